"""Tensors that no adapter changes: every value is compared, whoever merged, in every dtype and layout; what differs is named."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests import merged_models, pico
from tests.alarm_faults import change_tensors
from trimtab.merging import merge
from trimtab.verification.merges import unchanged
from trimtab.verification.merges.retention_files import read_merge
from trimtab.verification.merges.weights import merged_weights
from trimtab.verification.verify import verify

PROMPTS = [{"id": "one", "token_ids": list(range(40, 52))}]
ATTENTION = r".*(model|language_model)\.layers\.\d+\.self_attn\.(q_proj|v_proj)"
K_PROJ, NORM = "model.layers.1.self_attn.k_proj.weight", "model.layers.0.input_layernorm.weight"


def written(model, folder, **options):
    model.save_pretrained(folder, **options)
    return folder


def packed(folder, out, kind, dtype=torch.bfloat16):
    """Pack a folder with transformers and bitsandbytes, and return the new one."""
    form = {"load_in_8bit": True} if kind == "int8" else {
        "load_in_4bit": True, "bnb_4bit_quant_type": kind[:3], "bnb_4bit_use_double_quant": kind.endswith("-dq"),
        "bnb_4bit_compute_dtype": dtype,
    }  # fmt: skip
    options = {"quantization_config": BitsAndBytesConfig(**form), "device_map": {"": "cpu"}, "dtype": dtype}
    return written(AutoModelForCausalLM.from_pretrained(folder, **options), out)


def judged(base, merged, adapter):
    found = merged_weights(*read_merge(base, merged, adapter)[1:])
    return found.verdict, found.others.differing, found.others.not_compared


RIGHT = ("right", (), ())


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A base, an adapter of some of its layers, and PEFT's merge."""
    work = tmp_path_factory.mktemp("unchanged")
    base = pico.build("llama", work / "base")
    return base, pico.adapter(base, work / "adapter", targets=ATTENTION), work


@pytest.mark.parametrize("family", ["gemma3", "qwen3_moe", "mixtral", "gemma4"])
def test_other_tensors_of_a_right_merge_are_the_bases(tmp_path, family):
    base = pico.build(family, tmp_path / "base")
    adapter = pico.adapter(base, tmp_path / "adapter", targets="text")
    merge(base, tmp_path / "own", adapters=adapter, dtype="float32")
    merge(base, tmp_path / "nf4", adapters=adapter, requantize="nf4")
    assert [judged(base, tmp_path / name, adapter) for name in ("own", "nf4")] == [RIGHT] * 2


@pytest.mark.parametrize("kind", [None, "nf4", "nf4-dq", "fp4", "int8"])
def test_one_changed_tensor_that_no_adapter_changes_is_named(case, tmp_path, kind):
    from peft import PeftModel

    base, adapter, _ = case
    model = PeftModel.from_pretrained(merged_models.load(base, dtype="float32"), adapter).merge_and_unload()
    right = written(model, tmp_path / "right", max_shard_size="60KB")
    assert len(list(right.glob("*.safetensors"))) > 1
    with torch.no_grad():
        model.get_parameter(K_PROJ).mul_(1.1)
        model.get_parameter(NORM)[3] += 0.1
    wrong = written(model, tmp_path / "wrong")
    if kind is not None:
        right, wrong = (packed(folder, tmp_path / f"{folder.name}-{kind}", kind) for folder in (right, wrong))
    assert judged(base, right, adapter) == RIGHT and judged(base, wrong, adapter) == ("differs", (NORM, K_PROJ), ())


