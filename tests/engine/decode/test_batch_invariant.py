"""Batch-invariant answers have the same bits alone and beside others: mixed adapters, arrivals and departures, prompts of any
length, cached prefixes and none. Bits are compared, and the same tests show that without the flag they differ.

On a CPU every row is computed by itself; tests/gpu runs the same tests with one graph of all rows.
"""

import random
from functools import partial

import pytest
import torch

from tests import pico
from tests.engine.batch.test_company import alone as alone_in
from tests.engine.batch.test_company import begun
from tests.engine.decode.test_graphs import DEVICE, replayed  # noqa: F401
from tests.long_runs import SLOW_ON_CPU, slow_on_cpu
from trimtab import load, plan
from trimtab.demo.demo import ADAPTERS
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine.batch.batch import Batch
from trimtab.engine.decode import batch_invariant
from trimtab.engine.kv import sequence
from trimtab.engine.prefill.prefill import PrefillRunner
from trimtab.errors import RequestError
from trimtab.planning.values import execution
from trimtab.request import GenerateRequest, LoadRequest
from trimtab.serve.contract.job import Job
from trimtab.serve.scheduling.scheduler import Scheduler
from trimtab.serve.worker.engine import LoadedEngine

TOKENS = 6
ROWS = 4
PIECE = 64
STYLES = {name: DEMO / "adapters" / name for name in ADAPTERS}


def made(folder=DEMO / "base", *, adapters=STYLES, context=512, rows=ROWS, invariant=True, **options):
    options = {"quant": "none", "dtype": "float32", "images": 0, "audio_s": 0.0, "device": DEVICE} | options
    return plan(folder, adapters=adapters, context=context, batch=rows, batch_invariant=invariant, **options)


@pytest.fixture(scope="module")
def model():
    with load(made()) as found:
        yield found


def questions(count, *, names=(None, *ADAPTERS), seed=0, shared=0, low=8, high=200, most=150):
    """Return (adapter, token ids): prompts of many lengths, each beginning with `shared` tokens that all have."""
    chance = random.Random(seed)
    first = [low + (7 * number) % (high - low) for number in range(shared)]
    return [
        (names[number % len(names)], [*first, *(chance.randrange(low, high) for _ in range(chance.randrange(3, most)))])
        for number in range(count)
    ]


began, alone = (partial(call, tokens=TOKENS, client=None) for call in (begun, alone_in))


def batch_of(model, *, static=False):
    batch = Batch(model, rows=model.plan.request.batch)
    batch.ends = frozenset()
    if static:  # chunks of still shapes, run as they are on a CPU
        batch.prompts = PrefillRunner(batch, "static", (16, PIECE))
    return batch


def beside(batch, asked, seed, client=None, leaves=0.1):
    """Return what each request gets that comes and goes among the others; some leave before their end."""
    chance, waiting, said, rows, prompt = random.Random(seed), list(enumerate(asked)), {}, {}, None
    busiest = 0
    while waiting or prompt or batch.active:
        if prompt is None and waiting and batch.free_rows:
            number, ask = waiting.pop(0)
            prompt = number, began(batch, ask, client=client)
        if prompt is not None and prompt[1].step(chance.choice((16, 64, 256))):
            drawn = batch.join(prompt[1])
            rows[drawn.row] = prompt[0]
            said[prompt[0]] = [(drawn.token_id, drawn.logprob)]
            prompt = None
        if chance.random() < 0.3 and batch.free_rows and waiting:
            continue
        busiest = max(busiest, len(batch.active))
        for one in batch.step():
            said[rows[one.row]].append((one.token_id, one.logprob))
        for row in list(batch.active):
            if row.finish is not None or chance.random() < leaves:
                batch.leave(row)
    assert busiest >= min(3, batch.rows)
    return said


def is_beginning(part, whole):
    """Whether all tokens and the bits of their log-probabilities are the first ones of the whole answer."""
    return part == whole[: len(part)]


@pytest.mark.parametrize("static", [False, True], ids=["own prompts", "chunks"])
def test_an_answer_has_the_same_bits_alone_and_beside_others(model, replayed, static):  # noqa: F811
    asked = questions(9)
    batch = batch_of(model, static=static)
    expected = [alone(batch, ask) for ask in asked]
    for seed in (1, 2):
        said = beside(batch, asked, seed)
        assert len(said) == len(asked)
        assert all(is_beginning(said[number], whole) for number, whole in enumerate(expected))


def test_without_the_flag_bits_differ_between_numbers_of_rows():
    asked = questions(9)
    with load(made(invariant=False, quant="none")) as one:
        expected = [alone(Batch(one, rows=1), ask) for ask in asked]
        batch = Batch(one, rows=ROWS)
        batch.ends = frozenset()
        assert any(  # else the tests here could not fail
            not is_beginning(part, expected[number])
            for seed in range(4)
            for number, part in beside(batch, asked, seed, leaves=0.0).items()
        )


@pytest.mark.parametrize("static", [pytest.param(True, id="chunks"), pytest.param(False, marks=SLOW_ON_CPU, id="own prompts")])
def test_cached_prefixes_change_no_bits(static, monkeypatch):
    monkeypatch.setattr(batch_invariant, "INVARIANT_CHUNK", PIECE)
    # A prompt of a GPU's own goes through in the plan's chunks, the largest of 512 tokens: what two of them hold needs more room.
    has_own_sizes = DEVICE != "cpu" and not static
    context, cache = (1280, "64MiB") if has_own_sizes else (320, "8MiB")
    with load(made(prefix_cache=cache, context=context)) as one:
        batch = batch_of(one, static=static)
        piece = batch_invariant.piece_tokens(batch.prompts.sizes, batch.model.prefill_tokens)
        assert piece == (512 if has_own_sizes else PIECE)
        asked = questions(6, shared=piece * 2 + 5, most=90)
        expected = [alone(batch, ask) for ask in asked]
        for seed in (1, 2):
            said = beside(batch, asked, seed, client="a")
            assert all(is_beginning(said[number], whole) for number, whole in enumerate(expected))
        assert one.prefix_cache.numbers()["hits"] >= len(asked)
        again = began(batch, asked[0], client="a").compute()
        assert again.row.cached_tokens and not again.row.cached_tokens % piece  # no answer, no part of a piece


