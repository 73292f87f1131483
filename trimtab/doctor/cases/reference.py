"""What is the reference answer of a case, with stock PEFT on one device?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trimtab.doctor.cases import stock_model
from trimtab.doctor.cases.answers import forward, generate, sees
from trimtab.doctor.cases.cases import Case
from trimtab.doctor.cases.inputs import make_inputs, read_inputs, save_inputs
from trimtab.doctor.cases.record import exception_json
from trimtab.doctor.facts.probe_kit import quiet
from trimtab.process.redact import Cleaner
from trimtab.stock.load import load_adapter, without_repacking


def main(request: Mapping[str, Any], emit: Callable[[dict[str, Any]], None]) -> None:
    """Write the references of one name into a file.

    request: name ("none", "nf4+towers", ...), model, adapter (a patched copy, or null), inputs (a file, made here if it does not
    exist), save, device.
    """
    from safetensors.torch import save_file

    folder, save = Path(request["model"]), Path(request["save"])
    card = stock_model.Card(request["device"])
    quant, _, keep = request["name"].partition("+")
    case = Case(name="REFERENCE", title="", quant=quant, keep=keep, base_map="all")
    answers: dict[str, Any] = {}
    with quiet():
        if not Path(request["inputs"]).is_file():
            made, source = make_inputs(folder)
            save_inputs(made, Path(request["inputs"]))
            emit({"inputs": source})
        empty = stock_model.empty_model(folder)
        arguments = stock_model.load_arguments(case, stock_model.parts_of(empty), empty, save.parent)
        model = stock_model.load_base(folder, arguments, card)
        inputs = read_inputs(Path(request["inputs"]), card.device)
        answers |= _answers(model, inputs, "base")
        if request["adapter"]:
            try:
                model = without_repacking(load_adapter(model, request["adapter"]))
                answers |= _answers(model, inputs, "adapter")
            except Exception as exc:
                emit({"failed": exception_json(exc, Cleaner({}))})
    save_file(answers, save)
    emit({"answers": sorted(answers), **card.memory()})


def _answers(model: Any, inputs: Mapping[str, Any], voice: str) -> dict[str, Any]:
    import torch

    answers: dict[str, Any] = {}
    for mode, tensors in inputs.items():
        # An exception of the stack here also occurs in the case itself, which records it.
        with suppress(Exception):
            if mode == "image" and not sees(model, tensors):
                continue  # the answer of a model that ignores images is no reference
            answers[f"{mode}.{voice}.logits"] = forward(model, tensors).contiguous()
            answers[f"{mode}.{voice}.ids"] = torch.tensor(generate(model, tensors)[0])
    return answers
