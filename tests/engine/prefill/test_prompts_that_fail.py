"""Prompts that cannot be answered end by name and alone: longer than the context, with a picture that no chunk holds, with an
adapter that goes while they wait, with a prefix cache that runs out of memory. The others' answers are what they are without
them."""

import pytest

from tests.raised import raising
from tests.serve.worker.test_serve_engine import LOOK, PATHS, ask, engine, model, run  # noqa: F401 - fixtures
from trimtab.engine.prefill.prefill import PrefillRunner
from trimtab.engine.prefill.prefix_cache import PrefixCache
from trimtab.errors import RequestError

TEXT = [{"role": "user", "content": [{"type": "text", "text": "What is red? " * 12}]}]
TOKENS = 8


@pytest.fixture
def chunked(engine):  # noqa: F811
    """An engine whose prompts go through in chunks of at most 64 tokens, as on a GPU."""
    engine.batch.prompts = PrefillRunner(engine.batch, "static", (16, 64))
    return engine


@pytest.fixture
def expected(model):  # noqa: F811
    return model.answer(TEXT, max_new_tokens=TOKENS).text


def test_a_prompt_longer_than_the_context_ends_alone(chunked, expected):
    long = [{"role": "user", "content": [{"type": "text", "text": "red " * 500}]}]
    found = run(chunked, ask("a", TEXT, tokens=TOKENS), ask("long", long), ask("b", TEXT, tokens=TOKENS))
    assert found["long"][1].error["class"] == "RequestError" and found["long"][1].error["fields"]["field"] == "messages"
    assert [found[name][0] for name in "ab"] == [expected] * 2


def test_a_picture_that_no_chunk_holds_goes_through_as_transformers_runs_it(chunked, model, expected, monkeypatch):  # noqa: F811
    # Tokens of a picture that see each other have to be in one chunk: here they are more than the largest one has.
    monkeypatch.setattr("trimtab.engine.passes.chunk_forward.chunks_of", lambda *args, **kwargs: None)
    wanted = model.answer(LOOK, max_new_tokens=TOKENS).text
    found = run(chunked, ask("a", TEXT, tokens=TOKENS), ask("look", tokens=TOKENS), ask("b", TEXT, tokens=TOKENS))
    assert found["look"][0] == wanted and [found[name][0] for name in "ab"] == [expected] * 2


def test_an_adapter_that_goes_while_its_prompt_waits_is_named(chunked, expected, monkeypatch):
    begun = chunked.prefill

    def prefill(answer, most_tokens):
        if answer.job.id == "gone" and answer.prompt.done_tokens:
            chunked.shelf._take_off(answer.row.adapter)
        return begun(answer, 16)

    monkeypatch.setattr(chunked, "prefill", prefill)
    found = run(chunked, ask("a", TEXT, tokens=TOKENS), ask("gone", TEXT, adapter="style"), ask("b", TEXT, tokens=TOKENS))
    assert found["gone"][1].kind == "error" and "adapter was unloaded" in found["gone"][1].error["message"]
    assert [found[name][0] for name in "ab"] == [expected] * 2


def test_an_adapter_in_use_is_not_unloaded_by_the_server(engine):  # noqa: F811
    with pytest.raises(RequestError, match="style"):
        engine.shelf.remove("style", ["style"])
    assert "style" in PATHS and "style" in engine.shelf.names


def test_a_cache_that_runs_out_of_memory_is_named_and_everyone_goes_on(chunked, model, expected, monkeypatch):  # noqa: F811
    model.keep_prefixes(2**22)
    try:
        monkeypatch.setattr(PrefixCache, "_to_pages", raising(MemoryError("no room")))
        found = run(chunked, ask("a", TEXT, tokens=TOKENS), ask("b", TEXT, tokens=TOKENS))
        assert [found[name][0] for name in "ab"] == [expected] * 2
        assert "switched off: MemoryError: no room" in [one.why for one in model.fallbacks]
    finally:
        model.prefix_cache.close()
        model.prefix_cache = None
