"""LoRA on routers that were Linear layers before transformers 5: PEFT's numbers, unmerged, merged and in mixed batches."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import trimtab
from tests import pico
from tests.adapter_files import write_tensors
from tests.merged_models import load
from tools import former_names
from trimtab.adapters.adapter import match_adapter, read_adapter
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.engine.loader.transformers_model import read_anatomy
from trimtab.engine.lora.layers import LinearAdapter, RouterAdapter
from trimtab.engine.lora.routers import RouterModule, takes_lora
from trimtab.engine.lora.store import AdapterStore, Selection
from trimtab.errors import AdapterError, DeviceError

IDS = [2, 30, 41, 7, 91, 12, 38, 51, 64, 11, 70, 23]
# How releases before 5 spelled the router of each family.
FORMER = {"qwen3_moe": "mlp.gate", "mixtral": "block_sparse_moe.gate"}
# Modules of transformers 4.51.3 and 4.57.3 that were nn.Linear (tools/former_names.py lists both) and are a router with a bare
# weight in 5.23.0, by class. Found by comparing the releases' models.
ROUTERS = {
    "AriaForConditionalGeneration": "AriaTextTopKRouter", "DeepseekV2ForCausalLM": "DeepseekV2TopkRouter",
    "Ernie4_5_MoeForCausalLM": "Ernie4_5_MoeTopKRouter", "FlexOlmoForCausalLM": "FlexOlmoTopKRouter",
    "GraniteMoeForCausalLM": "GraniteMoeTopKRouter", "GraniteMoeHybridForCausalLM": "GraniteMoeHybridTopKRouter",
    "GraniteMoeSharedForCausalLM": "GraniteMoeSharedTopKRouter", "Llama4ForConditionalGeneration": "Llama4Router",
    "MiniMaxForCausalLM": "MiniMaxTopKRouter", "MixtralForCausalLM": "MixtralTopKRouter", "OlmoeForCausalLM": "OlmoeTopKRouter",
    "PhimoeForCausalLM": "PhimoeTopKRouter", "Qwen2MoeForCausalLM": "Qwen2MoeTopKRouter",
    "Qwen3MoeForCausalLM": "Qwen3MoeTopKRouter", "Qwen3NextForCausalLM": "Qwen3NextTopKRouter",
}  # fmt: skip


def router_adapter(family: str, base: Path, folder: Path, *, strength: float = 0.3, seed: int = 0, **config: Any) -> Path:
    """Write what transformers 4 and PEFT wrote: LoRA on every q_proj and router."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for path, module in load(base).named_modules():
        if path.endswith(("q_proj", "mlp.gate")):
            out_size, in_size = module.weight.shape
            former = path.replace("mlp.gate", FORMER[family])
            for role, shape in (("A", (3, in_size)), ("B", (out_size, 3))):
                tensors[f"base_model.model.{former}.lora_{role}.weight"] = strength * torch.randn(shape, generator=generator)
    stored = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "gate"], "task_type": "CAUSAL_LM"}
    return write_tensors(folder, tensors, stored | {"peft_version": "0.17.1"} | config)


