"""Labels: real records have theirs, unknown failures stay unknown, silent faults are told apart."""

import copy
import getpass
import json
import re
import socket
from pathlib import Path

import pytest

from tests import ROOT
from tests.rules import each
from tools import matrix_table
from trimtab.doctor.cases import labels
from trimtab.doctor.cases.cases import CASES

RESULTS = ROOT / "bench" / "results"
RECORDED = [
    (file.stem, run) for file in sorted(RESULTS.glob("matrix_*.json"))
    for run in json.loads(file.read_text(encoding="utf-8"))["runs"]
]  # fmt: skip
VERSIONS = dict.fromkeys(matrix_table.PACKAGES, "1")
BY_NAME = {case.name: case for case in CASES}


def run_of(version: str, case: str, engine: str = "stock") -> dict:
    return copy.deepcopy(
        next(run for name, run in RECORDED if name == f"matrix_cpu_{version}" and (run["case"], run["engine"]) == (case, engine))
    )


def label_of(run: dict) -> str:
    case = BY_NAME[run["case"]]
    return labels.label_of(run, lane=case.lane, adapter=case.adapter)


@each("name, run", RECORDED, where=lambda item: f"{item[0]} {item[1]['case']} {item[1]['engine']}")
def test_recorded_run_has_its_label(name, run):
    assert label_of(run) == run["label"] in labels.LABELS
    assert run["label"] != labels.UNKNOWN or "cpu" not in name  # a GPU may still meet what nobody has read yet
    assert labels.catalogue_of(run) == run["catalogue"]


@pytest.mark.parametrize("version", ["oldest", "newest"])
def test_every_case_was_recorded_by_both_engines_with_one_set_of_versions(version):
    runs = [run for name, run in RECORDED if name == f"matrix_cpu_{version}"]
    assert [(run["case"], run["engine"]) for run in runs] == [
        (case.name, engine) for case in CASES for engine in ("stock", "trimtab")
    ]
    assert len({json.dumps(run["versions"]) for run in runs}) == 1
    wanted = {"oldest": ("5.6.2", "0.19.1", "1.13.0", "0.49.2"), "newest": ("5.23.0", "0.21.2", "1.15.0", "0.50.2")}[version]
    packages = ("transformers", "peft", "accelerate", "bitsandbytes")
    assert tuple(runs[0]["versions"][package] for package in packages) == wanted


# A path that begins at the root, at a drive or at a home folder: in a record only "<work>/..." and "peft/..." may stand.
PATH = re.compile(
    r"(?<![\w.:/<>*)\]-])/(?:home|root|Users|tmp|var|opt|usr|mnt|work|srv|private)\b|\b[A-Za-z]:[\\/]{1,2}\w|(?<!\w)~/"
)


@each("file", sorted(RESULTS.glob("matrix_*.json")))
def test_recorded_file_holds_no_path_user_host_or_address(file):
    text = file.read_text(encoding="utf-8")
    assert not PATH.findall(text)
    assert not re.findall(r"[\w.+-]+@[\w-]+\.\w+|\bhf_\w{20,}|file://|(?:site|dist)-packages", text)
    names = {getpass.getuser(), socket.gethostname(), Path.home().name, RESULTS.parent.parent.parent.name}
    # A name that is also a word of a library's log says nothing.
    words = {"root", "main", "work", "home", "runner", "user", "localhost", "src", "code", "projects"}
    for name in names - words:
        assert not re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", text), name


@pytest.mark.parametrize("text", ["/home/x/y", '"/root/.cache"', "E:\\\\offload", "~/models", "in /tmp/run", "C:/Users"])
def test_pattern_of_paths_finds_paths(text):
    assert PATH.search(text)


@pytest.mark.parametrize("text", ["<work>/R03-stock/offload", "peft/tuners/x.py:3", "https://github.com/a/b", "n/a", "1e-3/2"])
def test_pattern_of_paths_leaves_the_rest_alone(text):
    assert not PATH.search(text)


