"""Which stage does one case reach on the stock stack, and is its answer right?"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from trimtab.doctor.cases import answers, stock_model
from trimtab.doctor.cases.cases import TARGETS, device_map
from trimtab.doctor.cases.engine_run import Emit, EngineRun, Enter, play
from trimtab.doctor.facts.probe_kit import quantized
from trimtab.process.redact import map_texts
from trimtab.stock.load import load_adapter, without_repacking


def main(request: Mapping[str, Any], emit: Emit) -> None:
    """Run one case and report its record's fields. request: that of an `EngineRun`."""
    play(StockRun, request, emit)


class StockRun(EngineRun):
    """One case on the stock stack."""

    def __init__(self, request: Mapping[str, Any], emit: Emit) -> None:
        super().__init__(request, emit)
        self.card = stock_model.Card(request["device"])
        self.facts(device=self.card.name, pressure=self.pressure)

    def run(self) -> None:
        """Report the memory also of a failed run."""
        try:
            model = self.adapt(self.load())
            self.look(model)
            if self.case.then:
                self.enter("merge")
                model = self.merge(model)
            self.ask_modes(model)
        finally:
            with suppress(Exception):  # after a CUDA error nothing can be read
                self.facts(memory=self.card.memory())

    def load(self) -> Any:
        """Return the loaded base, after its facts."""
        self.enter("base")
        empty = stock_model.empty_model(self.folder)
        self.parts = stock_model.parts_of(empty)
        known = {"", *(path for path, _ in empty.named_modules())}
        arguments = stock_model.load_arguments(self.case, self.parts, empty, self.work)
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
        model = stock_model.load_base(self.folder, arguments, self.card)
        self.before = stock_model.offloaded(model, self.card)
        self.facts(
            quantized=quantized(model), map_base=stock_model.map_json(getattr(model, "hf_device_map", None)),
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
        after = stock_model.offloaded(model, self.card)
        shared = [path for path in self.before if path in after]
        kept = all(self.before[path] == after[path] for path in shared)
        if self.case.call == "dispatch":
            kept = True  # the new map was requested
        self.facts(
            map_after=stock_model.map_json(getattr(model, "hf_device_map", None)), placement_kept=kept,
            offloaded={"before": sum(self.before.values()), "after": sum(after.values()), "of": len(shared)},
            sequential_hooks=stock_model.sequential_hooks(model), quantized=quantized(model), scan=_scan(model),
        )  # fmt: skip

    def merge(self, model: Any) -> Any:
        """Return the merged model."""
        if self.case.then.startswith("dequantize"):
            model.dequantize()
        model = without_repacking(model.merge_and_unload())
        self.facts(merged=True)
        return model

    def ask_modes(self, model: Any) -> None:
        """Ask the model in every mode, and whether it sees the image if its tower may be quantized."""

        def answer(mode: str, tensors: Mapping[str, Any], enter: Enter) -> tuple[Any, list[int], list[int]]:
            enter("first forward")
            logits = answers.forward(model, tensors)
            enter("generate")
            return logits, *answers.generate(model, tensors)

        device = "cpu" if self.case.base_map == "cpu" else self.card.device
        self.ask(device, answer, partial(answers.sees, model) if self.case.unquantized == "" else None)


def _scan(model: Any) -> list[dict[str, Any]]:
    try:
        from trimtab.bridge.inspect import scan
    except ImportError:
        return []
    return [asdict(finding) for finding in scan(model).findings]
