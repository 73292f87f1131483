"""What does a reproducer print as a plain script, in an empty folder, in the given interpreter?"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from trimtab.process.packages import versions_of
from trimtab.process.work_folder import work_folder

PACKAGES = ("transformers", "accelerate", "peft", "bitsandbytes", "torch")
TIMEOUT_S = 300.0
MEMORY_BYTES = 12 * 2**30
MOST_LINES = 2000
# Progress bars and notes that do not concern the failure.
_NOISE = re.compile(r"(\d%\|)|FutureWarning|^\s+torch\._check_is_size|^\s+warnings\.warn\(|kernels-community")


def run_script(text: str, *, python: str | os.PathLike[str] | None = None, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Return the result of a script: ended, exit_code, output (stdout and stderr in order), versions, seconds.

    Errors: RequestError if the interpreter cannot be started.
    """
    from trimtab.process.runner import run_inside

    outcome = run_inside(
        "trimtab.doctor.issues.run", {"text": text}, python=python, timeout_s=timeout_s, memory_bytes=MEMORY_BYTES,
        environment={"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )  # fmt: skip
    ended: dict[str, Any] = {"exit_code": None, "output": outcome.stdout + outcome.stderr, "versions": {}}
    for line in outcome.lines:
        ended |= line
    return ended | {"ended": outcome.ended, "seconds": outcome.seconds, "output": readable(str(ended["output"]))}


def readable(output: str) -> str:
    """Return an output without progress bars, shortened to its last MOST_LINES lines."""
    lines = [part.rpartition("\r")[2].rstrip() for part in output.splitlines()]
    kept = [line for line in lines if line and not _NOISE.search(line)]
    return "\n".join(kept if len(kept) <= MOST_LINES else ["...", *kept[-MOST_LINES:]])


def main(request: Mapping[str, Any], emit: Callable[[dict[str, Any]], None]) -> None:
    """Run the script of `request["text"]` and report its exit code and output."""
    emit({"versions": versions_of(PACKAGES)})
    with work_folder("reproducer") as folder:
        (folder / "reproducer.py").write_text(request["text"], encoding="utf-8")
        # Temporary files of the script are removed with this folder.
        places = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
        done = subprocess.run(
            [sys.executable, "reproducer.py"], cwd=folder, env={**os.environ, **places}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    emit({"exit_code": done.returncode, "output": done.stdout.decode("utf-8", "replace")})
