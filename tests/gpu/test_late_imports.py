"""A process with late imports captures the same steps on a GPU, imports nothing in a capture, and never needs the compiler."""

import json
import os
import subprocess
import sys

import pytest
import torch

from trimtab.demo.line import FOLDER

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

CODE = """
import json, sys
from trimtab.machine import late_imports
late_imports.use("cuda")
import trimtab
plan = trimtab.plan(sys.argv[1], device="cuda", context=256, images=0, audio_s=0.0)
with trimtab.load(plan, decode="graph") as model:
    answer = model.answer("Describe what is there.", max_new_tokens=8)
    loaded = [name for name in ("torch._dynamo.convert_frame", "sympy.core", "scipy.sparse") if name in sys.modules]
    print(json.dumps([late_imports.is_on(), loaded, list(answer.token_ids)]))
"""


def answered(wanted):
    made = subprocess.run(
        [sys.executable, "-c", CODE, str(FOLDER / "base")], capture_output=True, text=True, timeout=300,
        env={**os.environ, "TRIMTAB_LATE_IMPORTS": wanted},
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return json.loads(made.stdout.splitlines()[-1])


def test_captured_answers_are_those_of_a_process_that_imports_everything_first():
    late_is_on, late_loaded, late_ids = answered("check")
    is_on, _, ids = answered("0")
    assert late_is_on and not is_on and not late_loaded
    assert late_ids == ids and ids
