"""How does a route to an answer run in a separate process?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trimtab.errors import DeviceError, TrimtabError, UpstreamError
from trimtab.planning import Plan
from trimtab.process import phases
from trimtab.process.runner import FAILED, OOM_HOST, Outcome, run_inside
from trimtab.request import EXPERTS, LoadRequest
from trimtab.verification.routes.child import PHASE
from trimtab.verification.routes.compare import Noise, NoiseFloor

Say = Callable[[str], None]
TIMEOUT_S = 3600.0
OWN, STOCK, PREPARE = (
    "trimtab.verification.routes.trimtab_run", "trimtab.verification.routes.stock_run", "trimtab.verification.routes.inputs",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Route:
    """A route to the answers.

    label: its name in a report. trimtab's routes have a plan, or a request to plan; stock routes have folder, quant, experts,
    dtype, device and adapters, and their interpreter (None: this one). batched: rows computed together (0: one). decode: the decode
    mode of answers and their logits (None: logits of one forward pass). A model in one placement and format, in trimtab or in the
    stock stack. The reference answers first; its greedy texts are the continuation for which both then compute logits.
    """

    label: str
    engine: Literal["trimtab", "stock"] = "trimtab"
    plan: Plan | None = None
    request: LoadRequest | None = None
    folder: str = ""
    quant: str = "none"
    experts: str = EXPERTS[0]
    dtype: str = "bfloat16"
    device: str = "cpu"
    adapters: Mapping[str, str] | None = None
    python: str | None = None
    batched: int = 0
    decode: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the request of the route's process."""
        if self.engine == "trimtab":
            return {
                "plan": self.plan.to_json() if self.plan else None,
                "request": self.request.to_json() if self.request else None, "decode": self.decode,
            }  # fmt: skip
        return {
            "folder": self.folder, "quant": self.quant, "experts": self.experts, "dtype": self.dtype, "device": self.device,
            "adapters": dict(self.adapters or {}),
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Item:
    """One prepared prompt and the adapter that answers it. continuation: the tokens whose logits are compared; None: its own
    answer or, with `follows`, the answer of the item at that index."""

    id: str
    file: str
    prompt_tokens: int
    has_media: bool
    adapter: str | None
    continuation: tuple[int, ...] | None = None
    follows: int | None = None


@dataclass(frozen=True, kw_only=True)
class Said:
    """A route's answer to one item. file: of its logits. repeats: whether a second pass gave the same bits."""

    id: str
    file: str
    token_ids: tuple[int, ...] | None
    text: str | None
    continuation: tuple[int, ...]
    repeats: bool


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A finished route: its answers in the order of the items, its noise, its time and memory.

    memory: host_peak_bytes (of the process; 0 without a separate process), gpu_peak_bytes. loaded: its report line. rows:
    of the prompts that it prepared.
    """

    route: Route
    said: tuple[Said, ...]
    noise: NoiseFloor
    memory: Mapping[str, int]
    seconds: float
    loaded: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the route's entry in a report."""
        names = ("device", "quant", "head", "tiers", "adapters", "notes", "warnings", "versions")
        shown = {name: self.loaded.get(name) for name in names}
        return {
            "label": self.route.label, "engine": self.route.engine, "memory": dict(self.memory),
            "seconds": round(self.seconds, 2), **{name: value for name, value in shown.items() if value},
        }  # fmt: skip


def prepare(model: str | Path, dtype: str, prompts: Sequence[Any], out: Path, *, isolated: bool = True) -> list[dict[str, Any]]:
    """Return one row per prompt (see `inputs.prepare`), made in a separate process."""
    lines, _ = run_module(PREPARE, to_prepare(model, dtype, prompts, out), "the prompts", isolated=isolated)
    return _prepared(lines)


def to_prepare(model: str | Path, dtype: str, prompts: Sequence[Any], out: Path) -> dict[str, Any]:
    """Return the request that `inputs.main` takes."""
    return {"model": str(model), "dtype": dtype, "prompts": [p.to_json() for p in prompts], "out": str(out)}


def _prepared(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [row for line in lines if line["event"] == "prepared" for row in line["rows"]]


def run_route(
    route: Route, items: Sequence[Item], out: Path, *, new_tokens: int, noise: bool | str = False,
    noise_items: int | None = None, rounding: bool = False, packed: Mapping[str, str] | None = None,
    hidden: bool = False, isolated: bool = True, timeout_s: float = TIMEOUT_S, prepare: Mapping[str, Any] | None = None,
) -> Ran:  # fmt: skip
    """Return a route's answers to all items.

    out: an empty folder for the files. prepare: `to_prepare`, for items whose prompts trimtab's process prepares first: another
    process would import the same libraries again. noise: measure the route's noise ("without batches" if batching is tested), only
    on the first noise_items if given. rounding: also answer with the adapter's change added to the weights and rounded
    once (see `rounding`). packed: module path -> form of the modules that the merged model has in 4 bits. isolated
    False runs in this process, which is faster and records no host peak.
    Errors: those of planning and loading; UpstreamError for an exception of stock; DeviceError for a process that died.
    """
    out.mkdir(parents=True, exist_ok=True)
    request = {
        "route": route.to_json(), "items": [asdict(item) for item in items], "out": str(out), "new_tokens": new_tokens,
        "noise": noise, "noise_items": len(items) if noise_items is None else noise_items, "hidden": hidden,
        "batched": route.batched, "rounding": rounding, "packed": dict(packed or {}), "prepare": prepare,
    }  # fmt: skip
    module = OWN if route.engine == "trimtab" else STOCK
    lines, outcome = run_module(module, request, route.label, isolated=isolated, python=route.python, timeout_s=timeout_s)
    answers, pairs, skipped = [], [], []
    memory = {"host_peak_bytes": outcome.peak_host_bytes if outcome else 0, "gpu_peak_bytes": 0}
    for line in lines:
        if line["event"] == "item":
            memory["gpu_peak_bytes"] = max(memory["gpu_peak_bytes"], line["memory"]["gpu_peak_bytes"])
            if outcome is not None and line["memory"].get("host_peak_bytes"):
                memory["host_peak_bytes"] = line["memory"]["host_peak_bytes"]  # noise is measured afterwards
            answers.append(_said(line))
        elif line["event"] == "noise":
            pairs += [Noise(**pair) for pair in line["pairs"]]
            skipped += line["skipped"]
    loaded = next((line for line in lines if line["event"] == "loaded"), {})
    return Ran(
        route=route, said=tuple(answers), noise=NoiseFloor(tuple(pairs), tuple(skipped)), memory=memory,
        seconds=outcome.seconds if outcome else 0.0, loaded=loaded, rows=_prepared(lines),
    )  # fmt: skip


def _said(line: Mapping[str, Any]) -> Said:
    ids = line["token_ids"]
    return Said(
        id=line["id"], file=line["file"], token_ids=None if ids is None else tuple(ids), text=line["text"],
        continuation=tuple(line["continuation"]), repeats=line["repeats"],
    )  # fmt: skip


def with_continuations(items: Sequence[Item], reference: Ran) -> tuple[Item, ...]:
    """Return the items with the reference's greedy tokens as continuations; it may have answered further items after them."""
    return tuple(
        replace(item, continuation=answer.continuation) for item, answer in zip(items, reference.said[: len(items)], strict=True)
    )


def run_module(
    module: str, request: Mapping[str, Any], label: str, *, isolated: bool, python: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> tuple[list[dict[str, Any]], Outcome | None]:  # fmt: skip
    """Return the lines that a module's `main` emitted, and the outcome of its process (None if it ran in this one).

    Errors: trimtab's error from `main`, raised again here; UpstreamError; DeviceError.
    """
    lines: list[dict[str, Any]] = []

    def take(line: dict[str, Any]) -> None:
        if line.get("event") == PHASE:
            phases.begin(line["phase"], line["far"])
        else:
            lines.append(line)

    with phases.within(label):
        if not isolated and python is None:
            import importlib

            importlib.import_module(module).main(request, lines.append)
            raise_told(lines, label)
            return lines, None
        phases.begin("starting a process")
        outcome = run_inside(
            "trimtab.verification.routes.child", {"module": module, "request": request}, python=python,
            timeout_s=timeout_s, on_event=take,
        )  # fmt: skip
    raise_told(lines, label)
    if outcome.ended != "done":
        raise _died(outcome, label, timeout_s)
    return lines, outcome


def raise_told(lines: Sequence[Mapping[str, Any]], label: str) -> None:
    """Raise the exception that a process reported."""
    for line in lines:
        if line.get("event") == "error":
            raise TrimtabError.from_dict(line)
        if line.get("event") == "upstream":
            raise UpstreamError(
                f"{label}: {line['type']}: {line['message']}", package=line["package"], installed=line["installed"],
                hint="This route does not run here; `trimtab doctor` says whether it is a known bug",
            )  # fmt: skip


def _died(outcome: Outcome, label: str, timeout_s: float) -> DeviceError:
    last = next((line for line in reversed(outcome.stderr.strip().splitlines()) if line.strip()), "it said nothing")
    words = {
        FAILED: f"ended with {last}", OOM_HOST: "was killed, probably for lack of host memory",
        "timeout": f"took longer than {timeout_s:.0f} s",
    }  # fmt: skip
    reason = words.get(outcome.ended, f"crashed (exit code {outcome.exit_code}; {last})")
    return DeviceError(f"the process of route {label!r} {reason}", device="host")
