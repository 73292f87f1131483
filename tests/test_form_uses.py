"""Which forms of a prompt's pass are captured where few graphs have room."""

from trimtab.runtime.form_uses import PERIOD, FormUses


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
    needed = 0
    while not uses.pays("new", "old"):
        uses.note("new")
        needed += 1
    assert 2 < needed < 5 * PERIOD