def test_answers_that_do_not_show_a_changed_tensor_do_not_make_it_right(case, tmp_path, monkeypatch):
    base, adapter, _ = case
    merge(base, tmp_path / "merged", adapters=adapter)
    change_tensors(tmp_path / "merged", lambda tensors: tensors[NORM].mul_(1.02))
    options = {"adapters": {"a": adapter}, "against": tmp_path / "merged", "prompts": PROMPTS, "new_tokens": 2, "isolated": False}
    found = verify(base, **options)
    assert ([row.verdict for row in found.prompts], found.verdict) == (["same within noise"], "differs")
    assert f"no adapter changes them, and they differ from the base's: {NORM}" in found.findings
    assert "other tensors  16 are the base's, 1 differ" in str(found) and found.to_json()["weights"]["others"]["equal"] == 16
    with pytest.raises(Exception, match=f"{NORM} of merged model merged is not the base's"):
        found.check()
    monkeypatch.setattr(unchanged._Comparison, "__call__", lambda self, path: "not compared" if path == NORM else "equal")
    found = verify(base, **options)
    assert (found.weights.verdict, found.verdict) == ("cannot tell", "cannot tell")
    assert f"1 weights were not compared with the base's: {NORM}" in found.findings


@pytest.mark.parametrize("how", [{}, {"dtype": "float16"}, {"dtype": "float32"}, {"requantize": "nf4"}, {"requantize": "nf4-dq"}])
def test_a_right_merge_of_a_packed_base_is_right(case, how):
    """The merge adds to the exact values of a packed base, and packs the sum again where it is told to."""
    plain, adapter, work = case
    base = work / "nf4"
    if not base.exists():
        packed(plain, base, "nf4")
    shutil.rmtree(work / "merged", ignore_errors=True)
    merge(base, work / "merged", adapters=adapter, **how)
    found = verify(base, adapters={"a": adapter}, against=work / "merged", prompts=PROMPTS, new_tokens=2, isolated=False)
    assert (found.verdict, found.weights.verdict, found.weights.wrong) == ("same within noise", "right", ())


def test_a_merge_into_what_a_packed_base_is_unpacked_to_is_right(case, tmp_path):
    """transformers unpacks a base to bfloat16, whatever is saved afterwards."""
    from peft import PeftModel

    plain, adapter, _ = case
    base = packed(plain, tmp_path / "base", "nf4")
    model = AutoModelForCausalLM.from_pretrained(base, device_map={"": "cpu"}).dequantize().to(torch.float32)
    saved = merged_models.load(plain, dtype="float32")  # a model that was packed cannot be saved
    saved.load_state_dict(PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict())
    assert judged(base, written(saved, tmp_path / "merged"), adapter) == RIGHT


def test_a_changed_bias_of_an_adapter_is_tested(tmp_path):
    base = pico.build("qwen2_5_vl", tmp_path / "base")
    adapter = pico.adapter(base, tmp_path / "adapter", targets=ATTENTION, bias=True)
    merge(base, tmp_path / "merged", adapters=adapter)
    assert judged(base, tmp_path / "merged", adapter) == RIGHT
    name = next(name for name in merged_models.tensors_of(tmp_path / "merged") if name.endswith("q_proj.bias"))
    change_tensors(tmp_path / "merged", lambda tensors: tensors[name].mul_(1.5))
    assert judged(base, tmp_path / "merged", adapter)[0] == "differs"


def test_tensors_laid_out_otherwise_are_compared_whole(tmp_path):
    """A base with one file tensor for each expert, and a merge saved with the stacks that the model has."""
    from peft import PeftModel

    base = pico.build("mixtral", tmp_path / "base")
    adapter = pico.adapter(base, tmp_path / "adapter", targets=ATTENTION)
    model = PeftModel.from_pretrained(merged_models.load(base), adapter).merge_and_unload()
    right = written(model, tmp_path / "right", save_original_format=False)
    stack = "model.layers.1.mlp.experts.down_proj"
    assert stack in merged_models.tensors_of(right) and stack not in merged_models.tensors_of(base)
    assert judged(base, right, adapter) == RIGHT
    change_tensors(right, lambda tensors: tensors[stack][1].mul_(1.1))
    assert judged(base, right, adapter) == ("differs", (stack,), ())
