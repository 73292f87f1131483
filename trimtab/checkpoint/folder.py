"""Which files does a checkpoint have: a config, and the weight files that transformers would read?"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NoReturn

from trimtab.adapter_names import MODEL, without_demo_name
from trimtab.checkpoint.config_limits import check_config, check_layers, most_tensors
from trimtab.checkpoint.headers import TensorEntry, read_header
from trimtab.checkpoint.unreadable import address_hint, check_reachable, checkpoint_refusal, path_hint, reading
from trimtab.errors import CheckpointError
from trimtab.gguf import companion, folders
from trimtab.gguf.architectures import Order
from trimtab.gguf.header import file_kind
from trimtab.process.json_file import read_object

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
INDEX_SUFFIX = ".safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# Pickles that a trainer leaves in a checkpoint's folder.
NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state", "random_states")
SHOWN_NAMES = 5

# One of the two names of a hub id: never a path. Source: huggingface_hub, utils/_validators.py, REPO_ID_REGEX.
_HUB_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")

Stamp = tuple[str, int, int]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder by its config and headers.

    tensors: by file tensor name. quantization: the config's quantization_config, None for plain weights. stamps:
    (file name in the folder, bytes, modification time in ns) of the config, the index and every weight file. orders: of tensors
    of GGUF files, "rows" or "columns" and their order there. files of GGUF are not in the folder.
    """

    folder: Path
    config: dict[str, Any]
    files: tuple[Path, ...]
    tensors: dict[str, TensorEntry]
    has_weights: bool
    quantization: dict[str, Any] | None
    stamps: tuple[Stamp, ...]
    orders: Mapping[str, Mapping[str, Order]] = field(default_factory=dict)
    # By who asked: what was made of the headers and of small tensors, once; a changed copy has none of it.
    made: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def is_unchanged(self) -> bool:
        """Whether its files are still those that were read, and those of the cache are there."""
        is_there = all(file.is_file() for file in self.files)
        return is_there and all(stamp_of(self.folder, self.folder / stamp[0]) == stamp for stamp in self.stamps)

    @property
    def is_gguf(self) -> bool:
        """Whether its matrices are in GGUF files."""
        return bool(self.orders)

    @property
    def path(self) -> Path:
        """What errors name: its folder, of a GGUF model the first of its files."""
        return self.files[1] if self.is_gguf else self.folder


@reading(checkpoint_refusal)
def read_checkpoint(model: str | os.PathLike[str]) -> Checkpoint:
    """Return a checkpoint from its config and headers; has_weights is False for a folder with a config alone.

    model: a folder, a hub-cache folder, a hub id that is in the local cache, or "demo". Errors: CheckpointError; of missing shards
    and misplaced tensors it names all. Nothing is downloaded. Source of the file choice: transformers 5.6.2 and 5.23.0,
    modeling_utils.py, _get_resolved_checkpoint_files. Files are never chosen by pattern: some repositories carry the weights twice.
    """
    folder = find_folder(model)
    config_file = folder / CONFIG
    if not config_file.is_file():
        _refuse_without_config(folder)
    config = read_object(config_file, "config.json")
    check_config(config, config_file)
    check_not_foreign(config, folder)
    if (quantization := _quantization(config_file, config)) and quantization.get("quant_method") == "gguf":
        return _of_gguf(folder, config, quantization)
    files, index, weight_map = _weight_files(folder, config)
    # Stamped before it is read, so a change during reading is detected.
    stamps = tuple(stamp_of(folder, file) for file in (config_file, *([index] if index else []), *files))
    tensors = _read_tensors(files, most_tensors(config))
    if files:
        check_layers(config, len(tensors), config_file)
    if index is not None:
        _check_index(folder, index, weight_map, tensors)
    return Checkpoint(folder, config, files, tensors, bool(files), quantization, stamps)


