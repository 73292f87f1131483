"""Drafts: from recorded runs alone, each with a reproducer that showed its failure; nothing personal, nothing half-written."""

import ast
import getpass
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import ROOT
from tests.raised import refused
from trimtab.doctor.cases.labels import LABELS
from trimtab.doctor.facts.buckets import BUCKETS, STATES
from trimtab.doctor.facts.bug import Affected, Bug
from trimtab.doctor.facts.evidence import Point, Run, Statement, differences, evidence_of, nearest_pass, raised_in
from trimtab.doctor.issues import draft
from trimtab.doctor.issues import run as draft_run
from trimtab.doctor.issues.claims import CLAIMS, NOT_TESTED, REFUTED, WIDER, decide_claims
from trimtab.doctor.issues.issue import Recorded
from trimtab.doctor.issues.markdown import TEMPLATES, script
from trimtab.doctor.issues.owner import came_back, fixed_here, owner_of
from trimtab.errors import RequestError
from trimtab.process.redact import check_clean, clean
from trimtab.report.render import cell, fence, inline, plain

SCRIPTS = {file.name.partition(".")[0] for file in (TEMPLATES / "issues/reproducers").glob("[a-z]*.py.j2")}
NEW = {"transformers": "5.23.0", "accelerate": "1.15.0", "peft": "0.21.2", "bitsandbytes": "0.50.2", "torch": "2.13.0"}
OLD = {"transformers": "5.6.2", "accelerate": "1.13.0", "peft": "0.19.1", "bitsandbytes": "0.49.2", "torch": "2.13.0"}
TOWERS = {"model.vision_tower": "cpu", "model.audio_tower": "cpu", "": 0}
NAMED = {"model.language_model": 0, "model.vision_tower": "cpu", "model.audio_tower": "cpu", "lm_head": 0}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
ITEM = "Tensor.item() cannot be called on meta tensors"
ENVIRONMENT = {"os": "Ubuntu 24.04 (Linux 6.8)", "python": "3.11.9", "cpu": "A CPU", "gpus": [], "host_total_bytes": 2**34}


def failure(kind, message, *frames):
    kept = [
        {"library": file.partition("/")[0], "file": file, "line": line, "function": function} for file, line, function in frames
    ]
    tail = "\n".join(f"{one['file']}:{one['line']} in {one['function']}" for one in kept)
    return {"type": kind, "message": message, "frames": kept, "tail": f"{tail}\n{kind}: {message}", "ours": False}


def record(case, label="PASS", *, exception=None, adapter_map=None, call="peft", asked=None, quant=NF4, **extra):
    """Return a record as the matrix writes it."""
    base = {"device_map": asked if asked is not None else {"": 0}, "dtype": "bfloat16"}
    if quant:
        base["quantization_config"] = quant
    return {
        "case": case, "title": case.lower().replace("_", " "), "engine": "stock", "label": label, "lane": None,
        "stage": "adapter" if exception else "done", "ended": "done", "modes": {}, "placement_kept": True,
        "map_asked": base["device_map"], "map_after": None, "memory": {"host_peak_bytes": 3 * 2**28},
        "seconds": 4.0, "exception": exception, "warnings": {}, "quantized": {"Linear4bit": 35 if quant else 0},
        "scan": [], "log_lines": [], "device": "CPU (the GPU is imitated)", "pressure": None, "versions": dict(NEW),
        "configuration": {"base": base, "adapter": {"device_map": adapter_map} if adapter_map else {}, "call": call},
        "model": "demo", "script": "", "map_keys_without_module": [], "catalogue": "", **extra,
    }  # fmt: skip


META_ITEM = failure(
    "RuntimeError", ITEM, ("peft/peft_model.py", 601, "from_pretrained"), ("accelerate/hooks.py", 482, "attach"),
    ("bitsandbytes/functional.py", 565, "as_dict"), ("torch/_meta_registrations.py", 8550, "meta_local_scalar_dense"),
)  # fmt: skip


def r03(**extra):
    return record("R03_SPLIT_4BIT", "FAIL_QUANT_STATE_META_ITEM", exception=META_ITEM, asked=TOWERS, **extra)


def the_runs():
    """Return what a small matrix writes: passes, failures of several kinds, one that nothing knows."""
    return [
        record("R05_ALL_GPU_4BIT"),
        r03(log_lines=["no modules could be assigned to the following devices: 0: 5668601858 bytes required"]),
        record("SPLIT_4BIT_NO_ADAPTER", asked=TOWERS, call="none"),
        record("SPLIT_4BIT_ADAPTER", "PASS_BUT_PLACEMENT_UNDONE", asked=TOWERS, placement_kept=False,
               offloaded={"before": 28, "after": 0, "of": 28}),
        record("SPLIT_4BIT_ADAPTER_PREFIXED_MAP", asked=NAMED,
               adapter_map={f"base_model.model.{key}": place for key, place in NAMED.items()}),
        record("ODD", "UNKNOWN", exception=failure("ZeroDivisionError", "division by zero", ("peft/x.py", 3, "f")), asked=TOWERS),
        record("SLOW", "TIMEOUT", ended="timeout", stage="generate"),
        record("MAP_KEY_MISSING", "PASS_BUT_MAP_KEY_IGNORED", call="none", asked=TOWERS, catalogue="C5",
               map_keys_without_module=["model.multi_modal_projector"]),
        record("BLIND", "PASS_BUT_IMAGE_IGNORED", catalogue="H1"),
    ]  # fmt: skip


