"""In which environment does each release of a bisection run?"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import InvalidVersion, Version
from platformdirs import user_cache_path

from trimtab.errors import RequestError
from trimtab.process.json_file import read_own
from trimtab.process.redact import scrubbed

# Packages that a case's run depends on; they are pinned.
PINNED = ("transformers", "peft", "accelerate", "bitsandbytes", "torch")
PACKAGES = ("transformers", "peft", "accelerate", "bitsandbytes", "safetensors", "huggingface_hub", "tokenizers")
READY = "ready.json"
TIMEOUT_S = 1200.0
OPTIONS = ("--disable-pip-version-check", "--no-input", "--quiet", "--only-binary", ":all:")
Say = Callable[[str], None]
_ASK = """
import json, site, sys, sysconfig
from importlib import metadata
found = {}
for name in json.loads(sys.argv[1]):
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
folders = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
folders = [*folders, *[path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]]
print(json.dumps({"versions": found, "folders": list(dict.fromkeys(folders)), "python": sys.version, "prefix": sys.prefix}))
"""


class InstallError(Exception):
    """An environment could not be created. The message names the reason, without data of the user."""


@dataclass(frozen=True)
class Base:
    """The base interpreter of environments: they use its packages unless they have their own."""

    python: Path
    versions: Mapping[str, str]
    folders: tuple[str, ...]
    identity: str

    @classmethod
    def read(cls, python: str | os.PathLike[str] | None) -> Base:
        """Read the base interpreter. Errors: RequestError if it cannot be started."""
        exe = os.fspath(python or sys.executable)
        try:
            done = subprocess.run(
                [exe, "-c", _ASK, json.dumps([*PINNED, *PACKAGES])], capture_output=True, text=True, timeout=60,
                check=True,
            )  # fmt: skip
            reply = json.loads(done.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as exc:
            raise RequestError(f"is not a Python interpreter that runs ({type(exc).__name__})", field="python", value=exe) from exc
        return cls(Path(exe).absolute(), reply["versions"], tuple(reply["folders"]), f"{reply['python']} {reply['prefix']}")


@dataclass
class Environments:
    """Makes interpreters and keeps them.

    others: package -> version in every environment (all others as in the base). runner: runs one command, (command, seconds) ->
    (exit code, output). Each imports the packages of its base interpreter (a .pth file adds their folders after its own), so torch
    is not installed again. The other packages are pinned. pip is the user's, and no index is named; only wheels are used.
    """

    base: Base
    others: Mapping[str, str] = field(default_factory=dict)
    folder: Path = field(default_factory=lambda: user_cache_path("trimtab") / "bisect")
    say: Say = lambda text: None
    runner: Callable[[Sequence[str], float], tuple[int, str]] = field(default_factory=lambda: run_command)

    def releases(self, package: str) -> tuple[str, ...]:
        """Return the versions that the index offers, the oldest first.

        Errors: RequestError if pip is missing, InstallError if the index is unreachable or has no such package.
        """
        code, output = self.runner([*self._pip(), "index", "versions", package], 120.0)
        listed = re.search(r"^Available versions: (.+)$", output, re.MULTILINE)
        if code != 0 or listed is None:
            if "No module named pip" in output:
                raise RequestError(
                    "has no pip, which is needed to create environments", field="python", value=str(self.base.python),
                    hint="python -m ensurepip",
                )  # fmt: skip
            raise InstallError(f"the index does not list {package}: {reason_of(output)}")
        return sorted_versions(text.strip() for text in listed.group(1).split(","))

    def kept_versions(self, package: str) -> tuple[str, ...]:
        """Return the versions of a package with a ready environment with these pins."""
        versions = []
        for marker in self.folder.glob(f"*/{READY}"):
            pins = read_own(marker, "own state").get("pins", {})
            if package in pins and self._home(package, pins[package]) == marker.parent:
                versions.append(str(pins[package]))
        return sorted_versions(versions)

    def pins(self, package: str, version: str) -> dict[str, str]:
        """Return package -> version of an environment."""
        pinned = {name: self.base.versions[name] for name in PINNED if name in self.base.versions}
        return {**pinned, **self.others, package: version}

    def python_for(self, package: str, version: str) -> Path:
        """Return the interpreter of a version, made now or kept from an earlier run. Errors: InstallError with the reason."""
        home = self._home(package, version)
        python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        if (home / READY).is_file() and python.exists():
            return python
        shutil.rmtree(home, ignore_errors=True)  # incomplete
        started = time.monotonic()
        self.say(f"{package} {version}: creating an environment")
        try:
            self._make(home, python, package, version)
        except BaseException:
            shutil.rmtree(home, ignore_errors=True)
            raise
        self.say(f"{package} {version}: ready after {time.monotonic() - started:.0f} s")
        return python

    # Making an environment --------------------------------------------------------------------------------------------

    def _make(self, home: Path, python: Path, package: str, version: str) -> None:
        pins = self.pins(package, version)
        home.parent.mkdir(parents=True, exist_ok=True)
        self._run([str(self.base.python), "-m", "venv", "--without-pip", str(home)], "venv")
        self._link(python)
        requirements = [f"{name}=={pinned}" for name, pinned in pins.items()]
        self._run([*self._pip(), "--python", str(python), "install", *OPTIONS, *requirements], "pip")
        installed = self._installed(python, pins)
        wrong = [f"{name} is {installed.get(name, 'missing')}" for name in pins if installed.get(name) != pins[name]]
        if wrong:
            raise InstallError(f"the environment has other versions than requested: {', '.join(wrong)}")
        (home / READY).write_text(json.dumps({"pins": pins}), encoding="utf-8")

    def _link(self, python: Path) -> None:
        """Add the base's packages to the environment's search path after its own, editable ones included."""
        code, output = self.runner([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], 60.0)
        if code != 0:
            raise InstallError(f"the environment does not start: {reason_of(output)}")
        # addsitedir, not a bare path, so that .pth files of the base (editable installs) are read too.
        lines = [f"import site; site.addsitedir({folder!r})" for folder in self.base.folders]
        Path(output.strip().splitlines()[-1], "base-packages.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _installed(self, python: Path, names: Iterable[str]) -> dict[str, str]:
        code, output = self.runner([str(python), "-c", _ASK, json.dumps(list(names))], 120.0)
        try:
            return dict(json.loads(output.strip().splitlines()[-1])["versions"])
        except (ValueError, KeyError, IndexError):
            raise InstallError(f"the environment does not start (exit {code}): {reason_of(output)}") from None

    def _run(self, command: Sequence[str], what: str) -> None:
        code, output = self.runner(command, TIMEOUT_S)
        if code != 0:
            raise InstallError(f"{what}: {reason_of(output)}")

    def _pip(self) -> list[str]:
        return [str(self.base.python), "-m", "pip"]

    def _home(self, package: str, version: str) -> Path:
        text = json.dumps([self.base.identity, sorted(self.pins(package, version).items())])
        return self.folder / f"{package}-{version}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def run_command(command: Sequence[str], timeout_s: float) -> tuple[int, str]:
    """Return (exit code, output and errors together) of a command; 124 if it exceeded its time."""
    # pip of an environment must not find packages that the caller's path adds.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(
            list(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment,
            timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 124, f"ran past {timeout_s:.0f} s"
    except OSError as exc:
        return 127, f"cannot be started ({exc.strerror})"
    return done.returncode, done.stdout.decode("utf-8", "replace")


def reason_of(output: str) -> str:
    """Return why a command failed, in one line without addresses and folders."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["no output"]
    text = re.sub(r"(?<![a-z+])[a-z+]+://\S+", "an address", errors[0].removeprefix("ERROR:").strip())
    return scrubbed(text)[:300]


def sorted_versions(texts: Iterable[str]) -> tuple[str, ...]:
    """Return final releases in order, without duplicates and invalid versions."""
    by_version: dict[Version, str] = {}
    for text in texts:
        try:
            version = Version(text)
        except InvalidVersion:
            continue
        if not version.is_prerelease:
            by_version.setdefault(version, text)
    return tuple(by_version[version] for version in sorted(by_version))
