"""Metrics of the server, for Prometheus and for the page."""

from __future__ import annotations

import platform
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)  # fmt: skip

from trimtab._version import __version__
from trimtab.adapter_names import UNLOADED, label_of
from trimtab.process.packages import versions_of
from trimtab.serve.contract import log
from trimtab.serve.contract.job import SPOKEN, Event
from trimtab.serve.contract.quotas import Use

TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BETWEEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
RECENT = 50
TOKEN_KINDS = ("prompt", "cached", "completion")
# Values of `PrefixCache.numbers`.
PREFIX_CACHE = {
    "lookups": "Prompts that were looked up", "hits": "Prompts with a cached prefix", "bytes": "Bytes of cached prefixes",
    "hit_tokens": "Tokens that were not computed again", "capacity_bytes": "Most bytes of cached prefixes",
    "evicted": "Evicted blocks and snapshots", "media_passes": "Passes of towers",
    "media_lookups": "Images and groups of audio that were looked up", "media_hits": "Those whose tower output was cached",
}  # fmt: skip
# Those that only grow while a worker lives.
PREFIX_COUNTS = ("lookups", "hits", "hit_tokens", "evicted", "media_lookups", "media_hits", "media_passes")
# Values of the worker's numbers, and of `LoadedModel.memory`.
NUMBERS = ("kv_tokens", "kv_reserved_tokens", "adapter_host_bytes", "adapter_host_budget_bytes")
MEMORY = (
    "gpu_bytes", "gpu_peak_bytes", "gpu_process_bytes", "gpu_process_is_estimate", "gpu_planned_bytes", "host_peak_bytes",
)  # fmt: skip


