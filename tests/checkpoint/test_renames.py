"""Former names of modules lead to the modules of today, for every family whose names changed in the supported range."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests import ROOT, pico
from tests.adapter_files import rewritten
from tools import former_names
from trimtab.adapters.adapter import describe, match_adapter, read_adapter
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.checkpoint.names import Rename, renamed
from trimtab.engine.loader.transformers_model import read_anatomy, read_renames
from trimtab.errors import AdapterError
from trimtab.machine.machine_cache import read_anatomy as from_json
from trimtab.machine.machine_cache import write_anatomy

# Module paths of layer 0 in transformers 4.51.3, 4.57.3 and 5.6.2 that 5.23.0 has under another name, by model class. Written
# by tools/former_names.py from those releases' own models, not by hand.
FORMER: dict[str, dict[str, list[str]]] = json.loads((ROOT / "tests" / "data").joinpath("former_names.json").read_text())
CLASSES = sorted({name for models in FORMER.values() for name in models})
QUICK = ("Gemma3ForConditionalGeneration", "LlavaForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration",
         "VoxtralForConditionalGeneration", "GraniteMoeForCausalLM", "GPTNeoXForCausalLM")  # fmt: skip


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CLASSES])
def test_every_former_name_leads_to_a_module(name: str) -> None:
    model = former_names.build(name)
    if model is None:
        pytest.skip(f"this transformers does not build {name}")
    have, renames = dict(model.named_modules()), read_renames(model)
    former = {path for models in FORMER.values() for path in models.get(name, ())}
    assert former
    assert [path for path in former if path not in have and renamed(path, renames) not in have] == []
    # Names of today stay as they are.
    assert [path for path in have if path and renamed(path, renames) not in (path, *have)] == []


# Adapters --------------------------------------------------------------------------------------------------------------


VISION = Rename("model", "vision_tower", r"^vision_model\.(.+)", r"\1")
SPELLINGS = {
    "of 4.57": lambda key: key.replace("vision_tower.encoder", "vision_tower.vision_model.encoder"),
    "of 4.51": lambda key: (
        key.replace("model.model.vision_tower.encoder", "model.vision_tower.vision_model.encoder")
        .replace("model.model.language_model.", "model.language_model.model.")
        .replace("model.model.multi_modal_projector", "model.multi_modal_projector")
    ),
}


def _respelled(source: Path, folder: Path, change: Any, **config: Any) -> Path:
    return rewritten(source, folder, lambda tensors: {change(key): value for key, value in tensors.items()}, **config)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = pico.build("gemma3", tmp_path_factory.mktemp("base") / "gemma3")
    return base, pico.adapter(base, tmp_path_factory.mktemp("adapter") / "new", targets="all")


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_an_adapter_with_former_tower_names_is_put_where_peft_puts_it(
    spelling: str, gemma3: tuple[Path, Path], tmp_path: Path
) -> None:
    from peft import PeftModel

    base, new = gemma3
    old = _respelled(new, tmp_path / "old", SPELLINGS[spelling])
    anatomy = read_anatomy(read_checkpoint(base), quant="none", dtype="float32")
    spec = match_adapter(read_adapter(old), from_json(write_anatomy(anatomy)))
    today = match_adapter(read_adapter(new), anatomy)
    assert [(t.module_path, t.rank, t.scale) for t in spec.targets] == [(t.module_path, t.rank, t.scale) for t in today.targets]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock = dict(PeftModel.from_pretrained(pico._load(base), str(new)).named_parameters())
    tensors = load_file(old / "adapter_model.safetensors")
    assert sum("vision_tower" in target.module_path for target in spec.targets) > 0
    for target in spec.targets:
        for role in "AB":
            own = stock[f"base_model.model.{target.module_path}.lora_{role}.default.weight"]
            assert own.detach().equal(tensors[target.tensors[role].tensor_name].to(own.dtype))


def test_ranks_by_former_names_are_those_of_the_former_modules(gemma3: tuple[Path, Path], tmp_path: Path) -> None:
    base, new = gemma3
    named = {r"vision_tower\.vision_model\.encoder\.layers\.0\.mlp\.fc1": 16}
    old = _respelled(new, tmp_path / "old", SPELLINGS["of 4.57"], alpha_pattern=named, exclude_modules=r".*vision_model\.head.*")
    spec = match_adapter(read_adapter(old), read_anatomy(read_checkpoint(base), quant="none", dtype="float32"))
    scales = {target.module_path: target.scale for target in spec.targets}
    assert {path for path, scale in scales.items() if scale == 4.0} == {"model.vision_tower.encoder.layers.0.mlp.fc1"}
    assert not any("no module" in note for note in describe(spec.file, spec)["notes"])


def test_a_name_that_never_was_is_still_refused(gemma3: tuple[Path, Path], tmp_path: Path) -> None:
    base, new = gemma3
    old = _respelled(new, tmp_path / "old", lambda key: key.replace("vision_tower.encoder", "vision_tower.vision_modle.encoder"))
    with pytest.raises(AdapterError, match="the model has no model.vision_tower.vision_modle"):
        match_adapter(read_adapter(old), read_anatomy(read_checkpoint(base), quant="none", dtype="float32"))


@pytest.mark.parametrize(("rename", "path", "expected"), [
    (VISION, "model.vision_tower.vision_model.a", "model.vision_tower.a"),
    (VISION, "vision_tower.vision_model.a", "vision_tower.a"),
    (VISION, "model.other.vision_model.a", "model.other.vision_model.a"),
    (Rename("", "", r"\.to_q\.", ".q_proj."), "layers.0.to_q", "layers.0.q_proj"),
    (Rename("model", "", r"^text\.(.+)", r"\1"), "model.text.a", "model.a"),
])  # fmt: skip
def test_a_rename_changes_its_own_part_alone(rename: Rename, path: str, expected: str) -> None:
    assert renamed(path, [rename]) == expected
