"""What transformers would do with a checkpoint: its classes, its names, its configs. The only file that imports it.

`probe` runs transformers' own loader on tensors without data (`probe.py`), so that renames, fused experts, ties and casts
are stock's in every release, with no weight read and accelerate untouched. Only public arguments of public methods.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from trimtab.checkpoint.folder import Checkpoint
from trimtab.checkpoint.headers import TensorEntry
from trimtab.checkpoint.packed import PackedEntry, split_packed
from trimtab.errors import CheckpointError
from trimtab.runtime.probe import Expression, Traced

# from_pretrained sets process-wide state while it runs (default dtype, patched constructors): one at a time.
_ONE_PROBE = threading.Lock()

AUTO_CLASSES = ("AutoModelForImageTextToText", "AutoModelForMultimodalLM", "AutoModelForCausalLM")


@dataclass
class Probe:
    """The empty model as stock's loader would fill it.

    model: in eval mode; every tensor is traced, or real and on the CPU (computed at load). sources: tensor_path -> how to
    make it. missing: buffers that no file holds and that keep their initial value. unexpected: file tensors not used.
    ties: tensor_path -> the tensor_path that owns the storage.
    """

    model: Any
    config: Any
    sources: dict[str, Expression]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    ties: dict[str, str]


def read_config(checkpoint: Checkpoint) -> Any:
    """Return transformers' config of a checkpoint, without its quantization_config.

    Errors: CheckpointError for an architecture that the installed transformers does not know, or remote code.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError, OSError, TypeError, AttributeError) as exc:
        kind = checkpoint.config.get("model_type")
        remote = "it names code of its own (auto_map), which is never run; " if "auto_map" in checkpoint.config else ""
        raise CheckpointError(
            f"unknown architecture: {remote}model_type {kind!r}, architectures {checkpoint.config.get('architectures')}, "
            f"transformers {transformers.__version__} ({str(exc).splitlines()[0] if str(exc) else type(exc).__name__})",
            path=checkpoint.folder, hint="Install a transformers release that knows it",
        ) from exc  # fmt: skip
    for part in (config, config.get_text_config()):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    config._name_or_path = str(checkpoint.folder)
    return config


def model_class(checkpoint: Checkpoint, config: Any) -> Any:
    """Return the class that the config names. Errors: CheckpointError."""
    for name in checkpoint.config.get("architectures") or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type):
            return found
    if not checkpoint.config.get("architectures"):
        for auto in AUTO_CLASSES:
            mapping = getattr(getattr(transformers, auto, None), "_model_mapping", {})
            if type(config) in mapping:
                found = mapping[type(config)]
                return found[0] if isinstance(found, (tuple, list)) else found
    raise CheckpointError(
        f"unknown architecture {checkpoint.config.get('architectures')} (transformers {transformers.__version__})",
        path=checkpoint.folder, hint="Install a transformers release that knows it",
    )  # fmt: skip


def read_generation_config(folder: Path) -> Any:
    """Return the generation config of a folder, None if it has none."""
    if not (folder / "generation_config.json").is_file():
        return None
    try:
        return transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, TypeError) as exc:
        raise CheckpointError(f"cannot be read ({exc})", path=folder / "generation_config.json") from exc


