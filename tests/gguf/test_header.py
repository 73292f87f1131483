"""Are GGUF headers read strictly, weights as ggml's own library reads them, and files that are not read refused by name?"""

import os
import shutil
import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from tests import gguf_files
from tests.golden.formats.make import FOLDER
from tests.raised import raised
from trimtab.checkpoint.folder import find_folder, read_checkpoint
from trimtab.engine.formats import ggml, weights
from trimtab.engine.formats import packed as packing
from trimtab.engine.formats.packed import Packed
from trimtab.errors import CheckpointError
from trimtab.formats import record
from trimtab.formats.packed import split_packed
from trimtab.formats.record import GGML_BLOCKS, PackedEntry, packed_parts, stored_format
from trimtab.gguf import companion, folders
from trimtab.gguf import header as header_module
from trimtab.gguf.architectures import config_of, frequencies, in_order, tensors_of
from trimtab.gguf.folders import is_made_here
from trimtab.gguf.header import MOST_TENSORS, TYPES, read_gguf

CPU = torch.device("cpu")
SMALL = {"general.architecture": "llama"}
VECTOR = ("F32", torch.arange(5.0), (5,))


@pytest.fixture(scope="module")
def golden():
    return load_file(FOLDER / "ggml.safetensors")


# Weights --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_blocks_of_any_bits_are_what_gguf_and_transformers_make_of_them(golden, kind, monkeypatch):
    stored, expected = golden[f"{kind}/weight"], golden[f"{kind}/expected"]
    of_file = Packed(kind.lower(), tuple(expected.shape), torch.float32, {"weight": stored}, {})
    entry = PackedEntry("x.weight", kind.lower(), of_file.shape, "bfloat16", {}, {})
    packed = weights.prequantized(entry, {"weight": stored}, torch.float32)
    for file in (ggml, record):
        monkeypatch.setattr(file, "DEQUANTIZED_VALUES", 100)  # a row at a time
    half = weights.prequantized(entry, {"weight": stored}, torch.float32)
    for one in (of_file, packed, half):
        assert torch.equal(weights.dequantize(one), expected)
        assert torch.equal(weights.dequantize_rows(one, 2, 5, CPU), expected[2:5])
    sizes = {name: part.nbytes for name, part in packed.parts.items()}
    assert packed_parts(packed.shape, packed.kind, "bfloat16") == sizes and sum(sizes.values()) == stored.numel()
    as_bfloat16 = packing.dequantized(ggml.exact_rows, half, 0, len(expected), CPU, torch.bfloat16)
    assert torch.equal(as_bfloat16, expected.to(torch.bfloat16))
    x = torch.randn(3, expected.shape[1])
    assert torch.equal(weights.shell(packed, None, torch.float32)(x), torch.nn.functional.linear(x, expected))


