"""Kernels compile for compute capabilities 7.5 to 12.0; on 7.5 (T4, RTX 20, GTX 16) float16 is chosen with care.

Nothing here runs on a card: nobody here has one of 7.5, 8.6, 8.9 or 12.0.

The compiler is NVRTC, or a toolkit's nvcc where that is installed; without either the tests of compiling are skipped.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import trimtab
from tests import pico, stock, talking, talking_families
from tests.cuda_on_cpu.machine_code import machine_code
from tests.long_runs import crossed, slow_on_cpu
from tests.raised import raised, refused
from trimtab import api
from trimtab.cli import main
from trimtab.engine import float16_check
from trimtab.engine.cuda import launch_config
from trimtab.engine.formats import int8_head
from trimtab.engine.kernels import attention_and_norms, delta_rule, dequantize, embed_and_logits, experts, gemm4, gemv4
from trimtab.engine.loader import load
from trimtab.engine.loader import pieces as loaded_pieces
from trimtab.engine.tiers.reader import Reader
from trimtab.errors import CheckpointError, DeviceError
from trimtab.planning import Plan
from trimtab.planning.values.byte_sizes import choose_dtype
from trimtab.request import LoadRequest

TARGET = "sm_75"
NEWER = ("sm_86", "sm_89", "sm_120")  # cards whose blocks have less shared memory than those that were measured
SHARED_BYTES = 64 * 1024  # of a block on compute capability 7.5


@pytest.mark.parametrize("target", [TARGET, "sm_80", "sm_90", *(slow_on_cpu(target) for target in NEWER)])
@pytest.mark.parametrize(
    "module",
    [embed_and_logits, attention_and_norms, int8_head, gemm4, gemv4, experts, dequantize],
    ids=lambda one: one.__name__.rpartition(".")[2],
)
def test_every_kernel_compiles(module, target):
    code = machine_code(module.source(), target)
    assert all(name.encode() in code for name in module.NAMES)


@pytest.mark.parametrize(("dim", "dtype", "target"), [
    (64, torch.float16, TARGET), (256, torch.float16, TARGET), (512, torch.float16, TARGET),
    *((dim, dtype, target) for dim, dtype in ((256, torch.bfloat16), (512, torch.float16)) for target in ("sm_80", "sm_90")),
    *(slow_on_cpu(dim, torch.bfloat16, target) for dim in (128, 512) for target in NEWER),
])  # fmt: skip
def test_attention_compiles(dim, dtype, target):
    shape = attention_and_norms.AttentionShape(*((16, 1) if dim == 512 else (8, 2)), dim)
    for turn in (False, True):
        assert machine_code(
            attention_and_norms.source("attend.cu"), target, attention_and_norms.attention_options(shape, dtype, turn=turn)
        )


def test_attention_does_not_compile_without_its_shape():
    with pytest.raises((DeviceError, AssertionError), match="DIM"):
        machine_code(attention_and_norms.source("attend.cu"), "sm_90")


def test_the_gated_delta_rule_compiles():
    options = delta_rule.options(delta_rule.DeltaShape(16, 32, 128, 128, 4), torch.float16)
    assert machine_code(delta_rule.source(), TARGET, options)


def test_every_source_of_kernels_is_compiled_here():
    """A new file of kernels belongs into the list above."""
    folder = Path(gemv4.__file__).parent / "cuda"
    assert {file.name for file in folder.glob("*.cu")} == {
        "attend.cu", "delta.cu", "ends.cu", "experts.cu", "experts_many.cu", "experts_near.cu", "fused.cu", "head8.cu",
        "matvec4.cu", "prompt.cu", "rows.cu",
    }  # fmt: skip


@pytest.mark.parametrize(("shared_bytes", "has_room"), [(48 * 1024, False), (SHARED_BYTES, True), (99 * 1024, True)])
def test_products_of_many_rows_are_refused_by_name_where_a_block_has_no_room(shared_bytes, has_room):
    why = gemm4.why_no_room(SimpleNamespace(shared_bytes=shared_bytes), "nf4")
    assert (why is None) == has_room
    if why is not None:
        assert f"{gemm4.shared_bytes(16, 16)} B of shared memory" in why and str(shared_bytes) in why


def test_our_products_of_4_bit_weights_have_no_room_in_its_shared_memory():
    """So captured modules, with bitsandbytes' products, are the fastest way to run there."""
    for columns in (256, 1024, 2560, 10240):
        assert launch_config.cuts((2560,), columns, 1, multiprocessors=40, shared_bytes=SHARED_BYTES) == []


