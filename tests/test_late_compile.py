"""A package whose functions go to torch.compile at import is imported without torch's compiler, and compiled when it is called."""

import importlib
import subprocess
import sys

import pytest
import torch

from trimtab.runtime.late_compile import late_compile

SOURCE = """
import math
import torch

def double(x):
    return 2 * x

plain = double
double = torch.compile(double, dynamic=False)
foreign = torch.compile(math.sqrt)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "late_sample.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "late_sample"
    sys.modules.pop("late_sample", None)


def test_a_function_is_compiled_at_its_first_call_with_its_options(package, monkeypatch):
    given = []

    def compile_now(model, **options):
        given.append((model.__name__, options))
        return lambda *args: ("compiled", model(*args))

    monkeypatch.setattr(torch, "compile", compile_now)
    with late_compile(package):
        importlib.import_module(package)
    assert torch.compile is compile_now
    made = sys.modules[package]
    # What is not the package's own is compiled at once.
    assert given == [("sqrt", {})] and made.foreign(4) == ("compiled", 2)
    assert made.double(3) == made.double(3) == ("compiled", 6)
    assert given == [("sqrt", {}), ("double", {"dynamic": False})]
    assert made.double.__name__ == "double"


def test_torch_compile_is_put_back_after_an_import_that_fails(tmp_path, monkeypatch):
    (tmp_path / "broken_sample.py").write_text("raise ImportError('no')")
    monkeypatch.syspath_prepend(tmp_path)
    before = torch.compile
    with pytest.raises(ImportError, match="no"), late_compile("broken_sample"):
        importlib.import_module("broken_sample")
    assert torch.compile is before


def test_bitsandbytes_does_not_bring_inductor():
    code = (
        "import sys, trimtab.runtime.quant\n"
        "assert 'bitsandbytes.backends.default.ops' in sys.modules\n"
        "assert 'torch._inductor.compile_fx' not in sys.modules, 'inductor'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
