"""Whole decode steps from the CUDA sources, run on the CPU: few rows and many, adapters by table, attention, the ends."""

from itertools import groupby

import pytest
import torch

import trimtab
from tests import mobile_files, pico, quantized_files
from tests.cuda_on_cpu import modules
from tests.engine.decode.test_graphs import ASKED, answers, demo, joined, replayed  # noqa: F401 - replayed is a fixture
from trimtab.engine.batched_lora import table as slots
from trimtab.engine.cuda import nvrtc
from trimtab.engine.decode import decode_step
from trimtab.engine.formats.packed import MatmulTable
from trimtab.engine.kernels import autotune, dequantize, device_kernels, gemm4, gemv4
from trimtab.engine.tiers import streaming

# bfloat16: every product, norm and attention rounds once, in another order of sums than torch's.
STEP_TOLERANCE = 2**-4


RANKS = {"a": 4, "b": 20}


@pytest.fixture
def on_cpu(monkeypatch):
    """The kernels of both sources, compiled by g++, in place of those of a GPU."""
    few = {"multiprocessors": 4}
    chosen = device_kernels.DeviceKernels(modules.small(**few), modules.products(**few), ends=modules.step_ends())
    monkeypatch.setattr(nvrtc, "why_not", lambda device: None)
    monkeypatch.setattr(decode_step.DeviceKernels, "none", staticmethod(lambda: chosen))
    return chosen


@pytest.mark.parametrize("decode", ["auto", "graph"])
def test_adapters_by_table_serve_captured_modules(on_cpu, replayed, tmp_path, decode):  # noqa: F811
    """A tiny Llama: its own modules, adapters of two ranks looked up by each row, nothing captured anew."""
    assert device_kernels.wrong_lora(on_cpu.matvec, torch.bfloat16) is None
    base = pico.build("llama", tmp_path / "base")
    adapters = {name: pico.adapter(base, tmp_path / name, seed=seed, rank=r) for seed, (name, r) in enumerate(RANKS.items())}
    plan = trimtab.plan(base, quant="none", adapters=adapters, context=64, device="cpu")
    asked = [("a", [5, 6, 7], {}), (None, [9, 8], {}), ("b", [4], {})]
    with trimtab.load(plan) as model:
        eager, batch = (joined(model, way, asked, rows=4) for way in ("eager", decode))
        assert batch.steps.is_captured and batch.steps._slots is None
        for names in (["a", None, "b"], ["b", "a", None], [None, "b", "b"]):
            for one in (eager, batch):
                for row, name in zip(one.active, names, strict=True):
                    row.adapter = name
                    row.token_ids.append(11)
                one.write_last_tokens()
            wanted, found = eager.logits(), batch.logits()
            assert (found - wanted).abs().max() <= 2**-6 * wanted.abs().max()
        # One launch a layer: A x is made by those of the first of a group. The kernels' check launched it three times.
        leaves = len(table._covered) if (table := batch.steps._slots) else 0
        adds = on_cpu.matvec.launches.count("lora_add") - 3
        assert batch.steps.captures == 1 and adds > 40 and leaves > 0 and adds % leaves == 0
        assert {name.partition("_")[0] for name in on_cpu.ends.launches} == {"likeliest"}


