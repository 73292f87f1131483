"""An answer does not depend on who else is being answered: mixed adapters, arrivals and departures, prompts cut anywhere, several
prompts in one pass, beginnings that are cached and that are not.

Three routes: rows of a batch whose prompts go through behind the steps of others, the same request alone, and stock transformers
with PEFT, teacher-forced on the same tokens. The model computes in float32, where another order of a sum moves a logarithm of a
probability by about 1e-5; a row, adapter or position that is another's moves it by 1e-1 and more.
"""

from __future__ import annotations

import random
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch

from tests import pico, stock
from tests.engine.batch.test_batch import DEVICE, model  # noqa: F401
from tests.engine.decode.test_graphs import replayed  # noqa: F401
from tests.long_runs import slow_on_cpu
from trimtab import load, plan
from trimtab.demo.demo import ADAPTERS
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine.batch.batch import Batch
from trimtab.engine.prefill import packing
from trimtab.engine.prefill.prefill import PrefillRunner
from trimtab.errors import RequestError
from trimtab.request import GenerateRequest

TOLERANCE = 2e-3
TEXTS = ("Hello", "What is red?", "Say something about the sea and the colour of it", "Who are you?", "Count to three")
TOKENS = 10
STOCK_ADAPTERS = ("style", "rslora-dora")  # PEFT refuses the third one's layers


def asks(count):
    names = [None, *ADAPTERS]
    return [(names[number % len(names)], TEXTS[number % len(TEXTS)]) for number in range(count)]


def batch_of(model, decode, sizes, rows):  # noqa: F811
    batch = Batch(model, rows=rows, decode=decode)
    if sizes:
        batch.prompts = PrefillRunner(batch, "static", sizes)
        assert batch.prompts.sizes == sizes
    return batch


def begun(batch, ask, tokens=TOKENS, **options):
    request = GenerateRequest(max_new_tokens=tokens)
    return batch.begin(batch.model.prepare(ask[1]), request, adapter=ask[0], top_logprobs=0, **options)


def forks(batch, ask, count):
    """Return rows of one prompt that joined the batch one after the other: all but the first share its keys and values."""
    rows = [batch.join(begun(batch, ask, group="one").compute()).row for _ in range(count)]
    assert [row.shared_tokens > 0 for row in rows] == [False, *[True] * (count - 1)]
    return rows


@contextmanager
def keeping_prefixes(model):  # noqa: F811
    """Give the model a prefix cache, and none afterwards."""
    model.keep_prefixes(2**26)
    try:
        yield
    finally:
        model.prefix_cache.close()
        model.prefix_cache = None


def check_beside_spoilt(model, spoil):  # noqa: F811
    """An answer is the one it is alone, after `spoil` has filled what another row wrote with values that are not numbers.

    spoil(layer, row number): for each layer of the cache.
    """
    ask = asks(2)[1]
    expected = alone(batch_of(model, "eager", (), 1), ask)
    batch = batch_of(model, "eager", (16, 64), 4)
    prompt = begun(batch, asks(1)[0]).compute()
    batch.place(prompt)
    for layer in batch.cache.layers:
        spoil(layer, prompt.row.number)
    batch.leave(prompt.row)
    assert [token for token, _ in alone(batch, ask)] == [token for token, _ in expected]


def alone(batch, ask, **options):
    """Return [(token, its logarithm of a probability)] of a request that nobody else is answered beside."""
    found = [batch.join(begun(batch, ask, **options).compute())]
    while found[-1].row.finish is None:
        found += batch.step()
    batch.leave(found[0].row)
    return [(one.token_id, one.logprob) for one in found]


_ALONE: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def each_alone(model, asked):  # noqa: F811
    """Return what modules answer to each request alone: computed once for a model."""
    known = _ALONE.setdefault(model, {})
    for ask in asked:
        if ask not in known:
            known[ask] = alone(batch_of(model, "eager", (), 1), ask)
    return [known[ask] for ask in asked]


