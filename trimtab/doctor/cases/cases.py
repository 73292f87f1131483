"""Which cases are there: base placement x quantization x adapter x call?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from trimtab.checkpoint.names import near_names
from trimtab.errors import RequestError

MODES = ("text", "image", "audio")
BROAD_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Descriptions of the target_modules of an adapter's copies, for records.
TARGETS = {
    "patched": "exactly the modules that it has weights for", "broad": ", ".join(BROAD_TARGETS),
    "narrow": "the language model's modules alone, though it has weights for the towers", "original": "as they were saved",
}  # fmt: skip
PEFT_PREFIX = "base_model.model."
Place = int | str


@dataclass(frozen=True)
class Parts:
    """The modules of one model that a map can name, by module path.

    children: direct children of the root, including the head. towers: those for images or audio. language: the language
    model; the root itself in a text-only model. language_children: its direct children. layers: path of the list of
    decoder layers, "" if there is none.
    """

    children: tuple[str, ...]
    towers: tuple[str, ...]
    language: str
    language_children: tuple[str, ...]
    layers: str
    layer_count: int


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case: everything that a run needs and that does not depend on the model.

    quant: "none", "nf4" (no double quant), "nf4-dq" or "int8", bf16 compute, offload to the CPU allowed. keep: "towers"
    leaves towers and connectors unquantized with a skip list. base_map: a name that `device_map` knows. gpu_share: for
    "auto", the share of the model that max_memory grants the GPU. load: more arguments of from_pretrained; a folder
    among them lies below the run's own. adapter: "patched" (a copy whose target_modules name exactly what its keys
    name), "broad" (a copy whose target_modules are BROAD_TARGETS), "narrow" (a copy that targets the language model
    alone) or "original". call: how the adapter is attached. peft: arguments of PeftModel.from_pretrained; `peft_map`
    names its device_map. then: steps before the model is run. pressure: share of an imitated card that the loaded base
    fills. shows: catalogue ids that it can trigger. lane: a merge lane's or target lane's name.
    """

    name: str
    title: str
    quant: str = "nf4"
    keep: str = ""
    base_map: str = "all"
    gpu_share: float | None = None
    load: Mapping[str, Any] = field(default_factory=dict)
    adapter: str = "patched"
    call: str = "peft"
    peft: Mapping[str, Any] = field(default_factory=dict)
    peft_map: str = ""
    then: str = ""
    pressure: float | None = None
    shows: tuple[str, ...] = ()
    lane: str = ""

    @property
    def needs_towers(self) -> bool:
        return self.base_map not in ("all", "auto", "cpu", "blocks") or self.adapter == "broad" or "D3" in self.shows

    @property
    def needs_adapter(self) -> bool:
        return self.call not in ("none", "dispatch")

    @property
    def unquantized(self) -> str:
        """The unquantized modules: "towers" (by skip list or by their placement), "all", or "" (the default list)."""
        if self.quant == "none" or self.base_map == "cpu":
            return "all"
        return "towers" if self.keep or self.base_map not in ("all", "auto") else ""

    @property
    def reference(self) -> str:
        """The name of the all-on-one-device model with the same formats that the answer is compared with."""
        return "none" if self.unquantized == "all" else f"{self.quant}{'+' if self.unquantized else ''}{self.unquantized}"

    @property
    def line_reference(self) -> str:
        """The same for trimtab: it quantizes weights on every device, and merges from the original checkpoint."""
        if self.then and self.lane != "direct-4bit-merge":
            return "none"
        return self.quant if self.base_map == "cpu" else self.reference

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        values["shows"] = list(self.shows)
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Case:
        return cls(**{**values, "shows": tuple(values.get("shows", ()))})


_OFFLOAD = {"offload_dir": "offload", "offload_buffers": True, "ephemeral_gpu_offload": True, "torch_device": 0}

