"""What is a checkpoint's processor, also where its video part is unavailable?"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import transformers

from trimtab.checkpoint.folder import CONFIG
from trimtab.engine.loader import transformers_model
from trimtab.errors import CheckpointError, RequestError
from trimtab.process.json_file import check_files, read_object

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, ProcessorMixin

    from trimtab.engine.formats.hf_types import Processor, Tokenizer

# Fields of config.json whose token represents media, not text.
PLACEHOLDERS = (
    "image_token_id", "image_token_index", "audio_token_id", "audio_token_index", "video_token_id", "video_token_index",
    "boi_token_id", "boi_token_index", "eoi_token_id", "eoi_token_index", "vision_start_token_id", "vision_end_token_id",
)  # fmt: skip
# The files that hold a tokenizer's words, in one of its forms.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")
NO_VOCABULARY = "tokenizer.json is missing"
TOKENIZER_HINT = "Copy the tokenizer files of this model into the folder (tokenizer.json, tokenizer_config.json)"


def load_processor(folder: Path) -> Processor:
    """Return the folder's processor; its tokenizer if the model only reads.

    Errors: CheckpointError, also for a tokenizer that is empty or has more tokens than the model, and for files over the limits of
    `json_file.py`. Multimodal processors carry a video processor that needs torchvision even for an image. Where it is missing, the
    processor is put together from its other parts and refuses videos.
    """
    check_files(folder)
    _add_once(logging.getLogger("transformers.image_utils"), _NotAmbiguous())
    lacking = _lacking(folder)
    if lacking is not None:  # raised at the end, when all other parts are read: a large tokenizer takes a second
        processor = _without_video(folder, lacking)
    else:
        try:
            processor = transformers_model.load_processor(folder)
        except CheckpointError as exc:
            # transformers finds no tokenizer, or one of special tokens alone, by the files that it has loaded before.
            if (folder / "tokenizer_config.json").is_file() and not _has_vocabulary(folder):
                raise CheckpointError(NO_VOCABULARY, path=folder, hint=TOKENIZER_HINT) from exc
            if "orchvision" not in str(exc):
                raise
            processor = _without_video(folder, exc)
    tokenizer = processor.tokenizer if hasattr(processor, "tokenizer") else processor
    check_tokenizer(tokenizer, folder, _vocabulary(folder))
    check_named_ids(tokenizer, folder)
    return processor


def _has_vocabulary(folder: Path) -> bool:
    return any((folder / name).is_file() for name in VOCABULARIES)


def _lacking(folder: Path) -> ImportError | None:
    """Return the error with which transformers' own processor of the folder will fail if its video part lacks torchvision.

    Transformers exports such a class as a stand-in, each of whose attributes raises ImportError (utils/import_utils.py,
    DummyObject). None where the folder's files do not show it.
    """
    try:
        config, _ = transformers.ProcessorMixin.get_processor_dict(folder, local_files_only=True)
        kind = getattr(transformers, config["video_processor"]["video_processor_type"])
    except Exception:  # any content of the files: the load of the processor reports it
        return None
    try:
        _ = kind.from_pretrained
    except ImportError as exc:
        return exc if "orchvision" in str(exc) else None
    return None


class _NotAmbiguous(logging.Filter):
    """Suppresses transformers' warning for an image one or three pixels wide: which axis has the channels.

    It takes the first one, which is right: every image arrives as RGB, made [3, H, W] before the check. No argument prevents the
    warning: Gemma 4's processor does not pass `input_data_format` on (transformers 5.23.0, image_processing_pil_gemma4.py,
    aspect_ratio_preserving_resize). Without this, each such image of a client would write into the log.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("The channel dimension is ambiguous")


def _add_once(logger: logging.Logger, added: logging.Filter) -> None:
    if not any(type(known) is type(added) for known in logger.filters):
        logger.addFilter(added)


def _vocabulary(folder: Path) -> int | None:
    """Return how many rows the embedding has, None where the configuration does not say."""
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        return int(config.get_text_config().vocab_size)
    except Exception:  # the load of the model reports the error of its configuration
        return None


def check_tokenizer(tokenizer: Tokenizer, folder: Path, vocabulary: int | None) -> None:
    """Raise CheckpointError for a tokenizer without words, and for one that has more tokens than the model.

    Without tokenizer files transformers makes a tokenizer of special tokens alone. Tokens that were added to a vocabulary
    are not counted: some models never got rows for them, and a prompt that has one is refused by itself.
    """
    known, special = tokenizer.get_vocab(), set(tokenizer.all_special_ids)  # the latter is computed at each access
    words = {token for token, number in known.items() if number not in special}
    if not words:
        reason = f"its tokenizer knows {len(known)} special tokens and no others"
        if not _has_vocabulary(folder):
            reason = NO_VOCABULARY
        raise CheckpointError(reason, path=folder, hint=TOKENIZER_HINT)
    added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    largest = max((number for token, number in known.items() if token not in added), default=-1)
    if vocabulary is not None and largest >= vocabulary:
        raise CheckpointError(
            f"its tokenizer has token ids up to {largest}, the model has {vocabulary} embedding rows: it belongs to another "
            "model", path=folder, hint=TOKENIZER_HINT,
        )  # fmt: skip


