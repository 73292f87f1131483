"""Which modules does the empty model have, as rows: modalities, blocks and caches?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from trimtab.checkpoint.anatomy import DTYPE_BYTES, Anatomy, Kind, KVLayer, ModuleRow, Part, TensorRow, check_keep
from trimtab.checkpoint.config_limits import experts_per_token
from trimtab.checkpoint.names import Rename, is_under, matches
from trimtab.engine.loader.pieces import formats_of_files, why_not_packed
from trimtab.engine.loader.tracing import Expression
from trimtab.engine.lora.experts import why_no_lora
from trimtab.engine.lora.routers import takes_lora
from trimtab.errors import CheckpointError, RequestError
from trimtab.formats.packed import format_names
from trimtab.formats.record import MADE_STACKS, SHOWN_PROBLEMS, PackedEntry, float_dtype, stored_format
from trimtab.request import EXPERTS, MADE_EXPERTS

if TYPE_CHECKING:
    from trimtab.engine.formats.hf_types import Config, HFModel

# Words in names of sub-configs -> part; a sub-config with none of them (a projector's, a talker's) is no part.
PART_WORDS: tuple[tuple[str, Part], ...] = (
    ("vision", "vision"), ("image", "vision"), ("visual", "vision"), ("audio", "audio"), ("speech", "audio"),
    ("sound", "audio"), ("text", "language"), ("llm", "language"), ("language", "language"),
)  # fmt: skip
# Model types whose forward computes with the whole word table, not with rows of it (transformers 5.23.0: deberta heads
# multiply by it, diffusion_gemma's self-conditioning, t5gemma's shared table).
READS_WHOLE_TABLE = ("deberta", "diffusion_gemma", "t5gemma")
# Class -> its Linears whose weight its own forward reads, so that the Linear is not called. Source: transformers 5.23.0.
READS_WEIGHT: Mapping[str, tuple[str, ...]] = {
    "MambaMixer": ("dt_proj",), "FalconMambaMixer": ("dt_proj",), "JambaMambaMixer": ("dt_proj",),
    "LongcatFlashTopkRouter": ("classifier",),
}  # fmt: skip


def build_anatomy(
    model: HFModel, config: Config, sources: Mapping[str, Expression], ties: Mapping[str, str], *, dtype: str,
    packed: Mapping[str, PackedEntry], quant: str, unquantized: Mapping[str, str], keep_unquantized: tuple[str, ...],
    windows: tuple[int | None, ...] | None, renames: tuple[Rename, ...], head: str = "full",
    file_dtype: Callable[[str], str | None] | None = None, experts: str = EXPERTS[1],
) -> Anatomy:  # fmt: skip
    """Return one row a module that owns tensors or wraps one.

    windows: of the layers of stock's cache, None to read them from the config. renames: of `read_renames`. head: "int8" makes the
    output head a separate module, tied to nothing. file_dtype: the type of a tensor of the files, where weights that are looked up
    or multiplied stay in it if it has fewer bits than `dtype`; None where all are cast. experts: of stacked ones, as `LoadRequest`
    has it. Errors: RequestError for a pattern that names nothing, for a model without such a head, and with all reasons why experts
    cannot be packed.
    """
    copies: dict[str, str] | None = None
    if head == "int8":
        copies, ties = _untied_head(_head_path(model, sources, packed, keep_unquantized), ties)
    places = _Places(model, config, ties)
    formats = _Formats(sources, packed, quant, unquantized, keep_unquantized)
    rows = tuple(_rows(places, formats, sources, ties, copies, config))
    if file_dtype is not None:
        rows = _narrowed(rows, places, sources, file_dtype)
    if experts in MADE_EXPERTS:
        rows = _packed_experts(rows, places, sources, packed, ties, experts)
    elif packed:
        rows = tuple(_stored_experts(row, places, packed, ties, is_kept=experts == EXPERTS[0]) for row in rows)
    check_keep(keep_unquantized, rows)
    caches = _Caches(places, config.get_text_config(), windows)
    text = config.get_text_config()
    kinds = format_names(packed)
    return Anatomy(
        model_class=type(model).__name__, model_type=str(config.model_type), dtype=dtype, rows=rows,
        kv_layers=tuple(caches.layers()), hidden_size=int(text.hidden_size), vocab_size=int(text.vocab_size),
        missing_projections=tuple(caches.missing_projections()), prequantized=kinds[0] if kinds else None,
        renames=renames,
    )  # fmt: skip


def _head_path(
    model: HFModel, sources: Mapping[str, Expression], packed: Mapping[str, PackedEntry], keep_unquantized: tuple[str, ...]
) -> str:
    """Return the path of the head that an 8-bit copy can replace. Errors: RequestError if there is none."""
    head = model.get_output_embeddings()
    path = next((path for path, module in model.named_modules() if head is not None and module is head), None)
    if path is None:
        raise RequestError(f"{type(model).__name__} has no language head", field="head", value="int8", allowed=("full",))
    if type(head) is not nn.Linear:
        raise RequestError(
            f"the head {path} is a {type(head).__name__}, not a plain Linear", field="head", value="int8", allowed=("full",)
        )
    expression = sources.get(f"{path}.weight")
    if expression is not None and any(leaf in packed for leaf in expression.leaves):
        raise RequestError(
            f"the checkpoint already holds {path} quantized or in a GGUF file: it stays so", field="head", value="int8",
            allowed=("full",),
        )  # fmt: skip
    named = [pattern for pattern in keep_unquantized if matches(pattern, path)]
    if named:
        raise RequestError(
            f"keep_unquantized names {path} as well ({', '.join(named)})", field="head", value="int8", hint="Give one"
        )
    return path


def _untied_head(path: str, ties: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return (the head's weight -> its former owner, the ties without it)."""
    weight = f"{path}.weight"
    copies = {weight: ties[weight]} if weight in ties else {}
    remaining = {name: owner for name, owner in ties.items() if name != weight}
    heirs = [name for name, owner in remaining.items() if owner == weight]
    if heirs:  # the head was the owner: the first of the others takes its place
        copies[weight] = heirs[0]
        remaining = {name: heirs[0] if owner == weight else owner for name, owner in remaining.items() if name != heirs[0]}
    return copies, remaining


