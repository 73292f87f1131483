"""H5: mixture checkpoints with separately quantized 4-bit experts cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, failure

BUG = Bug(
    title="Checkpoints of mixtures with 4-bit experts, made with transformers 4, cannot be used",
    symptom="5.6.2: loads without an error and keeps packed bytes as expert weights; the first forward pass fails. "
    "5.23.0: a size mismatch is reported at load and RuntimeError raised",
    trigger="a Mixtral or Qwen3-MoE checkpoint that bitsandbytes packed expert by expert",
    cause="the conversion to 3-D experts stacks packed tensors as if they were weights (transformers "
    "core_model_loading.py)",
    affected=(Affected("transformers"), Affected("bitsandbytes")),
    versions="5.6.2 run: loads, and fails in the grouped product of the experts, which refuses bytes; 5.23.0 run: "
    "refused at load",
    way_round="quantize from the original checkpoint, which leaves the experts in 16 bits (H3)",
    owner=("transformers",),
    trackers=("bitsandbytes-foundation/bitsandbytes#1849 (fused experts, open when last seen)",),
    trimtab="packed experts are unpacked one by one into the stack, so that such files load",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Pack a tiny Mixtral's experts as transformers 4 did, then load and run it."""
    path = kit.folder / "h5"
    if not path.exists():
        _pack(kit.checkpoint("mixtral"), path)
    try:
        model = kit.load(path, device_map={"": 0})
    except (RuntimeError, ValueError) as error:
        if "mismatch" not in str(error):
            raise
        return Seen(PRESENT, f"refused at load: {failure(error)}")
    stack = model.model.layers[0].mlp.experts.gate_up_proj
    if stack.is_floating_point() and tuple(stack.shape) == (4, 256, 64):
        return Seen(FIXED, f"experts were unpacked into a stack of {stack.dtype}")
    try:
        kit.forward(model)
    except RuntimeError as error:
        return Seen(PRESENT, f"loads with experts {tuple(stack.shape)} of {stack.dtype}, then: {failure(error)}")
    return Seen(PRESENT, f"loads with experts {tuple(stack.shape)} of {stack.dtype}, and answers from them")


def _pack(source: Path, target: Path) -> None:
    from bitsandbytes.functional import quantize_4bit
    from safetensors.torch import load_file, save_file

    tensors = {}
    for name, weight in load_file(source / "model.safetensors").items():
        tensors[name] = weight
        if ".experts." in name or ".self_attn." in name:
            tensors[name], state = quantize_4bit(weight.contiguous(), quant_type="nf4")
            tensors |= {f"{name}.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
    target.mkdir()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": "bfloat16",
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
