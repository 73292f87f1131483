"""What does a merge of the stock stack do: base, adapter loaded, merged, step by step?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.process.packages import stack_versions
from trimtab.stock.load import without_repacking
from trimtab.stock.unsplit import load_unsplit, with_adapters
from trimtab.verification.merges.retention import Survival, lora_delta, survival
from trimtab.verification.routes import stock_run, teacher_forcing

Emit = Callable[[dict[str, Any]], None]
ADAPTER = "adapter"
ROUNDING_WARNING = "may get different generations"


def main(request: Mapping[str, Any], emit: Emit) -> None:
    """Run one lane.

    request: folder, adapter, quant, dequantize ("" | "base" | "adapted"), dtype, device, items, out, new_tokens. Emits stage lines
    (with the peaks so far), `said` lines (who: adapter, base, merged), one `survival` and one `merge` line; an exception of stock
    is an `upstream` line. Each LoRA layer's `merge` is wrapped, so that the weight before and after it can be compared with the
    exact change.
    """
    with stock_run.emit_if_raised(emit):
        _run(request, emit)


def _run(request: Mapping[str, Any], emit: Emit) -> None:
    stock_run.bound_attention()
    with stock_run.recorded_warnings() as loading:
        model = load_unsplit(request["folder"], request["quant"], request["dtype"], request["device"])
        device = next(model.parameters()).device
        _stage(emit, "base", device, versions=stack_versions())
        if request["dequantize"] == "base":
            model = model.dequantize()
        model, notes = with_adapters(model, {ADAPTER: request["adapter"]}, Path(request["out"]))
    _stage(emit, "adapter", device, notes=notes, warnings=dict(loading))
    tokenizer = stock_run.read_tokenizer(request["folder"])
    answers = _answers(
        model, tokenizer, "adapter", ADAPTER, request, [teacher_forcing.wanted(i, []) for i in request["items"]], emit
    )
    _answers(model, tokenizer, "base", None, request, answers, emit)
    _stage(emit, "merge", device)
    merged, counts, seconds, unmeasured = _merged(model, request["dequantize"] == "adapted", emit)
    rounding = sum(count for text, count in counts.items() if ROUNDING_WARNING in text)
    emit({"event": "merge", "warnings": counts, "rounding_warnings": rounding, "seconds": seconds})
    _stage(emit, "merged", device, notes=unmeasured)
    _answers(without_repacking(merged), tokenizer, "merged", None, request, answers, emit, plain=True)


def _stage(emit: Emit, stage: str, device: torch.device, **more: Any) -> None:
    emit({"event": "stage", "stage": stage, "memory": stock_run.memory(device), **more})


def _answers(
    model: Any, tokenizer: Any, who: str, adapter: str | None, request: Mapping[str, Any],
    continuations: Sequence[Sequence[int] | None], emit: Emit, *, plain: bool = False,
) -> list[list[int]]:  # fmt: skip
    answers = []
    for place, (item, continuation) in enumerate(zip(request["items"], continuations, strict=True)):
        with stock_run.using(model, adapter, not plain):
            line = stock_run.run_item(model, tokenizer, place, item, continuation, request, name=who)
        answers.append(line["continuation"])
        emit({"event": "said", "who": who, "place": place, **line})
    return answers


def _merged(model: Any, dequantize: bool, emit: Emit) -> tuple[Any, dict[str, int], float, list[str]]:
    """Return the merged model, PEFT's warnings, its seconds, and why the survival in a layer could not be measured."""
    rows: list[Survival] = []
    unmeasured: list[str] = []
    if dequantize:
        model.dequantize()
    for path, module in model.named_modules():
        if hasattr(module, "lora_A") and callable(getattr(module, "merge", None)):
            _watch(path.removeprefix("base_model.model."), module, rows, unmeasured)
    started = time.monotonic()
    with stock_run.recorded_warnings() as counts:
        merged = model.merge_and_unload()
    seconds = time.monotonic() - started
    emit({"event": "survival", "rows": [row.to_json() for row in rows]})
    return merged, dict(counts), seconds, unmeasured


def _watch(module_path: str, module: Any, rows: list[Survival], unmeasured: list[str]) -> None:
    """Measure a layer's `merge` when it is called. An exception of the measurement is a line of `unmeasured`."""
    merge = module.merge
    parameter = getattr(module, "parameter_name", None)
    name = module_path if parameter is None else f"{module_path.removesuffix('.base_layer')}.{parameter}"

    def measured(*args: Any, **kwargs: Any) -> None:
        before = delta = None
        with torch.no_grad():
            with _noting(name, unmeasured):
                before = dense(module).clone()
                delta = delta_of(module, before)
            merge(*args, **kwargs)
            if before is not None and delta is not None:
                with _noting(name, unmeasured):
                    flat = [tensor.flatten(0, -2) for tensor in (before, dense(module), delta)]
                    rows.append(survival(name, *flat))

    module.merge = measured


@contextmanager
def _noting(name: str, unmeasured: list[str]) -> Iterator[None]:
    try:
        yield
    except Exception as exc:  # of any release of PEFT: its merge is judged, not what it keeps inside
        unmeasured.append(f"{name}: its survival could not be measured ({type(exc).__name__}: {exc})")


def dense(module: Any) -> Tensor:
    """Return the unpacked base weight of a LoRA layer in any format, or the parameter that its LoRA is on."""
    weight = getattr(module.get_base_layer(), getattr(module, "parameter_name", "weight"))
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight.data
    import bitsandbytes.functional

    weight_dense: Tensor = bitsandbytes.functional.dequantize_4bit(weight.data, state)
    return weight_dense


def delta_of(module: Any, weight: Tensor) -> Tensor | None:
    """Return the exact change of a layer's adapter in float32, in the shape of its weight; None for a layer without LoRA
    matrices.

    Of a stack of experts as PEFT lays it out (0.21.2, lora/layer.py, ParamWrapper): A [E R, D_in], B [D_out, R E].
    """
    if ADAPTER in module.lora_A:
        A, B = module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight
        if weight.dim() == 3:
            left = B.float().reshape(B.shape[0], -1, weight.shape[0]).permute(2, 0, 1)
            change = (left @ A.float().reshape(weight.shape[0], -1, A.shape[1])) * float(module.scaling[ADAPTER])
            is_turned = weight.shape[0] > 1 and not getattr(module, "_did_swap_in_out_features", False)
            return change.mT if is_turned else change
        dora_dim = 1
        if getattr(module, "fan_in_fan_out", False):  # a Conv1D, whose weight is [D_in, D_out]
            A, B, dora_dim = B.T, A.T, 0
    elif ADAPTER in getattr(module, "lora_embedding_A", {}):
        A, B = module.lora_embedding_B[ADAPTER].T, module.lora_embedding_A[ADAPTER].T
        dora_dim = 0
    else:
        return None
    vectors = getattr(module, "lora_magnitude_vector", None) or {}
    magnitude = vectors[ADAPTER].weight if ADAPTER in vectors else None
    return lora_delta(weight, A, B, float(module.scaling[ADAPTER]), magnitude, dora_dim=dora_dim)
