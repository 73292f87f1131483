"""How does each case end on the stock stack and on trimtab, as records and as scripts?"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trimtab.adapters.adapter import read_adapter
from trimtab.adapters.file import for_peft
from trimtab.checkpoint.folder import find_folder
from trimtab.doctor.cases import labels
from trimtab.doctor.cases.cases import BROAD_TARGETS, GEMMA4, MODES, Case, device_map, find_cases, skip_modules
from trimtab.doctor.facts.probe_kit import EVERYWHERE, LANGUAGE
from trimtab.errors import CheckpointError, RequestError
from trimtab.process.files import write_whole
from trimtab.process.json_file import read_object
from trimtab.process.redact import Cleaner
from trimtab.process.runner import CRASHED, DONE, FAILED, Outcome, run_inside
from trimtab.process.work_folder import work_folder
from trimtab.report.document import Block, Code, Details, Document, Facts, Heading, Table, Text
from trimtab.report.render import filled
from trimtab.request import check_choice

FORMAT = 1
ENGINES = ("stock", "trimtab")
DEMO = Path(__file__).resolve().parents[2] / "demo"
DEMO_ADAPTER = "specialist"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
HOW_CHARS = 120
MODES_HEAD = "t i a"
PEAK_HEAD = "GiB"
LEGEND = (
    "t i a: text, image, audio. = the reference's answer, ~ another one, + an answer without a reference, x an exception, "
    ". not asked. GiB: peak of the GPU's memory, of the process's where the CPU is used in place of the GPU"
)
TAIL_LINES = 4  # lines of a trace below the table
REFERENCE_SHARE = 2  # a reference answers twice, with the adapter and without
Record = dict[str, Any]


def run_matrix(
    *,
    cases: Sequence[str | Case] | None = None,
    python: str | os.PathLike[str] | None = None,
    model: str | Path | None = None,
    adapter: str | Path | None = None,
    device: str = "auto",
    pressure: float | None = None,
    timeout_s: float = 120.0,
    memory_bytes: int | None = None,
    engines: Sequence[str] = ENGINES,
    progress: Callable[[int, int], None] | None = None,
    on_record: Callable[[Record], None] | None = None,
) -> tuple[Record, ...]:
    """Return the records of the cases, in the table's order, stock before trimtab.

    python: the interpreter of the stock stack (trimtab itself always runs in this one). model, adapter: None is the bundled demo.
    device: "auto", "cpu" (the GPU is imitated) or "cuda". pressure: share of the card that the loaded base fills, instead of the
    cases' own. timeout_s, memory_bytes: limits of one case. on_record: called after each. Errors: RequestError for an invalid
    request (an unknown case, an interpreter without the packages, a model without an adapter), CheckpointError, AdapterError.
    """
    chosen = find_cases(cases)
    for engine in engines:
        check_choice(engine, ENGINES, field_name="engine")
    check_choice(device, ("auto", "cpu", "cuda"), field_name="device")
    if pressure is not None and not 0 < pressure < 1:
        raise RequestError("must be between 0 and 1", field="pressure", value=pressure)
    records: list[Record] = []
    with work_folder("matrix") as work:
        matrix = _Matrix(work, chosen, python, model, adapter, device, pressure, timeout_s, memory_bytes, engines)
        total = len(chosen) * len(engines)
        for case in chosen:
            for engine in engines:
                records.append(matrix.run(case, engine))
                if on_record is not None:
                    on_record(records[-1])
                if progress is not None:
                    progress(len(records), total)
    return tuple(records)


class _Matrix:
    """Data that the cases of one call share: the adapter's variants, the prompts, the references."""

    def __init__(
        self, work: Path, cases: Sequence[Case], python: str | os.PathLike[str] | None, model: str | Path | None,
        adapter: str | Path | None, device: str, pressure: float | None, timeout_s: float, memory_bytes: int | None,
        engines: Sequence[str],
    ) -> None:  # fmt: skip
        self.work, self.python, self.pressure = work, python, pressure
        self.timeout_s, self.memory_bytes = timeout_s, memory_bytes
        if model is None:
            adapter = adapter if adapter is not None else DEMO / "adapters" / DEMO_ADAPTER
        self.folder = find_folder(model if model is not None else DEMO / "base").resolve()
        self.model_name = "demo" if model is None else self.folder.name
        config = read_object(self.folder / "config.json", "config.json")
        self.has_towers = "vision_config" in config
        self.adapters = _variants(None if adapter is None else for_peft(adapter, config), cases, work)
        self.names = {
            str(self.folder): "<model>", str(Path(adapter).resolve()) if adapter else "": "<adapter>", str(work): "<work>",
            str(Path(__file__).resolve().parents[2]): "trimtab",
        }  # fmt: skip
        self.packages = {python: _packages(python)} if "stock" in engines else {}
        if "trimtab" in engines and None not in self.packages:
            self.packages[None] = _packages(None)
        self.devices = {key: _device(device, value["has_gpu"], key) for key, value in self.packages.items()}
        self.references: dict[tuple[Any, str], Path | None] = {}
        self.sources: dict[Any, str] = {}
        self.outcomes: dict[Any, Outcome] = {}

    def run(self, case: Case, engine: str) -> Record:
        """Return one record; only Ctrl-C ends without one."""
        python = self.python if engine == "stock" else None
        record: Record = {
            "case": case.name, "title": case.title, "engine": engine, "label": labels.UNKNOWN, "lane": None,
            "stage": "import", "ended": DONE, "modes": {}, "placement_kept": None, "map_asked": None, "map_after": None,
            "memory": {}, "seconds": 0.0, "exception": None, "warnings": {}, "quantized": {}, "scan": [], "log_lines": [],
            "configuration": {}, "device": None, "pressure": None, "versions": {}, "model": self.model_name,
            "shows": list(case.shows), "script": script_of(case),
        }  # fmt: skip
        if case.needs_towers and not self.has_towers:
            return record | {"label": labels.NOT_APPLICABLE, "versions": self.packages[python]["versions"]}
        reference = self.reference(case.reference if engine == "stock" else case.line_reference, python)
        if not self._inputs(python).is_file():
            # Not even the inputs could be made: the case ended at that stage.
            return _finish(record, case, self.outcomes[python], Cleaner(self.names))
        folder = self.work / f"{case.name}-{engine}"
        folder.mkdir(parents=True, exist_ok=True)
        request = {
            "case": case.to_json(), "model": str(self.folder), "adapters": self.adapters, "work": str(folder),
            "inputs": str(self._inputs(python)), "reference": str(reference) if reference else None,
            "device": self.devices[python], "pressure": self.pressure, "names": self.names,
        }  # fmt: skip
        module = "trimtab.doctor.cases.stock_run" if engine == "stock" else "trimtab.doctor.cases.trimtab_run"
        outcome = run_inside(
            module, request, python=python, timeout_s=self.timeout_s, memory_bytes=self.memory_bytes,
            environment=OFFLINE, cwd=folder,
        )  # fmt: skip
        shutil.rmtree(folder, ignore_errors=True)
        return _finish(record | {"inputs": self.sources.get(python)}, case, outcome, Cleaner(self.names))

    def _inputs(self, python: Any) -> Path:
        return self.work / f"inputs-{list(self.packages).index(python)}.safetensors"

    def reference(self, name: str, python: Any) -> Path | None:
        """Return the file of a reference, made once per interpreter; None if it could not be made."""
        key = (python, name)
        if key not in self.references:
            save = self.work / f"reference-{list(self.packages).index(python)}-{name}.safetensors"
            request = {
                "name": name, "model": str(self.folder), "adapter": self.adapters.get("patched"), "save": str(save),
                "inputs": str(self._inputs(python)), "device": self.devices[python],
            }  # fmt: skip
            outcome = run_inside(
                "trimtab.doctor.cases.reference", request, python=python, timeout_s=REFERENCE_SHARE * self.timeout_s,
                memory_bytes=self.memory_bytes, environment=OFFLINE, cwd=self.work,
            )  # fmt: skip
            for line in outcome.lines:
                if "inputs" in line:
                    self.sources[python] = line["inputs"]
            self.references[key] = save if save.is_file() and outcome.ended == DONE else None
            self.outcomes[python] = outcome
        return self.references[key]


