"""How fast a loaded model decodes, and what holds it back: stock and trimtab in one run on one GPU.

    python -m bench.decode --work FOLDER --save bench/results/decode.json [--models e4b,e2b] [--cases NAME,...]

Each case is a process; checkpoints are bench.memory's. A row says what was decoded (`model`, `engine`, `placement`,
`decode`, `adapter_rank`, `adapters` in its rows, `batch`, `context`, `loaded` adapters on the model where that was varied)
and `tok_s` of all rows together, `ms` of a step, `limit_tok_s` from the bytes that a token has to read and the bandwidth
measured in the same process, `ttft_ms` where it was measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench import environment, generated, parser_of, save, timed_s
from bench.memory import LEAN, prepare

CONTEXT = 2048
PROMPT_TOKENS = 512
STEPS = 64
RANKS = (8, 64)
LOADED = (1, 4, 16, 64)
DRAWS: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 0.7, "seed": 1}, {"temperature": 0.7, "top_p": 0.95, "seed": 1},
    {"temperature": 0.7, "top_k": 50, "repetition_penalty": 1.1, "seed": 1},
)  # fmt: skip


def cases_of(size: str) -> list[dict[str, Any]]:
    """Return the cases of one model size, the most wanted first."""
    half = {"e2b": range(17, 35), "e4b": range(21, 42)}[size]
    half_streamed = LEAN | {f"model.language_model.layers.{i}": "stream" for i in half}
    return [
        {"name": "resident", "engine": "trimtab", "place": {"*": "resident"}, "full": True},
        {"name": "resident", "engine": "stock"},
        {"name": "lean", "engine": "trimtab", "place": LEAN},
        {"name": "lean+half-decoder", "engine": "trimtab", "place": half_streamed},
        {"name": "long", "placement": "lean", "engine": "trimtab", "place": LEAN, "context": 32768, "long": True},
        {"name": "adapters", "placement": "resident", "engine": "trimtab", "place": {"*": "resident"}, "many": True},
        {"name": "drawn", "placement": "resident", "engine": "trimtab", "place": {"*": "resident"}, "draws": True},
    ]


# What every case measures with --------------------------------------------------------------------------------------------


def token_bytes(model: Any) -> int:
    """Return the bytes that one token has to read: the decoder's and the head's weights as they are packed."""
    from trimtab.engine.families.families import describe
    from trimtab.engine.layers.leaves import Leaf

    inside = {id(module) for module in describe(model.hf_model).text.modules()} | {id(model.hf_model.lm_head)}
    leaves = [module for module in model.hf_model.modules() if isinstance(module, Leaf) and id(module) in inside]
    total = sum(leaf.packed().nbytes for leaf in leaves)
    if not isinstance(model.hf_model.lm_head, Leaf):
        total += model.hf_model.lm_head.weight.nbytes
    return total


# trimtab ------------------------------------------------------------------------------------------------------------------


class Bench:
    """Times steps of batches of one loaded model and collects rows."""

    def __init__(self, model: Any, label: dict[str, Any], names: dict[str, int]) -> None:
        from bench.checkpoints import text_inputs
        from bench.kernels import copy_bandwidth

        self.model, self.label, self.ranks, self.rows = model, label, names, []
        self.kernels_us: dict[str, list[float]] = {}  # ours and what it replaces, one row
        self.config = model.hf_model.config
        self.bandwidth = copy_bandwidth(model.device) / 1e9
        self.bytes = token_bytes(model)
        self.prompt = text_inputs(self.config, PROMPT_TOKENS, device="cuda")["input_ids"][0].tolist()

    def batch(self, decode: str, rows: int, adapters: list[str | None], draws: dict[str, Any] | None = None) -> Any:
        """Return a batch whose rows have read the prompt. draws: how tokens are drawn."""
        from trimtab.engine.batch.batch import Batch
        from trimtab.request import GenerateRequest

        batch = Batch(self.model, rows=rows, decode=decode)
        request = GenerateRequest(max_new_tokens=self.model.context_tokens - len(self.prompt) - 8, **(draws or {}))
        batch.ends = frozenset()  # random weights may draw an end token at once
        for name in adapters:
            batch.join(batch.begin(self.model.prepare(self.prompt), request, adapter=name).compute())
        return batch

    def row(
        self, decode: str, adapters: list[str | None], *, at: int | None = None, draws: dict[str, Any] | None = None,
        waits: bool = False, **more: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Time steps and add a row. at: the position that the rows are moved to (what they hold there does not matter).
        draws: how tokens are drawn. waits: no step is queued before the host has the token in front of it."""
        import torch

        gc.collect()  # a batch and its steps know each other: the one before is still there
        rank = max((self.ranks[name] for name in adapters if name is not None), default=0)
        found: dict[str, Any] = {
            **self.label, "decode": decode, "batch": len(adapters), "adapter_rank": rank,
            "adapters": len({name for name in adapters if name is not None}), "context": at or PROMPT_TOKENS, **more,
            **({"draws": draws} if draws is not None else {}), **({"waits": True} if waits else {}),
        }  # fmt: skip
        self.rows.append(found)
        try:
            batch = self.batch(decode, len(adapters), adapters, draws)
            if waits:
                batch.steps.may_look_ahead = lambda: False
            if at is not None:
                for row in batch.active:
                    row.token_ids += [7] * (at - len(row.token_ids))
                batch.cache.positions[: len(adapters)] = at - 1
            for _ in range(3):
                batch.step()
            captured = {"captures": batch.steps.captures, "capture_s": round(batch.steps.capture_s, 3)}
            steps = 8 if decode == "eager" else STEPS
            times = [timed_s(batch.step) for _ in range(steps)]
            whole = timed_s(lambda: [batch.step() for _ in range(steps)])
            ms = whole / steps * 1000
            limit = self.bandwidth * 1e9 / self.bytes * len(adapters)
            self.kernels_us |= {name: [round(us, 2) for us in pair] for name, pair in batch.steps.kernels.measured_us.items()}
            found |= {
                "tok_s": round(len(adapters) / ms * 1000, 1), "ms": round(ms, 3),
                "ms_p50": round(sorted(times)[len(times) // 2] * 1000, 3), "limit_tok_s": round(limit, 1),
                "share": round(len(adapters) / ms * 1000 / limit, 3), **captured,
                "overlap": batch.steps.kernels.overlap_pays, "gpu_peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3),
                "fallbacks": [f"{one.what}: {one.why}" for one in batch.steps.fallbacks],
            }  # fmt: skip
        except Exception as exc:
            found["error"] = f"{type(exc).__name__}: {exc}"[:300]
        print("ROW " + json.dumps(found), flush=True)  # kept if the case runs out of time
        return found


def run_trimtab(case: dict[str, Any], work: Path) -> list[dict[str, Any]]:
    import torch

    import trimtab

    size = case["model"]
    label = {"model": size, "engine": "trimtab", "placement": case.get("placement", case["name"])}
    adapters = {f"r{rank}": work / f"{size}-r{rank}" for rank in RANKS[: 1 if case.get("many") else None]}
    if not case.get("many"):
        adapters |= {f"e{number}": work / f"{size}-r8" for number in range(8)}
    plan = trimtab.plan(
        work / size, adapters=adapters, context=case.get("context", CONTEXT), images=1, audio_s=10.0, quant="nf4-dq",
        place=case["place"], batch=8 if case.get("full") or case.get("draws") else 1,
    )  # fmt: skip
    ranks = dict.fromkeys(adapters, 8) | {"r64": 64}
    with trimtab.load(plan, decode="eager") as model:
        bench = Bench(model, label, ranks)
        if case.get("full"):
            full(bench)
        elif case.get("draws"):
            drawn(bench)
        elif case.get("many"):
            many(bench)
        elif case.get("long"):
            for at in (1024, 4096, 16384, 32000):
                bench.row("auto", ["r8"], at=at)
        else:
            bench.row("auto", [None])
            bench.row("auto", ["r8"])
            bench.row("graph", ["r8"])
        bench.rows[0] |= {"bandwidth_gbps": round(bench.bandwidth), "token_gb": round(bench.bytes / 1e9, 3)}
        if model.streamer is not None and case["name"] == "lean+half-decoder":
            from bench.memory import stream_share

            share = stream_share(model)
            per_token = sum(group.nbytes for group in model.streamer.groups if "language_model" in group.block)
            for row in bench.rows:
                if "ms" in row:
                    rate = per_token / row["ms"] * 1000 / 1e9
                    row |= {"stream_gbps": round(rate, 1), "stream_share": round(rate / share["pinned_gbps"], 3)}
        del bench.model
    torch.cuda.synchronize()
    return bench.rows


def full(bench: Bench) -> None:
    """The rows of the resident placement: ways to decode, ranks, batches, many adapters, first token, swap."""
    for name in (None, "r8", "r64"):
        bench.row("auto", [name])
    bench.rows[0] |= {"kernels_us": bench.kernels_us}
    eight = [f"e{number}" for number in range(8)]
    for count in (2, 4, 8):
        bench.row("auto", eight[:count])
    bench.row("auto", [None] * 8)
    for measure in (swap, first_token, agreement):
        bench.rows.append(measure(bench))
        print("ROW " + json.dumps(bench.rows[-1]), flush=True)
    for decode in ("graph", "eager"):
        for name in ("r8", None, "r64"):
            bench.row(decode, [name])
    bench.row("graph", eight)


def many(bench: Bench) -> None:
    """The rows by number of adapters that are on the model, of which a step uses one."""
    held = bench.model.read_adapter(bench.model.plan.request.adapters["r8"])
    loaded = 1
    for count in LOADED:
        while loaded < count:
            bench.model.load_adapter(f"m{loaded}", held)
            loaded += 1
        bench.row("auto", ["r8"], loaded=count)


def drawn(bench: Bench) -> None:
    """The rows by how tokens are drawn: with steps queued ahead, and waiting for each token."""
    for draws in DRAWS:
        for waits in (False, True):
            bench.row("auto", ["r8"], draws=draws, waits=waits)
    bench.row("auto", [f"e{number}" for number in range(8)], draws=DRAWS[2])


def agreement(bench: Bench) -> dict[str, Any]:
    """Compare captured steps with eager ones, token for token and in the first step's scores."""
    import torch

    found: dict[str, Any] = {**bench.label, "what": "agreement", "steps": 256}
    try:
        tokens, scores = {}, {}
        for decode in ("eager", "graph", "auto"):
            batch = bench.batch(decode, 2, ["r8", None])
            scores[decode] = batch.logits().clone()
            batch.cache.positions[:2] -= 1
            batch.write_last_tokens()
            for _ in range(found["steps"]):
                batch.step()
            tokens[decode] = [row.answer_ids for row in batch.active]
        for decode in ("graph", "auto"):
            pairs = [zip(a, b, strict=True) for a, b in zip(tokens["eager"], tokens[decode], strict=True)]
            agreed = [next((i for i, (a, b) in enumerate(pair) if a != b), found["steps"]) for pair in pairs]
            logs = [torch.log_softmax(scores[name], -1) for name in ("eager", decode)]
            kl = (logs[0].exp() * (logs[0] - logs[1])).sum(-1)
            found[decode] = {
                "tokens_agree": agreed, "kl": [float(f"{value:.2e}") for value in kl.tolist()],
                "largest_difference": float((scores["eager"] - scores[decode]).abs().max()),
            }  # fmt: skip
    except Exception as exc:
        found["error"] = f"{type(exc).__name__}: {exc}"[:300]
    return found


def first_token(bench: Bench) -> dict[str, Any]:
    """Time a prompt through the model and into a row."""

    def once() -> None:
        bench.batch("eager", 1, ["r8"])

    once()
    taken = sorted(timed_s(once) for _ in range(5))
    return {
        **bench.label, "what": "ttft", "adapter_rank": 8, "batch": 1, "context": PROMPT_TOKENS,
        "ttft_ms": round(taken[2] * 1000, 1),
    }  # fmt: skip


def swap(bench: Bench) -> dict[str, Any]:
    """Time putting an adapter that waits in host memory on the model while a row is answering."""
    import torch

    found: dict[str, Any] = {**bench.label, "what": "swap", "adapter_rank": 8}
    try:
        held = bench.model.read_adapter(bench.model.plan.request.adapters["e7"])
        batch = bench.batch("auto", 2, ["r8", "e1"])
        for _ in range(3):
            batch.step()
        step_ms = sorted(timed_s(batch.step) for _ in range(20))[10] * 1000
        taken, after = [], []
        for _ in range(30):
            bench.model.unload_adapter("e7")
            taken.append(timed_s(lambda: bench.model.load_adapter("e7", held)) * 1000)
            batch.active[1].adapter = "e7"
            after.append(timed_s(batch.step) * 1000)
            batch.active[1].adapter = "e1"
            batch.step()
        taken.sort()
        found |= {
            "swap_ms_p50": round(taken[len(taken) // 2], 2), "swap_ms_p99": round(taken[-1], 2),
            "step_ms": round(step_ms, 2), "step_after_ms_p50": round(sorted(after)[len(after) // 2], 2),
            "captures": batch.steps.captures,
        }  # fmt: skip
    except Exception as exc:
        found["error"] = f"{type(exc).__name__}: {exc}"[:300]
    torch.cuda.synchronize()
    return found


# Stock --------------------------------------------------------------------------------------------------------------------


def run_stock(case: dict[str, Any], work: Path) -> list[dict[str, Any]]:
    import torch

    from bench.checkpoints import text_inputs
    from trimtab.stock.load import load_adapter, load_base, quantization

    size = case["model"]
    model = load_base(work / size, dtype=torch.bfloat16, device_map={"": 0}, quantization_config=quantization("nf4-dq"))
    rows = []
    inputs = text_inputs(model.config, PROMPT_TOKENS, device="cuda")
    for rank in (0, *RANKS):
        peft_model: Any = load_adapter(model, work / f"{size}-r{rank}") if rank else model
        for batch in (1,) if rank != 8 else (1, 8):
            several = {name: value.repeat(batch, 1) for name, value in inputs.items()}
            rows.append({
                "model": size, "engine": "stock", "placement": "resident", "decode": "eager", "adapter_rank": rank,
                "adapters": int(rank > 0), "batch": batch, "context": PROMPT_TOKENS, **stock_steps(peft_model, several),
            })  # fmt: skip
        if rank:
            model = peft_model.unload()
    return rows


def stock_steps(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    import torch

    generated(model, inputs, 2)
    first = sorted(timed_s(lambda: generated(model, inputs, 1)) for _ in range(3))[1]
    whole = timed_s(lambda: generated(model, inputs, 17))
    ms = (whole - first) / 16 * 1000
    return {
        "tok_s": round(inputs["input_ids"].shape[0] / ms * 1000, 1), "ms": round(ms, 2), "ttft_ms": round(first * 1000, 1),
        "gpu_peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3),
    }  # fmt: skip


# One run ------------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = parser_of(__doc__, work=True)
    parser.add_argument("--models", default="e4b,e2b")
    parser.add_argument("--cases", default="")
    parser.add_argument("--timeout-s", type=float, default=120)
    parser.add_argument("--case")
    given = parser.parse_args()
    if given.case:
        import warnings

        warnings.filterwarnings("ignore")
        case = json.loads(given.case)
        print("ROWS " + json.dumps((run_stock if case["engine"] == "stock" else run_trimtab)(case, given.work)))
        return
    rows: list[dict[str, Any]] = []
    for size in given.models.split(","):
        prepare(size, given.work)
        for case in cases_of(size):
            if not given.cases or f"{case['engine']}:{case['name']}" in given.cases.split(","):
                rows += run_case({**case, "model": size}, given)
                save(given.save, {"environment": environment(), "context": CONTEXT, "rows": rows})


def run_case(case: dict[str, Any], given: argparse.Namespace) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "bench.decode", "--work", str(given.work), "--case", json.dumps(case)]
    label = {"model": case["model"], "engine": case["engine"], "placement": case["name"]}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=given.timeout_s)
    except subprocess.TimeoutExpired as exc:
        said = exc.stdout.decode() if isinstance(exc.stdout, bytes) else exc.stdout or ""
        done_rows = [json.loads(line[4:]) for line in said.splitlines() if line.startswith("ROW ") and line.endswith("}")]
        return [*done_rows, {**label, "error": f"longer than {given.timeout_s} s"}]
    found = [line for line in done.stdout.splitlines() if line.startswith("ROWS ")]
    if done.returncode or not found:
        last = (done.stderr.strip().splitlines() or ["?"])[-1][:300]
        print(json.dumps({**label, "error": last}), done.stderr[-1500:], flush=True)
        return [{**label, "error": last}]
    rows: list[dict[str, Any]] = json.loads(found[-1][5:])
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


if __name__ == "__main__":
    main()
