"""Launch configurations as data that this code would make and that fit the card; a passed check is kept for that card alone."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from trimtab.engine.cuda import check_cache, launch_config, nvrtc, shipped_configs
from trimtab.engine.cuda.check_cache import CardEntries
from trimtab.engine.cuda.nvrtc import KernelLimits
from trimtab.engine.cuda.shipped_configs import Target
from trimtab.engine.kernels import gemv4
from trimtab.engine.kernels.selfcheck import KernelFamily
from trimtab.errors import DeviceError
from trimtab.process import user_cache

H200 = {"multiprocessors": 132, "shared_bytes": 232448}
TARGET = Target("NVIDIA H200", (9, 0), 132, 232448, "0123")
KEY = ("cut", (2560,), 2048, 1, False)
PAIR = ("cut", (512, 512), 2048, 3, True)
HELD = next(cut for cut in launch_config.cuts((2560,), 2048, 1, **H200) if cut.held and cut.may_be_normed)
RING = next(cut for cut in launch_config.cuts((512, 512), 2048, 3, pair=True, **H200) if not cut.held)
CONFIGS = {KEY: dataclasses.replace(HELD, normed=True), PAIR: RING}


def plain(configs):
    return {key: dataclasses.replace(cut, estimated_us=0.0) for key, cut in configs.items()}


def text_of(configs=CONFIGS, target=TARGET):
    return shipped_configs.to_text(shipped_configs.document(target, configs, {"torch": "2.9"}))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(user_cache, "user_cache_path", lambda name: tmp_path / name)
    return tmp_path / "trimtab" / check_cache.FOLDER


@pytest.fixture
def resources(tmp_path, monkeypatch):
    """Let the package's data be in the test's folder."""
    (tmp_path / "cuda").mkdir()
    monkeypatch.setattr(shipped_configs.resources, "files", lambda package: tmp_path)
    return tmp_path / "cuda" / "launch_configs_sm_90.json"


def test_a_document_comes_back_with_its_card_one_configuration_a_line():
    text = text_of()
    assert shipped_configs.from_text(text) == (TARGET, plain(CONFIGS))
    assert sum(line.startswith('  {"rows"') for line in text.splitlines()) == 2
    assert json.loads(text)["about"] == {"torch": "2.9"}


def test_the_shipped_configurations_were_measured_with_the_present_source():
    file = Path(gemv4.__file__).parent / "cuda" / "launch_configs_sm_90.json"
    target, configs = shipped_configs.from_text(file.read_text(encoding="utf-8"))
    assert configs and target.source == gemv4.source_hash()


@pytest.mark.parametrize("change", [
    {"grid": HELD.grid - 1}, {"held": 7}, {"n": 0}, {"n": 9}, {"columns": 2047}, {"columns": 10**9}, {"rows": []},
    {"rows": "2560"}, {"rows": [2**30]}, {"shared_bytes": -1}, {"extra": 1}, {"pair": True}, {"k_warps": "4"},
])  # fmt: skip
def test_a_configuration_that_this_code_would_not_make_is_dropped_and_the_others_kept(change):
    whole = json.loads(text_of())
    row = next(row for row in whole["configs"] if row["columns"] == 2048 and not row["pair"])
    row.update(change)
    assert shipped_configs.from_text(json.dumps(whole))[1] == plain({PAIR: RING})


def test_a_norm_in_front_is_kept_only_where_a_block_has_whole_rows():
    whole = json.loads(text_of({PAIR: RING}))
    whole["configs"][0]["normed"] = True
    assert shipped_configs.from_text(json.dumps(whole))[1] == {}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[" * 9999, '{"form": 0, "configs": []}', '{"form": 1, "configs": [1], "target": {}}']
)
def test_another_text_is_no_document(text):
    with pytest.raises(ValueError):
        shipped_configs.from_text(text)


@settings(max_examples=examples(60))
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda kids: st.lists(kids) | st.dictionaries(
    st.sampled_from(["form", "configs", "target", "rows", "columns", "n"]), kids)))  # fmt: skip
def test_any_json_is_a_document_or_a_value_error(value):
    try:
        shipped_configs.from_text(json.dumps(value))
    except ValueError:
        return


# Shipped --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "status"), [
    ({}, shipped_configs.SHIPPED), ({"name": "NVIDIA H100"}, shipped_configs.SHIPPED),
    ({"multiprocessors": 114}, shipped_configs.SHIPPED_ELSEWHERE), ({"source": "other"}, shipped_configs.SHIPPED_ELSEWHERE),
])  # fmt: skip
def test_what_was_shipped_says_whether_it_was_measured_on_such_a_card(change, status, resources):
    resources.write_text(text_of())
    assert shipped_configs.shipped(dataclasses.replace(TARGET, **change)) == (plain(CONFIGS), status)


def test_a_card_with_less_shared_memory_gets_those_that_fit(resources):
    resources.write_text(text_of())
    small = dataclasses.replace(TARGET, shared_bytes=RING.shared_bytes - 1)
    fitting = {key for key, cut in CONFIGS.items() if cut.shared_bytes < RING.shared_bytes}
    assert set(shipped_configs.shipped(small)[0]) == fitting


def test_a_card_without_a_file_has_nothing_that_was_measured(resources):
    resources.write_text(text_of())
    assert shipped_configs.shipped(dataclasses.replace(TARGET, capability=(8, 6))) == ({}, shipped_configs.ESTIMATED)
    resources.write_text("{")
    assert shipped_configs.shipped(TARGET) == ({}, shipped_configs.ESTIMATED)


def test_every_file_of_the_package_can_be_read_whole():
    from pathlib import Path

    for file in (Path(gemv4.__file__).parent / "cuda").glob("launch_configs_sm_*.json"):
        target, configs = shipped_configs.from_text(file.read_text(encoding="utf-8"))
        assert len(configs) == len(json.loads(file.read_text(encoding="utf-8"))["configs"])
        assert file.stem == f"launch_configs_sm_{target.capability[0]}{target.capability[1]}"


# Kept -----------------------------------------------------------------------------------------------------------------


def test_what_was_tuned_is_kept_beside_what_was_tuned_before(folder):
    shipped_configs.keep(TARGET, {KEY: HELD})
    shipped_configs.keep(TARGET, {PAIR: RING})
    assert shipped_configs.kept(TARGET) == plain({KEY: HELD, PAIR: RING})


@pytest.mark.parametrize("change", [{"name": "NVIDIA L4"}, {"source": "newer"}, {"multiprocessors": 78}])
def test_another_card_or_kernel_was_not_tuned(change, folder):
    shipped_configs.keep(TARGET, CONFIGS)
    assert shipped_configs.kept(dataclasses.replace(TARGET, **change)) == {}


def test_a_folder_that_cannot_be_written_is_no_error(folder):
    folder.parent.write_text("in the way")
    shipped_configs.keep(TARGET, CONFIGS)
    assert shipped_configs.kept(TARGET) == {}


# What a compiled kernel needs -----------------------------------------------------------------------------------------

FITS = KernelLimits(registers=64, max_threads=1024, static_shared_bytes=0, local_bytes=0)


@pytest.mark.parametrize(("change", "word"), [
    ({}, None), ({"static_shared_bytes": 232448}, "shared memory"), ({"max_threads": 32}, "threads"),
    ({"registers": 10**4}, "registers"), ({"local_bytes": 8}, "no room in registers"),
])  # fmt: skip
def test_a_kernel_is_checked_for_shared_memory_threads_and_registers(change, word):
    why = shipped_configs.why_not(HELD, dataclasses.replace(FITS, **change), H200["shared_bytes"])
    assert (why is None) == (word is None) and (word is None or word in why)


def test_registers_are_given_to_a_warp_in_pieces():
    """57 registers x 32 are 1824, given as 2048: 32 warps take all 65536, one register more a warp's piece takes too many."""
    wide = dataclasses.replace(HELD, k_warps=32, groups=1)
    assert wide.threads == 1024
    assert shipped_configs.why_not(wide, dataclasses.replace(FITS, registers=57), 10**6) is None
    assert shipped_configs.why_not(wide, dataclasses.replace(FITS, registers=65), 10**6) is not None