def bug(id, owner="peft", *, fixed=(), trackers=(), name="a-bug"):
    return Bug(
        id=id, name=name, title="a bug", symptom="s", trigger="t", cause="c",
        affected=tuple(Affected(package, None, version) for package, version in fixed) or (Affected(owner),), versions="v",
        way_round="go round", owner=(owner,) if isinstance(owner, str) else owner, trackers=tuple(trackers), trimtab="t",
        evidence="run",
    )  # fmt: skip


BUGS = {
    "A1": bug("A1", ("bitsandbytes", "accelerate"), trackers=("bitsandbytes-foundation/bitsandbytes#1525 (closed)",)),
    "A3": bug("A3", "accelerate", fixed=(("accelerate", "1.14.0"), ("bitsandbytes", "0.50.0"))),
    "B1": bug("B1", "peft", trackers=("huggingface/peft#287 (open)", "a page without a number")),
    "H1": bug("H1", "transformers", name="blind"),
}


def printed(kind, message, *files):
    frames = "\n".join(f'  File "{file}", line 1, in f\n    x()' for file in files)
    return f"works: all on the GPU\nTraceback (most recent call last):\n{frames}\n{kind}: {message}\n"


def came(output, *, versions=NEW, exit_code=1, ended="done"):
    return {"output": output, "exit_code": exit_code, "versions": dict(versions), "ended": ended, "seconds": 5.2}


def reproduce(text):
    """Stand in for a run: answer as the two scripts did when they were run."""
    if "vision tower weights were offloaded before" in text:
        return came(printed("AssertionError", "28 of 28 vision tower weights were offloaded before the adapter, 0 after it"))
    return came(printed("RuntimeError", ITEM, "/x/site-packages/bitsandbytes/functional.py"))


def make(runs=None, **options):
    options = {"bugs": BUGS, "run_script": reproduce, **options}
    return draft.make_drafts(the_runs() if runs is None else runs, ENVIRONMENT, **options)


def the_draft(made, name):
    return next(one for one in made.drafts if one.bucket.name == name)


# Evidence -------------------------------------------------------------------------------------------------------------


def test_a_sentence_without_a_run_cannot_be_made():
    error = refused(Statement, "it fails", ())
    assert (error.field, error.value) == ("statement", "it fails")
    with pytest.raises(RequestError):
        Statement("it fails", ({"case": "made up"},))
    with pytest.raises(RequestError):
        Recorded("x", ())


def test_what_is_no_record_is_no_evidence():
    error = refused(lambda: evidence_of([record("A"), {"case": "B", "engine": 3}, "text"]))
    assert error.field == "runs"
    assert "run 2: 'engine' is a int; 'label' is missing; 'versions' is missing" in str(error)
    assert "run 3: a str, not an object" in str(error)
    with pytest.raises(RequestError):
        Run("r1", {})


def test_a_point_is_stated_with_the_runs_that_carry_it_or_not_at_all():
    runs = evidence_of(the_runs())
    point = Point("runs without an adapter", lambda run: run.passed and not run.adapter)
    stated = point.stated(runs)
    assert stated is not None and str(stated) == "runs without an adapter [r3]"
    assert Point("never", lambda run: False).stated(runs) is None


def test_every_fact_of_a_draft_names_a_run_and_every_number_in_it_was_recorded():
    made = make()
    recorded = json.dumps(the_runs()) + json.dumps(ENVIRONMENT)
    for one in made.drafts:
        known = {run.mark for run in one.runs} | {"reproducer", "environment"}
        for facts in one.facts.values():
            for fact in facts:
                assert isinstance(fact, Statement | Recorded)
                assert fact.sources and {source.mark for source in fact.sources} <= known
                if isinstance(fact, Statement) and one.shown not in fact.sources:
                    for number in re.findall(r"(?<![\w-])\d+(?![\w-])", fact.text):
                        assert number in recorded, fact.text
        # What the template adds to the facts has no number of its own.
        body = one.markdown().partition("\n---\n")[2]
        for text in sorted((str(fact) for facts in one.facts.values() for fact in facts), key=len, reverse=True):
            body = body.replace(text, "")
        for _, quoted in commonmark_fences(body):
            body = body.replace(quoted, "")
        own = [line for line in body.splitlines() if not line.startswith("|") and "http" not in line]
        assert not re.search(r"(?<![\w#-])\d+(?![\w-])", "\n".join(own).replace("PEFT 0", "")), own


def test_each_line_of_the_issue_with_a_fact_ends_with_its_runs():
    body = the_draft(make(), "quant-state-meta-item").markdown().partition("\n---\n")[2]
    facts = re.search(r"### Summary\n(.*?)\n### Exact", body, re.DOTALL).group(1).strip().splitlines()
    assert [re.search(r"(\[[^\]]+\])$", line).group(1) for line in facts[:3]] == ["[r1]", "[r2]", "[reproducer]"]
    assert facts[3] == "" and facts[4].startswith("Marks such as [r2] are rows of the table")


