"""Issues: what saved lanes carry, where a failure is filed, what is withheld and why."""

import json
import re
from pathlib import Path

import pytest

from trimtab import cli
from trimtab.doctor.claims import decide_claims
from trimtab.doctor.draft import make_drafts
from trimtab.doctor.draft_evidence import differences, evidence_of
from trimtab.doctor.draft_front import _action, front_matter
from trimtab.doctor.trackers import Tracker

ROOT = Path(__file__).resolve().parent.parent


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
    assert cli.main(asked) == 0
    text = (tmp_path / "drafts" / "peft-merge-parity.md").read_text(encoding="utf-8")
    assert "| `text_1` | `DIRECT_4BIT_MERGED_MATCHES_BASE` | `True` | `False` | `True` |" in text
    assert "1 of 3 prompts answered otherwise" in text and "24 warnings" in text
    assert (
        text.index("## Works") < text.index("## Fails") and "3 of 3 prompts answered as with the adapter loaded" in text
    )
    assert "- peft: 0.21.2" in text and "huggingface/peft#2321" in text
    assert cli.main(asked) == 2  # the folder is not empty
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
    assert cli.main(asked) == 0
    assert reason in capsys.readouterr().out and not (tmp_path / "drafts").exists()


def test_lanes_without_drafts_and_files_without_lanes_are_refused(tmp_path, capsys):
    (tmp_path / "x.json").write_text("{}", encoding="utf-8")
    assert cli.main(["doctor", "--lanes", str(tmp_path / "x.json")]) == 2
    assert cli.main(["doctor", "--lanes", str(tmp_path / "x.json"), "--drafts", str(tmp_path / "d")]) == 3
    assert "holds no merge lanes" in capsys.readouterr().err


# Where to file --------------------------------------------------------------------------------------------------------


def recorded(case):
    text = (ROOT / "bench" / "results" / "matrix_cpu_newest.json").read_text(encoding="utf-8")
    return next(run for run in json.loads(text)["runs"] if run["case"] == case and run["engine"] == "stock")


def environment_of(run):
    return {"packages": {name: {"version": value} for name, value in run["versions"].items()}}


def shown(run, kind, message):
    """What a reproducer prints that fails as the run did."""
    file = [frame["file"] for frame in run["exception"]["frames"] if frame["library"] != "torch"][-1]
    output = f'works: it\nTraceback (most recent call last):\n  File "/x/{file}", line 1, in f\n{kind}: {message}\n'
    return lambda text: {"output": output, "exit_code": 1, "versions": run["versions"], "ended": "done"}


@pytest.mark.parametrize("words, state, may_be_open", [
    ("open when last seen", "open", True), ("", "state not known", True), ("named by users", "state not known", True),
    ("closed", "closed", False), ("merged", "closed", False), ("pull request, open", "open", False),
])  # fmt: skip
def test_thread_of_unknown_state_may_be_open(words, state, may_be_open):
    tracker = Tracker("huggingface/peft", 1, words)
    assert (tracker.known_state, tracker.may_be_open) == (state, may_be_open)


def test_clippable_draft_sends_to_the_thread_that_is_open():
    run = recorded("BROAD_TARGETS_4BIT")
    made = make_drafts(
        [run, recorded("R05_ALL_GPU_4BIT")], environment_of(run),
        run_script=shown(run, "ValueError", "Target module Gemma4ClippableLinear("),
    )  # fmt: skip
    (draft,) = made.drafts
    target = dict(front_matter(draft))["Target repository"]
    assert "add the evidence to huggingface/peft#3129, no new issue" in target
    assert "peft-clippable-linear.md: huggingface/peft#3129" in made.not_to_file


def test_offload_folder_has_a_draft_about_documentation():
    run = recorded("DISK_MAP_NO_FOLDER")
    made = make_drafts(
        [run, recorded("R05_ALL_GPU_4BIT")], environment_of(run),
        run_script=shown(run, "ValueError", run["exception"]["message"]),
    )  # fmt: skip
    (draft,) = made.drafts
    assert (draft.file_name, draft.state) == ("peft-offload-folder.md", "documentation")
    text = draft.markdown()
    assert "offload_dir" in text and "huggingface/peft#774" in text


