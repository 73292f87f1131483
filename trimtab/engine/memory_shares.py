"""What takes the device's memory: planned and measured shares?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from trimtab.engine.formats.packed import Packed
from trimtab.engine.layers.context import EngineContext
from trimtab.engine.layers.leaves import PackedTable, ResidentLeaf
from trimtab.engine.memory.graph_cache import extra_bytes
from trimtab.engine.memory.rates import process_on_gpu
from trimtab.errors import gib
from trimtab.machine.memory import peak_host_bytes
from trimtab.planning.planner import ITEM
from trimtab.report.document import Document, Table

if TYPE_CHECKING:
    from trimtab.engine.batch.batch import Batch
    from trimtab.engine.prefill.prefix_cache import PrefixCache

# Tensors of a running request that are not measured one by one: together the rest of torch's peak.
_RUNNING = (
    "activations", "workspaces", "logits", "scratch", "kv_copies", "prompt_buffers", "tower_buffers", "tower_activations", "checks",
)  # fmt: skip
_DRIVER = ("cuda_context", "kernels")
_SLACK = ("allocator_reserve", "fragments")
_GRAPHS = ("graphs", "prompt_graphs", "tower_graphs")


@dataclass(frozen=True, kw_only=True)
class Share:
    """One share of the device's memory. measured_bytes: None where it cannot be measured. is_estimate: whether it is one. cuBLAS'
    workspaces lie within torch's tensors, and without NVIDIA's management library the driver's memory outside torch is unknown. The
    measured figures add up to the process."""

    name: str
    planned_bytes: int
    measured_bytes: int | None
    is_estimate: bool = False

    def to_json(self) -> dict[str, object]:
        """Return the share as JSON-ready values."""
        return asdict(self)


class MeasuredModel(EngineContext, Protocol):
    """A loaded model whose memory is measured."""

    unpacked_bytes: int
    prefix_cache: PrefixCache | None

    @property
    def weight_bytes(self) -> int: ...

    def memory(self) -> dict[str, int]: ...


def shares_of(model: MeasuredModel, batch: Batch | None = None) -> tuple[Share, ...]:
    """Return the shares of a loaded model's device, the whole process last. batch: that answers, None where none was made."""
    plan, cuda = model.plan.gpu, model.device.type == "cuda"

    def planned(*names: str) -> int:
        return sum(plan.get(name, 0) for name in names)

    pairs = {
        "weights": (planned("weights", "fixed", "expert_slots"), model.weight_bytes),
        "unpacked weights": (planned(ITEM), model.unpacked_bytes if model.unpacked is None else model.unpacked.nbytes),
        "adapters": (planned("adapters"), _adapter_bytes(model)),
        "adapter copies": (planned("adapter_copy"), 0 if batch is None else batch.prompts.layouts.nbytes),
        "kv cache": (planned("kv_cache"), 0 if batch is None else batch.cache.nbytes()),
        "staging": (planned("staging", "prefix_staging"), _staging_bytes(model)),
    }
    shares = [Share(name=name, planned_bytes=left, measured_bytes=right) for name, (left, right) in pairs.items()]
    if not cuda:
        shares += [_not_measured(name, planned(name)) for name in _RUNNING if planned(name)]
        total = model.plan.gpu_needed_bytes
        return (*shares, Share(name="process", planned_bytes=total, measured_bytes=None))
    peak = model.memory()["gpu_peak_bytes"]
    reserved = int(torch.cuda.memory_reserved(model.device))
    process, is_estimate = process_on_gpu(model.device)
    graphs = 0 if batch is None else batch.steps.graph_bytes + batch.prompts.graph_bytes
    running = peak - sum(right for _, right in pairs.values())
    shares += [_not_measured(name, planned(name)) for name in _RUNNING if name != "activations" and planned(name)]
    shares += [
        Share(name="activations, with workspaces and buffers", planned_bytes=planned(*_RUNNING), measured_bytes=max(running, 0)),
        Share(name="allocator slack", planned_bytes=planned(*_SLACK), measured_bytes=max(reserved - peak, 0)),
        Share(name="graphs", planned_bytes=planned(*_GRAPHS), measured_bytes=None if is_estimate else graphs),
        Share(
            name="context and kernels", planned_bytes=planned(*_DRIVER),
            measured_bytes=None if is_estimate else max(process - reserved - graphs, 0),
        ),
        Share(
            name="process", planned_bytes=model.plan.gpu_needed_bytes, measured_bytes=process, is_estimate=is_estimate
        ),
    ]  # fmt: skip
    return tuple(shares)