# 0.45: the share of a 14.6 GiB card that E2B took in a user's report. The rest has space for some layers, not all.
CASES: tuple[Case, ...] = (
    Case(
        name="FIRST_REPORT", title="the first report's own script: its map, attention, loading and offload arguments",
        quant="nf4-dq", base_map="towers-projector", pressure=0.45,
        load={"attn_implementation": "sdpa", "low_cpu_mem_usage": False, "offload_folder": "offload"},
        shows=("A1", "A3", "B1", "B2", "C5", "D3"),
    ),
    Case(name="R05_ALL_GPU_4BIT", title="all on the GPU in 4 bits, multimodal adapter", keep="towers"),
    Case(
        name="R05_ALL_GPU_4BIT_DOUBLE_QUANT", title="the same with double quantization", quant="nf4-dq", keep="towers",
    ),
    Case(
        name="R03_SPLIT_4BIT", title="towers off the GPU, adapter with the offload arguments, card 45 % full",
        base_map="towers", peft=_OFFLOAD, pressure=0.45, shows=("A2", "A3", "A4", "B1", "B2", "B7"),
    ),
    Case(
        name="R03_SPLIT_4BIT_DOUBLE_QUANT", title="the same with double quantization", quant="nf4-dq",
        base_map="towers", peft=_OFFLOAD, pressure=0.45, shows=("A1", "A3", "B1", "B2", "B7"),
    ),
    Case(
        name="SPLIT_4BIT_NO_ADAPTER", title="towers off the GPU, no adapter", base_map="towers", call="none",
        shows=("A4", "C4"),
    ),
    Case(
        name="SPLIT_4BIT_ADAPTER", title="towers off the GPU, adapter with no map for PEFT, room to spare",
        base_map="towers", shows=("B1",),
    ),
    Case(
        name="SPLIT_4BIT_ADAPTER_PRESSED", title="the same on a card 45 % full", quant="nf4-dq", base_map="towers",
        pressure=0.45, shows=("A1", "A2", "A3", "B1", "B2"),
    ),
    Case(
        name="SPLIT_4BIT_ADAPTER_FULL_CARD", title="the same on a card 90 % full", base_map="towers", pressure=0.9,
        shows=("A2", "A3", "B1", "B2"),
    ),
    Case(
        name="SPLIT_4BIT_ADAPTER_SAME_MAP", title="towers off the GPU, PEFT given the base's own map", base_map="towers",
        peft_map="towers", shows=("B3", "B4"),
    ),
    Case(
        name="SPLIT_4BIT_ADAPTER_SAME_MAP_NO_CATCH_ALL", title="the same with a map that has no catch-all entry",
        base_map="towers-explicit", peft_map="towers-explicit", shows=("B3",),
    ),
    Case(
        name="SPLIT_4BIT_ADAPTER_PREFIXED_MAP", title="the same map with PEFT's prefix before every key",
        base_map="towers-explicit", peft_map="prefixed:towers-explicit", shows=("B4",),
    ),
    Case(
        name="SPLIT_4BIT_NATIVE_LOAD", title="towers off the GPU, transformers' own load_adapter",
        base_map="towers-explicit", call="native", shows=("B9", "B8"),
    ),
    Case(
        name="SPLIT_4BIT_BRIDGE", title="towers off the GPU, trimtab.bridge.load_peft", base_map="towers-explicit",
        adapter="original", call="bridge",
    ),
    Case(
        name="SPLIT_4BIT_BRIDGE_PRESSED", title="the first report's map on a card 45 % full, trimtab.bridge.load_peft",
        quant="nf4-dq", base_map="towers", adapter="original", call="bridge", pressure=0.45,
    ),
    Case(
        name="BROAD_TARGETS_4BIT", title="adapter whose target_modules are the broad projection names", keep="towers",
        adapter="broad", shows=("D1",), lane="clippable",
    ),
    Case(
        name="NARROW_CONFIG", title="adapter whose config leaves the towers out although it has weights for them",
        keep="towers", adapter="narrow", shows=("E3",),
    ),
    Case(
        name="MERGE_DIRECT_4BIT", title="merge_and_unload() on the 4-bit base", keep="towers", then="merge",
        shows=("F1",), lane="direct-4bit-merge",
    ),
    Case(
        name="MERGE_FRESH_BF16", title="merge_and_unload() on a fresh bf16 base", quant="none", then="merge",
        lane="fresh-bf16-merge",
    ),
    Case(
        name="MERGE_DEQUANTIZE_IN_PLACE", title="dequantize() under the adapter, then merge", keep="towers",
        then="dequantize, merge", shows=("F2",),
    ),
    Case(
        name="MERGE_DEQUANTIZE_BASE_FIRST", title="base.dequantize(), then the adapter, then merge", keep="towers",
        call="dequantize, peft", then="merge",
    ),
    Case(
        name="MERGE_SPLIT_BF16", title="merge on a bf16 base with towers off the GPU, PEFT's map with a catch-all entry",
        quant="none", base_map="towers", peft_map="prefixed:towers", then="merge", shows=("C2", "B4"),
    ),
    Case(
        name="SPLIT_INT8", title="towers off the GPU in 8 bits, adapter", quant="int8", base_map="towers", shows=("B1",),
    ),
    Case(
        name="SPLIT_INT8_PRESSED", title="the same on a card 45 % full", quant="int8", base_map="towers", pressure=0.45,
        shows=("A3", "A7", "B2"),
    ),
    Case(
        name="SPLIT_BF16_NO_ADAPTER", title="towers off the GPU without quantization, no adapter", quant="none",
        base_map="towers", call="none",
    ),
    Case(
        name="SPLIT_BF16", title="towers off the GPU without quantization, adapter", quant="none", base_map="towers",
        shows=("B1",),
    ),
    Case(
        name="SPLIT_BF16_PRESSED", title="the same on a card 45 % full", quant="none", base_map="towers", pressure=0.45,
        shows=("B2", "B4"),
    ),
    Case(
        name="DISK_TOWER_NO_ADAPTER", title="vision tower on disk, no catch-all entry, no adapter", quant="none",
        base_map="disk-explicit", call="none",
    ),
    Case(
        name="DISK_TOWER", title="vision tower on disk, no catch-all entry, adapter", quant="none",
        base_map="disk-explicit", shows=("B5", "B6"),
    ),
    Case(
        name="DISK_TOWER_PREFIXED_MAP", title="the same with the map given to PEFT too, PEFT's prefix before every key",
        quant="none", base_map="disk-explicit", peft={"offload_dir": "offload"}, peft_map="prefixed:disk-explicit",
        shows=("B5", "B6"),
    ),
    Case(
        name="DISK_MAP_NO_FOLDER", title="vision tower on disk by PEFT's map, the offload folder given to the base alone",
        quant="none", base_map="towers-explicit", load={"offload_folder": "offload"}, peft_map="prefixed:disk-explicit",
        shows=("B7",),
    ),
    Case(
        name="DISK_TOWER_CATCH_ALL", title="vision tower on disk and a catch-all entry, no adapter", quant="none",
        base_map="disk", call="none", shows=("C1",),
    ),
    Case(
        name="EMBED_TOKENS_OFFLOADED", title="the token embedding off the GPU", base_map="embed", keep="towers",
        call="none", shows=("D4",),
    ),
    Case(
        name="AUDIO_TOWER_QUANTIZED", title="all on the GPU, towers quantized too", shows=("D2", "H1"),
    ),
    Case(
        name="ATTN_SDPA", title='attn_implementation="sdpa"', keep="towers", load={"attn_implementation": "sdpa"},
        shows=("D3",),
    ),
    Case(
        name="MAP_KEY_MISSING", title="a map with model.multi_modal_projector, which the model does not have",
        base_map="towers-projector", call="none", shows=("C5",),
    ),
    Case(
        name="NOTHING_QUANTIZED", title="all on the CPU with the offload flag", base_map="cpu", call="none",
        shows=("A5",),
    ),
    Case(
        name="BLOCKS_OFFLOADED_4BIT", title="4-bit layers given to the CPU, layer by layer", keep="towers",
        base_map="all", call="dispatch", peft_map="blocks", shows=("A2", "A3"),
    ),
    Case(
        name="BLOCKS_OFFLOADED_4BIT_DOUBLE_QUANT", title="the same with double quantization", quant="nf4-dq",
        keep="towers", base_map="all", call="dispatch", peft_map="blocks", shows=("A1", "A3"),
    ),
    Case(
        name="BLOCKS_OFFLOADED_INT8", title="8-bit layers given to the CPU, layer by layer", quant="int8", keep="towers",
        base_map="all", call="dispatch", peft_map="blocks", shows=("A3", "A7"),
    ),
    Case(
        name="AUTO_MAP_4BIT", title='device_map="auto" with less memory than the model needs', base_map="auto",
        gpu_share=0.6, call="none", shows=("A6", "A2", "A3"),
    ),
)  # fmt: skip
CASE_NAMES: tuple[str, ...] = tuple(case.name for case in CASES)