def _packed_experts(
    rows: tuple[ModuleRow, ...], places: _Places, sources: Mapping[str, Expression], packed: Mapping[str, PackedEntry],
    ties: Mapping[str, str], kind: str,
) -> tuple[ModuleRow, ...]:  # fmt: skip
    """Return the rows with every stack of experts in a format. Errors: RequestError if there is none, or one that cannot be."""
    tied, made = {*ties, *ties.values()}, MADE_STACKS.get(kind, kind)
    stacked = {row.module_path: row for row in rows if row.kind == "experts"}
    problems = [
        f"{path}: {problem}"
        for path, row in stacked.items()
        for problem in why_not_packed(places.modules[path], row.tensors, sources, packed, tied, made)
    ]
    if problems or not stacked:
        more = f"; and {len(problems) - SHOWN_PROBLEMS} more" if len(problems) > SHOWN_PROBLEMS else ""
        why = "; ".join(problems[:SHOWN_PROBLEMS]) + more or "the model has no stacked experts"
        raise RequestError(f"cannot be packed: {why}", field="experts", value=kind, allowed=EXPERTS[:2])
    return tuple(replace(row, quantized=True, why_unquantized="", made=made) if row.module_path in stacked else row for row in rows)


def _stored_experts(
    row: ModuleRow, places: _Places, packed: Mapping[str, PackedEntry], ties: Mapping[str, str], *, is_kept: bool
) -> ModuleRow:
    """Return a row whose experts stay in the format of the files, or say why they do not. is_kept: whether they may."""
    formats, problems = formats_of_files(places.modules[row.module_path], row, packed, {*ties, *ties.values()})
    if not formats or not is_kept:
        why = "; ".join(problems) or (f"requested (experts={EXPERTS[1]!r})" if formats else "")
        return replace(row, why_unquantized=f"experts of the files, dequantized: {why}") if why else row
    tensors = tuple(replace(one, stored=formats.get(one.tensor_path)) for one in row.tensors)
    return replace(row, quantized=True, why_unquantized="", tensors=tensors)


