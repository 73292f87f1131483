"""Machine code of CUDA sources for cards that need not be here: NVRTC, or a toolkit's nvcc, compiles each once for every later
process. Without either a test is skipped."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import lru_cache
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
    command = [nvcc, "-std=c++17", f"-arch={target}", "-cubin", *options]
    kept = cuda_on_cpu.folder() / f"{hashlib.sha256(repr((_version(nvcc), command, source)).encode()).hexdigest()}.cubin"
    if kept.exists():
        kept.touch()  # it is in use
        return kept.read_bytes()
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        file, made = Path(folder) / "kernels.cu", Path(folder) / "kernels.cubin"
        file.write_text(source, encoding="utf-8")
        ran = subprocess.run([*command, "-o", str(made), str(file)], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        made.replace(kept)
    return kept.read_bytes()


@lru_cache
def _version(nvcc: str) -> str:
    return subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout


def _folder(compiler: nvrtc.Compiler) -> Path:
    """Return the folder of what this build of the compiler makes, called as it is now: the cache's own key has neither."""
    path = Path(compiler.path)
    build = (path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else ()  # the system's search has a bare name
    facts = (Path(nvrtc.__file__).read_bytes(), compiler.path, build)
    return cuda_on_cpu.folder() / f"nvrtc-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"
