"""Experts that the files hold packed: kept so in every tier, with the values of the format's own library and PEFT's answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.gguf.dequant import dequantize as dequantize_ggml

import trimtab
from tests import gguf_files, pico, quantized_files
from tests.engine.kernels import test_experts
from tests.engine.lora.test_experts import NEAR, answered, loaded, of_peft
from tests.engine.lora.test_routers import IDS, gap, logprobs, of_model
from tests.long_runs import slow_on_cpu
from tests.merged_models import load
from tests.merging.changes.test_merge_experts import BOTH, stack_adapter
from tests.raised import refused
from trimtab.cli.commands.plan_run import adapter_document
from trimtab.engine.formats.packed import Packed
from trimtab.engine.formats.weights import dequantize, unpacked
from trimtab.engine.kernels.experts import CHECK_ERROR, Mixture, experts
from trimtab.engine.kernels.selfcheck import relative_error
from trimtab.engine.loader import load as loading
from trimtab.engine.loader import pieces
from trimtab.engine.tiers import streaming
from trimtab.engine.tiers.reader import HostMemory
from trimtab.errors import CheckpointError
from trimtab.formats.record import PackedEntry, stored_format
from trimtab.gguf.header import read_gguf
from trimtab.planning.values.blocks import blocks_of
from trimtab.stock.unsplit import load_unsplit

# Files of llama.cpp's converter, with down_proj in Q6_K but for the last.
GGUF = ("q4_0", "q4_k", "q8_0")
# Files with three matrices of each expert, of which gate and up are joined: compressed-tensors, and blocks as in official FP8.
APART = ("ct-int4", "ct-int4-zp", "ct-int8", "fp8-128")
OFFICIAL = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
FORMS = {"fp8-128": (OFFICIAL, lambda weight: quantized_files.fp8(weight, block=(128, 128)), "fp8-128x128")}
FORMS |= quantized_files.FORMS
GROUPED = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}  # pico's experts are narrower than 128
FORMS["gptq-g32"] = (GROUPED, quantized_files.gptq, "int4-g32-zp")
TIERS = ("stream", "disk", "host")


@cache
def files(form: str, root: Path) -> tuple[Path, Path]:
    """Return (the model in a format, the folder of the same values in float32)."""
    folder = root / f"moe-{form}"
    if form in GGUF:
        return gguf_files.model("qwen3_moe", form, folder, dtype=torch.float32)
    # Blocks of 128 rows need wider experts than pico's.
    base = files("q8_0", root)[1] if form == "fp8-128" else pico.build("qwen3_moe", folder / "base", dtype="float32")
    with patch.dict(quantized_files.FORMS, FORMS):
        return quantized_files.write(base, folder, form)


@cache
def adapters(form: str, root: Path) -> tuple[Path, Path]:
    dense = files(form, root)[1]
    a, b = (stack_adapter(dense, root / f"moe-{form}-{name}", list(names)) for name, names in (("a", BOTH), ("b", BOTH[1:])))
    return a, b


@pytest.fixture
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


def stacks_in(model: Any) -> dict[str, Packed]:
    return {
        f"{path}.{name}": held if isinstance(held, Packed) else held.open()[1]
        for path, module in model.hf_model.named_modules() for name, held in vars(module).get("stacks", {}).items()
    }  # fmt: skip


def of_gguf(file: Path) -> dict[str, Tensor]:
    """Return the stacks float32 as transformers' reader makes them of the file's bytes."""
    found: dict[str, Tensor] = {}
    for name, one in read_gguf(file).tensors.items():
        if name.endswith("_exps.weight"):
            raw = torch.frombuffer(bytearray(file.read_bytes()[one.start : one.start + one.nbytes]), dtype=torch.uint8)
            found[name] = dequantize_ggml(raw, gguf_files.TYPES[one.type_name]).view(one.shape)
    joined = {}
    for layer in range(2):
        part = {stem: found[f"blk.{layer}.ffn_{stem}_exps.weight"] for stem in ("gate", "up", "down")}
        joined[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.cat((part["gate"], part["up"]), dim=1)
        joined[f"model.layers.{layer}.mlp.experts.down_proj"] = part["down"]
    return joined


def truth(form: str, root: Path) -> dict[str, Tensor]:
    """Return the stacks float32: transformers' own values of GGUF and FP8 files, else those that the file was made of."""
    small, dense = files(form, root)
    if form in GGUF:
        return of_gguf(small)
    model = load_unsplit(str(small), "auto", "bfloat16", "cpu") if form == "fp8-128" else load(dense)
    return {name: stack.detach().float() for name, stack in model.named_parameters() if ".experts." in name}