def test_every_run_that_a_sentence_names_stands_in_the_table_of_results():
    for one in make().drafts:
        body = one.markdown().partition("\n---\n")[2]
        table = re.search(r"### Observed results\n(.*?)\n### ", body, re.DOTALL).group(1)
        rows = re.findall(r"^\| (r\d+) \|", table, re.M)
        assert set(re.findall(r"\[(r\d+)\]", body)) == set(rows) and len(set(rows)) == len(rows) > 2


def test_an_imitated_gpu_is_told_with_the_memory_that_was_set():
    pressed = r03(how_pressed="imitated card of 100 bytes, 55 of them free after the base")
    text = the_draft(make([pressed, record("R05")]), "quant-state-meta-item").markdown()
    assert "is used in place of the GPU in every map" in text
    assert "free memory was set: imitated card of 100 bytes, 55 of them free after the base. [r1]" in text
    real = [{**run, "device": "NVIDIA H200"} for run in (pressed, record("R05"))]
    assert "is used in place of the GPU in every map" not in the_draft(make(real), "quant-state-meta-item").markdown()


def test_a_wrong_answer_is_told_by_mode_and_number():
    modes = {
        "text": {"ok": True, "equals_reference": True, "max_abs": 0.0},
        "image": {"ok": True, "equals_reference": False, "max_abs": 3.14159},
        "audio": {"ok": False, "equals_reference": None, "max_abs": None},
    }
    undone = {"label": "PASS_BUT_PLACEMENT_UNDONE", "placement_kept": False, "asked": TOWERS}
    text = make([record("A", modes=modes, **undone), record("C")]).drafts[0].markdown()
    assert "text right, image another answer, audio failed" in text
    assert "Another answer than that of the same model on one device: image (a logit differs by 3.14). [r1]" in text


def test_what_sets_two_runs_apart_is_said():
    odd = r03()
    odd["configuration"] |= {"targets": "q_proj, v_proj", "then": "dequantize, merge"}
    same = record("R05", asked=TOWERS)
    same["configuration"] |= {"targets": "exactly the modules that it has weights for"}
    text = the_draft(make([odd, same]), "quant-state-meta-item").markdown()
    assert "(`target_modules`: q_proj, v_proj), `model.dequantize()`, `merge_and_unload()`: " in text
    assert "| targets | `q_proj, v_proj` | `exactly the modules that it has weights for` |" in text
    assert "| then | `dequantize, merge` | not set |" in text


def test_long_lines_are_cut_and_say_so():
    long = {**META_ITEM, "message": f"{ITEM} {'x' * 2000}", "tail": "y" * 2000}
    output = printed("RuntimeError", f"{ITEM} {'x' * 2000}", "bitsandbytes/functional.py")
    runs = [{**r03(), "exception": long}, record("R05")]
    text = the_draft(make(runs, run_script=lambda _: came(output)), "quant-state-meta-item").markdown()
    assert max(map(len, text.splitlines())) < 800
    fenced = "\n".join(body for _, body in commonmark_fences(text))
    # In what is quoted with a count, in sentences with an ellipsis.
    assert text.count("characters omitted]") == fenced.count("characters omitted]") >= 2
    assert f"`RuntimeError: {ITEM} ...`" in text


def test_lines_that_differ_in_a_module_are_told_once():
    noisy = r03(warnings={f"for base.model.layers.{n}.q_proj: copying to meta is a no-op": 2 for n in range(5)})
    text = the_draft(make([noisy, record("R05")]), "quant-state-meta-item").markdown()
    assert text.count("copying to meta is a no-op") == 1 and "Printed while it ran (10 times)" in text


def test_without_the_run_the_sentence_is_gone():
    assert "runs without an adapter. [r3]" in the_draft(make(), "quant-state-meta-item").markdown()
    runs = [run for run in the_runs() if run["case"] != "SPLIT_4BIT_NO_ADAPTER"]
    assert "runs without an adapter" not in the_draft(make(runs), "quant-state-meta-item").markdown()


# Buckets --------------------------------------------------------------------------------------------------------------


def test_runs_are_sorted_into_drafts_and_reasons():
    made = make()
    assert {one.file_name: one.state for one in made.drafts} == {
        "peft-placement-planned-again.md": "primary", "bitsandbytes-quant-state-meta-item.md": "supporting",
    }  # fmt: skip
    assert {(one.name, one.runs[0].case) for one in made.withheld} == {
        ("unknown", "ODD"), ("timeout", "SLOW"), ("unknown-map-key", "MAP_KEY_MISSING"),
        ("blind", "BLIND"),
    }  # fmt: skip


def test_what_trimtab_did_is_no_evidence_against_others():
    runs = [{**r03(), "engine": "trimtab"}, record("BRIDGE", "UNKNOWN", call="bridge", exception=META_ITEM), record("OK")]
    made = make(runs)
    assert made.drafts == () and made.withheld == ()


