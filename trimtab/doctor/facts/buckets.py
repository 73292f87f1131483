"""Which failures share an issue, and which questions go to its owner?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trimtab.doctor.facts.evidence import Point, Run

PRIMARY, SUPPORTING, FIXED, DEFERRED, DOCUMENTATION = "primary", "supporting", "fixed", "deferred", "documentation"
STATES = {
    PRIMARY: "a separate fault with a trace or a wrong result, a reproducer and a passing case",
    SUPPORTING: "a case for another draft or a smaller fault; file it after the primary ones",
    FIXED: "a release has the fix: upgrade, and file only if the failure comes back",
    DEFERRED: "not ready: no passing case was recorded with the same versions",
    DOCUMENTATION: "works as designed, but is not documented",
}
REPOSITORIES = {
    "accelerate": "huggingface/accelerate", "bitsandbytes": "bitsandbytes-foundation/bitsandbytes",
    "peft": "huggingface/peft", "transformers": "huggingface/transformers", "safetensors": "huggingface/safetensors",
    "torch": "pytorch/pytorch",
}  # fmt: skip


def _any(run: Run) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One issue. name: of its file. labels: of its runs, filtered by `only`. bug: catalogue id. title: of the issue. kinds: GitHub
    labels to suggest. state: before "fixed" and "deferred" are decided. script: of reproducers. shows: (exception type, text)
    that must end the reproducer. pair: the failing and the passing case with the clearest contrast, if both were recorded.
    expected: alternatives. beside: buckets to link.
    """

    name: str
    labels: tuple[str, ...]
    bug: str
    title: str
    shows: tuple[str, str]
    script: str = ""
    pair: tuple[str, str] = ("", "")
    kinds: tuple[str, ...] = ("bug",)
    state: str = PRIMARY
    expected: tuple[str, ...] = ()
    specific: tuple[Point, ...] = ()
    related: tuple[Point, ...] = ()
    questions: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    only: Callable[[Run], bool] = _any

    def takes(self, run: Run) -> bool:
        return run.label in self.labels and self.only(run)


def map_given(run: Run) -> bool:
    """Whether PEFT was given a device map."""
    return bool((run.configuration.get("adapter") or {}).get("device_map"))


def map_prefixed(run: Run) -> bool:
    """Whether the map that PEFT was given has the names of the wrapped model."""
    device_map = (run.configuration.get("adapter") or {}).get("device_map") or {}
    return bool(device_map) and all(key.startswith("base_model.model.") for key in device_map if key)


SPLIT_ALONE = Point(
    "A 4-bit base with modules off the GPU runs without an adapter.",
    lambda run: run.passed and run.offloads and run.four_bit_layers > 0 and not run.adapter,
)
RESIDENT = Point(
    "The adapter runs on a 4-bit base that is not split.",
    lambda run: run.passed and run.adapter and run.four_bit_layers > 0 and not run.offloads and not run.merges,
)
BF16_SPLIT = Point(
    "Without quantization, an adapter on a split base runs.",
    lambda run: run.passed and run.adapter and run.offloads and run.four_bit_layers + run.eight_bit_layers == 0,
)  # fmt: skip
PREFIXED = Point(
    "With a map whose keys begin with `base_model.model.` and that has no catch-all entry, PEFT keeps the placement.",
    lambda run: run.passed and run.offloads and map_prefixed(run),
)
NATIVE = Point(
    "`model.load_adapter` of transformers on the same kind of base keeps the placement.",
    lambda run: run.passed and run.offloads and run.call == "native",
)
UNDONE = Point(
    "With room to spare `PeftModel.from_pretrained` on a split base ends without an error, and what was off the GPU is on it.",
    lambda run: run.label == "PASS_BUT_PLACEMENT_UNDONE" and run.adapter and not map_given(run),
)
SINGLE_QUANT = Point(
    "Without double quantization it fails too, in another place.",
    lambda run: run.label in ("FAIL_QUANT_STATE_META_COPY", "FAIL_QUANT_STATE_META_USE"),
)
DOUBLE_QUANT = Point("With double quantization it fails earlier.", lambda run: run.label == "FAIL_QUANT_STATE_META_ITEM")
INT8 = Point(
    "8-bit layers in the same place run.",
    lambda run: run.passed and run.eight_bit_layers > 0
    and (run.offloads or run.call == "dispatch"),
)  # fmt: skip
OTHER_MODES = Point(
    "The same model answers prompts without audio.",
    lambda run: run.label == "FAIL_AUDIO_FINFO" and bool((run.record.get("modes") or {}).get("text", {}).get("ok")),
)
BF16_MERGE = Point("A merge on a bf16 base answers as the adapter.", lambda run: run.label == "BF16_MERGED_MATCHES_BF16_ADAPTER")
BASE_FIRST = Point(
    "Dequantizing the base first, then loading the adapter and merging, runs.",
    lambda run: run.call == "dequantize, peft" and run.exception is None,
)
EXPLICIT_DISK = Point(
    "Without the catch-all entry the base loads.",
    lambda run: "disk" in run.map_asked.values() and "" not in run.map_asked and run.stage not in ("", "import", "base"),
)  # fmt: skip
RE_PLAN_LOG = Point(
    "A case of this set logged that no module fits the device, while PEFT placed the model again.",
    lambda run: run.adapter and any("no modules could be assigned" in line for line in run.record.get("log_lines") or ()),
)

