"""Embedding tables: complete on the computing device, or in host memory or the file, from which rows are fetched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.engine.formats.packed import Packed, is_narrow, widened
from trimtab.engine.formats.weights import dequantize_at, dequantize_rows
from trimtab.engine.lora import layers as lora
from trimtab.engine.lora.store import AdapterStore
from trimtab.engine.tiers.reader import PositionedFile, bytes_of, seen_by


class Table(nn.Module):
    """An embedding table with its adapters: ids [B, S] -> rows [B, S, D]. embed_scale: the factor of the original class, or
    None. exact_scale: that factor where it is not rounded to the rows' type first. Subclasses store the rows."""

    def __init__(
        self, module_path: str, shape: tuple[int, int], *, embed_scale: Tensor | None, device: torch.device,
        dtype: torch.dtype, store: AdapterStore, padding_idx: int | None,
        exact_scale: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.module_path, self.device, self.dtype, self.adapter_store = module_path, device, dtype, store
        self.num_embeddings, self.embedding_dim = shape
        self.padding_idx, self.exact_scale = padding_idx, exact_scale
        self.adapters: dict[str, lora.EmbeddingAdapter] = {}
        self.embed_scale: Tensor | None
        self.__dict__["embed_scale"] = embed_scale

    def rows(self, ids: Tensor) -> Tensor:
        """Return the unscaled rows of ids on the execution device."""
        raise NotImplementedError

    def held(self) -> tuple[Tensor, bool] | None:
        """Return the table that `rows` reads on the execution device [V, D], and whether its rows are those of the ids in order
        (instead of by id); None if they come from elsewhere."""
        return None

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.rows(ids)
        if self.exact_scale is not None:
            rows = rows * self.exact_scale
        elif self.embed_scale is not None:
            rows = rows * self.embed_scale.to(rows.dtype)
        return self.adapter_store.applier.apply(self, ids, rows)


class ResidentTable(Table):
    """The whole table is on the execution device; a tied head may share it. Its rows are widened where it is stored in fewer bits
    than the model computes with; then it is no parameter, because transformers takes a model's dtype from its first parameter."""

    def __init__(self, module_path: str, weight: nn.Parameter, **kwargs: Any) -> None:
        super().__init__(module_path, (weight.shape[0], weight.shape[1]), **kwargs)
        if is_narrow(weight.dtype, self.dtype):
            self.__dict__["weight"] = weight.data
        else:
            self.weight = weight

    def rows(self, ids: Tensor) -> Tensor:
        return widened(nn.functional.embedding(ids, self.weight), self.dtype)

    def held(self) -> tuple[Tensor, bool] | None:
        return self.weight, False


class PackedTable(Table):
    """The whole table is on the execution device as its file stores it; `read` dequantizes the rows of the tokens. `weight` is the
    first few rows, as in `GatheredTable`."""

    def __init__(self, module_path: str, packed: Packed, first_rows: int, **kwargs: Any) -> None:
        super().__init__(module_path, (packed.shape[0], packed.shape[1]), **kwargs)
        self.stored = packed
        self.read: Callable[[Packed, Tensor], Tensor] = dequantize_at
        self.__dict__["weight"] = dequantize_rows(packed, 0, min(first_rows, packed.shape[0]), self.device).to(self.dtype)

    def rows(self, ids: Tensor) -> Tensor:
        return self.read(self.stored, ids.reshape(-1)).to(self.dtype).view(*ids.shape, self.embedding_dim)


class GatheredTable(Table):
    """The table stays in host memory or in the checkpoint file; only the requested rows are fetched.

    source: the table [V, D] on the CPU, or what reads its rows. `weight` is the first few rows on the
    execution device: Gemma4Model.forward reads the padding row of its token table on every call. `seen` is the table in host
    memory as the device itself reads it, None where that is unavailable: then the host has to fetch the rows of every step.
    """

    def __init__(
        self, module_path: str, shape: tuple[int, int], source: Tensor | FileRows | PackedRows, first_rows: int, **kwargs: Any
    ):
        super().__init__(module_path, shape, **kwargs)
        self.source = source
        self.seen: Tensor | None
        cuda = self.device.type == "cuda"
        self._pinned = cuda
        # While `reads_staged`, rows are those that `stage` put on the device: a captured step cannot ask the host.
        self.reads_staged = False
        # By places: a captured step keeps reading the buffer of its batch size, so none is ever freed.
        self._buffers_of: dict[int, Tensor] = {}
        self._staged: Tensor | None = None
        self.__dict__["seen"] = seen_by(source, self.device) if isinstance(source, Tensor) else None
        self.stored = source.seen_by(self.device) if isinstance(source, PackedRows) else None
        self.read: Callable[[Packed, Tensor], Tensor] = dequantize_at
        ids = torch.arange(min(first_rows, shape[0]))
        self.__dict__["weight"] = widened(self._gather(ids).to(self.device), self.dtype)

    @property
    def asks_host(self) -> bool:
        """Whether the host fetches the rows of every step."""
        return self.seen is None and self.stored is None

    def _gather(self, ids: Tensor) -> Tensor:
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_embeddings:
            raise IndexError(f"{self.module_path}: token id outside 0..{self.num_embeddings - 1}")
        if isinstance(self.source, Tensor):
            rows = torch.empty(ids.numel(), self.embedding_dim, dtype=self.source.dtype, pin_memory=self._pinned)
            return torch.index_select(self.source, 0, ids, out=rows)
        return self.source.read(ids, self.dtype, pinned=self._pinned)

    def stage(self, ids: Tensor, places: int) -> None:
        """Fetch the rows of one step's tokens (ids [N] on the CPU) into a buffer of `places` rows that stays where it is."""
        if places not in self._buffers_of:
            self._buffers_of[places] = torch.zeros(places, self.embedding_dim, dtype=self.dtype, device=self.device)
        self._staged = self._buffers_of[places]
        self._staged[: ids.numel()].copy_(self._gather(ids), non_blocking=True)

    def rows(self, ids: Tensor) -> Tensor:
        if self.seen is not None:
            return widened(nn.functional.embedding(ids, self.seen), self.dtype)
        if self.stored is not None:
            return self.read(self.stored, ids.reshape(-1)).to(self.dtype).view(*ids.shape, self.embedding_dim)
        if self.reads_staged:
            assert self._staged is not None
            return self._staged[: ids.numel()].view(*ids.shape, self.embedding_dim)
        flat = ids.reshape(-1).cpu()
        rows = widened(self._gather(flat).to(self.device, non_blocking=True), self.dtype)
        return rows.view(*ids.shape, self.embedding_dim)

    def held(self) -> tuple[Tensor, bool] | None:
        if self.seen is not None:
            return self.seen, False
        return (self._staged, True) if self.reads_staged and self._staged is not None else None


def asking_host(hf_model: nn.Module) -> list[GatheredTable]:
    """Return the tables of a model whose rows the host fetches."""
    return [one for one in hf_model.modules() if isinstance(one, GatheredTable) and one.asks_host]


@contextmanager
def reading_staged(staged: Sequence[GatheredTable]) -> Iterator[None]:
    """Let tables give the rows that `stage` put on the device while the block runs."""
    for table in staged:
        table.reads_staged = True
    try:
        yield
    finally:
        for table in staged:
            table.reads_staged = False


class FileRows:
    """The rows of a table left in its checkpoint file: nothing read at load, no memory, rows read as they are needed."""

    def __init__(self, path: Path, start: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self.file, self.start, self.shape, self.dtype = PositionedFile(path), start, shape, dtype

    def read(self, ids: Tensor, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        """Return rows [N, D]. Errors: CheckpointError if the file changed since it was opened."""
        self.file.check()
        rows = torch.empty(ids.numel(), self.shape[1], dtype=self.dtype, pin_memory=pinned)
        width = self.shape[1] * rows.element_size()
        view = bytes_of(rows) if rows.numel() else memoryview(b"")
        for place, row in enumerate(ids.tolist()):
            self.file.read_into(view[place * width : (place + 1) * width], self.start + row * width)
        return rows if rows.dtype == dtype else rows.to(dtype)

    def close(self) -> None:
        self.file.close()


class PackedRows:
    """The rows of a table that is packed, in host memory or with its parts left in the checkpoint file."""

    def __init__(self, packed: Packed, files: Mapping[str, FileRows] | None = None) -> None:
        self.packed, self.files = packed, files

    def seen_by(self, device: torch.device) -> Packed | None:
        """Return the table as a device reads it in host memory; None where that is impossible, or it is in a file."""
        parts = {} if self.files is not None else {name: seen_by(part, device) for name, part in self.packed.parts.items()}
        seen = {name: part for name, part in parts.items() if part is not None}
        if not seen or len(seen) < len(parts):
            return None
        return self.packed.with_parts(seen, {name: code.to(device) for name, code in self.packed.codes.items()})

    def read(self, ids: Tensor, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        """Return rows [N, D]. Errors: CheckpointError if the file changed since it was opened."""
        packed = self.packed
        if self.files is not None:
            parts = {name: rows.read(ids, rows.dtype, pinned=False) for name, rows in self.files.items()}
            packed, ids = replace(packed, shape=(len(ids), packed.shape[1]), parts=parts), torch.arange(len(ids))
        rows = dequantize_at(packed, ids).to(dtype)
        return rows.pin_memory() if pinned else rows
