"""What a merge is asked: adapters with weights from a command line, and options that change nothing are refused."""

from __future__ import annotations

import pytest

from tests.raised import refused
from trimtab.errors import RequestError
from trimtab.merging.changes.request import MergeRequest, Part, full_dtype, parse_adapter, parse_adapters, parts_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=path", Part("a", "path")),
        ("a=path:0.7", Part("a", "path", 0.7)),
        ("a=path:-1", Part("a", "path", -1.0)),
        ("a=path:.5", Part("a", "path", 0.5)),
        ("a=path:1e-3", Part("a", "path", 0.001)),
        ("a=/x/y=z:2", Part("a", "/x/y=z", 2.0)),
        (r"a=C:\adapters\law", Part("a", r"C:\adapters\law")),
        (r"a=C:\adapters\law:0.5", Part("a", r"C:\adapters\law", 0.5)),
        ("a=C:/adapters/law:-1", Part("a", "C:/adapters/law", -1.0)),
        # On drive C the folder 7, relative to where C is: a drive letter takes no weight.
        ("a=C:7", Part("a", "C:7")),
        ("a=dir:name", Part("a", "dir:name")),
        ("a=dir:2:1", Part("a", "dir:2", 1.0)),
        ("a=1:2", Part("a", "1", 2.0)),
    ],
)
def test_a_flag_is_taken_apart(text: str, expected: Part) -> None:
    assert parse_adapter(text) == expected


@pytest.mark.parametrize("text", ["=path", "a=", "", "a=path:", "a=:1", "=", "path:"])
def test_a_flag_that_names_no_adapter_is_refused(text: str) -> None:
    error = refused(parse_adapter, text)
    assert (error.field, error.value) == ("adapter", text) and "NAME=PATH:WEIGHT" in error.allowed


@pytest.mark.parametrize("text", ["a=path:0", "a=path:-0.0", "a=path:nan", "a=path:inf", "a=path:-Infinity"])
def test_a_weight_that_is_zero_or_no_number_is_refused(text: str) -> None:
    error = refused(parse_adapter, text)
    assert (error.field, error.value) == ("adapter", text)


@pytest.mark.parametrize("weight", [0, float("nan"), float("inf"), True, "1"])
def test_a_weight_in_a_call_is_checked_as_well(weight: object) -> None:
    with pytest.raises(RequestError) as caught:
        parts_of({"law": ("folder", weight)})  # type: ignore[dict-item]
    assert caught.value.field == "adapters['law']"


def test_a_name_given_twice_is_refused() -> None:
    assert refused(parse_adapters, ["a=x", "b=y", "a=z"]).value == "a"
    with pytest.raises(RequestError):
        MergeRequest(model="m", out="o", adapters=(Part("a", "x"), Part("a", "y")))


@pytest.mark.parametrize(("options", "field"), [
    ({"dtype": "int8"}, "dtype"), ({"requantize": "fp4"}, "requantize"), ({"adapters": (Part("a b", "x"),)}, "adapters"),
    ({"adapters": (Part("", "x"),)}, "adapters"), ({"out": ""}, "out"),
])  # fmt: skip
def test_options_are_checked(options: dict[str, object], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        MergeRequest(**({"model": "m", "out": "o"} | options))  # type: ignore[arg-type]
    assert caught.value.field == field


def test_short_dtypes_are_spelled_out() -> None:
    assert [full_dtype(text) for text in ("bf16", "fp16", "fp32", "float16", None)] == [
        "bfloat16", "float16", "float32", "float16", None,
    ]  # fmt: skip
