"""`trimtab doctor --trace`, `--report` and `--lanes`: a pasted error, a block for a question, an issue on a merge."""

from __future__ import annotations

import argparse
import codecs
import sys
from pathlib import Path

from trimtab.checkpoint.unreadable import request_refusal
from trimtab.cli.flags.flags import read_device_map
from trimtab.cli.flags.output import print_json, print_text, show
from trimtab.errors import RequestError
from trimtab.process import phases
from trimtab.process.files import write_whole

# Flags of the doctor that cannot be combined with these.
_OTHERS = ("matrix", "bisect", "runs", "drafts", "html", "probe", "quant", "dtype", "gpu_memory", "host_memory", "max_memory")
TAKES = (
    "MODEL is a folder or a hub id in the local cache; an error's text goes to --trace FILE, a device map to --device-map "
    "FILE, an adapter to --adapter FOLDER"
)
_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


def run_trace(options: argparse.Namespace) -> int:
    """Print the diagnosis of a pasted error; FILE or - (stdin)."""
    _check_alone(options, "--trace", ("model", "adapter", "device_map", "python", "report", *_OTHERS))
    from trimtab.doctor.traces.answer import diagnose, diagnosis_document

    answers = diagnose(_read(options.trace))
    if options.json:
        print_json(answers.to_json())
    else:
        show(diagnosis_document(answers))
    return 0


def run_report(options: argparse.Namespace) -> int:
    """Print the block to paste."""
    _check_alone(options, "--report", _OTHERS)
    from trimtab.doctor.traces.report_block import report_block
    from trimtab.machine.environment import read_environment

    device_map = None if options.device_map is None else read_device_map(options.device_map)
    text = report_block(read_environment(options.python), model=options.model, adapter=options.adapter, device_map=device_map)
    print_json({"report": text}) if options.json else print_text(text, end="")
    return 0


def run_lanes(options: argparse.Namespace) -> int:
    """Write the issue on a merge from a saved report of lanes, or print why it supports none."""
    _check_alone(options, "--lanes", ("model", "adapter", "device_map", "matrix", "bisect", "runs", "html", "probe"))
    from trimtab.doctor.issues.draft import check_folder
    from trimtab.doctor.issues.merge_parity import FILE, merge_parity, read_lanes

    text, reason = merge_parity(read_lanes(options.lanes))
    file = Path(options.drafts) / FILE
    if text is not None:
        check_folder(file.parent, overwrite=options.overwrite)
        write_whole(file, lambda sibling: _write(sibling, text), field="drafts")
    if options.json:
        print_json({"file": str(file) if text is not None else None, "reason": reason or None, "markdown": text})
    else:
        print_text(f"written: {file}" if text is not None else f"no draft: {reason}")
    return 0


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8", newline="\n")


def check_model(model: str | None) -> None:
    """Raise RequestError for a file instead of a model's folder, with the flag for such a file."""
    if model is not None and Path(model).is_file() and Path(model).suffix.lower() != ".gguf":
        raise RequestError("is a file, not a model", field="MODEL", value=model, hint=TAKES)


def _check_alone(options: argparse.Namespace, flag: str, others: tuple[str, ...]) -> None:
    flags = [name for name in others if getattr(options, name, None) not in (None, False)]
    if flags:
        names = ", ".join("MODEL" if name == "model" else f"--{name.replace('_', '-')}" for name in flags)
        raise RequestError(f"cannot be combined with {names}", field=flag)


def _read(name: str) -> str:
    """Return a file's text, or stdin's for "-", in UTF-8 or in UTF-16 as PowerShell writes it."""
    from trimtab.doctor.traces.reading import MOST_BYTES

    try:
        if name == "-":
            phases.begin("")  # the user may type here
            data = sys.stdin.buffer.read(2 * MOST_BYTES + 1)
        else:
            with Path(name).open("rb") as file:
                data = file.read(2 * MOST_BYTES + 1)
    except OSError as exc:
        raise request_refusal("--trace", name, exc) from exc
    encoding = next((encoding for mark, encoding in _MARKS if data.startswith(mark)), "utf-8")
    return data.decode(encoding, "replace")
