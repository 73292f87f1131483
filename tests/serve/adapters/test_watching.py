"""Adapters whose folders change while the server answers: what is taken up, what is left alone, and who keeps the old weights."""

import json
import os
import shutil
import threading
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import waiting
from tests.serve.worker.test_serve_worker import REQUEST, Running, settings_of
from trimtab.adapters.file import CONFIG_NAME, TENSORS_NAME
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.errors import CheckpointError
from trimtab.serve.adapters.new_adapters import Watcher, files_stamp

STYLE, SPECIALIST = (DEMO / "adapters" / name for name in ("style", "specialist"))
WAIT_S = 60


def touch(folder, seconds):
    """Make a folder's files differ in their times, however coarse the file system's clock is."""
    for name in (CONFIG_NAME, TENSORS_NAME):
        at = time.time() + seconds
        os.utime(folder / name, (at, at))


def put(source, folder):
    for name in (CONFIG_NAME, TENSORS_NAME):
        shutil.copy(source / name, folder / name)


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(STYLE, tmp_path / "mine")


def watching(folder, read):
    watcher = Watcher(read)
    watcher.watch("mine", folder, files_stamp(folder))
    return watcher


def test_a_change_is_read_once_it_is_the_same_in_two_looks(folder):
    read = []
    watcher = watching(folder, lambda path, name: read.append((path, name)) or len(read))
    watcher.look()
    watcher.look()
    assert read == []
    put(SPECIALIST, folder)
    touch(folder, 1)
    watcher.look()
    assert read == []  # it may still be being written
    touch(folder, 2)
    watcher.look()
    assert read == []  # it was
    watcher.look()
    watcher.look()
    assert read == [(folder, "mine")] and watcher.read_again.get_nowait() == ("mine", 1)
    watcher.forget("mine")
    touch(folder, 3)
    watcher.look()
    watcher.look()
    assert len(read) == 1


def test_files_that_cannot_be_read_are_named_once_and_read_again_once_they_are_mended(folder, caplog):
    problems = [CheckpointError("the header is cut", path=folder), KeyError("a mistake of ours")]

    def read(path, name):
        if problems:
            raise problems.pop()
        return "held"

    watcher = watching(folder, read)
    for second in (1, 2):
        touch(folder, second)
        for _ in range(4):
            watcher.look()
    said = [one.getMessage() for one in caplog.records if one.name == "trimtab.serve"]
    assert len(said) == 2 and all("was not reloaded" in text for text in said) and watcher.read_again.empty()
    touch(folder, 3)
    for _ in range(3):
        watcher.look()
    assert watcher.read_again.get_nowait() == ("mine", "held") and watcher.read_again.empty()


def test_files_that_change_while_they_are_read_and_folders_that_go_are_left_alone(folder):
    read = []

    def slow(path, name):
        read.append(name)
        touch(folder, 10 + len(read))
        return "torn"

    watcher = watching(folder, slow)
    touch(folder, 1)
    watcher.look()
    watcher.look()
    assert read == ["mine"] and watcher.read_again.empty()
    shutil.rmtree(folder)
    for _ in range(3):
        watcher.look()
    assert read == ["mine"] and watcher.read_again.empty()


# In the worker ---------------------------------------------------------------------------------------------------------


def text_of(running, name):
    assert running.end_of(name).kind == "done", running.end_of(name)
    return "".join(event.text for event in running.events if event.job_id == name)


@pytest.fixture
def running(folder, tmp_path):
    half = shutil.copytree(STYLE, tmp_path / "half")
    request = {**REQUEST.to_json(), "prefix_cache_bytes": 2**24}
    found = Running({**settings_of({"mine": folder, "half": half, "specialist": SPECIALIST}), "request": request})
    yield found
    found.close()


