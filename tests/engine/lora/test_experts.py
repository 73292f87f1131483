"""Adapters on stacked experts answer as PEFT's, or as a model whose weights have the change: alone, mixed and in one batch."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import trimtab
from tests import pico
from tests.adapter_files import rewritten, write_tensors
from tests.engine.lora.test_routers import IDS, gap, logprobs, of_model
from tests.long_runs import halved
from tests.merged_models import load
from tests.merging.changes.test_merge_experts import BOTH, stack_adapter
from tests.raised import raised
from trimtab.errors import AdapterError

# Sums of float32 in another order: PEFT adds B A to the weight, here it is added to the product.
NEAR = 2e-5


def build(family: str, folder: Path) -> Path:
    """Write a checkpoint in float32. gpt_oss: transposed stacks, gate and up in turns, and biases."""
    if family != "gpt_oss":
        return pico.build(family, folder, dtype="float32")
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=128, hidden_size=48, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=24, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, max_position_embeddings=128,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = GptOssForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return folder


def loaded(base: Path, adapters: Mapping[str, Path], **options: Any) -> Any:
    given = {name: str(path) for name, path in adapters.items()}
    plan = trimtab.plan(base, adapters=given, **{"quant": "none", "dtype": "float32", "context": 64, "device": "cpu"} | options)
    return trimtab.load(plan)


def answered(model: Any, adapter: Any) -> dict[int, float]:
    return logprobs(model.answer(IDS, adapter=adapter, max_new_tokens=1, logprobs=8))


def with_changes(base: Path, changes: Mapping[str, Tensor]) -> Tensor:
    """Return the logprobs of the stock model whose parameters have these changes, added in float64."""
    model = load(base)
    with torch.no_grad():
        for name, change in changes.items():
            parameter = model.state_dict()[name]
            parameter.copy_(parameter.double() + change)
    return of_model(model)


@cache
def of_base(base: Path) -> Tensor:
    return of_model(load(base))


@cache
def of_peft(base: Path, adapter: Path) -> Tensor:
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return of_model(PeftModel.from_pretrained(load(base), str(adapter)).eval())


WORKS = ("mixtral", "gpt_oss")


@pytest.fixture(scope="module", params=[*WORKS, pytest.param("gemma4_moe", marks=pytest.mark.slow)])
def work(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    base = build(request.param, folder / "base")
    names = {"a": (BOTH, {"use_rslora": True}), "b": (BOTH[1:], {"alpha_pattern": {"experts.down_proj": 3}})}
    return base, *(stack_adapter(base, folder / name, list(given), **how) for name, (given, how) in names.items())


def test_target_parameters_answer_as_in_peft_in_one_batch(work: tuple[Path, Path, Path]) -> None:
    base, a, b = work
    expected = {"a": of_peft(base, a), "b": of_peft(base, b), None: of_base(base)}
    with loaded(base, {"a": a, "b": b}) as model:
        names = ("a", None, "b", "a")
        requests = [{"prompt": IDS, "adapter": name} for name in names]
        batch = [*model.batch(requests, rows=4, max_new_tokens=3, logprobs=8)]
        found = [logprobs(one) for one in batch]
        shares = {share.name: share for share in model.memory_shares()}
        # Tensors of plain layers begin at multiples of 256 bytes.
        assert shares["adapters"].measured_bytes <= 1.05 * shares["adapters"].planned_bytes
        alone = model.answer(IDS, adapter="b", max_new_tokens=3, logprobs=8)
        for name in ("a", "b"):
            model.unload_adapter(name)
        after = answered(model, None)
    assert max(gap(one, expected[name]) for one, name in zip(found, names, strict=True)) < NEAR
    assert max(gap(logprobs(alone), expected["b"]), gap(after, expected[None])) < NEAR
    assert logprobs(batch[2], 2) == pytest.approx(logprobs(alone, 2), abs=NEAR)  # of a step in which rows differ
    assert min(gap(found[0], expected[None]), gap(found[2], expected[None]), gap(found[0], expected["b"])) > 1e-2


def test_a_mix_adds_the_weighted_changes(work: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, a, b = work
    plain, changes = load(base).state_dict(), {}
    for weight, adapter in ((0.5, a), (-1.5, b)):
        trimtab.merge(base, tmp_path / adapter.name, adapters={"x": adapter}, dtype="float32")
        for name, value in load(tmp_path / adapter.name).state_dict().items():
            changes[name] = changes.get(name, 0) + weight * (value.double() - plain[name].double())
    with loaded(base, {"a": a, "b": b}) as model:
        found = answered(model, {"a": 0.5, "b": -1.5})
    assert gap(found, with_changes(base, changes)) < 5 * NEAR  # each merge rounds its weights once


@pytest.mark.parametrize("tier", ["stream", "host", pytest.param("disk", marks=pytest.mark.slow)])
def test_every_tier_answers_as_the_resident_one(tier: str, work: tuple[Path, Path, Path]) -> None:
    base, a, _ = work
    with loaded(base, {"a": a}) as model:
        expected = answered(model, "a")
    with loaded(base, {"a": a}, place={"model*layers.0": tier}) as model:
        assert tier in {row.tier for row in model.plan.placements}
        found = answered(model, "a")
    assert max(abs(found[token] - value) for token, value in expected.items()) < NEAR


# What PEFT makes of each family: modules that transformers 5 made stacks and bare weights are parameters there.
KINDS: dict[str, dict[str, Any]] = {
    "all-linear": {"target_modules": "all-linear"},
    "dora": {"target_modules": "all-linear", "use_dora": True},
    "stacks": {"target_modules": ["q_proj"], "target_parameters": BOTH},
    "experts-of-transformers-4": {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
    "experts-of-Mixtral": {"target_modules": ["q_proj", "w1", "w2", "w3"]},
    "router": {"target_modules": ["q_proj", "gate", "router"]},
    "weight-of-a-router": {"target_modules": ["q_proj"], "target_parameters": ["gate.weight", "router.weight"]},
    "shared-expert": {"target_modules": ["q_proj", "shared_expert.gate_proj", "shared_experts.up_proj", "shared_expert_gate"]},
}
MIXTURES = ("qwen3_5_moe", "mixtral", "qwen3_moe", "qwen2_moe", "glm4_moe", "gpt_oss", "gemma4_moe", "qwen3_vl_moe")


@pytest.mark.parametrize("family", MIXTURES)
def test_all_that_peft_makes_of_a_mixture_answers_as_in_peft(family: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base, made, generator = build(family, tmp_path / "base"), {}, torch.Generator().manual_seed(0)
    for kind, options in KINDS.items():
        try:
            model = get_peft_model(load(base), LoraConfig(r=3, lora_alpha=7, **options))
        except ValueError:  # which names the module
            continue
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                if "lora_" in path:
                    change = 0.1 * torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(parameter * (1 + change) if "magnitude" in path else change)
        made[kind] = tmp_path / kind
        model.save_pretrained(made[kind])
    assert len(made) >= (2 if family == "gemma4_moe" else 6), sorted(made)  # the others name its towers' wrappers
    with loaded(base, made) as model:
        found = {kind: answered(model, kind) for kind in made}
    assert {kind: gap(found[kind], of_peft(base, folder)) < NEAR for kind, folder in made.items()} == dict.fromkeys(made, True)


# Other layouts --------------------------------------------------------------------------------------------------------


def by_rank_to_by_expert(tensors: dict[str, Tensor], experts: int = 4) -> dict[str, Tensor]:
    return {
        name: value.reshape(value.shape[0], -1, experts).transpose(1, 2).reshape(value.shape).contiguous()
        if ".experts" in name and "lora_B" in name else value for name, value in tensors.items()
    }  # fmt: skip


def test_an_unsloth_adapter_has_lora_b_expert_by_expert(work: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, a, _ = work
    marked = {"auto_mapping": {"unsloth_fixed": True}}
    error = raised(AdapterError, lambda: loaded(base, {"a": rewritten(a, tmp_path / "marked", **marked)}))
    assert all('stacked_lora_B in adapter_config.json to "unsloth" or "peft"' in problem for problem in error.problems)
    assert len(error.problems) >= 2
    unsloth = rewritten(a, tmp_path / "unsloth", by_rank_to_by_expert, stacked_lora_B="unsloth", **marked)
    with loaded(base, {"a": unsloth, "peft": rewritten(a, tmp_path / "peft", stacked_lora_B="peft", **marked)}) as model:
        expected = of_peft(base, a)
        assert max(gap(answered(model, "a"), expected), gap(answered(model, "peft"), expected)) < NEAR


LAYERS = {"gate": ("gate_proj", "w1"), "up": ("up_proj", "w3"), "down": ("down_proj", "w2")}


def single_adapter(
    base: Path, folder: Path, alias: int, *, ranks: bool = True, experts: tuple[int, ...] = (0, 1, 3), shared: str = ""
) -> dict[str, Tensor]:
    """Write one pair for each linear layer of some experts; return the change of each stack in float64. shared: A or B, where all
    have one."""
    generator, tensors, changes = torch.Generator().manual_seed(alias), {}, {}
    targets = [f"{expert}.{names[alias]}" for expert in experts for names in LAYERS.values()]
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": targets}
    for path, module in load(base).named_modules():
        if not path.endswith(".experts"):
            continue
        is_transposed = module.is_transposed
        for name, roles in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            stack = module.get_parameter(name)
            high, wide = (stack.shape[2], stack.shape[1]) if is_transposed else (stack.shape[1], stack.shape[2])
            change = torch.zeros(stack.shape[0], high, wide, dtype=torch.float64)
            for number, role in enumerate(roles):
                size = high // len(roles)
                turns = slice(number, None, 2) if len(roles) == 2 and not module.is_concatenated else slice(
                    number * size, (number + 1) * size
                )  # fmt: skip
                A, B = None, None
                for expert in experts:
                    rank = 3 if ranks and expert == 3 and role == "down" else 2
                    A = A.clone() if shared == "A" and A is not None else 0.2 * torch.randn(rank, wide, generator=generator)
                    B = B.clone() if shared == "B" and B is not None else 0.2 * torch.randn(size, rank, generator=generator)
                    own = f"{path}.{expert}.{LAYERS[role][alias]}"
                    own = own.replace("mlp.block_sparse_moe", "block_sparse_moe")
                    tensors |= {f"base_model.model.{own}.lora_A.weight": A, f"base_model.model.{own}.lora_B.weight": B}
                    change[expert, turns] = 3 / rank * B.double() @ A.double()
            changes[f"{path}.{name}"] = change.mT if is_transposed else change
    if ranks:
        config["rank_pattern"] = {rf"experts\.3\.{LAYERS['down'][alias]}": 3}
    write_tensors(folder, tensors, config)
    return changes


@pytest.mark.parametrize(("work", "alias"), halved(WORKS, (0, 1), slow=("gemma4_moe",)), indirect=["work"])
def test_pairs_of_single_experts_reach_their_part_of_the_stack(work: tuple[Path, Path, Path], alias: int, tmp_path: Path) -> None:
    base = work[0]
    expected = with_changes(base, single_adapter(base, tmp_path / "one", alias))
    with loaded(base, {"one": tmp_path / "one", "b": work[2]}) as model:
        requests = [{"prompt": IDS, "adapter": name} for name in ("one", "b", None)]
        found = [logprobs(one) for one in model.batch(requests, rows=3, max_new_tokens=2, logprobs=8)]
    plain = of_base(base)
    assert max(gap(found[0], expected), gap(found[1], of_peft(base, work[2])), gap(found[2], plain)) < NEAR
    assert gap(found[0], plain) > 1e-2
    trimtab.merge(base, tmp_path / "merged", adapters={"one": tmp_path / "one"}, check=True)
    assert float((of_model(load(tmp_path / "merged")) - expected).abs().max()) < NEAR


def apart(shared: str = "") -> Any:
    """Return a change of a file's pairs of single experts into three dimensions. shared: A or B, where all have one."""

    def changed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, dict[int, Tensor]] = {}
        for key, value in tensors.items():
            head, tail = key.split(".experts.")
            expert, own, rest = tail.split(".", 2)
            found.setdefault(f"{head}.experts.{own}.{rest}", {})[int(expert)] = value
        pairs = {key: torch.stack([of[expert] for expert in sorted(of)]) for key, of in found.items()}
        return {key: value[:1] if shared and f"lora_{shared}" in key else value for key, value in pairs.items()}

    return changed


