"""Loading: every family in every format and tier gives the stock stack's own numbers; no processor is looked for twice."""

from __future__ import annotations

import gc
import os
from dataclasses import FrozenInstanceError, replace
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import trimtab
from tests import pico, stock
from tests.long_runs import FIRST, crossed
from tests.raised import raised, raising, refused
from trimtab.engine import model as model_module
from trimtab.engine.layers import leaves
from trimtab.engine.loader import load
from trimtab.engine.tiers import streaming
from trimtab.engine.tiers.streaming import in_pass
from trimtab.errors import CheckpointError, DoesNotFitError, RequestError
from trimtab.planning.values.copy_order import CopyOrder, Piece
from trimtab.request import GenerateRequest

QUANTS = ("nf4-dq", "int8", "none", "nf4", "fp4")
STORED = ("nf4", "nf4-dq", "fp4", "fp4-dq", "int8")  # in files of stock, resident and streamed
DEVICE = os.environ.get("TRIMTAB_TEST_DEVICE", "cpu")  # tests/gpu runs this file on "cuda:0"
OLD = tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 11)


@cache
def checkpoint(family: str, folder: Path) -> Path:
    return pico.build(family, folder / family)


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pico")
    return lambda family: checkpoint(family, folder)


def plan_of(folder: Path, device: str = DEVICE, **options):
    return trimtab.plan(folder, device=device, context=64, images=1, audio_s=1.0, **options)


def inputs_of(family: str, config, device: str = DEVICE):
    """Return forward arguments with pixels and sound in the model's dtype, as the chat room prepares them.

    Stock's quantized vision tower computes in the dtype of the pixels it is given, so both routes get the same.
    """
    found = pico.inputs(family, config)
    return {k: v.to(device, torch.bfloat16 if v.is_floating_point() else None) for k, v in found.items()}


def forward(model, family: str) -> torch.Tensor:
    return stock.logits(model.hf_model, inputs_of(family, model.hf_model.config, str(model.device)))


def host_noise(folder: Path, family: str, quant: str, reference: torch.Tensor) -> float:
    """Return how far the CPU's own kernels are from the reference: the floor for what the host tier may differ by."""
    if DEVICE == "cpu":
        return 0.0
    with trimtab.load(plan_of(folder, device="cpu", quant=quant, place={"*": "resident"})) as model:
        return 2 * (forward(model, family) - reference.cpu()).abs().max().item()


def tiers_of(folder: Path, quant: str):
    """Yield (name, plan) of every tier that some block of the model allows."""
    for tier in ("stream", "disk", "host", "gather"):
        try:
            plan = plan_of(folder, quant=quant, place={"*": tier})
        except RequestError as exc:
            assert tier == "gather", exc  # only a tied vocabulary table leaves nothing to gather
            continue
        yield tier, plan
        if tier == "gather":
            placements = tuple(replace(p, home="file") if p.tier == "gather" else p for p in plan.placements)
            yield "gather from the file", replace(plan, placements=placements)


@pytest.mark.parametrize(("family", "quant"), crossed(pico.FAMILIES, QUANTS, first=["llama"], rest=1))
def test_resident_equals_stock_and_every_tier_equals_resident(family, quant, built):
    folder = built(family)
    with trimtab.load(plan_of(folder, quant=quant, place={"*": "resident"})) as model:
        reference = forward(model, family)
        assert torch.equal(forward(model, family), reference), "a second forward differs"
    assert torch.isfinite(reference).all()
    # transformers 5.6.2 casts pixels to the packed weight's uint8 and fails on quantized audio: no stock answer there.
    if not (OLD and quant != "none" and family.startswith("gemma4")):
        expected = stock.logits(stock.load_stock(folder, quant, device=DEVICE), inputs_of(family, model_config(folder)))
        assert torch.equal(reference, expected), (reference - expected).abs().max()
    seen = []
    for name, plan in tiers_of(folder, quant):
        with trimtab.load(plan) as model:
            if model.streamer is not None:
                model.streamer.poison = True
            floor = host_noise(folder, family, quant, reference) if name == "host" else 0.0
            for _ in range(2):
                difference = (forward(model, family) - reference).abs().max().item()
                assert difference <= floor, (name, difference, floor)
        seen.append(name)
    assert {"stream", "disk", "host"} <= set(seen)


