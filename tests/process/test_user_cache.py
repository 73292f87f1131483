"""Files that are kept between runs: whole or not there, and never from a folder that others can change."""

import os
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from trimtab.process import user_cache as own_folder
from trimtab.process.user_cache import DIGEST_BYTES, RefusedError, hashed, prune, read_own, touch, write_own

needs_owners = pytest.mark.skipif(sys.platform == "win32", reason="Windows has access lists instead")


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setattr(own_folder, "user_cache_path", lambda name: tmp_path / name)
    own_folder._warn_once.cache_clear()
    return tmp_path / "trimtab"


def written(base, contents=b"contents", key="key"):
    path = own_folder.own_folder("things") / hashed(key)
    write_own(path, key, contents)
    return path


def read(path, key="key"):
    return read_own(path, key, limit_bytes=100)


@needs_owners
def test_a_new_folder_and_its_files_are_the_user_s_alone(base):
    path = written(base)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert read(path) == b"contents"


@settings(max_examples=30)
@given(contents=st.binary(max_size=60), key=st.text(max_size=20), other=st.text(max_size=20))
def test_what_was_written_comes_back_for_its_key_alone(tmp_path_factory, contents, key, other):
    path = tmp_path_factory.mktemp("own") / "file"
    write_own(path, key, contents)
    assert read(path, key) == contents
    assert (read(path, other) == contents) == (other == key)


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
    assert read(written(base, b"x" * 100)) == b"x" * 100
    assert read(written(base, b"x" * 101)) is None


@needs_owners
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_is_refused_and_that_is_logged_once(mode, base, caplog):
    folder = own_folder.own_folder("things")
    folder.chmod(mode)
    for _ in range(2):
        with pytest.raises(RefusedError, match="can be written by others"):
            own_folder.own_folder("things")
    (record,) = [one for one in caplog.records if one.name == "trimtab"]
    assert str(folder) in record.getMessage()


@needs_owners
def test_a_folder_of_another_user_is_refused(base, monkeypatch):
    path = written(base)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(RefusedError, match=f"belongs to user {os.getuid()}, not to {os.getuid() + 1}"):
        own_folder.own_folder("things")
    assert read(path) is None


@needs_owners
def test_a_link_in_place_of_the_folder_or_of_a_file_is_refused(base, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    base.mkdir()
    (base / "things").symlink_to(elsewhere)
    with pytest.raises(RefusedError, match="no plain folder"):
        own_folder.own_folder("things")
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
