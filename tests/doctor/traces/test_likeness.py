"""Reports without a traceback: entries that they look like are listed under UNKNOWN, and never as a name."""

import json

import pytest

from tools import score_traces
from trimtab.cli import main as cli
from trimtab.doctor.facts.bug import Affected, Bug
from trimtab.doctor.probes.runner import read_catalogue
from trimtab.doctor.traces.answer import diagnose, diagnosis_document
from trimtab.doctor.traces.classify import UNKNOWN
from trimtab.doctor.traces.likeness import MOST_LISTED, index_of, reported_as, tokens
from trimtab.doctor.traces.reported import REPORTED
from trimtab.report.render import Lines

BARE = "RuntimeError: Tensor.item() cannot be called on meta tensors"
FRAMES = 'Traceback (most recent call last):\n  File "/x/site-packages/my_own/model.py", line 1, in mask\n    pass\n'


def bug(name, **texts):
    empty = dict.fromkeys(("title", "symptom", "trigger", "cause", "versions", "way_round", "trimtab"), "")
    return Bug(
        id=name, name=name.lower(), affected=(Affected("torch"),), owner=("torch",), trackers=(), evidence="run",
        **{**empty, **texts},
    )  # fmt: skip


def test_bare_last_line_gets_its_probable_bug_and_stays_unknown():
    answer = diagnose(BARE).answers[0]
    assert (answer.label, answer.confidence, answer.bug) == (UNKNOWN, "none", None)
    assert answer.looks_like[0].bug.id == "A1" and len(answer.looks_like) <= MOST_LISTED
    assert answer.looks_like[0].tell == (
        "ask: whether a frame is in bitsandbytes/functional.py, as_dict", "run: trimtab doctor --probe A1",
    )  # fmt: skip
    shown = Lines(112).show(diagnosis_document(diagnose(BARE)))
    assert shown.startswith("UNKNOWN: ") and "no diagnosis" in shown and "A1 meta-item: " in shown
    assert max(map(len, shown.splitlines())) <= 113


@pytest.mark.parametrize("text", [FRAMES + BARE, "NCCL hangs cause a timeout in allreduce", "what now?", "step\n" * 300 + BARE])
def test_report_with_frames_or_with_other_words_lists_nothing(text):
    answer = diagnose(text).answers[0]
    assert answer.label == UNKNOWN and answer.looks_like == ()
    assert "looks like" not in Lines(112).show(diagnosis_document(diagnose(text)))


def test_named_answer_has_no_list():
    named = diagnose("TypeError: Params4bit.__new__() got an unexpected keyword argument '_is_hf_initialized'").answers
    assert named[0].label != UNKNOWN and [one.looks_like for one in named] == [()]


def test_json_has_the_list(tmp_path, capsys):
    (tmp_path / "t.txt").write_text(BARE, encoding="utf-8")
    assert cli.main(["doctor", "--trace", str(tmp_path / "t.txt"), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["answers"][0]["looks_like"]
    assert listed[0]["bug"] == "A1" and listed[0]["tell"][-1] == "run: trimtab doctor --probe A1"
    assert set(listed[0]) == {"bug", "title", "symptom", "score", "tell"}


def test_words_are_stems_parts_of_names_and_whole_names():
    found = ["load", "param", "4", "bit", "item", "=params4bit", "4", "bit"]
    assert tokens("Loading Params4bit.item() in 4bit") == found
    assert tokens("the merges_and") == ["merg", "=merges_and"]


def test_score_grows_with_rare_shared_words_and_falls_with_unknown_ones():
    index = index_of([bug("A1", title="meta tensors"), bug("B1", title="tensors of a map"), bug("B2", title="tensors")])
    scores = index.scores("meta tensors")
    assert scores["A1"] > scores["B2"] > 0
    assert index.scores("meta tensors, and my own_name_of_a_thing")["A1"] < scores["A1"]
    assert index.scores("nothing in common") == {} == index.scores("")


def test_reports_are_halved_by_their_links_and_name_entries():
    reports = json.loads(score_traces.REPORTS.read_text(encoding="utf-8"))["entries"]
    assert len({one["link"] for one in reports}) == len(reports) >= 80
    assert all(one["half"] == score_traces.half_of(one["link"]) for one in reports)
    assert {one["bug"] for one in reports} - {""} <= {entry.bug.id for entry in read_catalogue()}


@pytest.mark.parametrize("half", ["tune", "held-out"])
def test_right_entry_is_listed_and_foreign_reports_get_none_in_80_percent(half):
    rows = score_traces.likeness()[half].values()
    assert sum(one["listed"] for one in rows) >= 0.8 * sum(one["with_an_entry"] for one in rows)
    assert sum(one["silent"] for one in rows) >= 0.8 * sum(one["without_an_entry"] for one in rows)


def test_every_entry_has_lines_and_a_line_needs_all_its_patterns_in_a_few_sentences():
    assert REPORTED.keys() == {entry.bug.id for entry in read_catalogue()}
    told, apart = "Merging my adapter needs more {}RAM than I have", "and so on " * 60
    assert reported_as(told.format("")) == ["F4"] and reported_as(told.format("").upper()) == ["F4"]
    assert reported_as(told.format(apart)) == [] == reported_as("Merging my adapter")


def test_page_shows_these_counts_and_the_answer_to_each_paste():
    page = score_traces.PAGE.read_text(encoding="utf-8")
    assert score_traces.likeness_table(score_traces.likeness()) in page
    assert page.count("<!-- paste -->") == len(score_traces._PASTE.findall(page)) > 3
    assert score_traces.answered(page) == page
