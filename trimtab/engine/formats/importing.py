"""The import of bitsandbytes: with the kernels that it includes, no others, and without torch's compiler.

Where a CPU has AVX512-BF16, bitsandbytes 0.50 asks the `kernels` package for a product from the hub while it is imported: a
download and foreign code where the package is installed, a warning in every process where it is not.
bitsandbytes also gives four functions to `torch.compile` while it is imported, which loads inductor: two seconds of every start.
Two are for training. Two unpack weights whose last side is odd, one product and one cast for each value: torch's own operators give
the same bits, without a C++ compiler. `TORCHDYNAMO_DISABLE` is torch's switch for it.
Source: bitsandbytes 0.50.2, backends/cpu/ops.py, backends/default/ops.py; torch 2.13, _dynamo/eval_frame.py.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

NO_COMPILER = "TORCHDYNAMO_DISABLE"


@contextmanager
def without_compiler() -> Iterator[None]:
    """Make `torch.compile` return functions as they are, in a process that has not compiled anything yet."""
    if "torch._inductor.compile_fx" in sys.modules:  # a program that compiles: the import costs nothing more
        yield
        return
    before = os.environ.get(NO_COMPILER)
    os.environ[NO_COMPILER] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NO_COMPILER]
        else:
            os.environ[NO_COMPILER] = before


@contextmanager
def without_hub_kernels() -> Iterator[None]:
    """Make `import kernels` fail while bitsandbytes is imported, and suppress its warning."""
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level, known = log.level, sys.modules.get("kernels")
    log.setLevel(logging.ERROR)
    sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        log.setLevel(level)
        if known is None:
            del sys.modules["kernels"]
        else:
            sys.modules["kernels"] = known
