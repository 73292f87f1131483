"""Do models with projector files (mmproj) answer on images as the stock stack does with the same weights, adapters on?"""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import trimtab
from tests import gguf_files, gguf_towers, pico, stock, talking, talking_families
from tests.raised import raised
from trimtab.checkpoint.folder import find_folder, read_checkpoint
from trimtab.errors import AdapterError, CheckpointError


@pytest.fixture
def root(tmp_path_factory):
    return tmp_path_factory.getbasetemp()


# Gemma 4 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gemma4", "gemma4_dense"])
def test_answers_on_images_are_those_of_the_stock_stack(family, tmp_path):
    source = pico.built(family)
    folder = gguf_towers.gemma4(source, tmp_path / "pair")
    lora = pico.adapter(source, tmp_path / "lora", targets="all") if family == "gemma4_dense" else None
    plan = trimtab.plan(folder, adapters={"one": lora} if lora else {}, device="cpu", context=64, place={"*": "resident"})
    truth = stock.load_stock(source)
    truth = truth if lora is None else stock.with_adapter(truth, lora)
    with trimtab.load(plan) as model:
        model.adapter_store.set("one" if lora else None)
        given = pico.inputs(family, model.hf_model.config)
        found = stock.logits(model.hf_model, given)
    assert "pixel_values" in given and torch.equal(found, stock.logits(truth, given))


def test_a_projector_that_does_not_fit_is_refused_by_name(tmp_path):
    folder = gguf_towers.gemma4(pico.built("gemma4_dense"), tmp_path / "pair")
    projector, config = (folder / "mmproj-model.gguf").read_bytes(), json.loads((folder / "config.json").read_text())

    def refused(words, raw=projector, change=None, tokenizer=None):
        (folder / "mmproj-model.gguf").write_bytes(raw)
        (folder / "config.json").write_text(json.dumps(config | (change or {})))
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer or {"added_tokens": []}))
        error = raised(CheckpointError, find_folder, folder)
        assert words in str(error) and "pair" in str(error.path)

    refused("is a projector of the type 'gemma9v'; gemma4v and qwen3vl_merger are read", projector.replace(b"gemma4v", b"gemma9v"))
    refused("has tensors whose meaning is not known here: v.std_bips", projector.replace(b"v.std_bias", b"v.std_bips"))
    vision = config["vision_config"] | {"patch_size": 16}
    refused("clip.vision.patch_size is 8, config.json has 16", change={"vision_config": vision})
    text = config["text_config"] | {"sliding_window": 9}
    refused("does not fit config.json next to it: sliding_window 9 (8)", change={"text_config": text})
    vision = config["vision_config"] | {"rms_norm_eps": "1e-6"}
    refused("config.json has '1e-6'", change={"vision_config": vision})
    refused("config.json of 'qwen3_vl'", change={"model_type": "qwen3_vl"})
    refused("2 of 2 tokens are others than in tokenizer.json", tokenizer={"model": {"vocab": {"a": 0, "b": 1}}})


# Qwen3-VL -------------------------------------------------------------------------------------------------------------


@cache
def source(root: Path) -> Path:
    return gguf_towers.deep_qwen3vl(root / "seeing")


@cache
def files(text: str, tower: str, root: Path) -> tuple[Path, Path]:
    return gguf_towers.qwen3vl(source(root), root / f"seeing-{text}-{tower}" / "pair", text=text, tower=tower)


@cache
def adapter(variant: str, root: Path) -> Path:
    options = {"lora": {}, "dora": {"dora": True}, "rslora": {"rslora": True}}[variant]
    return pico.adapter(source(root), root / f"seeing-{variant}", targets="all", **options)


def found_logits(folder, adapters=None, place=None, dtype="bfloat16"):
    plan = trimtab.plan(folder, adapters=adapters or {}, device="cpu", context=64, place=place or {"*": "resident"}, dtype=dtype)
    with trimtab.load(plan) as model:
        model.adapter_store.set("one" if adapters else None)
        return stock.logits(model.hf_model, pico.inputs("qwen3_vl", model.hf_model.config))