def check_not_foreign(config: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Raise CheckpointError for a config of MLX or ExLlama, whose weights no stock stack reads either."""
    settings = config.get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    own = config.get("quantization")
    name = {"exl2": "ExLlama (EXL2)", "exl3": "ExLlama (EXL3)"}.get(str(method))
    if name is None and method is None and isinstance(own, dict) and "group_size" in own:
        name = "MLX"
    if name is not None:
        raise CheckpointError(
            f"is packed for {name}, which is not read", path=path,
            hint="Use a GGUF file, the FP8 or W4A16 files, or the unquantized files of the same model",
        )  # fmt: skip


def _of_gguf(folder: Path, config: dict[str, Any], quantization: dict[str, Any]) -> Checkpoint:
    """Return the checkpoint of a companion's folder. The types of its tensors are ggml's; formats/gguf.py reads them."""
    table = folders.read_table(folder) if folders.is_made_here(folder) else None
    if table is None:
        raise CheckpointError("config.json says GGUF: give the GGUF file itself", path=folder)
    files = tuple(Path(name) for name, *_ in table["files"])
    changed = [
        file.name for file, (_, *then) in zip(files, table["files"], strict=True) if list(stamp_of(folder, file)[1:]) != then
    ]
    if changed:
        raise CheckpointError(f"{', '.join(changed)} changed or went away", path=files[0], hint="Give the model again")
    tensors = read_header(folder / companion.SMALL, most_tensors=most_tensors(config)).tensors
    orders: dict[str, dict[str, Order]] = {}
    for name, (kind, shape, place, start, nbytes, rows, columns) in table["tensors"].items():
        tensors[name] = TensorEntry(name, kind, tuple(shape), files[place], start, nbytes)
        orders[name] = {side: order for side, order in (("rows", rows), ("columns", columns)) if order}
    check_layers(config, len(tensors), folder / CONFIG)
    # The files that the user gave: those of the cache are made of them, and made again at another time.
    stamps = tuple(stamp_of(folder, file) for file in (*files, *map(Path, table.get("beside", ()))))
    return Checkpoint(folder, config, (folder / companion.SMALL, *files), tensors, True, quantization, stamps, orders)


def read_loadable(model: str | os.PathLike[str]) -> Checkpoint:
    """Return a checkpoint that has weights. Errors: CheckpointError, as `read_checkpoint`."""
    checkpoint = read_checkpoint(model)
    check_has_weights(checkpoint)
    return checkpoint


def check_has_weights(checkpoint: Checkpoint, so: str = "it can be planned, not loaded") -> None:
    """Raise CheckpointError for a checkpoint without weights. so: what that means."""
    if not checkpoint.has_weights:
        raise CheckpointError(f"has a config.json but no weights: {so}", path=checkpoint.path, hint="Add the safetensors files")


def check_no_adapter(checkpoint: Checkpoint, adapters: Iterable[str | os.PathLike[str]]) -> None:
    """Raise CheckpointError for a model's folder that holds an adapter too, unless it is one of these adapters.

    Source: transformers 5.23.0, auto_factory.py: `from_pretrained` of such a folder loads both.
    """
    folder = checkpoint.folder
    if not os.path.isfile(folder / ADAPTER_CONFIG) or not any(os.path.isfile(folder / name) for name in ADAPTER_WEIGHTS):
        return
    if os.path.realpath(folder) not in map(os.path.realpath, adapters):
        raise CheckpointError(
            f"holds an adapter too ({ADAPTER_CONFIG}), which transformers would load with the model", path=folder,
            hint=f"Move {ADAPTER_CONFIG} away if its weights are merged, or the model alone is meant; or give it as an adapter",
        )  # fmt: skip


def check_unchanged(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a file has changed since the checkpoint was read."""
    now = [stamp_of(checkpoint.folder, checkpoint.folder / name) for name, *_ in checkpoint.stamps]
    changed = [then[0] for then, new in zip(checkpoint.stamps, now, strict=True) if then != new]
    if changed:
        raise CheckpointError(
            f"changed since it was read: {', '.join(changed)}", path=checkpoint.path,
            hint="Plan and load again; a checkpoint must not be written while it is in use",
        )  # fmt: skip


def stamp_of(folder: Path, file: Path) -> Stamp:
    """Return (name, size, mtime in ns) of a file; -1 for both if it does not exist. A file elsewhere has its whole path."""
    name = (file.relative_to(folder) if file.is_relative_to(folder) else file).as_posix()
    try:
        stat = file.stat()
    except OSError:
        return name, -1, -1
    return name, stat.st_size, stat.st_mtime_ns


# Fields of generation_config.json that change which token `generate` takes, and with which values they change nothing.
_RULES: dict[str, tuple[object, ...]] = {
    "repetition_penalty": (1,), "encoder_repetition_penalty": (1,), "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,), "sequence_bias": (), "min_length": (0,), "min_new_tokens": (0,), "num_beams": (1,),
    "forced_bos_token_id": (), "forced_eos_token_id": (), "exponential_decay_length_penalty": (), "guidance_scale": (1,),
    "watermarking_config": (), "stop_strings": (),
}  # fmt: skip


def unapplied_rules(generation: Mapping[str, Any]) -> dict[str, str]:
    """Return what a generation_config.json asks of every answer and trimtab does not do, by the file's name; {} if nothing."""
    rules = {name: generation.get(name) for name, neutral in _RULES.items() if generation.get(name) not in (None, [], *neutral)}
    words = generation.get("bad_words_ids")
    if any(isinstance(word, list) and len(word) > 1 for word in (words if isinstance(words, list) else ())):
        rules["bad_words_ids"] = words
    texts = (f"{name} {value}" if isinstance(value, (int, float)) else name for name, value in rules.items())
    remedy = "; repetition_penalty can be given with each request" if "repetition_penalty" in rules else ""
    return {GENERATION: f"requests {', '.join(texts)}: not applied{remedy}"} if rules else {}


def _quantization(config_file: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the quantization_config where transformers looks for it: at the top, else in the text config."""
    text = config.get("text_config")
    quantization = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    if quantization and not isinstance(quantization, dict):
        raise CheckpointError("quantization_config is not an object", path=config_file)
    return quantization or None


# Which folder ---------------------------------------------------------------------------------------------------------


def _gguf_in(folder: Path) -> Path | None:
    """Return the companion of the GGUF file that a folder holds instead of safetensors files, None for any other folder.

    A folder with config.json is such a one if it has a model and its projector file; some of these need no config.json. Errors:
    CheckpointError for several models or projectors.
    """
    names: list[str] = []
    with suppress(OSError):
        names = os.listdir(folder)
    packed = sorted(name for name in names if name.lower().endswith(".gguf"))
    if not packed or any(name.endswith(".safetensors") for name in names):
        return None
    models = [name for name in packed if companion.is_model_file(folder / name)]
    towers = [name for name in packed if name not in models and file_kind(folder / name) == "mmproj"]
    if len(models) == 1 and towers and (CONFIG in names or any(companion.is_whole(folder / name) for name in towers)):
        if len(towers) > 1:
            raise CheckpointError(
                f"has {len(towers)} projectors (mmproj): {', '.join(towers[:SHOWN_NAMES])}", path=folder,
                hint=f"Leave one of them in the folder, or give {models[0]} for text alone",
            )  # fmt: skip
        return companion.folder_with_towers(folder, folder / models[0], folder / towers[0])
    if CONFIG in names:
        return None
    if len(models) > 1:
        raise CheckpointError(
            f"has {len(models)} GGUF files: {', '.join(models[:SHOWN_NAMES])}", path=folder, hint="Give one of the files"
        )
    # A later file of a set, or towers alone: reading says what is missing.
    return companion.folder_of(folder / (models or packed)[0])


@reading(checkpoint_refusal)
def find_folder(model: str | os.PathLike[str]) -> Path:
    """Return the folder that holds the config: the given one, a hub-cache folder's snapshot, a cached hub id's, a GGUF file's.

    A folder wins over a hub id of the same name, as in transformers. "demo" is the bundled model (adapter_names.py). Errors:
    CheckpointError; nothing is downloaded.
    """
    text = without_demo_name(model)
    if not text:
        raise CheckpointError("the name is empty", path=text, hint="Give a folder or a hub id")
    path = Path(text)
    if os.path.isdir(path):  # pathlib raises for a name that is too long
        is_cache = path.resolve().name.startswith("models--") and not (path / CONFIG).is_file()
        return _of_folder(_snapshot(path) if is_cache else path)
    if os.path.exists(path):
        if path.suffix.lower() == ".gguf":
            return companion.folder_of(path)
        raise CheckpointError("is a file; give the folder that holds it", path=path, hint=f"Give {path.parent}")
    check_reachable(path)
    if hint := address_hint(text, takes_hub_id=True):
        raise CheckpointError("is an address, not a folder", path=text, hint=hint)
    parts = text.split("/")
    if len(parts) > 2 and parts[-1].lower().endswith(".gguf") and all(_HUB_NAME.fullmatch(part) for part in parts):
        return companion.folder_of(_cached_gguf(text, parts))
    if len(parts) > 2 or not all(_HUB_NAME.fullmatch(part) for part in parts):
        raise _missing(text)
    cached = hub_cache() / "--".join(("models", *parts))
    if not os.path.isdir(cached) and path.suffix.lower() == ".gguf":
        raise _missing(text)
    if not os.path.isdir(cached):
        meant = path_hint(text, holds=CONFIG, deeper=1, also=(MODEL, *_cached_ids(cached.parent)), takes_hub_id=True)
        raise CheckpointError(
            f"is neither a folder nor in the local hub cache ({cached.parent}), and nothing is downloaded automatically",
            path=text, hint=f"{meant} Fetch it first with `trimtab pull {text}`, or give a folder".lstrip(),
        )  # fmt: skip
    return _of_folder(_snapshot(cached))


def _missing(text: str) -> CheckpointError:
    """Return the error of a path where nothing is."""
    what, holds = ("file", None) if text.lower().endswith(".gguf") else ("folder", CONFIG)
    return CheckpointError(f"no such {what}", path=text, hint=path_hint(text, holds=holds, deeper=1 if holds else 0))


def _cached_ids(cache: Path) -> list[str]:
    """Return the hub ids in a cache; none where it cannot be read."""
    with suppress(OSError):
        names = sorted(name for name in os.listdir(cache) if name.startswith("models--"))
        return [name.removeprefix("models--").replace("--", "/", 1) for name in names]
    return []


def _cached_gguf(text: str, parts: list[str]) -> Path:
    """Return the file of OWNER/NAME/FILE.gguf in the local hub cache. Errors: CheckpointError if it is not there."""
    cached = hub_cache() / "--".join(("models", *parts[:2]))
    file = _snapshot(cached).joinpath(*parts[2:]) if os.path.isdir(cached) else cached
    if not _is_file(file):
        raise CheckpointError(
            f"is neither a file nor in the local hub cache ({cached.parent}), and nothing is downloaded automatically", path=text,
            hint=f"Fetch it first with `trimtab pull {text}`, or give a file",
        )  # fmt: skip
    return file


def _of_folder(folder: Path) -> Path:
    """Return a folder, or the companion of the GGUF file that it holds instead of a checkpoint."""
    return _gguf_in(folder) or folder


def hub_cache() -> Path:
    """Return the hub's cache folder as huggingface_hub finds it.

    Source: huggingface_hub, constants.py (HF_HUB_CACHE, the older HUGGINGFACE_HUB_CACHE, HF_HOME, XDG_CACHE_HOME).
    """
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return _expanded(cache)
    if home := os.environ.get("HF_HOME"):
        return _expanded(home) / "hub"
    return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def _expanded(text: str) -> Path:
    return Path(os.path.expandvars(os.path.expanduser(text)))


def _snapshot(cached: Path) -> Path:
    """Return the snapshot that refs/main names, else the only snapshot."""
    main, snapshots = cached / "refs" / "main", cached / "snapshots"
    try:
        revisions = sorted(child.name for child in snapshots.iterdir() if child.is_dir()) if snapshots.is_dir() else []
        revision = main.read_text(encoding="utf-8").strip() if main.is_file() else None
    except (OSError, ValueError) as exc:
        raise CheckpointError(f"hub-cache folder cannot be read ({exc})", path=cached) from exc
    have = f"it has {', '.join(revisions) or 'none'}"
    if revision is not None:
        if revision not in revisions:
            raise CheckpointError(
                f"refs/main names the snapshot {revision!r}; {have}", path=cached,
                hint="Download it again, or give the folder of a snapshot",
            )  # fmt: skip
    elif len(revisions) == 1:
        revision = revisions[0]
    else:
        raise CheckpointError(
            f"has no refs/main to choose among {len(revisions)} snapshots; {have}", path=cached,
            hint="Give the folder of one snapshot" if revisions else "Download it again",
        )  # fmt: skip
    return snapshots / revision


# Which files ----------------------------------------------------------------------------------------------------------


# The weight files, the index that names them, if any, and its weight_map.
_WeightFiles = tuple[tuple[Path, ...], Path | None, Mapping[str, str]]


def _weight_files(folder: Path, config: Mapping[str, Any]) -> _WeightFiles:
    """Return the weight files, sorted, and the index that named them, if any."""
    named = config.get("transformers_weights")
    if named is not None:
        return _named_files(folder, named)
    if _is_file(folder / SINGLE):
        return (folder / SINGLE,), None, {}
    if _is_file(folder / INDEX):
        return _indexed(folder, folder / INDEX)
    _refuse_other_weights(folder)
    return (), None, {}


def _named_files(folder: Path, named: Any) -> _WeightFiles:
    source = folder / CONFIG
    if not isinstance(named, str) or not named.endswith((".safetensors", INDEX_SUFFIX)):
        raise CheckpointError(f"transformers_weights is {named!r}, not a safetensors file or index", path=source)
    file = _inside(folder, named, source)
    if not _is_file(file):
        raise CheckpointError(f"transformers_weights names {named}, which is missing", path=source)
    return _indexed(folder, file) if named.endswith(INDEX_SUFFIX) else ((file,), None, {})


def _is_file(file: Path) -> bool:
    """Return whether the file exists. Errors: CheckpointError for a broken link (an incomplete hub cache)."""
    if os.path.islink(file) and not os.path.exists(file):
        raise CheckpointError("is a broken link", path=file, hint="Copy or download the checkpoint again")
    return os.path.isfile(file)


def _inside(folder: Path, name: str, source: Path) -> Path:
    """Return folder / name for a plain relative name. Targets of links are not checked: hub caches consist of links. Errors:
    CheckpointError."""
    pure, windows = PurePosixPath(name), PureWindowsPath(name)
    if not pure.parts or pure.is_absolute() or windows.drive or "\\" in name or ".." in pure.parts or "\0" in name:
        raise CheckpointError(f"names a file outside its folder: {name!r}", path=source)
    return folder / pure


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_object(index, "index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError("has no weight_map of tensor names to file names", path=index)
    return weight_map


def _indexed(folder: Path, index: Path) -> _WeightFiles:
    weight_map = _weight_map(index)
    named = sorted(set(weight_map.values()))
    files = [_inside(folder, name, index) for name in named]
    missing = [name for name, file in zip(named, files, strict=True) if not os.path.isfile(file)]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(files)} shards are missing: {', '.join(missing)}", path=folder,
            hint="Copy or download them again",
        )  # fmt: skip
    return tuple(dict.fromkeys(files)), index, weight_map


def _read_tensors(files: tuple[Path, ...], most: int) -> dict[str, TensorEntry]:
    """Return the tensors of all files. most: the most tensors that a model of this config can have."""
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        tensors_of_file = read_header(file, most_tensors=most - len(tensors)).tensors
        twice = [name for name in tensors_of_file if name in tensors]
        if twice:
            raise CheckpointError(
                f"is in {tensors[twice[0]].file.name} as well" + _others(twice[1:]), path=file, tensor_name=twice[0]
            )
        tensors |= tensors_of_file
    return tensors


def _check_index(folder: Path, index: Path, weight_map: Mapping[str, str], tensors: Mapping[str, TensorEntry]) -> None:
    """Raise CheckpointError unless every tensor of the index is in the file it names; files may hold more."""
    lost = [
        f"{name} (in {file})" for name, file in weight_map.items()
        if name not in tensors or tensors[name].file != _inside(folder, file, index)
    ]  # fmt: skip
    if lost:
        raise CheckpointError(
            f"names tensors that are not in that file: {lost[0]}{_others(lost[1:])}", path=index,
            hint="Index and shards are of different checkpoints: copy or download them again",
        )  # fmt: skip


def _others(names: list[str]) -> str:
    if not names:
        return ""
    shown = ", ".join(names[:SHOWN_NAMES]) + (", ..." if len(names) > SHOWN_NAMES else "")
    return f" (and {len(names)} more: {shown})"


# Other files in the folder: checked only for an error message ---------------------------------------------------------


def _names(folder: Path) -> list[str]:
    try:
        return sorted(file.name for file in folder.iterdir())
    except OSError as exc:
        raise CheckpointError(f"cannot be read ({exc.strerror})", path=folder) from exc


def _refuse_without_config(folder: Path) -> NoReturn:
    if (folder / "adapter_config.json").is_file():
        raise CheckpointError(
            "is an adapter, not a model", path=folder, hint="Give its base model as the model, this folder as an adapter"
        )
    inside = path_hint(folder / CONFIG, holds=CONFIG, deeper=1, lists=True)
    hint = f"A checkpoint is a folder with {CONFIG} and safetensors files" + (inside and f". {inside}")
    raise CheckpointError(f"has no {CONFIG}", path=folder, hint=hint)


def _refuse_other_weights(folder: Path) -> None:
    """Raise CheckpointError if the folder has weights, but none that would be read."""
    names = _names(folder)
    pickles = [name for name in names if name.endswith(PICKLES) and not name.startswith(NOT_WEIGHTS)]
    if pickles:
        raise CheckpointError(
            f"holds its weights only as pickle ({pickles[0]}{_others(pickles[1:])}), which can run code when read",
            path=folder, hint="Convert it to safetensors in a place you trust, with transformers' save_pretrained",
        )  # fmt: skip
    other = [name for name in names if name.endswith((".safetensors", ".gguf"))]
    if other:
        raise CheckpointError(
            f"has {other[0]}{_others(other[1:])}, but neither {SINGLE} nor {INDEX}, which name the files that transformers reads",
            path=folder, hint="Copy or download the missing file; a GGUF file is given itself, an adapter together with its model",
        )  # fmt: skip
