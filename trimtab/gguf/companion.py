"""A GGUF file as a checkpoint's folder: config, tokenizer and small tensors of the file, in the user's cache.

The folder of a file has config.json, tokenizer files made by transformers, the vectors of the model as the converter found them
(`small.safetensors`), and `gguf.json` with the places of the other tensors. Weights stay in the GGUF file. A folder belongs to the
files' names, sizes and times.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from trimtab.errors import CheckpointError
from trimtab.gguf.architectures import Mapped, Order, config_of, tensors_of
from trimtab.gguf.header import SPLIT, GgufHeader, GgufTensor, read_gguf, refuse
from trimtab.process.user_cache import hashed, own_folder

FOLDER, TABLE, SMALL = "gguf", "gguf.json", "small.safetensors"
FORM = 3
PREFIX = "trimtab-gguf-"
KEPT_S = 30 * 24 * 3600.0
# What one file of vectors may hold: Qwen3.5's largest model has 20 MiB.
MOST_SMALL_BYTES = 512 * 2**20
MATRIX_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Ends of a turn that a vocabulary may have in addition to its own. Source: llama.cpp, llama-vocab.cpp (special_eog_ids).
ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|endoftext|>", "<|eom_id|>", "<|tool_response>")


def folder_of(path: Path) -> Path:
    """Return the checkpoint folder of a GGUF file, made if it is missing. Errors: CheckpointError for a file that is not read."""
    file = path.absolute()
    # Its last name is the file's, for messages.
    key = key_of(_siblings(file))
    folder = home_of() / key / file.name
    if not (folder / TABLE).is_file():
        _make(read_gguf(file), folder, key)
    with suppress(OSError):
        os.utime(folder.parent)
    return folder


def key_of(files: list[Path]) -> str:
    """Return the name of the folder of files, as they are now."""
    return hashed(json.dumps([FORM, [(str(one), *_stamp(one)) for one in files], _transformers()]))


def _siblings(file: Path) -> list[Path]:
    """Return the files of a set by their names, the file itself where it is in none."""
    named = SPLIT.fullmatch(file.name)
    if named is None:
        return [file]
    found = [(other, SPLIT.fullmatch(other)) for other in sorted(os.listdir(file.parent))]
    return [file.parent / other for other, parts in found if parts and parts[1] == named[1] and parts[3] == named[3]]


def is_made_here(folder: Path) -> bool:
    """Return whether a folder is one that `folder_of` made: no other folder can name files elsewhere."""
    home = folder.absolute().parent.parent
    if ".." in folder.parts:
        return False
    return home == home_of() or (home.name.startswith(PREFIX) and home.parent == Path(tempfile.gettempdir()) and _is_own(home))


def _is_own(home: Path) -> bool:
    """Whether a folder is this user's own, and no link: another user can make one of any name in the temporary folder."""
    try:
        found = home.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and (not hasattr(os, "getuid") or found.st_uid == os.getuid())


def is_model_file(file: Path) -> bool:
    """Return whether a file is a model by its name: GGUF, no towers (mmproj), and the first of a set."""
    named = SPLIT.fullmatch(file.name)
    is_first = named is None or int(named[2]) == 1
    return is_first and file.suffix.lower() == ".gguf" and not file.name.lower().startswith("mmproj")


@cache
def home_of() -> Path:
    """Return the folder of all companions: in the user's cache, else one of this process."""
    with suppress(OSError):
        return own_folder(FOLDER)
    home = Path(tempfile.mkdtemp(prefix=PREFIX))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return home


def _transformers() -> str:
    from importlib.metadata import version

    return version("transformers")


