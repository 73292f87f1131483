"""I22: PEFT takes FP8 linear layers for plain ones; merging an adapter into them and DoRA fail."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, NOT_APPLICABLE, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, quiet

BUG = Bug(
    title="An adapter runs on an FP8 checkpoint, but cannot be merged into it, and DoRA cannot be attached",
    symptom="RuntimeError: Promotion for Float8 Types is not supported, attempted to promote Float8_e4m3fn and Float (merge); "
    'NotImplementedError: "mul_cpu_reduced_float" not implemented for \'Float8_e4m3fn\' (DoRA)',
    trigger="a checkpoint of quant_method fp8, fbgemm_fp8 or compressed-tensors float-quantized that transformers keeps in FP8, a "
    "LoRA on its linear layers, merge_and_unload or DoRA",
    cause="FP8Linear, FbgemmFp8Linear and CompressedTensorsFP8Linear are subclasses of nn.Linear with separate scales; "
    "PEFT lora/layer.py dispatches by isinstance and merges with weight.data += delta",
    affected=(Affected("transformers"), Affected("peft")),
    versions="transformers 5.23.0 with PEFT 0.21.2, run on a CPU with the layers alone",
    way_round="keep the adapter unmerged, without DoRA; or load with dequantize=True",
    trimtab="it reads these files packed, applies LoRA and DoRA, and merges into the dequantized weights, 16 bits",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Put a LoRA on one FP8 layer of one block, and merge it."""
    from torch import nn

    try:
        import peft
        from transformers.integrations.finegrained_fp8 import FP8Linear
    except ImportError as exc:
        return Seen(NOT_APPLICABLE, str(exc))
    model = nn.Sequential(FP8Linear(128, 128, block_size=(128, 128)))
    with quiet():
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
        try:
            adapted.merge_and_unload()
        except RuntimeError as exc:
            return Seen(PRESENT, f"RuntimeError: {str(exc)[:120]}")
    return Seen(FIXED, "PEFT merges into the layer")
