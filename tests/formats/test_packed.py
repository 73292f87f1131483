"""Packed weights are grouped with their statistics as stock has them, and every inconsistent group is refused by name."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.raised import raised
from trimtab.checkpoint.folder import Checkpoint, read_checkpoint
from trimtab.checkpoint.headers import TensorEntry
from trimtab.errors import CheckpointError
from trimtab.formats import bitsandbytes
from trimtab.formats.packed import split_packed
from trimtab.formats.record import PackedEntry

BNB = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
SPELLED = {"uint8": "U8", "int8": "I8", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32"}


@dataclass(frozen=True)
class Part:
    """A tensor to write; content None is zeros."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes | None = None

    def data(self) -> bytes:
        zeros = bytes(prod(self.shape) * {"uint8": 1, "int8": 1, "float32": 4, "int32": 4}.get(self.dtype, 2))
        return zeros if self.content is None else self.content


def checkpoint(folder: Path, parts: Mapping[str, Part], config: Mapping[str, Any] | None = None) -> Checkpoint:
    tensors, data = {}, b""
    for name, part in parts.items():
        content = part.data()
        place = [len(data), len(data) + len(content)]
        tensors[name] = {"dtype": SPELLED[part.dtype], "shape": list(part.shape), "data_offsets": place}
        data += content
    header = json.dumps(tensors).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    (folder / "config.json").write_text(json.dumps(BNB if config is None else config), encoding="utf-8")
    return read_checkpoint(folder)


def state_part(state: Any) -> Part:
    content = state if isinstance(state, bytes) else json.dumps(state).encode()
    return Part("uint8", (len(content),), content)


STATE = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [8, 64]}
NESTED = {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5}
STATE_NAME = "l.weight.quant_state.bitsandbytes__nf4"


def four_bit(state: Mapping[str, Any] = STATE) -> dict[str, Part]:
    """Return a sound group of an [8, 64] weight."""
    return {
        "l.weight": Part("uint8", (256, 1)), "l.weight.absmax": Part("float32", (8,)),
        "l.weight.quant_map": Part("float32", (16,)), STATE_NAME: state_part(state),
    }  # fmt: skip


def nested(state: Mapping[str, Any] | None = None) -> dict[str, Part]:
    """Return a sound double-quantized group of an [8, 64] weight."""
    return four_bit(STATE | NESTED if state is None else state) | {
        "l.weight.absmax": Part("uint8", (8,)), "l.weight.nested_absmax": Part("float32", (1,)),
        "l.weight.nested_quant_map": Part("float32", (256,)),
    }  # fmt: skip


def eight_bit() -> dict[str, Part]:
    """Return a sound int8 group of a [4, 8] weight."""
    return {"l.weight": Part("int8", (4, 8)), "l.SCB": Part("float32", (4,)), "l.weight_format": Part("uint8", (), b"\0")}


def refusal(folder: Path, parts: Mapping[str, Part], config: Mapping[str, Any] | None = None) -> CheckpointError:
    error = raised(CheckpointError, split_packed, checkpoint(folder, parts, config))
    assert error.path == str(folder)
    return error


def problem(folder: Path, parts: Mapping[str, Part]) -> str:
    """Return the one problem with the one weight "l.weight"."""
    error = refusal(folder, parts)
    assert error.tensor_name == "l.weight"
    message = str(error)
    assert "(1 problems of 1 weights)" in message
    return message


# What is read ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [four_bit, nested, eight_bit])
def test_a_sound_group_is_one_weight_and_plain_tensors_stay(tmp_path: Path, parts: Callable[[], dict[str, Part]]) -> None:
    more = {"norm.weight": Part("bfloat16", (4,)), "l.bias": Part("float32", (4,)), "ids": Part("uint8", (4,))}
    plain, packed = split_packed(checkpoint(tmp_path, more | parts()))
    assert set(plain) == set(more)
    assert set(packed) == {"l.weight"}


def test_an_unquantized_checkpoint_is_all_plain(tmp_path: Path) -> None:
    found = checkpoint(tmp_path, {"a.weight": Part("bfloat16", (4, 4)), "absmax": Part("float32", (1,))}, {})
    assert split_packed(found) == (found.tensors, {})


def test_int8_and_4_bit_weights_may_stand_side_by_side(tmp_path: Path) -> None:
    other = {name.replace("l.", "m.", 1): part for name, part in eight_bit().items()}
    packed = split_packed(checkpoint(tmp_path, four_bit() | other))[1]
    assert {name: entry.kind for name, entry in packed.items()} == {"l.weight": "nf4", "m.weight": "int8"}


