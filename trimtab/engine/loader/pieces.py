"""How is a large tensor of the files read piece by piece: a head by its rows, a stack of experts one by one?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor, nn

from trimtab.checkpoint.anatomy import ModuleRow, TensorRow
from trimtab.checkpoint.headers import TensorEntry
from trimtab.engine.cuda.nvrtc import wait_for_all
from trimtab.engine.formats.packed import CodeTables, Packed
from trimtab.engine.formats.weights import quantize
from trimtab.engine.loader.tracing import Expression
from trimtab.engine.lora.experts import hold_packed, why_no_lora
from trimtab.engine.lora.store import AdapterStore
from trimtab.engine.tiers.near_experts import NearExperts, NearWriter
from trimtab.engine.tiers.streaming import Staged, Streamer
from trimtab.errors import CheckpointError, DeviceError
from trimtab.formats.record import HEAD_PIECE_VALUES, PackedEntry, stored_format

Forms = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
Take = Callable[[TensorEntry], Tensor]


def why_not_packed(
    module: nn.Module,
    tensors: Sequence[TensorRow],
    sources: Mapping[str, Expression],
    packed: Collection[str],
    tied: Collection[str],
    kind: str,
) -> list[str]:
    """Return why the stacks of a module of experts cannot be packed in a format, nothing if they can. packed: file tensors that are
    already. tied: paths that share storage."""
    block = stored_format(kind).stack_multiple
    unknown = why_no_lora(module)
    problems = [] if unknown is None else [unknown]
    for tensor in tensors:
        if len(tensor.shape) != 3 or tensor.is_buffer:
            continue
        columns, expression = tensor.shape[2], sources.get(tensor.tensor_path)
        if columns % block:
            problems.append(f"{tensor.tensor_path} has rows of {columns} values, no multiple of the block of {block}")
        if any(name in packed for name in tensor.sources):
            problems.append(f"the files hold {tensor.tensor_path} quantized, and nothing is quantized twice")
        elif expression is None or not (_is_whole(expression) or _are_single(tensor)):
            problems.append(f"{tensor.tensor_path} is made from the files otherwise than expert by expert")
        if tensor.tensor_path in tied:
            problems.append(f"{tensor.tensor_path} is shared with another module")
    return problems


def check_routers(model: nn.Module, rows: Iterable[ModuleRow], path: str) -> None:
    """Raise CheckpointError unless all values of a loaded model's routers are finite, in the type in which they are computed."""
    for row in rows:
        module = model.get_submodule(row.module_path)
        for tensor in row.tensors:
            value = getattr(module, tensor.tensor_path.rpartition(".")[2], None)  # None of a packed one
            if not isinstance(value, Tensor) or value.is_meta or not value.is_floating_point():
                continue
            if not bool(value.isfinite().all()):
                raise CheckpointError(
                    "a router of experts has values that are NaN or infinite", path=path, tensor_name=tensor.tensor_path,
                    hint="The file is damaged, or its values are too large for the dtype",
                )  # fmt: skip


def formats_of_files(
    module: nn.Module, row: ModuleRow, packed: Mapping[str, PackedEntry], tied: Collection[str]
) -> tuple[dict[str, str], list[str]]:
    """Return (path of each stack -> the format in which the files hold each of its experts, why they do not stay so); neither for
    experts that the files hold unquantized. tied: paths that share storage."""
    if not any(name in packed for stack in row.stacks for name in stack.sources):
        return {}, []
    unknown = why_no_lora(module)
    formats: dict[str, str] = {}
    problems = [] if unknown is None else [unknown]
    for stack in row.stacks:
        name, count = stack.tensor_path.rpartition(".")[2], stack.shape[0]
        entries = [packed[source] for source in stack.sources if source in packed]
        kinds = sorted({(one.kind, one.dtype) for one in entries})
        if not _are_single(stack) or len(entries) != len(stack.sources):
            problems.append(f"{name} is not made of one packed matrix or several for each expert")
        elif len(kinds) > 1:
            problems.append(f"the matrices of {name} are in several formats ({', '.join(' of '.join(kind) for kind in kinds)})")
        elif (why := stored_format(kinds[0][0]).why_not_stacked([one.shape[0] for one in entries[::count]])) is not None:
            problems.append(f"{kinds[0][0]} {why} ({name})")
        elif stack.tensor_path in tied:
            problems.append(f"{name} is shared with another module")
        else:
            formats[stack.tensor_path] = kinds[0][0]
    return ({}, problems) if problems else (formats, [])


def _is_whole(expression: Expression) -> bool:
    return expression.cast_leaf is not None


def _are_single(tensor: TensorRow) -> bool:
    return tensor.halves > 0 and len(tensor.sources) == tensor.halves * tensor.shape[0]


def rows_of(entry: TensorEntry) -> list[TensorEntry]:
    """Return a tensor of a file as pieces of whole rows, of HEAD_PIECE_VALUES values at most where a row has fewer."""
    rows, *inner = entry.shape
    step = max(1, HEAD_PIECE_VALUES // prod(inner))
    return [_piece(entry, at, (min(step, rows - at), *inner)) for at in range(0, rows, step)]


def _piece(entry: TensorEntry, first: int, shape: tuple[int, ...]) -> TensorEntry:
    row_bytes = entry.nbytes // entry.shape[0]
    return replace(entry, shape=shape, start=entry.start + first * row_bytes, nbytes=shape[0] * row_bytes)


def joined(shape: Sequence[int], dtype: str, pieces: Iterable[TensorEntry], take: Take) -> Tensor:
    """Return the tensor whose rows the pieces are, in a type."""
    whole, start = None, 0
    for part in map(take, pieces):
        if whole is None:
            whole = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=part.device)
        whole[start : start + len(part)].copy_(part)
        start += len(part)
    assert whole is not None and start == len(whole)
    return whole