def test_a_half_that_all_experts_share_completes_their_pairs(work: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Megatron-Bridge's `experts.gate_proj.lora_A` [1, R, D_in] beside `experts.3.gate_proj.lora_B`."""
    base = work[0]
    expected = with_changes(base, single_adapter(base, tmp_path / "one", 0, ranks=False, experts=(0, 1, 2, 3), shared="A"))

    def halves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        every = apart("A")(tensors)
        return {key: value for key, value in every.items() if "lora_A" in key} | {
            key: value for key, value in tensors.items() if "lora_B" in key
        }

    halved = rewritten(tmp_path / "one", tmp_path / "halves", halves, target_modules="all-linear")
    with loaded(base, {"halves": halved}) as model:
        assert gap(answered(model, "halves"), expected) < NEAR
        shares = {share.name: share for share in model.memory_shares()}
        assert shares["adapters"].measured_bytes <= 1.05 * shares["adapters"].planned_bytes
    trimtab.merge(base, tmp_path / "merged", adapters={"one": halved}, check=True)
    assert float((of_model(load(tmp_path / "merged")) - expected).abs().max()) < NEAR


@pytest.mark.parametrize(
    ("work", "shared", "alias"), halved(WORKS, ("", "A", "B"), (0, 1), slow=("gemma4_moe",)), indirect=["work"]
)
def test_linear_layers_of_all_experts_have_three_dimensions(
    work: tuple[Path, Path, Path], shared: str, alias: int, tmp_path: Path
) -> None:
    """SGLang's `experts.gate_proj` [E, R, D_in], and Tinker's `experts.w1`, of which all experts share A or B."""
    base = work[0]
    every = (0, 1, 2, 3)
    expected = with_changes(base, single_adapter(base, tmp_path / "one", alias, ranks=False, experts=every, shared=shared))
    rewritten(tmp_path / "one", tmp_path / "apart", apart(shared), target_modules="all-linear")
    with loaded(base, {"apart": tmp_path / "apart", "b": work[2]}) as model:
        requests = [{"prompt": IDS, "adapter": name} for name in ("apart", "b", None)]
        found = [logprobs(one) for one in model.batch(requests, rows=3, max_new_tokens=2, logprobs=8)]
        shares = {share.name: share for share in model.memory_shares()}
        assert shares["adapters"].measured_bytes <= 1.05 * shares["adapters"].planned_bytes
    plain = of_base(base)
    assert max(gap(found[0], expected), gap(found[1], of_peft(base, work[2])), gap(found[2], plain)) < NEAR
    assert gap(found[0], plain) > 1e-2
    trimtab.merge(base, tmp_path / "merged", adapters={"one": tmp_path / "apart"}, check=True)
    assert float((of_model(load(tmp_path / "merged")) - expected).abs().max()) < NEAR


def test_a_stack_with_three_dimensions_and_unsloths_matrices_are_pefts_pair(work: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """`experts.down_proj` [E, R, D_in] as vLLM reads it, and `experts.down_projs.3` of gpt-oss in Unsloth's 4 bits."""
    base, _, b = work
    expected = of_peft(base, b)

    def per_expert(tensors: dict[str, Tensor]) -> Iterator[tuple[str, str, Tensor]]:
        for key, value in tensors.items():
            if ".experts.lora_A" in key or ".experts.lora_B" in key:
                head, role = key.split(".lora_")
                own = value.reshape(4, 3, -1) if role[0] == "A" else value.reshape(value.shape[0], 3, 4).permute(2, 0, 1)
                yield head, role, own

    def three(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = {key: value for key, value in tensors.items() if ".experts." not in key}
        return kept | {f"{head}.down_proj.lora_{role}": own.contiguous() for head, role, own in per_expert(tensors)}

    def matrices(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = {key: value for key, value in tensors.items() if ".experts." not in key}
        return kept | {
            f"{head}.down_projs.{expert}.lora_{role}": own[expert].contiguous()
            for head, role, own in per_expert(tensors) for expert in range(4)
        }  # fmt: skip

    pattern = {"alpha_pattern": {r"experts\.down_projs?(\.\d)?": 3}, "target_parameters": None}
    targets = [*json.loads((b / "adapter_config.json").read_text())["target_modules"], *(f"down_projs.{n}" for n in range(4))]
    given = {
        "three": rewritten(b, tmp_path / "three", three, **pattern),
        "matrices": rewritten(b, tmp_path / "matrices", matrices, **pattern, target_modules=targets),
    }
    with loaded(base, given) as model:
        assert max(gap(answered(model, name), expected) for name in given) < NEAR


# Refused --------------------------------------------------------------------------------------------------------------


def test_a_pair_that_fits_no_stack_is_refused_before_loading(work: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, a, _ = work

    def problems(name: str, change: Any, **config: Any) -> str:
        with pytest.raises(AdapterError) as caught:
            trimtab.plan(base, adapters={"x": str(rewritten(a, tmp_path / name, change, **config))}, quant="none", device="cpu")
        assert caught.value.path == str(tmp_path / name)
        return " ".join(caught.value.problems)

    def each(change: Any, *, renames: str = "", but: str = " ") -> Any:
        def changed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            stem = f"experts.{renames}" if renames else "experts.base_layer"
            kept = {key.replace("experts.base_layer", stem): value for key, value in tensors.items() if but not in key}
            return {key: change(key, value) if ".experts" in key else value for key, value in kept.items()}

        return changed

    def same(_: str, value: Tensor) -> Tensor:
        return value

    more = each(lambda key, value: torch.cat([value, value], int("lora_B" in key)))
    assert "it was made for 8 experts, the model has 4" in problems("more", more)
    named = each(same, renames="gate_up_proj", but="experts.lora")
    assert "the order of lora_B's columns is ambiguous" in problems("named", named, target_parameters=None)
    assert "use_dora: PEFT has no such adapter on stacks" in problems("dora", None, use_dora=True)
    vector = {"base_model.model.model.layers.0.mlp.experts.lora_magnitude_vector": torch.ones(4)}
    assert "DoRA on fused experts" in problems("vector", lambda tensors: tensors | vector)
    assert "experts has 4 experts" in problems("seventh", each(same, renames="7.w1"))
    assert "names no part of the stacked experts" in problems("other", each(same, renames="0.x"))
    assert "values are NaN" in problems("nan", each(lambda _, value: value * torch.nan))


def test_pairs_of_all_experts_that_fit_no_layout_are_refused(work: tuple[Path, Path, Path], tmp_path: Path) -> None:
    single_adapter(work[0], tmp_path / "one", 1, ranks=False, experts=(0, 1, 2, 3))

    def problems(name: str, change: Any) -> list[str]:
        folder = rewritten(tmp_path / "one", tmp_path / name, lambda tensors: change(apart()(tensors)), target_modules="all-linear")
        error = raised(AdapterError, trimtab.plan, work[0], adapters={"x": str(folder)}, quant="none", device="cpu")
        return list(error.problems)

    more = problems("eight", lambda tensors: {key: torch.cat([value, value]) for key, value in tensors.items()})
    assert len(more) == 6 and all(one.endswith("it was made for 8 experts, the model has 4") for one in more)
    flat = problems("flat", lambda tensors: {key: value.flatten(0, 1) for key, value in tensors.items()})
    assert len(flat) == 6 and all("has pairs of [8, " in one and "expected [4, 2, " in one for one in flat)
    half = problems("half", lambda tensors: {key: value for key, value in tensors.items() if "w1.lora_B" not in key})
    assert len(half) == 2 and all("experts.w1: lora_A or lora_B of" in one for one in half)


def test_experts_without_a_pair_that_target_modules_names_are_refused(work: tuple[Path, Path, Path], tmp_path: Path) -> None:
    single_adapter(work[0], tmp_path / "one", 1)
    fewer = rewritten(tmp_path / "one", tmp_path / "fewer", target_modules=["w1", "w2", "w3"])
    (problem,) = raised(AdapterError, trimtab.plan, work[0], adapters={"x": str(fewer)}, quant="none", device="cpu").problems
    assert problem.startswith("6 layers of experts have no pair") and all(f"experts.2.w{n}" in problem for n in "123")
    named = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    fewer = rewritten(tmp_path / "one", tmp_path / "named by stacks", **named)
    with pytest.raises(AdapterError, match="6 layers of experts have no pair"):
        trimtab.plan(work[0], adapters={"x": str(fewer)}, quant="none", device="cpu")


@pytest.mark.parametrize("saved", [("experts",), ("experts.1.w1",)])
def test_lora_on_experts_that_are_also_saved_is_refused(saved: tuple[str], work: tuple[Path, Path, Path], tmp_path: Path) -> None:
    single_adapter(work[0], tmp_path / "one", 1)
    both = rewritten(work[1] if saved == ("experts",) else tmp_path / "one", tmp_path / "both", modules_to_save=[*saved])
    error = raised(AdapterError, trimtab.plan, work[0], adapters={"x": str(both)}, quant="none", device="cpu")
    told = [problem for problem in error.problems if "LoRA on experts that modules_to_save replaces" in problem]
    assert len(told) == 2 and all(saved[0] in problem for problem in told)
