"""What is the state of layers that keep no keys and values: a convolution's window and one matrix a head?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers import cache_utils

if TYPE_CHECKING:
    from transformers.cache_utils import LinearAttentionLayer

# Families whose modules update these states in place, in one step of several rows. Others keep more, or keep it elsewhere.
MODEL_TYPES = ("qwen3_5_text", "qwen3_5_moe_text")
_Base: Any = getattr(cache_utils, "LinearAttentionCacheLayerMixin", object)


def is_recurrent(layer: object) -> bool:
    """Whether a layer of transformers' own cache keeps such a state, and nothing else, in the form of releases that know more."""
    return type(layer).__name__ == "LinearAttentionLayer" and getattr(layer, "number_of_states", 0) == 1


def states_of(theirs: LinearAttentionLayer) -> dict[str, Tensor]:
    """Return the states of a layer of transformers' cache of one row, as `RecurrentLayer.row_states`."""
    return {"conv": theirs.conv_states[0], "recurrent": theirs.recurrent_states[0][0]}


def set_states(theirs: LinearAttentionLayer, conv: Tensor, recurrent: Tensor) -> None:
    """Give an empty layer of transformers' cache the states of one row, as `RecurrentLayer.row_states` has them."""
    theirs.lazy_initialization(conv_states=conv, recurrent_states=recurrent[None])
    theirs.conv_states[0].copy_(conv)
    theirs.recurrent_states[0].copy_(recurrent[None])
    theirs.has_previous_state[0] = True


class StepRows(Protocol):
    """The cache that a layer is of: its rows, and those of the present step."""

    context_tokens: int
    step_count: int

    @property
    def held_rows(self) -> int: ...

    def rows_of_step(self, count: int) -> slice: ...

    def zeros(self, like: Tensor, *shape: int) -> Tensor: ...


class RecurrentLayer(_Base):  # type: ignore[misc]
    """One layer's states: conv [rows, C, K] in the model's dtype, recurrent [rows, H, Dk, Dv] float32. A row's state is that of
    exactly the tokens that it has read, and cannot be cut back to a prefix. Source: transformers 5.23.0,
    cache_utils.LinearAttentionLayer and models/qwen3_5/modeling_qwen3_5.py."""

    is_compileable = True
    record_past = False
    is_sliding = False
    number_of_states = 1

    def __init__(self, shared: StepRows) -> None:
        self.shared = shared
        self.conv: Tensor | None = None
        self.recurrent: Tensor | None = None

    @property
    def is_initialized(self) -> bool:
        """Whether there is memory."""
        return self.conv is not None

    def lazy_initialization(self, conv_states: Tensor, recurrent_states: Tensor, **kwargs: object) -> None:
        """Allocate states of all rows like these of one [1, ...]."""
        rows = self.shared.held_rows
        self.conv = self.shared.zeros(conv_states, rows, *conv_states.shape[1:])
        self.recurrent = self.shared.zeros(recurrent_states, rows, *recurrent_states.shape[1:])

    def make(self, shape: Any, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate states of all rows. shape: `kernels.delta_rule.DeltaShape`."""
        conv = torch.zeros(1, shape.channels, shape.taps, dtype=dtype, device=device)
        self.lazy_initialization(conv, torch.zeros(1, shape.value_heads, shape.key_dim, shape.value_dim, device=device))

    def like(self, theirs: LinearAttentionLayer) -> None:
        """Allocate memory for the states that a layer of transformers' cache has of one row, if there is none."""
        if self.conv is None:
            self.lazy_initialization(theirs.conv_states[0], theirs.recurrent_states[0])

    def fill(self, row: int, theirs: LinearAttentionLayer) -> None:
        """Take over one row's states."""
        self.like(theirs)
        for mine, other in zip(self.tensors, (theirs.conv_states[0], theirs.recurrent_states[0]), strict=True):
            mine[row].copy_(other[0])

    def move(self, source: int, target: int) -> None:
        """Copy one row over another."""
        for tensor in self.tensors:
            tensor[target].copy_(tensor[source])

    def states(self, row: int | None = None) -> tuple[Tensor, Tensor]:
        """Return both states, of all rows or of one [1, ...]. They must have memory."""
        assert self.conv is not None and self.recurrent is not None
        rows = slice(None) if row is None else slice(row, row + 1)
        return self.conv[rows], self.recurrent[rows]

    def row_states(self, row: int) -> dict[str, Tensor]:
        """Return one row's states by name: conv [1, C, K], recurrent [H, Dk, Dv]."""
        conv, recurrent = self.states(row)
        return {"conv": conv, "recurrent": recurrent[0]}

    @property
    def tensors(self) -> list[Tensor]:
        """Both states of all rows."""
        return [one for one in (self.conv, self.recurrent) if one is not None]

    # The interface of transformers' modules, for the rows of the cache's present step ------------------------------

    def _rows(self, tensor: Tensor | None) -> Tensor:
        assert tensor is not None
        return tensor[self.shared.rows_of_step(self.shared.step_count)]

    @property
    def conv_states(self) -> dict[int, Tensor]:
        """The windows of the step's rows: modules write them in place."""
        return {0: self._rows(self.conv)}

    @property
    def recurrent_states(self) -> dict[int, Tensor]:
        """The matrices of the step's rows."""
        return {0: self._rows(self.recurrent)}

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """Steps follow a prompt."""
        return {0: True}

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: object) -> Tensor:
        """Write the matrices of the step's rows."""
        rows = self._rows(self.recurrent)
        rows.copy_(recurrent_states)
        return rows

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: object) -> Tensor:
        """Not for steps: a step's modules write windows in place."""
        raise NotImplementedError("a prompt in a row of states")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As of a layer of keys: what masks of the other layers are made of."""
        return self.shared.context_tokens, 0

    def get_seq_length(self, *args: object) -> int:
        return 0

    def get_max_cache_shape(self) -> int:
        return self.shared.context_tokens
