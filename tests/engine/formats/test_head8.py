"""An 8-bit head: its bytes against float64, its kernel thread by thread, every tier, ties, adapters, and what is refused."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import trimtab
from tests import pico
from tests.adapter_files import write_tensors
from tests.cuda_on_cpu import run
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.engine.formats import int8_head
from trimtab.engine.layers.leaves import GatheredTable, HostLeaf, ResidentLeaf, StagedLinear
from trimtab.engine.loader import head_kernel, transformers_model
from trimtab.engine.tiers.reader import read_small
from trimtab.errors import CheckpointError, DeviceError, RequestError
from trimtab.formats.record import HEAD8, packed_parts
from trimtab.planning import Plan
from trimtab.planning.values.byte_sizes import HEAD_CHUNK_VALUES, buffer_bytes
from trimtab.request import LoadRequest

DEMO = Path(trimtab.__file__).parent / "demo"
ASKED = [[2, 5, 9, 17, 4], [2, 40, 41]]


def of_demo(**options) -> Plan:
    return trimtab.plan(DEMO / "base", **{"head": "int8", "device": "cpu", "context": 256, "images": 0, "audio_s": 0} | options)


def seen_by_head(model, **options) -> tuple[Tensor, Tensor]:
    """Return the last input and output of a model's head for a prompt."""
    seen = []
    handle = model.hf_model.lm_head.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    model.logits(ASKED[0], **options)
    handle.remove()
    return seen[-1]


def kernel_of(model):
    return model.hf_model.get_output_embeddings().packed().kernel.module


