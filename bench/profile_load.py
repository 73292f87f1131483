"""Where the seconds of a load go: phases and the dearest functions.  python -m bench.profile_load WORK MODEL"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from bench.memory import LEAN, prepare


def main() -> None:
    work, size = Path(sys.argv[1]), sys.argv[2]
    prepare(size, work)
    import torch

    import trimtab
    from trimtab.checkpoint.folder import read_checkpoint
    from trimtab.engine.loader import transformers_model as hf
    from trimtab.engine.memory import rates as devices

    marks = [("start", time.perf_counter())]

    def mark(name: str) -> None:
        marks.append((name, time.perf_counter()))
        print(f"{name:24s} {marks[-1][1] - marks[-2][1]:6.2f} s   rss {devices.process_bytes() / 2**30:.2f} GiB", flush=True)

    plan = trimtab.plan(work / size, adapters={"a": work / f"{size}-r8"}, context=1024, audio_s=10.0, place=LEAN)
    mark("plan (imports, rates)")
    plan = trimtab.plan(work / size, adapters={"a": work / f"{size}-r8"}, context=1024, audio_s=10.0, place=LEAN)
    mark("plan again")
    checkpoint = read_checkpoint(work / size)
    mark("checkpoint")
    found = hf.probe(checkpoint)
    mark("probe")
    hf.anatomy_of(found, checkpoint, quant="nf4-dq")
    mark("anatomy")
    del found
    with trimtab.load(plan) as model:
        torch.cuda.synchronize()
        mark("load 1")
        del model
    spent = timed_calls()
    with trimtab.load(plan):
        torch.cuda.synchronize()
        mark("load 2 (timed calls)")
    for name, (count, seconds) in sorted(spent.items(), key=lambda item: -item[1][1]):
        print(f"  {name:44s} {count:6d} calls {seconds:6.2f} s")


def timed_calls() -> dict[str, list[float]]:
    """Wrap the steps of a load so that each counts its calls and its wall time in the thread that calls it."""
    from trimtab.engine import model_calls
    from trimtab.engine.formats import bitsandbytes as quant
    from trimtab.engine.loader import load
    from trimtab.engine.loader import transformers_model as hf
    from trimtab.engine.lora import host_adapter as held_adapter
    from trimtab.engine.lora import layers as lora
    from trimtab.engine.tiers import reader as read
    from trimtab.engine.tiers import streaming as tiers

    spent: dict[str, list[float]] = {}

    def wrap(owner: object, name: str) -> None:
        inner = getattr(owner, name)
        label = f"{getattr(owner, '__name__', owner)}.{name}"

        def call(*args, **kwargs):
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                entry = spent.setdefault(label, [0, 0.0])
                entry[0] += 1
                entry[1] += time.perf_counter() - start

        setattr(owner, name, call)

    for owner, names in (
        (load, ("read_checkpoint", "split_packed", "quantize", "keep")),
        (hf, ("probe", "anatomy_of")),
        (
            load._Filler,
            (
                "run",
                "_dense",
                "_fill_block",
                "_fill_linear",
                "_fill_fixed",
                "_fill_embedding",
                "_check_nothing_left",
                "_streamer",
                "_blocks",
                "_reads",
            ),
        ),
        (read.Reader, ("__init__", "take", "_start", "_fill", "__exit__")),
        (read.HostMemory, ("__init__", "close")),
        (tiers.GroupWriter, ("add", "finish")),
        (quant.CodeTables, ("share",)),
        (tiers, ("shell",)),
        (lora, ("attach",)),
        (model_calls, ("match_adapter", "read_adapter")),
        (held_adapter.HeldAdapter, ("read",)),
    ):
        for name in names:
            wrap(owner, name)
    return spent


if __name__ == "__main__":
    main()
