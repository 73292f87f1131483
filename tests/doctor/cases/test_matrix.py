"""The matrix: records of every ending, nothing finished is lost, files, the table; a few real cases on the demo model."""

import json
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from tests import ROOT, pico
from tests.raised import raised
from trimtab.doctor.cases import runner
from trimtab.doctor.cases.cases import CASES
from trimtab.doctor.cases.runner import matrix_document, read_runs, run_matrix, save_runs, saving
from trimtab.errors import CheckpointError, RequestError
from trimtab.process.runner import Outcome
from trimtab.report.render import Lines

IS_NEWEST = Version(version("transformers")) >= Version("5.23.0")
VERSIONS = {"python": "3.12", "torch": "2.13.0"}
DONE_LINES = (
    {"stage": "base"}, {"facts": {"device": "CPU (the GPU is imitated)", "quantized": {"Linear4bit": 3}}}, {"stage": "generate"},
    {"facts": {"modes": {"text": {"ok": True, "equals_reference": True, "exception": None}}, "placement_kept": True}},
    {"stage": "done"},
)  # fmt: skip
A, B = "R05_ALL_GPU_4BIT", "R03_SPLIT_4BIT"


def outcome(ended="done", lines=DONE_LINES, stderr=""):
    return Outcome(ended, tuple(lines), 1.5, 2**20, 0 if ended == "done" else 1, "", stderr)


class Processes:
    """Stands for `run_inside`: answers by module name, keeps what was asked."""

    def __init__(self, cases=(), packages=None, makes_inputs=True):
        self.cases, self.asked, self.makes_inputs = list(cases), [], makes_inputs
        self.packages = packages or {"versions": VERSIONS, "missing": [], "has_gpu": False}

    def __call__(self, module, request, **options):
        name = module.rpartition(".")[2]
        self.asked.append((name, dict(request), options))
        if name == "record":
            return outcome(lines=[self.packages])
        if name == "reference":
            if not self.makes_inputs:
                return outcome("oom-host", [])
            Path(request["inputs"]).touch()
            Path(request["save"]).touch()
            return outcome(lines=[{"inputs": "processor"}])
        found = self.cases.pop(0) if self.cases else outcome()
        if isinstance(found, BaseException):
            raise found
        return found


@pytest.fixture
def processes(monkeypatch):
    def use(*cases, **options):
        found = Processes(cases, **options)
        monkeypatch.setattr(runner, "run_inside", found)
        return found

    return use


def stock(*names, **options):
    return run_matrix(cases=names, engines=["stock"], **options)


# Endings --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ended, label", [("timeout", "TIMEOUT"), ("oom-host", "OOM_HOST"), ("crashed", "CRASHED")])
def test_killed_case_keeps_its_stage_and_the_next_one_runs(processes, ended, label):
    processes(outcome(ended, DONE_LINES[:3]))
    first, second = stock(A, B)
    assert (first["label"], first["stage"], first["ended"]) == (label, "generate", ended)
    assert first["quantized"] == {"Linear4bit": 3} and first["memory"] == {"host_peak_bytes": 2**20}
    assert second["label"] == "PASS"


def test_exception_outside_the_case_is_kept_from_stderr(processes):
    processes(outcome("failed", [{"stage": "import"}], "Traceback ...\nImportError: libcudart.so.12: no such file\n"))
    (found,) = stock(A)
    assert found["label"] == "UNKNOWN" and found["stage"] == "import"
    assert found["exception"]["type"] == "ImportError" and "libcudart" in found["exception"]["message"]


def test_model_whose_questions_cannot_be_made_loses_no_record(processes):
    processes(makes_inputs=False)
    found = stock(A, B)
    assert [(run["case"], run["label"], run["stage"]) for run in found] == [(A, "OOM_HOST", "import"), (B, "OOM_HOST", "import")]


def test_ctrl_c_keeps_what_was_done_and_a_valid_file(processes, tmp_path):
    processes(outcome(), KeyboardInterrupt())
    file = tmp_path / "runs.json"
    with pytest.raises(KeyboardInterrupt):
        stock(A, B, on_record=saving(file, {"python": "3.12"}))
    found = read_runs(file)
    assert [run["case"] for run in found["runs"]] == [A] and found["environment"] == {"python": "3.12"}


def test_progress_and_records_come_after_each_case(processes):
    processes()
    seen, records = [], []
    stock(A, B, progress=lambda done, of: seen.append((done, of)), on_record=lambda run: records.append(run["case"]))
    assert seen == [(1, 2), (2, 2)] and records == [A, B]


