"""How does a GGUF file become a checkpoint's folder: config, tokenizer and small tensors?"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from trimtab.errors import CheckpointError
from trimtab.gguf.architectures import HINT, TOKEN_IDS, Mapped, config_of, in_order, tensors_of
from trimtab.gguf.folders import folder_for, stamp
from trimtab.gguf.header import SPLIT, GgufHeader, GgufTensor, file_kind, read_bytes, read_gguf, refuse
from trimtab.gguf.towers import QWEN3VL, gemma4_vision, projector_of, qwen3vl_config, qwen3vl_vision
from trimtab.process.json_file import FOREIGN_FILES, check_files, read_object

SMALL = "small.safetensors"
# The share of a tokenizer's texts that may differ from the file's: words that a converter renames.
MOST_OTHER = 0.01
# What one file of vectors may hold: Qwen3.5's largest model has 20 MiB.
MOST_SMALL_BYTES = 512 * 2**20
MATRIX_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Ends of a turn that a vocabulary may have in addition to its own. Source: llama.cpp, llama-vocab.cpp (special_eog_ids).
ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>", "<|endoftext|>",
    "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>",
    "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
)  # fmt: skip
# Where a vocabulary has one of each of a pair, <|end|> ends a part of an answer. Source: the same.
_PARTS_END = (({"<|return|>"}, {"<|call|>", "<|calls|>"}), ({"<|flush|>"}, {"<|call|>", "<|calls|>"}))
# Cuts of words (tokenizer.ggml.pre) whose vocabularies have whole words that no merges make, and whose texts begin with a token
# unless tokenizer.ggml.add_bos_token says otherwise. Source: llama.cpp, llama-vocab.cpp (ignore_merges, add_bos).
WHOLE_WORDS = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken"
)  # fmt: skip
# Types of tokens in a vocabulary: control tokens, and those that a user defined.
_CONTROL, _DEFINED = 3, 4


def folder_of(path: Path) -> Path:
    """Return the checkpoint folder of a GGUF file, made if it is missing. Errors: CheckpointError for a file that is not read."""
    file = path.absolute()
    return folder_for(file, lambda made: _write(read_gguf(file), made))


def folder_with_towers(folder: Path, model: Path, projector: Path) -> Path:
    """Return the checkpoint folder of a GGUF model with its projector file (mmproj); both are in a folder. That of Gemma 4 has
    config.json and the processor's files of the original. Errors: CheckpointError for files that do not fit each other."""
    check_files(folder)
    beside = [folder / name for name in ("config.json", *FOREIGN_FILES) if (folder / name).is_file()]
    more = [(str(one), *stamp(one)) for one in (projector, *beside)]
    return folder_for(model, lambda made: _write_towers(read_gguf(model), read_gguf(projector), beside, made), more)


def is_whole(projector: Path) -> bool:
    """Return whether a projector file and its model's file need no config.json. Errors: CheckpointError for a damaged file."""
    header = read_gguf(projector)
    return QWEN3VL in (header.keys.get("clip.vision.projector_type"), header.keys.get("clip.projector_type"))


def is_model_file(file: Path) -> bool:
    """Return whether a file is a model: GGUF, the first of a set, and no towers (mmproj) or LoRA by its name or its header."""
    named = SPLIT.fullmatch(file.name)
    is_first = named is None or int(named[2]) == 1
    if not is_first or file.suffix.lower() != ".gguf" or file.name.lower().startswith("mmproj"):
        return False
    return not file.is_file() or file_kind(file) == "model"


def _write(header: GgufHeader, made: Path) -> dict[str, Any]:
    """Fill a new folder, and return its table."""
    config = config_of(header)
    mapped = tensors_of(header, config)
    (made / "config.json").write_text(json.dumps(config | _token_ids(header), indent=1), encoding="utf-8")
    _write_tokenizer(header, made)
    return _write_tensors(header, header.files, mapped, made)


