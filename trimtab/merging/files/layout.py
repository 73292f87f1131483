"""The output files of a merge and the sources of each tensor, decided before the first byte is written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from trimtab.checkpoint.anatomy import Anatomy
from trimtab.checkpoint.folder import CONFIG, INDEX_SUFFIX, SINGLE, Checkpoint
from trimtab.checkpoint.headers import TensorEntry, read_header
from trimtab.checkpoint.writer import Layout, NewTensor, lay_out, same_layout
from trimtab.engine.loader.transformers_model import Probe
from trimtab.errors import CheckpointError
from trimtab.formats.packed import split_packed, written_config, written_tensors
from trimtab.formats.record import PackedEntry
from trimtab.merging.changes.inverse import is_cast
from trimtab.merging.changes.plan import Edit, Recipe
from trimtab.process.json_file import read_object
from trimtab.request import DTYPES

_LET_QUANTIZE = "Merge without requantizing, and let the loader quantize"
FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Out:
    """One tensor of the merged model. tensor_name: as written. leaf: the file tensor with its values.

    dtype, shape: of the values. edits: their changes. pack: the format in which it is written, if packed.
    """

    tensor_name: str
    leaf: str
    dtype: str
    shape: tuple[int, ...]
    edits: tuple[Edit, ...] = ()
    pack: str | None = None

    def tensors(self) -> list[NewTensor]:
        """Return its file tensors."""
        if self.pack is None:
            return [NewTensor(self.tensor_name, self.dtype, self.shape)]
        return written_tensors(self.pack, self.tensor_name, self.shape, self.dtype)


@dataclass(frozen=True)
class Shard:
    """One weight file. file: the base's. outs: in the order of the base's data. is_plain: laid out as the base's file.

    A plain file is copied front to back, and its changed rows are replaced; any other is written tensor by tensor.
    """

    name: str
    file: Path
    outs: tuple[Out, ...]
    layout: Layout
    is_plain: bool


# The shards -----------------------------------------------------------------------------------------------------------


def plan_shards(
    checkpoint: Checkpoint, probe: Probe, recipe: Recipe, *, dtype: str | None, pack: str | None, to_pack: set[str]
) -> tuple[Shard, ...]:
    """Return the weight files to write, one for each of the base, with its name.

    dtype: of all floating-point tensors, None to keep each one's. to_pack: file tensors that are written packed.
    """
    plain, packed = split_packed(checkpoint)
    dtypes = _Dtypes(checkpoint, probe, dtype, packed)
    # Some layouts have no file tensor of the weight's own name: it stands where its packed values do.
    weights = {entry.parts["weight"].tensor_name: name for name, entry in packed.items()}
    shards = []
    for place, file, entries, metadata in _files(checkpoint):
        outs = []
        for entry in entries:
            name = weights.get(entry.tensor_name, entry.tensor_name)
            if name not in plain and name not in packed:
                continue  # statistics of a packed weight: in the same file as the weight
            shape = packed[name].shape if name in packed else entry.shape
            leaf, edits = name, tuple(recipe.edits.get(name, ()))
            if name in recipe.copies:
                leaf, edit = recipe.copies[name]
                edits = (edit,)
            outs.append(
                Out(name, leaf, dtypes.of(name, entry), shape, edits, pack if name in to_pack else None)
            )  # fmt: skip
        for name, holder in recipe.added.items():
            leaf, edit = recipe.copies[name]
            if holder == file.name or checkpoint.is_gguf:
                source = packed[leaf].parts["weight"] if leaf in packed else checkpoint.tensors[leaf]
                shape = packed[leaf].shape if leaf in packed else source.shape
                outs.append(Out(name, leaf, dtypes.of(leaf, source), shape, (edit,)))
        shards.append(_shard(place, file, outs, entries, metadata))
    return tuple(shards)


def _files(checkpoint: Checkpoint) -> Iterator[tuple[str, Path, list[TensorEntry], Mapping[str, str]]]:
    """Yield (name, base's file, its tensors in the order of its data, its metadata); all tensors of a GGUF model come into one."""
    if checkpoint.is_gguf:
        yield SINGLE, checkpoint.files[1], list(checkpoint.tensors.values()), {"format": "pt"}
        return
    for file in checkpoint.files:
        header = read_header(file)
        name = file.relative_to(checkpoint.folder).as_posix()
        yield name, file, sorted(header.tensors.values(), key=lambda entry: entry.start), header.metadata


def _shard(name: str, file: Path, outs: list[Out], entries: list[TensorEntry], metadata: Mapping[str, str]) -> Shard:
    expected = [(tensor.tensor_name, tensor.dtype, tensor.shape) for out in outs for tensor in out.tensors()]
    if expected == [(entry.tensor_name, entry.dtype, entry.shape) for entry in entries]:
        with open(file, "rb") as handle:
            head = handle.read(8)
            head += handle.read(int.from_bytes(head, "little"))
        return Shard(name, file, tuple(outs), same_layout(Path(name), head, entries), True)
    tensors = [tensor for out in outs for tensor in out.tensors()]
    return Shard(name, file, tuple(outs), lay_out(Path(name), tensors, metadata, ordered=False), False)


class _Dtypes:
    """The dtype in which each tensor is written."""

    def __init__(self, checkpoint: Checkpoint, probe: Probe, dtype: str | None, packed: Mapping[str, PackedEntry]) -> None:
        self.asked, self.packed = dtype, packed
        self.model: dict[str, str] = {}
        tensors = dict(probe.model.named_parameters(remove_duplicate=False)) | dict(probe.model.named_buffers())
        for path, expression in probe.sources.items():
            for leaf in expression.leaves:
                self.model.setdefault(leaf, str(tensors[path].dtype).removeprefix("torch."))
        self.base = config_dtype(checkpoint.config)
        # GGUF files hold vectors in float32, in models of any type.
        self.is_gguf = checkpoint.is_gguf

    def of(self, leaf: str, entry: TensorEntry) -> str:
        if leaf in self.packed:
            return self.model.get(leaf, self.asked or self.base) if self.asked else self.base
        if entry.dtype not in FLOATS or (self.asked is None and not self.is_gguf):
            return entry.dtype
        # Tensors that the architecture keeps in float32 stay in float32, as in stock.
        return self.model.get(leaf, self.asked or self.base)


def config_dtype(config: Mapping[str, Any]) -> str:
    """Return the dtype that a config names, at the top or in its text part; bfloat16 if it names none."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            if part.get(key) in DTYPES:
                return str(part[key])
    return "bfloat16"


def leaves_to_pack(anatomy: Anatomy, probe: Probe, checkpoint: Checkpoint) -> set[str]:
    """Return the file tensors that stock would quantize when it loads the model.

    Errors: CheckpointError for a linear layer that stock makes from several file tensors: packed tensors cannot be
    joined; for Conv1D layers, which bitsandbytes packs turned; for a model without a layer to pack.
    """
    leaves, lost = set(), []
    turned = [row.module_path for row in anatomy.rows if row.class_name == "Conv1D"]
    for row in anatomy.rows:
        if not row.quantized or row.weight is None:
            continue
        expression = probe.sources[row.weight.tensor_path]
        if is_cast(expression):
            leaves.add(expression.leaves[0])
        else:
            lost.append(row.module_path)
    if lost:
        raise CheckpointError(
            f"cannot be packed: {', '.join(lost[:5])} are made of several file tensors each", path=checkpoint.path,
            hint=_LET_QUANTIZE,
        )  # fmt: skip
    if turned or not leaves:
        what = f"{len(turned)} layers are Conv1D ({', '.join(turned[:2])}, ...)" if turned else "it has no layer to pack"
        raise CheckpointError(f"cannot be packed: {what}", path=checkpoint.path, hint=_LET_QUANTIZE)
    return leaves


# The small files ------------------------------------------------------------------------------------------------------


def new_config(checkpoint: Checkpoint, *, dtype: str | None, pack: str | None, untie: bool) -> bytes | None:
    """Return the config.json of the merged model, None if the base's is right unchanged."""
    config = read_object(checkpoint.folder / CONFIG, CONFIG)
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    before = json.dumps(config)
    is_packed = checkpoint.quantization is not None
    for part in parts:
        for key in ("quantization_config", "compression_config"):  # the second: compressed-tensors before release 0.5
            part.pop(key, None)
        for key in ("dtype", "torch_dtype"):
            if key in part and (dtype is not None):
                part[key] = dtype
        if untie and "tie_word_embeddings" in part:
            part["tie_word_embeddings"] = False
    if is_packed and dtype is None and not any(key in config for key in ("dtype", "torch_dtype")):
        config["dtype"] = config_dtype(checkpoint.config)
    if untie:
        config["tie_word_embeddings"] = False
        text = config.get("text_config")
        if isinstance(text, dict):
            text["tie_word_embeddings"] = False
    if pack is not None:
        config["quantization_config"] = written_config(pack, dtype or config_dtype(checkpoint.config))
    return None if json.dumps(config) == before else (json.dumps(config, indent=2) + "\n").encode()


def new_index(checkpoint: Checkpoint, shards: tuple[Shard, ...]) -> tuple[str, bytes] | None:
    """Return (name, content) of the index, None if the base has none or the base's is right unchanged."""
    named = checkpoint.config.get("transformers_weights")
    name = named if isinstance(named, str) and named.endswith(INDEX_SUFFIX) else "model.safetensors.index.json"
    stamped = {stamp[0] for stamp in checkpoint.stamps}
    if name not in stamped or all(shard.is_plain for shard in shards):
        return None
    index = read_object(checkpoint.folder / name, "index")
    metadata = index.get("metadata")
    metadata = dict(metadata) if isinstance(metadata, dict) else {}
    places = [entry for shard in shards for entry in shard.layout.places.values()]
    metadata["total_size"] = sum(entry.nbytes for entry in places)
    if isinstance(metadata.get("total_parameters"), int):  # as transformers counts them, each weight once, packed or not
        sizes = {out.tensor_name: prod(out.shape) for shard in shards for out in shard.outs}
        before = {name: prod(entry.shape) for found in split_packed(checkpoint) for name, entry in found.items()}
        metadata["total_parameters"] += sum(sizes.values()) - sum(before.values())
    weights = {entry.tensor_name: shard.name for shard in shards for entry in shard.layout.places.values()}
    content = {"metadata": metadata, "weight_map": dict(sorted(weights.items()))}
    return name, (json.dumps(content, indent=2) + "\n").encode()
