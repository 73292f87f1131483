"""Which forms of a prompt's pass are captured where few graphs have room."""

from types import SimpleNamespace

import pytest

from trimtab.engine.decode.graph_uses import PERIOD, FormUses
from trimtab.engine.memory.graph_cache import GraphCache
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
    monkeypatch.setattr(PrefillRunner, "_most_graphs", lambda self: 2)
    return made


def may_capture(prompts, key, times):
    for _ in range(times):
        prompts._uses.note(key)
    return prompts._may_capture(key)


def test_a_graph_goes_for_a_form_that_is_needed_more_often(prompts):
    for _ in range(3):
        prompts._uses.note(("first", None))
    assert not may_capture(prompts, ("new", None), 3)
    assert may_capture(prompts, ("new", None), 1)


def test_the_graph_of_an_unloaded_adapter_keeps_no_other_out(prompts):
    for _ in range(9):
        prompts._uses.note(("first", None))
        prompts._uses.note(("second", "a"))
    prompts.model.adapter_store.serials = {}
    assert not may_capture(prompts, ("new", None), 1)
    assert may_capture(prompts, ("new", None), 1)
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
