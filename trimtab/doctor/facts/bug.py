"""One bug of another package: the known facts, and what a probe observed here."""

from __future__ import annotations

from dataclasses import dataclass

PRESENT, FIXED, NOT_APPLICABLE, UNKNOWN = "present", "fixed", "not applicable", "unknown"
STATES = (PRESENT, FIXED, NOT_APPLICABLE, UNKNOWN)
OWNERS = ("accelerate", "bitsandbytes", "peft", "transformers", "safetensors", "servers", "torch")


@dataclass(frozen=True)
class Affected:
    """One package of a bug: first version that has it (None: as far back as is known), first one that has not (None: none)."""

    package: str
    since: str | None = None
    fixed_in: str | None = None


@dataclass(frozen=True, kw_only=True)
class Bug:
    """One entry of the catalogue.

    id: letter and number ("A1"). name: short, with hyphens. title: one line, what a user sees. symptom: the message or the
    silent effect. trigger: whom it hits, the configuration that calls it. cause: file and function upstream. affected: the
    packages; several mean that any fixed one cures it unless `versions` says otherwise. versions: in words, with how each
    is known. way_round: what a user does today. owner: whose repository a report belongs to, first where several meet.
    trackers: "owner/repository#number" with its state in words. trimtab: how trimtab itself avoids it.
    evidence: how we know: "run" (shown live), "source" (read in the installed files), "tracker" (reported by others).
    """

    id: str
    name: str
    title: str
    symptom: str
    trigger: str
    cause: str
    affected: tuple[Affected, ...]
    versions: str
    way_round: str
    owner: tuple[str, ...]
    trackers: tuple[str, ...]
    trimtab: str
    evidence: str


@dataclass(frozen=True)
class Seen:
    """The result of a probe: state is one of STATES, evidence the fact behind it (numbers, a message, file and line)."""

    state: str
    evidence: str
