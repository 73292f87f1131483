"""The file of the disk tier."""

from __future__ import annotations

import tempfile
from pathlib import Path

from torch import Tensor

from trimtab.engine.tiers.reader import bytes_of
from trimtab.errors import CheckpointError, DeviceError


class Spill:
    """The disk tier's file: packed blocks one after the other, in a nameless temporary file that no one else can open.

    Nothing stays behind: the file goes with the process, however that ends. Errors: CheckpointError if the file is
    changed or short, DeviceError if the disk is full or the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as exc:
            raise DeviceError(
                f"the spill file in {folder} cannot be made ({exc.strerror or exc})", device="disk",
                hint="Name a folder that can be written with offload_dir",
            ) from exc  # fmt: skip
        self.folder, self.nbytes = folder, 0

    def append(self, buffer: Tensor) -> int:
        """Write one block and return where it starts."""
        start, view = self.nbytes, bytes_of(buffer)
        try:
            done = 0
            while done < len(view):
                done += self._file.write(view[done : done + 2**30]) or 0
        except OSError as exc:
            raise DeviceError(
                f"writing {len(view)} B to the spill file in {self.folder} failed ({exc.strerror})", device="disk",
                hint="Free disk space or name another folder with offload_dir",
            ) from exc  # fmt: skip
        self.nbytes += len(view)
        return start

    def read_into(self, target: Tensor, start: int) -> None:
        # One reader thread only (Streamer's), so seek and read need no lock.
        self._file.seek(start)
        view, done = bytes_of(target), 0
        while done < len(view):
            count = self._file.readinto(view[done:])  # type: ignore[attr-defined]
            if not count:
                raise CheckpointError(
                    f"spill file ends at byte {start + done}, {len(view) - done} bytes are missing: it was changed "
                    "while in use", path=self.folder, hint="Load the model again",
                )  # fmt: skip
            done += count

    def close(self) -> None:
        self._file.close()
