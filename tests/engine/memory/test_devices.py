"""The machine: memory within its limits, rates that are measured once and never trusted when damaged."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace

import psutil
import pytest
import torch

from tests.raised import refused
from trimtab.engine.memory import rates as devices
from trimtab.machine import machine_cache, memory
from trimtab.planning import Rates
from trimtab.process import user_cache

MIB = 2**20
MEASURED = Rates(host_Bps=7e9)


def test_the_cpu_is_the_device_when_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.resolve_device("auto") == "cpu"


@pytest.mark.parametrize(("asked", "found"), [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", "cpu")])
def test_devices_are_named_with_their_number(asked, found, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.resolve_device(asked) == found


def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    error = refused(devices.resolve_device, "cuda:2")
    assert (error.field, error.value) == ("device", "cuda:2") and error.allowed == ("auto", "cpu", "cuda:0", "cuda:1")


def test_a_machine_without_gpu_has_host_memory_only():
    machine = devices.read_machine("cpu")
    assert (machine.execution_device, machine.gpu_total_bytes, machine.has_pinned) == ("cpu", 0, False)
    assert 0 < machine.host_available_bytes <= psutil.virtual_memory().total
    assert 0 < machine.process_bytes < psutil.virtual_memory().total


def test_who_plans_has_the_libraries_of_loading_in_the_count():
    # torch, transformers and bitsandbytes: together they take more than 200 MiB.
    code = (
        "import sys; from trimtab import api; from trimtab.request import LoadRequest; "
        "from trimtab.engine.memory import rates as devices; "
        "assert 'bitsandbytes' not in sys.modules; devices.measure_rates = lambda device: None; "
        "machine, _ = api._ask_machine(LoadRequest(model='m', device='cpu'), None); "
        "print('bitsandbytes' in sys.modules, machine.process_bytes)"
    )
    has_library, counted = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert has_library == "True" and int(counted) > 200 * MIB


# Control groups -------------------------------------------------------------------------------------------------------


def group(folder, limit, used, cached, *, version=2):
    limit_name, used_name, cache_keys = memory.CGROUP_FILES[2 - version]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / limit_name).write_text(f"{limit}\n")
    (folder / used_name).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{cache_keys[0]} {cached}\n{cache_keys[1]} 0\nslab 9\n")


def available(tmp_path, line):
    (tmp_path / "membership").write_text(f"{line}\n")
    return memory.cgroup_available_bytes(tmp_path / "membership", tmp_path / "fs")


@pytest.mark.parametrize(("limit", "used", "cached", "line", "left"), [
    (1000, 300, 0, "0::/", 700), (1000, 950, 600, "0::/", 650), (1000, 1200, 0, "0::/", 0), ("max", 300, 0, "0::/", None),
    (1000, 300, 0, "0::/../../outer/unknown", 700),
], ids=["limit", "page cache", "over", "no limit", "of the outer machine"])  # fmt: skip
def test_a_limit_leaves_what_is_not_used_and_can_be_taken_back(tmp_path, limit, used, cached, line, left):
    group(tmp_path / "fs", limit, used, cached)
    assert available(tmp_path, line) == left


def test_the_tightest_group_on_the_way_up_counts(tmp_path):
    group(tmp_path / "fs", "max", 0, 0)
    group(tmp_path / "fs/user", 500, 400, 0)
    group(tmp_path / "fs/user/job", 1000, 100, 0)
    assert available(tmp_path, "0::/user/job") == 100


def test_version_1_groups_are_read_too_and_their_no_limit_number_is_none(tmp_path):
    group(tmp_path / "fs/memory/job", 1000, 300, 100, version=1)
    group(tmp_path / "fs/memory", 9223372036854771712, 300, 0, version=1)
    assert available(tmp_path, "4:cpu,memory:/job") == 800 and available(tmp_path, "4:memory:/") is None


def test_other_systems_have_no_groups(tmp_path):
    assert memory.cgroup_available_bytes(tmp_path / "none", tmp_path) is None


def test_the_container_limit_bounds_what_the_machine_has(monkeypatch):
    monkeypatch.setattr(memory, "cgroup_available_bytes", lambda: 123)
    assert memory.host_available_bytes() == 123


# This process ---------------------------------------------------------------------------------------------------------


def test_the_peak_follows_an_allocation_stays_when_it_is_gone_and_is_not_the_parents():
    """In a process of its own: this one may have freed memory to give out again. A parent's memory is no part of its peak."""
    held = bytearray(b"x" * (512 * MIB))
    code = (
        "from trimtab.machine import memory as d; a = d.process_bytes(); block = bytearray(b'x' * (64 * 2**20)); "
        "b = d.process_bytes(); del block; print(a, b, d.peak_host_bytes())"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    del held
    before, during, peak = map(int, child.stdout.split())
    assert during >= before + 60 * MIB and peak >= before + 60 * MIB
    # torch alone takes about 250 MiB; the parent held 512 MiB more than it. The other systems count per process from the start.
    assert sys.platform != "linux" or 100 * MIB < peak < 512 * MIB


def test_the_spill_folder_is_the_one_asked_for_and_its_disk_is_measured(tmp_path):
    folder = tmp_path / "not" / "yet" / "there"
    assert memory.spill_folder(str(folder)) == folder
    assert 0 < memory.disk_free_bytes(str(folder)) == pytest.approx(psutil.disk_usage(str(tmp_path)).free, rel=0.2)


def test_a_disk_that_does_not_exist_is_refused(monkeypatch):
    monkeypatch.setattr(memory.Path, "exists", lambda self: False)
    error = refused(memory.disk_free_bytes, "E:/spill")
    assert (error.field, error.value) == ("offload_dir", "E:/spill")


# Rates ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Count measurements and keep the cache in the test's folder."""
    calls = []
    monkeypatch.setattr(user_cache, "user_cache_path", lambda name: tmp_path / name)
    monkeypatch.setattr(devices, "_measure", lambda device: calls.append(str(device)) or MEASURED)
    monkeypatch.setattr(devices, "_cpu_is_busy", lambda: False)  # it computes for a while
    return calls


def file_of(device="cpu"):
    return machine_cache.rates_path(devices.device_name(device), str(torch.__version__), torch.get_num_threads())


def test_rates_are_measured_once_and_read_back_equal(cache):
    assert devices.measure_rates("cpu") == MEASURED == devices.measure_rates("cpu")
    assert cache == ["cpu"]
    assert [file.name for file in file_of().parent.iterdir()] == [file_of().name]


def test_rates_of_a_busy_machine_are_kept_for_minutes_only(cache, monkeypatch):
    now, busy = [1000.0], [True]
    monkeypatch.setattr(machine_cache.time, "time", lambda: now[0])
    monkeypatch.setattr(devices, "_cpu_is_busy", lambda: busy[0])
    assert devices.measure_rates("cpu") == MEASURED == devices.measure_rates("cpu")
    assert cache == ["cpu"]
    now[0] += machine_cache.BUSY_S
    busy[0] = False
    assert devices.measure_rates("cpu") == MEASURED and len(cache) == 2
    now[0] += 365 * 86400
    assert devices.measure_rates("cpu") == MEASURED and len(cache) == 2, "those of an idle machine stay"
    busy[0] = True
    file_of().unlink()
    devices.measure_rates("cpu")
    now[0] -= 86400  # a clock that was set back
    devices.measure_rates("cpu")
    assert len(cache) == 4


@pytest.mark.parametrize(("percent", "is_busy"), [(None, False), (0, False), (20, False), (21, True), (100, True)])
def test_a_gpu_that_others_use_is_busy(percent, is_busy, monkeypatch):
    monkeypatch.setattr(devices.gpus, "busy_percent", lambda index: percent if index == 1 else 100)
    assert devices._gpu_is_busy(torch.device("cuda:1")) is is_busy and not devices._gpu_is_busy(torch.device("cpu"))


@pytest.mark.parametrize(("share", "is_busy"), [(1.0, False), (0.85, False), (0.75, True), (0.5, True)])
def test_threads_that_get_less_than_their_cores_are_on_a_busy_machine(share, is_busy, monkeypatch):
    clock = [0.0]

    def wall() -> float:
        clock[0] += 0.01
        return clock[0]

    threads = torch.get_num_threads()
    monkeypatch.setattr(devices, "GEMV_SIDE", 8)
    monkeypatch.setattr(devices, "time", SimpleNamespace(perf_counter=wall, process_time=lambda: clock[0] * share * threads))
    assert devices._cpu_is_busy() is is_busy


def test_without_the_cache_they_are_measured_every_time_and_nothing_is_written(cache):
    devices.measure_rates("cpu", cache=False)
    devices.measure_rates("cpu", cache=False)
    assert cache == ["cpu", "cpu"]
    assert not file_of().exists()


@pytest.mark.parametrize("damaged", [
    "", "{", "[]", "null", "\x00\xff", '{"host_Bps": 1.0}', json.dumps(asdict(MEASURED) | {"other": 1.0}),
    json.dumps(asdict(MEASURED) | {"disk_Bps": 0}), json.dumps(asdict(MEASURED) | {"disk_Bps": -1.0}),
    json.dumps(asdict(MEASURED) | {"disk_Bps": "fast"}), json.dumps(asdict(MEASURED) | {"disk_Bps": None}),
    json.dumps(asdict(MEASURED) | {"disk_Bps": float("nan")}),
    json.dumps(asdict(MEASURED) | {"busy_at_s": "noon"}), json.dumps(asdict(MEASURED) | {"busy_at_s": 1e400}),
])  # fmt: skip
@pytest.mark.parametrize("has_digest", [False, True], ids=["as it is", "with its digest"])
def test_a_damaged_cache_is_measured_again_and_replaced(damaged, has_digest, cache):
    file = file_of()
    if has_digest:
        user_cache.write_own(file, file.name, damaged.encode("latin-1"))
    else:
        file.write_text(damaged, encoding="latin-1")
    assert devices.measure_rates("cpu") == MEASURED and devices.measure_rates("cpu") == MEASURED
    assert cache == ["cpu"]


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(cache, tmp_path):
    (tmp_path / "trimtab").write_text("a file where the folder should be")
    assert devices.measure_rates("cpu") == MEASURED
    assert (tmp_path / "trimtab").read_text() == "a file where the folder should be"


def test_another_device_torch_or_thread_count_is_another_file(cache):
    facts = ("a card", "2.9.0", 4)
    changed = [("Another/Card 9000", *facts[1:]), (facts[0], "9.9.9+cu999", 4), (*facts[:2], 77)]
    names = {machine_cache.rates_path(*one) for one in (facts, *changed)}
    assert len(names) == 4
    assert len({name.parent for name in names}) == 1  # no separator of a device name makes a folder


def test_a_real_measurement_has_every_rate_and_makes_sense(tmp_path, monkeypatch):
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / name)
    for name, size in (("SAMPLE_BYTES", 2**22), ("DISK_SAMPLE_BYTES", 2**22), ("GEMV_SIDE", 512)):
        monkeypatch.setattr(devices, name, size)
    rates = devices.measure_rates("cpu", cache=False)
    assert rates.host_Bps > 1e8 and rates.disk_Bps > 1e6
    # Without a GPU the execution device is the CPU itself.
    assert (rates.device_Bps, rates.device_flops) == (rates.host_matmul_Bps, rates.host_flops)
    assert rates.pinned_h2d_Bps == rates.host_Bps and rates.launch_s > 0 and 0 < rates.transfer_s < 1e-3
    assert 0 < rates.disk_access_s < 1
    # Everything that a small operation takes here is in its time.
    monkeypatch.setattr(torch, "pow", lambda base, _: (sum(range(20_000)), base)[1])
    assert devices._operation_s() > 2 * rates.launch_s
    # The sample file is gone.
    assert list((tmp_path / "trimtab" / "spill").iterdir()) == []


def test_a_disk_that_cannot_be_written_leaves_the_assumed_rate(tmp_path, monkeypatch):
    (tmp_path / "trimtab").write_text("a file where the folder should be")
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / name)
    monkeypatch.setattr(devices, "_host_products", lambda: {"host_matmul_Bps": 1e9, "host_flops": 1e10})
    measured = devices.measure_rates("cpu", cache=False)
    assumed = Rates()
    assert (measured.disk_Bps, measured.disk_access_s) == (assumed.disk_Bps, assumed.disk_access_s)
    assert replace(measured, host_Bps=1.0) != replace(assumed, host_Bps=1.0)