def _make(header: GgufHeader, folder: Path, key: str) -> None:
    config = config_of(header)
    mapped = tensors_of(header, config)
    _check_types(header, mapped)
    config |= _token_ids(header)
    _prune(folder.parent.parent)
    folder.parent.mkdir(exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    try:
        (made / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        small = [one for one in mapped if _is_small(one)]
        _write_small(header, small, made / SMALL)
        _write_tokenizer(header, made)
        files = [[str(file), *_stamp(file)] for file in header.files]
        tensors = {one.tensor_name: _row(header, one) for one in mapped if not _is_small(one)}
        (made / TABLE).write_text(json.dumps({"files": files, "tensors": tensors}), encoding="utf-8")
        if key_of(_siblings(header.files[0])) != key:  # the stamps above would name offsets of the earlier file
            refuse(header.files[0], "changed while it was read", hint="Try again when the file is complete")
        with suppress(OSError):  # another process made it first
            made.replace(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    if not (folder / TABLE).is_file():
        raise CheckpointError("the folder for its config and tokenizer cannot be written", path=folder)


def _prune(home: Path) -> None:
    """Remove the folders that were not used for a month."""
    with suppress(OSError):
        for entry in os.scandir(home):
            if entry.stat(follow_symlinks=False).st_mtime < time.time() - KEPT_S:
                shutil.rmtree(entry.path, ignore_errors=True)


def _stamp(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns


def _row(header: GgufHeader, one: Mapped) -> list[Any]:
    tensor = one.source
    place = header.files.index(tensor.file)
    return [tensor.type_name, tensor.shape, place, tensor.start, tensor.nbytes, one.rows, one.columns]


def _check_types(header: GgufHeader, mapped: list[Mapped]) -> None:
    wrong = [
        one.source for one in mapped
        if one.source.type_name not in (_DTYPES if _is_small(one) else MATRIX_TYPES) or len(one.source.shape) > 2
    ]  # fmt: skip
    if wrong:
        kinds = ", ".join(sorted({tensor.type_name for tensor in wrong}))
        shown = ", ".join(tensor.name for tensor in wrong[:3])
        refuse(
            header.files[0], f"has {len(wrong)} tensors of types that are not read ({kinds}): {shown}",
            hint=f"{', '.join(MATRIX_TYPES)} are read: use such a file of the same model, as Q4_K_M or Q8_0",
        )  # fmt: skip


# Small tensors --------------------------------------------------------------------------------------------------------


def _is_small(one: Mapped) -> bool:
    """Whether a tensor is no matrix that is multiplied or looked up: it stands in the folder as the model has it."""
    return len(one.source.shape) == 1 or bool(one.change)


def _write_small(header: GgufHeader, small: list[Mapped], target: Path) -> None:
    if sum(one.source.nbytes for one in small) > MOST_SMALL_BYTES:
        refuse(header.files[0], f"has vectors of more than {MOST_SMALL_BYTES} B", hint="The file is damaged")
    import torch
    from safetensors.torch import save_file

    changes: dict[str, Callable[[Any], Any]] = {
        "": lambda value: value, "minus_one": lambda value: value.float() - 1, "unsqueeze": lambda value: value.unsqueeze(1),
        "log_negate": lambda value: torch.log(-value.float()),
    }  # fmt: skip
    tensors = {}
    for one in small:
        value = torch.frombuffer(bytearray(_bytes(one.source)), dtype=getattr(torch, _DTYPES[one.source.type_name]))
        value = value.view(one.source.shape)
        tensors[one.tensor_name] = changes[one.change](value if one.rows is None else _in_order(value, one.rows)).contiguous()
    save_file(tensors, target, {"format": "pt"})


def _bytes(tensor: GgufTensor) -> bytes:
    with open(tensor.file, "rb") as file:
        file.seek(tensor.start)
        found = file.read(tensor.nbytes)
    if len(found) != tensor.nbytes:
        refuse(tensor.file, "changed while it was read", tensor.name)
    return found


def _in_order(value: Any, order: Order) -> Any:
    """Return a tensor with its rows in the model's order."""
    offset, *sides = order
    whole, rest = value.clone(), value[offset:]
    whole[offset:] = rest.reshape(*sides, *rest.shape[1:]).transpose(1, 2).reshape(rest.shape)
    return whole


# The tokenizer --------------------------------------------------------------------------------------------------------


def _token_ids(header: GgufHeader) -> dict[str, Any]:
    """Return the ids of config.json: the file's own, and every end of a turn that its vocabulary has."""
    own = {name: header.keys.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding", "eot", "eom")}
    tokens, types = (header.keys.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if isinstance(tokens, list) and isinstance(types, list) and len(types) == len(tokens):
        # 3 and 4: control tokens, and those that a user defined.
        found = [place for place, text in enumerate(tokens) if types[place] in (3, 4) and text in ENDS]
    else:
        found = []
    ends = list(dict.fromkeys(one for one in (own["eos"], own["eot"], own["eom"], *found) if isinstance(one, int)))
    return {"bos_token_id": own["bos"], "pad_token_id": own["padding"], "eos_token_id": ends[0] if len(ends) == 1 else ends or None}


def _write_tokenizer(header: GgufHeader, folder: Path) -> None:
    """Write the tokenizer's files as transformers makes them of the keys; none for a file without a vocabulary."""
    kind = header.keys.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return
    file = header.files[0]
    try:
        import transformers
        from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping
    except ImportError as exc:
        raise CheckpointError(
            "has a tokenizer that the installed transformers cannot make", path=file,
            hint="Install transformers 5.23 or later",
        ) from exc  # fmt: skip
    split = header.keys.get("tokenizer.ggml.pre")
    if kind == "gpt2" and split not in (None, "gpt-2", *mapping.GGUF_PRE_TOKENIZER_SPLITS):
        refuse(
            file, f"its tokenizer cuts words as {split!r:.40}, which transformers {transformers.__version__} does not know",
            hint="Use the safetensors files that this file was made from",
        )  # fmt: skip
    try:
        # The file stands alone: transformers prefers a tokenizer.json in its folder, which may be of another model.
        with tempfile.TemporaryDirectory(prefix=".alone-", dir=folder.parent) as alone:
            _link(file, Path(alone) / file.name)
            tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(alone, gguf_file=file.name, local_files_only=True)
            tokenizer.save_pretrained(folder)
    except Exception as exc:  # tokenizers raises bare Exceptions
        words = " ".join(str(exc).split())[:200]
        raise CheckpointError(f"transformers cannot make its tokenizer ({type(exc).__name__}: {words})", path=file) from exc


def _link(file: Path, name: Path) -> None:
    """Give a file a second name: a link where the system permits one, else a copy."""
    for link in (os.symlink, os.link):
        with suppress(OSError, NotImplementedError):
            link(file, name)
            return
    shutil.copyfile(file, name)