def _variants(adapter: str | Path | None, cases: Sequence[Case], work: Path) -> dict[str, str]:
    if adapter is not None:
        return write_variants(Path(adapter).resolve(), work)
    needing = [case.name for case in cases if case.needs_adapter]
    if needing:
        raise RequestError(
            f"these cases put an adapter on the model: {', '.join(needing)}", field="adapter",
            allowed=[case.name for case in find_cases(None) if not case.needs_adapter],
            hint="Give the adapter's folder, or choose cases without an adapter",
        )  # fmt: skip
    return {}


def _packages(python: str | os.PathLike[str] | None) -> dict[str, Any]:
    """Return the packages of an interpreter. Errors: RequestError that names the missing packages."""
    outcome = run_inside("trimtab.doctor.cases.record", {}, python=python, timeout_s=60)
    if outcome.ended != DONE or not outcome.lines:
        raise RequestError(
            f"is not a Python interpreter that can run a case ({_last_line(outcome)})", field="python", value=str(python)
        )
    reply = outcome.lines[0]
    if reply["missing"]:
        raise RequestError(
            f"this interpreter lacks {', '.join(reply['missing'])}", field="python",
            value=str(python) if python is not None else "this one", hint="Install them there, or name another interpreter",
        )  # fmt: skip
    return reply


