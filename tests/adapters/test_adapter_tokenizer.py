"""An adapter's own copy of the tokenizer against the model's: extra and renamed tokens are no other tokenizer, another one is."""

import json
import shutil

import pytest

import trimtab
import trimtab.demo as demo
from trimtab.adapters.file import check_vocabulary
from trimtab.errors import AdapterError


def write(folder, vocabulary):
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}), encoding="utf-8")
    return folder


WORDS = {f"word{number}": number for number in range(100)}
SAME = {
    "equal": WORDS, "more tokens": WORDS | {"<new>": 100}, "fewer": {word: at for word, at in WORDS.items() if at < 50},
    "reserved ones renamed": {(f"<own{at}>" if at >= 92 else word): at for word, at in WORDS.items()},
    "another order": dict(reversed(WORDS.items())), "unigram": [[word, -1.0] for word in WORDS],
}  # fmt: skip


@pytest.mark.parametrize("theirs", SAME)
def test_a_trainers_copy_is_the_models_tokenizer(theirs, tmp_path):
    check_vocabulary(write(tmp_path / "adapter", SAME[theirs]), write(tmp_path / "model", WORDS))


def test_a_tokenizer_of_equal_size_and_other_texts_is_named(tmp_path):
    other = {word: (at + 1) % 100 for word, at in WORDS.items()}
    with pytest.raises(AdapterError) as caught:
        check_vocabulary(write(tmp_path / "adapter", other), write(tmp_path / "model", WORDS))
    assert caught.value.path == str(tmp_path / "adapter")
    assert caught.value.problems == (
        "tokenizer.json: 100 of 100 token ids have other texts than in the model's tokenizer (id 0: 'word99' here, 'word0' there)",
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": {"vocab": 3}}', '{"model": {"vocab": {"a": "b"}}}'])
def test_a_file_that_says_nothing_is_no_error(text, tmp_path):
    model, adapter = write(tmp_path / "model", WORDS), write(tmp_path / "adapter", WORDS)
    (adapter / "tokenizer.json").write_text(text)
    check_vocabulary(adapter, model)
    (adapter / "tokenizer.json").unlink()
    check_vocabulary(adapter, model)


def test_plan_merge_and_verify_refuse_it(tmp_path):
    adapter = shutil.copytree(demo.ADAPTERS["style"], tmp_path / "style")
    known = json.loads((demo.BASE / "tokenizer.json").read_text("utf-8"))
    size = len(known["model"]["vocab"])
    known["model"]["vocab"] = {text: (number + 7) % size for text, number in known["model"]["vocab"].items()}
    (adapter / "tokenizer.json").write_text(json.dumps(known), encoding="utf-8")
    for call in (
        lambda: trimtab.plan(demo.BASE, adapters={"a": adapter}, device="cpu"),
        lambda: trimtab.merge(demo.BASE, tmp_path / "out", adapters={"a": adapter}),
        lambda: trimtab.verify(demo.BASE, adapters={"a": adapter}, against="base", isolated=False),
        lambda: trimtab.inspect(adapter, model=demo.BASE),
    ):
        with pytest.raises(AdapterError, match="token ids have other texts"):
            call()
    shutil.copy(demo.BASE / "tokenizer.json", adapter / "tokenizer.json")
    trimtab.plan(demo.BASE, adapters={"a": adapter}, device="cpu")