# The type -----------------------------------------------------------------------------------------------------------------


def test_the_type_follows_the_card_and_the_family():
    assert choose_dtype("llama", None) == choose_dtype("gemma4", (8, 0)) == ("bfloat16", "")
    dtype, why = choose_dtype("llama", (7, 5))
    assert dtype == "float16" and "7.5" in why and "measured" in why
    for family in ("gemma", "gemma2", "gemma3", "gemma3n", "gemma4"):
        dtype, why = choose_dtype(family, (7, 5))
        assert dtype == "float32" and "exceed float16" in why


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return pico.build("llama", tmp_path_factory.mktemp("llama") / "base")


def test_a_plan_for_a_t4_says_its_type_and_how_it_runs(llama, tmp_path, capsys):
    options = {"card": "T4", "context": 64}
    plan = trimtab.plan(llama, **options)
    assert plan.request.dtype == "float16" and "emulated" in plan.dtype_reason
    assert plan.execution.step.mode == "graph" and Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert trimtab.plan(llama, dtype="bf16", **options).request.dtype == "bfloat16"
    assert trimtab.plan(llama, card="RTX 4060 8GB", context=64).request.dtype == "bfloat16"
    gemma = pico.build("gemma4", tmp_path / "gemma")
    made = trimtab.plan(gemma, **options)
    assert made.request.dtype == "float32" and "exceed float16" in made.dtype_reason
    step = trimtab.plan(gemma, dtype="float16", quant="nf4", **options).execution.step
    assert step.mode == "graph" and "trimtab's kernels need 8.0" in step.reason
    assert main.main(["plan", str(llama), "--card", "T4", "--context", "64"]) == 0
    assert "type float16: bfloat16 is emulated" in " ".join(capsys.readouterr().out.split())