@pytest.mark.parametrize(("settings", "words"), [
    ({"llm_int8_threshold": 2.0}, "llm_int8_threshold 2.0, 6.0 is read"),
    ({"llm_int8_threshold": 0}, "llm_int8_threshold 0, 6.0"),
    ({"llm_int8_has_fp16_weight": True}, "llm_int8_has_fp16_weight True, False is read"),
])  # fmt: skip
def test_int8_layers_that_compute_in_another_way_are_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    config = {"quantization_config": {"quant_method": "bitsandbytes"} | settings}
    assert words in str(refusal(tmp_path, eight_bit(), config))
    assert set(split_packed(checkpoint(tmp_path, four_bit(), config))[1]) == {"l.weight"}
    usual = {name: {"llm_int8_threshold": 6.0}.get(name, False) for name in settings}
    assert set(split_packed(checkpoint(tmp_path, eight_bit(), {"quantization_config": usual | {"load_in_8bit": True}}))[1])


@pytest.mark.parametrize(("storage", "count"), [("uint8", 8), ("bfloat16", 4), ("float16", 4), ("float32", 2)])
def test_an_odd_number_of_values_is_rounded_up(tmp_path: Path, storage: str, count: int) -> None:
    parts = four_bit(STATE | {"shape": [3, 5]}) | {"l.weight": Part(storage, (count, 1)), "l.weight.absmax": Part("float32", (1,))}
    assert split_packed(checkpoint(tmp_path, parts))[1]["l.weight"].shape == (3, 5)


def test_a_parameter_of_any_name_may_be_packed_and_one_at_the_root(tmp_path: Path) -> None:
    # As bitsandbytes.nn.parametrize saves a parameter that is no linear's weight.
    parts = {name.replace("l.weight", "mixer.table"): part for name, part in four_bit().items()}
    parts |= {"weight": Part("int8", (4, 8)), "SCB": Part("float32", (4,))}
    assert set(split_packed(checkpoint(tmp_path, parts))[1]) == {"mixer.table", "weight"}


@pytest.mark.parametrize("config", [{}, *({"quantization_config": {f"load_in_{bits}bit": True}} for bits in (8, 4))], ids=str)
def test_configs_that_say_nothing_or_name_options_alone_are_bitsandbytes(tmp_path: Path, config: dict[str, Any]) -> None:
    assert set(split_packed(checkpoint(tmp_path, four_bit(), config))[1]) == {"l.weight"}


def test_a_config_alone_is_not_asked_for_packed_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BNB), encoding="utf-8")
    assert split_packed(read_checkpoint(tmp_path)) == ({}, {})


# What is refused: the whole -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["mxfp4", "vptq", None])
def test_another_quantization_is_refused_by_name(tmp_path: Path, method: str | None) -> None:
    error = refusal(tmp_path, four_bit(), {"quantization_config": {"quant_method": method, "bits": 4}})
    named = f"is quantized with {method!r}" if method else "names no quant_method"
    assert f"{named}; bitsandbytes, compressed-tensors" in str(error) and "unquantized checkpoint" in error.hint


def test_config_that_says_quantized_over_plain_weights_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, {"l.weight": Part("bfloat16", (4, 4))})
    assert "config.json says quantized, but no weight is packed" in str(error) and "Remove quantization_config" in error.hint


def test_every_problem_of_every_group_is_listed(tmp_path: Path) -> None:
    first = {name: part for name, part in nested().items() if not name.endswith(("nested_absmax", "quant_map"))}
    second = {name.replace("l.", "m.", 1): part for name, part in eight_bit().items()} | {"m.SCB": Part("float32", (5,))}
    error = refusal(tmp_path, first | second)
    assert error.tensor_name is None and "(3 problems of 2 weights)" in str(error)
    for expected in (
        "l.weight: has no quant_map", "l.weight: has no nested_absmax, nested_quant_map",
        "m.weight: SCB is float32 [5]",
    ):  # fmt: skip
        assert expected in str(error)