def test_record_has_the_whole_contract(processes):
    processes()
    (found,) = stock(A)
    assert {
        "case", "title", "engine", "label", "lane", "stage", "ended", "modes", "placement_kept", "map_asked", "map_after",
        "memory", "seconds", "exception", "warnings", "quantized", "scan", "log_lines", "configuration", "device",
        "pressure", "versions", "model", "script", "inputs", "catalogue",
    } <= set(found)  # fmt: skip
    assert found["model"] == "demo" and "from_pretrained" in found["script"]


def test_record_names_no_folder_of_the_interpreter_or_the_adapter(processes):
    inside = "/home/ann/env/lib/python3.12/site-packages"
    told = f'File "{inside}/torch/__init__.py", line 9\nOSError: {inside}/x.so: cannot open'
    processes(outcome("failed", [{"stage": "import"}], told))
    (found,) = stock(A)
    assert found["exception"]["message"] == "x.so: cannot open" and "/home/" not in json.dumps(found)


# What is asked of the processes ---------------------------------------------------------------------------------------


def test_reference_is_made_once_a_quantization(processes):
    found = processes()
    stock(A, B, "SPLIT_BF16")
    assert [request["name"] for module, request, _ in found.asked if module == "reference"] == ["nf4+towers", "none"]


def test_limits_interpreter_and_pressure_reach_the_case(processes):
    found = processes()
    stock(A, python="other", timeout_s=7, memory_bytes=5, pressure=0.9)
    module, request, options = found.asked[-1]
    assert module == "stock_run" and request["pressure"] == 0.9
    assert (options["python"], options["timeout_s"], options["memory_bytes"]) == ("other", 7, 5)


def test_trimtab_always_runs_in_this_interpreter(processes):
    found = processes()
    runs = run_matrix(cases=[A], python="other")
    pythons = {module: options["python"] for module, _, options in found.asked if module in ("stock_run", "trimtab_run")}
    assert pythons == {"stock_run": "other", "trimtab_run": None} and [run["engine"] for run in runs] == ["stock", "trimtab"]


def test_case_about_towers_does_not_apply_to_a_model_without(processes, tmp_path):
    found = processes()
    model = pico.build("llama", tmp_path / "llama")
    runs = run_matrix(cases=["SPLIT_4BIT_NO_ADAPTER", "AUTO_MAP_4BIT"], model=model, engines=["stock"])
    assert [run["label"] for run in runs] == ["NOT_APPLICABLE", "PASS"] and runs[0]["model"] == "llama"
    assert [module for module, _, _ in found.asked].count("stock_run") == 1


# Refusals -------------------------------------------------------------------------------------------------------------


def test_interpreter_without_the_packages_is_refused_with_their_names(processes):
    processes(packages={"versions": {}, "missing": ["peft", "accelerate"], "has_gpu": False})
    error = raised(RequestError, stock, A, python="other")
    assert error.field == "python" and error.value == "other" and "peft, accelerate" in str(error)


def test_interpreter_that_is_none_is_refused(tmp_path):
    assert raised(RequestError, stock, A, python=tmp_path / "no-such-python").field == "python"


def test_user_model_without_an_adapter_is_refused_for_cases_that_need_one(processes, tmp_path):
    processes()
    error = raised(RequestError, lambda: stock(A, "SPLIT_4BIT_NO_ADAPTER", model=pico.build("gemma4", tmp_path / "model")))
    assert error.field == "adapter" and A in str(error)
    assert "SPLIT_4BIT_NO_ADAPTER" in error.allowed and A not in error.allowed


def test_folder_that_is_no_model_is_refused(processes, tmp_path):
    processes()
    with pytest.raises(CheckpointError):
        stock("SPLIT_4BIT_NO_ADAPTER", model=tmp_path)


def test_gpu_that_is_not_there_is_refused(processes):
    processes()
    error = raised(RequestError, stock, A, device="cuda")
    assert error.field == "device" and error.allowed == ("auto", "cpu")


@pytest.mark.parametrize("options, field", [
    ({"cases": ["NO_CASE"]}, "case"), ({"engines": ["vllm"]}, "engine"), ({"device": "tpu"}, "device"),
    ({"pressure": 1.0}, "pressure"), ({"pressure": 0.0}, "pressure"),
])  # fmt: skip
def test_wrong_question_is_refused(options, field):
    assert raised(RequestError, run_matrix, **options).field == field


# Files ----------------------------------------------------------------------------------------------------------------


def test_runs_come_back_as_saved(tmp_path):
    runs = [{"case": A, "engine": "stock", "label": "PASS", "stage": "done"}]
    save_runs(tmp_path / "deep" / "runs.json", {"python": "3.12"}, runs)
    assert read_runs(tmp_path / "deep" / "runs.json") == {"format": 1, "environment": {"python": "3.12"}, "runs": runs}
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["runs.json"]


def test_failed_save_leaves_the_last_file(tmp_path):
    file = tmp_path / "runs.json"
    save_runs(file, {}, [])
    before = file.read_bytes()
    endless: list = []
    endless.append(endless)  # what JSON cannot hold
    with pytest.raises(ValueError):
        save_runs(file, {}, [{"case": endless}])
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