def test_what_was_never_timed_holds_its_weights_in_registers_where_every_timed_shape_does():
    file = Path(gemv4.__file__).parent / "cuda" / "launch_configs_sm_90.json"
    timed = json.loads(file.read_text(encoding="utf-8"))["configs"]
    assert len(timed) > 80 and all(one["held"] for one in timed)
    for one in timed:
        assert launch_config.cuts(one["rows"], one["columns"], one["n"], pair=one["pair"], **H200)[0].held, one
    # 22 pairs of blocks: 11 or 22 warps.
    first = launch_config.cuts((4096, 2048, 2048), 2816, 1, **H200)[0]
    assert (first.held, first.k_warps) == (1, 11)


CARD = SimpleNamespace(name="a card", uuid="1", total_memory=2**33, multi_processor_count=4, major=9, minor=0)


@pytest.fixture
def card(folder, monkeypatch):
    """A GPU whose facts the test may change, and an empty folder."""
    shown = SimpleNamespace(**vars(CARD))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: shown)
    monkeypatch.setattr(nvrtc, "why_not", lambda device: None)
    monkeypatch.setattr(nvrtc, "find_compiler", lambda: SimpleNamespace(version=(13, 0)))
    monkeypatch.setattr(nvrtc, "driver_version", lambda: 13000)
    return shown


def kept(*what):
    return CardEntries.of("cuda:0").find(*what)


def passed(*what, entry=None):
    checks = CardEntries.of("cuda:0")
    checks.keep(entry or {"us": {"a": [1.0, 2.0]}}, *what)
    checks.save()


