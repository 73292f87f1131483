"""Does a GGUF file's tokenizer cut, begin and end texts as the file's keys say? Source: llama.cpp, llama-vocab.cpp (load)."""

import json

import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from tests import gguf_files, pico
from tests.raised import raised
from trimtab.checkpoint.folder import find_folder
from trimtab.errors import CheckpointError

pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
DEEPSEEK = ("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<\uff5cUser\uff5c>", "  ")
BYTE_LEVEL = gguf_files.tokenizer_keys()
BOS = BYTE_LEVEL["tokenizer.ggml.tokens"].index("<|endoftext|>")


def folder_of(tmp_path, family, keys, texts=(), kinds=()):
    """Return the folder of a file without layers' weights. texts, kinds: of its tokens from 270 on."""
    own = gguf_files.FAMILIES[family][2] | keys
    for name, new in (("tokens", texts), ("token_type", kinds)):
        own[f"tokenizer.ggml.{name}"] = [
            *own[f"tokenizer.ggml.{name}"][:270],
            *new,
            *own[f"tokenizer.ggml.{name}"][270 + len(new) :],
        ]
    table = ("Q8_0", gguf_files.pack("Q8_0", torch.zeros(320, 256))[0], (320, 256))
    tensors = {"token_embd.weight": table, "output_norm.weight": ("F32", torch.ones(256), (256,))}
    given = {name: one for name, one in own.items() if one is not None}
    return find_folder(gguf_files.write(tmp_path / "tiny.gguf", given, tensors))


def tokenizer_of(*given):
    return transformers.AutoTokenizer.from_pretrained(folder_of(*given))


@pytest.mark.parametrize("begins", [None, True, False])
@pytest.mark.parametrize(("pre", "is_whole"), [("llama-bpe", True), ("tekken", True), ("smaug-bpe", False)])
def test_whole_words_and_the_first_token_are_those_of_llama_cpp(pre, is_whole, begins, tmp_path):
    more = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.bos_token_id": BOS, "tokenizer.ggml.add_bos_token": begins}
    found = tokenizer_of(tmp_path, "llama", BYTE_LEVEL | more, ["Ġquincy"], [1])
    vocab = {text: place for place, text in enumerate(found.convert_ids_to_tokens(range(320)))}
    truth = Tokenizer(models.BPE(vocab=vocab, merges=gguf_files.MERGES, ignore_merges=is_whole))
    truth.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    wanted = truth.encode("hello quincy").ids
    assert (270 in wanted) is is_whole
    assert found("hello quincy").input_ids == [BOS] * (is_whole if begins is None else begins) + wanted


@pytest.mark.parametrize(("family", "kind"), [("qwen2", 3), ("qwen3", 3), ("llama", 3), ("qwen3", 1)])
def test_control_tokens_of_other_letters_than_bytes_have_their_own_ids(family, kind, tmp_path):
    more = {"tokenizer.ggml.pre": "deepseek-r1-qwen", "tokenizer.ggml.bos_token_id": 270, "tokenizer.ggml.eos_token_id": 271}
    found = tokenizer_of(tmp_path, family, BYTE_LEVEL | more | {"tokenizer.ggml.add_bos_token": True}, DEEPSEEK, [kind, kind, 3, 4])
    assert len(found) == 320 and found.bos_token_id == 270
    ids = found(f"{DEEPSEEK[2]}hello  hello{DEEPSEEK[1]}").input_ids
    assert ids == [270, 272, 259, 273, 259, 271]
    assert found.decode(ids) == "".join((DEEPSEEK[0], DEEPSEEK[2], "hello  hello", DEEPSEEK[1]))
    assert found.decode(ids, skip_special_tokens=True) == "hello  hello"


@pytest.mark.parametrize(("begins", "tokens"), [(True, ["▁hello"]), (None, ["▁hello"]), (False, ["hello"])])
def test_a_space_is_put_before_a_text_only_where_the_file_does(begins, tokens, tmp_path):
    words = ["▁", "h", "e", "l", "o", "ll", "he", "hell", "hello", "▁hello"]
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    rest = [f"[PAD{place}]" for place in range(len(texts), pico.VOCABULARY)]
    more = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": texts + rest, "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(place) for place in range(len(words + rest))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words) + [5] * len(rest),
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.add_space_prefix": begins,
    }  # fmt: skip
    found = tokenizer_of(tmp_path, "llama", more)
    ids = found("hello").input_ids
    assert found.convert_ids_to_tokens(ids) == ["<s>", *tokens] and found.decode(ids[1:]) == "hello"


@pytest.mark.parametrize(("texts", "ends"), [
    (["<|return|>", "</s>", "[EOS]", "_<EOT>"], [270, 271, 272, 273]), (["<|end|>", "<|call|>"], [270, 271]),
    (["<|end|>", "<|call|>", "<|return|>"], [271, 272]), (["<|end|>", "<|flush|>", "<|calls|>"], [271, 272]),
    ([DEEPSEEK[1], "[e~["], [270, 271]), (["<|other|>"], []),
])  # fmt: skip
def test_the_ends_of_a_turn_are_those_of_llama_cpp(texts, ends, tmp_path):
    folder = folder_of(tmp_path, "llama", BYTE_LEVEL, texts, [3] * len(texts))
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == [266, 264, *ends]


@pytest.mark.parametrize(("family", "pre", "is_composed"), [
    ("qwen2", "deepseek-r1-qwen", True), ("qwen3", "qwen2", True), ("qwen3_moe", "qwen2", True), ("qwen3_5", "qwen35", True),
    ("qwen3_5_moe", "qwen35", True), ("llama", "qwen2", False), ("qwen3", "llama-bpe", False),
])  # fmt: skip
def test_a_text_is_cut_and_composed_as_the_file_and_its_family_do(family, pre, is_composed, tmp_path):
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    found = tokenizer_of(tmp_path, family, BYTE_LEVEL | {"tokenizer.ggml.pre": pre})
    own = transformers.Qwen2Tokenizer(vocab=found.get_vocab(), merges=gguf_files.MERGES)
    normal = own.backend_tokenizer.normalizer.normalize_str
    assert found("e\u0301 a").input_ids == found(normal("e\u0301 a") if is_composed else "e\u0301 a").input_ids
    assert (len(found("e\u0301").input_ids) == 2) is is_composed
    cut = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), "isolated").pre_tokenize_str("x12345 \u0915\u094d\u0937")
    assert [place for _, place in found.backend_tokenizer.pre_tokenizer.pre_tokenize_str("x12345 \u0915\u094d\u0937")] == [
        place for _, place in cut
    ]


@pytest.mark.parametrize(("family", "more", "texts", "words"), [
    ("qwen2", {"tokenizer.ggml.pre": "llama-bpe"}, (), "as 'llama-bpe', and transformers makes Qwen2Tokenizer"),
    ("qwen3", {"tokenizer.ggml.pre": None}, (), r"does not say how its tokenizer cuts words \(tokenizer.ggml.pre\)"),
    ("qwen3", {"tokenizer.ggml.pre": "default"}, (), "cuts words as 'default', which transformers"),
    ("qwen3", {}, ("<x>", "<x>"), r"1 of its control tokens get other ids from transformers: '<x>' \(270\)"),
])  # fmt: skip
def test_a_vocabulary_that_is_not_made_as_it_is_is_refused(family, more, texts, words, tmp_path):
    error = raised(CheckpointError, folder_of, tmp_path, family, BYTE_LEVEL | more, texts, [3] * len(texts), match=words)
    assert error.path == str(tmp_path / "tiny.gguf") and "safetensors files" in str(error)
