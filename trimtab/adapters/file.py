"""The files of an adapter folder: the configuration and the header of PEFT's tensor file, read strictly.

Only files with fixed names inside the folder are opened: no name in them ever becomes a path. Imports no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimtab.adapter_names import is_lora_file
from trimtab.adapters.config import config_problems
from trimtab.adapters.values import value_problems
from trimtab.adapters.weights_beside import weights_beside
from trimtab.checkpoint.folder import CONFIG, Stamp, stamp_of
from trimtab.checkpoint.headers import TensorEntry, read_header
from trimtab.checkpoint.unreadable import adapter_refusal, address_hint, check_reachable, reading
from trimtab.demo_names import MODEL, NAMED, without_demo_name
from trimtab.errors import AdapterError
from trimtab.gguf.adapter import adapter_folder, made_for
from trimtab.printable import printable
from trimtab.process.json_file import JsonError, read_json

log = logging.getLogger("trimtab")

DIVERGED = "Its training diverged or the file is damaged: use an earlier checkpoint of it"
CONFIG_NAME, TENSORS_NAME = "adapter_config.json", "adapter_model.safetensors"
_OTHER_FILES = {
    "adapter_model.bin": "is a pickle, which can run code when it is opened; load it once with PEFT in a place you "
    "trust and save it again (safe_serialization=True is the default)",
    "adapters.safetensors": "is an mlx-lm adapter; convert it to the PEFT layout first",
    "pytorch_lora_weights.safetensors": "is a diffusers LoRA, not a PEFT adapter",
}


@dataclass(frozen=True)
class AdapterFile:
    """A folder that PEFT wrote: its configuration as stored and the header of its tensor file.

    folder: as the user named it; of a LoRA in GGUF that file, and `peft_folder` is what gguf/adapter.py made of it. stamps: (file,
    size, mtime in ns) of both files, or of the GGUF file, taken before they were read. notes: other weights in the folder that
    nothing uses. made_for: the types of models that a GGUF file is for, () for a folder. turned: its modules whose rows are not in
    the model's order.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]
    file: Path
    stamps: tuple[Stamp, ...] = ()
    notes: tuple[str, ...] = ()
    made_for: tuple[str, ...] = ()
    turned: tuple[str, ...] = ()

    @property
    def peft_folder(self) -> Path:
        """The folder with both files, which PEFT loads."""
        return self.file.parent

    def with_heads(self, width: int) -> AdapterFile:
        """Return the adapter with its rows in the order of a model whose heads have this width. Errors: AdapterError."""
        file = peft_folder(self.folder, width) / TENSORS_NAME
        return replace(self, file=file, tensors=dict(read_header(file).tensors), turned=())


def peft_folder(path: str | Path, width: int = 0) -> Path:
    """Return the folder of an adapter that PEFT can load: of a LoRA in GGUF the one made of it, as `adapter_folder`."""
    return Path(adapter_folder(str(path), width) if is_lora_file(path) else path)


GGUF = ".gguf"
GGUF_HINT = "give one of the files, or the folder that PEFT wrote"


def _only_gguf(folder: Path) -> str | None:
    """Return the name of a GGUF file in a folder without an adapter's two files, None for another folder."""
    names = sorted(file.name for file in folder.iterdir())
    packed = [name for name in names if name.lower().endswith(GGUF)]
    return packed[0] if packed and CONFIG_NAME not in names and TENSORS_NAME not in names else None


@reading(adapter_refusal)
def check_is_adapter(path: str | Path) -> None:
    """Raise AdapterError for what is no folder that PEFT wrote. Nothing in it is read."""
    folder = peft_folder(path)
    if not folder.is_dir():
        check_reachable(folder)
        if hint := address_hint(str(path)):
            raise AdapterError(str(path), ["is an address, not a folder"], hint=hint)
        is_file = folder.is_file()
        hint = f"The demo has {', '.join(list(NAMED)[1:])}" if str(path).startswith(f"{MODEL}/") else ""
        raise AdapterError(folder, ["is a file; name the folder that holds it" if is_file else "no such folder"], hint=hint)
    if gguf := _only_gguf(folder):
        raise AdapterError(folder, [f"has GGUF files and no adapter of PEFT ({gguf}); {GGUF_HINT}"])
    problems = _missing_files(folder)
    if problems:
        raise AdapterError(folder, problems)


