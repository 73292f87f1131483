"""What a release brings: files that hosts and tools read, and a wheel that runs from an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import yaml

import trimtab
from trimtab import cli

ROOT = Path(__file__).resolve().parents[1]
MOST_WHEEL_BYTES = 25_000_000


def read_yaml(name):
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_ci_tests_on_three_systems_and_says_that_it_was_not_run():
    values = read_yaml(".github/workflows/ci.yml")
    assert values["permissions"] == {"contents": "read"}
    job = values["jobs"]["test"]
    assert job["strategy"]["matrix"]["os"] == ["ubuntu-latest", "windows-latest", "macos-latest"]
    steps = "\n".join(step.get("run", "") for step in job["steps"])
    for command in ("locks/newest.txt", "ruff check", "ruff format --check", "mypy", "pytest"):
        assert command in steps
    assert "python -m build" in "\n".join(step.get("run", "") for step in values["jobs"]["wheel"]["steps"])
    first = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8").splitlines()[0]
    assert "has not been run yet" in first
    # Every script and file that a step names exists.
    for path in re.findall(r"(?:-r |python )((?:locks|tools)/[\w./]+)", steps):
        assert (ROOT / path).is_file(), path


def test_pre_commit_runs_the_tools_of_make_lint():
    (repo,) = read_yaml(".pre-commit-config.yaml")["repos"]
    entries = {hook["id"]: hook["entry"] for hook in repo["hooks"]}
    assert repo["repo"] == "local" and all(hook["language"] == "system" for hook in repo["hooks"])
    lint = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nlint:")[2].partition("\n\n")[0]
    for tool in ("ruff check", "ruff format", "mypy"):
        assert tool in lint and any(entry.startswith(tool) for entry in entries.values())
    assert (ROOT / entries["rooms"].split()[1]).is_file()


def test_bug_template_asks_for_the_doctors_report_and_options_that_exist():
    values = read_yaml(".github/ISSUE_TEMPLATE/bug.yml")
    fields = {field["id"]: field for field in values["body"] if "id" in field}
    report = fields["report"]
    assert "trimtab doctor --report" in report["attributes"]["label"] and report["validations"]["required"] is True
    known = {option for action in doctor_parser()._actions for option in action.option_strings}
    text = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", text)) <= known


def doctor_parser():
    commands = next(action for action in cli.parser()._actions if action.dest == "name" and action.choices)
    return commands.choices["doctor"]


def test_citation_and_security_say_what_holds():
    citation = read_yaml("CITATION.cff")
    assert (citation["cff-version"], citation["version"], citation["license"]) == (
        "1.2.0",
        trimtab.__version__,
        "Apache-2.0",
    )
    assert citation["authors"] and citation["title"] == "trimtab"
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (ROOT / link).is_file(), link


@pytest.mark.slow
def test_wheel_is_small_and_runs_the_demo_in_a_fresh_environment_from_an_empty_folder(tmp_path):
    """The environment is fresh but for the other packages, which are read from this one: they weigh gigabytes."""
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path / "dist"), str(ROOT)], check=True, timeout=300)
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.stat().st_size < MOST_WHEEL_BYTES
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tracked = subprocess.run(
        ["git", "ls-files", "trimtab"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    assert set(tracked) <= names
    assert {name.partition("/")[0] for name in names} == {"trimtab", f"trimtab-{trimtab.__version__}.dist-info"}

    fresh = tmp_path / "fresh"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(fresh)], check=True, timeout=120)
    python = fresh / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True, timeout=300)
    # A folder named in a .pth file is searched; the .pth files in it are not read, so this tree's editable copy stays out.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    empty = tmp_path / "empty"
    empty.mkdir()
    where = run(python, "-c", "import trimtab; print(trimtab.__file__)", cwd=empty).strip()
    assert Path(where).resolve().is_relative_to(site.resolve())
    printed = run(python.with_name("trimtab.exe" if os.name == "nt" else "trimtab"), "demo", cwd=empty)
    assert "positions: largest difference of a logit 0\n   same" in printed, printed
    assert list(empty.iterdir()) == []


def run(python, *arguments, cwd=None):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [str(python), *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
