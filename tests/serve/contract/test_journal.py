"""What is written down: lines with time, level and id, in two forms; a request's id in its answer, and its traceback under it."""

import gc
import json
import logging
import os
import re
import shlex
import sys
import threading
from pathlib import Path

import pytest

from tests.raised import refused
from tests.serving import MockPool, client, words
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.serve.contract import log
from trimtab.serve.scheduling.scheduler import MistakeError, error_event

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "a secret message"}]}
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


@pytest.fixture
def lines(monkeypatch):
    """Return a function that sets the journal up in a form; it returns the lines written since."""
    loggers = [logging.getLogger(name) for name in ("trimtab", "uvicorn")]
    before = [(one.handlers[:], one.propagate, one.level) for one in loggers]
    monkeypatch.setenv(log.FORMAT_VARIABLE, "")
    monkeypatch.setenv(log.LEVEL_VARIABLE, "")
    written, here = [], threading.get_ident()

    def set_up(form, level="info"):
        gc.collect()  # what an earlier test left may write from here as it goes
        log.set_up(form, level)
        (handler,) = logging.getLogger("trimtab").handlers
        # A thread that an earlier test left may write too: in no request, and not from here.
        handler.emit = lambda record: (
            written.append(handler.format(record))
            if record.thread == here or log.request_id() else None
        )  # fmt: skip
        return written

    yield set_up
    for one, (handlers, propagate, level) in zip(loggers, before):
        one.handlers[:], one.propagate = handlers, propagate
        one.setLevel(level)


class Broken(MockPool):
    def resolve(self, model_id):
        raise ZeroDivisionError("a mistake of ours")


def test_a_request_is_one_line_of_json_without_what_it_says(lines):
    written = lines("json")
    found = client(MockPool(lambda job: words(job, "fine"))).post(
        "/v1/chat/completions?key=abc", json=CHAT, headers={"x-request-id": "mine-1"}
    )
    assert found.headers["x-request-id"] == "mine-1"
    (line,) = [json.loads(text) for text in written]
    assert TIME.fullmatch(line["time"])
    assert (line["level"], line["message"], line["request_id"]) == ("info", "request", "mine-1")
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/chat/completions", 200)
    assert (line["model"], line["ended"]) == ("demo", "done") and line["seconds"] >= 0 and "prompt_tokens" in line
    assert "secret" not in written[0] and "fine" not in written[0] and "abc" not in written[0]


def test_text_leaves_out_what_has_no_value(lines):
    """The request is for the base and without a named key: `key=None` would read as a key of that name."""
    written = lines("text")
    found = client(MockPool(lambda job: words(job, "fine"))).post("/v1/chat/completions", json=CHAT)
    (line,) = [one for one in written if found.headers["x-request-id"] in one]
    assert " model=demo ended=done " in line and "None" not in line and "adapter=" not in line and "key=" not in line


def test_a_request_is_one_line_of_text(lines):
    written = lines("text")
    found = client(MockPool()).post("/v1/chat/completions", json={**CHAT, "model": "none\nsuch"})
    (line,) = [one for one in written if found.headers["x-request-id"] in one]
    when, level, word, *fields = shlex.split(line)
    assert TIME.fullmatch(when) and (level, word) == ("INFO", "request")
    values = dict(field.split("=", 1) for field in fields)
    assert values["request_id"] == found.headers["x-request-id"]
    assert values["status"] == "404"
    assert (values["field"], values["reason"]) == ("model", "is not served here")
    found = client(MockPool()).post("/v1/chat/completions", content="{}")  # what curl sends without a type
    (line,) = [one for one in written if found.headers["x-request-id"] in one]
    assert " status=415 " in line and ' reason="Send JSON: Content-Type: application/json' in line


@pytest.mark.parametrize("given", ["", "a b", "x" * 65, "a\tb", "é", "1;2"])
def test_an_id_that_is_not_plain_is_replaced(lines, given):
    lines("json")
    found = client(MockPool()).get("/health", headers={"x-request-id": given.encode("utf-8")})
    assert re.fullmatch(r"[0-9a-f]{32}", found.headers["x-request-id"])


@pytest.mark.parametrize("form", log.FORMATS)
def test_the_id_of_a_500_finds_its_traceback(lines, form):
    written = lines(form)
    found = client(Broken(), raises=False).post("/v1/chat/completions", json=CHAT)
    error = found.json()["error"]
    assert found.status_code == 500 and error["fields"]["error_id"] == found.headers["x-request-id"]
    assert error["fields"]["error_id"] in error["message"]
    (trace,) = [text for text in written if "ZeroDivisionError" in text]
    assert error["fields"]["error_id"] in trace and "Traceback" in trace
    if form == "json":
        assert json.loads(trace)["error_id"] == error["fields"]["error_id"]
        assert "a mistake of ours" in json.loads(trace)["traceback"]
    assert "mistake of ours" not in found.text


def test_a_mistake_of_the_worker_names_where_its_traceback_stands(lines):
    written = lines("json")  # as a worker writes, in the form of the process that started it
    try:
        raise ZeroDivisionError("deep inside")
    except ZeroDivisionError as exc:
        error_id = log.write_traceback(exc, "a mistake while answering")
    found = client(MockPool(lambda job: [error_event(job.id, MistakeError(error_id))])).post("/v1/chat/completions", json=CHAT)
    assert found.status_code == 500 and found.json()["error"]["fields"]["error_id"] == error_id
    assert "deep inside" in next(text for text in written if error_id in text)


