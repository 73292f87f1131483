"""The stock stack's answers to the same prompts: transformers' loader, bitsandbytes and PEFT, on one device.

Runs in a separate process of any interpreter that has these packages (`--python`). It imports nothing else but torch,
safetensors and files of this package with the same limits. A target list that names Gemma 4's wrapped projections,
which PEFT refuses, is replaced in a copy of the adapter by the exact paths that the file has keys for.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
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

from trimtab.adapters.file import for_peft
from trimtab.adapters.rules import Rules
from trimtab.bridge.row_scales import wrong_scales
from trimtab.process import phases
from trimtab.process.json_file import read_object
from trimtab.process.packages import stack_versions, version_of
from trimtab.request import EXPERTS
from trimtab.verification.routes import teacher_forcing as forced
from trimtab.verification.routes.loaded_changes import sketch

Emit = Callable[[dict[str, Any]], None]
# quant_method -> the package that transformers needs to dequantize such weights while it loads (None: no other).
DEQUANTIZED_BY_STOCK: dict[str, str | None] = {"fp8": None, "compressed-tensors": "compressed_tensors"}
# quant_method that transformers computes with as it is, which PEFT adapts too (I19 of the doctor's catalogue: it cannot merge).
MOBILE = "gemma"
LIBRARIES = ("bitsandbytes", "accelerate", "peft", "transformers", "safetensors", "torch")
_KEY = re.compile(r"^base_model\.model\.(.+?)\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector)(\..*)?$")


def main(request: Mapping[str, Any], emit: Emit) -> None:
    """Load the stock model, answer every item, and emit one line per step, as `trimtab_run.main` does.

    An exception of stock is emitted as an `upstream` line (package, version, message) and ends the work.
    """
    with emit_if_raised(emit):
        route = request["route"]
        started = time.monotonic()
        bound_attention()
        phases.begin("loading")
        with recorded_warnings() as counts:
            model = load_base(route["folder"], route["quant"], route["dtype"], route["device"])
            round_experts(model, route["experts"])
            model, notes = with_adapters(model, route["adapters"], Path(request["out"]))
            notes = dense_note(route["folder"]) + notes
            if route["experts"] != EXPERTS[0]:
                notes.append(f"the stacked experts have the values that bitsandbytes' {route['experts']} gives each of them")
        emit(
            {"event": "loaded", "seconds": time.monotonic() - started, "device": route["device"], "tiers": {},
             "quant": route["quant"], "adapters": list(route["adapters"]), "notes": notes, "warnings": dict(counts),
             "versions": stack_versions(), "changes": stock_changes(model), "wrong_scales": wrong_scales(model)}
        )  # fmt: skip
        tokenizer = read_tokenizer(route["folder"])
        answers: list[list[int]] = []
        for place, item in enumerate(request["items"]):
            phases.begin("prompt", phases.far_text(place + 1, len(request["items"])))
            with using(model, item["adapter"], bool(route["adapters"])):
                line = run_item(model, tokenizer, place, item, forced.wanted(item, answers), request)
            answers.append(line["continuation"])
            emit({"event": "item", "place": place, **line})
        count = request["noise_items"] if request["noise"] else 0
        for place, (item, continuation) in enumerate(list(zip(request["items"], answers, strict=True))[:count], 1):
            phases.begin("measuring noise, prompt", phases.far_text(place, count))
            with using(model, item["adapter"], bool(route["adapters"])):
                emit({"event": "noise", **noise_of(model, item, continuation)})


def bound_attention() -> None:
    """Compute attention without cuDNN, as a model within a small budget does, because its different rounding must not
    affect the comparison.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def load_base(folder: str, quant: str, dtype: str, device: str) -> Any:
    """Return the stock model on one device, in eval mode, with bitsandbytes' quantization as trimtab names it.

    Of other formats stock dequantizes the weights while it loads, where it can (`dense_note`), else our reader does.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    options: dict[str, Any] = {"device_map": {"": device}}
    method = _method(folder)
    if method is None and quant != "none":
        options["quantization_config"] = _quantization(transformers, quant, dtype)
    name = (config.architectures or ["AutoModelForCausalLM"])[0]
    model_class = getattr(transformers, name)
    source: str | None = folder
    if method == MOBILE:
        return _mobile_model(model_class, config, Path(folder), dtype, device)
    if method not in (None, "bitsandbytes"):
        options["config"] = config
        if not dense_note(folder):
            config.quantization_config["dequantize"] = True
        else:
            for part in (config, config.get_text_config()):
                if getattr(part, "quantization_config", None) is not None:
                    del part.quantization_config
            source, options["state_dict"] = None, _dense_state(Path(folder), getattr(torch, dtype))
    model = model_class.from_pretrained(source, dtype=getattr(torch, dtype), **options)
    return without_cpu_repacking(model.eval())


def round_experts(model: Any, kind: str) -> None:
    """Give every stacked expert the values that bitsandbytes reads back after it packed that matrix: stock holds none packed."""
    if kind == EXPERTS[0]:
        return
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False) if "expert" in f"{path} {type(module).__name__}".lower() else ():
            for matrix in parameter.data if parameter.dim() == 3 else ():
                packed = quantize_4bit(
                    matrix.contiguous(), blocksize=64, quant_type=kind[:3], compress_statistics=kind.endswith("-dq")
                )
                matrix.copy_(dequantize_4bit(*packed))


def _mobile_model(model_class: Any, config: Any, folder: Path, dtype: str, device: str) -> Any:
    """Return transformers' own model of Gemma's mobile files.

    transformers 5.23 refuses a table with more than one scale a row, as official files have it, although its forward takes them:
    they are set after it has loaded the first of each row.
    """
    from trimtab.checkpoint.folder import read_checkpoint
    from trimtab.engine.tiers.reader import read_small

    state: dict[str, torch.Tensor] = dict(read_small(read_checkpoint(folder).tensors))
    wide = {name: scale for name, scale in state.items() if name.endswith(".embedding_scale") and scale.shape[-1] > 1}
    state |= {name: scale[:, :1].contiguous() for name, scale in wide.items()}
    options = {"device_map": {"": device}, "dtype": getattr(torch, dtype)}
    model = model_class.from_pretrained(None, config=config, state_dict=state, **options)
    for name, scale in wide.items():
        stem = name.removesuffix(".embedding_scale")
        table = next(module for path, module in model.named_modules() if path and f".{stem}".endswith(f".{path}"))
        table.embedding_scale = torch.nn.Parameter(scale.to(device), requires_grad=False)
    return model.eval()


def _method(folder: str) -> str | None:
    """Return the quant_method of a folder's config, at the top or in its text part; None for plain weights."""
    config = read_object(Path(folder) / "config.json", "config.json")
    text = config.get("text_config")
    settings = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    return str(settings.get("quant_method", "bitsandbytes")) if isinstance(settings, dict) else None


