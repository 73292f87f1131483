"""What the card bench says of the link: the limit that copied bytes give, and what the budget forces off the card."""

from dataclasses import replace
from functools import partial

import pytest

from bench import cards
from tests.anatomies import with_int8_head
from tests.planning.values.test_execution import ADAPTER, E4B, GIB, H200, card
from tools import readme_numbers
from trimtab.planning import make_plan
from trimtab.request import LoadRequest


def planned(gib, head="full", *, anatomy=E4B, gpu_memory=None, **asked):
    request = LoadRequest(model="m", quant="nf4-dq", head=head, gpu_memory_bytes=gpu_memory, **asked)
    return make_plan(request, anatomy, adapters=ADAPTER, machine=card(gib), rates=H200, head8=with_int8_head(E4B), is_advised=False)


def row_of(gib, tok_s=None):
    plan = planned(gib)
    return plan, cards.link_row(plan, tok_s, cards.forced_bytes(plan, partial(planned, gib)))


def test_the_link_allows_its_rate_over_the_bytes_that_a_step_copies():
    plan, row = row_of(3.5, tok_s=50.0)
    off = [one for one in plan.placements if one.part in ("language", "head") and one.tier == "stream"]
    copied = sum(one.host_bytes for one in off)
    assert copied and row["copied_gib"] == round(copied / GIB, 3) and row["link_gb_s"] == 52.4
    assert row["link_limit_tok_s"] == pytest.approx(52.4e9 / copied, abs=0.1)
    assert row["link_share"] == pytest.approx(50 * copied / 52.4e9, abs=1e-3)
    assert plan.execution.tokens_per_s < row["link_limit_tok_s"]


def test_a_card_that_holds_the_decoder_has_no_limit_by_its_link():
    plan, row = row_of(8, tok_s=400.0)
    assert not plan.blocks_off_device
    assert (row["copied_gib"], row["forced_gib"], row["link_limit_tok_s"], row["link_share"]) == (0.0, 0.0, None, None)


def test_no_plan_copies_less_than_its_budget_forces():
    forced = []
    for gib in (2.6, 3.0, 3.5, 4.0):
        _, row = row_of(gib)
        assert row["forced_gib"] <= row["copied_gib"]
        forced.append(row["forced_gib"])
    assert forced == sorted(forced, reverse=True) and forced[0] > 0.5 and forced[-1] < forced[0]


def test_towers_tables_and_what_the_cpu_computes_are_not_copied_in_a_step():
    plan = planned(8, place={"vision": "stream", "audio": "disk", "language": "host"})
    assert cards.copied_bytes(plan) == 0
    some = planned(8, place={"model.language_model.layers.1": "disk"})
    (row,) = [one for one in some.placements if one.tier == "disk"]
    assert cards.copied_bytes(some) == row.disk_bytes + row.host_bytes > 0


def test_modes_that_a_model_does_not_have_are_left_out():
    again = partial(planned, 3.5, anatomy=replace(E4B, fused_unsupported="its layers have experts"))
    assert cards.forced_bytes(again(), again) > 0


def test_stock_rows_of_whole_models_are_among_the_cases():
    names = {cards.name_of(case) for case in cards.CASES}
    assert {"e4b:0:full:enginestock", "e2b:0:full:enginestock", "qwen3-8b:0:full:enginestock"} <= names


def test_the_table_shows_the_link_once_a_row_has_it():
    row = {"model": "e4b", "card_gib": 4, "head": "full", "chosen_head": "full", "execution": "fused", "tok_s": 111.1}
    where = {"gpu": "a GPU", "python": "3.12"}
    before = readme_numbers.cards({"environment": where, "rows": [row]})
    assert "link limit" not in before
    link = {"link_limit_tok_s": 140.2, "link_share": 0.792, "forced_gib": 0.31}
    whole = {**row, "card_gib": 8, "link_limit_tok_s": None, "link_share": None, "forced_gib": 0.0}
    lines = readme_numbers.cards({"environment": where, "rows": [{**row, **link}, whole]}).splitlines()
    assert "| link limit tokens/s | of it | forced GiB |" in lines[0]
    assert lines[2].endswith("| 140 | 0.79 | 0.31 |") and lines[3].endswith("| - | - | 0.00 |")


def test_rows_of_another_machine_are_named_after_it_and_compared_with_its_own():
    first, other = ({"gpu": f"NVIDIA {name}", "python": "3.12"} for name in ("H200", "H100 80GB HBM3"))

    def row(gib, tok_s, streamed):
        return {
            "model": "e4b", "card_gib": gib, "head": "auto", "tok_s": tok_s, "predicted_tok_s": tok_s, "streamed_gib": streamed,
        }  # fmt: skip

    results = cards.merged({}, [row(4, 400.0, 0.0)], first)
    results = cards.merged(results, [row(4, 380.0, 0.0), row(3.7, 358.0, 0.1), row(3.5, 176.0, 0.3)], other)
    # 358 is nine tenths of 380 and more, but not of another GPU's 400.
    assert "On 3.5 GiB and less" in readme_numbers.link_limit(results) and "(H100)" in readme_numbers.link_limit(results)
    assert [readme_numbers._gpu(one, results) for one in results["rows"]] == ["H200", "H100", "H100", "H100"]