def test_place_that_cannot_be_written_to_is_known_before_the_first_case(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "file" / "runs.json"):
        error = raised(RequestError, saving, place, {})
        assert (error.field, error.value) == ("save", str(place))


@pytest.mark.parametrize("text, reason", [
    ("{", "is not JSON"), ("[]", "is not a JSON object"), ('{"format": 2, "runs": []}', "is not a runs file"),
    ('{"format": 1, "runs": [{"case": "A", "engine": "stock"}]}', "run 0 lacks label, stage"),
])  # fmt: skip
def test_file_that_holds_no_runs_is_refused(tmp_path, text, reason):
    file = tmp_path / "runs.json"
    file.write_text(text)
    error = raised(CheckpointError, read_runs, file)
    assert error.path == str(file) and reason in str(error)


def test_runs_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(CheckpointError):
        read_runs(tmp_path / "no.json")


FAILED = {
    "case": A, "engine": "stock", "label": "FAIL_AUDIO_FINFO", "stage": "first forward", "catalogue": "D2",
    "modes": {
        "text": {"ok": True, "equals_reference": True}, "image": {"ok": True, "equals_reference": False},
        "audio": {"ok": False},
    },
    "memory": {"host_peak_bytes": 2**30, "gpu_peak_bytes": 5 * 2**29},
    "exception": {"tail": "a.py:1 in f\n" * 9 + "transformers/x.py:7 in forward\nTypeError: torch.finfo() requires [x]"},
}  # fmt: skip
RIGHT = {
    "case": A, "engine": "trimtab", "label": "PASS", "stage": "done", "modes": {"text": {"ok": True, "equals_reference": True}},
    "memory": {"host_peak_bytes": 3 * 2**29, "gpu_peak_bytes": None}, "how": "9 blocks [resident]", "exception": None,
}  # fmt: skip


def test_table_has_both_engines_side_by_side_with_modes_and_peaks():
    lines = Lines(200).show(matrix_document([FAILED, RIGHT])).splitlines()
    rows = [re.split(r"  +", line) for line in lines if line.startswith(A)]
    assert rows == [
        [A, "stock", "= ~ x", "2.5", "FAIL_AUDIO_FINFO at first forward"],
        [A, "trimtab", "= . .", "1.5", "PASS (9 blocks [resident])"],
    ]


def test_ends_of_traces_stand_below_the_table_once_a_label():
    lines = Lines(200).show(matrix_document([FAILED, {**FAILED, "case": B}, RIGHT])).splitlines()
    found = lines[next(place for place, line in enumerate(lines) if line.startswith("FAIL_AUDIO_FINFO (D2) by stock:")) :]
    assert found[1] == f"in {A}, {B}"
    assert found[-2:] == ["    transformers/x.py:7 in forward", "    TypeError: torch.finfo() requires [x]"]


def test_refusals_of_two_reasons_are_told_apart():
    refused = [
        {**RIGHT, "case": case, "label": "REFUSED_BY_NAME", "exception": {"message": why, "tail": f"RequestError: {why}"}}
        for case, why in ((A, "names nothing"), (B, "cannot stream"))
    ]
    below = Lines().show(matrix_document(refused)).partition("REFUSED_BY_NAME by trimtab")[2]
    assert "names nothing" in below and "cannot stream" in below


def test_table_of_passes_has_no_traces():
    assert "by trimtab" not in Lines().show(matrix_document([RIGHT]))


# Real cases -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real():
    return {run["case"]: run for run in run_matrix(cases=["BROAD_TARGETS_4BIT"], engines=["stock"], device="cpu")}


@pytest.mark.slow  # its script in test_cases.py
def test_first_reports_case_fails_as_its_versions_do():
    (run,) = run_matrix(cases=[B], engines=["stock"], device="cpu")
    seen = (run["label"], run["stage"], run["catalogue"])
    if IS_NEWEST:
        assert seen == ("FAIL_QUANT_STATE_META_COPY", "first forward", "A2")
        assert run["placement_kept"] is False and "cpu" in run["map_after"].values()  # a load without an error
    else:
        assert seen == ("FAIL_BNB_PARAM_CONSTRUCTOR", "adapter", "A3")
    assert run["exception"]["frames"][-1]["library"] in ("accelerate", "bitsandbytes")
    assert run["map_asked"] == {"model.vision_tower": "cpu", "model.audio_tower": "cpu", "": 0}
    assert run["pressure"] == 0.45 and "imitated card" in run["how_pressed"]
    assert any("required" in line for line in run["log_lines"]) or run["log_lines"]