def test_a_long_list_of_problems_is_cut(tmp_path: Path) -> None:
    parts = {f"l{number}.weight": Part("uint8", (4, 1)) for number in range(30)}
    message = str(refusal(tmp_path, parts))
    assert "(30 problems of 30 weights)" in message and "l19.weight" in message
    assert "l20.weight" not in message and message.endswith("and 10 more")


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_packed_bytes_without_statistics_are_not_taken_for_weights(tmp_path: Path, dtype: str) -> None:
    assert f"l.weight: {dtype} without its quantization statistics" in problem(tmp_path, {"l.weight": Part(dtype, (8, 4))})


# What is refused: half groups -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "part"), [
    *((make, part) for make in (four_bit, nested) for part in ("l.weight", "l.weight.absmax", "l.weight.quant_map")),
    (nested, "l.weight.nested_absmax"), (nested, "l.weight.nested_quant_map"), (eight_bit, "l.weight"), (eight_bit, "l.SCB"),
])  # fmt: skip
def test_a_group_without_a_part_is_refused(tmp_path: Path, make: Callable[[], dict[str, Part]], part: str) -> None:
    parts = make()
    del parts[part]
    assert f"has no {part.rpartition('.')[2]}" in problem(tmp_path, parts)


@pytest.mark.parametrize("storage", ["uint8", "bfloat16"])
def test_statistics_without_a_quant_state_are_refused_in_every_storage(tmp_path: Path, storage: str) -> None:
    parts = four_bit() | {"l.weight": Part(storage, (256, 1))}
    del parts[STATE_NAME]
    assert "has no quant_state" in problem(tmp_path, parts)


HALVES = {
    "has no weight, quant_map, quant_state": {"l.weight.absmax": Part("float32", (8,))},
    "has no nested_absmax, nested_quant_map": four_bit(STATE | NESTED) | {"l.weight.absmax": Part("uint8", (8,))},
    "has 8-bit and 4-bit statistics (absmax)": eight_bit() | {"l.weight.absmax": Part("float32", (1,))},
    "quant_state has unknown keys: scale": four_bit(STATE | {"scale": 2}),
    "quant_state has no nested_blocksize, nested_dtype": four_bit() | {"l.weight.nested_absmax": Part("float32", (1,))},
    "no nested_blocksize, nested_dtype, nested_offset": four_bit() | {"l.weight.nested_quant_map": Part("float32", (256,))},
}


@pytest.mark.parametrize("words", HALVES)
def test_statistics_that_do_not_go_together_are_refused(tmp_path: Path, words: str) -> None:
    assert words in problem(tmp_path, HALVES[words])


# What is refused: the quant_state -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int4", "af4", "", "nf4.x", "NF4"])
def test_unknown_4_bit_type_is_refused(tmp_path: Path, kind: str) -> None:
    parts = four_bit()
    parts[f"l.weight.quant_state.bitsandbytes__{kind}"] = parts.pop(STATE_NAME)
    assert f"unknown 4-bit type {kind!r} (known: nf4, fp4)" in problem(tmp_path, parts)


def test_two_quant_states_are_refused(tmp_path: Path) -> None:
    parts = four_bit() | {"l.weight.quant_state.bitsandbytes__fp4": state_part(STATE | {"quant_type": "fp4"})}
    assert "has 2 quant_states (nf4, fp4)" in str(refusal(tmp_path, parts))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff", b"[" * 60_000, b"[]", b"1"], ids=["none", "cut", "no-utf8", "deep", "list", "1"]
)
def test_quant_state_that_is_no_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    message = problem(tmp_path, four_bit() | {STATE_NAME: state_part(content)})
    assert "quant_state cannot be read" in message or "quant_state is not a JSON object" in message


@pytest.mark.parametrize("part", [Part("int8", (4,)), Part("uint8", (65537,))], ids=["int8", "large"])
def test_quant_state_that_is_no_small_uint8_tensor_is_refused(tmp_path: Path, part: Part) -> None:
    assert f"{part.dtype} of {part.shape[0]} B, not a small uint8 tensor" in problem(tmp_path, four_bit() | {STATE_NAME: part})


@pytest.mark.parametrize(("make", "whole", "key"), [
    *((four_bit, STATE, key) for key in STATE), *((nested, STATE | NESTED, key) for key in NESTED),
])  # fmt: skip
def test_quant_state_without_a_key_is_refused(
    tmp_path: Path, make: Callable[[Any], dict[str, Part]], whole: Mapping[str, Any], key: str
) -> None:
    assert f"quant_state has no {key}" in problem(tmp_path, make({name: one for name, one in whole.items() if name != key}))


