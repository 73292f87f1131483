"""How often `trimtab verify --against a server` is right: planted faults and right servers on the demo model.

    python -m bench.alive --numbers FOLDER --save bench/results/alive.json

A case is one server state (adapter, fault, precision of the server) asked in one way (top-k, with or without its base, with small
random changes of its logprobs as other kernels make them). Computed answers are kept, so that many cases share them; each case is
judged by the command's own code. A fault counts as above the noise where it moves the answers at least twice as far as the server's
precision moves the right ones.

Besides the demo's adapters there is `patterned`: style with an alpha_pattern and a rank_pattern. An older version of an adapter
is the adapter with its B changed at random; the command gets it as another adapter (`adapter older`) or does not get it (`older`).

The distances that each case is judged by are kept in FOLDER, a file for each server, adapter and fault. What lies there is not
computed again: a run that was stopped goes on, two runs may share the work, and a change of the verdict's rules takes seconds.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import trimtab
from bench import parser_of, save
from bench.planted import Both, Planted
from bench.rates import at_least, at_most
from trimtab.adapters.file import CONFIG_NAME, TENSORS_NAME
from trimtab.demo.demo import ADAPTERS
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.process.files import write_text
from trimtab.process.packages import stack_versions
from trimtab.verification.server import verify
from trimtab.verification.server.faults import Fault, other_values, write_adapter, write_faults
from trimtab.verification.server.local import Reference
from trimtab.verification.server.verdict import Asked, Verdict, judge, nothing_to_tell

SERVERS = ("none", "nf4", "4 bits of another kind", "merged", "merged, nf4", "int8")
FAULTY_SERVERS = ("none", "nf4")
PATTERNED = "patterned"
NAMES = (*ADAPTERS, PATTERNED)
OF_PATTERNED = ("ignored", "scale", "alpha_pattern ignored", "rank_pattern ignored")
OLDER = "older"
OLDER_SEED = 1  # not that of the command's own stand-in for an older version
BLOCK = 32
ABOVE = 2.0
OTHER = "adapter "  # how the command names a fault that is another adapter


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

    def rows(self, rows: Any, name: str | None) -> list[Any]:
        folder = self.folder if name else None
        keys = [(self.where, self.adapter if name else None, str(folder), row.question.id, tuple(row.tokens)) for row in rows]
        missing = {key: row for key, row in zip(keys, rows, strict=True) if key not in self.kept}
        if missing:
            with super().instead(folder) if folder is not None else nullcontext():
                self.kept |= dict(zip(missing, super().rows(list(missing.values()), name), strict=True))
        return [self.kept[key] for key in keys]


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


def patterned(style: Path, out: Path) -> Path:
    """Write the adapter style with another alpha for the queries and half the rank for the down projections."""
    config = json.loads((style / CONFIG_NAME).read_text(encoding="utf-8"))
    tensors = load_file(str(style / TENSORS_NAME))
    rank = config["r"] // 2
    for name, tensor in tensors.items():
        if ".down_proj." in name:
            tensors[name] = tensor[:rank] if ".lora_A." in name else tensor[:, :rank]
    patterns = {"alpha_pattern": {"q_proj": 2 * config["lora_alpha"]}, "rank_pattern": {"down_proj": rank}}
    return write_adapter(out, {**config, **patterns}, tensors)


def older(adapter: Path, out: Path) -> Path:
    """Write an adapter with other values of about the same size, as an older version has them."""
    tensors = load_file(str(adapter / TENSORS_NAME))
    names = [name for name in tensors if ".lora_B." in name]
    config = json.loads((adapter / CONFIG_NAME).read_text(encoding="utf-8"))
    return write_adapter(out, config, other_values(tensors, names, OLDER_SEED))


def _load(folder: Path, adapters: dict[str, Path], quant: str) -> Any:
    plan = trimtab.plan(folder, adapters=adapters, quant=quant, context=verify.CONTEXT_TOKENS, images=1, audio_s=2.0)
    return trimtab.load(plan, decode="eager")


class Proof:
    """Every case, and what came of it."""

    def __init__(self, work: Path, save: Path | None, numbers: Path | None = None) -> None:
        self.work, self.save, self.kept = work, save, {}
        self.numbers = numbers or work / "numbers"
        self.numbers.mkdir(parents=True, exist_ok=True)
        self.asked: list[dict[str, Any]] = []
        self.base_answers: dict[Any, Any] = {}
        self.own = {name: DEMO / "adapters" / name for name in ADAPTERS}
        self.own[PATTERNED] = patterned(self.own["style"], work / PATTERNED)
        self.local: dict[str, Any] = {}
        self.chosen: dict[str, Any] = {}
        self.written: dict[Any, Any] = {}
        self.words: dict[int, str] = {}
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
        if where.startswith("merged"):
            out, quant = self.work / f"merged-{name}", where.partition(", ")[2] or "none"
            if not out.exists():
                trimtab.merge(DEMO / "base", out, adapters={name: self.own[name]})
            return _load(out, {}, quant), self.local[quant]
        folder, quant = DEMO / "base", where
        if where not in verify.PRECISIONS:
            folder, quant = self.work / "other-bits", "none"
            if not folder.exists():
                other_bits(DEMO / "base", folder)
        if where not in self.local and where in verify.PRECISIONS:
            self.local[where] = _load(folder, self.own, quant)
        if where in self.local:
            return self.local[where], self.local[where]
        self.local[where] = _load(folder, self.own, quant)
        return self.local[where], self.local[where]

    def case(
        self, name: str, fault: str, where: str, planted: Planted, base: Planted, other: Path | None = None, **asked: Any
    ) -> None:
        both = Both(planted, base)
        adapters = {name: self.own[name]}
        if fault.startswith(OTHER) and other is not None:
            adapters[fault.removeprefix(OTHER)] = other
        with_base = asked["with_base"]
        judged: list[dict[str, Any]] = []

        def judge_and_keep(questions: Any, faults: Any, **options: Any) -> Verdict:
            judged.append({"questions": [asdict(one) for one in questions], "faults": faults, "options": options})
            return judge(questions, faults, **options)

        verify.judge = judge_and_keep
        report = verify.verify_remote(
            DEMO / "base", adapters=adapters, adapter=name, against="http://server/v1", remote_model="m",
            remote_base="b" if with_base else None, transport=both.transport(),
        )  # fmt: skip
        base_noise = round(report.residuals[report.precision], 5) if with_base else None
        self.asked.append(
            {"case": {"adapter": name, "fault": fault or None, "server": where, **asked, "base_noise": base_noise,
                      "precision": report.precision, "questions": len(report.answered)},
             "judged": judged[0] if judged else None}
        )  # fmt: skip

    def right(self, name: str, where: str) -> None:
        model, base_model = self.server(where, name)
        served = None if where.startswith("merged") else name
        memory: dict[Any, Any] = {}
        ways = [(20, True, 0.0), (20, False, 0.0), (5, True, 0.0), (5, False, 0.0), (0, True, 0.0)]
        ways += [(20, True, jitter) for jitter in (0.01, 0.03, 0.05, 0.1)] + [(5, True, 0.05), (5, False, 0.02), (20, False, 0.05)]
        for top, with_base, jitter in ways:
            planted = Planted(model, {"m": served}, top=top, jitter=jitter, words=self.words)
            base = Planted(base_model, {"b": None}, top=top, jitter=jitter, words=self.words)
            planted.share, base.share = memory.setdefault("m", {}), memory.setdefault("b", {})
            self.case(name, "", where, planted, base, top=top, with_base=with_base, jitter=jitter)

    def wrong(self, name: str, where: str, fault: Fault) -> None:
        model, _ = self.server(where, name)
        served = None
        if fault.folder is not None:
            served = f"fault-{name}-{fault.name}".replace(" ", "-").lower()
            model.load_adapter(served, fault.folder)
        memory: dict[Any, Any] = {}
        ways = [(20, True), (5, True), (20, False)]
        for top, with_base in ways if where == "none" else ways[:2]:
            planted = Planted(model, {"m": served}, top=top, words=self.words)
            base = Planted(model, {"b": None}, top=top, words=self.words)
            planted.share, base.share = memory, self.base_answers.setdefault((where, name), {})
            self.case(name, fault.name, where, planted, base, fault.folder, top=top, with_base=with_base, jitter=0.0)
        if served is not None:
            model.unload_adapter(served)

    def run(self, cases: Sequence[tuple[str, str]], *, with_faults: bool = True) -> dict[str, Any]:
        """Return the verdicts on every (precision of the server, adapter): right servers first, then those with faults."""
        verify.open_reference = self.open  # type: ignore[assignment]
        choose = verify.choose

        def chosen(reference: Any, questions: Any, new_tokens: int) -> Any:
            if reference.adapter not in self.chosen:
                self.chosen[reference.adapter] = choose(reference, questions, new_tokens)
            return self.chosen[reference.adapter]

        candidates = verify.candidates
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

        verify.choose, verify.candidates, verify.write_faults = chosen, asked, written
        for where, name in cases:
            with self.unit(where, name, "right") as is_missing:
                if is_missing:
                    self.right(name, where)
        for where, name in cases if with_faults else ():
            if where in FAULTY_SERVERS:
                self.faults(name, where, written)
        return self.result()

    @contextmanager
    def unit(self, where: str, name: str, what: str) -> Iterator[bool]:
        """Yield whether these cases are still to be computed; what was asked meanwhile is kept in a file of its own."""
        file = self.numbers / re.sub(r"[ ,]+", "-", f"{where}-{name}-{what}.json")
        self.asked = []
        yield not file.exists()
        if self.asked:
            text = json.dumps(self.asked)
            write_text(file, text, field="numbers", newline=None)
            self.tell(file.stem)

    def faults(self, name: str, where: str, written: Any) -> None:
        """Plant each fault of an adapter."""
        with self.open(None, "none", name, None) as reference:
            others = {other: self.own[other] for other in ADAPTERS if other != name and name in ADAPTERS}
            others[OLDER] = older(self.own[name], self.work / f"{OLDER}-{name}")
            faults, _ = written(reference.spec, self.work, others)
        faults.append(Fault(OLDER, "an older version answers, of which the command knows nothing", others[OLDER]))
        for fault in faults:
            if name in ADAPTERS or fault.name in OF_PATTERNED:
                with self.unit(where, name, fault.name) as is_missing:
                    if is_missing:
                        self.wrong(name, where, fault)

    def tell(self, text: str) -> None:
        result = self.result()
        print(
            f"{time.monotonic() - self.started:6.0f} s ({time.process_time():.0f} of CPU)  {text}: {json.dumps(result['summary'])}",
            flush=True,
        )
        save(self.save, result)

    def result(self) -> dict[str, Any]:
        rows = [row(one) for file in sorted(self.numbers.glob("*.json")) for one in json.loads(file.read_text("utf-8"))]
        return {
            "what": "python -m bench.alive: verdicts of `trimtab verify --against` on the demo model, with planted faults",
            "versions": stack_versions(), "above_noise": ABOVE, "summary": summary(rows), "cases": rows,
        }  # fmt: skip


def is_right(row: dict[str, Any]) -> bool:
    """Return whether a seeded fault was named."""
    return row["verdict"] == ("ignored" if row["fault"] == "ignored" else "wrong") and row["named"] == row["fault"]


def row(one: dict[str, Any]) -> dict[str, Any]:
    """Return a case with its verdict, judged by today's rules."""
    case, judged = one["case"], one["judged"]
    verdict = nothing_to_tell("nothing was compared")
    if judged is not None:
        questions = [Asked(**question) for question in judged["questions"]]
        verdict = judge(questions, [tuple(fault) for fault in judged["faults"]], **judged["options"])
    size = next((weighed.size for weighed in verdict.weighed if weighed.name == case["fault"]), 0.0)
    return {
        **case, "verdict": verdict.word, "named": verdict.fault or None, "is_as_a_whole": verdict.is_as_a_whole,
        "noise": round(verdict.noise, 5), "visible_from": round(verdict.visible_from, 4), "size": round(size, 4),
        "false_alarm_rate": verdict.false_alarm_rate, "unseen": list(verdict.unseen),
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts that the targets speak of."""
    clean = [row for row in rows if row["fault"] is None and not row["jitter"] and row["top"] == 20 and row["with_base"]]
    noise = {(row["adapter"], row["server"]): row["noise"] for row in clean}
    right = [row for row in rows if row["fault"] is None]
    unknown = [row for row in rows if row["fault"] == OLDER]
    wrong = [row for row in rows if row["fault"] not in (None, OLDER)]
    above = [row for row in wrong if row["size"] >= ABOVE * noise.get((row["adapter"], row["server"]), 0.0) and row["size"] > 0]
    below = [row for row in wrong if row not in above]
    alarms = sum(map(is_alarm, right))
    return {
        "right_cases": len(right), "right_servers": len({(row["adapter"], row["server"]) for row in right}),
        "false_alarms": alarms, "false_alarm_rate_at_most": at_most(alarms, len(right)),
        "right_words": dict(Counter(row["verdict"] for row in right)),
        "right_words_by_way": {way: dict(Counter(row["verdict"] for row in right if way_of(row) == way)) for way in WAYS},
        "right_alive_as_a_whole": sum(row["is_as_a_whole"] for row in right),
        "faults_above_noise": len(above), "named": sum(map(is_right, above)), "called_wrong": sum(map(is_alarm, above)),
        "named_at_least": at_least(sum(map(is_right, above)), len(above)),
        "alive_above_noise": sum(row["verdict"] == "alive" for row in above),
        "faults_below_noise": len(below), "words_below_noise": dict(Counter(row["verdict"] for row in below)),
        "older_not_given": dict(Counter(row["verdict"] for row in unknown)),
    }  # fmt: skip


def is_alarm(row: dict[str, Any]) -> bool:
    """Return whether the server was called ignored or wrong."""
    return row["verdict"] in ("ignored", "wrong")


FIGURES = re.compile(r"(<!-- figures:alive -->\n).*?(\n<!-- /figures -->)", re.DOTALL)
WAYS = ("logprobs and the server's base", "logprobs alone", "texts alone")


def way_of(row: dict[str, Any]) -> str:
    """Return how a server was asked."""
    return WAYS[2] if not row["top"] else WAYS[0] if row["with_base"] else WAYS[1]


def figures(summary: dict[str, Any]) -> str:
    """Return what the page says of the counts, as Markdown."""
    words, above, below = summary["right_words"], summary["faults_above_noise"], summary["faults_below_noise"]
    ways = summary["right_words_by_way"].items()
    shares = "; ".join(f"{way}: {one.get('alive', 0)} of {sum(one.values())}" for way, one in ways)
    lines = [
        f"- **Right servers: {summary['right_cases']} cases, {summary['false_alarms']} called ignored or wrong.** The exact bound "
        f"of that rate is {summary['false_alarm_rate_at_most']:.1%} (95 % confidence, Clopper and Pearson) if every case counts. "
        f"{_independent(summary)}",
        f"- Of these, {words.get('alive', 0)} were called alive and {words.get('cannot tell', 0)} could not be told; of "
        f"{summary['right_alive_as_a_whole']} every fault of the whole adapter was excluded. Alive by {shares}.",
        f"- Planted faults that stand above the noise: {above} cases, {summary['called_wrong']} called ignored or wrong, "
        f"{summary['named']} named for what they are, {summary['alive_above_noise']} called alive. The exact lower bound of the "
        f"share that is named is {summary['named_at_least']:.1%} (95 % confidence).",
        f"- Planted faults below the noise: {below} cases{_counted(summary['words_below_noise'])}.",
        "- An older version of the adapter of which the command knows nothing: "
        f"{sum(summary['older_not_given'].values())} cases{_counted(summary['older_not_given'])}.",
    ]
    return "\n".join(lines)


def _independent(summary: dict[str, Any]) -> str:
    """Return what the cases are: those of one server are not independent, so the bound of the servers alone is given too."""
    cases, servers, alarms = (summary[name] for name in ("right_cases", "right_servers", "false_alarms"))
    bound = at_most(min(alarms, servers), servers) or 0.0
    return (
        f"The {cases} cases are {servers} servers and adapters, each asked in {cases // servers} ways; with the {servers} alone "
        f"the bound is {bound:.1%}."
    )


def _counted(words: dict[str, int]) -> str:
    return f" ({', '.join(f'{count} {word}' for word, count in sorted(words.items()))})" if words else ""


def write_figures(page: Path, summary: dict[str, Any]) -> None:
    """Put the figures of the summary in their place in the page."""
    text = page.read_text(encoding="utf-8")
    page.write_text(FIGURES.sub(lambda match: match[1] + figures(summary) + match[2], text), encoding="utf-8")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--numbers", type=Path, help="keep what was computed here, and take from here what is there")
    parser.add_argument("--adapter", action="append", choices=NAMES, help="compute only these")
    parser.add_argument("--server", action="append", choices=SERVERS, help="compute only these")
    parser.add_argument("--right", action="store_true", help="compute the right servers alone")
    parser.add_argument("--page", type=Path, help="put the figures into this page")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory(prefix="trimtab-alive-", ignore_cleanup_errors=True) as work:
        cases = [(where, name) for name in options.adapter or NAMES for where in options.server or SERVERS]
        proof = Proof(Path(work), options.save, options.numbers)
        proof.run(cases, with_faults=not options.right)
        proof.tell("all")
        if options.page:
            write_figures(options.page, proof.result()["summary"])


if __name__ == "__main__":
    main()
