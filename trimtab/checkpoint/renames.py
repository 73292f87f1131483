"""Former names of modules: transformers renames parts of models between releases, but adapters keep the names of their
training.

The renames come from the installed release's table for checkpoints (engine/loader/transformers_model.py) and are part of the
anatomy. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple


class Rename(NamedTuple):
    """One renaming of tensor names: below `base.scope`, or `scope`, the first match of a pattern is replaced.

    pattern: from transformers, for Python's `re`. target: the replacement; \\1 is the pattern's group.
    """

    base: str
    scope: str
    pattern: str
    target: str

    def apply(self, tensor_name: str) -> str:
        """Return the new name. Source: transformers 5.23.0, core_model_loading.py, WeightTransform.rename_source_key."""
        scope = f"{self.scope}." if self.scope else ""
        base = f"{self.base}." if self.base else ""
        head = next((head for head in (base + scope, scope) if tensor_name.startswith(head)), None)
        if head is None:
            return tensor_name
        rest = tensor_name[len(head) :]
        match = re.search(self.pattern, rest)
        if match is None:
            return tensor_name
        target = self.target.replace(r"\1", match[1]) if r"\1" in self.target else self.target
        return head + rest.replace(match[0], target, 1)


def renamed(path: str, renames: Iterable[Rename]) -> str:
    """Return the present path of a module. The table has tensor names, so the name of the module's weight is used."""
    name = f"{path}.weight"
    for rename in renames:
        name = rename.apply(name)
    return name.removesuffix(".weight")


def former_words(renames: Iterable[Rename], paths: Iterable[str]) -> frozenset[str]:
    """Return the words of former names that occur in no present path."""
    words = {word for rename in renames for word in re.findall(r"[A-Za-z_]\w{2,}", re.sub(r"\\.", " ", Rename(*rename).pattern))}
    return frozenset(words - {segment for path in paths for segment in path.split(".")}) if words else frozenset()
