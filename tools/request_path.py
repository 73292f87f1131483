"""Prints the path of one warm chat request: the files that it enters, by process and room, in the order of first entry.

    python tools/request_path.py           print it
    python tools/request_path.py --write   put it into docs/architecture.md

The demo model with an adapter is served on a CPU and answers two streamed chats; the second is traced in all threads of the API
process and of the worker. A file counts when one of its functions is entered: constants and classes alone leave no trace. What
either process does beside the request, such as the worker's beats, counts too.

This file is also copied as `sitecustomize.py` to the front of PYTHONPATH, so that each process watches itself. Files in a folder
say when to begin and when to write.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
SLOT = re.compile(r"(<!-- path -->\n).*?(<!-- /path -->)", re.DOTALL)
FOLDER, PACKAGE = "TRIMTAB_PATH_FOLDER", "TRIMTAB_PATH_PACKAGE"
LOOK_S, MOST_S, WIDTH, COLUMN = 0.05, 120.0, 128, 26
# What each of the two processes enters, and no third one.
API, WORKER = "serve/http/app.py", "serve/worker/worker.py"


class Watch:
    """Notes the files of the package that this process enters, in order, between the two signs in a folder."""

    def __init__(self, package: str, folder: Path) -> None:
        self.prefix, self.folder = os.path.join(package, ""), folder
        self.entered: dict[str, None] = {}
        self.is_on = False

    def begin(self) -> None:
        threading.Thread(target=self._obey, daemon=True).start()
        threading.setprofile(self.note)
        sys.setprofile(self.note)

    def note(self, frame: FrameType, event: str, arg: object) -> None:
        if event != "call" or not self.is_on:
            return
        code = frame.f_code
        # A module's or class's body runs at an import.
        if code.co_filename.startswith(self.prefix) and code.co_flags & inspect.CO_OPTIMIZED:
            self.entered.setdefault(code.co_filename)

    def _obey(self) -> None:
        while not (self.folder / "write").exists():
            self.is_on = (self.folder / "begin").exists()
            time.sleep(LOOK_S)
        files = [name.removeprefix(self.prefix).replace(os.sep, "/") for name in self.entered]
        part = self.folder / f"{os.getpid()}.part"
        part.write_text(json.dumps(files), encoding="utf-8")
        part.replace(part.with_suffix(".json"))


def trace() -> dict[str, list[str]]:
    """Return process -> the files that the second of two requests enters there, in order."""
    sys.path.insert(0, str(ROOT))
    from bench import client
    from bench.served import Served

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shutil.copy(__file__, folder / "sitecustomize.py")
        paths = os.pathsep.join((str(folder), str(ROOT)))
        environment = {**os.environ, "PYTHONPATH": paths, FOLDER: str(folder), PACKAGE: str(ROOT / "trimtab")}
        with Served(environment=environment) as server:
            for question in ("How are you?", "What is a lighthouse for?"):
                body = client.chat_body(question, model="style", max_tokens=4)
                answer = client.ask(server.address, body, timeout_s=MOST_S)
                assert answer.ended == "complete", answer
                (folder / "begin").touch()
                time.sleep(4 * LOOK_S)
            (folder / "write").touch()
            end = time.monotonic() + MOST_S
            found: dict[str, list[str]] = {}
            while len(found) < 2 and time.monotonic() < end:
                time.sleep(LOOK_S)
                for file in folder.glob("*.json"):
                    files = json.loads(file.read_text(encoding="utf-8"))
                    found |= {mark: files for mark in (API, WORKER) if mark in files}
    return {"API process": found[API], "worker process": found[WORKER]}


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


if __name__ == "sitecustomize" and os.environ.get(FOLDER):
    Watch(os.environ[PACKAGE], Path(os.environ[FOLDER])).begin()
elif __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