# Rows -----------------------------------------------------------------------------------------------------------------


def _rows(
    places: _Places, formats: _Formats, sources: Mapping[str, Expression], ties: Mapping[str, str],
    head_copies: Mapping[str, str] | None, config: Config,
) -> Iterator[ModuleRow]:  # fmt: skip
    for path, module in places.modules.items():
        is_head8 = head_copies is not None and path == places.head
        tensors = tuple(_tensors(path, module, sources, ties, (head_copies or {}) if is_head8 else {}))
        wraps = _wrapped(path, module)
        if not tensors and not wraps:
            continue
        kind = _kind(path, module, tensors, is_read=places.is_read(path))
        if kind == "experts" and (empty := next((one for one in tensors if 0 in one.shape[:1]), None)) is not None:
            raise ValueError(f"{empty.tensor_path} is {list(empty.shape)}: a mixture of no experts")
        quantized, why = (False, "") if is_head8 else formats.of(path, module, kind)
        stored = formats.stored(path) if kind in ("linear", "embedding") else None
        if kind == "embedding" and stored is not None and path not in places.tables:
            shared = ties.get(f"{path}.weight") or next((name for name, owner in ties.items() if owner == f"{path}.weight"), None)
            if shared is not None and not stored_format(stored).shares_tables:
                raise CheckpointError(
                    f"is a quantized table that {shared} shares, which transformers cannot compute with either",
                    path=str(getattr(config, "_name_or_path", "")), tensor_name=f"{path}.weight",
                    hint="Mobile files have tie_word_embeddings false and a separate head",
                )  # fmt: skip
            stored = None
        if kind == "embedding" and stored is not None and not stored_format(stored).has_rows:
            raise CheckpointError(
                f"is a table in {stored}, whose parts have no row for each token: its rows cannot be looked up",
                path=str(getattr(config, "_name_or_path", "")), tensor_name=f"{path}.weight",
                hint="Use the files of the same model with an unquantized table",
            )  # fmt: skip
        yield ModuleRow(
            module_path=path, class_name=type(module).__name__, part=places.part(path), kind=kind,
            block=places.block(path), tensors=tensors, quantized=quantized, why_unquantized=why, wraps=wraps,
            gather_only=path in places.tables, is_head8=is_head8, is_router=takes_lora(module), stored=stored,
            is_transposed=bool(getattr(module, "is_transposed", False)),
            is_interleaved=getattr(module, "is_concatenated", True) is False,
            takes_lora=kind == "experts" and why_no_lora(module) is None,
            chosen=experts_per_token(config.get_text_config()) if kind == "experts" else 0,
        )  # fmt: skip


def _tensors(
    path: str, module: nn.Module, sources: Mapping[str, Expression], ties: Mapping[str, str], copies: Mapping[str, str]
) -> Iterator[TensorRow]:
    own: list[tuple[str, Tensor | None, bool]] = [(name, value, False) for name, value in module._parameters.items()]
    own += [(name, value, True) for name, value in module._buffers.items()]
    for name, value, is_buffer in own:
        if value is None:
            continue
        tensor_path = f"{path}.{name}" if path else name
        expression = sources.get(tensor_path)
        yield TensorRow(
            tensor_path=tensor_path, shape=tuple(value.shape), dtype=str(value.dtype).removeprefix("torch."),
            is_buffer=is_buffer, sources=() if expression is None else expression.leaves, tied_to=ties.get(tensor_path),
            copy_of=copies.get(tensor_path), halves=0 if expression is None or value.dim() != 3 else _halves(expression),
        )  # fmt: skip


def _halves(expression: Expression) -> int:
    """Return `TensorRow.halves` of a parameter that the loader makes so."""
    name = getattr(expression.func, "__name__", "")
    if name in ("to", "contiguous"):
        return _halves(expression.args[0])
    dim = expression.kwargs.get("dim", expression.args[1] if len(expression.args) > 1 else 0)
    pieces = expression.args[0] if expression.args and isinstance(expression.args[0], (list, tuple)) else ()
    if name == "stack" and dim == 0:
        return int(all(piece.cast_leaf is not None for piece in pieces))
    is_joined = name in ("cat", "concat", "concatenate") and dim == 1
    return len(pieces) if is_joined and pieces and all(_halves(piece) == 1 for piece in pieces) else 0


