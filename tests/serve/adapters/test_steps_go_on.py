"""Loading, changing and swapping adapters while an answer runs: counted in steps, nothing holds it up for more than one."""

import json
import shutil
import threading
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests import waiting
from tests.serve.worker.test_serve_worker import REQUEST, WAIT_S, Running, settings_of
from trimtab.adapters import file
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine.formats import int8_head
from trimtab.engine.lora import base_values
from trimtab.engine.model import LoadedModel
from trimtab.serve.adapters import new_adapters
from trimtab.serve.adapters.new_adapters import AdapterQueue, Urgency
from trimtab.serve.worker import prompt_inputs
from trimtab.serve.worker.ipc import event_from_message

DORA, STYLE = DEMO / "adapters" / "rslora-dora", DEMO / "adapters" / "style"
CONTEXT, NEVER_ENDS = 4096, 4000


class Recorded(Running):
    """A worker that records the steps of rows and the weights that are read for an adapter, in their order."""

    def __init__(self, settings, monkeypatch):
        self.replies = []
        super().__init__(settings)
        self.log, served = [], self.worker.engine
        step, norms = served.step, base_values._row_norms

        def recorded(behind=None):
            step(behind)
            self.log.append("step")

        def read(*args):
            self.log.append("weight")
            return (yield from norms(*args))

        monkeypatch.setattr(served, "step", recorded)
        monkeypatch.setattr(base_values, "_row_norms", read)
        served.batch.ends = frozenset()  # an answer is as long as it may be

    def _run(self):
        with suppress(OSError):  # the test ends before the answer
            super()._run()
        self.worker.model.close()

    def hear(self, kind):
        return self.replies.pop(0) if kind == "reply" and self.replies else super().hear(kind)

    def begin_long(self):
        """Return when an answer that never ends has begun."""
        self.ask("long", tokens=NEVER_ENDS)
        self.wait_for_steps(2)

    def wait_for_steps(self, count):
        """Return when the running answer has made so many steps more; what is told meanwhile is kept."""
        end = self.log.count("step") + count
        while self.log.count("step") < end:
            assert self.channel.poll(WAIT_S), "the answer stands still"
            message = self.channel.receive()
            if message["say"] == "reply":
                self.replies.append(message)
            elif message["say"] == "events":
                self.events += map(event_from_message, message["events"])


@pytest.fixture
def running(monkeypatch):
    made = Recorded(settings_of({}) | {"request": replace(REQUEST, context_tokens=CONTEXT).to_json()}, monkeypatch)
    yield made
    made.close()


def load(running, name, path):
    running.call("load_adapter", name=name, path=str(path))
    return running.hear("reply")


def test_a_step_follows_each_weight_that_a_new_adapter_needs_and_its_first_use_needs_none(running):
    running.begin_long()
    assert load(running, "dora", DORA)["value"]["adapters"] == ["dora"]
    log = list(running.log)
    first, last = log.index("weight"), len(log) - log[::-1].index("weight")
    assert log.count("weight") > 10
    assert all(pair != ("weight", "weight") for pair in zip(log[first:last], log[first + 1 : last], strict=False))
    running.log.clear()
    running.ask("with it", tokens=3, adapter="dora")
    assert running.end_of("with it").kind == "done"
    assert "weight" not in running.log and not any(event.job_id == "long" and event.kind == "done" for event in running.events)


def test_an_answer_goes_on_while_the_files_of_an_adapter_or_their_dates_cannot_be_read_yet(running, monkeypatch):
    may_go_on = threading.Event()

    def blocking(work):
        def blocked(*args, **options):
            if threading.current_thread() is not threading.main_thread():
                assert may_go_on.wait(WAIT_S)
            return work(*args, **options)

        return blocked

    monkeypatch.setattr(new_adapters, "files_stamp", blocking(new_adapters.files_stamp))
    monkeypatch.setattr(file, "_not_finite", blocking(file._not_finite))
    running.begin_long()
    running.call("load_adapter", name="style", path=str(STYLE))
    running.wait_for_steps(10)
    may_go_on.set()
    assert running.hear("reply")["value"]["adapters"] == ["style"]


