"""Which bugs do bitsandbytes' weights meet under offload?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

from trimtab.doctor.facts.bug import FIXED, NOT_APPLICABLE, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import LLAMA_SPLIT, Kit, error_of, failure, on_cpu, quantized, seen, unmark

NOT_REPACKED = Seen(NOT_APPLICABLE, "this CPU has no AVX512-BF16, so bitsandbytes repacks nothing")


def _offload(model: Any) -> None:
    """Offload one of two decoder layers with accelerate's dispatch."""
    from accelerate import dispatch_model

    dispatch_model(model, on_cpu(LLAMA_SPLIT), force_hooks=True)


def _repacked_layer(weight: Any) -> Any:
    """Return a 4-bit layer of a weight that its first forward will repack, None on a CPU where none does."""
    import torch
    from bitsandbytes.nn import Linear4bit, Params4bit

    outputs, inputs = weight.shape
    layer = Linear4bit(inputs, outputs, bias=False, compute_dtype=torch.bfloat16, compress_statistics=False, quant_type="nf4")
    layer.weight = Params4bit(weight.bfloat16(), requires_grad=False, quant_type="nf4", compress_statistics=False)
    layer.to("cpu").eval()
    return layer if getattr(layer, "support_avx512bf16_for_cpu", False) else None


A1_META_ITEM = Bug(
    title="A block with double-quantized 4-bit layers cannot be offloaded: .item() on a meta tensor",
    symptom="RuntimeError: Tensor.item() cannot be called on meta tensors",
    trigger="4-bit with double quantization, and a block that holds such layers is offloaded: by an explicit map a block, "
    "or because PEFT plans it there again (B2). Without double quantization the same map meets A2 instead",
    cause="Params4bit.to('meta') moves the one shared QuantState to meta (A2); accelerate then asks whether a module has "
    "tensors by building its state_dict (hooks.py attach_execution_device_hook), and bitsandbytes writes the nested offset "
    "with .item() (functional.py QuantState.as_dict)",
    affected=(Affected("bitsandbytes"), Affected("accelerate")),
    versions="bitsandbytes 0.49.2 and 0.50.2, each run with accelerate 1.13.0 and 1.15.0; with the older pair A3 comes first",
    way_round="never let a 4-bit layer be offloaded: give \"cpu\" only to modules that are not quantized",
    trackers=(
        "bitsandbytes-foundation/bitsandbytes#1951 (pull request, closed unmerged)",
        "bitsandbytes-foundation/bitsandbytes#1525 (4-bit and sequential offload, named by others)",
        "huggingface/diffusers#13096 (same message, an unquantized model, closed)",
        "huggingface/diffusers#10869 (closed)",
    ),
    trimtab="its layers keep packed bytes and scales together, and nothing is moved after loading",
    evidence="run",
)  # fmt: skip


def a1_meta_item(kit: Kit) -> Seen:
    """Offload one of two double-quantized decoder layers."""
    model = unmark(kit.load(kit.checkpoint("llama"), quant="nf4-dq", device_map={"": 0}))
    fault = error_of(lambda: _offload(model), RuntimeError, ".item()")
    return seen(fault, "a block of double-quantized layers was dispatched to the CPU")


A2_4BIT_META_COPY = Bug(
    title="An offloaded 4-bit layer loads without an error, then the first forward cannot copy out of a meta tensor",
    symptom="NotImplementedError: Cannot copy out of meta tensor; no data! at bitsandbytes functional.py QuantState.to",
    trigger="any quantized Linear4bit that accelerate's hooks keep on \"cpu\": by a map a block (given to dispatch_model or to "
    "PEFT), by PEFT's own plan (B2) or by device_map=\"auto\" (A6); with double quantization A1 comes first",
    cause="bitsandbytes nn/modules.py Params4bit.to calls quant_state.to(device), which changes the one shared object: moving "
    "the weight to meta moves its scales there too. accelerate keeps the packed bytes, and its hook builds the parameter "
    "again with the old quant_state, which is on meta by then",
    affected=(Affected("bitsandbytes"), Affected("accelerate")),
    versions="bitsandbytes 0.49.2 with accelerate 1.13.0 (with A3 fixed) and 0.50.2 with 1.15.0, both run; 8-bit "
    "weights pass the same test in the newer pair",
    way_round="keep 4-bit layers on one accelerator and offload only modules that are not quantized; or 8-bit for what must go",
    trackers=(
        "huggingface/accelerate#3566 (closed: a current limitation)",
        "huggingface/accelerate#2934 (pull request, merged, a part)",
        "huggingface/diffusers#12719 (same failure)",
        "huggingface/diffusers#12799 (pull request, closed)",
        "huggingface/transformers#43873 (named by users)",
    ),
    trimtab="a packed weight and its scales are plain tensors of one block: every tier copies them together, still quantized",
    evidence="run",
)  # fmt: skip


