"""Does trimtab itself work on this machine? One line for people, before what is known of other packages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from typing import Any

from packaging.requirements import Requirement
from packaging.version import InvalidVersion

from trimtab.errors import gib
from trimtab.machine.environment import Environment
from trimtab.process.packages import install_command

# Without one of these no model is loaded.
NEEDED = ("torch", "transformers", "accelerate", "bitsandbytes", "safetensors")


@dataclass(frozen=True)
class OwnVerdict:
    """Whether trimtab can run models here. problems: the obstacles, each with its remedy; empty without any."""

    text: str
    problems: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {"works": not self.problems, "text": self.text, "problems": list(self.problems)}


def own_verdict(environment: Environment, requirements: Sequence[str] | None = None) -> OwnVerdict:
    """Return the verdict on the interpreter that asks. requirements: of trimtab, None reads its own metadata."""
    versions = environment.versions
    outside = [
        _outside(one, versions) for one in map(Requirement, _own_requirements() if requirements is None else requirements)
        if one.name in environment.packages and _is_for_all(one)
    ]  # fmt: skip
    stops = [f"{name} is not installed ({install_command([name])})" for name in NEEDED if name not in versions]
    if environment.torch_error:
        stops.append(
            f"torch cannot be used ({environment.torch_error}): python -c 'import torch; torch.cuda.device_count()' says why"
        )
    wrong = tuple(problem for problem in (*stops, *outside) if problem)
    name = f"trimtab {versions['trimtab']}" if "trimtab" in versions else "trimtab"
    if wrong:
        does = "does not work" if stops else "was not tested with what is installed"
        return OwnVerdict(f"{name} {does} on this machine: {'; '.join(wrong)}", wrong)
    places = [f"GPU {gpu.index} ({gpu.name}, {gib(gpu.free_bytes)} free)" for gpu in environment.gpus]
    where = ", ".join(places) if places else "the CPU, without a GPU"
    return OwnVerdict(f"{name} works on this machine; models run on {where}")


def _own_requirements() -> Sequence[str]:
    try:
        return requires("trimtab") or ()
    except PackageNotFoundError:  # run from a folder of its source
        return ()


def _is_for_all(needed: Requirement) -> bool:
    """Whether it belongs to every installation on this machine, not to an extra."""
    return needed.marker is None or ("extra" not in str(needed.marker) and needed.marker.evaluate())


def _outside(needed: Requirement, versions: Mapping[str, str]) -> str:
    version = versions.get(needed.name)
    try:
        is_in_range = version is None or needed.specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return ""
    if is_in_range:
        return ""
    return f"{needed.name} {version} is not {needed.specifier} (pip install '{needed.name}{needed.specifier}')"