@each("version, case, label, stage", [
    ("oldest", "FIRST_REPORT", "FAIL_BNB_PARAM_CONSTRUCTOR", "adapter"),
    ("oldest", "SPLIT_4BIT_ADAPTER_SAME_MAP", "FAIL_SHARED_KV_KEYERROR", "first forward"),
    ("newest", "FIRST_REPORT", "FAIL_SDPA_AUDIO", "base"),
    ("oldest", "R03_SPLIT_4BIT", "FAIL_BNB_PARAM_CONSTRUCTOR", "adapter"),
    ("oldest", "SPLIT_4BIT_ADAPTER_PREFIXED_MAP", "FAIL_SHARED_KV_KEYERROR", "first forward"),
    ("oldest", "BROAD_TARGETS_4BIT", "GEMMA4_CLIPPABLE_LINEAR_UNSUPPORTED", "adapter"),
    ("oldest", "AUDIO_TOWER_QUANTIZED", "FAIL_AUDIO_FINFO", "first forward"),
    ("newest", "R03_SPLIT_4BIT", "FAIL_QUANT_STATE_META_COPY", "first forward"),
    ("newest", "R03_SPLIT_4BIT_DOUBLE_QUANT", "FAIL_QUANT_STATE_META_ITEM", "adapter"),
    ("newest", "MERGE_DEQUANTIZE_IN_PLACE", "FAIL_DEQUANTIZED_UNDER_LORA", "merge"),
    ("newest", "ATTN_SDPA", "FAIL_SDPA_AUDIO", "base"),
    ("newest", "EMBED_TOKENS_OFFLOADED", "FAIL_EMBED_TOKENS_META", "first forward"),
    ("newest", "DISK_TOWER_CATCH_ALL", "FAIL_CATCH_ALL_DISK", "base"),
    ("newest", "MERGE_SPLIT_BF16", "PASS_BUT_MERGE_DROPPED_OFFLOADED", "done"),
    ("newest", "SPLIT_4BIT_ADAPTER", "PASS_BUT_PLACEMENT_UNDONE", "done"),
    ("newest", "NOTHING_QUANTIZED", "PASS_BUT_NOT_QUANTIZED", "done"),
    ("newest", "SPLIT_4BIT_NO_ADAPTER", "PASS", "done"),
    ("newest", "SPLIT_4BIT_BRIDGE_PRESSED", "PASS", "done"),
])  # fmt: skip
def test_what_the_field_and_the_catalogue_say_was_seen(version, case, label, stage):
    run = run_of(version, case)
    assert (run["label"], run["stage"]) == (label, stage)


def test_page_says_what_the_result_files_say():
    assert matrix_table.main(["--check"]) == 0  # else: python tools/matrix_table.py


def test_load_that_cannot_run_was_silent():
    run = run_of("newest", "R03_SPLIT_4BIT")
    assert run["placement_kept"] is False and "cpu" in run["map_after"].values()
    assert {finding["kind"] for finding in run["scan"]} >= {"quant-state-on-meta"}
    assert [mode["stage"] for mode in run["modes"].values()] == ["first forward"] * 3
    inner = run["exception"]["frames"][-1]
    assert (inner["library"], inner["function"]) == ("bitsandbytes", "to")


def test_key_of_the_shared_states_is_the_last_layer_that_stores_them():
    message = run_of("oldest", "SPLIT_4BIT_ADAPTER_SAME_MAP")["exception"]["message"]
    assert re.fullmatch(r"\d+", message)  # 22 on E4B, 13 on E2B


def test_first_failing_mode_leaves_the_others_answers():
    modes = run_of("oldest", "AUDIO_TOWER_QUANTIZED")["modes"]
    assert (modes["text"]["ok"], modes["image"]["ok"], modes["audio"]["ok"]) == (True, True, False)
    assert modes["image"]["sees"] is False  # an integer tower sees one constant picture there


def test_lane_verdicts_of_real_runs():
    assert run_of("newest", "BROAD_TARGETS_4BIT")["lane"] == "GEMMA4_CLIPPABLE_LINEAR_STILL_BLOCKS"
    assert run_of("newest", "MERGE_FRESH_BF16")["lane"] == "FRESH_BF16_MERGE_STILL_PASSES"
    assert run_of("newest", "MERGE_DIRECT_4BIT")["lane"] == "DIRECT_4BIT_MERGE_STILL_DIVERGES"
    assert run_of("newest", "MERGE_FRESH_BF16", "trimtab")["lane"] is None


# What keeps a label honest --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [
    {"type": "RuntimeError"}, {"message": "some other text"}, {"frames": [{"file": "torch/x.py", "function": "to"}]},
])  # fmt: skip
def test_failure_that_misses_one_mark_is_unknown(change):
    run = run_of("newest", "R03_SPLIT_4BIT")
    run["exception"].update(change)
    assert label_of(run) == "UNKNOWN" and labels.catalogue_of(run | {"label": "UNKNOWN"}) == ""


def test_failure_in_another_stage_is_unknown():
    run = run_of("newest", "ATTN_SDPA")
    run["stage"] = "generate"
    assert label_of(run) == "UNKNOWN"


def test_error_of_our_own_tree_is_a_refusal():
    run = run_of("newest", "MAP_KEY_MISSING", "trimtab")
    assert run["label"] == "REFUSED_BY_NAME" and run["exception"]["type"] == "RequestError"