@pytest.mark.slow  # 23 s; test_cases.py runs the script of the first report
@pytest.mark.slow
def test_wrapper_target_is_refused_by_stock_peft(real):
    run = real["BROAD_TARGETS_4BIT"]
    assert (run["label"], run["lane"]) == ("GEMMA4_CLIPPABLE_LINEAR_UNSUPPORTED", "GEMMA4_CLIPPABLE_LINEAR_STILL_BLOCKS")


@pytest.mark.slow
def test_real_records_hold_no_path_of_this_machine(real):
    for run in real.values():
        text = json.dumps({key: value for key, value in run.items() if key != "script"})
        assert str(Path.home()) not in text and str(ROOT) not in text and sys.prefix not in text


@pytest.mark.parametrize("limit, label", [({"timeout_s": 0.5}, "TIMEOUT"), ({"memory_bytes": 2**26}, "OOM_HOST")])
def test_limit_ends_a_real_case_and_its_record_says_so(limit, label):
    (run,) = run_matrix(cases=["SPLIT_4BIT_NO_ADAPTER"], engines=["stock"], device="cpu", **limit)
    assert run["label"] == label and run["stage"] != "done" and run["exception"] is None
    assert run["seconds"] < 30


@pytest.mark.slow
def test_every_case_has_a_known_label_on_both_engines():
    runs = run_matrix(device="cpu", timeout_s=300)
    assert len(runs) == 2 * len(CASES)
    assert {run["label"] for run in runs}.isdisjoint({"UNKNOWN", "CRASHED", "TIMEOUT", "OOM_HOST"})
    ours = {run["case"]: run["label"] for run in runs if run["engine"] == "trimtab"}
    refused = {name for name, label in ours.items() if label == "REFUSED_BY_NAME"}
    # A key that names nothing, and an embedding that the model reads outside its module: refused before any loading.
    assert refused == {"FIRST_REPORT", "MAP_KEY_MISSING", "EMBED_TOKENS_OFFLOADED"}
    assert {name for name, label in ours.items() if label.startswith("PASS_BUT")} == set()


REQUEST = {"model": "m", "work": "w", "device": "cuda", "pressure": None, "names": {}}


def test_an_emulated_card_leaves_room_for_what_a_process_needs_beside_its_tensors(monkeypatch):
    """A plan on a GPU counts the driver's share too; the card of a case is measured in tensors alone."""
    from types import SimpleNamespace

    from trimtab import api
    from trimtab.doctor.cases.trimtab_run import TrimtabRun

    monkeypatch.setattr(api, "plan", lambda *_, **__: SimpleNamespace(gpu_peak_bytes=1000, gpu_needed_bytes=1600))
    case = next(case for case in CASES if case.name == "SPLIT_4BIT_ADAPTER_FULL_CARD")
    run = TrimtabRun(REQUEST | {"case": case.to_json()}, lambda found: None)
    assert run.budget("model", {"adapters": {}})["gpu_memory"] == int(1000 / 0.9) + 600


@pytest.mark.parametrize(
    ("asked", "kept"), [({"": "cpu"}, True), ({"model.layers": "cpu"}, True), ({"model.head": "cpu"}, False), ({"": 0}, True)]
)
def test_a_catch_all_asks_of_what_can_leave(asked, kept):
    """A head that is tied cannot leave: a catch-all entry does not ask it to, a key of its own does."""
    from types import SimpleNamespace

    import trimtab
    from trimtab.demo.demo import FOLDER as DEMO
    from trimtab.doctor.cases.trimtab_run import TrimtabRun

    rows = [
        SimpleNamespace(block_path="model.layers", tier="stream", reason="requested: device_map"),
        SimpleNamespace(block_path="model.head", tier="resident", reason="its weight is the embedding's too"),
    ]
    plan = SimpleNamespace(placements=rows, tiers=lambda: {row.block_path: row.tier for row in rows}, gpu_peak_bytes=3)
    told: dict[str, object] = {}
    case = next(case for case in CASES if case.name == "NOTHING_QUANTIZED")
    run = TrimtabRun(REQUEST | {"case": case.to_json()}, lambda found: None)
    run.facts = lambda **found: told.update(found)
    run.look(plan, SimpleNamespace(memory=lambda: {"gpu_bytes": 1, "gpu_peak_bytes": 2}), asked)
    assert told["placement_kept"] is kept
    real = trimtab.plan(DEMO / "base", device="cpu", device_map={"": "cpu"}, context=64)
    unasked = {row.block_path for row in real.placements if not row.reason.startswith("requested: ")}
    assert unasked == {"lm_head"}  # the planner says so in these words: the head is tied
    rows[0].tier = "resident"  # asked off the GPU, and there
    run.look(plan, SimpleNamespace(memory=lambda: {"gpu_bytes": 1, "gpu_peak_bytes": 2}), {"": "cpu"})
    assert told["placement_kept"] is False