@pytest.fixture(scope="module", params=FORMER)
def work(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = pico.build(request.param, tmp_path_factory.mktemp("base") / "base", dtype="float32")
    return base, router_adapter(request.param, base, tmp_path_factory.mktemp("adapter") / "router")


def logprobs(answer: Any, place: int = 0) -> dict[int, float]:
    return {int(token): float(value) for token, value in answer.logprobs[place].top}


def of_model(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([IDS])).logits[0, -1].float().log_softmax(-1)


def gap(found: dict[int, float], expected: torch.Tensor) -> float:
    return max(abs(value - float(expected[token])) for token, value in found.items())


def test_a_router_with_lora_answers_as_in_peft(work: tuple[Path, Path]) -> None:
    from peft import PeftModel

    base, adapter = work
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, plain = of_model(PeftModel.from_pretrained(load(base), str(adapter)).eval()), of_model(load(base))
    plan = trimtab.plan(base, adapters={"a": str(adapter)}, quant="none", dtype="float32", context=64, device="cpu")
    with trimtab.load(plan) as model:
        own = logprobs(model.answer(IDS, adapter="a", max_new_tokens=1, logprobs=8))
        bare = logprobs(model.answer(IDS, adapter=None, max_new_tokens=1, logprobs=8))
        requests = [{"prompt": IDS, "adapter": name} for name in ("a", None, "a")]
        mixed = [logprobs(one) for one in model.batch(requests, rows=3, max_new_tokens=3, logprobs=8)]
        model.unload_adapter("a")
        after = logprobs(model.answer(IDS, max_new_tokens=1, logprobs=8))
    # PEFT adds the change to the router's weight, here it is added to its output: float32 sums in another order.
    assert gap(own, expected) < 2e-5 and gap(own, plain) > 1e-2
    assert gap(bare, plain) < 2e-5 and after == bare
    assert [gap(found, expected if place != 1 else plain) < 2e-5 for place, found in enumerate(mixed)] == [True] * 3


def test_a_merged_router_answers_as_in_peft(work: tuple[Path, Path], tmp_path: Path) -> None:
    from peft import PeftModel

    base, adapter = work
    trimtab.merge(base, tmp_path / "merged", adapters={"a": adapter}, check=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = of_model(PeftModel.from_pretrained(load(base), str(adapter)).eval())
    assert float((of_model(load(tmp_path / "merged")) - expected).abs().max()) < 2e-5


def test_a_plan_counts_the_routers_tensors(work: tuple[Path, Path]) -> None:
    base, adapter = work
    spec = match_adapter(read_adapter(adapter), read_anatomy(read_checkpoint(base), quant="nf4", dtype="float32"))
    routers = [row for row in read_anatomy(read_checkpoint(base), quant="nf4", dtype="float32").rows if row.is_router]
    assert routers and not any(row.quantized for row in routers)
    assert spec.counts()["targets"] == {"wrapped": 0, "linear": 2, "router": len(routers), "total": 2 + len(routers)}
    assert spec.nbytes("float32") == sum(entry.nbytes for entry in spec.file.tensors.values())


def test_dora_on_a_router_is_refused_by_name(tmp_path: Path) -> None:
    base = pico.build("qwen3_moe", tmp_path / "base", dtype="float32")
    adapter = router_adapter("qwen3_moe", base, tmp_path / "dora", use_dora=True)
    file = adapter / "adapter_model.safetensors"
    from safetensors.torch import load_file

    tensors = load_file(file)
    tensors |= {
        key.replace("lora_B.weight", "lora_magnitude_vector"): torch.ones(value.shape[0])
        for key, value in tensors.items() if "lora_B" in key
    }  # fmt: skip
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(AdapterError, match=r"LoRA on Qwen3MoeTopKRouter with DoRA or a bias \(model.layers.0.mlp.gate\)"):
        match_adapter(read_adapter(adapter), read_anatomy(read_checkpoint(base), quant="none", dtype="float32"))


def test_load_peft_refuses_a_router_by_name(work: tuple[Path, Path]) -> None:
    from trimtab.bridge import load_peft

    with pytest.raises(AdapterError, match="PEFT has no LoRA for routers"):
        load_peft(load(work[0]), work[1])


def test_a_mix_adds_the_changes_of_a_router(work: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = work
    half = router_adapter(json.loads((base / "config.json").read_text())["model_type"], base, tmp_path / "half", lora_alpha=3)
    given = {"a": str(adapter), "half": str(half)}
    plan = trimtab.plan(base, adapters=given, quant="none", dtype="float32", context=64, device="cpu")
    with trimtab.load(plan) as model:
        whole, mix = (
            logprobs(model.answer(IDS, adapter=one, max_new_tokens=1, logprobs=8)) for one in ("a", {"a": 0.5, "half": 1})
        )
    assert max(abs(value - whole[token]) for token, value in mix.items()) < 2e-5


# Every former Linear ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [name if name in ("MixtralForCausalLM", "GraniteMoeForCausalLM") else pytest.param(name, marks=pytest.mark.slow)
             for name in ROUTERS]
)  # fmt: skip
def test_every_router_that_was_a_linear_is_known(name: str) -> None:
    model = former_names.build(name)
    if model is None:
        pytest.skip(f"this transformers does not build {name}")
    found = {type(module).__name__ for module in model.modules() if takes_lora(module)}
    assert ROUTERS[name] in found


class Casting(nn.Module):
    """A router as DeepSeek's and Ernie's: the product in float32 of a weight in another type."""

    def __init__(self, calls: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).bfloat16())
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.calls):
            logits = nn.functional.linear(x.reshape(-1, 8).float(), self.weight.type(torch.float32))
        return logits.softmax(-1)


def _with_adapter(router: Casting) -> tuple[RouterModule, AdapterStore, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    A, B = torch.randn(2, 8, generator=generator), torch.randn(4, 2, generator=generator)
    store = AdapterStore()
    module = RouterModule(router, store, "mlp.gate", "language")
    module.__dict__["adapters"]["a"] = RouterAdapter(LinearAdapter("language", 0.5, A, B))
    return module, store, 0.5 * B @ A


def test_a_weight_that_is_cast_first_takes_lora_too() -> None:
    module, store, delta = _with_adapter(Casting())
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(3))
    plain, changed = module.original.weight.float(), module.original.weight.float() + delta
    expected = [(x.double() @ weight.double().T).softmax(-1).reshape(-1, 4) for weight in (plain, changed)]
    store.selection = Selection("a")
    assert torch.allclose(module(x).double(), expected[1], atol=1e-5)
    store.selection = Selection.of_rows(("a", None, "a"))
    wanted = expected[1].clone()
    wanted[5:10] = expected[0][5:10]
    assert torch.allclose(module(x).double(), wanted, atol=1e-5)
    store.selection = Selection(None)
    assert torch.equal(module(x), module.original(x)) and module.calls == 1


@pytest.mark.parametrize("calls", [0, 2])
def test_a_router_that_computes_otherwise_is_an_error(calls: int) -> None:
    class Other(Casting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if self.calls else x

    module, store, _ = _with_adapter(Other(calls))
    store.selection = Selection("a")
    with pytest.raises(DeviceError, match=f"{calls} times"):
        module(torch.zeros(1, 8))
