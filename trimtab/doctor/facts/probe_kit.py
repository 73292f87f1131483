"""Which tools do probes share: tiny checkpoints and adapters, the stock stack on them, the source of an error?"""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from trimtab.doctor.facts.bug import FIXED, PRESENT, Seen
from trimtab.process.packages import version_of
from trimtab.stock.load import load_adapter, load_base, quantization

LIBRARIES = ("accelerate", "bitsandbytes", "peft", "safetensors", "torch", "transformers")
PROJECTIONS = r"(q|k|v|o|gate|up|down)_proj"
# Regular expressions for PEFT's target_modules on the tiny Gemma 4. Towers by the Linear inside their wrappers.
LANGUAGE = rf"model\.language_model\.layers\.\d+\.(self_attn|mlp)\.{PROJECTIONS}"
VISION = rf"model\.vision_tower\.encoder\.layers\.\d+\.(self_attn|mlp)\.{PROJECTIONS}\.linear"
AUDIO = r"model\.audio_tower\.layers\.\d+\.self_attn\.(q|k|v)_proj\.linear"
EVERYWHERE = f"{LANGUAGE}|{VISION}|{AUDIO}"
TOWERS_OFF: Mapping[str, int | str] = {
    "model.vision_tower": "cpu", "model.audio_tower": "cpu", "model.embed_vision": 0, "model.embed_audio": 0,
    "model.language_model": 0, "lm_head": 0,
}  # fmt: skip
# The second of two decoder layers offloaded: the smallest model on which offload of a quantized layer shows.
LLAMA_SPLIT: Mapping[str, int | str] = {
    "model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": "cpu", "model.norm": 0, "model.rotary_emb": 0,
    "lm_head": 0,
}  # fmt: skip
OFFLOAD: Mapping[str, Any] = {"llm_int8_enable_fp32_cpu_offload": True}


class Kit:
    """Builds the files of a probe in one folder; later probes reuse them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def version(self, package: str) -> str | None:
        """Return the installed version, None if it is not installed."""
        return version_of(package)

    def has(self, package: str) -> bool:
        """Return whether the package is installed and importable."""
        return self.version(package) is not None and importlib.util.find_spec(package) is not None

    def checkpoint(self, name: str = "gemma4", **text: Any) -> Path:
        """Return the folder of a tiny checkpoint (`tiny.NAMES`) with these fields changed in its text config."""
        from trimtab.doctor.facts import tiny

        folder = self.folder / f"{name}-{_digest(text)}"
        if not (folder / "config.json").exists():
            with quiet():
                tiny.build(name, folder, **text)
        return folder

    def load(self, path: Path, *, quant: str = "none", device_map: Any = None, repack: bool = False, **kwargs: Any) -> Any:
        """Return the stock model of a checkpoint in bfloat16, in eval mode.

        quant: "none", "nf4", "nf4-dq" or "int8", all with `llm_int8_enable_fp32_cpu_offload`; a `quantization_config`
        among kwargs replaces it. device_map: 0 is the imitated GPU, "cpu" and "disk" are offload, a string such as
        "auto" is passed unchanged. repack: keep bitsandbytes' AVX512 path, which repacks weights in place (A8).
        """
        options: dict[str, Any] = {"dtype": "bfloat16"}
        if quant != "none":
            options["quantization_config"] = quantization(quant, **OFFLOAD)
        if device_map is not None:
            options["device_map"] = on_cpu(device_map)
        if isinstance(device_map, Mapping) and "disk" in device_map.values():
            options["offload_folder"] = str(self.folder / "offload")
        return load_base(path, repack=repack, **(options | kwargs))

    def adapter(self, path: Path, *, targets: str | Sequence[str] = LANGUAGE, rank: int = 4, **config: Any) -> Path:
        """Return the folder of a random LoRA adapter for a checkpoint, saved by stock PEFT on the unsplit model.

        targets: PEFT's target_modules (a regular expression or names). config: other fields of LoraConfig.
        """
        folder = self.folder / f"{path.name}-adapter-{_digest([targets, rank, config])}"
        if (folder / "adapter_config.json").exists():
            return folder
        import torch
        from peft import LoraConfig, get_peft_model

        with quiet(), torch.no_grad():
            target_modules = targets if isinstance(targets, str) else list(targets)
            lora_config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=target_modules, **config)
            model = get_peft_model(self.load(path), lora_config)
            generator = torch.Generator().manual_seed(3)
            for name, parameter in model.named_parameters():
                if "lora_B" in name or "lora_embedding_A" in name:
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
            model.save_pretrained(str(folder))
        return folder

    def peft(self, model: Any, adapter: Path, **kwargs: Any) -> Any:
        """Return `PeftModel.from_pretrained(model, adapter, **kwargs)` in eval mode; 0 in a device_map as in `load`."""
        if "device_map" in kwargs:
            kwargs["device_map"] = on_cpu(kwargs["device_map"])
        return load_adapter(model, adapter, **kwargs)

    def inputs(self, model_or_path: Any, kind: str = "text") -> dict[str, Any]:
        """Return forward arguments of one row. kind: "text", "image" or "audio"."""
        from trimtab.doctor.facts import tiny

        config = getattr(model_or_path, "config", None)
        if config is None:
            import transformers

            config = transformers.AutoConfig.from_pretrained(model_or_path)
        return tiny.inputs(config, kind)

    def forward(self, model: Any, kind: str = "text") -> Any:
        """Return the logits [S, V] of one forward pass, float32 on the CPU."""
        import torch

        with torch.no_grad():
            return model(**self.inputs(model, kind)).logits[0].float().cpu()


def on_cpu(device_map: Any) -> Any:
    """Return a device map with every number turned into the imitated GPU; other maps unchanged.

    With "disk" and no "cpu" in the map the imitation is the string "cpu": accelerate then has no other offload device, and passes
    no device object to safetensors (C7). accelerate compares devices by value: `torch.device("cpu")` is the GPU and the string
    "cpu" is offload. Errors of tensors on different devices do not appear.
    """
    import torch

    if not isinstance(device_map, Mapping):
        return device_map
    places = set(map(str, device_map.values()))
    main: Any = "cpu" if "disk" in places and "cpu" not in places else torch.device("cpu")
    return {key: main if isinstance(place, int) else place for key, place in device_map.items()}


def behind_peft(device_map: Mapping[str, Any]) -> dict[str, Any]:
    """Return a base's device map with the names that its modules have inside a PeftModel (B3)."""
    return {f"base_model.model.{module_path}": place for module_path, place in device_map.items()}


