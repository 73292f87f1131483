"""Which layers does PEFT adapt, save or merge wrongly?"""

from __future__ import annotations

from typing import Any

from trimtab.doctor.facts.bug import FIXED, NOT_APPLICABLE, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, error_of, seen


def _adapted(model: Any, refusal: type[Exception]) -> Seen:
    """Put a LoRA on the first layer of a Sequential: PEFT adapts a layer of its class, or refuses it with this error."""
    import peft

    fault = error_of(lambda: peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0"])), refusal)
    return seen(fault, "PEFT adapts the layer")


I2_MOE_LORA_LOAD = Bug(
    title="No LoRA loads on Mixtral or Qwen3-MoE: unexpected keyword argument 'distributed_operation'",
    symptom="TypeError: WeightConverter.__init__() got an unexpected keyword argument 'distributed_operation'",
    trigger="any adapter, on attention alone too, on a model whose experts transformers converts at load; through "
    "PEFT and through transformers load_adapter",
    cause="PEFT utils/transformers_weight_conversion.py build_peft_weight_mapping gives WeightConverter arguments "
    "that its __init__ does not take",
    affected=(Affected("peft", fixed_in="0.20.0"),),
    versions="peft 0.19.1 with transformers 5.6.2 run, fails; peft 0.21.2 with 5.23.0 run, loads; 0.20.0 has the "
    "cure (read)",
    way_round="a newer PEFT",
    owner=("peft", "transformers"),
    trackers=(
        "huggingface/peft#3372 (closed)",
        "huggingface/peft#3553 (the attribute of later transformers, pull request, closed)",
    ),
    trimtab="it reads adapter files itself",
    evidence="run",
)  # fmt: skip


def i2_moe_lora_load(kit: Kit) -> Seen:
    """Load an adapter on the attention of a tiny Mixtral."""
    path = kit.checkpoint("mixtral")
    adapter = kit.adapter(path, targets=["q_proj"])
    base = kit.load(path)
    fault = error_of(lambda: kit.peft(base, adapter), (AttributeError, TypeError), "distributed_operation")
    return seen(fault, "an adapter on attention was loaded on a tiny Mixtral")


I3_MOE_TARGETS = Bug(
    title="gate_proj, up_proj and down_proj on Qwen3-MoE become adapters on 3-D parameters, which refuse DoRA and "
    "lora_bias",
    symptom="ValueError: lora.ParamWrapper does not work with use_dora=True (or lora_bias=True). Without them: "
    "target_modules is emptied, target_parameters filled, the rank of gate_up_proj doubled, and newer PEFT warns "
    "that \"rank_pattern keys did not match any targeted module and were ignored\" although they were used",
    trigger="target_modules with MLP names on a model whose experts are fused in transformers 5",
    cause="PEFT utils/transformers_weight_conversion.py rewrites the configuration; lora/layer.py ParamWrapper "
    "supports plain LoRA alone",
    affected=(Affected("peft"),),
    versions="peft 0.19.1 and 0.21.2 run (older than expected); the wrong warning is in 0.21.2 (run) and not in "
    "0.20.0 (read)",
    way_round="target attention alone, or plain LoRA on experts",
    trackers=("huggingface/peft#2638 (adapters on parameters, merged)", "huggingface/peft#3112 (closed)"),
    trimtab="pairs of single experts are applied to their part of the stack, at the rank and scale of the file",
    evidence="run",
)  # fmt: skip


def i3_moe_targets(kit: Kit) -> Seen:
    """Create a PEFT DoRA adapter on the MLP of a tiny Qwen3-MoE."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["gate_proj", "up_proj", "down_proj"], use_dora=True)
    base = kit.load(kit.checkpoint("qwen3_moe"))
    fault = error_of(lambda: get_peft_model(base, config), ValueError, "ParamWrapper")
    return seen(fault, "DoRA was put on the MLP of a tiny Qwen3-MoE")


I4_INT8_DORA_SCALE = Bug(
    title="DoRA on an 8-bit base works once on the CPU: 'NoneType' object has no attribute 'dtype'",
    symptom="AttributeError: 'NoneType' object has no attribute 'dtype' at the second forward pass",
    trigger="an adapter with use_dora=True on an 8-bit base, run on the CPU",
    cause="bitsandbytes moves the scale SCB from the weight to the layer's state in the first forward pass; PEFT "
    "lora/dora.py dequantizes with the weight's own SCB, which is None by then",
    affected=(Affected("peft"), Affected("bitsandbytes")),
    versions="peft 0.19.1 and 0.21.2 with bitsandbytes 0.49.2 and 0.50.2 run on the CPU; not tried on CUDA",
    way_round="4-bit, or a plain LoRA",
    trimtab="scales stay with their weight, and norms for DoRA are computed once, when the adapter is attached",
    evidence="run",
)  # fmt: skip


def i4_int8_dora_scale(kit: Kit) -> Seen:
    """Run an 8-bit model with a DoRA adapter twice."""
    path = kit.checkpoint("llama")
    adapter = kit.adapter(path, targets=["q_proj"], use_dora=True)
    model = kit.peft(kit.load(path, quant="int8", device_map={"": 0}), adapter)
    kit.forward(model)
    fault = error_of(lambda: kit.forward(model), AttributeError, "NoneType")
    return seen(fault and f"the second forward pass: {fault}", "a second forward pass ran")


I5_LORA_ONLY_BIAS = Bug(
    title="bias=\"lora_only\" trains biases of the base that save_pretrained leaves out",
    symptom="silent: the file has no bias, and a reloaded adapter answers otherwise than the trained one",
    trigger="LoraConfig(bias=\"lora_only\") on layers with biases, then save_pretrained",
    cause="PEFT utils/save_and_load.py looks for \"<module>.bias\", and the trained one is "
    "\"<module>.base_layer.bias\"",
    affected=(Affected("peft", fixed_in="0.21.0"),),
    versions="peft 0.19.1 run, nothing saved; 0.21.2 run, saved; 0.20.0 has the old code, 0.21.0 the new (read in "
    "the wheels)",
    way_round="a newer PEFT, or bias=\"all\"",
    trackers=("huggingface/peft#3306 (closed)", "huggingface/peft#3490 (the fix)"),
    trimtab="it trains nothing; it says when a configuration requests biases that the file does not hold, and "
    "refuses full biases",
    evidence="run",
)  # fmt: skip


def i5_lora_only_bias(kit: Kit) -> Seen:
    """Save an adapter with bias="lora_only" on a model with biases."""
    from safetensors.torch import load_file

    path = kit.checkpoint("llama", attention_bias=True)
    adapter = kit.adapter(path, targets=["q_proj"], bias="lora_only")
    saved = sum(key.endswith(".bias") for key in load_file(adapter / "adapter_model.safetensors"))
    return Seen(FIXED if saved else PRESENT, f"{saved} of 2 biases of the adapted layers are in the file")


I6_SAVE_BY_ENDING = Bug(
    title="modules_to_save=[\"norm\"] also takes input_layernorm: names are compared by their last letters",
    symptom="silent: copies of modules that the user did not name are trained and saved; or TypeError for a word that a LoRA "
    "module ends with (\"A\")",
    trigger="modules_to_save with a short name",
    cause="PEFT utils/other.py _set_trainable asks name.endswith(word), without a dot before it; target_modules has "
    "the dot",
    affected=(Affected("peft"),),
    versions="peft 0.19.1 and 0.21.2 run",
    way_round="write a longer ending, \"model.norm\"",
    trackers=("huggingface/peft#1917 (closed)", "huggingface/peft#3755 (open when last seen)"),
    trimtab="trimtab applies the same rule to a configuration, so it reads what PEFT saved",
    evidence="run",
)  # fmt: skip


def i6_save_by_ending(kit: Kit) -> Seen:
    """Save the final norm of a tiny Llama with PEFT."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["norm"])
    model = get_peft_model(kit.load(kit.checkpoint("llama")), config)
    wrapped = [name for name, module in model.named_modules() if type(module).__name__ == "ModulesToSaveWrapper"]
    others = [name for name in wrapped if not name.endswith(".norm")]
    if others:
        return Seen(PRESENT, f"modules_to_save=['norm'] takes {len(wrapped)} modules, such as {others[0]}")
    return Seen(FIXED, f"modules_to_save=['norm'] takes {', '.join(wrapped)}")


I10_MERGE_BIAS_SCALE = Bug(
    title="Merging an adapter with lora_bias into a bitsandbytes base adds the bias without its scale",
    symptom="silent: the merged bias is off by the factor lora_alpha / r; unmerging hides it, because it forgets the "
    "same factor",
    trigger="an adapter with lora_bias=True merged into a 4-bit or 8-bit base with biases",
    cause="PEFT lora/bnb.py merge adds lora_B.bias; lora/layer.py and the forward pass multiply it by the scale",
    affected=(Affected("peft"), Affected("bitsandbytes")),
    versions="peft 0.19.1 and 0.21.2 run, 4-bit and 8-bit",
    way_round="merge in full precision",
    owner=("peft",),
    trackers=("huggingface/peft#3741 (open when last seen)", "huggingface/peft#3757 (pull request, open)"),
    trimtab="an adapter is never merged into quantized weights; its bias is scaled as PEFT's forward "
    "pass does",
    evidence="run",
)  # fmt: skip


def i10_merge_bias_scale(kit: Kit) -> Seen:
    """Merge an adapter with bias 1 and scale 2, and check the resulting bias."""
    import torch

    path = kit.checkpoint("llama", attention_bias=True)
    adapter = kit.adapter(path, targets=["q_proj"], lora_bias=True)
    added = {}
    for quant in ("none", "nf4"):
        model = kit.peft(kit.load(path, quant=quant, device_map={"": 0}), adapter)
        layer = model.base_model.model.model.layers[0].self_attn.q_proj
        with torch.no_grad():
            layer.lora_B["default"].bias.fill_(1.0)
        before = layer.base_layer.bias.detach().clone()
        layer.merge()
        added[quant] = float((layer.base_layer.bias - before).float().mean())
    # bfloat16 biases near 1 are rounded to 1/128.
    state = PRESENT if abs(added["nf4"] - added["none"]) > 0.1 else FIXED
    return Seen(state, f"a bias of 1 with scale 2 adds {added['none']:.1f} to a plain layer and {added['nf4']:.1f} to a 4-bit one")


I19_PACKED_LINEAR = Bug(
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


def i19_packed_linear(kit: Kit) -> Seen:
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
        try:
            adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
            before = adapted(x)
            after = adapted.merge_and_unload()(x)
        except Exception as exc:
            return Seen(PRESENT, f"{type(exc).__name__}: {exc}")
    away = float((after - before).abs().max())
    return Seen(FIXED if away < 1e-2 else PRESENT, f"outputs differ by {away:.2g} after the merge")


I20_GGUF_LINEAR = Bug(
    title="PEFT puts no adapter on a GGUF file that transformers keeps packed",
    symptom="ValueError: Target module GgufLinear(in_features=..., out_features=..., ggml_type=...) is not supported",
    trigger="a GGUF checkpoint loaded with transformers without dequantizing it, and PEFT on its linear layers",
    cause="integrations/gguf/utils.py GgufLinear is an nn.Module and no nn.Linear, and PEFT has no dispatcher for it",
    affected=(Affected("peft"),),
    versions="transformers 5.23.0 with PEFT 0.21.2, run; transformers 5.20.0 has the class, 5.16.0 has not (read)",
    way_round="load the file dequantized (in 16 bits), or use the safetensors files of the same model",
    owner=("peft", "transformers"),
    trimtab="it reads the packed weights itself, and an adapter is added to each product",
    evidence="run",
)  # fmt: skip


def i20_gguf_linear(kit: Kit) -> Seen:
    """Put a LoRA on one packed layer of type Q4_0."""
    from torch import nn

    try:
        from transformers.integrations.gguf.utils import GgufLinear
    except ImportError as exc:
        return Seen(NOT_APPLICABLE, str(exc))
    return _adapted(nn.Sequential(GgufLinear(32, 8, 2)), ValueError)


I22_FP8_LINEAR = Bug(
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


def i22_fp8_linear(kit: Kit) -> Seen:
    """Put a LoRA on one FP8 layer of one block, and merge it."""
    from torch import nn

    try:
        import peft
        from transformers.integrations.finegrained_fp8 import FP8Linear
    except ImportError as exc:
        return Seen(NOT_APPLICABLE, str(exc))
    model = nn.Sequential(FP8Linear(128, 128, block_size=(128, 128)))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    fault = error_of(adapted.merge_and_unload, RuntimeError)
    return seen(fault, "PEFT merges into the layer")


I23_NVFP4_LINEAR = Bug(
    title="PEFT puts no adapter on layers that transformers packs in NVFP4",
    symptom="ValueError: Target module NVFP4Linear(in_features=..., out_features=..., nvfp4) is not supported",
    trigger="a model loaded with transformers' NVFP4 quantizer, and PEFT on its linear layers",
    cause="integrations/nvfp4.py NVFP4Linear is an nn.Module and no nn.Linear, and PEFT has no dispatcher for it",
    affected=(Affected("peft"),),
    versions="transformers 5.23.0 with PEFT 0.21.2, run on a CPU with an empty layer",
    way_round="use the checkpoint in 16 bits, in FP8, or bitsandbytes' 4 bits",
    owner=("peft", "transformers"),
    trimtab="it reads NVFP4 files packed, and an adapter is added to each product",
    evidence="run",
)  # fmt: skip


def i23_nvfp4_linear(kit: Kit) -> Seen:
    """Put a LoRA on one layer. Its constructor needs a kernel of a GPU, so that it is made without its buffers."""
    from torch import nn

    try:
        from transformers.integrations.nvfp4 import NVFP4Linear
    except ImportError as exc:
        return Seen(NOT_APPLICABLE, str(exc))
    layer = NVFP4Linear.__new__(NVFP4Linear)
    nn.Module.__init__(layer)
    layer.in_features = layer.out_features = 32
    return _adapted(nn.Sequential(layer, nn.Linear(2, 2)), ValueError)


I24_SHARED_EXPERTS = Bug(
    title="LoRA on the shared experts of GLM-4.5 is put on its routed experts, silently",
    symptom="silent: no parameter with lora_ in its name is below shared_experts, target_modules is emptied and "
    "target_parameters filled",
    trigger="target_modules, as names or a pattern, with shared_experts.down_proj, or with shared_experts.gate_proj and up_proj, "
    "on GLM-4.5 (glm4_moe) in transformers 5; gate_proj without up_proj is refused with an error",
    cause="PEFT utils/transformers_weight_conversion.py finds the names of the experts' former layers anywhere in a target",
    affected=(Affected("peft"),),
    versions="peft 0.21.2 with transformers 5.23.0, run",
    way_round="leave shared experts out: names and patterns in target_modules were both tried",
    trimtab="it applies what a file names: pairs below shared_experts to these layers, those of stacks to the stacks",
    evidence="run",
)  # fmt: skip


def i24_shared_experts(kit: Kit) -> Seen:
    """Put a LoRA on the shared expert of a tiny GLM-4.5."""
    try:
        from peft import LoraConfig, get_peft_model
        from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
    except ImportError as exc:
        return Seen(NOT_APPLICABLE, str(exc))
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 16)
    sizes |= {"num_hidden_layers": 1, "first_k_dense_replace": 0, "n_routed_experts": 2, "num_experts_per_tok": 1, "vocab_size": 8}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**sizes))
    made = get_peft_model(model, LoraConfig(r=2, target_modules=["shared_experts.down_proj"]))
    names = [name for name, _ in made.named_parameters() if "lora_A" in name]
    if names and not any(".shared_experts." in name for name in names):
        return Seen(PRESENT, f"the adapter is {names[0]}")
    return Seen(FIXED, "the adapter is on the shared expert")


I25_COMPRESSED_LINEAR = Bug(
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


def i25_compressed_linear(kit: Kit) -> Seen:
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
    quantizer.validate_environment()
    quantizer._process_model_before_weight_loading(model)
    return _adapted(model, AttributeError)