class Made(TorchDispatchMode):
    """The storages that operations made, kept alive."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.__dict__.setdefault("storages", {})[out.untyped_storage().data_ptr()] = out.untyped_storage()
        return out


@pytest.mark.parametrize("offset", [0, 256])
def test_rows_are_put_in_order_in_the_memory_that_a_plan_counts(offset):
    stored = torch.randint(0, 255, (512, 256), dtype=torch.uint8)
    order = (offset, 1, 2, (512 - offset) // 64, 32)
    with Made() as made:
        found = in_order(stored, order)
    rest = stored[offset:].view(1, 2, -1, 32, 256).transpose(1, 2).reshape(-1, 256)
    assert torch.equal(found, torch.cat((stored[:offset], rest)))
    del made.storages[stored.untyped_storage().data_ptr()]
    nbytes = sum(one.nbytes() for one in made.storages.values())
    assert nbytes * 272 // 256 == stored_format("q8_0").reading_bytes((512, 256))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_scales_that_are_not_finite_are_refused(golden, kind):
    stored = golden[f"{kind}/weight"].clone()
    entry = PackedEntry("x.weight", kind.lower(), tuple(golden[f"{kind}/expected"].shape), "bfloat16", {}, {})
    assert weights.prequantized(entry, {"weight": stored}, torch.float32).nbytes == stored.numel()
    blocks = stored.view(-1, GGML_BLOCKS[kind.lower()][1])
    at = 208 if kind == "Q6_K" else 0
    blocks[3, at : at + 2] = torch.tensor([float("inf")], dtype=torch.float16).view(torch.uint8)
    with pytest.raises(CheckpointError, match="x.weight: has scales that are not finite"):
        weights.prequantized(entry, {"weight": stored}, torch.float32)


def test_sizes_of_types_are_those_of_ggml():
    assert {
        TYPES[number][0].lower(): TYPES[number][1:] for number in TYPES if TYPES[number][0].lower() in GGML_BLOCKS
    } == GGML_BLOCKS


@given(
    sides=st.tuples(*[st.integers(1, 5)] * 4), offset=st.integers(0, 3), wide=st.sampled_from([32, 64]), seed=st.integers(0, 10**6)
)
def test_rows_and_columns_are_moved_as_an_index_moves_them(sides, offset, wide, seed):
    a, b, c, d = sides
    count = a * b * c * d
    order = (offset, a, b, c, d)
    places = [one + offset for one in range(count)]
    moved = [places[((i * b + k) * c + j) * d + m] for i in range(a) for j in range(c) for k in range(b) for m in range(d)]
    index = torch.tensor([*range(offset), *moved])
    value = torch.randn(offset + count, wide, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(ggml.in_order(value, order), value[index])


# Headers --------------------------------------------------------------------------------------------------------------


def test_a_file_of_gguf_itself_is_read():
    header = read_gguf(FOLDER / "small.gguf")
    assert header.keys["llama.context_length"] == 64 and header.keys["a.list"] == [1, 2, 3]
    assert header.keys["tokenizer.ggml.tokens"] == ["a", "bé"] and header.architecture == "llama"
    found = {name: (one.type_name, one.shape, one.nbytes) for name, one in header.tensors.items()}
    assert found == {"a.weight": ("Q8_0", (2, 64), 2 * 2 * 34), "b.weight": ("F32", (5,), 20)}
    raw = (FOLDER / "small.gguf").read_bytes()
    start = header.tensors["b.weight"].start
    assert struct.unpack("<5f", raw[start : start + 20]) == (0.0, 1.0, 2.0, 3.0, 4.0)


def small(tmp_path, keys=None, tensors=None, **other):
    return gguf_files.write(
        tmp_path / "a.gguf", SMALL | (keys or {}), {"a.weight": VECTOR} if tensors is None else tensors, **other
    )


def refusal(path):
    return str(raised(CheckpointError, read_gguf, path))


@pytest.mark.parametrize(("change", "words"), [
    (lambda raw: b"GGML" + raw[4:], "does not begin with GGUF"),
    (lambda raw: raw[:4] + struct.pack("<I", 1) + raw[8:], "is GGUF version 1"),
    (lambda raw: raw[:4] + struct.pack(">I", 3) + raw[8:], "big-endian"),
    (lambda raw: raw[:8] + struct.pack("<Q", MOST_TENSORS + 1) + raw[16:], "50001 tensors"),
    (lambda raw: raw[:8] + struct.pack("<Q", 2**63) + raw[16:], "at most 50000"),
    (lambda raw: raw[:16] + struct.pack("<Q", 2**40) + raw[24:], "keys, at most"),
    (lambda raw: raw[:24] + struct.pack("<Q", 2**62) + raw[32:], "a key's name has"),
    (lambda raw: raw[:-13], "ends at byte"), (lambda raw: raw + bytes(100), "100 B follow the last tensor"),
    (lambda raw: raw[:40], "ends within"), (lambda raw: b"", "ends within its first bytes"),
])  # fmt: skip
def test_a_damaged_file_is_refused_by_name(change, words, tmp_path):
    file = small(tmp_path)
    file.write_bytes(change(file.read_bytes()))
    assert words in refusal(file)


@pytest.mark.parametrize(("keys", "words"), [
    ({"general.alignment": 24}, "not a power of two"), ({"general.alignment": 2**17}, "up to 65536"),
    ({"split.count": 3}, "is not called NAME-0000N-of-00003.gguf"), ({"split.count": 10**6}, "at most 1000 files"),
])  # fmt: skip
def test_a_wrong_key_is_refused(keys, words, tmp_path):
    assert words in refusal(small(tmp_path, keys))


def test_wrong_tensors_are_all_named(tmp_path):
    rows = {
        "a": ("Q4_0", torch.zeros(2, 18, dtype=torch.uint8), (2, 32)),
        "b": ("Q4_K", torch.zeros(2, 144, dtype=torch.uint8), (2, 100)),
        "c": ("F32", torch.zeros(4), (2, 2, 1, 1)),
    }  # fmt: skip
    text = refusal(small(tmp_path, tensors=rows))
    assert "tensor b" in text and "rows of blocks of 256" in text and "a:" not in text
    file = small(tmp_path, tensors={"a": rows["a"], "b": rows["a"]})
    raw = file.read_bytes()
    where = raw.index(gguf_files.text("b")) + 9
    file.write_bytes(raw[:where] + struct.pack("<I", 5) + raw[where + 4 :])
    assert "tensor b: has 5 dimensions" in refusal(file)
    file.write_bytes(raw.replace(gguf_files.text("b"), gguf_files.text("a")))
    assert "the name occurs twice" in refusal(file)
    kind = where + 4 + 16
    file.write_bytes(raw[:kind] + struct.pack("<I", 77) + raw[kind + 4 :])
    assert "unknown type 77" in (text := refusal(file)) and "newer than this release" in text
    file.write_bytes(raw[: kind + 4] + struct.pack("<Q", 32) + raw[kind + 12 :])
    assert "begins at byte" in refusal(file)


def test_lists_have_limits_and_no_lists_in_them(tmp_path):
    file = small(tmp_path, {"x": [1, 2]})
    raw = file.read_bytes()
    at = raw.index(gguf_files.text("x")) + 9 + 4
    for change, words in ((struct.pack("<IQ", 9, 2), "a list of lists"), (struct.pack("<IQ", 4, 2**60), "at most 2500000")):
        file.write_bytes(raw[:at] + change + raw[at + 12 :])
        assert words in refusal(file)
    file = small(tmp_path, {"x": True})
    file.write_bytes(file.read_bytes().replace(struct.pack("<I?", 7, True), b"\7\0\0\0\2"))
    assert "x is 2, not 0 or 1" in refusal(file)
    file.write_bytes(small(tmp_path, {"x": "ab"}).read_bytes().replace(b"ab", b"\xff\xfe"))
    assert "x is not UTF-8" in refusal(file)


def test_files_of_a_set_are_one_model_from_any_of_them(tmp_path):
    names = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for number, name in enumerate(names):
        keys = {"split.no": number, "split.count": 2, "split.tensors.count": 2} | (SMALL if number == 0 else {})
        gguf_files.write(name, keys, {f"t{number}": VECTOR})
    for name in names:
        header = read_gguf(name)
        assert header.architecture == "llama" and [one.file for one in header.tensors.values()] == names
    names[1].write_bytes(names[0].read_bytes())
    assert "says it is file 0 of 2, its name says 1 of 2" in refusal(names[0])
    names[1].unlink()
    assert "1 of 2 files of its set are missing: m-00002-of-00002.gguf" in refusal(names[0])
    names[0].rename(names[1])  # a later file alone in its folder is not called a folder without config.json
    with pytest.raises(CheckpointError, match="1 of 2 files of its set are missing: m-00001-of-00002.gguf"):
        find_folder(tmp_path)


def test_the_kind_of_a_file_is_not_asked_of_more_keys_than_are_read(tmp_path, monkeypatch):
    file = small(tmp_path, {"general.name": "a", "general.type": "adapter"})
    assert header_module.file_kind(file) == "adapter"
    monkeypatch.setattr(header_module, "MOST_KEYS", 2)
    assert header_module.file_kind(file) == "model" and "at most 2 are read in all" in refusal(file)


def test_the_limits_of_headers_are_those_of_a_whole_set(tmp_path, monkeypatch):
    file, _ = gguf_files.model("qwen3", "q8_0", tmp_path)
    parts = gguf_files.split(file, tmp_path)
    count = len(read_gguf(file).tensors)
    monkeypatch.setattr(header_module, "MOST_TENSORS", count - 1)
    assert f"at most {count - 1} are read in all" in refusal(parts[0])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.gguf")
    assert "is no regular file" in refusal(tmp_path / "x.gguf")


@given(data=st.data())
def test_a_file_with_changed_bytes_is_read_or_refused(data, tmp_path_factory):
    raw = bytearray((FOLDER / "small.gguf").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + 8] = data.draw(st.binary(max_size=9))
    file = tmp_path_factory.mktemp("fuzz") / "a.gguf"
    file.write_bytes(raw)
    try:
        header = read_gguf(file)
        config_of(header)
    except CheckpointError as exc:
        assert str(exc).startswith(str(file))
    else:
        assert all(one.start > 0 and one.start + one.nbytes <= len(raw) for one in header.tensors.values())


# Models ---------------------------------------------------------------------------------------------------------------


def tiny(tmp_path, keys=None, *, family="qwen3", **tensors):
    """Return a file without layers' weights: what its keys and names say is read first."""
    table = ("Q8_0", *gguf_files.pack("Q8_0", torch.randn(320, 256))[:1], (320, 256))
    whole = {"token_embd.weight": table, "output_norm.weight": ("F32", torch.ones(256), (256,))} | tensors
    given = {name: one for name, one in (gguf_files.FAMILIES[family][2] | (keys or {})).items() if one is not None}
    return gguf_files.write(tmp_path / "tiny.gguf", given, whole)