@contextmanager
def _quiet() -> Iterator[None]:
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
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

    With no weight files the tensors are the model's own, by their own names (declared shapes). Errors: CheckpointError
    for missing tensors, wrong shapes, or an operation that cannot be followed.
    """
    config = read_config(checkpoint)
    found = model_class(checkpoint, config)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    with _ONE_PROBE, _quiet():
        empty = _empty(found, config, torch_dtype)
        if checkpoint.has_weights:
            plain, packed = split_packed(checkpoint)
            _check_amount(checkpoint, empty, plain, packed)
            traced = _trace(plain, packed, torch_dtype)
        else:
            tied = set(getattr(empty, "all_tied_weights_keys", None) or ())
            traced = {
                name: Traced.of(tuple(value.shape), value.dtype, Expression(leaf=name), _never_equal)
                for name, value in empty.state_dict().items()
                if name not in tied
            }
        del empty
        try:
            model, info = found.from_pretrained(
                None, config=config, state_dict=traced, dtype=torch_dtype, output_loading_info=True,
                generation_config=read_generation_config(checkpoint.folder),
            )  # fmt: skip
        except (RuntimeError, ValueError, KeyError, TypeError, NotImplementedError) as exc:
            raise CheckpointError(
                f"transformers {transformers.__version__} cannot load it as {found.__name__} ({exc})", path=checkpoint.folder
            ) from exc
    model.name_or_path = config._name_or_path = str(checkpoint.folder)
    model.config._name_or_path = str(checkpoint.folder)
    return _result(checkpoint, model.eval(), info)


def _empty(found: Any, config: Any, dtype: torch.dtype) -> Any:
    import copy

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return found(copy.deepcopy(config))
    except Exception as exc:
        raise CheckpointError(
            f"transformers {transformers.__version__} cannot build {found.__name__} from this config ({exc})",
            path=config._name_or_path,
        ) from exc
    finally:
        torch.set_default_dtype(before)


def _never_equal(a: Expression, b: Expression) -> bool:
    return False


def _check_amount(
    checkpoint: Checkpoint, empty: Any, plain: dict[str, TensorEntry], packed: dict[str, PackedEntry]
) -> None:
    """Raise CheckpointError if the files hold clearly less than the model needs.

    Stock allocates and randomly fills what is missing before it says so: a wrong folder would cost real memory.
    """
    tied = set(getattr(empty, "all_tied_weights_keys", None) or ())
    needed = {name: value for name, value in empty.named_parameters(remove_duplicate=False) if name not in tied}
    have = sum(prod(entry.shape) for entry in plain.values()) + sum(prod(entry.shape) for entry in packed.values())
    want = sum(value.numel() for value in needed.values())
    if have < want:
        absent = [name for name in needed if name not in plain and name not in packed]
        raise CheckpointError(
            f"holds {have} values, {type(empty).__name__} needs {want}; not found by name: {', '.join(absent[:8])}"
            + (f" and {len(absent) - 8} more" if len(absent) > 8 else ""),
            path=checkpoint.folder, hint="Files are missing, or config.json belongs to another checkpoint",
        )  # fmt: skip


def _trace(plain: dict[str, TensorEntry], packed: dict[str, PackedEntry], dtype: torch.dtype) -> dict[str, Traced]:
    compare: Callable[[Expression, Expression], bool] = partial(_equal_in_files, plain)
    traced = {
        name: Traced.of(entry.shape, getattr(torch, entry.dtype), Expression(leaf=name), compare)
        for name, entry in plain.items()
    }
    for name, item in packed.items():
        # The model's own dtype, so that no cast is recorded on a weight that stays packed.
        traced[name] = Traced.of(item.shape, dtype, Expression(leaf=name), compare)
    return traced


def _equal_in_files(plain: dict[str, TensorEntry], a: Expression, b: Expression) -> bool:
    """Stock ties two stored tensors only if they are equal: the one question whose answer needs the weights."""
    from trimtab.runtime.read import read_small

    if not all(leaf in plain for leaf in (*a.leaves, *b.leaves)):
        return False
    first, second = (expression.replay(lambda n: read_small({n: plain[n]})[n]) for expression in (a, b))
    return torch.equal(first, second)


def _result(checkpoint: Checkpoint, model: Any, info: dict[str, Any]) -> Probe:
    parameters = list(model.named_parameters(remove_duplicate=False))
    buffers = list(model.named_buffers(remove_duplicate=False))
    sources = {name: value.expression for name, value in (*parameters, *buffers) if isinstance(value, Traced)}
    owners: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, value in parameters:
        owner = owners.setdefault(id(value), name)
        if owner != name:
            ties[name] = owner
    missing = sorted(set(info["missing_keys"]))
    names = {name for name, _ in parameters}
    lost = [name for name in missing if name in names and name not in sources and name not in ties]
    if lost:
        raise CheckpointError(
            f"{len(lost)} tensors are missing: {', '.join(lost[:8])}" + (" ..." if len(lost) > 8 else ""),
            path=checkpoint.folder, hint="Files are missing, or config.json belongs to another checkpoint",
        )  # fmt: skip
    escaped = [n for n, v in (*parameters, *buffers) if not isinstance(v, Traced) and v.device.type == "meta"]
    if escaped:
        raise CheckpointError(
            f"{type(model).__name__} makes {', '.join(escaped[:3])} in a way that cannot be followed", path=checkpoint.folder
        )
    return Probe(model, model.config, sources, tuple(missing), tuple(sorted(set(info["unexpected_keys"]))), ties)


# What stock quantizes -------------------------------------------------------------------------------------------------


def stock_unquantized(model: Any, kind: str) -> dict[str, str]:
    """Return {module_path: reason} of the plain linears that stock bitsandbytes leaves in full precision.

    Source: transformers 5.23.0 quantizers/base.py get_keys_to_not_convert, quantizers_utils.py should_convert_module:
    tied weights, the last parameter's module, the output embedding. Stock asks before weights are tied; a tied model
    lists every name here too, because duplicates are kept.
    """
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    reasons = {name.removesuffix(".weight"): "tied" for name in (*tied, *tied.values())}
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if parameters:
        reasons.setdefault(parameters[-1].removesuffix(".weight"), "the last module (stock's rule)")
    head = model.get_output_embeddings()
    reasons |= {name: "the output head" for name, module in model.named_modules() if module is head and head is not None}
    for name in model._keep_in_fp32_modules or ():
        reasons.setdefault(name, "kept in float32 by its architecture")
    found = {}
    for path, module in model.named_modules():
        if type(module) is nn.Linear:
            for pattern, reason in reasons.items():
                if re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", path) or path.endswith(pattern):
                    found[path] = reason
                    break
    return found


# Processors -----------------------------------------------------------------------------------------------------------


def load_processor(folder: Path) -> Any:
    """Return the folder's processor. Errors: CheckpointError if it has none that works."""
    return _load(transformers.AutoProcessor, folder, "processor")


