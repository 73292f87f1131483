"""What a release brings: files that hosts and tools read, and a wheel that runs from an empty folder."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import trimtab
from trimtab.cli import main

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
    assert (ROOT / entries["rooms"].split()[-1]).is_file()


def test_bug_template_asks_for_the_doctors_report_and_options_that_exist():
    fields = {field["id"]: field for field in read_yaml(".github/ISSUE_TEMPLATE/bug.yml")["body"] if "id" in field}
    report = fields["report"]
    assert "trimtab doctor --report" in report["attributes"]["label"] and report["validations"]["required"] is True
    known = {option for action in doctor_parser()._actions for option in action.option_strings}
    text = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", text)) <= known


def doctor_parser():
    commands = next(action for action in main.parser()._actions if action.dest == "name" and action.choices)
    return commands.choices["doctor"]


def test_citation_and_security_say_what_holds():
    citation = read_yaml("CITATION.cff")
    assert (citation["cff-version"], citation["version"], citation["license"]) == ("1.2.0", trimtab.__version__, "Apache-2.0")
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
    tracked = subprocess.run(["git", "ls-files", "trimtab"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
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


def needed_distributions(name):
    """Return the distributions that `pip install NAME` brings here, without extras, by their normalized names."""
    needed, waiting = {}, [(name, frozenset())]
    while waiting:
        one, extras = waiting.pop()
        key = re.sub(r"[-_.]+", "-", one).lower()
        if key in needed:
            continue
        needed[key] = found = metadata.distribution(one)
        for text in found.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or any(requirement.marker.evaluate({"extra": x}) for x in extras or {""}):
                waiting.append((requirement.name, frozenset(requirement.extras)))
    return needed


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="makes links")
def test_what_an_installation_brings_is_enough_for_every_command_of_the_readme(tmp_path):
    """The environment has the packages that the dependencies of the wheel name, and none of the others that are installed here."""
    fresh = tmp_path / "fresh"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(fresh)], check=True, timeout=120)
    python = fresh / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    for name, distribution in needed_distributions("trimtab").items():
        if name == "trimtab":
            continue
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    (site / "trimtab").symlink_to(ROOT / "trimtab")
    assert not (site / "pytest").exists()
    base, style = ROOT / "trimtab/demo/base", ROOT / "trimtab/demo/adapters/style"
    placed = (str(base), "--adapter", f"style={style}", "--device", "cpu", "--context", "256")

    def trimtab_(*arguments):
        return run(python, "-m", "trimtab", *arguments, cwd=tmp_path)

    trimtab_("plan", *placed, "--picture", str(tmp_path / "plan.svg"))
    trimtab_("run", *placed, "Who are you?", "--max-new-tokens", "4", "--image", str(ROOT / "trimtab/demo/images/image_1.png"))
    trimtab_("merge", str(base), str(tmp_path / "merged"), "--adapter", f"style={style}", "--check", "--device", "cpu")
    verified = json.loads(trimtab_("verify", *placed, "--against", "stock", "--max-new-tokens", "4", "--json"))
    assert verified["verdict"].startswith("same")
    timed = json.loads(trimtab_("bench", *placed, "--runs", "1", "--new-tokens", "4", "--prompt-tokens", "32", "--json"))
    assert {name: one["failure"] for name, one in timed["engines"].items()} == {"trimtab": None, "stock": None}
    verdicts = json.loads(trimtab_("doctor", "--json"))["verdicts"]
    unknown = [json.dumps(one) for one in verdicts if one["state"] == "unknown"]
    assert verdicts and [one for one in unknown if "No module named" in one or "not installed" in one] == []


def run(python, *arguments, cwd=None):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [str(python), *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