@pytest.mark.parametrize(("key", "value", "reason"), [
    ("quant_type", "fp4", "quant_state says 'fp4', its name says 'nf4'"), ("shape", None, "logical shape None"),
    ("shape", [512], "is not a matrix"), ("shape", [2, 4, 64], "is not a matrix"),
    ("shape", [8, 0], "is not a matrix"),
    ("shape", [8, -64], "is not a matrix"), ("shape", [8.0, 64], "is not a matrix"),
    ("shape", [True, 64], "is not a matrix"),
    ("shape", "8x64", "is not a matrix"), ("dtype", "float8_e4m3fn", "logical dtype 'float8_e4m3fn'"),
    ("dtype", None, "logical dtype None"), ("dtype", ["float16"], "logical dtype ['float16']"),
    ("blocksize", 0, "blocksize 0"), ("blocksize", -64, "blocksize -64"),
    ("blocksize", 63, "blocksize 63 is not one of"),
    ("blocksize", 64.0, "blocksize 64.0"), ("blocksize", "64", "blocksize '64'"),
    ("blocksize", True, "blocksize True"),
    ("blocksize", [64], "blocksize [64]"),
    ("nested_blocksize", 0, "nested_blocksize 0"), ("nested_blocksize", 255, "nested_blocksize 255"),
    ("nested_blocksize", None, "nested_blocksize None"), ("nested_dtype", "float16", "nested_dtype 'float16'"),
    ("nested_offset", float("nan"), "nested_offset nan"), ("nested_offset", float("inf"), "nested_offset inf"),
    ("nested_offset", "0.5", "nested_offset '0.5'"), ("nested_offset", None, "nested_offset None"),
    ("nested_offset", True, "nested_offset True"),
])  # fmt: skip
def test_bad_value_of_a_quant_state_is_refused(tmp_path: Path, key: str, value: Any, reason: str) -> None:
    parts = nested(STATE | NESTED | {key: value}) if key in NESTED else four_bit(STATE | {key: value})
    assert reason in problem(tmp_path, parts)


# What is refused: parts against the logical shape ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "part", "needed"),
    [
        ("l.weight", Part("uint8", (255, 1)), "needs [256, 1]"),
        ("l.weight", Part("uint8", (257, 1)), "needs [256, 1]"),
        ("l.weight", Part("uint8", (1, 256)), "needs [256, 1]"), ("l.weight", Part("uint8", (256,)), "needs [256, 1]"),
        ("l.weight", Part("uint8", (8, 64)), "needs [256, 1]"),
        ("l.weight", Part("bfloat16", (256, 1)), "needs [128, 1]"),
        ("l.weight", Part("float16", (127, 1)), "needs [128, 1]"),
        ("l.weight", Part("float32", (128, 1)), "needs [64, 1]"),
        ("l.weight", Part("int32", (64, 1)), "packed values are stored as uint8"),
        ("l.weight.absmax", Part("float32", (7,)), "needs float32 [8]"),
        ("l.weight.absmax", Part("float32", (9,)), "needs float32 [8]"),
        ("l.weight.absmax", Part("float32", (8, 1)), "needs float32 [8]"),
        ("l.weight.absmax", Part("uint8", (8,)), "needs float32 [8]"),
        ("l.weight.absmax", Part("bfloat16", (8,)), "needs float32 [8]"),
        ("l.weight.quant_map", Part("float32", (15,)), "float32 [16]"),
        ("l.weight.quant_map", Part("bfloat16", (16,)), "needs float32 [16]"),
        ("l.weight.absmax", Part("float32", (8,)), "needs uint8 [8]"),
        ("l.weight.nested_absmax", Part("float32", (2,)), "needs float32 [1]"),
        ("l.weight.nested_absmax", Part("bfloat16", (1,)), "needs float32 [1]"),
        ("l.weight.nested_quant_map", Part("float32", (255,)), "needs float32 [256]"),
        ("l.weight.nested_quant_map", Part("uint8", (256,)), "needs float32 [256]"),
    ],
    ids=str,
)  # fmt: skip
def test_part_of_the_wrong_size_or_type_is_refused(tmp_path: Path, name: str, part: Part, needed: str) -> None:
    make = nested if "nested" in name or needed == "needs uint8 [8]" else four_bit
    message = problem(tmp_path, make() | {name: part})
    assert f"{name.rpartition('.')[2]} is {part.dtype} {list(part.shape)}" in message and needed in message


