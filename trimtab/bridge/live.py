"""What is the anatomy of a model that transformers has loaded?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from trimtab.checkpoint.anatomy import Anatomy, ModuleRow, TensorRow
from trimtab.errors import RequestError

QUANTIZED = ("Linear4bit", "Linear8bitLt")


def is_linear(module: nn.Module) -> bool:
    """Return whether the module is a plain Linear or bitsandbytes' version of one; other subclasses are not."""
    return type(module) is nn.Linear or type(module).__name__ in QUANTIZED


def read_live(model: Any) -> Anatomy:
    """Return the anatomy of a live model. Errors: RequestError if it is no language model of transformers. A quantized linear
    counts as a linear with its unpacked shape. A model that already has adapters is not covered."""
    from trimtab.engine.loader.anatomy_builder import build_anatomy
    from trimtab.engine.loader.transformers_model import read_renames

    owners: dict[int, str] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    ties = {name: owner for name, value in parameters if (owner := owners.setdefault(id(value), name)) != name}
    try:
        dtype = str(model.dtype).removeprefix("torch.")
        anatomy = build_anatomy(
            model, model.config, {}, ties, dtype=dtype, packed={}, quant="none", unquantized={}, keep_unquantized=(),
            windows=None, renames=read_renames(model),
        )  # fmt: skip
    except AttributeError as exc:
        raise RequestError(f"a {type(model).__name__} is not a transformers language model ({exc})", field="base_model") from exc
    modules = dict(model.named_modules())
    rows = {row.module_path: _unpacked(row, modules[row.module_path], dtype) for row in anatomy.rows}
    for path, module in modules.items():
        inner = module._modules.get("linear")
        if inner is not None and is_linear(inner) and "Linear" in type(module).__name__:
            row = rows.get(path) or replace(rows[f"{path}.linear"], module_path=path, tensors=(), quantized=False)
            rows[path] = replace(row, class_name=type(module).__name__, kind="other", wraps=f"{path}.linear")
    return replace(anatomy, rows=tuple(rows[path] for path in modules if path in rows))


def _unpacked(row: ModuleRow, module: nn.Module, dtype: str) -> ModuleRow:
    """Return the row with the shape and dtype of the unpacked weight."""
    if type(module).__name__ not in QUANTIZED:
        return row
    weight = f"{row.module_path}.weight"
    shape = (int(module.out_features), int(module.in_features))  # type: ignore[arg-type]
    tensors = tuple(
        TensorRow(weight, shape, dtype, False, (), tensor.tied_to) if tensor.tensor_path == weight else tensor
        for tensor in row.tensors
    )
    return replace(row, kind="linear", tensors=tensors, quantized=True)
