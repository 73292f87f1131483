"""The threads that compute: as asked, else the free and allowed cores. What is loaded during planning is what torch finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from trimtab.errors import RequestError
from trimtab.process import before_torch


def group(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


@pytest.mark.parametrize(("text", "cores"), [
    ("200000 100000", 2), ("150000 100000", 1), ("50000 100000", 1), ("max 100000", None), ("", None), ("x y", None),
])  # fmt: skip
def test_a_quota_is_whole_cores(tmp_path: Path, text: str, cores: int | None) -> None:
    group(tmp_path / "cg", cpu__max=text)
    assert before_torch.quota_cores(tmp_path / "cg", tmp_path / "none") == cores


def test_the_tightest_quota_above_a_process_holds(tmp_path: Path) -> None:
    member = tmp_path / "self"
    member.write_text("0::/pod/one\n")
    group(tmp_path / "cg", cpu__max="max 100000")
    group(tmp_path / "cg" / "pod", cpu__max="300000 100000")
    group(tmp_path / "cg" / "pod" / "one", cpu__max="800000 100000")
    assert before_torch.quota_cores(tmp_path / "cg", member) == 3


def test_the_first_version_of_control_groups_is_read_too(tmp_path: Path) -> None:
    member = tmp_path / "self"
    member.write_text("5:cpuset:/a\n4:cpu,cpuacct:/box\n")
    group(tmp_path / "cg" / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    group(tmp_path / "cg" / "cpu" / "box", cpu__cfs_quota_us="400000\n", cpu__cfs_period_us="100000\n")
    assert before_torch.quota_cores(tmp_path / "cg", member) == 4


@pytest.mark.parametrize(("cores", "quota", "load", "expected"), [
    (8, None, 0.4, None), (8, 3, 0.4, 3), (8, None, 2.9, 6), (8, 3, 2.9, 1), (2, None, 17.9, 1), (1, None, 9.0, None),
    (1, None, 0.0, None), (4, 16, 0.0, None),
])  # fmt: skip
def test_threads_have_cores_of_their_own(
    monkeypatch: pytest.MonkeyPatch, cores: int, quota: int | None, load: float, expected: int | None
) -> None:
    monkeypatch.setattr(before_torch, "_cores", lambda: cores)
    monkeypatch.setattr(before_torch, "quota_cores", lambda: quota)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0), raising=False)
    assert (before_torch.choose(beside_others=True) or cores) == (expected or cores)
    alone = min(cores, quota or cores)
    assert (before_torch.choose(beside_others=False) or cores) == alone


@pytest.mark.parametrize(("asked", "environ", "expected"), [
    (3, {}, "3"), (3, {"TRIMTAB_THREADS": "5"}, "3"), (None, {"TRIMTAB_THREADS": "5"}, "5"),
    (None, {"TRIMTAB_THREADS": "5", "OMP_NUM_THREADS": "7"}, "5"), (None, {"OMP_NUM_THREADS": "7"}, "7"),
    (2, {"OMP_NUM_THREADS": "7"}, "2"), (None, {}, "4"),
])  # fmt: skip
def test_a_flag_comes_first_then_our_variable_then_openmps(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, environ: dict[str, str], expected: str
) -> None:
    monkeypatch.setattr(before_torch, "choose", lambda **_: 4)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    before_torch.use_threads(asked, environ=environ)
    assert environ["OMP_NUM_THREADS"] == expected


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "", "5000"])
def test_what_is_no_number_of_threads_is_refused(value: str) -> None:
    with pytest.raises(RequestError) as caught:
        before_torch.use_threads(value, environ={})
    assert (caught.value.field, caught.value.value) == ("--threads", value)
    if value:
        with pytest.raises(RequestError) as caught:
            before_torch.use_threads(None, environ={"TRIMTAB_THREADS": value})
        assert caught.value.field == "TRIMTAB_THREADS"


def test_torch_of_a_command_computes_with_that_many() -> None:
    code = (
        "import json, sys\n"
        "from trimtab.cli import main as cli\n"
        "from trimtab.cli.commands import plan_run as line\n"
        "def run(options):\n"
        "    assert 'torch' not in sys.modules\n"
        "    import torch\n"
        "    print(json.dumps(torch.get_num_threads()))\n"
        "    return 0\n"
        "line.run_demo = run\n"
        "sys.exit(cli.main(['demo', '--threads', '1']))\n"
    )
    environ = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "TRIMTAB_THREADS")}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == 1


@pytest.mark.slow  # three processes with torch; the ones above set the same variable
def test_a_model_loaded_in_a_program_follows_the_variable_and_leaves_the_environment() -> None:
    code = (
        "import os, trimtab, trimtab.demo as demo, torch\n"
        "before = dict(os.environ)\n"
        "with trimtab.load(demo.BASE, device='cpu', context=64, images=0, audio_s=0.0): print(torch.get_num_threads())\n"
        "assert 'OMP_NUM_THREADS' not in os.environ and before['TRIMTAB_THREADS'] == os.environ['TRIMTAB_THREADS']\n"
    )
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | {"TRIMTAB_THREADS": "3"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3"]


def test_the_page_says_what_the_record_has():
    root = ROOT
    record = json.loads((root / "bench" / "results" / "threads.json").read_text("utf-8"))
    page = (root / "docs" / "run-on-a-cpu.md").read_text("utf-8")
    for way in ("chosen", "all_cores"):
        assert f"{record['medians'][way]['tokens_per_s']:.1f}" in page and f"{record['medians'][way]['process_s']:.1f} s" in page
    assert record["all_cores_over_chosen"]["decode_s"] > 1.2


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
def test_torch_finds_the_libraries_that_were_loaded_before() -> None:
    made = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr


def test_a_folder_without_the_libraries_costs_nothing(tmp_path: Path) -> None:
    thread = before_torch._begin("test", lambda: before_torch._load(tmp_path))
    thread.join(10)
    assert not thread.is_alive()


def test_a_cpu_needs_no_context_and_a_machine_without_a_driver_gets_none() -> None:
    assert before_torch.make_context("cpu") is None
    thread = before_torch.make_context("cuda:99")
    if thread is not None:
        thread.join(60)
        assert not thread.is_alive()
