"""trimtab's answers in one placement and format; runs in a separate process and reports its progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from trimtab.api import PlanInputs, load, plan_request
from trimtab.engine.batch.batch import Batch
from trimtab.engine.kv.sequence import Inputs
from trimtab.engine.lora.layers import EmbeddingAdapter
from trimtab.planning import Plan
from trimtab.process import phases
from trimtab.request import GenerateRequest, LoadRequest
from trimtab.verification.routes import inputs as prompt_inputs
from trimtab.verification.routes import stock_run, teacher_forcing
from trimtab.verification.routes.loaded_changes import sketch
from trimtab.verification.routes.rounding import rounded_draws, rounded_order

Emit = Callable[[dict[str, Any]], None]


def main(request: Mapping[str, Any], emit: Emit) -> None:
    """Load the route's model and answer every item of the request.

    request: route (its `plan` or `request`), items (id, file, prompt_tokens, has_media, adapter, continuation), out
    (folder), new_tokens, prepare (None, or how to prepare prompts that have no files yet), noise, rounding, packed (modules that
    a merged model has in 4 bits), hidden, batched. Emits one line per step: prepared, loaded, item (with the file of its logits),
    noise, memory.
    """
    route = request["route"]
    started = time.monotonic()
    stock_run.bound_attention()  # for every budget: both routes then round equally
    prepared = {row["file"]: row for row in prompt_inputs.main(request["prepare"], emit)} if request.get("prepare") else {}
    plan = (
        Plan.from_json(route["plan"])
        if route.get("plan")
        else plan_request(LoadRequest.from_json(route["request"]), inputs=PlanInputs(checks_folder=False))
    )
    # Transformers' generation if nothing else is compared: bit-equal to the stock stack's.
    with load(plan, decode=route.get("decode") or "eager") as model:
        emit(
            {"event": "loaded", "seconds": time.monotonic() - started, "device": str(model.device),
             "tiers": _tally(plan), "quant": plan.request.quant, "head": _head(plan), "adapters": list(model.adapters),
             "changes": own_changes(model)}
        )  # fmt: skip
        items = [{**item, **prepared.get(item["file"], {})} for item in request["items"]]
        if request.get("batched"):
            _run_batched(model, items, request, emit)
            return
        work = model, request, emit
        teacher_forcing.answer_and_measure(items, request, partial(_run_item, *work), partial(_emit_noise, *work))


def own_changes(model: Any) -> dict[str, dict[str, list[float]]]:
    """Return adapter -> module path -> `sketch` of every LoRA change that a model has loaded."""
    changes: dict[str, dict[str, list[float]]] = {}
    for module in model.hf_model.modules():
        for name, adapter in module.__dict__.get("adapters", {}).items():
            A, B = getattr(adapter, "A", None), getattr(adapter, "B", None)
            if A is None or B is None or A.dim() != 2:
                continue
            A = A.T if isinstance(adapter, EmbeddingAdapter) else A
            changes.setdefault(name, {})[module.module_path] = sketch(A, B, adapter.scale)
    return changes


def _head(plan: Plan) -> str:
    return "8-bit head" if plan.request.head == "int8" else ""


def _tally(plan: Plan) -> dict[str, int]:
    tiers = list(plan.tiers().values())
    return {tier: tiers.count(tier) for tier in sorted(set(tiers))}


def _run_item(
    model: Any, request: Mapping[str, Any], emit: Emit, place: int, item: Mapping[str, Any], given: Sequence[int] | None
) -> list[int]:  # fmt: skip
    """Answer one item, write its logits, and return their continuation."""
    inputs = teacher_forcing.read_inputs(item["file"], model.device)
    ids = tuple(inputs["input_ids"][0].tolist())
    prepared = Inputs(inputs, item["prompt_tokens"], ids, item["has_media"])
    greedy = GenerateRequest(max_new_tokens=request["new_tokens"])
    answer = model.answer_inputs(prepared, greedy, adapter=item["adapter"])
    continuation = list(answer.token_ids) if given is None else list(given)
    whole = teacher_forcing.extended(inputs, continuation)
    if request["route"].get("decode"):
        hidden: tuple[torch.Tensor, ...] = ()
        logits = _stepped(model, prepared, continuation, item["adapter"])[None]
        again = _stepped(model, prepared, continuation, item["adapter"])[None]
    else:
        with using(model, item["adapter"]):
            logits, hidden = teacher_forcing.forward(model.hf_model, whole, hidden=request.get("hidden", False))
            again = teacher_forcing.forward(model.hf_model, whole)[0]
    file = _file(request, place)
    teacher_forcing.save_run(file, logits[0], [layer[0] for layer in hidden])
    emit(
        {"event": "item", "place": place, "id": item["id"], "file": str(file), "token_ids": list(answer.token_ids),
         "text": answer.text, "continuation": continuation, "repeats": bool(torch.equal(again, logits)),
         "memory": model.memory()}
    )  # fmt: skip
    return continuation


def _file(request: Mapping[str, Any], place: int) -> Path:
    return Path(request["out"]) / f"run-{place}.safetensors"


def _stepped(model: Any, inputs: Inputs, continuation: Sequence[int], adapter: str | None) -> torch.Tensor:
    """Return logits [S, V] of a prompt in one pass and of a continuation in one step per token."""
    with using(model, adapter):
        before, _ = teacher_forcing.forward(model.hf_model, dict(inputs.tensors))
    model.forget_batch()
    batch = Batch(model, rows=1)
    request = GenerateRequest(max_new_tokens=max(len(continuation), 1))
    prompt = batch.begin(inputs, request, adapter=adapter, client=None).compute()
    batch.join(prompt)
    row = batch.active[0]
    logits = []
    for token in continuation:
        row.token_ids[-1] = token
        batch.write_last_tokens()
        logits.append(batch.logits()[0].to(before.device, before.dtype, copy=True))
        row.token_ids.append(token)
    batch.leave(row)
    model.adapter_store.set(None)
    return torch.cat([before[0], torch.stack(logits)]) if logits else before[0]


@contextmanager
def using(model: Any, adapter: str | None) -> Iterator[None]:
    """Answer as an attached adapter, or as the base, while the block runs."""
    model.lend_prompt_room()  # these passes keep the logits of every position
    model.adapter_store.set(adapter)
    try:
        yield
    finally:
        model.adapter_store.set(None)


def _emit_noise(
    model: Any, request: Mapping[str, Any], emit: Emit, place: int, item: Mapping[str, Any], continuation: Sequence[int]
) -> None:  # fmt: skip
    whole = teacher_forcing.extended(teacher_forcing.read_inputs(item["file"], model.device), continuation)
    with using(model, item["adapter"]):
        is_one_pass = not request["route"].get("decode")  # the item's logits are those of the same pass
        once = (
            teacher_forcing.read_run(_file(request, place))[0].to(model.device)
            if is_one_pass
            else teacher_forcing.forward(model.hf_model, whole)[0][0]
        )
        orders = teacher_forcing.other_orders(
            model.hf_model, whole, prompt_tokens=item["prompt_tokens"], has_media=item["has_media"],
            batches=request["noise"] != "without batches",
        )  # fmt: skip
        draws = teacher_forcing.drawn_runs(model.hf_model, whole)
        if request.get("rounding") and item["adapter"] is not None:
            packed = request.get("packed") or {}
            orders = chain(orders, rounded_order(model, item["adapter"], whole, packed))
            draws = rounded_draws(model, item["adapter"], whole, packed)
        pairs, skipped = teacher_forcing.measure_noise(item["id"], once, orders, draws)
    emit({"event": "noise", "pairs": [asdict(pair) for pair in pairs], "skipped": list(skipped)})


def _run_batched(model: Any, items: Sequence[Mapping[str, Any]], request: Mapping[str, Any], emit: Emit) -> None:
    """Answer items together, `batched` rows at a time, each row with its own adapter. Text only."""
    count = int(request["batched"])
    for start in range(0, len(items), count):
        phases.begin("prompt", phases.far_text(start + 1, len(items)))
        group = items[start : start + count]
        rows = [teacher_forcing.extended(teacher_forcing.read_inputs(i["file"], model.device), i["continuation"]) for i in group]
        model.lend_prompt_room()
        model.adapter_store.set_rows([item["adapter"] for item in group])
        try:
            logits, _ = teacher_forcing.forward(model.hf_model, teacher_forcing.padded_batch(rows))
        finally:
            model.adapter_store.set(None)
        for at, (item, row) in enumerate(zip(group, rows, strict=True)):
            file = _file(request, start + at)
            teacher_forcing.save_run(file, logits[at, : row["input_ids"].shape[1]], ())
            emit(
                {"event": "item", "place": start + at, "id": item["id"], "file": str(file), "token_ids": None,
                 "text": None, "continuation": list(item["continuation"]), "repeats": True, "memory": model.memory()}
            )  # fmt: skip
