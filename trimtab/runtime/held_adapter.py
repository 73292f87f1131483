"""An adapter in host memory: matched with one model, ready to be loaded, identified by its content."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.checkpoint.adapter import AdapterSpec
from trimtab.runtime.read import HostMemory
from trimtab.runtime.tiers import Part, aligned

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
    def of(cls, spec: AdapterSpec, tensors: Mapping[tuple[Path, int], Tensor], *, pinned: bool) -> HeldAdapter:
        """Return the adapter with its tensors moved into one piece of memory."""
        # What replaces a module whole is often equal to it and then dropped: it must not be kept by its neighbours.
        saved = {
            (entry.file, entry.start) for target in spec.targets if target.kind == "saved"
            for entry in target.tensors.values()
        }  # fmt: skip
        places: dict[tuple[Path, int], Part] = {}
        end = 0
        for key, tensor in tensors.items():
            if key not in saved:
                places[key] = Part(end, tensor.numel() * tensor.element_size(), tuple(tensor.shape), tensor.dtype)
                end += aligned(places[key].nbytes)
        memory = HostMemory(end, pinned=pinned)
        views = dict(tensors)
        for key, place in places.items():
            views[key] = place.view(memory.tensor)
            views[key].copy_(tensors[key])
        types = {place.dtype for place in places.values()}
        return cls(spec, views, memory, places, types.pop() if len(types) == 1 else None)

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


def content_of(spec: AdapterSpec, tensors: Mapping[Any, Tensor]) -> str:
    """Return a digest of an adapter's places, scales and values. tensors: by file and the byte where each starts there."""
    digest = hashlib.sha256(repr(spec.model_dtype).encode())
    for target in spec.targets:
        entries = sorted(target.tensors.items())
        how = (target.kind, target.rank, target.scale, target.use_dora, target.has_bias, len(entries))
        digest.update(repr((target.module_path, *how)).encode())
        for role, entry in entries:
            tensor = tensors[entry.file, entry.start]
            digest.update(repr((role, tuple(tensor.shape), str(tensor.dtype))).encode())
            values: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            digest.update(values)
    return digest.hexdigest()
