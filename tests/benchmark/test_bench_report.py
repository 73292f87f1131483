"""What is made of runs: medians with their spread, where answers part, failures named, nothing of this machine's folders."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.machine.test_environment import read_only_environment
from tests.planning.plan.test_picture import check_labels
from tests.planning.test_planner import plan
from tests.raised import refused
from trimtab.benchmark import bench as benching
from trimtab.benchmark import chart, stats
from trimtab.benchmark.bench import BenchRequest, bench
from trimtab.benchmark.chart import draw
from trimtab.benchmark.report import check_save_path
from trimtab.errors import DeviceError, RequestError, UpstreamError
from trimtab.report.charts import WIDTH, Box, Stroke
from trimtab.request import LoadRequest
from trimtab.verification.routes.prompts import Prompt

PLAN = plan()
BANDWIDTH = {"device_Bps": 1e12, "host_Bps": 2e10, "link_Bps": 5e10}
numbers = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=50)


def ran(*, ms=10.0, tokens=(5, 6, 7, 8), load_s=2.0, fallbacks=(), notes=(), bandwidth=BANDWIDTH, host=2**30):
    """Return the line of one run with a token every `ms`."""
    answer = {"id": "text", "token_ids": list(tokens), "first_ms": 30.0, "gaps_ms": [ms] * (len(tokens) - 1), "cpu_ms": 9.0}
    return {
        "event": "ran", "load_s": load_s, "warm_s": 0.1, "answers": [answer], "device_peak_bytes": 2**31,
        "host_peak_bytes": host, "fallbacks": list(fallbacks), "steps": {"computed": "eager"}, "notes": list(notes),
        "bandwidth": bandwidth,
    }  # fmt: skip


@pytest.fixture
def world(monkeypatch):
    """Let no process run: `says` answers for each, and `asked` has what each was asked."""
    prepared = {
        "event": "prepared", "plan": PLAN.to_json(), "folder": "/home/somebody/model", "context_tokens": 544.0,
        "items": [{"id": "text", "file": "/tmp/x/inputs-0", "prompt_tokens": 512, "has_media": False}],
        "reads": {
            "trimtab": [{"what": "decoder", "way": "device", "nbytes": 10**9}, {"what": "rows", "way": "link", "nbytes": 9}],
            "stock": [{"what": "decoder", "way": "device", "nbytes": 2 * 10**9}],
        },
    }  # fmt: skip

    found = SimpleNamespace(asked=[], says=lambda name, run: ran(), outcome=None)

    def run_module(module, request, label, *, isolated, timeout_s):
        assert isolated
        if module == benching.PREPARE:
            return [prepared], None
        run = sum(name == label for name, _, _ in found.asked)
        found.asked.append((label, module, request))
        return [found.says(label, run)], found.outcome

    monkeypatch.setattr(benching, "run_module", run_module)
    monkeypatch.setattr(benching, "read_environment", read_only_environment)
    return found


def failing(error, *engines, run=None):
    """Return what the processes say if those of some engines fail, in one run or in all."""

    def says(name, at):
        if name in engines and run in (None, at):
            raise error
        return ran(ms=10.0 * (at + 1))

    return says


def asked(**more):
    return BenchRequest(load=LoadRequest(model="m"), **more)


# Figures


def test_figures_of_a_run_pool_the_gaps_of_all_prompts():
    line = ran(ms=10.0) | {"expert_hits": 0.375}
    line["answers"].append({"id": "b", "token_ids": [1, 2], "first_ms": 50.0, "gaps_ms": [50.0], "cpu_ms": 3.0})
    assert stats.run_figures(line) == {
        "load_s": 2.0, "first_token_ms": 40.0, "decode_tok_s": 50.0, "between_p50_ms": 10.0, "between_p99_ms": 50.0, "cpu_ms": 3.0,
        "device_peak_gib": 2.0, "host_peak_gib": 1.0, "expert_hits_pct": 37.5,
    }  # fmt: skip


def test_a_peak_that_is_not_known_is_no_figure():
    assert "host_peak_gib" not in stats.run_figures(ran(host=0))


@given(numbers, st.floats(0.01, 1.0))
def test_a_percentile_is_the_least_value_that_enough_values_do_not_exceed(values, share):
    found = stats.percentile(values, share)
    assert found in values and sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert sum(value < found for value in values) < share * len(values)


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), max_size=8))
def test_where_answers_part_they_are_equal_before_and_not_there(a, b):
    place = stats.first_difference(a, b)
    if place is None:
        assert a == b
    else:
        assert a[:place] == b[:place] and a[place : place + 1] != b[place : place + 1]


@given(numbers)
def test_a_spread_holds_its_median(values):
    found = stats.spread(values)
    assert found.least <= found.median <= found.most and found.count == len(values)
    assert stats.spread([]) is None


# The runs


def test_runs_are_made_in_turn_each_with_the_same_inputs(world):
    found = bench(asked(runs=2, new_tokens=8))
    assert [(label, module) for label, module, _ in world.asked] == [
        ("trimtab", benching.OWN), ("stock", benching.STOCK), ("trimtab", benching.OWN), ("stock", benching.STOCK)
    ]  # fmt: skip
    requests = [request for _, _, request in world.asked]
    assert len({json.dumps([request["items"], request["new_tokens"]]) for request in requests}) == 1
    assert len({request["out"] for request in requests}) == 4
    assert [(row["engine"], row["run"]) for row in found.to_json()["rows"]] == [
        ("trimtab", 0), ("stock", 0), ("trimtab", 1), ("stock", 1)
    ]  # fmt: skip


def test_the_ratio_is_taken_pair_by_pair(world):
    paces = {"trimtab": [1.0, 4.0, 2.0], "stock": [2.0, 4.0, 8.0]}
    world.says = lambda name, run: ran(ms=paces[name][run])
    found = bench(asked()).to_json()
    assert found["ratios"]["decode_tok_s"] == {"median": 2.0, "min": 1.0, "max": 4.0, "runs": 3}
    assert found["engines"]["trimtab"]["medians"]["decode_tok_s"] == {"median": 500, "min": 250, "max": 1000, "runs": 3}


def test_against_eager_is_the_same_plan_with_eager_steps(world):
    bench(asked(against="eager", runs=1, decode="graph"))
    assert [(label, request["decode"]) for label, _, request in world.asked] == [("trimtab", "graph"), ("eager", "eager")]


def test_what_stock_cannot_run_is_named_and_ours_is_measured_to_the_end(world):
    world.says = failing(UpstreamError("OutOfMemoryError: 4 GiB", package="torch", installed="2.6"), "stock")
    found = bench(asked(runs=3))
    assert [label for label, _, _ in world.asked] == ["trimtab", "stock", "trimtab", "trimtab"]
    told = found.to_json()["engines"]["stock"]
    assert told["failure"]["class"] == "UpstreamError" and "4 GiB" in told["failure"]["message"]
    assert told["medians"] == {} and told["limit"]["tok_s"] == 500
    text = str(found)
    assert "failed    stock, in run 1: UpstreamError" in text and re.search(r"decode +50 tok/s \(33.3..100\) +-", text)
    assert found.ours.failure is None and found.ratio() is None and found.differences() == []


def test_the_runs_before_a_failure_are_kept(world):
    world.says = failing(DeviceError("out of memory", device="cuda:0"), "trimtab", run=1)
    found = bench(asked(runs=3))
    assert len(found.ours.rows) == 1 and len(found.other.rows) == 3 and found.ours.failed_run == 1
    assert "failed    trimtab, in run 2" in str(found) and found.ratio().count == 1


def test_both_failing_leaves_a_report_without_a_limit(world):
    world.says = failing(DeviceError("no", device="cpu"), "trimtab", "stock")
    found = bench(asked())
    assert found.ours.limit is None and found.to_json()["bandwidth"] == {} and "failed  stock" in str(found)


def test_the_limit_is_the_bytes_over_the_bandwidth_of_the_same_runs(world):
    rates = iter([1e12, 2e12, 4e12, 1e12, 2e12, 4e12])
    world.says = lambda name, run: ran(ms=10.0, bandwidth={**BANDWIDTH, "device_Bps": next(rates)})
    found = bench(asked())
    assert found.bandwidth["device memory"].to_json() == {"median": 2e12, "min": 1e12, "max": 4e12, "runs": 6}
    assert (found.ours.limit.tok_s, found.other.limit.tok_s) == (2000.0, 1000.0)
    assert found.ours.limit_share() == pytest.approx(0.05)
    text = str(found)
    assert "2000 tok/s" in text and "5 %" in text and "decoder 953.7 MiB, rows 9 B over the link" in text


def test_fallbacks_notes_and_changed_tokens_are_said_once(world):
    slow = {"what": "graph", "why": "there is no GPU"}
    world.says = lambda name, run: ran(
        tokens=(1, 2, 3 + run, 4) if name == "trimtab" else (1, 9, 3, 4), fallbacks=[slow], notes=["as it is"]
    )
    found = bench(asked(runs=2))
    assert found.ours.fallbacks == [slow]
    assert found.to_json()["same_tokens"] == [{"id": "text", "tokens": 4, "equal": False, "first_difference": 1}]
    text = str(found)
    assert text.count("slower    trimtab: graph: there is no GPU") == 1 and text.count("note      stock: as it is") == 1
    assert "text: tokens differ from position 1 on, of 4" in text
    assert "unsteady  trimtab gave other tokens for text" in text and "unsteady  stock" not in text


def test_a_peak_that_the_process_cannot_say_is_what_was_seen_from_outside(world):
    world.says = lambda name, run: ran(host=0)
    world.outcome = SimpleNamespace(peak_host_bytes=3 * 2**30)
    assert bench(asked(runs=1)).ours.spreads["host_peak_gib"].median == 3


def test_stock_is_said_to_quantize_what_was_to_be_kept(world, monkeypatch):
    kept = replace(PLAN, request=replace(PLAN.request, keep_unquantized=("*q_proj",)))
    monkeypatch.setattr(benching.Plan, "from_json", staticmethod(lambda values: kept))
    found = bench(asked(runs=1))
    assert "--keep-unquantized" in found.other.notes[0] and found.ours.notes == []


def test_the_json_names_no_folder_and_is_written_whole(world, tmp_path):
    world.says = failing(DeviceError("/home/somebody/model/x.safetensors: unreadable", device="host"), "stock")
    bench(asked(runs=1)).save(tmp_path / "a.json")
    text = (tmp_path / "a.json").read_text("utf-8")
    found = json.loads(text)
    assert found["environment"]["packages"] and found["model"]["name"] == "m" and "/tmp/x" not in text
    assert "/home/somebody/model" not in json.dumps({key: found[key] for key in found if key != "engines"})
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


# What is refused


@pytest.mark.parametrize(("values", "field"), [
    ({"runs": 0}, "--runs"), ({"new_tokens": 1}, "--new-tokens"), ({"prompt_tokens": 0}, "--prompt-tokens"),
    ({"runs": True}, "--runs"), ({"against": "vllm"}, "--against"), ({"decode": "fast"}, "--decode"),
    ({"decode": "eager", "against": "eager"}, "--decode"), ({"adapter": "b"}, "--use"),
    ({"images": ("a.png",), "prompt_tokens": 9}, "--prompt-tokens"),
    ({"prompts": (Prompt("a", "text"),), "prompt_tokens": 9}, "--prompt-tokens"),
    ({"prompts": (Prompt("a", "text"),), "images": ("a.png",)}, "--image"),
    ({"prompts": (Prompt("a", "text"),), "audios": ("a.wav",)}, "--audio"),
])  # fmt: skip
def test_a_value_without_effect_or_out_of_range_is_refused(values, field):
    assert refused(asked, **values).field == field


def test_eager_against_eager_on_a_cpu_is_refused_before_a_run(world, monkeypatch):
    monkeypatch.setattr(benching.Plan, "from_json", staticmethod(lambda _: replace(PLAN, execution_device="cpu")))
    error = refused(lambda: bench(asked(against="eager")), match="no GPU")
    assert error.field == "--against" and world.asked == []


def test_a_place_that_cannot_be_written_is_refused_before_a_run(tmp_path):
    for name in ("a.md", "no/a.json"):
        with pytest.raises(RequestError):
            check_save_path(str(tmp_path / name))
    check_save_path(str(tmp_path / "a.json"))


# The picture


def test_a_bar_is_the_median_its_whisker_the_spread_and_the_line_the_limit(world):
    world.says = lambda name, run: ran(ms=[1.0, 2.0, 4.0][run])
    shapes, _ = chart.layout(bench(asked()))
    bars = [s for s in shapes if isinstance(s, Box) and s.fill == chart.COLORS["trimtab"]]
    lines = [s for s in shapes if isinstance(s, Stroke)]
    decode = next(bar for bar in bars if any(line.top < bar.top < line.bottom for line in lines))
    line = next(line for line in lines if line.top < decode.top < line.bottom)
    # 500 tok/s of a limit of 1000
    assert decode.width / (line.left - decode.left) == pytest.approx(500 / 1000)
    whisker = next(s for s in shapes if isinstance(s, Box) and s.fill == chart.INK and decode.top < s.top < line.bottom)
    assert whisker.left - decode.left == pytest.approx(decode.width / 2)
    assert whisker.left + whisker.width == pytest.approx(decode.left + 2 * decode.width)


def test_labels_stay_on_the_page_and_off_each_other(world):
    world.says = failing(DeviceError("out of memory " * 20, device="cuda:0"), "trimtab", run=2)
    shapes, height = chart.layout(bench(asked()))
    check_labels(shapes, height, letter=0.55)
    boxes = [shape for shape in shapes if isinstance(shape, Box)]
    assert all(box.left >= 0 and box.left + box.width <= WIDTH for box in boxes)


def test_a_picture_is_the_same_every_time_and_says_every_figure(world, tmp_path):
    found = bench(asked())
    draw(found, tmp_path / "a.svg")
    draw(found, tmp_path / "b.svg")
    text = (tmp_path / "a.svg").read_bytes()
    assert text == (tmp_path / "b.svg").read_bytes()
    words = {element.text for element in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}text")}
    shown = [one for one in stats.FIGURES if one[0] in found.ours.spreads]
    assert len(shown) > 6 and {f"{stats.NAMES[name]}, {unit}" for name, unit, _ in shown} <= words
    with pytest.raises(RequestError):
        draw(found, tmp_path / "a.png")
