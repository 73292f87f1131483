"""What does transformers make of a checkpoint: which class, names and configs?"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
import transformers
from torch import Tensor, nn

from trimtab.checkpoint.anatomy import DTYPE_BYTES, Anatomy
from trimtab.checkpoint.config_limits import MOST_BUFFER_BYTES, MOST_MODULES, check_declared
from trimtab.checkpoint.folder import CONFIG, Checkpoint
from trimtab.checkpoint.headers import TensorEntry
from trimtab.checkpoint.names import Rename
from trimtab.engine.loader.anatomy_builder import build_anatomy
from trimtab.engine.loader.tracing import (  # fmt: skip
    CannotFollowError,
    Expression,
    NoAllocation,
    TooLargeError,
    Trace,
    Traced,
    is_undefined,
    most_modules,
)
from trimtab.engine.tiers.reader import read_small
from trimtab.errors import CheckpointError
from trimtab.formats.packed import split_packed
from trimtab.formats.record import PackedEntry, float_dtype
from trimtab.process.json_file import check_file
from trimtab.process.packages import switch
from trimtab.report.document import some
from trimtab.request import EXPERTS

if TYPE_CHECKING:
    from trimtab.engine.formats.hf_types import Config, HFModel, LoadingInfo, Processor, Tokenizer

T = TypeVar("T")

# from_pretrained sets process-wide state while it runs (default dtype, patched constructors): one at a time.
_ONE_PROBE = threading.Lock()

# transformers' switch for its loading threads. Source: transformers 5.6.2 to 5.23.0, core_model_loading.py.
NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"
TOO_LARGE = "No released model is so large: a count in config.json is wrong"
AUTO_CLASSES = ("AutoModelForMultimodalLM", "AutoModelForImageTextToText", "AutoModelForCausalLM")
# Names of tensors in a message.
SHOWN = 20


@dataclass
class Probe:
    """The empty model as stock's loader would fill it.

    model: in eval mode; every tensor is traced, or real and on the CPU (computed at load). sources: tensor_path -> how
    to make it. missing: persistent buffers that no file holds and that keep their initial value. unexpected: file
    tensors that the model does not use (after its own list of known ones). ties: tensor_path -> the tensor_path that
    owns the storage. dtype: the requested one. compares_values: whether the loader asked if stored tensors are equal.
    """

    model: HFModel
    config: Config
    sources: dict[str, Expression]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    ties: dict[str, str]
    dtype: str
    compares_values: bool = False


# Configs and classes --------------------------------------------------------------------------------------------------


def read_config(checkpoint: Checkpoint) -> Config:
    """Return transformers' config of a checkpoint, without any quantization_config.

    Errors: CheckpointError for an architecture that the installed transformers does not know, for one that would need
    code from the checkpoint (auto_map; it is never run), and for values that the config class refuses.
    """
    check_declared(checkpoint.config, _declared_fields(checkpoint.config), checkpoint.folder / CONFIG)
    try:
        config = transformers.AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False, local_files_only=True)
    except Exception as exc:  # strict config classes raise validation errors of several libraries
        if checkpoint.config.get("model_type") in transformers.CONFIG_MAPPING:
            raise CheckpointError(
                f"config.json is refused by transformers {transformers.__version__}: {_words(exc)}", path=checkpoint.path
            ) from exc
        raise _unknown(checkpoint, f"model_type {checkpoint.config.get('model_type')!r}") from exc
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ())]
    for part in parts:
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    config._name_or_path = str(checkpoint.folder)
    return config


def _declared_fields(config: Mapping[str, object]) -> set[str]:
    """Return the names that the config's class and those of its sub-configs read; a part can name its own class."""
    types = (part.get("model_type") for part in (config, *config.values()) if isinstance(part, Mapping))
    waiting: list[object] = [
        transformers.CONFIG_MAPPING[one] for one in types if isinstance(one, str) and one in transformers.CONFIG_MAPPING
    ]
    seen: set[type] = set()
    names: set[str] = set()
    while waiting:
        kind = waiting.pop()
        if not isinstance(kind, type) or kind in seen:
            continue
        seen.add(kind)
        names |= set(getattr(kind, "__dataclass_fields__", ())) | set(inspect.signature(kind).parameters)
        names |= set(getattr(kind, "attribute_map", ()))
        waiting += (getattr(kind, "sub_configs", None) or {}).values()
    return names


def _unknown(checkpoint: Checkpoint, what: str) -> CheckpointError:
    remote = ""
    if "auto_map" in checkpoint.config:
        remote = "; it has its own code (auto_map), which is never run"
    return CheckpointError(
        f"unknown architecture: {what}, architectures {checkpoint.config.get('architectures')}; transformers "
        f"{transformers.__version__} does not have it{remote}",
        path=checkpoint.path, hint="Install a transformers release that knows it",
    )  # fmt: skip


