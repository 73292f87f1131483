"""Files kept between runs are whole or not there, in no folder of others; folders of commands go with them."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from trimtab.process import user_cache
from trimtab.process import work_folder as module
from trimtab.process.runner import run_inside
from trimtab.process.user_cache import DIGEST_BYTES, RefusedError, hashed, prune, read_own, touch, write_own
from trimtab.process.work_folder import LOCK_NAME, work_folder

needs_owners = pytest.mark.skipif(sys.platform == "win32", reason="Windows has access lists instead")


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setattr(user_cache, "user_cache_path", lambda name: tmp_path / name)
    user_cache._warn_once.cache_clear()
    return tmp_path / "trimtab"


def written(base, contents=b"contents", key="key"):
    path = user_cache.own_folder("things") / hashed(key)
    write_own(path, key, contents)
    return path


def read(path, key="key"):
    return read_own(path, key, limit_bytes=100)


@needs_owners
def test_a_new_folder_and_its_files_are_the_user_s_alone(base):
    path = written(base)
    assert path.parent.stat().st_mode & 0o777 == 0o700 and path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in path.parent.iterdir()] == [path.name] and read(path) == b"contents"


@settings(max_examples=30)
@given(contents=st.binary(max_size=60), key=st.text(max_size=20), other=st.text(max_size=20))
def test_what_was_written_comes_back_for_its_key_alone(tmp_path_factory, contents, key, other):
    path = tmp_path_factory.mktemp("own") / "file"
    write_own(path, key, contents)
    assert read(path, key) == contents and (read(path, other) == contents) == (other == key)


@settings(max_examples=examples(60))
@given(data=st.data())
def test_any_changed_byte_and_any_cut_are_seen(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("own") / "file"
    write_own(path, "key", b"machine code")
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        path.write_bytes(whole[:at])
    else:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :])
    os.chmod(path, 0o600)
    assert read(path) is None


def test_a_file_under_another_name_is_not_that_one(base):
    path = written(base, key="a kernel")
    other = path.with_name(hashed("another kernel"))
    os.replace(path, other)
    assert read(other, "another kernel") is None


def test_more_bytes_than_allowed_are_not_read(base):
    assert read(written(base, b"x" * 100)) == b"x" * 100 and read(written(base, b"x" * 101)) is None


@needs_owners
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_is_refused_and_that_is_logged_once(mode, base, caplog):
    folder = user_cache.own_folder("things")
    folder.chmod(mode)
    for _ in range(2):
        with pytest.raises(RefusedError, match="can be written by others"):
            user_cache.own_folder("things")
    (record,) = [one for one in caplog.records if one.name == "trimtab"]
    assert str(folder) in record.getMessage()


@needs_owners
def test_a_folder_of_another_user_is_refused(base, monkeypatch):
    path = written(base)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(RefusedError, match=f"belongs to user {os.getuid()}, not to {os.getuid() + 1}"):
        user_cache.own_folder("things")
    assert read(path) is None


@needs_owners
def test_a_link_in_place_of_the_folder_or_of_a_file_is_refused(base, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    base.mkdir()
    (base / "things").symlink_to(elsewhere)
    with pytest.raises(RefusedError, match="no plain folder"):
        user_cache.own_folder("things")
    (base / "things").unlink()
    path = written(base)
    path.rename(elsewhere / "file")
    path.symlink_to(elsewhere / "file")
    assert read(path) is None


@needs_owners
def test_a_file_that_others_can_write_is_not_read(base):
    path = written(base)
    path.chmod(0o620)
    assert read(path) is None


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(base, monkeypatch):
    path = written(base, b"old")

    def fail(*args):
        raise OSError("no room")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no room"):
        write_own(path, "key", b"new")
    assert read(path) == b"old" and len(list(path.parent.iterdir())) == 1


def test_the_files_used_longest_ago_go_first(base):
    paths = [written(base, b"x" * 36, key=str(number)) for number in range(4)]
    for age, path in enumerate(paths):
        os.utime(path, (1000 + age, 1000 + age))
    touch(paths[0])
    prune(paths[0].parent, most_files=3, most_bytes=10**6)
    assert [path.exists() for path in paths] == [True, False, True, True]
    prune(paths[0].parent, most_files=3, most_bytes=2 * (36 + DIGEST_BYTES))
    assert [path.exists() for path in paths] == [True, False, False, True]


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
