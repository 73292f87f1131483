"""Which forms of a prompt's pass are captured where few graphs have room, and what a decode step knows."""

import ast
import inspect
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.decode.test_graphs import ASKED, joined, model  # noqa: F401 - a fixture
from trimtab.engine.decode import decode_step, step_capture, step_choice
from trimtab.engine.decode.decode_step import SMALLEST_PLACES, BatchState, DecodeStep, StepBuffers
from trimtab.engine.memory.graph_cache import PERIOD, FormUses, GraphCache
from trimtab.engine.prefill.prefill import PrefillRunner


@pytest.fixture
def prompts(monkeypatch):
    """Prompts with room for two graphs, both there: of the base, and of an adapter with the serial 7."""
    made = object.__new__(PrefillRunner)
    made.captures, made._uses, made._graphs, made.room = True, FormUses(), GraphCache(), None
    made._graphs[("first", None)] = SimpleNamespace(serial=None)
    made._graphs[("second", "a")] = SimpleNamespace(serial=7)
    plan = SimpleNamespace(request=SimpleNamespace(batch_invariant=False))
    store = SimpleNamespace(serials={"a": 7}, reads_on_host=lambda: False)
    made.model = SimpleNamespace(plan=plan, adapter_store=store)
    monkeypatch.setattr(PrefillRunner, "_most_graphs", 2)
    return made


def may_capture(prompts, key, times):
    for _ in range(times):
        prompts._uses.note(key)
    return prompts._may_capture(key)


def test_a_graph_goes_for_a_form_that_is_needed_more_often(prompts):
    for _ in range(3):
        prompts._uses.note(("first", None))
    assert not may_capture(prompts, ("new", None), 3) and may_capture(prompts, ("new", None), 1)


def test_the_graph_of_an_unloaded_adapter_keeps_no_other_out(prompts):
    for _ in range(9):
        prompts._uses.note(("first", None))
        prompts._uses.note(("second", "a"))
    prompts.model.adapter_store.serials = {}
    assert not may_capture(prompts, ("new", None), 1) and may_capture(prompts, ("new", None), 1)
    assert list(prompts._graphs) == [("first", None)]


def test_a_form_is_captured_when_it_is_needed_again():
    uses = FormUses()
    uses.note("a")
    assert not uses.pays("a", None)
    uses.note("a")
    assert uses.pays("a", None)


def test_forms_in_turn_do_not_push_each_other_out():
    """Three forms and room for two graphs: two of them stay."""
    uses, graphs, captures = FormUses(), [], 0
    for _ in range(100):
        for key in "abc":
            uses.note(key)
            if key in graphs:
                graphs.remove(key)
                graphs.append(key)
            elif uses.pays(key, graphs[0] if len(graphs) == 2 else None):
                graphs = [*graphs[-1:], key] if len(graphs) == 2 else [*graphs, key]
                captures += 1
    assert captures <= 20 and len(graphs) == 2


def test_a_form_that_is_needed_now_replaces_one_of_long_ago():
    uses = FormUses()
    for _ in range(5 * PERIOD):
        uses.note("old")
    for needed in range(5 * PERIOD):
        if uses.pays("new", "old"):
            assert needed > 2
            break
        uses.note("new")
    assert uses.pays("new", "old")


ROWS = st.lists(st.tuples(st.one_of(st.none(), st.sampled_from("ab")), st.integers(0, 99)), min_size=1, max_size=9)


@given(ROWS, st.integers(1, 500), st.booleans())
def test_the_state_of_fewer_rows_is_of_the_first_ones(rows, longest, ahead):
    names, tokens = zip(*rows, strict=True)
    state = BatchState(names, tokens, longest, ahead)
    few = state.uniform("a", 1)
    assert few == BatchState(("a",), tokens[:1], longest, ahead) and state.count == len(rows)
    assert state.tokens_in_reach == longest + int(ahead) and state.any_of({tokens[-1]}) and not state.any_of({100})


@pytest.mark.parametrize(("names", "tokens"), [((), ()), (("a",), ()), ((None, "a"), (1,))])
def test_rows_without_a_token_each_are_no_state(names, tokens):
    with pytest.raises(ValueError, match="adapters"):
        BatchState(names, tokens, 1)


@pytest.mark.parametrize("module", [decode_step, step_capture, step_choice])
def test_no_step_imports_the_batch(module):
    """Not for types either: what a step reads is in its buffers and its state."""
    names = {
        getattr(node, "module", None) or alias.name
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not names & {"trimtab.engine.batch.batch", "trimtab.engine.batch.request"}


def test_steps_of_buffers_alone_give_what_the_batch_gives(model):  # noqa: F811 - the fixture
    batch = joined(model, "eager", [ASKED[3], ASKED[0]])
    expected = batch.logits()
    again = joined(model, "eager", [ASKED[3], ASKED[0]])
    buffers = StepBuffers(again.tokens, again.cache, again.rows, again.context_tokens)
    state = again.state()
    assert state.adapters == ("style", "style") and state.longest == max(len(row.token_ids) for row in again.active)
    again.active.clear()  # nobody asks the batch any more
    logits, argmax_logits = DecodeStep(model, buffers, "eager").run(state)
    assert torch.equal(logits, expected) and torch.equal(argmax_logits, expected.argmax(-1))


def test_a_step_ahead_reads_one_place_more(model):  # noqa: F811 - the fixture
    batch = joined(model, "eager", [ASKED[3]])
    steps = DecodeStep(model, StepBuffers(batch.tokens, batch.cache, 1, 4 * SMALLEST_PLACES), "eager")
    full = BatchState((None,), (1,), SMALLEST_PLACES)
    assert steps._places(full) == SMALLEST_PLACES
    assert steps._places(BatchState((None,), (1,), SMALLEST_PLACES, ahead=True)) == 2 * SMALLEST_PLACES
    assert steps._places(full, sees_all=True) == 4 * SMALLEST_PLACES


def test_the_batch_says_what_its_rows_are(model):  # noqa: F811 - the fixture
    batch = joined(model, "eager", [ASKED[3], (None, "Hello", {})])
    state = batch.state(ahead=True)
    assert state.adapters == tuple(row.adapter for row in batch.active) and state.ahead
    assert state.last_tokens == tuple(row.token_ids[-1] for row in batch.active)
