"""How fast do mixtures decode with their experts in 4 bits, and what do they take? One process a case, one GPU.

    python -m bench.experts --work FOLDER --save bench/results/experts.json [--cases 26b-a4b:nf4-dq,26b-a4b:nf4-dq:8,...]

A case: MODEL:EXPERTS[:GIB of the GPU[:SKEW[:COPIES]]]. Checkpoints are random, of released sizes, the decoder's linears in NF4
with double quantization, experts in 16 bits; EXPERTS says what loading makes of them. Random routers choose evenly, the worst
case, where the residual is the token's embedding for the most part, and tokens are drawn (temperature 50); with a SKEW the second
half of each layer's experts has scores times that. COPIES: every copy to the GPU is issued so often, as a slow link would take. A
row, of the public API, token ids in and text out, an adapter of rank 8 on attention and dense parts: `tok_s` of one row behind a
prompt of 33 tokens, `first_ms` of 512 tokens; `experts_tok_s`: an adapter on experts too; `rows8_tok_s`: eight rows, each with its
own of these. `predicted_tok_s`: of the plan of one row; of that of eight `predicted_row_tok_s`, the rate of each. `hits`: of
the experts chosen by steps, those that were on the card; `predicted_at_hits_tok_s`: of the plan, with these hits;
`link_limit_tok_s`: what copying the others allows at `link_gb_s`, and `link_share` of it was reached. `peak_gib`: of torch's
allocator; `process_gib`: of the driver. stock: transformers and PEFT, 16 bits, the same adapter, greedy, one row behind 512 tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import DEVICE, empty_cache, environment, parser_of, row_of, save, saved, table
from bench.cards import link_row
from bench.families import CONTEXT, LONG, SHORT, prompts, stock_rates
from bench.memory import bound_tensors

CASES = "26b-a4b:nf4-dq,26b-a4b:nf4-dq:8,26b-a4b:nf4-dq:8:0.5,qwen3-30b-a3b:nf4-dq,qwen3-30b-a3b:nf4-dq:8,26b-a4b:stock"
RANK = 8


def prepare(size: str, work: Path, layers: int | None = None) -> Path:
    """Make a checkpoint with a tokenizer, and two adapters: on linears, and on experts too."""
    from bench import checkpoints, voices

    folder = work / f"{size}-experts-{layers or 'all'}"
    adapters = folder / "r8"
    if (adapters / "experts" / "adapter_config.json").exists():
        return folder
    config = checkpoints.config_of(size)
    config = config if layers is None else checkpoints.first_layers(config, layers)
    config.eos_token_id = config.get_text_config().eos_token_id = None  # a drawn token may be one
    checkpoints.write_checkpoint(size, folder, device=DEVICE, packed=True, config=config)
    voices.give(folder)
    checkpoints.write_adapter(folder, adapters / "linears", RANK, size=size)
    _write_expert_adapter(size, folder, adapters)
    empty_cache()
    return folder


def _write_expert_adapter(size: str, folder: Path, adapters: Path) -> None:
    """Write the adapter on linears with pairs on both stacks of every module, as PEFT's target_parameters has them."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig

    from bench import checkpoints

    tensors = load_file(adapters / "linears" / "adapter_model.safetensors")
    model = checkpoints.empty_model(AutoConfig.from_pretrained(folder), size)
    for path, module in model.named_modules():
        for name, inside in (("gate_up_proj", ".base_layer"), ("down_proj", "")):
            own = module._parameters.get(name)
            if own is None or own.dim() != 3:
                continue
            count, high, wide = own.shape
            key = f"base_model.model.{path}{inside}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(RANK * count, wide) / wide**0.5
            tensors[f"{key}.lora_B.weight"] = torch.randn(high, RANK * count) * 0.02 / RANK**0.5
    (adapters / "experts").mkdir(exist_ok=True)
    save_file(tensors, adapters / "experts" / "adapter_model.safetensors", metadata={"format": "pt"})
    config = json.loads((adapters / "linears" / "adapter_config.json").read_text())
    config["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj"]
    (adapters / "experts" / "adapter_config.json").write_text(json.dumps(config))


