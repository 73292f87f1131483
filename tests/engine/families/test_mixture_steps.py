"""Is a captured step of a mixture what its modules compute: packed experts and 16 bits, adapters on experts of some rows?"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

import trimtab
from tests import pico
from tests.cuda_on_cpu import run
from tests.engine.decode.test_graphs import joined, replayed  # noqa: F401 - replayed is a fixture
from tests.engine.families import test_matrix
from tests.engine.families.test_decoders import ASKED, TOLERANCE, compare
from tests.engine.kernels.test_fused_kernels import on_cpu  # noqa: F401 - a fixture
from tests.engine.lora.test_routers import router_adapter
from tests.engine.prefill.test_packed_prompts import both, packing, together
from tests.engine.prefill.test_prefill import REQUEST, answered, through
from tests.engine.prefill.test_prefill import replayed as prompts_replayed  # noqa: F401 - a fixture
from tests.long_runs import halved
from tests.merging.changes.test_merge_experts import BOTH, stack_adapter
from trimtab.engine.batch.batch import Batch
from trimtab.engine.batched_lora import table
from trimtab.engine.families import families
from trimtab.engine.kernels import delta_rule, experts, gemm4
from trimtab.engine.prefill.prefill import PrefillRunner
from trimtab.errors import DeviceError

FAMILIES = ("qwen3_moe", "gemma4_moe")
KINDS = ("nf4", "nf4-dq", "int8", "16bit")


def loaded(family: str, folder: Path, kind: str, slots: int = 0, seed: int = 0, **options: Any) -> Any:
    base = pico.build(family, folder / "base", seed=seed)
    adapters = {"a": pico.adapter(base, folder / "a", rank=4), "b": stack_adapter(base, folder / "b", list(BOTH))}
    given = {"adapters": adapters, "device": "cpu", "quant": "nf4-dq", "context": 96, "experts": kind} | options
    plan = trimtab.plan(base, **given)
    return trimtab.load(replace(plan, execution=replace(plan.execution, expert_slots=slots)))


def with_kernels(kernels: Any, model: Any) -> None:
    kernels.experts = run.CpuModule(experts.source(), experts.NAMES)
    kernels.experts.variant_names = experts.NAMES
    for shape in {one.shape for one in families.describe(model.hf_model).deltas.values()}:
        kernels.delta = run.CpuModule(delta_rule.source(), delta_rule.NAMES, options=delta_rule.options(shape, torch.bfloat16))


@pytest.mark.parametrize(("family", "kind"), halved(FAMILIES, KINDS, slow=("mixtral", "qwen3_5_moe", "glm4_moe", "qwen3_vl_moe")))
def test_a_step_of_mixed_rows_is_the_modules(family, kind, on_cpu, replayed, tmp_path):  # noqa: F811
    """Rows with an adapter on attention, on experts, and none: one capture, nothing read on the host."""
    with loaded(family, tmp_path, kind) as model:
        with_kernels(on_cpu, model)
        expected, batch = (joined(model, way, ASKED, rows=4) for way in ("eager", "fused"))
        compare(expected, batch, 2, 2 * TOLERANCE)
        assert batch.steps.captures == 1 and not batch.steps.fallbacks
        names = on_cpu.experts.launches
        mixtures = sum(layer.experts is not None for layer in families.describe(model.hf_model).layers)
        assert names.count("experts_gate_up") >= mixtures and names.count("experts_low") == 2 * names.count("experts_gate_up")


SHARED = r".*\.(self_attn\.q_proj|shared_experts?\.(gate|up|down)_proj|shared_expert_gate)"
WITH_SHARED = ["qwen3_5_moe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2_moe", "glm4_moe"))]


@pytest.mark.parametrize("rows", [4, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", WITH_SHARED)
def test_shared_experts_are_products_of_the_step(family, rows, on_cpu, replayed, tmp_path):  # noqa: F811
    """They and their gates, with an adapter on all of them, in steps and in prompts."""
    adapter = {"s": pico.adapter(pico.build(family, tmp_path / "base"), tmp_path / "s", targets=SHARED)}
    asked = [("s" if number % 2 else None, tokens, {}) for number, (_, tokens, _) in enumerate(ASKED * (rows // len(ASKED)))]
    with loaded(family, tmp_path, "nf4", adapters=adapter) as model:
        with_kernels(on_cpu, model)
        if rows > 8:
            on_cpu.rows = run.CpuModule(gemm4.source(), gemm4.NAMES)
            on_cpu.rows.variant_names = gemm4.NAMES
        decoder = families.describe(model.hf_model)
        of_shared = [leaf for layer in decoder.layers if layer.experts for group in layer.experts.products for leaf in group]
        assert of_shared and all(leaf.quant_kind != "none" for leaf in of_shared)
        # PEFT 0.21 takes the names of GLM's for those of experts.
        assert all(("s" in leaf.adapters) is (family != "glm4_moe") for leaf in of_shared)
        expected, batch = (joined(model, way, asked, rows=rows) for way in ("eager", "fused"))
        compare(expected, batch, 2, 2 * TOLERANCE)
        expected, prompts = (Batch(model, rows=1, decode=way) for way in ("eager", "fused"))
        expected.prompts, prompts.prompts = PrefillRunner(expected, "eager"), PrefillRunner(prompts, "static", (32,))
        wanted = through(expected, model.prepare(ASKED[0][1]), adapter="s").logits
        # From here on their own modules fail.
        for name, part in model.hf_model.named_modules():
            if re.search(r"\.shared_experts?$", name):
                part.forward = None
        batch.step()
        found = through(prompts, model.prepare(ASKED[0][1]), adapter="s").logits
        assert (found - wanted).abs().max() <= 2 * TOLERANCE * wanted.abs().max()
        assert batch.steps.captures == 1 and not batch.steps.fallbacks


@pytest.mark.parametrize("family", WITH_SHARED)
def test_shared_experts_say_what_stock_says(family, tmp_path, monkeypatch):
    """In float32, rows with two adapters on them and their gates, and without."""
    monkeypatch.setitem(test_matrix.KINDS, "shared", {"targets": SHARED})
    test_matrix.test_rows_say_what_stock_says(family, "resident", "shared", tmp_path)


@pytest.mark.parametrize(("family", "kind"), [*halved(FAMILIES, ["16bit", "nf4"]), ("qwen3_moe", "host")])
def test_a_prompt_is_the_modules_and_captured(family, kind, on_cpu, replayed, prompts_replayed, tmp_path):  # noqa: F811
    """More tokens than a step has rows: pairs are sorted by experts on the device, of 16 bits where an adapter changes experts, or
    where torch's own product reads their counts on the host."""
    with loaded(family, tmp_path, "16bit" if kind == "host" else kind, context=192) as model:
        with_kernels(on_cpu, model)
        if kind == "host":
            model.adapter_store.set_groups_on_host()
        expected, batch = Batch(model, rows=1, decode="eager"), Batch(model, rows=1, decode="fused")
        expected.prompts, batch.prompts = PrefillRunner(expected, "eager"), PrefillRunner(batch, "static", (32, 128))
        batch.prompts.captures = True
        found, launches = {}, on_cpu.experts.launches
        for name in ("a", None, "b", "b", "b"):
            before = len(launches)
            wanted, found[name] = (
                through(one, model.prepare(list(range(5, 75))), adapter=name).logits for one in (expected, batch)
            )
            assert (found[name] - wanted).abs().max() <= 2 * TOLERANCE * wanted.abs().max(), name
            assert ("experts_sort" in launches[before:]) is (kind != "16bit" or name == "b")
            assert ("experts_many_low" in launches[before:]) is (name == "b")
        assert (found["b"] - found[None]).abs().max() > 8 * TOLERANCE * wanted.abs().max()
        assert [one.replays for one in prompts_replayed] == [2]  # of "b": when it is captured, and the third pass
        wanted, short = (through(one, model.prepare(list(range(5, 25))), adapter="b").logits for one in (expected, batch))
        assert (short - wanted).abs().max() <= 2 * TOLERANCE * wanted.abs().max() and launches[-1] == "experts_down"


