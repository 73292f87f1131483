"""An adapter in host memory: matched with one model, ready to be loaded, identified by its content."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.adapters.adapter import AdapterSpec
from trimtab.adapters.file import TENSORS_NAME, check_values
from trimtab.engine.tiers.reader import HostMemory, Part, PositionedFile, aligned, bytes_of, read_small
from trimtab.errors import AdapterError

ADAPTER_DTYPE = "float32"  # PEFT's own rule: half-precision adapters are cast up when they are loaded


@dataclass(frozen=True, eq=False)
class HeldAdapter:
    """An adapter in host memory, matched with one model: ready to be put on it without touching the disk.

    tensors: by file and the byte where each starts there, as the file holds them. The LoRA ones are views of `memory`,
    one piece that is page-locked for a GPU, so that putting an adapter on a model is one copy; places: where they lie.
    dtype: the one type of all values in `memory`, None if they differ.
    """

    spec: AdapterSpec
    tensors: Mapping[tuple[Path, int], Tensor]
    memory: HostMemory
    places: Mapping[tuple[Path, int], Part]
    dtype: torch.dtype | None = None

    @classmethod
    def read(cls, spec: AdapterSpec, *, pinned: bool) -> HeldAdapter:
        """Return an adapter, read once: each LoRA tensor straight to its place in one piece of memory.

        Errors: AdapterError for values that are not finite, of tensors without effect too; CheckpointError if the file is short.
        """
        entries = {(one.file, one.start): one for target in spec.targets for one in target.tensors.values()}
        # A saved whole module often equals the model's and is then dropped: its neighbours must not keep its memory. Pairs of
        # experts are sorted by expert on the device: the copies of the piece do not hold them a second time.
        saved = {
            (entry.file, entry.start) for target in spec.targets if target.kind in ("saved", "experts")
            for entry in target.tensors.values()
        }  # fmt: skip
        places: dict[tuple[Path, int], Part] = {}
        end = 0
        for key, entry in entries.items():
            if key not in saved:
                places[key] = Part(end, entry.nbytes, entry.shape, getattr(torch, entry.dtype))
                end += aligned(entry.nbytes)
        memory = HostMemory(end, pinned=pinned)
        tensors = {key: place.view(memory.tensor) for key, place in places.items()}
        whole = bytes_of(memory.tensor)
        with closing(PositionedFile(spec.file.file)) as file:
            is_own = spec.file.peft_folder == spec.file.folder  # not of a GGUF file
            if is_own and spec.file.stamps and (TENSORS_NAME, *file.stamp) not in spec.file.stamps:
                raise AdapterError(spec.file.folder, [f"{TENSORS_NAME} changed after its header was read"])
            for (_, start), place in sorted(places.items(), key=lambda one: one[0][1]):
                stop = place.offset + place.nbytes
                file.read_into(whole[place.offset : stop], start)
                whole[stop : place.offset + aligned(place.nbytes)] = bytes(aligned(place.nbytes) - place.nbytes)
        types = {place.dtype for place in places.values()}
        dtype = types.pop() if len(types) == 1 else None
        seen = set(places) if dtype is not None and _has_finite_sum(memory.tensor.view(dtype)) else set()
        file_tensors = spec.file.tensors.items()
        others = {name: entry for name, entry in file_tensors if (entry.file, entry.start) not in seen}
        check_values(replace(spec.file, tensors=others))
        tensors |= read_small({key: entries[key] for key in saved})
        return cls(spec, tensors, memory, places, dtype)

    def starts(self) -> dict[tuple[Path, int], int]:
        """Return at which value of `memory` each LoRA tensor begins; empty if the values are of several types."""
        if self.dtype is None:
            return {}
        return {key: place.offset // self.dtype.itemsize for key, place in self.places.items()}

    @cached_property
    def host_bytes(self) -> int:
        """Its bytes in host memory."""
        beside = (tensor.nbytes for key, tensor in self.tensors.items() if key not in self.places)
        return int(self.memory.tensor.nbytes + sum(beside))

    @cached_property
    def content(self) -> str:
        """A digest of everything that it changes: equal for two adapters only if they compute the same."""
        return content_of(self.spec, self.tensors)

    @cached_property
    def device_bytes(self) -> int:
        """Its bytes on the execution device."""
        return self.spec.nbytes(ADAPTER_DTYPE)


def _has_finite_sum(values: Tensor) -> bool:
    """Whether the sum of all values is finite, which it is only if each of them is. False proves nothing: a sum can overflow."""
    if values.dtype.itemsize == 1:  # torch sums no 8-bit floats
        return False
    return math.isfinite(float(values.sum(dtype=torch.promote_types(values.dtype, torch.float32))))


def content_of(spec: AdapterSpec, tensors: Mapping[tuple[Path, int], Tensor]) -> str:
    """Return a digest of an adapter's places, scales and values. tensors: by file and the byte where each starts there."""
    digest = hashlib.sha256(repr(spec.model_dtype).encode())
    for target in spec.targets:
        entries = sorted(target.tensors.items())
        how = (target.kind, target.rank, target.scale, target.use_dora, target.has_bias, len(entries), target.stack)
        digest.update(repr((target.module_path, *how)).encode())
        for role, entry in entries:
            tensor = tensors[entry.file, entry.start]
            digest.update(repr((role, tuple(tensor.shape), str(tensor.dtype))).encode())
            values: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            digest.update(values)
    return digest.hexdigest()
