"""What is loaded on a thread before torch is imported: the same libraries, and nothing where that is not possible."""

import subprocess
import sys

import pytest

from trimtab.process import before_torch

LOADED = """
import sys
from trimtab.process import before_torch
thread = before_torch.load_libraries()
thread.join(120)
assert "torch" not in sys.modules
names = [line.split("/")[-1].strip() for line in open("/proc/self/maps") if ".so" in line]
assert "libtorch_python.so" in names and any(name.startswith("libc10.so") for name in names)
import torch
assert float(torch.ones(3) @ torch.arange(3.0)) == 3
assert before_torch.load_libraries() is None
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="files of another form")
def test_torch_finds_the_libraries_that_were_loaded_before():
    made = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr


def test_a_folder_without_the_libraries_costs_nothing(tmp_path):
    thread = before_torch._begin("test", lambda: before_torch._load(tmp_path))
    thread.join(10)
    assert not thread.is_alive()


def test_a_cpu_needs_no_context_and_a_machine_without_a_driver_gets_none():
    assert before_torch.make_context("cpu") is None
    thread = before_torch.make_context("cuda:99")
    if thread is not None:
        thread.join(60)
        assert not thread.is_alive()
