"""What does the stock stack answer to the same prompts, on one device?"""

from __future__ import annotations

import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from trimtab.bridge.row_scales import wrong_scales
from trimtab.machine.memory import peak_host_bytes
from trimtab.process import phases
from trimtab.process.packages import stack_versions, version_of
from trimtab.request import MADE_EXPERTS
from trimtab.stock.load import generating
from trimtab.stock.unsplit import dense_note, load_unsplit, round_experts, with_adapters
from trimtab.verification.routes import teacher_forcing
from trimtab.verification.routes.loaded_changes import sketch

Emit = Callable[[dict[str, Any]], None]
LIBRARIES = ("bitsandbytes", "accelerate", "peft", "transformers", "safetensors", "torch")


def main(request: Mapping[str, Any], emit: Emit) -> None:
    """Load the stock model, answer every item, and emit one line per step, as `trimtab_run.main` does.

    An exception of stock is emitted as an `upstream` line (package, version, message) and ends the work. A target list that names
    Gemma 4's wrapped projections, which PEFT refuses, is replaced in a copy of the adapter by exact paths.
    """
    with emit_if_raised(emit):
        route = request["route"]
        started = time.monotonic()
        bound_attention()
        phases.begin("loading")
        with recorded_warnings() as counts:
            model = load_unsplit(route["folder"], route["quant"], route["dtype"], route["device"])
            round_experts(model, route["experts"])
            model, notes = with_adapters(model, route["adapters"], Path(request["out"]))
            notes = dense_note(route["folder"]) + notes
            if route["experts"] in MADE_EXPERTS:
                rule = "GGML's Q8_0" if route["experts"] == "int8" else f"bitsandbytes' {route['experts']}"
                notes.append(f"the stacked experts have the values that {rule} gives each of them")
        emit(
            {"event": "loaded", "seconds": time.monotonic() - started, "device": route["device"], "tiers": {},
             "quant": route["quant"], "adapters": list(route["adapters"]), "notes": notes, "warnings": dict(counts),
             "versions": stack_versions(), "changes": stock_changes(model), "wrong_scales": wrong_scales(model)}
        )  # fmt: skip
        tokenizer = read_tokenizer(route["folder"])

        def answer(place: int, item: Mapping[str, Any], given: list[int] | None) -> list[int]:
            with using(model, item["adapter"], bool(route["adapters"])):
                line = run_item(model, tokenizer, place, item, given, request)
            emit({"event": "item", "place": place, **line})
            return list(line["continuation"])

        def measure(place: int, item: Mapping[str, Any], continuation: list[int]) -> None:
            with using(model, item["adapter"], bool(route["adapters"])):
                emit({"event": "noise", **noise_of(model, item, continuation)})

        teacher_forcing.answer_and_measure(request["items"], request, answer, measure)


def bound_attention() -> None:
    """Compute attention without cuDNN, as a model within a small budget does, because its different rounding must not affect
    the comparison."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def stock_changes(model: Any) -> dict[str, dict[str, list[float]]]:
    """Return adapter -> module path -> `sketch` of every LoRA change that PEFT has loaded, by the base's paths."""
    changes: dict[str, dict[str, list[float]]] = {}
    for path, module in model.named_modules():
        scaling = getattr(module, "scaling", None)
        if not isinstance(scaling, dict):
            continue
        for name, scale in scaling.items():
            pairs = [(getattr(module, f"lora_{kind}A", {}), getattr(module, f"lora_{kind}B", {})) for kind in ("", "embedding_")]
            for A, B in pairs:
                if name not in A or name not in B:
                    continue
                left, right = (getattr(part[name], "weight", part[name]) for part in (B, A))
                if left.dim() == right.dim() == 2 and left.shape[1] == right.shape[0]:
                    own_path = path.removeprefix("base_model.model.").removesuffix(".linear")
                    changes.setdefault(name, {})[own_path] = sketch(right, left, scale)
    return changes


@contextmanager
def using(model: Any, adapter: str | None, has_adapters: bool) -> Iterator[None]:
    """Answer with one adapter, or with the base alone."""
    if not has_adapters:
        yield
        return
    if adapter is not None:
        model.set_adapter(adapter)
    with nullcontext() if adapter is not None else model.disable_adapter():
        yield


def read_tokenizer(folder: str) -> Any:
    """Return the folder's tokenizer, None if it has none."""
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(folder)
    except Exception:  # a checkpoint without tokenizer: its answers are compared as token ids
        return None


