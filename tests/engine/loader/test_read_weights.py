"""Linears whose weight the module around them reads: they are as in the files, in every tier and format."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

import trimtab
from tests import pico
from tests.raised import raised
from tests.stock import load_stock
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.engine.loader.transformers_model import read_anatomy
from trimtab.errors import AdapterError, DeviceError

IDS = [2, 5, 9, 44, 100, 7, 8, 33, 21]
SIZES = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
JAMBA = {
    "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
    "num_experts": 1, "num_experts_per_tok": 1, "mamba_d_state": 8, "mamba_dt_rank": 64,
}  # fmt: skip
LONGCAT = {
    "vocab_size": 320, "hidden_size": 64, "ffn_hidden_size": 128, "expert_ffn_hidden_size": 64, "num_layers": 1,
    "num_attention_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "head_dim": 16, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2, "bos_token_id": 2,
    "eos_token_id": 1,
}  # fmt: skip
FAMILIES = {
    "Mamba": (SIZES | {"state_size": 8}, "mixer.dt_proj"), "FalconMamba": (SIZES | {"state_size": 8}, "mixer.dt_proj"),
    "Jamba": (SIZES | JAMBA, "mamba.dt_proj"), "LongcatFlash": (LONGCAT, "mlp.router.classifier"),
}  # fmt: skip


@cache
def _base(name: str) -> Path:
    folder = Path(pico._cache_folder().name) / name
    config = getattr(transformers, f"{name}Config")(**FAMILIES[name][0])
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for path, value in model.named_parameters():
            if value.dim() >= 2 and "A_log" not in path:
                value.copy_(torch.randn_like(value) * value.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "options", [{"quant": "none", "place": {"*": tier}} for tier in ("stream", "disk", "host")] + [{"quant": "nf4"}], ids=str
)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_answer_is_stocks_with_the_same_weights(name, options):
    plain, read = load_stock(_base(name), dtype=torch.float32), FAMILIES[name][1]
    plan = trimtab.plan(str(_base(name)), device="cpu", dtype="float32", context=64, **options)
    with trimtab.load(plan) as model, torch.no_grad():
        for path, module in model.hf_model.named_modules():
            if hasattr(module, "dense_weight"):
                plain.get_submodule(path).weight.copy_(module.dense_weight())  # as the format rounds it
        expected = plain(input_ids=torch.tensor([IDS])).logits[0]
        torch.testing.assert_close(model.logits(IDS), expected, rtol=2e-4, atol=2e-4)
    listed = [one.reason for one in plan.unquantized if one.module_path.endswith(read)]
    assert set(listed) == ({"the module around it reads its weight"} if options["quant"] == "nf4" else set())


def test_it_can_be_named_in_keep_unquantized():
    rows = read_anatomy(read_checkpoint(str(_base("Mamba"))), quant="nf4", dtype="float32", keep_unquantized=("*dt_proj*",)).rows
    assert sum(row.is_read_linear for row in rows) == 2


@pytest.mark.parametrize("is_saved", [True, False], ids=["saved", "LoRA"])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_adapter_on_it_is_refused_and_can_be_merged(name, is_saved, tmp_path):
    rows = read_anatomy(read_checkpoint(str(_base(name))), quant="none", dtype="float32").rows
    row = next(row for row in rows if row.module_path.endswith(FAMILIES[name][1]))
    high, wide = row.weight.shape
    adapter = tmp_path / "a"
    adapter.mkdir()
    head = f"base_model.model.{row.module_path}"
    new = torch.randn(high, wide, generator=torch.Generator().manual_seed(0))
    A, B = new[:2] / 4, new[:, :2].contiguous() / 4
    tensors = {f"{head}.weight": new} if is_saved else {f"{head}.lora_A.weight": A, f"{head}.lora_B.weight": B}
    if is_saved and any(one.tensor_path.endswith(".bias") for one in row.tensors):
        tensors[f"{head}.bias"] = torch.ones(high)
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": [] if is_saved else [row.module_path]}
    config |= {"modules_to_save": [row.module_path] if is_saved else None}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterError) as refused:
        trimtab.plan(str(_base(name)), adapters={"a": str(adapter)}, device="cpu", quant="none", dtype="float32", context=64)
    assert any(row.module_path in one and "reads its weight" in one for one in refused.value.problems)
    trimtab.merge(str(_base(name)), str(tmp_path / "m"), adapters={"a": str(adapter)}, dtype="float32")
    own, merged = (
        load_stock(at, dtype=torch.float32).get_submodule(row.module_path).weight for at in (_base(name), tmp_path / "m")
    )
    torch.testing.assert_close(merged, new if is_saved else own + B @ A)


@pytest.mark.parametrize("options", [{"quant": "nf4"}, {"quant": "none", "place": {"*": "stream"}}], ids=["nf4", "streamed"])
def test_of_a_weight_that_is_elsewhere_only_shape_and_type_are_told(options):
    with trimtab.load(trimtab.plan(pico.built("llama"), device="cpu", context=64, **options)) as model:
        path = "model.layers.0.self_attn.o_proj"
        weight, x = model.hf_model.get_submodule(path).weight, torch.ones(64, 128, dtype=torch.bfloat16)
        assert (tuple(weight.shape), weight.dtype, weight.dim(), weight.size(0), weight.ndim) == (x.shape, x.dtype, 2, 64, 2)
        assert not weight.requires_grad and weight.device.type == "meta" and x.to(weight.dtype) is x
        reads = (
            lambda: weight @ x.T, lambda: torch.nn.functional.linear(x, weight), lambda: weight[0], lambda: weight.float(),
            lambda: x.to(weight), lambda: torch.cat([x, weight]), lambda: weight + 1, lambda: weight.data,
        )  # fmt: skip
        for read in reads:
            error = raised(DeviceError, read, match="the model's code reads the weight")
            assert (error.block, error.device) == (path, "meta")