def test_layers_share_a_x_only_of_the_very_same_numbers(on_cpu, tmp_path, monkeypatch):
    base = pico.build("llama", tmp_path / "base")
    adapters = {"a": pico.adapter(base, tmp_path / "a", seed=1, rank=6)}
    with trimtab.load(trimtab.plan(base, quant="none", adapters=adapters, context=64, device="cpu")) as model:
        table = slots.AdapterSlots(model.hf_model.modules(), model.adapter_store, 2, torch.device("cpu"), module=on_cpu.matvec)
        table.set_rows(["a", "a"])
        attention = model.hf_model.model.layers[0].self_attn
        q, k = attention.q_proj, attention.k_proj
        x = torch.randn(2, q.in_features).bfloat16()

        makes = []
        add = gemv4.lora_add
        monkeypatch.setattr(gemv4, "lora_add", lambda *a, x, **o: (makes.append(x is not None), add(*a, x=x, **o)))

        def is_made(leaf, given):
            y = torch.zeros(2, leaf.out_features).bfloat16()
            found = leaf.adapters["a"]
            table.add(leaf, given, y)
            wanted = found.scale * (given.double() @ found.A.double().T @ found.B.double().T)
            assert autotune.relative_error(y, wanted) < autotune.LARGEST_ERROR
            return makes[-1]

        for emptied in (False, True):  # a layer that comes twice finds what its first call made, emptied or not
            if emptied:
                table.empty(2)
            assert is_made(q, x) and not is_made(k, x)
            assert is_made(k, x.clone())  # equal, but another tensor: nobody says that it stays so
            assert is_made(q, x)
            x *= 2
            assert is_made(k, x) and is_made(q, x) and not is_made(k, x)
            table.empty(2)
            assert is_made(k, x)  # what was shared is gone
        with torch.inference_mode():
            y = x.clone()
            assert is_made(q, y) and is_made(k, y)


def test_a_wrong_adapter_kernel_is_named(on_cpu, monkeypatch):
    monkeypatch.setattr(gemv4, "lora_add", lambda y, args, module, *, x: None)
    assert "relative error" in device_kernels.wrong_lora(on_cpu.matvec, torch.bfloat16)
    monkeypatch.setattr(device_kernels, "of_this_process", device_kernels.ChosenKernels)
    monkeypatch.setattr(gemv4, "load", lambda device: on_cpu.matvec)
    for dtype, why in ((torch.bfloat16, "relative error"), (torch.float32, "float32")):
        assert why in device_kernels.DeviceKernels.for_adapters(torch.device("cpu"), dtype).left_out[device_kernels.ADAPTERS]


def test_a_step_of_mixed_rows_from_the_kernels_is_the_modules(on_cpu, replayed):  # noqa: F811
    asked = [ASKED[0], ASKED[1], ASKED[5]]
    with demo("streamed") as model:
        expected = joined(model, "eager", asked, rows=4)
        batch = joined(model, "fused", asked, rows=4)
        for step in range(3):
            wanted, found = expected.logits(), batch.logits()
            assert (found - wanted).abs().max() <= STEP_TOLERANCE * wanted.abs().max()
            assert found.argmax(-1).tolist() == wanted.argmax(-1).tolist()
            for one in (expected, batch):
                for row, token in zip(one.active, wanted.argmax(-1).tolist(), strict=True):
                    row.token_ids.append(token)
                one.write_last_tokens()
            if step == 1:  # rows change their adapters: nothing is captured anew
                captured = batch.steps.captures
                for one in (expected, batch):
                    one.active[0].adapter, one.active[2].adapter = "specialist", None
        assert batch.steps.captures == captured == 1 and batch.steps.fallbacks == []
        assert "matvec_4" in on_cpu.matvec.launches and len(on_cpu.small.launches) > 50
        counted = [on_cpu.ends.launches.count(name) for name in ("rows", "per_layer", "likeliest_8")]
        # Here the modules' steps end with the kernel too.
        assert counted[0] == counted[1] == counted[2] - 3 > 2


@pytest.mark.parametrize("decode", ["eager", "fused"])
def test_a_step_says_of_each_streamed_block_that_it_was_read(on_cpu, replayed, monkeypatch, decode):  # noqa: F811
    """Otherwise the next copy begins when its own block is asked for, and nothing hides it. Where kernels read a block, no module's
    end can say so."""
    said = []

    def recorded(name):
        own = getattr(streaming.Streamer, name)

        def call(self, what):
            said.append((name, what.block.block if name == "enter" else what.block))
            return own(self, what)

        return call

    with demo("front") as model:
        batch = joined(model, decode, [ASKED[0]], rows=1)
        batch.logits()
        for name in ("enter", "leave"):
            monkeypatch.setattr(streaming.Streamer, name, recorded(name))
        batch.steps._graphs.clear()
        batch.logits()
    # Of the text model itself one layer is streamed: the projection of each layer's own input.
    streamed = ["model.language_model", *(f"model.language_model.layers.{number}" for number in (3, 5))]
    once = [what for what, _ in groupby(said)]
    assert once[:6] == [(what, block) for block in streamed for what in ("enter", "leave")]


