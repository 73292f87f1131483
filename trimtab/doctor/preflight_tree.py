"""The model that PEFT hands to accelerate, as a tree of sizes: the stock base with its packed weights, LoRA layers in place.

Sizes are those that accelerate counts (number of elements times size of the dtype): a 4-bit weight counts its packed
bytes, its scales nothing, LoRA weights four bytes a number (PEFT keeps them in float32). Source: PEFT 0.19.1 and 0.21.2,
tuners/lora/layer.py (which child modules a LoRA layer has, and in which order), utils/other.py, ModulesToSaveWrapper.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trimtab.checkpoint.adapter import AdapterSpec, AdapterTarget
from trimtab.checkpoint.adapter_config import is_saved
from trimtab.checkpoint.adapter_keys import PEFT_HEAD, own_path
from trimtab.checkpoint.anatomy import DTYPE_BYTES, ModuleRow
from trimtab.doctor.preflight_replan import Node, Number
from trimtab.doctor.preflight_shape import ModelShape, ModuleShape, OwnTensor
from trimtab.plan.cost import packed_bytes

ROOT = PEFT_HEAD.rstrip(".")
LORA_BYTES = 4
ADAPTER_NAME = "default"


@dataclass(frozen=True)
class Wrapped:
    """The tree and its tied parameters (groups of paths), both in the wrapped model's names."""

    root: Node
    ties: tuple[tuple[str, ...], ...]


def stock_kept(shape: ModelShape, *, takes_map: bool) -> dict[str, str]:
    """Return module_path -> reason of the linears that the stock stack leaves unquantized.

    takes_map: whether the map's CPU and disk keys count (llm_int8_enable_fp32_cpu_offload with a map as a dict).
    """
    if shape.quant == "none":
        return {}
    found = {row.module_path: row.why_unquantized for row in shape.anatomy.rows if row.why_unquantized}
    # A checkpoint that is already packed stays packed where it is packed, whatever the map says.
    if takes_map and shape.anatomy.prequantized is None:
        for path, key in shape.skipped_by_key.items():
            found.setdefault(path, f"the map's key {key!r} is on the CPU or disk")
    return found


def quantized_paths(shape: ModelShape, kept: Mapping[str, str]) -> frozenset[str]:
    """Return the linears whose weight the stock stack quantizes."""
    return frozenset(row.module_path for row in shape.anatomy.rows if row.quantized and row.module_path not in kept)


def weight_bytes(row: ModuleRow, kind: str) -> int:
    """Return the bytes of a linear's weight in a format, scales included."""
    weight = row.weight
    return 0 if weight is None else packed_bytes(weight.shape, kind, weight.dtype)


def stock_bytes(shape: ModelShape, quantized: frozenset[str]) -> dict[str, int]:
    """Return tensor_path -> the bytes it really takes in the loaded stock model, scales included; no tied copies."""
    rows, found = shape.anatomy.by_path(), {}
    for module in shape.modules:
        for own in module.tensors:
            if own.tied_to is not None:
                continue
            size = own.numel * DTYPE_BYTES.get(own.dtype, 4)
            if own.name == "weight" and module.module_path in quantized:
                size = weight_bytes(rows[module.module_path], shape.quant)
            found[f"{module.module_path}.{own.name}".lstrip(".")] = size
    return found


def _counted(shape: ModelShape, quantized: frozenset[str], module_path: str, own: OwnTensor) -> Number:
    """Return the bytes that accelerate counts for a tensor."""
    if own.name == "weight" and module_path in quantized:
        return own.numel if shape.quant == "int8" else (own.numel + 1) // 2
    if own.dtype == "bool":
        return own.numel / 8
    return own.numel * DTYPE_BYTES.get(own.dtype, 4)


def wrapped_tree(shape: ModelShape, quantized: frozenset[str], spec: AdapterSpec | None) -> Wrapped:
    """Return the tree of the PeftModel with the adapter (None: with an adapter that adds nothing)."""
    builder = _Builder(shape, quantized, () if spec is None else spec.targets, {} if spec is None else spec.file.config)
    model = builder.node("", f"{ROOT}")
    root = Node("", "PeftModel", children=(Node("base_model", "LoraModel", children=(model,)),))
    return Wrapped(root, builder.ties())


