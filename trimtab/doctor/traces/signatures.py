"""By which exception type, message, frames, source lines and settings is a known failure recognized?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Signature:
    """One failure. label: its name. catalogue: its id, "" if it is no bug. owner: of the failure.

    type: the exception's class name. message: pattern for the result of `plain_message`. frame: pattern for the frames,
    one per line, as "file:function", outermost first; "" needs none. innermost: frame must match the last frame outside
    torch. code: a source line or arrow that replaces the frame in a text without frames. beside_frames: it also counts
    with other frames, as in a shortened trace. settings: pattern that the configuration of a run, or the text around a
    trace, must also match. foreign: frames of another project with the same failure. stages: stages of a recorded run,
    () is any. ask: the information to request if the rest is missing. meaning: one line for people.

    A signature has a unique message, written by one function of one package, or needs a frame.
    """

    label: str
    type: str
    message: str
    frame: str = ""
    innermost: bool = False
    code: str = ""
    beside_frames: bool = False
    settings: str = ""
    foreign: str = ""
    stages: tuple[str, ...] = ()
    catalogue: str
    owner: str
    meaning: str
    ask: str = ""

    @property
    def has_own_message(self) -> bool:
        """Whether the message identifies the failure without a frame or a setting."""
        return not (self.frame or self.settings)


@dataclass(frozen=True)
class Match:
    """A matching signature, and the matched evidence as text: "exception type", "message", "frame ...", ..."""

    signature: Signature
    rests_on: tuple[str, ...]


MESSAGE_CHARS = 20_000
_LOADING = ("base", "adapter")
_RUNNING = ("first forward", "generate")
_BNB = r"bitsandbytes/(functional|_ops|nn/|autograd/|backends/)"
_GEMMA = r"transformers/models/gemma(4|3n)\w*/modeling_gemma(4|3n)\w*\.py"
_SAME_DEVICE = r"Expected all tensors to be on the same device"
_COPY_OF_META = r"Cannot copy out of meta tensor; no data"
# A list, or a variable with one: a printed default (null, None) replaces nothing.
_SKIP_LIST = r"\bllm_int8_skip_modules\W{0,3}[:=]\s{0,4}(?!\s|null\b|None\b)"
_TIED_HEAD = "a skip list replaced the default one and the tied head was quantized"

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        label="FAIL_BNB_PARAM_CONSTRUCTOR", type="TypeError",
        message=r"(Params4bit|Int8Params|Parameter)\.__new__\(\) got an unexpected keyword argument '_is_hf_initialized'"
        r"|TypeError.{0,120}unexpected '?_is_hf_initialized'? argument",
        catalogue="A3", owner="accelerate", meaning="accelerate rebuilds a weight with an argument that its class does not accept",
    ),
    Signature(
        label="FAIL_QUANT_STATE_META_ITEM", type="RuntimeError", message=r"Tensor\.item\(\) cannot be called on meta tensors",
        frame=r"bitsandbytes/functional\.py:as_dict$", code=r"quant_state\.as_dict\(|QuantState\.as_dict|nested_offset",
        catalogue="A1", owner="bitsandbytes",
        meaning="the scales of an offloaded 4-bit weight are missing when its state is read",
        ask="whether a frame is in bitsandbytes/functional.py, as_dict",
    ),
    Signature(
        label="FAIL_QUANT_STATE_META_COPY", type="NotImplementedError", message=_COPY_OF_META,
        frame=r"bitsandbytes/functional\.py:to$", innermost=True, code=r"self\.absmax = self\.absmax\.to\(device\)",
        catalogue="A2", owner="bitsandbytes", meaning="an offloaded 4-bit weight is restored without its scales",
        ask="whether the innermost frame is in bitsandbytes/functional.py, to",
    ),
    Signature(
        label="FAIL_QUANT_STATE_META_USE", type="RuntimeError", message=r"on device meta|meta is not on the expected device",
        frame=_BNB, innermost=True, catalogue="A2", owner="bitsandbytes",
        meaning="a 4-bit weight is used although its scales are gone",
        ask="whether the innermost frame is in bitsandbytes",
    ),
    Signature(
        label="FAIL_INT8_SCALES_LOST", type="AttributeError|TypeError", message=r"'NoneType' object has no attribute 'dtype'",
        frame=_BNB, innermost=True, catalogue="A7", owner="accelerate", meaning="an 8-bit weight is restored without its scales",
        ask="whether the innermost frame is in bitsandbytes, and whether an adapter was loaded on an offloaded 8-bit base",
    ),
    Signature(
        label="FAIL_DISPATCH_OF_DISK_WEIGHTS", type="NotImplementedError", message=_COPY_OF_META,
        frame=r"peft/peft_model\.py:[\s\S]*accelerate/big_modeling\.py:dispatch_model",
        code=r"infer_auto_device_map\(\W*(\d+\W+)?self\b[\s\S]{0,600}dispatch_model\(\W*(\d+\W+)?self\b",
        beside_frames=True, stages=_LOADING, catalogue="B5", owner="peft",
        meaning="PEFT plans one device and moves weights that are on disk",
        ask="whether a frame in peft/peft_model.py calls accelerate's dispatch_model; without one it is a .to() of an empty model",
    ),
    Signature(
        label="FAIL_DISK_OFFLOAD_INDEX", type="KeyError", message=r"base_model\.model\.[\w.]*",
        frame=r"peft/peft_model\.py:_update_offload|accelerate/(utils/offload|hooks)\.py",
        code=r"base_model\.model\.model\.model\.|because they were offloaded to the disk|self\.index\[key\]", beside_frames=True,
        catalogue="B5", owner="peft", meaning="PEFT joins the names of a disk-offloaded base wrongly",
        ask="whether the base had modules on disk, and the frames in peft/peft_model.py and accelerate/utils/offload.py",
    ),
    Signature(
        label="FAIL_DEVICE_MAP_KEYS", type="ValueError",
        message=r"device_map provided does not give any device .{0,80}base_model\.model",
        catalogue="B3", owner="peft", meaning="PEFT's map needs the names of the wrapped model",
    ),
    Signature(
        label="FAIL_DEVICE_MAP_LAYER_SCALAR", type="ValueError",
        message=r"device_map provided does not give any device .{0,4000}\blayer_scalar", catalogue="C8", owner="accelerate",
        meaning="an inferred map leaves out Gemma 4's layer_scalar",
    ),
    Signature(
        label="FAIL_SHARED_KV_KEYERROR", type="KeyError", message=r"^\(?(\d+|'?(sliding|full)_attention'?)\)?$",
        frame=_GEMMA + ":forward", innermost=True, code=r"shared_kv_states", foreign=r"auto_round/|vllm/|sglang/",
        stages=_RUNNING, catalogue="B4", owner="transformers", meaning="the layers get copies of the shared key/value states",
        ask="whether the line above says shared_kv_states[...], and which model it is",
    ),
    Signature(
        label="FAIL_OFFLOAD_DIR_NEEDED", type="ValueError", message=r"We need an '{0,2}offload_dir\b", stages=_LOADING,
        catalogue="B7", owner="peft", meaning="PEFT's plan puts modules on disk without a folder",
    ),
    Signature(
        label="FAIL_OFFLOAD_FLAG_NEEDED", type="ValueError", message=r"Some modules are dispatched on the CPU or the disk",
        stages=_LOADING, catalogue="A4", owner="transformers", meaning="a map with the CPU needs llm_int8_enable_fp32_cpu_offload",
    ),
    Signature(
        label="FAIL_LORA_ON_WRONG_DEVICE", type="RuntimeError", message=_SAME_DEVICE + r".{0,200}\bcpu\b",
        frame=r"peft/tuners/lora/", innermost=True, stages=_RUNNING, catalogue="B8", owner="peft",
        meaning="LoRA weights and their layer are on different devices",
        ask="whether the innermost frame outside torch is in peft/tuners/lora",
    ),
    Signature(
        label="FAIL_INPUTS_ON_WRONG_DEVICE", type="RuntimeError",
        message=_SAME_DEVICE + r".{0,40}index is on cuda\S* different from other tensors on cpu", frame=r"peft/peft_model\.py",
        stages=_RUNNING, catalogue="B2", owner="peft", meaning="the re-plan put the model on the CPU; the inputs are on the GPU",
        ask="model.hf_device_map after the adapter was loaded",
    ),
    Signature(
        label="FAIL_CROSS_DEVICE", type="RuntimeError", message=_SAME_DEVICE, frame=_GEMMA, innermost=True, stages=_RUNNING,
        catalogue="D5", owner="transformers", meaning="tensors of one layer are on different devices",
        ask="the innermost frame outside torch",
    ),
    Signature(
        label="FAIL_CATCH_ALL_DISK", type="ValueError", message=r"is on the meta device, we need a '{0,2}value'{0,2} to put in on",
        frame=r"accelerate/", settings=r"""\A(?=[\s\S]*["']disk["'])(?=[\s\S]*["']["']\s*:)""", stages=_LOADING, catalogue="C1",
        owner="accelerate", meaning="a catch-all entry places what another entry left on disk",
        ask="the device_map: with a \"\" key and a \"disk\" value it is C1; else a tensor is missing from the checkpoint",
    ),
    Signature(
        label="FAIL_SAVE_SEQUENTIAL_HOOK", type="AttributeError",
        message=r"'SequentialHook' object has no attribute 'weights_map'", catalogue="C3", owner="transformers",
        meaning="saving does not handle the hooks of a catch-all entry",
    ),
    Signature(
        label="FAIL_DEVICE_OBJECT_ON_DISK", type="SafetensorError", message=r"device device\(.{0,60}\) is invalid",
        catalogue="C7", owner="accelerate", meaning="a map with torch.device objects and something on disk",
    ),
    Signature(
        label="GEMMA4_CLIPPABLE_LINEAR_UNSUPPORTED", type="ValueError", message=r"Target module Gemma4ClippableLinear\(",
        stages=("adapter",), catalogue="D1", owner="peft", meaning="the adapter targets a wrapper instead of its inner Linear",
    ),
    Signature(
        label="FAIL_AUDIO_FINFO", type="TypeError", message=r"torch\.finfo\(\) requires a floating point input type",
        frame=_GEMMA, innermost=True, code=r"Gemma(4|3n)Audio\w+", stages=_RUNNING, catalogue="D2", owner="transformers",
        meaning="a quantized audio tower calls torch.finfo on its integer weights",
        ask="the innermost frame outside torch: modeling_gemma4.py or another model",
    ),
    Signature(
        label="FAIL_SDPA_AUDIO", type="ValueError",
        message=r"Gemma(4|3n)Audio\w* does not support an attention implementation through "
        r"torch\.nn\.functional\.scaled_dot_product_attention", stages=("base",), catalogue="D3", owner="transformers",
        meaning="one attention implementation is set for a tower that does not support it",
    ),
    Signature(
        label="FAIL_EMBED_TOKENS_META", type="RuntimeError", message=r"Tensor on device meta is not on the expected device",
        frame=_GEMMA, innermost=True, stages=_RUNNING,
        code=r"Gemma ?-?4[\s\S]{0,2000}embed_tokens|embed_tokens[\s\S]{0,2000}Gemma ?-?4",
        catalogue="D4", owner="transformers", meaning="the model reads the embedding's weight outside its module",
        ask="the model, and where embed_tokens is in model.hf_device_map",
    ),
    Signature(
        label="FAIL_DEQUANTIZED_UNDER_LORA", type="AttributeError",
        message=r"'Parameter' object has no attribute 'quant_state'", frame=r"peft/tuners/lora/bnb\.py:(un)?merge$",
        code=r"\.dequantize\(\)[\s\S]{0,2000}merge_and_unload", catalogue="F2", owner="peft",
        meaning="the base was dequantized under the adapter's 4-bit layers",
        ask="whether model.dequantize() was called after the adapter was loaded",
    ),
    Signature(
        label="FAIL_SAFE_MERGE_BIAS", type="RuntimeError",
        message=r"Boolean value of Tensor with more than one value is ambiguous", frame=r"peft/tuners/lora/bnb\.py",
        innermost=True, code=r"\bbnb\b[\s\S]{0,600}safe_merge|safe_merge[\s\S]{0,600}\bbnb\b", stages=("merge",), catalogue="F5",
        owner="peft", meaning="safe_merge tests a bias as one truth value",
        ask="whether safe_merge=True was given and the adapter has lora_bias",
    ),
    Signature(
        label="FAIL_SKIP_LIST_TIED", type="AssertionError", message=r"^$|module\.weight\.shape\[1\] == 1",
        frame=r"bitsandbytes/nn/modules\.py:fix_4bit_weight_quant_state_from_module$", innermost=True,
        settings=r"llm_int8_skip_modules(?!\W{0,4}(null|None)\b)", catalogue="H4", owner="transformers", meaning=_TIED_HEAD,
        ask="llm_int8_skip_modules of the BitsAndBytesConfig, and the innermost frame in bitsandbytes",
    ),
    Signature(
        label="FAIL_SKIP_LIST_TIED", type="AttributeError", message=r"'Parameter' object has no attribute 'S?CB'",
        frame=r"bitsandbytes/nn/modules\.py:forward$", innermost=True, code=r"load_in_8bit=True", settings=_SKIP_LIST,
        catalogue="H4", owner="transformers", meaning=_TIED_HEAD,
        ask="llm_int8_skip_modules of the BitsAndBytesConfig, and the innermost frame in bitsandbytes",
    ),
    Signature(
        label="FAIL_TORCHAO_LORA", type="TypeError",
        message=r"TorchaoLoraLinear\.__init__\(\) missing \d required .{0,40}'get_apply_tensor_subclass'", catalogue="F3",
        owner="peft", meaning="PEFT's torchao layer lacks an argument that merging needs",
    ),
    Signature(
        label="FAIL_TORCHAO_LORA", type="TypeError", message=r"Int4Tensor", frame=r"peft/tuners/lora/torchao", catalogue="F3",
        owner="peft", meaning="LoRA on torchao supports int8 only", ask="the frames in peft/tuners/lora/torchao.py",
    ),
    Signature(
        label="FAIL_PREQUANTIZED_EXPERTS", type="RuntimeError", message=r"(size mismatch|mismatched sizes).{0,2000}experts",
        frame=r"transformers/", innermost=True, stages=("base",), catalogue="H5", owner="transformers",
        settings=r"load_in_4bit\W{1,4}[Tt]rue|-bnb-4bit|quant_method\W{1,5}bitsandbytes",
        meaning="per-expert 4-bit files of an older release",
        ask="whether bitsandbytes packed the checkpoint expert by expert",
    ),
    Signature(
        label="OOM_GPU", type="OutOfMemoryError", message=r"out of memory|Tried to allocate", catalogue="", owner="",
        meaning="the GPU is out of memory",
    ),
    Signature(
        label="OOM_GPU", type="RuntimeError", message=r"CUDA (error: )?out of memory|CUBLAS_STATUS_ALLOC_FAILED", catalogue="",
        owner="", meaning="the GPU is out of memory",
    ),
)  # fmt: skip


