"""Does a tower of a family that media_check.py does not know read beyond one of its tables?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trimtab.errors import RequestError

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from trimtab.engine.formats.hf_types import HFModel

# Towers whose positions are computed for any size, that resize every image to one, or that media_check.py checks first.
KNOWN = (
    "gemma4_vision", "gemma4_audio", "gemma3n_vision", "gemma3n_audio", "siglip_vision_model", "clip_vision_model",
    "qwen2_vl_vision", "qwen2_5_vl_vision", "qwen3_vl_vision", "qwen3_vl_moe_vision", "qwen3_5_vision", "qwen3_5_moe_vision",
    "pixtral",
)  # fmt: skip
HINT = "Send one of another size or length"
# Texts of torch for two shapes that do not match, and of a CPU for an index without a class in one_hot.
_SHAPE_WORDS = ("must match", "shape", "size", "num_classes")
_ATEN = torch.ops.aten


class BeyondTableError(IndexError):
    """An index is outside its table. entries: the size of the table; index: the first index that is too large or too small."""

    def __init__(self, index: int, entries: int) -> None:
        self.index, self.entries = index, entries
        super().__init__(f"entry {index} of a table of {entries}")


class CheckedIndices(TorchDispatchMode):
    """While it is on, operations that look something up raise BeyondTableError before they run."""

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        look = _LOOK_UPS.get(func.overloadpacket)
        if look is not None:
            for indices, entries, may_be_negative in look(*args):
                _check(indices, entries, may_be_negative)
        return func(*args, **(kwargs or {}))


def _check(indices: object, entries: int, may_be_negative: bool) -> None:
    if not isinstance(indices, Tensor) or indices.dtype in (torch.bool, torch.uint8) or not indices.numel():
        return
    least, most = (int(value) for value in torch.aminmax(indices))
    if most >= entries:
        raise BeyondTableError(most, entries)
    if least < (-entries if may_be_negative else 0):
        raise BeyondTableError(least, entries)


# (indices, entries, whether they may count from the end) of one operation.
LookUps = Iterator[tuple[object, int, bool]]


def _of_embedding(weight: Tensor, indices: Tensor, *rest: object) -> LookUps:
    yield indices, weight.shape[0], False


def _of_index(table: Tensor, indices: Sequence[Tensor | None], *rest: object) -> LookUps:
    axis = 0
    for one in indices:
        if one is not None and one.dtype in (torch.bool, torch.uint8):
            axis += one.dim()
            continue
        if one is not None:
            yield one, table.shape[axis], True
        axis += 1


def _along(table: Tensor, axis: int, indices: Tensor, *rest: object) -> LookUps:
    yield indices, table.shape[axis] if table.dim() else 1, False


_LOOK_UPS: dict[object, Callable[..., LookUps]] = {
    _ATEN.embedding: _of_embedding, _ATEN.index: _of_index, _ATEN._unsafe_index: _of_index, _ATEN.index_put: _of_index,
    _ATEN.index_put_: _of_index, _ATEN.index_select: _along, _ATEN.gather: _along, _ATEN.scatter: _along,
    _ATEN.scatter_: _along, _ATEN.scatter_add: _along, _ATEN.scatter_add_: _along, _ATEN.index_add: _along,
    _ATEN.index_add_: _along, _ATEN.index_copy: _along, _ATEN.index_copy_: _along,
}  # fmt: skip


def unknown_towers(config: object) -> tuple[str, ...]:
    """Return the model types of a model's towers that are not in KNOWN."""
    names = [name for name in getattr(config, "sub_configs", None) or {} if "vision" in name or "audio" in name]
    kinds = [getattr(getattr(config, name, None), "model_type", None) for name in names]
    return tuple(kind for kind in kinds if kind is not None and kind not in KNOWN)


def guard_towers(hf_model: HFModel) -> tuple[str, ...]:
    """Have every part of a model that is not its decoder checked while it runs, for one with `unknown_towers`.

    Returns the names of those parts. They raise RequestError for media that lead beyond a table, or to shapes that do not go
    together. A GPU answers an index beyond a table with an assertion that ends the process. Each look-up costs a transfer. Kernels
    of other packages that index by themselves are not covered.
    """
    base = getattr(hf_model, "model", hf_model)
    decoder = hf_model.get_decoder() if hasattr(hf_model, "get_decoder") else None
    guarded = []
    for name, part in base.named_children():
        is_decoder = decoder is not None and any(module is decoder for module in part.modules())
        if not is_decoder and name not in ("language_model", "lm_head") and next(part.parameters(), None) is not None:
            vars(part)["forward"] = _guarded(part.forward, "audio" if "audio" in name else "image")
            guarded.append(name)
    return tuple(guarded)


def _guarded(forward: Callable[..., object], field: str) -> Callable[..., object]:
    def run(*args: object, **kwargs: object) -> object:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return forward(*args, **kwargs)  # nothing can be read while steps are captured
        try:
            with CheckedIndices():
                return forward(*args, **kwargs)
        except BeyondTableError as exc:
            why = f"leads to {exc}: this model has no place for it"
            raise RequestError(why, field=field, hint=HINT) from exc
        except (IndexError, ValueError, RuntimeError) as exc:
            # Running out of memory and a device's errors have separate classes.
            if isinstance(exc, RuntimeError) and not (type(exc) is RuntimeError and _is_shape(str(exc))):
                raise
            raise RequestError(f"does not fit this model ({exc})", field=field, hint=HINT) from exc

    return run


def _is_shape(text: str) -> bool:
    return any(words in text for words in _SHAPE_WORDS) and "CUDA" not in text
