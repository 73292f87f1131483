"""The parity report and its verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from trimtab.errors import ParityError
from trimtab.report.document import Document
from trimtab.report.render import Report

if TYPE_CHECKING:
    from trimtab.verification.merges.retention import Survival
    from trimtab.verification.merges.variants import LaneReport
    from trimtab.verification.merges.weights import MergedWeights
    from trimtab.verification.routes.compare import Difference, NoiseFloor
    from trimtab.verification.routes.loaded_changes import LoadedChanges


@dataclass(frozen=True, kw_only=True)
class PromptParity:
    """One prompt, compared. The three booleans of a merge: base_is_adapter, same_text (adapter == merged),
    base_is_merged.

    same_text: whether the greedy tokens are equal, None if they are not requested (batches). base_kl: the adapter's own
    effect on the base (KL in nats, mean of positions), to compare the difference's KL with. base_is_noise: whether that
    is no more than the noise, so that the prompt cannot distinguish a merged model from the base.
    """

    id: str
    kind: str
    adapter: str | None
    verdict: str
    difference: Difference
    prompt_tokens: int
    reference_text: str | None
    subject_text: str | None
    same_text: bool | None
    expected_text: str | None = None
    base_kl: float | None = None
    base_is_noise: bool | None = None
    base_is_adapter: bool | None = None
    base_is_merged: bool | None = None

    @property
    def merged_matches(self) -> str | None:
        """The side that the merged model's answer equals: "ADAPTER", "BASE" or "NEITHER"; None without a merge."""
        if self.base_is_merged is None:
            return None
        return "ADAPTER" if self.same_text else "BASE" if self.base_is_merged else "NEITHER"

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON-ready values."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return values | {"difference": self.difference.to_json(), "merged_matches": self.merged_matches}


@dataclass(frozen=True, kw_only=True)
class ParityReport(Report):
    """Two routes to the same answers.

    against: the comparison (a word of `comparisons.AGAINST` or a folder). expected: the right verdict: `same`
    (bit-equal or within noise), or `differs` if an adapter must have an effect. floor: the reference's own noise.
    layers: relative difference of the hidden states after each layer, the largest of all prompts. survival: the share
    of the adapter's change in a merged folder, by module; weights: the test of these weights, which is more sensitive
    than answers. changes: whether both routes loaded the same adapters, as sensitive. findings: further notes for the
    reader. unfinished: why a later step, such as the lanes, failed.
    """

    model: str
    against: str
    adapter: str | None
    expected: str
    prompts: tuple[PromptParity, ...]
    floor: NoiseFloor
    layers: tuple[float, ...]
    reference: Mapping[str, Any]
    subject: Mapping[str, Any]
    findings: tuple[str, ...] = ()
    survival: tuple[Survival, ...] = ()
    weights: MergedWeights | None = None
    changes: LoadedChanges | None = None
    lanes: LaneReport | None = None
    unfinished: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def verdict(self) -> str:
        """The worst verdict of all prompts and of the merged weights; "cannot tell" if a fault would be below the noise."""
        from trimtab.verification.routes.compare import CANNOT_TELL, DIFFERS, WITHIN_NOISE, worst

        answers = worst(row.verdict for row in self.prompts)
        if DIFFERS in (answers, self.weights.verdict if self.weights is not None else None):
            return DIFFERS
        if self.changes is not None and self.changes.wrong:
            return DIFFERS
        if self.weights is not None and self.weights.others.not_compared:
            return CANNOT_TELL
        if answers != WITHIN_NOISE:
            return answers
        return CANNOT_TELL if self._is_below_noise else WITHIN_NOISE

    @property
    def _is_below_noise(self) -> bool:
        """Whether answers within noise prove nothing: the fault to detect would be within it too."""
        if self.expected == "differs":
            return True
        is_merge = any(row.base_kl is not None for row in self.prompts)
        if not is_merge or (self.weights is not None and self.weights.verdict == "right"):
            return False
        return all(row.base_is_noise for row in self.prompts)

    @property
    def ok(self) -> bool:
        """Whether the verdict is the expected one, which sets the command's exit code.

        "cannot tell" is accepted for answers that should be the same, if they are within a measured noise.
        """
        if self.expected == "differs":
            return self.verdict == "differs"
        return self.verdict != "differs" and (self.verdict != "cannot tell" or self.floor.is_measured)

    @property
    def worst_prompt(self) -> PromptParity:
        """The prompt with the largest difference, of those with the worst verdict."""
        return max(self.prompts, key=lambda row: (row.verdict == "differs", row.difference.max_abs))

    def check(self) -> None:
        """Raise ParityError unless the verdict is the right one."""
        if self.ok:
            return
        row = self.worst_prompt
        limit = self.floor.limits.get(row.id)
        ours, theirs = self.subject["label"], self.reference["label"]
        if self.verdict == "cannot tell":
            reason = f"cannot tell whether {ours} differs from {theirs}: " + (
                "the difference is within the noise" if self.floor.is_measured else "the noise could not be measured"
            )
        elif self.expected == "differs":
            reason = f"{ours} gives the same answers as {theirs}: the adapter is inactive"
        elif self.weights is not None and self.weights.wrong and row.verdict != "differs":
            reason = f"{self.weights.wrong[0].module_path} of {ours} is not base plus change"
        elif self.weights is not None and self.weights.others.differing and row.verdict != "differs":
            reason = f"{self.weights.others.differing[0]} of {ours} is not the base's, and the adapter does not change it"
        elif self.changes is not None and self.changes.wrong:
            reason = f"{ours} did not load the same adapters as {theirs}: {self.changes.wrong[0]}"
        else:
            reason = f"{ours} differs from {theirs} on prompt {row.id}"
        first = row.difference.first_position
        raise ParityError(
            reason, position=-1 if first is None else first, max_abs=row.difference.max_abs,
            mean_abs=row.difference.mean_abs, tolerance=limit.max_abs if limit is not None else 0.0,
            hint="The tolerance is a bound on the reference's own noise, measured in the same run",
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-ready values."""
        return {
            "format": 1, "model": self.model, "against": self.against, "adapter": self.adapter,
            "verdict": self.verdict, "expected": self.expected, "ok": self.ok, "findings": list(self.findings),
            "prompts": [row.to_json() for row in self.prompts], "noise_floor": self.floor.to_json(),
            "layers": [_finite(value) for value in self.layers], "reference": dict(self.reference),
            "subject": dict(self.subject),
            "survival": [{k: _finite(v) for k, v in row.to_json().items()} for row in self.survival],
            "weights": self.weights.to_json() if self.weights is not None else None,
            "changes": self.changes.to_json() if self.changes is not None else None,
            "lanes": self.lanes.to_json() if self.lanes is not None else None, "versions": dict(self.versions),
        }  # fmt: skip

    def document(self) -> Document:
        from trimtab.verification.render.text import document_of

        return document_of(self)


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
