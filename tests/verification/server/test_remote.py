"""Whether a server's adapter is alive, on the demo model: a server with planted faults answers in this process."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import trimtab
from bench.planted import Planted
from tests.adapter_files import rewritten
from tests.raised import raised
from trimtab.cli import main
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.doctor.servers.known import FAULTS
from trimtab.errors import RequestError
from trimtab.report.render import FORMS
from trimtab.verification.server import verify
from trimtab.verification.server.channels import Channel
from trimtab.verification.server.faults import other_values, write_adapter, write_faults
from trimtab.verification.server.local import Reference, Row
from trimtab.verification.server.report import EXIT_CANNOT_TELL, Answered
from trimtab.verification.server.verdict import nothing_to_tell

STYLE, OTHER, BASE = DEMO / "adapters" / "style", DEMO / "adapters" / "rslora-dora", DEMO / "base"


def served_scaled(folder):
    """Return the adapter style with another scale."""
    return rewritten(STYLE, folder / "scaled", use_rslora=True)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The demo model with the right adapter and with one whose scale is wrong."""
    scaled = served_scaled(tmp_path_factory.mktemp("remote"))
    plan = trimtab.plan(BASE, adapters={"style": STYLE, "scaled": scaled}, quant="none", context=256)
    with trimtab.load(plan, decode="eager") as model:
        yield model


def ask(planted, **options):
    given = {"adapters": {"style": STYLE}, "remote_model": "m", "quant": "none", "new_tokens": 4, **options}
    return verify.verify_remote(BASE, against="http://host:8000/v1", transport=planted.transport(), **given)


@pytest.mark.usefixtures("few_questions")
def test_the_right_adapter_is_alive_and_the_report_says_what_that_rests_on(served, tmp_path):
    planted = Planted(served, {"m": "style", "b": None}, jitter=0.02)
    report = ask(planted, remote_base="b")
    assert (report.verdict.word, report.exit_code, report.verdict.unseen) == ("alive", 0, ())
    assert set(report.verdict.excluded) == {
        "ignored", "scale", "A and B swapped", "merged twice", "one module dropped", "another version of the adapter",
    }  # fmt: skip
    assert report.channels["text"].name == "completions, token ids"
    assert set(report.channels) == {"text"}  # the adapter changes no tower: no picture need be sent
    assert 0 < report.residuals["none"] < 0.1 and report.requests == planted.requests <= 200
    report.save(tmp_path / "report.json")
    saved = json.loads((tmp_path / "report.json").read_text("utf-8"))
    assert (saved["verdict"], saved["exit_code"], saved["still_possible"]) == ("alive", 0, [])
    assert saved["smallest_fault_seen"]["name"] in ("one module dropped", "another version of the adapter")
    assert (saved["false_alarm_rate"], saved["false_alarms_measured"]["alarms"]) == (0.005, 0)
    assert {row["name"] for row in saved["faults"]} == set(saved["excluded"])
    assert saved["asked"]["text"] == {"how": "completions, token ids", "logprobs": 20, "refused": []}
    assert str(report).startswith("ALIVE: m answers with the adapter style")
    for words in [form.show(report.document()) for form in FORMS.values()]:
        assert "a right server is called wrong in at most 0.50% of runs" in words
        assert "is the smallest fault that would have been detected" in words


@pytest.mark.usefixtures("few_questions")
def test_an_adapter_in_noise_is_not_called_alive_and_what_noise_hides_is_named(served):
    report = ask(Planted(served, {"m": "style", "b": None}, jitter=0.4), remote_base="b")
    assert (report.verdict.word, report.exit_code) == ("cannot tell", 9) and report.verdict.is_as_a_whole
    assert "another version of the adapter" in report.verdict.unseen
    assert report.to_json()["still_possible"] == list(report.verdict.unseen)
    first, because = str(report).splitlines()[0], dict(report.document().blocks[0].rows)["because"]
    assert first == "CANNOT TELL whether m answers with the adapter style: as a whole it does, a small fault would not be detected"
    assert because.endswith("another version of the adapter")
    assert "is the smallest fault that would have been detected" in FORMS[".html"].show(report.document())