@pytest.mark.parametrize("place", ["resident", "streamed"])
def test_a_step_with_kernels_at_its_ends_alone_is_that_of_plain_torch(on_cpu, replayed, place):  # noqa: F811
    """Tables on the device and tables whose rows are staged; an adapter leaves the ends alone."""
    asked = [ASKED[0], ASKED[1], ASKED[5]]
    with demo(place) as model:
        on_cpu.small = on_cpu.matvec = None
        expected, batch = (joined(model, "fused", asked, rows=4) for _ in range(2))
        for _ in range(3):
            tokens, found = [], []
            for one, kernels_of_ends in ((expected, None), (batch, on_cpu.ends)):
                one.steps._choice.kernels = device_kernels.DeviceKernels(ends=kernels_of_ends)
                scores, greedy = one._forward()
                one._advance(one.active)
                tokens.append(one.tokens[:3, 0].tolist())
                found.append(scores.clone())
                assert greedy.tolist() == tokens[-1] == scores.argmax(-1).tolist()
                for row, token in zip(one.active, tokens[-1], strict=True):
                    row.token_ids.append(token)
            # A tanh that is one float32 step away may round to the other side.
            assert tokens[0] == tokens[1] and int((found[0] != found[1]).sum()) <= 2
            assert (found[0] - found[1]).abs().max() <= 2**-7 * found[0].abs().max()
        # Before, in and after the capture, twice beside copied layers; then three steps.
        assert on_cpu.ends.launches == ["rows", "likeliest_8"] * (7 if place == "streamed" else 6)


@pytest.mark.parametrize("decode", ["auto", pytest.param("graph", marks=pytest.mark.slow)])
def test_batch_invariant_steps_are_one_graph_of_all_rows_whoever_is_active(on_cpu, replayed, tmp_path, decode):  # noqa: F811
    """A tiny Llama: bits of a row's scores are the same alone and beside others with other adapters, in another row, and beside one
    whose adapter no table holds."""
    base = pico.build("llama", tmp_path / "base")
    adapters = {name: pico.adapter(base, tmp_path / name, seed=seed, rank=r) for seed, (name, r) in enumerate(RANKS.items())}
    adapters["dora"] = pico.adapter(base, tmp_path / "dora", seed=5, rank=4, dora=True)
    plan = trimtab.plan(base, quant="none", adapters=adapters, context=64, device="cpu", batch=4, batch_invariant=True)
    with trimtab.load(plan) as model:

        def scores(*asked, of):
            batch = joined(model, decode, [(name, ids, {}) for name, ids in asked], rows=4)
            assert batch.steps.is_captured and batch.is_invariant and batch.steps._adapter_slots().is_fixed
            found = [batch.logits()[of].clone() for _ in range(3)]
            captures = batch.steps.captures
            return torch.stack(found), captures

        company = [(0, [("b", [4])]), (1, [("b", [12, 13]), ("b", [1])]), (2, [(None, [30, 31]), ("dora", [7]), ("a", [8, 8])])]
        for number, ask in enumerate((("a", [5, 6, 7]), (None, [9, 8, 3, 4]), ("dora", [4, 9]))):
            wanted, captures = scores(ask, of=0)
            assert captures == (ask[0] != "dora")
            for of, others in (*company[number + 1 :], *company[:number]):  # two of them, others from one to the next
                beside = [*others[:of], ask, *others[of:]]
                found, _ = scores(*beside, of=of)
                assert torch.equal(found, wanted)