def _device(requested: str, has_gpu: bool, python: Any) -> str:
    if requested == "cuda" and not has_gpu:
        raise RequestError(
            "torch sees no GPU there", field="device", value=requested, allowed=("auto", "cpu"),
            hint=f"Interpreter: {python if python is not None else 'this one'}",
        )  # fmt: skip
    return "cuda" if has_gpu and requested != "cpu" else "cpu"


def _finish(record: Record, case: Case, outcome: Outcome, clean: Cleaner) -> Record:
    """Return the record with the facts that the process emitted, how it ended, and the label."""
    for line in outcome.lines:
        record["stage"] = line.get("stage", record["stage"])
        record.update(line.get("facts", {}))
    record["ended"], record["seconds"] = outcome.ended, round(outcome.seconds, 2)
    record["memory"] = {"host_peak_bytes": outcome.peak_host_bytes, **record["memory"]}
    if outcome.ended in (FAILED, CRASHED) and record["exception"] is None:
        last = clean(_last_line(outcome))
        record["stderr_tail"] = clean(outcome.stderr[-2000:])
        if outcome.ended == FAILED:
            name, _, message = last.partition(": ")
            record["exception"] = {"type": name, "message": message, "frames": [], "tail": last, "ours": False}
    record["label"] = labels.label_of(record, lane=case.lane, adapter=case.adapter)
    # A lane's verdict is about the stock stack only.
    record["lane"] = labels.lane_of(record["label"], record, case.lane) if record["engine"] == "stock" else None
    record["catalogue"] = labels.catalogue_of(record)
    return record