BUCKETS: tuple[Bucket, ...] = (
    Bucket(
        name="params4bit-constructor", pair=("R03_SPLIT_4BIT", "R05_ALL_GPU_4BIT"),
        labels=("FAIL_BNB_PARAM_CONSTRUCTOR",), bug="A3", script="layer-single-quant",
        shows=("TypeError", r"__new__\(\) got an unexpected keyword argument '_is_hf_initialized'"),
        title="Offloading a quantized weight raises TypeError: unexpected keyword argument '_is_hf_initialized'",
        expected=(
            "`set_module_tensor_to_device` passes on only what the parameter's class takes; or",
            "`Params4bit.__new__` and `Int8Params.__new__` accept attributes that another library set.",
        ),
        specific=(RESIDENT, SPLIT_ALONE), related=(UNDONE, RE_PLAN_LOG),
        questions=("Which of the two classes should ignore attributes of the other library?",),
        beside=("quant-state-meta-item", "placement-planned-again"),
    ),
    Bucket(
        name="quant-state-meta-item", pair=("R03_SPLIT_4BIT_DOUBLE_QUANT", "R05_ALL_GPU_4BIT_DOUBLE_QUANT"),
        labels=("FAIL_QUANT_STATE_META_ITEM",), bug="A1", state=SUPPORTING,
        script="layer-double-quant", shows=("RuntimeError", r"Tensor\.item\(\) cannot be called on meta tensors"),
        title="Offloading a double-quantized 4-bit layer raises: Tensor.item() cannot be called on meta tensors",
        expected=(
            "an offloaded 4-bit layer keeps its scales, and runs; or",
            "the dispatch refuses a 4-bit layer by name, before anything is moved; or",
            "the state of a layer on meta can be requested without reading values.",
        ),
        specific=(RESIDENT, SPLIT_ALONE, BF16_SPLIT, SINGLE_QUANT), related=(UNDONE, RE_PLAN_LOG, PREFIXED),
        questions=(
            "Is it intended that moving a 4-bit weight to meta also moves the quantization state that others share?",
            "Should accelerate ask whether a module has tensors without building its state_dict?",
        ),
        beside=("quant-state-meta-copy", "placement-planned-again"),
    ),
    Bucket(
        name="quant-state-meta-copy", pair=("R03_SPLIT_4BIT", "R05_ALL_GPU_4BIT"),
        labels=("FAIL_QUANT_STATE_META_COPY", "FAIL_QUANT_STATE_META_USE"), bug="A2",
        script="layer-single-quant", shows=("NotImplementedError", r"Cannot copy out of meta tensor; no data"),
        title="An offloaded 4-bit layer loads without an error and fails at the first forward: Cannot copy out of meta tensor",
        expected=(
            "an offloaded 4-bit layer keeps its scales, and runs; or",
            "the dispatch refuses a 4-bit layer by name instead of loading one that cannot run.",
        ),
        specific=(RESIDENT, SPLIT_ALONE, INT8, DOUBLE_QUANT), related=(UNDONE, RE_PLAN_LOG),
        questions=(
            "Is offload of 4-bit layers meant to work? If not, may the dispatch say so?",
            "Could the quantization state be kept next to the packed weight when accelerate takes the weight away?",
        ),
        beside=("quant-state-meta-item", "placement-planned-again"),
    ),
    Bucket(
        name="placement-planned-again", labels=("PASS_BUT_PLACEMENT_UNDONE", "PASS_BUT_EVERYTHING_ON_HOST"), bug="B1",
        script="re-plan",
        only=lambda run: run.adapter and not map_given(run), kinds=("bug", "device placement"),
        shows=("AssertionError", r"weights were offloaded before the adapter"),
        title="PeftModel.from_pretrained on a base with offloaded modules plans the placement again and discards the user's map",
        expected=(
            "the base's `hf_device_map` is kept, and only the adapter's weights are placed; or",
            "a new placement honours the base's map where it has an entry; or",
            "the call reports that it will place the model again, and accepts an argument that forbids it.",
        ),
        specific=(SPLIT_ALONE, RESIDENT, PREFIXED, NATIVE), related=(RE_PLAN_LOG,),
        questions=(
            "Does an adapter need a new dispatch of the base at all, if every layer already has its hook?",
            "Should the new plan count the memory that the loaded base itself holds as available?",
        ),
        beside=("quant-state-meta-item", "quant-state-meta-copy", "params4bit-constructor", "map-ignored"),
    ),
    Bucket(
        name="map-ignored", labels=("PASS_BUT_PLACEMENT_UNDONE",), bug="B3", script="map-ignored", state=SUPPORTING,
        only=lambda run: run.adapter and map_given(run), kinds=("bug", "device placement"),
        shows=("AssertionError", r"weights were offloaded before the adapter"),
        title="The base's own device_map given to PeftModel.from_pretrained is ignored but for its catch-all entry",
        expected=(
            "keys of the unwrapped model are understood; or",
            "keys that name no module are an error that shows the expected prefix.",
        ),
        specific=(SPLIT_ALONE, PREFIXED),
        questions=("Would a map in the base's own names be accepted as a feature?",),
        beside=("placement-planned-again", "map-refused"),
    ),
    Bucket(
        name="map-refused", labels=("FAIL_DEVICE_MAP_KEYS",), bug="B3", script="map-refused", state=DOCUMENTATION,
        shows=("ValueError", r"does not give any device for the following parameters: base_model\.model"),
        title="device_map of PeftModel.from_pretrained needs the names of the wrapped model; the message does not say so",
        kinds=("documentation",),
        expected=(
            "the documentation of `device_map` says that keys begin with `base_model.model.`; or",
            "keys of the unwrapped model are understood.",
        ),
        specific=(SPLIT_ALONE, PREFIXED),
        questions=("Would a sentence in the docstring be welcome?",), beside=("map-ignored",),
    ),
    Bucket(
        name="shared-kv-states", pair=("SPLIT_4BIT_ADAPTER_SAME_MAP", "R05_ALL_GPU_4BIT"),
        labels=("FAIL_SHARED_KV_KEYERROR",), bug="B4", script="shared-kv",
        shows=("KeyError", r"^(\d+|'(sliding|full)_attention')$"),
        title="KeyError in shared_kv_states at the first prefill of a model that PEFT dispatched",
        expected=(
            "the shared states survive a dispatch without `skip_keys`; or",
            "PEFT passes the model's own skip keys when it dispatches.",
        ),
        specific=(SPLIT_ALONE, RESIDENT, NATIVE),
        questions=("Should PEFT read `_skip_keys_device_placement` of the model?",), beside=("placement-planned-again",),
    ),
    Bucket(
        name="disk-offloaded-base", labels=("FAIL_DISPATCH_OF_DISK_WEIGHTS", "FAIL_DISK_OFFLOAD_INDEX"), bug="B5",
        script="disk", shows=("NotImplementedError|KeyError", r"Cannot copy out of meta tensor|base_model\.model\."),
        title="PeftModel.from_pretrained fails on a base that has modules on disk",
        expected=(
            "weights on disk stay there; or", "the call says that a base with modules on disk is not supported.",
        ),
        questions=("Is an adapter on a disk-offloaded base meant to work without a separate device_map?",),
        specific=(RESIDENT, PREFIXED), beside=("placement-planned-again", "catch-all-disk"),
    ),
    Bucket(
        name="offload-folder", labels=("FAIL_OFFLOAD_DIR_NEEDED",), bug="B7", script="offload-folder", state=DOCUMENTATION,
        shows=("ValueError", r"We need an `offload_dir` to dispatch"), kinds=("documentation",),
        title="PeftModel.from_pretrained on a base with an offload_folder needs an offload_dir; the documentation has neither",
        expected=(
            "the documentation says which of `offload_dir` and `offload_folder` PEFT takes on a base that is dispatched; or",
            "the base's own folder is used again; or", "the message says that the argument belongs to PEFT's call.",
        ),
        specific=(SPLIT_ALONE, RESIDENT, PREFIXED),
        questions=(
            "Are `offload_buffers` and `ephemeral_gpu_offload` meant to have an effect in this call?",
            "Is a device_map recommended at all when the base has an `hf_device_map`?",
        ),
        beside=("disk-offloaded-base", "map-refused"),
    ),
    Bucket(
        name="lora-wrong-device", labels=("FAIL_LORA_ON_WRONG_DEVICE",), bug="B8", script="native-load", state=SUPPORTING,
        shows=("RuntimeError", r"Expected all tensors to be on the same device"), kinds=("bug",),
        title="LoRA matrices of an offloaded layer stay on the CPU while the layer computes on the GPU",
        expected=("the matrices are where their layer computes; or", "the base layer's result is moved to its input's device."),
        specific=(SPLIT_ALONE, RESIDENT),
        questions=("Is this reproducer, with a base offloaded by accelerate, the requested one?",),
    ),
    Bucket(
        name="catch-all-disk", labels=("FAIL_CATCH_ALL_DISK",), bug="C1", script="catch-all-disk",
        shows=("ValueError", r"is on the meta device, we need a `value` to put in on"),
        title='A device_map with a "disk" entry and a catch-all entry cannot be loaded',
        expected=(
            "the catch-all places only what no other entry names; or", "such a map is refused with that reason.",
        ),
        specific=(EXPLICIT_DISK,), questions=("Should the hook of the catch-all leave modules alone that have their own entry?",),
        beside=("disk-offloaded-base", "merge-drops-offloaded"),
    ),
    Bucket(
        name="merge-drops-offloaded", labels=("PASS_BUT_MERGE_DROPPED_OFFLOADED",), bug="C2", script="merge-drops",
        shows=("AssertionError", r"with a catch-all, 0 of \d+ weights merged"),
        title="merge_and_unload skips the adapters of offloaded modules without a warning, if the map has a catch-all entry",
        expected=(
            "offloaded modules are merged, as they are with a map that has no catch-all entry; or",
            "the merge refuses a module whose weights it cannot reach.",
        ),
        specific=(BF16_MERGE,), questions=("Should `onload_layer` know `SequentialHook`?",), beside=("catch-all-disk",),
    ),
    Bucket(
        name="clippable-linear", labels=("GEMMA4_CLIPPABLE_LINEAR_UNSUPPORTED",), bug="D1", script="clippable",
        state=SUPPORTING, shows=("ValueError", r"Target module Gemma4ClippableLinear\("), kinds=("enhancement",),
        title="Broad target_modules on Gemma 4 fail on Gemma4ClippableLinear; the message does not name the inner Linear",
        expected=(
            "a target that wraps one Linear resolves to it; or", "the message names the module's path and its inner Linear.",
        ),
        specific=(RESIDENT,), questions=("Would a message with the module's path and its inner Linear be accepted?",),
    ),
    Bucket(
        name="audio-finfo", labels=("FAIL_AUDIO_FINFO",), bug="D2", script="audio-finfo",
        shows=("TypeError", r"torch\.finfo\(\) requires a floating point input type"),
        title="Gemma 4 with a quantized audio tower raises in torch.finfo on a prompt with audio",
        expected=("the limits are those of the compute dtype, not of the packed weight.",),
        specific=(OTHER_MODES, RESIDENT), questions=("Should the audio tower be left unquantized by default?",),
    ),
    Bucket(
        name="sdpa-audio", labels=("FAIL_SDPA_AUDIO",), bug="D3", script="sdpa",
        shows=("ValueError", r"Gemma4AudioModel does not support an attention implementation"),
        title='attn_implementation="sdpa" refuses the whole of Gemma 4 because of its audio tower',
        expected=(
            "a tower that does not support the requested implementation keeps its own, with a log line; or",
            "the message says that a dict per part is accepted.",
        ),
        specific=(RESIDENT, SPLIT_ALONE),
        questions=("Is the string meant for every sub-model, also those that support eager attention alone?",),
    ),
    Bucket(
        name="embed-tokens-offload", labels=("FAIL_EMBED_TOKENS_META",), bug="D4", script="embed-offload",
        shows=("RuntimeError", r"Tensor on device meta is not on the expected device"),
        title="Gemma 4 with embed_tokens off the GPU fails: the weight is read outside the module's forward",
        expected=("the padding row is read through the module; or", "such a placement is refused with that reason."),
        specific=(SPLIT_ALONE,), questions=("Could the padding embedding be taken from a call of the module?",),
    ),
    Bucket(
        name="merge-4bit", labels=("DIRECT_4BIT_MERGED_MATCHES_BASE", "DIRECT_4BIT_MERGED_MATCHES_NEITHER"), bug="F1",
        script="merge-4bit", state=DOCUMENTATION, kinds=("documentation",),
        shows=("AssertionError", r"chooses other tokens than the adapter"),
        title="merge_and_unload on a 4-bit base: other answers than the adapter; document the bf16 route",
        expected=(
            "the documentation of `merge_and_unload` shows the merge on a bf16 base next to the warning; or",
            "the warning names that route once, instead of appearing once a layer.",
        ),
        specific=(BF16_MERGE,), questions=("Would a section in the quantization guide be welcome?",),
    ),
    Bucket(
        name="dequantize-then-merge", labels=("FAIL_DEQUANTIZED_UNDER_LORA",), bug="F2", script="dequantize-merge",
        state=SUPPORTING, shows=("AttributeError", r"'Parameter' object has no attribute 'quant_state'"),
        title="dequantize() under an adapter, then merge_and_unload: 'Parameter' object has no attribute 'quant_state'",
        expected=(
            "the LoRA layers follow the base layers that `dequantize()` replaced; or",
            "`dequantize()` refuses a model that has adapters on it.",
        ),
        specific=(BASE_FIRST, BF16_MERGE), questions=("Is `PeftModel.dequantize()` a supported call?",),
        beside=("merge-4bit",),
    ),
    Bucket(
        name="extra-keys", labels=("PASS_BUT_TOWER_WEIGHTS_DROPPED",), bug="E3", script="extra-keys", state=SUPPORTING,
        shows=("AssertionError", r"tensors of the file loaded, without a warning"),
        title="PeftModel.from_pretrained drops adapter weights whose modules the config does not target, without a warning",
        expected=("unexpected keys are reported as missing keys are; or", "they are an error unless asked otherwise."),
        specific=(RESIDENT,), questions=("Would a warning with the number and the first of such keys be accepted?",),
    ),
    Bucket(
        name="unknown-map-key", labels=("PASS_BUT_MAP_KEY_IGNORED",), bug="C5", script="unknown-key", state=SUPPORTING,
        shows=("AssertionError", r"a key that names no module was accepted"),
        title="A device_map key that names no module is accepted with a warning and stays in hf_device_map",
        expected=("such a key is an error with the names that are near; or", "it does not stay in `hf_device_map`."),
        specific=(SPLIT_ALONE,), questions=("Is there a use for keys that name nothing?",),
    ),
    Bucket(
        name="nothing-quantized", labels=("PASS_BUT_NOT_QUANTIZED",), bug="A5", script="nothing-quantized", state=SUPPORTING,
        shows=("AssertionError", r"^0 4-bit layers, is_loaded_in_4bit True"),
        title='device_map {"": "cpu"} with the offload flag quantizes nothing and still says is_loaded_in_4bit',
        expected=("the layers are quantized; or", "the load says that nothing was quantized."),
        specific=(SPLIT_ALONE, RESIDENT), questions=("Should an empty key match every module of the exemption?",),
    ),
)  # fmt: skip