def test_every_bucket_has_known_labels_a_script_and_the_sections_texts():
    assert len({bucket.name for bucket in BUCKETS}) == len(BUCKETS)
    assert any(" needs an offload_dir;" in bucket.title for bucket in BUCKETS)
    for bucket in BUCKETS:
        assert set(bucket.labels) <= set(LABELS), bucket.name
        assert bucket.script in SCRIPTS and bucket.expected and bucket.questions and bucket.specific
        assert set(bucket.beside) <= {other.name for other in BUCKETS}
    assert {bucket.script for bucket in BUCKETS} == SCRIPTS


def test_a_map_given_to_peft_parts_two_buckets_of_one_label():
    undone = {"label": "PASS_BUT_PLACEMENT_UNDONE", "placement_kept": False, "asked": TOWERS}
    runs = [record("A", **undone), record("B", adapter_map=TOWERS, **undone), record("C")]
    made = make(runs)
    assert {one.bucket.name: [run.case for run in one.failing] for one in made.drafts} == {
        "placement-planned-again": ["A"], "map-ignored": ["B"],
    }  # fmt: skip


def test_the_nearest_passing_case_differs_in_the_fewest_settings_and_shares_the_versions():
    far = record("FAR", quant=None, asked={"": "cpu"}, call="none")
    near = record("NEAR", asked=TOWERS, call="none")
    other = record("OTHER", asked=TOWERS) | {"versions": OLD}
    runs = evidence_of([r03(), far, near, other])
    found = nearest_pass(runs[0], runs)
    assert found is not None and found.case == "NEAR"
    assert nearest_pass(runs[0], [runs[0], runs[3]]) is None


def test_of_several_version_sets_the_environment_s_own_is_the_draft_s():
    old = {**r03(), "case": "OLD", "versions": OLD}
    installed = {"packages": {name: {"version": version, "installed": None} for name, version in NEW.items()}}
    made = draft.make_drafts([old, record("R05") | {"versions": OLD}, r03()], installed, bugs=BUGS, run_script=reproduce)
    (one,) = made.drafts
    assert [run.case for run in one.failing] == ["R03_SPLIT_4BIT", "OLD"]


def test_a_pass_that_undid_the_placement_is_no_pass():
    (run,) = evidence_of([record("X", "PASS", placement_kept=False)])
    assert not run.passed


def test_without_a_passing_case_a_draft_is_deferred_and_says_so():
    made = make([r03()])
    (one,) = made.drafts
    assert one.state == "deferred" and "No passing case was recorded" in one.markdown()
    assert "no passing case next to it" in made.not_to_file


def test_a_release_with_a_fix_makes_it_fixed_and_a_failure_with_the_fix_makes_it_come_back():
    message = "Params4bit.__new__() got an unexpected keyword argument '_is_hf_initialized'"
    exception = failure("TypeError", message, ("accelerate/utils/modeling.py", 363, "set_module_tensor_to_device"))

    def answer(text):
        return came(printed("TypeError", message, "accelerate/utils/modeling.py"), versions=versions)

    for versions, state in ((OLD, "fixed"), (NEW, "primary")):
        runs = [
            record("R03", "FAIL_BNB_PARAM_CONSTRUCTOR", exception=exception, asked=TOWERS) | {"versions": versions},
            record("R05") | {"versions": versions},
        ]
        (one,) = make(runs, run_script=answer).drafts
        assert one.state == state and "accelerate 1.14.0 or bitsandbytes 0.50.0 (catalogue)" in one.markdown()
        assert ("| Came back | fails with accelerate 1.15.0 (fixed in 1.14.0)" in one.markdown()) == (state == "primary")
    (run,) = evidence_of([record("X")])
    assert not fixed_here(BUGS["A1"], run) and came_back(BUGS["A1"], run) == []


def test_the_same_case_under_other_versions_is_told():
    other = r03() | {"versions": OLD, "label": "PASS", "exception": None}
    text = the_draft(make([*the_runs(), other]), "quant-state-meta-item").markdown()
    old = "transformers 5.6.2, accelerate 1.13.0, peft 0.19.1, bitsandbytes 0.49.2"
    assert f"`R03_SPLIT_4BIT` with {old}: the right answer, with the requested placement (`PASS`). [r10]" in text


def test_what_probes_saw_is_told():
    seen = SimpleNamespace(bug=BUGS["A1"], seen=SimpleNamespace(state="present", evidence="RuntimeError: item"))
    text = the_draft(make(verdicts=[seen]), "quant-state-meta-item").markdown()
    assert "A check of this installation reports present: `RuntimeError: item` [probe A1]" in text


# Owner and threads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("files, owner", [
    (("peft/a.py", "accelerate/hooks.py", "bitsandbytes/functional.py", "torch/x.py"), "bitsandbytes"),
    (("peft/a.py", "accelerate/hooks.py"), "accelerate"), (("transformers/a.py", "peft/tuners/lora/model.py"), "peft"),
    (("peft/a.py", "transformers/models/gemma4/modeling_gemma4.py"), "transformers"), (("torch/x.py",), "transformers"),
])  # fmt: skip
def test_the_owner_is_the_layer_of_the_failing_frame(files, owner):
    (run,) = evidence_of([record("X", "UNKNOWN", exception=failure("E", "m", *((file, 1, "f") for file in files)))])
    assert owner_of(None, run)[0] == owner