def test_an_answer_goes_on_while_an_image_comes_through_the_pipe(running):
    running.begin_long()
    connection = running.channel._connection
    connection.send_bytes(json.dumps({"message": {"do": "cancel", "id": None}, "blobs": [["id"]]}).encode())
    running.wait_for_steps(10)
    connection.send_bytes(b"all of it")
    running.wait_for_steps(2)


def test_an_answer_goes_on_while_the_vocabulary_is_read_for_the_first_answer_to_a_schema(running, monkeypatch):
    may_go_on, grammar = threading.Event(), prompt_inputs.Grammar

    def blocked(*args):
        assert may_go_on.wait(WAIT_S)
        return grammar(*args)

    monkeypatch.setattr(prompt_inputs, "Grammar", blocked)
    running.begin_long()
    running.ask("json", tokens=3, schema={"type": "object"})
    running.wait_for_steps(10)
    assert not any(event.job_id == "json" for event in running.events)
    may_go_on.set()
    assert running.end_of("json").kind in ("done", "error")


def test_changed_files_are_prepared_between_steps_too(running, tmp_path):
    shutil.copytree(STYLE, tmp_path / "a")
    assert "value" in load(running, "a", tmp_path / "a")
    running.begin_long()
    running.log.clear()
    held = running.worker.engine.shelf.read(DORA, "a")
    running.worker.adapters.watcher.read_again.put(("a", held))
    for _ in range(20):
        running.wait_for_steps(10)
        if running.worker.engine.shelf.reloads:
            break
    log = [entry for entry in running.log if entry in ("step", "weight")]
    assert running.worker.engine.shelf.reloads == 1 and log.count("weight") > 10
    assert all(pair != ("weight", "weight") for pair in zip(log, log[1:], strict=False))


def test_an_adapter_that_cannot_be_prepared_is_refused_and_the_answer_goes_on(running, monkeypatch):
    running.begin_long()

    def fails(*_):
        raise torch.OutOfMemoryError("no")
        yield

    monkeypatch.setattr(base_values, "_row_norms", fails)
    assert load(running, "dora", DORA)["error"]["class"] == "DeviceError"
    running.wait_for_steps(5)
    monkeypatch.undo()
    assert "value" in load(running, "dora", DORA)  # its name is free


def test_adapters_of_the_start_are_prepared_before_anybody_asks(monkeypatch):
    read, done = [], threading.Event()
    norms = base_values._row_norms
    step = AdapterQueue.step

    def counted(*args):
        read.append(threading.current_thread())
        return (yield from norms(*args))

    def finished(self, *arguments, **options):
        step(self, *arguments, **options)
        if not self:
            done.set()

    monkeypatch.setattr(base_values, "_row_norms", counted)
    monkeypatch.setattr(AdapterQueue, "step", finished)
    running = Running(settings_of({"style": STYLE, "dora": DORA}, kept=["style"], resident_limit=2))
    assert done.wait(WAIT_S)
    assert len(read) > 10
    shelf = running.worker.engine.shelf
    assert all(held in shelf.model._base_values for held in shelf.held)
    running.close()


PIECES = 40


