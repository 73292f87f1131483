"""Which files of the package does one answer enter? Traced in every process and thread of a command.

    python tools/traced_files.py run [DEVICE]     `trimtab run` on the demo, with an adapter, on a CPU unless DEVICE is given
    python tools/traced_files.py chat [DEVICE]    a warm chat request to the demo's server: its API process and its worker together

A file counts if one of its functions was entered: code that only an import runs (module and class bodies, comprehensions of
them) does not. A generator or coroutine that goes on is entered again. What a server does beside a request, such as the worker's
beats, is in the figure: the count goes on for QUIET_S after the answer, so that everything periodic has had its turn. A chat
request is asked three times, and what each of them enters counts: a busy machine now and then adds a file to one of them.

This file is copied as `sitecustomize.py` into a folder at the front of PYTHONPATH, so that each process runs it before anything
else. The processes and the one that asks tell each other by files in a folder. Needs only the standard library there.
"""

from __future__ import annotations

import atexit
import inspect
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

# The folder of what processes tell, and the package's own.
RECORDS, WATCHED = "TRIMTAB_TRACED_RECORDS", "TRIMTAB_TRACED_PACKAGE"
COMPREHENSIONS = frozenset(("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"))
LOOK_S, QUIET_S, MOST_S = 0.02, 1.5, 120.0
ROOT = Path(__file__).resolve().parent.parent
# Few tokens, and one row's worth of text: the same work wherever it runs.
TOKENS = 4
QUESTIONS = ("How are you?", "What is a lighthouse for?", "Name three colours.", "Where do swallows go in winter?")


