"""Folders of a command in the temporary directory: gone at its end, and those of killed commands with the next one."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from trimtab.process import work_folder as module
from trimtab.process.runner import run_inside
from trimtab.process.work_folder import LOCK_NAME, work_folder

OWNER = """
import sys
from trimtab.process.work_folder import work_folder
with work_folder("test") as folder:
    (folder / "large.bin").write_bytes(b"x" * 1000)
    (folder / "inner").mkdir()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    module._remove_left.cache_clear()
    yield tmp_path
    module._remove_left.cache_clear()


@pytest.fixture
def owner(root):
    """Start a process that has a folder in `root`."""
    started = []

    def start():
        places = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(root))
        process = subprocess.Popen(
            [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **places},
        )  # fmt: skip
        started.append(process)
        return process, Path(process.stdout.readline().strip())

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_folder_is_gone_at_its_end_and_after_an_error(root):
    with work_folder("verify") as folder:
        assert folder.parent == root and folder.name.startswith("trimtab-verify-")
        assert [path.name for path in folder.iterdir()] == [LOCK_NAME]
        (folder / "file").write_text("text")
    with pytest.raises(KeyError), work_folder("verify"):
        raise KeyError
    assert list(root.iterdir()) == []


def test_the_folder_of_a_killed_process_goes_with_the_next_command_and_a_living_one_stays(owner, root):
    killed, left = owner()
    living, used = owner()
    killed.kill()
    killed.wait()
    assert (left / "large.bin").is_file()
    with work_folder("other"):
        assert not left.exists()
        assert (used / "large.bin").is_file()
    living.communicate("")  # it ends by itself
    assert living.returncode == 0 and list(root.iterdir()) == []


def test_a_process_with_limits_removes_them_too(owner, root):
    killed, left = owner()
    killed.kill()
    killed.wait()
    run_inside("trimtab.no_such_module", {})
    assert not left.exists() and list(root.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="users have temporary directories of their own")
def test_what_is_another_users_or_a_link_or_has_no_lock_stays(root, tmp_path_factory, monkeypatch):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / LOCK_NAME).touch()
    (root / "trimtab-verify-link").symlink_to(elsewhere)
    (root / "trimtab-demo").mkdir()
    (root / "trimtab-notes.txt").write_text("text")
    (root / "other-verify").mkdir()
    (root / "other-verify" / LOCK_NAME).touch()
    pipe = root / "trimtab-pipe"
    pipe.mkdir()
    os.mkfifo(pipe / "fifo")
    before = sorted(root.iterdir())
    with work_folder("verify"):
        pass
    assert sorted(root.iterdir()) == before and (elsewhere / LOCK_NAME).is_file()
    (root / "trimtab-verify-foreign").mkdir()
    (root / "trimtab-verify-foreign" / LOCK_NAME).touch()
    own = os.getuid()
    for user, is_there in ((own + 1, True), (own, False)):
        module._remove_left.cache_clear()
        monkeypatch.setattr(os, "getuid", lambda user=user: user)
        with work_folder("verify"):
            assert (root / "trimtab-verify-foreign").exists() is is_there


def test_a_folder_that_another_process_took_for_left_is_made_again(root, monkeypatch):
    """Between making its lock's file and taking the lock, another process may have removed it."""
    taken = []
    real = module.lock

    def lock(handle):
        if not taken:
            (folder,) = root.iterdir()
            taken.append(folder)
            (folder / LOCK_NAME).unlink()
        real(handle)

    monkeypatch.setattr(module, "lock", lock)
    with work_folder("verify") as folder:
        assert folder != taken[0] and (folder / LOCK_NAME).is_file()