def test_monitoring_is_written_for_who_debugs_alone(lines):
    written = lines("text")
    for path in log.QUIET_PATHS:
        client(MockPool()).get(path)
    assert written == []
    logging.getLogger("trimtab").setLevel("DEBUG")
    client(MockPool()).get("/health")
    assert len(written) == 1


def test_a_line_has_no_line_end_of_a_clients(lines):
    written = lines("text")
    client(MockPool()).get("/v1/models/a%0A2026-01-01T00:00:00.000Z%20ERROR%20forged")
    assert len(written) == 1 and "\n" not in written[0]


def test_statuses_are_counted_by_route_and_no_path_of_a_clients_is_a_series(lines):
    lines("json")
    found = client(pool := MockPool(lambda job: words(job, "fine")))
    for path in ("/v1/models", "/v1/models/none", "/v1/models/other", "/nowhere", "/elsewhere"):
        found.get(path)
    text = found.get("/metrics").text
    counted = dict(re.findall(r'^trimtab_http_responses_total\{path="([^"]+)",status="\d+"\} (\S+)$', text, re.M))
    assert counted == {"/v1/models": "1.0", "/v1/models/{name:path}": "2.0", "other": "2.0"} and pool.refreshes == 1


@pytest.mark.parametrize(("field", "form", "level"), [("log_format", "xml", "info"), ("log_level", "text", "loud")])
def test_an_unknown_form_or_level_is_refused(field, form, level):
    assert refused(log.set_up, form, level).field == field


# What a client chooses, and where lines go ----------------------------------------------------------------------------


@pytest.mark.parametrize("form", log.FORMATS)
def test_no_client_makes_a_long_line(lines, form):
    written = lines(form)
    found = client(MockPool())
    long = "A" * 5000
    answer = found.request(long, "/v1/models", headers={"user-agent": long, "x-request-id": long, "traceparent": long})
    assert answer.status_code == 405 and len(answer.text) < 300
    found.get(f"/v1/models/{long}?{long}", headers={"referer": long})
    found.post("/v1/completions", json={"model": long, "prompt": "a", "user": long})
    names = {f"{'n' * 60}{number}": 1.0 for number in range(60)}
    mixed = MockPool(adapters=("style", "+".join(f"{name}:1" for name in names)))
    client(mixed).post("/v1/chat/completions", json={**CHAT, "adapter": names, "user": "u" * 500})
    assert len(written) == 4 and max(map(len, written)) < 1000 and "A" * 300 not in "".join(written)
    assert "Method Not Allowed" in written[0] and "does not take" not in written[0]


@pytest.mark.parametrize("form", log.FORMATS)
def test_an_error_that_quotes_a_client_is_cut(lines, form):
    written = lines(form)
    try:
        raise ValueError("B" * 10**6)
    except ValueError as exc:
        log.write_traceback(exc, "C" * 10**6)
    logging.getLogger("trimtab.serve").warning("%s", "D" * 10**6, extra={"fields": {"field": "E" * 10**6}})
    assert len(written) == 2 and max(map(len, written)) < 100_000 and "letters)" in written[0]


def test_a_text_is_cut_in_its_middle():
    assert log.short("abcdef", 6) == "abcdef" and log.short("abcdefg", 6) == "abc...(1 letters)...efg"


FULL = Path("/dev/full")


def gone():
    """Return a stream whose reader has left."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w", buffering=1)


def closed():
    stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    stream.close()
    return stream


STREAMS = {
    "a full disk": lambda: open(FULL, "w", buffering=1, encoding="utf-8"),  # noqa: SIM115
    "a reader that left": gone, "a closed stream": closed, "no stream": lambda: None,
}  # fmt: skip


@pytest.fixture
def streams(monkeypatch):
    def use(name):
        if "full" in name and not FULL.exists():
            pytest.skip("this system has no /dev/full")
        for stream in ("stdout", "stderr"):
            monkeypatch.setattr(sys, stream, STREAMS[name]())

    return use


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("form", log.FORMATS)
def test_an_output_that_cannot_be_written_fails_nothing(streams, lines, name, form):
    streams(name)
    log.keep_streams()
    lines(form)
    del logging.getLogger("trimtab").handlers[0].emit  # the real one, to the stream
    logging.getLogger("trimtab.serve").error("a line")
    for stream in (sys.stdout, sys.stderr):
        print("a line", file=stream, flush=True)
        stream.writelines(["one", "two\n"])
    log.keep_streams()
    assert not isinstance(sys.stderr._stream, log.Unfailing)
    assert client(MockPool()).post("/v1/chat/completions", json=CHAT).status_code == 200


def test_a_stream_that_can_be_written_again_is_written(monkeypatch):
    class Disk:
        is_full, text = True, ""

        def write(self, text):
            if self.is_full:
                raise OSError(28, "No space left on device")
            self.text += text

    disk = Disk()
    stream = log.Unfailing(disk)
    stream.write("lost\n")
    disk.is_full = False
    stream.write("written\n")
    assert disk.text == "written\n" and stream.is_full is False


@pytest.mark.parametrize("name", ["a full disk", "a reader that left"])
@pytest.mark.parametrize("flags", [[], ["--json"], ["--log-format", "json"]])
def test_the_command_says_what_it_can_and_serves(streams, monkeypatch, lines, name, flags):
    from trimtab.cli import main
    from trimtab.cli.commands import serve

    streams(name)
    said = []

    def run(models, settings, together, say, reread):
        say("http://127.0.0.1:8000")
        said.append(1)
        return False

    monkeypatch.setattr(serve, "_serve", run)
    assert main.main(["serve", str(DEMO / "base"), "--device", "cpu", *flags]) == 0 and said == [1]
