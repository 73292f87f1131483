"""Folders and files that the system does not let a command use: an error with the path, never a traceback."""

from __future__ import annotations

import errno
import json
import ntpath
import os
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

import trimtab
from tests import talking
from tests.adapter_files import write_adapter
from trimtab.checkpoint import unreadable
from trimtab.checkpoint.unreadable import first_missing, path_hint
from trimtab.cli.main import main
from trimtab.engine.chat.media import read_image
from trimtab.engine.tiers.spill import Spill
from trimtab.errors import AdapterError, CheckpointError, DeviceError, RequestError

PAIR = {f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.weight": shape for side, shape in
        (("A", (4, 8)), ("B", (8, 4)))}  # fmt: skip
OTHER_USER = 65_534


@pytest.fixture
def llama(tmp_path):
    return talking.build_llama(tmp_path / "llama")


def refuse(monkeypatch, folder: Path, code: int) -> None:
    """Let the system refuse everything in a folder, as it does to a user without the right to it; root has every right."""

    def refusing(function):
        def called(path, *args, **kwargs):
            if not isinstance(path, int) and str(folder) in os.fsdecode(path):
                raise OSError(code, os.strerror(code), os.fspath(path))
            return function(path, *args, **kwargs)

        return called

    for name in ("listdir", "scandir", "open"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    real_stat = os.stat

    def stat(path, *args, **kwargs):
        if not isinstance(path, int) and os.path.dirname(os.fsdecode(path)) == str(folder):
            raise OSError(code, os.strerror(code), os.fspath(path))
        return real_stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", stat)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE], ids=["permission", "disk", "stale"])
def test_a_model_that_cannot_be_read(llama, monkeypatch, capsys, code):
    refuse(monkeypatch, llama, code)
    assert main(["plan", str(llama), "--device", "cpu", "--context", "32"]) == 3
    said = capsys.readouterr().err
    assert said.startswith(f"trimtab: {llama}") and f"cannot be read ({os.strerror(code)})" in said and "Traceback" not in said
    with pytest.raises(CheckpointError):
        trimtab.plan(llama, device="cpu", context=32)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE], ids=["permission", "disk", "stale"])
def test_an_adapter_that_cannot_be_read(tmp_path, monkeypatch, capsys, code):
    adapter = write_adapter(tmp_path / "adapter", PAIR, target_modules=["q_proj"])
    refuse(monkeypatch, adapter, code)
    assert main(["inspect", str(adapter)]) == 3
    said = capsys.readouterr().err
    assert str(adapter) in said and f"cannot be read ({os.strerror(code)})" in said
    with pytest.raises(AdapterError):
        trimtab.inspect(adapter)


@pytest.mark.skipif(not hasattr(os, "seteuid") or os.geteuid() != 0, reason="only root becomes another user")
def test_folders_of_another_user(llama, tmp_path, capsys):
    adapter = write_adapter(tmp_path / "adapter", PAIR, target_modules=["q_proj"])
    commands = {llama: ["plan", str(llama), "--device", "cpu", "--context", "32"], adapter: ["inspect", str(adapter)]}
    for command in commands.values():  # what is imported late is readable for root alone
        assert main(command) == 0
    tmp_path.chmod(0o755)
    for folder, command in commands.items():
        folder.chmod(0)
        os.seteuid(OTHER_USER)
        try:
            code = main(command)
        finally:
            os.seteuid(0)
            folder.chmod(0o755)
        said = capsys.readouterr().err
        assert (code in (2, 3) and str(folder) in said and "cannot be read" in said) or "Permission denied" in said


def test_the_disk_tier_in_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DeviceError, match="cannot be made .*offload_dir"):
        Spill(tmp_path / "file" / "below")


def test_a_missing_tokenizer_json_is_named(llama, capsys):
    (llama / "tokenizer.json").unlink()
    assert main(["run", str(llama), "hello", "--device", "cpu", "--context", "64"]) == 3
    assert f"{llama}: tokenizer.json is missing" in capsys.readouterr().err


def test_no_temporary_folder(llama, monkeypatch, capsys):
    def none(*args, **kwargs):
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "mkdtemp", none)
    monkeypatch.setattr(tempfile, "TemporaryDirectory", none)
    for flags in ([], ["--json"]):
        assert main(["verify", str(llama), "--device", "cpu", *flags]) == 2
        said = capsys.readouterr()
        assert "No usable temporary directory found" in (json.loads(said.out)["error"]["message"] if flags else said.err)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="a folder in which nobody, root included, makes files")
def test_a_home_in_which_nothing_can_be_written(llama, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("HOME", "/proc/trimtab")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    run = ["run", str(llama), "hello", "--device", "cpu", "--context", "64", "--max-new-tokens", "2", "--place", "*=disk"]
    assert main(run) in (4, 6)  # no room for the tier, or no file for it
    assert "offload" in capsys.readouterr().err
    assert main([*run, "--offload-dir", str(tmp_path / "off")]) == 0


@pytest.mark.parametrize(
    ("folder", "missing"), [("Z:\\models\\gemma", "Z:\\"), (r"\\server\share\models", "\\\\server\\share\\"), (r"a\b\c", "a")]
)
def test_the_first_missing_folder_is_found_where_a_drive_or_share_is_missing(folder, missing):
    assert first_missing(folder, ntpath) == missing


def test_a_hint_never_raises(tmp_path):
    (tmp_path / "cut.png").symlink_to(300 * "n")
    (tmp_path / "cat.png").touch()
    with pytest.raises(RequestError, match="no such file") as caught:
        read_image(tmp_path / "cta.png")
    assert caught.value.hint == f"Did you mean {tmp_path}/cat.png?"


def test_a_hint_looks_at_few_entries_of_all_levels_together(tmp_path, monkeypatch):
    real, looked_at = os.scandir, []

    def entries(folder):
        with real(folder) as found:
            yield from (looked_at.append(one) or one for one in found)

    for name in "abcd":
        for below in "efgh":
            (tmp_path / name / below).mkdir(parents=True)
    monkeypatch.setattr(unreadable, "MOST_LOOKED_AT", 10)
    monkeypatch.setattr(os, "scandir", lambda folder: closing(entries(folder)))
    assert not path_hint(tmp_path / "zzz", holds="config.json", deeper=2, lists=True) and len(looked_at) == 10