def test_the_trigger_is_named_beside_the_owner():
    (run,) = evidence_of([r03()])
    assert owner_of(BUGS["A1"], run) == (
        "bitsandbytes",
        "fails in bitsandbytes (quantized weights and their state), called from peft; the catalogue names bitsandbytes, accelerate",
    )


def test_an_open_thread_gets_the_evidence_instead_of_a_new_issue():
    made = make()
    assert (
        "`huggingface/peft`: add the evidence to huggingface/peft#287, no new issue"
        in the_draft(made, "placement-planned-again").markdown()
    )
    assert "`bitsandbytes-foundation/bitsandbytes`: new issue" in the_draft(made, "quant-state-meta-item").markdown()
    assert "- peft-placement-planned-again.md: huggingface/peft#287" in made.not_to_file


def test_a_thread_that_the_error_itself_names_comes_before_a_new_issue():
    message = f"{ITEM}. See https://github.com/bitsandbytes-foundation/bitsandbytes/issues/77."
    runs = [{**r03(), "exception": {**META_ITEM, "message": message}}, record("R05")]
    text = the_draft(make(runs), "quant-state-meta-item").markdown()
    named = "bitsandbytes-foundation/bitsandbytes#77"
    assert f"add the evidence to {named} if it is open: the error message links to it; else new issue" in text
    assert f"- {named} (named by the error's own text)" in text


def test_a_run_s_own_folder_sets_no_two_runs_apart():
    one, two = record("A"), record("B")
    for run in (one, two):
        run["configuration"]["base"] |= {"offload_folder": f"<work>/{run['case']}-stock/offload"}
    two["configuration"]["adapter"] = {"offload_dir": "<work>/B-stock/x"}
    first, second = evidence_of([one, two])
    assert differences(first, second) == {"adapter.offload_dir": (None, "<work>/x")}


def test_of_equally_near_cases_that_with_the_same_call_is_the_contrast():
    failing = record("EMBED", "FAIL_EMBED_TOKENS_META", call="none", asked=NAMED, exception=META_ITEM)
    other_call = record("R05", asked=NAMED)
    same_call = record("SPLIT", asked=TOWERS, call="none")
    runs = evidence_of([failing, other_call, same_call])
    found = nearest_pass(runs[0], runs)
    assert found is not None and found.case == "SPLIT"


def test_drafts_link_each_other():
    one = the_draft(make(), "quant-state-meta-item")
    assert one.beside == ("peft-placement-planned-again.md",)
    assert "`huggingface/accelerate`, peft-placement-planned-again.md" in one.markdown()


def test_a_draft_has_every_section():
    text = the_draft(make(), "quant-state-meta-item").markdown()
    front = re.findall(r"^\| ([A-Z][a-z -]+) \|", text.partition("\n---\n")[0], re.M)
    assert front == ["Target repository", "Why there", "State", "Labels", "Cross-links", "Known threads", "Fixed in", "Workaround"]
    assert re.findall(r"^### (.*)", text, re.M) == [
        "System information", "Summary", "Exact configuration", "Reproducer: the case that works and the case that fails",
        "Observed results", "Trace", "Expected behaviour", "Actual behaviour", "Why it is specific",
        "Related observations", "Checks on another model", "Questions", "Links",
    ]  # fmt: skip


# Reproducers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer, reason", [
    (came("works: x\n", exit_code=0), "did not show the failure (exit code 0)"),
    (came(printed("KeyError", "22")), "ended in another failure (KeyError: 22)"),
    (came(printed("RuntimeError", "something else")), "ended in another failure"),
    (came(printed("RuntimeError", ITEM, "peft/x.py")), "failed in another place than the run"),
    (
        came(printed("RuntimeError", ITEM, "bitsandbytes/functional.py").replace("works", "no")),
        "failed in the case that should work",
    ),
    (came(printed("RuntimeError", ITEM, "bitsandbytes/functional.py"), versions=OLD), "with other versions than the run"),
    (came("", ended="timeout"), "ended as timeout"),
])  # fmt: skip
def test_a_reproducer_that_does_not_show_the_failure_makes_no_draft(answer, reason):
    made = make([r03(), record("R05")], run_script=lambda text: answer)
    assert made.drafts == ()
    (one,) = made.withheld
    assert reason in one.reason and one.name == "quant-state-meta-item"
    assert f"- `quant-state-meta-item`: {one.reason}. Cases: `R03_SPLIT_4BIT` [r1]" in made.not_to_file


def test_the_text_that_ran_is_the_text_that_is_quoted():
    ran = []
    made = make(run_script=lambda text: ran.append(text) or reproduce(text))
    for one in made.drafts:
        assert one.shown.text in ran and f"\n{one.shown.text.rstrip()}\n" in one.markdown()
        assert one.shown.output.rstrip() in one.markdown()