# bfloat16: one rounding of a product in another order moves a score by a few steps of 2^-8 of the largest.
MANY_STEP_TOLERANCE = 2**-5


def wide(family, monkeypatch, folder):
    """Return the folder of a family's tiny checkpoint with a hidden size of 256, and adapters of two ranks."""
    name = f"{family}_wide"
    class_name, make = pico._CONFIGS[family]
    monkeypatch.setattr(pico, "_TEXT", pico._TEXT | {"hidden_size": 256, "intermediate_size": 256})
    monkeypatch.setitem(pico._CONFIGS, name, (class_name, make))
    base = pico.build(name, folder / "base")
    adapters = {one: pico.adapter(base, folder / one, seed=seed, rank=rank) for seed, (one, rank) in enumerate(RANKS.items())}
    return base, adapters


@pytest.mark.parametrize(("family", "decode", "form"), [
    ("llama", "fused", None), ("llama", "graph", None), ("gemma4", "fused", "mobile"), ("llama", "fused", "nvfp4-ct"),
    pytest.param("gemma4", "fused", None, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_step_of_ten_rows_from_the_kernels_is_the_modules(
    on_cpu, replayed, monkeypatch, tmp_path, family, decode, form  # noqa: F811
):  # fmt: skip
    base, adapters = wide(family, monkeypatch, tmp_path)
    if form == "mobile":
        base = mobile_files.write(base, tmp_path / "file", rounds=False)
    elif form is not None:
        base = quantized_files.write(base, tmp_path / "file", form)[0]
    on_cpu.rows = modules.rows()
    if form is not None:
        on_cpu.rows.variant_names = ("rows_product_16", "rows_product_32", "rows_product_64", *["round_to_8"] * (form == "mobile"))
    quant = {} if form else {"quant": "nf4-dq"}
    plan = trimtab.plan(base, adapters=adapters, context=64, device="cpu", images=0, audio_s=0.0, **quant)
    asked = [(("a", None, "b")[number % 3], [5 + number, 6, 7 + 2 * number], {}) for number in range(10)]
    with trimtab.load(plan) as model:
        eager = joined(model, "eager", asked, rows=10)
        batch = joined(model, decode, asked, rows=10)
        if decode == "graph":  # on a CPU the operations themselves take the time, so modules are not covered there
            leaves = dequantize.four_bit(model.hf_model)
            plain = batch.steps._modules

            def covered(count, **more):
                with model.adapter_store.applying(None, MatmulTable(gemm4.matmul(leaves, on_cpu.rows))):
                    return plain(count, **more)

            monkeypatch.setattr(batch.steps, "_modules", covered)
        for _ in range(2):
            wanted, found = eager.logits(), batch.logits()
            assert (found - wanted).abs().max() <= MANY_STEP_TOLERANCE * wanted.abs().max()
            for one in (eager, batch):
                for row in one.active:
                    row.token_ids.append(11)
                one.write_last_tokens()
        launched = on_cpu.rows.launches
        assert launched.count("rows_product_16") > 5 and "rows_low" in launched and "rows_up" in launched
        # What is too narrow for the kernel takes the layers' own way, with the same table of adapters.
        assert not any(name.startswith("matvec") for name in on_cpu.matvec.launches)
        assert "lora_add" not in on_cpu.matvec.launches
        table = batch.steps._slots
        assert table is not None and table.slots == 32 and table.many is on_cpu.rows


def test_a_table_has_a_slot_for_every_row(on_cpu, replayed, monkeypatch, tmp_path):  # noqa: F811
    base, adapters = wide("llama", monkeypatch, tmp_path)
    plan = trimtab.plan(base, quant="none", adapters=adapters, context=64, device="cpu", batch=48)
    with trimtab.load(plan) as model:
        batch = joined(model, "graph", [("a", [5, 6], {}), ("b", [7], {})], rows=48)
        batch.logits()
        assert batch.steps._slots.slots == 48 and torch.isfinite(batch.logits()).all()
