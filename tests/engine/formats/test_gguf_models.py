"""Do models in GGUF files answer as the stock stack does with the same weights, in every tier, adapters on?"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import trimtab
from tests import gguf_files, gguf_towers, pico, stock
from tests.long_runs import slow_on_cpu
from tests.raised import raised
from trimtab.checkpoint.folder import find_folder, read_checkpoint
from trimtab.engine.formats import weights
from trimtab.engine.layers.leaves import PackedTable, ResidentLeaf
from trimtab.engine.loader import load, transformers_model
from trimtab.engine.tiers.reader import Arena
from trimtab.errors import CheckpointError, RequestError
from trimtab.planning.plan.plan import Plan
from trimtab.planning.plan.table import stored_rows
from trimtab.planning.values.blocks import blocks_of
from trimtab.stock import unsplit

TIERS = ("resident", "stream", "disk", "host")
VARIANTS = {"none": None, "lora": {}, "dora": {"dora": True}, "rslora": {"rslora": True}, "saved": {"modules_to_save": ["norm"]}}


@cache
def files(family: str, form: str, root: Path) -> tuple[Path, Path]:
    return gguf_files.model(family, form, root / f"{family}-{form}")


@cache
def adapter(family: str, variant: str, root: Path) -> Path:
    # A saved norm inside a recurrent layer is refused: the last one alone.
    is_recurrent = family.startswith("qwen3_5")
    options = {"modules_to_save": ["model.norm"]} if is_recurrent and variant == "saved" else VARIANTS[variant]
    return pico.adapter(files(family, "q4_k", root)[1], root / f"gguf-{family}-{variant}", **options)


@cache
def expected(family: str, form: str, variant: str, root: Path) -> torch.Tensor:
    model = stock.load_stock(files(family, form, root)[1])
    if VARIANTS[variant] is not None:
        model = stock.with_adapter(model, adapter(family, variant, root))
    return stock.logits(model, pico.inputs("llama", model.config))


@pytest.fixture
def root(tmp_path_factory):
    return tmp_path_factory.getbasetemp()


def cases():
    """Yield every combination: by default each family once, each type and variant more often, Llama's in each tier."""
    forms, variants, families = list(gguf_files.FORMS), list(VARIANTS), list(gguf_files.FAMILIES)
    kept = {("llama", forms[number % len(forms)], tier, variants[number % 5]) for number, tier in enumerate(TIERS * 5)}
    kept |= {(one, forms[at % len(forms)], TIERS[at % 4], variants[1 + at % 4]) for at, one in enumerate(families)}
    for one in itertools.product(families, forms, TIERS, variants):
        yield one if one in kept else slow_on_cpu(*one)


@pytest.mark.parametrize(("family", "form", "tier", "variant"), list(cases()))
def test_logits_are_those_of_the_stock_stack(family, form, tier, variant, root):
    adapters = {} if VARIANTS[variant] is None else {"one": adapter(family, variant, root)}
    place = {"*": tier} if tier == "resident" else {"language": tier}
    plan = trimtab.plan(files(family, form, root)[0], adapters=adapters, place=place, device="cpu", context=64)
    with trimtab.load(plan) as model:
        model.adapter_store.set("one" if adapters else None)
        found = stock.logits(model.hf_model, pico.inputs("llama", model.hf_model.config))
    assert torch.equal(found, expected(family, form, variant, root))


def test_a_set_of_files_is_one_model(root, tmp_path):
    file, _ = files("llama", "q4_k", root)
    parts = gguf_files.split(file, tmp_path)
    plan = trimtab.plan(parts[1], device="cpu", context=64, place={"*": "resident"})
    with trimtab.load(plan) as model:
        found = stock.logits(model.hf_model, pico.inputs("llama", model.hf_model.config))
    assert torch.equal(found, expected("llama", "q4_k", "none", root))


@pytest.mark.parametrize("form", gguf_files.FORMS)
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_the_stock_route_of_verify_has_the_same_weights_without_the_engines_reader(family, form, root, monkeypatch):
    for name in ("prequantized", "dequantize"):
        monkeypatch.setattr(weights, name, lambda *_: pytest.fail("the engine's reader"))
    file, dense = files(family, form, root)
    model = unsplit.load_unsplit(str(find_folder(file)), "auto", "bfloat16", "cpu")
    truth, found = load_file(dense / "model.safetensors"), model.state_dict()
    assert set(truth) <= set(found)
    assert [name for name, tensor in truth.items() if not torch.equal(found[name], tensor)] == []


