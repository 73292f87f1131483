"""Which interpreters there are to look at, and what the probes say of each: run once, read by every test here.

TRIMTAB_OTHER_PYTHON names the other interpreter; without it the environment beside this one that `make` builds is taken.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.upstream.expected import SETS, set_of
from trimtab.doctor.probes.runner import run_probes

ROOT = Path(__file__).resolve().parents[2]
_VERSIONS = """
import importlib.metadata, json
found = {}
for name in ("transformers", "accelerate", "peft", "bitsandbytes"):
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found[name] = None
print(json.dumps(found))
"""


def versions_of(python):
    """Return the version of each package of a set in an interpreter, None for one that is not there."""
    said = subprocess.run([str(python), "-c", _VERSIONS], check=True, capture_output=True, text=True)
    return json.loads(said.stdout)


def find_interpreters():
    """Return name of set -> interpreter for the sets that are installed here."""
    binary = Path("Scripts", "python.exe") if os.name == "nt" else Path("bin", "python")
    beside = [ROOT / folder / binary for folder in (".venv-oldest", ".venv")]
    other = os.environ.get("TRIMTAB_OTHER_PYTHON")
    found = {}
    for python in (
        Path(sys.executable),
        *([Path(os.path.abspath(other))] if other else [path for path in beside if path.exists()]),
    ):
        name = set_of(versions_of(python))
        if name is not None:
            found.setdefault(name, python)
    return found


@pytest.fixture(scope="session")
def verdicts():
    """Return a function: name of set -> {id: verdict}; skips where that set is not installed."""
    interpreters, ran = find_interpreters(), {}

    def of(set_name):
        if set_name not in interpreters:
            wanted = ", ".join(f"{name} {version}" for name, version in SETS[set_name].items())
            pytest.skip(f"no interpreter with {wanted}: name one in TRIMTAB_OTHER_PYTHON")
        if set_name not in ran:
            found = run_probes(python=interpreters[set_name])
            ran[set_name] = {verdict.bug.id: verdict for verdict in found}
        return ran[set_name]

    return of
