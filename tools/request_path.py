"""Prints the path of one warm chat request: the files that it enters, by process and room, in the order of first entry.

    python tools/request_path.py           print it
    python tools/request_path.py --write   put it into docs/architecture.md

The demo model with an adapter is served on a CPU and answers streamed chats (traced_files.py). What either process does beside a
request, such as the worker's beats, counts too.
"""

from __future__ import annotations

import re
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import traced_files  # noqa: E402

PAGE = ROOT / "docs" / "architecture.md"
SLOT = re.compile(r"(<!-- path -->\n).*?(<!-- /path -->)", re.DOTALL)
WIDTH, COLUMN = 128, 26
# What each of the two processes enters, and no third one.
API, WORKER = "serve/http/app.py", "serve/worker/worker.py"


def trace() -> dict[str, list[str]]:
    """Return process -> the files that warm chat requests enter there, in order."""
    with tempfile.TemporaryDirectory() as folder:
        found = traced_files.chat_records(Path(folder)).by_process()
    return {
        process: next(files for files in found if mark in files)
        for process, mark in {"API process": API, "worker process": WORKER}.items()
    }


def picture(processes: Mapping[str, Sequence[str]]) -> str:
    """Return the files of each process as text: a line for each room, rooms and files in the order of first entry."""
    lines = []
    for process, files in processes.items():
        lines.append(f"{process}: {len(files)} files")
        rooms: dict[str, list[str]] = {}
        for file in files:
            room, _, name = file.rpartition("/")
            rooms.setdefault(room or "(top level)", []).append(name.removesuffix(".py"))
        for room, names in rooms.items():
            text = textwrap.fill(" > ".join(names), WIDTH - COLUMN - 2, break_on_hyphens=False)
            first, *rest = text.splitlines()
            lines.append(f"  {room:<{COLUMN}}{first}")
            lines += [f"  {'':<{COLUMN}}{line}" for line in rest]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def files_of(text: str) -> list[str]:
    """Return the files that such a picture names."""
    files, room = [], ""
    for line in text.splitlines():
        if match := re.fullmatch(rf"  (?:(\S.{{{COLUMN - 1}}})| {{{COLUMN}}})(\w.*)", line):
            room = match[1].strip() if match[1] else room
            prefix = "" if room == "(top level)" else f"{room}/"
            files += [f"{prefix}{name}.py" for name in re.findall(r"\w+", match[2])]
    return files


def main(arguments: Sequence[str]) -> int:
    text = picture(trace())
    if "--write" in arguments:
        page = PAGE.read_text(encoding="utf-8")
        block = f"```text\n{text}```\n"
        PAGE.write_text(SLOT.sub(lambda match: match[1] + block + match[2], page), encoding="utf-8", newline="\n")
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
