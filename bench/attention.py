"""How long attention of a decode step takes at a head of 128 values, by the number of splits and of blocks on a multiprocessor.

    python -m bench.attention --save bench/results/attention.json [--rows 1,8] [--tokens 550,1300]

Qwen3-8B's layer (32 heads of queries over 8 of keys) over caches that no L2 holds, in CUDA graphs: `us` of our kernel with norms,
rotation and the write (what a step launches), `attend_us` of attention alone, and one row of torch's SDPA. The limit: keys and
values are read once at the copy bandwidth of the same run. A block takes one row and one head of keys (attend.cu).
`splits`: over how many blocks its places are divided. `used`: how many of them have a tile of 32 places. `blocks`: how many a
multiprocessor must hold at least (1: as shipped; its 186 registers a thread allow 5). `chosen`: what the kernel takes by itself. A
result that differs from SDPA's has no time. What the file of --save has is not measured again. DEVICE=cpu: the kernels of
tests/cuda_on_cpu.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from bench import DEVICE, environment, parser_of, save, saved
from trimtab.engine.kernels import attention_and_norms, autotune

HEADS, KV_HEADS, DIM, CONTEXT = 32, 8, 128, 2048
SHAPE = attention_and_norms.AttentionShape(HEADS, KV_HEADS, DIM, "after", norms_values=False)
SPLITS = (1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 14, 18, 21, 24, 32, 41, 48, 64)
BLOCKS = (1, 4, 6)
BOUNDS = "__launch_bounds__(DIM / 2, DIM == 256 && TILES == 1 ? 3 : 1)"
TILE, MOST_COPIES = 32, 64


class Case:
    """Attention of some rows over some tokens. copies: of keys and values, more than the L2 cache holds."""

    def __init__(self, rows: int, tokens: int, context: int, cold_bytes: int) -> None:
        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device=DEVICE).bfloat16()

        self.rows, self.tokens, self.context = rows, tokens, context
        self.nbytes = 4 * rows * KV_HEADS * tokens * DIM
        copies = max(2, min(MOST_COPIES, cold_bytes // self.nbytes))
        self.caches = [random(2, rows, KV_HEADS, context, DIM) for _ in range(copies)]
        self.q, self.qkv = random(rows, HEADS, DIM), random(rows, (HEADS + 2 * KV_HEADS) * DIM)
        self.cos, self.sin = random(rows, DIM), random(rows, DIM)
        self.norms = attention_and_norms.HeadNorms(random(DIM), random(DIM), 1e-6, "after", values=False)
        self.positions = torch.full((rows,), tokens - 1, device=DEVICE)
        self.out = torch.empty(rows, HEADS * DIM, dtype=torch.bfloat16, device=DEVICE)
        many = torch.cuda.get_device_properties(DEVICE).multi_processor_count
        self.scratch = torch.empty(attention_and_norms.scratch_values(rows, HEADS, KV_HEADS, DIM, context, many), device=DEVICE)

    def attend(self, module: Any) -> None:
        for keys, values in self.caches:
            attention_and_norms.attend(self.q, keys, values, self.positions, DIM**-0.5, None, self.out, self.scratch, module)

    def step(self, module: Any) -> None:
        for keys, values in self.caches:
            attention_and_norms.rope_and_attention(
                self.qkv, HEADS, self.norms, self.cos, self.sin, keys, values, self.positions, self.positions, DIM**-0.5, None,
                self.out, self.q, self.scratch, module,
            )  # fmt: skip

    def sdpa(self) -> None:
        for keys, values in self.caches:
            k, v = keys[:, :, : self.tokens], values[:, :, : self.tokens]
            y = functional.scaled_dot_product_attention(self.q[:, :, None], k, v, scale=DIM**-0.5, enable_gqa=True)
            self.out.copy_(y.view(self.rows, -1))

    def error(self, module: Any) -> float:
        """Return the largest difference from SDPA, over the largest value."""
        self.attend(module)
        ours = self.out.float()
        self.sdpa()
        return float((ours - self.out.float()).abs().max() / self.out.float().abs().max())


def modules() -> dict[int, Any]:
    """Return blocks -> the kernels."""
    if DEVICE != "cuda":
        from tests.cuda_on_cpu import modules as on_cpu

        return {1: on_cpu.small()}
    from trimtab.engine.cuda import nvrtc

    found, source, plain = {}, attention_and_norms.source("attend.cu"), attention_and_norms.AttentionShape(HEADS, KV_HEADS, DIM)
    assert BOUNDS in source
    for blocks in BLOCKS:
        module = found[blocks] = attention_and_norms.load(DEVICE)
        for turn in (False, True) if blocks > 1 else ():
            options = attention_and_norms.attention_options(SHAPE if turn else plain, torch.bfloat16, turn=turn)
            text = source.replace(BOUNDS, f"__launch_bounds__(DIM / 2, {blocks})")
            module.attention[options] = nvrtc.Module(text, device=DEVICE, options=options, name="attend.cu")
    return found


def wall_us(run: Callable[[], None]) -> float:
    begun = time.perf_counter()
    run()
    return (time.perf_counter() - begun) * 1e6


def us(run: Callable[[], None], case: Case) -> float:
    return round((autotune.graph_us(run, torch.device(DEVICE, 0)) if DEVICE == "cuda" else wall_us(run)) / len(case.caches), 2)


def measure(case: Case, known: set[tuple[Any, ...]], found: dict[int, Any], keep: Callable[[dict[str, Any]], None]) -> None:
    """Measure every setting of a case that is not known, SDPA first."""
    about: dict[str, Any] = {"rows": case.rows, "tokens": case.tokens, "context": case.context}
    tiles = -(-case.tokens // TILE)
    if key({**about, "way": "sdpa"}) not in known:
        keep({**about, "way": "sdpa", "attend_us": us(case.sdpa, case)})
    own = attention_and_norms._splits
    for blocks, module in found.items():
        chosen = own(case.rows, HEADS, KV_HEADS, DIM, case.context, module.multiprocessors)
        for splits in sorted({chosen, *(one for one in SPLITS if one <= -(-case.context // TILE))}):
            row = {**about, "way": "trimtab", "splits": splits, "blocks": blocks}
            if key(row) in known:
                continue
            each = -(-tiles // splits)
            row |= {"used": -(-tiles // each), "tiles": each, "chosen": splits == chosen and blocks == 1}
            with mock.patch.object(attention_and_norms, "_splits", lambda *_, count=splits: count):
                error = case.error(module)
                if error > 0.02:  # two roundings of bfloat16 and their sums
                    keep({**row, "error": f"differs from SDPA by {error:.3f}"})
                    continue
                keep(row | {"attend_us": us(lambda m=module: case.attend(m), case), "us": us(lambda m=module: case.step(m), case)})


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("rows", "tokens", "context", "way", "splits", "blocks"))


def table(rows: list[dict[str, Any]], bandwidth: float | None) -> str:
    """Return for each case SDPA's time, what the kernel chooses, and the fastest settings."""
    head = ("rows", "tokens", "way", "splits", "tiles", "blocks", "attend us", "step us", "limit")
    lines = ["{:>4} {:>6} {:14} {:>6} {:>5} {:>6} {:>9} {:>8} {:>6}".format(*head)]
    for case in sorted({(row["rows"], row["tokens"]) for row in rows}):
        own = [row for row in rows if (row["rows"], row["tokens"]) == case and "attend_us" in row]
        ranked = sorted((row for row in own if row["way"] == "trimtab"), key=lambda row: float(row["us"]))
        limit = "" if bandwidth is None else f"{4 * case[0] * KV_HEADS * case[1] * DIM / bandwidth * 1e6:.1f}"
        for row in [one for one in own if one["way"] == "sdpa"] + [one for one in ranked if one["chosen"]] + ranked[:3]:
            way = "torch SDPA" if row["way"] == "sdpa" else "as chosen" if row["chosen"] else "trimtab"
            lines.append(
                f"{case[0]:4} {case[1]:6} {way:14} {row.get('splits', ''):>6} {row.get('tiles', ''):>5} {row.get('blocks', ''):>6} "
                f"{row['attend_us']:9.2f} {row.get('us', ''):>8} {limit:>6}"
            )
    return "\n".join(dict.fromkeys(lines))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--tokens", default="550,1300")
    parser.add_argument("--context", type=int, default=CONTEXT)
    given = parser.parse_args()
    torch.manual_seed(0)
    before = saved(given.save)
    rows: list[dict[str, Any]] = [row for row in before.get("rows", []) if "error" not in row]
    bandwidth, cold_bytes = before.get("copy_Bps"), 2**20
    if DEVICE == "cuda":
        from bench.kernels import copy_bandwidth

        cold_bytes = 3 * int(getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 64 * 2**20))
        bandwidth = bandwidth or copy_bandwidth(torch.device("cuda:0"))

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        save(given.save, {"environment": environment(), "copy_Bps": bandwidth, "rows": rows})

    found, known = modules(), {key(row) for row in rows}
    for count in map(int, given.rows.split(",")):
        for tokens in map(int, given.tokens.split(",")):
            measure(Case(count, tokens, given.context, cold_bytes), known, found, keep)
    print(table(rows, bandwidth))


if __name__ == "__main__":
    main()