def run(
    size: str, experts: str, card_gib: float | None, skew: float, copies: int, work: Path, layers: int | None
) -> dict[str, Any]:  # fmt: skip
    import torch

    import trimtab
    from trimtab.engine.memory_shares import expert_hits

    begun = time.perf_counter()

    def say(what: str) -> None:
        print(f"# {time.perf_counter() - begun:.1f} s: {what}", flush=True)

    folder = prepare(size, work, layers)
    if copies > 1:
        _slow_link(copies)
    adapters = folder / "r8"
    rows = 8 if card_gib is None else 1
    named = {"linears": adapters / "linears"}
    named |= {f"e{number}": adapters / "experts" for number in range(0 if skew != 1 or copies > 1 else rows)}
    start = time.perf_counter()
    asked: dict[str, Any] = {"gpu_memory": f"{card_gib}GiB"} if card_gib else {}
    plan = trimtab.plan(folder, adapters=named, context=CONTEXT, device=DEVICE, batch=rows, experts=experts, **asked)
    if card_gib and DEVICE == "cuda":
        bound_tensors(plan, card_gib * 2**30)
    found: dict[str, Any] = {
        "step": plan.execution.step.mode, "prompt": plan.execution.prompt.mode, "head": plan.execution.head,
        "predicted_tok_s" if rows == 1 else "predicted_row_tok_s": round(plan.execution.tokens_per_s, 1),
        "weights_gib": round(plan.gpu["weights"] / 2**30, 2),
        "slots": plan.execution.expert_slots, "planned_gib": round(plan.gpu_needed_bytes / 2**30, 2),
    }  # fmt: skip
    if rows > 1:
        alone = trimtab.plan(
            folder, adapters={"linears": named["linears"]}, context=CONTEXT, device=DEVICE, experts=experts, **asked
        )
        found["predicted_tok_s"] = round(alone.execution.tokens_per_s, 1)
    asks = prompts(1)
    say(f"planned, {plan.execution.expert_slots} slots")
    with trimtab.load(plan) as model:
        found["load_s"] = round(time.perf_counter() - start, 1)
        say("loaded")
        _spread(model, skew)

        def once(tokens: int, adapter: str, prompt: int) -> Any:
            answer = model.answer(next(asks)[:prompt], adapter=adapter, max_new_tokens=tokens, temperature=50.0)
            assert len(answer.token_ids) == tokens, answer.finish_reason
            return answer

        once(3, "linears", LONG)
        say("first answer")
        found["first_ms"] = round(statistics.median(once(1, "linears", 512).ttft_s for _ in range(3)) * 1000, 1)
        for name, adapter in (("tok_s", "linears"), ("experts_tok_s", "e0")):
            if adapter in named:
                once(SHORT, adapter, 33)
                found[name] = round(statistics.median(once(LONG, adapter, 33).tokens_per_s for _ in range(3)), 1)
                say(f"{name} {found[name]}")
        if (hits := expert_hits(model)) is not None:
            found["hits"] = round(hits, 3)
            found |= _link_row(model, plan, hits, found)
            say(f"hits {found['hits']}, {found['link_share']} of the link's limit")

        def several(tokens: int) -> list[float]:
            requests = [{"prompt": next(asks)[:33], "adapter": f"e{number}"} for number in range(rows)]
            return [answer.tokens_per_s for answer in model.batch(requests, max_new_tokens=tokens, temperature=50.0)]

        if rows > 1:
            several(SHORT)
            say("eight rows")
            # The row that joins last has seven neighbours all the time.
            found["rows8_tok_s"] = round(rows * max(several(LONG)), 1)
            say(f"eight rows {found['rows8_tok_s']}")
        found["process_gib"] = round(model.memory()["gpu_process_bytes"] / 2**30, 2)
        found["fallbacks"] = sorted({f"{one.what}: {one.why}" for one in model.fallbacks})
    if DEVICE == "cuda":
        found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return found


def _link_row(model: Any, plan: Any, hits: float, row: Mapping[str, Any]) -> dict[str, float]:
    """Return what a row says of the link, which brings the experts that are not found, and the plan's rate with these hits."""
    config = model.hf_model.config.get_text_config()
    chosen = getattr(config, "num_experts_per_tok", None) or config.top_k_experts
    most = chosen * plan.experts.bytes / plan.experts.count  # bytes of a token that finds none of its experts
    link = link_row(plan, row["tok_s"], copied=(1 - hits) * most)
    fewer_s = (hits - row["slots"] / config.num_experts) * most / plan.rates.pinned_h2d_Bps
    return {name: link[name] for name in link if name.startswith("link")} | {
        "predicted_at_hits_tok_s": round(1 / (1 / row["predicted_tok_s"] - fewer_s), 1)
    }