def unmark(model: Any) -> Any:
    """Return the model without transformers' mark on its parameters, so that A3 does not hide later failures."""
    for parameter in model.parameters():
        parameter.__dict__.pop("_is_hf_initialized", None)
    return model


def quantized(model: Any) -> dict[str, int]:
    """Return the number of modules of each of "Linear4bit", "Linear8bitLt" and plain "Linear"."""
    counts = {"Linear4bit": 0, "Linear8bitLt": 0, "Linear": 0}
    for module in model.modules():
        if type(module).__name__ in counts:
            counts[type(module).__name__] += 1
    return counts


def frames(error: BaseException) -> list[dict[str, Any]]:
    """Return the frames of an error in installed libraries, outermost first.

    Each is {"library", "file", "line", "function"}; file paths begin with the package ("peft/peft_model.py").
    """
    rows = []
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        library = str(trace.tb_frame.f_globals.get("__name__", "")).split(".")[0]
        if library in LIBRARIES:
            file = from_package(code.co_filename, library)
            rows.append({"library": library, "file": file, "line": trace.tb_lineno, "function": code.co_name})
        trace = trace.tb_next
    return rows


def failure(error: BaseException) -> str:
    """Return an error in one line for evidence: its type, the first line of its message, the innermost library frame."""
    message = (str(error).strip() or "(no text)").splitlines()[0][:200]
    inner = [frame for frame in frames(error) if frame["library"] != "torch"][-1:]
    where = "".join(f" at {frame['file']}:{frame['line']} {frame['function']}" for frame in inner)
    return f"{type(error).__name__}: {message}{where}"


def error_of(run: Callable[[], object], kind: type[Exception] | tuple[type[Exception], ...], *words: str) -> str:
    """Run a call and return its error for evidence, "" if there is none. Errors: those of another kind, or with none of the words,
    which are no sign of the bug."""
    try:
        run()
    except kind as error:
        if words and not any(word in str(error) for word in words):
            raise
        return failure(error)
    return ""


def seen(fault: str, fixed: str) -> Seen:
    """Return that the bug is present with this fault, or, without one, fixed with the other text."""
    return Seen(PRESENT, fault) if fault else Seen(FIXED, fixed)


def installed_source(module: str, needle: str) -> tuple[str, int] | None:
    """Return the file (path from the package) and the line where an installed module's text has needle, None if nowhere."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    text = Path(spec.origin).read_text(encoding="utf-8")
    at = text.find(needle)
    if at < 0:
        return None
    return from_package(spec.origin, module.split(".")[0]), text.count("\n", 0, at) + 1


def from_package(filename: str, library: str) -> str:
    """Return a file's path from the library's folder, without private folders."""
    parts = Path(filename).parts
    places = [index for index, part in enumerate(parts[:-1]) if part == library]
    installed = [index for index in places if index and parts[index - 1] in ("site-packages", "dist-packages")]
    # A user's folder may have the library's name: the one in site-packages counts, else the innermost.
    return "/".join(parts[(installed or places)[-1] :]) if places else parts[-1]


@dataclass
class Heard:
    """Warnings and log lines of the stack, each in order."""

    warnings: list[str] = field(default_factory=list)
    log_lines: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[str]:
        return iter((*self.warnings, *self.log_lines))


class _Handler(logging.Handler):
    def __init__(self, heard: Heard, told: Sequence[str]) -> None:
        super().__init__(logging.INFO)
        self._heard, self._told = heard, told

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING or record.name.split(".")[0] in self._told:
            self._heard.log_lines.append(record.getMessage())


@contextmanager
def quiet(*told: str) -> Iterator[Heard]:
    """Hide warnings and log lines of the stack from the terminal; yield what collects them. told: libraries whose INFO lines are
    collected too."""
    heard = Heard()
    handler = _Handler(heard, told)
    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in LIBRARIES)]
    before = [(logger, logger.handlers[:], logger.level) for logger in loggers]
    _forget_said_once()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: heard.warnings.append(str(message))
        for logger in loggers:
            # Lines of a library that propagates to the root logger are collected there.
            logger.handlers = [handler] if logger.parent is None or not logger.propagate else []
            if logger.name in told:
                logger.setLevel(logging.INFO)
            elif logger.getEffectiveLevel() > logging.WARNING:
                logger.setLevel(logging.WARNING)  # a program that silenced a library would hide the evidence
        try:
            yield heard
        finally:
            for logger, handlers, level in before:
                logger.handlers = handlers
                logger.setLevel(level)


def _forget_said_once() -> None:
    """Reset the messages that transformers prints only once per process, so that each probe gets them."""
    stack = sys.modules.get("transformers")
    if stack is not None:
        stack.utils.logging.warning_once.cache_clear()
        stack.utils.logging.disable_progress_bar()


def _digest(value: Any) -> str:
    import hashlib

    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:10]
