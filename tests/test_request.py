"""What a request to load takes: every wrong value is a RequestError that names its field, numpy's numbers are numbers."""

import numpy
import pytest

import trimtab
from tests.cli.test_vocabulary import BASE
from trimtab.errors import RequestError
from trimtab.request import GenerateRequest, LoadRequest, parse_bytes


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


def test_one_pattern_is_shown_as_a_list_of_it():
    with pytest.raises(RequestError, match=r"must be a list of patterns \(choices: \['lm_head'\]\)"):
        trimtab.plan(BASE, device="cpu", keep_unquantized="lm_head")


def test_numbers_of_numpy_are_numbers():
    assert parse_bytes(numpy.int64(2**31), field_name="gpu_memory") == 2**31
    assert trimtab.plan(BASE, device="cpu", audio_s=numpy.float32(5)).request.to_json()["audio_s"] == 5.0


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", "hot"), ("temperature", None), ("temperature", True), ("top_k", 2.5), ("top_k", "5"), ("top_p", "x"),
     ("min_p", [0.1]), ("repetition_penalty", {}), ("presence_penalty", "1"), ("frequency_penalty", None), ("seed", "a"),
     ("seed", 2**63), ("max_new_tokens", "5"), ("max_new_tokens", True), ("logprobs", 1.5), ("stop", 5), ("stop", [5]),
     ("stop", "end"), ("stop_token_ids", 5), ("stop_token_ids", ["a"]), ("logit_bias", 5), ("logit_bias", {"a": 1}),
     ("logit_bias", {3: "b"}), ("logit_bias", [3])],
)  # fmt: skip
def test_an_option_of_an_answer_of_another_type_is_refused_by_name(field, value):
    with pytest.raises(RequestError) as caught:
        GenerateRequest(**{"temperature": 1.0, field: value})
    assert caught.value.field == field


def test_options_of_numpy_become_pythons():
    request = GenerateRequest(
        max_new_tokens=numpy.int64(3), temperature=numpy.float32(0.5), seed=numpy.uint8(7), stop_token_ids=[numpy.int64(5)],
        logit_bias={numpy.int32(4): numpy.float64(1.5)},
    )  # fmt: skip
    expected = GenerateRequest(max_new_tokens=3, temperature=0.5, seed=7, stop_token_ids=(5,), logit_bias=((4, 1.5),))
    assert request == expected
    assert {type(value) for value in (request.max_new_tokens, request.temperature, request.seed)} == {int, float}


def test_torchs_own_dtypes_are_taken() -> None:
    import torch

    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16"), (torch.float32, "float32")):
        assert LoadRequest(model="m", dtype=dtype).dtype == name  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="unknown choice"):
        LoadRequest(model="m", dtype=torch.int8)  # type: ignore[arg-type]