class Metrics:
    """One server's metrics; `begin` returns an object for one request."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ["model", "adapter"]
        options: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("trimtab_requests", "Requests, by how they ended", [*labels, "ended"], **options)
        self.tokens = Counter("trimtab_tokens", "Tokens of prompts and answers", [*labels, "kind"], **options)
        self.ttft = Histogram(
            "trimtab_time_to_first_token_seconds", "From arrival to the first token", labels,
            buckets=TTFT_BUCKETS, **options,
        )  # fmt: skip
        self.between = Histogram(
            "trimtab_time_between_pieces_seconds", "Time between two deltas of one answer", labels, buckets=BETWEEN_BUCKETS,
            **options,
        )  # fmt: skip
        self.queued = Histogram(
            "trimtab_queue_seconds", "From arrival until the prompt starts to run", labels,
            buckets=QUEUE_BUCKETS, **options,
        )  # fmt: skip
        self.whole = Histogram(
            "trimtab_request_seconds", "From arrival to the end of the answer", labels, buckets=REQUEST_BUCKETS, **options
        )
        self.key_requests = Counter("trimtab_key_requests", "Requests of each named key", ["key", "ended"], **options)
        self.key_tokens = Counter("trimtab_key_tokens", "Tokens of prompts and answers of each named key", ["key"], **options)
        self.responses = Counter("trimtab_http_responses", "HTTP responses, by route and status", ["path", "status"], **options)
        self.grown = {
            name: _Grown(Counter(f"trimtab_{name}", text, ["model"], **options))
            for name, text in (
                ("worker_restarts", "How often the worker was restarted"), ("adapter_swaps", "Adapters put on the model"),
                ("adapter_reloads", "Adapters reloaded because their files changed"),
                *((f"prefix_cache_{key}", PREFIX_CACHE[key]) for key in PREFIX_COUNTS),
            )
        }  # fmt: skip
        build = Gauge("trimtab_build_info", "1, with the versions of what runs", ["version", *_BUILT_OF], **options)
        build.labels(__version__, *_versions()).set(1)
        ProcessCollector(registry=self.registry)
        self.gauges: dict[str, Any] = {
            name: Gauge(f"trimtab_{name}", text, ["model"], **options)
            for name, text in (
                ("queue_length", "Requests that wait for a row"), ("running", "Requests that are decoding or in prefill"),
                ("resident_adapters", "Adapters on the model"), ("worker_ready", "1 while the worker answers"),
                ("kv_cache_bytes", "Bytes of keys and values"),
                ("kv_tokens", "Tokens that the rows hold together in pages, 0 where each has its whole context"),
                ("kv_reserved_tokens", "Tokens of those that requests have reserved"),
                ("gpu_bytes", "Bytes allocated on the device"),
                ("adapter_host_bytes", "Bytes of adapters in host memory"),
                ("adapter_host_budget_bytes", "Bytes that adapters may take in host memory in addition to the plan"),
                ("gpu_peak_bytes", "Most bytes allocated on the device"), ("host_peak_bytes", "Most bytes of the process"),
                ("gpu_process_bytes", "Bytes that the driver holds for the worker on the device"),
                ("gpu_process_is_estimate", "1 where the driver does not report that figure"),
                ("gpu_planned_bytes", "Bytes that the plan counts for the worker on the device"),
                *((f"prefix_cache_{key}", text) for key, text in PREFIX_CACHE.items() if key not in PREFIX_COUNTS),
            )
        }  # fmt: skip
        self.share_bytes = Gauge(
            "trimtab_gpu_share_bytes", "Bytes of each share of the device's memory", ["model", "share", "kind"], **options
        )
        self.tier_bytes = Gauge("trimtab_tier_bytes", "Planned bytes of each tier", ["model", "tier"], **options)
        # The endings counted for each adapter, for `forget`.
        self._endings: dict[tuple[str, str], set[str]] = {}
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT)

    def begin(
        self, model: str, adapter: str | None, *, choices: int, key: str | None = None, use: Use | None = None,
        computes: bool = True,
    ) -> Seen:  # fmt: skip
        """Return the counter of one request, used until its end. key: the name of its key, if any. use: charged with the tokens
        of prompt and answer, and left at the end. computes: whether the model computes its tokens; others are not counted."""
        return Seen(self, model, adapter or "", choices, key, use, computes)

    def forget(self, adapter: str, model: str | None) -> None:
        """Drop an adapter's series, so that the number of series stays limited. Their counts are added to UNLOADED's. model:
        None for every model with an adapter of this name."""
        for labels in [labels for labels in self._endings if labels[1] == adapter and model in (None, labels[0])]:
            unloaded = (labels[0], UNLOADED)
            for how in self._endings.pop(labels):
                _fold(self.requests, (*labels, how), (*unloaded, how))
            for kind in TOKEN_KINDS:
                _fold(self.tokens, (*labels, kind), (*unloaded, kind))
            for histogram in (self.ttft, self.between, self.queued, self.whole):
                _fold(histogram, labels, unloaded)

    def expect_keys(self, names: Iterable[str]) -> None:
        """Show named keys at zero, so that Prometheus' `increase` counts their first request too."""
        for name in names:
            self.key_requests.labels(name, "done")
            self.key_tokens.labels(name)

    def _expect(self, model: str, adapter: str) -> None:
        """Show an adapter ("": the base) at zero, as `expect_keys`."""
        self._endings.setdefault((model, adapter), set()).add("done")
        self.requests.labels(model, adapter, "done")
        for kind in TOKEN_KINDS:
            self.tokens.labels(model, adapter, kind)

    def responded(self, path: str, status: int) -> None:
        """Count one HTTP response. path: of its route, from `log.named`."""
        self.responses.labels(path, str(status)).inc()

    def ended(self, labels: tuple[str, str], how: str, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> None:
        """Count one request. cached_tokens: those of its prompt whose keys and values were cached."""
        self._endings.setdefault(labels, set()).add(how)
        self.requests.labels(*labels, how).inc()
        for kind, count in zip(TOKEN_KINDS, (prompt_tokens, cached_tokens, completion_tokens), strict=True):
            self.tokens.labels(*labels, kind).inc(count)

    def recent(self) -> list[dict[str, Any]]:
        """Return the last requests, the newest first."""
        return list(reversed(self._recent))

    def text(self, status: Mapping[str, Any]) -> tuple[bytes, str]:
        """Return all metrics in Prometheus' text form, and its content type. status: from `Pool.status`."""
        for model in status["models"]:
            self._set(model)
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def _set(self, model: Mapping[str, Any]) -> None:
        numbers, name = model.get("numbers") or {}, model["name"]
        for adapter in ("", *model.get("adapters", ())):
            self._expect(name, adapter)
        memory, kept = numbers.get("memory", {}), numbers.get("prefix_cache") or {}
        values = {
            "queue_length": numbers.get("waiting", 0), "running": numbers.get("running", 0),
            "resident_adapters": len(numbers.get("resident", ())), "worker_ready": int(model["state"] == "ready"),
            "kv_cache_bytes": numbers.get("kv_bytes", 0),
            **{key: numbers.get(key, 0) for key in NUMBERS},
            **{key: memory.get(key, 0) for key in MEMORY},
            **{f"prefix_cache_{key}": kept.get(key, 0) for key in PREFIX_CACHE if key not in PREFIX_COUNTS},
        }  # fmt: skip
        self.grown["worker_restarts"].see(name, model["restarts"])
        if numbers:  # a missing worker has not counted less
            self.grown["adapter_swaps"].see(name, numbers.get("swaps", 0))
            self.grown["adapter_reloads"].see(name, numbers.get("reloads", 0))
            for key in PREFIX_COUNTS:
                self.grown[f"prefix_cache_{key}"].see(name, kept.get(key, 0))
        for key, value in values.items():
            self.gauges[key].labels(name).set(value)
        for share in numbers.get("memory_shares", ()):
            for kind in ("planned", "measured"):
                if share[f"{kind}_bytes"] is not None:
                    self.share_bytes.labels(name, share["name"], kind).set(share[f"{kind}_bytes"])
        for tier, count in (model.get("tier_bytes") or {}).items():
            self.tier_bytes.labels(name, tier).set(count)


class _Grown:
    """A counter of a value that the worker counts. A restarted worker starts at zero; this counter continues."""

    def __init__(self, counter: Any) -> None:
        self._counter = counter
        self._last: dict[str, float] = {}

    def see(self, model: str, value: float) -> None:
        last = self._last.get(model, 0.0)
        self._counter.labels(model).inc(value - last if value >= last else value)
        self._last[model] = value


def _fold(metric: Any, labels: tuple[str, ...], into: tuple[str, ...]) -> None:
    """Add a series to another one of the same metric, and remove it."""
    if labels not in metric._metrics:  # nothing was counted, such as the first text of an empty answer
        return
    series, other = metric.labels(*labels), metric.labels(*into)
    if isinstance(metric, Counter):
        other.inc(series._value.get())
    else:
        other._sum.inc(series._sum.get())
        for mine, theirs in zip(series._buckets, other._buckets):
            theirs.inc(mine.get())
    metric.remove(*labels)


_BUILT_OF = ("python", "torch", "transformers", "bitsandbytes")


def _versions() -> list[str]:
    """Return the installed versions of _BUILT_OF; none of them is imported."""
    kept = versions_of(_BUILT_OF[1:])
    return [platform.python_version(), *(kept.get(name, "") for name in _BUILT_OF[1:])]


@dataclass(eq=False)
class Seen:
    """One running request."""

    metrics: Metrics
    model: str
    adapter: str
    choices: int
    key: str | None = None
    use: Use | None = None
    computes: bool = True
    arrived: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    last: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    queued_s: float | None = None
    is_over: bool = False
    counted: int = 0  # choices whose tokens are known
    _kept: dict[str, object] = field(default_factory=dict)  # its entry of `Metrics.recent`

    @property
    def _tokens(self) -> dict[str, int | None]:
        """Its counts as they are shown: None as long as the worker has not reported those of each choice."""
        counts = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
        }
        return {name: count if self.counted >= self.choices else None for name, count in counts.items()}

    def event(self, event: Event) -> None:
        """Record an event of the request."""
        now = time.monotonic()
        labels = (self.model, label_of(self.adapter))
        if event.kind in SPOKEN:
            if self.first_s is None:
                self.first_s = now - self.arrived
                self.metrics.ttft.labels(*labels).observe(self.first_s)
            elif self.last is not None:
                self.metrics.between.labels(*labels).observe(now - self.last)
            self.last = now
        elif event.kind in ("done", "result", "error"):
            self.counted += event.kind != "result"
            self._count(event.usage if self.computes else {})

    def _count(self, usage: Mapping[str, Any]) -> None:
        """Charge the computed tokens. Choices of one prompt share it; a prompt may have been computed twice (scored_tokens)."""
        prompt_tokens = usage.get("prompt_tokens", 0) - usage.get("shared_tokens", 0)
        completion_tokens = usage.get("completion_tokens", 0)
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        self.cached_tokens += usage.get("cached_tokens", 0)
        tokens = prompt_tokens + completion_tokens + usage.get("scored_tokens", 0)
        if self.use is not None:
            self.use.charge(tokens)
        if self.key is not None:
            self.metrics.key_tokens.labels(self.key).inc(tokens)

    def dropped(self, usage: Mapping[str, Any]) -> None:
        """Charge the computed tokens of a cancelled job, as the worker reports them, often after the request's end."""
        before = self.prompt_tokens, self.completion_tokens
        self.counted += 1
        self._count(usage if self.computes else {})
        if self.is_over:
            self._kept.update(self._tokens)
            tokens = self.metrics.tokens
            labels = self.model, label_of(self.adapter)
            tokens.labels(*labels, "prompt").inc(self.prompt_tokens - before[0])
            tokens.labels(*labels, "completion").inc(self.completion_tokens - before[1])

    def started(self, usage: Mapping[str, float]) -> None:
        """Record that a prompt has started, usage["ago_s"] seconds ago. Of several choices, only the first counts."""
        if self.queued_s is None:
            self.queued_s = max(0.0, time.monotonic() - self.arrived - usage.get("ago_s", 0.0))
            self.metrics.queued.labels(self.model, label_of(self.adapter)).observe(self.queued_s)

    def end(self, how: str) -> None:
        """Record its end, once: "done", "cancelled" or the class of the error."""
        if self.is_over:
            return
        self.is_over = True
        seconds = time.monotonic() - self.arrived
        labels = (self.model, label_of(self.adapter))
        self.metrics.ended(labels, how, self.prompt_tokens, self.completion_tokens, self.cached_tokens)
        if self.use is not None:
            self.use.leave()
        if self.key is not None:
            self.metrics.key_requests.labels(self.key, how).inc()
        self.metrics.whole.labels(*labels).observe(seconds)
        times = {"queue_s": self.queued_s, "first_token_s": self.first_s}
        log.note(
            model=self.model, adapter=self.adapter or None, key=self.key, ended=how, **self._tokens,
            **{log.ARRIVED: self.arrived},
            **{name: round(value, 4) for name, value in times.items() if value is not None},
        )  # fmt: skip
        decode_s = seconds - (self.first_s or 0.0)
        self._kept.update({
            "at": time.time(), "model": self.model, "adapter": self.adapter, "ended": how, "seconds": seconds,
            "ttft_s": self.first_s, **self._tokens,
            "tok_s": (self.completion_tokens - self.choices) / decode_s
            if self.completion_tokens > self.choices and decode_s > 0 else None,
        })  # fmt: skip
        self.metrics._recent.append(self._kept)