class Company:
    """Requests that come, go through behind the steps of others in pieces of any size or several at once, and leave at any time."""

    def __init__(self, batch, waiting, seed, *, together=False):
        self.batch, self.waiting, self.chance = batch, list(enumerate(waiting)), random.Random(seed)
        self.prompt, self.through, self.said, self.left = None, [], {}, set()
        self.busiest, self.together, self.passes = 0, together, 0

    def at_once(self):
        """Put the next prompts through in one pass, where they go together; returns whether they did."""
        count = min(len(self.waiting), self.batch.free_rows, 4)
        chosen = [(number, begun(self.batch, ask)) for number, ask in self.waiting[:count]]
        placed, _ = self.batch.place_together([prompt for _, prompt in chosen], self.chance.choice((64, 128)))
        self.through += [pair for pair in chosen if pair[1] in placed]
        gone = [number for number, prompt in chosen if prompt in placed]
        self.waiting = [one for one in self.waiting if one[0] not in gone]
        self.passes += bool(placed)
        return bool(placed)

    def told(self, number, drawn):
        self.said.setdefault(number, []).append((drawn.token_id, drawn.logprob))

    def behind(self):
        """What a scheduler does behind a step: those that went through join, others go on."""
        worked = False
        for number, prompt in self.through:
            self.rows[prompt.row] = number
            self.told(number, self.batch.join(prompt))
        self.through = []
        if self.together and self.prompt is None and self.chance.random() < 0.7 and self.at_once():
            return True
        for _ in range(self.chance.choice((0, 1, 1, 3))):
            if self.prompt is None and self.waiting and self.batch.free_rows:
                number, ask = self.waiting.pop(0)
                self.prompt = number, begun(self.batch, ask)
            if self.prompt is None:
                break
            worked = True
            if self.prompt[1].step(self.chance.choice((16, 32, 64))):
                self.batch.place(self.prompt[1])
                self.through.append(self.prompt)
                self.prompt = None
        return worked

    def run(self):
        self.rows = {}
        while self.waiting or self.prompt or self.through or self.batch.active:
            if not self.batch.active:
                self.behind()
                continue
            self.busiest = max(self.busiest, len(self.batch.active))
            going = dict(self.rows)
            for drawn in self.batch.step(self.behind):
                self.told(going[drawn.row], drawn)
            for row in list(self.batch.active):
                assert row.error is None
                leaves = row in going and self.chance.random() < 0.02
                if row.finish is not None or leaves:
                    self.left |= {self.rows[row]} if row.finish is None else set()
                    self.batch.leave(row)
            if self.through and self.chance.random() < 0.1:  # a client that leaves before its row is there
                number, prompt = self.through.pop(self.chance.randrange(len(self.through)))
                self.left.add(number)
                self.batch.leave(prompt.row)
        assert not self.batch.placed and self.batch.free_rows == self.batch.rows
        return self.said


def check(found, expected, left, *, tolerance=TOLERANCE):
    for number, whole in enumerate(expected):
        said = found.get(number, [])
        assert len(said) == len(whole) or number in left
        assert [token for token, _ in said] == [token for token, _ in whole][: len(said)]
        for (_, made), (_, wanted) in zip(said, whole):
            assert abs(made - wanted) < tolerance


def with_pool(model, tokens):  # noqa: F811
    """Let batches of the model have a pool of so many tokens."""
    model.plan = replace(model.plan, request=replace(model.plan.request, kv_tokens=tokens))


def check_company(model, decode, sizes, *, tolerance=TOLERANCE):  # noqa: F811
    """Check that requests get in company what they get alone, and return the company."""
    asked = asks(10)
    expected = each_alone(model, asked)
    company = Company(batch_of(model, decode, sizes, 5), asked, 1)
    check(company.run(), expected, company.left, tolerance=tolerance)
    assert company.busiest >= 3 and len(company.left) < len(asked) / 2  # and most go on to their end
    return company


@contextmanager
def packed_with_cached_beginnings(model, monkeypatch, *, decode="eager", cached=True, tolerance=TOLERANCE):  # noqa: F811
    """Prompts go together, twice, and say what they say alone; the second time the prefix cache has their beginnings."""
    monkeypatch.setattr(packing, "LEAST_TOKENS", 32)
    monkeypatch.setattr(PrefillRunner, "most_packed", property(lambda self: 256))
    # What is shorter than a block of 32 tokens is not cached.
    asked = [(name, f"{text} {'again and ' * 18}again") for name, text in asks(8)]
    expected = each_alone(model, asked)
    with keeping_prefixes(model) if cached else nullcontext():
        passes = 0
        for seed in (1, 2):  # the second time all beginnings are there
            company = Company(batch_of(model, decode, (16, 64), 6), asked, seed, together=True)
            check(company.run(), expected, company.left, tolerance=tolerance)
            passes += company.passes
        assert passes and company.busiest >= 3 and (not cached or model.prefix_cache.numbers()["hits"])
        yield


