"""bitsandbytes is imported for its own formats alone, without code from the hub, without a warning and without torch's compiler."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import numpy as np
import torch

from tests import gguf_files, pico, quantized_files
from trimtab.engine.formats.bitsandbytes import library, without_compiler, without_hub_kernels

# Computes with an adapter on one model after another, and prints after each whether bitsandbytes was imported.
LOADED = """
import sys
import torch
import trimtab
given = iter(sys.argv[1:])
for base, adapter, quant in zip(given, given, given):
    with trimtab.load(base, adapters={"one": adapter}, quant=quant, device="cpu", context=64) as model:
        model.adapter_store.set("one")
        model.hf_model(input_ids=torch.tensor([[1, 2, 3]]))
    print("bitsandbytes" in sys.modules)
"""


def test_a_model_imports_it_for_its_own_formats_alone(tmp_path):
    plain = pico.built("llama")
    grouped, _ = quantized_files.write(plain, tmp_path / "ct", "ct-int4")
    ggml, dense = gguf_files.model("llama", "q8_0", tmp_path / "gguf")
    own, other = (pico.adapter(base, tmp_path / base.name, targets="all") for base in (plain, dense))
    given = [(plain, own, "none"), (grouped, own, "auto"), (ggml, other, "auto"), (plain, own, "nf4")]
    code = [sys.executable, "-c", LOADED, *(str(one) for row in given for one in row)]
    made = subprocess.run(code, capture_output=True, text=True)
    assert made.stdout.split() == ["False", "False", "False", "True"], made.stderr


def test_a_process_that_quantizes_says_nothing_and_asks_for_no_kernels(tmp_path):
    (tmp_path / "kernels.py").write_text("raise SystemExit('asked for the hub')")
    code = (
        "from trimtab.engine.formats.bitsandbytes import library; import sys; library(); "
        "print('kernels' in sys.modules, 'bitsandbytes' in sys.modules)"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert made.stdout.split() == ["False", "True"] and "kernels" not in made.stderr


def test_what_was_imported_before_comes_back(monkeypatch):
    stands = object()
    monkeypatch.setitem(sys.modules, "kernels", stands)
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    before = log.level
    with without_hub_kernels():
        assert sys.modules["kernels"] is None and log.level == logging.ERROR
    assert sys.modules["kernels"] is stands and log.level == before


def test_functions_go_to_the_compiler_again_after_the_import(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    monkeypatch.delitem(sys.modules, "torch._inductor.compile_fx", raising=False)
    with without_compiler():
        assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
    assert os.environ["TORCHDYNAMO_DISABLE"] == "0"


def test_a_program_that_compiles_keeps_its_compiler_meanwhile(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._inductor.compile_fx", object())
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    with without_compiler():
        assert "TORCHDYNAMO_DISABLE" not in os.environ


def test_a_weight_with_an_odd_side_is_unpacked_to_the_numbers_of_its_format():
    """bitsandbytes would compile this one; the right value is numpy's, each product and each cast rounded once."""
    functional = library().functional
    weight = torch.randn(64, 65, generator=torch.Generator().manual_seed(3))
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    found = torch.ops.bitsandbytes.dequantize_4bit(packed, state.absmax, 64, "nf4", (64, 65), torch.float32)
    nibbles = np.stack([packed.numpy().reshape(-1) >> 4, packed.numpy().reshape(-1) & 15], axis=1).reshape(-1)
    scales = np.repeat(state.absmax.numpy(), 64)[: nibbles.size]
    right = state.code.numpy()[nibbles] * scales
    assert np.array_equal(found.numpy().reshape(-1), right[: 64 * 65])
