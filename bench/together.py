"""What a decode step of many rows takes, and a pass of several prompts, on a GPU: with unpacked weights and without.

    python -m bench.together --work FOLDER --size e4b --adapters 32 --save bench/results/together.json

A random checkpoint of a size (as bench.load has it), 32 rows of 512 tokens. "step": milliseconds of one captured step by rows, for
the base, 8 adapters and an adapter for each row. "pass": milliseconds of prompts alone, and of several in one pass. Times are the
device's, medians of ten. "beside" (`--beside`): the graph of a step on a stream of high priority while graphs of chunks run on
another one. It asks what that could gain: the two share scratch, so what they compute then is not used. `unpacked`: whether the
decoder's weights are kept in the model's own type beside the packed ones.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from typing import Any

import torch

from bench import environment, parser_of, save

REPEAT = 10
TOKENS = 512
COUNTS = (32, 16, 8, 4)
SINGLES = (64, 128, 256, 512, 1024)
# Steps beside chunks: rows, tokens of a chunk, and how many chunks run one behind the other.
BESIDE_COUNTS, BESIDE_TOKENS, BESIDE_CHUNKS = (8, 16, 31), (64, 256, 512), 8


def timed(run: Callable[[], Any]) -> float:
    """Return the median milliseconds of the device."""
    found = []
    for _ in range(REPEAT):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return round(statistics.median(found), 2)


def steps(model: Any, batch: Any, names: list[str], about: dict[str, Any], counts: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return the rows of steps. The batch's rows stay; how many of them step, and with which adapters, is changed."""
    rows, found = list(batch.active), []
    for count in counts:
        for adapters in (0, 8, len(names)):
            batch.active[:] = rows[:count]
            for number, row in enumerate(batch.active):
                row.adapter = names[number % adapters] if adapters else None
            batch.write_last_tokens()
            batch.steps.run(batch.state())
            found.append({"what": "step", "rows": count, "adapters": adapters, "ms": step_ms(batch), **about})
            print(json.dumps(found[-1]), flush=True)
    batch.active[:] = rows
    return found


