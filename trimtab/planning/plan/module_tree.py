"""The empty module tree that planning may have made: the first load of the plan uses it, a second load makes its own."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Tree = TypeVar("Tree")


class ModuleTree(Generic[Tree]):
    """A module tree on tensors without data, as `engine/loader/transformers_model.py` makes it, until a load takes it.

    tree: None if planning needed none. made_of: the checkpoint's files and the dtype; plans of other files or dtypes do
    not get it.
    """

    def __init__(self, tree: Tree | None = None, made_of: Hashable = None) -> None:
        self._trees, self._made_of = [] if tree is None else [tree], made_of

    def look(self, made_of: Hashable) -> Tree | None:
        """Return the tree if it is of these files and this dtype and was not taken yet; keep it."""
        return self._trees[0] if self._trees and made_of == self._made_of else None

    def take(self, made_of: Hashable) -> Tree | None:
        """Return the same and forget it, because a load fills the tree."""
        if made_of != self._made_of:
            return None
        try:
            return self._trees.pop()
        except IndexError:
            return None
