"""The Machine and Rates that an earlier process measured through torch, in the user's cache, so that a plan needs no torch.

Cached values: the host memory of the libraries, and torch's thread count. Their keys are the installed releases and the
settings of the thread count. Rates of a busy machine are cached for minutes only. Free memory is read now, from the driver. If
torch is loaded already, torch is queried instead (engine/memory/rates.py).

Not known: unused memory that torch's allocator in another process keeps.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path

from trimtab.errors import RequestError
from trimtab.machine import gpus
from trimtab.machine.memory import cpu_name, host_available_bytes, process_bytes
from trimtab.planning.request.card_machine import context_bytes
from trimtab.planning.values.budget import Machine
from trimtab.planning.values.byte_sizes import Rates
from trimtab.process.json_file import parse
from trimtab.process.packages import deciding_versions, torch_build
from trimtab.process.user_cache import hashed, own_folder, read_own, write_own

# Host memory that the first forward on a GPU adds permanently: code of cuBLAS, cuDNN and bitsandbytes, and the driver's
# tables. 0.85 GiB with torch 2.11, CUDA 13 on an H200 (bench/results/memory.json: resident, host peak over base).
FIRST_FORWARD_BYTES = 850 * 2**20
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT")
# The user's folder of these files, and the most bytes of one: of a process's facts, of rates.
FOLDER, MOST_BYTES, MOST_RATES_BYTES = "machine", 4096, 64 * 1024
# A further key of rates: the time of the measurement in seconds since 1970, if the machine was busy.
BUSY, BUSY_S = "busy_at_s", 600
# Plausible host memory of torch's libraries: values outside these limits are not cached.
LEAST_ADDED_BYTES, MOST_ADDED_BYTES, MOST_THREADS = 50 * 2**20, 2**35, 2**16


def resolve(device: str, count: int) -> str:
    """Return "cpu" or "cuda:N" on a machine with this many GPUs. Errors: RequestError if there is no such GPU."""
    if device == "auto":
        return "cuda:0" if count else "cpu"
    if device == "cpu":
        return "cpu"
    index = int(device.partition(":")[2] or 0)
    if index >= count:
        allowed = ["auto", "cpu", *(f"cuda:{i}" for i in range(count))]
        raise RequestError(f"this machine has {count} CUDA devices", field="device", value=device, allowed=allowed)
    return f"cuda:{index}"


def cpu_machine(process: int) -> Machine:
    """Return a machine whose CPU computes. process: the host memory of the process before any weight."""
    return Machine(execution_device="cpu", host_available_bytes=host_available_bytes(), process_bytes=process, has_pinned=False)


def gpu_machine(
    device: str, *, total_bytes: int, free_bytes: int, process: int, capability: tuple[int, int], multiprocessors: int,
    reads_host: bool = True,
) -> Machine:  # fmt: skip
    """Return a machine that computes on a GPU. free_bytes: without this process's context."""
    return Machine(
        execution_device=device, gpu_total_bytes=total_bytes, gpu_free_bytes=free_bytes,
        host_available_bytes=host_available_bytes(), context_bytes=context_bytes(multiprocessors),
        process_bytes=process + FIRST_FORWARD_BYTES, capability=capability, reads_host=reads_host,
    )  # fmt: skip


def torch_is_loaded() -> bool:
    """Whether this process has imported torch."""
    return "torch" in sys.modules


def find_machine(device: str, bytes_before: int | None = None) -> tuple[Machine, Rates] | None:
    """Return the machine and its rates without torch; None if torch is loaded, or if only torch knows them.

    bytes_before: host memory of this process before it began to load libraries; None: now. Errors: RequestError if there is no
    such GPU.
    """
    build = torch_build()
    if torch_is_loaded() or build is None or build.has_hip:
        return None
    cards = () if build.cuda is None else gpus.read_gpus()
    # The driver is older than torch's build needs: torch does not use it.
    if cards is None or any(card.driver[0] < (build.cuda or (0,))[0] for card in cards):
        return None
    resolved = resolve(device, len(cards))
    facts = _facts(resolved)
    if facts is None:
        return None
    process = (process_bytes() if bytes_before is None else bytes_before) + facts["added_bytes"]
    if resolved == "cpu":
        machine, name = cpu_machine(process), cpu_name()
    else:
        card = cards[int(resolved.partition(":")[2])]
        name = card.name
        machine = gpu_machine(
            resolved, total_bytes=card.total_bytes, free_bytes=max(card.free_bytes - context_bytes(card.multiprocessors), 0),
            process=process, capability=card.capability, multiprocessors=card.multiprocessors, reads_host=card.reads_host,
        )  # fmt: skip
    rates = read_rates(name, build.version, facts["threads"])
    return None if rates is None else (machine, rates)


def remember(machine: Machine, *, bytes_before: int, threads: int) -> None:
    """Cache the values for `find_machine`, from a process that had `bytes_before` when it began to import torch and the
    rest.

    Without a folder, the next process only takes longer.
    """
    taken = machine.process_bytes - (0 if machine.on_cpu else FIRST_FORWARD_BYTES)
    with suppress(OSError):
        key = _key(machine.execution_device)
        facts = {"added_bytes": taken - bytes_before, "threads": threads}
        write_own(own_folder(FOLDER) / f"process-{hashed(key)}", key, json.dumps(facts).encode())


def _facts(device: str) -> dict[str, int] | None:
    key = _key(device)
    try:
        path = own_folder(FOLDER) / f"process-{hashed(key)}"
        facts = parse(read_own(path, key, limit_bytes=MOST_BYTES) or b"null", "own state")
        added, threads = facts["added_bytes"], facts["threads"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    is_whole = all(isinstance(value, int) for value in (added, threads))
    is_plausible = is_whole and LEAST_ADDED_BYTES < added < MOST_ADDED_BYTES and 0 < threads < MOST_THREADS
    return {"added_bytes": added, "threads": threads} if is_plausible else None


def _key(device: str) -> str:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    return json.dumps([device.partition(":")[0], deciding_versions(), threads, count])


def rates_path(device_name: str, torch_version: str, threads: int) -> Path:
    """Return the file of a device, a torch release and a thread count. Errors: OSError if its folder cannot be made."""
    key = "-".join(_slug(part) for part in (device_name, f"torch{torch_version}"))
    return own_folder(FOLDER) / f"rates-{key[:150]}-{threads}threads"


def _slug(text: str) -> str:
    return "".join(char if char.isalnum() or char in ".-" else "-" for char in text) or "unknown"


def read_rates(device_name: str, torch_version: str, threads: int) -> Rates | None:
    """Return the cached rates; None if there are none, or they are invalid or too old."""
    names = {item.name for item in fields(Rates)}
    try:
        path = rates_path(device_name, torch_version, threads)
        text = read_own(path, path.name, limit_bytes=MOST_RATES_BYTES)
        values = {} if text is None else parse(text, "own state")
        if (busy_at := values.pop(BUSY, None)) is not None and not 0 <= time.time() - busy_at < BUSY_S:
            return None
        return Rates(**values) if set(values) == names else None
    except (OSError, ValueError, TypeError, AttributeError, RequestError):
        return None


def write_rates(device_name: str, torch_version: str, threads: int, rates: Rates, *, is_busy: bool = False) -> None:
    """Cache rates. A folder that cannot be written is ignored: the next process measures again. is_busy: keep them for
    `BUSY_S` seconds.
    """
    values = asdict(rates) | ({BUSY: time.time()} if is_busy else {})
    with suppress(OSError):
        path = rates_path(device_name, torch_version, threads)
        write_own(path, path.name, json.dumps(values, indent=1).encode())