def _words(exc: BaseException) -> str:
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return " ".join(lines[:3]) or type(exc).__name__


def model_class(checkpoint: Checkpoint, config: Config) -> type[HFModel]:
    """Return the class that the config names. Errors: CheckpointError."""
    architectures = checkpoint.config.get("architectures") or ()
    for name in architectures:
        kind = getattr(transformers, name, None)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            return kind
    if not architectures:
        for auto in AUTO_CLASSES:
            mapping = getattr(getattr(transformers, auto, None), "_model_mapping", {})
            if type(config) in mapping:
                kind = mapping[type(config)]
                return kind[0] if isinstance(kind, (tuple, list)) else kind
    raise _unknown(checkpoint, f"model_type {config.model_type!r}")


def read_generation_config(folder: Path) -> transformers.GenerationConfig | None:
    """Return the folder's generation defaults; without a generation_config.json those in config.json, as stock does."""
    has_own = (folder / "generation_config.json").is_file()
    if has_own:
        check_file(folder / "generation_config.json", "generation_config.json")
    options = {} if has_own else {"config_file_name": "config.json", "_from_model_config": True}
    try:
        config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True, **options)
    except (ValueError, OSError, TypeError) as exc:
        if not has_own:
            return None
        raise CheckpointError(f"cannot be read ({_words(exc)})", path=folder / "generation_config.json") from exc
    for name in ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids"):  # what `sequence.suppressed_ids` reads
        given = getattr(config, name, None) or []
        words = given if name == "bad_words_ids" else [given]
        if not (
            isinstance(words, list) and all(isinstance(one, list) and all(type(token) is int for token in one) for one in words)
        ):
            raise CheckpointError(
                f"{name} must be token ids", path=folder / ("generation_config.json" if has_own else "config.json")
            )
    return config


@contextmanager
def _quiet() -> Iterator[None]:
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    # Its warnings (missing, unexpected, mismatched) are in the Probe or an error of ours.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


# The probe ------------------------------------------------------------------------------------------------------------


def probe(checkpoint: Checkpoint, dtype: str = "bfloat16") -> Probe:
    """Return the empty model and how each of its tensors is made from the file tensors.

    Packed weights count as tensors of their logical shape in the model's dtype. Without weight files the sources are the model's
    own names. Errors: CheckpointError for missing tensors (all of them, before any is allocated), wrong shapes, and operations that
    cannot be followed.
    """
    plain, packed = split_packed(checkpoint)
    config = read_config(checkpoint)
    kind = model_class(checkpoint, config)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    compared: list[bool] = []
    trace = Trace(lambda a, b: compared.append(True) or _equal_in_files(plain, a, b))  # type: ignore[func-returns-value]
    tensors = _trace(trace, plain, packed, torch_dtype)
    with _ONE_PROBE, _quiet(), switch(NO_THREADS):
        model, info = _load_traced(checkpoint, kind, config, tensors, torch_dtype, trace)
        if not checkpoint.has_weights:
            tensors = _declared(trace, model)
            # Only the loader applies the list of modules that stay in float32.
            if not any(getattr(model, f"_keep_in_fp32_modules{name}", None) for name in ("", "_strict")):
                return _declared_result(model, tensors, dtype)
            model, info = _load_traced(checkpoint, kind, config, tensors, torch_dtype, trace)
    model.name_or_path = model.config._name_or_path = str(checkpoint.folder)
    return replace(_result(checkpoint, model.eval(), info, dtype), compares_values=bool(compared))


def _trace(trace: Trace, plain: dict[str, TensorEntry], packed: dict[str, PackedEntry], dtype: torch.dtype) -> dict[str, Traced]:
    tensors = {name: trace.tensor(name, entry.shape, getattr(torch, entry.dtype)) for name, entry in plain.items()}
    # In the model's own dtype, so that no cast is recorded on a weight that stays packed.
    return tensors | {name: trace.tensor(name, entry.shape, dtype) for name, entry in packed.items()}


def _declared(trace: Trace, empty: HFModel) -> dict[str, Traced]:
    tied = set(getattr(empty, "all_tied_weights_keys", None) or ())
    tensors = {name: value for name, value in empty.state_dict().items() if name not in tied}
    return {name: trace.tensor(name, tuple(value.shape), value.dtype) for name, value in tensors.items()}


