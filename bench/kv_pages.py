"""What keys and values in pages take and cost on a GPU, beside a whole context for every row.

    python -m bench.kv_pages --work FOLDER --model e4b --rows 32 --context 4096 --tokens 512 --save bench/results/kv_pages.json

A random checkpoint of a size (as bench.cards has it). Every row is behind a prompt of `--tokens` tokens and was promised 128 more.
"kernel": microseconds of attention of one full layer in a CUDA graph, over rows in one piece and over pages (Gemma 4 alone).
"step": milliseconds of one captured step by rows, medians of ten, and how far its logits are from those without pages. "bytes": of
keys and values as planned and as held, the positions that rows have written, and those that they have pages for.
"""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from typing import Any

import torch

from bench import environment, parser_of, save, saved
from bench.together import filled, step_ms
from trimtab.planning.values.byte_sizes import PAGE_TOKENS, pages_of

ANSWER = 128
COUNTS = (32, 8, 1)


def kernels(model: Any) -> list[dict[str, Any]]:
    """Return the rows of the attention kernel, of every kind of full layer."""
    from trimtab.engine.families.families import describe
    from trimtab.engine.kernels import attention_and_norms
    from trimtab.engine.kernels.autotune import graph_us
    from trimtab.engine.kv.sequence import PagePool

    found, module = [], attention_and_norms.load(model.device)
    for heads, kv_heads, dim, *_ in describe(model.hf_model).shapes(full_only=True):
        for rows, seen, context in ((1, 640, 4096), (8, 640, 4096), (32, 640, 4096), (32, 4000, 4096), (1, 30000, 32768)):
            whole = [torch.randn(rows, kv_heads, context, dim, device=model.device).bfloat16() for _ in range(2)]
            pool = PagePool(rows * pages_of(context) * PAGE_TOKENS, rows, context, model.device)
            order = torch.randperm(pool.pages, generator=torch.Generator().manual_seed(1)) + 2
            for row in range(rows):
                pool.bind(row, order[row * pages_of(context) : (row + 1) * pages_of(context)].tolist())
            places = torch.arange(context, device=model.device).expand(rows, -1)
            at = pool.table.written(places, pool.table.table).flatten()
            paged = [torch.zeros(kv_heads, pool.places, dim, device=model.device).bfloat16() for _ in range(2)]
            for to, source in zip(paged, whole, strict=True):
                to[:, at] = source.transpose(0, 1).flatten(1, 2)
            positions = torch.full((rows,), seen - 1, device=model.device)
            qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, device=model.device).bfloat16()
            weight, cos = torch.ones(dim, device=model.device).bfloat16(), qkv[:, :dim].contiguous()
            norms = attention_and_norms.HeadNorms(weight, weight, 1e-6)
            q = torch.empty(rows, heads, dim, device=model.device).bfloat16()
            values = attention_and_norms.scratch_values(rows, heads, kv_heads, dim, context, module.multiprocessors)
            scratch = torch.empty(values, device=model.device)
            us, outs = [], []
            for (keys, values), table in ((whole, None), (paged, pool.table)):
                out = torch.empty(rows, heads * dim, device=model.device).bfloat16()

                def run(keys: Any = keys, values: Any = values, table: Any = table, out: Any = out) -> None:
                    attention_and_norms.rope_and_attention(
                        qkv, heads, norms, cos, cos, keys, values, positions, positions, 1.0, None, out, q,  # noqa: B023
                        scratch, module, pages=table,  # noqa: B023
                    )  # fmt: skip

                run()
                us.append(round(graph_us(run, model.device), 2))
                outs.append(out)
            found.append({
                "what": "kernel", "heads": heads, "kv_heads": kv_heads, "dim": dim, "rows": rows, "positions": seen,
                "context": context, "whole_us": us[0], "pages_us": us[1], "equal": bool(torch.equal(*outs)),
            })  # fmt: skip
            print(json.dumps(found[-1]), flush=True)
    return found


def steps(model: Any, rows: int, tokens: int, kv_tokens: int | None, about: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of one layout, and leave the logits of every count of rows in `about`."""
    model.plan = replace(model.plan, request=replace(model.plan.request, kv_tokens=kv_tokens))
    batch = filled(model, rows, tokens, ANSWER)
    found, layout, going = [], "whole" if kv_tokens is None else "pages", list(batch.active)
    for count in COUNTS:
        if count > rows:
            continue
        batch.active[:] = going[:count]
        batch.write_last_tokens()
        logits = batch.steps.run(batch.state())[0].float().cpu()
        other = about.setdefault("logits", {}).setdefault(count, logits)
        batch.write_last_tokens()
        found.append({
            "what": "step", "layout": layout, "rows": count, "ms": step_ms(batch), "equal": bool(torch.equal(logits, other)),
            "largest_difference": float((logits - other).abs().max()), "largest_logit": float(other.abs().max()),
        })  # fmt: skip
    batch.active[:] = going
    written = sum(row.written for row in going)
    promised = rows * (tokens + ANSWER)
    row = {
        "what": "bytes", "layout": layout, "rows": rows, "held": batch.cache.nbytes(), "positions": written,
        "promised_positions": promised, "reserved_positions": sum(len(one.pages or ()) for one in going) * PAGE_TOKENS,
        "fallbacks": [f"{one.what}: {one.why}" for one in batch.steps.fallbacks],
    }  # fmt: skip
    row["wasted"] = round(1 - promised / row["reserved_positions"], 4) if kv_tokens else None
    found.append(row)
    return found


def main() -> None:
    parser = parser_of(__doc__, work=True)
    parser.add_argument("--model", default="e4b")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=512)
    given = parser.parse_args()
    import trimtab
    from bench.cards import prepare

    prepare(given.model, given.work)
    pool = given.rows * pages_of(given.tokens + ANSWER) * PAGE_TOKENS
    plans = [
        trimtab.plan(
            given.work / given.model, quant="nf4-dq", context=given.context, batch=given.rows, device="cuda", images=0,
            audio_s=0.0, kv_tokens=tokens,
        )
        for tokens in (None, pool)
    ]  # fmt: skip
    found: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    with trimtab.load(plans[0]) as model:
        if hasattr(model.hf_model.config.get_text_config(), "hidden_size_per_layer_input"):
            found += kernels(model)
        for plan, tokens in zip(plans, (None, pool), strict=True):
            rows = steps(model, given.rows, given.tokens, tokens, about)
            rows[-1]["planned"] = plan.gpu["kv_cache"]
            found += [{"model": given.model, "context": given.context, "mode": plan.execution.step.mode} | row for row in rows]
            for row in rows:
                print(json.dumps(row), flush=True)
            gc.collect()
            torch.cuda.empty_cache()
    save(given.save, {"environment": environment("cuda"), "rows": saved(given.save).get("rows", []) + found})


if __name__ == "__main__":
    main()
