"""One file of a merge: its threads hold few bytes, an error in any of them is the one that is raised, pages are whole."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import merged_models, pico
from tests.merged_models import content
from trimtab.checkpoint.writer import PAGE, PositionedWriter
from trimtab.errors import DoesNotFitError
from trimtab.merging import merge
from trimtab.merging.files import write as stream
from trimtab.merging.files.write import _Aligned, _Behind, _Flushed, _is_finite, use_threads

WAIT_S = 20.0


@pytest.fixture(scope="module")
def whole(base: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "out"
    merge(base, out, adapters={"a": adapter})
    return content(out)


# The threads of one file ----------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_written_as_fast_as_it_is_made_holds_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BEHIND_BYTES", 100)
    is_free, given = threading.Event(), []

    def make() -> None:
        with _Behind() as behind:
            for number in range(10):
                given.append(number)
                behind.piece(30, write=partial(is_free.wait, WAIT_S))

    maker = threading.Thread(target=make)
    maker.start()
    # The fourth piece makes 120 bytes: it waits, for the disk moves on no further.
    while len(given) < 4 and maker.is_alive():
        maker.join(0.01)
    maker.join(0.2)
    assert given == [0, 1, 2, 3]
    is_free.set()
    maker.join(WAIT_S)
    assert given == list(range(10))


@pytest.mark.parametrize("queue", ["old", "new", "write"])
def test_what_one_thread_raises_is_raised_and_the_other_threads_end(queue: str) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "the disk")

    with pytest.raises(OSError, match="the disk"), _Behind() as behind:
        behind.piece(1, **{name: fail if name == queue else int for name in ("old", "new", "write")})
        behind.drain()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("trimtab-merge-")]


class Hash:
    """A sha256 that fails at its second piece."""

    def __init__(self, data: bytes) -> None:
        self.pieces = 0

    def update(self, data: memoryview) -> None:
        self.pieces += 1
        if self.pieces == 2:
            raise MemoryError("no room for a hash")


def test_an_error_in_a_thread_that_hashes_ends_the_merge_under_its_own_name(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(stream, "hashlib", SimpleNamespace(sha256=Hash))
        patched.setattr(stream, "hash_file", lambda path: "made up")
        with pytest.raises(MemoryError, match="no room for a hash"):
            merge(base, tmp_path / "out", adapters={"a": adapter})
    assert merged_models.left_over(tmp_path) == []


def test_when_one_file_fails_the_others_are_given_up_and_finished_ones_are_kept(
    base: Path, adapter: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = stream.write_shard
    last = min(base.glob("*.safetensors"), key=lambda path: path.stat().st_size).name

    def failing(shard: Any, *args: Any) -> Any:
        if shard.name == last:  # the smallest file is the last one to be written
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(shard, *args)

    monkeypatch.setattr(stream, "write_shard", failing)
    with pytest.raises(DoesNotFitError, match="full"):
        merge(base, tmp_path / "out", adapters={"a": adapter})
    monkeypatch.undo()
    assert merged_models.left_over(tmp_path) == [".out.merging"]
    report = merge(base, tmp_path / "out", adapters={"a": adapter})
    assert [file.name for file in report.files if not file.is_resumed].count(last) == 1
    assert any(file.is_resumed for file in report.files)
    assert content(tmp_path / "out") == whole


def test_the_number_of_threads_that_torch_takes_is_as_before(base: Path, adapter: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    use_threads(3)
    try:
        merge(base, tmp_path / "out", adapters={"a": adapter})
        assert torch.get_num_threads() == 3
    finally:
        use_threads(before)


# Around the cache -----------------------------------------------------------------------------------------------------


def pieces(size: int) -> Iterator[tuple[int, memoryview]]:
    """Yield (offset, bytes) of uneven pieces, front to back."""
    data = memoryview(bytearray(torch.randint(0, 256, (size,), dtype=torch.uint8).numpy().tobytes()))
    at = 0
    for number in range(size):
        step = 1 + (number * 7919) % 9001
        if at >= size:
            return
        yield at, data[at : at + step]
        at += step


@pytest.mark.parametrize("size", [1, PAGE - 1, 4 * PAGE, 4 * PAGE + 1, 40 * PAGE + 77])
@pytest.mark.parametrize("refuses", [False, True], ids=["taken", "refused"])
def test_uneven_pieces_become_whole_pages_and_a_rest(
    size: int, refuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "ALIGNED_BYTES", 4 * PAGE)
    if refuses:  # as a file system that wants another alignment

        def refuse(self: PositionedWriter, data: memoryview, start: int) -> None:
            assert start % PAGE == 0 and len(data) % PAGE == 0
            self._close_direct()
            self.write(data, start)

        monkeypatch.setattr(PositionedWriter, "write_aligned", refuse)
    wanted = b""
    with PositionedWriter(tmp_path / "file", direct=True) as writer:
        aligned = _Aligned(writer)
        for at, data in pieces(size):
            aligned.write(data, at)
            wanted += bytes(data)
        aligned.check()
        writer.finish()
    assert (tmp_path / "file").read_bytes() == wanted


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system always goes through its cache")
@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSPC])
def test_a_refused_alignment_goes_through_the_cache_and_a_full_disk_is_told(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite, own = os.pwrite, []

    def refuse(handle: int, data: memoryview, start: int) -> int:
        if handle in own:
            raise OSError(code, os.strerror(code))
        return pwrite(handle, data, start)

    monkeypatch.setattr(os, "pwrite", refuse)
    page = memoryview(bytearray(b"x" * PAGE))
    with PositionedWriter(tmp_path / "file", direct=True) as writer:
        if writer._direct is None:
            pytest.skip("this file system always goes through its cache")
        own.append(writer._direct)
        if code == errno.EINVAL:
            writer.write_aligned(page, 0)
            assert not writer.is_direct
            writer.finish()
        else:
            with pytest.raises(OSError, match="space"):
                writer.write_aligned(page, 0)
    left = [path.read_bytes() for path in tmp_path.iterdir()]
    assert left == ([bytes(page)] if code == errno.EINVAL else [])


def test_a_merge_in_whole_pages_is_the_same_merge(
    base: Path, adapter: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "ALIGNED_BYTES", 2 * PAGE)
    merge(base, tmp_path / "out", adapters={"a": adapter})
    assert content(tmp_path / "out") == whole


def test_a_file_is_brought_to_the_disk_while_it_is_written_and_a_failure_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "FLUSH_BYTES", 10)
    flushed = []

    def flush(self: PositionedWriter) -> None:
        flushed.append(self.path.stat().st_size)
        if len(flushed) == 2:
            raise OSError(errno.EIO, "lost")

    monkeypatch.setattr(PositionedWriter, "flush", flush)
    with PositionedWriter(tmp_path / "file") as writer, _Behind() as behind:
        writing = _Flushed(writer, behind)
        writing.write(memoryview(b"x" * 10), 0)
        writing.check()
        writing.write(memoryview(b"x" * 10), 10)
        with pytest.raises(OSError, match="lost"):
            writing.check()
    assert flushed == [10, 20]


# Finite ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_one_value_that_is_not_finite_is_seen_and_a_sum_that_overflows_is_not_taken_for_one(dtype: torch.dtype) -> None:
    assert _is_finite(torch.full((1000,), torch.finfo(dtype).max, dtype=dtype))
    for bad in (float("nan"), float("inf"), float("-inf")):
        assert not _is_finite(torch.zeros(1000, dtype=dtype).index_fill_(0, torch.tensor([777]), bad))
    both = torch.zeros(1000, dtype=dtype)
    both[3], both[4] = float("inf"), float("-inf")
    assert not _is_finite(both)


def test_a_float32_base_with_two_adapters_keeps_its_hash(tmp_path: Path) -> None:
    # Changes of several adapters are added in place: not into the rows whose hash is the base's.
    base = pico.build("llama", tmp_path / "base")
    for file in base.glob("*.safetensors"):
        save_file({name: tensor.float() for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    adapters = {name: pico.adapter(base, tmp_path / name, seed=seed) for seed, name in enumerate("ab", 1)}
    report = merge(base, tmp_path / "out", adapters=adapters, check=True)
    assert [file.base_sha256 for file in report.files] == [stream.hash_file(base / file.name) for file in report.files]
    assert [file.sha256 for file in report.files] == [stream.hash_file(tmp_path / "out" / file.name) for file in report.files]