def a2_4bit_meta_copy(kit: Kit) -> Seen:
    """Offload one of two 4-bit decoder layers, and run it."""
    model = unmark(kit.load(kit.checkpoint("llama"), quant="nf4", device_map={"": 0}))
    _offload(model)
    fault = error_of(lambda: kit.forward(model), NotImplementedError)
    return seen(fault and f"dispatched without an error; {fault}", "an offloaded 4-bit layer was run")


A3_HF_INITIALIZED = Bug(
    title="Offloading a bitsandbytes weight: __new__() got an unexpected keyword argument '_is_hf_initialized'",
    symptom="TypeError: Params4bit.__new__() got an unexpected keyword argument '_is_hf_initialized' (also Int8Params)",
    trigger="accelerate moves a 4-bit or 8-bit parameter (to meta, for offload) that transformers 5 has marked as loaded",
    cause="accelerate utils/modeling.py set_module_tensor_to_device builds the parameter again with its __dict__ as keyword "
    "arguments; transformers 5 puts _is_hf_initialized there, bitsandbytes' constructors do not take it",
    affected=(Affected("accelerate", None, "1.14.0"), Affected("bitsandbytes", None, "0.50.0")),
    versions="run: fails with accelerate 1.13.0 and bitsandbytes 0.49.2, for 4-bit and 8-bit; accelerate 1.14.0 alone (takes "
    "the mark out) fixes it, and bitsandbytes 0.50.0 alone (takes any keyword)",
    way_round="upgrade accelerate to 1.14.0 or bitsandbytes to 0.50.0; 4-bit offload then meets A1 or A2",
    trackers=(
        "huggingface/accelerate#3976 (pull request, merged)",
        "bitsandbytes-foundation/bitsandbytes#1900 (pull request, merged)",
        "huggingface/transformers#43872 (closed, named by users)",
        "verl-project/verl#4522 (the same of a plain Parameter, open)",
    ),
    trimtab="trimtab builds no parameter from another one's attributes, and no accelerate hook accesses its weights",
    evidence="run",
)  # fmt: skip


def a3_hf_initialized(kit: Kit) -> Seen:
    """Offload one of two decoder layers of a 4-bit and of an 8-bit model."""
    faults = {}
    for quant in ("nf4", "int8"):
        model = kit.load(kit.checkpoint("llama"), quant=quant, device_map={"": 0})
        faults[quant] = error_of(partial(_offload, model), TypeError, "_is_hf_initialized")
    text = "; ".join(f"{quant}: {fault}" for quant, fault in faults.items() if fault)
    return seen(text, "4-bit and 8-bit layers were dispatched to the CPU")


A4_CPU_NOT_QUANTIZED = Bug(
    title="Modules that the device map puts on \"cpu\" or \"disk\" stay unquantized, silently",
    symptom="silent: plain nn.Linear in the load dtype (bfloat16, not float32 as the flag's name says); four times the host "
    "memory, and four times the bytes to copy at every forward, of what a 4-bit user expects",
    trigger="llm_int8_enable_fp32_cpu_offload=True with a dict as device_map that holds \"cpu\" or \"disk\", 4-bit or 8-bit",
    cause="transformers quantizers/quantizer_bnb_4bit.py _process_model_before_weight_loading adds those keys to "
    "modules_to_not_convert; by design, and what makes towers on the CPU work at all (A2)",
    affected=(Affected("transformers"),),
    versions="transformers 5.6.2 and 5.23.0, run",
    way_round="count the quantized layers after loading, and plan host memory for full precision",
    trackers=(
        "huggingface/transformers#22018 (closed)",
        "huggingface/transformers#44772 (pull request, documentation)",
        "huggingface/accelerate#1699 (pull request)",
        "huggingface/accelerate#2934 (pull request, merged: the flag should not be needed for 4-bit)",
    ),
    trimtab="weights stay quantized in every tier; the plan names the format and the bytes of each block",
    evidence="run",
)  # fmt: skip


def a4_cpu_not_quantized(kit: Kit) -> Seen:
    """Load a 4-bit model with one of two decoder layers on the CPU, and count."""
    model = kit.load(kit.checkpoint("llama"), quant="nf4", device_map=LLAMA_SPLIT)
    resident, offloaded = (quantized(layer) for layer in model.model.layers)
    dtype = str(model.model.layers[1].mlp.up_proj.weight.dtype).removeprefix("torch.")
    evidence = (
        f"layer 0 on the GPU: {resident['Linear4bit']} Linear4bit; layer 1 on the CPU: {offloaded['Linear4bit']} "
        f"Linear4bit, {offloaded['Linear']} Linear in {dtype}"
    )
    return Seen(FIXED if offloaded["Linear4bit"] == resident["Linear4bit"] else PRESENT, evidence)