def negated(adapter: Path, folder: Path) -> Path:
    """Write the adapter with B of the other sign."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    shutil.copytree(adapter, folder)
    turned = {name: -value if "lora_B" in name else value for name, value in tensors.items()}
    save_file(turned, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def test_adapters_of_one_layout_share_a_prompts_graph(on_cpu, replayed, prompts_replayed, tmp_path):  # noqa: F811
    """What they change of experts is in a table; one that is loaded again under its name is another."""
    with loaded("qwen3_moe", tmp_path, "nf4", context=192) as model:
        with_kernels(on_cpu, model)
        model.load_adapter("c", negated(tmp_path / "b", tmp_path / "c"))
        expected, batch = Batch(model, rows=1, decode="eager"), Batch(model, rows=1, decode="fused")
        expected.prompts, batch.prompts = PrefillRunner(expected, "eager"), PrefillRunner(batch, "static", (128,))
        batch.prompts.captures = True
        asked, found = list(range(5, 75)), {}
        for name in ("b", "c", "b", "c", None, "again", "c"):
            if name == "again":
                model.unload_adapter("c")
                model.load_adapter("c", tmp_path / "b")
                name = "c"
            wanted, found[name] = (through(one, model.prepare(asked), adapter=name).logits for one in (expected, batch))
            assert (found[name] - wanted).abs().max() <= 2 * TOLERANCE * wanted.abs().max(), name
            if name == "c":
                assert len(batch.prompts.layouts) == 1
        assert [one.replays for one in prompts_replayed] == [5] and torch.equal(found["c"], found["b"])
        for name in ("b", "c"):
            model.unload_adapter(name)
        wanted, plain = (through(one, model.prepare(asked)).logits for one in (expected, batch))
        assert (plain - wanted).abs().max() <= 2 * TOLERANCE * wanted.abs().max()
        assert (found["b"] - plain).abs().max() > 8 * TOLERANCE * wanted.abs().max()


@pytest.mark.parametrize("why", ["tables", "kernels"])
def test_a_prompt_whose_adapter_no_kernel_adds_is_not_captured(why, on_cpu, replayed, prompts_replayed, tmp_path, monkeypatch):  # noqa: F811
    with loaded("qwen3_moe", tmp_path, "16bit", context=192) as model:
        with_kernels(on_cpu, model)
        expected, batch = Batch(model, rows=1, decode="eager"), Batch(model, rows=1, decode="fused")
        expected.prompts, batch.prompts = PrefillRunner(expected, "eager"), PrefillRunner(batch, "static", (128,))
        batch.prompts.captures = True
        if why == "kernels":
            on_cpu.experts = None
        else:
            monkeypatch.setattr(table, "why_not_experts", lambda adapter: "has more than two changes of one stack")
        for _ in range(3):
            wanted, found = (through(one, model.prepare(list(range(5, 75))), adapter="b").logits for one in (expected, batch))
            assert (found - wanted).abs().max() <= 2 * TOLERANCE * wanted.abs().max()
        assert not prompts_replayed and any("are chosen on the host" in one.why for one in batch.steps.fallbacks)


@pytest.mark.parametrize(("family", "kind"), halved(FAMILIES, ["nf4", "16bit"], slow=("qwen3_5_moe",)))
def test_a_step_of_streamed_layers_is_the_resident_one(family, kind, on_cpu, replayed, tmp_path):  # noqa: F811
    """Stacks are views of a staging buffer, which the next layer's copy fills."""
    scores = []
    for tier in ("resident", "stream"):
        with loaded(family, tmp_path / tier, kind, place={"model*layers.*": tier}) as model:
            assert tier in {row.tier for row in model.plan.placements}
            with_kernels(on_cpu, model)
            assert len(families.describe(model.hf_model).mixtures()) == 1
            batch = joined(model, "fused", ASKED, rows=4)
            scores.append(batch.logits().clone())
            assert on_cpu.experts.launches
    assert torch.equal(*scores)