def test_a_known_bug_without_a_bucket_uses_the_run_s_own_script():
    exception = failure("IndexError", "index 7 is out of range", ("peft/x.py", 3, "f"))
    odd = record("CASE", "FAIL_NEW", exception=exception, catalogue="A1", script="raise SystemExit\n")
    message = "index 2 is out of range"
    (one,) = make([odd, record("OK")], run_script=lambda text: came(printed("IndexError", message, "peft/x.py"))).drafts
    assert (one.bucket.name, one.state, one.shown.text) == ("a-bug", "supporting", "raise SystemExit\n")
    made = make([odd], run_script=lambda text: came(printed("IndexError", "no such index", "peft/x.py")))
    assert made.drafts == () and "another failure" in made.withheld[0].reason
    assert make([{**odd, "script": ""}]).withheld[0].reason == "the runs hold no reproducer"


def test_the_last_traceback_counts():
    text = (printed("KeyError", "1", "a.py") + "\nDuring handling of the above exception\n\n" + printed(
        "x.y.TypeError", "no: way", "b.py",
    ))  # fmt: skip
    assert raised_in(text) == ("TypeError", "no: way", ("b.py",)) and raised_in("all well\n") == ("", "", ())


def test_a_script_runs_by_itself_and_leaves_nothing():
    text = (
        "import sys, tempfile, pathlib\nprint('works:', pathlib.Path.cwd() == pathlib.Path(tempfile.gettempdir()))\n"
        "print('50%|###', file=sys.stderr)\nraise KeyError('gone')\n"
    )
    found = draft_run.run_script(text, timeout_s=60)
    assert (found["ended"], found["exit_code"]) == ("done", 1)
    assert "works: True" in found["output"] and "50%" not in found["output"]
    assert raised_in(found["output"])[:2] == ("KeyError", "'gone'") and found["versions"]["torch"]


def shows_its_failure(name):
    """Run a reproducer; return whether it showed its failure. It must get through the case that works, and fail in no other way."""
    found = draft_run.run_script(script(name), timeout_s=240)
    assert found["ended"] == "done" and re.search(r"^works: ", found["output"], re.M), found["output"]
    kind, message, _ = raised_in(found["output"])
    if not kind:
        assert found["exit_code"] == 0, found["output"]
        return False
    shows = [bucket.shows for bucket in BUCKETS if bucket.script == name]
    # One script offloads a 4-bit layer: which of its failures comes first depends on the versions.
    shows += [bucket.shows for bucket in BUCKETS if name.startswith("layer-") and bucket.script.startswith("layer-")]
    assert any(re.fullmatch(one, kind) and re.search(other, message) for one, other in shows), (kind, message)
    return True


@pytest.mark.slow  # one of the scripts of cases in test_cases.py
def test_a_reproducer_shows_its_failure_on_this_stack():
    # PEFT plans the placement again in every release that is supported.
    assert shows_its_failure("re-plan")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SCRIPTS - {"re-plan"}))
def test_every_reproducer_shows_its_failure_or_runs_through(name):
    shows_its_failure(name)


def test_a_script_that_hangs_is_ended():
    assert draft_run.run_script("import threading\nthreading.Event().wait(60)\n", timeout_s=0.5)["ended"] == "timeout"


def test_reproducers_need_the_stock_stack_alone():
    for name in SCRIPTS:
        text = script(name)
        compile(text, name, "exec")
        lines = [line for line in text.splitlines() if line.startswith(("import ", "from "))]
        used = {line.split()[1].partition(".")[0] for line in lines}
        assert used - sys.stdlib_module_names <= {"torch", "accelerate", "peft", "transformers", "bitsandbytes"}
        assert "trimtab" not in text and clean(text) == text
        assert 'print("works: ' in text or 'print(f"works: ' in text


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_reproducers_hold_nothing_that_they_do_not_use(name):
    tree = ast.parse(script(name))
    made = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    made |= {
        alias.name.split(".")[0] for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names
    }
    made |= {
        target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets if isinstance(target, ast.Name)
    }
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    assert made - used == set()


# Not to file ----------------------------------------------------------------------------------------------------------


def test_claims_are_decided_on_the_runs():
    states = {decision.claim.text: decision for decision in decide_claims(evidence_of(the_runs()))}
    assert len(states) == len(CLAIMS)
    broken = states["CPU offload is broken."]
    assert broken.state == REFUTED and [run.mark for run in broken.refuted_by] == ["r3", "r5"]
    assert states["PEFT expects the towers on the GPU."].state == REFUTED and states["Merging is broken."].state == NOT_TESTED
    only_failures = decide_claims(evidence_of([r03()]))
    assert {one.claim.text: one.state for one in only_failures}["CPU offload is broken."] == WIDER