@pytest.mark.parametrize(("storage", "count"), [("uint8", 256), ("bfloat16", 128), ("float16", 128), ("float32", 64)])
def test_part_of_the_right_size_is_accepted_in_every_storage(tmp_path: Path, storage: str, count: int) -> None:
    packed = split_packed(checkpoint(tmp_path, four_bit() | {"l.weight": Part(storage, (count, 1))}))[1]
    assert packed["l.weight"].parts["weight"].dtype == storage


def test_count_of_nested_blocks_is_rounded_up(tmp_path: Path) -> None:
    state = STATE | NESTED | {"shape": [257, 64]}
    parts = nested(state) | {"l.weight": Part("uint8", (257 * 32, 1)), "l.weight.absmax": Part("uint8", (257,))}
    assert "nested_absmax is float32 [1], its quant_state needs float32 [2]" in problem(tmp_path, parts)
    right = parts | {"l.weight.nested_absmax": Part("float32", (2,))}
    assert split_packed(checkpoint(tmp_path, right))[1]["l.weight"].shape == (257, 64)


INT8 = {
    ("l.weight", "has an SCB but is {}, not an int8 matrix"): [
        Part("bfloat16", (4, 8)), Part("uint8", (4, 8)), Part("int8", (4,)), Part("int8", (4, 2, 4)), Part("int8", (4, 0)),
    ],
    ("l.SCB", "SCB is {}, float32 [4] is needed"): [
        Part("float32", (8,)), Part("float32", (4, 1)), Part("float32", ()), Part("float16", (4,)),
    ],
    ("l.weight_format", "weight_format is {}, only 0 (rows) is known"): [Part("uint8", (2,)), Part("float32", ())],
    ("l.weight_format", "weight_format is 1, only 0 (rows) is known"): [Part("uint8", (), b"\1")],
}  # fmt: skip


@pytest.mark.parametrize(("name", "said", "part"), [(*key, part) for key, parts in INT8.items() for part in parts])
def test_a_part_that_int8_does_not_have_is_refused(tmp_path: Path, name: str, said: str, part: Part) -> None:
    assert said.format(f"{part.dtype} {list(part.shape)}") in problem(tmp_path, eight_bit() | {name: part})


def test_a_file_that_went_away_is_refused(tmp_path: Path) -> None:
    found = checkpoint(tmp_path, four_bit())
    gone = {name: replace(entry, file=tmp_path / "gone") for name, entry in found.tensors.items()}
    with pytest.raises(CheckpointError, match="quant_state cannot be read"):
        split_packed(replace(found, tensors=gone))


def test_the_states_of_a_checkpoint_are_read_once(tmp_path, monkeypatch):
    read, asked = bitsandbytes._read_state, list[str]()
    monkeypatch.setattr(bitsandbytes, "_read_state", lambda entry: asked.append(entry.tensor_name) or read(entry))
    known = checkpoint(tmp_path, four_bit())
    split_packed(known)[1].clear()
    assert list(split_packed(known)[1]) == ["l.weight"] and len(asked) == 1
    split_packed(replace(known, folder=known.folder))
    assert len(asked) == 2


KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"bnb_4bit_quant_type": "nf4"},
    "nf4-dq": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"bnb_4bit_quant_type": "fp4"},
    "fp4-dq": {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    "nf4-bf16-storage": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "bfloat16"},
    "nf4-dq-fp16-storage": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "float16", "bnb_4bit_use_double_quant": True},
    "fp4-fp32-storage": {"bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": "float32"},
}  # fmt: skip


def read_part(entry: TensorEntry) -> torch.Tensor:
    content = bytearray(entry.file.read_bytes()[entry.start : entry.start + entry.nbytes])
    return torch.frombuffer(content, dtype=getattr(torch, entry.dtype)).reshape(entry.shape)


@pytest.fixture(scope="module")
def plain_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    # 192 x 128 values are 384 blocks of 64: two second-level blocks, the last one not full.
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=192, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("plain")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def quantized(source: Path, folder: Path, **options: Any) -> Any:
    """Write the checkpoint with stock transformers and bitsandbytes, and return the stock model."""
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = LlamaForCausalLM.from_pretrained(
            source, dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(**options), device_map={"": "cpu"}
        )
        model.save_pretrained(folder)
    return model


def linears(model: Any) -> dict[str, Any]:
    return {f"{path}.weight": module for path, module in model.named_modules() if path.endswith("_proj")}


