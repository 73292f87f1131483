"""A comparison names the stock side's wrong attention where it ran into it, and nowhere else."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.proof import compare, stock_faults, verify

E2B = {"text_config": {"num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512}}
E4B = {"text_config": {"num_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512}}
NARROW = {"num_key_value_heads": 1, "head_dim": 256}


@pytest.mark.parametrize(
    ("config", "is_hit"),
    [
        (E2B, True),
        (E4B, False),
        (NARROW, False),
        ({}, False),
        ({"text_config": 7}, False),
        ({**NARROW, "head_dim": 320}, True),
    ],
)
def test_the_models_are_those_with_one_wide_head_of_keys(config, is_hit):
    assert stock_faults.one_wide_key_head(config) is is_hit


@given(tokens=st.integers(1, 5000), device=st.sampled_from(["cuda", "cuda:1", "cpu", "None"]))
def test_only_lengths_and_devices_that_are_wrong_are_named(tokens, device):
    lines = stock_faults.wrong_last_positions(E2B, device, [("river", tokens)])
    assert bool(lines) == (device.startswith("cuda") and tokens in range(33, 5001, 32))
    assert all("I13" in line and f"river ({tokens} tokens)" in line for line in lines)


@pytest.mark.parametrize(
    ("verdict", "tokens", "engine", "is_said"),
    [
        (compare.DIFFERS, 29, "stock", True), (compare.SAME, 29, "stock", False), (compare.DIFFERS, 30, "stock", False),
        (compare.DIFFERS, 29, "trimtab", False),
    ],
)  # fmt: skip
def test_a_comparison_that_differs_says_it_of_the_stock_side(verdict, tokens, engine, is_said, monkeypatch):
    def ran(engine):
        said = SimpleNamespace(continuation=(1, 2, 3, 4))
        return SimpleNamespace(route=SimpleNamespace(engine=engine), loaded={"device": "cuda:0"}, said=(said,))

    monkeypatch.setattr(verify, "read_checkpoint", lambda model: SimpleNamespace(config=E2B))
    items = [SimpleNamespace(id="river", prompt_tokens=tokens)]
    rows = [SimpleNamespace(verdict=verdict)]
    lines = verify._stock_faults(SimpleNamespace(model="m"), items, rows, ran(engine), ran("trimtab"))
    assert bool(lines) == is_said