# Family -> stacks of experts that a file of it has, each without the others of its layer.
STACKS = {
    "qwen3": {}, "qwen3_5_moe": {"blk.0.ffn_gate_up_exps.weight": (4, 512, 256)},
    "qwen3_moe": {"blk.0.ffn_up_exps.weight": (4, 256, 256), "blk.1.ffn_gate.weight": (4, 256, 256)},
}  # fmt: skip


@pytest.mark.parametrize(("family", "keys", "words"), [
    ("qwen3", {"general.architecture": "rwkv7"}, "is of the architecture 'rwkv7'; llama, qwen2, qwen3, qwen3vl, "),
    ("qwen3", {"general.type": "adapter"}, "is an adapter in GGUF, not a model"),
    ("qwen3", {"general.type": "mmproj"}, "has the towers of a model"),
    ("qwen3", {"qwen3.block_count": None}, "has no qwen3.block_count"), ("qwen3", {"qwen3.block_count": 10**6}, "1 to 512 is read"),
    ("qwen3", {"qwen3.embedding_length": "x"}, "qwen3.embedding_length is 'x'"),
    ("qwen3", {"qwen3.expert_count": 8}, "qwen3.expert_count is 8, 0 is read"),
    ("qwen3", {"qwen3.new_trick": 7}, "new_trick = 7"), ("qwen3", {"qwen3.vocab_size": 5}, "vocab_size is 5, 320 is read"),
    ("qwen3", {"qwen3.rope.scaling.type": "longrope"}, "none, linear and yarn are read"),
    ("qwen3", {"qwen3.rope.scaling.yarn_beta_fast": 16.0}, "yarn_beta_fast is 16.0, 32.0 is read"),
    ("qwen3", {"qwen3.rope.dimension_count": 8}, "turns 8 of 32 values of a head"),
    ("qwen3", {"tokenizer.ggml.tokens": ["a"] * 319}, "tokenizer.ggml.tokens has 319 entries, token_embd.weight 320 rows"),
    ("qwen3", {"tokenizer.ggml.eos_token_id": 320}, "tokenizer.ggml.eos_token_id is 320, 0 to 319 is read"),
    ("qwen3_moe", {"qwen3moe.expert_count": None}, "has no qwen3moe.expert_count"),
    ("qwen3_moe", {"qwen3moe.expert_count": 0}, "has 0 experts in each of 2 layers, 2 chosen, 256 wide"),
    ("qwen3_moe", {"qwen3moe.expert_count": 10**9}, "has 1000000000 experts in each of 2 layers"),
    ("qwen3_moe", {"qwen3moe.expert_used_count": 5}, "has 4 experts in each of 2 layers, 5 chosen"),
    ("qwen3_moe", {"qwen3moe.expert_feed_forward_length": 0}, "2 chosen, 0 wide; at most 65536 in all are read"),
    ("qwen3_moe", {"qwen3moe.expert_gating_func": 2}, "expert_gating_func is 2, 1 is read"),
    ("qwen3_moe", {"qwen3moe.expert_weights_norm": False}, "expert_weights_norm is False, True is read"),
    ("qwen3_moe", {"qwen3moe.expert_count": 3}, "has the shape [4, 256, 256], matrices of 3 experts are needed"),
    ("qwen3_moe", {}, "meaning is not known here: blk.1.ffn_gate.weight"),
    ("qwen3_5_moe", {"qwen35moe.expert_shared_count": 2}, "expert_shared_count is 2, 1 is read"),
    ("qwen3_5_moe", {"qwen35moe.expert_shared_feed_forward_length": None}, "has no qwen35moe.expert_shared_feed_forward_length"),
    ("qwen3_5_moe", {"qwen35moe.expert_used_count": 5}, "has 4 experts in each of 4 layers, 5 chosen"),
    ("qwen3_5_moe", {}, "meaning is not known here: blk.0.ffn_gate_up_exps.weight"),
])  # fmt: skip
def test_a_model_that_is_not_read_is_refused_by_name(family, keys, words, tmp_path):
    stacks = {name: ("Q8_0", gguf_files.pack("Q8_0", torch.randn(shape))[0], shape) for name, shape in STACKS[family].items()}
    file = tiny(tmp_path, keys, family=family, **stacks)
    assert words in str(raised(CheckpointError, find_folder, file, match="tiny.gguf"))


