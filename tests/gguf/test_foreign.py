"""Are names, orders and values of GGUF models those of transformers' own reader and of llama.cpp's package?

transformers reads Qwen3.5 by itself, the others with the package gguf: `make test-formats` has it.
"""

import re
import struct

import pytest
import torch

import trimtab
from tests import gguf_files, gguf_towers, pico, stock
from trimtab.gguf.architectures import config_of, tensors_of
from trimtab.gguf.header import read_bytes, read_gguf
from trimtab.gguf.towers import qwen3vl_config, qwen3vl_vision

# Families whose config transformers 5.23 does not read (the width of a head, of layers, of experts): it is given.
GIVEN = ("qwen3", "gemma4", "qwen3_moe")
# What llama.cpp's converter does before its table of names: Gemma 4's scale of a layer and Qwen3.5's dt have other ends there.
RENAMED = {"layer_scalar": "layer_scalar.weight", "dt_bias": "dt_proj.bias"}


@pytest.mark.parametrize("form", ["q8_0", "q4_k"])
@pytest.mark.parametrize("family", gguf_files.FAMILIES)
def test_logits_are_those_of_transformers_own_reader(family, form, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("transformers.integrations.gguf" if family.startswith("qwen3_5") else "gguf")
    cut = {"tokenizer.ggml.pre": "qwen35" if family.startswith("qwen3_5") else "qwen2"}
    file, dense = gguf_files.model(family, form, tmp_path, **gguf_files.tokenizer_keys() | cut)
    config = {"config": transformers.AutoConfig.from_pretrained(dense)} if family in GIVEN else {}
    kind = getattr(transformers, gguf_files.FAMILIES[family][0])
    theirs = kind.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32, **config).eval()
    header = read_gguf(file)
    for name, scalar in theirs.state_dict().items():
        if name.endswith("layer_scalar"):  # which it does not read, and leaves at 1
            assert float(scalar) == 1.0
            raw = read_bytes(header.tensors[f"blk.{name.split('.')[2]}.layer_output_scale.weight"])
            scalar.fill_(struct.unpack("<f", raw)[0])
    given = pico.inputs("llama", theirs.config)
    plan = trimtab.plan(file, device="cpu", context=64, dtype="float32", place={"*": "resident"})
    with trimtab.load(plan) as model:
        assert torch.equal(stock.logits(model.hf_model, given), stock.logits(theirs, given))


@pytest.mark.parametrize("family", gguf_files.FAMILIES)
def test_names_are_those_of_llama_cpp(family, tmp_path):
    gguf = pytest.importorskip("gguf")
    header = read_gguf(gguf_files.model(family, "q8_0", tmp_path)[0])
    config = config_of(header)
    kind = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == header.architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    mapped = tensors_of(header, config)
    assert len(mapped) > 20
    for one in mapped:
        # The converter joins the matrices of all experts before.
        stem, _, last = re.sub(r"\.experts\.\d+\.", ".experts.", one.tensor_name).rpartition(".")
        theirs = names.get_name(f"{stem}.{RENAMED.get(last, last)}", try_suffixes=(".weight", ".bias"))
        assert theirs == one.source.name


def test_names_and_keys_of_a_projector_are_those_of_llama_cpp(tmp_path):
    """By the package's tables; conversion/qwen3vl.py names what these do not have: the merger, its taps and the two frames."""
    gguf = pytest.importorskip("gguf")
    kinds, own = gguf.MODEL_TENSOR, gguf.TENSOR_NAMES
    folder, _ = gguf_towers.qwen3vl(gguf_towers.deep_qwen3vl(tmp_path / "base"), tmp_path / "pair")
    header, projector = (read_gguf(folder / name) for name in ("model.gguf", "mmproj-model.gguf"))
    config, _ = qwen3vl_config(header, projector, config_of(header))
    vision = config["vision_config"]
    fixed = {
        "patch_embed.proj": own[kinds.V_ENC_EMBD_PATCH], "merger.norm": own[kinds.V_POST_NORM],
        "merger.linear_fc1": own[kinds.V_MMPROJ].format(bid=0), "merger.linear_fc2": own[kinds.V_MMPROJ].format(bid=2),
    }  # fmt: skip
    for place, layer in enumerate(vision["deepstack_visual_indexes"]):
        for stem, kind in (("norm", kinds.V_DS_NORM), ("linear_fc1", kinds.V_DS_FC1), ("linear_fc2", kinds.V_DS_FC2)):
            fixed[f"deepstack_merger_list.{place}.{stem}"] = own[kind].format(bid=layer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision["depth"])
    mapped = qwen3vl_vision(projector, vision)
    assert len(mapped) == len(projector.tensors) - 1
    for one in mapped:
        stem, _, end = one.tensor_name.removeprefix("model.visual.").rpartition(".")
        theirs = fixed.get(stem) or names.get_name(f"visual.{stem}")
        assert f"{theirs}.{end}" == one.source.name
        assert (one.second.name if one.second else None) == (f"{theirs}.weight.1" if one.change == "frames" else None)
    known = {value for group in (gguf.Keys.Clip, gguf.Keys.ClipVision, gguf.Keys.ClipVision.Attention)
             for name, value in vars(group).items() if name.isupper()}  # fmt: skip
    assert {name for name in projector.keys if name.startswith("clip.")} <= known
    assert projector.keys["clip.projector_type"] == gguf.VisionProjectorType.QWEN3VL
    assert gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.QWEN3VL] == header.architecture
    assert vision["deepstack_visual_indexes"] == [0, 2]
