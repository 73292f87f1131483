"""What is written down: lines with time, level and id, in two forms; a request's id in its answer, and its traceback under it."""

from __future__ import annotations

import json
import logging
import re

import pytest

from tests.serving import MockPool, client, words
from trimtab.errors import RequestError
from trimtab.serve import journal
from trimtab.serve.scheduler import MistakeError, error_event

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "a secret message"}]}
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


@pytest.fixture
def lines(monkeypatch):
    """Return a function that sets the journal up in a form; it returns the lines written since."""
    loggers = [logging.getLogger(name) for name in ("trimtab", "uvicorn")]
    before = [(one.handlers[:], one.propagate, one.level) for one in loggers]
    monkeypatch.setenv(journal.FORMAT_VARIABLE, "")
    monkeypatch.setenv(journal.LEVEL_VARIABLE, "")
    written = []

    def set_up(form, level="info"):
        journal.set_up(form, level)
        (handler,) = logging.getLogger("trimtab").handlers
        handler.emit = lambda record: written.append(handler.format(record))
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
    assert (line["model"], line["ended"]) == ("demo", "done")
    assert line["seconds"] >= 0 and "prompt_tokens" in line
    assert "secret" not in written[0] and "fine" not in written[0] and "abc" not in written[0]


def test_text_leaves_out_what_has_no_value(lines):
    """The request is for the base and without a named key: `key=None` would read as a key of that name."""
    written = lines("text")
    client(MockPool(lambda job: words(job, "fine"))).post("/v1/chat/completions", json=CHAT)
    (line,) = written
    assert " model=demo ended=done " in line and "None" not in line and "adapter=" not in line and "key=" not in line


def test_a_request_is_one_line_of_text(lines):
    written = lines("text")
    found = client(MockPool()).post("/v1/chat/completions", json={**CHAT, "model": "none\nsuch"})
    (line,) = written
    when, level, word, *fields = line.split(" ")
    assert TIME.fullmatch(when) and (level, word) == ("INFO", "request")
    values = dict(field.split("=", 1) for field in fields)
    assert values["request_id"] == found.headers["x-request-id"]
    assert values["status"] == "404"


@pytest.mark.parametrize("given", ["", "a b", "x" * 65, "a\tb", "é", "1;2"])
def test_an_id_that_is_not_plain_is_replaced(lines, given):
    lines("json")
    found = client(MockPool()).get("/health", headers={"x-request-id": given.encode("utf-8")})
    assert re.fullmatch(r"[0-9a-f]{32}", found.headers["x-request-id"])


@pytest.mark.parametrize("form", journal.FORMATS)
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
        error_id = journal.write_traceback(exc, "a mistake while answering")
    found = client(MockPool(lambda job: [error_event(job.id, MistakeError(error_id))])).post(
        "/v1/chat/completions", json=CHAT
    )
    assert found.status_code == 500
    assert found.json()["error"]["fields"]["error_id"] == error_id
    assert "deep inside" in next(text for text in written if error_id in text)


def test_monitoring_is_written_for_who_debugs_alone(lines):
    written = lines("text")
    for path in journal.QUIET_PATHS:
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
    found = client(MockPool(lambda job: words(job, "fine")))
    for path in ("/v1/models", "/v1/models/none", "/v1/models/other", "/nowhere", "/elsewhere"):
        found.get(path)
    text = found.get("/metrics").text
    counted = dict(re.findall(r'^trimtab_http_responses_total\{path="([^"]+)",status="\d+"\} (\S+)$', text, re.M))
    assert counted == {"/v1/models": "1.0", "/v1/models/{name:path}": "2.0", "other": "2.0"}


@pytest.mark.parametrize(("field", "form", "level"), [("log_format", "xml", "info"), ("log_level", "text", "loud")])
def test_an_unknown_form_or_level_is_refused(field, form, level):
    with pytest.raises(RequestError) as caught:
        journal.set_up(form, level)
    assert caught.value.field == field
