"""Adapters in host memory: equal files are stored once, under any names, within the plan's budget."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Hashable
from contextlib import closing
from pathlib import Path
from weakref import WeakSet, WeakValueDictionary

import torch

from trimtab.adapters.file import CONFIG_NAME, TENSORS_NAME, check_beside, stamps_of
from trimtab.engine.lora.host_adapter import HeldAdapter
from trimtab.engine.model import LoadedModel
from trimtab.engine.tiers.reader import PositionedFile, bytes_of
from trimtab.errors import CheckpointError, DoesNotFitError
from trimtab.gguf.adapter import is_lora_file
from trimtab.planning.values.byte_sizes import HELD_OBJECT_BYTES
from trimtab.serve.adapters.watching import files_stamp

# Bytes at each end of an adapter's tensors that distinguish adapters; only those with equal ends are compared in full.
END_BYTES = 2**20


class HeldAdapters:
    """Reads adapters, one at a time. An adapter is freed when its last reference ends. Methods may be called on several
    threads.
    """

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._by_files: WeakValueDictionary[Hashable, HeldAdapter] = WeakValueDictionary()
        self._by_ends: dict[str, WeakSet[HeldAdapter]] = {}
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """The host memory of all adapters."""
        adapters = {id(one): one for one in list(self._by_files.values())}
        return sum(one.host_bytes + HELD_OBJECT_BYTES for one in adapters.values())

    @property
    def room_bytes(self) -> int:
        """Return the bytes that the plan leaves for adapters beyond those in host memory."""
        return max(0, self._model.plan.held_adapters_limit_bytes - self.nbytes)

    def read(self, path: str | Path, *, name: str | None = None) -> HeldAdapter:
        """Return an adapter in its host form; an adapter or a copy that is already in memory is not stored twice.

        name: for an error; None skips the budget check, for adapters that the plan counts. Errors: DoesNotFitError
        before a tensor is read; as `LoadedModel.read_adapter`.
        """
        with self._lock:
            return self._held(path, name, None)

    def take(self, path: str | Path, held: HeldAdapter) -> HeldAdapter:
        """Return an adapter that was read from a folder, or an equal one that is already in memory. Nothing is read
        again.
        """
        with self._lock:
            if held.spec.file.stamps == stamps_of(path):
                return self._held(path, None, held)
            self._by_files[object()] = held  # its files have changed since: it has no stamp
            return held

    def _held(self, path: str | Path, name: str | None, given: HeldAdapter | None) -> HeldAdapter:
        files = files_stamp(path)
        known = self._by_files.get(files) if files is not None else None
        if known is not None:
            check_beside(path, name or str(path))  # several folders can have the same two adapter files
            return known
        ends = None if files is None else _ends(path)
        known = None if ends is None else next((one for one in self._by_ends.get(ends, ()) if _is_copy(path, one)), None)
        if known is not None and files is not None and files == files_stamp(path):
            check_beside(path, name or str(path))  # several folders can have the same two adapter files
            self._by_files[files] = known
            return known
        if name is not None:
            self._check_room(name, path)
        held = self._model.read_adapter(path, name=name) if given is None else given
        # Files that change during the read get no stamp.
        if files is not None and files == files_stamp(path):
            self._by_files[files] = held
            if ends is not None:
                self._by_ends = {key: alike for key, alike in self._by_ends.items() if alike}
                self._by_ends.setdefault(ends, WeakSet()).add(held)
        else:
            self._by_files[object()] = held
        return held

    def _check_room(self, name: str, path: str | Path) -> None:
        try:
            needed = os.stat(path if is_lora_file(path) else Path(path) / TENSORS_NAME).st_size + HELD_OBJECT_BYTES
        except OSError:
            return  # reading reports the problem
        if needed > self.room_bytes:
            limit = self._model.plan.held_adapters_limit_bytes
            raise DoesNotFitError(
                f"the plan leaves {limit} B of host memory for adapters, those that are loaded take {self.nbytes} B",
                block=f"adapter {name}", device="host", needed_bytes=needed, budget_bytes=self.room_bytes,
                hint="Unload adapters that are not needed",
            )  # fmt: skip


def _ends(path: str | Path) -> str | None:
    """Return a hash of an adapter's configuration, tensor names, sizes and the ends of its values; None if the files
    cannot be read.
    """
    whole = hashlib.sha256()
    try:
        whole.update(hashlib.sha256((Path(path) / CONFIG_NAME).read_bytes()).digest())
        with open(Path(path) / TENSORS_NAME, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            whole.update(str(size).encode() + head + file.read(min(int.from_bytes(head, "little"), size) + END_BYTES))
            file.seek(max(file.tell(), size - END_BYTES))
            whole.update(file.read())
    except OSError:
        return None
    return whole.hexdigest()


def _is_copy(path: str | Path, held: HeldAdapter) -> bool:
    """Whether a folder with the same ends as an adapter in memory has all of its values."""
    try:
        with closing(PositionedFile(Path(path) / TENSORS_NAME)) as file:
            for (_, start), tensor in held.tensors.items():
                values = torch.empty(tensor.nbytes, dtype=torch.uint8)
                file.read_into(bytes_of(values), start)
                if not torch.equal(values, tensor.contiguous().reshape(-1).view(torch.uint8)):
                    return False
    except CheckpointError:
        return False
    return True
