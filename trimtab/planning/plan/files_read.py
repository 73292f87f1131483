"""What planning read of a model's files: the first load of the plan uses it, a second load reads them again."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from trimtab.adapters.adapter import AdapterSpec
from trimtab.checkpoint.anatomy import Anatomy
from trimtab.checkpoint.folder import Checkpoint

Tree = TypeVar("Tree")


@dataclass(frozen=True)
class FilesRead(Generic[Tree]):
    """checkpoint: config and headers. specs: adapters by folder and by the identity of the anatomy that each was matched with.
    tree: the module tree on tensors without data, as `engine/loader/transformers_model.py` makes it; None if planning needed none.
    """

    checkpoint: Checkpoint | None = None
    specs: Mapping[tuple[str, int], tuple[AdapterSpec, Anatomy]] = field(default_factory=dict)
    tree: Tree | None = None


class Handover(Generic[Tree]):
    """What was read, until a load takes it. made_of: the checkpoint's files and the dtype; plans of others do not get it."""

    def __init__(self, files: FilesRead[Tree] | None = None, made_of: Hashable = None) -> None:
        self._files, self._made_of = [] if files is None else [files], made_of

    def look(self, made_of: Hashable) -> FilesRead[Tree]:
        """Return what was read of these files for this dtype and was not taken yet; keep it."""
        return self._files[0] if self._files and made_of == self._made_of else FilesRead()

    def take(self, made_of: Hashable) -> FilesRead[Tree]:
        """Return the same and forget it, because a load fills the tree."""
        if made_of != self._made_of:
            return FilesRead()
        try:
            return self._files.pop()
        except IndexError:
            return FilesRead()
