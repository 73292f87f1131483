"""Adapters in host memory: the same files once, whatever their names, within the budget that the plan leaves."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Hashable
from pathlib import Path
from weakref import WeakValueDictionary

from trimtab.checkpoint.adapter_file import CONFIG_NAME, TENSORS_NAME
from trimtab.errors import DoesNotFitError
from trimtab.plan.cost import HELD_OBJECT_BYTES
from trimtab.runtime.held_adapter import HeldAdapter
from trimtab.runtime.model import LoadedModel
from trimtab.serve.watching import files_stamp


class HeldAdapters:
    """Reads adapters, one at a time; whoever holds one keeps it. Methods may be called on several threads."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._by_files: WeakValueDictionary[Hashable, HeldAdapter] = WeakValueDictionary()
        self._by_content: WeakValueDictionary[str, HeldAdapter] = WeakValueDictionary()
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """What all of them take on the host."""
        adapters = {id(one): one for one in list(self._by_files.values())}
        return sum(one.host_bytes + HELD_OBJECT_BYTES for one in adapters.values())

    @property
    def room_bytes(self) -> int:
        """Return the bytes that the plan leaves for adapters beyond those in host memory."""
        return max(0, self._model.plan.held_adapters_limit_bytes - self.nbytes)

    def read(self, path: str | Path, *, name: str | None = None) -> HeldAdapter:
        """Return an adapter's files as they are held; those that are held already, or whose copies are, are not kept twice.

        name: for an error, and whether there is room is asked at all: None for what the plan has counted. Errors:
        DoesNotFitError before a tensor is read; as `LoadedModel.read_adapter`.
        """
        files = files_stamp(path)
        with self._lock:
            held = self._by_files.get(files) if files is not None else None
            if held is not None:
                return held
            content = _content(path)
            held = self._by_content.get(content) if content is not None else None
            if held is not None and files is not None and files == files_stamp(path):
                self._by_files[files] = held
                return held
            if name is not None:
                self._check_room(name, path)
            held = self._model.read_adapter(path)
            # Files that change while they are read are known by nothing.
            if files is not None and files == files_stamp(path):
                self._by_files[files] = held
                if content is not None:
                    self._by_content[content] = held
            else:
                self._by_files[object()] = held
            return held

    def _check_room(self, name: str, path: str | Path) -> None:
        try:
            needed = os.stat(Path(path) / TENSORS_NAME).st_size + HELD_OBJECT_BYTES
        except OSError:
            return  # reading says what is wrong
        if needed > self.room_bytes:
            limit = self._model.plan.held_adapters_limit_bytes
            raise DoesNotFitError(
                f"the plan leaves {limit} B of host memory for adapters, those that are loaded take {self.nbytes} B",
                block=f"adapter {name}", device="host", needed_bytes=needed, budget_bytes=self.room_bytes,
                hint="Unload adapters that are not needed",
            )  # fmt: skip


def _content(path: str | Path) -> str | None:
    """Return the hash of both files; None if they cannot be read."""
    whole = hashlib.sha256()
    try:
        for name in (CONFIG_NAME, TENSORS_NAME):
            file = Path(path) / name
            whole.update(f"{name} {os.stat(file).st_size}\n".encode())
            with open(file, "rb") as stream:
                while piece := stream.read(2**20):
                    whole.update(piece)
    except OSError:
        return None
    return whole.hexdigest()
