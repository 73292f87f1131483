"""What is counted: requests by their end, tokens, times, and no series for a name that is gone."""

import sys
from importlib import metadata

import pytest
from prometheus_client.parser import text_string_to_metric_families

import trimtab
from trimtab.serve.contract import log
from trimtab.serve.contract.job import Event
from trimtab.serve.observe.metrics import Metrics

USAGE = {"prompt_tokens": 10, "completion_tokens": 4, "cached_tokens": 6}
MODEL = {
    "name": "demo", "state": "ready", "restarts": 2, "tier_bytes": {"resident": 5, "stream": 6},
    "numbers": {"waiting": 3, "running": 4, "swaps": 7, "resident": ["a"], "kv_bytes": 8,
        "adapter_host_bytes": 18, "adapter_host_budget_bytes": 19,
                "prefix_cache": {"lookups": 12, "hits": 13, "hit_tokens": 14, "bytes": 15, "capacity_bytes": 16, "evicted": 17},
                "memory": {"gpu_bytes": 9, "gpu_peak_bytes": 10, "host_peak_bytes": 11}},
}  # fmt: skip


def samples(metrics, *models):
    """Return (name, labels as a sorted tuple) -> value."""
    text, kind = metrics.text({"models": models})
    assert kind.startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def label(**labels):
    return tuple(sorted(labels.items()))


def answer(metrics, adapter="style", how="done"):
    seen = metrics.begin("demo", adapter, choices=1)
    seen.event(Event("1", "text", text="a"))
    seen.event(Event("1", "text", text="b"))
    if how == "done":
        seen.event(Event("1", "done", finish="stop", usage=USAGE))
    seen.end(how)
    return seen


def test_requests_tokens_and_times_are_counted_for_each_adapter():
    metrics = Metrics()
    answer(metrics)
    answer(metrics)
    answer(metrics, None, "cancelled")
    found = samples(metrics)
    assert found["trimtab_requests_total", label(model="demo", adapter="style", ended="done")] == 2
    assert found["trimtab_requests_total", label(model="demo", adapter="", ended="cancelled")] == 1
    assert found["trimtab_tokens_total", label(model="demo", adapter="style", kind="completion")] == 8
    assert found["trimtab_tokens_total", label(model="demo", adapter="style", kind="prompt")] == 20
    assert found["trimtab_tokens_total", label(model="demo", adapter="style", kind="cached")] == 12
    assert found["trimtab_time_to_first_token_seconds_count", label(model="demo", adapter="style")] == 2
    assert found["trimtab_time_between_pieces_seconds_count", label(model="demo", adapter="style")] == 2


def test_a_request_ends_once():
    metrics = Metrics()
    answer(metrics).end("cancelled")
    assert [seen["ended"] for seen in metrics.recent()] == ["done"]
    assert ("trimtab_requests_total", label(model="demo", adapter="style", ended="cancelled")) not in samples(metrics)


def test_what_an_abandoned_request_computed_is_unknown_until_the_worker_tells_it():
    metrics, notes = Metrics(), {}
    seen = metrics.begin("demo", "style", choices=2)
    seen.event(Event("1", "done", finish="stop", usage=USAGE))
    token = log._notes.set(notes)
    seen.end("cancelled")
    log._notes.reset(token)
    shown = metrics.recent()[0]
    assert [one[name] for one in (notes, shown) for name in USAGE] == [None] * 6
    seen.dropped({"prompt_tokens": 5, "completion_tokens": 3})
    assert [shown[name] for name in USAGE] == [15, 7, 6]
    assert samples(metrics)["trimtab_tokens_total", label(model="demo", adapter="style", kind="completion")] == 7


def test_a_models_state_is_shown():
    found = samples(Metrics(), MODEL)
    expected = {
        "queue_length": 3, "running": 4, "worker_restarts_total": 2, "adapter_swaps_total": 7, "resident_adapters": 1,
        "worker_ready": 1, "kv_cache_bytes": 8, "gpu_bytes": 9, "gpu_peak_bytes": 10, "host_peak_bytes": 11,
        "prefix_cache_lookups_total": 12, "prefix_cache_hits_total": 13, "prefix_cache_hit_tokens_total": 14,
        "adapter_host_bytes": 18, "adapter_host_budget_bytes": 19,
        "prefix_cache_bytes": 15, "prefix_cache_capacity_bytes": 16, "prefix_cache_evicted_total": 17,
    }  # fmt: skip
    assert {name: found[f"trimtab_{name}", label(model="demo")] for name in expected} == expected
    assert found["trimtab_tier_bytes", label(model="demo", tier="stream")] == 6


