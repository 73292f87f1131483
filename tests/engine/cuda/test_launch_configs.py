"""Launch configurations as data: only those that this code would make, that fit the card, and that say how they were measured."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from trimtab.engine.cuda import launch_config as cuts
from trimtab.engine.cuda import shipped_configs as launch_configs
from trimtab.engine.cuda.shipped_configs import KernelLimits, Target
from trimtab.engine.kernels import gemv4 as matvec
from trimtab.process import user_cache as own_folder

H200 = {"multiprocessors": 132, "shared_bytes": 232448}
TARGET = Target("NVIDIA H200", (9, 0), 132, 232448, "0123")
KEY = ("cut", (2560,), 2048, 1, False)
PAIR = ("cut", (512, 512), 2048, 3, True)
HELD = next(cut for cut in cuts.cuts((2560,), 2048, 1, **H200) if cut.held and cut.may_be_normed)
RING = next(cut for cut in cuts.cuts((512, 512), 2048, 3, pair=True, **H200) if not cut.held)
CONFIGS = {KEY: dataclasses.replace(HELD, normed=True), PAIR: RING}


def plain(configs):
    return {key: dataclasses.replace(cut, estimated_us=0.0) for key, cut in configs.items()}


def text_of(configs=CONFIGS, target=TARGET):
    return launch_configs.to_text(launch_configs.document(target, configs, {"torch": "2.9"}))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(own_folder, "user_cache_path", lambda name: tmp_path / name)
    return tmp_path / "trimtab" / launch_configs.FOLDER


@pytest.fixture
def resources(tmp_path, monkeypatch):
    """Let the package's data be in the test's folder."""
    (tmp_path / "cuda").mkdir()
    monkeypatch.setattr(launch_configs.resources, "files", lambda package: tmp_path)
    return tmp_path / "cuda" / "launch_configs_sm_90.json"


def test_a_document_comes_back_with_its_card_one_configuration_a_line():
    text = text_of()
    assert launch_configs.from_text(text) == (TARGET, plain(CONFIGS))
    assert sum(line.startswith('  {"rows"') for line in text.splitlines()) == 2
    assert json.loads(text)["about"] == {"torch": "2.9"}


def test_the_shipped_configurations_were_measured_with_the_present_source():
    file = Path(matvec.__file__).parent / "cuda" / "launch_configs_sm_90.json"
    target, configs = launch_configs.from_text(file.read_text(encoding="utf-8"))
    assert configs and target.source == matvec.source_hash()


@pytest.mark.parametrize(
    "change",
    [
        {"grid": HELD.grid - 1}, {"held": 7}, {"n": 0}, {"n": 9}, {"columns": 2047}, {"columns": 10**9}, {"rows": []},
        {"rows": "2560"}, {"rows": [2**30]}, {"shared_bytes": -1}, {"extra": 1}, {"pair": True}, {"k_warps": "4"},
    ],
)  # fmt: skip
def test_a_configuration_that_this_code_would_not_make_is_dropped_and_the_others_kept(change):
    whole = json.loads(text_of())
    row = next(row for row in whole["configs"] if row["columns"] == 2048 and not row["pair"])
    row.update(change)
    assert launch_configs.from_text(json.dumps(whole))[1] == plain({PAIR: RING})


def test_a_norm_in_front_is_kept_only_where_a_block_has_whole_rows():
    whole = json.loads(text_of({PAIR: RING}))
    whole["configs"][0]["normed"] = True
    assert launch_configs.from_text(json.dumps(whole))[1] == {}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[" * 9999, '{"form": 0, "configs": []}', '{"form": 1, "configs": [1], "target": {}}']
)
def test_another_text_is_no_document(text):
    with pytest.raises(ValueError):
        launch_configs.from_text(text)


@settings(max_examples=examples(60))
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda kids: st.lists(kids) | st.dictionaries(
    st.sampled_from(["form", "configs", "target", "rows", "columns", "n"]), kids)))  # fmt: skip
def test_any_json_is_a_document_or_a_value_error(value):
    try:
        launch_configs.from_text(json.dumps(value))
    except ValueError:
        return


# Shipped --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, launch_configs.SHIPPED), ({"name": "NVIDIA H100"}, launch_configs.SHIPPED),
        ({"multiprocessors": 114}, launch_configs.SHIPPED_ELSEWHERE), ({"source": "other"}, launch_configs.SHIPPED_ELSEWHERE),
    ],
)  # fmt: skip
def test_what_was_shipped_says_whether_it_was_measured_on_such_a_card(change, status, resources):
    resources.write_text(text_of())
    assert launch_configs.shipped(dataclasses.replace(TARGET, **change)) == (plain(CONFIGS), status)


def test_a_card_with_less_shared_memory_gets_those_that_fit(resources):
    resources.write_text(text_of())
    small = dataclasses.replace(TARGET, shared_bytes=RING.shared_bytes - 1)
    fitting = {key for key, cut in CONFIGS.items() if cut.shared_bytes < RING.shared_bytes}
    assert set(launch_configs.shipped(small)[0]) == fitting


def test_a_card_without_a_file_has_nothing_that_was_measured(resources):
    resources.write_text(text_of())
    assert launch_configs.shipped(dataclasses.replace(TARGET, capability=(8, 6))) == ({}, launch_configs.ESTIMATED)
    resources.write_text("{")
    assert launch_configs.shipped(TARGET) == ({}, launch_configs.ESTIMATED)


def test_every_file_of_the_package_can_be_read_whole():
    from pathlib import Path

    for file in (Path(matvec.__file__).parent / "cuda").glob("launch_configs_sm_*.json"):
        target, configs = launch_configs.from_text(file.read_text(encoding="utf-8"))
        assert len(configs) == len(json.loads(file.read_text(encoding="utf-8"))["configs"])
        assert file.stem == f"launch_configs_sm_{target.capability[0]}{target.capability[1]}"


# Kept -----------------------------------------------------------------------------------------------------------------


def test_what_was_tuned_is_kept_beside_what_was_tuned_before(folder):
    launch_configs.keep(TARGET, {KEY: HELD}, {})
    launch_configs.keep(TARGET, {PAIR: RING}, {})
    assert launch_configs.kept(TARGET) == plain({KEY: HELD, PAIR: RING})


@pytest.mark.parametrize("change", [{"name": "NVIDIA L4"}, {"source": "newer"}, {"multiprocessors": 78}])
def test_another_card_or_kernel_was_not_tuned(change, folder):
    launch_configs.keep(TARGET, CONFIGS, {})
    assert launch_configs.kept(dataclasses.replace(TARGET, **change)) == {}


def test_a_damaged_file_is_as_if_nothing_was_tuned(folder):
    launch_configs.keep(TARGET, CONFIGS, {})
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes().replace(b"2560", b"2561", 1))
    assert launch_configs.kept(TARGET) == {}


def test_a_folder_that_cannot_be_written_is_no_error(folder):
    folder.parent.write_text("in the way")
    launch_configs.keep(TARGET, CONFIGS, {})
    assert launch_configs.kept(TARGET) == {}


# What a compiled kernel needs -----------------------------------------------------------------------------------------

FITS = KernelLimits(registers=64, max_threads=1024, static_shared_bytes=0, local_bytes=0)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({}, None), ({"static_shared_bytes": 232448}, "shared memory"), ({"max_threads": 32}, "threads"),
        ({"registers": 10**4}, "registers"), ({"local_bytes": 8}, "no room in registers"),
    ],
)  # fmt: skip
def test_a_kernel_is_checked_for_shared_memory_threads_and_registers(change, word):
    why = launch_configs.why_not(HELD, dataclasses.replace(FITS, **change), H200["shared_bytes"])
    assert (why is None) == (word is None)
    assert word is None or word in why


def test_registers_are_given_to_a_warp_in_pieces():
    """57 registers x 32 are 1824, given as 2048: 32 warps take all 65536, one register more a warp's piece takes too many."""
    wide = dataclasses.replace(HELD, k_warps=32, groups=1)
    assert wide.threads == 1024
    assert launch_configs.why_not(wide, dataclasses.replace(FITS, registers=57), 10**6) is None
    assert launch_configs.why_not(wide, dataclasses.replace(FITS, registers=65), 10**6) is not None


def test_what_was_never_timed_holds_its_weights_in_registers_where_every_timed_shape_does():
    file = Path(matvec.__file__).parent / "cuda" / "launch_configs_sm_90.json"
    timed = json.loads(file.read_text(encoding="utf-8"))["configs"]
    assert len(timed) > 80 and all(one["held"] for one in timed)
    for one in timed:
        assert cuts.cuts(one["rows"], one["columns"], one["n"], pair=one["pair"], **H200)[0].held, one
    # 22 pairs of blocks: 11 or 22 warps.
    first = cuts.cuts((4096, 2048, 2048), 2816, 1, **H200)[0]
    assert (first.held, first.k_warps) == (1, 11)
