"""One owner of adapters, a frozen selection for a pass, and one applier at a time."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.engine.lora.store import BASE, EAGER, AdapterStore, Holders, Selection, covered
from trimtab.errors import RequestError

CPU = torch.device("cpu")
NAMES = st.one_of(st.none(), st.sampled_from(["a", "b", "c"]))


def store_of(*names):
    store = AdapterStore()
    for name in names:
        store.attached(name, Holders(None, []))
    return store


@given(st.lists(NAMES, min_size=1, max_size=12))
def test_a_selection_names_each_rows_adapter_once(rows):
    selection = Selection.of_rows(rows)
    assert selection.active() == (tuple(rows) if len(set(rows)) > 1 else (rows[0],))
    if selection.rows is None:
        return
    found = [None] * len(rows)
    for name, index in selection.groups("language", len(rows), CPU):
        for at in index.tolist():
            assert found[at] is None
            found[at] = name
    assert found == rows


def test_a_selection_does_not_change_after_it_was_made():
    rows, vision = ["a", None], ["a"]
    selection = Selection.of_rows(rows, {"vision": vision})
    rows[0], vision[0] = "b", "b"
    assert selection.rows == ("a", None) and selection.towers == {"vision": ("a",)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        selection.name = "b"


@pytest.mark.parametrize(("rows", "towers", "field"), [([], {}, "rows"), (["a", "b"], {"text": ["a"]}, "towers")])
def test_a_selection_of_nothing_is_refused(rows, towers, field):
    with pytest.raises(RequestError) as caught:
        Selection.of_rows(rows, towers)
    assert caught.value.field == field


def test_an_equal_selection_keeps_the_row_numbers_that_are_on_the_device():
    store = store_of("a", "b")
    store.set_rows(["a", "b"])
    first = store.selection
    ((_, index), _) = first.groups("language", 2, CPU)
    store.set_rows(["a", "b"])
    assert store.selection is first and store.selection.groups("language", 2, CPU)[0][1] is index
    store.set_rows(["b", "a"])
    assert store.selection is not first and store.selection.groups("language", 2, CPU)[0][1] is not index
    assert first.groups("language", 2, CPU)[0][1] is index  # whoever kept the selection has them still


def test_an_adapter_that_is_gone_is_selected_by_nobody():
    store = store_of("a", "b")
    store.set_rows(["a", "b"])
    store.detached("a")
    assert store.selection == BASE and set(store.names) == {"b"}
    with pytest.raises(RequestError, match="no such adapter"):
        store.set_rows(["a", "b"])
    assert store.selection == BASE
    store.set("b")
    store.detached("a")  # one that nobody uses changes no row
    assert store.selection == Selection("b")


def test_appliers_end_in_the_order_in_which_they_began():
    store, table = AdapterStore(), SimpleNamespace(table="table")
    short = SimpleNamespace(table=None)
    assert store.applier is EAGER and store.table is None
    with pytest.raises(KeyboardInterrupt), store.applying(short):
        with store.applying(table):
            assert store.table == "table"
            with store.applying(None):
                assert store.applier is table
        assert store.applier is short
        raise KeyboardInterrupt
    assert store.applier is EAGER
    with covered({(store, "more"): 1, (store, "applier"): table}):
        with covered({(store, "more"): 2}):
            assert (store.more, store.applier) == (2, table)
        assert store.more == 1
    assert store.applier is EAGER and not hasattr(store, "more")
