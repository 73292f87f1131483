"""Decoding on a CPU beside the stock stack: the demo model and a random Llama of 300 million weights, in turn, same inputs.

    OMP_NUM_THREADS=1 python -m bench.cpu --work FOLDER --save bench/results/bench_cpu.json [--runs 3] [--new-tokens 32]

The Llama is made on the first call; its weights mean nothing. What else the machine does meanwhile is in the spread.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "trimtab" / "demo"
LLAMA = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 22, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK = 8


def write_llama(folder: Path) -> Path:
    """Write the random checkpoint; 310 million weights in bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if (folder / "config.json").is_file():
        return folder
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = LlamaForCausalLM(LlamaConfig(**LLAMA, dtype="bfloat16"))
    finally:
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    return folder


def write_adapter(folder: Path) -> Path:
    """Write a PEFT adapter of rank 8 on every linear layer of the decoder."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    width, inner = LLAMA["hidden_size"], LLAMA["intermediate_size"]
    narrow = LLAMA["num_key_value_heads"] * LLAMA["head_dim"]
    shapes = {
        "self_attn.q_proj": (width, width), "self_attn.k_proj": (narrow, width), "self_attn.v_proj": (narrow, width),
        "self_attn.o_proj": (width, width), "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }  # fmt: skip
    tensors = {}
    for layer in range(LLAMA["num_hidden_layers"]):
        for name, (out, inside) in shapes.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(RANK, inside, generator=generator) / inside**0.5
            tensors[f"{key}.lora_B.weight"] = torch.randn(out, RANK, generator=generator) * 0.02
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "", "r": RANK, "lora_alpha": RANK,
        "lora_dropout": 0.0, "bias": "none", "target_modules": list(TARGETS), "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))
    return folder


def cases(work: Path) -> dict[str, Any]:
    """Return name -> LoadRequest of what is measured."""
    from trimtab.request import LoadRequest

    llama, adapter = write_llama(work / "llama-300m"), write_adapter(work / "llama-300m-r8")
    style = {"adapter": str(DEMO / "adapters" / "style")}
    random = {"adapter": str(adapter)}
    return {
        "demo, nf4-dq": LoadRequest(model=str(DEMO / "base"), adapters=style, device="cpu"),
        "llama-300m, nf4-dq": LoadRequest(model=str(llama), adapters=random, device="cpu"),
        "llama-300m, nf4-dq, repacked": LoadRequest(model=str(llama), adapters=random, device="cpu"),
        "demo, nf4-dq, repacked": LoadRequest(model=str(DEMO / "base"), adapters=style, device="cpu"),
        "llama-300m, none": LoadRequest(model=str(llama), adapters=random, device="cpu", quant="none"),
        # What bitsandbytes' fast path for some CPUs is worth to the stock side.
        "demo, nf4-dq, without AVX512-BF16": LoadRequest(model=str(DEMO / "base"), adapters=style, device="cpu"),
        "llama-300m, nf4-dq, without AVX512-BF16": LoadRequest(model=str(llama), adapters=random, device="cpu"),
    }


def main() -> None:
    from trimtab.speed.bench import BenchRequest, bench

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--note", default="", help="what else the machine did, for the file")
    parser.add_argument("--only", action="append", help="this case alone; may be repeated")
    given = parser.parse_args()
    found: dict[str, Any] = {"note": given.note, "reports": {}}
    if given.only and given.save.exists():  # the other cases stay as they were measured
        found = json.loads(given.save.read_text(encoding="utf-8"))
    for name, load in cases(given.work).items():
        asked = BenchRequest(
            load=load, adapter="adapter", runs=given.runs, new_tokens=given.new_tokens,
            prompt_tokens=given.prompt_tokens, stock_cpu_path=not name.endswith("without AVX512-BF16"),
            decode="repacked" if name.endswith("repacked") else "auto",
        )  # fmt: skip
        if given.only and name not in given.only:
            continue
        report = bench(asked, say=lambda text: print(text, flush=True))
        print(f"\n{name}\n{report}\n", flush=True)
        found["reports"][name] = report.to_json()
        given.save.parent.mkdir(parents=True, exist_ok=True)
        given.save.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
