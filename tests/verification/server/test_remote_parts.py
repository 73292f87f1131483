"""A server that drops the part of an adapter on a tower: seen with images and sounds, on the demo's specialist."""

import pytest

import trimtab
from bench.planted import Planted
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.verification.server import choosing
from trimtab.verification.server.faults import write_faults
from trimtab.verification.server.verify import verify_remote

pytestmark = pytest.mark.slow
BASE, SPECIALIST = DEMO / "base", DEMO / "adapters" / "specialist"
# The planted faults, by the name under which the server holds them.
DROPPED = {name: name.replace(" ", "-") for name in ("vision part dropped", "audio part dropped", "tower parts dropped")}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The demo model with the specialist, right and with the part on each tower dropped."""
    plan = trimtab.plan(
        BASE, adapters=dict.fromkeys(("right", *DROPPED.values()), SPECIALIST), quant="none", context=1024, images=1,
        audio_s=5.0,
    )  # fmt: skip
    with trimtab.load(plan, decode="eager") as model:
        faults, _ = write_faults(model.adapter_spec("right"), tmp_path_factory.mktemp("faults"), {})
        for fault in faults:
            if fault.name in DROPPED:
                model.unload_adapter(DROPPED[fault.name])
                model.load_adapter(DROPPED[fault.name], fault.folder)
        yield model


def ask(served, name, **options):
    planted = Planted(served, {"m": DROPPED.get(name, name), "b": None}, **options)
    return verify_remote(
        BASE, adapters={"specialist": SPECIALIST}, against="http://host/v1", remote_model="m", remote_base="b",
        transport=planted.transport(), quant="none", new_tokens=4,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def few_texts(monkeypatch):
    monkeypatch.setattr(choosing, "GENERATED", 4)


@pytest.mark.parametrize("name", DROPPED)
def test_the_part_of_a_tower_that_is_dropped_is_named(served, name):
    report = ask(served, name)
    assert (report.verdict.word, report.verdict.fault) == ("wrong", name), str(report)
    assert report.requests <= 200


def test_the_right_specialist_is_alive_and_texts_say_nothing_of_its_towers(served):
    report = ask(served, "right")
    assert report.verdict.word == "alive", str(report)
    assert set(DROPPED) <= set(report.verdict.excluded)
    weighed = {one.name: one for one in report.verdict.weighed}
    counts = {kind: sum(one.kind == kind for one in report.answered) for kind in ("text", "image", "audio")}
    assert all(counts.values()) and weighed["vision part dropped"].questions <= counts["image"]
    assert weighed["audio part dropped"].questions <= counts["audio"]


def test_a_server_that_takes_no_images_leaves_the_towers_open(served):
    report = ask(served, "vision part dropped", kinds=("completions",))
    assert report.verdict.word == "cannot tell", str(report)
    assert {"vision part dropped", "audio part dropped"} <= set(report.verdict.unseen)
    assert [note for note in report.notes if note.startswith("image questions were not sent")]
