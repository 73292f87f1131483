"""The worker's own loop on a real model: adapters read while it answers, bad ones refused, and what it comes back with."""

import json
import multiprocessing
import shutil
import threading
from contextlib import suppress
from dataclasses import replace

import pytest
import transformers

from tests import waiting
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine.prefill.warm_up import CaptureAhead
from trimtab.engine.tiers.reader import Reader
from trimtab.errors import AdapterError, DeviceError, RequestError
from trimtab.request import GenerateRequest, LoadRequest
from trimtab.serve.adapters.new_adapters import LOOK_S as WATCH_S
from trimtab.serve.contract.job import Job
from trimtab.serve.worker import worker
from trimtab.serve.worker.ipc import BEAT_S, Channel, Patience, event_from_message, job_to_message
from trimtab.serve.worker.worker import _Worker

WAIT_S = 60
REQUEST = LoadRequest(model=str(DEMO / "base"), quant="none", dtype="float32", context_tokens=384, audio_s=1.0, device="cpu")


def settings_of(adapters, **more):
    return {
        "request": REQUEST.to_json(), "adapters": {name: str(path) for name, path in adapters.items()}, "rows": 2,
        "queue_limit": 8, **more,
    }  # fmt: skip


class Running:
    """A worker on a thread of this process, and the other end of its pipe."""

    def __init__(self, settings):
        here, there = multiprocessing.Pipe()
        self.channel, self.worker = Channel(here), _Worker(Channel(there), settings)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self.ready = self.hear("ready")
        self.events, self.calls = [], 0

    def _run(self):
        try:
            self.worker.run()
        except (EOFError, OSError):
            self.worker.model.close()

    def hear(self, kind):
        while self.channel.poll(WAIT_S):
            message = self.channel.receive()
            if message["say"] == kind:
                return message
            if message["say"] == "events":
                self.events += [event_from_message(found) for found in message["events"]]
        raise AssertionError(f"no {kind} came")

    def call(self, what, **arguments):
        self.calls += 1
        self.channel.send({"do": "call", "id": self.calls, "what": what, **arguments})

    def ask(self, name, tokens=20, **options):
        job = Job(name, {"text": "three orange"}, GenerateRequest(max_new_tokens=tokens), **options)
        self.channel.send({"do": "submit", "job": job_to_message(job)})

    def end_of(self, name):
        while True:
            for event in self.events:
                if event.job_id == name and event.kind in ("done", "error"):
                    return event
            message = self.hear("events")
            self.events += [event_from_message(found) for found in message["events"]]

    def close(self):
        self.channel.close()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    found = Running(settings_of({"style": DEMO / "adapters" / "style"}))
    yield found
    found.close()


def test_the_loop_beats_while_nobody_asks(running):
    for _ in range(2):
        assert running.hear("events")["events"] == []
    assert Patience().unresponsive_s > BEAT_S + WATCH_S  # its longest wait, and the beat behind it


def test_graphs_are_captured_after_a_while_without_requests_and_not_right_behind_an_answer_or_a_load(running, monkeypatch):
    captured = []
    monkeypatch.setattr(type(running.worker.engine), "has_more_to_capture", property(lambda self: len(captured) < 2))
    monkeypatch.setattr(running.worker.engine, "capture_more", lambda: captured.append(threading.get_ident()))
    monkeypatch.setattr(worker, "CAPTURING_S", WAIT_S)
    for name in ("one", "another"):  # the first may find a worker that waited before
        running.ask(name, tokens=2)
        running.end_of(name)
        captured.clear()
    for tokens in (1, 2):
        running.ask(f"behind {tokens}", tokens=tokens)
        assert running.end_of(f"behind {tokens}").kind == "done" and captured == []
    running.call("load_adapter", name="behind", path=str(DEMO / "adapters" / "specialist"))
    assert "behind" in running.hear("reply")["value"]["adapters"]
    running.call("unload_adapter", name="behind")
    running.hear("reply")
    assert captured == []
    monkeypatch.setattr(worker, "CAPTURING_S", 0.01)
    running.ask("last", tokens=2)
    running.end_of("last")
    waiting.until(lambda: len(captured) == 2)


def test_work_that_may_take_long_is_announced_before_it_begins(running, monkeypatch):
    running.ask("warm")
    running.end_of("warm")
    monkeypatch.setattr(running.worker.pulse, "unit_s", dict.fromkeys(running.worker.pulse.unit_s, 7.0))
    running.ask("long", tokens=1)
    assert running.hear("busy")["most_s"] >= 7.0 and running.end_of("long").kind == "done"