def rounded_by_hand(weight: Tensor) -> tuple[list[list[int]], list[float]]:
    """The definition, one value after the other in Python's own arithmetic."""
    q, scales = [], []
    for row in weight.double().tolist():
        scale = torch.tensor(max(abs(value) for value in row)).float().div(127).item()
        one = torch.tensor(scale or 1.0, dtype=torch.float32)
        q.append([round((torch.tensor(value).float() / one).item()) for value in row])
        scales.append(scale)
    return q, scales


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_are_scaled_by_their_largest_value_and_rounded_to_even(dtype):
    torch.manual_seed(0)
    weight = torch.randn(7, 64).to(dtype)
    weight[2] = 0
    weight[3, :5] = torch.tensor([127, 0.5, 1.5, -2.5, -127]).to(dtype)  # scale 1: halves are ties
    q, scale = int8_head.quantize_rows(weight)
    wanted, scales = rounded_by_hand(weight)
    assert q.tolist() == wanted and scale.tolist() == scales and q[3, :5].tolist() == [127, 0, 2, -2, -127]
    assert scale[2] == 0 and not q[2].any()
    assert int(q.abs().max()) == 127 and int(q.min()) >= -127
    back = int8_head.dense(q, scale, torch.float32)
    assert (back - weight.float()).abs().le(scale[:, None] * 0.5001).all()
    assert int8_head.is_same({"weight": q, "scale": scale}, weight) and not int8_head.is_same(
        {"weight": q, "scale": scale}, -weight
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_not_finite_is_seen(value):
    weight = torch.ones(4, 8)
    q, scale = torch.empty(4, 8, dtype=torch.int8), torch.empty(4)
    assert int8_head.fill([weight[:3], weight[3:]], {"weight": q, "scale": scale})
    weight[3, 5] = value
    assert not int8_head.fill([weight[:3], weight[3:]], {"weight": q, "scale": scale})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_product_rounds_once_after_float32_sums(monkeypatch, dtype, has_bias):
    torch.manual_seed(1)
    q, scale = int8_head.quantize_rows(torch.randn(301, 128))
    bias = torch.randn(301).to(dtype) if has_bias else None
    x = torch.randn(2, 3, 128).to(dtype)
    whole = int8_head.Head(q, scale, bias)(x)
    monkeypatch.setattr(int8_head, "HEAD_CHUNK_VALUES", 128 * 50)  # seven chunks, the last one short
    y = int8_head.Head(q, scale, bias)(x)
    assert y.shape == (2, 3, 301) and y.dtype == dtype
    exact = x.double() @ q.double().T * scale.double() + (0 if bias is None else bias.double())
    step = 2**-8 if dtype == torch.bfloat16 else 2**-22
    assert ((y.double() - exact).abs() <= exact.abs() * step + 1e-4).all()
    torch.testing.assert_close(y, whole, rtol=step * 2, atol=1e-4)


# The kernel -----------------------------------------------------------------------------------------------------------


def kernel(source: str | None = None, order: int = 0) -> run.CpuModule:
    return run.CpuModule(source or int8_head.source(), int8_head.NAMES, order=order, multiprocessors=1)


def random_head(rows: int, width: int, *, bias: bool = False) -> int8_head.Head:
    torch.manual_seed(rows + width)
    q, scale = int8_head.quantize_rows(torch.randn(rows, width) * torch.rand(rows, 1))
    return int8_head.Head(q, scale, torch.randn(rows).bfloat16() if bias else None)


@pytest.mark.parametrize("order", [0, 1, 7])
@pytest.mark.parametrize("rows, width, bias", [(48, 64, False), (301, 320, True), (16 * 17, 256, False)])
def test_the_kernel_agrees_with_float64_and_torch(rows, width, bias, order):
    head = random_head(rows, width, bias=bias)
    module = kernel(order=order)
    assert head_kernel.why_not(head, torch.bfloat16, module) is None
    assert head_kernel.check(module, head, counts=(1, 2, 5, 8)) is None and module.launches == ["head8"] * 4


def test_every_8_bit_value_and_place_is_decoded(tmp_path):
    """x picks one column at a time, so that y is that column of q itself."""
    width = 128
    q = (torch.arange(255 * width) * 7 % 255 - 127).to(torch.int8).view(255, width)
    head = int8_head.Head(q, torch.ones(255), None)
    head.kernel.module = kernel()
    for start in range(0, width, 8):
        x = torch.zeros(8, width, dtype=torch.bfloat16)
        x[torch.arange(8), torch.arange(start, start + 8)] = 1
        assert torch.equal(head(x), q[:, start : start + 8].T.bfloat16())


def test_the_kernel_writes_its_rows_alone_and_reads_strided_ones():
    head = random_head(40, 192)
    module = kernel()
    wide = torch.randn(3, 2, 192).bfloat16()
    out = torch.full((3, 64), math.nan, dtype=torch.bfloat16)
    int8_head.launched(wide[:, 1], head.q, head.scale, None, module, out=out[:, :40])
    torch.testing.assert_close(out[:, :40], int8_head.plain(wide[:, 1], head.q, head.scale))
    assert out[:, 40:].isnan().all()
    odd = torch.randn(2, 193).bfloat16()[:, 1:]  # not aligned: copied first
    torch.testing.assert_close(int8_head.launched(odd, head.q, head.scale, None, module), int8_head.plain(odd, head.q, head.scale))


@pytest.mark.parametrize("right, wrong", [
    ("0xc300c300u", "0xc200c200u"), ("first + 8 * half", "first + half"), ("scales[i >> 1]", "scales[0]"),
    ("2 * t + (i & 1)", "2 * t"),
])  # fmt: skip
def test_a_kernel_that_computes_wrongly_is_left_out(right, wrong):
    source = int8_head.source()
    assert right in source
    why = head_kernel.check(kernel(source.replace(right, wrong)), random_head(64, 128))
    assert why is not None and "relative error" in why


def test_a_kernel_that_is_slower_is_left_out_and_what_was_measured_is_kept(monkeypatch):
    head, module = random_head(64, 128), kernel()
    times = iter([3.0, 2.0, 3.0, 20.0])
    monkeypatch.setattr(int8_head, "load", lambda device: module)
    monkeypatch.setattr("trimtab.engine.kernels.autotune.graph_us", lambda run, device: next(times))
    for theirs, used, why in ((2.0, None, "slower here: 3.0 µs against torch's 2.0"), (20.0, module, None)):
        measured: dict = {}
        found = head_kernel.family(head, torch.bfloat16).choose_alone(head.q.device, measured)
        assert found == (used, why) and measured == {int8_head.NAME: (3.0, theirs)}
    found = head_kernel.measure(module, head, lambda run: (run(), 5.0)[1], weight=torch.randn(64, 128))
    assert found == {int8_head.NAME: (5.0, 5.0), "whole head": (5.0, 5.0)}


@pytest.mark.parametrize("tier", ["resident", "stream"])
def test_a_loaded_head_uses_the_kernel_that_was_chosen(demo_plan, monkeypatch, tier):
    plan = of_demo(place={"head": tier})
    with trimtab.load(plan) as model:
        wanted, leaf, module = model.logits(ASKED[1]), model.hf_model.lm_head, kernel()
        monkeypatch.setattr(int8_head, "load", lambda device: module)
        times = iter([5.0, 1.0, 1.0, 5.0])
        monkeypatch.setattr("trimtab.engine.kernels.autotune.graph_us", lambda run, device: next(times))
        assert "slower here" in str(head_kernel.choose(leaf)) and kernel_of(model) is None
        assert head_kernel.choose(leaf) is None and kernel_of(model) is module
        module.launches.clear()
        torch.testing.assert_close(model.logits(ASKED[1]), wanted, rtol=2**-7, atol=2**-7)
        assert module.launches

        def refuses(device):
            raise DeviceError("does not compile", device="cuda")

        monkeypatch.setattr(int8_head, "load", refuses)
        assert "does not compile" in str(head_kernel.choose(leaf))


def test_what_the_kernel_cannot_take_goes_through_torch():
    head, module = random_head(64, 96), kernel()
    assert "96 values" in str(head_kernel.why_not(head, torch.bfloat16, module))
    head = random_head(64, 128)
    assert "float32" in str(head_kernel.why_not(head, torch.float32, module))
    head.kernel.module = module
    for x in (torch.randn(9, 128).bfloat16(), torch.randn(2, 128)):
        torch.testing.assert_close(head(x), int8_head.plain(x, head.q, head.scale))
    assert module.launches == []
    assert head(torch.randn(1, 8, 128).bfloat16()).shape == (1, 8, 64)
    assert module.launches == ["head8"]


# Loaded models --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo_plan() -> Plan:
    return of_demo()


def head_weight(folder: Path) -> Tensor:
    """The tensor of the file that the demo's head is."""
    checkpoint = read_checkpoint(folder)
    probe = transformers_model.probe(checkpoint)
    expression = probe.sources["lm_head.weight"]
    (name,) = expression.leaves
    return read_small({name: checkpoint.tensors[name]})[name]


def test_the_head_is_made_from_the_file_and_the_table_stays_bit_for_bit(demo_plan):
    weight = head_weight(DEMO / "base")
    with trimtab.load(demo_plan) as model:
        leaf = model.hf_model.lm_head
        assert isinstance(leaf, ResidentLeaf) and leaf.quant_kind == HEAD8
        q, scale = int8_head.quantize_rows(weight)
        packed = leaf.packed()
        assert torch.equal(packed.parts["weight"], q) and torch.equal(packed.parts["scale"], scale)
        table = model.hf_model.get_input_embeddings()
        assert torch.equal(table.rows(torch.arange(len(weight))), weight.to(model.dtype))
        assert kernel_of(model) is None  # no kernel on a CPU, and nothing to tell of it
        assert model.fallbacks == ()


def test_pieces_smaller_than_the_weight_give_the_same_head(demo_plan, monkeypatch):
    from trimtab.engine.loader import load

    monkeypatch.setattr(load, "HEAD_PIECE_VALUES", 7 * 128)
    q, scale = int8_head.quantize_rows(head_weight(DEMO / "base"))
    with trimtab.load(demo_plan) as model:
        packed = model.hf_model.lm_head.packed()
        assert torch.equal(packed.parts["weight"], q) and torch.equal(packed.parts["scale"], scale)


def test_the_plan_counts_the_bytes_that_the_head_takes(demo_plan):
    (row,) = [row for row in demo_plan.placements if row.block_path == "lm_head"]
    rows, width = head_weight(DEMO / "base").shape
    assert row.part == "head" and packed_parts((rows, width), HEAD8, "bfloat16") == {"weight": rows * width, "scale": 4 * rows}
    assert row.gpu_bytes == rows * width + 4 * rows  # on a CPU nothing is rounded up
    with trimtab.load(demo_plan) as model:
        packed = model.hf_model.lm_head.packed()
        assert packed.nbytes == row.gpu_bytes
        storage = packed.parts["weight"].untyped_storage()
        assert storage.data_ptr() == packed.parts["scale"].untyped_storage().data_ptr()
        assert buffer_bytes({name: part.nbytes for name, part in packed.parts.items()}) <= storage.nbytes()
    assert "8-bit head" in str(demo_plan) and not any(row.module_path == "lm_head" for row in demo_plan.unquantized)
    assert demo_plan.request.head == "int8" and Plan.from_json(json.loads(json.dumps(demo_plan.to_json()))) == demo_plan


def test_a_step_is_counted_with_the_weights_that_are_float32_at_a_time():
    from trimtab.planning.memory.activations import needs_of, use_of

    checkpoint = read_checkpoint(DEMO / "base")
    found = {
        head: transformers_model.anatomy_of(transformers_model.probe(checkpoint), checkpoint, quant="nf4-dq", head=head)
        for head in ("full", "int8")
    }
    use = use_of(LoadRequest(model="m", context_tokens=1, images=0, audio_s=0), found["full"], answer_tokens=1)
    steps = {head: needs_of(one, use, quant="nf4-dq", has_adapters=False).phases["step"][1] for head, one in found.items()}
    rows, width = head_weight(DEMO / "base").shape
    assert rows * width < HEAD_CHUNK_VALUES and steps["int8"] >= 4 * rows * width > steps["full"]


def test_with_an_8_bit_head_the_token_table_can_leave(demo_plan):
    table = "model.language_model.embed_tokens"
    plan = of_demo(place={table: "gather"})
    (row,) = [row for row in plan.placements if row.block_path == table]
    assert row.gpu_bytes < 1024 and row.host_bytes == head_weight(DEMO / "base").numel() * 2
    with trimtab.load(demo_plan) as resident, trimtab.load(plan) as model:
        assert isinstance(model.hf_model.get_input_embeddings(), GatheredTable)
        assert torch.equal(model.logits(ASKED[0]), resident.logits(ASKED[0]))
    with pytest.raises(RequestError, match="cannot be placed on gather"):
        trimtab.plan(DEMO / "base", device="cpu", place={table: "gather"})


def test_the_table_may_stay_in_the_checkpoint_file(demo_plan):
    table = "model.language_model.embed_tokens"
    plan = of_demo(device_map={"": "cpu", table: "disk"})
    assert {row.block_path: row.home for row in plan.placements}[table] == "file"
    with trimtab.load(demo_plan) as resident, trimtab.load(plan) as model:
        assert torch.equal(model.logits(ASKED[1]), resident.logits(ASKED[1]))


@pytest.mark.parametrize("tier, kind", [("stream", StagedLinear), ("disk", StagedLinear), ("host", HostLeaf)])
def test_every_tier_gives_the_same_logits(demo_plan, tier, kind, tmp_path):
    plan = of_demo(place={"head": tier}, offload_dir=tmp_path)
    assert plan.tier_of("lm_head") == tier
    with trimtab.load(demo_plan) as resident, trimtab.load(plan) as model:
        leaf = model.hf_model.lm_head
        assert type(leaf) is kind and leaf.quant_kind == HEAD8
        if model.streamer is not None:
            model.streamer.poison = True
        for ids in ASKED:
            assert torch.equal(model.logits(ids), resident.logits(ids))
        assert kernel_of(model) is None


def test_answers_stay_those_of_the_whole_head(demo_plan):
    adapters = {path.name: path for path in sorted((DEMO / "adapters").iterdir()) if path.is_dir()}
    assert adapters
    plan = of_demo(adapters=adapters)
    whole = of_demo(head="full", adapters=adapters)
    with trimtab.load(plan) as ours, trimtab.load(whole) as theirs:
        for name in (None, *adapters):
            options = {"adapter": name, "max_new_tokens": 12}
            assert ours.answer("Who are you?", **options).text == theirs.answer("Who are you?", **options).text
            a, b = (m.logits(ASKED[0], adapter=name).log_softmax(-1) for m in (ours, theirs))
            assert 0 < (b.exp() * (b - a)).sum(-1).max() < 2e-3


def test_logits_are_those_of_the_8_bit_weight_in_float64(demo_plan):
    with trimtab.load(demo_plan) as model:
        x, y = seen_by_head(model)
        parts = model.hf_model.lm_head.packed().parts
        exact = x.double() @ parts["weight"].double().T * parts["scale"].double()
        assert (y.double() - exact).abs().max() <= exact.abs().max() * 2**-8


# Adapters -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return pico.build("gemma4", tmp_path_factory.mktemp("gemma4"))


def planned(base: Path, **options) -> Plan:
    return trimtab.plan(base, device="cpu", context=64, images=0, audio_s=0, **options)


def on_the_head(base: Path, folder: Path, *, dora: bool = False) -> Path:
    """Write an adapter of rank 4 for the head alone, by hand: PEFT 0.19 refuses a tied one."""
    rows, width = head_weight(base).shape
    generator = torch.Generator().manual_seed(4)
    name = "base_model.model.lm_head"
    tensors = {
        f"{name}.lora_A.weight": torch.randn(4, width, generator=generator) / 8,
        f"{name}.lora_B.weight": torch.randn(rows, 4, generator=generator) / 8,
    }
    if dora:
        tensors[f"{name}.lora_magnitude_vector"] = torch.rand(rows, generator=generator) + 0.5
    config = {
        "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["lm_head"], "use_dora": dora, "bias": "none",
        "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base),
    }  # fmt: skip
    return write_tensors(folder, tensors, config)


def test_lora_on_the_head_is_added_to_the_8_bit_product(base, tmp_path):
    adapter = on_the_head(base, tmp_path / "head")
    with trimtab.load(planned(base, head="int8", adapters={"a": adapter})) as model:
        x, y = seen_by_head(model, adapter="a")
        leaf = model.hf_model.lm_head
        own = leaf.adapters["a"]
        weight = leaf.packed()
        exact = x.double() @ weight.parts["weight"].double().T * weight.parts["scale"].double()
        change = own.scale * (x.double() @ own.A.double().T @ own.B.double().T)
        assert change.abs().max() > exact.abs().max() * 1e-3
        assert (y.double() - exact - change).abs().max() <= 3 * (exact + change).abs().max() * 2**-8


def test_dora_on_the_head_scales_by_the_8_bit_weights_own_norms(base, tmp_path):
    adapter = on_the_head(base, tmp_path / "dora", dora=True)
    with trimtab.load(planned(base, head="int8", adapters={"a": adapter})) as model:
        leaf = model.hf_model.lm_head
        own, parts = leaf.adapters["a"], leaf.packed().parts
        dense = int8_head.dense(parts["weight"], parts["scale"], model.dtype)
        norm = torch.linalg.norm(dense.float() + own.scale * (own.B @ own.A), dim=1)
        stored = own.magnitude.flatten() * norm
        x = torch.randn(3, leaf.in_features).bfloat16()
        model.adapter_store.set("a")
        changed = (dense.double() + own.scale * (own.B @ own.A).double()) * (stored / norm).double()[:, None]
        y = leaf(x)
        model.adapter_store.set(None)
        assert (y.double() - x.double() @ changed.T).abs().max() <= 4 * y.abs().max() * 2**-8


def test_an_adapter_that_brings_the_unchanged_head_costs_nothing_and_a_changed_one_keeps_its_own(base, tmp_path):
    weight = head_weight(base)
    plain = pico.adapter(base, tmp_path / "saved", modules_to_save=["lm_head"])
    file = plain / "adapter_model.safetensors"
    tensors = load_file(file)
    (name,) = [key for key in tensors if "lm_head" in key]
    for change, is_kept in ((0.0, False), (0.25, True)):
        tensors[name] = (weight + change).contiguous()
        save_file(tensors, file)
        with trimtab.load(planned(base, head="int8", adapters={"a": plain})) as model:
            assert ("a" in model.hf_model.lm_head.adapters) is is_kept
            if is_kept:
                x = torch.randn(2, weight.shape[1]).bfloat16()
                model.adapter_store.set("a")
                torch.testing.assert_close(model.hf_model.lm_head(x), x @ tensors[name].bfloat16().T)
                model.adapter_store.set(None)


def test_a_full_embedding_in_an_adapter_reaches_the_tied_head_too(base, tmp_path):
    """PEFT copies an embedding that modules_to_save does not name into the base: both ends of a tied model change."""
    adapter = pico.adapter(base, tmp_path / "both")
    file = adapter / "adapter_model.safetensors"
    changed = (head_weight(base) * 1.5).contiguous()
    name = "base_model.model.model.language_model.embed_tokens.weight"
    save_file(load_file(file) | {name: changed}, file)
    found = {}
    for head in ("full", "int8"):
        with trimtab.load(planned(base, head=head, quant="none", adapters={"a": adapter})) as model:
            assert "a" in model.hf_model.lm_head.adapters and "a" in model.hf_model.get_input_embeddings().adapters
            found[head] = model.logits(ASKED[0], adapter="a")
    torch.testing.assert_close(found["int8"], found["full"])


# Families and errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3_vl", "gemma3"])
def test_other_families_and_untied_heads_load_and_answer(family, tmp_path):
    folder = pico.build(family, tmp_path)
    checkpoint = read_checkpoint(folder)
    is_tied = bool(transformers_model.probe(checkpoint).ties)
    plan, whole = planned(folder, head="int8", quant="none"), planned(folder, quant="none")
    with trimtab.load(plan) as model, trimtab.load(whole) as theirs:
        assert model.hf_model.get_output_embeddings().quant_kind == HEAD8
        a, b = model.logits(ASKED[0]), theirs.logits(ASKED[0])
        assert 0 < (a - b).abs().max() <= 0.02 * b.abs().max()
    if not is_tied:  # nothing else of the model changes its place
        assert plan.tiers() == whole.tiers()


def with_head(folder: Path, change) -> tuple[Path, Tensor]:
    """Return a tiny Llama whose head is changed in its file, and the head."""
    file = pico.build("llama", folder) / "model.safetensors"
    tensors = load_file(file)
    name = "lm_head.weight" if "lm_head.weight" in tensors else "model.embed_tokens.weight"
    tensors[name] = change(tensors[name])
    save_file(tensors, file, metadata={"format": "pt"})
    return file.parent, tensors[name]


def test_a_head_of_float32_is_made_from_float32(tmp_path):
    torch.manual_seed(3)
    folder, head = with_head(tmp_path, lambda head: head.float() + torch.randn(head.shape) * 1e-4)
    with trimtab.load(planned(folder, head="int8", quant="none")) as model:
        parts = model.hf_model.lm_head.packed().parts
    q, scale = int8_head.quantize_rows(head)
    assert torch.equal(parts["weight"], q) and torch.equal(parts["scale"], scale)
    assert not int8_head.is_same({"weight": q, "scale": scale}, head.bfloat16())


def test_a_value_that_is_not_finite_names_the_tensor(tmp_path):
    folder, _ = with_head(tmp_path, lambda head: head.index_fill(0, torch.tensor([5]), math.inf))
    with pytest.raises(CheckpointError, match="not finite") as error:
        trimtab.load(planned(folder, head="int8", quant="none"))
    assert error.value.tensor_name == "lm_head.weight"


def test_what_cannot_be_is_refused_by_name(base):
    with pytest.raises(RequestError, match="unknown choice") as error:
        planned(base, head="int4")
    assert (error.value.field, error.value.value, error.value.allowed) == ("head", "int4", ("auto", "full", "int8"))
    with pytest.raises(RequestError, match="keep_unquantized names lm_head") as error:
        planned(base, head="int8", keep_unquantized=("lm_head",))
    assert (error.value.field, error.value.value) == ("head", "int8")
    with pytest.raises(RequestError, match="gather") as error:
        planned(base, head="int8", place={"lm_head": "gather"})
    assert error.value.field == "place['lm_head']"


class _Bare(torch.nn.Module):
    """What the head is asked of: a model, its output embeddings and paths."""

    def __init__(self, head: torch.nn.Module | None) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.out = head

    def get_output_embeddings(self):
        return self.out


def test_models_without_a_head_of_their_own_are_refused():
    from trimtab.engine.loader.anatomy_builder import _head_path

    with pytest.raises(RequestError, match="_Bare has no language head") as error:
        _head_path(_Bare(None), {}, {}, ())
    assert (error.value.field, error.value.value, error.value.allowed) == ("head", "int8", ("full",))
    with pytest.raises(RequestError, match="not a plain Linear"):
        _head_path(_Bare(torch.nn.Bilinear(2, 2, 2)), {}, {}, ())
    assert _head_path(_Bare(torch.nn.Linear(2, 2)), {}, {}, ()) == "out"


def test_a_head_that_the_checkpoint_holds_packed_is_refused():
    from trimtab.engine.loader.anatomy_builder import _head_path
    from trimtab.engine.loader.tracing import Expression

    model = _Bare(torch.nn.Linear(2, 2))
    sources = {"out.weight": Expression(leaf="head.weight")}
    with pytest.raises(RequestError, match="already holds out quantized") as error:
        _head_path(model, sources, {"head.weight": object()}, ())  # type: ignore[dict-item]
    assert error.value.field == "head"


def test_ties_are_undone_at_the_head_alone():
    from trimtab.engine.loader.anatomy_builder import _untied_head

    assert _untied_head("h", {"h.weight": "e.weight", "x": "y"}) == ({"h.weight": "e.weight"}, {"x": "y"})
    assert _untied_head("h", {"e.weight": "h.weight", "d.weight": "h.weight"}) == (
        {"h.weight": "e.weight"}, {"d.weight": "e.weight"},
    )  # fmt: skip
    assert _untied_head("h", {"x": "y"}) == ({}, {"x": "y"})


# The command line -----------------------------------------------------------------------------------------------------


def test_the_flag_reaches_the_plan_and_the_answer(capsys):
    from trimtab.cli.main import main

    words = [str(DEMO / "base"), "--head", "int8", "--device", "cpu", "--json"]
    assert main(["plan", *words]) == 0
    assert json.loads(capsys.readouterr().out)["request"]["head"] == "int8"
    assert main(["run", *words, "--max-new-tokens", "3", "Hello"]) == 0
    assert json.loads(capsys.readouterr().out)["text"]
    assert main(["plan", str(DEMO / "base"), "--head", "int9", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["fields"]["field"] == "head"


def test_verify_holds_the_8_bit_head_against_the_whole_one():
    prompts = [{"id": "one", "text": "Who are you?"}]
    report = trimtab.verify(DEMO / "base", head="int8", against="full-head", prompts=prompts, new_tokens=4, isolated=False)
    (row,) = report.prompts
    assert report.subject["head"] == "8-bit head" and "head" not in report.reference
    assert 0 < row.difference.kl_mean < 1e-3 and row.difference.top1_agreement > 0.9 and row.same_text
    with pytest.raises(RequestError, match="head='int8'") as error:
        trimtab.verify(DEMO / "base", against="full-head", prompts=prompts, isolated=False)
    assert error.value.field == "against"
    with pytest.raises(RequestError, match="stock stack has no 8-bit head"):
        trimtab.verify(DEMO / "base", head="int8", against="stock", prompts=prompts, isolated=False)


def test_a_registry_says_head(tmp_path):
    from trimtab.serve.worker.registry import read_registry

    file = tmp_path / "models.toml"
    file.write_text(f'[models.one]\npath = "{(DEMO / "base").as_posix()}"\nhead = "int8"\n', encoding="utf-8")
    (model,) = read_registry(file)
    assert model.request.head == "int8"
