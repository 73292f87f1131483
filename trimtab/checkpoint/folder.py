"""Which files make a checkpoint: a config, and the weight files that transformers itself would read.

`read_checkpoint` takes a folder, a hub-cache folder or a hub id that is in the local cache; nothing is ever downloaded.
Source of the file choice: transformers 5.23.0, modeling_utils.py, _get_resolved_checkpoint_files. Folders are never
globbed: some repositories carry the weights a second time under another name.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from trimtab.checkpoint.headers import TensorEntry, read_header
from trimtab.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
MAX_JSON_BYTES = 256 * 2**20

Stamp = tuple[str, int, int]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder by its config and headers.

    tensors: by file tensor name. quantization: the config's quantization_config, None for plain weights. stamps:
    (file name, bytes, modification time in ns) of the config and every weight file.
    """

    folder: Path
    config: dict[str, Any]
    files: tuple[Path, ...]
    tensors: dict[str, TensorEntry]
    has_weights: bool
    quantization: dict[str, Any] | None
    stamps: tuple[Stamp, ...]


def read_checkpoint(model: str | os.PathLike[str]) -> Checkpoint:
    """Return a checkpoint from its config and headers. Errors: CheckpointError, naming every missing file at once."""
    folder = find_folder(model)
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise CheckpointError(
            "has no config.json", path=folder, hint="A checkpoint is a folder with config.json and safetensors files"
        )
    config = read_json(config_file)
    files = _weight_files(folder, config)
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in read_header(file).tensors.items():
            if name in tensors:
                raise CheckpointError(f"is in {tensors[name].file.name} as well", path=file, tensor_name=name)
            tensors[name] = entry
    if files:
        _check_index(folder, tensors)
    text = config.get("text_config")
    quantization = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    stamps = tuple(_stamp(file) for file in (config_file, *files))
    return Checkpoint(folder, config, files, tensors, bool(files), quantization, stamps)


def check_unchanged(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a file is no longer what it was when the checkpoint was read."""
    now = [_stamp(checkpoint.folder / name) for name, *_ in checkpoint.stamps]
    changed = [then[0] for then, new in zip(checkpoint.stamps, now, strict=True) if then != new]
    if changed:
        raise CheckpointError(f"changed since it was read: {', '.join(changed)}", path=checkpoint.folder)


def read_json(file: Path) -> dict[str, Any]:
    """Return a JSON object. Errors: CheckpointError if it is not one."""
    try:
        if file.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"is over {MAX_JSON_BYTES} B, too large for a JSON file", path=file)
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as exc:
        raise CheckpointError(f"cannot be read ({exc.strerror})", path=file) from exc
    except (ValueError, RecursionError) as exc:
        raise CheckpointError(f"is not JSON ({exc})", path=file) from exc
    if not isinstance(found, dict):
        raise CheckpointError("is not a JSON object", path=file)
    return found


def _stamp(file: Path) -> Stamp:
    try:
        found = file.stat()
    except OSError:
        return file.name, -1, -1
    return file.name, found.st_size, found.st_mtime_ns


def find_folder(model: str | os.PathLike[str]) -> Path:
    """Return the folder that holds the config: the given one, a snapshot inside a hub-cache folder, or a cached hub id's."""
    path = Path(model)
    if path.is_dir():
        return _snapshot(path) if path.name.startswith("models--") and (path / "snapshots").is_dir() else path
    if path.exists():
        raise CheckpointError("is a file; give the folder that holds it", path=path)
    text = os.fspath(model)
    parts = text.split("/")
    if len(parts) == 2 and all(part and part not in (".", "..") and "\\" not in part for part in parts):
        cached = hub_cache() / f"models--{parts[0]}--{parts[1]}"
        if cached.is_dir():
            return _snapshot(cached)
        raise CheckpointError(
            "is neither a folder nor in the local hub cache, and nothing is ever downloaded", path=text,
            hint=f"Fetch it first with `hf download {text}`, or give a folder",
        )  # fmt: skip
    raise CheckpointError("no such folder", path=path)


def hub_cache() -> Path:
    """Return the hub's cache folder as huggingface_hub finds it."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache)
    home = os.environ.get("HF_HOME")
    base = Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    return base / "hub"


def _snapshot(cached: Path) -> Path:
    main = cached / "refs" / "main"
    snapshots = cached / "snapshots"
    if main.is_file():
        revision = main.read_text(encoding="utf-8").strip()
        if revision and PurePosixPath(revision).name == revision and (snapshots / revision).is_dir():
            return snapshots / revision
        raise CheckpointError(f"refs/main names {revision!r}, which is not among its snapshots", path=cached)
    found = sorted(child for child in snapshots.iterdir() if child.is_dir()) if snapshots.is_dir() else []
    if len(found) != 1:
        names = ", ".join(child.name for child in found) or "none"
        raise CheckpointError(f"has no refs/main and {len(found)} snapshots ({names})", path=cached, hint="Name one of them")
    return found[0]


def _weight_files(folder: Path, config: dict[str, Any]) -> tuple[Path, ...]:
    named = config.get("transformers_weights")
    if isinstance(named, str) and named:
        file = _inside(folder, named, folder / "config.json")
        if not file.is_file():
            raise CheckpointError(f"config.json names {named}, which is missing", path=folder)
        return _indexed(folder, file) if named.endswith(".index.json") else (file,)
    if (folder / SINGLE).is_file():
        return (folder / SINGLE,)
    if (folder / INDEX).is_file():
        return _indexed(folder, folder / INDEX)
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES and file.name != "training_args.bin")
    if pickles:
        raise CheckpointError(
            f"holds its weights only as pickle ({', '.join(pickles[:3])}), which can run code when read and is refused",
            path=folder, hint="Convert it to safetensors with transformers' save_pretrained",
        )  # fmt: skip
    return ()


def _inside(folder: Path, name: str, source: Path) -> Path:
    """Return folder / name for a plain relative name. Where a symbolic link leads is not asked: hub caches are made of them."""
    pure, windows = PurePosixPath(name), PureWindowsPath(name)
    if not name or pure.is_absolute() or windows.drive or windows.root or "\\" in name or ".." in pure.parts:
        raise CheckpointError(f"names a file outside its folder: {name!r}", path=source)
    return folder / name


def _weight_map(index: Path) -> dict[str, str]:
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise CheckpointError("has no weight_map of tensor names to file names", path=index)
    return found


def _indexed(folder: Path, index: Path) -> tuple[Path, ...]:
    files = [_inside(folder, name, index) for name in dict.fromkeys(_weight_map(index).values())]
    if not files:
        raise CheckpointError("weight_map is empty", path=index)
    missing = sorted(file.name for file in files if not file.is_file())
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(files)} shards are missing: {', '.join(missing)}", path=folder,
            hint="Copy or download them again",
        )  # fmt: skip
    return tuple(sorted(files))


def _check_index(folder: Path, tensors: dict[str, TensorEntry]) -> None:
    index = folder / INDEX
    if (folder / SINGLE).is_file() or not index.is_file():
        return
    lost = [
        f"{name} (in {file})" for name, file in _weight_map(index).items()
        if name not in tensors or tensors[name].file.name != PurePosixPath(file).name
    ]  # fmt: skip
    if lost:
        raise CheckpointError(
            f"the index names {len(lost)} tensors that are not where it says: {', '.join(lost[:5])}", path=index
        )
