"""Attention on a CPU with grouped keys read in place, and repeated to every query head: in turn, in one process.

    OMP_NUM_THREADS=1 python -m bench.grouped_keys --save bench/results/grouped_keys.json [--repeats 9]

One layer's attention over the lengths of a later chunk, and the first token of the demo model and of a random Llama with fewer
layers than in bench.cpu, whose prompt ends behind the first chunk of 1,024 tokens. CPU time, so that other load counts little.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

from bench import parser_of, save
from bench.checkpoints import LLAMA
from trimtab.demo.demo import FOLDER as DEMO

# name: (heads of keys, group, tokens, places, width).
LAYERS = {
    "Llama, 16 of 64": (4, 4, 176, 1200, 64), "E4B, 8 of 256": (2, 4, 16, 4096, 256), "demo, 4 of 32": (2, 2, 64, 256, 32),
}  # fmt: skip


def compared(run: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """Return medians of CPU time in ms, their ratio, and whether results are the same bits. One pass of each does not count."""
    import torch

    from trimtab.engine.passes import attention as hf_attention

    times: dict[str, list[float]] = {"in_place": [], "repeated": []}
    results = {}
    for _ in range(repeats + 1):
        for name, made in times.items():
            with mock.patch.object(hf_attention, "grouped", hf_attention.grouped if name == "in_place" else _none):
                start = time.process_time()
                results[name] = run()
                made.append(1000 * (time.process_time() - start))
    medians = {name: round(median(made[1:]), 3) for name, made in times.items()}
    return {
        "cpu_ms": medians, "ratio": round(medians["in_place"] / medians["repeated"], 4),
        "same_bits": torch.equal(results["in_place"], results["repeated"]),
        "rows": {name: [round(one, 3) for one in made[1:]] for name, made in times.items()},
    }  # fmt: skip


def _none(*args: Any, **options: Any) -> None:
    return None


def layer(shape: tuple[int, ...], dtype: str, repeats: int) -> dict[str, Any]:
    """Return the comparison of one layer's attention."""
    import torch

    from trimtab.engine.passes.attention import attention

    kv_heads, group, tokens, places, width = shape
    kind = getattr(torch, dtype)
    query = torch.randn(1, tokens, kv_heads * group, width).to(kind).transpose(1, 2)
    keys, values = (torch.randn(1, kv_heads, places, width).to(kind) for _ in range(2))
    mask = torch.zeros(1, 1, tokens, places, dtype=kind)
    module = SimpleNamespace(num_key_value_groups=group, is_causal=True)
    return compared(lambda: attention(module, query, keys, values, mask)[0], repeats)


def model(folder: Path, tokens: int, dtype: str, repeats: int) -> dict[str, Any]:
    """Return the comparison of a prompt up to its first token."""
    import torch

    import trimtab
    from trimtab.engine.batch.batch import Batch

    plan = trimtab.plan(folder, device="cpu", dtype=dtype, context=tokens + 16)
    with trimtab.load(plan) as one, torch.no_grad():
        batch = Batch(one, rows=1, decode="eager")
        inputs = one.prepare([3 + number * 7 % 400 for number in range(tokens)])

        def first() -> Any:
            prompt = batch.begin(inputs, trimtab.GenerateRequest(max_new_tokens=1)).compute()
            return prompt.logits.clone()

        return compared(first, repeats) | {"prompt_tokens": tokens, "dtype": dtype, "quant": plan.request.quant}


def main() -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from trimtab.machine.environment import read_environment

    parser = parser_of(__doc__, must_save=True)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--layers", type=int, default=4)
    given = parser.parse_args()
    torch.manual_seed(0)
    found: dict[str, Any] = {
        "threads": torch.get_num_threads(), "cpu": torch.backends.cpu.get_cpu_capability(), "repeats": given.repeats,
        "environment": read_environment().to_json(), "layers": {}, "first_tokens": {},
    }  # fmt: skip
    for name, shape in LAYERS.items():
        for dtype in ("float32", "bfloat16"):
            found["layers"][f"{name}, {dtype}"] = layer(shape, dtype, given.repeats) | {"shape": shape}
    found["first_tokens"]["demo"] = model(DEMO / "base", 192, "float32", given.repeats)
    with tempfile.TemporaryDirectory() as folder:
        config = LlamaConfig(**LLAMA | {"num_hidden_layers": given.layers, "vocab_size": 1024})
        LlamaForCausalLM(config).save_pretrained(folder)
        name = f"llama, {given.layers} layers"
        found["first_tokens"][name] = model(Path(folder), 1200, "float32", min(given.repeats, 5))
    for part in ("layers", "first_tokens"):
        for name, row in found[part].items():
            print(name, row["cpu_ms"], row["ratio"], row["same_bits"], flush=True)
    save(given.save, found)


if __name__ == "__main__":
    main()
