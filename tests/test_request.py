"""What a request to load takes: every wrong value is a RequestError that names its field, numpy's numbers are numbers."""

import numpy
import pytest

import trimtab
from tests.test_vocabulary import BASE
from trimtab.errors import RequestError
from trimtab.request import parse_bytes


@pytest.mark.parametrize(
    "field, value",
    [
        ("audio_s", "5"), ("audio_s", float("nan")), ("device", None), ("place", ["*"]), ("keep_unquantized", "lm_head"),
        ("gpu_memory", "9" * 330 + "G"), ("gpu_memory", "1" * 5000 + "GiB"), ("context", numpy.float32(512)),
    ],
    ids=lambda value: str(value)[:12],
)  # fmt: skip
def test_a_value_of_another_kind_is_named(field, value):
    with pytest.raises(RequestError) as caught:
        trimtab.plan(BASE, **{"device": "cpu", field: value})
    assert caught.value.field.startswith(field) and len(str(caught.value)) < 300


def test_numbers_of_numpy_are_numbers():
    assert parse_bytes(numpy.int64(2**31), field_name="gpu_memory") == 2**31
    assert trimtab.plan(BASE, device="cpu", audio_s=numpy.float32(5)).request.to_json()["audio_s"] == 5.0
