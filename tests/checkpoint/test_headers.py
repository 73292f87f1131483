"""Whether the header reader gives what the safetensors library wrote, and refuses every file that lies."""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests import ROOT
from tests.examples import examples
from tests.raised import raised
from trimtab.checkpoint.headers import DTYPES, MAX_HEADER_BYTES, is_finite, read_header
from trimtab.errors import CheckpointError

# One float16 tensor "a" of shape [2], then its four bytes of data: 8 + 56 + 4 bytes.
VALID = b'\x38\0\0\0\0\0\0\0{"a":{"dtype":"F16","shape":[2],"data_offsets":[0,4]}}  \x01\x02\x03\x04'


def written(folder: Path, content: bytes) -> Path:
    file = folder / "model.safetensors"
    file.write_bytes(content)
    return file


def framed(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def refusal(folder: Path, content: bytes) -> CheckpointError:
    file = written(folder, content)
    error = raised(CheckpointError, read_header, file)
    assert error.path == str(file)
    return error


def refusal_of(folder: Path, tensors: dict[str, Any], data: bytes = bytes(4)) -> CheckpointError:
    return refusal(folder, framed(json.dumps(tensors).encode(), data))


# What is read ---------------------------------------------------------------------------------------------------------


def test_one_tensor_is_found_at_its_bytes(tmp_path: Path) -> None:
    file = written(tmp_path, VALID)
    header = read_header(file)
    (found,) = header.tensors.values()
    assert (found.tensor_name, found.dtype, found.shape, found.file) == ("a", "float16", (2,), file)
    assert (found.start, found.nbytes, header.metadata) == (64, 4, {})
    assert VALID[found.start : found.start + found.nbytes] == b"\x01\x02\x03\x04"


def test_a_text_path_is_as_good_as_a_path(tmp_path: Path) -> None:
    file = written(tmp_path, VALID)
    assert read_header(str(file)) == read_header(file)


def test_a_file_without_tensors_is_empty_and_sound(tmp_path: Path) -> None:
    assert read_header(written(tmp_path, framed(b"{}"))).tensors == {}


def test_empty_tensors_and_scalars_have_their_place(tmp_path: Path) -> None:
    tensors = {"none": entry(shape=[0, 7], offsets=[0, 0]), "one": entry("F32", [], [0, 4]), "end": entry("I64", [0], [4, 4])}
    header = read_header(written(tmp_path, framed(json.dumps(tensors).encode(), bytes(4))))
    start = header.path.stat().st_size - 4
    assert [(e.shape, e.start - start, e.nbytes) for e in header.tensors.values()] == [((0, 7), 0, 0), ((), 0, 4), ((0,), 4, 0)]


def test_tensors_may_be_listed_in_another_order_than_they_lie(tmp_path: Path) -> None:
    tensors = {"second": entry(offsets=[4, 8]), "first": entry(offsets=[0, 4])}
    header = read_header(written(tmp_path, framed(json.dumps(tensors).encode(), bytes(8))))
    assert header.tensors["second"].start == header.tensors["first"].start + 4 and list(header.tensors) == ["second", "first"]


def test_metadata_is_text_by_text(tmp_path: Path) -> None:
    header = read_header(written(tmp_path, framed('{"__metadata__":{"format":"pt","ключ":"é"}}'.encode())))
    assert header.metadata == {"format": "pt", "ключ": "é"} and header.tensors == {}


def test_reading_needs_neither_torch_nor_the_safetensors_library() -> None:
    code = (
        "import sys, trimtab.checkpoint.headers, trimtab.checkpoint.folder, trimtab.formats.packed\n"
        "import trimtab.checkpoint.names\n"
        "print([name for name in ('torch', 'safetensors', 'transformers', 'numpy') if name in sys.modules])"
    )
    root = ROOT
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("dtype", sorted(spelled for spelled, _ in DTYPES.values()))
def test_what_the_library_writes_comes_back(tmp_path: Path, dtype: str) -> None:
    real: torch.dtype = getattr(torch, dtype)
    source = {
        "matrix": torch.arange(24).reshape(4, 6).to(real), "scalar": torch.tensor(1).to(real),
        "empty": torch.zeros(0, 3).to(real), "a.ключ \"1\"\\": torch.ones(3).to(real),
    }  # fmt: skip
    file = tmp_path / "model.safetensors"
    save_file(source, file, metadata={"format": "pt"})
    header, content = read_header(file), file.read_bytes()
    assert header.metadata == {"format": "pt"} and set(header.tensors) == set(source)
    for name, tensor in source.items():
        found = header.tensors[name]
        assert (found.dtype, found.shape) == (dtype, tuple(tensor.shape))
        stored = content[found.start : found.start + found.nbytes]
        assert stored == bytes(tensor.reshape(-1).view(torch.uint8).tolist())


# What is refused: the file --------------------------------------------------------------------------------------------


def torch_saved(*, as_zip: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save({"weight": torch.ones(4)}, buffer, _use_new_zipfile_serialization=as_zip)
    return buffer.getvalue()


@pytest.mark.parametrize(("content", "said", "hint"), [
    (b"", "has 0 B", ""), (b"\x02\0\0\0\0\0\0", "has 7 B", ""),
    (b"\x80\x02\0\0\0\0\0\0{}", "header of 640 B is longer", "truncated"),
    (b"\x39\0\0\0\0\0\0\0{}", "header of 57 B is longer than the file (10 B)", "truncated"),
    (b"GGUF\x03\0\0\0" + bytes(64), "GGUF", ""), (framed(b"{}", b"\0"), "1 B follow the last tensor", ""),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\n", "Git LFS pointer", "git lfs pull"),
    *((pickle.dumps(value, protocol=protocol), "is a pickle", "Convert it to safetensors")
      for protocol in (2, 3, 4, 5) for value in (None, {"weight": [1.0] * 100})),
    *((torch_saved(as_zip=as_zip), "is a pickle", "Convert it to safetensors") for as_zip in (True, False)),
], ids=lambda value: str(value)[:30])  # fmt: skip
def test_file_that_is_none_is_refused_as_what_it_is(tmp_path: Path, content: bytes, said: str, hint: str) -> None:
    error = refusal(tmp_path, content)
    assert said in str(error) and hint in error.hint


def test_header_over_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    file = written(tmp_path, (MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
    with open(file, "r+b") as handle:
        handle.truncate(MAX_HEADER_BYTES + 100)  # sparse: takes no disk
    with pytest.raises(CheckpointError, match="100000001 B is over the limit of 100000000 B"):
        read_header(file)


def test_file_that_is_cut_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, VALID[:62])  # without the last two spaces of the header and the data
    monkeypatch.setattr(os, "fstat", lambda _: SimpleNamespace(st_size=len(VALID)))
    with pytest.raises(CheckpointError, match="changed while it was read"):
        read_header(file)


@pytest.mark.parametrize("name", ["none.safetensors", "", "a\0b"], ids=["missing", "a folder", "a null character"])
def test_path_of_no_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(str(tmp_path / name))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
)
@pytest.mark.parametrize("size", [1, 2**16 + 3])
def test_a_value_that_is_no_number_is_found_wherever_it_is(tmp_path: Path, dtype: torch.dtype, size: int) -> None:
    plain = torch.full((size,), torch.finfo(dtype).max, dtype=torch.float64)
    infinite = () if dtype == torch.float8_e4m3fn else (torch.inf, -torch.inf)  # it has none
    values = [None, torch.nan, -torch.nan, *infinite]
    for value, place in itertools.product(values, {0, size // 2, size - 1}):
        tensor = -plain if value is None else plain.clone()
        tensor[place] = tensor[place] if value is None else value
        tensor = tensor.to(dtype)
        save_file({"w": tensor}, tmp_path / "w.safetensors")
        entry = read_header(tmp_path / "w.safetensors").tensors["w"]
        assert is_finite(entry, entry.dtype) is (value is None) is bool(tensor.double().isfinite().all())


# What is refused: the header ------------------------------------------------------------------------------------------


SIZE = '{"a":{"dtype":"U8","shape":[%s],"data_offsets":[0,0]}}'
HEADERS = {
    "does not start with '{'": [b"", b'[{"a":1}]', b'"a"', b" {}", b"\xef\xbb\xbf{}"],
    "not UTF-8": [b'{"\xff":1}'],
    "not JSON": [b'{"a":', b"{}{}", b"{}\0", b"{'a':1}", b'{"a":' + b"[" * 100_000],
    "keys twice: a": [b'{"__metadata__":{"a":"1","a":"2"}}'],
    "is not a size": [(SIZE % number).encode() for number in ("-0", "1" * 21, "1" * 5000)],
    **{f"{constant} is not JSON": [f'{{"a":{constant}}}'.encode()] for constant in ("NaN", "Infinity", "-Infinity")},
}


@pytest.mark.parametrize(
    ("said", "header"), [(said, one) for said, headers in HEADERS.items() for one in headers], ids=lambda value: str(value)[:40]
)
def test_what_is_no_header_is_refused(tmp_path: Path, said: str, header: bytes) -> None:
    assert said in str(refusal(tmp_path, framed(header)))


@pytest.mark.parametrize(("header", "name", "said"), [
    (b'{"a":%s,"a":%s}' % (b'{"dtype":"U8","shape":[1],"data_offsets":[0,1]}', b'{"dtype":"U8","shape":[1],"data_offsets":[1,2]}'),
     "a", "occurs twice"),
    (b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', "a", "each once"),
    (b'{"a\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', "a\\ud800", "not valid Unicode"),
])  # fmt: skip
def test_a_name_or_key_twice_and_half_a_letter_are_refused(tmp_path: Path, header: bytes, name: str, said: str) -> None:
    error = refusal(tmp_path, framed(header, bytes(2)))
    assert error.tensor_name == name and said in str(error) and str(error).encode("utf-8")


@pytest.mark.parametrize("found", [[], "x", 1, None, {"a": 1}, {"a": None}, {"a": {"b": "c"}}])
def test_metadata_that_is_not_text_by_text_is_refused(tmp_path: Path, found: Any) -> None:
    assert "__metadata__ is not a map from text to text" in str(refusal_of(tmp_path, {"__metadata__": found}, b""))


ITEMS = {
    "is not {dtype, shape, data_offsets}": [1, None, [], "U8", {}, {"dtype": "U8", "shape": [4]}, entry() | {"strides": [1]}],
    "bad shape": [entry(shape=one) for one in (
        [-4], [4.0], [True, 4], ["4"], [None], 4, "4", None, {}, [2**63], [1] * 65, [[4]],
    )],
    "too large": [entry(shape=one, offsets=[0, 0]) for one in (
        [2**62, 2], [2**32, 2**31], [2**32, 2**32], [2**40, 0, 2**40], [2**62, 4, 0],
    )],
    "bad offsets": [entry(offsets=one) for one in (
        [0], [0, 4, 8], [0.0, 4], [0, "4"], [-4, 0], [False, 4], [0, 2**63], [4, 0], None, 4, "04", {},
    )],
    "(known: BOOL, U8, I8, ": [entry(one) for one in ("F128", "f16", "", 1, None, ["U8"], "F4", "x" * 10_000)],
    **{f"has 6 B, its dtype {dtype} and shape {shape} need {need} B": [entry(dtype, shape, [0, 6])]
       for dtype, shape, need in (("U8", [3], 3), ("U8", [5], 5), ("F32", [], 4), ("F16", [2, 0], 0))},
}  # fmt: skip


@pytest.mark.parametrize(("said", "item"), [(said, item) for said, items in ITEMS.items() for item in items], ids=repr)
def test_what_describes_no_tensor_is_refused(tmp_path: Path, said: str, item: Any) -> None:
    error = refusal_of(tmp_path, {"a": item})
    assert error.tensor_name == "a" and said in str(error) and len(str(error)) < 1000


# What is refused: the layout ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("entries", "nbytes", "name", "said"), [
    ({"a": entry(), "b": entry(offsets=[4, 8])}, 7, "b", "The file is truncated"),
    ({"a": entry(), "b": entry(offsets=[3, 7])}, 7, "b", "overlaps the tensor before it by 1 B"),
    ({"a": entry(), "b": entry()}, 4, "b", "overlaps the tensor before it by 4 B"),
    ({"a": entry(), "b": entry(shape=[0], offsets=[2, 2])}, 4, "b", "overlaps"),
    ({"a": entry(offsets=[1, 5])}, 5, "a", "a gap of 1 B"), ({"a": entry(), "b": entry(offsets=[6, 10])}, 10, "b", "a gap of 2 B"),
    ({"a": entry(shape=[6], offsets=[0, 6]), "b": entry(shape=[2], offsets=[1, 3]), "c": entry(shape=[1], offsets=[3, 4])}, 6, "b",
     "overlaps the tensor before it by 5 B (and 1 more: c: overlaps the tensor before it by 3 B)"),
    ({"a": entry()}, 7, None, "3 B follow the last tensor"),
], ids=[
    "cut", "by a byte", "the same bytes", "an empty one inside", "a hole in front", "a hole between", "two inside", "more bytes"
])  # fmt: skip
def test_data_that_the_tensors_do_not_cover_once_is_refused(
    tmp_path: Path, entries: dict[str, Any], nbytes: int, name: str | None, said: str
) -> None:
    error = refusal_of(tmp_path, entries, bytes(nbytes))
    assert error.tensor_name == name and said in str(error)


def test_every_wrong_tensor_is_named_at_once(tmp_path: Path) -> None:
    wrong = {f"bad{number}": entry("F128") for number in range(9)}
    error = refusal_of(tmp_path, {"good": entry()} | wrong)
    assert error.tensor_name == "bad0" and "and 8 more: bad1: unknown dtype" in str(error)
    assert "good" not in str(error)
    assert "bad6" not in str(error)  # a broken file of thousands of tensors must not fill the screen


# Whatever the bytes are -----------------------------------------------------------------------------------------------

_MIXED = framed(
    json.dumps(
        {
            "__metadata__": {"format": "pt"}, "a.weight": entry("BF16", [2, 3], [0, 12]),
            "a.bias": entry("F32", [], [12, 16]),
            "empty": entry("U8", [0], [16, 16]), "b": entry("I64", [1], [16, 24]),
        }
    ).encode(),
    bytes(range(24)),
)  # fmt: skip


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("headers")


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    content = bytearray(_MIXED)
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(("flip", "cut", "insert", "swap", "length")))
        at = draw(st.integers(0, max(len(content) - 1, 0)))
        if kind == "flip" and content:
            content[at] ^= draw(st.integers(1, 255))
        elif kind == "cut":
            del content[at : at + draw(st.integers(1, 40))]
        elif kind == "insert":
            content[at:at] = draw(st.sampled_from((b"0", b"-", b"1", b",", b"]", b'"', b"{", b"}", b"[", b"\\ud800", b"e9")))
        elif kind == "swap":
            content[at : at + 1] = draw(st.binary(max_size=3))
        else:
            content[:8] = draw(st.integers(0, len(content))).to_bytes(8, "little")
    return bytes(content)


def _check_never_lies(scratch: Path, content: bytes) -> None:
    """A file is refused with CheckpointError, or read as the library reads it, each byte of its data covered once."""
    file = written(scratch, content)
    try:
        header = read_header(file)
    except CheckpointError:
        return
    known = {name: (found["shape"], bytes(found["data"])) for name, found in safetensors.deserialize(content)}
    assert known == {
        name: (list(found.shape), content[found.start : found.start + found.nbytes]) for name, found in header.tensors.items()
    }
    assert sum(found.nbytes for found in header.tensors.values()) == len(content) - 8 - int.from_bytes(content[:8], "little")


@given(content=mutations())
@settings(max_examples=examples(600), deadline=None)
def test_a_damaged_file_is_refused_or_read_as_the_library_reads_it(scratch: Path, content: bytes) -> None:
    _check_never_lies(scratch, content)


@given(content=st.binary(max_size=64) | st.builds(framed, st.binary(max_size=48), st.binary(max_size=16)))
@settings(max_examples=examples(200), deadline=None)
def test_random_bytes_are_refused_or_read_as_the_library_reads_them(scratch: Path, content: bytes) -> None:
    _check_never_lies(scratch, content)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**65) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=6,
)  # fmt: skip
_ENTRIES = st.fixed_dictionaries({
    "dtype": st.sampled_from(("U8", "F16", "BF16", "F64")) | _JSON, "shape": st.lists(st.integers(0, 4), max_size=3) | _JSON,
    "data_offsets": st.lists(st.integers(0, 12), min_size=2, max_size=2) | _JSON,
})  # fmt: skip


@given(tensors=st.dictionaries(st.text(max_size=3), _ENTRIES | _JSON, max_size=3), data=st.binary(max_size=12))
@settings(max_examples=examples(400), deadline=None)
def test_any_json_header_is_refused_or_read_as_the_library_reads_it(scratch: Path, tensors: Any, data: bytes) -> None:
    _check_never_lies(scratch, framed(json.dumps(tensors).encode(), data))
