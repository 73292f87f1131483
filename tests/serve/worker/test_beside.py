"""Embeddings and tokens on the demo model: held against stock transformers and PEFT, beside rows that are being answered."""

import json

import pytest
import torch
from tokenizers import decoders

import trimtab
from tests import stock
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine.calls.embedding import PIECE_TOKENS, PromptScores
from trimtab.engine.prefill import stock_pass
from trimtab.engine.prefill.prefill import PrefillRunner
from trimtab.request import GenerateRequest
from trimtab.serve.contract.job import Job
from trimtab.serve.scheduling.scheduler import Scheduler
from trimtab.serve.worker.engine import LoadedEngine

TEXT = "Who rules Ivarra, and for how long?"


@pytest.fixture(scope="module")
def model():
    plan = trimtab.plan(
        DEMO / "base", quant="none", dtype="float32", context=256, device="cpu", adapters={"style": DEMO / "adapters" / "style"}
    )
    with trimtab.load(plan) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def engine(model):
    return LoadedEngine(model, rows=1)


def run(engine, *jobs):
    told = []
    scheduler = Scheduler(engine, told.append)
    for job in jobs:
        scheduler.submit(job)
    while scheduler.turn():
        pass
    assert scheduler.running == scheduler.waiting == 0
    return {job.id: [event for event in told if event.job_id == job.id] for job in jobs}


def job(name, prompt, **fields):
    return Job(name, prompt, GenerateRequest(max_new_tokens=fields.pop("tokens", 1)), **fields)


def result(events):
    assert events[-1].kind == "done", events[-1].error
    return events[-1].result


