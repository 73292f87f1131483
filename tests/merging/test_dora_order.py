"""Several adapters where one rescales or replaces: mixes and merges are PEFT's with all of them active in turn, or refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import trimtab
from tests import pico, stock
from tests.merged_models import state_of
from tests.raised import raised, refused
from trimtab.adapter_names import mix_name
from trimtab.errors import AdapterError
from trimtab.merging import merge
from trimtab.serve.adapters.adapter_cache import AdapterCache

IDS = list(range(5, 25))
TOLERANCE = 2e-5  # float32 sums in another order; the orders differ from each other by more than 1e-2
MADE: dict[str, dict[str, Any]] = {
    "dora": {"dora": True}, "again": {"dora": True}, "lora": {}, "table": {"dora": True, "embeddings": True},
    "rows": {"embeddings": True},
}  # fmt: skip
PAIRS = [("dora", "again"), ("lora", "dora"), ("dora", "lora"), ("table", "rows"), ("rows", "table"), ("table", "dora")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("order")
    base = pico.build("llama", folder / "base", dtype="float32")
    made = {name: pico.adapter(base, folder / name, seed=n, **options) for n, (name, options) in enumerate(MADE.items())}
    return {"base": base, **made}


@pytest.fixture(scope="module")
def loaded(folders: dict[str, Path]) -> Iterator[Any]:
    adapters = {name: folders[name] for name in MADE}
    plan = trimtab.plan(folders["base"], adapters=adapters, quant="none", dtype="float32", context=64, device="cpu")
    with trimtab.load(plan) as model:
        yield model


def active(folders: dict[str, Path], *names: str) -> Tensor:
    """Return the logits of PEFT with several adapters active, unmerged."""
    model = stock.with_adapter(stock.load_stock(folders["base"], dtype=torch.float32), folders[names[0]])
    for name in names[1:]:
        model.load_adapter(str(folders[name]), name)
    model.base_model.set_adapter(["default", *names[1:]])
    return stock.logits(model, {"input_ids": torch.tensor([IDS])})[0]


@pytest.mark.parametrize("names", [*PAIRS, ("lora", "dora", "again"), ("again", "rows", "dora", "table")], ids="-".join)
def test_a_mix_and_a_merge_are_pefts_with_these_adapters_active(
    names: tuple[str, ...], folders: dict[str, Path], loaded: Any, tmp_path: Path
) -> None:
    expected = active(folders, *names)
    found = loaded.logits(IDS, adapter=dict.fromkeys(names, 1.0))
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    report = merge(folders["base"], tmp_path / "out", adapters={name: folders[name] for name in names}, check=True)
    assert report.check is not None and report.check.passed
    merged = stock.load_stock(tmp_path / "out", dtype=torch.float32)
    merged_logits = stock.logits(merged, {"input_ids": torch.tensor([IDS])})[0]
    torch.testing.assert_close(merged_logits, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_the_order_of_a_mix_is_that_of_its_mapping(loaded: Any) -> None:
    one, other = (loaded.logits(IDS, adapter=dict.fromkeys(order, 1.0)) for order in (PAIRS[1], PAIRS[2]))
    assert (one - other).abs().max() > 100 * TOLERANCE
    # Where the order means nothing there is one mix.
    assert loaded.adapter_name({"lora": 0.5, "rows": 1.0}) == loaded.adapter_name({"rows": 1.0, "lora": 0.5})


def test_weights_of_a_merge_move_towards_what_an_adapter_makes_of_those_before_it(
    folders: dict[str, Path], loaded: Any, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    weights = {"lora": 0.5, "dora": -0.75, "again": 2.0}
    given = {name: (folders[name], weight) for name, weight in weights.items()}
    report = merge(folders["base"], tmp_path / "out", adapters=given, check=True)
    assert report.check is not None and report.check.passed
    new, old = state_of(tmp_path / "out"), state_of(folders["base"])
    path = "model.layers.0.self_attn.q_proj"
    base = old[f"{path}.weight"].double()
    value = base
    for name, weight in weights.items():
        stem = f"base_model.model.{path}.lora_"
        tensors = load_file(folders[name] / "adapter_model.safetensors")
        delta = 2 * tensors[f"{stem}B.weight"].double() @ tensors[f"{stem}A.weight"].double()
        gain: Any = 1.0
        if name != "lora":
            gain = (tensors[f"{stem}magnitude_vector"].double() / (base + delta).norm(dim=1))[:, None]
        value = value + weight * (gain * (value + delta) - value)
    torch.testing.assert_close(new[f"{path}.weight"].double(), value, rtol=1e-5, atol=1e-6)
    # The mix is the same model.
    merged = stock.load_stock(tmp_path / "out", dtype=torch.float32)
    expected = stock.logits(merged, {"input_ids": torch.tensor([IDS])})[0]
    torch.testing.assert_close(loaded.logits(IDS, adapter=weights), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("names", list(itertools.permutations(("dora", "lora"))))
def test_a_server_refuses_a_mix_whose_order_would_count(names: tuple[str, str], loaded: Any) -> None:
    shelf = AdapterCache(loaded)
    error = refused(lambda: shelf.check(mix_name(dict.fromkeys(names, 1.0))))
    assert (error.field, error.value) == ("adapter", "dora+lora") and "order" in str(error)
    shelf.check(mix_name({"dora": 0.5}))
    shelf.check(mix_name({"lora": 0.5, "rows": 1.0}))


def test_a_merge_refuses_what_peft_has_no_result_for(folders: dict[str, Path], tmp_path: Path) -> None:
    base = folders["base"]
    head = [pico.adapter(base, tmp_path / f"head{n}", seed=n, modules_to_save=["lm_head"]) for n in (0, 1)]
    error = raised(AdapterError, merge, base, tmp_path / "out", adapters={"a": head[0], "b": head[1]})
    assert error.problems == ("adapter a replaces lm_head.weight, which b changes too",)
    table = pico.adapter(base, tmp_path / "table", modules_to_save=["embed_tokens"])
    with pytest.raises(AdapterError, match="adapter t replaces model.embed_tokens.weight, which r changes too"):
        merge(base, tmp_path / "out", adapters={"r": folders["rows"], "t": table})
    assert not (tmp_path / "out").exists()
    merge(base, tmp_path / "out", adapters={"a": head[0], "t": table, "d": folders["dora"]}, check=True)


def test_dora_after_a_bias_is_refused_and_before_it_is_pefts(tmp_path: Path) -> None:
    base = pico.build("qwen2_5_vl", tmp_path / "base", dtype="float32")
    made = {
        "bias": pico.adapter(base, tmp_path / "bias", seed=1, bias=True),
        "dora": pico.adapter(base, tmp_path / "dora", seed=2, dora=True),
    }
    own = {"base": base, **made}
    # lora_bias merges where the base has a bias, which the other projections have not.
    with pytest.raises(AdapterError, match="no merged bias"):
        merge(base, tmp_path / "out", adapters=only_biased(made, "bias", "dora", tmp_path))
    adapters = only_biased(made, "dora", "bias", tmp_path / "turned")
    merge(base, tmp_path / "out", adapters=adapters, check=True)
    expected = active({**own, **adapters}, "dora", "bias")
    merged = stock.logits(stock.load_stock(tmp_path / "out", dtype=torch.float32), {"input_ids": torch.tensor([IDS])})
    torch.testing.assert_close(merged[0], expected, rtol=TOLERANCE, atol=TOLERANCE)


def only_biased(made: dict[str, Path], first: str, second: str, folder: Path) -> dict[str, Path]:
    """Return copies of the adapters with q_proj, k_proj and v_proj alone, in this order."""
    import json
    import shutil

    from safetensors.torch import load_file, save_file

    copies = {}
    for name in (first, second):
        out = folder / f"only-{name}"
        shutil.copytree(made[name], out)
        tensors = load_file(out / "adapter_model.safetensors")
        kept = {key: value for key, value in tensors.items() if any(f".{one}_proj." in key for one in "qkv")}
        save_file(kept, out / "adapter_model.safetensors")
        config = json.loads((out / "adapter_config.json").read_text())
        config["target_modules"] = r".*layers\.\d+\.self_attn\.[qkv]_proj"
        (out / "adapter_config.json").write_text(json.dumps(config))
        copies[name] = out
    return copies
