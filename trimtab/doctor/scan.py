"""A scan of a live torch model: where its weights are, what is quantized, what is broken or idle.

`scan` takes any model of transformers: plain, quantized, split by accelerate's hooks, with adapters of PEFT, or empty on
the meta device. It moves nothing and calls no forward. The rules are in scan_rules.py; this file holds the values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trimtab.errors import RequestError, gib


@dataclass(frozen=True)
class Kind:
    """One kind of finding.

    breaks: what fails or is wrong because of it: "forward", "merge", "save", "answer" (a silent one), "" for nothing. bugs:
    ids of the upstream catalogue. package: whose bug it is, first of all.
    """

    name: str
    bugs: tuple[str, ...]
    package: str
    breaks: str
    meaning: str
    way_round: str


_NO_4BIT_OFFLOAD = (
    "Load the base with only unquantized modules (towers, embed_tokens_per_layer) on \"cpu\" or \"disk\", or the whole of "
    "it with trimtab.load, which keeps weights quantized wherever they are"
)  # fmt: skip
_BY_NAME = 'Name each module in the device map, without the "" entry'
KINDS = (
    Kind("quant-state-on-meta", ("A1", "A2"), "bitsandbytes", "forward",
         "the scales of a quantized weight are on the meta device", _NO_4BIT_OFFLOAD),
    Kind("quantized-weight-offloaded", ("A2",), "bitsandbytes", "forward",
         "a hook offloads a 4-bit weight and restores it without its scales", _NO_4BIT_OFFLOAD),
    Kind("weight-on-meta", ("C1", "C6"), "accelerate", "forward",
         "a weight is on the meta device and no hook loads it", "Load the base again, one device map key for each module"),
    Kind("embedding-offloaded", ("D4",), "transformers", "forward",
         "the model reads the token embedding outside the module's forward", "Keep embed_tokens on the GPU"),
    Kind("shared-kv-copied", ("B4",), "transformers", "forward",
         "hooks copy the dictionary through which layers share keys and values",
         "Update transformers to 5.23.0, or load with device_map= instead of calling dispatch_model"),
    Kind("hooks-unknown", (), "accelerate", "forward", "several hooks of one module offload its weights", _BY_NAME),
    Kind("sequential-hook", ("C2", "C3"), "peft", "merge",
         "an offload hook behind the one of a \"\" entry: PEFT's merge skips such modules silently, and "
         "save_pretrained of the model fails", _BY_NAME),
    Kind("nothing-quantized", ("A5",), "transformers", "answer",
         "the model reports that it is quantized, and no module is",
         'Omit llm_int8_enable_fp32_cpu_offload when everything is on one device, and do not map "" to "cpu"'),
    Kind("left-unquantized", ("A4",), "transformers", "", "linears in full precision in a quantized model",
         "By design for modules that the map offloads: count their bytes at full size"),
    Kind("experts-unquantized", ("H3",), "transformers", "", "fused experts in full precision in a quantized model",
         "None in the stock stack"),
    Kind("lora-on-meta", ("E2",), "peft", "forward", "adapter weights are on the meta device",
         "Load with trimtab.bridge.load_peft"),
    Kind("lora-wrong-device", ("B8",), "peft", "forward", "adapter weights are on another device than their layer computes on",
         "Load with trimtab.bridge.load_peft"),
    Kind("adapter-does-nothing", ("E1",), "peft", "answer", "every B of the adapter is zero: the output is the base's",
         "Compare the adapter's keys with the model (trimtab inspect), or load with trimtab.bridge.load_peft"),
    Kind("module-does-nothing", ("E1",), "peft", "answer", "B is zero while other modules of the adapter have one",
         "Compare the adapter's keys with the model (trimtab inspect), or load with trimtab.bridge.load_peft"),
    Kind("keys-without-effect", (), "", "", "tensors of the adapter that match no module of this model",
         "None needed: they had no effect during training either"),
    Kind("not-where-the-map-says", ("B1", "C6"), "accelerate", "", "a module is on another device than in hf_device_map",
         "One device map key for each module"),
    Kind("map-key-names-nothing", ("C5",), "accelerate", "", "a device map key that matches no module", "Correct the key"),
    Kind("tied-weights-untied", ("G1",), "accelerate", "answer", "two tied weights have become two tensors",
         "Keep the head and the token embedding on one device"),
    Kind("table-copied-whole", ("D6",), "accelerate", "", "an offloaded table that every forward copies whole",
         "trimtab.load fetches only the rows that a prompt needs"),
)  # fmt: skip
BY_NAME: Mapping[str, Kind] = {kind.name: kind for kind in KINDS}


@dataclass(frozen=True)
class Finding:
    """One thing that the scan saw. count: how many modules it stands for; module_path is the first, or what holds them."""

    kind: str
    module_path: str
    detail: str
    count: int = 1

    @property
    def bugs(self) -> tuple[str, ...]:
        return BY_NAME[self.kind].bugs

    @property
    def breaks(self) -> str:
        return BY_NAME[self.kind].breaks

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"bugs": list(self.bugs), "breaks": self.breaks}


@dataclass(frozen=True)
class Scan:
    """The placement and the findings of one model.

    classes: part -> class -> how many linears, embeddings, fused experts. devices: place -> bytes of weights ("cuda:0",
    "offloaded to cpu", "offloaded to disk", "meta"). adapters: name -> modules, tensors by part, whether it is active.
    targets: what an adapter that was asked about would change, None if none was.
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
        """How many modules each kind of finding has."""
        counts: Counter[str] = Counter()
        for finding in self.findings:
            counts[finding.kind] += finding.count
        return dict(counts)

    def of(self, *kinds: str) -> tuple[Finding, ...]:
        """Return the findings of these kinds."""
        return tuple(finding for finding in self.findings if finding.kind in kinds)

    def class_counts(self) -> dict[str, int]:
        """Return class -> how many, over all parts."""
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
    """Return what is where in a live model, and what is wrong with it.

    adapter: a folder of PEFT, for what it would change in this model (counted, not loaded). Errors: RequestError for
    something that is no torch model; AdapterError, CheckpointError if the adapter does not fit or cannot be read.
    """
    from trimtab.doctor.scan_rules import read_versions, view

    if not hasattr(model, "named_modules"):
        raise RequestError("is not a torch model", field="model", value=type(model).__name__)
    seen = view(model)
    return Scan(
        model_class=seen.model_class, said_quantized=seen.said_quantized(), classes=seen.classes(),
        devices=seen.devices(), device_map=seen.shown_map(), adapters=seen.adapters(), findings=tuple(seen.findings()),
        targets=None if adapter is None else _targets(seen.base, adapter), versions=read_versions(),
    )  # fmt: skip


def _targets(base: Any, adapter: str | Path) -> dict[str, Any]:
    """Return the counts of an adapter on a model: tensors by part, modules by part and by the class that PEFT meets."""
    from trimtab.bridge.live import read_live
    from trimtab.checkpoint.adapter import match_adapter, read_adapter

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
