"""What every test runs under: one thread, no network, and a cache folder of its own."""

import gc
import logging
import os
import random
import socket
import sys
import tempfile
import zlib

import pytest

from tests import cuda_on_cpu
from tests.examples import examples

# Before anything imports torch, transformers or platformdirs.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ[cuda_on_cpu.FOLDER_VARIABLE] = str(cuda_on_cpu.folder())
_CACHE = tempfile.TemporaryDirectory(prefix="trimtab-tests-", ignore_cleanup_errors=True)
os.environ["XDG_CACHE_HOME"] = _CACHE.name

# Collecting makes a million objects that stay: looking for garbage among them takes a quarter of the time. Afterwards it is looked
# for less often than Python would, before trimtab notes how often: a twentieth of the tests' time.
gc.disable()
gc.set_threshold(100_000, 20, 10)


def pytest_configure(config):
    """Tests of properties that name no number of examples make a quarter of hypothesis's 100; a busy machine fails none of them."""
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import HealthCheck, settings

        settings.register_profile(
            "trimtab", max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
        )
        settings.load_profile("trimtab")


def pytest_collection_finish():
    """Let later searches for garbage pass over what torch, transformers and the tests' modules hold."""
    gc.collect()
    gc.freeze()
    gc.enable()
    keep_rates()


def keep_rates():
    """Give plans for the CPU rates that no other work on this machine changes, in this process and its children.

    Measuring them computes for seconds, and again every ten minutes where the machine is busy.
    """
    import torch
    from platformdirs import user_cache_path

    from trimtab.engine.memory import rates as devices
    from trimtab.machine import machine_cache
    from trimtab.planning import Rates

    if user_cache_path("trimtab").is_relative_to(_CACHE.name):
        rates = Rates(
            host_Bps=6e9, pinned_h2d_Bps=6e9, pageable_h2d_Bps=6e9, disk_Bps=5e8, host_matmul_Bps=3e8, device_Bps=3e8,
            host_flops=1e10, device_flops=1e10, launch_s=7e-6, transfer_s=3e-6, disk_access_s=7e-5,
        )  # fmt: skip
        machine_cache.write_rates(devices.device_name("cpu"), str(torch.__version__), torch.get_num_threads(), rates)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """Draw what tests share as whichever of them asks first would, and leave that one's own draws as they are."""
    if fixturedef.scope == "function":
        return (yield)
    states = [(put_back, state()) for _, state, put_back in _generators()]
    _seed(f"{fixturedef.baseid}::{fixturedef.argname}{request.param_index or ''}")
    try:
        return (yield)
    finally:
        for put_back, state in states:
            put_back(state)


@pytest.fixture(autouse=True)
def own_draws(request):
    """Draw what each test draws without a seed as if no other test had run before it in its process."""
    _seed(request.node.nodeid)


def _seed(name):
    for seed, _, _ in _generators():
        seed(zlib.crc32(name.encode()))


def _generators():
    """Yield how to seed, read and put back each generator of what is imported; import nothing."""
    yield random.seed, random.getstate, random.setstate
    if "numpy" in sys.modules:
        one = sys.modules["numpy"].random
        yield one.seed, one.get_state, one.set_state
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        one = torch.default_generator  # `torch.manual_seed` formats the stack each time, for a GPU not yet used
        yield one.manual_seed, one.get_state, one.set_state
        if torch.cuda.is_initialized() or os.environ.get("TRIMTAB_TEST_DEVICE", "cpu") != "cpu":
            yield torch.cuda.manual_seed_all, torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Refuse every connection to another machine: a test that needs the network is a defect."""
    connect = socket.socket.connect

    def refuse(self, address):
        is_local = not isinstance(address, tuple) or address[0] in ("127.0.0.1", "::1", "localhost")
        assert is_local, f"a test opened a connection to {address}"
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(autouse=True)
def own_log():
    """Take back how `trimtab serve` logs if a test calls it in this process: its handler writes to a stream that is closed."""
    from trimtab.serve.contract.log import FORMAT_VARIABLE, LEVEL_VARIABLE

    loggers = [logging.getLogger(name) for name in ("trimtab", "uvicorn")]
    before = [(one, list(one.handlers), one.propagate, one.level) for one in loggers]
    variables = {name: os.environ.get(name) for name in (FORMAT_VARIABLE, LEVEL_VARIABLE)}
    yield
    for one, handlers, propagate, level in before:
        one.handlers[:], one.propagate = handlers, propagate
        one.setLevel(level)
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture
def no_kept_anatomies(monkeypatch):
    """For tests that change what an anatomy is made by: they take none of another test, and keep none for it."""
    from trimtab.machine import machine_cache

    monkeypatch.setattr(machine_cache, "find_anatomy", lambda *_, **__: None)
    monkeypatch.setattr(machine_cache, "keep_anatomy", lambda *_, **__: None)