class Tracer:
    """Notes the files of a folder in which a function was entered, in all threads that begin after it."""

    def __init__(self, package: str, records: Path) -> None:
        self.prefix, self.records = os.path.join(package, ""), records
        self.found: dict[str, None] = {}  # in the order of first entry

    def begin(self) -> None:
        self._write("alive")
        atexit.register(self._write, "found0")
        threading.Thread(target=self._obey, name="traced-files", daemon=True).start()
        threading.setprofile(self.entered)
        sys.setprofile(self.entered)

    def entered(self, frame: FrameType, event: str, arg: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        name = code.co_filename
        if name.startswith(self.prefix) and name not in self.found and is_function(code.co_flags, code.co_name):
            self.found[name] = None

    def _obey(self) -> None:
        """Begin to count, then write what was found, each as soon as a file asks for it, in one round after the other."""
        for number in itertools.count(1):
            self._wait(f"count{number}")
            atexit.unregister(self._write)
            self.found = {}
            self._write(f"counting{number}")
            self._wait(f"write{number}")
            self._write(f"found{number}")

    def _wait(self, word: str) -> None:
        while not (self.records / word).exists():
            time.sleep(LOOK_S)

    def _write(self, what: str) -> None:
        files = [name.removeprefix(self.prefix).replace(os.sep, "/") for name in list(self.found)]
        file = self.records / f"{os.getpid()}.{what}"
        file.with_suffix(".part").write_text(json.dumps(files), encoding="utf-8")
        file.with_suffix(".part").replace(file)


def is_function(flags: int, name: str) -> bool:
    """Return whether code is a function's: that of a module or a class is not optimized."""
    return bool(flags & inspect.CO_OPTIMIZED) and name not in COMPREHENSIONS


class Records:
    """A folder in which traced processes say what they entered, and the environment that makes processes do so."""

    def __init__(self, folder: Path, *, package: Path = ROOT / "trimtab") -> None:
        self.folder = folder / "records"
        self.folder.mkdir()
        site = folder / "site"
        site.mkdir()
        shutil.copy(__file__, site / "sitecustomize.py")
        paths = [str(site), str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        # A home of its own, so that nothing that this machine keeps between runs changes which way is taken.
        self.untraced = {
            **os.environ, "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(folder / "home"),
            "PYTHONPATH": os.pathsep.join(paths),
        }  # fmt: skip
        self.environment = {**self.untraced, RECORDS: str(self.folder), WATCHED: str(package)}

    def count(self, number: int) -> None:
        """Let every traced process begin a round. Errors: TimeoutError."""
        self._ask(f"count{number}", f"counting{number}")

    def write(self, number: int) -> None:
        """Let every traced process write what it entered in a round. Errors: TimeoutError."""
        self._ask(f"write{number}", f"found{number}")

    def _ask(self, word: str, answer: str) -> None:
        import psutil

        processes = [file.stem for file in self.folder.glob("*.alive") if psutil.pid_exists(int(file.stem))]
        (self.folder / word).touch()
        end = time.monotonic() + MOST_S
        while not all((self.folder / f"{pid}.{answer}").exists() for pid in processes):
            if time.monotonic() > end:
                raise TimeoutError(f"not every one of the processes {', '.join(processes)} answered to {word!r}")
            time.sleep(LOOK_S)

    def files(self) -> list[str]:
        """Return the files, below the package's folder, that were entered in each round, in whichever process."""
        rounds: dict[str, set[str]] = {}
        for file in self.folder.glob("*.found*"):
            rounds.setdefault(file.suffix, set()).update(json.loads(file.read_text(encoding="utf-8")))
        return sorted(set.intersection(*rounds.values())) if rounds else []

    def by_process(self) -> list[list[str]]:
        """Return the same files for each process that entered some, in the order of first entry in the first round."""
        common = set(self.files())
        rounds = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(self.folder.glob("*.found1"))]
        return [kept for files in rounds if (kept := [name for name in files if name in common])]


def entered_by(arguments: Sequence[str], folder: Path, *, package: Path = ROOT / "trimtab") -> list[str]:
    """Return the files that `python ARGUMENTS` enters on a machine that it has seen: it runs twice. Errors: CalledProcessError."""
    records = Records(folder, package=package)
    for environment in (records.untraced, records.environment):
        # In the package's folder: `python -c` and `-m` look there first.
        subprocess.run([sys.executable, *arguments], env=environment, cwd=package.parent, check=True, capture_output=True)
    return records.files()


def of_a_run(folder: Path, device: str = "cpu") -> list[str]:
    """Return the files that `trimtab run` on the demo enters."""
    demo = ROOT / "trimtab" / "demo"
    flags = ["--adapter", f"style={demo / 'adapters' / 'style'}", "--device", device, "--max-new-tokens", str(TOKENS)]
    return entered_by(["-m", "trimtab", "run", str(demo / "base"), *flags, QUESTIONS[0]], folder)


def chat_records(folder: Path, device: str = "cpu") -> Records:
    """Return what chat requests with an adapter enter, each after the first: a round each."""
    from bench import client
    from bench.served import DEMO, Served

    records = Records(folder)
    with Served([*DEMO, "--device", device], environment=records.environment) as server:
        for number, question in enumerate(QUESTIONS):
            if number:
                records.count(number)
            asked = client.ask(server.address, client.chat_body(question, model="style", max_tokens=TOKENS), timeout_s=MOST_S)
            assert asked.ended == "complete", asked
            time.sleep(QUIET_S)
            if number:
                records.write(number)
    return records


def of_a_chat_request(folder: Path, device: str = "cpu") -> list[str]:
    """Return the files that every such request enters, in the API process and the worker."""
    return chat_records(folder, device).files()


TRACED = {"run": of_a_run, "chat": of_a_chat_request}


def main(arguments: Sequence[str]) -> int:
    if not 1 <= len(arguments) <= 2 or arguments[0] not in TRACED:
        print(f"python tools/traced_files.py {'|'.join(TRACED)} [DEVICE]", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        print("\n".join(TRACED[arguments[0]](Path(folder), *arguments[1:])))
    return 0


if __name__ == "sitecustomize" and os.environ.get(RECORDS):
    Tracer(os.environ[WATCHED], Path(os.environ[RECORDS])).begin()
elif __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