@pytest.mark.parametrize("family", ["llama", "gemma4", "qwen3_vl", *map(slow_on_cpu, ("qwen3", "gemma3", "gemma3n"))])
def test_every_family(family, tmp_path):
    folder = pico.build(family, tmp_path)
    asked = questions(6, names=(None,), low=100, high=290, most=60)
    with load(made(folder, adapters=None, context=96, rows=3)) as one:
        for static in (False, True):
            batch = batch_of(one, static=static)
            expected = [alone(batch, ask) for ask in asked]
            said = beside(batch, asked, 3)
            assert all(is_beginning(said[number], whole) for number, whole in enumerate(expected))


def test_a_row_alone_in_the_batch_is_that_of_answer_and_generate(model):
    asked = questions(3, names=("style",))
    answers = [model.answer(ids, adapter=name, max_new_tokens=TOKENS) for name, ids in asked]
    requests = [{"prompt": ids, "adapter": name} for name, ids in [*asked, *questions(4, seed=9)]]
    together = list(model.batch(requests, max_new_tokens=TOKENS))
    assert [one.token_ids for one in together[:3]] == [one.token_ids for one in answers]
    with pytest.raises(RequestError, match="as many rows as it was planned for"):
        list(model.batch(requests, rows=ROWS - 1))


def test_a_placeholder_that_was_drawn_changes_nobody_elses_bits(model):
    asked = questions(3, names=(None,))
    batch = batch_of(model)
    expected = [alone(batch, ask) for ask in asked[:2]]
    rows = []
    for ask in asked:
        rows.append(batch.join(began(batch, ask).compute()))
    said = {one.row: [(one.token_id, one.logprob)] for one in rows}
    third = rows[2].row
    third.token_ids[-1] = min(sequence.placeholder_ids(model.hf_model))
    batch.write_last_tokens()
    while any(row.finish is None for row in batch.active):
        for one in batch.step():
            said[one.row].append((one.token_id, one.logprob))
    for row in list(batch.active):
        batch.leave(row)
    assert [said[one.row] for one in rows[:2]] == expected


def test_pieces_of_a_prompt_do_not_follow_the_time_that_others_leave(model):
    batch = batch_of(model, static=True)
    prompt = began(batch, (None, list(range(8, 158))))
    sizes = []
    while not prompt.step(16):
        sizes.append(prompt.chunk_tokens)
    assert sizes == [PIECE, PIECE] and batch_invariant.piece_tokens(batch.prompts.sizes, batch.model.prefill_tokens) == PIECE
    batch.leave(batch.join(prompt).row)
    first, second = (began(batch, (None, list(range(8, 158)))) for _ in range(2))
    first.step()
    with pytest.raises(RequestError, match="another prompt is on its way"):
        second.step()
    first.compute()
    batch.leave(batch.join(first).row)
    assert batch.prompts.packs.why_not() == "answers are batch-invariant" or not batch.prompts.captures


def test_the_plan_says_it_and_keeps_it(tmp_path):
    found = made(invariant=True)
    found.save(tmp_path / "plan.json")
    assert type(found).load(tmp_path / "plan.json").request.batch_invariant
    assert not made(invariant=False).request.batch_invariant
    assert "batch-invariant" in str(found) and "batch-invariant" not in str(made(invariant=False))
    with pytest.raises(RequestError, match="batch_invariant"):
        LoadRequest(model="m", batch_invariant="yes")
    assert max(execution.CHUNKS) > execution.INVARIANT_CHUNK in execution.CHUNKS


def test_rows_one_by_one_leave_the_cache_as_it_was(model):
    batch = batch_of(model)
    rows = []
    for ask in questions(3):
        rows.append(batch.join(began(batch, ask).compute()).row)
    logits, tokens = batch.steps._one_by_one({number: row.adapter for number, row in enumerate(rows)})
    assert logits.shape[0] == 3 and torch.equal(logits.argmax(-1), tokens) and batch.cache.first_row == 0
    for row in rows:
        batch.leave(row)


def test_a_server_s_answers_have_the_same_bits_whoever_else_asks(model):
    engine = LoadedEngine(model, rows=ROWS, resident_limit=2)
    jobs = [
        Job(str(number), ids, GenerateRequest(max_new_tokens=TOKENS), adapter=name, top_logprobs=0)
        for number, (name, ids) in enumerate(questions(7, seed=4))
    ]

    def said(*asked):
        """Return job id -> [(token, its log-probability)]."""
        told = []
        scheduler = Scheduler(engine, told.append)
        for job in asked:
            scheduler.submit(job)
        for _ in range(2000):
            if not scheduler.turn():
                break
        assert all(event.kind != "error" for event in told)
        return {job.id: [t for event in told if event.job_id == job.id for t in event.tokens] for job in asked}

    together = said(*jobs)
    assert sum(len(one) > 1 for one in together.values()) >= 3  # a random prompt may be answered with an end at once
    for job in jobs:
        assert said(job)[job.id] == together[job.id]
