"""Adapters on stacked experts mean what the release of PEFT that wrote them computes, also where shapes do not show its layout.

tests/data/peft/stack_layouts.json holds what each release computed (PEFT 0.17.0 to 0.21.2, run one by one).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests import ROOT
from tests.adapter_files import row
from tests.raised import raised
from trimtab.adapters.adapter import AdapterTarget, match_adapter, read_adapter
from trimtab.adapters.stack_layout import layout_of_release
from trimtab.checkpoint.anatomy import Anatomy, TensorRow
from trimtab.errors import AdapterError
from trimtab.merging.changes.experts import StackPairs

RECORD = json.loads((ROOT / "tests" / "data/peft/stack_layouts.json").read_text(encoding="utf-8"))["releases"]
UNSURE = ("0.19.0", "transposed")  # its transformers may have marked the stack or not


def change_of(folder: Path, pairs: dict[str, dict[str, Any]], version: str | None) -> dict[str, torch.Tensor]:
    """Return the change of each stack, by module name. pairs: module name -> its part of the record."""
    rows, tensors, folder = [], {}, folder / "adapter"
    folder.mkdir()
    for name, pair in pairs.items():
        stack = TensorRow(f"{name}.w", tuple(torch.tensor(pair["change"]).shape), "float32", False, ())
        rows.append(row(name, (), kind="experts", tensors=(stack,), is_transposed="transposed" in name))
        for role in "AB":
            tensors[f"base_model.model.{name}.lora_{role}.weight"] = torch.tensor(pair[role]).float()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": [], "target_parameters": ["w"]}
    config |= {} if version is None else {"peft_version": version}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    anatomy = Anatomy("Small", "small", "float32", tuple(rows), (), 16, 50)
    spec = match_adapter(read_adapter(folder), anatomy, computes=False)

    def made(target: AdapterTarget) -> torch.Tensor:
        left, right, scale = StackPairs((target,)).factors(lambda entry: tensors[entry.tensor_name])
        return left @ right * scale

    return {target.module_path: made(target) for target in spec.targets}


@pytest.mark.parametrize("kind", RECORD["0.21.2"])
@pytest.mark.parametrize("release", RECORD)
def test_a_pair_changes_its_stack_as_its_release_does(release: str, kind: str, tmp_path: Path) -> None:
    name, pair = kind.replace(" ", "_"), RECORD[release][kind]
    if (release, kind) == UNSURE:
        with pytest.raises(AdapterError, match=r"peft_version is '0\.19\.0'"):
            change_of(tmp_path, {name: pair}, release)
        return
    assert torch.equal(change_of(tmp_path, {name: pair}, release)[name], torch.tensor(pair["change"]).float())


@pytest.mark.parametrize("release", ["0.17.1", "0.18.1", "0.19.0", "0.21.2"])
@pytest.mark.parametrize("kind", ["plain", "transposed"])
def test_other_pairs_of_the_file_show_the_layout_of_a_square_one(release: str, kind: str, tmp_path: Path) -> None:
    pairs = {kind: RECORD[release][kind], f"{kind}_oblong": RECORD[release][f"{kind} oblong"]}
    found = change_of(tmp_path, pairs, None)
    assert {name: change.tolist() for name, change in found.items()} == {name: pair["change"] for name, pair in pairs.items()}


@pytest.mark.parametrize("version", [None, "0.18.2.dev0@1a2b3c", "0.19.0.dev0", "0.19.1.dev0@UNKNOWN", "main", "", "9" * 5000])
def test_a_square_pair_of_an_unknown_layout_is_refused(version: str | None, tmp_path: Path) -> None:
    (problem,) = raised(AdapterError, change_of, tmp_path, {"plain": RECORD["0.18.1"]["plain"]}, version).problems
    assert "plain.w: the shapes are square and peft_version is" in problem and "PEFT 0.17 and 0.18" in problem


@pytest.mark.parametrize("names", ["w", {"w": 1}, [1], [""]])
def test_names_of_parameters_are_a_list(names: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dumps = json.dumps
    monkeypatch.setattr(json, "dumps", lambda config: dumps({**config, "target_parameters": names}))
    with pytest.raises(AdapterError, match="must be a list of names"):
        change_of(tmp_path, {"plain": RECORD["0.18.1"]["plain"]}, "0.18.1")


@pytest.mark.parametrize(("version", "same_as"), [
    ("0.22.0", "0.21.2"), ("0.19.2.dev0@ff", "0.21.2"), ("0.18.0rc1", "0.18.0"), ("0.18.1.post1", "0.18.1"),
])  # fmt: skip
def test_releases_that_are_not_recorded_go_with_their_neighbours(version: str, same_as: str) -> None:
    for kind in ("plain", "transposed"):
        layouts = [layout_of_release(one, is_transposed=kind == "transposed") for one in (version, same_as)]
        assert layouts[0] == layouts[1] is not None
