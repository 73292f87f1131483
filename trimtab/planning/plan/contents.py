"""What does a plan hold, and what follows from it?"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from trimtab.adapters.adapter import AdapterSpec
from trimtab.checkpoint.anatomy import Anatomy
from trimtab.checkpoint.folder import Checkpoint
from trimtab.errors import CheckpointError, RequestError
from trimtab.planning.values.byte_sizes import Rates, check_family, pool_tokens
from trimtab.planning.values.cards import Card
from trimtab.planning.values.execution import Execution
from trimtab.planning.values.rows import OUTSIDE_PEAK, ExpertWeights, Placement, StoredWeights, Unquantized
from trimtab.request import LoadRequest

PLAN_VERSION = 7
Tree = TypeVar("Tree")


@dataclass(frozen=True)
class FilesRead(Generic[Tree]):
    """What planning read of a model's files: the first load of the plan uses it, a second load reads them again.

    checkpoint: config and headers. specs: adapters by folder and by the identity of the anatomy that each was matched with.
    anatomies: by `anatomy_key`. tree: the module tree on tensors without data, as `engine/loader/transformers_model.py` makes it;
    None if planning needed none.
    """

    checkpoint: Checkpoint | None = None
    specs: Mapping[tuple[str, int], tuple[AdapterSpec, Anatomy]] = field(default_factory=dict)
    anatomies: Mapping[tuple[Hashable, ...], Anatomy] = field(default_factory=dict)
    tree: Tree | None = None


def anatomy_key(request: LoadRequest, *, keeps_16bit: bool) -> tuple[Hashable, ...]:
    """Return what the anatomy of a model's files depends on, the model first. request: its quant and dtype are not "auto"."""
    return request.model, request.quant, request.dtype, request.keep_unquantized, request.head, keeps_16bit, request.experts


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


Stamps = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class PlanContents:
    """The fields of `Plan`, which says what each is, and what follows from them."""

    request: LoadRequest
    model_class: str
    execution_device: str
    placements: tuple[Placement, ...]
    gpu: Mapping[str, int]
    host: Mapping[str, int]
    gpu_peak_bytes: int
    gpu_load_peak_bytes: int
    gpu_budget_bytes: int
    host_peak_bytes: int
    host_budget_bytes: int
    disk_bytes: int
    staging_slots: int
    prefill_tokens: int
    answer_tokens: int
    peak_phase: str
    unquantized: tuple[Unquantized, ...]
    checkpoint_stamps: tuple[tuple[str, int, int], ...]
    rates: Rates
    execution: Execution
    adapter_bytes: Mapping[str, int] = field(default_factory=dict)
    adapter_stamps: Mapping[str, Stamps] = field(default_factory=dict)
    card: Card | None = None
    dtype_reason: str = ""
    media_reason: str = ""
    prefix_reason: str = ""
    window_reason: str = ""
    version: int = PLAN_VERSION
    stored: tuple[StoredWeights, ...] = field(default=(), compare=False, repr=False)
    files_read: Handover[Any] = field(default_factory=Handover, compare=False, repr=False)
    experts: ExpertWeights | None = field(default=None, compare=False, repr=False)

    def tier_of(self, block_path: str) -> str:
        """Return the tier of a block; KeyError if the model has no such block."""
        return self.tiers()[block_path]

    def tiers(self) -> dict[str, str]:
        """Return block_path -> tier."""
        return {row.block_path: row.tier for row in self.placements}

    @property
    def made_of(self) -> tuple[Any, ...]:
        """The key of what planning read for this plan: the checkpoint's files and the dtype."""
        return self.request.model, self.checkpoint_stamps, self.request.dtype

    @property
    def pool_tokens(self) -> int | None:
        """How many tokens all rows hold together in pages; None if every row has its whole context."""
        request = self.request
        return pool_tokens(request.kv_tokens, rows=request.batch, context_tokens=request.context_tokens)

    @property
    def blocks_off_device(self) -> int:
        """The number of blocks that every token reads and that are not resident."""
        return sum(row.part in ("language", "head") and row.tier != "resident" for row in self.placements)

    @property
    def is_whole(self) -> bool:
        """Whether every weight that tokens read stays on the device."""
        return not self.blocks_off_device and not self.execution.expert_slots

    def check_same_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError if the files are not the ones that the plan was made from."""
        now, then = set(checkpoint.stamps), set(self.checkpoint_stamps)
        if now != then:
            changed = sorted({name for name, *_ in now ^ then})
            raise CheckpointError(
                f"changed since the plan was made: {', '.join(changed)}", path=checkpoint.path, hint="Make the plan again"
            )

    def check_family(self, anatomy: Anatomy) -> None:
        """Raise RequestError for what the model's family does not support: an edited plan, or an earlier release's."""
        check_family(self.request, anatomy)
        if self.prefill_tokens < self.request.context_tokens and not anatomy.can_chunk:
            why = f"texts of {anatomy.model_class} are computed whole"
            raise RequestError(why, field="plan.prefill_tokens", value=self.prefill_tokens, hint="Plan again")

    @property
    def request_s(self) -> float:
        """Expected seconds of one request before its first token: images, audio and a prompt that fills the context."""
        return self.execution.prompt.seconds

    @property
    def token_s(self) -> float:
        """Expected seconds of one decoding step, all blocks, in the execution chosen."""
        return self.execution.step.seconds

    @property
    def expected_s(self) -> float:
        """Expected seconds of a request and its whole answer, by which the placement was chosen."""
        return self.request_s + self.answer_tokens * self.token_s

    @property
    def gpu_needed_bytes(self) -> int:
        """The device budget that this placement needs: peaks, context and reserve."""
        return max(self.gpu_peak_bytes, self.gpu_load_peak_bytes) + sum(self.gpu.get(name, 0) for name in OUTSIDE_PEAK)

    @property
    def held_adapters_limit_bytes(self) -> int:
        """The most host memory of a server's adapters: the planned bytes and the unused budget."""
        on_host = self.host_peak_bytes + (self.gpu_needed_bytes if self.execution_device == "cpu" else 0)
        return max(0, self.host_budget_bytes - on_host + self.host.get("held_adapters", 0))
