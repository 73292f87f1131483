"""On which device do accelerate's hooks compute a module, and where are its weights stored?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

HOOK = "_hf_hook"
CPU, DISK = "cpu", "disk"


def hooks_of(module: nn.Module) -> tuple[Any, ...]:
    """Return the hooks of a module in the order they run, those of a SequentialHook as single hooks; () if it has none. Hooks are
    read by attributes, so that accelerate is not imported. Source: accelerate 1.13.0 and 1.15.0, hooks.py."""

    def flat(hook: Any) -> Iterator[Any]:
        if hasattr(hook, "hooks"):
            for inner in hook.hooks:
                yield from flat(inner)
        elif hook is not None:
            yield hook

    return tuple(flat(module.__dict__.get(HOOK)))


def is_sequential(module: nn.Module) -> bool:
    """Return whether the module has several hooks as one SequentialHook."""
    return hasattr(module.__dict__.get(HOOK), "hooks")


def offload_hook(module: nn.Module) -> Any:
    """Return the last hook that offloads the module's weights after its forward, None if there is none."""
    return next((hook for hook in reversed(hooks_of(module)) if getattr(hook, "offload", False)), None)


def offloaded_to(module: nn.Module) -> str | None:
    """Return "cpu" or "disk" for a module whose weights a hook keeps there between forwards, else None."""
    hook = offload_hook(module)
    if hook is None:
        return None
    index = getattr(getattr(hook.weights_map, "dataset", None), "index", None) or {}
    prefix = getattr(hook.weights_map, "prefix", "")
    own = [name for name, _ in module.named_parameters(recurse=False)]
    return DISK if any(f"{prefix}{name}" in index for name in own) else CPU


def execution_device(module: nn.Module) -> torch.device | None:
    """Return the device that a module computes on: its last hook's, or that of its tensors; None if neither has one."""
    devices = [getattr(hook, "execution_device", None) for hook in hooks_of(module)]
    named = [device for device in devices if device is not None]
    if named:
        return torch.device(named[-1])
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return next((tensor.device for tensor in own if tensor.device.type != "meta"), None)


@contextmanager
def hooks_aside(model: nn.Module) -> Iterator[None]:
    """Remove all hook objects from the modules temporarily, without calling them, so that no tensor moves.

    PEFT deep-copies modules while it injects (modules_to_save; 4-bit layers under DoRA). With its hook, a copy would
    include the hook's maps: every offloaded weight, and the tied embedding table.
    """
    held = [(module, module.__dict__.pop(HOOK)) for module in model.modules() if HOOK in module.__dict__]
    try:
        yield
    finally:
        for module, hook in held:
            module.__dict__[HOOK] = hook
