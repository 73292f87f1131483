"""A long text that cannot fit is refused by its first part; others are not looked at, or tokenized whole."""

import pytest

import trimtab
from tests.raised import refused
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.errors import RequestError
from trimtab.request import GenerateRequest
from trimtab.serve.contract.job import Job
from trimtab.serve.worker.engine import LoadedEngine
from trimtab.serve.worker.prompt_inputs import FREE, MARGIN, PARTS, check_first_tokens

CONTEXT = 100


class Counting:
    """A tokenizer with a fixed number of characters per token. sizes: of the texts that it was given."""

    def __init__(self, characters):
        self.characters, self.sizes = characters, []

    def __call__(self, text, *, add_special_tokens):
        self.sizes.append(len(text))
        return {"input_ids": [0] * (len(text) // self.characters)}


def job(prompt, **fields):
    return Job("a", prompt, GenerateRequest(max_new_tokens=1), **fields)


def said(text):
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("asked", [
    job({"text": "x" * 100_000}), job(said("x" * 100_000)), job(said([{"type": "text", "text": "x"}] * 100_000)),
    job(said("x"), system="x" * 100_000), job(said("x"), tools=({"name": "x" * 100_000},)),
    job([{"role": "assistant", "content": None, "tool_calls": [{"arguments": "x" * 100_000}]}]),
])  # fmt: skip
def test_no_more_is_tokenized_than_shows_that_a_text_cannot_fit(asked):
    tokenizer = Counting(1)
    error = refused(check_first_tokens, asked, tokenizer, CONTEXT)
    assert error.field == "prompt" and f"more than {MARGIN * CONTEXT} tokens" in str(error)
    assert tokenizer.sizes == [PARTS[0] * CONTEXT]


def test_a_text_that_may_fit_is_tokenized_once_and_whole():
    tokenizer = Counting(1)
    check_first_tokens(job(said("x" * FREE * CONTEXT)), tokenizer, CONTEXT)
    assert not tokenizer.sizes
    # Of so many characters per token everything fits.
    rare = Counting(200)
    check_first_tokens(job(said("x" * 10_000)), rare, CONTEXT)
    assert rare.sizes == [size * CONTEXT for size in PARTS if size * CONTEXT < 10_000]


@pytest.mark.parametrize("prompt", [{"text": '"' * 900_000}, said('"' * 900_000)])
def test_a_server_refuses_a_long_text_without_tokenizing_all_of_it(prompt, monkeypatch):
    planned = trimtab.plan(DEMO / "base", quant="none", dtype="float32", context=64, device="cpu", batch=1)
    with trimtab.load(planned) as model:
        engine, sizes = LoadedEngine(model, rows=1), []
        kind = type(engine.inputs.tokenizer)
        called = kind.__call__

        def noted(self, text, *arguments, **options):
            sizes.append(len(text) if isinstance(text, str) else sum(map(len, text)))
            return called(self, text, *arguments, **options)

        monkeypatch.setattr(kind, "__call__", noted)
        with pytest.raises(RequestError) as caught:
            engine.prepare(job(prompt)).result(60)
    assert caught.value.field == ("prompt" if isinstance(prompt, dict) else "messages")
    assert "the context has 64" in str(caught.value) and "Shorten it" in caught.value.hint
    assert sum(sizes) <= PARTS[0] * 64
