"""A merge leaves the whole new model or none: killed, on a full disk, on bad input; and goes on where it was killed."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import merged_models, pico
from tests.merged_models import content
from tests.raised import raised
from trimtab.checkpoint.writer import PositionedWriter
from trimtab.errors import DoesNotFitError, RequestError
from trimtab.merging import merge
from trimtab.merging.files import output_dir

# Stopped ---------------------------------------------------------------------------------------------------------------


def test_a_finished_file_that_was_changed_meanwhile_is_written_again(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_before_the_end(base, adapter, tmp_path / "out", monkeypatch)
    half = tmp_path / ".out.merging"
    files = sorted(half.glob("*.safetensors"))
    assert len(files) == 5
    with open(files[1], "r+b") as handle:
        handle.seek(-1, os.SEEK_END)
        handle.write(b"\x55")
    files[2].unlink()
    report = merge(base, tmp_path / "out", adapters={"a": adapter})
    assert [file.is_resumed for file in report.files] == [True, False, False, True, True]
    merge(base, tmp_path / "again", adapters={"a": adapter})
    assert content(tmp_path / "out") == content(tmp_path / "again")


def stop_before_the_end(base: Path, adapter: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(sys.modules["trimtab.merging.merge"], "_write_small", stop)
        merge(base, out, adapters={"a": adapter})


@pytest.mark.parametrize("what", ["weight", "adapter", "base", "dtype"])
def test_another_merge_resumes_nothing(
    what: str, base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_before_the_end(base, adapter, tmp_path / "out", monkeypatch)
    options: dict[str, Any] = {"adapters": {"a": adapter}}
    model = base
    if what == "weight":
        options["adapters"] = {"a": (adapter, 0.5)}
    elif what == "adapter":
        options["adapters"] = {"a": pico.adapter(base, tmp_path / "other", seed=5)}
    elif what == "base":
        model = pico.build("llama", tmp_path / "base", shards=3, seed=3)
    else:
        options["dtype"] = "float16"
    assert not any(file.is_resumed for file in merge(model, tmp_path / "out", **options).files)


def test_two_merges_into_one_place_at_once_are_refused(base: Path, adapter: Path, tmp_path: Path) -> None:
    with output_dir.Workplace(tmp_path / "out", "key"), pytest.raises(RequestError) as caught:
        merge(base, tmp_path / "out", adapters={"a": adapter})
    assert caught.value.field == "out" and "another merge" in str(caught.value)


def test_a_model_caught_between_two_renames_is_put_back(base: Path, tmp_path: Path) -> None:
    old = tmp_path / ".out.replaced"
    old.mkdir()
    (old / "old.txt").write_text("kept")
    with pytest.raises(RequestError, match="not empty"):
        with output_dir.Workplace(tmp_path / "out", "key"):
            pass
        merge(base, tmp_path / "out", dtype="bfloat16")
    assert (tmp_path / "out" / "old.txt").read_text() == "kept"


# The disk -------------------------------------------------------------------------------------------------------------


def fail_at(monkeypatch: pytest.MonkeyPatch, byte_count: int, code: int) -> None:
    written = 0
    write = PositionedWriter.write

    def failing(self: PositionedWriter, data: memoryview | bytes, start: int) -> None:
        nonlocal written
        written += len(data)
        if written > byte_count:
            raise OSError(code, os.strerror(code))
        write(self, data, start)

    monkeypatch.setattr(PositionedWriter, "write", failing)


@pytest.mark.parametrize("byte_count", [0, 100_000, 200_000, 270_000])
def test_a_full_disk_leaves_no_half_model_and_the_next_run_goes_on(
    byte_count: int, base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, byte_count, errno.ENOSPC)
    error = raised(DoesNotFitError, merge, base, tmp_path / "out", adapters={"a": adapter})
    assert error.device == "disk" and error.needed_bytes > 270_000
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    merge(base, tmp_path / "out", adapters={"a": adapter}, check=True)
    assert merged_models.left_over(tmp_path) == ["out"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a file size limit of the system")
def test_a_file_that_the_system_will_not_let_grow_is_a_full_disk(base: Path, tmp_path: Path) -> None:
    """The system's own refusal (EFBIG): Python ignores the signal that comes with it."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        with pytest.raises(DoesNotFitError) as caught:
            merge(base, tmp_path / "out", dtype="bfloat16")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.device == "disk" and merged_models.left_over(tmp_path) == []


