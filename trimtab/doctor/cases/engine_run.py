"""What do the runs of a case on both engines share: their stages, their facts, and the answer of every mode?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trimtab.doctor.cases.answers import ADAPTER, BASE, References
from trimtab.doctor.cases.cases import Case
from trimtab.doctor.cases.inputs import read_inputs, read_text
from trimtab.doctor.cases.record import exception_json, heard_json, versions
from trimtab.doctor.facts.probe_kit import quiet
from trimtab.process.redact import Cleaner

Emit = Callable[[dict[str, Any]], None]
Enter = Callable[[str], None]


class EngineRun(ABC):
    """One case in this process.

    request: case (Case.to_json), model, adapters (variant -> folder), inputs, reference (a file or null), work, device, pressure
    (null: the case's), names (path -> its name in texts of the record).
    """

    def __init__(self, request: Mapping[str, Any], emit: Emit) -> None:
        self.request, self.emit, self.clean = request, emit, Cleaner(request["names"])
        self.case = Case.from_json(request["case"])
        self.folder, self.work = Path(request["model"]), Path(request["work"])
        self.pressure = self.case.pressure if request["pressure"] is None else request["pressure"]

    @abstractmethod
    def run(self) -> None:
        """Load the model of the case and ask it. Errors: any exception of the engine."""

    def facts(self, **found: Any) -> None:
        self.emit({"facts": found})

    def enter(self, stage: str) -> None:
        self.emit({"stage": stage})

    def ask(
        self, device: Any, answer: Callable[[str, Mapping[str, Any], Enter], tuple[Any, list[int], list[int]]],
        sees: Callable[[Mapping[str, Any]], bool] | None = None,
    ) -> None:  # fmt: skip
        """Ask in every mode and report the answers; a failing mode does not stop the others.

        answer: returns the last position's logits, the generated tokens and the shape of the result for a mode and its inputs, and
        reports its stages. sees: whether the model uses the image of its inputs; None if that is not examined.
        """
        references = References(self.request["reference"])
        to = ADAPTER if self.case.needs_adapter else BASE
        modes: dict[str, Any] = {}
        stage = failed = ""

        def enter(name: str) -> None:
            nonlocal stage
            stage = name
            self.enter(failed or name)  # the record keeps the stage in which the first mode failed

        for mode, tensors in read_inputs(Path(self.request["inputs"]), device).items():
            try:
                logits, ids, shape = answer(mode, tensors, enter)
                modes[mode] = {
                    "ok": True, "output_shape": shape, "text": read_text(self.folder, ids), "exception": None,
                    **references.compare(mode, logits, ids, to=to),
                }  # fmt: skip
                if sees is not None and mode == "image":
                    modes[mode]["sees"] = sees(tensors)
            except Exception as exc:
                failure = exception_json(exc, self.clean)
                modes[mode] = {
                    "ok": False, "output_shape": None, "equals_reference": None, "equals_base": None, "max_abs": None,
                    "matches": None, "text": None, "exception": failure, "stage": stage,
                }  # fmt: skip
                if not failed:
                    failed = stage
                    self.facts(exception=failure)
            self.facts(modes=modes)
        self.enter(failed or "done")


def play(engine: type[EngineRun], request: Mapping[str, Any], emit: Emit) -> None:
    """Run one case and report its record's fields. Every fact is emitted as soon as it is known, so that a killed process leaves
    it."""
    emit({"stage": "import"})
    emit({"facts": {"versions": versions()}})
    import transformers  # noqa: F401  its own handlers come with it

    # accelerate's INFO lines name the modules that do not fit.
    with quiet("accelerate") as heard:
        run = engine(request, emit)
        try:
            run.run()
        except Exception as exc:
            run.facts(exception=exception_json(exc, run.clean))
        finally:
            emit({"facts": heard_json(heard, run.clean)})
