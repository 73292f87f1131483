"""I25: PEFT puts no adapter on packed integers of compressed-tensors until the model has run once."""

from __future__ import annotations

from trimtab.doctor.facts.bug import NOT_APPLICABLE, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, adapted, quiet

BUG = Bug(
    title="PEFT puts no adapter on a compressed-tensors checkpoint (W4A16) until the model has run once",
    symptom="AttributeError: 'Linear' object has no attribute 'weight', from get_peft_model and PeftModel.from_pretrained",
    trigger="a checkpoint of quant_method compressed-tensors in pack-quantized (RedHat's W4A16, Gemma 4's qat-w4a16-ct), loaded by "
    "transformers as it is, and PEFT on its linear layers",
    cause="compressed-tensors replaces weight by weight_packed in the same nn.Linear, and makes weight again in the first forward; "
    "PEFT's LoraLayer reads weight when it wraps the layer",
    affected=(Affected("peft"), Affected("transformers")),
    versions="transformers 5.23.0 with PEFT 0.21.2 and compressed-tensors 0.20.0, run on a CPU: LoRA and DoRA",
    way_round="load with CompressedTensorsConfig(dequantize=True), or run the model once before the adapter is attached: both ways "
    "its weights take 16 bits",
    trimtab="it reads these files packed, and an adapter is added to each product",
    evidence="run",
)  # fmt: skip
SCHEME = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def probe(kit: Kit) -> Seen:
    """Make one layer as transformers does for such a file, and put a LoRA on it."""
    from torch import nn

    try:
        from transformers import CompressedTensorsConfig
        from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer

        groups = {"g": {"targets": ["Linear"], "weights": SCHEME}}
        config = CompressedTensorsConfig(config_groups=groups, format="pack-quantized", quantization_status="compressed")
        quantizer = CompressedTensorsHfQuantizer(config)
    except ImportError as exc:
        return Seen(NOT_APPLICABLE, str(exc).partition("\n")[0])
    model = nn.Sequential(nn.Linear(32, 32))
    with quiet():
        quantizer.validate_environment()
        quantizer._process_model_before_weight_loading(model)
    return adapted(model, AttributeError)
