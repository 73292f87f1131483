"""What an answer's bits and time depend on: who else is answered. Batch-invariant execution, and without, on a GPU.

    python -m bench.company --work FOLDER --size e4b --rows 8 --save bench/results/company.json

A random checkpoint of a size (as bench.load has it), 8 adapters, prompts of 64 to 700 tokens. Each request is answered alone, then
among others that come and go. A row: `invariant`; `same_bits`: of how many answers tokens and log-probabilities are equal in bits;
`same_tokens`; `largest`: the largest difference of a log-probability where tokens are the same; `alone_ms`, `full_ms`: a step of
one row and of all; `prompt_ms`: 512 tokens to the first token.

    python -m bench.company --work FOLDER --size e4b --texts --save bench/results/texts.json

What is read of a text of 512 tokens with an adapter, by transformers' modules and in captured chunks. A row: `what` ("embedding",
"prompt_logprobs": to the answer's first token), `way` ("modules", "chunks"), `ms`; of chunks `largest`: the largest difference of a
value of the embedding or a log-probability from the modules'.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from bench import environment, parser_of, save
from bench.together import ids

TOKENS = 24
LENGTHS = (64, 200, 520, 700)
REPEAT = 20


def began(batch: Any, ask: tuple[str | None, list[int]], tokens: int = TOKENS) -> Any:
    from trimtab.request import GenerateRequest

    request = GenerateRequest(max_new_tokens=tokens)
    return batch.begin(batch.model.prepare(ask[1]), request, adapter=ask[0], top_logprobs=0, client=None)


def through(prompt: Any, chance: random.Random | None = None) -> Any:
    while not prompt.step(None if chance is None else chance.choice((16, 64, 256))):
        pass
    return prompt.batch.join(prompt)


def alone(batch: Any, ask: tuple[str | None, list[int]]) -> list[tuple[int, float]]:
    """Return (token, its log-probability) of an answer that nobody is answered beside."""
    drawn = [through(began(batch, ask))]
    while drawn[0].row.finish is None:
        drawn += batch.step()
    batch.leave(drawn[0].row)
    return [(one.token_id, one.logprob) for one in drawn]


def beside(batch: Any, asked: list[tuple[str | None, list[int]]], seed: int) -> dict[int, list[tuple[int, float]]]:
    """Return the same of answers among others."""
    chance, waiting = random.Random(seed), list(enumerate(asked))
    said: dict[int, list[tuple[int, float]]] = {}
    rows: dict[Any, int] = {}
    while waiting or batch.active:
        while waiting and batch.free_rows and (not batch.active or chance.random() < 0.5):
            number, ask = waiting.pop(0)
            drawn = through(began(batch, ask), chance)
            rows[drawn.row], said[number] = number, [(drawn.token_id, drawn.logprob)]
        for one in batch.step():
            said[rows[one.row]].append((one.token_id, one.logprob))
        for row in [row for row in batch.active if row.finish is not None]:
            batch.leave(row)
    return said


def differences(expected: list[list[tuple[int, float]]], said: dict[int, list[tuple[int, float]]]) -> dict[str, Any]:
    """Return how many answers are equal in bits and in tokens, and the largest difference of a log-probability."""
    largest = 0.0
    for number, whole in enumerate(expected):
        for (token, logprob), (other, found) in zip(whole, said[number], strict=False):
            if token != other:
                break
            largest = max(largest, abs(logprob - found))
    return {
        "answers": len(expected), "same_bits": sum(said[number] == whole for number, whole in enumerate(expected)),
        "same_tokens": sum(
            [token for token, _ in said[number]] == [token for token, _ in whole] for number, whole in enumerate(expected)
        ),
        "largest": float(f"{largest:.3g}"),
    }  # fmt: skip


def step_ms(batch: Any, asked: list[tuple[str | None, list[int]]], count: int) -> float:
    """Return the median milliseconds of a step of so many rows, the host's share included."""
    rows = [through(began(batch, (name, tokens[:64]), 4 * REPEAT)).row for name, tokens in asked[:count]]
    times = []
    for _ in range(REPEAT + 3):
        start = time.perf_counter()
        batch.step()
        times.append(time.perf_counter() - start)
    for row in rows:
        batch.leave(row)
    return round(1000 * statistics.median(times[3:]), 2)


def prompt_ms(batch: Any, name: str | None) -> float:
    times = []
    for number in range(7):
        start = time.perf_counter()
        row = through(began(batch, (name, ids(511, 90 + number)), 1)).row
        times.append(time.perf_counter() - start)
        batch.leave(row)
    return round(1000 * statistics.median(times[2:]), 2)