def _declared_result(model: HFModel, tensors: dict[str, Traced], dtype: str) -> Probe:
    ties = _ties(model)
    sources = {name: value.expression for name, value in tensors.items()}
    sources |= {name: sources[owner] for name, owner in ties.items()}
    return Probe(model.eval(), model.config, sources, (), (), ties, dtype)


def _load_traced(
    checkpoint: Checkpoint, kind: type[HFModel], config: Config, tensors: dict[str, Traced], dtype: torch.dtype, trace: Trace
) -> tuple[HFModel, LoadingInfo]:
    """Return (model, loading info) of stock's loader run on tensors without data."""
    try:
        with NoAllocation(MOST_BUFFER_BYTES), most_modules(MOST_MODULES + 4 * len(tensors)):
            model, info = kind.from_pretrained(
                None, config=config, state_dict=tensors, dtype=dtype, output_loading_info=True, local_files_only=True,
                generation_config=read_generation_config(checkpoint.folder), ignore_mismatched_sizes=True,
            )  # fmt: skip
    except TooLargeError as exc:
        raise CheckpointError(f"{kind.__name__} {exc}", path=checkpoint.folder / CONFIG, hint=TOO_LARGE) from exc
    except CannotFollowError as exc:  # of trimtab: transformers may load it
        why = "; ".join(trace.problems[:5])
        raise CheckpointError(
            f"trimtab cannot follow how transformers {transformers.__version__} makes {kind.__name__}: {why}",
            path=checkpoint.path, hint="Load it with transformers alone",
        ) from exc  # fmt: skip
    except Exception as exc:  # any error of the model's own code
        why = "; ".join(trace.problems[:5]) or _words(exc)
        raise CheckpointError(
            f"cannot be loaded as {kind.__name__} by transformers {transformers.__version__}: {why}", path=checkpoint.path
        ) from exc
    return model, info


def _equal_in_files(plain: dict[str, TensorEntry], a: Expression, b: Expression) -> bool:
    """Stock ties two stored tensors only if they are equal: the one question whose answer needs the weights."""
    if not all(leaf in plain for leaf in (*a.leaves, *b.leaves)):
        return False
    first, second = (item.replay(lambda name: read_small({name: plain[name]})[name]) for item in (a, b))
    return torch.equal(first, second)


def _result(checkpoint: Checkpoint, model: HFModel, info: LoadingInfo, dtype: str) -> Probe:
    _check_shapes(checkpoint, info)
    parameters = list(model.named_parameters(remove_duplicate=False))
    buffers = list(model.named_buffers(remove_duplicate=False))
    _check_complete(checkpoint, model, parameters, info)
    _check_followed(checkpoint, model, parameters, buffers)
    sources = {name: value.expression for name, value in (*parameters, *buffers) if isinstance(value, Traced)}
    persistent = set(model.state_dict())
    missing = sorted(name for name, _ in buffers if name in persistent and name not in sources)
    return Probe(model, model.config, sources, tuple(missing), tuple(sorted(info["unexpected_keys"])), _ties(model), dtype)


def _ties(model: HFModel) -> dict[str, str]:
    owners: dict[int, str] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    return {name: owner for name, value in parameters if (owner := owners.setdefault(id(value), name)) != name}


def _check_shapes(checkpoint: Checkpoint, info: LoadingInfo) -> None:
    wrong = [f"{name} is {list(have)}, the model's is {list(want)}" for name, have, want in sorted(info["mismatched_keys"])]
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} tensors have another shape than the model: {some(wrong, SHOWN)}", path=checkpoint.path,
            hint="config.json belongs to another checkpoint",
        )  # fmt: skip


def _check_complete(checkpoint: Checkpoint, model: HFModel, parameters: Iterable[tuple[str, Tensor]], info: LoadingInfo) -> None:
    absent = set(info["missing_keys"])
    lost = [name for name, value in parameters if not isinstance(value, Traced) and (name in absent or not value.is_meta)]
    if lost:
        others = sorted(info["unexpected_keys"])
        raise CheckpointError(
            f"{len(lost)} tensors of {type(model).__name__} are missing: {some(lost, SHOWN)}"
            + (f"; {len(others)} other tensors are not used: {some(others, 3)}" if others else ""),
            path=checkpoint.path, tensor_name=lost[0] if len(lost) == 1 else None,
            hint="A file is missing or truncated, or config.json belongs to another checkpoint",
        )  # fmt: skip
    if checkpoint.is_gguf and (others := sorted(info["unexpected_keys"])):
        raise CheckpointError(
            f"{len(others)} tensors have no place in {type(model).__name__}: {some(others, SHOWN)}", path=checkpoint.path,
            hint="The answer would lack them: use the safetensors files that this file was made from",
        )  # fmt: skip


