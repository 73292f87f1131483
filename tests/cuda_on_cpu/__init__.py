"""Runs the CUDA sources of this package on the CPU with g++: every thread a fiber, every barrier a turn of a scheduler."""

import os
from pathlib import Path

import platformdirs

# Names the folder of what g++ made. tests/conftest.py sets it before it gives the tests another cache folder.
FOLDER_VARIABLE = "TRIMTAB_TESTS_CUDA_ON_CPU"


def folder() -> Path:
    """Return where compiled sources of this user are kept."""
    return Path(os.environ.get(FOLDER_VARIABLE) or platformdirs.user_cache_path("trimtab") / "cuda-on-cpu")
