"""Where E4B does not fit: what E2B would need, planned from its sizes, and nothing of the kind for other models."""

import re

import pytest

from tests.doctor.preflight.test_preflight import BASE, gpu, judge, sized
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.doctor.preflight import answer
from trimtab.doctor.preflight.answer import DOES_NOT_FIT, SPLIT, has_smaller, smaller_shape
from trimtab.doctor.preflight.shape import shape_of

GIB = 2**30


def card(total_gib: float):
    """A machine whose whole budget is this: the driver's share comes out of it."""
    return gpu(total_gib - gpu(8, 24).context_bytes / GIB, 24)


@pytest.fixture(scope="module")
def e4b(tmp_path_factory):
    return sized("e4b", tmp_path_factory.mktemp("sizes"))


@pytest.fixture(scope="module")
def e2b(tmp_path_factory):
    return sized("e2b", tmp_path_factory.mktemp("sizes"))


def test_e4b_at_two_gib_names_e2b_with_what_it_needs(e4b, e2b):
    found = judge(e4b, machine=card(2)).answer
    assert found.kind == DOES_NOT_FIT
    named = re.search(r"E2B of the same family, as asked \(([\d.]+) GiB of ([\d.]+) GiB\)", found.reason)
    assert named, found.reason
    assert float(named[1]) <= float(named[2]) == 2.0
    # The figure is that of a plan for an E2B of the benchmarks on the same card.
    own = judge(e2b, machine=card(2)).answer
    assert own.kind == SPLIT
    assert float(named[1]) == pytest.approx(own.plan.gpu_needed_bytes / GIB, abs=0.006)


def test_e2b_is_not_named_where_it_does_not_fit_either(e4b, monkeypatch):
    monkeypatch.setattr(answer, "_fitting_ways", lambda asking: [])  # 0.5 GiB hold no way; planning each takes long
    found = judge(e4b, machine=card(0.5)).answer
    assert found.kind == DOES_NOT_FIT and "E2B" not in found.reason
    assert "No smaller context, head or prompt fits." in found.reason


def test_other_models_and_e2b_itself_are_sent_to_no_other(e4b, e2b, monkeypatch):
    monkeypatch.setattr(answer, "smaller_shape", lambda **_: pytest.fail("another model was planned"))
    for model in (e2b, BASE):
        found = judge(model, machine=card(0.5)).answer
        assert "E2B" not in found.reason and "same family" not in found.reason
    assert [has_smaller(read_checkpoint(model).config) for model in (e4b, e2b, BASE)] == [True, False, False]
    assert not has_smaller({"text_config": None}) and not has_smaller({})


def test_the_sizes_are_those_of_the_benchmarks(e2b):
    assert (
        smaller_shape(quant="nf4-dq", dtype="bfloat16", python=None).anatomy == shape_of(str(e2b), {}, "nf4-dq", "bfloat16").anatomy
    )
