"""Memory, load time and first-token time of stock and trimtab, side by side in one run on one GPU.

    python -m bench.memory --work FOLDER --save bench/results/memory.json [--models e2b,e4b] [--cases NAME,...]

Every case runs in its own process: same checkpoint, same adapter, same inputs. Greedy tokens of every trimtab placement
are compared with the resident one's. `card4` and `card6` imitate a small card with PyTorch's per-process memory limit.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import environment, generated, median_ms, parser_of, row_of, save
from trimtab.machine.memory import peak_host_bytes, process_bytes

CONTEXT = 1024
PROMPT_TOKENS = 900
SHORT_TOKENS = 512
NEW_TOKENS = 48
LEAN = {"table": "gather", "vision": "stream", "audio": "stream", "connector": "stream"}


def cases_of(size: str) -> list[dict[str, Any]]:
    """Return the cases of one model size; `name` is the placement as the results call it."""
    half = {"e2b": range(17, 35), "e4b": range(21, 42)}[size]
    half_streamed = LEAN | {f"model.language_model.layers.{i}": "stream" for i in half}
    ours = [
        {"name": "resident", "place": {"*": "resident"}, "rank": 8},
        {"name": "lean", "place": LEAN, "rank": 8},
        {"name": "lean", "place": LEAN, "rank": 64},
        {"name": "lean+half-decoder", "place": half_streamed, "rank": 8},
        {"name": "lean, towers on host", "place": LEAN | {"vision": "host", "audio": "host"}, "rank": 8},
        {"name": "disk-towers", "place": LEAN | {"vision": "disk", "audio": "disk"}, "rank": 8},
        {"name": "card4", "card_gib": 4, "rank": 8},
        {"name": "card6", "card_gib": 6, "rank": 8},
    ]
    stock = [{"name": "resident", "rank": 8}, {"name": "towers-cpu", "rank": 8}]
    return [dict(case, engine="stock") for case in stock] + [dict(case, engine="trimtab") for case in ours]


def measure(case: dict[str, Any], model: Any, config: Any) -> dict[str, Any]:
    """Time the forward passes of a model of either engine (hf_model answers the same calls)."""
    import torch

    from bench.checkpoints import media_inputs, text_inputs

    row: dict[str, Any] = {}
    device = "cuda"

    def first_token(inputs: dict[str, Any]) -> torch.Tensor:
        with torch.no_grad():
            return model(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)

    def greedy(inputs: dict[str, Any], count: int) -> list[int]:
        return generated(model, inputs, count)[0, inputs["input_ids"].shape[1] :].tolist()

    short, full = text_inputs(config, SHORT_TOKENS, device=device), text_inputs(config, PROMPT_TOKENS, device=device)
    first_token(short)
    row["ttft_ms"] = round(median_ms(lambda: first_token(short)), 1)
    row["tokens"], row["logits"] = greedy(full, NEW_TOKENS), digest(model, full)
    if hasattr(config, "audio_config"):  # Gemma 4; the others here only read
        media = media_inputs(config, device=device)
        first_token(media)
        row["ttft_media_ms"] = round(median_ms(lambda: first_token(media)), 1)
        row["media_tokens"], row["media_logits"] = greedy(media, 16), digest(model, media)
    start = time.perf_counter()
    greedy(short, 32)
    row["decode_tok_s"] = round(32 / (time.perf_counter() - start - row["ttft_ms"] / 1000), 2)
    return row


def digest(model: Any, inputs: dict[str, Any]) -> str:
    """Return a hash of the last position's logits, bit for bit: random weights can repeat one token whatever is wrong."""
    import hashlib

    import torch

    with torch.no_grad():
        logits = model(**inputs, use_cache=True, logits_to_keep=1).logits.float().cpu()
    return hashlib.sha256(logits.numpy().tobytes()).hexdigest()[:16]


