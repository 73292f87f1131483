"""Issues: what saved lanes carry, where a failure is filed, what is withheld and why."""

import ast
import contextlib
import io
import json
import re
from functools import cache

import pytest

from tests import ROOT
from tests.rules import each
from trimtab.cli import main
from trimtab.doctor.facts.buckets import BUCKETS
from trimtab.doctor.facts.bug import Tracker
from trimtab.doctor.facts.evidence import Shown, Statement, evidence_of
from trimtab.doctor.issues import draft as module
from trimtab.doctor.issues.draft import make_drafts
from trimtab.doctor.issues.owner import action_for
from trimtab.machine.environment import read_environment

NEVER_RECORDED = {"merge-4bit"}  # the merge lanes carry it (trimtab verify --lanes)
CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`)(.*?)(?<!`)\1(?!`)")


@pytest.fixture
def lanes():
    run = json.loads((ROOT / "bench" / "results" / "lanes_demo.json").read_text(encoding="utf-8"))["runs"][0]
    return run | {"versions": {"peft": "0.21.2"}, "device": "CPU"}


def diverging(lanes):
    direct = next(lane for lane in lanes["lanes"] if lane["lane"] == "direct_4bit_merge")
    changed = {"adapter_is_merged": False, "base_is_merged": True, "classification": "DIRECT_4BIT_MERGED_MATCHES_BASE"}
    direct["prompts"] = [direct["prompts"][0] | changed, *direct["prompts"][1:]]
    return lanes


def test_merge_parity_issue_has_the_prompts_the_warnings_and_the_control(lanes, tmp_path, capsys):
    (tmp_path / "verify.json").write_text(json.dumps({"lanes": diverging(lanes)}), encoding="utf-8")
    asked = ["doctor", "--lanes", str(tmp_path / "verify.json"), "--drafts", str(tmp_path / "drafts")]
    assert main.main(asked) == 0
    text = (tmp_path / "drafts" / "peft-merge-parity.md").read_text(encoding="utf-8")
    assert "| `text_1` | `DIRECT_4BIT_MERGED_MATCHES_BASE` | `True` | `False` | `True` |" in text
    assert "1 of 3 prompts answered otherwise" in text and "24 warnings" in text
    assert text.index("## Works") < text.index("## Fails") and "3 of 3 prompts answered as with the adapter loaded" in text
    assert "- peft: 0.21.2" in text and "huggingface/peft#2321" in text
    assert main.main(asked) == 2  # the folder is not empty
    assert "not empty" in capsys.readouterr().err


@pytest.mark.parametrize("break_it, reason", [
    (lambda lanes: lanes, "answered every prompt as the adapter did"),
    (lambda lanes: diverging(lanes) | {"lanes": [one for one in lanes["lanes"] if one["lane"] != "fresh_bf16_merge"]},
     "fresh_bf16_merge was not run"),
    (lambda lanes: [row.update(base_differs=False) for lane in diverging(lanes)["lanes"] for row in lane["prompts"]] and lanes,
     "the adapter has no effect"),
])  # fmt: skip
def test_merge_parity_issue_is_withheld_with_its_reason(lanes, break_it, reason, tmp_path, capsys):
    (tmp_path / "verify.json").write_text(json.dumps(break_it(lanes)), encoding="utf-8")
    asked = ["doctor", "--lanes", str(tmp_path / "verify.json"), "--drafts", str(tmp_path / "drafts")]
    assert main.main(asked) == 0
    assert reason in capsys.readouterr().out and not (tmp_path / "drafts").exists()


def test_lanes_without_drafts_and_files_without_lanes_are_refused(tmp_path, capsys):
    (tmp_path / "x.json").write_text("{}", encoding="utf-8")
    assert main.main(["doctor", "--lanes", str(tmp_path / "x.json")]) == 2
    assert main.main(["doctor", "--lanes", str(tmp_path / "x.json"), "--drafts", str(tmp_path / "d")]) == 3
    assert "has no merge lanes" in capsys.readouterr().err


def matrix_of(name):
    return json.loads((ROOT / "bench" / "results" / f"matrix_{name}.json").read_text(encoding="utf-8"))["runs"]


# Where to file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words, state, may_be_open", [
    ("open when last seen", "open", True), ("", "state not known", True), ("named by users", "state not known", True),
    ("closed", "closed", False), ("merged", "closed", False), ("pull request, open", "open", False),
])  # fmt: skip
def test_thread_of_unknown_state_may_be_open(words, state, may_be_open):
    tracker = Tracker("huggingface/peft", 1, words)
    assert (tracker.known_state, tracker.may_be_open) == (state, may_be_open)


@pytest.mark.parametrize("name, file, state, words", [
    ("clippable-linear", "peft-clippable-linear.md", "supporting",
     "| Target repository | `huggingface/peft`: add the evidence to huggingface/peft#3129, no new issue |"),
    ("offload-folder", "peft-offload-folder.md", "documentation", "huggingface/peft#774"),
])  # fmt: skip
def test_a_draft_sends_to_the_thread_that_is_open(name, file, state, words):
    draft = drafts_of("cpu_newest")[name]
    assert (draft.file_name, draft.state) == (file, state) and words in draft.markdown()


def test_unknown_thread_comes_before_a_new_issue():
    known = (Tracker("huggingface/peft", 7, "named by users"), Tracker("huggingface/peft", 8, "closed"))
    said = action_for("primary", known, "huggingface/peft")
    assert said.startswith("look at huggingface/peft#7 first") and said.endswith("else new issue")
    assert action_for("primary", known[1:], "huggingface/peft") == "new issue"
    assert action_for("fixed", known, "huggingface/peft") == "no new issue, a release has the fix"


def test_lane_that_still_diverges_without_another_answer_is_withheld_with_the_reason():
    run = next(run for run in matrix_of("cpu_newest") if (run["case"], run["engine"]) == ("MERGE_DIRECT_4BIT", "stock"))
    assert (run["label"], run["lane"]) == ("DIRECT_4BIT_MERGED_MATCHES_ADAPTER", "DIRECT_4BIT_MERGE_STILL_DIVERGES")
    made = make_drafts([run], {}, run_script=lambda text: {})
    (withheld,) = made.withheld
    assert withheld.name == "direct-4bit-merge-still-diverges" and "only its logits differ" in withheld.reason
    assert "direct-4bit-merge-still-diverges" in made.not_to_file


# As a maintainer reads it ---------------------------------------------------------------------------------------------


@cache
def drafts_of(matrix):
    """Return a draft for every failure that a recorded matrix has one for; their reproducers are taken as run."""
    runs, output = matrix_of(matrix), "works: it\nTraceback (most recent call last):\nRuntimeError: it\n"

    def taken(text, bucket, run, came):
        return Shown(text, output, 1, 3.0, run.versions)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "show", taken)
        packages = {name: {"version": value} for name, value in runs[0]["versions"].items()}
        made = make_drafts(runs, {"packages": packages}, run_script=lambda text: {})
    return {draft.bucket.name: draft for draft in made.drafts}


MATRICES = ("cpu_newest", "cpu_oldest", "gpu_newest", "gpu_oldest")


def all_drafts():
    return [(matrix, name) for matrix in MATRICES for name in drafts_of(matrix)]


def test_the_matrices_give_a_draft_for_every_bucket_but_those_that_need_another_stack():
    seen = {name for _, name in all_drafts()}
    assert {bucket.name for bucket in BUCKETS} - seen <= NEVER_RECORDED
    assert len(all_drafts()) > 20


def body_of(text):
    """Return the issue's text without what it quotes: fences, then code spans."""
    return CODE_SPAN.sub("``", re.sub(r"^(`{3,}).*?^\1$", "", text.partition("\n---\n")[2], flags=re.S | re.M))