@pytest.mark.parametrize("claim, run", [
    ("Merging is broken.", record("M", "BF16_MERGED_MATCHES_BF16_ADAPTER", quant=None, merged=True)),
    ("8-bit layers cannot be offloaded either.", record("I", asked=TOWERS, quantized={"Linear8bitLt": 3})),
    (
        "Switching double quantization off is a fix.",
        record("S", "FAIL_QUANT_STATE_META_COPY", asked=TOWERS, exception=META_ITEM,
               quant={**NF4, "bnb_4bit_use_double_quant": False}),
    ),
    (
        "PEFT keeps the placement if it is given the base's own device_map.",
        record("P", "PASS_BUT_PLACEMENT_UNDONE", asked=TOWERS, adapter_map=TOWERS, placement_kept=False),
    ),
    (
        "offload_buffers=True and ephemeral_gpu_offload=True make PEFT keep the offload.",
        {**r03(), "configuration": {**r03()["configuration"], "adapter": {"offload_buffers": True}}},
    ),
    ("PEFT with bitsandbytes in 4 bits is broken.", record("G")),
    ("All Gemma 4 adapters fail.", record("G")), ("QLoRA adapters are broken.", record("G")),
])  # fmt: skip
def test_one_run_refutes_a_claim(claim, run):
    assert {one.claim.text: one.state for one in decide_claims(evidence_of([run]))}[claim] == REFUTED
    bridged = {**run, "engine": "trimtab"}
    assert {one.claim.text: one.state for one in decide_claims(evidence_of([bridged]))}[claim] == NOT_TESTED


def test_a_claim_s_row_says_what_decides_it():
    text = make().not_to_file
    assert "| CPU offload is broken. | refuted by [r3] [r5] | Say which modules, in which format, were off the GPU. |" in text
    assert "| Merging is broken. | not tested: no run says anything about it |" in text
    text = make([r03()]).not_to_file
    assert "| CPU offload is broken. | nothing refutes it, and it is wider than the 1 runs that were asked [r1] |" in text


def test_not_to_file_lists_what_has_no_trace_no_reproducer_or_no_module():
    text = make().not_to_file
    assert (
        "- `unknown`: no known signature matches this failure; read its trace and find its cause before filing. Cases: `ODD` [r6]"
        in text
    )
    assert "- `timeout`: ended as TIMEOUT without a separate trace. Cases: `SLOW` [r7]" in text
    assert "- `model.multi_modal_projector` [r8]" in text
    assert re.findall(r"^## (.*)", text, re.M) == [
        "Claims wider than the evidence", "Failures without a draft", "Threads that exist: add evidence there, no new issue",
        "Drafts that are not for filing now", "Module names that these models do not have", "The runs",
    ]  # fmt: skip
    versions = ", ".join(f"{name} {version}" for name, version in NEW.items())
    assert f"| r6 | `ODD` | stock | `UNKNOWN` | adapter | {versions} |" in text


def test_the_states_in_the_docs_are_the_states():
    text = (ROOT / "docs" / "whose-bug.md").read_text(encoding="utf-8")
    table = text.partition("**States** of a draft:")[2].partition("Where a thread")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == list(STATES)


# Text -----------------------------------------------------------------------------------------------------------------


def commonmark_fences(text):
    """Return (info, body) of the fenced blocks of a text, as CommonMark 0.31 section 4.5 reads them."""
    found, open_bar, body = [], "", []
    for line in text.split("\n"):
        opening = re.match(r"^ {0,3}(`{3,})([^`]*)$", line)
        if not open_bar and opening:
            open_bar, info, body = opening.group(1), opening.group(2), []
        elif open_bar and re.match(rf"^ {{0,3}}`{{{len(open_bar)},}}[ \t]*$", line):
            found.append((info, "\n".join(body)))
            open_bar = ""
        elif open_bar:
            body.append(line)
    assert not open_bar
    return found


markdown = st.text(alphabet=st.sampled_from("`~ab\n\r >-\t"), max_size=80)


@given(markdown, st.integers(0, 3))
def test_fences_nest(text, depth):
    wanted = "\n".join(re.split(r"\r\n|\r", text)).rstrip("\n")
    for _ in range(depth):
        text = fence(text, "markdown")
        wanted = text
    assert commonmark_fences(fence(text, "text")) == [("text", wanted)]


@given(st.text(max_size=60))
def test_code_spans_hold_any_text(text):
    shown = inline(text)
    flat = " ".join(text.split())
    assert "\n" not in shown
    if flat:
        bar = re.match(r"`+", shown).group()
        inner = shown[len(bar) : -len(bar)]
        assert shown.endswith(bar) and not re.search(rf"(?<!`){bar}(?!`)", inner) and inner.strip(" ") == flat.strip(" ")


def test_recorded_text_mentions_nobody_and_links_nothing():
    assert plain("@someone see #12 <b> [x](y) *z*") == ("@\u200bsomeone see #\u200b12 &lt;b\\> \\[x\\](y) \\*z\\*")
    assert cell("`a|b`") == r"`a\|b`" and cell("a|b\nc") == r"a\|b c"


def test_a_message_with_a_fence_stays_inside_its_own():
    hostile = failure("RuntimeError", ITEM + " ```\n# pwned", ("bitsandbytes/functional.py", 1, "f"))
    text = the_draft(make([{**r03(), "exception": hostile}, record("OK")]), "quant-state-meta-item").markdown()
    blocks = [body for _, body in commonmark_fences(text)]
    assert any("# pwned" in body for body in blocks)
    outside = text
    for body in blocks:
        outside = outside.replace(body, "")
    assert not re.search(r"^# pwned", outside, re.M)


