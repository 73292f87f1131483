"""A package that is not installed is named before any work, with the command that installs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import trimtab.demo as demo
from tests.raised import raised
from trimtab.errors import RequestError
from trimtab.process import packages

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from tools import rooms

BASE, STYLE = str(demo.BASE), f"style={demo.ADAPTERS['style']}"
# An environment without these two: nothing can import them.
WITHOUT = """
import sys, importlib.abc
class Gone(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('peft', 'accelerate'):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Gone())
"""


def run_without(*arguments: str, refused: str = "") -> subprocess.CompletedProcess[str]:
    code = f"{WITHOUT}{refused}\nfrom trimtab.cli.main import main\nsys.exit(main(sys.argv[1:]))\n"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_a_comparison_with_the_stock_stack_names_what_is_missing_before_it_plans(command: str) -> None:
    done = run_without(command, BASE, "--adapter", STYLE, "--against", "stock", "--json")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["fields"]["value"], error["fields"]["hint"]) == (2, "stock", "pip install accelerate peft")
    assert error["message"].startswith("--against stock: needs accelerate and peft, which are not installed")


def test_the_doctor_says_what_it_cannot_probe_before_it_begins() -> None:
    # The probes themselves run in a process of their own, which is not what is tried here.
    refused = "import trimtab.doctor.probes.runner as p\np.run_probes = lambda **_: sys.exit(9)"
    done = run_without("doctor", "--probe", "A1", refused=refused)
    assert done.returncode == 9
    assert done.stderr.splitlines()[0] == (
        "accelerate and peft are not installed here: probes that need them will say unknown (pip install accelerate peft)"
    )


def test_what_is_missing_is_found_without_importing_it() -> None:
    assert packages.missing(("json", "no_such_package_here", "peft")) == ("no_such_package_here",)
    packages.check_installed(packages.STOCK, field="against", value="stock")
    error = raised(RequestError, packages.check_installed, ("no_such_package_here",), field="against", value="stock")
    assert error.hint == "pip install no_such_package_here"


def test_what_the_commands_need_is_installed_by_default_and_old_extras_stay() -> None:
    project = tomllib.loads((rooms.ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    names = {text.partition(">")[0].strip() for text in project["dependencies"]}
    assert {*packages.STOCK, "torch", "transformers"} <= names
    assert set(project["optional-dependencies"]) >= {"all", "bridge", "ray", "triton"}
    assert project["optional-dependencies"]["all"] == ["trimtab[bridge,otel,ray,triton]"]