def test_what_passed_is_known_to_the_next_process_for_the_same_check_alone(card):
    passed("products", (64, 64), "torch.bfloat16")
    passed("ends", 8)
    assert kept("products", (64, 64), "torch.bfloat16") == {"us": {"a": [1.0, 2.0]}} and kept("ends", 8) is not None
    assert kept("products", (64, 128), "torch.bfloat16") is None and kept("ends", 9) is None


@pytest.mark.parametrize("fact, value", [("uuid", "2"), ("name", "another"), ("multi_processor_count", 5), ("minor", 1)])
def test_another_card_is_checked_itself(fact, value, card):
    passed("products")
    setattr(card, fact, value)
    assert kept("products") is None


@pytest.mark.parametrize("name", ["driver_version", "find_compiler"])
def test_another_driver_or_compiler_checks_again_and_tunes_nothing_again(name, card, monkeypatch):
    passed("products")
    new = 13010 if name == "driver_version" else SimpleNamespace(version=(13, 1))
    shipped_configs.keep(TARGET, CONFIGS)
    monkeypatch.setattr(nvrtc, name, lambda: new)
    assert kept("products") is None and shipped_configs.kept(TARGET) == plain(CONFIGS)


def test_changed_code_checks_again(card, monkeypatch):
    passed("products")
    monkeypatch.setattr(check_cache, "sources", lambda: "changed")
    assert kept("products") is None


def test_a_damaged_file_is_as_if_it_were_not_there(card, folder):
    passed("products")
    (file,) = folder.iterdir()
    whole = bytearray(file.read_bytes())
    whole[-3] ^= 1
    file.write_bytes(whole)
    assert kept("products") is None


def test_two_processes_that_save_lose_nothing_of_each_other(card):
    first, second = CardEntries.of("cuda:0"), CardEntries.of("cuda:0")
    first.keep({}, "one")
    second.keep({}, "two")
    first.save()
    second.save()
    assert kept("one") == {} and kept("two") == {}


def test_a_cpu_keeps_nothing(card, tmp_path):
    checks = CardEntries.of("cpu")
    checks.keep({}, "one")
    checks.save()
    assert checks.find("one") == {} and not (tmp_path / "trimtab").exists()


def tried(checks, why, *, calls, key=("bf16",)):
    def check(module):
        calls.append(module)
        return why

    left_out, measured = {}, {}
    family = KernelFamily("small", key, lambda: "module", check, measure=lambda _: {"add": (1.0, 2.0)})
    module = family.choose(checks, left_out, measured)
    checks.save()
    return module, left_out, measured


def test_kernels_that_passed_are_loaded_without_a_check_and_with_the_times_of_then(card):
    calls = []
    first = tried(CardEntries.of("cuda:0"), None, calls=calls)
    again = tried(CardEntries.of("cuda:0"), "would be wrong", calls=calls)
    assert calls == ["module"] and first == again == ("module", {}, {"add": (1.0, 2.0)})


def test_a_choice_without_a_key_is_not_kept(card):
    calls = []
    for _ in range(2):
        assert tried(CardEntries.of("cuda:0"), None, calls=calls, key=None)[0] == "module"
    assert calls == ["module"] * 2 and not CardEntries.of("cuda:0").all()


def test_kernels_are_asked_whether_they_know_the_shapes_then_checked_then_timed():
    asked, times = [], {"one": (3.0, 2.0), "two": (1.0, 1.5)}

    def told(what, why):
        def tell(module):
            asked.append(what)
            if isinstance(why, Exception):
                raise why
            return why

        return tell

    def left_out(unsupported=None, wrong=None, **more):
        asked.clear()
        reasons, measured = {}, {}
        family = KernelFamily(
            "small", (), lambda: "module", told("check", wrong), told("unsupported", unsupported), told("measure", times), **more
        )  # fmt: skip
        module = family.choose(CardEntries(), reasons, measured)
        assert (module is None) == bool(reasons) and measured == (times if "measure" in asked else {})
        return reasons.get("small"), list(asked)

    for wrong in ("wrong", DeviceError("no kernel for 96 values", device="cuda:0")):
        assert left_out("96 values", wrong) == ("96 values", ["unsupported"])
    assert left_out(wrong="relative error") == ("relative error", ["unsupported", "check"])
    slower = "slower here: 4.0 µs against bitsandbytes' 3.5 for one layer"
    assert left_out(theirs="bitsandbytes'", of=" for one layer") == (slower, ["unsupported", "check", "measure"])
    assert left_out(is_each=True)[0] is None  # the second is used alone
    times["two"] = (2.0, 1.5)
    assert left_out(is_each=True)[0] == "slower here: 3.5 µs against torch's 3.5"


def test_kernels_that_failed_are_checked_again_each_time(card):
    calls = []
    first = tried(CardEntries.of("cuda:0"), "slower here", calls=calls)
    second = tried(CardEntries.of("cuda:0"), None, calls=calls)
    assert first[:2] == (None, {"small": "slower here"}) and second[:2] == ("module", {}) and len(calls) == 2