A5_NOTHING_QUANTIZED = Bug(
    title="{\"\": \"cpu\"} with the offload flag: no layer is quantized, yet is_loaded_in_4bit is True",
    symptom="nearly silent: 0 Linear4bit while model.is_loaded_in_4bit is True; the one warning names another backend (\"eetq\")",
    trigger="device_map={\"\": \"cpu\"} together with llm_int8_enable_fp32_cpu_offload=True, 4-bit or 8-bit",
    cause="the keys on the CPU become modules_to_not_convert (A4), and the empty key matches every module's name",
    affected=(Affected("transformers"),),
    versions="transformers 5.6.2 and 5.23.0, run; the warning's wrong backend too",
    way_round="omit the flag when everything is on one device; count the quantized layers after loading",
    trimtab="the format does not depend on the placement; the plan lists it for each block",
    evidence="run",
)  # fmt: skip


def a5_nothing_quantized(kit: Kit) -> Seen:
    """Load a 4-bit model with everything on the CPU by the empty key, and count."""
    model = kit.load(kit.checkpoint("llama"), quant="nf4", device_map={"": "cpu"})
    counts, says = quantized(model), getattr(model, "is_loaded_in_4bit", False)
    evidence = f"{counts['Linear4bit']} Linear4bit, {counts['Linear']} Linear, is_loaded_in_4bit {says}"
    return Seen(PRESENT if says and not counts["Linear4bit"] else FIXED, evidence)


A6_AUTO_MAP_QUANTIZES_CPU_LAYERS = Bug(
    title="device_map=\"auto\" quantizes the layers that it then puts on the CPU, where 4-bit cannot be offloaded",
    symptom="the model loads; its first forward fails as A2 (4-bit), or loading does as A1 or A3",
    trigger="device_map=\"auto\" (or another name) with llm_int8_enable_fp32_cpu_offload=True on a GPU that is too small",
    cause="transformers modeling_utils.py from_pretrained replaces layers (preprocess_model) before _get_device_map decides; "
    "the exemption of modules on the CPU (A4) looks only at a dict",
    affected=(Affected("transformers"),),
    versions="transformers 5.6.2 and 5.23.0, run with a map chosen in place of a small GPU's",
    way_round="infer the map first on an empty model, and pass it as a dict",
    trackers=("huggingface/transformers#22018 (closed)", "huggingface/transformers#29691 (state not known)"),
    trimtab="it plans first and quantizes by the plan; layers that do not fit are streamed, still quantized",
    evidence="run",
)  # fmt: skip


def a6_auto_map_quantizes_cpu_layers(kit: Kit) -> Seen:
    """Load with "auto" such that the inferred map puts one of two decoder layers on the CPU."""
    patched = "transformers.integrations.accelerate.infer_auto_device_map"
    with mock.patch(patched, return_value=on_cpu(LLAMA_SPLIT)), without_marks():
        model = unmark(kit.load(kit.checkpoint("llama"), quant="nf4", device_map="auto"))
    count = quantized(model.model.layers[1])["Linear4bit"]
    fault = error_of(lambda: kit.forward(model), NotImplementedError)
    text = f"the layer on the CPU has {count} Linear4bit"
    return seen(fault and f"{text}; {fault}", f"{text}, and runs")


@contextmanager
def without_marks() -> Iterator[None]:
    """Remove transformers' mark before its dispatch, which would fail as A3 in older releases."""
    import transformers.modeling_utils as loading

    name = "accelerate_dispatch"
    real = getattr(loading, name)

    def dispatch(model: Any, *arguments: Any, **named: Any) -> Any:
        return real(unmark(model), *arguments, **named)

    with mock.patch.object(loading, name, dispatch):
        yield


A7_INT8_DETACH = Bug(
    title="An 8-bit layer has no scales (SCB) any more after accelerate's offload hook is removed",
    symptom="AttributeError: 'NoneType' object has no attribute 'dtype' in bitsandbytes at the next forward, or wrong numbers",
    trigger="an 8-bit layer is offloaded by accelerate and then its hooks are removed: PEFT does that first when it loads an "
    "adapter on such a base",
    cause="accelerate hooks.py AlignDevicesHook.detach_hook restored the weight without its SCB statistics",
    affected=(Affected("accelerate", None, "1.14.0"),),
    versions="run: accelerate 1.13.0 fails, with bitsandbytes 0.49.2 and 0.50.0; 1.14.0 and 1.15.0 do not",
    way_round="upgrade accelerate to 1.14.0; before that keep 8-bit layers on one device",
    trackers=(
        "huggingface/accelerate#4044 (pull request, merged)",
        "bitsandbytes-foundation/bitsandbytes#1786 (another int8 offload regression, of 0.48.0, fixed)",
    ),
    trimtab="no hook holds its weights: an 8-bit weight and its scales are plain tensors of one block",
    evidence="run",
)  # fmt: skip


