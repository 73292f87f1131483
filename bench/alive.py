"""How often `trimtab verify --against a server` is right: planted faults and right servers on the demo model.

    python -m bench.alive --save bench/results/alive.json

A case is one server state (adapter, fault, precision of the server) asked in one way (top-k, with or without its base, with small
random changes of its logprobs as other kernels make them). Computed answers are kept, so that many cases share them; each case is
judged by the command's own code. A fault counts as above the noise where it moves the answers at least twice as far as the server's
precision moves the right ones.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import trimtab
from bench.planted import Planted
from trimtab.demo.line import ADAPTERS
from trimtab.demo.line import FOLDER as DEMO
from trimtab.proof.remote import verify_remote as remote
from trimtab.proof.remote.faults import write_faults
from trimtab.proof.remote.local import Reference
from trimtab.proof.versions import versions

SERVERS = ("none", "nf4", "4 bits of another kind", "merged", "nf4-dq", "int8")
FAULTY_SERVERS = ("none", "nf4")
NEW_TOKENS = 4
BLOCK = 32
ABOVE = 2.0


class Kept(Reference):
    """A reference that computes each answer once, however many cases ask for it."""

    def __init__(self, model: Any, adapter: str, kept: dict[Any, Any], where: str) -> None:
        super().__init__(model, adapter)
        self.kept, self.where, self.folder = kept, where, None

    @contextmanager
    def instead(self, folder: Path) -> Iterator[str]:
        self.folder = folder
        try:
            yield self.adapter
        finally:
            self.folder = None

    def logprobs(self, question: Any, tokens: Any, name: str | None) -> Any:
        key = (self.where, self.adapter if name else None, name and str(self.folder), question.id, tuple(tokens))
        if key not in self.kept:
            if name and self.folder is not None:
                with super().instead(self.folder):
                    self.kept[key] = super().logprobs(question, tokens, name).half()
            else:
                self.kept[key] = super().logprobs(question, tokens, name).half()
        return self.kept[key].float()


def other_bits(base: Path, out: Path) -> Path:
    """Write the checkpoint with its language weights rounded to 4 bits in blocks of 32, as Q4_0 does, and back."""
    shutil.copytree(base, out)
    for file in out.glob("*.safetensors"):
        tensors = load_file(str(file))
        for name, tensor in tensors.items():
            if tensor.ndim == 2 and name.endswith("_proj.weight") and tensor.shape[1] % BLOCK == 0:
                blocks = tensor.float().reshape(-1, BLOCK)
                largest = blocks.gather(1, blocks.abs().argmax(dim=1, keepdim=True))
                scale = largest / -8
                whole = (blocks / scale.where(scale != 0, 1.0)).round().clamp(-8, 7) * scale
                tensors[name] = whole.reshape(tensor.shape).to(tensor.dtype)
        save_file(tensors, str(file), metadata={"format": "pt"})
    return out


def _load(folder: Path, adapters: dict[str, Path], quant: str) -> Any:
    plan = trimtab.plan(folder, adapters=adapters, quant=quant, context=remote.CONTEXT_TOKENS, images=1, audio_s=2.0)
    return trimtab.load(plan, decode="eager")


class Proof:
    """Every case, and what came of it."""

    def __init__(self, work: Path, save: Path | None) -> None:
        self.work, self.save, self.rows, self.kept = work, save, [], {}
        self.own = {name: DEMO / "adapters" / name for name in ADAPTERS}
        self.local: dict[str, Any] = {}
        self.chosen: dict[str, Any] = {}
        self.written: dict[Any, Any] = {}
        self.started = time.monotonic()

    def open(self, placed: Any, precision: str, adapter: str, folder: Any, **_: Any) -> Any:
        """Stand in the place of `open_reference`: the models stay loaded."""
        if precision not in self.local:
            self.local[precision] = _load(DEMO / "base", self.own, precision)

        @contextmanager
        def opened() -> Iterator[Kept]:
            yield Kept(self.local[precision], adapter, self.kept, precision)

        return opened()

    def server(self, where: str, name: str) -> tuple[Any, Any]:
        """Return the server's model with the adapter, and the one that is its base."""
        if where == "merged":
            out = self.work / f"merged-{name}"
            if not out.exists():
                trimtab.merge(DEMO / "base", out, adapters={name: self.own[name]})
            return _load(out, {}, "none"), self.local["none"]
        folder, quant = DEMO / "base", where
        if where not in remote.PRECISIONS:
            folder, quant = self.work / "other-bits", "none"
            if not folder.exists():
                other_bits(DEMO / "base", folder)
        if where not in self.local and where in remote.PRECISIONS:
            self.local[where] = _load(folder, self.own, quant)
        if where in self.local:
            return self.local[where], self.local[where]
        self.local[where] = _load(folder, self.own, quant)
        return self.local[where], self.local[where]

    def case(self, name: str, fault: str, where: str, planted: Planted, base: Planted, **asked: Any) -> None:
        both = _Both(planted, base)
        others = {"adapters": {name: self.own[name]}}
        if fault.startswith("adapter "):
            others["adapters"][fault.removeprefix("adapter ")] = self.own[fault.removeprefix("adapter ")]
        with_base = asked["with_base"]
        report = remote.verify_remote(
            DEMO / "base", **others, adapter=name, against="http://server/v1", remote_model="m",
            remote_base="b" if with_base else None, transport=both.transport(), new_tokens=NEW_TOKENS,
        )  # fmt: skip
        verdict = report.verdict
        size = next((one.size for one in verdict.weighed if one.name == fault), 0.0)
        self.rows.append(
            {"adapter": name, "fault": fault or None, "server": where, **asked, "verdict": verdict.word,
             "named": verdict.fault or None, "is_confident": verdict.is_confident, "noise": round(verdict.noise, 5),
             "size": round(size, 4), "false_alarm_rate": verdict.false_alarm_rate, "precision": report.precision,
             "questions": len(report.answered), "unseen": list(verdict.unseen)}
        )  # fmt: skip

    def right(self, name: str, where: str) -> None:
        model, base_model = self.server(where, name)
        served = None if where == "merged" else name
        memory: dict[Any, Any] = {}
        ways = [(20, True, 0.0), (20, False, 0.0), (5, True, 0.0), (5, False, 0.0), (0, True, 0.0)]
        ways += [(20, True, jitter) for jitter in (0.01, 0.03, 0.05, 0.1)] + [
            (5, True, 0.05),
            (5, False, 0.02),
            (20, False, 0.05),
        ]
        for top, with_base, jitter in ways:
            planted = Planted(model, {"m": served}, top=top, jitter=jitter)
            base = Planted(base_model, {"b": None}, top=top, jitter=jitter)
            planted.share, base.share = memory.setdefault("m", {}), memory.setdefault("b", {})
            self.case(name, "", where, planted, base, top=top, with_base=with_base, jitter=jitter)

    def wrong(self, name: str, where: str, faults: list[Any]) -> None:
        model, _ = self.server(where, name)
        shared: dict[Any, Any] = {}
        for fault in faults:
            served = None
            if fault.folder is not None:
                served = f"fault-{name}-{fault.name}".replace(" ", "-").lower()
                if served not in model.adapters:
                    model.load_adapter(served, fault.folder)
            memory: dict[Any, Any] = {}
            for top, with_base in ((20, True), (5, True), (20, False)):
                planted, base = Planted(model, {"m": served}, top=top), Planted(model, {"b": None}, top=top)
                planted.share, base.share = memory, shared
                self.case(name, fault.name, where, planted, base, top=top, with_base=with_base, jitter=0.0)
            if served is not None:
                model.unload_adapter(served)

    def run(self, names: Sequence[str]) -> dict[str, Any]:
        remote.open_reference = self.open  # type: ignore[assignment]
        choose = remote.choose

        def chosen(reference: Any, questions: Any, new_tokens: int) -> Any:
            if reference.adapter not in self.chosen:
                self.chosen[reference.adapter] = choose(reference, questions, new_tokens)
            return self.chosen[reference.adapter]

        candidates = remote.candidates
        made: dict[str, Any] = {}

        def asked(reference: Any, *args: Any, **options: Any) -> Any:
            if reference.adapter not in made:
                made[reference.adapter] = candidates(reference, *args, **options)
            return made[reference.adapter]

        def written(spec: Any, work: Path, others: Any) -> Any:
            key = (spec.file.folder.name, *others)
            if key not in self.written:
                self.written[key] = write_faults(spec, self.work / f"faults-{'-'.join(key)}", others)
            faults, not_tried = self.written[key]
            return list(faults), list(not_tried)

        remote.choose, remote.candidates, remote.write_faults = chosen, asked, written
        for name in names:
            with self.open(None, "none", name, None) as reference:
                others = {other: path for other, path in self.own.items() if other != name}
                faults, _ = written(reference.spec, self.work, others)
            for where in SERVERS:
                self.right(name, where)
                self.tell(f"{name}, {where}: right")
                if where in FAULTY_SERVERS:
                    self.wrong(name, where, faults)
                    self.tell(f"{name}, {where}: faults")
                self.kept.clear()
        return self.result()

    def tell(self, text: str) -> None:
        result = self.result()
        print(f"{time.monotonic() - self.started:6.0f} s  {text}: {json.dumps(result['summary'])}", flush=True)
        if self.save:
            self.save.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    def result(self) -> dict[str, Any]:
        return {
            "what": "python -m bench.alive: verdicts of `trimtab verify --against` on the demo model, with planted faults",
            "versions": versions(), "above_noise": ABOVE, "summary": summary(self.rows), "cases": self.rows,
        }  # fmt: skip


