"""Merges into weights that a hook offloads: each layer's hook loads the weights, PEFT merges, and the hook keeps the
result.

PEFT's `onload_layer` does this for a plain hook, with four faults. A `""` entry in a device map leaves two hooks on a
module, as one SequentialHook, which PEFT does not know: it silently merges into a weight without data. It is called on
every module, the whole model first, and loads everything that is offloaded below it to the GPU at once. For a layer on
disk, it reads all offloaded weights, once for each layer, and fails with a KeyError if some are on the CPU too. So
offload hooks are hidden from it while a merge runs. Source: PEFT 0.19.1 and 0.21.2, tuners/tuners_utils.py,
onload_layer and _unload_and_optionally_merge; accelerate 1.13.0 and 1.15.0, hooks.py and utils/offload.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from trimtab.bridge.hooks import HOOK, offload_hook


def keep_merges(peft_model: Any) -> None:
    """Make all methods that merge, unmerge and unload reach the weights of offloaded layers."""
    tuner, is_split = peft_model.base_model, False
    for layer in tuner.modules():
        base = getattr(layer, "base_layer", None)
        if isinstance(base, nn.Module) and hasattr(layer, "merge") and offload_hook(base) is not None:
            _wrap(layer, lambda layer: _brought(layer.base_layer), "merge", "unmerge")
        is_split = is_split or offload_hook(layer) is not None
    if is_split:
        _wrap(tuner, _hidden, "merge_and_unload", "unload", "merge_adapter", "unmerge_adapter")


def _wrap(module: Any, around: Callable[[Any], AbstractContextManager[None]], *names: str) -> None:
    """Run methods of one object inside a block."""

    def inside(name: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with around(self):
                return getattr(type(self), name)(self, *args, **kwargs)

        return call

    for name in names:
        setattr(module, name, MethodType(inside(name), module))


class _Hidden:
    """Replaces a hook, so that PEFT finds none that it would use; keeps the hook for `_brought`."""

    def __init__(self, hook: Any) -> None:
        self.hooks = (hook,)


@contextmanager
def _hidden(tuner: nn.Module) -> Iterator[None]:
    """Hide offload hooks from PEFT; the hook objects are restored unchanged."""
    held = [(module, module.__dict__[HOOK]) for module in tuner.modules() if offload_hook(module) is not None]
    for module, hook in held:
        module.__dict__[HOOK] = _Hidden(hook)
    try:
        yield
    finally:
        for module, hook in held:
            module.__dict__[HOOK] = hook


@contextmanager
def _brought(base: nn.Module) -> Iterator[None]:
    """Load a base layer's weights on its device, and keep the result unless the call failed."""
    hook = offload_hook(base)
    own = [*base.named_parameters(recurse=False)]
    if hook is None or not any(tensor.device.type == "meta" for _, tensor in own):
        yield
        return
    hook.pre_forward(base)
    try:
        yield
        tensors = (*base.named_parameters(recurse=False), *base.named_buffers(recurse=False))
        hook.weights_map = {name: tensor.detach().to("cpu") for name, tensor in tensors}
    finally:
        hook.post_forward(base, torch.tensor([]))
