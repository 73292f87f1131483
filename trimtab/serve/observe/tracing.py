"""What does the OpenTelemetry trace of a request hold?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trimtab.errors import RequestError
from trimtab.serve.contract.log import Lines, list_of, value_of

HINT = "pip install 'trimtab[otel]'"
# Field of a log line -> attribute of the span.
ATTRIBUTES = {
    "method": "http.request.method", "path": "url.path", "status": "http.response.status_code", "model": "gen_ai.request.model",
    "adapter": "trimtab.adapter", "key": "trimtab.key", "ended": "trimtab.ended", "request_id": "trimtab.request_id",
    "prompt_tokens": "gen_ai.usage.input_tokens", "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "trimtab.cached_tokens",
}  # fmt: skip
SECOND_NS = 1_000_000_000
# Other methods come from the client, and a span's name must not. OpenTelemetry's semantic conventions for HTTP spans,
# "Name".
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "CONNECT", "TRACE")


class Spans:
    """Makes a request's spans. tracer: OpenTelemetry's. close: writes the remaining spans, at the server's end. Spans are made from
    the log fields when a request has ended. A client's `traceparent` (W3C Trace Context) makes the request a part of its trace.
    Names follow OpenTelemetry's semantic conventions for HTTP and generative AI."""

    def __init__(self, tracer: Any, close: Callable[[], None] = lambda: None) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer, self._trace, self.close = tracer, trace, close
        self._propagator = TraceContextTextMapPropagator()

    def request(
        self, headers: Lines, route: str, fields: Mapping[str, Any], *, start_ns: int, end_ns: int,
        arrived_ns: int | None = None,
    ) -> str:  # fmt: skip
        """Make the spans of a request that has ended; returns the trace's id in hexadecimal.

        headers: in ASGI's form. fields: of the request's log line. Times are nanoseconds since 1970; arrived_ns: when
        its body had been read, the start of `queue_s` and `first_token_s`.
        """
        parent, state = value_of(headers, "traceparent"), list_of(headers, "tracestate")
        carrier = {"traceparent": parent.decode("latin-1"), "tracestate": state.decode("latin-1")} if parent else {}
        context = self._propagator.extract(carrier)
        attributes = {ATTRIBUTES[name]: value for name, value in fields.items() if name in ATTRIBUTES and value is not None}
        method = fields["method"] if fields["method"] in METHODS else "HTTP"
        span = self._tracer.start_span(
            f"{method} {route}", context=context, kind=self._trace.SpanKind.SERVER, start_time=start_ns,
            attributes={**attributes, "http.route": route},
        )  # fmt: skip
        if fields["status"] >= 500 or fields.get("ended") not in (None, "done", "cancelled"):
            span.set_status(self._trace.StatusCode.ERROR, str(fields.get("ended", "")))
        inside = self._trace.set_span_in_context(span)
        arrived_ns = start_ns if arrived_ns is None else arrived_ns
        marks = [arrived_ns + int(fields[name] * SECOND_NS) for name in ("queue_s", "first_token_s") if name in fields]
        # The time before the prompt, the prompt up to its first token, the tokens: as far as they exist.
        for name, begin, end in zip(("queue", "prompt", "decode"), [arrived_ns, *marks], [*marks, end_ns]):
            if marks and begin <= end:
                self._tracer.start_span(name, context=inside, start_time=begin).end(end_time=end)
        span.end(end_time=end_ns)
        return f"{span.get_span_context().trace_id:032x}"


def from_environment() -> Spans:
    """Return spans that are exported over HTTP, as the variables OTEL_EXPORTER_OTLP_* configure. Errors: RequestError if
    OpenTelemetry is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as exc:
        raise RequestError("OpenTelemetry is not installed", field="--otel", hint=HINT) from exc
    resource = Resource.create()
    if str(resource.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):  # no variable names it
        resource = resource.merge(Resource({"service.name": "trimtab"}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Spans(provider.get_tracer("trimtab"), provider.shutdown)
