"""Adapters of clients stay below the server's folder: links, loops, pipes, and files that are swapped while they are read."""

import os
import shutil
from pathlib import Path

import pytest

from tests.raised import raised, refused
from tests.serve.adapters.test_watching import touch
from trimtab.adapters.adapter import read_adapter
from trimtab.adapters.file import CONFIG_NAME, TENSORS_NAME
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.errors import AdapterError, RequestError
from trimtab.request import LoadRequest
from trimtab.serve.adapters.adapter_cache import HeldAdapters
from trimtab.serve.adapters.new_adapters import Watcher, files_stamp
from trimtab.serve.contract import inside_root
from trimtab.serve.contract.inside_root import look, read_inside
from trimtab.serve.contract.settings import Settings
from trimtab.serve.pool import Pool
from trimtab.serve.worker.registry import ServedModel
from trimtab.serve.worker.supervisor import Loaded
from trimtab.serve.worker.worker import _lost_adapters

pytestmark = pytest.mark.skipif(os.name == "nt", reason="making links needs a right on Windows")
STYLE = DEMO / "adapters" / "style"


@pytest.fixture
def root(tmp_path):
    """A server's folder with an adapter, and another one that lies outside of it."""
    made = (tmp_path / "root").resolve()
    shutil.copytree(STYLE, made / "team" / "mine")
    shutil.copytree(STYLE, tmp_path / "outside")
    return made


def out(root):
    return root.parent / "outside"


def replace_by_link(path, target):
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(target)


