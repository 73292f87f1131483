"""Machine code of CUDA sources for cards that need not be here: NVRTC compiles each once for every later process.

Where a toolkit's nvcc alone is installed it compiles them each time; without either a test is skipped.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import cuda_on_cpu
from trimtab.engine.cuda import nvrtc
from trimtab.process import user_cache


def machine_code(source: str, target: str, options: Sequence[str] = ()) -> bytes:
    """Return a source's machine code for a target. Errors: DeviceError or AssertionError with the compiler's log."""
    compiler = nvrtc.find_compiler()
    if compiler is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(user_cache, "user_cache_path", lambda name: _folder(compiler))
            return nvrtc.compiled(compiler, source, target, options)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("neither NVRTC nor nvcc is installed")
    with tempfile.TemporaryDirectory() as folder:
        file, made = Path(folder) / "kernels.cu", Path(folder) / "kernels.cubin"
        file.write_text(source, encoding="utf-8")
        command = [nvcc, "-std=c++17", f"-arch={target}", "-cubin", *options, "-o", str(made), str(file)]
        ran = subprocess.run(command, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return made.read_bytes()


def _folder(compiler: nvrtc.Compiler) -> Path:
    """Return the folder of what this build of the compiler makes, called as it is now: the cache's own key has neither."""
    path = Path(compiler.path)
    build = (path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else ()  # the system's search has a bare name
    facts = (Path(nvrtc.__file__).read_bytes(), compiler.path, build)
    return cuda_on_cpu.folder() / f"nvrtc-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"
