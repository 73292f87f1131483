"""How is an image or audio clip that a chat repeats not encoded again?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from trimtab.engine.kv import sequence
from trimtab.engine.kv.prefix_store import scope_of
from trimtab.engine.lora.store import Place

if TYPE_CHECKING:
    from trimtab.engine.formats.hf_types import HFModel
    from trimtab.engine.kv.sequence import Inputs

# The fields of a tower's output that families read (transformers 5.6.2 to 5.23).
PARTS = ("pooler_output", "deepstack_features", "attention_mask", "audio_mel_mask")
# Where the output of one image is kept as a whole.
_WHOLE = "whole"
FUNCTIONS = ("get_image_features", "get_audio_features")


class OutputCache(Protocol):
    """Where outputs of towers are kept by key (`PrefixCache`)."""

    def get_blob(self, key: bytes) -> Any: ...

    def put_blob(self, key: bytes, value: Any) -> None: ...


def encoders(
    hf_model: HFModel, cache: OutputCache, scope: bytes, inputs: Inputs, counts: Counter[str]
) -> dict[Place, object]:  # fmt: skip
    """Return the functions of towers for a pass (`covered`): they return cached outputs, and new outputs are cached. counts: what
    they count, as `PrefixCache.encoder_counts` has it. The cache wraps `get_image_features` and `get_audio_features`. Images are
    cached one by one, the audio clips of a prompt together. A key is the content, the shape that the processor gave it, and the
    scope: the client, and the adapter's content if it changes a tower."""
    owner = getattr(hf_model, "model", None)
    towers: dict[Place, object] = {}
    for name, ids in zip(FUNCTIONS, sequence.media_ids(hf_model), strict=True):
        if hasattr(owner, name):
            digests = [mark.digest for mark in inputs.marks if inputs.token_ids[mark.start] in ids]
            towers[owner, name] = _Tower(getattr(owner, name), cache, counts, scope_of(scope, name), digests, name == FUNCTIONS[0])
    return towers


@dataclass
class _Tower:
    """Replaces one function for one prompt. digests: of its images or audio, in order."""

    compute: Callable[..., object]
    cache: OutputCache
    counts: Counter[str]
    scope: bytes
    digests: Sequence[bytes]
    is_vision: bool

    def __call__(self, *args: object, **kwargs: object) -> object:
        if not self.digests:
            return self.compute(*args, **kwargs)
        split = self._split(args, kwargs) if self.is_vision else None
        if split is None:
            return self._whole(args, kwargs)
        return self._each(split)

    # All of them together ---------------------------------------------------------------------------------------------

    def _whole(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        key = scope_of(self.scope, "all", _form(args, kwargs), *self.digests)
        kept = self._find(key)
        if kept is not None:
            return SimpleNamespace(**kept)
        self.counts["passes"] += 1
        output = self.compute(*args, **kwargs)
        parts = {name: getattr(output, name, None) for name in PARTS}
        if parts["pooler_output"] is not None:
            self.cache.put_blob(key, parts)
        return output

    def _find(self, key: bytes) -> Any:
        kept = self.cache.get_blob(key)
        self.counts.update(lookups=1, hits=int(kept is not None))
        return kept

    # One by one -------------------------------------------------------------------------------------------------------

    def _split(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> list[tuple[tuple[object, ...], dict[str, object]]] | None:
        """Return the arguments of each image separately, None if they cannot be separated."""
        count = len(self.digests)
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if not tensors or count == 1:
            return None if not tensors else [(args, kwargs)]
        if all(tensor.shape[0] == count for tensor in tensors):
            return [tree_map_only(Tensor, partial(_row, number=n), (args, kwargs)) for n in range(count)]
        # Patches of all images in one row, and how many along each axis.
        grids = [tensor for tensor in tensors if tensor.shape == (count, 3)]
        if len(grids) != 1:
            return None
        sizes = grids[0].prod(dim=-1).tolist()
        if any(tensor.shape[0] not in (count, sum(sizes)) for tensor in tensors):
            return None
        ends = [sum(sizes[:n]) for n in range(count + 1)]

        def part(tensor: Tensor, number: int) -> Tensor:
            return _row(tensor, number) if tensor is grids[0] else tensor[ends[number] : ends[number + 1]]

        return [tree_map_only(Tensor, partial(part, number=n), (args, kwargs)) for n in range(count)]

    def _each(self, split: Sequence[tuple[tuple[object, ...], dict[str, object]]]) -> object:
        keys = [
            scope_of(self.scope, "one", _form(*arguments), digest) for arguments, digest in zip(split, self.digests, strict=True)
        ]
        outputs: dict[bytes, Any] = {key: self._find(key) for key in dict.fromkeys(keys)}
        if any(kept is not None and _WHOLE in kept for kept in outputs.values()):
            if len(keys) == 1:
                return SimpleNamespace(**outputs[keys[0]][_WHOLE])
            outputs = dict.fromkeys(outputs)  # fields kept of images alone are no part of an output of several
        missing = [key for key, kept in outputs.items() if kept is None]
        if missing:
            args, kwargs = tree_map(_joined, *(split[keys.index(key)] for key in missing))
            self.counts["passes"] += 1
            output = self.compute(*args, **kwargs)
            parts = _parts_of(output, len(missing))
            if parts is None:  # nothing of this form was ever kept but of images alone: all of them were missing
                whole = {name: getattr(output, name, None) for name in PARTS}
                if len(keys) == 1 and whole["pooler_output"] is not None:
                    self.cache.put_blob(keys[0], {_WHOLE: whole})
                return output
            for key, part in zip(missing, parts, strict=True):
                outputs[key] = part
                self.cache.put_blob(key, part)
        return _assembled([outputs[key] for key in keys])


def _form(args: Sequence[object], kwargs: dict[str, object]) -> str:
    """Return the part of a call without content: shapes and plain values."""

    def shown(value: object) -> object:
        return (tuple(value.shape), str(value.dtype)) if isinstance(value, Tensor) else repr(value)

    return repr(([shown(value) for value in args], sorted((name, shown(value)) for name, value in kwargs.items())))


def _row(tensor: Tensor, number: int) -> Tensor:
    return tensor[number : number + 1]


def _joined(*values: Any) -> object:
    return torch.cat(values) if isinstance(values[0], Tensor) else values[0]


def _parts_of(output: object, count: int) -> list[dict[str, Any]] | None:
    """Return each image's part of a tower's output, None for an output of another form. Outputs of Gemma 4 and Qwen3-VL cannot be
    split, up to some release after transformers 5.6.2."""
    pooled, deep = getattr(output, "pooler_output", None), getattr(output, "deepstack_features", None)
    is_stacked = isinstance(pooled, Tensor)
    if pooled is None or len(pooled) != count or (is_stacked and pooled.dim() != 3):
        return None
    if deep is not None and not all(isinstance(layer, (tuple, list)) and len(layer) == count for layer in deep):
        return None
    return [
        {
            "pooler_output": pooled[n], "is_stacked": is_stacked,
            "deepstack_features": None if deep is None else [layer[n] for layer in deep],
        }
        for n in range(count)
    ]  # fmt: skip


def _assembled(parts: Sequence[dict[str, Any]]) -> object:
    pooled = [part["pooler_output"] for part in parts]
    deep = None
    if parts[0]["deepstack_features"] is not None:
        deep = [tuple(layers) for layers in zip(*(part["deepstack_features"] for part in parts), strict=True)]
    return SimpleNamespace(pooler_output=torch.stack(pooled) if parts[0]["is_stacked"] else tuple(pooled), deepstack_features=deep)
