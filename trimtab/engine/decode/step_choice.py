"""In which mode do a batch's decode steps run: captured or not, fused or modules, and with which kernels?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trimtab.engine.kernels import dequantize
from trimtab.engine.kernels.device_kernels import EXPERTS, DeviceKernels
from trimtab.engine.layers.leaves import Leaf
from trimtab.engine.memory.graph_cache import check_room
from trimtab.engine.memory.out_of_memory import naming_out_of_memory
from trimtab.errors import DeviceError, DoesNotFitError
from trimtab.planning.values.execution import CAPTURED, CHOSEN_ON_HOST, KERNEL_ROWS
from trimtab.request import DECODE_MODES, check_choice

if TYPE_CHECKING:
    from trimtab.engine.layers.context import EngineContext


@dataclass(frozen=True)
class Fallback:
    """Something that runs the slower way. what: "graph", "fused step", a kernel's name; why: in words, with numbers."""

    what: str
    why: str


class StepChoice:
    """How steps of `rows` rows are computed. mode: "auto" takes the fastest one that works, the others are exact.

    Errors: RequestError for an unknown mode; DeviceError if an explicitly requested mode is unavailable.
    """

    def __init__(self, model: EngineContext, mode: str, rows: int) -> None:
        check_choice(mode, DECODE_MODES, field_name="decode")
        self.model, self.mode, self.rows, self.device = model, mode, rows, model.device
        self.fallbacks: list[Fallback] = []
        self.kernels = DeviceKernels.none()
        self.is_fusable = False
        self.four_bit: list[Leaf] = []
        self.is_captured = mode != "eager" and self._may_capture()
        with naming_out_of_memory("choosing kernels", model.plan, self.device):
            self._choose()
        if self.is_captured and self.model.adapter_store.reads_on_host(()) and self.kernels.experts is None:
            self.is_captured = False
            self.fall_back("graph", self.kernels.left_out.get(EXPERTS, CHOSEN_ON_HOST), requested=self.mode == "fused")
        if self.is_captured and not self.kernels.is_empty:
            torch.cuda.empty_cache()  # the tensors of checks and timings are free

    def _choose(self) -> None:
        planned = self.model.plan.execution.step
        if self.mode == "auto" and planned.mode == "graph" and self.device.type == "cuda":
            self.fall_back("fused step", f"planned so: {planned.reason}", requested=False)
            if self.is_captured:
                self._take_for_adapters()
        elif self.mode == "fused" or (self.mode == "auto" and (self.is_captured or planned.mode != "eager")):
            self._choose_kernels()
        elif self.is_captured:
            self._take_for_adapters()
        has_many = self.is_captured and self.rows > KERNEL_ROWS
        hf_model = self.model.hf_model
        self.four_bit = [*dequantize.four_bit(hf_model), *dequantize.packed_heads(hf_model)] if has_many else []
        if self.four_bit and self.device.type == "cuda":
            self._take(self.kernels.with_rows(self.four_bit, self.model.dtype))

    def _may_capture(self) -> bool:
        why = self._why_no_graph()
        if why is None:
            return True
        if self.device.type == "cuda":
            self.fall_back("graph", why, requested=self.mode in ("graph", "fused"))
        elif self.mode == "graph":
            raise DeviceError("CUDA graphs require a GPU", device=str(self.device), hint="Leave the mode out")
        return False

    def _why_no_graph(self) -> str | None:
        if self.device.type != "cuda":
            return "there is no GPU"
        if (why := self.model.anatomy.capture_unsupported) is not None:
            return why
        for row in self.model.plan.placements:
            if row.part in ("language", "text", "head") and row.tier in ("host", "disk"):
                return f"{row.block_path} is in tier {row.tier}: the CPU takes part in every step"
        if self.model.adapter_store.reads_on_host(()) and self.mode == "graph":
            return CHOSEN_ON_HOST
        planned = self.model.plan.execution.step
        if self.mode == "auto" and planned.mode == "eager":
            return f"planned so: {planned.reason}"
        mode = self.mode if self.mode in CAPTURED else planned.mode
        check_room(self.model, self.rows, mode)
        if mode == "fused" and (why := self._difference()) is not None:
            try:  # the plan counts no graph of modules, which takes more
                check_room(self.model, self.rows, "graph")
            except DoesNotFitError as exc:
                return f"{why}; {exc}"
        return None

    def _difference(self) -> str | None:
        """Return why no step can be made of this model's description, None if one can."""
        from trimtab.engine.families import check

        return check.difference(self.model)

    def fall_back(self, what: str, why: str, *, requested: bool) -> None:
        """Report a slower computation. Errors: DeviceError if the faster one was explicitly requested."""
        if requested:
            raise DeviceError(f"{what}: {why}", device=str(self.device), hint="Omit the mode to use an available one")
        fallback = Fallback(what, why)
        if fallback not in self.fallbacks:
            self.fallbacks.append(fallback)

    def _choose_kernels(self) -> None:
        if self.device.type != "cuda" and self.mode != "fused":
            return
        if (why := self._difference()) is not None:
            self.fall_back("fused step", why, requested=self.mode == "fused")
            self._take_for_adapters()
            return
        self.is_fusable = True
        if self.device.type == "cuda":
            from trimtab.engine.families.step import choose_kernels

            invariant = bool(self.model.plan.request.batch_invariant)
            self._take(choose_kernels(self.model.hf_model, self.rows, is_invariant=invariant))
            # Without any of them the modules' own operations are as few as plain torch's.
            self.is_fusable = self.mode == "fused" or not self.kernels.is_empty

    def _take_for_adapters(self) -> None:
        if self.device.type == "cuda":
            self._take(DeviceKernels.for_adapters(self.device, self.model.dtype))

    def _take(self, kernels: DeviceKernels) -> None:
        self.kernels = kernels
        for name, reason in {**kernels.left_out, **kernels.plain_products}.items():
            self.fall_back(name, reason, requested=False)

    def capture_failed(self, why: str, *, is_fused: bool) -> None:
        """Go on without the fused step, or without graphs: without kernels of ours there may still be a graph."""
        self.fall_back("fused step" if is_fused else "graph", why, requested=self.mode != "auto")
        self.is_fusable, self.is_captured = False, is_fused
