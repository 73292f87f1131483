"""A comparison names the stock side's wrong attention and wrong scales where it ran into them, and nowhere else."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.bridge import row_scales
from trimtab.doctor.catalogue import read_catalogue
from trimtab.doctor.facts.bug import PRESENT
from trimtab.doctor.facts.probe_kit import Kit
from trimtab.verification import verify
from trimtab.verification.routes import compare

E2B = {"text_config": {"num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512}}
E4B = {"text_config": {"num_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512}}
NARROW = {"num_key_value_heads": 1, "head_dim": 256}


@pytest.mark.parametrize(("config", "is_hit"), [
    (E2B, True), (E4B, False), (NARROW, False), ({}, False), ({"text_config": 7}, False), ({**NARROW, "head_dim": 320}, True),
])  # fmt: skip
def test_the_models_are_those_with_one_wide_head_of_keys(config, is_hit):
    assert verify.one_wide_key_head(config) is is_hit


@given(tokens=st.integers(1, 5000), device=st.sampled_from(["cuda", "cuda:1", "cpu", "None"]))
def test_only_lengths_and_devices_that_are_wrong_are_named(tokens, device):
    lines = verify.wrong_last_positions(E2B, device, [("river", tokens)])
    assert bool(lines) == (device.startswith("cuda") and tokens in range(33, 5001, 32))
    assert all("I13" in line and f"river ({tokens} tokens)" in line for line in lines)


@pytest.mark.parametrize(("verdict", "tokens", "engine", "is_said"), [
    (compare.DIFFERS, 29, "stock", True), (compare.SAME, 29, "stock", False), (compare.DIFFERS, 30, "stock", False),
    (compare.DIFFERS, 29, "trimtab", False),
])  # fmt: skip
def test_a_comparison_that_differs_says_it_of_the_stock_side(verdict, tokens, engine, is_said, monkeypatch):
    def ran(engine):
        said = SimpleNamespace(continuation=(1, 2, 3, 4))
        return SimpleNamespace(route=SimpleNamespace(engine=engine), loaded={"device": "cuda:0"}, said=(said,))

    monkeypatch.setattr(verify, "read_checkpoint", lambda model: SimpleNamespace(config=E2B))
    items = [SimpleNamespace(id="river", prompt_tokens=tokens)]
    rows = [SimpleNamespace(verdict=verdict)]
    assert bool(verify._stock_faults(SimpleNamespace(model="m"), items, rows, ran(engine), ran("trimtab"))) == is_said


@pytest.mark.parametrize(("verdict", "engine", "paths", "is_said"), [
    (compare.DIFFERS, "stock", ["a.fc2", "b.fc2"], True), (compare.SAME, "stock", ["a.fc2"], False),
    (compare.DIFFERS, "stock", [], False), (compare.DIFFERS, "trimtab", ["a.fc2"], False),
])  # fmt: skip
def test_a_comparison_that_differs_names_layers_with_wrong_scales(verdict, engine, paths, is_said, monkeypatch):
    def ran(engine):
        said = SimpleNamespace(continuation=(1,))
        loaded = {"device": "cpu", "wrong_scales": paths}
        return SimpleNamespace(route=SimpleNamespace(engine=engine), loaded=loaded, said=(said,))

    monkeypatch.setattr(verify, "read_checkpoint", lambda model: SimpleNamespace(config=E4B))
    items, rows = [SimpleNamespace(id="river", prompt_tokens=30)], [SimpleNamespace(verdict=verdict)]
    lines = verify._stock_faults(SimpleNamespace(model="m"), items, rows, ran(engine), ran("trimtab"))
    assert len(lines) == is_said and all("I16" in line and "a.fc2 and 1 more" in line for line in lines)


def four_bit(rows, width, device="cpu"):
    layer = torch.nn.Linear(1, 1)
    state = SimpleNamespace(shape=(rows, width), blocksize=64)
    layer._parameters.clear()
    layer.weight = SimpleNamespace(device=torch.device(device), quant_state=state)
    return layer


def test_the_stock_route_names_layers_whose_rows_of_this_length_are_unpacked_wrong(monkeypatch):
    asked = []

    def answer(*key):
        asked.append(key)
        return key[1] == 80

    monkeypatch.setattr(row_scales, "unpacks_wrong", answer)
    layers = {"whole": four_bit(96, 128), "wrong": four_bit(96, 80), "also": four_bit(200, 80), "right": four_bit(3, 72)}
    layers["elsewhere"] = four_bit(96, 80, "cuda")
    assert row_scales.wrong_scales(torch.nn.ModuleDict(layers)) == ["wrong", "also"]
    assert asked == [(64, 80, 64), (3, 72, 64)]
    wrapped = torch.nn.Module()
    wrapped.q = four_bit(96, 80)
    wrapped.q.base_layer = four_bit(96, 80)
    assert row_scales.wrong_scales(wrapped) == ["q"]


def test_a_small_weight_shows_what_the_catalogue_s_probe_shows(tmp_path):
    pytest.importorskip("bitsandbytes")
    seen = next(entry for entry in read_catalogue() if entry.bug.id == "I16").probe(Kit(tmp_path))
    assert row_scales.unpacks_wrong(24, 80, 64) == (seen.state == PRESENT) and not row_scales.unpacks_wrong(24, 128, 64)
