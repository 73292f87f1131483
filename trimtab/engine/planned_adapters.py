"""The transfer of a plan's adapters from files to the device: matched once, read ahead on a few threads, attached in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trimtab.adapters.adapter import AdapterSpec, match_adapter, read_adapter
from trimtab.adapters.file import stamps_of
from trimtab.adapters.vocabulary import check_vocabulary
from trimtab.checkpoint.anatomy import Anatomy
from trimtab.engine.lora.host_adapter import HeldAdapter
from trimtab.planning.plan.plan import FilesRead

if TYPE_CHECKING:
    from trimtab.engine.loader.transformers_model import Probe
    from trimtab.engine.model import LoadedModel

# Adapters in host memory before their turn: a server keeps them all; another program has a plan that counts none of them there.
AHEAD_KEPT, AHEAD = 4, 2


def match(model: LoadedModel, path: str | Path, spec: AdapterSpec | None = None, *, log_name: str | None = None) -> AdapterSpec:
    """Return the adapter of a folder matched with a model. spec: it, where this is known. log_name: as for the `read_adapter` of
    adapters/file.py. Errors: AdapterError, CheckpointError."""
    spec = spec or match_adapter(read_adapter(path, values=False, log_name=log_name), model.anatomy)
    check_vocabulary(spec.file.folder, model.processor_folder)
    model._check_head(path, spec)
    return spec


def read(model: LoadedModel, spec: AdapterSpec) -> HeldAdapter:
    """Return a matched adapter in host memory, for a model; on any thread. Errors: AdapterError for its values, CheckpointError."""
    held = HeldAdapter.read(spec, pinned=model.device.type == "cuda")
    if model.prefix_cache is not None:
        _ = held.content  # hashed once, where no request waits
    return held


def _use_device(device: torch.device) -> None:
    """Name this thread's GPU: to lock pages without one makes a context on the first GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def read_planned(
    model: LoadedModel, files: FilesRead[Probe] | None, held: dict[str, HeldAdapter] | None
) -> Iterator[tuple[str, HeldAdapter]]:
    """Yield name and adapter of a model's plan, in its order. files: what planning read. held: gets the adapters by name, for a
    server, which keeps them in host memory; None: not kept. Errors: as `LoadedModel.read_adapter`."""
    known = {} if files is None else _specs_of(files, model.anatomy)
    threads = AHEAD if held is None else AHEAD_KEPT
    pool = ThreadPoolExecutor(threads, "trimtab-adapter", initializer=partial(_use_device, model.device))
    reading: deque[tuple[str, Future[HeldAdapter]]] = deque()

    def first() -> tuple[str, HeldAdapter]:
        name, future = reading.popleft()
        adapter = future.result()
        if held is not None:
            held[name] = adapter
        return name, adapter

    try:
        for name, path in model.plan.request.adapters.items():
            spec = known.get(path)
            is_same = spec is not None and spec.file.stamps == stamps_of(path)
            reading.append((name, pool.submit(read, model, match(model, path, spec if is_same else None))))
            if len(reading) > threads:
                yield first()
        while reading:
            yield first()
    finally:
        pool.shutdown(cancel_futures=True)


def _specs_of(files: FilesRead[Probe], anatomy: Anatomy) -> dict[str, AdapterSpec]:
    """Return the specs by folder that were matched with an equal anatomy."""
    equal: dict[int, bool] = {}  # by identity: comparing thousands of rows takes milliseconds
    for _, one in files.specs.values():
        if id(one) not in equal:
            equal[id(one)] = one is anatomy or one == anatomy
    return {path: spec for (path, _), (spec, one) in files.specs.items() if equal[id(one)]}
