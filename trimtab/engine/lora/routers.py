"""How does a router with a bare weight, a Linear layer once, take LoRA?"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor, nn

from trimtab.engine.lora.store import AdapterStore
from trimtab.errors import DeviceError

_USES_LINEAR = re.compile(r"\blinear\([^\n]*self\.weight\b|super\(\)\.forward\(")
_CASTS = (Tensor.to, Tensor.type, Tensor.float)


def takes_lora(module: nn.Module) -> bool:
    """Return whether a module is a router whose only weight is a matrix [E, D] that `linear` multiplies with."""
    weight = module._parameters.get("weight")
    is_router = type(module) is not nn.Linear and re.search(r"router|gate", type(module).__name__, re.IGNORECASE)
    if not is_router or weight is None or weight.dim() != 2:
        return False
    own_class: object = type(module)
    return set(module._parameters) <= {"weight", "bias"} and _uses_linear(own_class)


@cache
def _uses_linear(module_class: type[nn.Module]) -> bool:
    try:
        return len(_USES_LINEAR.findall(inspect.getsource(module_class.forward))) == 1
    except (OSError, TypeError):
        return False


class RouterModule(nn.Module):
    """A router with adapters. Path, parameters, buffers and attributes are the original's."""

    quant_kind = "none"

    def __init__(self, original: nn.Module, store: AdapterStore, module_path: str, part: str) -> None:
        super().__init__()
        # In __dict__, not as a child: parameter paths stay the same.
        self.__dict__.update(
            original=original, adapter_store=store, adapters={}, module_path=module_path, part=part,
            training=original.training, _parameters=original._parameters, _buffers=original._buffers,
            _modules=original._modules,
        )  # fmt: skip

    @property
    def bias(self) -> Tensor | None:
        return self._parameters.get("bias")

    def forward(self, *args: object, **kwargs: object) -> object:
        adapters, original = self.__dict__["adapters"], self.__dict__["original"]
        if not any(name in adapters for name in self.__dict__["adapter_store"].selection.active()):
            return original(*args, **kwargs)
        weight = original.weight.as_subclass(_AddingWeight)
        calls: list[bool] = []

        def change(x: Tensor, y: Tensor) -> Tensor:
            calls.append(True)
            return self._adapted(x, y)

        weight.change = change
        result = torch.func.functional_call(original, {"weight": weight}, args, kwargs, tie_weights=False)
        if len(calls) != 1:
            raise DeviceError(
                f"the router computed with its weight {len(calls)} times, once is known", device=str(original.weight.device),
                block=self.__dict__["module_path"],
            )  # fmt: skip
        return result

    def _adapted(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the output y [N, E] for x [N, D] with each row's adapter; N is the batch's rows times their tokens."""
        store, adapters = self.__dict__["adapter_store"], self.__dict__["adapters"]
        selection = store.selection
        if selection.rows is None:
            return adapters[selection.name].linear.apply(self, x, y)
        rows = len(selection.rows)
        is_flat = x.dim() == 2 and x.shape[0] != rows and x.shape[0] % rows == 0
        by_row, out = (x.unflatten(0, (rows, -1)), y.unflatten(0, (rows, -1))) if is_flat else (x, y)
        for name, index in selection.groups(self.__dict__["part"], by_row.shape[0], by_row.device):
            if name in adapters:
                out = out.index_copy(0, index, adapters[name].linear.apply(self, by_row[index], out[index]))
        return out.flatten(0, 1) if is_flat else out

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        if "original" in self.__dict__:
            return getattr(self.__dict__["original"], name)
        return super().__getattr__(name)


class _AddingWeight(Tensor):
    """A weight with which `linear` returns `change(x W^T)`; a cast of it does the same."""

    change: Callable[[Tensor, Tensor], Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Tensor], types: object, args: tuple[Tensor, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if func is nn.functional.linear and len(args) > 1 and isinstance(args[1], cls):
                return args[1].change(args[0], result)
            if func in _CASTS and isinstance(args[0], cls) and isinstance(result, Tensor):
                change = args[0].change
                result = result.as_subclass(cls)
                result.change = change
        return result
