"""Each bad input of a mixture is an error by name before anything is loaded, or a plan that says what happens instead."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import trimtab
from tests import counting
from tests.anatomies import gemma_26b
from tests.planning.values.test_execution import GIB, card, plan
from trimtab.errors import AdapterError, CheckpointError, DoesNotFitError, TrimtabError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("counting")
    return counting.build(folder / "base"), counting.adapter(folder / "german", "german")


def config(**changed: Any) -> Callable[[Path, Path], None]:
    def change(base: Path, _: Path) -> None:
        file = base / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changed))

    return change


def tensors(folder: int, name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    """Change the tensors with this in their names, of the checkpoint (0) or the adapter (1)."""

    def change(*folders: Path) -> None:
        (file,) = folders[folder].glob("*.safetensors")
        save_file({key: value(one) if name in key else one for key, one in load_file(file).items()}, file, {"format": "pt"})

    return change


def by_unsloth(_: Path, adapter: Path) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_mapping": {"unsloth_fixed": True}}))


def other_count(*folders: Path) -> None:
    tensors(1, "lora_A", lambda one: torch.cat([one, one]))(*folders)
    tensors(1, "lora_B", lambda one: torch.cat([one, one], 1))(*folders)


REFUSED: dict[str, tuple[Callable[..., None], type[TrimtabError], str]] = {
    "no experts": (config(num_local_experts=0), CheckpointError, "config.json belongs to another checkpoint"),
    "10^9 experts": (config(num_local_experts=10**9), CheckpointError, "num_local_experts is 1000000000: at most 65536 is read"),
    "more chosen than there are": (config(num_experts_per_tok=9), CheckpointError, "num_experts_per_tok is 9: there are 8 experts"),
    "none chosen": (config(num_experts_per_tok=0), CheckpointError, "a token needs at least one of 8 experts"),
    "an adapter of 16 experts": (other_count, AdapterError, "it was made for 16 experts, the model has 8"),
    "an adapter of either order": (by_unsloth, AdapterError, "the order of lora_B's columns is ambiguous"),
    "a router with NaN": (
        tensors(0, "mlp.gate.weight", lambda one: one * torch.nan), CheckpointError, "values that are NaN or infinite",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("what", REFUSED)
def test_a_bad_mixture_is_refused_before_loading(
    what: str, made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, kind, words = REFUSED[what]
    base, adapter = (shutil.copytree(one, tmp_path / one.name) for one in made)
    trimtab.plan(base, adapters={"a": adapter}, device="cpu", quant="nf4", context=64, experts="nf4")
    change(base, adapter)
    monkeypatch.setattr("trimtab.engine.loader.load.fill", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(kind) as caught:
        trimtab.load(trimtab.plan(base, adapters={"a": adapter}, device="cpu", quant="nf4", context=64, experts="nf4"))
    assert words in str(caught.value) and caught.value.path
    assert kind is AdapterError or caught.value.field or caught.value.tensor_name or "another checkpoint" in words


PLANNED: dict[str, tuple[dict[str, Any], bool, tuple[str, ...]]] = {  # what the machine has, disk, words of the plan
    "enough": ({}, False, ("of 128 of each layer on the device at a time",)),
    "a driver that lets no kernel read host memory": (
        {"reads_host": False}, False,
        ("no slots of experts: the driver lets no kernel read host memory", "layers off the device bring all of their experts"),
    ),
    "short host memory": (
        {"host_available_bytes": 6 * GIB}, True,
        ("bring all of their experts: in host memory, with slots on the device, they need 10.97 GiB there", "GiB on disk"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", PLANNED)
def test_a_poor_machine_has_a_plan_that_says_so(what: str) -> None:
    changed, is_on_disk, words = PLANNED[what]
    made = plan(8, anatomy=gemma_26b(), machine=replace(card(8), **changed), is_advised=False)
    text = " ".join(str(made).split())
    assert [word for word in words if word not in text] == [] and bool(made.disk_bytes) is is_on_disk
    assert bool(made.execution.expert_slots) is not bool(changed) and trimtab.Plan.from_json(made.to_json()) == made


def test_a_machine_with_room_for_nothing_is_refused() -> None:
    with pytest.raises(DoesNotFitError):
        poor = replace(card(8), host_available_bytes=6 * GIB, gpu_free_bytes=GIB)
        plan(3, anatomy=gemma_26b(), machine=poor, is_advised=False)