def _narrowed(
    rows: tuple[ModuleRow, ...], places: _Places, sources: Mapping[str, Expression], file_dtype: Callable[[str], str | None]
) -> tuple[ModuleRow, ...]:  # fmt: skip
    """Return the rows with each weight in its file's type that has fewer bits, where our own layers compute with it."""
    stored = {}
    for row in rows:
        weight = row.weight
        is_table = row.kind == "embedding" and not row.stored and row.module_path in places.word_tables
        owns = (row.kind == "linear" and not row.quantized) or is_table
        if weight is None or not owns or row.is_head8:
            continue
        expression = sources.get(weight.tensor_path)
        name = None if expression is None else expression.cast_leaf
        dtype = None if name is None else file_dtype(name)
        if dtype is not None and DTYPE_BYTES[dtype] < DTYPE_BYTES[weight.dtype]:
            stored[weight.tensor_path] = dtype
    shared: dict[str, list[str]] = {}  # one storage is narrow for all that share it
    for row in rows:
        for tensor in row.tensors:
            shared.setdefault(tensor.tied_to or tensor.tensor_path, []).append(tensor.tensor_path)
    for paths in shared.values():
        if not all(path in stored for path in paths):
            for path in paths:
                stored.pop(path, None)
    return tuple(
        replace(row, tensors=tuple(replace(tensor, dtype=stored.get(tensor.tensor_path, tensor.dtype)) for tensor in row.tensors))
        for row in rows
    )


def _wrapped(path: str, module: nn.Module) -> str | None:
    inner = module._modules.get("linear")
    return f"{path}.linear" if type(inner) is nn.Linear and "Linear" in type(module).__name__ else None


def _kind(path: str, module: nn.Module, tensors: tuple[TensorRow, ...], *, is_read: bool) -> Kind:
    if type(module) is nn.Linear:
        return "other" if is_read else "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    fused = any(len(tensor.shape) == 3 and not tensor.is_buffer for tensor in tensors)
    return "experts" if fused and "expert" in f"{path} {type(module).__name__}".lower() else "other"


class _Formats:
    """Whether a module's weight is quantized, and if not why."""

    def __init__(
        self, sources: Mapping[str, Expression], packed: Mapping[str, PackedEntry], quant: str,
        unquantized: Mapping[str, str], keep: tuple[str, ...],
    ) -> None:  # fmt: skip
        self.sources, self.packed, self.quant, self.unquantized, self.keep = sources, packed, quant, unquantized, keep

    def of(self, path: str, module: nn.Module, kind: Kind) -> tuple[bool, str]:
        if self.quant == "none" and not self.packed:
            return False, ""
        if kind == "experts":
            return False, f"stacked experts: packed only on request (experts={MADE_EXPERTS[0]!r}), which changes answers"
        if kind == "linear":
            why = self._why_not(path)
            return not why, why
        if type(module) is nn.Linear:
            return False, "the module around it reads its weight"
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            return False, f"a {type(module).__name__}, only plain Linear is quantized"
        return False, ""

    def stored(self, path: str) -> str | None:
        """Return the format in which the files hold a linear's whole weight, None if they hold it unquantized or in several."""
        expression = self.sources.get(f"{path}.weight")
        entry = self.packed.get(expression.leaves[0]) if expression is not None and expression.is_leaf else None
        return None if entry is None else entry.kind

    def _why_not(self, path: str) -> str:
        if self.packed:
            kind = self.stored(path)
            return (
                f"it is {kind} in its file" if kind and float_dtype(kind) else "" if kind else "the checkpoint stores it unpacked"
            )
        if any(matches(pattern, path) for pattern in self.keep):
            return "requested with keep_unquantized"
        return self.unquantized.get(path, "")


# Parts and blocks -----------------------------------------------------------------------------------------------------