def names_of(stack: TensorRow) -> Iterator[tuple[str, ...]]:
    """Yield the names of the file tensors that each expert of a stack is, whose rows follow each other."""
    return (stack.sources[expert :: stack.shape[0]] for expert in range(stack.shape[0]))


def experts_of(tensor: TensorRow, entries: Mapping[str, TensorEntry]) -> list[list[TensorEntry]]:
    """Return what of the files each expert of a stack is: pieces whose rows follow each other."""
    count, *matrix = tensor.shape
    if tensor.halves:
        return [[entries[name] for name in names] for names in names_of(tensor)]
    entry = entries[tensor.sources[0]]
    return [[replace(_piece(entry, expert, (1, *matrix)), shape=tuple(matrix))] for expert in range(count)]


def host_room(forms: Forms) -> dict[str, Tensor]:
    """Return tensors of these shapes and types in host memory."""
    return {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in forms.items()}


def pack(
    tensor: TensorRow, kind: str, entries: Mapping[str, TensorEntry], take: Take, room: Callable[[Forms], dict[str, Tensor]],
    codes: CodeTables,
) -> Packed:  # fmt: skip
    """Return a stack packed in a format, an expert at a time: two copies of one expert are the most that is in full precision.

    take: gives a piece on the device that packs. room: gives the tensors of the parts, where they stay. Errors: DeviceError,
    CheckpointError for values that the format does not have.
    """

    def experts() -> Iterator[Packed]:
        for pieces in experts_of(tensor, entries):
            try:
                one = codes.share(quantize(joined(tensor.shape[1:], tensor.dtype, pieces, take), kind))
            except ValueError as exc:
                file = entries[tensor.sources[0]].file
                raise CheckpointError(f"an expert has {exc}", path=file, tensor_name=tensor.tensor_path) from exc
            yield replace(one, parts={name: part.reshape(-1) for name, part in one.parts.items()}) if one.codes else one

    return _stacked(tensor, experts(), room)


def stored(tensor: TensorRow, fetch: Callable[[str], Packed], room: Callable[[Forms], dict[str, Tensor]]) -> Packed:
    """Return a stack as the files hold its experts, one at a time. fetch: gives a matrix of the files. room: as of `pack`."""

    def experts() -> Iterator[Packed]:
        for names in names_of(tensor):
            own = [fetch(name) for name in names]
            parts = {name: torch.cat([one.parts[name] for one in own]) for name in own[0].parts} if len(own) > 1 else own[0].parts
            yield replace(own[0], parts=parts)

    return _stacked(tensor, experts(), room)


def _stacked(tensor: TensorRow, experts: Iterable[Packed], room: Callable[[Forms], dict[str, Tensor]]) -> Packed:
    parts: dict[str, Tensor] = {}
    first: Packed | None = None
    for expert, one in enumerate(experts):
        if first is None:
            first = one
            parts = room({name: ((tensor.shape[0], *part.shape), part.dtype) for name, part in one.parts.items()})
        if any(one.codes[name] is not code for name, code in first.codes.items()):
            raise DeviceError(
                f"bitsandbytes packs the experts of {tensor.tensor_path} with different tables",
                device=str(one.parts["weight"].device), hint='Choose experts="nf4", which has one table',
            )  # fmt: skip
        for name, part in one.parts.items():
            parts[name][expert].copy_(part)
    assert first is not None
    return replace(first, shape=tensor.shape, parts=parts)


def hold(
    row: ModuleRow, module: nn.Module, pack_one: Callable[[TensorRow], Packed], codes: CodeTables, store: AdapterStore,
    stage: Callable[[Packed], Callable[[Streamer], Staged]] | None, near: NearWriter | None = None,
) -> Callable[[Streamer], None] | None:  # fmt: skip
    """Let a module of experts compute with the stacks that `pack_one` gives. stage: gives the stack that was packed last in
    a streamed block; what comes back is called with the streamer. near: of stacks that stay in host memory."""
    staged: dict[str, Callable[[Streamer], Staged]] = {}
    held: dict[str, Packed] = {}
    for stack in row.stacks:
        name = stack.tensor_path.rpartition(".")[2]
        held[name] = pack_one(stack) if near is None else near.taken(name, pack_one(stack))
        if stage is not None:
            staged[name] = stage(held[name])
    if stage is None:
        here = {name: one.with_parts(one.parts, codes.on(one, one.parts["weight"].device)) for name, one in held.items()}
        hold_packed(module, here, store, row.module_path)
        if near is not None:
            vars(module)["near"] = near.finish(row.stacks[0].shape[0])
        return None
    return lambda streamer: hold_packed(module, {name: put(streamer) for name, put in staged.items()}, store, row.module_path)


def let_go(hf_model: nn.Module | None) -> None:
    """Free the packed experts of a model at once: their modules and forwards know each other. Steps that were queued ahead may read
    those in host memory until they have run."""
    for module in () if hf_model is None else hf_model.modules():
        near: NearExperts | None = vars(module).pop("near", None)
        if near is not None:
            wait_for_all(near.where.device)
        vars(module).pop("stacks", None)