def run_stock(case: dict[str, Any], checkpoint: Path, adapter: Path) -> dict[str, Any]:
    import bitsandbytes  # noqa: F401 - imported before the clock starts, as in the other engine
    import peft  # noqa: F401 - as transformers: imported before the clock starts
    import torch
    import transformers  # noqa: F401

    from trimtab.stock.load import load_adapter, load_base, quantization

    towers = dict.fromkeys(("model.vision_tower", "model.audio_tower", "model.embed_vision", "model.embed_audio"), "cpu")
    device_map: Any = {"": 0}
    if case["name"] == "towers-cpu":
        device_map = {"model.language_model": 0, "lm_head": 0} | towers
    torch.cuda.init()
    start = time.perf_counter()
    settings = quantization("nf4-dq", llm_int8_enable_fp32_cpu_offload=True)
    model = load_base(checkpoint, repack=True, dtype=torch.bfloat16, device_map=device_map, quantization_config=settings)
    base_s = time.perf_counter() - start
    peft_model = load_adapter(model, adapter)
    torch.cuda.synchronize()
    load_s = time.perf_counter() - start
    row = measure(case, peft_model.base_model.model, model.config)
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {"load_s": round(load_s, 2), "base_s": round(base_s, 2), "gpu_peak_gib": round(peak, 3), **row}


def bound_tensors(plan: Any, card_bytes: float) -> None:
    """Imitate a small card: the driver's context is outside torch's limit, so that tensors have that much less."""
    import torch

    allowed = card_bytes - plan.gpu["cuda_context"]
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / torch.cuda.get_device_properties(0).total_memory))