@pytest.mark.parametrize("ended, label", [("timeout", "TIMEOUT"), ("oom-host", "OOM_HOST"), ("crashed", "CRASHED")])
def test_killed_run_is_called_by_its_end(ended, label):
    run = run_of("newest", "R05_ALL_GPU_4BIT")
    run |= {"ended": ended, "stage": "generate"}
    assert label_of(run) == label


def test_run_that_stopped_early_without_a_word_is_no_pass():
    run = run_of("newest", "R05_ALL_GPU_4BIT")
    assert label_of(run | {"stage": "generate"}) == "UNKNOWN" and label_of(run | {"modes": {}}) == "UNKNOWN"
    assert label_of(run | {"ended": "failed"}) == "UNKNOWN"


def changed(**facts):
    run = run_of("newest", "R05_ALL_GPU_4BIT")
    for mode in run["modes"].values():
        mode.update(facts)
    return run


def test_wrong_answer_comes_before_a_lost_placement():
    assert label_of(changed(equals_reference=False, equals_base=False) | {"placement_kept": False}) == "PASS_BUT_DIFFERENT_ANSWER"


def test_answer_of_the_base_is_an_adapter_without_effect():
    assert label_of(changed(equals_reference=False, equals_base=True)) == "PASS_BUT_ADAPTER_HAS_NO_EFFECT"


def test_pass_without_a_reference_says_so():
    assert label_of(changed(equals_reference=None)) == "PASS_NOT_COMPARED"


@pytest.mark.parametrize("voices, label", [
    (("adapter", "both", "adapter"), "DIRECT_4BIT_MERGED_MATCHES_ADAPTER"),
    (("adapter", "base", "both"), "DIRECT_4BIT_MERGED_MATCHES_BASE"),
    (("adapter", "base", "neither"), "DIRECT_4BIT_MERGED_MATCHES_NEITHER"),
])  # fmt: skip
def test_merge_is_called_by_whose_tokens_it_generates(voices, label):
    run = run_of("newest", "MERGE_DIRECT_4BIT")
    for mode, voice in zip(run["modes"].values(), voices, strict=True):
        mode["matches"] = voice
    assert label_of(run) == label


def test_fresh_merge_that_matches_neither_has_its_label():
    run = run_of("newest", "MERGE_FRESH_BF16")
    run["modes"]["text"]["matches"] = "neither"
    assert label_of(run) == "BF16_MERGED_MATCHES_NEITHER"
    assert labels.lane_of("BF16_MERGED_MATCHES_NEITHER", run, "fresh-bf16-merge") == "FRESH_BF16_MERGE_NOW_DIVERGES"


def test_every_label_has_a_meaning():
    for label in labels.LABELS:
        assert len(labels.meaning_of(label)) > 10
    with pytest.raises(KeyError):
        labels.meaning_of("NO_LABEL")


def test_every_catalogue_entry_that_a_case_names_has_a_label():
    # What a case shows without a failure of its own: by design (A4), works (B9), a copy on disk (B6), a peak (C4), a
    # silent argument (B7's other half is a label).
    quiet = {"A4", "A6", "B6", "B9", "C4"}
    known = {signature.catalogue for signature in labels.SIGNATURES} | {found[0] for found in labels.SILENT.values()}
    assert {bug for case in CASES for bug in case.shows} - quiet <= known


def test_a_gpus_table_says_how_many_cases_it_holds_and_what_differs_from_the_cpu(monkeypatch):
    case = CASES[0].name
    played = {"title": "t", "stage": "done", "label": "PASS", "exception": None, "device": "CPU", "versions": VERSIONS}
    failed = {"type": "RuntimeError", "message": "two devices (in a call): and more"}
    real = {**played, "device": "G", "label": "FAIL_INPUTS_ON_WRONG_DEVICE", "stage": "first forward", "exception": failed}
    found = {
        "cpu": {(case.name, engine): played for case in CASES for engine in ("stock", "trimtab")},
        "gpu": {(case, "stock"): real, (case, "trimtab"): {**played, "device": "G"}},
    }
    monkeypatch.setattr(matrix_table, "read", lambda device, name: found[device] if name == "newest" else {})
    cpu, gpu = matrix_table.tables().split("\nOn a GPU, G.")
    assert "so far" not in cpu and f"so far: 1 of {len(CASES)} (2 of {2 * len(CASES)} runs)" in gpu
    assert matrix_table.differences() == [
        "Of 2 runs made on both, 1 ended alike. Otherwise on the GPU:\n\n"
        f"- `{case}`, stock, newest set: `FAIL_INPUTS_ON_WRONG_DEVICE` at first forward, not `PASS` "
        "(`RuntimeError: two devices`)\n"
    ]
    found["gpu"][case, "stock"] = {**played, "device": "G"}
    assert matrix_table.differences() == ["The GPU said what the CPU that plays it had said in all 2 runs made on both.\n"]