WITH_SLOTS = [("qwen3_moe", "nf4"), ("gemma4_moe", "nf4-dq"), ("mixtral", "int8"), ("glm4_moe", "nf4"), ("qwen3_5_moe", "nf4-dq")]


@pytest.mark.parametrize(("mixture", "slots"), halved(WITH_SLOTS, [3, 1], slow=[("qwen3_vl_moe", "nf4")]))
def test_answers_with_experts_in_host_memory_are_the_resident_ones(mixture, slots, on_cpu, replayed, tmp_path):  # noqa: F811
    """Rows with adapters on experts arrive and leave; fewer slots than a token uses, and more; beside shared experts too. Prompts
    of packed experts too."""
    scores = []
    for number in (0, slots):
        with loaded(mixture[0], tmp_path / str(number), mixture[1], slots=number) as model:
            with_kernels(on_cpu, model)
            launched = len(on_cpu.experts.launches)
            batch, seen = joined(model, "fused", ASKED, rows=4), []
            batch.steps.run = lambda state, run=batch.steps.run, seen=seen: seen.append((made := run(state))[0].clone()) or made
            batch.step()
            for name, tokens in (("b", 70), (None, 40), ("a", 9)):
                batch.leave(batch.active[1])
                batch.join(through(batch, model.prepare(list(range(5, 5 + tokens))), adapter=name))
                batch.step()
            batch.step()
            scores.append(torch.cat(seen))
            assert ("experts_fetch" in on_cpu.experts.launches[launched:]) is bool(number)
            near = [vars(one)["near"] for one in model.hf_model.modules() if "near" in vars(one)]
            assert all(0 < one.slots == number and int(one.clock) > 1 for one in near) and bool(near) is bool(number)
    assert torch.equal(*scores)


