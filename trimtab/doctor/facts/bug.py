"""One bug of another package: the known facts, and a probe's observation here."""

from __future__ import annotations

from dataclasses import dataclass

PRESENT, FIXED, NOT_APPLICABLE, UNKNOWN = "present", "fixed", "not applicable", "unknown"
STATES = (PRESENT, FIXED, NOT_APPLICABLE, UNKNOWN)
OWNERS = ("accelerate", "bitsandbytes", "peft", "transformers", "safetensors", "servers", "torch")


@dataclass(frozen=True)
class Affected:
    """One package of a bug: first version with it (None: all earlier known versions), first version without it (None:
    none).
    """

    package: str
    since: str | None = None
    fixed_in: str | None = None


@dataclass(frozen=True, kw_only=True)
class Bug:
    """One entry of the catalogue.

    id: letter and number ("A1"). name: short, with hyphens; both are those of the file. title: one line, what a user sees.
    symptom: the message or the silent effect. trigger: the affected configuration. cause: file and function upstream. affected:
    the packages; with several, any fixed one is enough unless `versions` says otherwise. versions: as text, with the evidence
    for each. way_round: the workaround for users. owner: the repository for a report, the main one first (none: the affected
    packages). trackers: "owner/repository#number" with its state as text. trimtab: how trimtab itself avoids it. evidence:
    "run" (reproduced), "source" (read in the installed files), "tracker" (reported by others).
    """

    id: str = ""
    name: str = ""
    title: str
    symptom: str
    trigger: str
    cause: str
    affected: tuple[Affected, ...]
    versions: str
    way_round: str
    owner: tuple[str, ...] = ()
    trackers: tuple[str, ...] = ()
    trimtab: str
    evidence: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "owner", self.owner or tuple(one.package for one in self.affected))


@dataclass(frozen=True)
class Seen:
    """The result of a probe: state is one of STATES, evidence: numbers, a message, file and line."""

    state: str
    evidence: str
