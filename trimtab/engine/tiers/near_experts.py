"""Where are the experts of a module whose stacks stay in host memory, with slots on the card for those that were used last?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from trimtab.engine.formats.packed import Packed
from trimtab.engine.tiers.reader import Arena, Part, aligned, seen_by
from trimtab.errors import DeviceError, gib
from trimtab.formats.record import stored_format

_PAGE_BYTES = 4096


@dataclass(frozen=True, eq=False)
class NearExperts:
    """The slots of one module. stacks: by name, their parts [S, ...] in the slots. where [E]: an expert's slot, -1 without; owner
    [S]: a slot's expert, -1 while empty; used [S]: the step of its last use, 0 of none, -1 while empty; clock [1]: steps so far;
    all int32. counts [2] int64: how many experts steps chose, and how many of those had no slot. `experts_assign` gives the chosen
    experts slots and `experts_fetch` copies those that are new, both inside the step's graph: the host never reads which. Copies
    run on a separate stream. A prompt uses nearly all experts: they take turns in the half of the slots that was used longest
    ago."""

    stacks: Mapping[str, Packed]
    where: Tensor
    owner: Tensor
    used: Tensor
    clock: Tensor
    counts: Tensor

    @property
    def slots(self) -> int:
        return len(self.owner)

    @property
    def turning(self) -> int:
        """Slots in which a prompt's experts take turns: half of them, of few all."""
        return self.slots // 2 if self.slots > 1 and 8 * self.slots >= len(self.where) else self.slots

    @property
    def turns(self) -> int:
        """Launches of a prompt: of experts that are near, then of the others."""
        return 1 + -(-max(len(self.where) - self.slots, 0) // self.turning)

    def forget(self) -> None:
        """Empty the slots: a launch failed behind the one that says what they hold. What is captured has not run."""
        if not (self.where.is_cuda and torch.cuda.is_current_stream_capturing()):
            for table in (self.where, self.owner, self.used):
                table.fill_(-1)


@dataclass(eq=False)
class NearWriter:
    """Makes the host memory of a module's stacks, and its slots. arena: has the room of the slots. seen: the host memory as the
    device reads it, which keeps it alive."""

    device: torch.device
    slots: int
    arena: Arena
    _host: Tensor = field(init=False)
    _places: dict[str, Part] = field(init=False, default_factory=dict)
    _near: dict[str, Packed] = field(init=False, default_factory=dict)

    def room(self, forms: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Tensor]:
        """Return tensors of these shapes and types to be filled: in host memory, whose pages nothing else uses."""
        self._places, used = {}, 0
        for name, (shape, dtype) in forms.items():
            self._places[name] = Part(used, prod(shape) * dtype.itemsize, shape, dtype)
            used += aligned(self._places[name].nbytes)
        used = -(-used // _PAGE_BYTES) * _PAGE_BYTES
        memory = torch.empty(used + _PAGE_BYTES, dtype=torch.uint8)
        first = -memory.data_ptr() % _PAGE_BYTES
        self._host = memory[first : first + used]
        return {name: place.view(self._host) for name, place in self._places.items()}

    def taken(self, name: str, packed: Packed) -> Packed:
        """Return the stack that was filled last as the device reads it. Errors: DeviceError if it cannot."""
        seen = self._host if self.device.type == "cpu" else seen_by(self._host, self.device)
        if seen is None:
            raise DeviceError(
                f"the driver does not let the GPU read {gib(self._host.nbytes)} of host memory, as slots of experts need",
                device=str(self.device), hint='Raise the limit of locked memory, or stream layers: place={"*layers.*": "stream"}',
            )  # fmt: skip
        parts = {part: place.view(seen) for part, place in self._places.items()}
        whole = stored_format(packed.kind).arguments[3]  # a few bytes of each expert, which stay on the device
        if whole in parts:
            parts[whole] = packed.parts[whole].to(self.device)
        moved = {part: ((self.slots, *value.shape[1:]), value.dtype) for part, value in parts.items() if part != whole}
        own = packed.with_parts(self.arena.room(moved), packed.codes)
        self._near[name] = own
        return packed.with_parts(parts, packed.codes)

    def finish(self, count: int) -> NearExperts:
        """Return the slots, empty. count: of experts."""
        where, owner, used, clock = (
            torch.full((size,), first, dtype=torch.int32, device=self.device)
            for size, first in ((count, -1), (self.slots, -1), (self.slots, -1), (1, 0))
        )
        counts = torch.zeros(2, dtype=torch.int64, device=self.device)
        return NearExperts(self._near, where, owner, used, clock, counts)
