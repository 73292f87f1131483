"""Measures what an installation takes on the disk: a fresh environment, pip's usual wheels or torch's CPU build first.

python -m bench.install_size --save bench/results/install_size.json [--torch-wheel torch-2.13.0+cpu-...whl]

Sizes are those of the files in site-packages that pip added, compiled Python files included. With --torch-wheel a second
environment gets that torch first, and then everything else.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import parser_of, save

ROOT = Path(__file__).resolve().parent.parent
PRINT_VERSIONS = """import json, sys
from importlib.metadata import distributions
print(json.dumps({"purelib": __import__("sysconfig").get_paths()["purelib"],
                  "packages": {one.name.lower(): one.version for one in distributions()}}))"""
NAMED = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "triton")


def folder_bytes(folder: Path) -> int:
    """Return the bytes of the files below a folder; links count nothing."""
    return sum(
        os.path.getsize(file)
        for at, _, names in os.walk(folder)
        for name in names
        if not os.path.islink(file := os.path.join(at, name))
    )


def installed(first: list[str], folder: Path) -> dict[str, Any]:
    """Return the size of a fresh environment after pip has installed `first`, and then the package."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    def facts() -> dict[str, Any]:
        said = subprocess.run([str(python), "-c", PRINT_VERSIONS], check=True, capture_output=True, text=True).stdout
        return json.loads(said)

    packages = Path(facts()["purelib"])
    before = folder_bytes(packages)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    for what in (first, [str(ROOT)]):
        if what:
            subprocess.run([*pip, *what], check=True)
    made = facts()["packages"]
    by_folder = {path.name: folder_bytes(path) for path in packages.iterdir() if path.is_dir()}
    largest = dict(sorted(by_folder.items(), key=lambda item: -item[1])[:6])
    return {
        "bytes": folder_bytes(packages) - before, "packages": len(made), "largest_bytes": largest,
        "versions": {name: made[name] for name in NAMED if name in made},
    }  # fmt: skip


def main() -> None:
    """Measure and save."""
    parser = parser_of(__doc__, must_save=True)
    parser.add_argument("--torch-wheel", help="torch's CPU build, a wheel or a requirement")
    options = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        rows["usual"] = installed([], Path(folder) / "usual")
        if options.torch_wheel is not None:
            rows["cpu"] = installed([options.torch_wheel], Path(folder) / "cpu")
    where = {"python": platform.python_version(), "system": platform.system(), "machine": platform.machine()}
    save(options.save, {"environment": where, **rows})


if __name__ == "__main__":
    main()
