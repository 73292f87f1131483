"""What the start of a server's worker consists of: samples of its main thread, from the first line that it runs until it is ready.

`bench.start` copies this file as `sitecustomize.py` into a folder at the front of PYTHONPATH, so that the worker runs it before
anything else; BENCH_START_PARTS names the file for what it finds. A part's seconds are the samples in it times the time between
samples. Every sample is in one part: the first of PARTS whose function is on the stack. Imports only the standard library.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from types import FrameType

VARIABLE = "BENCH_START_PARTS"
STEP_S = 0.005
# (part, functions): a function is the end of a file's path without ".py", a colon, a name.
PARTS = (
    ("imports", ("<frozen importlib._bootstrap>:_find_and_load", "<frozen importlib._bootstrap>:_lock_unlock_module")),
    ("tokenizer", ("engine/loader/processor:load_processor",)),
    ("module tree", ("engine/loader/transformers_model:probe", "engine/loader/transformers_model:anatomy_of")),
    ("plan", ("serve/worker/worker:_planned", "trimtab/api:plan_request")),
    ("weights", ("engine/loader/load:run",)),
    ("adapters", ("engine/model_calls:", "engine/model:_attach_planned", "serve/adapters/adapter_cache:__init__")),
    (
        "checks of kernels",
        ("engine/kernels/selfcheck:", "engine/cuda/check_cache:", "engine/loader/head_kernel:", "engine/towers/bounds_check:"),
    ),
    (
        "captures",
        (
            "engine/prefill/warm_up:",
            "engine/memory/graph_cache:record",
            "engine/model:_prepare_steps",
            "serve/worker/engine:capture",
        ),
    ),
    ("rest of loading", ("engine/model:__init__",)),
)
READY = "serve/worker/worker:_answer"
MOST_FUNCTIONS = 80


def begin() -> None:
    """Sample the main thread until the worker is ready, then write the file."""
    thread = threading.Thread(target=_sample, args=(threading.main_thread().ident,), name="bench-parts", daemon=True)
    thread.start()


def _sample(main: int | None) -> None:
    assert main is not None
    began = time.perf_counter()
    parts: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    count = 0
    while True:
        time.sleep(STEP_S)
        frame = sys._current_frames().get(main)
        stack = names_of(frame)
        if frame is None or any(name.endswith(READY) for name in stack):
            break
        count += 1
        parts[part_of(stack)] += 1
        functions.update(set(stack))
    whole = time.perf_counter() - began
    each = whole / max(count, 1)
    found = {
        "seconds": whole,
        "parts": {name: number * each for name, number in parts.most_common()},
        "functions": {from_import_folder(name): round(number * each, 3) for name, number in functions.most_common(MOST_FUNCTIONS)},
    }
    with open(os.environ[VARIABLE], "w", encoding="utf-8") as file:
        json.dump(found, file, indent=1)


def names_of(frame: FrameType | None) -> list[str]:
    """Return the functions of a stack, the innermost first."""
    names = []
    while frame is not None:
        names.append(f"{frame.f_code.co_filename.removesuffix('.py')}:{frame.f_code.co_name}".replace(os.sep, "/"))
        frame = frame.f_back
    return names


def from_import_folder(name: str) -> str:
    """Return a function with its file as it is imported: without the folder of this machine."""
    folders = [folder.replace(os.sep, "/") + "/" for folder in sys.path if os.path.isabs(folder)]
    return name.removeprefix(max((folder for folder in folders if name.startswith(folder)), key=len, default=""))


def part_of(stack: list[str]) -> str:
    """Return the part of a stack, "rest" for none."""
    for part, functions in PARTS:
        for function in functions:
            if any(function in name if function.endswith(":") else name.endswith(function) for name in stack):
                return part
    return "rest"


if __name__ == "sitecustomize" and os.environ.get(VARIABLE) and "--multiprocessing-fork" in sys.orig_argv:
    begin()