@pytest.mark.slow
@pytest.mark.usefixtures("few_questions")
def test_a_server_with_an_older_version_is_not_called_alive_and_named_where_the_version_is_given(served, tmp_path):
    tensors = load_file(str(STYLE / "adapter_model.safetensors"))
    names = [name for name in tensors if ".lora_B." in name]
    config = json.loads((STYLE / "adapter_config.json").read_text("utf-8"))
    older = write_adapter(tmp_path / "older", config, other_values(tensors, names, seed=7))
    served.unload_adapter("scaled")
    try:
        served.load_adapter("scaled", older)
        planted = Planted(served, {"m": "scaled", "b": None})
        unknown = ask(planted, remote_base="b")
        assert (unknown.verdict.word, unknown.exit_code) == ("cannot tell", 9)
        assert unknown.verdict.unseen == ("another version of the adapter",)
        known = ask(planted, remote_base="b", adapters={"style": STYLE, "older": older}, adapter="style")
        assert (known.verdict.word, known.verdict.fault) == ("wrong", "adapter older")
    finally:
        served.unload_adapter("scaled")
        served.load_adapter("scaled", served_scaled(tmp_path))


@pytest.mark.usefixtures("few_questions")
def test_a_wrong_scale_is_named_by_chat_alone_without_the_servers_base(served):
    planted = Planted(served, {"m": "scaled"}, kinds=("chat/completions",), top=5)
    # Generated texts have no chat form: the questions are those of the demo, and the user's own.
    own = [f"What is the {what} of {land}?" for what in ("capital", "river", "animal") for land in ("Oru", "Tavel", "Lume", "Zand")]
    report = ask(planted, prompts=own, send_prompts=True)
    assert (report.verdict.word, report.verdict.fault, report.exit_code) == ("wrong", "scale", 1)
    assert report.verdict.false_alarm_rate <= 0.005
    assert (report.channels["text"].name, report.channels["text"].top) == ("chat", 5)
    assert any("status 404" in words for words in report.refusals["text"])
    assert "the scale is alpha / sqrt(r) where alpha / r is right" in str(report)


@pytest.mark.usefixtures("few_questions")
def test_an_adapter_without_effect_is_seen_in_texts_alone(served):
    planted = Planted(served, {"m": None, "b": None}, top=0, takes_ids=False)
    report = ask(planted, remote_base="b")
    assert (report.verdict.word, report.exit_code) == ("ignored", 1)
    assert "exactly those of the server's own base" in report.verdict.reason and report.channels["text"].top == 0


def test_texts_of_one_length_go_through_the_model_together_and_change_no_number(served):
    reference = Reference(served, "style")
    asked = [reference.raw_question(f"q{place}", ids) for place, ids in enumerate(([2, 5, 6, 7], [2, 8, 9, 7], [2, 5]))]
    rows = [Row(question, (6, 7, 8), ()) for question in asked]
    assert reference._batches(rows) == [[0, 1], [2]]
    with torch.no_grad():
        for name in (None, "style"):
            for row, together in zip(rows, reference.rows(rows, name), strict=True):
                torch.testing.assert_close(together, reference.logprobs(row.question, row.tokens, name), rtol=0, atol=0)


def test_every_fault_of_an_adapter_is_an_adapter_that_loads_and_acts_otherwise(served, tmp_path):
    faults, not_tried = write_faults(served.adapter_spec("style"), tmp_path, {"other": OTHER})
    names = [fault.name for fault in faults]
    assert names == ["ignored", "scale", "A and B swapped", "merged twice", "one module dropped",
                     "another version of the adapter", "adapter other"]  # fmt: skip
    assert not_tried == []
    assert {float(scale) for scale in trimtab.inspect(faults[3].folder, model=BASE)["scales"]} == {4.0}
    dropped = trimtab.inspect(faults[4].folder, model=BASE)
    assert dropped["targets"]["total"] == trimtab.inspect(STYLE, model=BASE)["targets"]["total"] - 1


def test_patterns_that_are_ignored_give_the_scale_of_the_defaults(tmp_path):
    folder = rewritten(STYLE, tmp_path / "patterned", alpha_pattern={"q_proj": 64})
    plan = trimtab.plan(BASE, adapters={"p": folder}, quant="none", context=64)
    with trimtab.load(plan, decode="eager") as model:
        faults, _ = write_faults(model.adapter_spec("p"), tmp_path / "faults", {})
    without = next(fault for fault in faults if fault.name == "alpha_pattern ignored")
    assert {float(scale) for scale in trimtab.inspect(folder, model=BASE)["scales"]} == {2.0, 8.0}
    assert {float(scale) for scale in trimtab.inspect(without.folder, model=BASE)["scales"]} == {2.0}