class _Both(Planted):
    """A server with two models: the adapter's and the base's may be different loaded models."""

    def __init__(self, planted: Planted, base: Planted) -> None:
        super().__init__(None, {"m": None, "b": None})
        self._parts = {"m": planted, "b": base}

    def transport(self) -> Any:
        for part in self._parts.values():
            part.transport()
        return super().transport()

    async def _answer(self, request: Any) -> Any:
        if request.url.path.endswith("/models"):
            return await super()._answer(request)
        body = json.loads(await request.aread())
        return await self._parts[body["model"]]._answer(request)


def is_right(row: dict[str, Any]) -> bool:
    """Return whether a seeded fault was named."""
    return row["verdict"] == ("ignored" if row["fault"] == "ignored" else "wrong") and row["named"] == row["fault"]


def join(files: list[Path], save: Path) -> None:
    """Write the cases of several runs as one file."""
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    rows = [row for result in results for row in result["cases"]]
    save.write_text(
        json.dumps({**results[0], "summary": summary(rows), "cases": rows}, indent=1) + "\n", encoding="utf-8"
    )


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts that the targets speak of."""
    clean = [
        row for row in rows if row["fault"] is None and not row["jitter"] and row["top"] == 20 and row["with_base"]
    ]
    noise = {(row["adapter"], row["server"]): row["noise"] for row in clean}
    right = [row for row in rows if row["fault"] is None]
    wrong = [row for row in rows if row["fault"] is not None]
    above = [
        row
        for row in wrong
        if row["size"] >= ABOVE * noise.get((row["adapter"], row["server"]), 0.0) and row["size"] > 0
    ]
    with_logprobs = [row for row in above if row["top"]]
    below = [row for row in wrong if row not in above]
    return {
        "right_cases": len(right), "false_alarms": sum(row["verdict"] in ("ignored", "wrong") for row in right),
        "right_words": dict(Counter(row["verdict"] for row in right)),
        "faults_above_noise": len(with_logprobs), "named": sum(map(is_right, with_logprobs)),
        "called_wrong": sum(row["verdict"] in ("ignored", "wrong") for row in with_logprobs),
        "faults_below_noise": len(below),
        "confident_alive_below": sum(row["verdict"] == "alive" and row["is_confident"] for row in below),
        "confident_alive_above": sum(row["verdict"] == "alive" and row["is_confident"] for row in above),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path)
    parser.add_argument(
        "--adapter", action="append", choices=ADAPTERS, help="only these; the files are put together by --join"
    )
    parser.add_argument("--join", type=Path, nargs="+", help="saved files of several runs: write them as one")
    options = parser.parse_args()
    if options.join:
        join(options.join, options.save)
        return
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory(prefix="trimtab-alive-", ignore_cleanup_errors=True) as work:
        Proof(Path(work), options.save).run(options.adapter or ADAPTERS)


if __name__ == "__main__":
    main()
