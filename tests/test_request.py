"""What a request takes: names of adapters in every form, sizes and types in their spellings; wrong values name their field."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import numpy
import pytest

import trimtab
import trimtab.demo as demo
from tests.cli.test_vocabulary import BASE
from tests.raised import refused
from trimtab.adapter_names import NamedAdapter, parse_adapter, parse_adapters, parse_unweighted, paths_of
from trimtab.cli.flags.wording import in_flags
from trimtab.errors import RequestError
from trimtab.request import BASE64_PIECE, GenerateRequest, LoadRequest, empty_place, from_base64, own_form, parse_bytes


@pytest.mark.parametrize(("text", "name", "path", "weight"), [
    ("adapters/medical", "medical", "adapters/medical", 1.0), ("adapters/medical/", "medical", "adapters/medical/", 1.0),
    ("medical", "medical", "medical", 1.0), ("adapters/medical:0.5", "medical", "adapters/medical", 0.5),
    ("runs/r=16", None, None, None), ("runs/r=16/law", "law", "runs/r=16/law", 1.0),
    (r"C:\\adapters\\law", "law", r"C:\\adapters\\law", 1.0), (r"C:\\adapters\\law:-1", "law", r"C:\\adapters\\law", -1.0),
    ("C:/adapters/law", "law", "C:/adapters/law", 1.0), ("checkpoint-500", "checkpoint-500", "checkpoint-500", 1.0),
])  # fmt: skip
def test_a_bare_path_is_named_after_its_folder(text: str, name: str, path: str, weight: float) -> None:
    if name is None:
        error = refused(parse_adapter, text, field="--adapter", match="Add a name: NAME=")
        assert (error.field, error.value) == ("--adapter", text)
        return
    assert parse_adapter(text) == NamedAdapter(name, path, weight)


def test_the_folder_one_is_in_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "law").mkdir()
    monkeypatch.chdir(tmp_path / "law")
    assert parse_adapter(".").name == "law"


def test_two_folders_of_one_name_are_refused() -> None:
    assert refused(parse_adapters, ["a/law", "b/law"], field="--adapter", match="two adapters").value == "law"
    error = refused(paths_of, ["a/law", Path("b/law")], match="two folders have the name law")
    assert error.field == "adapters" and '"two":' in error.hint


def test_a_weight_of_one_names_a_folder_that_ends_like_a_weight() -> None:
    assert parse_unweighted(["a=model:2:1"], field="--adapter") == {"a": "model:2"}
    with pytest.raises(RequestError, match="the weight 2 has no effect here"):
        parse_unweighted(["a=model:2"], field="--adapter")


@pytest.mark.parametrize(("given", "expected"), [
    (None, {}), ({}, {}), ("x/law", {"law": "x/law"}), (Path("x") / "law", {"law": os.path.join("x", "law")}),
    (["x/law", "y/art"], {"law": "x/law", "art": "y/art"}), ({"a": Path("x")}, {"a": "x"}),
])  # fmt: skip
def test_adapters_of_a_call(given: object, expected: dict[str, str]) -> None:
    assert paths_of(given) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "field"), [(3, "adapters"), ([3], "adapters"), ({"a": 3}, "adapters['a']"), ({"a": None}, "adapters['a']")]
)
def test_what_is_no_path_is_refused_by_name(given: object, field: str) -> None:
    with pytest.raises(RequestError, match="not a path") as caught:
        paths_of(given)  # type: ignore[arg-type]
    assert caught.value.field == field


# Sizes and types ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "expected"), [
    ("4GiB", 4 * 2**30), ("4G", 4 * 2**30), ("4g", 4 * 2**30), ("1TiB", 2**40), ("1T", 2**40), ("1TB", 10**12),
    ("4GB", 4 * 10**9), ("2.5 MiB", 5 * 2**19), ("8M", 8 * 2**20), ("16K", 16384), ("16KB", 16000), ("7B", 7),
    (4, 4), (4.5e9, 4_500_000_000), (None, None),
])  # fmt: skip
def test_sizes(value: object, expected: int) -> None:
    assert parse_bytes(value, field_name="gpu_memory") == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["4", 4.5, "4.5", "4X", "GiB", "", "4 4G", "-4G", True, float("nan"), float("inf"), [4]])
def test_what_is_no_size_is_refused(value: object) -> None:
    with pytest.raises(RequestError) as caught:
        parse_bytes(value, field_name="gpu_memory")  # type: ignore[arg-type]
    assert caught.value.field == "gpu_memory" and caught.value.value is value and "4GiB" in caught.value.allowed


def test_a_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        LoadRequest(model="m", adapters={1: "x"})  # type: ignore[dict-item]
    assert (caught.value.field, caught.value.value) == ("adapters", 1)


def test_a_number_alone_is_asked_for_its_unit() -> None:
    error = refused(parse_bytes, "4", field_name="--gpu-memory", match="needs a unit")
    assert error.hint == "Did you mean 4GiB? 4B is that many bytes"


@pytest.mark.parametrize(
    ("given", "expected"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"), ("float16", "float16")]
)
def test_types_have_two_spellings(given: str, expected: str) -> None:
    assert LoadRequest(model="m", dtype=given).dtype == expected


# Wording --------------------------------------------------------------------------------------------------------------

FLAGS = {
    "quant": "--quant", "gpu_memory": "--gpu-memory", "context_tokens": "--context", "context": "--context",
    "place": "--place", "adapter": "--use", "model": "MODEL", "out": "OUT",
    "overwrite": "--overwrite",
}  # fmt: skip


@pytest.mark.parametrize(("text", "field", "expected"), [
    ("quant='nf5': unknown choice", "quant", "--quant nf5: unknown choice"),
    ("context_tokens=0: must be 1", "context_tokens", "--context 0: must be 1"),
    ("context=-1.5: must be 1", "context", "--context -1.5: must be 1"),
    ("place=('', 1): is wrong", "place", "--place=('', 1): is wrong"),
    ("place['v']='x': unknown", "place['v']", "--place v=x: unknown"),
    ("--keep-unquantized=['v*']: names none", "keep_unquantized", "--keep-unquantized v*: names none"),
    ("DIR='/no': no such folder", "DIR", "DIR /no: no such folder"),
    ("Give gpu_memory=716324360; quant='nf4-dq' saves", None, "Give --gpu-memory 716324360B; --quant nf4-dq saves"),
    ("plan with a larger context=", None, "plan with a larger --context"),
    ("with a smaller gpu_memory.", None, "with a smaller --gpu-memory."),
    ("the model in place has a context", None, "the model in place has a context"),
    ("/a/quant=x/gpu_memory/y: no", "path", "/a/quant=x/gpu_memory/y: no"),
    ("adapter: none is given", "adapter", "--use: none is given"), ("out: is a file", "out", "OUT: is a file"),
    ("Give overwrite=True to replace it", "out", "Give --overwrite to replace it"),
    ("--gpu-memory='4': needs a unit", "--gpu-memory", "--gpu-memory 4: needs a unit"),
    ("--threads='': must be an integer", "--threads", "--threads='': must be an integer"),
])  # fmt: skip
def test_arguments_read_as_the_flags_of_the_command(text: str, field: str | None, expected: str) -> None:
    assert in_flags(text, field, FLAGS) == expected and in_flags(text, field, {}) == text


# load and plan --------------------------------------------------------------------------------------------------------


def test_a_model_by_its_path_is_planned_and_loaded(tmp_path: Path) -> None:
    options = {"adapters": [demo.ADAPTERS["style"]], "device": "cpu", "context": 64, "images": 0, "audio_s": 0.0}
    with trimtab.load(demo.BASE, **options) as model:
        assert model.adapters == ("style",) and model.context_tokens == 64
        model.plan.save(tmp_path / "plan.json")
    with trimtab.load(str(tmp_path / "plan.json")) as model:
        assert model.adapters == ("style",)


def test_options_of_load_are_checked_by_name() -> None:
    error = refused(trimtab.load, demo.BASE, contxt=5)
    assert (error.field, error.near) == ("contxt", ("context",))
    with pytest.raises(RequestError) as caught:
        trimtab.load(3)  # type: ignore[arg-type]
    assert caught.value.field == "plan"
    plan = trimtab.plan(demo.BASE, device="cpu", context=64, images=0, audio_s=0.0)
    error = refused(trimtab.load, plan, context=5, match="has no effect on a plan")
    assert (error.field, error.value) == ("context", 5)


@pytest.mark.parametrize(
    "field, value",
    [
        ("audio_s", "5"), ("audio_s", float("nan")), ("device", None), ("place", ["*"]), ("keep_unquantized", "lm_head"),
        ("gpu_memory", "9" * 330 + "G"), ("gpu_memory", "1" * 5000 + "GiB"), ("context", numpy.float32(512)),
    ],
    ids=lambda value: str(value)[:12],
)  # fmt: skip
def test_a_value_of_another_kind_is_named(field, value):
    error = refused(trimtab.plan, BASE, **{"device": "cpu", field: value})
    assert error.field.startswith(field) and len(str(error)) < 300


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
     ("logit_bias", {3: "b"}), ("logit_bias", [3]),
     # Values that could leave the numbers of float32.
     ("temperature", 1e-38), ("temperature", 9e-7), ("temperature", 101), ("temperature", float("nan")), ("temperature", -1e-9),
     ("repetition_penalty", 1e-39), ("repetition_penalty", 0), ("repetition_penalty", 1e38), ("repetition_penalty", float("nan")),
     ("top_p", float("nan")), ("min_p", float("inf")), ("top_k", 0)],
)  # fmt: skip
def test_an_option_of_an_answer_of_another_type_or_range_is_refused_by_name(field, value):
    assert refused(GenerateRequest, **{"temperature": 1.0, field: value}).field == field


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


PNG = "data:image/png;base64,UE5H"


@pytest.mark.parametrize(("part", "own"), [
    ({"type": "image_url", "image_url": {"url": PNG}}, {"type": "image", "image": b"PNG"}),
    ({"type": "image_url", "image_url": PNG}, {"type": "image", "image": b"PNG"}),
    ({"type": "image_url", "image_url": {"url": PNG, "detail": "low"}}, {"type": "image", "image": b"PNG", "detail": "low"}),
    ({"type": "input_audio", "input_audio": {"data": "V0FW", "format": "wav"}}, {"type": "audio", "audio": b"WAV"}),
    ({"type": "input_audio", "input_audio": {"data": "data:audio/wav;base64,V0FW"}}, {"type": "audio", "audio": b"WAV"}),
])  # fmt: skip
def test_openais_parts_become_our_own(part: dict[str, object], own: dict[str, object]) -> None:
    assert own_form(part) == own


@pytest.mark.parametrize(("part", "reason"), [
    ({"type": "image_url", "image_url": "https://example.org/a.png"}, "nothing is fetched"),
    ({"type": "image_url", "image_url": None}, "nothing is fetched"),
    ({"type": "input_audio", "input_audio": {"format": "wav"}}, "has no data"),
    ({"type": "input_audio", "input_audio": {"data": "V0F="  + "A" * BASE64_PIECE}}, "is not base64"),
    ({"type": "input_audio", "input_audio": {"data": "V0FW!"}}, "is not base64"),
    ({"type": "image_url", "image_url": "data:image/png;base64,"}, "is empty"),
])  # fmt: skip
def test_a_part_that_holds_nothing_to_read_is_refused(part: dict[str, object], reason: str) -> None:
    assert refused(own_form, part, match=reason).field == ("image" if part["type"] == "image_url" else "audio")


def test_base64_in_several_pieces_is_that_of_the_whole() -> None:
    data = os.urandom(BASE64_PIECE)  # a third longer as text
    assert from_base64("x" * 5 + base64.b64encode(data).decode(), field="image", start=5) == data


@pytest.mark.parametrize(("messages", "place"), [
    ([("user", "a")], None), ([("user", " ")], 0), ([("system", "a"), ("user", [])], 1), ([("system", " ")], 0),
    ([("user", "a"), ("assistant", "")], None), ([("user", [{"type": "image", "image": b""}])], None),
])  # fmt: skip
def test_a_chat_without_a_prompt_names_its_empty_message(messages: list[tuple[str, object]], place: int | None) -> None:
    assert empty_place([{"role": role, "content": content} for role, content in messages]) == place