def test_too_little_room_is_said_before_the_first_byte(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total = sum(path.stat().st_size for path in base.iterdir())
    usage = type("Usage", (), {"free": total - 1})
    monkeypatch.setattr(output_dir.shutil, "disk_usage", lambda _: usage)
    fail_at(monkeypatch, 0, errno.EIO)
    error = raised(DoesNotFitError, merge, base, tmp_path / "out", dtype="bfloat16")
    assert (error.device, error.budget_bytes) == ("disk", total - 1) and total <= error.needed_bytes < total + 10_000
    assert "Nothing was written" in error.hint and merged_models.left_over(tmp_path) == []


def test_a_place_that_cannot_be_written_is_named_and_nothing_is_left(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = Path.mkdir

    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        if self.parent == tmp_path:
            raise PermissionError(errno.EROFS, os.strerror(errno.EROFS))
        mkdir(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", refuse)
    error = raised(RequestError, merge, base, tmp_path / "out", dtype="bfloat16")
    assert error.field == "out" and "Read-only" in str(error)
    assert merged_models.left_over(tmp_path) == []


# The place ------------------------------------------------------------------------------------------------------------


def refused(base: Path, out: Path, **options: Any) -> RequestError:
    error = raised(RequestError, merge, base, out, **options)
    assert error.field == "out"
    return error


def test_the_model_itself_is_no_place(base: Path, adapter: Path) -> None:
    before = content(base)
    assert "is the model itself" in str(refused(base, base, overwrite=True))
    assert "is the model itself" in str(refused(base, base / ".." / "base", overwrite=True))
    assert "is inside the model" in str(refused(base, base / "merged"))
    assert "holds the model" in str(refused(base, base.parent, overwrite=True))
    assert "is the adapter a itself" in str(refused(base, adapter, adapters={"a": adapter}, overwrite=True))
    assert "is inside the adapter a" in str(refused(base, adapter / "x", adapters={"a": adapter}))
    # An adapter in the place of OUT is one that its --adapter was forgotten for.
    assert "is an adapter" in str(refused(base, adapter, dtype="bf16", overwrite=True))
    assert content(base) == before and (adapter / "adapter_config.json").exists()


@pytest.mark.parametrize("name", ["demo", "./demo", "demo/style"])
def test_a_name_of_the_bundled_demo_is_no_place(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert "is a name of the bundled demo: later commands would" in str(refused(base, Path(name), dtype="bf16"))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "config.json").write_text("{}")  # a model of the user's, which this name means here already
    assert "is not empty" in str(refused(base, Path("demo"), dtype="bf16"))
    monkeypatch.chdir("/")
    assert "is not empty" in str(refused(base, tmp_path / "demo", dtype="bf16"))


def test_a_link_to_the_model_is_the_model(base: Path, tmp_path: Path) -> None:
    try:
        (tmp_path / "link").symlink_to(base, target_is_directory=True)
    except OSError:
        pytest.skip("links need a privilege here")
    assert "is the model itself" in str(refused(base, tmp_path / "link", overwrite=True))


@pytest.mark.parametrize("swaps", [True, False])
def test_an_existing_folder_needs_overwrite_and_then_is_replaced_as_a_whole(
    swaps: bool, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not swaps:  # a system that only renames
        monkeypatch.setattr(output_dir.ctypes, "CDLL", lambda *_, **__: object())
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("x")
    assert "not empty" in str(refused(base, out)) and content(out) == {"mine.txt": b"x"}
    merge(base, out, dtype="bf16", overwrite=True)
    assert "mine.txt" not in content(out)
    assert merged_models.left_over(tmp_path) == ["out"]


def test_an_empty_folder_is_taken(base: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    merge(base, tmp_path / "out", dtype="bfloat16")
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_file_or_a_missing_parent_is_refused(base: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "is a file" in str(refused(base, tmp_path / "file"))
    assert "does not exist" in str(refused(base, tmp_path / "no" / "out"))
