"""The token that ends a turn in the chat template: found, said where the checkpoint's lists lack it, ends answers if asked."""

from __future__ import annotations

import json

import pytest

import trimtab
from tests import talking
from trimtab.cli import main
from trimtab.runtime import hf_generate
from trimtab.runtime.turn_end import missing_turn_end, turn_end

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn>{{ m.role }}\n\n{{ m.content }}<turn|>"
    "{% endfor %}{% if add_generation_prompt %}<|turn>assistant\n\n{% endif %}"
)


def build(folder, *, ends: bool):
    """Return a model whose template ends turns with <turn|>. ends: whether config and generation_config say so too."""
    made = talking.build_llama(folder, chat_template=TEMPLATE)
    with trimtab.load(made, device="cpu", context=64) as model:
        token = model.processor.convert_tokens_to_ids("<turn|>")
    for name in ("config.json", "generation_config.json"):
        file = made / name
        values = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps({**values, "eos_token_id": [0, token] if ends else 0}))
    return made, token


@pytest.mark.parametrize("ends", [False, True])
def test_the_token_is_found_and_known_to_be_missing(tmp_path, ends):
    folder, token = build(tmp_path / "llama", ends=ends)
    with trimtab.load(folder, device="cpu", context=64) as model:
        assert turn_end(model) == (token, "<turn|>")
        assert missing_turn_end(model) == (None if ends else (token, "<turn|>"))
        assert set(hf_generate.end_token_ids(model.hf_model)) == ({0, token} if ends else {0})  # as transformers


def test_answers_end_there_if_asked(tmp_path):
    folder, token = build(tmp_path / "llama", ends=False)
    bias = {token: 100.0}  # the model says it at once
    for asked, count in ((False, 6), (True, 1)):
        with trimtab.load(folder, device="cpu", context=64, stop_at_turn_end=asked) as model:
            answer = model.answer("hello", max_new_tokens=6, logit_bias=bias)
            assert (len(answer.token_ids), answer.finish_reason) == (count, "stop" if asked else "length")


@pytest.mark.parametrize(
    "ends, flags, is_told", [(False, [], True), (False, ["--stop-at-turn-end"], False), (True, [], False)]
)
def test_run_says_it(tmp_path, capsys, ends, flags, is_told):
    folder, _ = build(tmp_path / "llama", ends=ends)
    capsys.readouterr()
    assert (
        main(["run", str(folder), "hello", "--device", "cpu", "--context", "64", "--max-new-tokens", "2", *flags]) == 0
    )
    assert ("ends turns with <turn|>" in capsys.readouterr().err) is is_told
