"""The import of bitsandbytes: with the kernels that it includes, and no others.

Where a CPU has AVX512-BF16, bitsandbytes 0.50 asks the `kernels` package for a product from the hub while it is imported: a
download and foreign code where the package is installed, a warning in every process where it is not.
Source: bitsandbytes 0.50.2, backends/cpu/ops.py.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_hub_kernels() -> Iterator[None]:
    """Make `import kernels` fail while bitsandbytes is imported, and keep it from saying so."""
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
