"""How long the second turn of a chat takes to its first token: with the prefix cache, and without.

    python -m bench.turns MODEL --save bench/results/turns.json [--adapter FOLDER] [--tokens 2000] [--new 32] [--answer 64]

MODEL is a checkpoint folder (bench.checkpoints writes random ones). A first prompt of `tokens` tokens is answered with `answer`
tokens; then second turns of `new` more tokens each go through, another one every time, so that only the first turn is cached.
A row: `way` ("cached", "whole"), `ms` until the first token is drawn (median of five), `after_ms` until the copies to the
cache are done too, `cached_tokens`, `difference` of the logits from the whole prompt's in parts of their largest, `same_token`.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

from bench import environment, parser_of, save

REPEAT = 5


def token_ids(count: int, seed: int, vocabulary: int) -> list[int]:
    """Return tokens that are the same in every run and no placeholder of any model."""
    low, high = (1000, min(vocabulary - 1000, 100_000)) if vocabulary > 4000 else (8, vocabulary // 2)
    return [low + (7919 * (place + 1) * (seed + 3)) % (high - low) for place in range(count)]


class Turns:
    """Times prompts of one loaded model."""

    def __init__(self, model: Any, adapter: str | None) -> None:
        from trimtab.engine.batch.batch import Batch

        self.model, self.adapter = model, adapter
        self.batch = model.rows() or Batch(model, rows=1)
        self.batch.ends = frozenset()  # random weights end their answers anywhere
        self.vocabulary = int(model.hf_model.config.get_text_config().vocab_size)

    def _wait(self) -> None:
        import torch

        if self.model.device.type == "cuda":
            torch.cuda.synchronize()

    def once(self, ids: list[int], *, answer_tokens: int = 1, client: str | None) -> tuple[float, float, Any, Any]:
        """Return (ms to the first token, ms until nothing is under way, logits [V], the row) of one prompt."""
        from trimtab.request import GenerateRequest

        inputs = self.model.prepare(ids)
        self._wait()
        start = time.perf_counter()
        request = GenerateRequest(max_new_tokens=answer_tokens)
        prompt = self.batch.begin(inputs, request, adapter=self.adapter, client=client).compute()
        logits = prompt.logits.clone()
        row = self.batch.join(prompt).row
        first_ms = (time.perf_counter() - start) * 1000
        self._wait()
        after_ms = (time.perf_counter() - start) * 1000
        while row.finish is None:
            self.batch.step()
        self.batch.leave(row)
        return first_ms, after_ms, logits, row

    def rows(self, tokens: int, answer_tokens: int, new_tokens: int) -> list[dict[str, Any]]:
        first = self.once(token_ids(tokens, 0, self.vocabulary), answer_tokens=answer_tokens, client="")[3]
        chat = first.token_ids[:-1]
        made = []
        for way, client in (("cached", ""), ("whole", None)):
            times, row = [], None
            for number in range(REPEAT + 3):  # the first ones make what is made on first use
                turn = [*chat, *token_ids(new_tokens, 1 + number, self.vocabulary)]
                first_ms, after_ms, logits, row = self.once(turn, client=client)
                if number >= 3:
                    times.append((first_ms, after_ms))
            made.append({
                "way": way, "tokens": len(turn), "new_tokens": new_tokens, "adapter": self.adapter is not None,
                "ms": round(statistics.median(one for one, _ in times), 2),
                "after_ms": round(statistics.median(one for _, one in times), 2), "cached_tokens": row.cached_tokens,
            })  # fmt: skip
            made[-1]["_logits"] = logits
        kept, whole = (one.pop("_logits") for one in made)
        made[0] |= {
            "difference": float(f"{float((kept - whole).abs().max() / whole.abs().max()):.2e}"),
            "same_token": bool(kept.argmax() == whole.argmax()),
        }  # fmt: skip
        return made


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--prefix-cache", default="2GiB")
    parser.add_argument("--quant", default="auto")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    import trimtab

    context = given.tokens + given.answer + given.new + 64
    adapters = {"turns": given.adapter} if given.adapter else None
    plan = trimtab.plan(
        given.model, adapters=adapters, context=context, images=0, audio_s=0.0, quant=given.quant, device=given.device,
        prefix_cache=given.prefix_cache,
    )  # fmt: skip
    with trimtab.load(plan) as model:
        turns = Turns(model, "turns" if adapters else None)
        rows = [
            {"model": given.model.name, **row} for row in turns.rows(given.tokens, given.answer, given.new)
        ]  # fmt: skip
        kept = model.prefix_cache.numbers()
        is_gpu = model.device.type == "cuda"
        fallbacks = [f"{one.what}: {one.why}" for one in model.fallbacks]
    for row in rows:
        print(json.dumps(row), flush=True)
    where = environment() if is_gpu else {"device": "cpu"}
    save(given.save, {"environment": where, "rows": rows, "kept": kept, "fallbacks": fallbacks})


if __name__ == "__main__":
    main()