def _last_line(outcome: Outcome) -> str:
    lines = [line for line in outcome.stderr.strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else outcome.ended


# Files ----------------------------------------------------------------------------------------------------------------


def save_runs(path: str | Path, environment: Any, runs: Sequence[Mapping[str, Any]]) -> None:
    """Write the runs file, whole or not at all. environment: its JSON value, or an object with `to_json`.

    Errors: RequestError for a path that cannot be written.
    """
    target = Path(path)
    if target.is_dir():
        raise RequestError("is a folder", field="save", value=str(target))
    value = environment.to_json() if hasattr(environment, "to_json") else environment
    text = json.dumps({"format": FORMAT, "environment": value, "runs": list(runs)}, indent=1, default=str)

    def write(sibling: Path) -> None:
        sibling.parent.mkdir(parents=True, exist_ok=True)
        sibling.write_text(text + "\n", encoding="utf-8")

    write_whole(target, write, field="save")


def saving(path: str | Path, environment: Any) -> Callable[[Record], None]:
    """Return an `on_record` that writes the runs file again after every record.

    It is first written without a run, so that a path that cannot be written is reported before the first case.
    Errors: RequestError.
    """
    runs: list[Record] = []
    save_runs(path, environment, runs)

    def keep(record: Record) -> None:
        runs.append(record)
        save_runs(path, environment, runs)

    return keep


def read_runs(path: str | Path) -> dict[str, Any]:
    """Return a runs file's {"format", "environment", "runs"}. Errors: CheckpointError if it is not one."""
    file = Path(path)
    if not file.is_file():
        raise CheckpointError("is not a file", path=file)
    values = read_object(file, "report")
    if values.get("format") != FORMAT or not isinstance(values.get("runs"), list):
        raise CheckpointError(f"is not a runs file of format {FORMAT}", path=file)
    for place, run in enumerate(values["runs"]):
        missing = [key for key in ("case", "engine", "label", "stage") if not isinstance(run, dict) or key not in run]
        if missing:
            raise CheckpointError(f"run {place} lacks {', '.join(missing)}", path=file)
    return values


def matrix_document(records: Sequence[Mapping[str, Any]]) -> Document:
    """Return the records, one row per case and engine; then, once per label, the end of the traces; and each run's facts."""
    cases = list(dict.fromkeys(record["case"] for record in records))
    rows = [
        (record["case"], record["engine"], _modes_cell(record), _peak_cell(record), _label_cell(record))
        for record in sorted(records, key=lambda record: cases.index(record["case"]))
    ]
    table = Table(("case", "by", MODES_HEAD, PEAK_HEAD, "label"), rows, has_note=True)
    return Document("", [table, Text(LEGEND, "note"), *_failures(records), *map(_details, records)])


def _details(record: Mapping[str, Any]) -> Details:
    failure = record.get("exception") or {}
    label = str(record.get("label"))
    rows = (
        ("means", labels.meaning_of(label) if label in labels.LABELS else ""), ("case", record.get("title")),
        ("ended at", record.get("stage")), ("lane", record.get("lane")),
        ("versions", ", ".join(f"{name} {value}" for name, value in (record.get("versions") or {}).items())),
        ("quantized", _counts(record.get("quantized"))), ("seconds", record.get("seconds")), ("device", record.get("device")),
        ("pressure", record.get("pressure")), ("warnings", _counts(record.get("warnings"))),
        ("exception", f"{failure.get('type')}: {failure.get('message')}" if failure else None),
        ("log", "; ".join(map(str, record.get("log_lines") or ()))),
    )  # fmt: skip
    facts = Facts([(name, str(value)) for name, value in rows if value not in (None, "")])
    trace = [Code(str(failure["tail"]))] if failure.get("tail") else []
    return Details(f"{record['case']} by {record['engine']}: {label}", [facts, *trace])


def _counts(counts: Any) -> str:
    return ", ".join(f"{count} x {name}" for name, count in counts.items() if count) if isinstance(counts, Mapping) else ""


def _failures(records: Sequence[Mapping[str, Any]]) -> list[Block]:
    """Return each label with a trace once, refusals and unknown failures once per error: its meaning, the cases, the last lines
    of the first trace."""
    alike: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for record in records:
        if record.get("exception") is not None:
            label = str(record["label"])
            several = label in (labels.REFUSED_BY_NAME, labels.UNKNOWN)
            error = str(record["exception"].get("message")) if several else ""
            alike.setdefault((str(record["engine"]), label, error), []).append(record)
    blocks: list[Block] = []
    for (engine, label, _), same_failure in alike.items():
        known = f" ({same_failure[0]['catalogue']})" if same_failure[0].get("catalogue") else ""
        blocks.append(Heading(f"{label}{known} by {engine}: {labels.meaning_of(label)}"))
        blocks.append(Text(f"in {', '.join(dict.fromkeys(str(record['case']) for record in same_failure))}"))
        # torch's frames show the operation, not its caller.
        tail = [line for line in str(same_failure[0]["exception"].get("tail") or "").splitlines() if line.strip()]
        tail = [line for line in tail if not line.startswith("torch/")]
        blocks += [Code("\n".join(map(_cut, tail[-TAIL_LINES:])))] if tail else []
    return blocks


def _cut(text: str) -> str:
    return text if len(text) <= HOW_CHARS else f"{text[: HOW_CHARS - 1]}…"


def _label_cell(record: Mapping[str, Any]) -> str:
    stage = "" if record["stage"] == "done" else f" at {record['stage']}"
    lane = f", {record['lane']}" if record.get("lane") else ""
    how = f" ({_cut(str(record['how']))})" if record["engine"] == "trimtab" and record.get("how") else ""
    return f"{record['label']}{stage}{lane}{how}"


def _peak_cell(record: Mapping[str, Any]) -> str:
    """Return the peak in GiB, of the GPU if it was measured."""
    memory = record.get("memory") or {}
    count = memory.get("gpu_peak_bytes")
    count = memory.get("host_peak_bytes") if count is None else count
    return f"{count / 2**30:.1f}" if count else "-"


def _modes_cell(record: Mapping[str, Any]) -> str:
    """Return one sign per mode (text, image, audio), as in the legend."""
    modes = record.get("modes") or {}
    signs = {True: "=", False: "~", None: "+"}
    return " ".join(
        "." if mode not in modes else (signs[modes[mode].get("equals_reference")] if modes[mode]["ok"] else "x") for mode in MODES
    )


_PATH = re.compile(r"^base_model\.model\.(?P<path>.+?)\.lora_")
_TOWER = re.compile(r"(^|\.)(vision_tower|audio_tower|visual|vision_model|embed_vision|embed_audio)(\.|$)")
VARIANTS = ("patched", "broad", "narrow")


def write_variants(adapter: Path, out: Path) -> dict[str, str]:
    """Return the folder of every variant ("original" is the adapter itself), written below out.

    "patched" targets exactly the modules that the adapter has keys for: stock PEFT can load it even if the config names
    wrappers. "broad" names only the projections. "narrow" is "patched" without towers and connectors.
    Errors: AdapterError, CheckpointError for a folder that is no adapter.
    """
    file = read_adapter(str(adapter))
    paths = list(dict.fromkeys(match["path"] for match in map(_PATH.match, file.tensors) if match))
    targets: dict[str, str | list[str]] = {
        "patched": _pattern(paths),
        "broad": list(BROAD_TARGETS),
        "narrow": _pattern([path for path in paths if not _TOWER.search(path)]),
    }
    folders = {"original": str(adapter)}
    for variant in VARIANTS:
        folder = out / f"adapter-{variant}"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file.file, folder / file.file.name)
        config = {**file.config, "target_modules": targets[variant]}
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        folders[variant] = str(folder)
    return folders


