"""Are names, orders and values of GGUF models those of transformers' own reader and of llama.cpp's package?

transformers reads Qwen3.5 by itself, the others with the package gguf: `make test-formats` has it.
"""

from __future__ import annotations

import struct

import pytest
import torch

import trimtab
from tests import gguf_files, pico, stock
from trimtab.gguf.architectures import config_of, tensors_of
from trimtab.gguf.header import read_bytes, read_gguf

# Families whose config transformers 5.23 does not read (the width of a head; the widths of layers): it is given.
GIVEN = ("qwen3", "gemma4")
# What llama.cpp's converter does before its table of names: Gemma 4's scale of a layer and Qwen3.5's dt have other ends there.
RENAMED = {"layer_scalar": "layer_scalar.weight", "dt_bias": "dt_proj.bias"}


@pytest.mark.parametrize("form", ["q8_0", "q4_k"])
@pytest.mark.parametrize("family", gguf_files.FAMILIES)
def test_logits_are_those_of_transformers_own_reader(family, form, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("transformers.integrations.gguf" if family == "qwen3_5" else "gguf")
    file, dense = gguf_files.model(family, form, tmp_path, **gguf_files.tokenizer_keys())
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
        stem, _, last = one.tensor_name.rpartition(".")
        theirs = names.get_name(f"{stem}.{RENAMED.get(last, last)}", try_suffixes=(".weight", ".bias"))
        assert theirs == one.source.name
