"""What did an earlier process find of the machine and of models, so that a plan needs neither torch nor transformers?"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from trimtab.checkpoint.anatomy import Anatomy, KVLayer, ModuleRow, TensorRow
from trimtab.checkpoint.folder import CONFIG, Checkpoint
from trimtab.checkpoint.names import Rename
from trimtab.errors import RequestError
from trimtab.formats.packed import split_packed
from trimtab.machine import gpus
from trimtab.machine.memory import cpu_name, host_available_bytes, process_bytes
from trimtab.planning.plan.contents import anatomy_key
from trimtab.planning.request.card_machine import context_bytes
from trimtab.planning.values.blocks import Machine
from trimtab.planning.values.byte_sizes import Rates
from trimtab.process.json_file import JsonError, parse, read_bytes
from trimtab.process.packages import deciding_versions, torch_build
from trimtab.process.user_cache import hashed, own_folder, prune, read_own, touch, write_own
from trimtab.request import LoadRequest

# Host memory that the first forward on a GPU adds permanently: code of cuBLAS, cuDNN and bitsandbytes, and the driver's
# tables. 0.85 GiB with torch 2.11, CUDA 13 on an H200 (bench/results/memory.json: resident, host peak over base).
FIRST_FORWARD_BYTES = 850 * 2**20
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT")
# The user's folder of these files, and the most bytes of one: of a process's facts, of rates.
FOLDER, MOST_BYTES, MOST_RATES_BYTES = "machine", 4096, 64 * 1024
# A further key of rates: the time of the measurement in seconds since 1970, if the machine was busy.
BUSY, BUSY_S = "busy_at_s", 600
RATES_FORM = 2  # of what rates mean: those of another form are measured again
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

    bytes_before: host memory of this process before it began to load libraries; None: now. Errors: RequestError if there is no such
    GPU. Free memory is read now, from the driver.
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
    return own_folder(FOLDER) / f"rates{RATES_FORM}-{key[:150]}-{threads}threads"


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
    """Cache rates. A folder that cannot be written is ignored: the next process measures again. is_busy: keep them for `BUSY_S`
    seconds."""
    values = asdict(rates) | ({BUSY: time.time()} if is_busy else {})
    with suppress(OSError):
        path = rates_path(device_name, torch_version, threads)
        write_own(path, path.name, json.dumps(values, indent=1).encode())


# Anatomies ------------------------------------------------------------------------------------------------------------

ANATOMIES = "anatomies"
MOST_FILES, MOST_FILES_BYTES, MOST_FILE_BYTES = 64, 64 * 2**20, 16 * 2**20
# Files other than weights that transformers reads when it makes the empty model (5.6.2 to 5.23.0).
SHAPING_FILES = (CONFIG, "generation_config.json")
# This package's files that make an anatomy: an editable installation keeps its version when they change.
MAKERS = (
    "checkpoint/anatomy.py", "formats/*.py", "engine/loader/anatomy_builder.py", "engine/loader/transformers_model.py",
    "engine/loader/tracing.py", "engine/loader/pieces.py", "engine/families/*.py", "engine/kv/*.py", "engine/passes/*.py",
    "engine/lora/experts.py", "engine/lora/routers.py", "engine/towers/bounds_check.py",
)  # fmt: skip


def key_of(checkpoint: Checkpoint, request: LoadRequest, *, keeps_16bit: bool = False) -> str:
    """Return the cache key of a checkpoint's anatomy for a request, as text. request: its quant is not "auto". It has everything
    that shapes the tree: the hashes of config.json and of the other files that transformers reads for it, the tensors' names, types
    and shapes, the request's formats, releases, and this package's files."""
    plain, packed = split_packed(checkpoint)
    tensors: list[tuple[Any, ...]] = [(name, entry.dtype, entry.shape) for name, entry in sorted(plain.items())]
    tensors += [(name, entry.kind, entry.dtype, entry.shape) for name, entry in sorted(packed.items())]
    facts = {
        "form": form(), "files": {name: _hash_of(checkpoint.folder / name) for name in SHAPING_FILES},
        "tensors": hashlib.sha256(json.dumps(tensors).encode()).hexdigest(), "has_weights": checkpoint.has_weights,
        "request": anatomy_key(request, keeps_16bit=keeps_16bit)[1:], "versions": deciding_versions(),
        "makers": [_stamp(file) for name in MAKERS for file in sorted(Path(__file__).parent.parent.glob(name))],
    }  # fmt: skip
    return json.dumps(facts, sort_keys=True)


def _hash_of(file: Path) -> str | None:
    try:
        return hashlib.sha256(read_bytes(file, file.name)).hexdigest()
    except (OSError, JsonError):
        return None


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        seen = file.stat()
    except OSError:
        return None
    return seen.st_size, seen.st_mtime_ns


def find_anatomy(checkpoint: Checkpoint, request: LoadRequest, *, keeps_16bit: bool = False) -> Anatomy | None:
    """Return the anatomy that an earlier process read of this checkpoint for the same kind of request, None if it was not
    cached."""
    key = key_of(checkpoint, request, keeps_16bit=keeps_16bit)
    whole = _kept(key)
    with suppress(OSError, ValueError, KeyError, TypeError):
        if whole["values_of"] in (None, _same_files(checkpoint)):
            anatomy = read_anatomy(whole["anatomy"])
            touch(own_folder(ANATOMIES) / hashed(key))
            return anatomy
    return None


def keep_anatomy(
    checkpoint: Checkpoint, request: LoadRequest, anatomy: Anatomy, *, compares_values: bool, keeps_16bit: bool = False
) -> None:
    """Cache an anatomy for later processes. compares_values: whether it depends on stored values."""
    whole = {"values_of": _same_files(checkpoint) if compares_values else None, "anatomy": write_anatomy(anatomy)}
    _keep(key_of(checkpoint, request, keeps_16bit=keeps_16bit), whole)


def find_refusal(checkpoint: Checkpoint, request: LoadRequest, *, keeps_16bit: bool = False) -> str | None:
    """Return why an earlier process could make no anatomy of this checkpoint for the same kind of request, None if unknown."""
    reason = _kept(key_of(checkpoint, request, keeps_16bit=keeps_16bit)).get("refused")
    return reason if isinstance(reason, str) else None


def keep_refusal(checkpoint: Checkpoint, request: LoadRequest, reason: str, *, keeps_16bit: bool = False) -> None:
    """Cache the reason why no anatomy could be made for a request."""
    _keep(key_of(checkpoint, request, keeps_16bit=keeps_16bit), {"refused": reason})


def _kept(key: str) -> dict[str, Any]:
    """Return what an earlier process cached for a key, {} if it is missing or damaged."""
    with suppress(OSError, ValueError):
        text = read_own(own_folder(ANATOMIES) / hashed(key), key, limit_bytes=MOST_FILE_BYTES)
        whole = {} if text is None else parse(text, "own state")
        return whole if isinstance(whole, dict) else {}
    return {}


def _keep(key: str, whole: dict[str, Any]) -> None:
    contents = json.dumps(whole).encode()
    with suppress(OSError):
        folder = own_folder(ANATOMIES)
        file = folder / hashed(key)
        if len(contents) <= MOST_FILE_BYTES and read_own(file, key, limit_bytes=MOST_FILE_BYTES) != contents:
            write_own(file, key, contents)
            prune(folder, most_files=MOST_FILES, most_bytes=MOST_FILES_BYTES)


def _same_files(checkpoint: Checkpoint) -> list[Any]:
    """Return values that identify the weight files, in the form that JSON reads back."""
    stamps: Iterable[tuple[str, int, int]] = checkpoint.stamps
    return [str(checkpoint.folder.absolute()), *([*stamp] for stamp in stamps)]


FORM = 1


def form() -> list[Any]:
    """Return the names of the rows' fields. A reader compares them, because another release may have others."""
    return [FORM, *([item.name for item in fields(kind)] for kind in (Anatomy, ModuleRow, TensorRow, KVLayer))]