def test_a_connectors_part_that_is_dropped_is_a_fault_of_its_own(tmp_path):
    folder = rewritten(STYLE, tmp_path / "joined")
    file = folder / "adapter_model.safetensors"
    tensors = load_file(str(file))
    weights = {}
    for shard in BASE.glob("*.safetensors"):
        weights |= load_file(str(shard))
    path, weight = next(
        (name.removesuffix(".weight"), weight) for name, weight in weights.items()
        if "embed_vision" in name and name.endswith(".weight") and weight.ndim == 2
    )  # fmt: skip
    config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    rank = config["r"]
    added = {"A": torch.ones(rank, weight.shape[1]), "B": torch.ones(weight.shape[0], rank)}
    tensors |= {f"base_model.model.{path}.lora_{role}.weight": tensor for role, tensor in added.items()}
    save_file(tensors, str(file), metadata={"format": "pt"})
    plan = trimtab.plan(BASE, adapters={"j": folder}, quant="none", context=64)
    with trimtab.load(plan, decode="eager") as model:
        spec = model.adapter_spec("j")
        assert {target.part for target in spec.targets} == {"language", "connector"}
        faults, _ = write_faults(spec, tmp_path / "faults", {})
    names = [fault.name for fault in faults]
    # One part is one fault: not that of all towers besides.
    assert "connector part dropped" in names and "tower parts dropped" not in names
    assert "connector part dropped" in FAULTS
    dropped = next(fault for fault in faults if fault.name == "connector part dropped")
    kept = load_file(str(dropped.folder / "adapter_model.safetensors"))
    assert set(tensors) - set(kept) == {name for name in tensors if path in name}
    assert not dropped.is_part


@pytest.mark.slow
def test_the_output_in_the_docs_is_what_the_command_prints(served):
    page = (DEMO.parent.parent / "docs" / "is-my-adapter-alive.md").read_text("utf-8")
    shown = page.partition("<!-- output:alive -->")[2].partition("<!-- /output -->")[0]
    report = ask(Planted(served, {"m": "scaled", "b": None}), remote_base="b", new_tokens=verify.NEW_TOKENS)
    printed = str(report).replace("WRONG: m ", "WRONG: medical ").replace("adapter style should", "adapter medical should")
    # Times and last digits are this machine's; words, faults and counts are not.
    told = [[word for word in line.split() if not any(map(str.isdigit, word))] for line in shown.splitlines() if line.strip()]
    here = [[word for word in line.split() if not any(map(str.isdigit, word))] for line in printed.splitlines() if line.strip()]
    assert told == here


def test_own_prompts_do_not_leave_the_machine_without_the_flag():
    def no_request(*_, **__):
        raise AssertionError("a request was sent")

    planted = Planted(None, {})
    planted._answer = no_request
    error = raised(RequestError, ask, planted, prompts=["my secret"])
    assert error.field == "prompts" and "send_prompts" in str(error)


def test_what_cannot_be_asked_is_refused_before_anything_is_sent(capsys):
    refused = {
        ("--against", "http://h/v1"): "remote_model", ("--against", "http://h/v1", "--remote-model", "m", "--lanes"): "--lanes",
        ("--remote-model", "m"): "--remote-model",
        ("--against", "http://h/v1", "--remote-model", "m", "--deadline", "0"): "--deadline",
        ("--against", "http://h/v1", "--remote-model", "m", "--max-new-tokens", "900"): "--max-new-tokens",
        ("--against", "http://h/v1", "--remote-model", "m", "--send-prompts"): "send_prompts",
        ("--against", "http://u:p@h/v1", "--remote-model", "m"): "against", ("--against", "ollama:"): "against",
    }  # fmt: skip
    for flags, field in refused.items():
        assert main.main(["verify", str(BASE), "--adapter", f"style={STYLE}", *flags, "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["error"]["fields"]["field"] == field


def test_a_servers_words_are_escaped_on_the_page():
    evil = "<script>alert(1)</script>|[x](http://evil)"
    channel = Channel("chat", "/chat/completions", 5, lambda question: None, lambda value: None)
    report = verify.RemoteReport(
        url="http://h/v1", remote_model=evil, remote_base=None, model="m", adapter=evil, adapter_path="p",
        verdict=nothing_to_tell(evil), precision="none", residuals={"none": 0.1}, channels={"text": channel},
        refusals={"text": (evil,)}, answered=(Answered("q", "text", 1.0, evil + "\x1b[31m"),), not_tried=(evil,),
        notes=(evil,), requests=1, server_s=0.1, seconds=0.2,
    )  # fmt: skip
    page, marked = (FORMS[ending].show(report.document()) for ending in (".html", ".md"))
    assert "<script" not in page
    assert "<script" not in marked
    assert "\x1b" not in page
    assert "[x](" not in marked
    assert report.exit_code == EXIT_CANNOT_TELL and dataclasses.asdict(report.verdict)["word"] == "cannot tell"
