"""Are the tensors that no adapter changes the base's in a merged checkpoint?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from trimtab.checkpoint.folder import Checkpoint, read_checkpoint
from trimtab.checkpoint.headers import TensorEntry
from trimtab.engine.loader.tracing import Expression
from trimtab.engine.tiers.reader import PositionedFile, read_small
from trimtab.errors import CheckpointError
from trimtab.formats.packed import split_packed
from trimtab.formats.record import PackedEntry
from trimtab.merging.changes.delta import EntryRows, Rows, row_pieces
from trimtab.merging.changes.dequantize import packed_rows
from trimtab.merging.changes.inverse import is_cast
from trimtab.merging.files.layout import FLOATS
from trimtab.process import phases
from trimtab.verification.merges.weights import Grid, OtherTensors, exact_values, module_weight, read_grid

Outcome = Literal["equal", "differs", "not compared"]


class FileWeights:
    """The weights of a checkpoint by their path in the model, one at a time and dense."""

    def __init__(self, folder: Path) -> None:
        from trimtab.engine.loader import transformers_model

        self.checkpoint: Checkpoint = read_checkpoint(folder)
        self.entries, self.packed = split_packed(self.checkpoint)
        self.probe: Any = transformers_model.probe(self.checkpoint, "float32")  # represents every file dtype exactly
        self.anatomy: Any = transformers_model.anatomy_of(self.probe, self.checkpoint, quant="none", keep_unquantized=())

    def source(self, tensor_path: str) -> Expression | None:
        """Return how the files make a tensor, None if no file has it. A tied one is its owner's."""
        found: Expression | None = self.probe.sources.get(self.probe.ties.get(tensor_path, tensor_path))
        return found

    def weight(self, tensor_path: str, *, unpacked: bool = False) -> Tensor:
        """Return a tensor of the model, of a packed one the exact values. unpacked: as its format unpacks it, in its own dtype."""
        expression = self.source(tensor_path)
        if expression is None:
            raise CheckpointError("is in no file of it", path=self.checkpoint.path, tensor_name=tensor_path)
        return expression.replay(self.unpacked if unpacked else self.exact)

    def form(self, tensor_path: str) -> str:
        """Return the form of a weight in the files: the dtype of its tensors, or the packed form."""
        leaf = self._expression(tensor_path).leaves[0]
        return str(self.packed[leaf].kind if leaf in self.packed else self.entries[leaf].dtype)

    def grid(self, tensor_path: str) -> tuple[Grid, Tensor] | None:
        """Return the grid of a packed weight and its values, not rounded to any dtype; None if several tensors form the weight,
        or its format has no grid."""
        expression = self._expression(tensor_path)
        if not expression.is_leaf or expression.leaves[0] not in self.packed:
            return None
        return read_grid(self.packed[expression.leaves[0]])

    def is_plain(self, tensor_path: str) -> bool:
        """Whether the files contain the weight unpacked."""
        expression = self.source(tensor_path)
        return expression is not None and not any(leaf in self.packed for leaf in expression.leaves)

    def unpacked(self, name: str) -> Tensor:
        """Return a file tensor, a packed one as its format unpacks it."""
        from trimtab.engine.formats.weights import dequantize, prequantized

        if name not in self.packed:
            return self.exact(name)
        entry = self.packed[name]
        return dequantize(prequantized(entry, read_small(entry.read_parts), torch.float32))

    def stored(self, path: str) -> Tensor | None:
        """Return a buffer that no file has, None if it is not computed at load."""
        found = dict(self.probe.model.named_buffers()).get(path)
        return found if found is not None and not found.is_meta else None

    def exact(self, name: str) -> Tensor:
        """Return a file tensor, of a packed one the values before any rounding, float32."""
        return exact_values(self.packed[name]) if name in self.packed else read_small({name: self.entries[name]})[name]

    def _expression(self, tensor_path: str) -> Expression:
        found = self.source(tensor_path)
        assert found is not None, tensor_path
        return found


def compare_others(ours: FileWeights, theirs: FileWeights, changed: Collection[str]) -> OtherTensors:
    """Return the comparison of every tensor of the model that is not in `changed`, a set of tensor paths.

    ours: the base. theirs: the merged checkpoint. A tensor is right if it has the base's bytes, or the base's values rounded once
    to the dtype of the merged file. A tensor that the merged files have packed has to hold the levels that the base's values pack
    to.
    """
    paths = [path for path in sorted({*_paths(ours), *_paths(theirs)}) if path not in changed]
    count = phases.counting("comparing the weights that no adapter changes, tensor")
    found: dict[Outcome, list[str]] = {"equal": [], "differs": [], "not compared": []}
    with ExitStack() as stack:
        compare = _Comparison(ours, theirs, changed, stack)
        for done, path in enumerate(paths, 1):
            found[compare(path)].append(path)
            count(done, len(paths))
    return OtherTensors(len(found["equal"]), tuple(found["differs"]), tuple(found["not compared"]))


def _paths(weights: FileWeights) -> Iterator[str]:
    yield from (*weights.probe.sources, *weights.probe.ties)


