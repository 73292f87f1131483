"""A trace per request, as OpenTelemetry's own exporter in memory sees it. Skipped where the package is not installed."""

import subprocess
import sys

import pytest
from starlette.testclient import TestClient

from tests.serving import MockPool, failed, words
from trimtab.errors import RequestError
from trimtab.serve.contract.job import Event
from trimtab.serve.contract.settings import Settings
from trimtab.serve.http.app import make_app
from trimtab.serve.observe.metrics import Metrics

SECRET = "what nobody else may read"
CHAT = {"model": "style", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 5}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def seen():
    """Return (a client, the spans that were finished)."""
    pytest.importorskip("opentelemetry.sdk.trace", reason="OpenTelemetry is not installed: pip install 'trimtab[otel]'")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from trimtab.serve.observe.tracing import Spans

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    def made(answers):
        app = make_app(MockPool(answers), Settings(), Metrics(), spans=Spans(provider.get_tracer("test")))
        return TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)

    return made, exporter.get_finished_spans


def by_name(spans):
    return {span.name: span for span in spans}


def test_a_request_is_a_span_with_its_parts_and_no_text(seen):
    made, finished = seen
    with made(lambda job: words(job, "a secret", " too")) as client:
        for stream in (False, True):
            assert client.post("/v1/chat/completions", json={**CHAT, "stream": stream}).status_code == 200
    spans = finished()
    assert len({span.context.trace_id for span in spans}) == 2
    one = by_name(spans[:4])
    root = one.pop("POST /v1/chat/completions")
    assert list(one) == ["queue", "prompt", "decode"] and root.kind.name == "SERVER" and root.parent is None
    assert all(span.parent.span_id == root.context.span_id for span in one.values())
    attributes = dict(root.attributes)
    assert (attributes["gen_ai.request.model"], attributes["trimtab.adapter"]) == ("demo", "style")
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (7, 2)
    assert (
        attributes["http.response.status_code"] == 200
        and attributes["trimtab.ended"] == "done"
        and attributes["trimtab.request_id"]
    )
    ends = [
        root.start_time,
        *(time for name in ("queue", "prompt", "decode") for time in (one[name].start_time, one[name].end_time)),
    ]
    assert ends == sorted(ends) and one["decode"].end_time == root.end_time and root.status.status_code.name == "UNSET"
    for span in spans:
        assert "secret" not in span.to_json() and SECRET not in span.to_json()


def test_a_clients_trace_goes_on(seen):
    made, finished = seen
    with made(lambda job: words(job, "Hi")) as client:
        for parent in (f"00-{TRACE}-{PARENT}-01", "no such thing"):
            client.post("/v1/chat/completions", json=CHAT, headers={"traceparent": parent})
    roots = [span for span in finished() if span.kind.name == "SERVER"]
    assert f"{roots[0].context.trace_id:032x}" == TRACE and f"{roots[0].parent.span_id:016x}" == PARENT
    assert roots[1].parent is None and f"{roots[1].context.trace_id:032x}" != TRACE


def test_what_fails_or_is_refused_is_a_span_too_and_what_is_polled_is_none(seen, caplog):
    made, finished = seen
    with caplog.at_level("INFO", logger="trimtab.serve.requests"), made(lambda job: [failed(job, "DeviceError")]) as client:
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 503
        assert client.post("/v1/chat/completions", json={**CHAT, "model": "nobody"}).status_code == 404
        assert client.get("/ready").status_code == client.get("/metrics").status_code == 200
    wrong, refused = finished()
    assert wrong.status.status_code.name == "ERROR" and wrong.attributes["trimtab.ended"] == "DeviceError"
    assert refused.status.status_code.name == "UNSET" and refused.attributes["http.response.status_code"] == 404
    lines = [record.fields for record in caplog.records if record.name == "trimtab.serve.requests"]
    assert [line["trace_id"] for line in lines] == [f"{span.context.trace_id:032x}" for span in (wrong, refused)]
    assert "_arrived" not in lines[0]


def test_an_answer_that_never_began_has_a_queue_alone(seen):
    made, finished = seen
    with made(lambda job: [Event(job.id, "started"), failed(job, "DeadlineError")]) as client:
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 504
    assert [span.name for span in finished()] == ["queue", "prompt", "POST /v1/chat/completions"]


def test_without_the_package_the_flag_is_refused_by_name():
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from trimtab.serve.observe.tracing import from_environment\n"
        "from_environment()"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode != 0 and "OpenTelemetry is not installed" in found.stderr and "trimtab[otel]" in found.stderr
    assert issubclass(RequestError, Exception)


@pytest.mark.parametrize(
    ("variables", "name"),
    [({}, "trimtab"), ({"OTEL_SERVICE_NAME": "svc"}, "svc"), ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=own,a=b"}, "own")],
)  # fmt: skip
def test_what_is_sent_is_what_the_variables_say(variables, name):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the exporter is not installed")
    import http.server
    import os
    import threading

    got = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = (
        "from trimtab.serve.observe.tracing import from_environment\n"
        "spans = from_environment()\n"
        "spans.request([], '/v1/x', {'method': 'POST', 'status': 200, 'model': 'demo'}, start_ns=1, end_ns=2)\n"
        "spans.close()"
    )
    environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}", **variables}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)
    server.shutdown()
    ((path, body),) = got
    assert path == "/v1/traces" and b"POST /v1/x" in body and b"demo" in body
    assert b"service.name\x12" + bytes([len(name) + 2, 10, len(name)]) + name.encode() in body and b"unknown_service" not in body
