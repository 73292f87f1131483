"""A step of more than eight rows from the CUDA sources themselves, run on the CPU: wide products, adapters by table, other layers.

Slow, thread by thread: one step of a tiny Gemma 4 whose rows are wide enough for the kernel, and of a tiny Llama whose modules are
covered.
"""

import pytest
import torch

import trimtab
from tests import mobile_files, pico, quantized_files
from tests.cuda_on_cpu import run
from tests.cuda_on_cpu.modules import rows as rows_module
from tests.engine.decode.test_graphs import joined, replayed  # noqa: F401
from tests.engine.kernels.test_fused_kernels import on_cpu  # noqa: F401
from trimtab.engine.formats.matmul_table import MatmulTable
from trimtab.engine.kernels import dequantize as prompt_kernels
from trimtab.engine.kernels import gemm4 as many_rows

pytestmark = pytest.mark.skipif(run.why_not() is not None, reason=str(run.why_not()))
# bfloat16: one rounding of a product in another order moves a score by a few steps of 2^-8 of the largest.
STEP_TOLERANCE = 2**-5
RANKS = {"a": 4, "b": 20}


def wide(family, monkeypatch, folder):
    """Return the folder of a family's tiny checkpoint with a hidden size of 256, and adapters of two ranks."""
    name = f"{family}_wide"
    class_name, make = pico._CONFIGS[family]
    monkeypatch.setattr(pico, "_TEXT", pico._TEXT | {"hidden_size": 256, "intermediate_size": 256})
    monkeypatch.setitem(pico._CONFIGS, name, (class_name, make))
    base = pico.build(name, folder / "base")
    adapters = {one: pico.adapter(base, folder / one, seed=seed, rank=rank) for seed, (one, rank) in enumerate(RANKS.items())}
    return base, adapters


@pytest.mark.parametrize(
    ("family", "decode", "form"),
    [("llama", "fused", None), ("llama", "graph", None), ("gemma4", "fused", "mobile"), ("llama", "fused", "nvfp4-ct"),
     pytest.param("gemma4", "fused", None, marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_step_of_ten_rows_from_the_kernels_is_the_modules(
    on_cpu, replayed, monkeypatch, tmp_path, family, decode, form  # noqa: F811
):  # fmt: skip
    base, adapters = wide(family, monkeypatch, tmp_path)
    if form == "mobile":
        base = mobile_files.write(base, tmp_path / "file", rounds=False)
    elif form is not None:
        base = quantized_files.write(base, tmp_path / "file", form)[0]
    on_cpu.rows = rows_module()
    if form is not None:
        on_cpu.rows.variant_names = ("rows_product_16", "rows_product_32", "rows_product_64", *["round_to_8"] * (form == "mobile"))
    quant = {} if form else {"quant": "nf4-dq"}
    plan = trimtab.plan(base, adapters=adapters, context=64, device="cpu", images=0, audio_s=0.0, **quant)
    asked = [(("a", None, "b")[number % 3], [5 + number, 6, 7 + 2 * number], {}) for number in range(10)]
    with trimtab.load(plan) as model:
        eager = joined(model, "eager", asked, rows=10)
        batch = joined(model, decode, asked, rows=10)
        if decode == "graph":  # on a CPU the operations themselves take the time, so modules are not covered there
            leaves = prompt_kernels.four_bit(model.hf_model)
            modules = batch.steps._modules

            def covered(count, **more):
                with model.adapter_store.multiplying(MatmulTable(many_rows.matmul(leaves, on_cpu.rows))):
                    return modules(count, **more)

            monkeypatch.setattr(batch.steps, "_modules", covered)
        for _ in range(2):
            wanted, found = eager.logits(), batch.logits()
            assert (found - wanted).abs().max() <= STEP_TOLERANCE * wanted.abs().max()
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