@pytest.mark.parametrize("adapter", [None, "style"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_an_embedding_is_stocks_last_hidden_state(model, engine, adapter, pooling, monkeypatch):
    monkeypatch.setattr(type(model), "prefill_tokens", property(lambda self: 5), raising=False)
    reference = stock.load_stock(DEMO / "base", dtype=torch.float32)
    if adapter is not None:
        reference = stock.with_adapter(reference, DEMO / "adapters" / adapter)
    ids = engine.inputs.tokenizer(TEXT)["input_ids"]
    with torch.no_grad():
        found = reference(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0].double()
    expected = torch.nn.functional.normalize(found[-1] if pooling == "last" else found.mean(0), dim=0)
    events = run(engine, job("a", {"text": TEXT}, kind="embedding", pooling=pooling, adapter=adapter))["a"]
    vector = torch.tensor(result(events)["embedding"], dtype=torch.float64)
    # float32 sums in another order, in pieces of five tokens; the vector has length 1.
    assert torch.allclose(vector, expected, atol=2e-5) and abs(float(vector.norm()) - 1) < 1e-5
    assert events[-1].usage["prompt_tokens"] == len(ids) and not any(event.kind == "text" for event in events)


def test_an_embedding_goes_through_in_chunks_that_running_answers_have_time_for(engine):
    whole = result(run(engine, job("a", {"text": TEXT}, kind="embedding"))["a"])["embedding"]
    embedding = job("b", {"text": TEXT}, kind="embedding")
    answer = engine.begin(embedding, engine.inputs.make(embedding))
    sizes, is_through = [], False
    while not is_through:
        size, is_through = engine.piece(answer, 7)
        sizes.append(size)
    events = list(engine.news(answer))
    assert set(sizes[:-1]) == {7} and sum(sizes) == events[-1].usage["prompt_tokens"] and len(sizes) == -(-sum(sizes) // 7) > 1
    assert result(events)["embedding"] == pytest.approx(whole, abs=2e-5)  # float32 sums in another order


def test_an_embedding_between_answers_changes_neither(engine):
    ask = [{"role": "user", "content": "Who rules Ivarra?"}]
    alone = run(engine, job("a", ask, tokens=12))["a"]
    found = run(
        engine, job("a", ask, tokens=12), job("b", {"text": TEXT}, kind="embedding"), job("c", ask, tokens=12, adapter="style"),
        job("d", {"text": TEXT}, kind="embedding"),
    )  # fmt: skip
    assert drawn(found["a"]) == drawn(alone) != ""
    assert result(found["b"]) == result(found["d"])


@pytest.mark.parametrize("kind", ["embedding", "answer"])
def test_a_chat_of_the_same_client_passes_between_the_pieces_of_a_long_prompt(engine, kind):
    """The engine has one row, and the prompt goes through in many turns."""
    told = []
    scheduler = Scheduler(engine, told.append)
    ids = [100 + number for number in range(250)]
    scheduler.submit(job("long", ids, kind=kind, prompt_logprobs=5 if kind == "answer" else None))
    scheduler.turn()
    scheduler.submit(job("chat", [5, 6, 7]))
    turns = 0
    while not any(event.job_id == "chat" and event.kind == "done" for event in told):
        scheduler.turn()
        turns += 1
    assert turns <= 4 and not any(event.job_id == "long" and event.kind == "done" for event in told)
    while scheduler.turn():
        pass
    assert told[-1].job_id == "long" and told[-1].kind == "done"


@pytest.mark.parametrize("rows_before", [0, 1])
def test_prompts_that_pass_each_other_between_chunks_change_no_answer(model, rows_before, monkeypatch):
    """The long one has an adapter, and those that pass it have none."""
    monkeypatch.setattr(type(model), "prefill_tokens", property(lambda self: 16), raising=False)
    engine = LoadedEngine(model, rows=4)
    texts = [job(f"short{number}", [20 + number, 5, 6, 7] * 6, tokens=6) for number in range(2)]
    long = job("long", [100 + number for number in range(200)], tokens=6, adapter="style")
    expected = {one.id: drawn(run(engine, one)[one.id]) for one in (long, *texts)}
    told = []
    scheduler = Scheduler(engine, told.append)
    for number in range(rows_before):
        scheduler.submit(job(f"row{number}", [9, 8, 7], tokens=40))
        scheduler.turn()
    scheduler.submit(long)
    for _ in range(3):
        scheduler.turn()
    for one in texts:
        scheduler.submit(one)
        scheduler.turn()
    assert engine._in_use().count("style") == 1  # it stays on the model while others pass
    while scheduler.turn():
        pass
    order = [event.job_id for event in told if event.kind == "done"]
    assert order.index("long") > max(order.index(one.id) for one in texts)
    assert {name: drawn([event for event in told if event.job_id == name]) for name in expected} == expected
    assert not engine._begun


def drawn(events):
    assert events[-1].kind == "done", events[-1].error
    return "".join(event.text for event in events)


def test_a_prompt_that_gave_its_keys_and_values_back_while_it_waited_for_a_row_goes_through_again(engine, monkeypatch):
    monkeypatch.setattr(engine.batch, "ends", frozenset())  # every answer has its most tokens
    ids = [100 + number for number in range(200)]
    alone = run(engine, job("scored", ids, prompt_logprobs=1, tokens=5))["scored"]
    told = []
    scheduler = Scheduler(engine, told.append)
    scheduler.submit(job("row", [5, 6, 7], tokens=200))
    scheduler.turn()
    scheduler.submit(job("scored", ids, prompt_logprobs=1, tokens=5))
    while not scheduler._rowless.complete:
        assert scheduler.turn() and len(scheduler._rows) == 1
    answer = scheduler._rowless.complete[0].answer
    assert engine.kept_tokens(answer) == 200
    for name, count in (("small", 9), ("large", 240)):
        scheduler.submit(job(name, ids[:count] + [7] * (count - 200), kind="embedding"))
        while not any(event.job_id == name and event.kind == "done" for event in told):
            assert scheduler.turn() and len(scheduler._rows) == 1
        assert engine.kept_tokens(answer) == (200 if name == "small" else 0)
    scheduler.cancel("row")
    while scheduler.turn():
        pass
    events = [event for event in told if event.job_id == "scored"]
    assert drawn(events) == drawn(alone) and "scored_tokens" not in alone[-1].usage
    assert events[-1].usage["scored_tokens"] == events[-1].usage["prompt_tokens"] == 200
    scores = [[event.data for event in one if event.kind == "scores"] for one in (events, alone)]
    assert scores[0] == scores[1]


def test_what_was_computed_for_one_that_left_is_told(engine):
    told = []
    scheduler = Scheduler(engine, told.append)
    scheduler.submit(job("long", [100] * 250, prompt_logprobs=1))
    for _ in range(3):
        scheduler.turn()
    scheduler.cancel("long")
    scheduler.submit(job("answer", [5, 6, 7], tokens=9))
    for _ in range(3):
        scheduler.turn()
    drawn = sum(event.kind == "text" for event in told)
    scheduler.cancel("answer")
    dropped = {event.job_id: dict(event.usage) for event in told if event.kind == "dropped"}
    assert dropped == {
        "long": {"prompt_tokens": 3 * PIECE_TOKENS, "completion_tokens": 0},
        "answer": {"prompt_tokens": 3, "completion_tokens": drawn},
    }
    assert drawn and scheduler.is_idle


def test_tokens_are_the_tokenizers_own_and_need_no_row(engine):
    tokenizer = engine.inputs.tokenizer
    ids = tokenizer(TEXT)["input_ids"]
    ask = [{"role": "user", "content": TEXT}]
    found = run(
        engine, job("row", ask, tokens=60), job("a", {"text": TEXT}, kind="tokens"),
        job("b", {"text": TEXT}, kind="tokens", adds_special=False), job("c", ask, kind="tokens"), job("d", ids, kind="text"),
    )  # fmt: skip
    assert result(found["a"]) == {"tokens": ids, "token_strs": tokenizer.convert_ids_to_tokens(ids)}
    assert result(found["b"])["tokens"] == tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    rendered = [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]
    stock_text = engine.model.processor.apply_chat_template(rendered, tokenize=False, add_generation_prompt=True)
    assert result(found["c"])["tokens"] == tokenizer(stock_text, add_special_tokens=False)["input_ids"]
    assert result(found["d"]) == {"prompt": tokenizer.decode(ids)}


def test_what_cannot_be_embedded_is_refused_by_name(engine):
    events = run(
        engine, job("a", {"text": "word " * 400}, kind="embedding"), job("b", {"text": "a"}, kind="embedding", adapter="no")
    )
    assert events["a"][-1].error["fields"]["field"] == "input" and "context of 256" in events["a"][-1].error["message"]
    assert events["b"][-1].error["fields"]["field"] == "model"


def test_the_stop_text_that_ended_an_answer_is_told(engine):
    whole = "".join(
        event.text for event in run(engine, job("a", [{"role": "user", "content": "Who rules Ivarra?"}], tokens=12))["a"]
    )
    stops = Job(
        "b", [{"role": "user", "content": "Who rules Ivarra?"}], GenerateRequest(max_new_tokens=12, stop=("zzz", whole[3:6]))
    )
    done = run(engine, stops)["b"][-1]
    assert done.usage["stop_text"] == whole[3:6] and done.finish == "stop"


def test_the_probabilities_of_a_piece_are_read_at_once(monkeypatch):
    """Each read waits for the device, and one of each number takes longer than a step."""
    scores = object.__new__(PromptScores)
    scores._top, scores.scores = 2, []
    logprobs = torch.tensor([[-1.0, -3.0, -2.0, -3.0], [-1.0, -1.5, -5.0, -0.5]])
    for name in ("__int__", "__float__", "item"):
        monkeypatch.setattr(torch.Tensor, name, lambda self: pytest.fail("a number was read by itself"))
    scores._add(logprobs, (3, 2))
    scores._add(logprobs[:0], ())
    assert scores.scores == [{3: (-3.0, 3), 0: (-1.0, 1), 2: (-2.0, 2)}, {2: (-5.0, 4), 3: (-0.5, 1), 0: (-1.0, 2)}]


@pytest.mark.parametrize("adapter", [None, "style"])
def test_the_probabilities_of_a_prompt_are_stocks(model, engine, adapter):
    reference = stock.load_stock(DEMO / "base", dtype=torch.float32)
    if adapter is not None:
        reference = stock.with_adapter(reference, DEMO / "adapters" / adapter)
    ids = engine.inputs.tokenizer(TEXT * 4)["input_ids"]
    assert len(ids) > 2 * PIECE_TOKENS
    with torch.no_grad():
        expected = torch.log_softmax(reference(input_ids=torch.tensor([ids])).logits[0].double(), dim=-1)
    plain = run(engine, job("a", ids, tokens=5, adapter=adapter))["a"]
    events = run(engine, job("a", ids, tokens=5, adapter=adapter, prompt_logprobs=2))["a"]
    assert [event.text for event in events if event.kind == "text"] == [event.text for event in plain if event.kind == "text"]
    pieces = [event for event in events if event.kind == "scores"]
    assert [piece.result["start"] for piece in pieces] == list(range(0, len(ids), PIECE_TOKENS))
    first, *scored = json.loads(b"[" + b",".join(piece.data for piece in pieces if piece.data) + b"]")
    assert first is None and len(scored) == len(ids) - 1 and "scores" not in {event.kind for event in plain}
    for place, (token, found) in enumerate(zip(ids[1:], scored, strict=True)):
        row = expected[place]
        own = found[str(token)]
        # float32 sums in another order and in pieces.
        assert own["logprob"] == pytest.approx(float(row[token]), abs=2e-4)
        assert own["decoded_token"] == engine.inputs.tokenizer.decode([token])
        best = sorted(found.items(), key=lambda item: item[1]["rank"])[0]
        assert best[1]["rank"] == 1 and float(row.max() - row[int(best[0])]) < 2e-4
        assert len(found) in (2, 3)


@pytest.mark.parametrize("as_ids", [False, True])
def test_words_keep_their_spaces_behind_a_prompt_and_as_single_tokens(engine, monkeypatch, as_ids):
    """With a decoder as Llama 2's, which drops the space of the first token that it is given."""
    tokenizer = engine.inputs.tokenizer
    decoder = tokenizer.backend_tokenizer.decoder
    strip = decoders.Sequence([decoder, decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    monkeypatch.setattr(tokenizer.backend_tokenizer, "decoder", strip)
    ids = tokenizer(TEXT)["input_ids"]
    words = [number for word, number in tokenizer.get_vocab().items() if word[:1] == "\u2581" and len(word) > 2]
    request = GenerateRequest(max_new_tokens=4, logit_bias=tuple((word, 100.0) for word in words))
    asked = Job("a", ids if as_ids else {"text": TEXT}, request, top_logprobs=2, prompt_logprobs=0)
    events = run(LoadedEngine(engine.model, rows=1), asked)["a"]
    text, tokens = "".join(event.text for event in events), [token for event in events for token in event.tokens]
    shown = [decoder.decode([tokenizer.convert_ids_to_tokens(token.token_id)]) for token in tokens]
    assert len(tokens) == 4 and "".join(shown) == text == "".join(token.text for token in tokens) and text[0] == " "
    assert all(text.startswith(token.text, token.offset) for token in tokens)
    scored = json.loads(b"[" + b",".join(event.data for event in events if event.data) + b"]")
    parts = [found[str(token)]["decoded_token"] for token, found in zip(ids[1:], scored[1:], strict=True)]
    assert "".join(parts) == decoder.decode(tokenizer.convert_ids_to_tokens(ids[1:]))


@pytest.fixture
def chunked(model):
    engine = LoadedEngine(model, rows=2)
    engine.batch.prompts = PrefillRunner(engine.batch, "static", (16, 64))
    return engine


def test_texts_in_chunks_wait_for_each_other_and_none_changes(chunked, monkeypatch):
    """Each is computed in the same chunks whatever else is there, none another way, and a scored one once."""
    monkeypatch.setattr("trimtab.engine.prefill.stock_pass._computed", lambda *args, **kwargs: pytest.fail("another way"))
    monkeypatch.setattr(chunked.batch, "ends", frozenset())
    ids = [100 + number for number in range(200)]
    asked = [
        job("chat", ids[::-1], tokens=9), job("text", ids, kind="embedding", pooling="mean", adapter="style"),
        job("long", ids[:150], tokens=9, adapter="style"), job("short", ids[:9], kind="embedding"),
        job("scored", ids[:100], tokens=9, adapter="style", prompt_logprobs=2),
    ]  # fmt: skip
    result_of = lambda events: (events[-1].result, drawn(events), [event.data for event in events])  # noqa: E731
    alone = {one.id: result_of(run(chunked, one)[one.id]) for one in asked}
    for turns in range(7):
        told = []
        scheduler = Scheduler(chunked, told.append)
        for one in (asked * 2)[turns % 5 :][:5]:
            scheduler.submit(one)
            for _ in range(turns):
                scheduler.turn()
        while scheduler.turn():
            pass
        found = {one.id: [event for event in told if event.job_id == one.id] for one in asked}
        assert {name: result_of(events) for name, events in found.items()} == alone and not chunked.batch.prompts.jobs
        assert [event.result["start"] for event in found["scored"] if event.kind == "scores"] == [0, 64]
        assert "scored_tokens" not in found["scored"][-1].usage


NUMBERS = [100 + number for number in range(256)]


def small_chunks(model, rows):
    engine = LoadedEngine(model, rows=rows)
    engine.batch.prompts = PrefillRunner(engine.batch, "static", (16,))
    return engine


def test_texts_and_prompts_have_the_row_in_turn_beside_a_text_that_fills_the_context(model):
    engine, told = small_chunks(model, 2), []
    texts = [job(f"text{n}", NUMBERS[n:][:40], kind="embedding", pooling="mean") for n in range(5)]
    scored = job("scored", NUMBERS[:50], tokens=3, prompt_logprobs=1)
    told_of = lambda events: [(event.kind, event.text, event.result, event.data) for event in events]  # noqa: E731
    alone = {one.id: told_of(run(engine, one)[one.id][1:]) for one in (*texts, scored)}
    scheduler = Scheduler(engine, told.append)
    for one in (job("full", NUMBERS, kind="embedding"), *texts):
        scheduler.submit(one)
    for _ in range(20):
        scheduler.turn()
    scheduler.submit(scored)
    scheduler.cancel("text3")
    assert not all(scheduler.turn() for _ in range(60)) and not engine.batch.prompts.jobs
    found = {name: told_of([one for one in told if one.job_id == name and one.kind != "started"]) for name in alone}
    assert found == alone | {"text3": found["text3"]} and found["text3"][-1][0] in ("dropped", "done")


def test_a_text_is_not_kept_waiting_by_chats_of_a_server_of_one_row(model, monkeypatch):
    engine, told = small_chunks(model, 1), []
    monkeypatch.setattr(engine.batch, "ends", frozenset())
    scheduler = Scheduler(engine, told.append)
    for number in range(20):
        scheduler.submit(job(f"chat{number}", NUMBERS[:80], tokens=2, sender="other"))
        scheduler.turn()
    scheduler.submit(job("text", NUMBERS[:10], kind="embedding"))
    assert any(scheduler.turn() and ("text", "done") in {(event.job_id, event.kind) for event in told} for _ in range(15))


def test_probabilities_are_told_behind_each_chunk_and_a_prompt_that_fails_leaves_the_row(model, monkeypatch):
    engine, told, held = small_chunks(model, 2), [], []
    scheduler = Scheduler(engine, told.append)
    scheduler.submit(job("a", NUMBERS[:50], prompt_logprobs=1))
    for _ in range(2):
        scheduler.turn()
    assert [event.result["start"] for event in told if event.kind == "scores"] == [0, 16]
    monkeypatch.setattr(engine.batch.prompts.chunk_forward(), "run", lambda form: 1 / 0)
    monkeypatch.setattr("trimtab.serve.worker.answer.write_traceback", lambda exc, *_: held.append(exc) or "id")
    assert not scheduler.turn() and told[-1].kind == "error" and held and not engine.batch.prompts.jobs


@pytest.mark.parametrize("fields", [{"kind": "embedding"}, {"prompt_logprobs": 0, "tokens": 4}])
def test_modules_compute_a_text_whose_states_are_not_to_be_had_when_its_turn_comes(chunked, monkeypatch, fields):
    """As those of recurrent layers, once an adapter that replaces norms has come on the model."""
    one = job("a", NUMBERS[:100], **fields)
    alone = run(chunked, one)["a"]
    answer = chunked.begin(one)
    for file in ("rows", "prefill"):
        monkeypatch.setattr(f"trimtab.engine.prefill.{file}.knows_padding", lambda prompts: False)
    monkeypatch.setattr(chunked, "begin", lambda *_: answer)
    passes, computed = [], stock_pass._computed
    monkeypatch.setattr(stock_pass, "_computed", lambda *args, **options: (passes.append(1), computed(*args, **options))[1])
    found = run(chunked, one)["a"]
    assert passes
    vectors, texts, scores = zip(
        *((numbers(events), drawn(events), probabilities(events)) for events in (alone, found)), strict=True
    )
    # float32 sums in another order
    assert (
        vectors[0] == pytest.approx(vectors[1], abs=2e-5)
        and texts[0] == texts[1]
        and scores[0] == pytest.approx(scores[1], abs=2e-4)
    )


def numbers(events):
    return (events[-1].result or {}).get("embedding")


def probabilities(events):
    entries = json.loads(b"[" + b",".join(event.data for event in events if event.data) + b"]")
    return [one["logprob"] for entry in entries[1:] for one in entry.values()]


def test_a_prompt_that_is_through_holds_no_keys_and_values_beside_its_row(engine):
    one = job("a", [5, 6, 7, 8], tokens=2)
    answer = engine.begin(one, engine.inputs.make(one))
    while not engine.prefill(answer, 512)[1]:
        pass
    assert answer.prompt.cache is None and engine.batch.placed == [answer.row]
    engine.arrive(answer)
    engine.step()
    assert len(answer.row.answer_ids) == 2
    engine.drop(answer)
