"""The import of a package that calls torch.compile at import: each function is compiled at its first call.

`torch.compile` imports torch's compiler, inductor included, as soon as it is given a function: more than a second of every start,
for functions of bitsandbytes that most processes never call. What is called is compiled then, with the same options.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FunctionType
from typing import Any

import torch

_ONE_IMPORT = threading.Lock()


@contextmanager
def late_compile(package: str) -> Iterator[None]:
    """While the block imports a package, functions that the package passes to torch.compile are compiled at their first call.

    Functions that other threads pass to torch.compile at the same time are compiled as usual.
    """
    with _ONE_IMPORT:
        real = torch.compile
        torch.compile = _late(real, package)  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.compile = real


def _late(real: Callable[..., Any], package: str) -> Callable[..., Any]:
    def compile_late(model: Any = None, **options: Any) -> Any:
        is_own = isinstance(model, FunctionType) and model.__module__.partition(".")[0] == package
        if not is_own:
            return real(model, **options)
        compiled: list[Any] = []

        @wraps(model)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not compiled:
                compiled.append(real(model, **options))
            return compiled[0](*args, **kwargs)

        return call

    return compile_late