def packing(run):
    quant = (run.configuration.get("base") or {}).get("quantization_config") or {}
    return {name: value for name, value in quant.items() if name.startswith(("load_in", "bnb_4bit"))}


def check_as_a_maintainer(draft):
    """Raise AssertionError with the first point of a maintainer's checklist that the draft misses."""
    text, first = draft.markdown(), draft.failing[0]
    above, _, body = text.partition("\n---\n")
    # Versions and the setting, whole.
    for name in first.versions:
        assert f"| {name} | {first.versions[name]} |" in body, name
    for name in ("device", "model", "adapter", "attn\\_implementation", "trust\\_remote\\_code"):
        assert re.search(rf"^\| {re.escape(name)} \| [^|]+ \|$", body, re.M), name
    assert ("bundled demo model" in body) == (first.record["model"] == "demo")
    # The half that works comes first: in the summary, in the script, in what it printed.
    if draft.passing is not None:
        assert body.index("- Works, the nearest case") < body.index("- Fails:")
    assert draft.shown.text.find("works: ") >= 0 and body.index(draft.shown.text.rstrip()) < body.index("\nworks: ")
    assert draft.shown.output.index("works: ") < draft.shown.output.index("Traceback")
    # One claim a sentence, each with its runs; no marker alone, no sentence without its end.
    for facts in draft.facts.values():
        for fact in facts:
            if isinstance(fact, Statement):
                own = CODE_SPAN.sub("``", fact.text)
                assert ";" not in own and not re.search(r"[.!?] [A-Z]", own), fact.text
                assert re.search(r"[.:`)]$", fact.text), fact.text
                assert f"- {fact}" in body and fact.marks
    lines = body_of(text).splitlines()
    assert not [line for line in lines if re.fullmatch(r"[\s.:-]*(Recorded in )?(\[[^\]]+\][ .:]*)+", line)]
    assert not re.search(r"\[\d+ characters omitted\]", re.sub(r"^(`{3,}).*?^\1$", "", body, flags=re.S | re.M))
    # The contrast is of single settings: the same packing beside it where such a run passed.
    if draft.passing is not None:
        beside = [
            run for run in draft.runs
            if run.is_stock and run.passed and run.versions == first.versions and run.device_kind() == first.device_kind()
        ]  # fmt: skip
        assert packing(draft.passing) == packing(first) or packing(first) not in map(packing, beside), draft.passing.case
    assert "https://huggingface.co/docs/" in body and "| Labels | " in above and "\n\n\n\n" not in body