# Personal data --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, wanted", [
    ('File "/home/jane/venv/lib/python3.11/site-packages/peft/x.py", line 3', 'File "peft/x.py", line 3'),
    (r'File "C:\Users\Jane Doe\site-packages\peft\tuners\x.py", line 3', 'File "peft/tuners/x.py", line 3'),
    ("in /home/jane/models/e4b.safetensors.", "in <path>/e4b.safetensors."),
    ("'/home/jane doe/x.bin'", "'<path>/x.bin'"),
    (r"E:\offload", "<path>"),
    ("~/models/x", "<path>"),
    ("jane@example.com hf_abcdefghijABCDEFGHIJ0123", "<address> <token>"),
    ("\\\\server\\share\\x.bin", "<path>/x.bin"),
])  # fmt: skip
def test_what_is_personal_is_taken_out(text, wanted):
    assert clean(text) == wanted
    check_clean(wanted, what="x")
    assert refused(check_clean, text, what="x").field == "x"


@pytest.mark.parametrize(
    "text", ["https://github.com/a/b/issues/1", "and/or 1/2 n/a", "</details><br/>", r".*\.(q|k)_proj\.\d+", 'folder + "/base"']
)
def test_what_only_looks_like_a_path_stays(text):
    assert clean(text) == text


def test_user_and_host_are_taken_out(monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "janedoe")
    monkeypatch.setattr("socket.gethostname", lambda: "janes-pc")
    monkeypatch.setattr(Path, "home", lambda: Path("/srv/janehome"))
    assert clean("janedoe on janes-pc, janehome, janedoes") == "<user> on <host>, <user>, janedoes"


def test_a_draft_holds_no_path_of_the_machine():
    dirty = r03(
        log_lines=["offloading to /home/jane/offload/x.dat for jane@example.com"],
        warnings={r"C:\Users\jane\x.py is old": 2}, title="in /home/jane/cases/case",
    )  # fmt: skip
    dirty["configuration"]["adapter"] = {"offload_dir": "/home/jane/off/load"}
    dirty["exception"] = {**META_ITEM, "message": ITEM + " in /home/jane/secret/run.py"}
    made = make([dirty, record("OK")])
    for text in (made.drafts[0].markdown(), made.not_to_file, json.dumps(made.to_json())):
        assert "jane" not in text and "/home" not in text


def test_a_draft_that_would_still_hold_one_is_refused(monkeypatch):
    monkeypatch.setattr(draft, "clean", lambda text: text)
    output = printed("RuntimeError", ITEM, "/home/jane/site-packages/bitsandbytes/functional.py")
    made = make([r03(), record("OK")], run_script=lambda text: came(output))
    assert refused(made.drafts[0].markdown).field == "bitsandbytes-quant-state-meta-item.md"


# Files ----------------------------------------------------------------------------------------------------------------


def test_a_folder_of_drafts(tmp_path):
    said = []
    made = make(say=said.append).written_to(tmp_path / "a" / "out")
    folder = tmp_path / "a" / "out"
    assert made.folder == folder
    assert sorted(file.name for file in folder.iterdir()) == [
        "NOT_TO_FILE.md", "bitsandbytes-quant-state-meta-item.md", "peft-placement-planned-again.md",
    ]  # fmt: skip
    for one in made.drafts:
        assert (folder / one.file_name).read_text(encoding="utf-8") == one.markdown()
    assert [file.name for file in folder.parent.iterdir()] == ["out"]
    assert said[:2] == ["quant-state-meta-item: running its reproducer", "placement-planned-again: running its reproducer"]
    assert said[-1] == f"unknown-map-key: no draft, the reproducer ended in another failure (RuntimeError: {ITEM})"
    assert "2 drafts in" in draft.drafts_document(made).title


def test_an_empty_folder_is_used_and_a_full_one_refused(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    made = make()
    made.written_to(folder)
    error = refused(made.written_to, folder)
    assert (error.field, error.value) == ("drafts", str(folder))
    (folder / "peft-old.md").write_text("an old one")
    made.written_to(folder, overwrite=True)
    assert not (folder / "peft-old.md").exists() and (folder / "NOT_TO_FILE.md").exists()
    (folder / "thesis.docx").write_text("dear")
    with pytest.raises(RequestError, match=r"thesis\.docx"):
        made.written_to(folder, overwrite=True)
    assert (folder / "thesis.docx").read_text() == "dear"


def test_a_folder_that_drafts_did_not_make_is_never_replaced(tmp_path):
    (tmp_path / "notes.md").write_text("mine")
    with pytest.raises(RequestError, match=r"notes\.md"):
        make().written_to(tmp_path, overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="is a file"):
        make().written_to(tmp_path / "file")


def test_nothing_is_left_behind_when_writing_fails(tmp_path, monkeypatch):
    folder = tmp_path / "out"
    made, write_text, done = make(), Path.write_text, []

    def full(self, *args, **options):
        done.append(self)
        if len(done) == 2:
            raise OSError(28, "No space left on device")
        return write_text(self, *args, **options)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(RequestError, match="cannot be written"):
        made.written_to(folder)
    assert list(tmp_path.iterdir()) == []


def test_no_runs_no_drafts():
    assert refused(draft.make_drafts, [], ENVIRONMENT, bugs=BUGS).field == "runs"