def for_peft(path: str | Path, config: Mapping[str, Any]) -> Path:
    """Return the folder of an adapter that PEFT loads on a model with this config. Errors: AdapterError for a LoRA in GGUF."""
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config
    heads = text.get("num_attention_heads")
    width = text.get("head_dim") or (text.get("hidden_size", 0) // heads if isinstance(heads, int) and heads else 0)
    return peft_folder(path, width if isinstance(width, int) else 0)


@reading(adapter_refusal)
def read_adapter(path: str | Path, *, values: bool = True, log_name: str | None = None) -> AdapterFile:
    """Return configuration and header of the adapter in a folder.

    path: the folder, or a name of the demo's. values: also search its values for NaN and infinity; none is kept in memory.
    log_name: the name in the log of an adapter with unused weights in its folder (None: the caller logs `notes`). Errors:
    AdapterError with every reason: missing or foreign files, other weights in the folder that change the output, bad JSON, another
    method than LoRA, configuration fields that change the output in a way not supported, tensors with values that are not finite.
    CheckpointError if the safetensors header is invalid.
    """
    given = Path(without_demo_name(path))
    stamps = stamps_of(given)
    folder = peft_folder(given)
    check_is_adapter(folder)
    config = _read_config(folder / CONFIG_NAME)
    beside, notes = _beside(folder)
    problems = config_problems(config) + beside
    if problems:
        raise AdapterError(folder, problems)
    header = read_header(folder / TENSORS_NAME)
    if not header.tensors:
        raise AdapterError(folder, [f"{TENSORS_NAME} has no tensors"])
    own = ((), ()) if folder == given else made_for(str(folder))
    adapter = AdapterFile(given, config, dict(header.tensors), folder / TENSORS_NAME, stamps, tuple(notes), *own)
    if values:
        check_values(adapter)
    if log_name is not None:
        _log(notes, log_name)
    return adapter


def _beside(folder: Path) -> tuple[list[str], list[str]]:
    try:
        return weights_beside(folder)
    except OSError as exc:
        raise AdapterError(folder, [f"the folder cannot be read: {exc.strerror}"]) from exc


def check_beside(path: str | Path, log_name: str) -> None:
    """Check the other weights in the folder of an adapter that was read before, as `read_adapter` does. Errors: AdapterError."""
    problems, notes = _beside(peft_folder(path))
    if problems:
        raise AdapterError(Path(path), problems)
    _log(notes, log_name)


def _log(notes: Collection[str], name: str) -> None:
    for note in notes:
        log.warning("%s", printable(f"adapter {name}: {note}", one_line=True))


def stamps_of(path: str | Path) -> tuple[Stamp, ...]:
    """Return (file, size, mtime in ns) of an adapter's two files, or of its GGUF file; -1 for one that does not exist."""
    folder = Path(path)
    if is_lora_file(folder):
        return (stamp_of(folder.parent, folder),)
    return tuple(stamp_of(folder, folder / name) for name in (CONFIG_NAME, TENSORS_NAME))


def check_values(file: AdapterFile) -> None:
    """Raise AdapterError with every tensor of an adapter that has values which are NaN or infinite."""
    problems = value_problems(file.tensors)
    if problems:
        raise AdapterError(file.folder, problems, hint=DIVERGED)


def _missing_files(folder: Path) -> list[str]:
    missing = [name for name in (CONFIG_NAME, TENSORS_NAME) if not (folder / name).is_file()]
    if len(missing) == 2 and (folder / CONFIG).is_file():
        return ["this is a model, not an adapter: give it as the model, and a folder that PEFT wrote as the adapter"]
    problems = [f"{name} is missing" for name in missing]
    if missing:
        problems += [f"{name} {words}" for name, words in _OTHER_FILES.items() if (folder / name).exists()]
        # PEFT writes every adapter except "default" into a sub-folder.
        inside = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG_NAME}"))
        problems += [f"an adapter is in the folder {name!r} inside; name that one" for name in inside[:5]]
    return problems


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = read_json(path, CONFIG_NAME)
    except JsonError as exc:
        raise AdapterError(path.parent, [f"{path.name} {exc}"]) from exc
    except OSError as exc:
        raise AdapterError(path.parent, [f"{path.name} cannot be read: {exc.strerror}"]) from exc
    if not isinstance(config, dict):
        raise AdapterError(path.parent, [f"{path.name} must hold an object, it holds a {type(config).__name__}"])
    return config