class _Builder:
    def __init__(
        self, shape: ModelShape, quantized: frozenset[str], targets: Iterable[AdapterTarget],
        config: Mapping[str, object],
    ) -> None:  # fmt: skip
        self.shape, self.quantized = shape, quantized
        self.lora = {target.module_path: target for target in targets if target.kind != "saved"}
        # Only what modules_to_save names is wrapped; other full weights are copied into the base.
        self.saved = {
            target.module_path for target in targets
            if target.kind == "saved" and is_saved(config, own_path(target.adapter_path))
        }  # fmt: skip
        self.below: dict[str, list[ModuleShape]] = {}
        self.modules = {found.module_path: found for found in shape.modules}
        for found in shape.modules:
            if found.module_path:
                self.below.setdefault(found.module_path.rpartition(".")[0], []).append(found)
        self.names: dict[str, str] = {}

    def node(self, module_path: str, path: str) -> Node:
        """Return the tree of one module; path is its path in the wrapped model."""
        if module_path in self.saved:
            return self._saved(module_path, path)
        if module_path in self.lora:
            return self._lora(self.lora[module_path], path)
        return self._plain(module_path, path)

    def _plain(self, module_path: str, path: str) -> Node:
        found = self.modules[module_path]
        held: dict[bool, list[tuple[str, Number]]] = {False: [], True: []}
        for own in found.tensors:
            size = _counted(self.shape, self.quantized, module_path, own)
            held[own.is_buffer].append((f"{path}.{own.name}", size))
            self.names[f"{module_path}.{own.name}"] = f"{path}.{own.name}"
        children = tuple(
            self.node(child.module_path, f"{path}.{child.module_path.rpartition('.')[2]}")
            for child in self.below.get(module_path, ())
        )
        return Node(path, found.class_name, tuple(held[False]), tuple(held[True]), children)

    def _lora(self, target: AdapterTarget, path: str) -> Node:
        numel = {role: entry.nbytes // DTYPE_BYTES[entry.dtype] for role, entry in target.tensors.items()}

        def holder(name: str, **tensors: int) -> Node:
            """A ModuleDict of one layer that holds the named tensors."""
            own = f"{path}.{name}.{ADAPTER_NAME}"
            inside = tuple((f"{own}.{tensor}", LORA_BYTES * count) for tensor, count in tensors.items() if count)
            return Node(f"{path}.{name}", "ModuleDict", children=(Node(own, "Linear", inside),))

        def table(name: str, role: str) -> Node:
            own = ((f"{path}.{name}.{ADAPTER_NAME}", LORA_BYTES * numel[role]),) if embedding else ()
            return Node(f"{path}.{name}", "ParameterDict", own)

        embedding = target.kind == "embedding"
        empty = (Node(f"{path}.lora_A", "ModuleDict"), Node(f"{path}.lora_B", "ModuleDict"))
        full = (holder("lora_A", weight=numel.get("A", 0)),
                holder("lora_B", weight=numel.get("B", 0), bias=numel.get("B_bias", 0)))  # fmt: skip
        magnitude = Node(f"{path}.lora_magnitude_vector", "ModuleDict")
        if target.use_dora:
            magnitude = holder("lora_magnitude_vector", weight=numel["magnitude"])
        children = (
            self._plain(target.module_path, f"{path}.base_layer"), holder("lora_dropout"),
            *(empty if embedding else full), table("lora_embedding_A", "A"), table("lora_embedding_B", "B"), magnitude,
        )  # fmt: skip
        return Node(path, "LoraLayer", children=children)

    def _saved(self, module_path: str, path: str) -> Node:
        original = self._plain(module_path, f"{path}.original_module")
        kept = dict(self.names)
        copy = self._plain(module_path, f"{path}.modules_to_save.{ADAPTER_NAME}")
        self.names = kept  # a tie is with the original, the copy is its own
        copies = Node(f"{path}.modules_to_save", "ModuleDict", children=(copy,))
        return Node(path, "ModulesToSaveWrapper", children=(original, copies))

    def ties(self) -> tuple[tuple[str, ...], ...]:
        groups: dict[str, list[str]] = {}
        for found in self.shape.modules:
            for own in found.tensors:
                if own.tied_to is not None and not own.is_buffer:
                    groups.setdefault(own.tied_to, [own.tied_to]).append(f"{found.module_path}.{own.name}")
        named = ([self.names[name] for name in group if name in self.names] for group in groups.values())
        return tuple(tuple(sorted(group)) for group in named if len(group) > 1)