@pytest.mark.parametrize(("family", "slots"), crossed(pico.FAMILIES, [1, 2], first=["gemma4"], rest=1))
def test_a_pass_that_is_copied_piece_by_piece_equals_resident(family, slots, built):
    """As a captured pass copies: pieces of the next block are written over this one while the rest of it is computed with."""

    def scores(model) -> torch.Tensor:
        ids = torch.arange(3, 12, device=model.device)[None]
        return stock.logits(model.hf_model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    folder = built(family)
    with trimtab.load(plan_of(folder, quant="nf4", place={"*": "resident"})) as model:
        reference = scores(model)
    with trimtab.load(plan_of(folder, quant="nf4", place={"*": "stream"})) as model:
        streamer = model.streamer
        streamer.slots, streamer.poison = streamer.slots[:slots], True
        order: list[Piece] = []
        with in_pass(streamer, entered=order):
            assert torch.equal(scores(model), reference)
        groups = list(dict.fromkeys(piece.block for piece in order))
        assert streaming.is_cycle(order)
        for _ in range(2):
            before, entered = streamer.copied_bytes, []
            with in_pass(streamer, order, entered=entered):
                assert streamer._in_order and torch.equal(scores(model), reference)
                assert streamer._in_order, "the pass left its order"
            assert entered == order
        again = [group for number, group in enumerate(groups) if len(groups[number % slots :: slots]) > 1]
        assert streamer.copied_bytes - before == sum(group.nbytes for group in again)
        layers = [group for group in groups if ".layers." in group.block]
        whole = {step.block for step in CopyOrder(order, slots).steps if step.nbytes == step.block.nbytes}
        # Gemma 3n computes with small weights of a layer at both ends of it; every other layer is copied in pieces.
        assert layers and all((group in whole) == (family == "gemma3n") for group in layers)


def model_config(folder: Path):
    return transformers.AutoConfig.from_pretrained(folder)


def test_quantized_weights_are_stocks_byte_for_byte(built):
    folder = built("gemma4")
    for quant in ("nf4", "nf4-dq", "fp4", "int8"):
        reference = stock.load_stock(folder, quant, device=DEVICE)
        with trimtab.load(plan_of(folder, quant=quant, place={"*": "stream"})) as model:
            compared = 0
            for path, module in reference.named_modules():
                state = getattr(getattr(module, "weight", None), "quant_state", None)
                int8 = getattr(getattr(module, "weight", None), "CB", None)
                if state is None and int8 is None:
                    continue
                parts = model.hf_model.get_submodule(path).packed().parts
                assert torch.equal(parts["weight"], module.weight.data), path
                if int8 is not None:
                    assert torch.equal(parts["SCB"], module.weight.SCB), path
                else:
                    assert torch.equal(parts["absmax"], state.absmax), path
                if state is not None and state.nested:
                    assert torch.equal(parts["nested_absmax"], state.state2.absmax), path
                    assert torch.equal(parts["offset"].reshape(()), state.offset), path
                compared += 1
        assert compared > 20


@pytest.mark.parametrize(("family", "quant"), crossed(FIRST, STORED, first=["llama"], rest=1))
def test_a_prequantized_checkpoint_is_used_as_it_is(family, quant, built, tmp_path):
    if OLD and family == "gemma4":
        pytest.skip("transformers 5.6.2 has no right answer for a quantized Gemma 4 with pictures")
    reference = stock.load_stock(built(family), quant, device=DEVICE)
    reference.save_pretrained(tmp_path / "packed")
    again = stock.load_stock(tmp_path / "packed", device=DEVICE)
    expected = stock.logits(again, inputs_of(family, again.config))
    for place in ({"*": "resident"}, {"*": "stream"}):
        plan = plan_of(tmp_path / "packed", quant=quant, place=place)
        with trimtab.load(plan) as model:
            assert torch.equal(forward(model, family), expected)


def test_a_changed_checkpoint_is_refused(built, tmp_path):
    folder = pico.build("llama", tmp_path / "llama")
    plan = plan_of(folder)
    config = folder / "config.json"
    config.write_text(config.read_text() + " ")
    with pytest.raises(CheckpointError, match="changed since the plan was made.*config.json"):
        trimtab.load(plan)


def test_a_table_file_that_changes_under_us_is_named(tmp_path):
    folder = pico.build("gemma4", tmp_path / "gemma4")
    plan = plan_of(folder, quant="nf4", place={"table": "gather"})
    plan = replace(plan, placements=tuple(replace(p, home="file") if p.tier == "gather" else p for p in plan.placements))
    with trimtab.load(plan) as model:
        forward(model, "gemma4")
        file = next(folder.glob("*.safetensors"))
        with file.open("r+b") as handle:
            handle.truncate(file.stat().st_size - 8)
        assert raised(CheckpointError, forward, model, "gemma4", match="changed while in use").path == str(file)


def test_a_failed_load_gives_everything_back(built, monkeypatch):
    plan = plan_of(built("llama"), quant="nf4", place={"*": "stream"})
    gc.collect()
    before = sum(isinstance(item, leaves.Leaf) for item in gc.get_objects())
    calls = []

    def fail(self, spill=None):
        calls.append(1)
        raise RuntimeError("planted")

    monkeypatch.setattr(streaming.GroupWriter, "finish", fail)
    with pytest.raises(RuntimeError, match="planted"):
        trimtab.load(plan)
    gc.collect()
    assert calls and sum(isinstance(item, leaves.Leaf) for item in gc.get_objects()) == before


def test_a_load_that_fails_after_its_last_block_closes_what_streams(built, monkeypatch):
    closed, close = [], streaming.Streamer.close
    monkeypatch.setattr(streaming.Streamer, "close", lambda streamer: (closed.append(streamer), close(streamer)))

    monkeypatch.setattr(load._Filler, "_check_nothing_left", raising(CheckpointError("no", path="a")))
    with pytest.raises(CheckpointError):
        trimtab.load(plan_of(built("llama"), place={"*": "stream"}))
    assert len(closed) == 1 and not closed[0].slots


def test_a_streamed_weight_has_its_buffers_from_the_start(built):
    with trimtab.load(plan_of(built("llama"), place={"*": "stream"})) as model:
        staged = [module.staged for module in model.hf_model.modules() if isinstance(module, leaves.StagedLinear)]
        assert staged and all(one.streamer is model.streamer for one in staged)
        with pytest.raises(FrozenInstanceError):
            staged[0].streamer = None


def test_config_only_can_be_planned_and_not_loaded(built, tmp_path):
    folder = tmp_path / "declared"
    folder.mkdir()
    (folder / "config.json").write_text((built("gemma4") / "config.json").read_text())
    plan = plan_of(folder)
    assert plan.gpu_peak_bytes > 0
    with pytest.raises(CheckpointError, match="no weights"):
        trimtab.load(plan)


def test_progress_counts_every_byte_once(built):
    folder = built("gemma4")
    seen = []
    with trimtab.load(plan_of(folder, quant="nf4"), progress=lambda done, total: seen.append((done, total))):
        pass
    assert seen[-1][0] == seen[-1][1] and seen == sorted(seen)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert 0 < seen[-1][1] <= size


def test_a_closed_model_says_so(built):
    model = trimtab.load(plan_of(built("llama"), quant="nf4"))
    model.close()
    with pytest.raises(RequestError, match="closed"):
        model.logits([1, 2, 3])


# Adapters through the whole line --------------------------------------------------------------------------------------

VARIANTS = {
    "plain": {}, "rslora": {"rslora": True}, "dora": {"dora": True}, "bias": {"bias": True}, "all parts": {"targets": "all"},
    "embeddings": {"embeddings": True},
}  # fmt: skip


@pytest.mark.parametrize(("quant", "variant"), crossed(["none", "nf4-dq", "int8"], VARIANTS, first=["nf4-dq"], rest=3))
def test_an_adapter_equals_stock_peft_in_every_tier(quant, variant, built, tmp_path):
    """llama for text adapters, gemma4 for the one on language, vision and audio modules. Bit for bit: same kernels, and
    PEFT's own dtype rules; DoRA's weight norm is taken once instead of per call, from the same dequantized weight."""
    family = "gemma4" if variant == "all parts" else "llama"
    if OLD and family == "gemma4" and quant != "none":
        pytest.skip("transformers 5.6.2 has no right answer for a quantized Gemma 4 with pictures")
    folder = built(family)
    adapter = pico.adapter(folder, tmp_path / "adapter", **{"targets": "text", **VARIANTS[variant]})
    peft_model = stock.with_adapter(stock.load_stock(folder, quant, device=DEVICE), adapter)
    inputs = inputs_of(family, model_config(folder))
    # The base first: after a DoRA forward on the CPU, stock's int8 layers have lost their scales.
    with peft_model.disable_adapter():
        base = stock.logits(peft_model, inputs)
    expected = stock.logits(peft_model, inputs)
    assert not torch.equal(expected, base), "the adapter does nothing"
    for place in ({"*": "resident"}, {"*": "stream"}, {"*": "host"}):
        if place == {"*": "host"} and DEVICE != "cpu":
            continue  # other kernels: the noise floor of the tier is tested without an adapter
        with trimtab.load(plan_of(folder, quant=quant, place=place, adapters={"a": adapter})) as model:
            assert torch.equal(forward(model, family), base), place
            model.adapter_store.set("a")
            assert torch.equal(forward(model, family), expected), place
            model.adapter_store.set(None)
            model.unload_adapter("a")
            assert model.adapters == () and torch.equal(forward(model, family), base), place


def test_an_adapter_that_was_not_planned_is_counted_before_it_is_loaded(built, tmp_path):
    folder = built("llama")
    adapter = pico.adapter(folder, tmp_path / "adapter", targets="text")
    plan = plan_of(folder, quant="nf4")
    with trimtab.load(plan) as model:
        model.load_adapter("late", str(adapter))
        assert model.adapters == ("late",)
        model.unload_adapter("late")
    with trimtab.load(replace(plan, gpu_budget_bytes=plan.gpu_needed_bytes)) as model:
        error = raised(DoesNotFitError, model.load_adapter, "late", str(adapter))
        assert error.block == "adapter late" and error.budget_bytes == 0
        assert model.adapters == ()


def test_an_unknown_adapter_or_option_is_refused_by_name(built):
    with trimtab.load(plan_of(built("llama"), quant="nf4")) as model:
        assert refused(model.logits, [1, 2, 3], adapter="medcal").field == "adapter"
        error = refused(model.generate, [1, 2, 3], max_tokens=3)
        assert error.field == "max_tokens" and "max_new_tokens" in error.allowed


def test_two_answers_at_once_are_refused(built):
    with trimtab.load(plan_of(built("llama"), quant="nf4")) as model:
        pieces = model.answering(None)
        pieces.__enter__()
        with pytest.raises(RequestError, match="still running"):
            model.logits([1, 2, 3])
        pieces.__exit__(None, None, None)
        assert model.logits([1, 2, 3]).shape[0] == 3


@pytest.mark.parametrize(("family", "name"), [
    ("glm4_moe", "model.layers.1.mlp.gate.e_score_correction_bias"), ("mixtral", "model.layers.1.block_sparse_moe.gate.weight"),
    ("gemma4_moe", "model.language_model.layers.1.router.per_expert_scale"),
    ("gemma4_moe", "model.language_model.layers.1.router.proj.weight"),
])  # fmt: skip
def test_a_router_with_a_value_that_is_no_number_is_refused(family, name, tmp_path):
    """Before anything is loaded. With the first, transformers chooses expert 0 for every token and answers."""
    file = pico.build(family, tmp_path / "m") / "model.safetensors"
    plan = trimtab.plan(tmp_path / "m", quant="none", context=64, device="cpu")
    trimtab.load(plan).close()
    tensors = load_file(file)
    tensors[name].view(-1)[0] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    words = "a router of experts has values that are NaN or infinite"
    assert raised(CheckpointError, trimtab.plan, tmp_path / "m", context=64, device="cpu", match=words).tensor_name == name
    tensors[name] = tensors[name].float()
    tensors[name].view(-1)[0] = 1e30
    save_file(tensors, file, {"format": "pt"})
    plan = trimtab.plan(tmp_path / "m", quant="none", dtype="float16", context=64, device="cpu")
    assert plan.request.dtype == "float16"
    if "e_score" in name:  # it stays in float32, where this is a number
        trimtab.load(plan).close()
    else:
        with pytest.raises(CheckpointError, match="a router of experts has values that are NaN or infinite"):
            trimtab.load(plan)


def test_a_model_without_a_weight_outside_of_its_layers_answers(tmp_path):
    """OLMo's norms have none, and transformers asks a parameter for the model's device."""
    torch.manual_seed(0)
    own = transformers.OlmoForCausalLM(transformers.OlmoConfig(**pico._TEXT | {"head_dim": 16})).eval()
    own.save_pretrained(tmp_path)
    with trimtab.load(plan_of(tmp_path, quant="none", dtype="float32")) as model:
        answer = model.answer([5, 6, 7], max_new_tokens=1)
        assert model.hf_model.device.type == model.device.type
    assert answer.token_ids == (int(own(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1].argmax()),)


def test_a_missing_processor_is_looked_for_once(tmp_path, monkeypatch):
    reads, own = [], model_module.load_processor
    monkeypatch.setattr(model_module, "load_processor", lambda folder: reads.append(folder) or own(folder))
    with trimtab.load(pico.build("llama", tmp_path), quant="none", context=32, device="cpu") as model:
        for _ in range(3):
            assert len(model.answer_inputs(model.prepare([5, 6, 7]), GenerateRequest(max_new_tokens=2)).token_ids) == 2
    assert len(reads) == 1
