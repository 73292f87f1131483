"""A check that passed is not repeated by the next process on the same card; anything else is checked again."""

from types import SimpleNamespace

import pytest
import torch

from trimtab.engine.cuda import check_cache as kept_checks
from trimtab.engine.cuda import nvrtc
from trimtab.engine.cuda.check_cache import KeptChecks
from trimtab.engine.kernels.selfcheck import KernelFamily
from trimtab.process import user_cache as own_folder

CARD = SimpleNamespace(name="a card", uuid="1", total_memory=2**33, multi_processor_count=4, major=9, minor=0)


@pytest.fixture
def card(tmp_path, monkeypatch):
    """A GPU whose facts the test may change, and an empty folder."""
    shown = SimpleNamespace(**vars(CARD))
    monkeypatch.setattr(own_folder, "user_cache_path", lambda name: tmp_path / name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: shown)
    monkeypatch.setattr(nvrtc, "why_not", lambda device: None)
    monkeypatch.setattr(nvrtc, "find_compiler", lambda: SimpleNamespace(version=(13, 0)))
    monkeypatch.setattr(nvrtc, "driver_version", lambda: 13000)
    return shown


def kept(*what):
    return KeptChecks.of("cuda:0").find(*what)


def passed(*what, entry=None):
    checks = KeptChecks.of("cuda:0")
    checks.keep(entry or {"us": {"a": [1.0, 2.0]}}, *what)
    checks.save()


def test_what_passed_is_known_to_the_next_process_for_the_same_check_alone(card):
    passed("products", (64, 64), "torch.bfloat16")
    passed("ends", 8)
    assert kept("products", (64, 64), "torch.bfloat16") == {"us": {"a": [1.0, 2.0]}}
    assert kept("ends", 8) is not None
    assert kept("products", (64, 128), "torch.bfloat16") is None and kept("ends", 9) is None


@pytest.mark.parametrize("fact, value", [("uuid", "2"), ("name", "another"), ("multi_processor_count", 5), ("minor", 1)])
def test_another_card_is_checked_itself(fact, value, card):
    passed("products")
    setattr(card, fact, value)
    assert kept("products") is None


@pytest.mark.parametrize("name", ["driver_version", "find_compiler"])
def test_another_driver_or_compiler_checks_again(name, card, monkeypatch):
    passed("products")
    new = 13010 if name == "driver_version" else SimpleNamespace(version=(13, 1))
    monkeypatch.setattr(nvrtc, name, lambda: new)
    assert kept("products") is None


def test_changed_code_checks_again(card, monkeypatch):
    passed("products")
    monkeypatch.setattr(kept_checks, "sources", lambda: "changed")
    assert kept("products") is None


def test_a_damaged_file_is_as_if_it_were_not_there(card, tmp_path):
    passed("products")
    (file,) = (tmp_path / "trimtab" / "checked").iterdir()
    whole = bytearray(file.read_bytes())
    whole[-3] ^= 1
    file.write_bytes(whole)
    assert kept("products") is None


def test_two_processes_that_save_lose_nothing_of_each_other(card):
    first, second = KeptChecks.of("cuda:0"), KeptChecks.of("cuda:0")
    first.keep({}, "one")
    second.keep({}, "two")
    first.save()
    second.save()
    assert kept("one") == {} and kept("two") == {}


def test_a_cpu_keeps_nothing(card, tmp_path):
    checks = KeptChecks.of("cpu")
    checks.keep({}, "one")
    checks.save()
    assert checks.find("one") == {} and not (tmp_path / "trimtab").exists()


def tried(checks, why, *, times=None, calls=None):
    def wrong(module, us):
        calls.append(module)
        us.update(times or {"add": (1.0, 2.0)})
        return why

    left_out, measured = {}, {}
    module = KernelFamily("small", lambda: "module", wrong, ("bf16",)).choose(checks, left_out, measured)
    checks.save()
    return module, left_out, measured


def test_kernels_that_passed_are_loaded_without_a_check_and_with_the_times_of_then(card):
    calls = []
    first = tried(KeptChecks.of("cuda:0"), None, calls=calls)
    again = tried(KeptChecks.of("cuda:0"), "would be wrong", calls=calls)
    assert calls == ["module"] and first == again == ("module", {}, {"add": (1.0, 2.0)})


def test_kernels_that_failed_are_checked_again_each_time(card):
    calls = []
    first = tried(KeptChecks.of("cuda:0"), "slower here", calls=calls)
    second = tried(KeptChecks.of("cuda:0"), None, calls=calls)
    assert first[:2] == (None, {"small": "slower here"}) and second[:2] == ("module", {}) and len(calls) == 2