def passes(model: Any, batch: Any, name: str, about: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of prompts alone and together; no row may be active."""
    from trimtab.engine.passes.chunk_forward import Piece
    from trimtab.engine.prefill.packing import shapes_of
    from trimtab.request import GenerateRequest

    request = GenerateRequest(max_new_tokens=1)
    found = []
    for tokens in SINGLES:
        inputs = model.prepare(ids(tokens - 1))

        def alone(inputs: Any = inputs) -> None:
            prompt = batch.begin(inputs, request, adapter=name, client=None).compute()
            batch.prompts.release(prompt)

        for _ in range(2):
            alone()
        found.append({"what": "alone", "tokens": tokens, "ms": timed(alone), **about})
        print(json.dumps(found[-1]), flush=True)
    packs = batch.prompts.packs
    if packs.why_not() is not None:
        print(json.dumps({"together": packs.why_not()}), flush=True)
        return found
    for size, rows in shapes_of(batch.prompts.sizes, batch.prompts.most_packed):
        pieces = [Piece(ids(size - 1, seed), 0, seed) for seed in range(rows)]

        def together(pieces: Any = pieces, size: int = size, rows: int = rows) -> None:
            packs._pass(pieces, [name] * rows, size, rows)

        for _ in range(2):
            together()
        found.append({"what": "together", "tokens": size, "prompts": rows, "ms": timed(together), **about})
        print(json.dumps(found[-1]), flush=True)
    return found


def beside(model: Any, batch: Any, name: str, about: dict[str, Any]) -> list[dict[str, Any]]:
    """Return rows of a step's graph and a chunk's, by themselves and at once. A row of the batch has to be free."""
    from trimtab.request import GenerateRequest

    rows, results = list(batch.active), []
    for count in BESIDE_COUNTS:
        if count > len(rows):
            continue
        batch.active[:] = rows[:count]
        batch.write_last_tokens()
        batch.steps.run(batch.state())
        step = batch.steps._graphs[next(reversed(batch.steps._graphs))].graph
        for tokens in BESIDE_TOKENS:
            inputs = model.prepare(ids(tokens - 1))
            for _ in range(3):
                prompt = batch.begin(inputs, GenerateRequest(max_new_tokens=1), adapter=name, client=None).compute()
                batch.prompts.release(prompt)
            chunk = batch.prompts._graphs[next(reversed(batch.prompts._graphs))].graph
            alone = {"step_ms": timed(step.replay), "chunk_ms": timed(chunk.replay)}
            results.append({"what": "beside", "rows": count, "tokens": tokens, **alone, **at_once(step, chunk, **alone), **about})
            print(json.dumps(results[-1]), flush=True)
    batch.active[:] = rows
    return results


def at_once(step: Any, chunk: Any, *, step_ms: float, chunk_ms: float) -> dict[str, float]:
    """Return what steps and chunks take on two streams; gain: the time of as many behind each other, of that which they took."""
    high, low = torch.cuda.Stream(priority=-1), torch.cuda.Stream(priority=0)
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    most = int(4 * BESIDE_CHUNKS * chunk_ms / step_ms) + 2
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(most)]
    for stream in (high, low):
        stream.wait_event(start)
    with torch.cuda.stream(low):
        for _ in range(BESIDE_CHUNKS):
            chunk.replay()
        end.record()
    with torch.cuda.stream(high):
        for mark in marks:
            step.replay()
            mark.record()
    torch.cuda.synchronize()
    taken_ms = start.elapsed_time(end)
    done_ms = [ms for mark in marks if (ms := start.elapsed_time(mark)) <= taken_ms]
    behind_ms = len(done_ms) * step_ms + BESIDE_CHUNKS * chunk_ms
    return {
        "beside_step_ms": round(done_ms[-1] / len(done_ms), 2) if done_ms else 0.0,
        "beside_chunk_ms": round(taken_ms / BESIDE_CHUNKS, 2), "gain": round(behind_ms / taken_ms, 2),
    }  # fmt: skip


def ids(count: int, seed: int = 0) -> list[int]:
    return [1000 + (number * 7919 + seed * 31) % 90_000 for number in range(count)]


def step_ms(batch: Any) -> float:
    """Return the milliseconds of a captured step and of what is written in front of the next."""
    return timed(lambda: (batch.steps.run(batch.state()), batch.write_last_tokens()))


def filled(model: Any, rows: int, tokens: int = TOKENS, answer: int = 256) -> Any:
    """Return a batch whose rows are all active, each behind a prompt of so many tokens and with room for an answer."""
    from trimtab.engine.batch.batch import Batch
    from trimtab.request import GenerateRequest

    batch = Batch(model, rows)
    batch.ends = frozenset()
    batch.prepare()
    for number in range(rows):
        prompt = batch.begin(model.prepare(ids(tokens, number)), GenerateRequest(max_new_tokens=answer), client=None)
        batch.join(prompt.compute())
    return batch


def begin_anew(batch: Any) -> None:
    """Forget a batch's graphs, those of chunks too: they hold addresses of the step's buffers."""
    batch.steps._graphs.clear()
    batch.prompts.drop_graphs()
    batch.prompts.firsts = batch.prompts.lasts = None
    batch.steps._fused = None


def main() -> None:
    parser = parser_of(__doc__, work=True)
    parser.add_argument("--size", default="e4b")
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--beside", action="store_true", help="also steps and chunks on two streams")
    given = parser.parse_args()
    import trimtab
    from bench.load import sized

    made = sized(given.size, given.work, given.adapters, device="cuda")
    names = list(made.adapters)
    plan = trimtab.plan(
        made.folder, quant="nf4-dq", adapters=made.adapters, context=1024, batch=given.rows, device="cuda", images=0, audio_s=0.0
    )
    found: list[dict[str, Any]] = []

    def keep(rows: list[dict[str, Any]]) -> None:
        found.extend(rows)
        save(given.save, {"environment": environment("cuda"), "rows": found})

    with trimtab.load(plan) as model:
        kept = model.unpacked
        print(json.dumps({"unpacked_mib": 0 if kept is None else kept.nbytes >> 20}), flush=True)
        batch = filled(model, given.rows)
        for unpacked in (True, False) if kept is not None else (False,):
            model.unpacked = kept if unpacked else None
            begin_anew(batch)
            keep(steps(model, batch, names, {"unpacked": unpacked}, COUNTS if unpacked else COUNTS[:3]))
        model.unpacked = kept
        fallbacks = [f"{one.what}: {one.why}" for one in batch.steps.fallbacks]
        if given.beside:
            batch.leave(batch.active[-1])
            keep(beside(model, batch, names[0], {"unpacked": kept is not None}))
        for row in list(batch.active):
            batch.leave(row)
        for unpacked in (True, False) if kept is not None else (False,):
            model.unpacked = kept if unpacked else None
            if kept is not None and not unpacked:
                batch.prompts._graphs.clear()
                batch.prompts.kernels().reserve(batch.prompts.four_bit)
            keep(passes(model, batch, names[0], {"unpacked": unpacked}))
        print(json.dumps({"fallbacks": fallbacks, "memory": model.memory()}), flush=True)


if __name__ == "__main__":
    main()
