"""A decode step knows buffers and the state of rows, neither the batch nor its requests."""

import ast
import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.decode.test_graphs import ASKED, joined, model  # noqa: F401 - a fixture
from trimtab.engine.decode import decode_step, step_capture, step_choice
from trimtab.engine.decode.decode_step import SMALLEST_PLACES, BatchState, DecodeStep, StepBuffers

ROWS = st.lists(st.tuples(st.one_of(st.none(), st.sampled_from("ab")), st.integers(0, 99)), min_size=1, max_size=9)


@given(ROWS, st.integers(1, 500), st.booleans())
def test_the_state_of_fewer_rows_is_of_the_first_ones(rows, longest, ahead):
    names, tokens = zip(*rows, strict=True)
    state = BatchState(names, tokens, longest, ahead)
    few = state.uniform("a", 1)
    assert few == BatchState(("a",), tokens[:1], longest, ahead) and state.count == len(rows)
    assert state.tokens_in_reach == longest + int(ahead)
    assert state.any_of({tokens[-1]}) and not state.any_of({100})


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