@pytest.fixture
def slowly(monkeypatch, tmp_path):
    """A worker with three adapters in host memory, each with many pieces to prepare that are recorded beside the steps."""
    log, prepare, made, may_begin = [], LoadedModel.adapter_pieces, [], threading.Event()
    folders = {}
    for name in ("first", "second", "new"):
        folders[name] = shutil.copytree(STYLE, tmp_path / name)
        config = json.loads((folders[name] / "adapter_config.json").read_text())
        config["lora_alpha"] += len(folders)  # else it is one adapter under several names
        (folders[name] / "adapter_config.json").write_text(json.dumps(config))

    def pieces(self, held):
        if held in self._base_values:
            return
        while held.spec.file.folder.name in folders and not may_begin.is_set():
            yield
        for _ in range(PIECES):
            log.append(held.spec.file.folder.name)
            yield
        yield from prepare(self, held)

    monkeypatch.setattr(LoadedModel, "adapter_pieces", pieces)
    at_start = {"style": STYLE, "first": folders["first"], "second": folders["second"]}
    more = {"request": replace(REQUEST, context_tokens=CONTEXT).to_json(), "resident_limit": 1}
    made.append(Recorded(settings_of(at_start, **more), monkeypatch))
    made[0].log, made[0].folders, made[0].may_begin = log, folders, may_begin
    yield made[0]
    made[0].close()


def test_a_client_waits_for_none_of_the_adapters_of_the_start(slowly):
    slowly.begin_long()
    slowly.call("load_adapter", name="new", path=str(slowly.folders["new"]))
    waiting.until(lambda: any(one.urgency == Urgency.AWAITED for one in list(slowly.worker.adapters.waiting._waiting)))
    slowly.may_begin.set()
    assert "new" in slowly.hear("reply")["value"]["adapters"]
    log = list(slowly.log)
    assert log.count("new") == PIECES > log.count("second")
    assert not {"first", "second"} & set(log[log.index("new") : len(log) - log[::-1].index("new")])


def test_a_request_waits_for_its_adapter_and_for_none_before_it_and_nobody_waits_for_more_than_a_piece(slowly):
    slowly.begin_long()
    slowly.ask("with it", tokens=3, adapter="second")
    waiting.until(lambda: slowly.worker.scheduler.uses("second"))
    slowly.may_begin.set()
    assert slowly.end_of("with it").kind == "done"
    log = list(slowly.log)
    assert log.count("second") == PIECES > log.count("first")
    assert "first" not in log[log.index("second") : len(log) - log[::-1].index("second")]
    assert ("second", "second") not in set(zip(log, log[1:], strict=False))  # a step of the long answer between them


def test_a_draining_worker_prepares_only_what_a_request_waits_for(slowly):
    slowly.ask("with it", tokens=8, adapter="second")
    waiting.until(lambda: slowly.worker.scheduler.uses("second"))
    slowly.channel.send({"do": "drain"})
    waiting.until(lambda: slowly.worker.is_draining)
    slowly.may_begin.set()
    assert slowly.end_of("with it").kind == "done"
    log = list(slowly.log)
    assert log.count("second") == PIECES and set(log[log.index("second") :]) == {"second", "step"}


def test_a_streamed_head_is_compared_though_another_block_takes_its_buffer_between_pieces(monkeypatch):
    weight = torch.randn(12, 8)
    whole = dict(zip(("weight", "scale"), int8_head.quantize_rows(weight), strict=True))
    buffer = {name: value.clone() for name, value in whole.items()}

    def opened():
        for name, value in whole.items():
            buffer[name].copy_(value)
        return SimpleNamespace(parts=buffer)

    monkeypatch.setattr(int8_head, "HEAD_CHUNK_VALUES", 32)
    leaf = SimpleNamespace(quant_kind=base_values.HEAD8, packed=opened, weight=weight)
    for saved, expected in ((weight, True), (weight + torch.eye(12, 8), False)):
        comparison, pieces = base_values._equals_linear(leaf, {"weight": saved}, torch.device("cpu")), 0
        try:
            while True:
                next(comparison)
                pieces += 1
                for value in buffer.values():
                    value.zero_()
        except StopIteration as end:
            assert end.value is expected and (pieces == 3 or not expected)


def test_a_changed_adapter_that_fails_in_an_unknown_way_does_not_end_the_worker():
    def fails():
        raise ValueError("in the middle of a piece")

    new_adapters._changed("style", fails)
    new_adapters._changed("style", lambda: None)