@each("matrix, name", all_drafts)
def test_every_draft_has_what_a_maintainer_asks_for(matrix, name):
    check_as_a_maintainer(drafts_of(matrix)[name])


@pytest.mark.parametrize("matrix, name, failing, passing", [
    ("cpu_oldest", "params4bit-constructor", "R03_SPLIT_4BIT", "R05_ALL_GPU_4BIT"),
    ("gpu_oldest", "params4bit-constructor", "R03_SPLIT_4BIT", "R05_ALL_GPU_4BIT"),
    ("cpu_newest", "quant-state-meta-item", "R03_SPLIT_4BIT_DOUBLE_QUANT", "R05_ALL_GPU_4BIT_DOUBLE_QUANT"),
    ("cpu_newest", "quant-state-meta-copy", "R03_SPLIT_4BIT", "R05_ALL_GPU_4BIT"),
    ("cpu_oldest", "shared-kv-states", "SPLIT_4BIT_ADAPTER_SAME_MAP", "R05_ALL_GPU_4BIT"),
    ("cpu_newest", "embed-tokens-offload", "EMBED_TOKENS_OFFLOADED", "R05_ALL_GPU_4BIT"),  # before that of an automatic map
])  # fmt: skip
def test_a_draft_leads_with_the_pair_of_cases_that_was_recorded_for_it(matrix, name, failing, passing):
    draft = drafts_of(matrix)[name]
    assert (draft.failing[0].case, draft.passing.case) == (failing, passing)


@each("matrix, name", all_drafts)
def test_a_reproducer_quantizes_as_the_run_of_its_draft(matrix, name):
    draft = drafts_of(matrix)[name]
    quant = (draft.failing[0].configuration.get("base") or {}).get("quantization_config") or {}
    asked = set(re.findall(r"bnb_4bit_use_double_quant=(True|False)", draft.shown.text))
    if asked and quant.get("load_in_4bit"):
        assert asked == {str(bool(quant.get("bnb_4bit_use_double_quant")))}


def test_checks_of_a_draft_run_and_name_what_is_wrong():
    """The snippet as a reader would paste it, on a stock 4-bit model of which one scale has lost its data."""
    from tests.stock import load_stock

    text = drafts_of("cpu_newest")["quant-state-meta-item"].markdown()
    snippet = re.search(r"### Checks on another model\n.*?```python\n(.*?)```", text, re.S).group(1)
    model = load_stock(ROOT / "trimtab" / "demo" / "base", "nf4-dq")
    path = "model.language_model.layers.0.self_attn.q_proj"
    state = model.get_submodule(path).weight.quant_state
    state.offset = state.offset.to("meta")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(snippet, {"model": model, "device_map": {"model.vision_projector": "cpu", "model.vision_tower": "cpu"}})
    scales, keys = map(ast.literal_eval, printed.getvalue().splitlines())
    assert scales == [f"{path}.weight.quant_state: offset"]
    assert list(keys) == ["model.vision_projector"]
    assert {"model.vision_tower", "model.embed_vision"} <= set(keys["model.vision_projector"])


def test_drafts_count_what_a_scan_of_the_live_model_noticed():
    draft = drafts_of("cpu_newest")["quant-state-meta-copy"]
    first = draft.failing[0]
    lost = [one for one in first.record["scan"] if one["kind"] == "quant-state-on-meta"]
    body = draft.markdown().partition("\n---\n")[2]
    assert f"- The model had these linears: 115 `Linear4bit`, 224 `Linear`. [{first.mark}]" in body
    count = re.search(r"A scan of the live model counted: .*?(\d+) `quant-state-on-meta`", body)
    assert int(count.group(1)) == len(lost) == sum(one["count"] for one in lost) > 1


@pytest.mark.slow
@pytest.mark.parametrize("matrix", ["cpu_newest", "cpu_oldest"])
def test_every_draft_s_own_reproducer_runs(matrix):
    """With the reproducers really run, in the environment of this test: those of other versions are withheld by name."""
    runs, environment = matrix_of(matrix), read_environment()
    made = make_drafts(runs, environment)
    if any(environment.versions.get(name) != value for name, value in evidence_of(runs)[0].versions.items()):
        assert made.drafts == () and any("recorded under other versions" in one.reason for one in made.withheld)
        return
    assert {draft.bucket.name for draft in made.drafts} == set(drafts_of(matrix))
    for draft in made.drafts:
        check_as_a_maintainer(draft)
