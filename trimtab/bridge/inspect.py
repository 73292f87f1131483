"""Where are the weights of a live torch model, what is quantized, and what is broken or idle?"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trimtab.bridge.inspect_findings import KINDS, Finding
from trimtab.bridge.inspect_rules import read_versions, view
from trimtab.errors import RequestError, gib


@dataclass(frozen=True)
class Scan:
    """The placement and the findings of one model.

    classes: part -> class -> number of linears, embeddings, fused experts. devices: location -> bytes of weights
    ("cuda:0", "offloaded to cpu", "offloaded to disk", "meta"). adapters: name -> modules, tensors by part, whether it
    is active. targets: the modules that a given adapter would change, None without one.
    """

    model_class: str
    said_quantized: str
    classes: dict[str, dict[str, int]]
    devices: dict[str, int]
    device_map: dict[str, str] | None
    adapters: dict[str, dict[str, Any]]
    findings: tuple[Finding, ...]
    targets: dict[str, Any] | None = None
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """The number of modules of each kind of finding."""
        counts: Counter[str] = Counter()
        for finding in self.findings:
            counts[finding.kind] += finding.count
        return dict(counts)

    def of(self, *kinds: str) -> tuple[Finding, ...]:
        """Return the findings of these kinds."""
        return tuple(finding for finding in self.findings if finding.kind in kinds)

    def class_counts(self) -> dict[str, int]:
        """Return class -> number of modules, over all parts."""
        by_class: Counter[str] = Counter()
        for counts in self.classes.values():
            by_class.update(counts)
        return dict(sorted(by_class.items()))

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "findings": [finding.to_json() for finding in self.findings],
            "counts": self.counts, "class_counts": self.class_counts(),
        }  # fmt: skip


def scan(model: Any, *, adapter: str | Path | None = None) -> Scan:
    """Return the placement and the problems of a live model.

    adapter: a PEFT folder; its targets in this model are counted, but it is not loaded. Errors: RequestError for an
    object that is no torch model; AdapterError, CheckpointError if the adapter does not fit or cannot be read.
    """
    if not hasattr(model, "named_modules"):
        raise RequestError("is not a torch model", field="model", value=type(model).__name__)
    seen = view(model)
    return Scan(
        model_class=seen.model_class, said_quantized=seen.said_quantized(), classes=seen.classes(),
        devices=seen.devices(), device_map=seen.shown_map(), adapters=seen.adapters(), findings=tuple(seen.findings()),
        targets=None if adapter is None else _targets(seen.base, adapter), versions=read_versions(),
    )  # fmt: skip


def _targets(base: Any, adapter: str | Path) -> dict[str, Any]:
    """Return the counts of an adapter on a model: tensors by part, modules by part and by their class in PEFT."""
    from trimtab.adapters.adapter import match_adapter, read_adapter
    from trimtab.bridge.live import read_live

    if any(hasattr(module, "base_layer") for module in base.modules()):
        raise RequestError("already has adapters; scan the base before they are loaded", field="model")
    spec = match_adapter(read_adapter(str(adapter)), read_live(base))
    modules = dict(base.named_modules())
    by_part: dict[str, Counter[str]] = {}
    for target in spec.targets:
        outer = modules[target.module_path.removesuffix(".linear") if target.wrapped else target.module_path]
        by_part.setdefault(target.part, Counter())[type(outer).__name__] += 1
    total: Counter[str] = Counter()
    for counts in by_part.values():
        total.update(counts)
    return {
        "tensors": len(spec.file.tensors), "tensors_by_part": spec.counts()["parts"],
        "modules": len({target.module_path for target in spec.targets}),
        "modules_by_class": dict(sorted(total.items())),
        "modules_by_part": {part: dict(counts) for part, counts in sorted(by_part.items())},
        "no_effect": len(spec.no_effect), "no_effect_why": sorted({why for _, why in spec.no_effect}),
    }  # fmt: skip


def scan_text(scanned: Scan) -> str:
    """Return a scan for people: counts first, then each kind of finding once with its first modules."""
    lines = [f"{scanned.model_class}, {scanned.said_quantized}"]
    lines += [f"  {place}: {gib(count)}" for place, count in scanned.devices.items()]
    for part, counts in scanned.classes.items():
        lines.append(f"  {part}: " + ", ".join(f"{count} {name}" for name, count in counts.items()))
    for name, facts in scanned.adapters.items():
        state = "active" if facts["active"] else "not active"
        lines.append(f"  adapter {name}: {facts['modules']} modules, {state}")
    if scanned.targets is not None:
        shown = ", ".join(f"{count} {name}" for name, count in scanned.targets["modules_by_class"].items())
        idle = f"; {scanned.targets['no_effect']} tensors without effect" if scanned.targets["no_effect"] else ""
        lines.append(f"  the adapter would change {scanned.targets['modules']} modules: {shown}{idle}")
    if not scanned.findings:
        return "\n".join([*lines, "nothing found"])
    for kind in KINDS:
        mine = scanned.of(kind.name)
        if mine:
            bugs = f" ({', '.join(kind.bugs)})" if kind.bugs else ""
            lines += ["", f"{kind.name}{bugs}: {kind.meaning} [{scanned.counts[kind.name]}]"]
            lines += [f"  {finding.module_path or '(the model)'}: {finding.detail}" for finding in mine[:3]]
            lines += [f"  and {len(mine) - 3} more"] if len(mine) > 3 else []
            lines.append(f"  workaround: {kind.way_round}")
    return "\n".join(lines)