def run_item(
    model: Any, tokenizer: Any, place: int, item: Mapping[str, Any], given: Sequence[int] | None,
    request: Mapping[str, Any], *, name: str = "run",
) -> dict[str, Any]:  # fmt: skip
    """Return the report line of the model's answer to one item; its logits are written to a file."""
    device = next(model.parameters()).device
    inputs = teacher_forcing.read_inputs(item["file"], device)
    token_ids = greedy(model, inputs, int(request["new_tokens"]))
    continuation = token_ids if given is None else list(given)
    whole = teacher_forcing.extended(inputs, continuation)
    logits, hidden = teacher_forcing.forward(model, whole, hidden=request.get("hidden", False))
    again = teacher_forcing.forward(model, whole)[0]
    file = Path(request["out"]) / f"{name}-{place}.safetensors"
    teacher_forcing.save_run(file, logits[0], [layer[0] for layer in hidden])
    text = None if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens=True)
    return {
        "id": item["id"], "file": str(file), "token_ids": token_ids, "text": text, "continuation": continuation,
        "repeats": bool(torch.equal(again, logits)), "memory": memory(device),
    }  # fmt: skip


def noise_of(model: Any, item: Mapping[str, Any], continuation: Sequence[int]) -> dict[str, Any]:
    """Return the differences of this route's logits on one item when the order of summation changes."""
    inputs = teacher_forcing.read_inputs(item["file"], next(model.parameters()).device)
    whole = teacher_forcing.extended(inputs, continuation)
    once = teacher_forcing.forward(model, whole)[0][0]
    orders = teacher_forcing.other_orders(model, whole, prompt_tokens=item["prompt_tokens"], has_media=item["has_media"])
    pairs, skipped = teacher_forcing.measure_noise(item["id"], once, orders, teacher_forcing.drawn_runs(model, whole))
    return {"pairs": [asdict(pair) for pair in pairs], "skipped": list(skipped)}


def greedy(model: Any, inputs: Mapping[str, torch.Tensor], count: int) -> list[int]:
    """Return the greedy answer's token ids, its end token included. Of the checkpoint's generation config it obeys
    suppressed tokens alone, as trimtab does."""
    import transformers

    own = model.generation_config
    text = model.config.get_text_config()
    ends = getattr(own, "eos_token_id", None)
    ends = ends if ends is not None else getattr(text, "eos_token_id", None)
    ends = list(ends) if isinstance(ends, (list, tuple)) else [ends] if ends is not None else []
    pad = getattr(own, "pad_token_id", None)
    pad = pad if pad is not None else getattr(text, "pad_token_id", None)
    config = transformers.GenerationConfig(
        max_new_tokens=count, do_sample=False, eos_token_id=ends or None,
        pad_token_id=pad if pad is not None else (ends[0] if ends else 0),
        bos_token_id=getattr(own, "bos_token_id", None), suppress_tokens=getattr(own, "suppress_tokens", None),
        begin_suppress_tokens=getattr(own, "begin_suppress_tokens", None),
        bad_words_ids=[word for word in getattr(own, "bad_words_ids", None) or () if len(word) == 1] or None,
    )  # fmt: skip
    teacher_forcing.forget_request(model)
    with generating(model) as generate:
        out = generate(**inputs, generation_config=config)
    return [int(token) for token in out[0, inputs["input_ids"].shape[1] :]]


def memory(device: torch.device) -> dict[str, int]:
    """Return the peaks so far: of the device's tensors and of this process."""
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {"gpu_peak_bytes": int(peak), "host_peak_bytes": peak_host_bytes()}


@contextmanager
def recorded_warnings() -> Iterator[Counter[str]]:
    """Count the warnings inside the block by their first lines."""
    counts: Counter[str] = Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield counts
    counts.update(str(warning.message).strip().splitlines()[0][:200] for warning in caught if str(warning.message))


@contextmanager
def emit_if_raised(emit: Emit) -> Iterator[None]:
    """Report an error of the stock stack with the library of its frame, instead of ending in a traceback."""
    try:
        yield
    except Exception as exc:  # any exception of four libraries
        emit({"event": "upstream", **raised(exc)})


def raised(exc: BaseException) -> dict[str, Any]:
    """Return an exception as JSON-ready values: type, message, and the innermost library of the stock stack."""
    frames = [frame.filename.replace("\\", "/") for frame in traceback.extract_tb(exc.__traceback__)]
    named = [name for frame in frames for name in LIBRARIES if f"/{name}/" in frame and name != "torch"]
    package = named[-1] if named else "torch"
    installed = version_of(package) or "?"
    return {
        "type": type(exc).__name__, "message": str(exc)[:500], "package": package, "installed": installed,
        "frames": _library_frames(exc),
    }  # fmt: skip


def _library_frames(exc: BaseException) -> list[str]:
    frames = []
    for frame in traceback.extract_tb(exc.__traceback__):
        path = frame.filename.replace("\\", "/")
        for name in LIBRARIES:
            if f"/{name}/" in path:
                frames.append(f"{name}/{path.rpartition(f'/{name}/')[2]}:{frame.lineno} {frame.name}")
                break
    return frames[-4:]
