"""Which bugs does Gemma 4 have?"""

from __future__ import annotations

from functools import partial
from typing import Any

from trimtab.doctor.facts.bug import FIXED, NOT_APPLICABLE, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import TOWERS_OFF, Kit, error_of, seen

TABLE = "embed_tokens_per_layer"
LANGUAGE = ("embed_tokens", TABLE, "layers", "norm", "rotary_emb", "per_layer_model_projection", "per_layer_projection_norm")
PARTS: tuple[str, ...] = (
    "lm_head", *(f"model.{name}" for name in ("vision_tower", "audio_tower", "embed_vision", "embed_audio")),
    *(f"model.language_model.{name}" for name in LANGUAGE),
)  # fmt: skip

D1_CLIPPABLE = Bug(
    title="Broad LoRA targets on Gemma 4 are refused: \"Target module Gemma4ClippableLinear is not supported\"",
    symptom="ValueError: Target module Gemma4ClippableLinear(...) is not supported. Currently, only the following "
    "modules are supported: ...",
    trigger="target_modules such as q_proj, k_proj, gate_proj on a Gemma 4 with vision or audio: they also name the "
    "wrappers of the towers",
    cause="the wrapper keeps the real layer in .linear; PEFT lora/model.py _create_new_module knows no such class. "
    "PEFT's own default for Gemma 4 is language-only since 0.19.0",
    affected=(Affected("peft"),),
    versions="peft 0.19.1 and 0.21.2 run, on CPU and GPU",
    way_round="a regular expression that names the inner module, \"...q_proj.linear\" in the towers; keys in the "
    "file are those of the inner modules too",
    owner=("peft", "transformers"),
    trackers=(
        "huggingface/peft#3129 (open when last seen; maintainers: name the inner .linear)",
        "huggingface/peft#3130 (a patch)",
        "huggingface/peft#3154 (pull request, closed)",
        "huggingface/transformers#45388 (pull request, closed)",
        "unslothai/unsloth#4807 (patch, merged)",
    ),
    trimtab="a key that names a wrapper is applied to the linear inside it, and the report says so",
    evidence="run",
)  # fmt: skip


def d1_clippable(kit: Kit) -> Seen:
    """Create PEFT adapters on every q_proj of a tiny Gemma 4 with towers."""
    from peft import LoraConfig, get_peft_model

    model, config = kit.load(kit.checkpoint()), LoraConfig(r=4, target_modules=["q_proj"])
    fault = error_of(lambda: get_peft_model(model, config), ValueError, "Gemma4ClippableLinear")
    return seen(fault, "adapters were put on every q_proj, those of the towers too")


D2_AUDIO_FINFO = Bug(
    title="A 4-bit or 8-bit Gemma 4 fails on any audio: \"torch.finfo() requires a floating point input type\"",
    symptom="TypeError: torch.finfo() requires a floating point input type. Use torch.iinfo to handle ...",
    trigger="audio given to a Gemma 4 whose audio tower is quantized by bitsandbytes",
    cause="transformers models/gemma4/modeling_gemma4.py clips to torch.finfo(self.ffw_layer_1.linear.weight.dtype), "
    "and the dtype of a packed weight is uint8 or int8",
    affected=(Affected("transformers", fixed_in="5.11.0"), Affected("bitsandbytes")),
    versions="fails in 5.6.2 (run) and in 5.5.4 to 5.9.0 (read in the released wheels); gone in 5.11.0 at the "
    "latest; 5.23.0 run",
    way_round="transformers 5.11.0 or newer, or llm_int8_skip_modules with the audio tower and the head (H4)",
    owner=("transformers",),
    trackers=("huggingface/transformers#45672 (closed)",),
    trimtab="its quantized layers report the computing dtype, so audio works with all supported releases",
    evidence="run",
)  # fmt: skip


def d2_audio_finfo(kit: Kit) -> Seen:
    """Run a 4-bit Gemma 4 with an audio clip."""
    model = kit.load(kit.checkpoint(), quant="nf4", device_map={"": 0})
    fault = error_of(lambda: kit.forward(model, "audio"), TypeError, "torch.finfo()")
    return seen(fault, "a 4-bit Gemma 4 processed audio")


D3_SDPA_AUDIO = Bug(
    title="attn_implementation=\"sdpa\" is refused for Gemma 4 with audio",
    symptom="ValueError: Gemma4AudioModel does not support an attention implementation through "
    "torch.nn.functional.scaled_dot_product_attention yet",
    trigger="from_pretrained with the text \"sdpa\" for a Gemma 4 that has an audio tower; scripts that worked on "
    "older releases break",
    cause="the audio model has _supports_sdpa = False, and transformers modeling_utils.py applies a plain text to "
    "every sub-model",
    affected=(Affected("transformers", since="5.20.0"),),
    versions="accepted in 5.6.2, refused in 5.23.0 (both run); the flag is in 5.20.0, 5.21.0 and 5.22.2 and not in "
    "5.19.0 (read in the wheels)",
    way_round="leave attn_implementation out (sdpa for text and vision, eager for audio), or give a value for each "
    "part: {\"\": \"sdpa\", \"audio_config\": \"eager\"}",
    trimtab="it passes no attention implementation",
    evidence="run",
)  # fmt: skip


def d3_sdpa_audio(kit: Kit) -> Seen:
    """Load a Gemma 4 with an audio tower and the text "sdpa"."""
    words = "does not support an attention implementation"
    fault = error_of(lambda: kit.load(kit.checkpoint(), attn_implementation="sdpa"), ValueError, words)
    return seen(fault, 'attn_implementation="sdpa" was accepted')


