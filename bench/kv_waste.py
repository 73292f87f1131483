"""How much of the pages that requests have is more than their tokens take: on a CPU, with the demo model.

    python -m bench.kv_waste --save bench/results/kv_waste.json

The requests of a mix reserve their pages as they do when their prompts begin, one row each; nothing is answered. `wasted` is the
share of what is allocated that prompt and longest answer do not take. It depends on lengths and on the size of a page alone:
another model takes other bytes per token, and the same share. `early` is the share if every answer ends after half of its
`max_tokens`, which a request reserves from the start.
"""

from __future__ import annotations

import json
import random
from typing import Any

from bench import environment, parser_of, save
from trimtab.planning.values.byte_sizes import PAGE_TOKENS, pages_of

CONTEXT = 1024
ANSWER = 128
# Tokens of the load runs' requests: texts (bench/results/load_text.json), a picture of 640x480 with a question
# (bench/results/prompts.json), a sound of 5 s with one (25 tokens a second, 16 words and the chat template).
TEXT, PICTURE, SOUND = 512, 283, 152


def mixes() -> dict[str, list[tuple[int, int]]]:
    """Return the mixes by name: (tokens of the prompt, of the longest answer) of each request."""
    chance = random.Random(0)
    return {
        "texts": [(TEXT, ANSWER)] * 32,
        "texts, a token longer": [(TEXT + 1, ANSWER)] * 32,  # the first one that needs another page
        "texts, pictures and sounds": [(TEXT, ANSWER), (TEXT, ANSWER), (PICTURE, ANSWER), (SOUND, ANSWER)] * 8,
        "16 to 768 in, 16 to 256 out": [(chance.randint(16, 768), chance.randint(16, 256)) for _ in range(32)],
        "16 to 128 in, 16 to 64 out": [(chance.randint(16, 128), chance.randint(16, 64)) for _ in range(32)],
    }


def measured(model: Any, mix: list[tuple[int, int]]) -> dict[str, Any]:
    """Return the row of one mix, as a batch allocates it."""
    from trimtab.engine.batch.batch import Batch
    from trimtab.request import GenerateRequest

    batch = Batch(model, len(mix))
    first = batch.begin(model.prepare([5]), GenerateRequest(max_new_tokens=1), client=None).compute()
    batch.leave(batch.join(first).row)  # layers have their memory from now on
    pool = batch.cache.pool
    assert pool is not None and pool.free_tokens == pool.tokens
    prompts = [
        batch.begin(model.prepare([5] * tokens), GenerateRequest(max_new_tokens=answer), client=None) for tokens, answer in mix
    ]
    batch.pages.reserve(*(prompt.row for prompt in prompts))
    allocated = pool.tokens - pool.free_tokens
    in_pages = [layer for layer in batch.cache.layers if getattr(layer, "pool", None) is pool]
    nbytes = sum(one.numel() * one.element_size() for layer in in_pages for one in (layer.keys, layer.values))
    tokens, early = sum(prompt + answer for prompt, answer in mix), sum(prompt + answer // 2 for prompt, answer in mix)
    return {
        "requests": len(mix), "allocated_tokens": allocated, "tokens": tokens, "bytes_per_token": nbytes // pool.places,
        "allocated_bytes": allocated * nbytes // pool.places, "wasted": round(1 - tokens / allocated, 4),
        "early": round(1 - early / allocated, 4),
    }  # fmt: skip


def main() -> None:
    given = parser_of(__doc__).parse_args()
    import trimtab
    from trimtab.demo.demo import FOLDER

    found = []
    for name, mix in mixes().items():
        tokens = max(CONTEXT, sum(pages_of(prompt + answer) for prompt, answer in mix) * PAGE_TOKENS)
        plan = trimtab.plan(
            FOLDER / "base", quant="none", context=CONTEXT, batch=len(mix), device="cpu", images=0, audio_s=0.0, kv_tokens=tokens
        )
        with trimtab.load(plan) as model:
            found.append({"what": "waste", "mix": name, "page_tokens": PAGE_TOKENS, **measured(model, mix)})
        print(json.dumps(found[-1]), flush=True)
    save(given.save, {"environment": environment("cpu"), "rows": found})


if __name__ == "__main__":
    main()
