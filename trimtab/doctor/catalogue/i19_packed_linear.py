"""I19: PEFT takes Gemma's packed linear layers for plain ones, and merging an adapter into them fails."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, NOT_APPLICABLE, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, quiet

BUG = Bug(
    title="An adapter cannot be merged into a Gemma 4 mobile checkpoint: PEFT adds floats to packed bytes",
    symptom="RuntimeError: The size of tensor a (8) must match the size of tensor b (16) at non-singleton dimension 1 (2 and 4 "
    "bits), or RuntimeError: result type Float can't be cast to the desired output type Char (8 bits); DoRA and any code that "
    "reads .weight see packed bytes",
    trigger="a checkpoint with transformers' GemmaQuantizationConfig, a LoRA on its linear layers, merge_and_unload or DoRA",
    cause="integrations/gemma_quant.py QuantizedLinear is a subclass of nn.Linear whose weight holds packed integers; PEFT "
    "lora/layer.py dispatches by isinstance and merges with weight.data += delta",
    affected=(Affected("transformers", since="5.12.0"),),
    versions="transformers 5.23.0 with PEFT 0.21.2, run; transformers 5.12.0 has the class, 5.8.0 has not (read)",
    way_round="keep the adapter unmerged; or dequantize each layer (layer._dequantize_weights()) into a plain Linear first",
    owner=("transformers", "peft"),
    trimtab="it reads these files packed, and merges into the dequantized weights, 16 bits",
    evidence="run",
)  # fmt: skip


def probe(kit: Kit) -> Seen:
    """Merge a LoRA into one packed layer of 8 bits, and see whether its output stays."""
    import torch
    from torch import nn

    try:
        import peft
        from transformers.integrations.gemma_quant import QuantizedLinear
    except ImportError as exc:
        return Seen(NOT_APPLICABLE, str(exc))
    layer = QuantizedLinear(16, 8, num_bits=8)
    model = nn.Sequential(layer)
    torch.manual_seed(0)
    with torch.no_grad():
        layer.weight.copy_(torch.randint(-100, 100, (8, 16), dtype=torch.int8))
        layer.weight_scale.fill_(0.01)
        x = torch.randn(2, 16)
        with quiet():
            try:
                adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
                before = adapted(x)
                after = adapted.merge_and_unload()(x)
            except Exception as exc:
                return Seen(PRESENT, f"{type(exc).__name__}: {exc}")
    away = float((after - before).abs().max())
    return Seen(FIXED if away < 1e-2 else PRESENT, f"outputs differ by {away:.2g} after the merge")