# What somebody makes of the folder -> whether it may still be read.
WAYS = {
    "nothing": (lambda root: None, True),
    "a file by a link out": (lambda root: replace_by_link(root / "team/mine" / TENSORS_NAME, out(root) / TENSORS_NAME), False),
    "the config by a link out": (lambda root: replace_by_link(root / "team/mine" / CONFIG_NAME, "/etc/passwd"), False),
    "the folder by a link out": (lambda root: replace_by_link(root / "team/mine", out(root)), False),
    "the folder above by a link out": (lambda root: replace_by_link(root / "team", out(root).parent), False),
    "a link with dots out": (
        lambda root: replace_by_link(root / "team/mine" / TENSORS_NAME, f"../../../outside/{TENSORS_NAME}"), False,
    ),
    "another file that links out": (lambda root: (root / "team/mine/tokenizer.json").symlink_to("/etc/passwd"), False),
    "a link out that comes back": (
        lambda root: (out(root) / "back").symlink_to(root) or replace_by_link(
            root / "team/mine" / TENSORS_NAME, f"../../../outside/back/team/{TENSORS_NAME}"), False,
    ),
    "a link to itself": (lambda root: replace_by_link(root / "team/mine" / TENSORS_NAME, TENSORS_NAME), False),
    "a link to the root itself": (lambda root: replace_by_link(root / "team/mine", root), False),
    "a link to nothing": (lambda root: replace_by_link(root / "team/mine" / TENSORS_NAME, "gone"), False),
    "a pipe": (lambda root: os.mkfifo(root / "team/mine/pipe"), False),
    "a link within": (
        lambda root: shutil.move(root / "team/mine" / TENSORS_NAME, root / "blob")
        and (root / "team/mine" / TENSORS_NAME).symlink_to("../../blob"), True,
    ),
    "a link within, named in full": (
        lambda root: shutil.move(root / "team/mine" / TENSORS_NAME, root / "blob")
        and (root / "team/mine" / TENSORS_NAME).symlink_to(root / "blob"), True,
    ),
    "links to links within": (
        lambda root: (shutil.move(root / "team/mine", root / "real") and (root / "way").symlink_to("real"))
        or (root / "team/mine").symlink_to("../way"), True,
    ),
    "a folder inside": (lambda root: (root / "team/mine/checkpoint-5").mkdir(), True),
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
def test_a_folder_is_read_only_while_all_of_it_lies_below_the_root(root, name):
    make, may = WAYS[name]
    make(root)
    folder = root / "team" / "mine"
    if may:
        assert read_inside(lambda: "read", folder, root) == "read"
        assert Settings(adapter_root=root).adapter_path("team/mine").is_relative_to(root)
        return
    reads = []
    error = refused(read_inside, lambda: reads.append(1), folder, root)
    assert error.field == "lora_path" and reads == [] and "outside" not in str(error)
    with pytest.raises(RequestError):
        Settings(adapter_root=root).adapter_path("team/mine")


def test_a_root_that_is_reached_by_a_link_is_the_same_root(root):
    (root.parent / "alias").symlink_to(root)
    shutil.move(root / "team/mine" / TENSORS_NAME, root / "blob")
    (root / "team/mine" / TENSORS_NAME).symlink_to(root.parent / "alias" / "blob")
    assert Settings(adapter_root=root.parent / "alias").adapter_path("team/mine") == root / "team" / "mine"


def test_many_entries_are_refused_before_each_is_looked_at(root, monkeypatch):
    monkeypatch.setattr(inside_root, "MOST_ENTRIES", 1)
    with pytest.raises(RequestError):
        look(root / "team" / "mine", root)


# Who may write below the root, between the look and the read, and back before the next look.
def swap_file(root):
    file, kept = root / "team/mine" / TENSORS_NAME, root / "kept"
    os.rename(file, kept)
    file.symlink_to(out(root) / TENSORS_NAME)
    return lambda: (file.unlink(), os.rename(kept, file))


def swap_folder(root):
    folder, kept = root / "team/mine", root / "kept"
    os.rename(folder, kept)
    folder.symlink_to(out(root))
    return lambda: (folder.unlink(), os.rename(kept, folder))


def swap_folder_above(root):
    folder, kept = root / "team", root / "kept"
    os.rename(folder, kept)
    folder.mkdir()
    (folder / "mine").symlink_to(out(root))
    return lambda: (shutil.rmtree(folder), os.rename(kept, folder))


@pytest.mark.parametrize("swap", [swap_file, swap_folder, swap_folder_above])
@pytest.mark.parametrize("always", [False, True])
def test_what_is_swapped_during_a_read_and_put_back_is_not_used(root, swap, always):
    folder, read = root / "team" / "mine", []
    (out(root) / TENSORS_NAME).write_bytes(b"another client's")

    def reading():
        if always or not read:
            put_back = swap(root)
            read.append((folder / TENSORS_NAME).read_bytes())
            put_back()
        else:
            read.append((folder / TENSORS_NAME).read_bytes())
        return read[-1]

    own = (folder / TENSORS_NAME).read_bytes()
    if always:
        error = raised(AdapterError, read_inside, reading, folder, root)
        assert list(error.problems) == [inside_root.CHANGES] and set(read) == {b"another client's"}
    else:
        assert read_inside(reading, folder, root) == own and read == [b"another client's", own]


def test_an_error_of_what_was_swapped_in_is_not_told(root):
    folder, told = root / "team" / "mine", []

    def reading():
        if not told:
            put_back = swap_file(root)
            told.append(1)
            put_back()
            raise AdapterError(folder, ["a secret of the other file"])
        return "own"

    assert read_inside(reading, folder, root) == "own"

    def broken():
        raise AdapterError(folder, ["its own problem"])

    with pytest.raises(AdapterError, match="its own problem"):
        read_inside(broken, folder, root)


# Where it is used -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("root_of", [str, None])
def test_the_watcher_follows_no_link_out_of_the_root_of_a_client(root, caplog, root_of):
    folder, read = root / "team" / "mine", []
    watcher = Watcher(lambda path, name: read.append(name) or "new")
    watcher.watch("mine", folder, files_stamp(folder), root_of and root_of(root))
    replace_by_link(folder, out(root))
    touch(folder, 5)
    for _ in range(4):
        watcher.look()
    said = [one.getMessage() for one in caplog.records if "was not reloaded" in one.getMessage()]
    if root_of is None:  # one that the operator named may lie anywhere
        assert read == ["mine"] and watcher.read_again.get_nowait() == ("mine", "new") and said == []
        return
    assert read == [] and watcher.read_again.empty() and len(said) == 1 and "below the server's adapter folder" in said[0]
    folder.unlink()
    shutil.copytree(STYLE, folder)
    touch(folder, 9)
    for _ in range(3):
        watcher.look()
    assert read == ["mine"] and watcher.read_again.get_nowait() == ("mine", "new")


def test_a_worker_that_comes_back_follows_no_link_out_of_the_root_of_a_client(root):
    replace_by_link(root / "team" / "mine", out(root))
    adapters = {"mine": str(root / "team" / "mine"), "operators": str(root / "team" / "mine")}
    lost = _lost_adapters({"adapters": adapters, "roots": {"mine": str(root)}})
    assert list(lost) == ["mine"] and "below the server's adapter folder" in lost["mine"]


def test_what_clients_read_of_a_lost_adapter_has_no_names_of_its_neighbours(root):
    shutil.copytree(STYLE, root / "team" / "mime")
    shutil.rmtree(root / "team" / "mine")
    with pytest.raises(AdapterError, match="team/mime"):
        read_adapter(root / "team" / "mine")
    assert _lost_adapters({"adapters": {"mine": str(root / "team" / "mine")}}) == {"mine": "no such folder"}


class Worker:
    """A supervisor's place, which writes down what the worker is told."""

    def __init__(self, settings, **options):
        self.calls, self.state, self.plan, self.numbers, self.failure = [], "ready", None, {}, None

    def call(self, what, **arguments):
        from concurrent.futures import Future

        self.calls.append((what, arguments))
        done = Future()
        done.set_result({})
        return done


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_worker_is_told_the_root_of_a_clients_adapter_and_of_no_other(root, anyio_backend):
    workers = []

    def make(settings, **options):
        workers.append(Worker(settings))
        return workers[-1]

    served = ServedModel(name="toy", request=LoadRequest(model="none"))
    pool = Pool([served], Settings(page=False, adapter_root=root), make=make)
    folder = root / "team" / "mine"
    await pool.load_adapter(None, "mine", str(folder))
    await pool.use(ServedModel(name="toy", request=LoadRequest(model="none"), adapters={"own": str(folder)}))
    assert workers[0].calls == [
        ("load_adapter", {"name": "mine", "path": str(folder), "root": str(root)}),
        ("load_adapter", {"name": "own", "path": str(folder)}),
    ]


def test_the_next_worker_is_told_the_roots_of_what_clients_have_loaded(root):
    loaded = Loaded({"own": "/own"})
    loaded.called("load_adapter", {"name": "mine", "path": Path("/r/mine"), "root": "/r"})
    assert loaded.roots == {"mine": "/r"}
    loaded.called("unload_adapter", {"name": "mine"})
    assert loaded.roots == {} and loaded.adapters == {"own": "/own"}


def test_a_pipe_in_place_of_a_file_is_never_opened(root):
    folder = root / "team" / "mine"
    (folder / CONFIG_NAME).unlink()
    os.mkfifo(folder / CONFIG_NAME)
    assert files_stamp(folder) is None

    class Model:
        def read_adapter(self, path, *, name):
            raise AdapterError(path, ["is missing"])

    # Opening it would wait for ever, with the lock that every other adapter needs.
    with pytest.raises(AdapterError, match="is missing"):
        HeldAdapters(Model()).read(folder)
