"""What an operator reads first: a verdict on trimtab, the reason of a refusal, the ways in, the time of a merge."""

import importlib
import json
import logging
import socket
from dataclasses import replace

import pytest

import trimtab
from tests.serving import MockPool, client, words
from trimtab.cli import main
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.doctor.facts.bug import PRESENT, Affected, Bug, Seen
from trimtab.doctor.probes import runner
from trimtab.doctor.report import own_verdict
from trimtab.machine import environment
from trimtab.machine.environment import Environment, Gpu, Package
from trimtab.serve.contract import log
from trimtab.serve.run import ways_in

HERE = Environment(
    python="3.11.7", implementation="CPython", packages={name: Package(version, "index") for name, version in {
        "trimtab": "0.2.0", "torch": "2.8.0+cu129", "transformers": "5.6.2", "accelerate": "1.15.0", "bitsandbytes": "0.50.0",
        "safetensors": "0.6.2", "peft": "0.19.1",
    }.items()}, cuda="12.9", hip=None, torch_error=None, gpus=(), driver=None, os="Linux", architecture="x86_64", cpu="x",
    cpu_flags=(), cpu_capability=None, cores=8, threads=8, host_total_bytes=32 * 2**30, host_available_bytes=20 * 2**30,
)  # fmt: skip
GPU = Gpu(0, "NVIDIA H100", 80 * 2**30, 75 * 2**30, "9.0")
NEEDED = ("torch>=2.6", "transformers<5.24,>=5.6.2", "anyio>=4", "ray[serve]>=2.60; extra == 'ray'")
BUG = Bug(
    id="A1", name="a", title="a bug", symptom="", trigger="", cause="", affected=(Affected("torch"),), versions="", way_round="",
    owner=("torch",), trackers=(), trimtab="", evidence="run",
)  # fmt: skip


# The doctor -----------------------------------------------------------------------------------------------------------


def test_verdict_says_that_trimtab_works_and_where_models_run():
    verdict = own_verdict(HERE, NEEDED)
    assert verdict.text == "trimtab 0.2.0 works on this machine; models run on the CPU, without a GPU"
    assert verdict.to_json() == {"works": True, "text": verdict.text, "problems": []}
    assert own_verdict(replace(HERE, gpus=(GPU,)), NEEDED).text.endswith("models run on GPU 0 (NVIDIA H100, 75.00 GiB free)")


@pytest.mark.parametrize("change, words_of_it", [
    ({"packages": {**HERE.packages, "bitsandbytes": Package(None, None)}},
     "trimtab 0.2.0 does not work on this machine: bitsandbytes is not installed (pip install bitsandbytes)"),
    ({"torch_error": "RuntimeError"}, "does not work on this machine: torch cannot be used (RuntimeError)"),
    ({"packages": {**HERE.packages, "transformers": Package("5.24.0", "index")}},
     "was not tested with what is installed on this machine: transformers 5.24.0 is not <5.24,>=5.6.2"),
])  # fmt: skip
def test_verdict_names_what_stands_in_the_way_and_what_to_do(change, words_of_it):
    verdict = own_verdict(replace(HERE, **change), NEEDED)
    assert words_of_it in verdict.text and len(verdict.problems) == 1 and not verdict.to_json()["works"]


@pytest.fixture
def one_bug(monkeypatch):
    monkeypatch.setattr(environment, "read_environment", lambda python=None: replace(HERE, is_other=python is not None))
    monkeypatch.setattr(runner, "run_probes", lambda **_: (runner.Verdict(BUG, Seen(PRESENT, "seen"), 0.1),))


def test_doctor_begins_with_trimtab_and_counts_bugs_as_those_of_others(one_bug, capsys):
    assert main.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("trimtab 0.2.0 ") and "CPython 3.11.7" in shown.split("\n\n")[1]
    head, last = shown.rstrip().split("\n\n")[-2:]
    assert head.startswith("Known bugs of the other packages here, none of trimtab\n") and "without trimtab" in last
    assert main.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trimtab"]["text"] == shown.split("\n\n")[0]


def test_another_interpreter_gets_no_verdict_on_trimtab(one_bug, capsys):
    assert main.main(["doctor", "--python", "other"]) == 0
    assert capsys.readouterr().out.startswith("trimtab doctor\n\nCPython 3.11.7 (another interpreter)")


# A merge --------------------------------------------------------------------------------------------------------------


def test_time_of_a_merge_has_no_imports(tmp_path, monkeypatch):
    merging = importlib.import_module("trimtab.merging.merge")  # `trimtab.merging.merge` is the function
    clock = [0.0]

    class Time:
        @staticmethod
        def monotonic():
            clock[0] += 1.0
            return clock[0]

    def imports(*_, **__):
        clock[0] += 10_000.0

    monkeypatch.setattr(merging, "time", Time)
    monkeypatch.setattr(merging, "import_libraries", imports)
    report = trimtab.merge(DEMO / "base", tmp_path / "out", adapters={"style": DEMO / "adapters" / "style"})
    assert 0 < report.seconds < 10_000 and clock[0] > 10_000


# A server -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def line_of(monkeypatch):
    """Return a function that posts a chat and returns the log's line about it."""
    logger = logging.getLogger("trimtab")
    before = logger.handlers[:], logger.propagate, logger.level
    monkeypatch.setenv(log.FORMAT_VARIABLE, "")
    monkeypatch.setenv(log.LEVEL_VARIABLE, "")
    log.set_up("json")
    written = []
    logger.handlers[0].emit = lambda record: written.append(logger.handlers[0].format(record))

    def post(**fields):
        chat = {"model": "demo", "messages": [{"role": "user", "content": "a secret"}], **fields}
        found = client(MockPool(lambda job: words(job, "fine"))).post("/v1/chat/completions", json=chat)
        return found.status_code, json.loads(written.pop())

    yield post
    logger.handlers[:], logger.propagate = before[:2]
    logger.setLevel(before[2])


@pytest.mark.parametrize("fields, field, reason", [
    ({"temperature": 3}, "temperature", "must be less than or equal to 2"),
    ({"zoo": "a secret"}, "zoo", "not supported: zoo. This server refuses unknown fields"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "has no effect without stream"),
])  # fmt: skip
def test_line_of_a_400_has_its_reason_and_nothing_that_was_said(line_of, fields, field, reason):
    status, line = line_of(**fields)
    assert status == line["status"] == 400
    assert (line["error"], line["field"]) == ("RequestError", field) and line["reason"].startswith(reason)
    assert "secret" not in json.dumps(line)


def test_line_of_an_answer_has_no_reason(line_of):
    status, line = line_of()
    assert status == 200 and not {"error", "field", "reason"} & set(line)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_start_names_the_page_and_the_base_url(host):
    with socket.create_server((host, 0)) as listener:
        port = listener.getsockname()[1]
        base = f"base URL for clients: http://127.0.0.1:{port}/v1"
        assert ways_in(listener, has_page=True) == [f"page: http://127.0.0.1:{port}/", base]
        assert ways_in(listener, has_page=False) == [base]