def test_a_verdict_says_what_read_the_weights(root, monkeypatch):
    file, dense = files("llama", "q4_k", root)
    folder = str(find_folder(file))
    (note,) = unsplit.dense_note(folder)
    assert "(gguf) were dequantized by transformers' reader of GGUF, apart from trimtab's reader" in note
    monkeypatch.setattr(unsplit, "is_read", lambda method: False)  # a release of transformers that has none
    (note,) = unsplit.dense_note(folder)
    assert "by trimtab's own reader: nothing that is installed checks their values" in note
    found, truth = unsplit.load_unsplit(folder, "auto", "bfloat16", "cpu").state_dict(), load_file(dense / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in truth.items())


@pytest.mark.parametrize(("family", "form"), [("llama", "q4_k"), ("qwen3_5", "q8_0"), ("gemma4", "f16")])
def test_a_merge_is_the_sum_in_float64_rounded_once(family, form, root, tmp_path):
    file, dense = files(family, form, root)
    folder = adapter(family, "lora", root)
    trimtab.merge(file, tmp_path / "merged", adapters=folder, check=True)
    written, base = load_file(tmp_path / "merged" / "model.safetensors"), load_file(dense / "model.safetensors")
    lora = {name: tensor.double() for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert {name: tensor.dtype for name, tensor in written.items()} == {name: tensor.dtype for name, tensor in base.items()}
    for name, tensor in base.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" not in lora:
            assert torch.equal(written[name], tensor), name
            continue
        delta = lora[f"{stem}.lora_B.weight"] @ lora[f"{stem}.lora_A.weight"] * (settings["lora_alpha"] / settings["r"])
        # Half a unit of bfloat16 for the result, and for the base, which stands here rounded to it.
        exact = tensor.double() + delta
        assert bool(((written[name].double() - exact).abs() <= 2**-8 * (exact.abs() + tensor.double().abs())).all()), name
    names = sorted(path.name for path in (tmp_path / "merged").iterdir())
    assert names == ["config.json", "model.safetensors", "trimtab_merge.json"]
    assert "quantization_config" not in (tmp_path / "merged" / "config.json").read_text()
    # Stock loads what was written.
    assert stock.load_stock(tmp_path / "merged").dtype == torch.bfloat16


def test_a_plan_counts_the_bytes_of_each_type(root, monkeypatch):
    file, _ = files("llama", "q4_k", root)
    plan = trimtab.plan(file, device="cpu", context=64, place={"*": "resident"})
    with trimtab.load(plan) as model:
        layers = [one.stored for one in model.hf_model.modules() if isinstance(one, (ResidentLeaf, PackedTable))]
    assert len(layers) == 16 and {one.kind for one in layers} == {"q4_k", "q6_k"}
    for one in layers:
        assert one.nbytes == one.shape[0] * one.shape[1] // 256 * {"q4_k": 144, "q6_k": 210}[one.kind]
    assert plan.gpu["weights"] == sum(one.nbytes for one in layers)
    tied, rooms = trimtab.plan(files("qwen3", "q4_k", root)[0], device="cpu", context=64, place={"*": "resident"}), []
    monkeypatch.setattr(load, "Arena", lambda nbytes, device: rooms.append(nbytes) or Arena(nbytes, device))
    trimtab.load(tied).close()
    assert 0 <= rooms[0] - tied.gpu["weights"] < 1024  # a head that is its table's needs no room of its own
    # While a weight is read, its blocks become parts.
    anatomy = transformers_model.read_anatomy(read_checkpoint(file), quant="none", dtype="bfloat16")
    blocks = {block.block_path: block for block in blocks_of(anatomy, "auto")}
    peaks = [blocks[name].load_transient_bytes for name in ("lm_head", "model.layers.0")]
    assert peaks == [2 * 320 * 210, 2 * 512 * 210]


@pytest.mark.parametrize(("dtype", "is_rounded"), [("bfloat16", True), ("float16", False), ("float32", False)])
def test_values_of_16_bits_are_plain_weights_rounded_as_the_plan_says(dtype, is_rounded, root):
    plan = trimtab.plan(files("qwen3", "f16", root)[0], device="cpu", context=64, dtype=dtype, place={"*": "resident"})
    assert all(("its values rounded to bfloat16" in row[-1]) is is_rounded for row in stored_rows(plan))
    with trimtab.load(plan) as model:
        leaves = (one for one in model.hf_model.modules() if isinstance(one, ResidentLeaf))
        held = [one.stored for one in leaves if one.module_path != "lm_head"]
    assert {(one.kind, one.dtype) for one in held} == {("none", getattr(torch, dtype))} and len(held) == 14
    assert plan.gpu["weights"] == sum(one.nbytes for one in held)


@pytest.mark.parametrize("forms", [("Q4_K", "BF16"), ("BF16", "Q4_K")])
def test_floats_among_packed_weights_leave_those_to_kernels(forms, tmp_path, monkeypatch):
    monkeypatch.setitem(gguf_files.FORMS, "mixed", forms)
    plan = trimtab.plan(gguf_files.model("llama", "mixed", tmp_path)[0], card="H100", context=64)
    assert plan.execution.step.mode == "fused" and "the stack's own products" not in plan.execution.step.reason


@pytest.mark.parametrize(("family", "keys", "context", "is_named"), [
    ("mistral", {}, 4097, True), ("mistral", {}, 4096, False), ("llama", {}, 8192, True), ("qwen3", {}, 8192, False),
    ("mistral", {"rope.freq_base": 1e6}, 8192, False), ("mistral", {"context_length": 16384}, 8192, False),
])  # fmt: skip
def test_a_plan_names_the_window_that_a_file_of_mistral_lacks(family, keys, context, is_named, tmp_path):
    prefix = "qwen3" if family == "qwen3" else "llama"
    own = {f"{prefix}.{name}": value for name, value in ({"context_length": 32768, "rope.freq_base": 10000.0} | keys).items()}
    file, dense = gguf_files.model(family, "q8_0", tmp_path, **own)
    plan = trimtab.plan(file, device="cpu", context=context)
    assert ("was trained with one of 4096 tokens" in plan.window_reason) is is_named
    assert (f" {plan.window_reason}\n" in str(plan)) is is_named and Plan.from_json(plan.to_json()) == plan
    assert trimtab.plan(dense, quant="none", device="cpu", context=64).window_reason == ""


@pytest.mark.parametrize("home", ["device", "host", "file"])
def test_a_table_stays_packed_in_every_home_and_takes_adapters(home, root, tmp_path):
    table = "model.embed_tokens_per_layer"
    file, dense = files("gemma4", "q4_k", root)
    folder = pico.adapter(dense, tmp_path / "adapter", embeddings=True)
    request = {"place": {table: "gather" if home == "host" else "resident"}}
    if home == "file":
        request = {"device_map": {table: "disk", "": "cpu"}}
    plan = trimtab.plan(file, adapters={"one": folder}, device="cpu", context=64, **request)
    row = next(one for one in plan.placements if one.block_path == table)
    # 320 rows of 5 layers of 256 values in Q6_K; the scale is one value, and a gathered table has its first row on the device.
    packed, scale, first = 320 * 5 * 210, 2, 2 * 5 * 256
    at = {"device": (packed + scale, 0), "host": (first + scale, packed), "file": (first + scale, 0)}
    assert (row.home, row.gpu_bytes, row.host_bytes) == (home, *at[home])
    with trimtab.load(plan) as model:
        model.adapter_store.set("one")
        found = stock.logits(model.hf_model, pico.inputs("llama", model.hf_model.config))
    truth = stock.with_adapter(stock.load_stock(dense), folder)
    assert torch.equal(found, stock.logits(truth, pico.inputs("llama", truth.config)))


def test_a_type_of_files_is_not_made_and_not_made_again(root):
    with pytest.raises(RequestError, match="reads and does not make"):
        trimtab.plan(pico.built("llama"), quant="q4_k", device="cpu")
    with pytest.raises(RequestError, match=r"already quantized \(q4_k, q6_k\)"):
        trimtab.plan(files("llama", "q4_k", root)[0], quant="nf4", device="cpu")


def test_a_plan_knows_the_files_that_were_given(tmp_path):
    folder = gguf_towers.gemma4(pico.built("gemma4_dense"), tmp_path / "pair")
    assert {Path(name) for name, *_ in read_checkpoint(folder).stamps} == set(folder.iterdir())
    file, _ = gguf_files.model("qwen3", "q8_0", tmp_path)
    plan = trimtab.plan(file, device="cpu", context=64)
    shutil.rmtree(find_folder(file).parent)  # the cache's folder is made again
    trimtab.load(plan).close()
    os.utime(file, (1, 1))
    assert raised(CheckpointError, trimtab.load, plan, match="tiny-q8_0.gguf").path == str(file)


TEXTS = ("hello world hello", "ähnlich 123 <|im_end|>\n\n  x", " hello", "")


def test_the_tokenizer_and_the_ends_of_turns_are_the_files(tmp_path):
    import transformers

    keys = gguf_files.tokenizer_keys()
    tokens = keys["tokenizer.ggml.tokens"]
    first = {"tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"), "tokenizer.ggml.add_bos_token": True}
    truth = transformers.Qwen2Tokenizer(vocab={text: place for place, text in enumerate(tokens)}, merges=gguf_files.MERGES)
    truth.add_special_tokens({"additional_special_tokens": list(gguf_files.SPECIAL)})
    for number, (more, begin) in enumerate(((keys, []), (keys | first, [tokens.index("<|endoftext|>")]))):
        file, _ = gguf_files.model("qwen3", "q8_0", tmp_path / str(number), **more)
        folder = find_folder(file)
        found = transformers.AutoTokenizer.from_pretrained(folder)
        for text in TEXTS:
            assert found(text).input_ids == begin + truth(text).input_ids
        assert (found.eos_token, found.pad_token, found.chat_template) == ("<|im_end|>", "<|endoftext|>", gguf_files.TEMPLATE)
        assert json.loads((folder / "config.json").read_text())["eos_token_id"] == [266, 264]
    with trimtab.load(trimtab.plan(file, device="cpu", context=64)) as model:
        answer = model.answer("hello", max_new_tokens=3)
    asked = found.apply_chat_template([{"role": "user", "content": "hello"}], add_generation_prompt=True)
    assert answer.prompt_tokens == len(asked["input_ids"])


