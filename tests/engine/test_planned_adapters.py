"""What a plan read is not read again by its load: the checkpoint, its anatomy and each adapter, up to the server's host memory."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file

import trimtab
from tests import pico
from tests.raised import raised
from trimtab import api
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine import model_calls
from trimtab.engine.loader import load, transformers_model
from trimtab.engine.lora.store import HeldAdapter
from trimtab.errors import AdapterError
from trimtab.request import LoadRequest
from trimtab.serve.adapters import adapter_cache
from trimtab.serve.worker.engine import LoadedEngine
from trimtab.serve.worker.row_count import PLANNED

FILE = "adapter_model.safetensors"


@pytest.fixture
def folders(tmp_path):
    """Three adapters with values of their own."""
    made = {}
    for number in range(3):
        made[f"a{number}"] = str(shutil.copytree(DEMO / "adapters" / "style", tmp_path / f"a{number}"))
        change(made[f"a{number}"], lambda tensors, by=1 + number: {name: by * one for name, one in tensors.items()})
    return made


def change(folder, how):
    tensors = load_file(f"{folder}/{FILE}")
    save_file({name: one.contiguous() for name, one in how(tensors).items()}, f"{folder}/{FILE}")


def request(adapters, **options):
    known = {"device": "cpu", "quant": "none", "dtype": "float32", "context_tokens": 128, "images": 0, "audio_s": 0.0}
    return LoadRequest(model=str(DEMO / "base"), adapters=adapters, **known, **options)


@pytest.fixture
def counts(monkeypatch):
    """Calls by name and adapter."""
    found = Counter()

    def count(owner, name, key):
        inner = getattr(owner, name)

        def call(*args, **options):
            found[name, key(*args)] += 1
            return inner(*args, **options)

        monkeypatch.setattr(owner, name, call)

    count(api, "read_checkpoint", str)
    count(load, "read_checkpoint", str)
    count(transformers_model, "build_anatomy", lambda *_: str(DEMO / "base"))
    for module in (api, model_calls):
        count(module, "read_adapter", lambda path: str(path))
        count(module, "match_adapter", lambda file, anatomy: str(file.folder))
    count(HeldAdapter, "read", lambda spec: str(spec.file.folder))
    return found


def test_a_server_matches_and_reads_each_adapter_once_whatever_it_plans(folders, counts, no_kept_anatomies):
    inputs = api.PlanInputs(sees_values=False)
    plans = [api.plan_request(request(folders, batch=rows), inputs=inputs, later={}) for rows in PLANNED]
    held: dict = {}
    with api.load_plan(plans[-1], held=held) as model:
        engine = LoadedEngine(model, rows=PLANNED[-1], held=held)
        assert model.adapters == tuple(folders) and engine.shelf.resident == tuple(folders)
        assert [engine.shelf._held[name] for name in folders] == list(held.values())
    one_each = {(name, folder): 1 for name in ("read_adapter", "match_adapter", "read") for folder in folders.values()}
    assert counts == one_each | {(name, str(DEMO / "base")): 1 for name in ("read_checkpoint", "build_anatomy")}


def test_a_program_opens_the_files_of_a_plan_once_for_what_it_needs(folders):
    opened: Counter[str] = Counter()
    is_counted = [True]

    def hook(event: str, args: tuple) -> None:
        if event == "open" and is_counted and isinstance(args[0], str):
            opened[args[0]] += 1

    sys.addaudithook(hook)
    try:
        with api.load_plan(api.plan_request(request(folders))) as model:
            assert model.adapters == tuple(folders)
    finally:
        is_counted.clear()
    # A shard: its header, its weights. An adapter: its header, the search for NaN, its values.
    expected = {str(file): 2 for file in (DEMO / "base").glob("*.safetensors")}
    expected |= {str(DEMO / "base/model.safetensors.index.json"): 1}
    for folder in folders.values():
        expected |= {f"{folder}/adapter_config.json": 1, f"{folder}/{FILE}": 3}
    assert {name: opened[name] for name in expected} == expected


def test_a_plan_reads_an_adapter_again_when_its_files_have_changed(folders, counts):
    inputs = api.PlanInputs()
    api.plan_request(request(folders), inputs=inputs)
    change(folders["a1"], lambda tensors: {name: torch.full_like(one, torch.nan) for name, one in tensors.items()})
    with pytest.raises(AdapterError, match="NaN or infinite"):
        api.plan_request(request(folders), inputs=inputs)
    assert [counts["read_adapter", folder] for folder in folders.values()] == [1, 2, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, "mixed"])
def test_values_that_are_not_finite_are_named_before_an_adapter_is_used(folders, dtype):
    def spoil(tensors):
        types = [torch.float32, torch.bfloat16] if dtype == "mixed" else [dtype]
        made = {name: one.to(types[number % len(types)]) for number, (name, one) in enumerate(tensors.items())}
        made[sorted(made)[3]].view(-1)[5] = -torch.inf
        return made

    change(folders["a1"], spoil)
    plan = api.plan_request(request(folders), inputs=api.PlanInputs(sees_values=False))
    error = raised(AdapterError, api.load_plan, plan)
    assert len(error.problems) == 1 and "1 of" in error.problems[0]
    assert "values are NaN or infinite" in error.problems[0] and folders["a1"] in str(error)


def test_finite_values_whose_sum_overflows_are_no_error(folders):
    change(folders["a1"], lambda tensors: {name: torch.full_like(one, 3e38) for name, one in tensors.items()})
    with api.load_plan(api.plan_request(request(folders))) as model:
        assert "a1" in model.adapters


def test_a_file_that_changes_after_it_was_matched_is_named(folders):
    inputs = api.PlanInputs()
    plan = api.plan_request(request(folders), inputs=inputs)
    spec, _ = next(iter(inputs.specs.values()))
    change(folders["a0"], lambda tensors: dict(list(tensors.items())[:-2]))
    with pytest.raises(AdapterError, match="changed after its header was read"):
        HeldAdapter.read(spec, pinned=False)
    with pytest.raises(AdapterError, match="changed since the plan was made"):
        api.load_plan(plan)


def test_adapters_with_equal_ends_are_told_apart_and_copies_are_held_once(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(adapter_cache, "END_BYTES", 64)
    middle = sorted(load_file(f"{folders['a0']}/{FILE}"))[4]
    other = shutil.copytree(folders["a0"], tmp_path / "other")
    change(other, lambda tensors: tensors | {middle: tensors[middle] + 1})
    folders |= {"other": str(other), "copy": str(shutil.copytree(folders["a0"], tmp_path / "copy"))}
    assert adapter_cache._ends(other) == adapter_cache._ends(folders["a0"]) != adapter_cache._ends(folders["a1"])
    held: dict = {}
    with api.load_plan(api.plan_request(request(folders)), held=held) as model:
        shelf = LoadedEngine(model, rows=1, held=held).shelf
        assert shelf._held["a0"] is shelf._held["copy"] and shelf._held["other"] is held["other"]
        assert len(shelf.held) == 4


def test_what_was_made_of_files_goes_when_they_change(tmp_path):
    folder, inputs = pico.build("llama", tmp_path / "base"), api.PlanInputs()
    asked = trimtab.plan(folder, device="cpu", quant="none", context=64).request
    api.plan_request(asked, inputs=inputs)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.25}))
    with trimtab.load(api.plan_request(asked, inputs=inputs)) as model:
        assert model.hf_model.get_decoder().norm.variance_epsilon == 0.25