def of_router(entry: PackedEntry, parts: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    assert entry.kind == "f32", "another weight than a router's was dequantized while the model was loaded"
    return unpacked(entry, parts, dtype)


@pytest.mark.parametrize("form", (*GGUF, *APART, "awq", "gptq-g32", "mxfp4", "ct-fp8"))
def test_each_expert_stays_as_the_files_hold_it(form: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = truth(form, root)
    monkeypatch.setattr(loading, "unpacked", of_router)
    with loaded(files(form, root)[0], {}, quant="auto", place={"*": "resident"}) as model:
        found, shares, taken = stacks_in(model), {share.name: share for share in model.memory_shares()}, model.plan.experts
        assert set(found) == set(expected) and len(found) >= 2
        for name, packed in found.items():
            for number, matrix in enumerate(expected[name]):
                assert torch.equal(dequantize(packed.expert(number)).float(), matrix), (name, number)
    assert taken is not None and taken.bytes == sum(packed.nbytes for packed in found.values())
    assert not taken.is_made and not taken.reason
    # Two thirds of the values are gate and up.
    bits = {"q4_0": 4.5, "q4_k": 4.5, "q6_k": 6.5625, "q8_0": 8.5, "int4-g32": 4.5, "int4-g32-zp": 4.75, "int8-g32": 8.5}
    bits |= {"fp8-128x128": 8 + 32 / 128**2, "fp8-row": 8.5, "mxfp4-g32": 4.25}
    first, last = (form, "q8_0" if form == "q8_0" else "q6_k") if form in GGUF else (FORMS[form][2],) * 2
    assert taken.format_name == ", ".join(dict.fromkeys((first, last)))
    assert taken.bits_per_value == pytest.approx((2 * bits[first] + bits[last]) / 3)
    # Parts begin at multiples of 256 bytes.
    assert abs(shares["weights"].measured_bytes - shares["weights"].planned_bytes) <= 256 * 4 * 14
    text = str(model.plan)
    assert (
        f"experts      {taken.format_name}, {taken.bits_per_value:.2f} bits a weight" in text and "as the files hold them" in text
    )
    assert "stacked experts" not in text


def cases() -> Iterator[Any]:
    """Yield every format and tier; by default each format in one tier, beside resident experts."""
    for number, form in enumerate((*GGUF, *APART)):
        for place, tier in enumerate(TIERS):
            yield (form, tier) if number % len(TIERS) == place else slow_on_cpu(form, tier)


@pytest.mark.parametrize(("form", "tier"), list(cases()))
def test_rows_with_adapters_answer_as_peft_on_the_dequantized_values_in_every_tier(form: str, tier: str, root: Path) -> None:
    file, dense = files(form, root)
    a, b = adapters(form, root)
    expected = {"a": of_peft(dense, a), "b": of_peft(dense, b), None: of_model(load(dense))}
    names = ("a", None, "b")
    requests = [{"prompt": IDS, "adapter": name} for name in names]
    answers: dict[str, list[dict[int, float]]] = {}
    for place in ("resident", tier):
        with loaded(file, {"a": a, "b": b}, quant="auto", place={"model.layers.*": place}) as model:
            assert place in {row.tier for row in model.plan.placements}
            answers[place] = [logprobs(one) for one in model.batch(requests, rows=3, max_new_tokens=3, logprobs=8)]
            answers[place].append(answered(model, "a"))
    assert answers[tier] == answers["resident"]
    assert max(gap(one, expected[name]) for one, name in zip(answers[tier], (*names, "a"), strict=True)) < NEAR
    assert min(gap(answers[tier][0], expected[None]), gap(answers[tier][2], expected[None])) > 1e-2


def test_asked_for_in_16_bits_they_are_dequantized_and_answer_the_same(root: Path) -> None:
    file, _ = files("q4_k", root)
    options: dict[str, Any] = {"quant": "auto", "dtype": "bfloat16"}
    with loaded(file, {}, **options) as model:
        expected = model.answer(IDS, max_new_tokens=6).token_ids
    with loaded(file, {}, experts="16bit", **options) as model:
        assert not stacks_in(model) and model.answer(IDS, max_new_tokens=6).token_ids == expected
        plan = model.plan
    assert plan.experts is not None and plan.experts.bits_per_value == 16
    assert "experts of the files, dequantized: requested (experts='16bit')" in str(plan) and "16bit experts" in str(plan)
    error = refused(trimtab.plan, file, device="cpu", context=64, experts="nf4", match="quantized, and nothing is quantized twice")
    assert error.field == "experts" and error.allowed == ("auto", "16bit")


def test_a_plan_for_a_card_counts_them_and_says_how_steps_run(root: Path) -> None:
    plans = [trimtab.plan(files("q4_k", root)[0], card="RTX 4060 8GB", context=64, experts=kind) for kind in ("auto", "16bit")]
    assert all(plan.experts is not None for plan in plans)
    packed, dense = (plan.experts.bytes for plan in plans if plan.experts is not None)
    # The arena of packed weights has one more of 256 bytes for each part at most.
    assert 0 <= plans[1].gpu["weights"] - plans[0].gpu["weights"] - (dense - packed) < 2**16
    assert [plan.execution.step.mode for plan in plans] == ["fused", "fused"]
    assert "steps read the chosen ones packed" in " ".join(str(plans[0]).split())
    unread = trimtab.plan(files("mxfp4", root)[0], card="RTX 4060 8GB", context=64)
    assert unread.execution.step.mode == "eager" and "do not read weights in mxfp4-g32" in unread.execution.step.reason


@pytest.mark.parametrize("form", ["q4_k", "ct-int4", "fp8-128"])
def test_kernels_of_steps_read_them(form: str, root: Path) -> None:
    torch.manual_seed(3)
    module = test_experts.kernels()
    with loaded(files(form, root)[0], {}, quant="auto", dtype="bfloat16") as model:
        own = next(vars(one)["stacks"] for one in model.hf_model.modules() if "stacks" in vars(one))
        mixture = Mixture(own["gate_up_proj"], own["down_proj"], "silu")
        x, index, weights, tables = test_experts.case(mixture, 3, 2, torch.bfloat16, slots=(0, 1, 2, -1))
        out = experts(x, index, weights, mixture, torch.full_like(x, torch.nan), lora=tables, module=module)
        exact = test_experts.exact(x, index, weights, mixture, tables)
    assert relative_error(out, exact) < CHECK_ERROR[torch.bfloat16]


def changed(form: str, folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """Write a checkpoint in a format with other tensors."""
    with patch.dict(quantized_files.FORMS, FORMS):
        small, _ = quantized_files.write(pico.build("qwen3_moe", folder / "base", dtype="float32"), folder, form)
    (file,) = small.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    return small


def dequantized(number: int) -> Callable[[dict[str, Tensor]], None]:
    """Return what gives an expert's matrix in 16 bits."""

    def change(tensors: dict[str, Tensor]) -> None:
        stem = f"model.layers.0.mlp.experts.{number}.up_proj.weight"
        for end in ("_packed", "_scale", "_shape"):
            del tensors[stem + end]
        tensors[stem] = torch.randn(64, 64)

    return change


def unchanged(_: dict[str, Tensor]) -> None:
    pass


@pytest.mark.parametrize(("form", "change", "words"), [
    ("fp8-128", unchanged, "fp8-128x128 has blocks of 128 rows, which 64 rows cut (gate_up_proj)"),
    ("fp8-tensor", unchanged, "fp8-tensor has a scale for each whole matrix (gate_up_proj)"),
    ("nvfp4-ct", unchanged, "nvfp4-g16 has a scale for each whole matrix (gate_up_proj)"),
    ("gptq-ordered", unchanged, "int4-g32-zp-idx has an order of inputs for each matrix (gate_up_proj)"),
    ("ct-int4", dequantized(3), "gate_up_proj is not made of one packed matrix or several for each expert"),
])  # fmt: skip
def test_experts_that_cannot_stay_packed_are_dequantized_and_the_plan_says_why(
    form: str, change: Callable[[dict[str, Tensor]], None], words: str, tmp_path: Path
) -> None:
    with loaded(changed(form, tmp_path, change), {}, quant="auto", dtype="bfloat16") as model:
        assert not stacks_in(model) and len(model.answer(IDS, max_new_tokens=2).token_ids) == 2
        plan = model.plan
    assert plan.experts is not None and plan.experts.bits_per_value == 16 and words in plan.experts.reason
    assert [row.reason for row in plan.unquantized if row.module_path.endswith("experts")] == [plan.experts.reason]
    assert f"experts of the files, dequantized: {words}" in " ".join(str(plan).split())


@pytest.mark.parametrize("form", quantized_files.FORMS)
def test_experts_of_every_format_run_packed_or_as_the_plan_says(form: str, tmp_path: Path) -> None:
    """What the records say of a format, of two matrices of rows and of one; answers are stock's either way."""
    load(quantized_files.base_of("qwen3_moe", form), dtype="float32").save_pretrained(tmp_path / "base")
    small, dense = quantized_files.write(tmp_path / "base", tmp_path, form)
    kind = quantized_files.FORMS[form][2]
    with loaded(small, {}, quant="auto") as model:
        found, taken = stacks_in(model), model.plan.experts
        row = next(row for row in model.anatomy.rows if row.stacks)
        whys = [stored_format(kind).why_not_stacked([one.shape[1] // one.halves] * one.halves) for one in row.stacks]
        assert {one.kind for one in found.values()} == (set() if any(whys) else {kind})
        assert taken is not None and all(why in taken.reason for why in whys if why) and bool(taken.reason) is any(map(bool, whys))
        # Values of NVFP4 are written in bfloat16.
        assert gap(answered(model, None), of_model(load(dense, dtype="float32"))) < (2e-2 if form.startswith("nvfp4") else NEAR)


def test_an_expert_that_the_files_lack_is_an_error(tmp_path: Path) -> None:
    def lost(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".experts.3.up_proj." in name]:
            del tensors[name]

    with pytest.raises(CheckpointError, match="Expected 4 in dimension 0 but got 3"):
        trimtab.plan(changed("ct-int4", tmp_path, lost), device="cpu", context=64)


@pytest.mark.parametrize("form", ["ct-int4", "q4_k"])
def test_a_merge_and_an_inspection_know_such_experts(form: str, root: Path, tmp_path: Path) -> None:
    (small, dense), (adapter, _) = files(form, root), adapters(form, root)
    for name, base in (("small", small), ("dense", dense)):
        trimtab.merge(base, tmp_path / name, adapters={"a": adapter}, dtype="float32", check=True)
    found, expected, old = (load(folder).state_dict() for folder in (tmp_path / "small", tmp_path / "dense", dense))
    stacks = [name for name in old if ".experts." in name]
    assert stacks and not any(torch.equal(found[name], old[name]) for name in stacks)
    for name in stacks:  # values of the dense files are rounded to bfloat16, those of a merge are not
        assert bool(((found[name] - expected[name]).abs() <= 2**-8 * old[name].abs() + 1e-6).all()), name
    text = " ".join(str(adapter_document(trimtab.inspect(adapter, model=small))).split())
    assert f"{len(stacks)} stacks of experts" in text and "of experts the chosen ones" in text


@pytest.mark.parametrize("experts", ["auto", "nf4"])
@pytest.mark.parametrize("tier", ["stream", "disk"])
def test_a_block_that_leaves_the_device_is_once_in_host_memory(
    experts: str, tier: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    made: list[HostMemory] = []

    class Counted(HostMemory):
        def __init__(self, byte_count: int, *, pinned: bool) -> None:
            # A block on disk is not in host memory while the next one is read.
            assert tier != "disk" or not any(one.tensor.numel() for one in made)
            taken.append(byte_count)
            super().__init__(byte_count, pinned=pinned)
            if len(taken) <= 2:  # of the two layers: the buffers behind them stay
                made.append(self)

    def no_other_room(forms: object) -> dict[str, Tensor]:
        raise AssertionError("experts of a block were in host memory in addition to the block")

    monkeypatch.setattr(streaming, "HostMemory", Counted)
    monkeypatch.setattr(pieces, "host_room", no_other_room)
    file = files("q4_k", root)[experts == "nf4"]
    options = {"quant": "auto" if experts == "auto" else "nf4", "experts": experts}
    with loaded(file, {}, place={"model.layers.*": tier}, **options) as model:
        blocks = [block for block in blocks_of(model.anatomy, model.plan.request.quant) if block.is_decoder_layer]
        held = [module.stacks["down_proj"].group for module in model.hf_model.modules() if "stacks" in vars(module)]
    assert taken[: len(blocks)] == [block.buffer_bytes for block in blocks] == [group.nbytes for group in held]
    assert taken[len(blocks) :] == ([max(taken)] * 2 if tier == "disk" else [])  # the buffers of the disk tier
