"""The empty module tree that planning may have made: the first load of the plan takes it, and a second one makes its own."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Tree = TypeVar("Tree")


class ModuleTree(Generic[Tree]):
    """A module tree on tensors without data, as `engine/loader/transformers_model.py` makes it, until it is taken.

    tree: None if planning needed none. made_of: the checkpoint's files and the dtype; a plan of others does not get it.
    """

    def __init__(self, tree: Tree | None = None, made_of: Hashable = None) -> None:
        self._trees, self._made_of = [] if tree is None else [tree], made_of

    def look(self, made_of: Hashable) -> Tree | None:
        """Return the tree if it is of these files and this dtype and was not taken yet; it stays."""
        return self._trees[0] if self._trees and made_of == self._made_of else None

    def take(self, made_of: Hashable) -> Tree | None:
        """Return the same; the next one who asks gets None, because a load fills the tree."""
        if made_of != self._made_of:
            return None
        try:
            return self._trees.pop()
        except IndexError:
            return None