def _check_followed(
    checkpoint: Checkpoint, model: HFModel, parameters: Iterable[tuple[str, Tensor]], buffers: Iterable[tuple[str, Tensor]]
) -> None:
    """Raise CheckpointError if a tensor has neither a source nor a value."""
    escaped = [name for name, value in (*parameters, *buffers) if not isinstance(value, Traced) and value.is_meta]
    undefined = [name for name, value in buffers if not isinstance(value, Traced) and is_undefined(value)]
    for names, what in ((escaped, "in a way that cannot be traced"), (undefined, "without assigning a value")):
        if names:
            raise CheckpointError(
                f"transformers {transformers.__version__} makes {some(names, SHOWN)} of {type(model).__name__} {what}",
                path=checkpoint.path, tensor_name=names[0],
                hint="This architecture cannot be loaded; please report it",
            )  # fmt: skip


# Stock's quantization -------------------------------------------------------------------------------------------------


def stock_unquantized(model: HFModel, kind: str) -> dict[str, str]:
    """Return {module_path: reason} of the plain linears that stock bitsandbytes leaves in full precision.

    kind "none" gives {}; the rule is the same for every other. Source: transformers 5.6.2 to 5.23.0, quantizers/base.py
    get_keys_to_not_convert: tied weights, the module of the last parameter, the output embedding. Stock looks before
    weights are tied, so duplicates are kept here: on a tied model the last parameter is the head's own.
    """
    if kind == "none":
        return {}
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    tied |= model.get_expanded_tied_weights_keys(all_submodels=True)
    head = model.get_output_embeddings()
    reasons = {path: "the output head" for path, module in model.named_modules() if head is not None and module is head}
    reasons |= {name.removesuffix(".weight"): "its weight is tied" for name in (*tied, *tied.values())}
    last = [name for name, _ in model.named_parameters(remove_duplicate=False)][-1:]
    reasons = dict.fromkeys((name.removesuffix(".weight") for name in last), "the model's last module") | reasons
    for pattern in getattr(model, "_keep_in_fp32_modules", None) or ():
        reasons.setdefault(pattern, "its architecture keeps it in float32")
    reason_of: dict[str, str] = {}
    for path, module in model.named_modules():
        why = next((why for pattern, why in reasons.items() if _skips(pattern, path)), None)
        if type(module) is nn.Linear and why is not None:
            reason_of[path] = why
    return reason_of


def _skips(pattern: str, path: str) -> bool:
    """Return whether stock's skip pattern names a module. Source: quantizers_utils.py should_convert_module, 5.23.0. Earlier
    releases have no boundary after a name; no pattern of a default list needs one."""
    return path.endswith(pattern) or re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", path) is not None


# The anatomy ----------------------------------------------------------------------------------------------------------


def read_anatomy(checkpoint: Checkpoint, *, quant: str, dtype: str, keep_unquantized: tuple[str, ...] = ()) -> Anatomy:
    """Return the anatomy of a checkpoint, from config and headers alone."""
    return anatomy_of(probe(checkpoint, dtype), checkpoint, quant=quant, keep_unquantized=keep_unquantized)


def anatomy_of(
    probed: Probe, checkpoint: Checkpoint, *, quant: str, keep_unquantized: tuple[str, ...] = (), head: str = "full",
    keeps_16bit: bool = False, experts: str = EXPERTS[1],
) -> Anatomy:  # fmt: skip
    """Return the anatomy of a probed checkpoint.

    keeps_16bit: unquantized weights stay in 16 bits with a computing dtype of 32 (`planning/values/byte_sizes.py`). Errors:
    RequestError if a keep_unquantized pattern names no linear, or if the model has no head that could be in 8 bits, or no experts
    that could be in the format `experts`; without one they are dequantized.
    """
    plain, packed = split_packed(checkpoint)
    try:
        windows = _cache_windows(probed.config)
        if (least := min((one for one in windows or () if one is not None), default=1)) < 1:
            raise ValueError(f"a sliding window of {least} tokens")
        built = build_anatomy(
            probed.model, probed.config, probed.sources, probed.ties, dtype=probed.dtype, packed=packed, quant=quant,
            unquantized=stock_unquantized(probed.model, quant), keep_unquantized=keep_unquantized,
            windows=windows, head=head, experts=experts, renames=read_renames(probed.model),
            file_dtype=partial(_file_dtype, checkpoint, plain, packed) if keeps_16bit else None,
        )  # fmt: skip
        return _with_ways(built, probed)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as exc:
        raise CheckpointError(
            f"has values that do not go together for {type(probed.model).__name__} ({type(exc).__name__}: {exc})",
            path=checkpoint.folder / CONFIG,
        ) from exc


