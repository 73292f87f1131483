"""What does one run of the stock stack measure?"""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trimtab.benchmark import bandwidth
from trimtab.benchmark.stopwatch import Clock, wait
from trimtab.stock.load import generating
from trimtab.stock.unsplit import load_unsplit, with_adapters
from trimtab.verification.routes import stock_run, teacher_forcing

Emit = Callable[[dict[str, Any]], None]


def main(request: Mapping[str, Any], emit: Emit) -> None:
    """Make one run.

    request: folder, quant, dtype, device, adapters, adapter, items, out, new_tokens, warm_tokens, own_cpu_path (False: 4-bit
    products without bitsandbytes' fast path for CPUs). Emits one line, "ran", as `run_trimtab.main` does; an exception of the stack
    is an "upstream" line. The stack runs as its users run it: also with bitsandbytes' fast path for CPUs with AVX512-BF16, which a
    comparison of answers disables because it loses bits (`stock/load.py`).
    """
    with stock_run.emit_if_raised(emit):
        _import_all(request)
        device = torch.device(request["device"])
        if device.type == "cuda":
            torch.zeros(1, device=device)
            torch.cuda.reset_peak_memory_stats(device)
        started = time.perf_counter()
        model = load_unsplit(request["folder"], request["quant"], request["dtype"], request["device"])
        model, notes = with_adapters(model, request["adapters"], Path(request["out"]))
        wait(device)
        load_s = time.perf_counter() - started
        if device.type == "cpu" and request["own_cpu_path"]:
            notes += with_own_cpu_path(model)
        has_adapters = bool(request["adapters"])
        with stock_run.using(model, request["adapter"], has_adapters):
            started = time.perf_counter()
            for item in request["items"]:
                _answer(model, item, request["warm_tokens"])
            warm_s = time.perf_counter() - started
            answers = [_answer(model, item, request["new_tokens"]) for item in request["items"]]
        memory = stock_run.memory(device)
        line = {
            "event": "ran", "load_s": load_s, "warm_s": warm_s, "answers": answers,
            "device_peak_bytes": memory["gpu_peak_bytes"], "host_peak_bytes": memory["host_peak_bytes"],
            "fallbacks": [], "steps": {"computed": "eager"}, "notes": notes,
        }  # fmt: skip
        del model
        gc.collect()
        emit(line | {"bandwidth": bandwidth.measure(request["device"])})


def _import_all(request: Mapping[str, Any]) -> None:
    """Import the libraries and the model's module before the measurement starts, as on the other side."""
    import transformers

    for name in ("bitsandbytes", *(["peft"] if request["adapters"] else [])):
        importlib.import_module(name)
    for name in transformers.AutoConfig.from_pretrained(request["folder"]).architectures or ():
        getattr(transformers, name, None)


def with_own_cpu_path(model: Any) -> list[str]:
    """Restore the path that bitsandbytes itself chooses for 4-bit layers on this CPU; return a note if it is the fast path."""
    from bitsandbytes import functional

    has_path = getattr(functional, "has_avx512bf16", lambda: False)()
    layers = [module for module in model.modules() if hasattr(module, "support_avx512bf16_for_cpu")]
    for module in layers:
        module.support_avx512bf16_for_cpu = has_path
    if not (has_path and layers):
        return []
    return ["4-bit products by bitsandbytes' AVX512-BF16 path, which repacks the weights (bitsandbytes #2078)"]


class _Streamer:
    """Reports each token when transformers returns it. The first call has the prompt."""

    def __init__(self, tick: Callable[[list[int]], None]) -> None:
        self._tick, self._prompt_seen = tick, False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self._tick(value.reshape(-1).tolist())
        self._prompt_seen = True

    def end(self) -> None:
        """Called by transformers after the last token."""


def _answer(model: Any, item: Mapping[str, Any], new_tokens: int) -> dict[str, Any]:
    device = next(model.parameters()).device
    inputs = teacher_forcing.read_inputs(item["file"], device)
    with ready(model, new_tokens) as generate:
        wait(device)
        clock = Clock()
        generate(inputs, clock.tick)
    return clock.told(item["id"])


Tick = Callable[[list[int]], None]


@contextmanager
def ready(model: Any, new_tokens: int) -> Iterator[Callable[[Mapping[str, Any], Tick], None]]:
    """Yield a function that answers inputs greedily with exactly this many tokens and reports each when it is ready."""
    import transformers

    # No end token: every run decodes the same number of tokens.
    config = transformers.GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    teacher_forcing.forget_request(model)
    with generating(model) as generate:
        yield lambda inputs, tick: generate(**inputs, generation_config=config, streamer=_Streamer(tick))