def test_a_changed_folder_answers_next_and_what_runs_keeps_the_old_weights(running, folder, monkeypatch):
    worker = running.worker
    for name in ("mine", "specialist"):
        running.ask(f"{name} before", adapter=name)
    before, expected = (text_of(running, f"{name} before") for name in ("mine", "specialist"))
    assert before != expected
    # One answer is held after its first step until the new files are in place.
    step, is_through, begun = worker.engine.step, threading.Event(), threading.Event()

    def held(behind=None):
        step(behind)
        begun.set()
        assert is_through.wait(WAIT_S)

    monkeypatch.setattr(worker.engine, "step", held)
    running.ask("long", adapter="mine")
    assert begun.wait(WAIT_S)
    put(SPECIALIST, folder)
    touch(folder, 5)
    waiting.until(lambda: not worker.adapters.watcher.read_again.empty())
    is_through.set()
    assert text_of(running, "long") == before
    running.ask("after", adapter="mine")
    running.ask("mixed", adapter="mine:0.5+half:0.5")
    running.ask("half", adapter="half")
    assert text_of(running, "after") == expected and text_of(running, "half") == before
    assert running.end_of("mixed").kind == "done" and worker.engine.shelf.reloads == 1
    # The first weights are gone from the model once nobody uses them.
    keys = set(worker.engine.shelf._resident)
    assert "mine@2" in keys and "mine" not in keys
    running.call("numbers")
    numbers = running.hear("reply")["value"]
    assert "mine" in numbers["resident"] and numbers["reloads"] == 1 and "mine:0.5+half:0.5" in numbers["mixes"]
    assert worker.engine.shelf.mixes == ("mine:0.5+half:0.5",)


def test_a_half_written_folder_changes_nothing(running, folder, caplog):
    running.ask("before", adapter="mine")
    before = text_of(running, "before")
    whole = (folder / TENSORS_NAME).read_bytes()
    (folder / TENSORS_NAME).write_bytes(whole[: len(whole) // 2])
    touch(folder, 5)
    waiting.until(lambda: "was not reloaded" in caplog.text)
    running.ask("after", adapter="mine")
    assert text_of(running, "after") == before and running.worker.engine.shelf.reloads == 0
    # The same weights again: read, and nothing is new.
    (folder / TENSORS_NAME).write_bytes(whole)
    touch(folder, 9)
    waiting.until(lambda: running.worker.adapters.watcher._folders["mine"].used == files_stamp(folder))
    running.ask("whole", adapter="mine")
    assert text_of(running, "whole") == before and running.worker.engine.shelf.reloads == 0


def test_weights_of_another_shape_are_taken_up_too(running, folder):
    config = json.loads((folder / CONFIG_NAME).read_text("utf-8"))
    tensors = {
        name: torch.cat([value, torch.zeros_like(value)], dim=1 if ".lora_B." in name else 0)
        for name, value in load_file(folder / TENSORS_NAME).items()
    }
    save_file(tensors, folder / TENSORS_NAME, metadata={"format": "pt"})
    config |= {"r": 2 * config["r"], "lora_alpha": 2 * config["lora_alpha"]}
    (folder / CONFIG_NAME).write_text(json.dumps(config), encoding="utf-8")
    touch(folder, 5)
    running.ask("before", adapter="half")
    waiting.until(lambda: running.worker.engine.shelf.reloads == 1)
    running.ask("after", adapter="mine")
    # Twice the rank with zeros, at the same scale: the same sum.
    assert text_of(running, "after") == text_of(running, "before")


def test_a_worker_that_comes_back_plans_with_the_new_files(folder, tmp_path):
    first = Running(settings_of({"mine": folder}))
    plan = first.ready["plan"]
    first.close()
    put(SPECIALIST, folder)
    touch(folder, 5)
    second = Running({**settings_of({"mine": folder, "specialist": SPECIALIST}), "plan": plan})
    try:
        second.ask("mine", adapter="mine")
        second.ask("specialist", adapter="specialist")
        assert text_of(second, "mine") == text_of(second, "specialist")
    finally:
        second.close()