def test_unknown_tensors_and_types_are_refused_by_name(tmp_path):
    extra = {"blk.0.ssm_x.weight": ("F32", torch.ones(4), (4,))}
    with pytest.raises(CheckpointError, match="meaning is not known here: blk.0.ssm_x.weight"):
        find_folder(tiny(tmp_path, **extra))
    old = {"blk.0.attn_q.weight": ("Q2_K", torch.zeros(256, 84, dtype=torch.uint8), (256, 256))}
    with pytest.raises(CheckpointError, match=r"types that are not read \(Q2_K\): blk.0.attn_q.weight") as told:
        find_folder(tiny(tmp_path, **old))
    assert "Q4_K_M or Q8_0" in str(told.value)


USUAL = {"yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0}


@pytest.mark.parametrize("more", [{}, {"pooling_type": 3, **{f"rope.scaling.{name}": one for name, one in USUAL.items()}}])
def test_numbers_of_the_config_are_those_of_the_original(more, tmp_path):
    own = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128} | more
    config = config_of(read_gguf(tiny(tmp_path, {f"qwen3.{name}": one for name, one in own.items()})))
    assert config["rms_norm_eps"] == 1e-6 and config["head_dim"] == 32 and config["tie_word_embeddings"] is True
    assert config["rope_parameters"] == {
        "rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
    }  # fmt: skip