def check_named_ids(tokenizer: Tokenizer, folder: Path) -> None:
    """Raise CheckpointError if token ids that the model's files name are ordinary words of the tokenizer.

    A tokenizer of another model can have exactly as many tokens. Judged are the ids that end an answer, where all of them are
    words, and those that represent an image or an audio clip; ids that the files leave to a class's default are not.
    """
    config = read_object(folder / CONFIG, CONFIG) if (folder / CONFIG).is_file() else {}
    generation = folder / "generation_config.json"
    chosen = read_object(generation, generation.name) if generation.is_file() else {}
    text = config.get("text_config") or {}
    given = (source.get("eos_token_id") for source in (chosen, config, text) if isinstance(source, dict))
    ends = next((value for value in given if value is not None), None)
    ids = [number for number in (ends if isinstance(ends, list) else [ends]) if isinstance(number, int)]
    words = {number: _word(tokenizer, number) for number in ids}
    if words and all(words.values()):
        raise _foreign(folder, "eos_token_id", words)
    for name in PLACEHOLDERS:
        number = config.get(name)
        if isinstance(number, int) and not isinstance(number, bool) and _word(tokenizer, number):
            raise _foreign(folder, name, {number: _word(tokenizer, number)})


def _foreign(folder: Path, name: str, words: Mapping[int, str]) -> CheckpointError:
    listed = ", ".join(f"{number} ({word!r})" for number, word in words.items())
    return CheckpointError(
        f"its {name} is an ordinary word of its tokenizer: {listed}; configuration and tokenizer belong to two models",
        path=folder, hint=TOKENIZER_HINT,
    )  # fmt: skip


def _word(tokenizer: Tokenizer, number: int) -> str:
    """Return the token of an id if it is an ordinary word, "" for control tokens, added ones and ids without a token."""
    if number < 0 or number in set(tokenizer.all_special_ids) or number in tokenizer.added_tokens_decoder:
        return ""
    try:
        token = tokenizer.convert_ids_to_tokens(number)
    except (IndexError, KeyError, OverflowError, ValueError):
        return ""
    if not isinstance(token, str) or (token[:1] in "<[" and token[-1:] in ">]"):
        return ""
    return token


def _without_video(folder: Path, first: Exception) -> Processor:
    try:
        config, _ = transformers.ProcessorMixin.get_processor_dict(folder, local_files_only=True)
        kind = getattr(transformers, config.pop("processor_class"))
        parts: dict[str, object] = {"tokenizer": transformers_model.load_tokenizer(folder)}
        known = set(inspect.signature(kind.__init__).parameters)
        options = {"trust_remote_code": False, "local_files_only": True}
        if "image_processor" in known:
            parts["image_processor"] = _image_processor(folder, config).from_pretrained(folder, **options)
        if "feature_extractor" in known:
            parts["feature_extractor"] = transformers.AutoFeatureExtractor.from_pretrained(folder, **options)
        parts["video_processor"] = _no_video()
        rest = {key: value for key, value in config.items() if key in known and key not in parts}
        rest.setdefault("chat_template", getattr(parts["tokenizer"], "chat_template", None))
        return _accepting_no_video(kind)(**parts, **rest)
    except CheckpointError:
        raise
    except Exception as exc:  # any error of a processor's own code
        raise CheckpointError(
            f"its processor needs torchvision, and cannot be created without it ({' '.join(str(exc).split())})", path=folder,
            hint="Install the torchvision that belongs to your torch",
        ) from first  # fmt: skip


def _image_processor(folder: Path, config: Mapping[str, object]) -> type[BaseImageProcessor]:
    """Return the image processor's class that works on Pillow images."""
    own = config.get("image_processor")
    name = own.get("image_processor_type") if isinstance(own, dict) else None
    if name is None and (folder / "preprocessor_config.json").is_file():
        name = read_object(folder / "preprocessor_config.json", "processor").get("image_processor_type")
    base = str(name).removesuffix("Fast").removesuffix("Pil")
    kind = getattr(transformers, f"{base}Pil", None) or getattr(transformers, base, None)
    if kind is None:
        raise ValueError(f"no image processor {name!r} that works without torchvision")
    return kind


def _accepting_no_video(processor: type[ProcessorMixin]) -> type[ProcessorMixin]:
    def check(self: object, argument_name: str, argument: object) -> object:
        # Without torchvision transformers does not export the class that it would compare with.
        if argument_name == "video_processor":
            return type(argument)
        return processor.check_argument_for_proper_class(self, argument_name, argument)

    return type(processor.__name__, (processor,), {"check_argument_for_proper_class": check})


def _no_video() -> object:
    from transformers.video_processing_utils import BaseVideoProcessor

    class NoVideoProcessor(BaseVideoProcessor):  # type: ignore[misc]
        """Replaces a missing video processor."""

        def __init__(self) -> None:
            pass

        def __call__(self, *args: object, **kwargs: object) -> object:
            raise RequestError("videos need torchvision, which is not installed", field="video")

    return NoVideoProcessor()
