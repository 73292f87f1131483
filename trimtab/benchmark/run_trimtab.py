"""One run of trimtab in a separate process: load, warm up, answer every prompt, time each token."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import torch

from trimtab.api import load
from trimtab.benchmark import bandwidth
from trimtab.benchmark.stopwatch import Clock, wait
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.engine.batch.generate import Generation
from trimtab.engine.kv.sequence import Inputs
from trimtab.engine.loader import transformers_model
from trimtab.engine.memory_shares import expert_counts, expert_hits
from trimtab.errors import DeviceError
from trimtab.planning import Plan
from trimtab.request import GenerateRequest
from trimtab.verification.routes import teacher_forcing

Emit = Callable[[dict[str, Any]], None]


def main(request: Mapping[str, Any], emit: Emit) -> None:
    """Make one run.

    request: plan, adapter, items (id, file, prompt_tokens, has_media), new_tokens, warm_tokens, decode. Emits one line:
    "ran", with load_s, warm_s, answers, the peaks, how steps were computed, and the bandwidth measured afterwards.
    Errors: those of loading; DeviceError if memory runs out.
    """
    plan = Plan.from_json(request["plan"])
    _import_all(plan)
    device = torch.device(plan.execution_device)
    if device.type == "cuda":
        torch.zeros(1, device=device)  # the driver's context does not count as loading, on either side
    started = time.perf_counter()
    try:
        with load(plan, decode=request["decode"]) as model:
            wait(device)
            load_s = time.perf_counter() - started
            answer_to_the_end(model.hf_model)
            started = time.perf_counter()
            rows = model.rows()
            if rows is not None:
                rows.prepare()
            for item in request["items"]:
                _answer(model, item, request["adapter"], request["warm_tokens"])
            warm_s = time.perf_counter() - started
            chosen = expert_counts(model)
            answers = [_answer(model, item, request["adapter"], request["new_tokens"]) for item in request["items"]]
            memory = model.memory()
            line = {
                "event": "ran", "load_s": load_s, "warm_s": warm_s, "answers": answers,
                "device_peak_bytes": memory["gpu_peak_bytes"], "host_peak_bytes": memory["host_peak_bytes"],
                "fallbacks": [{"what": fallback.what, "why": fallback.why} for fallback in model.fallbacks],
                "steps": steps_of(model), "notes": [], "expert_hits": expert_hits(model, chosen),
            }  # fmt: skip
    except torch.OutOfMemoryError as exc:
        raise DeviceError(f"out of memory ({str(exc).splitlines()[0]})", device=str(device)) from exc
    emit(line | {"bandwidth": bandwidth.measure(str(device))})


def _import_all(plan: Plan) -> None:
    """Import the libraries and the model's module before the measurement starts, as on the other side."""
    import trimtab.engine.model  # noqa: F401

    checkpoint = read_checkpoint(plan.request.model)
    transformers_model.model_class(checkpoint, transformers_model.read_config(checkpoint))


def answer_to_the_end(hf_model: Any) -> None:
    """Disable the end tokens: every run decodes the same number of tokens."""
    hf_model.generation_config.eos_token_id = None
    hf_model.config.get_text_config().eos_token_id = None


def steps_of(model: Any) -> dict[str, Any]:
    """Return how steps were computed: captured or not, and the cost of capturing."""
    rows = model.rows()
    if rows is None:
        return {"computed": "eager"}
    steps = rows.steps
    computed = "captured" if steps.is_captured else steps.mode
    return {"computed": computed, "captures": steps.captures, "capture_s": steps.capture_s}


def _answer(model: Any, item: Mapping[str, Any], adapter: str | None, new_tokens: int) -> dict[str, Any]:
    inputs = teacher_forcing.read_inputs(item["file"], model.device)
    ids = tuple(inputs["input_ids"][0].tolist())
    prepared = Inputs(inputs, item["prompt_tokens"], ids, item["has_media"])
    model.adapter_store.set(adapter)
    wait(model.device)
    clock = Clock()
    try:
        generation = Generation(model, prepared, GenerateRequest(max_new_tokens=new_tokens))
        with closing(iter(generation)) as pieces:  # type: ignore[type-var]
            for piece in pieces:
                clock.tick(piece.token_ids)
    finally:
        model.adapter_store.set(None)
    return clock.told(item["id"])