def test_the_scaling_of_llama_3_is_found_from_its_factors(tmp_path):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
    }  # fmt: skip
    wanted = LlamaConfig(head_dim=32, hidden_size=256, num_attention_heads=8, rope_parameters=scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](wanted, "cpu")
    plain = 1 / 500000.0 ** (torch.arange(0, 32, 2).float() / 32)
    keys = gguf_files.FAMILIES["llama"][2] | {"llama.rope.freq_base": 500000.0}
    table = ("Q8_0", *gguf_files.pack("Q8_0", torch.randn(320, 256))[:1], (320, 256))

    def written(factors):
        tensors = {"token_embd.weight": table, "rope_freqs.weight": ("F32", factors, (16,))}
        return read_gguf(gguf_files.write(tmp_path / "l.gguf", keys, tensors))

    assert config_of(written(plain / scaled))["rope_parameters"] == scaling
    for wrong in ((plain / scaled) ** 2, torch.full((16,), float("nan")), torch.zeros(16)):
        with pytest.raises(CheckpointError, match="no scaling that is known"):
            config_of(written(wrong))
    keys |= {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    with pytest.raises(CheckpointError, match="factors and a scaling of type 'yarn'"):
        config_of(written(plain / scaled))


def changed_model(tmp_path, family, name, values, monkeypatch):
    """Return a model's file with one tensor replaced."""
    write = gguf_files.write
    monkeypatch.setattr(
        gguf_files, "write",
        lambda target, keys, tensors: write(target, keys, tensors | {name: ("F32", values, tuple(values.shape))}),
    )  # fmt: skip
    return gguf_files.model(family, "q8_0", tmp_path)[0]


@pytest.mark.parametrize(("name", "values", "words"), [
    ("blk.0.ssm_a", torch.tensor([-1.0] * 7 + [0.5]), "has values that are not below 0"),
    ("output_norm.weight", torch.full((256,), float("inf")), "has values that are not finite"),
    ("rope_freqs.weight", torch.ones(16), "has factors of positions, which Qwen3.5 does not have"),
])  # fmt: skip
def test_values_that_would_be_nan_or_unread_are_refused(name, values, words, tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match=words) as told:
        find_folder(changed_model(tmp_path, "qwen3_5", name, values, monkeypatch))
    assert told.value.tensor_name == name


def test_a_damaged_folder_of_the_cache_is_made_again(tmp_path):
    file, _ = gguf_files.model("qwen3", "q8_0", tmp_path)
    made = find_folder(file)
    for name in ("gguf.json", "config.json", "small.safetensors"):
        (made / name).write_bytes(b"")
        assert find_folder(file) == made and read_checkpoint(made).tensors


def test_factors_that_the_file_ends_within_are_refused(tmp_path):
    file = small(tmp_path)
    tensor = read_gguf(file).tensors["a.weight"]
    file.write_bytes(file.read_bytes()[: tensor.start + 1])
    with pytest.raises(CheckpointError, match="changed while it was read"):
        frequencies(tensor)


def test_a_file_that_changes_while_its_folder_is_made_is_refused(tmp_path, monkeypatch):
    file, _ = gguf_files.model("qwen3", "q8_0", tmp_path)

    def changed(*given):
        os.utime(file, (1, 1))

    monkeypatch.setattr(companion, "_write_tokenizer", changed)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        find_folder(file)


def test_another_folder_cannot_name_files_elsewhere(tmp_path):
    file, _ = gguf_files.model("qwen3", "q8_0", tmp_path)
    made = find_folder(file)
    assert made.name == file.name and is_made_here(made) and find_folder(file) == made
    assert not is_made_here(folders.home_of() / ".." / "other")
    checkpoint = read_checkpoint(made)
    assert set(split_packed(checkpoint)[1]) and checkpoint.is_gguf
    other = tmp_path / "other"
    other.mkdir()
    for name in ("config.json", "gguf.json", "small.safetensors"):
        (other / name).write_bytes((made / name).read_bytes())
    with pytest.raises(CheckpointError, match="give the GGUF file itself"):
        read_checkpoint(other)
    assert folders.read_table(made)["files"][0][0] == str(file) and checkpoint.path == file
    os.utime(file, ns=(1, 1))
    with pytest.raises(CheckpointError, match="changed or went away"):
        read_checkpoint(made)
    assert find_folder(file) != made


def test_a_folder_with_one_file_is_that_file(tmp_path):
    file, _ = gguf_files.model("qwen3", "q8_0", tmp_path / "m")
    (tmp_path / "one").mkdir()
    shutil.copy(file, tmp_path / "one")
    (tmp_path / "one" / "mmproj-f16.gguf").write_bytes(b"GGUF")
    assert find_folder(tmp_path / "one").name == file.name
    lora = {"general.architecture": "qwen3", "general.type": "adapter", "adapter.type": "lora"}
    gguf_files.write(tmp_path / "one" / "lora.gguf", lora, {"a": VECTOR})
    assert find_folder(tmp_path / "one").name == file.name
    shutil.copy(file, tmp_path / "one" / "other.gguf")
    with pytest.raises(CheckpointError, match="has 2 GGUF files: other.gguf, tiny-q8_0.gguf"):
        find_folder(tmp_path / "one")
    with pytest.raises(CheckpointError, match="gone/nothing.gguf: no such file"):
        find_folder("gone/nothing.gguf")


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owner's number here")
def test_a_temporary_folder_of_another_user_is_not_ours(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    home = tmp_path / (folders.PREFIX + "x")
    home.mkdir()
    assert is_made_here(home / "key" / "m.gguf")
    (tmp_path / (folders.PREFIX + "link")).symlink_to(home)
    assert not is_made_here(tmp_path / (folders.PREFIX + "link") / "key" / "m.gguf")
    monkeypatch.setattr("os.getuid", lambda: home.stat().st_uid + 1)
    assert not is_made_here(home / "key" / "m.gguf")


def test_a_packed_matrix_that_the_model_has_as_a_vector_is_refused(tmp_path):
    header = read_gguf(gguf_files.model("qwen3_5", "q8_0", tmp_path)[0])
    mapped = tensors_of(header, config_of(header))
    companion._check_types(header, mapped)
    packed = next(one for one in mapped if one.change == "unsqueeze")
    wrong = replace(packed, source=replace(packed.source, type_name="Q8_0"))
    with pytest.raises(CheckpointError, match="1 tensors of types that are not read \\(Q8_0\\)"):
        companion._check_types(header, [wrong])
