"""bitsandbytes is imported without code from the hub, without a warning and without torch's compiler."""

import logging
import os
import subprocess
import sys

import numpy as np
import torch

from trimtab.engine.formats.bitsandbytes import without_compiler, without_hub_kernels


def test_a_process_that_quantizes_says_nothing_and_asks_for_no_kernels(tmp_path):
    (tmp_path / "kernels.py").write_text("raise SystemExit('asked for the hub')")
    code = "import trimtab.engine.formats.bitsandbytes, sys; print('kernels' in sys.modules, 'bitsandbytes' in sys.modules)"
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
    import bitsandbytes.functional as functional

    import trimtab.engine.formats.bitsandbytes  # noqa: F401 - which imports bitsandbytes

    weight = torch.randn(64, 65, generator=torch.Generator().manual_seed(3))
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    found = torch.ops.bitsandbytes.dequantize_4bit(packed, state.absmax, 64, "nf4", (64, 65), torch.float32)
    nibbles = np.stack([packed.numpy().reshape(-1) >> 4, packed.numpy().reshape(-1) & 15], axis=1).reshape(-1)
    scales = np.repeat(state.absmax.numpy(), 64)[: nibbles.size]
    right = state.code.numpy()[nibbles] * scales
    assert np.array_equal(found.numpy().reshape(-1), right[: 64 * 65])