class _Places:
    """Which part and which placement block a module belongs to."""

    def __init__(self, model: HFModel, config: Config, ties: Mapping[str, str]) -> None:
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        head = model.get_output_embeddings()
        self.head = next((path for path, module in self.modules.items() if head is not None and module is head), None)
        self.base = str(getattr(model, "base_model_prefix", "") or "")
        self.roots = self._roots(config)
        self.word_tables = {path for path in self.modules if self._is_word_table(path, config)}
        self.tables = {path for path in self.word_tables if f"{path}.weight" not in {*ties, *ties.values()}}  # shared with nothing

    def _roots(self, config: Config) -> dict[str, Part]:
        """Return path -> part of the sub-models that carry one of the config's sub-configs."""
        parts = list(_sub_configs(config))
        roots: dict[str, Part] = {}
        for path, module in self.modules.items():
            # Layers and rotary embeddings carry the config too; only a model has post_init.
            own = getattr(module, "config", None) if hasattr(module, "post_init") and path else None
            part = next((part for sub, part in parts if own is sub or type(own) is type(sub)), None)
            if part is not None and not any(is_under(path, root) for root in roots):
                roots[path] = part
        return roots

    def is_read(self, path: str) -> bool:
        """Return whether the module around a Linear reads its weight."""
        parent, _, name = path.rpartition(".")
        return name in READS_WEIGHT.get(type(self.modules[parent]).__name__, ())

    def _is_word_table(self, path: str, config: Config) -> bool:
        """Return whether a module is an embedding that is only indexed: vocabulary-sized, of known forward."""
        module, text = self.modules[path], config.get_text_config()
        if not isinstance(module, nn.Embedding) or str(config.model_type).startswith(READS_WHOLE_TABLE):
            return False
        known = type(module) is nn.Embedding or hasattr(module, "embed_scale")
        sizes = {getattr(holder, name, None) for holder in (config, text) for name in ("vocab_size", "vocab_size_per_layer_input")}
        return known and module.max_norm is None and module.num_embeddings in sizes and "position" not in path

    def part(self, path: str) -> Part:
        """Return the part: table, head, the sub-model's, a connector of sub-models, or language."""
        if path in self.tables:
            return "table"
        if self.head is not None and is_under(path, self.head):
            return "head"
        root = self._root(path)
        if root is not None:
            return self.roots[root]
        return "connector" if self._joins(path) else "language"

    def _root(self, path: str) -> str | None:
        return max((root for root in self.roots if is_under(path, root)), key=len, default=None)

    def _joins(self, path: str) -> bool:
        towers = [root for root, part in self.roots.items() if part != "language"]
        if not towers or not path or path == self.base:
            return False
        if "language" in self.roots.values():
            return True
        # The language model is the model itself: connectors are next to a tower in a separate container.
        containers = {parent for root in towers for parent in _parents(root)} - {"", self.base}
        return any(is_under(path, container) for container in containers)

    def block(self, path: str) -> str:
        """Return the placement block: a table or head by itself, a list element, a sub-model, a connector, the rest."""
        if path in self.tables:
            return path
        if self.head is not None and is_under(path, self.head):
            return self.head
        for parent in _parents(path):
            if isinstance(self.modules[parent], nn.ModuleList):
                return ".".join(path.split(".")[: parent.count(".") + 2])
        root = self._root(path)
        if root is not None:
            return root
        if self._joins(path):
            beside = {root.rpartition(".")[0] for root in self.roots if is_under(path, root.rpartition(".")[0])}
            depth = max((parent.count(".") + 1 if parent else 0 for parent in beside), default=0)
            return ".".join(path.split(".")[: depth + 1])
        return self.base if self.base in self.modules and is_under(path, self.base) else path.split(".")[0]


def _sub_configs(config: object) -> Iterator[tuple[object, Part]]:
    """Yield (sub-config, part), looking into those that hold sub-configs themselves."""
    for name in getattr(config, "sub_configs", None) or ():
        sub = getattr(config, name, None)
        inner = [] if sub is None else list(_sub_configs(sub))
        part = next((part for word, part in PART_WORDS if word in name), None)
        if inner:
            yield from inner
        elif sub is not None and part is not None:
            yield sub, part


def _parents(path: str) -> list[str]:
    """Return the paths that contain a path, outermost first, without the model itself ("")."""
    words = path.split(".")
    return [".".join(words[:count]) for count in range(1, len(words))]