def _why_no_answers(model: HFModel) -> tuple[str | None, bool]:
    """Return (why a class gives no answers, whether it still embeds texts); (None, True) if it answers. Without a head it embeds
    as a decoder, not as an encoder: transformers has no masked head for it."""
    name, kind = type(model).__name__, type(model.config)
    if getattr(model.config, "is_encoder_decoder", False):
        return f"{name} has an encoder and a decoder; trimtab runs decoders", False
    if type(model).can_generate():
        return None, True
    decoders, encoders = (auto._model_mapping for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM))
    return f"{name} has no language modelling head, so it gives no answers", kind in decoders and kind not in encoders


def _with_ways(built: Anatomy, probed: Probe) -> Anatomy:
    """Return an anatomy with the executions that it supports."""
    from trimtab.engine.families import families
    from trimtab.engine.kv import kv_cache
    from trimtab.engine.passes import chunk_forward, media_embeddings
    from trimtab.engine.towers.bounds_check import unknown_towers

    why, has_vectors = _why_no_answers(probed.model)
    return replace(
        built, answers_unsupported=why, has_vectors=has_vectors, capture_unsupported=why or kv_cache.why_not(probed.model),
        fused_unsupported=why or families.why_not(probed.model), prompts_unsupported=why or chunk_forward.why_not(probed.model),
        images_look_ahead=media_embeddings.images_look_ahead(probed.config), can_chunk=kv_cache.can_chunk(probed.model),
        unknown_towers=unknown_towers(probed.config),
    )  # fmt: skip


def _file_dtype(
    checkpoint: Checkpoint, plain: Mapping[str, TensorEntry], packed: Mapping[str, PackedEntry], tensor_name: str
) -> str | None:
    """Return the type of a file tensor; without weight files the one that config.json names, or bfloat16."""
    if tensor_name in packed:
        return float_dtype(packed[tensor_name].kind)
    if checkpoint.has_weights:
        return plain[tensor_name].dtype if tensor_name in plain else None
    named = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    return named if isinstance(named, str) and named in DTYPE_BYTES else "bfloat16"


def _cache_windows(config: Config) -> tuple[int | None, ...] | None:
    """Return the window of each layer of transformers' own cache, None for a layer that keeps everything; None if the cache
    cannot be asked.

    The config is not read: transformers 5.6.2 drops all windows of a model whose num_kv_shared_layers is 0 (cache_utils.py).
    """
    try:
        layers = transformers.DynamicCache(config=config.get_text_config(decoder=True)).layers
    except Exception:  # a model with a separate kind of cache
        return None
    return tuple(getattr(layer, "sliding_window", None) for layer in layers)


# Others convert values too, or depend on which names were seen before.
_KINDS = ("WeightRenaming", "PrefixChange")


def read_renames(model: HFModel) -> tuple[Rename, ...]:
    """Return the model's renames in the order in which they apply, those of its sub-models included.

    Source: transformers 5.6.2 to 5.23.0, conversion_mapping.py get_model_conversion_mapping; 5.6.2 writes the prefix of a
    sub-model into its patterns, later releases hold it apart.
    """
    from transformers import conversion_mapping

    return tuple(
        Rename(
            getattr(transform, "base_model_prefix", None) or "" if scope is not None else "", scope or "",
            transform.source_patterns[0], transform.target_patterns[0],
        )
        for transform in conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
        if type(transform).__name__ in _KINDS
        for scope in (getattr(transform, "scope_prefix", None),)
    )  # fmt: skip


# Processors -----------------------------------------------------------------------------------------------------------


def load_processor(folder: Path) -> Processor:
    """Return the folder's processor. Errors: CheckpointError if it has none that works."""
    return _load(transformers.AutoProcessor.from_pretrained, folder, "processor")


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the folder's tokenizer. Errors: CheckpointError if it has none that works."""
    return _load(transformers.AutoTokenizer.from_pretrained, folder, "tokenizer")


def _load(load: Callable[..., T], folder: Path, what: str) -> T:
    try:
        with _quiet():
            return load(folder, trust_remote_code=False, local_files_only=True)
    except Exception as exc:  # tokenizers raises bare Exceptions
        is_there = any(folder.glob("*token*")) or any(folder.glob("vocab*")) or any(folder.glob("*.model"))
        raise CheckpointError(
            f"has no usable {what} ({_words(exc)})" if is_there else "has no tokenizer files", path=folder,
            hint="Copy the tokenizer and processor files of the model into the folder",
        ) from exc  # fmt: skip
