"""The second prompt with a system prompt resumes behind it, in families with sliding layers, and says what it says alone."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import trimtab
from tests.engine.prefill.test_prefill import differ, eager, ids, in_chunks, load
from tests.engine.prefill.test_prefix_cache import BATCHES, DEVICE, TOLERANCE, clone, keeping, scores
from tests.examples import examples
from tests.lent import lent
from tests.long_runs import crossed
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine.chat.marks import opening_of
from trimtab.engine.chat.prompt import prepare
from trimtab.engine.kv.prefix_layout import holds_window
from trimtab.engine.prefill.prefix_cache import PrefixCache
from trimtab.planning import Plan

FAMILIES = ("gemma3", "gemma3n", "gemma4")
WINDOW = 8  # of the families
# In 8 bits chunks of other sizes round some keys to the next value.
KV8_TOLERANCE = 2e-2


@pytest.fixture(autouse=True)
def short_openings(monkeypatch):
    monkeypatch.setattr("trimtab.engine.prefill.prefix_cache.LEAST_SAVED_TOKENS", 4)
    monkeypatch.setattr("trimtab.engine.prefill.prefix_cache.LEAST_CUT_TOKENS", 4)


def asked(model, opening, count, first):
    """Return a prompt of `count` tokens, of which all but the opening are its own."""
    tokens = [*ids(opening), *range(first, first + count - opening)]
    return replace(model.prepare(tokens), opening=opening)


# The rings hold everything, or have just begun to lose it, or have lost the opening's window once and several times.
SHAPES = ((5, 7), (4, 7), (5, 8), (6, 9), (8, 9), (9, 17), (21, 40), (24, 33))


@pytest.mark.parametrize(("family", "how"), crossed(FAMILIES, BATCHES, rest=1))
def test_the_second_prompt_resumes_behind_the_opening_and_says_what_it_says_alone(family, how):
    with lent(family) as model:
        for opening, count in SHAPES:
            cache = keeping(model, block_tokens=4)
            batch, plain = BATCHES[how](model), BATCHES[how](model)
            found = [scores(batch, asked(model, opening, count, 100))]
            added = cache.store.counts["added"]
            # A shorter and a longer question than the first one, whose later positions may still be in the rings.
            others = [asked(model, opening, opening + more, first) for more, first in ((1, 140), (count - opening, 170), (20, 200))]
            found += [scores(batch, other) for other in others]
            assert [reused for _, reused in found] == [0, *[opening] * 3], (opening, count)
            for one, (score, _) in zip(others, found[1:], strict=True):
                assert differ(score, clone(model, plain, one)) < TOLERANCE, (opening, count, one.prompt_tokens)
            # The opening's snapshot, the prompt's, its logits, and what of the answer's one token is a block or a snapshot.
            assert added - 3 - (count // 4) in (1, 2)
            assert scores(batch, others[1], client="another")[1] == 0


@pytest.mark.parametrize("how", BATCHES)
def test_a_prompt_is_cut_only_where_its_rings_lose_the_window(how, monkeypatch):
    with lent("gemma3") as model:
        keeping(model, block_tokens=4)
        for opening, count in SHAPES:
            batch = BATCHES[how](model)
            prompt = batch.begin(asked(model, opening, count, 100), trimtab.GenerateRequest(max_new_tokens=2))
            batch.prefixes.find(prompt)
            is_held = count < WINDOW
            assert prompt.row.reuse.places == ((opening,) if is_held else ())
            assert prompt.row.reuse.border == (None if is_held else opening)
            with monkeypatch.context() as patch:
                patch.setattr("trimtab.engine.prefill.prefix_cache.LEAST_CUT_TOKENS", opening + 1)
                batch.prefixes.find(prompt)
                assert prompt.row.reuse.border is None
            with monkeypatch.context() as patch:
                patch.setattr(Plan, "blocks_off_device", 1)  # each pass copies weights
                patch.setattr(batch, "prefixes", type(batch.prefixes)(batch))
                batch.prefixes.find(prompt)
                assert prompt.row.reuse.border is None and bool(prompt.row.reuse.places) == is_held


@pytest.mark.parametrize(("family", "how"), crossed(FAMILIES, BATCHES, rest=1))
def test_what_a_ring_holds_of_later_positions_is_masked(family, how, monkeypatch):
    """A snapshot from the end of a prompt has places that one taken by a cut leaves empty: whatever is there changes no bit."""
    load_states, spoilt = PrefixCache.load, []

    def load_and_spoil(cache, match, views):
        load_states(cache, match, views)
        for field, ring in zip(cache.layout.rings, views.rings, strict=True):
            ring.view(field.shape)[:, match.tokens :] = 1e4
            spoilt.append(ring)

    with lent(family) as model:
        keeping(model, block_tokens=4)
        batch = BATCHES[how](model)
        assert scores(batch, asked(model, 5, 7, 100))[1] == 0
        for more in (1, 2, 4, 20):
            other = asked(model, 5, 5 + more, 140 + more)
            fresh = keeping(model, block_tokens=4)
            scores(batch, asked(model, 5, 7, 100))
            expected, reused = scores(batch, other)
            assert reused == 5 and fresh is model.prefix_cache
            keeping(model, block_tokens=4)
            scores(batch, asked(model, 5, 7, 100))
            with monkeypatch.context() as patch:
                patch.setattr(PrefixCache, "load", load_and_spoil)
                found, reused = scores(batch, other)
            assert reused == 5 and spoilt and torch.equal(found, expected)


@settings(max_examples=examples(500), deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 12), st.booleans())
@example(8, 9, 8, False)
@example(8, 9, 8, True)
def test_a_ring_is_said_to_hold_a_window_exactly_if_it_does(place, more, window, is_short):
    """Against a ring that is written position by position. is_short: the oldest of its positions was not kept."""
    written, held = place + more, max(window - is_short, 0)
    ring = {}
    for position in range(written):
        ring[position % window] = position
    kept = set(sorted(ring.values())[len(ring) - min(held, len(ring)) :])
    needed = set(range(max(place - window + 1, 0), place))
    assert holds_window(place, written, window, held) == (needed <= kept)
    if holds_window(place, written, window, held):
        # What masks take a place for before the next token: another position is outside the window or none.
        for number, position in ring.items():
            taken_for = place - 1 - (place - 1 - number) % window
            assert taken_for == position or taken_for < 0 or taken_for <= place - window or position not in needed


# With a chat template ------------------------------------------------------------------------------------------------

SYSTEM = "You are a painter who loves red and blue and green and yellow things very much."
TOOL = {
    "type": "function",
    "function": {
        "name": "mix", "description": "Mix two colours.",
        "parameters": {"type": "object", "properties": {"first": {"type": "string"}, "second": {"type": "string"}}},
    },
}  # fmt: skip


def chat(question, system=SYSTEM):
    return [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": question}]


@pytest.fixture(scope="module", params=["rows", "pages", "8 bits"])
def demo(request):
    options = {"rows": {}, "pages": {"batch": 2, "kv_tokens": 640}, "8 bits": {"kv": "int8"}}[request.param]
    plan = trimtab.plan(
        DEMO / "base", adapters={"style": DEMO / "adapters" / "style"}, quant="none", dtype="float32", context=512,
        device=DEVICE, prefix_cache="16MiB", **options,
    )  # fmt: skip
    with trimtab.load(plan) as model:
        yield model, KV8_TOLERANCE if plan.request.kv == "int8" else TOLERANCE


@pytest.mark.parametrize(("adapter", "sizes"), crossed(["style", None], [(), (16, 64)], first=["style"], rest=1))
def test_chats_share_their_system_prompt_from_the_second_on(demo, sizes, adapter):
    model, tolerance = demo
    short, long = (("What is red?", "And what is green?"), ("Say all of it. " * 12, "And then say all of that again. " * 9))
    for questions in (short, long):
        keeping(model, block_tokens=16)
        batch, plain = (in_chunks(model, sizes) if sizes else eager(model) for _ in range(2))
        first, second = (model.prepare(chat(question)) for question in questions)
        assert (first.prompt_tokens < 64) == (questions is short)
        assert scores(batch, first, adapter=adapter)[1] == 0
        found, reused = scores(batch, second, adapter=adapter)
        assert reused == first.opening > 16
        assert differ(found, clone(model, plain, second, adapter=adapter)) < tolerance
        assert scores(batch, second, adapter=None if adapter else "style")[1] == 0
        assert scores(batch, second, adapter=adapter, client="another")[1] == 0


def common(*prompts):
    """Return how many tokens prompts begin with together."""
    return next(place for place, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1)


def test_an_opening_ends_where_chats_part(demo):
    model, _ = demo
    for options in ({}, {"tools": [TOOL]}):
        for system in (SYSTEM, "Write <turn|> and <|turn>model as text." + SYSTEM):
            one, other = (prepare(model, chat(text, system), **options) for text in ("What?", "Green and blue"))
            assert one.opening == other.opening == common(one.token_ids, other.token_ids) or "<" in system
            assert 0 < one.opening <= common(one.token_ids, other.token_ids)
    # Tools alone, parts, several messages of the system's, and an answer that is continued.
    one, other = (prepare(model, chat(text, ""), tools=[TOOL]) for text in ("What?", "Green and blue"))
    assert one.opening == common(one.token_ids, other.token_ids) > 20
    parts = [{"role": "user", "content": [{"type": "text", "text": "What?"}]}]
    assert model.prepare([chat("")[0], *parts]).opening == model.prepare(chat("What?")).opening
    answered = [*chat("What?"), {"role": "assistant", "content": "Red is"}]
    assert prepare(model, answered, continue_final_message=True).opening == model.prepare(answered).opening > 20
    assert model.prepare(chat("What?", "")).opening == 0 == model.prepare("What?").opening


# As Gemma 3's: no control token ends the system prompt.
IN_THE_FIRST_TURN = """{{ bos_token }}{% set first = '' %}{% for one in messages %}{% if one.role == 'system' %}
{%- set first = (one.content if one.content is string else one.content[0].text) + '\\n\\n' %}
{{- '<|turn>user\\n' + first }}{% else %}
{{- '' if loop.index == 2 else '<|turn>user\\n' }}{{ one.content if one.content is string else one.content[0].text }}<turn|>
{% endif %}{% endfor %}<|turn>model
"""


def test_an_opening_may_end_within_a_turn(demo, monkeypatch):
    model, _ = demo
    monkeypatch.setattr(model.processor, "chat_template", IN_THE_FIRST_TURN)
    one, other = (model.prepare(chat(text)) for text in ("What?", "Green and blue"))
    assert one.opening == other.opening == common(one.token_ids, other.token_ids) > 20
    assert not set(one.turns) & set(range(3, one.opening + 1))


def test_an_opening_that_cannot_be_told_is_none():
    def encode(text):
        return [ord(char) for char in text]

    assert opening_of("<ab", [(1, 60)], [60, 97, 98, 99, 60], (1, 5), encode) == 3
    assert opening_of("<ab", [(1, 60)], [1, 60, 97, 99, 60], (1, 2, 5), encode) == 3  # the tokenizer added a first token
    assert opening_of("<ab", [(1, 60)], [1, 97, 98], (1,), encode) == opening_of("", [], [1], (), encode) == 0
    assert opening_of("ab", [], [97, 98, 99], (), encode) == 2


def test_an_opening_is_looked_for_only_where_a_cache_needs_it(demo, monkeypatch, tmp_path):
    model, _ = demo
    monkeypatch.setattr(model, "prefix_cache", None)
    assert model.prepare(chat("What?")).opening == 0
    with load("llama", tmp_path) as plain:
        assert keeping(plain).windows == ()
    with load("gemma3", tmp_path / "sliding") as sliding:
        assert keeping(sliding).windows == (WINDOW,)