def load_tokenizer(folder: Path) -> Any:
    """Return the folder's tokenizer. Errors: CheckpointError if it has none that works."""
    return _load(transformers.AutoTokenizer, folder, "tokenizer")


def _load(auto: Any, folder: Path, what: str) -> Any:
    try:
        with _quiet():
            return auto.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, OSError, KeyError, ImportError, TypeError, AttributeError) as exc:
        raise CheckpointError(
            f"has no usable {what} ({str(exc).splitlines()[0] if str(exc) else type(exc).__name__})", path=folder,
            hint="Copy the tokenizer and processor files of the model into the folder",
        ) from exc  # fmt: skip


def read_anatomy(checkpoint: Checkpoint, *, quant: str, dtype: str, keep_unquantized: tuple[str, ...] = ()) -> Any:
    """Return the anatomy of a checkpoint: see `trimtab/checkpoint/anatomy.py`."""
    return anatomy_of(probe(checkpoint, dtype), checkpoint, quant=quant, keep_unquantized=keep_unquantized)


def anatomy_of(found: Probe, checkpoint: Checkpoint, *, quant: str, keep_unquantized: tuple[str, ...] = ()) -> Any:
    """Return the anatomy of a probed checkpoint."""
    from trimtab.runtime.anatomy_builder import build_anatomy

    packed = split_packed(checkpoint)[1] if checkpoint.has_weights else {}
    return build_anatomy(
        found.model, found.config, found.sources, found.ties, packed=packed, quant=quant,
        unquantized=stock_unquantized(found.model, quant), keep_unquantized=keep_unquantized, folder=checkpoint.folder,
    )  # fmt: skip


def real_tensor(value: Tensor) -> bool:
    """Return whether a tensor of a probed model holds data."""
    return not isinstance(value, Traced) and value.device.type != "meta"
