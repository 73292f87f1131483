"""What POST /api/verify takes, refuses and tells; the comparison itself is `trimtab.verify`'s and replaced here."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

import trimtab
from trimtab.demo.line import FOLDER as DEMO
from trimtab.errors import DeviceError, DoesNotFitError, TrimtabError
from trimtab.plan import Plan
from trimtab.process import CRASHED, DONE, OOM_HOST, Outcome
from trimtab.proof import comparisons
from trimtab.serve import verifying, verifying_inside
from trimtab.serve.app import _on_http_error, on_trimtab_error

PLAN = {"request": {"adapters": {"style": "/a/style"}}}
REPORT = {"verdict": "same", "ok": True}


class Pool:
    def __init__(self, plan=PLAN):
        self.plan = plan

    def running(self, model):
        return model or "gemma", self.plan, {"style": "/a/style", "late": "/a/late"}


def client(pool=None):
    from starlette.exceptions import HTTPException

    handlers = {TrimtabError: on_trimtab_error(), HTTPException: _on_http_error}
    return TestClient(Starlette(routes=verifying.verify_routes(pool or Pool()), exception_handlers=handlers))


def outcome(*lines, ended=DONE, exit_code=0):
    return Outcome(ended, lines, 1.0, 0, exit_code, "", "")


@pytest.fixture
def inside(monkeypatch):
    """Replace the process: calls are kept, and what `says` returns comes of each."""
    kept = SimpleNamespace(calls=[], says=lambda what, on_event: outcome())

    def run_inside(module, request, *, timeout_s, on_event):
        assert module == "trimtab.proof.isolated"
        assert request["module"] == verifying.INSIDE
        kept.calls.append(request["request"])
        return kept.says(request["request"]["what"], on_event)

    monkeypatch.setattr(verifying, "run_inside", run_inside)
    return kept


def told(answer):
    return [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]


def test_a_comparison_looks_for_room_then_tells_what_it_finds(inside):
    def says(what, on_event):
        if what == "compare":
            on_event({"event": "say", "value": "comparing"})
            on_event({"event": "alive", "value": None})
            on_event({"event": "report", "value": REPORT})
        return outcome()

    inside.says = says
    lines = told(client().post("/api/verify", json={"adapter": "late", "against": "base"}))
    assert [json.loads(line) for line in lines[1:-1]] == [{"say": "comparing"}, {"report": REPORT}]
    assert lines[-1] == "[DONE]"
    assert [call["what"] for call in inside.calls] == ["room", "compare"]
    assert inside.calls[1]["adapters"] == {"late": "/a/late"}
    assert inside.calls[1]["plan"] == PLAN


def test_the_base_is_compared_without_adapters(inside):
    client().post("/api/verify", json={})
    assert inside.calls[1]["adapters"] == {}
    assert inside.calls[1]["against"] == "resident"


def test_want_of_room_is_told_with_its_numbers_and_nothing_is_compared(inside):
    fields = {"block": None, "device": "cuda:0", "needed_bytes": 2, "budget_bytes": 1, "hint": verifying_inside.HINT}
    error = {"event": "error", "class": "DoesNotFitError", "message": "no room", "fields": fields}
    inside.says = lambda what, on_event: outcome(error)
    answer = client().post("/api/verify", json={})
    found = json.loads(told(answer)[-1])["error"]
    assert found["class"] == "DoesNotFitError"
    assert found["fields"]["needed_bytes"] == 2
    assert "event: error" in answer.text
    assert len(inside.calls) == 1


@pytest.mark.parametrize(
    "ended,words", [(OOM_HOST, "host memory"), (CRASHED, "exit code 139"), (verifying.TIMEOUT, "longer than 3600 s")]
)
def test_a_process_that_died_is_told(inside, ended, words):
    inside.says = lambda what, on_event: outcome(ended=ended, exit_code=139)
    found = json.loads(told(client().post("/api/verify", json={}))[-1])["error"]
    assert found["class"] == "DeviceError"
    assert words in found["message"]


@pytest.mark.parametrize(
    "body,field",
    [
        ({"adapter": "none"}, "adapter"), ({"against": "bf16"}, "against"), ({"against": "alone"}, "against"),
        ({"other": 1}, "other"), ([], "body"),
    ],
)  # fmt: skip
def test_a_wrong_question_is_refused_by_name(inside, body, field):
    answer = client().post("/api/verify", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert inside.calls == []


def test_a_model_that_was_never_loaded_has_nothing_to_compare(inside):
    answer = client(Pool(None)).post("/api/verify", json={"model": "gemma"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "model"


def test_what_another_site_could_send_unasked_is_refused(inside):
    answer = client().post("/api/verify", content="{}", headers={"content-type": "text/plain"})
    assert answer.status_code == 415
    assert inside.calls == []


def test_one_comparison_at_a_time(inside):
    begun, go_on = threading.Event(), threading.Event()

    def says(what, on_event):
        begun.set()
        assert go_on.wait(20)
        return outcome()

    inside.says = says
    with client() as found:
        first = threading.Thread(target=found.post, args=("/api/verify",), kwargs={"json": {}})
        first.start()
        assert begun.wait(20)
        assert found.post("/api/verify", json={}).status_code == 409
        go_on.set()
        first.join(20)
        assert found.post("/api/verify", json={}).status_code == 200


def test_a_client_that_leaves_ends_the_process(inside):
    import asyncio

    ended = threading.Event()

    def says(what, on_event):
        try:
            for _ in range(1000):
                on_event({"event": "alive", "value": None})
                time.sleep(0.01)
        finally:
            ended.set()
        return outcome()

    inside.says = says

    async def leave():
        asking = verifying._Verifying(Pool())
        asking._is_busy = True
        stream = asking._told({"what": "room"})
        await anext(stream)
        await asyncio.sleep(0.1)
        await stream.aclose()
        await asyncio.to_thread(ended.wait, 20)
        while asking._is_busy:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(leave(), 40))
    assert ended.is_set()


def test_the_comparisons_are_those_of_verify():
    allowed = set(verifying.wire.VerifyRequest.model_fields["against"].annotation.__args__)
    assert allowed < set(comparisons.AGAINST)


def test_nothing_is_told_after_the_work_is_over(monkeypatch):
    lines = []
    monkeypatch.setattr(verifying_inside, "_plan", lambda request: None)
    monkeypatch.setattr(verifying_inside, "ALIVE_S", 0.01)

    def check_room(plan):
        end = time.monotonic() + 20
        while len(lines) < 3 and time.monotonic() < end:
            time.sleep(0.001)

    monkeypatch.setattr(verifying_inside, "check_room", check_room)
    verifying_inside.main({"what": "room"}, lines.append)
    count = len(lines)
    time.sleep(0.05)
    assert len(lines) == count > 2


@pytest.mark.parametrize("free,needed", [(9, 10), (10, 10)])
def test_room_is_what_the_machine_has_now(monkeypatch, free, needed):
    from trimtab.runtime import devices

    machine = SimpleNamespace(on_cpu=False, execution_device="cuda:0", gpu_free_bytes=free, host_available_bytes=99)
    monkeypatch.setattr(devices, "read_machine", lambda device: machine)
    plan = SimpleNamespace(request=SimpleNamespace(device="cuda:0"), gpu_needed_bytes=needed, host_peak_bytes=5)
    if needed <= free:
        verifying_inside.check_room(plan)
        return
    with pytest.raises(DoesNotFitError) as caught:
        verifying_inside.check_room(plan)
    assert (caught.value.device, caught.value.needed_bytes, caught.value.budget_bytes) == ("cuda:0", 10, 9)
    assert caught.value.hint == verifying_inside.HINT


def test_the_api_process_imports_no_torch():
    code = "import sys, trimtab.serve.verifying, trimtab.serve.page; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


@pytest.mark.parametrize("names", [(), ("style",), ("style", "specialist"), ("later",)])
def test_the_compared_plan_is_one_that_can_be_read_back(names):
    folders = {name: str(DEMO / "adapters" / name) for name in ("style", "specialist")}
    plan = trimtab.plan(DEMO / "base", quant="none", context=64, device="cpu", adapters=folders)
    adapters = {name: folders.get(name, folders["style"]) for name in names}
    made = verifying_inside._plan({"plan": plan.to_json(), "adapters": adapters})
    assert dict(made.request.adapters) == adapters and made.placements == plan.placements
    assert Plan.from_json(json.loads(json.dumps(made.to_json()))) == made


# Keys and values in 8 bits --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kv8_plan():
    """A running plan as the pool has it: one layer streamed from disk, one adapter, keys and values in 8 bits."""
    plan = trimtab.plan(
        DEMO / "base", quant="none", context=64, batch=2, device="cpu", images=0, audio_s=0, kv="int8",
        adapters={"style": str(DEMO / "adapters" / "style")}, place={"model.language_model.layers.1": "disk"},
    )  # fmt: skip
    return json.loads(json.dumps(plan.to_json()))


class Kv8Pool(Pool):
    def running(self, model):
        return "demo", self.plan, {"style": str(DEMO / "adapters" / "style")}


@pytest.fixture
def in_this_process(monkeypatch):
    """Run the child's code here, without the comparison's two routes. Keeps the plan whose room is looked for, and the case."""
    from trimtab.proof import verify

    kept = SimpleNamespace(room=None, case=None, error=None)

    def run_inside(module, request, *, timeout_s, on_event):
        try:
            verifying_inside.main(request["request"], on_event)
        except TrimtabError as exc:
            kept.error = exc
            return outcome({"event": "error", **exc.to_dict()})
        return outcome()

    def compare(case, given, rows, work, **options):
        kept.case = case
        return SimpleNamespace()

    monkeypatch.setattr(verifying, "run_inside", run_inside)
    monkeypatch.setattr(verifying_inside, "_give_way", lambda: None)
    monkeypatch.setattr(verifying_inside, "check_room", lambda plan: setattr(kept, "room", plan))
    monkeypatch.setattr(verifying_inside, "report_json", lambda report: {**REPORT, "findings": ["of the report"]})
    monkeypatch.setattr(verify, "prepare", lambda *arguments, **options: [])
    monkeypatch.setattr(verify, "_compare", compare)
    return kept


def test_a_server_with_8_bit_keys_and_values_compares_a_copy_with_full_ones_and_says_so(in_this_process, kv8_plan):
    answer = client(Kv8Pool(kv8_plan)).post("/api/verify", json={"adapter": "style"})
    lines = [json.loads(line) for line in told(answer)[:-1]]
    assert lines[-1] == {"report": {**REPORT, "findings": [verifying_inside.KV_NOTE, "of the report"]}}
    served, copied = Plan.from_json(kv8_plan), in_this_process.case.subject.plan
    assert (served.request.kv, copied.request.kv) == ("int8", "full")
    assert copied.tiers() == served.tiers() and copied.tier_of("model.language_model.layers.1") == "disk"
    # The reference has every weight resident and full keys and values too.
    assert in_this_process.case.reference.request.kv == "full"
    # What must have room is the copy with full ones, of the files that the server loaded.
    room = in_this_process.room
    assert (room.request, room.gpu) == (copied.request, copied.gpu)
    assert room.gpu["kv_cache"] > served.gpu["kv_cache"]
    assert (room.checkpoint_stamps, room.adapter_stamps) == (served.checkpoint_stamps, served.adapter_stamps)


def test_want_of_room_for_full_keys_and_values_is_told(in_this_process, kv8_plan, monkeypatch):
    def plan_request(request, **options):
        raise DoesNotFitError("no", block=None, device="cuda:0", needed_bytes=9, budget_bytes=8, hint="Lower --context")

    monkeypatch.setattr("trimtab.api.plan_request", plan_request)
    answer = client(Kv8Pool(kv8_plan)).post("/api/verify", json={})
    error = json.loads(told(answer)[-1])["error"]
    assert (error["class"], error["fields"]["needed_bytes"]) == ("DoesNotFitError", 9)
    assert "--context" not in answer.text and in_this_process.error.hint == verifying_inside.HINT


def test_a_server_with_full_keys_and_values_says_nothing_of_8_bits(in_this_process, kv8_plan):
    plan = {**kv8_plan, "request": {**kv8_plan["request"], "kv": "full"}}
    lines = told(client(Kv8Pool(plan)).post("/api/verify", json={"adapter": "style"}))
    assert json.loads(lines[-2]) == {"report": {**REPORT, "findings": ["of the report"]}}


def test_a_full_temporary_folder_is_an_error_of_ours(monkeypatch):
    def no_room(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(verifying, "run_inside", no_room)
    with pytest.raises(DeviceError) as caught:
        verifying._compare({}, print)
    assert "No space left on device" in str(caught.value) and "TMPDIR" in caught.value.hint