def run_trimtab(case: dict[str, Any], checkpoint: Path, adapter: Path) -> dict[str, Any]:
    import torch

    import trimtab
    import trimtab.engine.model

    torch.cuda.init()
    gpu_memory = None
    if "card_gib" in case:
        gpu_memory = int(case["card_gib"] * 2**30)
    options = {"place": case["place"]} if "place" in case else {}
    start = time.perf_counter()
    plan = trimtab.plan(
        checkpoint, adapters={"a": adapter}, gpu_memory=gpu_memory, context=CONTEXT, images=1, audio_s=10.0,
        quant="nf4-dq", **options,
    )  # fmt: skip
    plan_s = time.perf_counter() - start
    if gpu_memory is not None:
        bound_tensors(plan, gpu_memory)
    base = process_bytes()
    start = time.perf_counter()
    with trimtab.load(plan) as model:
        torch.cuda.synchronize()
        load_s = time.perf_counter() - start
        load_peak, load_host = model.memory()["gpu_peak_bytes"], model.memory()["host_peak_bytes"]
        model.adapter_store.set("a")
        row = measure(case, model.hf_model, model.hf_model.config)
        row["gpu_load_peak_gib"] = round(load_peak / 2**30, 3)
        memory = model.memory()
        row["host_peak_gib"] = round(peak_host_bytes() / 2**30, 2)
        row |= stream_share(model)
        row["reserved_peak_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 3)
    planned = plan.gpu_peak_bytes / 2**30
    return {
        "plan_s": round(plan_s, 2), "load_s": round(load_s, 2), "gpu_planned_gib": round(planned, 3),
        "gpu_peak_gib": round(memory["gpu_peak_bytes"] / 2**30, 3),
        "host_base_gib": round(base / 2**30, 3), "host_load_gib": round(load_host / 2**30, 3),
        "host_planned_gib": round(plan.host_peak_bytes / 2**30, 3), "tiers": plan.tiers(), "gpu_items": dict(plan.gpu),
        "peak_phase": plan.peak_phase, **row,
    }  # fmt: skip


def stream_share(model: Any) -> dict[str, Any]:
    """Measure the streamer's copy rate without computing, as a share of one large pinned copy in the same process."""
    import torch

    streamer = model.streamer
    if streamer is None or len(streamer.groups) < 2:
        return {}
    from trimtab.engine.tiers.reader import HostMemory

    size = 256 * 2**20
    memory = HostMemory(size, pinned=True)
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    best = min(median_ms(lambda: target.copy_(memory.tensor, non_blocking=True)) for _ in range(3))
    pinned = size / best * 1000

    def once() -> None:
        for group in streamer.groups:
            streamer.enter(group.pieces[0])

    once()
    before = streamer.copied_bytes
    taken = median_ms(once, repeat=5)
    rate = (streamer.copied_bytes - before) / 5 / taken * 1000
    memory.close()
    return {"stream_gbps": round(rate / 1e9, 1), "pinned_gbps": round(pinned / 1e9, 1), "stream_share": round(rate / pinned, 3)}


def child(case: dict[str, Any], work: Path) -> dict[str, Any]:
    import warnings

    warnings.filterwarnings("ignore")
    checkpoint, adapter = work / case["model"], work / f"{case['model']}-r{case['rank']}"
    engine = run_stock if case["engine"] == "stock" else run_trimtab
    row = engine(case, checkpoint, adapter)
    return {"host_peak_gib": round(peak_host_bytes() / 2**30, 2), **row}


def main() -> None:
    parser = parser_of(__doc__, work=True)
    parser.add_argument("--models", default="e2b,e4b")
    parser.add_argument("--cases", default="")
    parser.add_argument("--timeout-s", type=float, default=150)
    parser.add_argument("--case")
    given = parser.parse_args()
    if given.case:
        print("ROW " + json.dumps(child(json.loads(given.case), given.work)))
        return
    rows = []
    for size in given.models.split(","):
        prepare(size, given.work)
        for case in cases_of(size):
            label = f"{case['engine']}:{case['name']}"
            if given.cases and label not in given.cases.split(","):
                continue
            rows.append(run_case({**case, "model": size}, given.work, given.timeout_s))
            print_row(rows[-1])
            save(given.save, {"environment": environment(), "context": CONTEXT, "rows": rows})
    compare(rows)
    for row in rows:
        print(row["model"], row["placement"], row["adapter_rank"], {k: v for k, v in row.items() if k.endswith("_equal")})
    save(given.save, {"environment": environment(), "context": CONTEXT, "rows": rows})


def prepare(size: str, work: Path) -> None:
    if not (work / size / "config.json").exists():
        prepared_apart(size, work, (8, 64))


def prepared_apart(size: str, work: Path, ranks: Sequence[int], then: str = "") -> None:
    """Make a checkpoint and its adapters in a process whose GPU memory is free again. then: more code of it, over `work`."""
    first = f"from pathlib import Path; work = Path({str(work)!r})"
    code = f"{first}\nfrom bench.cards import prepare; prepare({size!r}, work, {ranks})\n{then}"
    subprocess.run([sys.executable, "-c", code], check=True)


def run_case(case: dict[str, Any], work: Path, timeout_s: float) -> dict[str, Any]:
    label = {"model": case["model"], "engine": case["engine"], "placement": case["name"], "adapter_rank": case["rank"]}
    row = row_of(["bench.memory", "--work", str(work), "--case", json.dumps(case)], timeout_s=timeout_s) or {}
    return label | row


def compare(rows: list[dict[str, Any]]) -> None:
    """Add to each trimtab row whether its greedy tokens are those of the resident placement (rank 8)."""
    for row in rows:
        same = [
            r for r in rows
            if r["model"] == row["model"] and r["engine"] == "trimtab" and r["placement"] == "resident" and "tokens" in r
        ]  # fmt: skip
        if row["engine"] == "trimtab" and row["adapter_rank"] == 8 and same and "tokens" in row:
            keys = ("tokens", "media_tokens", "logits", "media_logits")
            row |= {f"{key}_equal": row[key] == same[0][key] for key in keys}


def print_row(row: dict[str, Any]) -> None:
    shown = {
        key: value
        for key, value in row.items()
        if key not in ("tokens", "media_tokens", "logits", "media_logits", "tiers", "gpu_items")
    }
    print(json.dumps(shown), flush=True)


if __name__ == "__main__":
    main()
