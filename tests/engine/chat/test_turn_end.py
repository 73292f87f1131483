"""The token that ends a turn in the chat template: found, said where the checkpoint's lists lack it, ends answers if asked."""

from __future__ import annotations

import json

import pytest

import trimtab
from tests import talking
from tests.serve.worker.test_serve_worker import Running
from trimtab.checkpoint.end_tokens import unlisted_end
from trimtab.cli.main import main
from trimtab.engine.chat.control_tokens import end_token_ids, missing_turn_end, turn_end
from trimtab.request import GenerateRequest, LoadRequest
from trimtab.serve.contract.job import Job
from trimtab.serve.contract.settings import Limits
from trimtab.serve.worker.ipc import job_to_message
from trimtab.serve.worker.registry import ServedModel

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn>{{ m.role }}\n\n{{ m.content }}<turn|>"
    "{% endfor %}{% if add_generation_prompt %}<|turn>assistant\n\n{% endif %}"
)


def build(folder, *, ends: bool, names: bool = False):
    """Return a model whose template ends turns with <turn|>, and the token's id.

    ends: whether config and generation_config say so too. names: whether the tokenizer's end token is this one.
    """
    made = talking.build_llama(folder, chat_template=TEMPLATE)
    with trimtab.load(made, device="cpu", context=64) as model:
        token = model.processor.convert_tokens_to_ids("<turn|>")
    for name in ("config.json", "generation_config.json"):
        file = made / name
        values = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps({**values, "eos_token_id": [0, token] if ends else 0}))
    if names:
        file = made / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token": "<turn|>"}))
    return made, token


@pytest.mark.parametrize("ends", [False, True])
def test_the_token_is_found_and_known_to_be_missing(tmp_path, ends):
    folder, token = build(tmp_path / "llama", ends=ends)
    with trimtab.load(folder, device="cpu", context=64) as model:
        assert turn_end(model) == (token, "<turn|>")
        assert missing_turn_end(model) == (None if ends else (token, "<turn|>"))
        assert set(end_token_ids(model.hf_model)) == ({0, token} if ends else {0})  # as transformers


def test_answers_end_there_if_asked(tmp_path):
    folder, token = build(tmp_path / "llama", ends=False)
    bias = {token: 100.0}  # the model says it at once
    for asked, count in ((False, 6), (True, 1)):
        with trimtab.load(folder, device="cpu", context=64, stop_at_turn_end=asked) as model:
            answer = model.answer("hello", max_new_tokens=6, logit_bias=bias)
            assert (len(answer.token_ids), answer.finish_reason) == (count, "stop" if asked else "length")


# ends, names, flags -> whether it is said that answers go on, and whether they do. The truth of the second without flags: vLLM
# stops at the end token of the tokenizer, and at those of generation_config.json.
CASES = [
    (False, False, [], True, True),
    (False, False, ["--stop-at-turn-end"], False, False),
    (False, False, ["--no-stop-at-turn-end"], False, True),
    (False, True, [], False, False),
    (False, True, ["--no-stop-at-turn-end"], False, True),
    (True, False, [], False, False),
    (True, True, ["--no-stop-at-turn-end"], False, False),
]


@pytest.mark.parametrize("ends, names, flags, is_told, goes_on", CASES)
def test_run_says_it_or_stops_there(tmp_path, capsys, monkeypatch, ends, names, flags, is_told, goes_on):
    folder, token = build(tmp_path / "llama", ends=ends, names=names)
    found = []
    answer = trimtab.LoadedModel.answer

    def biased(model, *arguments, **options):
        found.append(answer(model, *arguments, **options, logit_bias={token: 100.0}))
        return found[-1]

    monkeypatch.setattr(trimtab.LoadedModel, "answer", biased)
    capsys.readouterr()
    line = ["run", str(folder), "hello", "--device", "cpu", "--context", "64", "--max-new-tokens", "3", *flags]
    assert main(line) == 0
    assert ("ends turns with <turn|>" in capsys.readouterr().err) is is_told
    assert main([*line, "--json"]) == 0
    assert len(found[0].token_ids) == (3 if goes_on else 1)


@pytest.mark.parametrize("names", [False, True])
def test_the_library_goes_on_as_transformers(tmp_path, names):
    folder, token = build(tmp_path / "llama", ends=False, names=names)
    with trimtab.load(folder, device="cpu", context=64) as model:
        assert len(model.answer("hello", max_new_tokens=6, logit_bias={token: 100.0}).token_ids) == 6


@pytest.mark.parametrize("ends, names, is_told", [(False, False, False), (False, True, True), (True, True, False)])
def test_plan_says_that_the_tokenizer_names_another_end(tmp_path, capsys, ends, names, is_told):
    folder, _ = build(tmp_path / "llama", ends=ends, names=names)
    assert unlisted_end(folder) == ("<turn|>" if is_told else None)
    capsys.readouterr()
    assert main(["plan", str(folder), "--device", "cpu", "--context", "64"]) == 0
    assert ("the tokenizer's end token <turn|> is not among" in capsys.readouterr().err) is is_told


@pytest.mark.parametrize(
    "name, text",
    [
        ("tokenizer.json", "{"), ("tokenizer.json", '{"added_tokens": ' + "[" * 10**5),
        ("tokenizer.json", '{"added_tokens": [5, {"content": "<turn|>", "id": "x"}]}'),
        ("tokenizer_config.json", '{"eos_token": 5}'),
        ("tokenizer_config.json", "[]"), ("config.json", '{"text_config": 5}'), ("generation_config.json", "\0"),
        ("chat_template.jinja", "{{ messages }}"),
    ],
)  # fmt: skip
def test_plan_says_nothing_of_files_that_it_cannot_read(tmp_path, name, text):
    folder, _ = build(tmp_path / "llama", ends=False, names=True)
    (folder / name).write_text(text)
    if name == "config.json":
        (folder / "generation_config.json").unlink()
    assert unlisted_end(folder) is None


@pytest.mark.parametrize("asked, names, goes_on", [(None, False, True), (None, True, False), (True, False, False)])
def test_a_worker_says_it_or_stops_there(tmp_path, caplog, asked, names, goes_on):
    folder, token = build(tmp_path / "llama", ends=False, names=names)
    request = LoadRequest(model=str(folder), device="cpu", context_tokens=64)
    made = ServedModel(name="m", request=request, rows=2, stop_at_turn_end=asked).settings(4, Limits())
    running = Running(made)
    try:
        assert running.ready["goes_on_behind"] == ("<turn|>" if goes_on else None)
        job = Job("a", {"text": "hello"}, GenerateRequest(max_new_tokens=5, logit_bias={token: 100.0}))
        running.channel.send({"do": "submit", "job": job_to_message(job)})
        assert running.end_of("a").finish == ("length" if goes_on else "stop")
    finally:
        running.close()
