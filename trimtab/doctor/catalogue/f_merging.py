"""Which merges fail or are wrong?"""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, NOT_APPLICABLE, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, error_of, failure, installed_source, seen
from trimtab.stock.load import without_repacking

F1_4BIT_MERGE = Bug(
    title="merge_and_unload on a 4-bit base gives answers of neither the adapter nor the base",
    symptom="UserWarning \"Merge lora module to 4-bit linear may get different generations due to rounding errors\", "
    "once a layer, and different answers",
    trigger="merging an adapter into a base loaded in 4-bit",
    cause="PEFT lora/bnb.py dequantizes, adds, and quantizes again: a LoRA delta is smaller than a step of the 4-bit "
    "grid",
    affected=(Affected("peft"), Affected("bitsandbytes")),
    versions="by design; peft 0.19.1 and 0.21.2 run on a tiny model; on E2B, 525 warnings and three of three prompts "
    "different",
    way_round="merge in bfloat16 from the original checkpoint and quantize the result last",
    owner=("peft",),
    trackers=(
        "huggingface/peft#2321 (closed, by design)",
        "huggingface/peft#2105 (named by others)",
        "huggingface/peft#1388 (named by others)",
        "huggingface/transformers#31293 (closed)",
    ),
    trimtab="an adapter is never merged into quantized weights; it runs in addition to them",
    evidence="run",
)  # fmt: skip


def f1_4bit_merge(kit: Kit) -> Seen:
    """Compare logits of adapter and merged model, in bfloat16 and in 4-bit."""
    path = kit.checkpoint("llama")
    adapter = kit.adapter(path, targets=["q_proj", "v_proj", "up_proj", "down_proj"])
    errors = {}
    for quant in ("none", "nf4"):
        base, beside, merged = (kit.load(path, quant=quant, device_map={"": 0}) for _ in range(3))
        expected = kit.forward(kit.peft(beside, adapter))
        logits = kit.forward(without_repacking(kit.peft(merged, adapter).merge_and_unload()))
        errors[quant] = float((logits - expected).abs().max() / (expected - kit.forward(base)).abs().max())
    # bfloat16 rounds each sum once; 4-bit must lose at least several times that to count.
    state = PRESENT if errors["nf4"] > 4 * errors["none"] else FIXED
    return Seen(state, f"merging misses {errors['nf4']:.0%} of the adapter's effect in 4-bit, {errors['none']:.0%} in bfloat16")


F2_DEQUANT_MERGE = Bug(
    title="dequantize() on a PEFT model, then a merge: 'Parameter' object has no attribute 'quant_state'",
    symptom="AttributeError: 'Parameter' object has no attribute 'quant_state'",
    trigger="peft_model.dequantize() and then merge_and_unload()",
    cause="transformers replaces the base layer under PEFT's lora.Linear4bit, which goes on to read "
    "weight.quant_state (lora/bnb.py merge)",
    affected=(Affected("peft"), Affected("transformers"), Affected("bitsandbytes")),
    versions="peft 0.19.1 and 0.21.2 run",
    way_round="base.dequantize() first, then load the adapter, then merge: that works in both",
    owner=("peft", "transformers"),
    trimtab="a merge starts from the original checkpoint, not from a loaded model",
    evidence="run",
)  # fmt: skip


def f2_dequant_merge(kit: Kit) -> Seen:
    """Dequantize a 4-bit model that has an adapter, then merge."""
    path = kit.checkpoint("llama")
    adapter = kit.adapter(path, targets=["q_proj"])
    model = kit.peft(kit.load(path, quant="nf4", device_map={"": 0}), adapter)
    model.dequantize()
    return seen(error_of(lambda: model.merge_and_unload(), AttributeError, "quant_state"), "a dequantized PEFT model was merged")


F3_OTHER_BACKENDS = Bug(
    title="Other quantizers: no \"cpu\" or \"disk\" in a device map, no merge",
    symptom="ValueError about CPU or disk offload from HQQ, quanto and torchao; TypeError or no merge method for "
    "LoRA on torchao int4, GPTQ, AWQ and AQLM",
    trigger="a LoRA on, or a split of, a model quantized by torchao, HQQ, quanto, GPTQ, AWQ or AQLM",
    cause="transformers quantizers/quantizer_hqq.py, quantizer_quanto.py and quantizer_torchao.py refuse such maps; "
    "PEFT lora/torchao.py re-quantizes only with get_apply_tensor_subclass, and its GPTQ, AWQ and AQLM layers have "
    "no merge",
    affected=(Affected("transformers"), Affected("peft")),
    versions="read in transformers 5.6.2 and 5.23.0 and in peft 0.19.1 and 0.21.2; accelerate moves torchao weights "
    "from 1.14.0 on (accelerate#3973)",
    way_round="bitsandbytes for a base that carries adapters, all of it on one device",
    trackers=("huggingface/accelerate#3973 (merged)",),
    trimtab="files of GPTQ and AWQ are read, placed anywhere, still packed, and merged to 16 bits; torchao, HQQ, quanto and AQLM "
    "are refused by name",
    evidence="source",
)  # fmt: skip
# Distribution, transformers' quantizer, PEFT's layer.
BACKENDS = (
    ("torchao", "quantizer_torchao", "torchao"), ("hqq", "quantizer_hqq", "hqq"),
    ("optimum-quanto", "quantizer_quanto", ""), ("gptqmodel", "quantizer_gptq", "gptq"), ("autoawq", "quantizer_awq", "awq"),
    ("aqlm", "quantizer_aqlm", "aqlm"),
)  # fmt: skip