def test_a_tokenizer_of_another_model_beside_the_file_is_not_used(tmp_path):
    import tokenizers
    import transformers

    other = tokenizers.Tokenizer(tokenizers.models.WordLevel({"hello": 0, "[UNK]": 1}, unk_token="[UNK]"))
    other.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "of another model", "eos_token": "[UNK]"}))
    keys = gguf_files.tokenizer_keys()
    file, _ = gguf_files.model("qwen3", "q8_0", tmp_path, **keys)
    found = transformers.AutoTokenizer.from_pretrained(find_folder(file))
    assert found.convert_ids_to_tokens(range(5)) == keys["tokenizer.ggml.tokens"][:5]
    assert (found.eos_token, found.chat_template) == ("<|im_end|>", gguf_files.TEMPLATE)


def test_a_tensor_that_the_model_has_no_place_for_is_an_error(tmp_path, monkeypatch):
    write = gguf_files.write

    def with_bias(target, keys, tensors):
        rows = tensors["blk.0.attn_q.weight"][2][0]
        return write(target, keys, tensors | {"blk.0.attn_q.bias": ("F32", torch.ones(rows), (rows,))})

    monkeypatch.setattr(gguf_files, "write", with_bias)
    file, _ = gguf_files.model("llama", "q8_0", tmp_path)
    with pytest.raises(CheckpointError, match=r"1 tensors have no place in LlamaForCausalLM: .*q_proj\.bias") as told:
        trimtab.load(trimtab.plan(file, device="cpu", context=64))
    assert told.value.path == str(file)


def test_a_vocabulary_that_is_cut_in_an_unknown_way_is_refused(tmp_path):
    keys = gguf_files.tokenizer_keys() | {"tokenizer.ggml.pre": "own-cut"}
    file, _ = gguf_files.model("qwen3", "q8_0", tmp_path, **keys)
    with pytest.raises(CheckpointError, match="cuts words as 'own-cut'"):
        find_folder(file)


def test_a_merge_is_compared_with_a_quantized_base_as_it_is(root):
    from trimtab.verification.verify import _request

    file, dense = files("llama", "q4_k", root)
    quants = [_request(str(model), None, None, None, dense).quant for model in (file, dense)]
    assert quants == ["auto", "none"]