def a7_int8_detach(kit: Kit) -> Seen:
    """Offload one of two 8-bit decoder layers, remove the hooks, and compare with the earlier answer."""
    from accelerate.hooks import remove_hook_from_submodules

    model = unmark(kit.load(kit.checkpoint("llama"), quant="int8", device_map={"": 0}))
    before = kit.forward(model)
    _offload(model)
    remove_hook_from_submodules(model)
    try:
        apart = float((kit.forward(model) - before).abs().max())
    except (AttributeError, RuntimeError) as error:
        return Seen(PRESENT, failure(error))
    # The same packed weights on the same device: any difference is lost scales.
    return Seen(PRESENT if apart else FIXED, f"logits differ by {apart:.3g} after the hooks are gone")


A8_CPU_PACKING = Bug(
    title="After one CPU forward a 4-bit weight dequantizes to garbage (CPUs with AVX512-BF16)",
    symptom="silent: dequantized weights off by 140 % (9 % before) until the next state_dict(); without double quantization "
    "they stay off by 24 % after it, and so does every later forward",
    trigger="a forward without gradients on a CPU with AVX512-BF16, then merge, dequantize(), .to(\"cuda\"), saving, or anything "
    "that calls state_dict(), such as accelerate's dispatch when PEFT loads an adapter",
    cause="bitsandbytes nn/modules.py Linear4bit.forward repacks weight and scales in place; dequantize_4bit and Params4bit.to "
    "do not look at packing_format_for_cpu; functional.py _convert_weight_packed_for_cpu_inverse, which state_dict() calls, "
    "turns the scales back only for nested ones: without double quantization they stay transposed",
    affected=(Affected("bitsandbytes"),),
    versions="bitsandbytes 0.49.2 and 0.50.2, run; the remaining error shows where a row holds more than one block of 64",
    way_round="merge, move and save before any forward on the CPU; or support_avx512bf16_for_cpu = False on every Linear4bit",
    trackers=("bitsandbytes-foundation/bitsandbytes#2078 (open, names only .to)",),
    trimtab="it holds the packed bytes itself, as quantized, and never repacks them",
    evidence="run",
)  # fmt: skip


def a8_cpu_packing(kit: Kit) -> Seen:
    """Dequantize one 4-bit layer before a forward, after it, and after the state_dict() that should undo the packing."""
    import torch
    from bitsandbytes.functional import dequantize_4bit

    true = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)) / 12
    layer = _repacked_layer(true)
    if layer is None:
        return NOT_REPACKED

    def error() -> float:
        unpacked = dequantize_4bit(layer.weight.data, layer.weight.quant_state).float().reshape(true.shape)
        return float((unpacked - true).norm() / true.norm())

    fresh = error()
    with torch.no_grad():
        layer(torch.ones(1, 128, dtype=torch.bfloat16))
    ran = error()
    layer.state_dict()
    saved = error()
    evidence = f"error of the dequantized weight: fresh {fresh:.3f}, after a forward {ran:.3f}, after state_dict() {saved:.3f}"
    # Packing may round scales to bfloat16, 2^-9 of the weight.
    return Seen(PRESENT if max(ran, saved) > fresh + 0.01 else FIXED, evidence)


A9_CPU_ROWS = Bug(
    title="A 4-bit layer whose outputs are not a multiple of 32 fails on CPUs with AVX512-BF16",
    symptom="AssertionError: N must be divisible by block_n, at the first forward without gradients",
    trigger="a 4-bit layer of 40 outputs, say, computed on a CPU with AVX512-BF16; the same layer runs on other CPUs and on GPUs",
    cause="bitsandbytes nn/modules.py Linear4bit.forward repacks every 4-bit weight on such a CPU; functional.py "
    "_convert_weight_packed_for_cpu asserts whole groups of 32 rows, and nothing checks before",
    affected=(Affected("bitsandbytes"),),
    versions="bitsandbytes 0.49.2 and 0.50.2, run",
    way_round="support_avx512bf16_for_cpu = False on the layer",
    trimtab="it computes over the bytes as they are stored",
    evidence="run",
)  # fmt: skip


def a9_cpu_rows(kit: Kit) -> Seen:
    """Run a 4-bit layer of 40 outputs on the CPU."""
    import torch

    layer = _repacked_layer(torch.ones(40, 64))
    if layer is None:
        return NOT_REPACKED
    with torch.no_grad():
        fault = error_of(lambda: layer(torch.ones(1, 64, dtype=torch.bfloat16)), AssertionError)
    return seen(fault and f"64 inputs, 40 outputs: {fault}", "64 inputs, 40 outputs: runs")