@contextmanager
def failing(after: int) -> Iterator[None]:
    """Let memory end at this launch of an expert's kernels, at none for 0."""
    real, left = experts._launch, [after]

    def launch(*given: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise torch.OutOfMemoryError("planted")
        real(*given)

    with patch.object(experts, "_launch", launch):
        yield


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_rows_that_come_and_go_at_random_answer_as_with_resident_experts(seed, on_cpu, replayed, tmp_path):  # noqa: F811
    """Joins of prompts of any length, steps and departures in one random order, with few slots: every score has its bits. Some
    prompts end within a fetch; so do some steps, which are done again, and some that were queued."""
    chance = random.Random(seed)
    family, slots = ("qwen3_moe", "gemma4_moe")[seed % 2], 1 + seed % 3
    asked: list[Any] = [("join", chance.choice((3, 20, 66, 80)), chance.choice((None, "a", "b"))) for _ in range(3)]
    ends = [("fail", tokens, "b", launch) for tokens in (20, 80) for launch in range(1, 8)]
    for _ in range(50 if seed else 33):
        steps = ("step", 0), ("step", chance.choice((2, 3, 7, 8, 9, 10)))  # within copies of a step, and of one that is queued
        asked.append(chance.choice((*steps, ("leave", chance.random()), *asked[:2], chance.choice(ends))))
    scores, failed, repeated = [], 0, 0
    for number in (0, slots):
        with loaded(family, tmp_path / str(number), "nf4", slots=number) as model:
            with_kernels(on_cpu, model)
            batch, seen = Batch(model, rows=4, decode="fused"), []
            batch.prompts = PrefillRunner(batch, "static", (32, 128))
            for what, *given in asked:
                if what == "join" and len(batch.active) < 4:
                    batch.join(through(batch, model.prepare(list(range(5, 5 + given[0]))), adapter=given[1]))
                elif what == "fail" and number:
                    with failing(given[2]), suppress(torch.OutOfMemoryError):
                        through(batch, model.prepare(list(range(5, 5 + given[0]))), adapter=given[1])
                        pytest.fail("the planted end of memory was not met")
                    failed += 1
                elif what == "leave" and len(batch.active) > 1:
                    batch.leave(batch.active[int(given[0] * len(batch.active))])
                elif what == "step" and batch.active:
                    with failing(given[0] if number else 0):
                        try:
                            batch.step()
                        except (torch.OutOfMemoryError, DeviceError):  # of a step, and of its capture
                            batch.step()
                            repeated += 1
                    seen.append(batch.logits().clone())
            scores.append(torch.cat(seen))
    assert failed > 3 and repeated and len(scores[0]) > 20 and torch.equal(*scores)


@pytest.mark.parametrize("kind", ["nf4", "16bit"])
def test_a_router_of_a_later_adapter_is_used(kind, on_cpu, replayed, tmp_path):  # noqa: F811
    """A batch's description was made before: the adapter puts another module in the router's place."""
    with loaded("qwen3_moe", tmp_path, kind) as model:
        with_kernels(on_cpu, model)
        plain, expected, batch = (joined(model, way, ASKED[1:2], rows=2) for way in ("eager", "eager", "fused"))
        batch.steps.fused_step()
        model.load_adapter("r", router_adapter("qwen3_moe", tmp_path / "base", tmp_path / "r", strength=1.0))
        for one, name in ((plain, None), (expected, "r"), (batch, "r")):
            one.join(through(one, model.prepare(ASKED[0][1]), adapter=name))
        without, wanted, found = (one.logits() for one in (plain, expected, batch))
        assert (found - wanted).abs().max() <= 2 * TOLERANCE * wanted.abs().max()
        assert (without - wanted)[1].abs().max() > 8 * TOLERANCE * wanted[1].abs().max()


def test_packed_experts_without_their_kernels_are_not_captured(on_cpu, replayed, tmp_path):  # noqa: F811
    with loaded("qwen3_moe", tmp_path, "nf4") as model:
        with pytest.raises(DeviceError, match="the experts of a token are chosen on the host"):
            joined(model, "fused", ASKED[1:2])
        batch = joined(model, "auto", ASKED[1:2])
        batch.step()
        assert not batch.steps.captures and any("chosen on the host" in one.why for one in batch.steps.fallbacks)


def test_batch_invariant_rows_without_the_fused_step_are_computed_alone(on_cpu, replayed, tmp_path, monkeypatch):  # noqa: F811
    """An adapter that replaces a norm takes the fused step away; the graph of all rows then reads experts on the host."""
    with loaded("qwen3_moe", tmp_path, "nf4", batch_invariant=True, batch=2) as model:
        with_kernels(on_cpu, model)
        expected, batch = (joined(model, way, ASKED[1:2], rows=2) for way in ("eager", "auto"))
        monkeypatch.setattr(batch.steps, "fused_step", lambda: None)
        assert batch.steps.is_captured
        wanted, found = expected.logits(), batch.logits()
        assert (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max()


def test_prompts_of_one_pass_find_adapters_on_experts_in_tables(on_cpu, replayed, prompts_replayed, tmp_path, monkeypatch):  # noqa: F811
    """Each row has many tokens; the adapter of one changes experts, and the passes are captured."""
    names, counts = ("b", None, "a", "b"), (40, 33, 47, 64)
    with loaded("qwen3_moe", tmp_path, "nf4-dq", context=192, batch=5) as model:
        with_kernels(on_cpu, model)
        alone = Batch(model, rows=1, decode="eager")
        alone.prompts = PrefillRunner(alone, "eager")
        asked = [list(range(5 + place, 5 + place + count)) for place, count in enumerate(counts)]
        expected = [answered(alone, model.prepare(one), adapter=name) for one, name in zip(asked, names, strict=True)]
        batch = packing(Batch(model, rows=5, decode="fused"), monkeypatch)
        for _ in range(3):
            before = len(on_cpu.experts.launches)
            prompts = [batch.begin(model.prepare(one), REQUEST, adapter=name) for one, name in zip(asked, names, strict=True)]
            assert together(batch, prompts) == 1
            launches = on_cpu.experts.launches[before:]
            assert launches.count("experts_many_low") == 2 * launches.count("experts_sort") > 0
            for found, wanted in zip(both(batch, prompts), expected, strict=True):
                assert (found - wanted).abs().max() <= 2 * TOLERANCE * wanted.abs().max()
        assert [one.replays for one in prompts_replayed] == [2]


def test_kernels_compute_no_prompt_over_odd_experts(on_cpu, replayed, prompts_replayed, tmp_path, monkeypatch):  # noqa: F811
    """As an older plan asks on a card where torch's product reads on the host: steps by kernels, prompts by the modules."""
    config = pico._CONFIGS["qwen3_moe"][1]()
    config.moe_intermediate_size = 72
    monkeypatch.setitem(pico._CONFIGS, "qwen3_moe", ("Qwen3MoeForCausalLM", lambda: config))
    with loaded("qwen3_moe", tmp_path, "16bit", seed=72, context=192) as model:  # the seed: no checkpoint of another width
        with_kernels(on_cpu, model)
        model.adapter_store.set_groups_on_host()
        expected, batch = Batch(model, rows=1, decode="eager"), Batch(model, rows=1, decode="fused")
        expected.prompts, batch.prompts = PrefillRunner(expected, "eager"), PrefillRunner(batch, "static", (128,))
        batch.prompts.captures = True
        for _ in range(3):
            wanted, found = (through(one, model.prepare(list(range(5, 75)))).logits for one in (expected, batch))
            assert (found - wanted).abs().max() <= 2 * TOLERANCE * wanted.abs().max()
        assert not prompts_replayed
