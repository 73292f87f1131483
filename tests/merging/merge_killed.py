"""Merges that are killed: one process imports everything once, then each merge runs in a fork of it that dies at its point.

    python -m tests.merging.merge_killed MODEL ADAPTER FOLDER POINTS

Prints one JSON line a point: its number and how the child ended. Point 0 runs to the end and prints how many events
there were; the event is a write, a file that is brought to the disk, or a rename, remove or make of a name.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

EVENTS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")


def run(model: str, adapter: str, out: Path, point: int) -> int:
    """Merge, and kill this very process at an event; returns the number of events if it was never reached."""
    from trimtab.checkpoint.writer import PositionedWriter
    from trimtab.merging import merge

    count = 0

    def event() -> None:
        nonlocal count
        count += 1
        if count == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(name: str, args: tuple[object, ...]) -> None:
        if name in EVENTS and str(out.parent) in str(args[0]):
            event()

    write, finish = PositionedWriter.write, PositionedWriter.finish

    def counted_write(self: PositionedWriter, data: memoryview | bytes, start: int) -> None:
        half = len(data) // 2
        write(self, memoryview(data)[:half], start)
        event()  # with half of the bytes written
        write(self, memoryview(data)[half:], start + half)

    def counted_finish(self: PositionedWriter) -> None:
        event()
        finish(self)

    PositionedWriter.write, PositionedWriter.finish = counted_write, counted_finish  # type: ignore[method-assign]
    sys.addaudithook(hook)
    merge(model, out, adapters={"a": adapter}, overwrite=True)
    return count


def main() -> None:
    model, adapter, folder, points = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    import torch

    from trimtab.engine.loader import transformers_model  # noqa: F401
    from trimtab.merging import merge  # noqa: F401
    from trimtab.merging.changes import plan  # noqa: F401
    from trimtab.merging.files import write as stream  # noqa: F401

    torch.set_num_threads(1)
    total = _child(model, adapter, folder / "whole" / "out", 0)
    print(json.dumps({"point": 0, "events": total}), flush=True)
    for number in range(1, points + 1):
        point = max(1, total * number // points)
        ended = _child(model, adapter, folder / str(number) / "out", point)
        print(json.dumps({"point": point, "number": number, "ended": ended}), flush=True)


def _child(model: str, adapter: str, out: Path, point: int) -> int:
    out.parent.mkdir(parents=True)
    out.mkdir()
    (out / "old.txt").write_text("the model that was there before")
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, str(run(model, adapter, out, point)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    _, status = os.waitpid(pid, 0)
    text = os.read(reader, 100).decode()
    os.close(reader)
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else int(text or -1)


if __name__ == "__main__":
    main()