def stock_logits(folder, lora=None, dtype=torch.bfloat16):
    truth = stock.load_stock(folder, dtype=dtype)
    truth = truth if lora is None else stock.with_adapter(truth, lora)
    given = pico.inputs("qwen3_vl", truth.config)
    assert "pixel_values" in given
    return stock.logits(truth, given)


# F32 and BF16 hold the original's values, so that the original itself is the truth; of other types the values that they hold.
@pytest.mark.parametrize(
    ("text", "tower"), [("BF16", "BF16"), ("F32", "F32"), ("F16", "F16"), ("Q8_0", "F16"), ("Q8_0", "Q8_0"), ("Q4_0", "BF16")]
)
def test_logits_on_an_image_are_those_of_the_stock_stack(text, tower, root):
    folder, dense = files(text, tower, root)
    is_same = text in ("BF16", "F32")
    held, own = load_file(dense / "model.safetensors"), load_file(source(root) / "model.safetensors")
    assert all(torch.equal(held[name], tensor) for name, tensor in own.items()) is is_same
    assert torch.equal(found_logits(folder), stock_logits(source(root) if is_same else dense))


def test_values_of_float16_are_the_originals_in_their_own_type(root):
    folder, _ = files("F16", "F16", root)
    assert torch.equal(found_logits(folder, dtype="float16"), stock_logits(source(root), dtype=torch.float16))


@pytest.mark.parametrize(
    ("variant", "tier"), [("lora", "resident"), ("lora", "stream"), ("dora", "disk"), ("rslora", "host"), ("lora", "disk")]
)
@pytest.mark.parametrize("kinds", [("Q8_0", "F16"), ("Q8_0", "Q8_0")])
def test_adapters_on_both_parts_are_those_of_the_stock_stack(variant, tier, kinds, root):
    folder, dense = files(*kinds, root)
    lora = adapter(variant, root)
    names = load_file(lora / "adapter_model.safetensors")
    assert all(any(part in name for name in names) for part in (".visual.blocks.", "deepstack_merger", ".language_model."))
    place = {"*": "resident"} if tier == "resident" else {"language": tier, "vision": "stream" if tier == "stream" else "resident"}
    assert torch.equal(found_logits(folder, {"one": lora}, place), stock_logits(dense, lora))


def test_the_model_file_alone_is_its_language_model(root):
    folder, dense = files("Q8_0", "F16", root)
    truth, ids = stock.load_stock(dense), torch.arange(3, 40)[None]
    with trimtab.load(trimtab.plan(folder / "model.gguf", device="cpu", context=64, place={"*": "resident"})) as model:
        assert type(model.hf_model).__name__ == "Qwen3ForCausalLM"
        assert torch.equal(stock.logits(model.hf_model, {"input_ids": ids}), stock.logits(truth, {"input_ids": ids}))


def test_a_lora_in_a_gguf_file_fits_the_pair_and_the_file_alone(root, tmp_path):
    folder, dense = files("Q8_0", "F16", root)
    lora = pico.adapter(dense, tmp_path / "lora")
    file = gguf_files.lora("qwen3", lora, tmp_path / "lora.gguf", **{"general.architecture": "qwen3vl"})
    assert torch.equal(found_logits(folder, {"one": file}), stock_logits(dense, lora))
    assert trimtab.plan(folder / "model.gguf", adapters={"one": file}, device="cpu", context=64)
    with pytest.raises(AdapterError, match="is a projector \\(mmproj\\) of a model for images, and no LoRA"):
        trimtab.plan(folder, adapters={"one": folder / "mmproj-model.gguf"}, device="cpu", context=64)