def find_cases(names: Sequence[str | Case] | None) -> tuple[Case, ...]:
    """Return the cases of these names in the table's order (None: all); a Case is used unchanged.

    Errors: RequestError with the near names for the first unknown name.
    """
    if names is None:
        return CASES
    if isinstance(names, str):
        names = (names,)
    by_name = {case.name: case for case in CASES}
    cases = []
    for name in names:
        if isinstance(name, Case):
            cases.append(name)
        elif name in by_name:
            cases.append(by_name[name])
        else:
            near = near_names(name.upper().replace("-", "_"), CASE_NAMES)
            raise RequestError("no such case", field="case", value=name, allowed=CASE_NAMES, near=near)
    order = {name: place for place, name in enumerate(CASE_NAMES)}
    return tuple(sorted({case.name: case for case in cases}.values(), key=lambda case: order.get(case.name, len(order))))


def find_parts(paths: Sequence[str]) -> Parts:
    """Return the parts of a model by its module paths (those of `named_modules`, in order)."""
    known = dict.fromkeys(path for path in paths if path)
    children = [path for path in known if path.count(".") == 1 and path.startswith("model.")]
    heads = [path for path in known if "." not in path and path != "model"]
    language = next((path for path in children if path.endswith((".language_model", ".text_model"))), "model")
    language_children = [path for path in known if path.rpartition(".")[0] == language]
    layers = f"{language}.layers" if f"{language}.layers" in known else ""
    count = sum(1 for path in known if layers and path.rpartition(".")[0] == layers)
    towers = [path for path in children if path.endswith(("_tower", ".visual", ".vision_model"))]
    return Parts((*children, *heads), tuple(towers), language, tuple(language_children), layers, count)