D4_EMBED_OFFLOAD = Bug(
    title="Offloading embed_tokens of an E-series Gemma 4 breaks every forward pass, text too",
    symptom="RuntimeError: Tensor on device meta is not on the expected device (torch.where)",
    trigger="language_model.embed_tokens on \"cpu\" or \"disk\" in a Gemma 4 with per-layer embeddings (E2B, E4B), "
    "by a map or by \"auto\" under memory pressure",
    cause="transformers modeling_gemma4.py Gemma4Model.forward reads embed_tokens.weight[pad_token_id] itself, "
    "outside the module's forward, so that no hook brings the weight",
    affected=(Affected("transformers"),),
    versions="5.6.2 and 5.23.0 run; offloading the tied head as well does not help",
    way_round="keep embed_tokens on the GPU; embed_tokens_per_layer, the large table, can be offloaded",
    trackers=("huggingface/transformers#48409 (pull request, closed)",),
    trimtab="embed_tokens of such a model stays on the execution device, and a map that sends it away is refused "
    "with the reason",
    evidence="run",
)  # fmt: skip


def d4_embed_offload(kit: Kit) -> Seen:
    """Run a text through a Gemma 4 whose embedding table, and the head tied to it, are offloaded."""
    places = dict.fromkeys(PARTS, 0) | {"model.language_model.embed_tokens": "cpu", "lm_head": "cpu"}
    model = kit.load(kit.checkpoint(), device_map=places)
    fault = error_of(lambda: kit.forward(model), RuntimeError, "expected device")
    return seen(fault, "a text prompt ran with embed_tokens offloaded")


D5_CROSS_DEVICE = Bug(
    title="Gemma 4 split over GPU and CPU: \"Expected all tensors to be on the same device\"",
    symptom="RuntimeError: Expected all tensors to be on the same device, for rotary tables, inputs, layer_scalar, "
    "the attention mask or mm_token_type_ids",
    trigger="decoder layers or towers on the CPU by device_map, reported for 26B-A4B in int8 with LoRA",
    cause="transformers modeling_gemma4.py combines tensors that were made on different devices; 5.23.0 has some of "
    "the moves that were missing",
    affected=(Affected("transformers"),),
    versions="reported by others; the tiny model with towers and two decoder layers on the CPU is what the probe "
    "runs, and only a GPU can show it",
    way_round="keep whole parts together; check with one forward pass of text, image and audio",
    trackers=("huggingface/transformers#45482 (open when last seen)",),
    trimtab="weights come to the execution device; where a block computes on the CPU, its own layers move inputs and "
    "outputs",
    evidence="tracker", needs_gpu=True,
)  # fmt: skip


def d5_cross_device(kit: Kit) -> Seen:
    """Run text, image and audio through a Gemma 4 with towers, then with decoder layers, on the CPU."""
    import torch

    if not torch.cuda.is_available():
        return Seen(NOT_APPLICABLE, "no GPU here, and the CPU alone cannot show tensors on different devices")
    main = "cuda:0"
    towers = {name: main if place == 0 else place for name, place in TOWERS_OFF.items()}
    layers = {f"model.language_model.layers.{number}": "cpu" if number in (1, 4) else main for number in range(5)}
    split = dict.fromkeys(PARTS, main) | layers
    del split["model.language_model.layers"]
    faults = []
    for title, places in (("towers", towers), ("decoder layers", split)):
        model = kit.load(kit.checkpoint(), device_map=places)
        for kind in ("text", "image", "audio"):
            inputs = {name: tensor.to(main) for name, tensor in kit.inputs(model, kind).items()}
            with torch.no_grad():
                fault = error_of(partial(model, **inputs), RuntimeError, "same device", "expected device")
            faults += [f"{title} on the CPU, {kind}: {fault}"] if fault else []
    return seen("; ".join(faults), "text, image and audio ran with towers, and with decoder layers, on the CPU")


D6_PLE = Bug(
    title="Most of an E-series Gemma 4 on the GPU is an embedding table of which one token reads a row; offloading copies it whole",
    symptom="silent: 5.6 of 10.1 GB of E4B are embed_tokens_per_layer; given to \"cpu\", the whole table goes to the "
    "GPU in every forward pass for a few rows",
    trigger="Gemma 4 E2B and E4B on a small GPU, quantized or not: an Embedding is never quantized by bitsandbytes",
    cause="accelerate hooks.py AlignDevicesHook.pre_forward copies whole weights; no part of the stack gathers rows "
    "on the host",
    affected=(Affected("accelerate"), Affected("transformers")),
    versions="accelerate 1.13.0 and 1.15.0 run: bytes moved are those of the table, however few tokens",
    way_round="replace the module with one that reads rows on the CPU and moves the rows",
    trackers=("huggingface/transformers#47705 (closed)", "ggml-org/llama.cpp#14400 (keeps it on the CPU)"),
    trimtab="the table is gathered: rows are fetched from host memory or from the file, the table never comes to the "
    "GPU",
    evidence="run",
)  # fmt: skip


def d6_ple(kit: Kit) -> Seen:
    """Measure the bytes copied to the execution device when the table is offloaded and one short text is run."""
    model = kit.load(kit.checkpoint(), device_map=dict.fromkeys(PARTS, 0) | {f"model.language_model.{TABLE}": "cpu"})
    table = model.model.language_model.embed_tokens_per_layer
    own_forward, moved = table._old_forward, []

    def watched(ids: Any) -> Any:
        moved.append((table.weight.nbytes, ids.numel() * table.weight[0].nbytes))
        return own_forward(ids)

    table._old_forward = watched
    kit.forward(model)
    moved_bytes, needed = moved[0]
    text = f"rows of {needed:,} bytes are needed, {moved_bytes:,} bytes came to the execution device"
    return Seen(PRESENT if moved_bytes > needed else FIXED, text)
