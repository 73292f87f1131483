"""Which checkpoints load wrongly?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trimtab.doctor.facts.bug import FIXED, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import OFFLOAD, Kit, error_of, failure, frames, quantized
from trimtab.stock.load import quantization

H1_QUANTIZED_BLIND = Bug(
    title="A 4-bit or 8-bit Gemma 4 ignores the image",
    symptom="silent: halving every pixel changes no logit",
    trigger="images given to a Gemma 4 whose vision tower is quantized by bitsandbytes",
    cause="transformers modeling_gemma4.py Gemma4VisionPatchEmbedder.forward casts pixels to "
    "input_proj.weight.dtype, which is uint8 or int8 for a packed weight",
    affected=(Affected("transformers", fixed_in="5.13.0"), Affected("bitsandbytes")),
    versions="5.6.2 run, images ignored in 4-bit and 8-bit; 5.23.0 run, images used; the cast is still in 5.9.0 and no longer in "
    "5.13.0 (read in the wheels)",
    way_round="a newer transformers, or llm_int8_skip_modules with patch_embedder.input_proj and the head (H4)",
    owner=("transformers",),
    trackers=(
        "huggingface/transformers#46932 (closed)",
        "huggingface/transformers#46933 (merged)",
        "huggingface/transformers#46904 (the same in gemma4_unified, merged)",
    ),
    trimtab="its quantized layers report the computing dtype, so pixels are never cast to integers",
    evidence="run",
)  # fmt: skip


def h1_quantized_blind(kit: Kit) -> Seen:
    """Run a 4-bit Gemma 4 with an image, and with the same image at half brightness."""
    import torch

    model = kit.load(kit.checkpoint(), quant="nf4", device_map={"": 0})
    inputs = kit.inputs(model, "image")
    with torch.no_grad():
        bright = model(**inputs).logits
        dark = model(**inputs | {"pixel_values": inputs["pixel_values"] / 2}).logits
    change = float((bright - dark).abs().max())
    return Seen(FIXED if change else PRESENT, f"half the brightness changes the logits of a 4-bit model by up to {change:.2f}")


H2_VISION_FP32 = Bug(
    title="The vision tower of a quantized Gemma 4 runs in float32",
    symptom="silent and slow: hidden states of the tower are float32, twice the memory of bfloat16",
    trigger="a Gemma 4 quantized by bitsandbytes, and pixels as the image processor gives them (float32)",
    cause="since the fix of H1, transformers modeling_gemma4.py casts pixels only to a floating dtype, and "
    "Linear4bit gives back the dtype it was given",
    affected=(Affected("transformers", since="5.13.0"), Affected("bitsandbytes")),
    versions="5.23.0 run, 4-bit and 8-bit; not in 5.6.2, where H1 hides it; it came with the fix of H1, in 5.13.0 "
    "at the latest",
    way_round="pass pixel_values.to(torch.bfloat16)",
    owner=("transformers",),
    trackers=("huggingface/transformers#46933 (the change that introduced it, merged)",),
    trimtab="its quantized layers report the computing dtype, so the tower runs in that",
    evidence="run",
)  # fmt: skip


def h2_vision_fp32(kit: Kit) -> Seen:
    """Check the dtype of the input to the first layer of a 4-bit vision tower."""
    model = kit.load(kit.checkpoint(), quant="nf4", device_map={"": 0})
    dtypes = []

    def look(module: Any, args: Any, kwargs: Any) -> None:
        dtypes.append((args[0] if args else kwargs["hidden_states"]).dtype)

    model.model.vision_tower.encoder.layers[0].register_forward_pre_hook(look, with_kwargs=True)
    kit.forward(model, "image")
    state = PRESENT if str(dtypes[0]) == "torch.float32" else FIXED
    return Seen(state, f"hidden states of the tower are {dtypes[0]} in a model that computes in bfloat16")


H3_EXPERTS_UNQUANTIZED = Bug(
    title="\"4-bit\" mixture-of-experts models keep their experts in 16 bits",
    symptom="silent: the model needs several times the memory that 4-bit promises",
    trigger="Mixtral, Qwen3-MoE, Qwen3-VL-MoE, Gemma 4 MoE and others of transformers 5 with load_in_4bit or "
    "load_in_8bit",
    cause="transformers 5 keeps experts as 3-D parameters; bitsandbytes replaces nn.Linear alone",
    affected=(Affected("transformers"), Affected("bitsandbytes")),
    versions="5.6.2 and 5.23.0 run, with Mixtral, Qwen3-MoE and Gemma 4 MoE",
    way_round="count bytes after loading; bitsandbytes.nn.parametrize for parameters by hand",
    trackers=(
        "bitsandbytes-foundation/bitsandbytes#1849 (open when last seen)",
        "bitsandbytes-foundation/bitsandbytes#1965 (pull request, open)",
        "huggingface/transformers#39859 (pull request, open)",
    ),
    trimtab="the plan shows experts as unquantized, with bytes and reason; --experts nf4 packs each of them while loading",
    evidence="run",
)  # fmt: skip


def h3_experts_unquantized(kit: Kit) -> Seen:
    """Load a tiny Mixtral in 4-bit and check its experts."""
    model = kit.load(kit.checkpoint("mixtral"), quant="nf4", device_map={"": 0})
    experts = [parameter for name, parameter in model.named_parameters() if ".experts." in name]
    plain = [parameter for parameter in experts if parameter.is_floating_point() and parameter.element_size() > 1]
    values = sum(parameter.numel() for parameter in plain)
    linears = quantized(model)["Linear4bit"]
    if plain:
        return Seen(PRESENT, f"{linears} Linear4bit, and {values:,} expert weights as {plain[0].dtype}")
    return Seen(FIXED, f"{linears} Linear4bit, and no expert weight in full precision")


H4_SKIP_LIST_REPLACES = Bug(
    title="llm_int8_skip_modules replaces the default list: the head becomes 4-bit, tied models fail without a message",
    symptom="AssertionError without text (4-bit) or \"'Parameter' object has no attribute 'CB'\" (8-bit) at the "
    "first forward pass of a tied model; a 4-bit head, silently, on an untied one; a name such as \"self_attn\" "
    "matches nothing, silently",
    trigger="BitsAndBytesConfig(llm_int8_skip_modules=[...]) without the head",
    cause="transformers quantizers/base.py get_modules_to_not_convert looks for the head only if no list was given; "
    "names are compared with the start or the end of a path",
    affected=(Affected("transformers"), Affected("bitsandbytes")),
    versions="5.6.2 with bitsandbytes 0.49.2 and 5.23.0 with 0.50.2 run, in 4-bit and in 8-bit",
    way_round="add \"lm_head\" to every list of your own, and write full module paths",
    owner=("transformers",),
    trackers=(
        "huggingface/transformers#45674 (closed)",
        "bitsandbytes-foundation/bitsandbytes#1634 (8-bit)",
        "bitsandbytes-foundation/bitsandbytes#1865 (8-bit, pull request)",
    ),
    trimtab="keep_unquantized adds to the default list, and a pattern that names no linear is an error",
    evidence="run",
)  # fmt: skip


def h4_skip_list_replaces(kit: Kit) -> Seen:
    """Load an untied and a tied model in 4-bit with a list that names one MLP."""
    config = quantization("nf4", **OFFLOAD)
    config.llm_int8_skip_modules = ["model.layers.0.mlp"]
    untied = kit.load(kit.checkpoint("llama"), quantization_config=config, device_map={"": 0})
    kind = type(untied.lm_head).__name__
    try:
        kit.forward(kit.load(kit.checkpoint("qwen3"), quantization_config=config, device_map={"": 0}))
    except AssertionError as error:
        if not any(frame["library"] == "bitsandbytes" for frame in frames(error)):
            raise
        return Seen(PRESENT, f"the head of an untied model is {kind}; a tied one: {failure(error)}")
    if kind != "Linear":
        return Seen(PRESENT, f"the head of an untied model is {kind}; a tied one runs")
    return Seen(FIXED, "the head stays as it was with a list that does not name it")


H5_MOE_PREQUANTIZED = Bug(
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


def h5_moe_prequantized(kit: Kit) -> Seen:
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
    fault = error_of(lambda: kit.forward(model), RuntimeError)
    ending = f"then: {fault}" if fault else "and answers from them"
    return Seen(PRESENT, f"loads with experts {tuple(stack.shape)} of {stack.dtype}, {ending}")


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


H6_REQUEST_STATE = Bug(
    title="Qwen-VL keeps position offsets of the last request on the model",
    symptom="silent: model.rope_deltas holds the offsets of the last image, and a call with inputs_embeds alone "
    "gives other logits after a request with an image than before. With input_ids they are computed again",
    trigger="Qwen2-VL, Qwen2.5-VL, Qwen3-VL: a server or a test that uses one model for several requests",
    cause="transformers modeling_qwen2_5_vl.py compute_3d_position_ids keeps rope_deltas as an attribute and uses it "
    "whenever input_ids is None",
    affected=(Affected("transformers"),),
    versions="5.6.2 and 5.23.0 run with Qwen2.5-VL; new generations were fixed before 5.6.2",
    way_round="set model.model.rope_deltas = None between requests",
    trackers=("huggingface/transformers#43952 (generation, merged)", "huggingface/transformers#36013 (merged)"),
    trimtab="the attribute is reset before every request",
    evidence="run",
)  # fmt: skip


def h6_request_state(kit: Kit) -> Seen:
    """Run the same embedded text before and after a request with an image."""
    import torch

    model = kit.load(kit.checkpoint("qwen2_5_vl"))
    with torch.no_grad():
        embedded = model.get_input_embeddings()(kit.inputs(model)["input_ids"])
        before = model(inputs_embeds=embedded).logits
        model(**kit.inputs(model, "image"))
        change = float((model(inputs_embeds=embedded).logits - before).abs().max())
    kept: Any = getattr(model.model, "rope_deltas", None)
    if change:
        return Seen(PRESENT, f"the same text differs by up to {change:.3f} after an image; rope_deltas is {kept.tolist()}")
    return Seen(FIXED, "the same text has the same logits before and after an image")