def test_a_type_and_a_mode_that_are_asked_for_are_named_with_their_cost_and_the_modes_that_are_left(llama, capsys):
    assert main.main(["plan", str(llama), "--card", "T4", "--dtype", "bfloat16", "--context", "64"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "type bfloat16: requested; bfloat16 is emulated on compute capability 7.5" in shown
    error = refused(api.plan, llama, card="T4", decode="fused", context=64)
    assert error.field == "decode" and error.allowed == ("auto", "eager", "graph")


@pytest.mark.parametrize("device", [{"card": "T4"}, {"card": "RTX 4060 8GB"}, {"device": "cpu"}])
def test_float16_that_is_asked_for_names_a_family_whose_activations_exceed_it(device, llama, hearing):
    given = {"context": 256, "dtype": "float16", **device}
    why = trimtab.plan(hearing, **given).dtype_reason
    assert why.startswith("requested") and "(gemma4) exceed float16" in why
    assert trimtab.plan(llama, **given).dtype_reason == ""


def test_a_requested_type_is_not_measured(hearing, monkeypatch):
    monkeypatch.setattr(float16_check, "check", lambda model: pytest.fail("measured"))
    plan = trimtab.plan(hearing, dtype="float16", quant="none", context=64, device="cpu", images=0, audio_s=0.0)
    assert plan.dtype_reason
    trimtab.load(plan).close()


def test_a_gpu_that_torch_has_to_be_asked_for_is_planned_for_in_its_type(llama, monkeypatch):
    """Where the driver's own libraries do not answer, the type is known after torch was asked."""
    from trimtab import api
    from trimtab.planning.request.card_machine import machine_of, rates_of
    from trimtab.planning.values.cards import find_card

    monkeypatch.setattr(api, "_capability", lambda device: None)
    monkeypatch.setattr("trimtab.machine.machine_cache.find_machine", lambda *_: None)
    t4 = find_card("T4")
    here = machine_of(t4, host_available_bytes=2**34), rates_of(t4)
    monkeypatch.setattr(api, "_ask_machine", lambda *args: here)
    plan = api.plan_request(LoadRequest(model=str(llama), dtype="auto", context_tokens=64))
    assert plan.request.dtype == "float16" and plan.dtype_reason


# Weights in 16 bits beside a type of 32 -----------------------------------------------------------------------------------


def test_gemma_4_e2b_takes_on_a_t4_what_the_stock_stack_takes(tmp_path):
    """transformers, bitsandbytes and PEFT allocated 6.507 GiB on a Tesla T4, without double quantization. Weights in float32
    would take 5.1 GiB more."""
    plan = trimtab.plan(
        pico.e_series("e2b", tmp_path), card="T4", quant="nf4", place={"*": "resident"}, decode="eager", context=8,
        images=0, audio_s=0.0,
    )  # fmt: skip
    assert plan.request.dtype == "float32" and plan.gpu_peak_bytes / 2**30 == pytest.approx(6.5, rel=0.03)
    asked = trimtab.plan(
        pico.e_series("e2b", tmp_path), card="T4", quant="nf4", place={"*": "resident"}, decode="eager", context=8,
        images=0, audio_s=0.0, dtype="float32",
    )  # fmt: skip
    assert asked.gpu_peak_bytes - plan.gpu_peak_bytes == pytest.approx(5.125 * 2**30, rel=0.01)  # two tables in 16 bits


def wide_inputs(family, base):
    """Return inputs of a model in float32."""
    given = pico.inputs(family, base.config)
    return {name: value.float() if value.is_floating_point() else value for name, value in given.items()}


@pytest.fixture
def without_bfloat16(monkeypatch):
    """Plans as for a card that emulates bfloat16."""
    monkeypatch.setattr(api, "choose_dtype", lambda *_: ("float32", "bfloat16 is emulated"))


@pytest.mark.parametrize(
    ("family", "quant"), crossed(["gemma3", "gemma3n", "gemma4", "gemma4_moe", "llama"], ["none", "nf4"], rest=1)
)
def test_weights_in_16_bits_give_the_answer_of_stock_in_float32(family, quant, without_bfloat16, tmp_path):
    """A cast to float32 changes no value; the same products in the same order, so the same bits where nothing is on the host."""
    folder = pico.build(family, tmp_path / "base")
    base = stock.load_stock(folder, quant, dtype=torch.float32)
    inputs = wide_inputs(family, base)
    expected = stock.logits(base, inputs)
    for options in ({}, {"place": {"*": "stream"}}, {"place": {"*": "disk"}}):
        plan = trimtab.plan(folder, quant=quant, context=64, device="cpu", **options)
        with trimtab.load(plan) as model:
            head = model.hf_model.get_output_embeddings()
            assert (head.packed().dtype, head.dense_rows(0, 1).dtype) == (torch.bfloat16, torch.float32)
            assert model.hf_model.dtype == torch.float32
            assert torch.equal(stock.logits(model.hf_model, inputs), expected), options


@pytest.mark.parametrize(("family", "quant"), crossed(["gemma4", "gemma4_moe", "llama"], ["none", "nf4"], first=["llama"], rest=1))
def test_weights_that_are_cast_while_loading_are_cast_a_few_rows_at_a_time(family, quant, monkeypatch, tmp_path):
    """In float32 the per-layer table of Gemma 4 E2B was 4.4 GiB in bfloat16 beside 8.8 GiB in float32, which no plan counts."""
    taken = []
    whole = Reader.take

    def take(self, entry):
        taken.append(entry)
        return whole(self, entry)

    monkeypatch.setattr(Reader, "take", take)
    monkeypatch.setattr(load, "CAST_VALUES", 2)  # not scalars
    monkeypatch.setattr(loaded_pieces, "HEAD_PIECE_VALUES", 100)
    folder = pico.build(family, tmp_path / "base")
    base = stock.load_stock(folder, quant, dtype=torch.float32)
    inputs = wide_inputs(family, base)
    plan = trimtab.plan(folder, quant=quant, context=64, device="cpu", dtype="float32", place={"*": "resident"})
    with trimtab.load(plan) as model:
        assert torch.equal(stock.logits(model.hf_model, inputs), stock.logits(base, inputs))
    (table,) = {one.tensor_name for one in taken if one.tensor_name.endswith("embed_tokens.weight")}
    pieces = [one for one in taken if one.tensor_name == table]
    assert len(pieces) > 1 and max(one.shape[0] * one.shape[1] for one in pieces) <= max(100, pieces[0].shape[1])


@pytest.mark.parametrize("memory", ["host", "file"])
def test_rows_of_a_table_that_is_gathered_are_cast_from_16_bits(memory, without_bfloat16, tmp_path):
    folder = pico.build("gemma4", tmp_path / "base")
    plan = trimtab.plan(folder, quant="none", context=64, device="cpu", place={"*per_layer": "gather"})
    placed = [one for one in plan.placements if one.tier == "gather"]
    plan = replace(plan, placements=tuple(replace(one, home=memory) if one in placed else one for one in plan.placements))
    with trimtab.load(plan) as model:
        table = model.hf_model.get_submodule(placed[0].block_path)
        assert table.source.dtype == torch.bfloat16
        ids = torch.tensor([[3, 1, 4]])
        wide = stock.load_stock(folder, dtype=torch.float32).get_submodule(placed[0].block_path)
        with torch.no_grad():
            assert torch.equal(table(ids), wide(ids))


@pytest.mark.parametrize("embeddings", [False, True])
def test_adapters_over_weights_in_16_bits_are_pefts_in_float32(embeddings, without_bfloat16, tmp_path):
    folder = pico.build("gemma4", tmp_path / "base")
    adapter = pico.adapter(folder, tmp_path / "adapter", embeddings=embeddings, dora=embeddings)
    base = stock.load_stock(folder, dtype=torch.float32)
    inputs = wide_inputs("gemma4", base)
    expected = stock.logits(stock.with_adapter(base, adapter), inputs)
    plan = trimtab.plan(folder, quant="none", context=64, device="cpu", adapters={"a": str(adapter)})
    with trimtab.load(plan) as model:
        model.adapter_store.set("a")
        got = stock.logits(model.hf_model, inputs)
    # Adapters compute in float32 on both sides; the sums of two products are added in another order.
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


# Numerics, with the same type on a CPU --------------------------------------------------------------------------------------


def loaded(folder, dtype, reason=""):
    plan = trimtab.plan(folder, dtype=dtype, quant="none", context=64, device="cpu", images=0, audio_s=0.0)
    return trimtab.load(replace(plan, dtype_reason=reason))


def test_float16_answers_as_float32_does_within_its_rounding(llama):
    ids = list(range(5, 25))
    with loaded(llama, "float32") as wide, loaded(llama, "float16", "chosen") as half:
        expected, found = wide.logits(ids), half.logits(ids)
    # 11 bits of a value; a few dozen roundings add up.
    assert float((found - expected).abs().max()) <= 2**-7 * float(expected.abs().max())


def test_activations_are_measured_where_float16_was_chosen(llama):
    with loaded(llama, "float16", "chosen") as model:
        found = float16_check.largest_activations(model)
        count = len(model.hf_model.get_decoder().layers)
        assert len(found) == 2 * count and all(0 < value < 65504 for value in found.values())
        assert float16_check.check(model) == max(found.values())
        assert all(not module._forward_hooks for module in model.hf_model.modules())


def test_a_model_whose_activations_do_not_survive_is_refused_with_the_type_to_take(llama, monkeypatch):
    with loaded(llama, "float16", "chosen") as model:
        norm = model.hf_model.get_decoder().layers[0].post_attention_layernorm
        norm.weight.data.fill_(6e4)
        assert "dtype='float32'" in raised(DeviceError, float16_check.check, model, match="float16 holds 65504").hint
    monkeypatch.setattr(float16_check, "HEADROOM", 1e-9)
    with pytest.raises(DeviceError, match="float16 holds"):
        loaded(llama, "float16", "chosen")
    loaded(llama, "float16").close()  # asked for by name: the user's own choice
    loaded(llama, "float32", "chosen").close()


# Images and audio ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return talking_families.save("qwen3_vl", pico.build("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl") / "base"))


@pytest.fixture(scope="module")
def hearing(tmp_path_factory):
    return talking.build_gemma4(tmp_path_factory.mktemp("gemma4") / "base")


def loaded_with_media(folder, *, images=1, audio_s=1.0, context=256, reason="", **options):
    plan = trimtab.plan(
        folder, dtype="float16", quant="none", context=context, device="cpu", images=images, audio_s=audio_s, **options
    )
    return trimtab.load(replace(plan, dtype_reason=reason))


def test_activations_of_an_image_are_those_of_the_tower(seeing):
    """The other route: the tower alone, over what the processor made of the same noise."""
    with loaded_with_media(seeing) as model:
        found = float16_check.largest_activations(model)
        noise = np.random.default_rng(0).integers(0, 256, (448, 448, 3), np.uint8)
        inputs = model.prepare(float16_check.PROMPT, image=Image.fromarray(noise)).tensors
        tower = model.hf_model.model.visual
        with torch.no_grad():
            hidden = tower(inputs["pixel_values"].half(), grid_thw=inputs["image_grid_thw"]).last_hidden_state
        assert found["visual (image)"] == pytest.approx(float(hidden.abs().max()), rel=1e-3)
        blocks = [name for name in found if re.fullmatch(r"visual\.blocks\.\d+\.mlp \(image\)", name)]
        assert len(blocks) == len(tower.blocks) > 0
        assert "layers.0" in found and "layers.0 (image)" in found
        assert all(not module._forward_hooks for module in model.hf_model.modules())


@pytest.mark.parametrize(("medium", "tower"), [("image", "vision_tower"), ("audio", "audio_tower")])
def test_every_tower_of_the_plan_is_measured_and_no_other(medium, tower, hearing):
    lacks = {"image": {"audio_s": 0.0}, "audio": {"images": 0}}[medium]
    with loaded_with_media(hearing, **lacks) as model:
        found = float16_check.largest_activations(model)
        towers = {re.split(r"[. ]", name)[0] for name in found if "_tower" in name}
        assert towers == {tower} and all(name.endswith(f"({medium})") for name in found if tower in name)
    with loaded_with_media(hearing, images=0, audio_s=0.0) as model:
        assert not any(name.endswith(")") for name in float16_check.largest_activations(model))


@pytest.mark.parametrize(
    ("medium", "tower", "flag"), [("image", "vision_tower", "images=0"), ("audio", "audio_tower", "audio_s=0")]
)
def test_a_tower_whose_activations_do_not_survive_is_refused_and_named(medium, tower, flag, hearing):
    with loaded_with_media(hearing) as model:
        float16_check.check(model)
        part = getattr(model.hf_model.model, tower)
        norm = next(module for module in part.modules() if "Norm" in type(module).__name__ and hasattr(module, "weight"))
        with torch.no_grad():
            norm.weight.fill_(6e4)
        error = raised(DeviceError, float16_check.check, model, match=rf"in {tower}\.\S+ \({medium}\), float16 holds")
        assert error.hint == f"Plan again with dtype='float32', or with {flag}"


@pytest.mark.parametrize(("context", "side"), [(64, 64), (40, 32), (30, None)])
def test_the_largest_image_is_taken_that_the_context_has_room_for(context, side, seeing, monkeypatch):
    """47 tokens with an image of 64 x 64, 35 with one of 32 x 32."""
    monkeypatch.setattr(float16_check, "SIDES", (64, 32))
    with loaded_with_media(seeing, context=context, reason="chosen") as model:
        sides = [prompt["image"].width for _, prompt in float16_check._with_media(model)]
        found = float16_check.largest_activations(model)
    assert sides == ([] if side is None else [side]) and any(name.startswith("visual.") for name in found) == (side is not None)


def test_the_check_changes_no_answer(seeing):
    picture, ids = Image.new("RGB", (64, 64), "red"), list(range(5, 25))
    with loaded_with_media(seeing) as plain, loaded_with_media(seeing, reason="chosen") as checked:
        for model in (plain, checked):
            assert model.dtype == torch.float16
        assert torch.equal(checked.logits(ids), plain.logits(ids))
        assert torch.equal(checked.logits("What?", image=picture), plain.logits("What?", image=picture))
        assert checked.answer(ids, max_new_tokens=4).token_ids == plain.answer(ids, max_new_tokens=4).token_ids


def test_a_model_without_a_processor_loads_because_it_takes_no_images(tmp_path):
    folder = pico.build("qwen3_vl", tmp_path / "base")
    with loaded_with_media(folder, reason="chosen") as model, pytest.raises(CheckpointError):
        model.answer("What is it?", image=Image.new("RGB", (64, 64)), max_new_tokens=2)