@pytest.mark.parametrize(
    ("decode", "sizes"),
    [
        ("eager", ()), ("fused", (16, 64)), ("graph", (16, 64)),
        slow_on_cpu("eager", (16, 64)), slow_on_cpu("fused", ()), slow_on_cpu("graph", ()),
    ],
    ids=lambda value: value if isinstance(value, str) else "chunks" if value else "eager prompts",
)  # fmt: skip
def test_an_answer_is_the_same_alone_and_in_company(model, replayed, decode, sizes):  # noqa: F811
    check_company(model, decode, sizes)


@pytest.mark.parametrize(("decode", "cached"), [("eager", True), slow_on_cpu("graph", False)])
def test_an_answer_is_the_same_alone_and_in_a_pass_of_several_prompts(model, replayed, decode, cached, monkeypatch):  # noqa: F811
    with packed_with_cached_beginnings(model, monkeypatch, decode=decode, cached=cached):
        pass


def test_answers_in_company_are_those_of_stock_transformers_and_peft(model):  # noqa: F811
    asked = asks(8)
    company = Company(batch_of(model, "eager", (16, 64), 5), asked, 3)
    found = company.run()
    base = stock.load_stock(DEMO / "base", device=DEVICE, dtype=torch.float32)
    for name in (None, *STOCK_ADAPTERS):
        lone = base if name is None else stock.with_adapter(base, DEMO / "adapters" / name)
        for number, ask in enumerate(asked):
            if ask[0] != name or number not in found:
                continue
            prompt, answer = model.prepare(ask[1]).token_ids, [token for token, _ in found[number]]
            ids = torch.tensor([[*prompt, *answer[:-1]]], device=DEVICE)
            scores = stock.logits(lone, {"input_ids": ids})[0, len(prompt) - 1 :].float().log_softmax(-1).cpu()
            for place, (token, logprob) in enumerate(found[number]):
                assert abs(float(scores[place, token]) - logprob) < TOLERANCE
        if name is not None:
            base = lone.unload()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gemma4", "qwen3_vl", "gemma3n"])
def test_rows_of_every_kind_of_cache_are_the_same_in_company(family, tmp_path):
    made = plan(pico.build(family, tmp_path), quant="none", dtype="float32", context=96, device=DEVICE)
    prompts = [[100 + (number * 7 + 13 * who) % 190 for number in range(count)] for who, count in enumerate((3, 20, 41, 9, 33))]
    with load(made) as one:
        request = GenerateRequest(max_new_tokens=8)

        def begin(batch, ask, **options):
            return batch.begin(one.prepare(ask), request, top_logprobs=0)

        expected = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.engine.batch.test_company.begun", begin)
            for ask in prompts:
                expected.append(alone(batch_of(one, "eager", (), 1), ask))
            for sizes in ((), (16, 64)):
                company = Company(batch_of(one, "eager", sizes, 3), prompts, 5)
                check(company.run(), expected, company.left)


def test_prompts_join_in_the_order_in_which_they_went_through(model):  # noqa: F811
    batch = batch_of(model, "eager", (), 3)
    prompts = [begun(batch, ask) for ask in asks(3)]
    for prompt in prompts:
        prompt.compute()
        batch.place(prompt)
    assert batch.free_rows == 0 and [prompt.row.number for prompt in prompts] == [0, 1, 2]
    late = begun(batch, asks(1)[0]).compute()
    with pytest.raises(RequestError, match="every row"):
        batch.place(late)
    with pytest.raises(RequestError, match="in the order"):
        batch.join(prompts[1])
    batch.leave(prompts[0].row)  # before it has joined: its place is the next one's
    drawn = batch.join(prompts[1])
    assert (drawn.row.number, prompts[2].row.number) == (0, 2)
    batch.place(late)  # behind the last one there is no room: what is placed closes up
    assert (prompts[2].row.number, late.row.number) == (1, 2)
    expected = [alone(batch_of(model, "eager", (), 1), ask)[0][0] for ask in (asks(3)[1], asks(3)[2], asks(1)[0])]
    assert [drawn.token_id, batch.join(prompts[2]).token_id, batch.join(late).token_id] == expected