def _pattern(paths: list[str]) -> str:
    """Return a regular expression for exactly these paths: PEFT shortens a list of names to suffixes, but never a pattern."""
    return "|".join(re.escape(path) for path in paths)


LINE_CHARS = 90
# By an adapter's copy: the target_modules that are written over its own.
_RETARGETED = {"broad": list(BROAD_TARGETS), "original": list(BROAD_TARGETS), "narrow": LANGUAGE}
# Arguments of PEFT that are expressions in the script.
_SPECIAL = {"offload_dir": 'work / "peft-offload"', "torch_device": '"cuda:0" if gpu == 0 else "cpu"'}


def script_of(case: Case) -> str:
    """Return the script of a case. The bridge's cases show the stock call instead. It builds a small Gemma 4 and an adapter, needs
    no download and does not import trimtab. It ends with a line that begins "RESULT: ", after the exception if there is one."""
    return filled(
        Path(__file__).resolve().parents[1], "cases/case.py.j2", (repr, placed), case=case, targets=EVERYWHERE,
        retargeted=_RETARGETED.get(case.adapter), skipped=skip_modules(GEMMA4), special=_SPECIAL,
    )  # fmt: skip


def placed(name: str) -> str:
    """Return a map as Python text in which 0 is the name of the imitated GPU; if it is long, one entry per line inside a call."""
    places = device_map(name, GEMMA4)
    if isinstance(places, str):
        return repr(places)
    entries = [f"{key!r}: {'gpu' if place == 0 else repr(place)}" for key, place in places.items()]
    one_line = f"{{{', '.join(entries)}}}"
    if len(one_line) <= LINE_CHARS:
        return one_line
    return "{\n" + "".join(f"            {entry},\n" for entry in entries) + "        }"