def f3_other_backends(kit: Kit) -> Seen:
    """Read the refusals of the installed backends in their packages."""
    installed = [row for row in BACKENDS if kit.version(row[0]) is not None]
    if not installed:
        return Seen(NOT_APPLICABLE, f"none of {', '.join(row[0] for row in BACKENDS)} is installed")
    limits = []
    for name, quantizer, layer in installed:
        place = installed_source(f"transformers.quantizers.{quantizer}", "in device_map.values()")
        if place is not None:
            limits.append(f"{name} checks maps for cpu and disk ({place[0]}:{place[1]})")
        module = f"peft.tuners.lora.{layer}"
        if layer and installed_source(module, "class ") and not installed_source(module, "def merge("):
            limits.append(f"PEFT cannot merge into {name}")
    return Seen(PRESENT, "; ".join(limits)) if limits else Seen(FIXED, "none of the known limits was found in the sources")


F4_MERGE_MEMORY = Bug(
    title="Merging with PEFT needs the whole base in memory",
    symptom="out of memory while merging models larger than host memory, or machines that swap",
    trigger="merge_and_unload of a large base, in bfloat16 as F1 advises",
    cause="PEFT tuners_utils.py _unload_and_optionally_merge works on loaded modules; a module without data is "
    "merged without an error and stays without data",
    affected=(Affected("peft"),),
    versions="peft 0.19.1 and 0.21.2 run: merging into weights that are not in memory does nothing, silently",
    way_round="a tool that merges the files shard by shard",
    trackers=(
        "huggingface/peft#1939 (closed)",
        "unslothai/unsloth#432 (crash, reported by others)",
        "axolotl-ai-cloud/axolotl#3095 (shard by shard, merged)",
    ),
    trimtab="a merge works from the checkpoint's files, one tensor in memory at a time",
    evidence="run",
)  # fmt: skip


def f4_merge_memory(kit: Kit) -> Seen:
    """Merge an adapter into a base whose weights were never read."""
    import torch
    import transformers

    path = kit.checkpoint("llama")
    adapter = kit.adapter(path, targets=["q_proj"])
    with torch.device("meta"):
        base = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(path))
    model = kit.peft(base, adapter)
    try:
        merged = model.merge_and_unload()
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return Seen(PRESENT, f"a base that is not in memory is refused: {failure(error)}")
    weight = merged.model.layers[0].self_attn.q_proj.weight
    if weight.is_meta:
        return Seen(PRESENT, "a base that is not in memory is merged without an error, and holds no data afterwards")
    return Seen(FIXED, "weights were read for the merge")


F5_SAFE_MERGE_BIAS = Bug(
    title="safe_merge=True with lora_bias on a bitsandbytes base always fails",
    symptom="RuntimeError: Boolean value of Tensor with more than one value is ambiguous; by then the weight has "
    "been replaced already",
    trigger="merge_and_unload(safe_merge=True) of an adapter made with lora_bias=True, on a 4-bit or 8-bit base with "
    "biases",
    cause="PEFT lora/bnb.py merge asks \"not torch.isfinite(bias_data)\" without .all(), after it has set the new "
    "weight",
    affected=(Affected("peft"), Affected("bitsandbytes")),
    versions="peft 0.19.1 and 0.21.2 run, 4-bit and 8-bit",
    way_round="merge without safe_merge and check for NaN yourself; mind I10",
    owner=("peft",),
    trackers=(
        "huggingface/peft#3710 (open when last seen)",
        "huggingface/peft#3779 (pull request, open)",
        "huggingface/peft#3757 (pull request, open)",
    ),
    trimtab="an adapter is never merged into quantized weights; lora_bias runs in addition to them",
    evidence="run",
)  # fmt: skip


def f5_safe_merge_bias(kit: Kit) -> Seen:
    """Merge an adapter with a bias, safely, into a 4-bit base with biases."""
    path = kit.checkpoint("llama", attention_bias=True)
    adapter = kit.adapter(path, targets=["q_proj"], lora_bias=True)
    model = kit.peft(kit.load(path, quant="nf4", device_map={"": 0}), adapter)
    fault = error_of(lambda: model.merge_adapter(safe_merge=True), RuntimeError, "Boolean value of Tensor")
    return seen(fault, "an adapter with a bias was merged safely into a 4-bit base")