@cache
def talking_files(root: Path) -> tuple[Path, Path]:
    """Return (the pair, the checkpoint of its values with the original's tokenizer and processor)."""
    limits = {"vision.image_min_pixels": 256, "vision.image_max_pixels": 4096}
    folder, dense = gguf_towers.qwen3vl(source(root), root / "talking" / "pair", text="Q8_0", **limits)
    tokenizer = talking_families.tokenizer("qwen3_vl")
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])  # as Qwen's own
    (dense / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder, talking_families.save("qwen3_vl", dense)


@pytest.mark.parametrize("size", [(150, 100), (40, 40), (300, 20)])
def test_prompts_and_answers_on_pictures_are_those_of_the_original(size, root):
    def asked(folder):
        with trimtab.load(trimtab.plan(folder, quant=QUANTS[folder.name], device="cpu", context=256)) as model:
            prompt, picture = "the and <|im_end|> Was ist das? ähnlich  12345\n\n x", talking.png(size=size)
            answer = model.answer(prompt, image=picture, max_new_tokens=6)
            return model.prepare(prompt, image=picture), answer.token_ids

    (found, tokens), (expected, truth) = map(asked, talking_files(root))
    assert found.token_ids == expected.token_ids and pico.IMAGE in found.token_ids and tokens == truth
    for name, tensor in expected.tensors.items():
        assert torch.equal(found.tensors[name], tensor), name


QUANTS = {"pair": "auto", "dense": "none"}


def test_prompts_and_answers_are_those_of_stock_transformers(root):
    """The ids and pixels of a picture from transformers' own parts, and its own greedy answer."""
    import transformers

    folder, dense = talking_files(root)
    tokenizer, shown = transformers.AutoTokenizer.from_pretrained(dense), talking.png()
    processor = transformers.Qwen2VLImageProcessorPil.from_pretrained(dense)
    pixels = processor(images=[Image.open(io.BytesIO(shown))], return_tensors="pt")
    content = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True)
    count = int(pixels["image_grid_thw"].prod()) // 4
    ids = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * count), return_tensors="pt", add_special_tokens=False).input_ids
    types = (ids == pico.IMAGE).long()
    truth = stock.load_stock(dense)
    whole = truth.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=types, **pixels, max_new_tokens=6, do_sample=False,
    )  # fmt: skip
    with trimtab.load(trimtab.plan(folder, device="cpu", context=256)) as model:
        prepared = model.prepare("What is it?", image=shown)
        answer = model.answer("What is it?", image=shown, max_new_tokens=6)
    assert list(prepared.token_ids) == ids[0].tolist()
    assert torch.equal(prepared.tensors["pixel_values"], pixels["pixel_values"].bfloat16())
    assert list(answer.token_ids) == whole[0, ids.shape[1] :].tolist()


def test_a_processor_of_the_original_beside_the_files_limits_the_pixels(root, tmp_path):
    folder, _ = gguf_towers.qwen3vl(source(root), tmp_path / "pair")

    def sizes():
        made = json.loads((find_folder(folder) / "processor_config.json").read_text())
        return made["image_processor"]["size"], made["video_processor"]["size"]

    usual = ({"shortest_edge": 65536, "longest_edge": 16777216}, {"shortest_edge": 4096, "longest_edge": 25165824})
    assert sizes() == usual
    own = {"patch_size": 8, "image_mean": [0.48145466, 0.4578275, 0.40821073], "size": {"shortest_edge": 1, "longest_edge": 9}}
    (folder / "preprocessor_config.json").write_text(json.dumps(own))
    assert sizes() == ({"shortest_edge": 1, "longest_edge": 9}, usual[1])
    (folder / "config.json").write_text((source(root) / "config.json").read_text())
    assert sizes()[1] == usual[1] and {Path(name) for name, *_ in read_checkpoint(folder).stamps} == set(folder.iterdir())
    (folder / "preprocessor_config.json").write_text(json.dumps({"patch_size": 9}))
    with pytest.raises(CheckpointError, match=r"next to it: patch_size 9 \(8\)"):
        find_folder(folder)


def test_a_merge_has_the_tower_too(root, tmp_path):
    folder, dense = files("BF16", "BF16", root)
    lora = pico.adapter(dense, tmp_path / "lora", targets="all")
    trimtab.merge(folder, tmp_path / "merged", adapters=lora, check=True)
    trimtab.merge(source(root), tmp_path / "again", adapters=lora, check=True)
    merged, again = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "again"))
    assert merged.keys() == again.keys() and all(torch.equal(merged[name], tensor) for name, tensor in again.items())