def shares_document(shares: Sequence[Share]) -> Document:
    """Return the shares as a table: planned next to measured."""
    rows = []
    for one in shares:
        mark = "~" if one.is_estimate else ""
        measured = "-" if one.measured_bytes is None else f"{mark}{gib(one.measured_bytes)}"
        rows.append((one.name, gib(one.planned_bytes), measured))
    return Document("", [Table(("device memory", "planned", "measured"), rows)])


def _not_measured(name: str, planned_bytes: int) -> Share:
    return Share(name=name.replace("_", " "), planned_bytes=planned_bytes, measured_bytes=None)


def measured(model: EngineContext, batch: Batch | None, *, since_bytes: int) -> dict[str, int]:
    """Return the figures of `LoadedModel.memory`. batch: of its answers, None before the first. since_bytes: of torch's
    tensors on the device before the model was loaded."""
    extra = 0 if batch is None or model.device.type != "cuda" else extra_bytes(model, rows=1)
    now = peak = process = is_estimate = 0
    if model.device.type == "cuda":
        now = torch.cuda.memory_allocated(model.device) - since_bytes
        peak = torch.cuda.max_memory_allocated(model.device) - since_bytes
        process, is_estimate = process_on_gpu(model.device)
    return {
        "gpu_bytes": now, "gpu_peak_bytes": peak, "gpu_process_bytes": process,
        "gpu_planned_bytes": model.plan.gpu_needed_bytes, "gpu_decode_bytes": extra,
        "gpu_process_is_estimate": int(is_estimate), "host_peak_bytes": peak_host_bytes(),
    }  # fmt: skip


def weight_bytes(model: EngineContext) -> int:
    """Return the bytes of weights and buffers on the execution device; a piece of memory that several share counts once."""

    def tensors() -> Iterator[Tensor]:
        for module in model.hf_model.modules():
            yield from module.parameters(recurse=False)
            yield from module.buffers(recurse=False)
            for name in ("weight", "bias", "embed_scale"):
                tensor = module.__dict__.get(name)
                if isinstance(tensor, Tensor):
                    yield tensor
            if isinstance(module, (ResidentLeaf, PackedTable)):
                yield from module.stored.parts.values()
                yield from module.stored.codes.values()
            near = module.__dict__.get("near")  # in place of stacks in host memory, which the device reads where they are
            for held in (module.__dict__.get("stacks", {}) if near is None else near.stacks).values():
                if isinstance(held, Packed):
                    yield from (*held.parts.values(), *held.codes.values())

    return _held(tensors(), model.device)


def expert_counts(model: EngineContext) -> tuple[int, int]:
    """Return how many experts steps chose among slots since the load, and how many of them had none."""
    counts = [vars(one)["near"].counts for one in model.hf_model.modules() if "near" in vars(one)]
    chosen, missed = torch.stack(counts).sum(dim=0).tolist() if counts else (0, 0)
    return chosen, missed


def expert_hits(model: EngineContext, since: tuple[int, int] = (0, 0)) -> float | None:
    """Return the share of the experts chosen in steps that had a slot on the device; None where no step chose among slots.
    since: earlier `expert_counts`."""
    chosen, missed = (now - before for now, before in zip(expert_counts(model), since, strict=True))
    return 1 - missed / chosen if chosen else None


def _adapter_bytes(model: EngineContext) -> int:
    """Return the bytes of attached adapters on the device: one piece of memory for plain LoRA, and the rest."""
    tensors: list[Tensor] = []
    for name, holders in model.adapter_store.holders.items():
        leaves = [one.leaf for one in holders.fitting.plain[:1]]
        for module in (*leaves, *(module for _, module in holders.rest)):
            adapter = module.__dict__["adapters"][name]
            values = adapter.values() if hasattr(adapter, "values") else vars(adapter).values()
            tensors += [one for one in values if isinstance(one, Tensor)]
    return _held(tensors, model.device)


def _staging_bytes(model: MeasuredModel) -> int:
    slots = () if model.streamer is None else model.streamer.slots
    kept = 0 if model.prefix_cache is None else model.prefix_cache.staging_bytes
    return kept + sum(int(slot.buffer.nbytes) for slot in slots)


def _held(tensors: Iterable[Tensor], device: torch.device) -> int:
    storages = {}
    for tensor in tensors:
        if tensor.device.type == device.type:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