_QUOTE = re.compile('["`´′″‘’‚‛“”„‟‹›«»＂＇]')


def plain_message(message: str) -> str:
    """Return a message in the patterns' form: single spaces, every quote an apostrophe."""
    return _QUOTE.sub("'", " ".join(message[:MESSAGE_CHARS].split()))


def match(
    kind: str, message: str, frames: Sequence[str], *, stage: str | None = None, settings: str = "", code: str = ""
) -> Match | None:
    """Return the first matching signature, None for none.

    kind: the exception's class name, "" if unknown. message: its text. frames: as "file:function", outermost first.
    stage: of a recorded run, None for a pasted text. settings: the configuration, or the text around the trace. code:
    source lines of a pasted text that may replace frames.
    """
    plain = plain_message(message)
    for signature in SIGNATURES:
        rests_on = _seen(signature, kind, plain, frames, stage, settings, code)
        if rests_on is not None:
            return Match(signature, rests_on)
    return None


def _seen(
    signature: Signature, kind: str, message: str, frames: Sequence[str], stage: str | None, settings: str, code: str
) -> tuple[str, ...] | None:
    """Return the matched evidence of a signature, None unless all that it needs is present."""
    seen: list[str] = []
    if kind:
        if not re.fullmatch(signature.type, kind):
            return None
        seen.append(f"exception type {kind}")
    elif signature.type == "KeyError" and "KeyError" not in code:
        return None
    if not re.search(signature.message, message):
        return None
    seen.append("a distinctive message" if signature.has_own_message else "message")
    if stage is not None and signature.stages and stage not in signature.stages:
        return None
    if signature.foreign and any(re.search(signature.foreign, frame) for frame in frames):
        return None
    if signature.settings:
        if not re.search(signature.settings, settings):
            return None
        seen.append("settings")
    if signature.frame:
        where = _where(signature, frames, code)
        if not where:
            return None
        seen.append(where)
    return tuple(seen)


def _where(signature: Signature, frames: Sequence[str], code: str) -> str:
    """Return the frame, or the source line instead, as text; "" for neither."""
    outside = [frame for frame in frames if not frame.startswith("torch/")]
    looked_at = outside[-1:] if signature.innermost else list(frames)
    match = re.search(signature.frame, "\n".join(looked_at), re.MULTILINE)
    if match:
        last = match.group(0).splitlines()[-1]
        whole = next((frame for frame in reversed(looked_at) if last in frame), last)
        return f"frame {whole.rstrip(':')}"
    if not signature.beside_frames and any(not frame.endswith(":") for frame in outside):
        return ""  # the frames show another place of failure; a file that prose mentions ("file:") does not count
    line = re.search(signature.code, code, re.IGNORECASE) if signature.code else None
    return f"source line {' '.join(line.group(0).split())[:60]!r}" if line else ""
