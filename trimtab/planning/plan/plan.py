"""What does a plan record: the tier, the bytes and the reason of every block, frozen and as a file?"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trimtab.errors import CheckpointError, RequestError
from trimtab.formats.record import stored_format
from trimtab.planning.plan import chart
from trimtab.planning.plan.contents import PLAN_VERSION, PlanContents
from trimtab.planning.plan.table import document_of
from trimtab.planning.values.cards import Card
from trimtab.planning.values.execution import MODES
from trimtab.planning.values.reading import read_row
from trimtab.process.files import write_text
from trimtab.process.json_file import as_json, read_values
from trimtab.report import charts
from trimtab.report.document import Document
from trimtab.request import DTYPES, HEADS, TIERS

HOMES = ("device", "host", "disk", "file")


@dataclass(frozen=True, kw_only=True)
class Plan(PlanContents):
    """The placement of every block and the execution, with bytes and reasons.

    request: of the plan. model_class, execution_device: the transformers class and the device that computes.
    placements: one row per block. gpu, host: item -> bytes of the execution device and of the host. gpu_peak_bytes: the
    peak of tensors while a request runs, as torch.cuda.max_memory_allocated counts it; peak_phase: when it is reached.
    gpu_load_peak_bytes: the same while loading. The driver's context and torch's reserve are added and compared with
    gpu_budget_bytes. host_peak_bytes, host_budget_bytes: the same for host memory. disk_bytes: size of the spill file.
    staging_slots: number of staging buffers. prefill_tokens: the chunks in which a prompt is computed. answer_tokens:
    the answer length that weights the seconds. unquantized: weights that stay in full precision, with reasons.
    checkpoint_stamps: (file, size, mtime in ns) of the planned files. rates: bytes per second of this machine or card.
    execution: how prompts and steps run, and the output head. adapter_bytes: name -> bytes on the execution device.
    adapter_stamps: name -> the stamps of its files. card: the profile behind all figures, None for this machine's card.
    dtype_reason: why the dtype was chosen, or the cost of a requested one; "" for a usual one. media_reason: the limits
    behind the host memory of a server's images and audio; "" if none is counted. prefix_reason: the capacity in tokens
    of a prefix cache that is smaller than one prompt of the context; "" for others. window_reason: a window of attention that the
    file may lack; "" for others. version: of the file format.
    stored: the formats of the checkpoint's files, experts: what stacked experts take, for the table; files_read: from planning
    to the first load. None of them is part of the plan's value: not compared, not saved.
    """

    def document(self) -> Document:
        """Return what the plan says to people."""
        return document_of(self)

    def __str__(self) -> str:
        from trimtab.report.render import FORMS

        return FORMS[".txt"].show(self.document())

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw the plan as .svg. Errors: RequestError for another ending, or a path that cannot be written."""
        charts.check_path(path, field="path")
        chart.draw(self, path)

    def _repr_html_(self) -> str:
        """Return the chart and the table, for notebooks."""
        return f"<div>{charts.svg(*chart.layout(self))}<pre>{charts.escape(str(self))}</pre></div>"

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON-ready values."""
        return {**as_json(self), "held_adapters_limit_bytes": self.held_adapters_limit_bytes}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Plan:
        """Return the plan that `to_json` wrote.

        Errors: RequestError for another version, and for keys that are unknown, missing or of the wrong kind.
        """
        if not isinstance(values, Mapping):
            raise RequestError("not a plan: a JSON object is expected", field="plan")
        version = values.get("version")
        if version != PLAN_VERSION:
            raise RequestError(
                "another release wrote this plan", field="plan.version", value=version,
                allowed=(str(PLAN_VERSION),), hint="Make the plan again",
            )  # fmt: skip
        own = {name: value for name, value in values.items() if name != "held_adapters_limit_bytes"}
        plan = read_row(cls, own, "plan")
        if plan.card is not None:
            Card.from_json(values["card"])
        plan._check()
        limit = values.get("held_adapters_limit_bytes")
        if limit != plan.held_adapters_limit_bytes:
            raise RequestError(
                f"the plan's host budget leaves {plan.held_adapters_limit_bytes}",
                field="plan.held_adapters_limit_bytes",
                value=limit,
            )
        return plan

    def _check(self) -> None:
        """Raise RequestError for values of the right type that are impossible in a plan."""
        execution = self.execution
        choices = [
            ("execution.head", execution.head, HEADS), ("request.head", self.request.head, HEADS),
            ("request.dtype", self.request.dtype, DTYPES),
            ("execution.prompt.mode", execution.prompt.mode, MODES), ("execution.step.mode", execution.step.mode, MODES),
            ("version", self.version, (PLAN_VERSION,)),
        ]  # fmt: skip
        if execution.towers is not None:
            choices.append(("execution.towers.mode", execution.towers.mode, ("eager", "graph")))
        for place, row in enumerate(self.placements):
            choices += [(f"placements[{place}].tier", row.tier, TIERS), (f"placements[{place}].home", row.home, HOMES)]
        for name, value, allowed in choices:
            if value not in allowed:
                raise RequestError("unknown choice", field=f"plan.{name}", value=value, allowed=tuple(map(str, allowed)))
        try:
            stored_format(self.request.quant)
        except RequestError as exc:
            raise RequestError(exc.reason, field="plan.request.quant", value=self.request.quant) from None
        if not re.fullmatch(r"cpu|cuda:\d{1,3}", self.execution_device):
            raise RequestError(
                "unknown device", field="plan.execution_device", value=self.execution_device, allowed=("cpu", "cuda:N")
            )
        least = [("prefill_tokens", self.prefill_tokens), ("answer_tokens", self.answer_tokens)]
        least += [(f"execution.prompt.chunks[{n}]", size) for n, size in enumerate(execution.prompt.chunks)]
        least += [(f"rates.{name}", value) for name, value in asdict(self.rates).items()]
        for name, value in least:
            if value <= 0:
                raise RequestError("must be above zero", field=f"plan.{name}", value=value)
        if execution.expert_slots < 0 or bool(execution.expert_slots) != ("expert_slots" in self.gpu):
            raise RequestError(
                "does not agree with plan.gpu.expert_slots", field="plan.execution.expert_slots", value=execution.expert_slots
            )
        for name, named in (("adapter_bytes", self.adapter_bytes), ("adapter_stamps", self.adapter_stamps)):
            if self.request.adapters and set(named) != set(self.request.adapters):
                raise RequestError(
                    "must name the adapters of the request", field=f"plan.{name}", value=", ".join(named),
                    allowed=tuple(self.request.adapters),
                )  # fmt: skip

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, whole or not at all. Errors: RequestError if the path cannot be written."""
        text = json.dumps(self.to_json(), indent=1) + "\n"
        write_text(path, text, field="save")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Return the plan that `save` wrote.

        Errors: CheckpointError if the file cannot be read, or with the field if it is no plan of this version.
        """
        values = read_values(path, "plan")
        try:
            return cls.from_json(values)
        except RequestError as exc:
            if not _may_be_plan(values):
                raise _no_plan(path) from exc
            raise CheckpointError(f"is not a plan of this version: {exc}", path=path, cause=exc) from exc


def check_is_plan(path: str | os.PathLike[str]) -> None:
    """Raise CheckpointError for a file that is no plan of any release, such as a model's config.json."""
    if not _may_be_plan(read_values(path, "plan")):
        raise _no_plan(path)


def _may_be_plan(values: Any) -> bool:
    """Return whether a JSON value may be a plan of any release: every one has a version, a request and placements."""
    return isinstance(values, Mapping) and bool({"request", "placements"} & {*values} or {*values} == {"version"})


def _no_plan(path: str | os.PathLike[str]) -> CheckpointError:
    """Return the error of a file that is no plan; in a checkpoint's folder it names that."""
    folder = os.path.dirname(os.fspath(path)) or "."
    is_checkpoint = os.path.isfile(os.path.join(folder, "config.json"))
    return CheckpointError(
        "is not a saved plan", path=path,
        hint="A model is given as its folder" + (f": {folder}" if is_checkpoint else " or hub id"),
    )  # fmt: skip