def test_unknown_thread_comes_before_a_new_issue():
    known = (Tracker("huggingface/peft", 7, "named by users"), Tracker("huggingface/peft", 8, "closed"))
    said = _action("primary", known, "huggingface/peft")
    assert said.startswith("look at huggingface/peft#7 first") and said.endswith("else new issue")
    assert _action("primary", known[1:], "huggingface/peft") == "new issue"
    assert _action("fixed", known, "huggingface/peft") == "no new issue, a release has the fix"


def test_qlora_adapters_are_broken_is_a_claim_that_a_pass_refutes():
    decisions = {one.claim.text: one for one in decide_claims(evidence_of([recorded("R05_ALL_GPU_4BIT")]))}
    assert decisions["QLoRA adapters are broken."].state == "refuted"


def test_lane_that_still_diverges_without_another_answer_is_withheld_with_the_reason():
    run = recorded("MERGE_DIRECT_4BIT")
    assert (run["label"], run["lane"]) == ("DIRECT_4BIT_MERGED_MATCHES_ADAPTER", "DIRECT_4BIT_MERGE_STILL_DIVERGES")
    made = make_drafts([run], environment_of(run), run_script=lambda text: {})
    (withheld,) = made.withheld
    assert withheld.name == "direct-4bit-merge-still-diverges" and "only its logits differ" in withheld.reason
    assert "direct-4bit-merge-still-diverges" in made.not_to_file


# As a maintainer reads it ---------------------------------------------------------------------------------------------


def item_draft():
    run = recorded("R03_SPLIT_4BIT_DOUBLE_QUANT")
    names = ("R05_ALL_GPU_4BIT", "R05_ALL_GPU_4BIT_DOUBLE_QUANT", "SPLIT_4BIT_NO_ADAPTER")
    made = make_drafts(
        [run, *map(recorded, names)], environment_of(run),
        run_script=shown(run, "RuntimeError", "Tensor.item() cannot be called on meta tensors"),
    )  # fmt: skip
    return next(draft for draft in made.drafts if draft.bucket.name == "quant-state-meta-item")


def test_nearest_pass_has_the_same_quantization():
    draft = item_draft()
    assert draft.passing is not None and draft.passing.case == "R05_ALL_GPU_4BIT_DOUBLE_QUANT"
    assert "bnb_4bit_use_double_quant" not in differences(draft.failing[0], draft.passing)


def test_written_map_leads_before_an_automatic_one():
    old = json.loads((ROOT / "bench" / "results" / "matrix_cpu_oldest.json").read_text(encoding="utf-8"))["runs"]
    runs = [
        run
        for run in old
        if run["engine"] == "stock" and run["case"] in ("AUTO_MAP_4BIT", "R03_SPLIT_4BIT", "R05_ALL_GPU_4BIT")
    ]
    first = next(run for run in runs if run["case"] == "R03_SPLIT_4BIT")
    script = shown(first, "TypeError", first["exception"]["message"])
    (draft,) = make_drafts(runs, environment_of(first), run_script=script).drafts
    assert (draft.failing[0].case, draft.passing.case) == ("R03_SPLIT_4BIT", "R05_ALL_GPU_4BIT")


def test_draft_has_what_a_maintainer_asks_for():
    text = item_draft().markdown()
    above, _, body = text.partition("\n---\n")
    # Versions and the setting, whole.
    for row in (
        "| peft |",
        "| transformers |",
        "| model |",
        "| adapter |",
        "| attn\\_implementation |",
        "| trust\\_remote\\_code |",
    ):
        assert row in body, row
    assert "small model that comes with trimtab" in body
    # The half that works comes first, in the words and in the script that was run.
    assert body.index("Works, the nearest case") < body.index("- Fails:")
    assert body.index('print("works:') < body.index("model(ids)\n")
    # One claim a sentence, each with its run; no marks alone, nothing cut for a few characters.
    lines = body.splitlines()
    assert not [line for line in lines if re.fullmatch(r"(\[[^\]]+\] ?)+", line.strip())]
    assert not re.search(r"\[\d{1,2} characters left out\]", body)
    assert "quantization, device_map" in above and "https://huggingface.co/docs/" in body
