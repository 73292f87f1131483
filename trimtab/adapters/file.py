"""What do the files of an adapter's folder hold, read strictly?"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from operator import attrgetter
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO

from trimtab.adapter_names import BASE, MODEL, NAMED, is_lora_file, without_demo_name
from trimtab.adapters.config import config_problems
from trimtab.checkpoint.folder import CONFIG, Stamp, stamp_of
from trimtab.checkpoint.headers import TensorEntry, read_header
from trimtab.checkpoint.unreadable import adapter_refusal, address_hint, as_typed, check_reachable, path_hint, reading
from trimtab.errors import AdapterError, CheckpointError
from trimtab.gguf.adapter import adapter_folder, made_for
from trimtab.printable import printable
from trimtab.process.json_file import JsonError, count, parse, read_bytes, read_json

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
def check_is_adapter(path: str | Path, *, model: str | Path = "") -> None:
    """Raise AdapterError for what is no folder that PEFT wrote. Nothing in it is read. model: adapters near it are proposed."""
    folder = peft_folder(path)
    if not folder.is_dir():
        check_reachable(folder)
        if folder.is_file():
            raise AdapterError(folder, ["is a file; name the folder that holds it"])
        if hint := address_hint(str(path), is_adapter=True):
            raise AdapterError(as_typed(path), ["is an address, not a folder"], hint=hint)
        raise AdapterError(str(path), ["no such folder"], hint=_meant(str(path), model))
    if gguf := _only_gguf(folder):
        raise AdapterError(folder, [f"has GGUF files and no adapter of PEFT ({gguf}); {GGUF_HINT}"])
    problems = _missing_files(folder)
    if problems:
        raise AdapterError(folder, problems, hint=f"The demo has {', '.join(list(NAMED)[1:])}" if folder == BASE else "")


def _meant(path: str, model: str | Path) -> str:
    """Return which adapters near a missing one, or near the model, may be meant, else how to find one."""
    of_demo = list(NAMED)[1:]
    hint = path_hint(path, holds=CONFIG_NAME, deeper=2, also=of_demo, lists=True)
    if "?" not in hint and (path.startswith(f"{MODEL}/") or without_demo_name(model) == str(BASE)):
        hint = f"The demo has {', '.join(of_demo)}"
    elif "?" not in hint and os.path.isdir(model):
        hint = path_hint(Path(model).parent / Path(path).name, holds=CONFIG_NAME, deeper=2, lists=True) or hint
    hint = hint or f"An adapter is a folder with {CONFIG_NAME}; `trimtab adapters DIR` lists those below a folder"
    return f"Adapters are given one by one. {hint}" if "," in path else hint


def for_peft(path: str | Path, config: Mapping[str, Any]) -> Path:
    """Return the folder of an adapter that PEFT loads on a model with this config. Errors: AdapterError for a LoRA in GGUF."""
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config
    heads = text.get("num_attention_heads")
    width = text.get("head_dim") or (text.get("hidden_size", 0) // heads if isinstance(heads, int) and heads else 0)
    return peft_folder(path, width if isinstance(width, int) else 0)


@reading(adapter_refusal)
def read_adapter(path: str | Path, *, values: bool = True, log_name: str | None = None, model: str | Path = "") -> AdapterFile:
    """Return configuration and header of the adapter in a folder.

    path: the folder, or a name of the demo's. values: also search its values for NaN and infinity; none is kept in memory.
    log_name: the name in the log of an adapter with unused weights in its folder (None: the caller logs `notes`). model: of
    the plan; adapters near it are proposed. Errors: AdapterError with every reason: missing or foreign files, other weights in the
    folder that change the output, bad JSON, another method than LoRA, configuration fields that change the output in a way not
    supported, tensors with values that are not finite. CheckpointError if the safetensors header is invalid.
    """
    given = Path(without_demo_name(path))
    stamps = stamps_of(given)
    folder = peft_folder(given)
    check_is_adapter(folder, model=model)
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


# Weights in other files of the folder ---------------------------------------------------------------------------------

# Extensions of files with tensors or other trained values.
WEIGHTS = re.compile(r".+\.(safetensors|bin|pt|pth|ckpt|pkl|npz|npy|distcp|h5|msgpack|pth\.tar)", re.IGNORECASE)
# With these extensions, a file of unknown name is more often data than weights.
DATA = re.compile(r".+\.(pkl|npz|npy)", re.IGNORECASE)
MOST_FILES = 100_000  # the most files of a folder that are checked
_SHOWN = 20

# Names (in lower case) that change nothing, and why.
HARMLESS: Mapping[str, str] = {
    r"adapter_model\.(safetensors|bin)": "the adapter itself; PEFT reads the .bin only where there is no .safetensors",
    r"adapter_model\.pt|adapter_\d+\.pt": "the same adapter in torchtune's form",
    r"ggml-adapter-model[\w.-]*\.bin": "the same adapter for llama.cpp",
    r"(optimizer|optim|(lr_)?scheduler|(grad_)?scaler|sampler|dl_state_dict|recipe_state)[\w.-]*":
        "resumes training (transformers, accelerate, torchtune)",
    r"(rng[_-]state|random_states|custom_checkpoint|training_state|trainer_state|dataloader|train_dataloader)[\w.-]*":
        "resumes training (transformers, accelerate)",
    r"\w+_args\.(bin|pt|pkl)|train_args\.\w+|args\.\w+|hparams\.\w+|config\.pt": "options of the training run",
    r".*(_optim_states|_model_states)\.pt|zero_\w+\.\w+": "resumes training (DeepSpeed)",
    r"pytorch_model_fsdp[\w.-]*": "resumes training (FSDP); the adapter was saved with it",
    r"latest[\w.-]*": "names the newest state (DeepSpeed)",
    r"tokenizer[\w.-]*\.bin|vocab\.\w+": "a tokenizer",
    r"openvino_\w+\.bin": "an export",
    r"(loss|losses|metrics|eval|results|predictions?|embeddings_cache|images?|samples?)[\w-]*\.(npy|npz|pt|pkl)":
        "numbers of an evaluation",
    r"imatrix[\w.-]*": "statistics for quantization",
}  # fmt: skip

# Weights that no answer of a language model uses: reported, not refused.
TOLD: Mapping[str, str] = {
    r"(value_head|v_head|vhead\w*)\.(safetensors|bin|pt)": "the value head of a reward model or of PPO, which no answer uses",
    r"(model|pytorch_model|consolidated)([.-]\d+([.-]of[.-]\d+)?)?\.(safetensors|bin|pth)":
        "a whole model, which is not part of the adapter; name the folder as the model to use it",
}  # fmt: skip

# Weights that change the output, and the part that they belong to.
KNOWN: Mapping[str, str] = {
    r"vit\.safetensors": "a vision tower and projector that ms-swift trained whole",
    r"(non_lora_trainables|non_lora_state_dict)\.\w+": "what LLaVA's and Qwen-VL's trainers trained in addition to LoRA",
    r"\w*(projector|aligner|connector|mlp1|resampler)[\w.-]*": "a trained projector",
    r"\w*(visual|vision|image|audio)[\w.-]*": "a trained tower",
    r"\w*embed(ding)?s?[\w.-]*": "trained rows of an embedding",
    r"\w*(lm_head|score|classifier)[\w.-]*": "a trained head",
    r"adapter_model[\w.-]+": "another part of the adapter, which PEFT does not read",
}
# Names of sub-folders whose weights are part of the same model; all others are ignored.
INNER: Mapping[str, str] = {
    r"\d+_(?!transformer$)\w+": "a module of sentence-transformers behind the model",
    r"vit|\w*(visual|vision|audio)\w*": "a trained tower",
    r"mm\w*|\w*(projector|aligner|connector|resampler)\w*": "a trained projector",
    r"(new_)?embeddings?|modules_to_save": "trained modules",
}


def _why(table: Mapping[str, str], name: str) -> str | None:
    return next((why for pattern, why in table.items() if re.fullmatch(pattern, name.lower())), None)


def _files(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        yield from islice(entries, MOST_FILES)


def weights_beside(folder: Path) -> tuple[list[str], list[str]]:
    """Return (problems, notes) about other weights in an adapter's folder: those that change the output, and those that
    do not.

    Errors: OSError. trimtab applies `adapter_model.safetensors` only; trainers write trained towers, projectors or embedding rows
    into other files. Files are judged by their names: none is opened, so no pickle is read.
    """
    problems: dict[str, str] = {}
    notes: dict[str, str] = {}
    for entry in _files(folder):
        name = entry.name
        if entry.is_dir():
            what = _why(INNER, name)
            inner = [] if what is None else [one.name for one in _files(entry.path) if WEIGHTS.fullmatch(one.name)]
            problems |= {f"{name}/{one}": what or "" for one in inner}
        elif WEIGHTS.fullmatch(name) and not _why(HARMLESS, name):
            told, known = _why(TOLD, name), _why(KNOWN, name)
            if told is None and known is None and DATA.fullmatch(name):
                told = "nothing is known of it"
            if told is not None:
                notes[name] = told
            else:
                problems[name] = known or "not known"
    words = [f"{name}: weights next to the adapter ({why})" for name, why in sorted(problems.items())]
    if len(words) > _SHOWN:
        words = [*words[:_SHOWN], f"{len(words) - _SHOWN} more files with weights"]
    if words:
        words[-1] += (
            ". trimtab applies adapter_model.safetensors alone: put the weights into the base's files and name that folder as the "
            "model, or train with modules_to_save. Move the file away if it is not part of the adapter"
        )
    return words, [f"{name} is not used: {why}" for name, why in sorted(notes.items())]


# Values that are not finite -------------------------------------------------------------------------------------------


def _marks(is_marked: Callable[[int], bool]) -> bytes:
    """Return a table for `bytes.translate`: 1 for the bytes that are marked, 0 for all others."""
    return bytes(int(is_marked(byte)) for byte in range(256))


_SEVEN = _marks(lambda byte: byte & 0x7F == 0x7F)
_FIVE = _marks(lambda byte: byte & 0x7C == 0x7C)
# dtype -> (bytes of a value, tables for its highest byte and those below: a value marked in all of them is not finite).
_EXPONENTS: Mapping[str, tuple[int, tuple[bytes, ...]]] = {
    "float64": (8, (_SEVEN, _marks(lambda byte: byte >= 0xF0))), "float32": (4, (_SEVEN, _marks(lambda byte: byte >= 0x80))),
    "bfloat16": (2, (_SEVEN, _marks(lambda byte: byte >= 0x80))), "float16": (2, (_FIVE,)),
    "float8_e5m2": (1, (_FIVE,)), "float8_e4m3fn": (1, (_SEVEN,)),
}  # fmt: skip
# The bytes that a table marks: a search for each of them is several times as fast as `translate`.
_MARKED = {table: tuple(bytes([byte]) for byte in range(256) if table[byte]) for table in (_SEVEN, _FIVE)}
_PIECE_BYTES = 256 * 2**10  # the search holds the GIL, which other threads need for their steps


def value_problems(tensors: Mapping[str, TensorEntry]) -> tuple[str, ...]:
    """Return a line for each tensor with values that are not finite. tensors: name -> entry. Errors: OSError. A value is not finite
    if all bits of its exponent are set; these are in its one or two highest bytes."""
    problems = []
    with ExitStack() as stack:
        files: dict[Path, BinaryIO] = {}  # opening a file takes longer than reading one of its tensors

        def count_of(entry: TensorEntry) -> int:
            if entry.file not in files:
                files[entry.file] = stack.enter_context(open(entry.file, "rb"))
            return _not_finite(files[entry.file], entry)

        if not any(count_of(run) for run in _runs(tensors.values())):
            return ()
        for name, entry in tensors.items():
            count = count_of(entry) if entry.dtype in _EXPONENTS else 0
            if count:
                values = entry.nbytes // _EXPONENTS[entry.dtype][0]
                problems.append(f"{name}: {count} of {values} values are NaN or infinite")
    return tuple(problems)


def _runs(entries: Iterable[TensorEntry]) -> Iterator[TensorEntry]:
    """Join tensors of one type that are adjacent in a file. Only types that can hold values which are not finite."""
    ends: dict[tuple[Path, str, int], tuple[TensorEntry, int]] = {}  # of each run: its first tensor and its bytes
    for entry in sorted(entries, key=attrgetter("start", "nbytes")):
        if entry.dtype in _EXPONENTS:
            first, nbytes = ends.pop((entry.file, entry.dtype, entry.start), (entry, 0))
            ends[entry.file, entry.dtype, entry.start + entry.nbytes] = first, nbytes + entry.nbytes
    return (replace(first, nbytes=nbytes) for first, nbytes in ends.values())


def _not_finite(file: BinaryIO, entry: TensorEntry) -> int:
    """Return how many values of a tensor are NaN or infinite."""
    width, tables = _EXPONENTS[entry.dtype]
    count, left = 0, entry.nbytes
    file.seek(entry.start)
    while left:
        data = file.read(min(_PIECE_BYTES, left))
        if not data:
            break
        left -= len(data)
        highest = data if width == 1 else data[width - 1 :: width]
        if not any(byte in highest for byte in _MARKED[tables[0]]):  # the usual case: no value is that large
            continue
        both = int.from_bytes(highest.translate(tables[0]), "little")
        for place, table in enumerate(tables[1:], 2):
            both &= int.from_bytes(data[width - place :: width].translate(table), "little")
        count += both.bit_count()
    return count


TOKENIZER, KIND = "tokenizer.json", "tokenizer"
# Largest share of common ids that may have another text.
MOST_OTHER = 0.1


def check_vocabulary(adapter: str | Path, model: str | Path) -> None:
    """Raise AdapterError if both folders have a tokenizer.json and the same ids have different texts.

    adapter, model: folders. A missing file, or one without a vocabulary, proves nothing. Errors also: CheckpointError for a file
    over the limits of `json_file.py`. An adapter's tokenizer may have more tokens than the model's, and other texts for reserved
    ones; that of another model gives nearly every id another text.
    """
    ours, theirs = Path(model) / TOKENIZER, Path(adapter) / TOKENIZER
    stamps = _stamp(ours), _stamp(theirs)
    if None in stamps:
        return
    if problem := _problem(ours, theirs, stamps):
        raise AdapterError(
            adapter, [problem], hint="The adapter was trained with another model's tokenizer, or the model's was replaced"
        )


def _stamp(file: Path) -> tuple[int, ...] | None:
    """Return a stamp that identifies a file in its present state; None if it is no file."""
    try:
        stat = file.stat()
    except OSError:
        return None
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) if S_ISREG(stat.st_mode) else None


@lru_cache(1024)  # a plan and the load after it both check each adapter; a large vocabulary takes a second to read
def _problem(ours: Path, theirs: Path, stamps: tuple[object, ...]) -> str:
    """Return why an adapter's tokenizer does not match the model's, "" if it does. stamps: of both files."""
    raw = [_raw(file) for file in (ours, theirs)]
    if raw[0] == raw[1]:
        return ""
    first, second = _texts(ours, raw[0]), _texts(theirs, raw[1])
    both = first.keys() & second.keys()
    other = [number for number in both if first[number] != second[number]]
    if not both or len(other) <= MOST_OTHER * len(both):
        return ""
    one = min(other)
    return (
        f"{TOKENIZER}: {len(other)} of {len(both)} token ids have other texts than in the model's tokenizer (id {one}: "
        f"{second[one]!r} here, {first[one]!r} there)"
    )


def _raw(path: Path) -> bytes:
    try:
        return read_bytes(path, KIND)
    except OSError:  # loading the tokenizer reports that
        return b""
    except JsonError as exc:
        raise CheckpointError(str(exc), path=path) from exc


def _texts(path: Path, raw: bytes) -> dict[int, str]:
    """Return id -> text of a tokenizer.json's vocabulary, empty without one: loading the tokenizer reports that."""
    try:
        count(raw, KIND)
    except JsonError as exc:
        raise CheckpointError(str(exc), path=path) from exc
    try:
        known = parse(raw, KIND)["model"]["vocab"]
        if isinstance(known, list):  # Unigram: [text, score] by id
            return {number: str(pair[0]) for number, pair in enumerate(known)}
        return {int(number): str(text) for text, number in known.items()}
    except (ValueError, OverflowError, KeyError, TypeError, IndexError, AttributeError):
        return {}
