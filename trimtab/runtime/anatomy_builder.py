"""How the empty model becomes rows: parts from its sub-models, blocks from its layer lists, caches from its attention."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trimtab.checkpoint.anatomy import Anatomy, Kind, KVLayer, ModuleRow, Part, TensorRow
from trimtab.checkpoint.names import is_under, matches, near_names
from trimtab.checkpoint.packed import PackedEntry
from trimtab.errors import RequestError
from trimtab.runtime.probe import Expression

# Names of sub-configs -> part, by what they contain.
PART_WORDS: tuple[tuple[str, Part], ...] = (
    ("vision", "vision"), ("image", "vision"), ("visual", "vision"), ("audio", "audio"), ("speech", "audio"),
    ("text", "language"), ("llm", "language"), ("thinker", "language"),
)  # fmt: skip


def build_anatomy(
    model: Any, config: Any, sources: Mapping[str, Expression], ties: Mapping[str, str], *,
    packed: Mapping[str, PackedEntry], quant: str, unquantized: Mapping[str, str], keep_unquantized: tuple[str, ...],
    folder: Path,
) -> Anatomy:  # fmt: skip
    """Return one row a module that owns tensors or wraps one. Errors: RequestError for a pattern that names nothing."""
    builder = _Builder(model, config, sources, ties, packed, quant, unquantized, keep_unquantized)
    rows = builder.rows()
    _check_keep(keep_unquantized, rows)
    kv_layers, missing = builder.kv_layers()
    text = config.get_text_config()
    kinds = sorted({"nf4-dq" if p.kind == "nf4" and p.nested else p.kind for p in packed.values()})
    return Anatomy(
        model_class=type(model).__name__, model_type=str(config.model_type), dtype=str(model.dtype).removeprefix("torch."),
        rows=tuple(rows), kv_layers=tuple(kv_layers), hidden_size=int(text.hidden_size), vocab_size=int(text.vocab_size),
        missing_projections=tuple(missing), prequantized=kinds[0] if kinds else None,
    )  # fmt: skip


def _check_keep(keep_unquantized: tuple[str, ...], rows: list[ModuleRow]) -> None:
    linears = [row.module_path for row in rows if row.kind == "linear"]
    lost = [pattern for pattern in keep_unquantized if not any(matches(pattern, path) for path in linears)]
    if lost:
        near = [name for pattern in lost for name in near_names(pattern, linears)]
        raise RequestError("names no linear module", field="keep_unquantized", value=lost, allowed=near)


class _Builder:
    def __init__(
        self, model: Any, config: Any, sources: Mapping[str, Expression], ties: Mapping[str, str],
        packed: Mapping[str, PackedEntry], quant: str, unquantized: Mapping[str, str], keep_unquantized: tuple[str, ...],
    ) -> None:  # fmt: skip
        self.model, self.config, self.sources, self.ties = model, config, sources, ties
        self.packed, self.quant, self.unquantized, self.keep = packed, quant, unquantized, keep_unquantized
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        head = model.get_output_embeddings()
        self.head = next((path for path, module in self.modules.items() if head is not None and module is head), None)
        self.roots = self._roots()
        text = config.get_text_config()
        self.vocabularies = {
            size for size in (getattr(text, "vocab_size", None), getattr(text, "vocab_size_per_layer_input", None)) if size
        }
        tied = {*ties, *ties.values()}
        self.tables = {
            path for path, module in self.modules.items()
            if isinstance(module, nn.Embedding) and module.num_embeddings in self.vocabularies
            and (type(module) is nn.Embedding or hasattr(module, "embed_scale"))
            and f"{path}.weight" not in tied and "position" not in path
        }  # fmt: skip

    def _roots(self) -> dict[str, Part]:
        """Return {path: part} of the sub-models whose config is one of the config's sub-configs."""
        parts: list[tuple[Any, Part]] = []
        for name in getattr(self.config, "sub_configs", None) or {}:
            sub = getattr(self.config, name, None)
            part = next((part for word, part in PART_WORDS if word in name), None)
            if sub is not None and part is not None:
                parts.append((type(sub), part))
        found: dict[str, Part] = {}
        for path, module in self.modules.items():
            sub = getattr(module, "config", None)
            if not path or sub is None or any(is_under(path, root) for root in found):
                continue
            part = next((part for kind, part in parts if type(sub) is kind), None)
            # Layers and rotary embeddings carry the config too; a sub-model holds the layers.
            if part is not None and hasattr(module, "post_init"):
                found[path] = part
        return found

    def rows(self) -> list[ModuleRow]:
        rows = []
        for path, module in self.modules.items():
            tensors = self._tensors(path, module)
            wraps = self._wraps(path, module)
            if tensors or wraps:
                rows.append(self._row(path, module, tensors, wraps))
        return rows

    def _tensors(self, path: str, module: nn.Module) -> tuple[TensorRow, ...]:
        prefix = f"{path}." if path else ""
        own: list[tuple[str, Tensor, bool]] = [
            (name, value, False) for name, value in module._parameters.items() if value is not None
        ] + [(name, value, True) for name, value in module._buffers.items() if value is not None]
        rows = []
        for name, value, is_buffer in own:
            full = prefix + name
            expression = self.sources.get(full)
            rows.append(
                TensorRow(
                    tensor_path=full, shape=tuple(value.shape), dtype=str(value.dtype).removeprefix("torch."),
                    is_buffer=is_buffer, sources=expression.leaves if expression is not None else (),
                    tied_to=self.ties.get(full),
                )
            )  # fmt: skip
        return tuple(rows)

    def _wraps(self, path: str, module: nn.Module) -> str | None:
        inner = module._modules.get("linear")
        is_wrapper = type(inner) is nn.Linear and "Linear" in type(module).__name__
        return f"{path}.linear" if is_wrapper else None

    def _row(self, path: str, module: nn.Module, tensors: tuple[TensorRow, ...], wraps: str | None) -> ModuleRow:
        kind = self._kind(path, module, tensors)
        quantized, why = self._quantized(path, kind)
        return ModuleRow(
            module_path=path, class_name=type(module).__name__, part=self._part(path), kind=kind, block=self._block(path),
            tensors=tensors, quantized=quantized, why_unquantized=why, wraps=wraps, gather_only=path in self.tables,
        )  # fmt: skip

    def _kind(self, path: str, module: nn.Module, tensors: tuple[TensorRow, ...]) -> Kind:
        if type(module) is nn.Linear:
            return "linear"
        if isinstance(module, nn.Embedding):
            return "embedding"
        fused = any(len(tensor.shape) == 3 and not tensor.is_buffer for tensor in tensors)
        return "experts" if fused and "expert" in f"{path} {type(module).__name__}".lower() else "other"

    def _quantized(self, path: str, kind: Kind) -> tuple[bool, str]:
        if self.packed:
            expression = self.sources.get(f"{path}.weight")
            is_packed = expression is not None and expression.is_leaf and expression.leaves[0] in self.packed
            if kind == "linear":
                return is_packed, "" if is_packed else "not packed in the checkpoint"
            return False, "fused experts" if kind == "experts" else ""
        if self.quant == "none" or kind not in ("linear", "experts"):
            return False, ""
        if kind == "experts":
            return False, "fused experts: bitsandbytes has no 3-D format"
        if any(matches(pattern, path) for pattern in self.keep):
            return False, "asked for with keep_unquantized"
        why = self.unquantized.get(path, "")
        return not why, why

    def _part(self, path: str) -> Part:
        if path in self.tables:
            return "table"
        if self.head is not None and is_under(path, self.head):
            return "head"
        root = self._root(path)
        if root is not None:
            return self.roots[root]
        return "connector" if self._towers() and path else "language"

    def _towers(self) -> bool:
        return any(part in ("vision", "audio") for part in self.roots.values())

    def _root(self, path: str) -> str | None:
        return max((root for root in self.roots if is_under(path, root)), key=len, default=None)

    def _block(self, path: str) -> str:
        if path in self.tables:
            return path
        segments = path.split(".")
        for end in range(1, len(segments)):
            if isinstance(self.modules[".".join(segments[:end])], nn.ModuleList):
                return ".".join(segments[: end + 1])
        if self.head is not None and is_under(path, self.head):
            return self.head
        root = self._root(path)
        if root is not None:
            return root
        # A connector: the child beside the sub-models that it lies under, or it is part of the plain text model.
        parents = {root.rpartition(".")[0] for root in self.roots}
        for parent in sorted(parents, key=len, reverse=True):
            if is_under(path, parent) and path != parent:
                rest = path[len(parent) + 1 :] if parent else path
                return f"{parent}.{rest.split('.')[0]}" if parent else rest.split(".")[0]
        base = str(getattr(self.model, "base_model_prefix", ""))
        return base if base in self.modules and is_under(path, base) else path.split(".")[0]

    # The cache --------------------------------------------------------------------------------------------------------

    def kv_layers(self) -> tuple[list[KVLayer], list[str]]:
        """Return the cache of every decoder layer, and the k/v projections that KV-shared layers do not have."""
        text = self.config.get_text_config()
        paths = self._decoder_layers(int(text.num_hidden_layers))
        types = getattr(text, "layer_types", None)
        window = getattr(text, "sliding_window", None)
        shared_from = len(paths) - int(getattr(text, "num_kv_shared_layers", 0) or 0)
        layers: list[KVLayer] = []
        missing: list[str] = []
        for place, path in enumerate(paths):
            kind = types[place] if types else ("sliding_attention" if window else "full_attention")
            heads, width = self._geometry(path, text, kind)
            shares = None
            if place >= shared_from:
                shares = max((i for i in range(shared_from) if types and types[i] == kind), default=None)
                attention = f"{path}.self_attn"
                if attention in self.modules:
                    missing += [f"{attention}.{p}" for p in ("k_proj", "v_proj") if f"{attention}.{p}" not in self.modules]
            sliding = int(window) if kind == "sliding_attention" and window else None
            if heads:
                layers.append(KVLayer(place, heads, width, sliding, shares))
        return layers, missing

    def _decoder_layers(self, count: int) -> list[str]:
        for path, module in self.modules.items():
            if isinstance(module, nn.ModuleList) and len(module) == count and path.rpartition(".")[2] == "layers":
                if self._part(path) == "language":
                    return [f"{path}.{i}" for i in range(count)]
        return []

    def _geometry(self, path: str, text: Any, kind: str) -> tuple[int, int]:
        attention = self.modules.get(f"{path}.self_attn")
        width = int(getattr(attention, "head_dim", 0) or getattr(text, "head_dim", 0) or 0)
        if not width:
            width = int(text.hidden_size) // int(text.num_attention_heads)
        projection = getattr(attention, "k_proj", None)
        if isinstance(projection, nn.Linear):
            return projection.out_features // width, width
        heads = int(getattr(text, "num_key_value_heads", 0) or getattr(text, "num_attention_heads", 0) or 0)
        if kind == "full_attention":
            width = int(getattr(text, "global_head_dim", None) or width)
        return heads, width