# The cache ------------------------------------------------------------------------------------------------------------


class _Caches:
    """The shape of every decoder layer's cache, from the text config and the attention modules."""

    def __init__(self, places: _Places, text: Config, windows: tuple[int | None, ...] | None) -> None:
        self.places, self.text, self.windows = places, text, windows
        self.count = int(text.num_hidden_layers)
        self.paths = self._decoder_layers()
        self.types = list(getattr(text, "layer_types", None) or ())
        self.shared_from = self.count - int(getattr(text, "num_kv_shared_layers", 0) or 0)

    def _decoder_layers(self) -> list[str]:
        lists = [
            path for path, module in self.places.modules.items()
            if isinstance(module, nn.ModuleList) and len(module) == self.count and self.places.part(path) == "language"
        ]  # fmt: skip
        named = [path for path in lists if path.rpartition(".")[2] in ("layers", "h", "blocks")] or lists
        return [f"{named[0]}.{number}" for number in range(self.count)] if named else []

    def _config(self, layer: int) -> Config:
        """Return the layer's own config; on a config whose layers differ, the whole one raises (5.23.0)."""
        view = getattr(self.text, "per_layer_config", None)
        return self.text if view is None else view[layer]

    def _type(self, layer: int) -> str:
        if layer < len(self.types):
            return str(self.types[layer])
        return "sliding_attention" if getattr(self._config(layer), "sliding_window", None) else "full_attention"

    def layers(self) -> Iterator[KVLayer]:
        for layer, path in enumerate(self.paths):
            kind = self._type(layer)
            if "linear" in kind or kind in ("mamba", "conv", "recurrent"):
                yield KVLayer(layer, 0, 0, None, None, state_values=self._state_values())
                continue
            heads, width = self._geometry(layer, path)
            yield KVLayer(layer, heads, width, self._window(layer, kind), self._shares(layer, kind))

    def _window(self, layer: int, kind: str) -> int | None:
        if self.windows is not None and layer < self.shared_from:
            return self.windows[layer] if layer < len(self.windows) else None
        size = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}.get(kind, "")
        window = getattr(self._config(layer), size, None)
        return int(window) if window else None

    def _shares(self, layer: int, kind: str) -> int | None:
        if layer < self.shared_from:
            return None
        return max((other for other in range(self.shared_from) if self._type(other) == kind), default=None)

    def _geometry(self, layer: int, path: str) -> tuple[int, int]:
        """Return (kv heads, head width), from the key projection where there is one."""
        text, attention = self._config(layer), self._attention(path)
        widths = (getattr(attention, name, None) for name in ("qk_head_dim", "head_dim"))
        width = next((width for width in widths if width), None) or getattr(text, "head_dim", None)
        width = int(width or text.hidden_size // text.num_attention_heads)
        projection = getattr(attention, "k_proj", None)
        if isinstance(projection, nn.Linear):
            return projection.out_features // width, width
        return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads), width

    def _attention(self, path: str) -> nn.Module | None:
        names = ("self_attn", "attn", "attention", "self_attention")
        return next((self.places.modules[f"{path}.{name}"] for name in names if f"{path}.{name}" in self.places.modules), None)

    def _state_values(self) -> int:
        """Return the state of gated linear attention: the convolution's window and one matrix a value head."""
        names = ("linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim")
        sizes = [getattr(self.text, name, None) for name in names]
        if None in sizes:
            return 0
        key_heads, key_width, value_heads, value_width = (int(size) for size in sizes if size is not None)
        channels = 2 * key_heads * key_width + value_heads * value_width
        return channels * int(getattr(self.text, "linear_conv_kernel_dim", 4)) + value_heads * key_width * value_width

    def missing_projections(self) -> Iterator[str]:
        """Yield the k and v projections that layers reading another's cache do not have, although their siblings do."""
        present = self.places.modules
        for path in self.paths[self.shared_from :]:
            for name in ("k_proj", "v_proj"):
                wanted = f"{path}.self_attn.{name}"
                if f"{path}.self_attn" in present and wanted not in present:
                    yield wanted