# Gemma 4 as in the tiny models of the scripts.
GEMMA4 = Parts(
    (
        "model.language_model", "model.vision_tower", "model.embed_vision", "model.audio_tower", "model.embed_audio",
        "lm_head",
    ),
    ("model.vision_tower", "model.audio_tower"), "model.language_model",
    tuple(f"model.language_model.{name}" for name in (
        "embed_tokens", "layers", "norm", "rotary_emb", "embed_tokens_per_layer", "per_layer_model_projection",
        "per_layer_projection_norm",
    )),
    "model.language_model.layers", 5,
)  # fmt: skip


def device_map(name: str, parts: Parts) -> dict[str, Place] | str:
    """Return the device map of a name for a model's parts, 0 for the GPU; "auto" is returned as text."""
    if name.startswith("prefixed:"):
        base_map = device_map(name.removeprefix("prefixed:"), parts)
        assert isinstance(base_map, dict)
        return {PEFT_PREFIX + key if key else key: place for key, place in base_map.items()}
    explicit: dict[str, Place] = dict.fromkeys(parts.children, 0)
    towers: dict[str, Place] = dict.fromkeys(parts.towers, "cpu")
    disk: dict[str, Place] = {path: "disk" for path in parts.towers if "audio" not in path}
    beside = [path for path in parts.children if path != parts.language and path not in parts.language_children]
    inner: dict[str, Place] = dict.fromkeys(beside, 0)
    language: dict[str, Place] = dict.fromkeys(parts.language_children, 0)
    first_off = parts.layer_count // 2
    layers: dict[str, Place] = {f"{parts.layers}.{index}": 0 if index < first_off else "cpu" for index in range(parts.layer_count)}
    maps: dict[str, dict[str, Place] | str] = {
        "auto": "auto", "all": {"": 0}, "cpu": {"": "cpu"}, "towers": {**towers, "": 0},
        "towers-projector": {**towers, "model.multi_modal_projector": "cpu", "": 0}, "towers-explicit": {**explicit, **towers},
        "disk": {**disk, "": 0}, "disk-explicit": {**explicit, **disk},
        "embed": {**inner, **language, f"{parts.language}.embed_tokens": "cpu"},
        "blocks": {**inner, **{path: 0 for path in language if path != parts.layers}, **layers},
    }  # fmt: skip
    return maps[name]


def skip_modules(parts: Parts) -> list[str]:
    """Return `llm_int8_skip_modules` that keep towers and head unquantized (the list replaces the default one)."""
    return [*parts.towers, *(path for path in parts.children if not path.startswith("model."))]