def test_an_adapter_is_read_beside_the_batch(running, monkeypatch):
    shelf, may_go_on = running.worker.engine.shelf, threading.Event()
    read = shelf.read

    def slow(path, name):
        assert may_go_on.wait(WAIT_S)
        return read(path, name)

    monkeypatch.setattr(shelf, "read", slow)
    running.call("load_adapter", name="specialist", path=str(DEMO / "adapters" / "specialist"))
    running.call("load_adapter", name="specialist", path=str(DEMO / "adapters" / "specialist"))
    assert "being loaded" in running.hear("reply")["error"]["message"]
    running.ask("meanwhile")
    assert running.end_of("meanwhile").kind == "done"  # while the files are still being read
    may_go_on.set()
    assert running.hear("reply")["value"]["adapters"] == ["specialist", "style"]
    running.ask("with it", adapter="specialist")
    assert running.end_of("with it").kind == "done"
    running.call("unload_adapter", name="specialist")
    numbers = running.hear("reply")["value"]
    assert numbers["adapters"] == ["style"]
    assert numbers["counts"]["by_adapter"]["(unloaded)"] and "specialist" not in numbers["counts"]["by_adapter"]


def test_what_cannot_be_loaded_is_refused_and_the_worker_goes_on(running, monkeypatch, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{")
    running.call("load_adapter", name="bad", path=str(tmp_path))
    assert running.hear("reply")["error"]["class"] in ("AdapterError", "CheckpointError")
    shelf = running.worker.engine.shelf
    monkeypatch.setattr(shelf, "read", lambda path, name: {}["nobody thought of this"])
    running.call("load_adapter", name="odd", path=str(tmp_path))
    assert running.hear("reply")["error"]["class"] == "MistakeError"
    running.call("no such call")
    assert running.hear("reply")["error"]["fields"]["field"] == "what"
    running.call("numbers")
    assert running.hear("reply")["value"]["adapters"] == ["style"]
    running.ask("after", adapter="style")
    assert running.end_of("after").kind == "done"


def test_an_adapter_whose_reading_gets_no_thread_is_that_calls_error_alone(running, monkeypatch):
    start = threading.Thread.start

    def no_thread(thread):
        if thread.name == "trimtab-read":
            raise RuntimeError("can't start new thread")
        start(thread)

    path = str(DEMO / "adapters" / "specialist")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        running.call("load_adapter", name="specialist", path=path)
        assert running.hear("reply")["error"]["class"] == "MistakeError"
    running.call("load_adapter", name="specialist", path=path)  # the name is free again
    assert running.hear("reply")["value"]["adapters"] == ["specialist", "style"]
    running.call("unload_adapter", name="specialist")
    assert running.hear("reply")["value"]["adapters"] == ["style"]


def test_a_worker_comes_back_with_its_plan_and_without_adapters_whose_files_are_gone(tmp_path):
    for name in ("style", "specialist", "rslora-dora"):
        shutil.copytree(DEMO / "adapters" / name, tmp_path / name)
    adapters = {name: tmp_path / name for name in ("style", "rslora-dora")}
    first = Running(settings_of(adapters, resident_limit=2))
    plan = first.ready["plan"]
    first.close()
    later = {**adapters, "specialist": tmp_path / "specialist"}
    second = Running(settings_of(later, resident_limit=2, plan=plan))
    assert second.ready["plan"] == plan
    assert second.ready["adapters"] == ["rslora-dora", "specialist", "style"] and second.ready["lost"] == []
    second.close()
    shutil.rmtree(tmp_path / "rslora-dora")
    (tmp_path / "specialist" / "adapter_model.safetensors").write_bytes(b"cut")
    third = Running(settings_of(later, resident_limit=2, plan=plan))
    assert third.ready["adapters"] == ["style"] and third.ready["lost"] == ["rslora-dora", "specialist"]
    third.ask("a", adapter="specialist")
    third.ask("b", adapter="style")
    assert third.end_of("a").error["class"] == "AdapterError" and third.end_of("b").kind == "done"
    third.close()


def test_steps_are_captured_once_and_before_the_worker_says_that_it_is_ready(monkeypatch):
    told, prepare, send = [], CaptureAhead.prepare, Channel.send

    def prepared(self, expected=(), *, first=False):
        assert first
        told.append([held.spec.file.folder.name for held in expected])
        prepare(self, expected, first=first)

    def sent(self, message):
        told.append(message.get("say") or message.get("do"))
        send(self, message)

    monkeypatch.setattr(CaptureAhead, "prepare", prepared)
    monkeypatch.setattr(Channel, "send", sent)
    adapters = {name: DEMO / "adapters" / name for name in ("style", "specialist")}
    running = Running(settings_of(adapters, resident_limit=1))
    running.ask("one", adapter="style")
    assert running.end_of("one").kind == "done"
    running.close()
    calls = [entry for entry in told if isinstance(entry, list)]
    assert calls == [["style", "specialist"]]  # those that wait in host memory too
    assert told.index(calls[0]) < told.index("ready")
    assert (running.ready["captures"], running.ready["capture_s"]) == (0, 0.0)


@pytest.mark.parametrize("fails", [False, True])
def test_other_steps_are_captured_after_that_while_nothing_is_asked_and_an_error_ends_that_alone(fails, monkeypatch):
    captured, tried, prepare = [], [], CaptureAhead.prepare

    def prepared(self, expected=(), *, first=False):
        prepare(self, expected, first=first)
        self.left = [("steps", [size]) for size in (4, 2)]

    def more(self, expected=()):
        assert not self.batch.active
        left, self.left = self.left, []
        tried.append(left[0])
        if fails:
            raise DeviceError("no memory", device="cuda:0")
        captured.append(left[0])
        self.left = left[1:]

    monkeypatch.setattr(CaptureAhead, "prepare", prepared)
    monkeypatch.setattr(CaptureAhead, "prepare_more", more)
    running = Running(settings_of({}))
    for name in ("one", "two"):
        running.ask(name)
        assert running.end_of(name).kind == "done"
        waiting.until(lambda: len(tried) >= (1 if fails else 2))
    running.close()
    assert tried == [("steps", [4]), ("steps", [2])][: 1 if fails else 2] and captured == ([] if fails else tried)


def test_a_request_that_fails_while_it_is_taken_is_answered_and_the_others_go_on(monkeypatch):
    running = Running(settings_of({}))
    engine = running.worker.engine
    prepare = engine.prepare

    def fail(job):
        if job.id == "odd":
            raise ZeroDivisionError("a header nobody thought of")
        return prepare(job)

    monkeypatch.setattr(engine, "prepare", fail)
    running.ask("before")
    running.ask("odd")
    error = running.end_of("odd").error
    assert error["class"] == "MistakeError" and "header" not in error["message"]
    # What cannot be read as a job is answered too.
    job = job_to_message(Job("unread", {"text": "a"}, GenerateRequest(max_new_tokens=2)))
    running.channel.send({"do": "submit", "job": {**job, "unknown": 1}})
    assert running.end_of("unread").error["class"] == "MistakeError"
    running.channel.send({"do": "cancel", "id": "odd"})
    assert running.end_of("before").kind == "done"
    scheduler = running.worker.scheduler
    running.ask("after", tokens=2)
    assert running.end_of("after").kind == "done"
    assert scheduler.is_idle and not scheduler.uses(None) and scheduler.waiting == 0
    running.close()


def messages_of(channel):
    """Return what a worker said until it hung up, as events and as replies by call."""
    events, replies = [], {}
    with suppress(EOFError):
        while channel.poll(WAIT_S):
            message = channel.receive()
            if message["say"] == "events":
                events += [event_from_message(found) for found in message["events"]]
            elif message["say"] == "reply":
                assert message["id"] not in replies
                replies[message["id"]] = message
    return events, replies


def test_a_draining_worker_answers_loads_under_way_and_ends_though_their_files_cannot_be_read(monkeypatch):
    adapters, may_go_on = DEMO / "adapters", threading.Event()
    running = Running(settings_of({"style": adapters / "style"}))
    served, reading, preparing = running.worker, threading.Event(), threading.Event()
    read, pieces = served.engine.shelf.read, served.model.adapter_pieces

    def slow(path, name):
        if name == "unread":
            reading.set()
            assert may_go_on.wait(WAIT_S)
        return read(path, name)

    def endless(held):
        preparing.set()
        while not may_go_on.is_set():
            yield
        yield from pieces(held)

    monkeypatch.setattr(served.engine.shelf, "read", slow)
    monkeypatch.setattr(served.adapters, "_pieces", endless)
    running.call("load_adapter", name="unread", path=str(adapters / "specialist"))
    running.call("load_adapter", name="unprepared", path=str(adapters / "rslora-dora"))
    assert reading.wait(WAIT_S) and preparing.wait(WAIT_S)
    running.ask("last", tokens=4)
    running.channel.send({"do": "drain"})
    running.call("load_adapter", name="late", path=str(adapters / "specialist"))
    running.thread.join(WAIT_S)
    assert not running.thread.is_alive()
    may_go_on.set()
    served.channel.close()
    events, replies = messages_of(running.channel)
    assert {call_id: reply["error"]["class"] for call_id, reply in replies.items()} == dict.fromkeys((1, 2, 3), "StoppingError")
    assert [event.kind for event in events if event.job_id == "last"][-1] == "done"
    running.channel.close()


def test_what_is_in_the_pipe_when_a_draining_worker_ends_is_answered():
    here, there = multiprocessing.Pipe()
    media = {"kinds": ["text", "audio"], "request_pixels": 1, "request_audio_s": 0.25, "all_body_bytes": 2**20}
    channel, served = Channel(here), _Worker(Channel(there), settings_of({}, media=media))
    assert (served.engine.inputs.audio_s, served.plan.request.audio_s) == (0.25, 1.0)
    channel.send({"do": "drain"})
    channel.send({"do": "call", "id": 1, "what": "numbers"})
    channel.send({"do": "call", "id": 2, "what": "load_adapter", "name": "a", "path": str(DEMO / "adapters" / "style")})
    channel.send({"do": "submit", "job": job_to_message(Job("late", {"text": "a"}, GenerateRequest(max_new_tokens=2)))})
    served.run()
    served.channel.close()
    events, replies = messages_of(channel)
    assert [replies[call_id]["error"]["class"] for call_id in (1, 2)] == ["StoppingError"] * 2
    assert [(event.job_id, event.error["class"]) for event in events] == [("late", "StoppingError")]
    channel.close()


def test_an_operator_is_told_of_a_bad_adapter_at_the_start(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(AdapterError):
        _Worker(Channel(multiprocessing.Pipe()[0]), settings_of({"bad": tmp_path}))


@pytest.mark.parametrize("rows", [1, None])
def test_a_family_that_cannot_be_batched_is_refused_before_weights_are_read(tmp_path, monkeypatch, rows):
    config = transformers.OpenAIGPTConfig(vocab_size=320, n_embd=64, n_layer=2, n_head=4, n_positions=128)
    transformers.OpenAIGPTLMHeadModel(config).save_pretrained(tmp_path)
    monkeypatch.setattr(Reader, "__init__", lambda *_: pytest.fail("weights are read"))
    request = replace(REQUEST, model=str(tmp_path), context_tokens=64).to_json()
    with pytest.raises(RequestError, match="OpenAIGPTLMHeadModel cannot be batched: ") as caught:
        _Worker(Channel(multiprocessing.Pipe()[0]), settings_of({}, rows=rows, request=request))
    assert (caught.value.field, caught.value.value) == ("model", str(tmp_path)) and "answer one at a time" in caught.value.hint


def test_a_worker_that_cannot_load_its_model_says_why_and_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(worker.signal, "signal", lambda *_: None)  # this process keeps its own
    monkeypatch.setattr(worker, "keep_streams", lambda: None)
    monkeypatch.setattr(Reader, "__init__", lambda *_: pytest.fail("weights are read"))
    shutil.copytree(DEMO / "base", tmp_path / "m", ignore=shutil.ignore_patterns("*token*"))
    here, there = multiprocessing.Pipe()
    with there, pytest.raises(SystemExit) as ended:
        worker.main(there, settings_of({}) | {"request": {**REQUEST.to_json(), "model": str(tmp_path / "m")}})
    channel, said = Channel(here), []
    with here, suppress(EOFError):
        while True:
            said.append(channel.receive())
    assert ended.value.code == 1 and said[-1]["say"] == "fatal"
    assert "has no tokenizer files" in said[-1]["error"]["message"] and said[-1]["error"]["class"] == "CheckpointError"


def test_a_start_is_sent_with_its_age(running, monkeypatch):
    prefill = running.worker.engine.prefill
    monkeypatch.setattr(running.worker.engine, "prefill", lambda *args: (waiting.hang(0.05), prefill(*args))[1])
    running.ask("aged", tokens=2)
    assert running.end_of("aged").kind == "done"
    (start,) = [event for event in running.events if (event.job_id, event.kind) == ("aged", "started")]
    assert 0.05 <= start.usage["ago_s"] < 5
