"""Do the formats' own libraries make the golden files again, with the same bits? `make test-formats` installs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.golden.formats.make import FOLDER

MADE = {"make": ("golden.safetensors", "cases.json"), "make ggml": ("ggml.safetensors", "small.gguf"),
        "make_small": ("small.safetensors", "small.json")}  # fmt: skip
TO_FOLDER = (
    "import sys; from pathlib import Path; from tests.golden.formats import {0} as made; "
    "made.FOLDER = Path(sys.argv.pop(1)); made.main()"
)


@pytest.mark.parametrize("command", MADE)
def test_the_golden_files_are_made_again(command, tmp_path):
    for package in ("compressed_tensors", "gguf"):  # auto-round is of the same lock
        pytest.importorskip(package)
    name, *rest = command.split()
    subprocess.run([sys.executable, "-c", TO_FOLDER.format(name), str(tmp_path), *rest], check=True)
    for file in MADE[command]:
        compare(tmp_path / file, FOLDER / file)


def compare(made: Path, kept: Path) -> None:
    if made.suffix == ".json":  # which releases of torch and transformers made them is no value
        assert json.loads(made.read_text())["configs"] == json.loads(kept.read_text())["configs"]
    elif made.suffix == ".gguf":
        assert made.read_bytes() == kept.read_bytes()
    else:
        found, wanted = load_file(made), load_file(kept)
        assert set(found) == set(wanted)
        for name, tensor in wanted.items():
            # Processors add a product in float32 in other orders; its terms are below 4, and a sum is of at most 64 of them.
            off = 64 * 4 * 2**-24 if name.endswith("float32/plain") else 0.0
            assert found[name].dtype == tensor.dtype
            same = torch.isclose(found[name].double(), tensor.double(), rtol=0, atol=off, equal_nan=True)
            assert bool(same.all()), name