def write_anatomy(anatomy: Anatomy) -> str:
    """Return the anatomy as JSON text."""
    rows = [[*_values(row, without="tensors"), [_values(tensor) for tensor in row.tensors]] for row in anatomy.rows]
    whole = {
        "form": form(), "anatomy": _values(replace(anatomy, rows=(), kv_layers=())), "rows": rows,
        "kv_layers": [_values(layer) for layer in anatomy.kv_layers],
    }  # fmt: skip
    return json.dumps(whole, separators=(",", ":"))


def _values(item: Any, *, without: str = "") -> list[Any]:
    return [getattr(item, field.name) for field in fields(item) if field.name != without]


def read_anatomy(text: str) -> Anatomy:
    """Return the anatomy that `write_anatomy` wrote. Errors: ValueError for any other text."""
    whole = parse(text.encode(), "own state")
    if not isinstance(whole, dict) or whole.get("form") != form():
        raise ValueError("not an anatomy of this release")
    try:
        anatomy = Anatomy(*(_frozen(value) for value in whole["anatomy"]))
        return replace(
            anatomy, rows=tuple(_row(values) for values in whole["rows"]),
            renames=tuple(Rename(*values) for values in anatomy.renames),
            kv_layers=tuple(KVLayer(*values) for values in whole["kv_layers"]),
        )  # fmt: skip
    except (TypeError, KeyError) as exc:
        raise ValueError(f"not an anatomy: {exc}") from exc


def _row(values: list[Any]) -> ModuleRow:
    *plain, tensors = values
    names = [field.name for field in fields(ModuleRow) if field.name != "tensors"]
    rows = tuple(TensorRow(*(_frozen(value) for value in tensor)) for tensor in tensors)
    return ModuleRow(**dict(zip(names, plain, strict=True)), tensors=rows)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
