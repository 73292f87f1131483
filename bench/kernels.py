"""How long each decode kernel takes, beside what memory allows and what bitsandbytes takes, over the shapes of Gemma 4.

    python -m bench.kernels [--models e2b,e4b,12b,26b-a4b] [--rows 1,2,4,8] [--ranks 8,64] [--tune] [--json FILE]

Weights are random bytes in bitsandbytes' layout; each product runs over enough copies of them that none is still in the
L2 cache, in one CUDA graph, so a time includes what a launch costs in a graph. The limit is the bytes that must be read
over the copy bandwidth measured in the same run. `--tune` times the likely cuts of each shape and keeps the fastest for
this card. A kernel whose answer is wrong is shown with its error and no time. Sizes of 12B are Gemma 3's with global
heads of 512.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import save
from trimtab.engine.cuda import nvrtc
from trimtab.engine.formats.weights import shell
from trimtab.engine.kernels import attention_and_norms, autotune, gemv4

# hidden size, sizes of the dense MLP, query heads, key and value heads (sliding, full), per-layer input, window,
# layers with their own keys and values are followed by layers without, keys serve as values in full layers
SIZES: dict[str, dict[str, Any]] = {
    "e2b": {"D": 1536, "I": (6144, 12288), "Hq": 8, "Hkv": (1, 1), "ple": 256, "window": 512, "shared": True},
    "e4b": {"D": 2560, "I": (10240,), "Hq": 8, "Hkv": (2, 2), "ple": 256, "window": 512, "shared": True},
    "12b": {"D": 3840, "I": (15360,), "Hq": 16, "Hkv": (8, 1), "ple": 0, "window": 1024, "k_is_v": True},
    "26b-a4b": {"D": 2816, "I": (2112,), "Hq": 16, "Hkv": (8, 2), "ple": 0, "window": 1024, "k_is_v": True},
}
HEAD = (256, 512)


@dataclass(frozen=True)
class Product:
    """A 4-bit product: layers of `rows` outputs over the same input of `columns`."""

    name: str
    rows: tuple[int, ...]
    columns: int

    @property
    def gate(self) -> str | None:
        """The activation of a product whose two members are multiplied at once."""
        return "gelu_tanh" if self.name == "gate+up" else None


def products(size: dict[str, Any]) -> list[Product]:
    """Return the distinct products of one decode step of a model."""
    D, found = size["D"], []
    for width, kv, kind in zip(HEAD, size["Hkv"], ("sliding", "full")):
        q, k = size["Hq"] * width, kv * width
        own = (q, k) if size.get("k_is_v") and kind == "full" else (q, k, k)
        found.append(Product(f"q+k+v {kind}" if len(own) == 3 else f"q+k {kind}", own, D))
        if size.get("shared"):
            found.append(Product(f"q {kind}", (q,), D))
        found.append(Product(f"o {kind}", (D,), q))
    for width in size["I"]:
        found += [Product("gate+up", (width, width), D), Product("down", (D,), width)]
    if size["ple"]:
        found += [Product("per-layer gate", (size["ple"],), D), Product("per-layer up", (D,), size["ple"])]
    return found


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes a second that a copy within the device's memory reads and writes together."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return 2 * source.numel() / autotune.graph_us(copy, device) * 1e6


def adapters_of(product: Product, rank: int, n: int, device: torch.device) -> gemv4.LoraArgs:
    """Return adapters for n rows, one slot a row."""
    slots = [
        [(torch.randn(rank, product.columns, device=device), torch.randn(rows, rank, device=device), 0.5)] * 1
        for rows in product.rows
    ]
    return gemv4.lora_args(slots, torch.zeros(n, dtype=torch.int32, device=device), rank)


class Bench:
    """One run: a module, the measured bandwidth, and the rows found so far."""

    def __init__(self, device: torch.device, *, tune: bool) -> None:
        self.device, self.tune = device, tune
        self.module = gemv4.load(device)
        self.weights = autotune.RandomWeights(device)
        self.cold_bytes = 3 * int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 * 2**20))
        self.bandwidth = copy_bandwidth(device)
        self.rows: list[dict[str, Any]] = []

    def us(self, run: Callable[[], None], count: int) -> float:
        return autotune.graph_us(run, self.device) / count

    def add(self, model: str, name: str, shape: str, n: int, us: float | None, nbytes: float, **more: Any) -> None:
        limit = nbytes / self.bandwidth * 1e6
        share = None if us is None else limit / us
        self.rows.append(
            {"model": model, "kernel": name, "shape": shape, "rows": n, "us": us, "limit_us": limit, "share": share} | more
        )
        shown = "       -" if us is None else f"{us:8.2f}"
        rest = " ".join(f"{key}={value}" for key, value in more.items() if value is not None)
        print(
            f"{model:8} {name:22} {shape:26} {n} {shown} us, limit {limit:6.2f} {'' if share is None else f'{share:5.0%}'} {rest}",
            flush=True,
        )

    def product(self, model: str, product: Product, counts: list[int], ranks: list[int]) -> None:
        groups = self.weights.groups(product.rows, product.columns, self.cold_bytes)
        shape = f"{'+'.join(map(str, product.rows))} x {product.columns}"
        nbytes = sum(packed.nbytes for packed in groups[0])
        wrong = autotune.check(groups[0], self.module, rows=sorted({*counts, 3}))
        for n in counts:
            if wrong is None and self.tune:
                taken = autotune.tune(groups, n, self.module, gate=product.gate)
                found = ", ".join(f"{us:.2f}" for us in taken.values())
            x = torch.randn(n, product.columns, device=self.device).bfloat16()
            gate = None if product.gate is None else gemv4.Gate(product.gate)
            width = sum(product.rows) if gate is None else product.rows[0]
            out = torch.empty(n, width, dtype=torch.bfloat16, device=self.device)

            def run(x: Tensor = x, out: Tensor = out, lora: gemv4.LoraArgs | None = None) -> None:
                for group in groups:
                    gemv4.matvec4(x, group, out, lora=lora, gate=gate, module=self.module)  # noqa: B023

            more: dict[str, Any] = {"error": wrong}
            if wrong is None:
                more["cut"] = str(gemv4.choose(groups[0], n, self.module, pair=gate is not None))
                more["tried_us"] = found if self.tune else None
                more["overlap_us"] = self.overlapped_us(run, len(groups))
            layers = [shell(packed, None, x.dtype) for group in groups for packed in group]
            stock_us = autotune.graph_us(lambda layers=layers, x=x: [layer(x) for layer in layers], x.device)
            more["bitsandbytes_us"] = round(stock_us / len(groups), 2)
            self.add(model, product.name, shape, n, None if wrong else self.us(run, len(groups)), nbytes, **more)
            for rank in ranks if wrong is None else ():
                lora = adapters_of(product, rank, n, self.device)
                extra = 4 * rank * (product.columns * len(product.rows) + sum(product.rows))
                us = self.us(lambda lora=lora: run(lora=lora), len(groups))
                early = self.overlapped_us(lambda lora=lora: run(lora=lora), len(groups))
                self.add(model, f"{product.name} + LoRA {rank}", shape, n, us, nbytes + extra, overlap_us=early)

    def overlapped_us(self, run: Callable[[], None], count: int) -> float | None:
        """Return the time with dependent launches, None on a card that has none."""
        if self.module.capability < (9, 0):
            return None
        self.module.overlap = True
        try:
            return round(self.us(run, count), 2)
        finally:
            self.module.overlap = False

    def attention(self, model: str, size: dict[str, Any], counts: list[int]) -> None:
        """Time attention over whole caches of different lengths; limit: keys and values are read once."""
        small = attention_and_norms.load(self.device) if hasattr(attention_and_norms, "load") else None
        for kind, heads, kv_heads, width, lengths in attentions(size):
            for length, n in ((length, n) for length in lengths for n in counts):
                q = torch.randn(n, heads, width, device=self.device).bfloat16()
                nbytes = 4 * n * kv_heads * length * width
                copies = max(2, min(32, round(self.cold_bytes / nbytes)))
                caches = torch.randn(copies, 2, n, kv_heads, length, width, device=self.device, dtype=torch.bfloat16)
                positions = torch.full((n,), length - 1, device=self.device)
                out = torch.empty(n, heads * width, dtype=torch.bfloat16, device=self.device)
                scratch = None  # made by each way itself

                def run(module: Any, cache: Tensor = caches, q: Tensor = q, out: Tensor = out) -> None:
                    for keys, values in cache:
                        attention_and_norms.attend(q, keys, values, positions, 1.0, None, out, scratch, module)  # noqa: B023

                stock = round(self.us(lambda: run(None), copies), 2)
                us = None if small is None else self.us(lambda: run(small), copies)
                shape = f"{heads}/{kv_heads} x {width}, {length} places"
                self.add(model, f"attention {kind}", shape, n, us, nbytes, torch_us=stock)


def attentions(size: dict[str, Any]) -> Iterator[tuple[str, int, int, int, list[int]]]:
    """Yield (kind, query heads, key heads, width, lengths) of a model's attention."""
    for width, kv, kind in zip(HEAD, size["Hkv"], ("sliding", "full")):
        lengths = [size["window"]] if kind == "sliding" else [1024, 8192, 32768]
        yield kind, size["Hq"], kv, width, lengths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="e2b,e4b,12b,26b-a4b")
    parser.add_argument("--rows", default="1,2,4,8")
    parser.add_argument("--ranks", default="8")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--no-attention", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    reason = nvrtc.why_not("cuda:0") if torch.cuda.is_available() else "there is no CUDA GPU"
    if reason:
        raise SystemExit(f"no kernels here: {reason}")
    torch.manual_seed(0)
    bench = Bench(torch.device("cuda:0"), tune=options.tune)
    print(f"{torch.cuda.get_device_name(0)}, copies at {bench.bandwidth / 1e12:.2f} TB/s")
    counts = [int(n) for n in options.rows.split(",")]
    ranks = [int(rank) for rank in options.ranks.split(",") if rank]
    done: set[tuple[tuple[int, ...], int]] = set()
    for model in options.models.split(","):
        for product in products(SIZES[model]):
            if (product.rows, product.columns) not in done:
                bench.product(model, product, counts, ranks)
            done.add((product.rows, product.columns))
        if not options.no_attention:
            bench.attention(model, SIZES[model], counts)
    if options.tune:
        autotune.keep_tuned(bench.module)
    if options.json:
        facts = {
            "gpu": torch.cuda.get_device_name(0), "copy_Bps": bench.bandwidth, "torch": torch.__version__,
            "cuda": torch.version.cuda, "python": platform.python_version(),
        }  # fmt: skip
        save(options.json, {"facts": facts, "rows": bench.rows})


if __name__ == "__main__":
    main()
