"""Which stage does one case reach on the stock stack, and is its answer right?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trimtab.doctor.cases.cases import TARGETS, Case, device_map
from trimtab.process.redact import Cleaner, map_texts
from trimtab.stock.load import load_adapter, without_repacking

Emit = Callable[[dict[str, Any]], None]


def main(request: Mapping[str, Any], emit: Emit) -> None:
    """Run one case and report its record's fields.

    request: case (Case.to_json), model, adapters (variant -> folder), inputs, reference (a file or null), work, device, pressure
    (null: the case's), names (path -> its name in texts of the record). Every fact is emitted as soon as it is known, so that a
    killed process leaves it.
    """
    emit({"stage": "import"})
    from trimtab.doctor.cases.record import exception_json, listening, versions

    emit({"facts": {"versions": versions()}})
    clean = Cleaner(request["names"])
    with listening() as events:
        run = _Run(Case.from_json(request["case"]), request, emit, clean)
        try:
            run.run()
        except Exception as exc:
            emit({"facts": {"exception": exception_json(exc, clean)}})
        finally:
            run.end()
            emit({"facts": events.to_json(clean)})


class _Run:
    """One case in this process."""

    def __init__(self, case: Case, request: Mapping[str, Any], emit: Emit, clean: Any) -> None:
        from trimtab.doctor.cases.stock_model import Card

        self.case, self.request, self.emit, self.clean = case, request, emit, clean
        self.folder, self.work = Path(request["model"]), Path(request["work"])
        self.card = Card(request["device"])
        self.pressure = case.pressure if request["pressure"] is None else request["pressure"]
        self.facts(device=self.card.name, pressure=self.pressure)
        self.before: dict[str, bool] = {}
        self.stage = self.failed_stage = ""

    def facts(self, **found: Any) -> None:
        self.emit({"facts": found})

    def enter(self, stage: str) -> None:
        self.emit({"stage": stage})

    def run(self) -> None:
        model = self.load()
        model = self.adapt(model)
        self.look(model)
        if self.case.then:
            self.enter("merge")
            model = self.merge(model)
        self.ask(model)

    def load(self) -> Any:
        """Return the loaded base, after its facts."""
        from trimtab.doctor.cases import stock_model as case_model
        from trimtab.doctor.facts.probe_kit import quantized

        self.enter("base")
        empty = case_model.empty_model(self.folder)
        self.parts = case_model.parts_of(empty)
        known = {"", *(path for path, _ in empty.named_modules())}
        arguments = case_model.load_arguments(self.case, self.parts, empty, self.work)
        self.configuration = {
            "base": {**arguments, "dtype": "bfloat16"}, "adapter": self._adapter_arguments(), "call": self.case.call,
            **({"targets": TARGETS[self.case.adapter]} if self.case.needs_adapter else {}),
            **({"then": self.case.then} if self.case.then else {}),
        }  # fmt: skip
        requested = arguments["device_map"]
        self.facts(
            configuration=map_texts(self.configuration, self.clean, keys=False), map_asked=requested,
            map_keys_without_module=[] if isinstance(requested, str) else [key for key in requested if key not in known],
        )  # fmt: skip
        model = case_model.load_base(self.folder, arguments, self.card)
        self.before = case_model.offloaded(model, self.card)
        self.facts(
            quantized=quantized(model), map_base=case_model.map_json(getattr(model, "hf_device_map", None)),
            how_pressed=self.card.press(model, self.pressure),
        )  # fmt: skip
        return model

    def _adapter_arguments(self) -> dict[str, Any]:
        case = self.case
        arguments: dict[str, Any] = dict(case.peft)
        if arguments.get("torch_device") == 0:
            arguments["torch_device"] = "cuda:0" if self.card.is_gpu else "cpu"
        if "offload_dir" in arguments:
            arguments["offload_dir"] = str(self.work / "peft-offload")
        if case.peft_map:
            arguments["device_map"] = device_map(case.peft_map, self.parts)
        return arguments

    def adapt(self, model: Any) -> Any:
        """Return the model with the adapter attached by the case's call."""
        call = self.case.call
        if call == "none":
            return model
        self.enter("adapter")
        arguments = self._adapter_arguments()
        if "device_map" in arguments:
            arguments["device_map"] = self.card.place(arguments["device_map"])
        if call == "dispatch":
            from accelerate import dispatch_model

            return dispatch_model(model, device_map=arguments["device_map"], offload_dir=str(self.work / "offload"))
        adapter = self.request["adapters"][self.case.adapter]
        if call == "native":
            model.load_adapter(adapter)
            return without_repacking(model)
        if call == "bridge":
            from trimtab.bridge import load_peft

            return without_repacking(load_peft(model, adapter))
        if call == "dequantize, peft":
            model = model.dequantize()
        return without_repacking(load_adapter(model, adapter, **arguments))

    def look(self, model: Any) -> None:
        """Report the current placement."""
        from trimtab.doctor.cases import stock_model as case_model
        from trimtab.doctor.facts.probe_kit import quantized

        after = case_model.offloaded(model, self.card)
        shared = [path for path in self.before if path in after]
        kept = all(self.before[path] == after[path] for path in shared)
        if self.case.call == "dispatch":
            kept = True  # the new map was requested
        self.facts(
            map_after=case_model.map_json(getattr(model, "hf_device_map", None)), placement_kept=kept,
            offloaded={"before": sum(self.before.values()), "after": sum(after.values()), "of": len(shared)},
            sequential_hooks=case_model.sequential_hooks(model), quantized=quantized(model), scan=_scan(model),
        )  # fmt: skip

    def merge(self, model: Any) -> Any:
        """Return the merged model."""
        if self.case.then.startswith("dequantize"):
            model.dequantize()
        model = without_repacking(model.merge_and_unload())
        self.facts(merged=True)
        return model

    def ask(self, model: Any) -> None:
        """Run the model in every mode; a failing mode does not stop the others."""
        from trimtab.doctor.cases import answers as case_answers
        from trimtab.doctor.cases import inputs as case_inputs
        from trimtab.doctor.cases.record import exception_json

        device = "cpu" if self.case.base_map == "cpu" else self.card.device
        inputs = case_inputs.read_inputs(Path(self.request["inputs"]), device)
        reference = self.request["reference"]
        references = case_answers.References(Path(reference) if reference else None)
        to = case_answers.ADAPTER if self.case.needs_adapter else case_answers.BASE
        modes: dict[str, Any] = {}
        for mode, tensors in inputs.items():
            try:
                modes[mode] = case_answers.ask(model, mode, tensors, references, to=to, folder=self.folder, enter=self.enter_mode)
                if mode == "image" and self.case.unquantized == "":
                    modes[mode]["sees"] = case_answers.sees(model, tensors)
            except Exception as exc:
                failure = exception_json(exc, self.clean)
                modes[mode] = case_answers.no_answer(failure, self.stage)
                if not self.failed_stage:
                    self.failed_stage = self.stage
                    self.facts(exception=failure)
            self.facts(modes=modes)
        self.enter(self.failed_stage or "done")

    def enter_mode(self, stage: str) -> None:
        """Report the stage of a mode; the record keeps the stage in which the first mode failed."""
        self.stage = stage
        self.enter(self.failed_stage or stage)

    def end(self) -> None:
        """Report the memory, also of a failed run."""
        with suppress(Exception):  # after a CUDA error nothing can be read
            self.facts(memory=self.card.memory())


def _scan(model: Any) -> list[dict[str, Any]]:
    from dataclasses import asdict

    try:
        from trimtab.bridge.inspect import scan
    except ImportError:
        return []
    return [asdict(finding) for finding in scan(model).findings]