def check_split(found: Checkpoint, plain: Mapping[str, TensorEntry], packed: Mapping[str, PackedEntry], source: Path) -> None:
    """Check that plain and packed names together are those of the unquantized checkpoint, with its shapes."""
    original = read_checkpoint(source).tensors
    assert set(plain) | set(packed) == set(original) and not set(plain) & set(packed)
    for name, entry in (plain | dict(packed)).items():
        assert entry.shape == original[name].shape, name
    assert all(plain[name] is found.tensors[name] for name in plain)


@pytest.mark.parametrize("kind", KINDS)
def test_a_4_bit_checkpoint_of_stock_is_split_and_stands_for_stocks_weights(tmp_path: Path, plain_llama: Path, kind: str) -> None:
    from bitsandbytes.functional import QuantState, dequantize_4bit

    model = quantized(plain_llama, tmp_path, load_in_4bit=True, **KINDS[kind])
    found = read_checkpoint(tmp_path)
    plain, packed = split_packed(found)
    check_split(found, plain, packed, plain_llama)
    assert set(packed) == set(linears(model))
    storage = KINDS[kind].get("bnb_4bit_quant_storage", "uint8")
    for name, module in linears(model).items():
        entry = packed[name]
        state = module.weight.quant_state
        assert (entry.tensor_name, entry.kind) == (name, kind[:3] + "-dq" * ("-dq" in kind))
        assert (entry.dtype, entry.state["blocksize"], entry.parts["weight"].dtype) == ("bfloat16", 64, storage)
        sides = ("absmax", "quant_map", "quant_state") + (("nested_absmax", "nested_quant_map") if "-dq" in kind else ())
        assert set(entry.parts) == {"weight", *sides}
        stored = {key: value for key, value in state.as_dict().items() if not isinstance(value, torch.Tensor)}
        assert entry.state == stored | {"shape": list(stored["shape"])}
        # Through the parts of the file alone, and bitsandbytes' own reader of a quant_state.
        values = {part: read_part(entry.parts[part]) for part in sides if part != "quant_state"}
        values[f"quant_state.bitsandbytes__{kind[:3]}"] = read_part(entry.parts["quant_state"])
        rebuilt = QuantState.from_dict(values, torch.device("cpu"))
        ours = dequantize_4bit(read_part(entry.parts["weight"]), rebuilt)
        assert torch.equal(ours, dequantize_4bit(module.weight.data, state)) and tuple(ours.shape) == entry.shape


def test_an_int8_checkpoint_of_stock_is_split_with_stocks_scales(tmp_path: Path, plain_llama: Path) -> None:
    model = quantized(plain_llama, tmp_path, load_in_8bit=True)
    found = read_checkpoint(tmp_path)
    plain, packed = split_packed(found)
    check_split(found, plain, packed, plain_llama)
    assert set(packed) == set(linears(model))
    for name, module in linears(model).items():
        entry = packed[name]
        assert (entry.kind, entry.dtype, entry.state) == ("int8", "float16", {}) and set(entry.parts) == {"weight", "SCB"}
        assert torch.equal(read_part(entry.parts["weight"]), module.weight.data)
        assert torch.equal(read_part(entry.parts["SCB"]), module.weight.SCB)


@pytest.mark.parametrize(("shape", "storage", "blocksize"), [
    ((6, 26), torch.uint8, 64), ((6, 26), torch.bfloat16, 64), ((3, 8), torch.float32, 128), ((1, 2), torch.uint8, 64),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("double", [False, True])
def test_weights_that_fill_no_whole_block_are_counted_as_bitsandbytes_counts(
    tmp_path: Path, shape: tuple[int, int], storage: torch.dtype, blocksize: int, double: bool
) -> None:
    from bitsandbytes.functional import quantize_4bit
    from safetensors.torch import save_file

    weight, state = quantize_4bit(
        torch.randn(shape, generator=torch.Generator().manual_seed(0)), blocksize=blocksize, compress_statistics=double,
        quant_type="nf4", quant_storage=storage,
    )  # fmt: skip
    sides = {f"l.weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    save_file({"l.weight": weight, **sides}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    plain, packed = split_packed(read_checkpoint(tmp_path))
    assert plain == {}
    entry = packed["l.weight"]
    assert (entry.kind, entry.shape, entry.dtype) == ("nf4-dq" if double else "nf4", shape, "float32")
    assert entry.state["blocksize"] == blocksize