def _slow_link(copies: int) -> None:
    """Issue every copy to the GPU as often, and say that the link's rate is so much lower."""
    from bench.cards import slow_link
    from trimtab.engine.kernels import experts as kernels

    slow_link(copies)
    copy = kernels._copy

    def several(*given: Any) -> None:
        for _ in range(copies):
            copy(*given)

    kernels._copy = several


def _spread(model: Any, skew: float) -> None:
    """Let the residual be the token's embedding for the most part, so that its experts are not its neighbour's. skew: a factor of
    the scores of the second half of each layer's experts."""
    from trimtab.engine.formats.bitsandbytes import quantize
    from trimtab.engine.formats.weights import dequantize

    norms = {name: value for name, value in model.hf_model.named_parameters() if ".post_" in name}
    post = any("post_feedforward" in name for name in norms)
    for value in norms.values() if post else ():
        value.data.mul_(0.03)
    for name, module in model.hf_model.named_modules():
        if name.endswith("embed_tokens") and not post:
            table = next(iter(module.parameters(recurse=False)), None)
            (module.source if table is None else table.data).mul_(50)
        if skew == 1 or not name.endswith(("router.proj", "mlp.gate")):
            continue
        stored = getattr(module, "stored", None)
        weight = module.weight.data if stored is None else dequantize(stored)
        weight[len(weight) // 2 :] *= skew
        if stored is not None:
            for part, value in quantize(weight, "nf4-dq").parts.items():
                stored.parts[part].copy_(value.view(stored.parts[part].shape))


def run_stock(size: str, work: Path, layers: int | None) -> dict[str, Any]:
    """transformers and PEFT as their pages show them, experts in 16 bits."""
    import torch

    from trimtab.stock.load import load_adapter, load_base

    folder = prepare(size, work, layers)
    model = load_adapter(load_base(folder, dtype=torch.bfloat16, device_map=DEVICE), folder / "r8" / "linears")
    return stock_rates(model) | {"peak_gib": round(_peak_gib(), 2)}


def _peak_gib() -> float:
    import torch

    return torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0


def main() -> None:
    parser = parser_of(__doc__, work=True)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--timeout-s", type=float, default=300)
    parser.add_argument("--total-s", type=float, default=36000, help="no case begins when 40 s of this are left")
    parser.add_argument("--layers", type=int, help="of the models' first layers alone")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        size, experts, *card = given.one.split(":")
        if experts == "stock":
            made = run_stock(size, given.work, given.layers)
        else:
            card_gib, skew, copies = [float(one) for one in card] + [0.0, 1.0, 1.0][len(card) :]
            made = run(size, experts, card_gib or None, skew, int(copies), given.work, given.layers)
        print("ROW " + json.dumps(made), flush=True)
        return
    end = time.monotonic() + given.total_s
    rows: list[dict[str, Any]] = [row for row in saved(given.save).get("rows", []) if "error" not in row]
    left_out = []
    for case in given.cases.split(","):
        left_s = end - time.monotonic()
        if any((row["case"], row["layers"]) == (case, given.layers) for row in rows):
            continue
        if left_s < 40:
            left_out.append(case)
            continue
        command = ["bench.experts", "--work", str(given.work), "--one", case]
        command += [] if given.layers is None else ["--layers", str(given.layers)]
        row = row_of(command, timeout_s=given.timeout_s, left_s=left_s - 5) or {"error": "no time left"}
        rows.append({"case": case, "layers": given.layers} | row)
        print(json.dumps(rows[-1])[:1800], flush=True)
        save(given.save, {"environment": environment(), "rows": rows})
    names = ("case", "tok_s", "experts_tok_s", "rows8_tok_s", "first_ms", "hits", "process_gib", "step", "error")
    print(table(rows, names))
    if left_out or any("error" in row for row in rows):
        raise SystemExit(f"not measured: {', '.join([*left_out, *(row['case'] for row in rows if 'error' in row)])}")


if __name__ == "__main__":
    main()