def _write_towers(header: GgufHeader, projector: GgufHeader, beside: list[Path], made: Path) -> dict[str, Any]:
    """Fill a new folder of a model with a vision tower, and return its table."""
    own, kind = config_of(header), projector_of(projector)
    if kind == QWEN3VL:
        config, vision = _write_qwen3vl(header, projector, own, beside, made)
    else:
        config, vision = _write_gemma4(header, projector, own, beside, made)
    (made / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    if kind == QWEN3VL:
        _write_tokenizer(header, made)
    names = [
        replace(one, tensor_name=one.tensor_name.replace("model.", "model.language_model.", 1)) for one in tensors_of(header, own)
    ]
    table = _write_tensors(header, header.files + projector.files, names + vision, made)
    return table | {"beside": [str(one) for one in beside]}


def _write_gemma4(
    header: GgufHeader, projector: GgufHeader, own: dict[str, Any], beside: list[Path], made: Path
) -> tuple[dict[str, Any], list[Mapped]]:
    """Copy the other files of the folder, and return (config.json, the tower's tensors)."""
    config = read_object(projector.files[0].parent / "config.json", "config.json")
    kind, text, vision = (config.get(name) for name in ("model_type", "text_config", "vision_config"))
    if kind != "gemma4" or own["model_type"] != "gemma4_text" or not isinstance(text, dict) or not isinstance(vision, dict):
        refuse(
            projector.files[0], f"is with config.json of {kind!r:.40} and a model of {own['model_type']}; that of Gemma 4 is read",
            hint="Use the safetensors files of the model for images",
        )  # fmt: skip
    _check_same(header.files[0], config, {"text_config": own})
    for one in beside:
        shutil.copyfile(one, made / one.name)
    if (made / "tokenizer.json").is_file():
        _check_words(header, read_object(made / "tokenizer.json", "tokenizer"))
    config |= {"audio_config": None, "quantization_config": own["quantization_config"]}  # audio towers are not read
    return config, gemma4_vision(projector, vision)


def _write_qwen3vl(
    header: GgufHeader, projector: GgufHeader, own: dict[str, Any], beside: list[Path], made: Path
) -> tuple[dict[str, Any], list[Mapped]]:
    """Write the processor of the files, and return (config.json, the tower's tensors)."""
    if header.architecture != "qwen3vl":
        refuse(
            projector.files[0], f"is with a model of the architecture {header.architecture!r:.40}, qwen3vl is read with it",
            hint="Use the safetensors files of the model for images",
        )  # fmt: skip
    config, processor = qwen3vl_config(header, projector, own)
    vision = qwen3vl_vision(projector, config["vision_config"])
    given = {one.name: read_object(one, FOREIGN_FILES[one.name]) for one in beside if one.name in ("config.json", *_PROCESSORS)}
    # A config.json has positions in one of two spellings; those of the GGUF file are used.
    _check_same(header.files[0], given.get("config.json", {}), config, (*_OTHER_FIELDS, "rope_parameters"))
    whole = given.get("processor_config.json", {})
    for part, name in zip(("image_processor", "video_processor"), _PROCESSORS, strict=False):
        settings = whole.get(part) or given.get(name) or {}
        _check_same(projector.files[0], {part: settings}, {part: processor[part]}, ("size", f"{part}_type"))
        processor[part] |= {name: value for name, value in settings.items() if name != f"{part}_type"}
    (made / "processor_config.json").write_text(json.dumps(processor, indent=1), encoding="utf-8")
    return config | _token_ids(header), vision


# Files of the original that say how images and videos are cut.
_PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
# Fields of a part of config.json that may differ from the file's.
_OTHER_FIELDS = ("model_type", "architectures", "dtype", "quantization_config", "tie_word_embeddings")


def _check_same(file: Path, given: Mapping[str, Any], made: Mapping[str, Any], but: tuple[str, ...] = _OTHER_FIELDS) -> None:
    """Refuse settings in a file's folder whose parts have other values than the file. but: fields that may differ."""
    for part, own in made.items():
        theirs = given.get(part)
        if not isinstance(own, dict) or theirs is None:
            continue
        if not isinstance(theirs, dict):
            refuse(file, f"does not fit the files next to it: {part} is no object", hint="Get the files of the same model")
        same = theirs.keys() & own.keys() - set(but)
        if own.get("hidden_size_per_layer_input") == 0:
            same -= {"vocab_size_per_layer_input"}
        wrong = [
            f"{name} {theirs[name]!r:.60} ({own[name]!r:.60})" for name in sorted(same) if not _is_same(theirs[name], own[name])
        ]
        if wrong:
            refuse(file, f"does not fit config.json next to it: {', '.join(wrong[:5])}", hint="Get config.json of the same model")


def _is_same(theirs: object, own: object) -> bool:
    """Return whether two settings are equal; the file's numbers are rounded to float32."""
    if isinstance(theirs, list) and isinstance(own, list):
        return len(theirs) == len(own) and all(map(_is_same, theirs, own))
    if isinstance(theirs, float) and isinstance(own, float):
        return math.isclose(theirs, own, rel_tol=2**-24)
    return theirs == own


def _check_words(header: GgufHeader, tokenizer: Mapping[str, Any]) -> None:
    """Refuse a tokenizer.json in the file's folder that is of another model."""
    tokens, model = header.keys.get("tokenizer.ggml.tokens") or [], tokenizer.get("model")
    words = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(words, dict) and isinstance(tokens, list):
        other = sum(not isinstance(place, int) or tokens[place : place + 1] != [text] for text, place in words.items())
        if other > MOST_OTHER * len(words):
            refuse(header.files[0], f"{other} of {len(words)} tokens are others than in tokenizer.json next to it")


def _write_tensors(header: GgufHeader, files: tuple[Path, ...], mapped: list[Mapped], made: Path) -> dict[str, Any]:
    """Write the small tensors, and return the table of the others."""
    _check_types(header, mapped)
    _write_small(header, [one for one in mapped if _is_small(one)], made / SMALL)
    rows = {one.tensor_name: _row(files, one) for one in mapped if not _is_small(one)}
    return {"files": [[str(file), *stamp(file)] for file in files], "tensors": rows}


def _row(files: tuple[Path, ...], one: Mapped) -> list[Any]:
    tensor = one.source
    place = files.index(tensor.file)
    return [tensor.type_name, tensor.shape, place, tensor.start, tensor.nbytes, one.rows, one.columns]


def _check_types(header: GgufHeader, mapped: list[Mapped]) -> None:
    wrong = [
        source for one in mapped for source in one.sources
        if source.type_name not in (_DTYPES if _is_small(one) else MATRIX_TYPES) or len(source.shape) > (4 if one.change else 2)
    ]  # fmt: skip
    if wrong:
        kinds = ", ".join(sorted({tensor.type_name for tensor in wrong}))
        shown = ", ".join(tensor.name for tensor in wrong[:3])
        refuse(
            wrong[0].file, f"has {len(wrong)} tensors of types that are not read ({kinds}): {shown}",
            hint=f"{', '.join(MATRIX_TYPES)} are read: use such a file of the same model, as Q4_K_M or Q8_0",
        )  # fmt: skip


# Small tensors --------------------------------------------------------------------------------------------------------


def _is_small(one: Mapped) -> bool:
    """Whether a tensor is no matrix that is multiplied or looked up: it stands in the folder as the model has it."""
    return len(one.source.shape) == 1 or bool(one.change)


def _write_small(header: GgufHeader, small: list[Mapped], target: Path) -> None:
    if (count := sum(source.nbytes for one in small for source in one.sources)) > MOST_SMALL_BYTES:
        refuse(header.files[0], f"its vectors have {count} B, at most {MOST_SMALL_BYTES} are read", hint="The file is damaged")
    import torch
    from safetensors.torch import save

    def values_of(source: GgufTensor) -> Any:
        return torch.frombuffer(bytearray(read_bytes(source)), dtype=getattr(torch, _DTYPES[source.type_name])).view(source.shape)

    changes: dict[str, Callable[[Any], Any]] = {
        "": lambda value: value, "minus_one": lambda value: value.float() - 1, "unsqueeze": lambda value: value.unsqueeze(1),
        "log_negate": lambda value: torch.log(-value.float()), "whole": lambda value: value, "frames": lambda value: value,
        "scalar": lambda value: value.reshape(()), "row": lambda value: value.reshape(1, -1),
        "patches": lambda value: value.permute(0, 2, 3, 1).flatten(1),
    }  # fmt: skip
    tensors = {}
    for one in small:
        value = values_of(one.source)
        if one.second is not None:  # the frames of a patch: [D, 3, P, P] of each
            value = torch.stack((value, values_of(one.second)), dim=2)
        try:
            value = changes[one.change](value if one.rows is None else in_order(value, one.rows)).contiguous()
        except RuntimeError as exc:  # sides that the change does not take
            shape = list(one.source.shape)
            raise CheckpointError(f"has the shape {shape}", path=one.source.file, tensor_name=one.source.name) from exc
        if not bool(torch.isfinite(value).all()):
            said = "has values that are not below 0" if one.change == "log_negate" else "has values that are not finite"
            refuse(one.source.file, said, one.source.name, "The file is damaged: copy or download it again")
        tensors[one.tensor_name] = value
    target.write_bytes(save(tensors, {"format": "pt"}))


# The tokenizer --------------------------------------------------------------------------------------------------------


def _token_ids(header: GgufHeader) -> dict[str, Any]:
    """Return the ids of config.json: the file's own, and every end of a turn that its vocabulary has."""
    own = {name: header.keys.get(f"tokenizer.ggml.{name}_token_id") for name in TOKEN_IDS}
    texts = {place: text for place, text in _marked(header).items() if text in ENDS}
    if any(all(not one.isdisjoint(texts.values()) for one in pair) for pair in _PARTS_END):
        texts = {place: text for place, text in texts.items() if text != "<|end|>"}
    ends = list(dict.fromkeys(one for one in (own["eos"], own["eot"], own["eom"], *texts) if isinstance(one, int)))
    return {"bos_token_id": own["bos"], "pad_token_id": own["padding"], "eos_token_id": ends[0] if len(ends) == 1 else ends or None}


def _marked(header: GgufHeader) -> dict[int, str]:
    """Return the texts of control tokens, of those that a user defined, and of those that keys name, by their ids."""
    tokens, types = (header.keys.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    named = [header.keys.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding", "unknown")]
    kinds = types if isinstance(types, list) else []
    texts = enumerate(tokens if isinstance(tokens, list) else [])
    return {place: str(text) for place, text in texts if kinds[place : place + 1] in ([_CONTROL], [_DEFINED]) or place in named}


def _write_tokenizer(header: GgufHeader, folder: Path) -> None:
    """Write the tokenizer's files as transformers makes them of the keys, corrected; none for a file without a vocabulary. The
    folder has config.json, which transformers chooses the tokenizer's class by."""
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
    if kind == "gpt2" and split not in ("gpt-2", *mapping.GGUF_PRE_TOKENIZER_SPLITS):
        known = f"its tokenizer cuts words as {split!r:.40}, which transformers {transformers.__version__} does not know"
        refuse(file, known if split else "does not say how its tokenizer cuts words (tokenizer.ggml.pre)", hint=HINT)
    try:
        # The file stands alone: transformers prefers a tokenizer.json in its folder, which may be of another model.
        with tempfile.TemporaryDirectory(prefix=".alone-", dir=folder.parent) as alone:
            _link(file, Path(alone) / file.name)
            tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(alone, gguf_file=file.name, local_files_only=True)
        tokenizer = _corrected(tokenizer, header, mapping)
        tokenizer.save_pretrained(folder)
        read = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        is_same = _ways(read) == _ways(tokenizer)
        ids = read.convert_tokens_to_ids(list((marked := _marked(header)).values()))
    except Exception as exc:  # tokenizers raises bare Exceptions
        words = " ".join(str(exc).split())[:200]
        raise CheckpointError(f"transformers cannot make its tokenizer ({type(exc).__name__}: {words})", path=file) from exc
    if not is_same:
        name = type(read).__name__
        refuse(file, f"its tokenizer cuts words as {split!r:.40}, and transformers makes {name} of the architecture", hint=HINT)
    if wrong := [f"{text!r:.40} ({place})" for (place, text), found in zip(marked.items(), ids, strict=True) if found != place]:
        refuse(file, f"{len(wrong)} of its control tokens get other ids from transformers: {', '.join(wrong[:5])}", hint=HINT)


def _corrected(tokenizer: Any, header: GgufHeader, mapping: Any) -> Any:
    """Return a tokenizer of transformers' reader with what the reader does not do as the keys say. mapping: the reader's module."""
    from tokenizers import Tokenizer

    keys, made = header.keys, json.loads(tokenizer.backend_tokenizer.to_str())
    kind, split, splits = keys["tokenizer.ggml.model"], keys.get("tokenizer.ggml.pre"), mapping.GGUF_PRE_TOKENIZER_SPLITS
    if kind == "gpt2":
        made["model"]["ignore_merges"] = split in WHOLE_WORDS
        _name_marked(made, header, mapping.bytes_to_unicode())
        if header.architecture.startswith("qwen") and splits.get(split) in (splits["qwen2"], splits["qwen35"]):
            made["normalizer"] = {"type": "NFC"}  # as Qwen2Tokenizer and Qwen3_5Tokenizer
    elif kind == "llama" and keys.get("tokenizer.ggml.add_space_prefix") is False:
        made["pre_tokenizer"]["prepend_scheme"] = "never"
        made["decoder"]["decoders"] = [one for one in made["decoder"]["decoders"] if one["type"] != "Strip"]
    begins = kind == "gpt2" and split in WHOLE_WORDS and "tokenizer.ggml.add_bos_token" not in keys
    named = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "unk_token", "pad_token", "chat_template")}
    return type(tokenizer)(
        tokenizer_object=Tokenizer.from_str(json.dumps(made)), add_bos_token=begins or tokenizer.add_bos_token,
        add_eos_token=tokenizer.add_eos_token, **named,
    )  # fmt: skip


def _name_marked(made: dict[str, Any], header: GgufHeader, spelling: Mapping[int, str]) -> None:
    """Give control and user-defined tokens their own texts and ids in a tokenizer.json. The reader spells a text with other
    characters than the alphabet of bytes (DeepSeek's control tokens) by its bytes, and adds none as a token."""
    marked, alphabet = _marked(header), set(spelling.values())
    if all(alphabet.issuperset(text) for text in marked.values()):
        return
    types, tokens = header.keys.get("tokenizer.ggml.token_type"), header.keys["tokenizer.ggml.tokens"]
    made["model"]["vocab"] = {
        text if place in marked or alphabet.issuperset(text) else "".join(spelling[byte] for byte in text.encode()): place
        for place, text in enumerate(tokens)
    }
    known = {one["content"]: one for one in made["added_tokens"]}
    usual = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    made["added_tokens"] = [
        known.get(text, usual | {"content": text, "special": not types or types[place] == _CONTROL}) | {"id": place}
        for place, text in marked.items()
    ]


def _ways(tokenizer: Any) -> list[Any]:
    """Return what a tokenizer makes ids of a text by."""
    made = json.loads(tokenizer.backend_tokenizer.to_str())
    parts = [made[name] for name in ("normalizer", "pre_tokenizer", "post_processor")]
    return [*parts, made["model"]["vocab"], bool(made["model"].get("ignore_merges"))]


def _link(file: Path, name: Path) -> None:
    """Give a file a second name: a link where the system permits one, else a copy."""
    for link in (os.symlink, os.link):
        with suppress(OSError, NotImplementedError):
            link(file, name)
            return
    shutil.copyfile(file, name)
