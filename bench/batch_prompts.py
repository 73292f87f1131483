"""How long `LoadedModel.batch` takes for many short prompts on a GPU: several of them in one pass, and one after the other.

    python -m bench.batch_prompts --work FOLDER --size e4b --save bench/results/batch_prompts.json

A random checkpoint of a size (as bench.load has it), 8 adapters in turn. A row: `prompts` of `tokens` tokens with answers of
`answer` tokens in `rows` rows, `way` ("together", "one by one"), `ms` until the last answer is there (median of three calls, after
one that captures and is not counted).
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

from bench import environment, parser_of, save

PROMPTS, ROWS, ANSWER, REPEAT = 64, 32, 16, 3
LENGTHS = (16, 64, 128)


def answered(model: Any, tokens: int, names: list[str], seed: int) -> float:
    """Return the milliseconds of all answers."""
    from bench.together import ids

    requests = [
        {"prompt": ids(tokens, seed + number), "adapter": names[number % len(names)], "max_new_tokens": ANSWER}
        for number in range(PROMPTS)
    ]
    start = time.perf_counter()
    for _ in model.batch(requests, rows=ROWS):
        pass
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = parser_of(__doc__, work=True)
    parser.add_argument("--size", default="e4b")
    given = parser.parse_args()
    import trimtab
    from bench.load import sized
    from trimtab.engine.prefill.packing import PackedPrefill

    made = sized(given.size, given.work, 8, device="cuda")
    plan = trimtab.plan(
        made.folder, quant="nf4-dq", adapters=made.adapters, context=1024, batch=ROWS, device="cuda", images=0, audio_s=0.0
    )
    found: list[dict[str, Any]] = []
    own = PackedPrefill.why_not
    with trimtab.load(plan) as model:
        for tokens in LENGTHS:
            for way in ("together", "one by one"):
                PackedPrefill.why_not = own if way == "together" else lambda self: "left out"  # type: ignore[method-assign]
                times = [answered(model, tokens, list(made.adapters), 1000 * turn) for turn in range(REPEAT + 1)][1:]
                about = {"prompts": PROMPTS, "tokens": tokens, "answer": ANSWER, "rows": ROWS}
                found.append({**about, "way": way, "ms": round(statistics.median(times), 1)})
                print(json.dumps(found[-1]), flush=True)
    save(given.save, {"environment": environment("cuda"), "rows": found})


if __name__ == "__main__":
    main()