def text_ms(batch: Any, name: str | None, what: str, way: str) -> tuple[float, list[float]]:
    """Return the median milliseconds of a text, and the values of the last one."""
    from trimtab.engine.calls.embedding import Embedding, PromptScores
    from trimtab.request import GenerateRequest

    times, values = [], list[float]()
    for number in range(9):
        tokens, is_through = ids(512, 90 + number), False
        start, inputs = time.perf_counter(), batch.model.prepare(tokens)
        if what == "embedding":
            one = Embedding(batch.model, inputs, adapter=name, batch=batch if way == "chunks" else None)
            while not one.step():
                pass
            values = one.unit.tolist()
        else:
            scores = PromptScores(batch.model, inputs, adapter=name, top=1)
            request = GenerateRequest(max_new_tokens=1)
            prompt = batch.begin(inputs, request, adapter=name, client=None, returns_states=way == "chunks")
            while way == "modules" and not scores.step():
                pass
            while not is_through:
                is_through = prompt.step()
                if way == "chunks":
                    scores.read(prompt)
            batch.leave(batch.join(prompt).row)
            values = [one[token][0] for one, token in zip(scores.take(), tokens[1:], strict=True)]
        times.append(time.perf_counter() - start)
    return round(1000 * statistics.median(times[3:]), 2), values


def texts(folder: Path, adapters: dict[str, Path], *, rows: int, device: str, quant: str) -> list[dict[str, Any]]:
    """Return the rows of `--texts`."""
    import trimtab
    from trimtab.engine.batch.batch import Batch

    found = []
    plan = trimtab.plan(folder, quant=quant, adapters=adapters, context=1024, batch=rows, device=device, images=0, audio_s=0.0)
    with trimtab.load(plan) as model:
        batch = Batch(model, rows)
        batch.prepare()
        for what in ("embedding", "prompt_logprobs"):
            (ms, wanted), (chunks_ms, values) = (text_ms(batch, list(adapters)[-1], what, way) for way in ("modules", "chunks"))
            largest = float(f"{max(abs(one - other) for one, other in zip(wanted, values, strict=True)):.3g}")
            found.append({"what": what, "way": "modules", "tokens": 512, "ms": ms})
            found.append({"what": what, "way": "chunks", "tokens": 512, "ms": chunks_ms, "largest": largest})
    return found


def measured(folder: Path, adapters: dict[str, Path], *, rows: int, invariant: bool, device: str, quant: str) -> dict[str, Any]:
    """Return the row of one execution."""
    import trimtab
    from trimtab.engine.batch.batch import Batch

    plan = trimtab.plan(
        folder, quant=quant, adapters=adapters, context=1024, batch=rows, device=device, images=0, audio_s=0.0,
        batch_invariant=invariant,
    )  # fmt: skip
    names = [None, *adapters]
    with trimtab.load(plan) as model:
        batch = Batch(model, rows)
        batch.ends = frozenset()
        batch.prepare()
        asked = [(names[number % len(names)], ids(LENGTHS[number % len(LENGTHS)], number)) for number in range(3 * rows)]
        expected = [alone(batch, ask) for ask in asked]
        found = differences(expected, beside(batch, asked, 1))
        return {
            "invariant": invariant, "rows": rows, "adapters": len(adapters), **found,
            "alone_ms": step_ms(batch, asked, 1), "full_ms": step_ms(batch, asked, rows),
            "prompt_ms": prompt_ms(batch, names[-1]), "captures": batch.steps.captures,
        }  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__, work=True)
    parser.add_argument("--size", default="e4b")
    parser.add_argument("--rows", type=int, nargs="*", default=(8,))
    parser.add_argument("--texts", action="store_true")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    from bench.load import sized

    made = sized(given.size, given.work, 8, device=given.device)
    found: list[dict[str, Any]] = []
    if given.texts:
        found = texts(made.folder, made.adapters, rows=given.rows[0], device=given.device, quant="nf4-dq")
        print(*map(json.dumps, found), sep="\n", flush=True)
        save(given.save, {"environment": environment(given.device), "size": given.size, "rows": found})
        return
    for rows in given.rows:
        for invariant in (False, True):
            found.append(measured(made.folder, made.adapters, rows=rows, invariant=invariant, device="cuda", quant="nf4-dq"))
            print(json.dumps(found[-1]), flush=True)
            save(given.save, {"environment": environment("cuda"), "size": given.size, "rows": found})


if __name__ == "__main__":
    main()