def _has(package: str | None) -> bool:
    return package is None or importlib.util.find_spec(package) is not None


def dense_note(folder: str) -> list[str]:
    """Return a note where the stock stack cannot load a checkpoint's format here, and computes with what our reader made of it."""
    method = _method(folder)
    is_nested = "quantization_config" not in read_object(Path(folder) / "config.json", "config.json")
    if method in (None, "bitsandbytes", MOBILE):
        return []
    if method in DEQUANTIZED_BY_STOCK and _has(DEQUANTIZED_BY_STOCK[method]) and not is_nested:
        return []
    return [f"the weights ({method}) were dequantized by trimtab's reader: the stock stack cannot here"]


def _dense_state(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint with its packed weights dequantized."""
    from trimtab.checkpoint.folder import read_checkpoint
    from trimtab.engine.formats.weights import dequantize, prequantized
    from trimtab.engine.tiers.reader import read_small
    from trimtab.formats.packed import split_packed
    from trimtab.formats.record import UNREAD_PARTS

    plain, packed = split_packed(read_checkpoint(folder))
    state: dict[str, torch.Tensor] = dict(read_small(plain))
    for name, entry in packed.items():
        parts = read_small({part: tensor for part, tensor in entry.parts.items() if part not in UNREAD_PARTS})
        state[name] = dequantize(prequantized(entry, parts, dtype))
    return state


def _quantization(transformers: Any, quant: str, dtype: str) -> Any:
    if quant == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=quant[:3], bnb_4bit_use_double_quant=quant.endswith("-dq"),
        bnb_4bit_compute_dtype=getattr(torch, dtype),
    )  # fmt: skip


def without_cpu_repacking(model: Any) -> Any:
    """Return the model with bitsandbytes' AVX512 path off: its first forward repacks weights in place and loses bits.

    Source: bitsandbytes #2078; a merge or a comparison after that forward would use other weights.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def with_adapters(model: Any, adapters: Mapping[str, str], work: Path) -> tuple[Any, list[str]]:
    """Return the PeftModel with every adapter loaded (the base itself for none), and notes on changes that this needed."""
    if not adapters:
        return model, []
    import peft

    notes = []
    for place, (name, folder) in enumerate(adapters.items()):
        base = model if place == 0 else model.get_base_model()
        loadable, note = loadable_adapter(base, for_peft(folder, base.config.to_dict()), work / f"adapter-{place}")
        notes += [f"{name}: {note}"] if note else []
        if place == 0:
            model = peft.PeftModel.from_pretrained(model, str(loadable), adapter_name=name)
        else:
            model.load_adapter(str(loadable), adapter_name=name)
    return without_cpu_repacking(model.eval()), notes


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


def loadable_adapter(model: Any, folder: Path, copy: Path) -> tuple[Path, str]:
    """Return an adapter folder that PEFT can load, and a note if it is a changed copy."""
    config = read_object(folder / "adapter_config.json", "adapter_config.json")
    targets = config.get("target_modules")
    paths = dict(model.named_modules())
    named = Rules(folder, {"target_modules": targets}, paths).named
    wrappers = [path for path in paths if f"{path}.linear" in paths and path in named]
    if not wrappers:
        return folder, ""
    keys = _adapted_paths(folder / "adapter_model.safetensors")
    exact = sorted(key for key in keys if key in paths)
    shutil.copytree(folder, copy)
    config["target_modules"] = "|".join(re.escape(path) for path in exact)
    (copy / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return copy, (
        f"target_modules names {len(wrappers)} wrapped projections, which PEFT refuses; a copy of the adapter names "
        f"the {len(exact)} paths that it has keys for"
    )


def _adapted_paths(file: Path) -> set[str]:
    from safetensors import safe_open

    with safe_open(str(file), framework="pt") as opened:
        matches = (_KEY.match(key) for key in opened.keys())  # noqa: SIM118 - it has no iterator
        return {match.group(1) for match in matches if match}


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
    inputs = forced.read_inputs(item["file"], device)
    token_ids = greedy(model, inputs, int(request["new_tokens"]))
    continuation = token_ids if given is None else list(given)
    whole = forced.extended(inputs, continuation)
    logits, hidden = forced.forward(model, whole, hidden=request.get("hidden", False))
    again = forced.forward(model, whole)[0]
    file = Path(request["out"]) / f"{name}-{place}.safetensors"
    forced.save_run(file, logits[0], [layer[0] for layer in hidden])
    text = None if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens=True)
    return {
        "id": item["id"], "file": str(file), "token_ids": token_ids, "text": text, "continuation": continuation,
        "repeats": bool(torch.equal(again, logits)), "memory": memory(device),
    }  # fmt: skip


def noise_of(model: Any, item: Mapping[str, Any], continuation: Sequence[int]) -> dict[str, Any]:
    """Return the differences of this route's logits on one item when the order of summation changes."""
    inputs = forced.read_inputs(item["file"], next(model.parameters()).device)
    whole = forced.extended(inputs, continuation)
    once = forced.forward(model, whole)[0][0]
    orders = forced.other_orders(model, whole, prompt_tokens=item["prompt_tokens"], has_media=item["has_media"])
    pairs, skipped = forced.measure_noise(item["id"], once, orders, forced.drawn_runs(model, whole))
    return {"pairs": [asdict(pair) for pair in pairs], "skipped": list(skipped)}


def greedy(model: Any, inputs: Mapping[str, torch.Tensor], count: int) -> list[int]:
    """Return the greedy answer's token ids, its end token included; the sampling values in the checkpoint are not used."""
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
        bos_token_id=getattr(own, "bos_token_id", None),
    )  # fmt: skip
    holder = model.get_base_model() if hasattr(model, "get_base_model") else model
    forced.forget_request(model)
    kept, holder.generation_config = holder.generation_config, transformers.GenerationConfig()
    try:
        with torch.no_grad():
            out = holder.generate(**inputs, generation_config=config)
    finally:
        holder.generation_config = kept
    return [int(token) for token in out[0, inputs["input_ids"].shape[1] :]]


def memory(device: torch.device) -> dict[str, int]:
    """Return the peaks so far: of the device's tensors and, if the system reports it, of this process."""
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {"gpu_peak_bytes": int(peak), "host_peak_bytes": host_peak_bytes()}


def host_peak_bytes() -> int:
    """Return the largest resident size of this process so far, 0 if the standard library cannot read it."""
    status = Path("/proc/self/status")
    if status.is_file():  # not ru_maxrss there: a child process inherits its parent's peak
        match = re.search(r"^VmHWM:\s+(\d+)", status.read_text(encoding="utf-8"), re.MULTILINE)
        return int(match.group(1)) * 1024 if match else 0
    try:
        import resource
    except ImportError:
        return 0
    peak = int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return peak if sys.platform == "darwin" else peak * 1024


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


def _library_frames(exc: BaseException, last: int = 4) -> list[str]:
    frames = []
    for frame in traceback.extract_tb(exc.__traceback__):
        path = frame.filename.replace("\\", "/")
        for name in LIBRARIES:
            if f"/{name}/" in path:
                frames.append(f"{name}/{path.rpartition(f'/{name}/')[2]}:{frame.lineno} {frame.name}")
                break
    return frames[-last:]