class _Comparison:
    def __init__(self, ours: FileWeights, theirs: FileWeights, changed: Collection[str], stack: ExitStack) -> None:
        self.ours, self.theirs = ours, theirs
        self._files: dict[Path, PositionedFile] = {}
        for file in dict.fromkeys((*ours.checkpoint.files, *theirs.checkpoint.files)):
            opened = self._files[file] = PositionedFile(file)
            stack.callback(opened.close)
        # A file tensor of which a changed parameter is made too is not the base's as a whole.
        sources = [one.source(path) for one in (ours, theirs) for path in changed]
        self._mixed = {leaf for source in sources if source is not None for leaf in source.leaves}
        self._known: dict[tuple[str, str], Outcome] = {}

    def __call__(self, path: str) -> Outcome:
        a, b = self.ours.source(path), self.theirs.source(path)
        if a is None or b is None:
            return self._compare_stored(path)
        if is_cast(a) and is_cast(b):
            return self._compare_leaves(a.leaves[0], b.leaves[0])
        is_alike = len(a.leaves) == len(b.leaves) and _is_made_alike(a, b)
        if is_alike and not self._mixed.intersection((*a.leaves, *b.leaves)):
            found = {self._compare_leaves(*pair) for pair in zip(a.leaves, b.leaves, strict=True)}
            return next((outcome for outcome in ("differs", "not compared") if outcome in found), "equal")
        return self._compare_whole(path, b)

    def _compare_stored(self, path: str) -> Outcome:
        """Compare a buffer that only one side has in its files with the value that it has at load."""
        a, b = (one.stored(path) if one.source(path) is None else one.weight(path) for one in (self.ours, self.theirs))
        if a is None or b is None:
            return "not compared"
        return "equal" if a.shape == b.shape and _is_rounded(a.to(b.dtype), b) else "differs"

    def _compare_whole(self, path: str, expression: Expression) -> Outcome:
        if any(leaf in self.theirs.packed for leaf in expression.leaves):
            return "not compared"  # packed before it was stacked, in blocks that are not known here
        merged = self.theirs.weight(path)
        kinds = {self.theirs.entries[leaf].dtype for leaf in expression.leaves if leaf in self.theirs.entries}
        for unpacked in (False, True):
            base = self.ours.weight(path, unpacked=unpacked)
            if base.shape != merged.shape:
                return "differs"
            if any(_is_rounded(base.to(getattr(torch, kind)).to(merged.dtype), merged) for kind in kinds):
                return "equal"
        return "differs"

    def _compare_leaves(self, a: str, b: str) -> Outcome:
        if (a, b) not in self._known:
            compare = self._compare_packed if b in self.theirs.packed else self._compare_plain
            self._known[a, b] = compare(a, b)
        return self._known[a, b]

    def _compare_plain(self, a: str, b: str) -> Outcome:
        new = self.theirs.entries[b]
        shape = (self.ours.packed.get(a) or self.ours.entries[a]).shape
        if tuple(shape) != tuple(new.shape):
            return "differs"
        written = EntryRows(self._files[new.file], new)
        if a not in self.ours.packed:
            return self._compare_rows(self._rows(self.ours.entries[a]), written, shape)
        if self._compare_rows(packed_rows(self.ours.packed[a], lambda entry: self._files[entry.file]), written, shape) == "equal":
            return "equal"
        whole = self.ours.unpacked(a)
        return self._compare_rows(lambda start, stop: whole[start:stop], written, shape)

    def _compare_rows(self, base: Rows, written: Rows, shape: tuple[int, ...]) -> Outcome:
        pieces = row_pieces(shape)
        return "equal" if all(_is_rounded(base(*piece), written(*piece)) for piece in pieces) else "differs"

    def _rows(self, entry: TensorEntry) -> EntryRows:
        return EntryRows(self._files[entry.file], entry)

    def _compare_packed(self, a: str, b: str) -> Outcome:
        old, new = self.ours.packed.get(a), self.theirs.packed[b]
        if old is not None and self._has_same_parts(old, new):
            return "equal"
        base = self.ours.exact(a)
        if tuple(base.shape) != tuple(new.shape):
            return "differs"
        known = read_grid(new)
        if known is None:
            return "not compared"
        grid, values = known
        zeros = torch.zeros(1, 1).expand(values.shape)
        bases: list[Callable[[], Tensor]] = [lambda: base, *([] if old is None else [lambda: self.ours.unpacked(a)])]
        tests = (module_weight(b, one().float(), values, zeros, new.kind, terms=zeros, grid=grid) for one in bases)
        return "equal" if any(not test.beyond for test in tests) else "differs"

    def _has_same_parts(self, old: PackedEntry, new: PackedEntry) -> bool:
        def described(entry: PackedEntry) -> tuple[object, ...]:
            return entry.kind, entry.shape, {name: (part.dtype, part.shape) for name, part in entry.parts.items()}

        return described(old) == described(new) and all(
            self._compare_rows(self._rows(part), self._rows(new.parts[name]), part.shape) == "equal"
            for name, part in old.parts.items()
        )


def _is_rounded(base: Tensor, written: Tensor) -> bool:
    """Return whether values are those of the base, rounded once to their own dtype."""
    base = base.to(written.dtype).contiguous()
    if base.shape != written.shape:
        return False
    if torch.equal(base.view(-1).view(torch.uint8), written.reshape(-1).view(torch.uint8)):
        return True
    is_same = base == written
    if str(written.dtype).removeprefix("torch.") in FLOATS:
        is_same |= base.isnan() & written.isnan()
    return bool(is_same.all())


def _is_made_alike(a: Any, b: Any) -> bool:
    """Return whether two tensors are made of their file tensors by the same operations."""
    if isinstance(a, Expression) or isinstance(b, Expression):
        if not (isinstance(a, Expression) and isinstance(b, Expression)) or a.is_leaf or b.is_leaf:
            return isinstance(a, Expression) and isinstance(b, Expression) and a.is_leaf and b.is_leaf
        return a.output == b.output and a.func == b.func and _is_made_alike([a.args, a.kwargs], [b.args, b.kwargs])
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_is_made_alike, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_made_alike(a[key], b[key]) for key in a)
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and bool(a == b)