def test_a_model_that_was_never_loaded_is_shown_as_such():
    found = samples(Metrics(), {"name": "demo", "state": "stopped", "restarts": 0, "numbers": {}, "tier_bytes": {}})
    assert found["trimtab_worker_ready", label(model="demo")] == 0


def test_series_of_a_name_that_is_gone_are_dropped():
    metrics = Metrics()
    for number in range(100):
        answer(metrics, f"a{number}")
        answer(metrics, f"a{number}", "DeviceError")
        metrics.begin("demo", f"a{number}", choices=1).end("QueueFullError")
        metrics.forget(f"a{number}", "demo" if number % 2 else None)
    answer(metrics, "kept")
    assert {dict(labels).get("adapter") for _, labels in samples(metrics)} - {None} == {"kept", "(unloaded)"}


def test_every_loaded_adapter_is_shown_at_zero_before_its_first_request():
    # Prometheus' `increase` of a series that begins at 1 is 0: the first request would be missing.
    metrics = Metrics()
    found = samples(metrics, {**MODEL, "adapters": ["style", "unused"]})
    for adapter in ("", "style", "unused"):
        assert found["trimtab_requests_total", label(model="demo", adapter=adapter, ended="done")] == 0
        for kind in ("prompt", "cached", "completion"):
            assert found["trimtab_tokens_total", label(model="demo", adapter=adapter, kind=kind)] == 0
    answer(metrics)
    metrics.forget("unused", "demo")
    found = samples(metrics, {**MODEL, "adapters": ["style"]})
    assert found["trimtab_requests_total", label(model="demo", adapter="style", ended="done")] == 1
    assert "unused" not in {dict(labels).get("adapter") for _, labels in found}


def test_no_sum_over_adapters_goes_down_when_one_is_unloaded():
    metrics = Metrics()
    for name in ("a", "b", "a"):
        answer(metrics, name).started({})

    def sums():
        found, ends = samples(metrics), ("_total", "_sum", "_count", "_bucket")
        total = {}
        for (name, labels), value in found.items():
            if name.startswith("trimtab_") and name.endswith(ends):
                key = (name, tuple(pair for pair in labels if pair[0] != "adapter"))
                total[key] = total.get(key, 0) + value
        return total

    before = sums()
    assert before["trimtab_requests_total", label(model="demo", ended="done")] == 3
    metrics.forget("a", "demo")
    assert sums() == pytest.approx(before)
    answer(metrics, "a")
    metrics.forget("a", None)
    after = sums()
    assert after["trimtab_requests_total", label(model="demo", ended="done")] == 4
    assert all(after[key] >= value for key, value in before.items())


def test_what_a_worker_counts_goes_on_when_the_worker_is_put_back():
    metrics = Metrics()
    total = []
    for swaps in (7, 9, None, 0, 2):  # None: no worker answers; then a new one begins at zero
        numbers = {} if swaps is None else {**MODEL["numbers"], "swaps": swaps}
        found = samples(metrics, {**MODEL, "numbers": numbers})
        total.append(found["trimtab_adapter_swaps_total", label(model="demo")])
    assert total == [7, 9, 9, 9, 11]


def test_the_queue_and_the_whole_request_are_timed():
    metrics = Metrics()
    seen = answer(metrics)
    seen.arrived -= 9  # of which the prompt was computed for the last 5
    for ago_s in (5.0, 1.0):
        seen.started({"ago_s": ago_s})
    assert seen.queued_s == pytest.approx(4, abs=0.5)
    found = samples(metrics)
    assert found["trimtab_queue_seconds_count", label(model="demo", adapter="style")] == 1
    assert found["trimtab_request_seconds_count", label(model="demo", adapter="style")] == 1


def test_what_runs_is_told():
    found = samples(Metrics())
    (labels,) = [dict(labels) for name, labels in found if name == "trimtab_build_info"]
    assert labels["version"] == trimtab.__version__ and labels["torch"] == metadata.version("torch")
    if sys.platform == "linux":  # where /proc tells it
        assert found["process_resident_memory_bytes", ()] > 2**20 and ("process_cpu_seconds_total", ()) in found


def test_only_the_last_requests_are_kept():
    metrics = Metrics()
    for _ in range(200):
        answer(metrics)
    recent = metrics.recent()
    assert len(recent) == 50 and recent[0]["at"] >= recent[-1]["at"]
    assert recent[0]["completion_tokens"] == 4 and recent[0]["ttft_s"] == pytest.approx(0, abs=1)
