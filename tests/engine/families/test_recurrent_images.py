"""Images in front of recurrent layers: Qwen3.5's positions along three axes, and states of exactly the tokens that were read.

The reference is stock transformers with PEFT, which reads every row alone, all of its tokens in one pass. Prompts go through chunks
of fixed shapes as on a GPU, steps through their plain counterpart, or the way of captured ones.
"""

from io import BytesIO

import pytest
import torch
from PIL import Image

import trimtab
from tests import pico, stock, talking_families
from tests.engine.decode.test_graphs import replayed  # noqa: F401 - a fixture
from tests.engine.loader.test_load import OLD
from tests.engine.prefill import test_encoder_cache, test_prefill, test_prefix_cache
from tests.engine.prefill.test_prefill import differ, ids
from tests.engine.prefill.test_prefix_cache import BATCHES, keeping, told
from tests.engine.towers import test_tower_graphs
from trimtab.engine.batch.batch import Batch
from trimtab.engine.kv.sequence import Inputs
from trimtab.engine.prefill.prefill import PrefillRunner
from trimtab.request import GenerateRequest
from trimtab.serve.contract.job import Job
from trimtab.serve.worker.engine import LoadedEngine

pytestmark = pytest.mark.skipif(OLD, reason="its modules differ from the descriptions")

FAMILIES = ["qwen3_5_vl", pytest.param("qwen3_5_moe_vl", marks=pytest.mark.slow)]
# float32: attention and the delta rule add in another order, a block of 64 tokens or one token at a time (largest seen: 3e-6).
TOLERANCE = 2e-5
# Patches of images in a row and a column; a soft token is 2 x 2 of them.
SMALL, WIDE = (4, 4), (4, 6)


def prompt_of(model, *parts):
    """Return a prompt of texts (numbers of tokens) and images (rows and columns of patches), in this order."""
    config, tokens, grids = model.hf_model.config, [], []
    for number, part in enumerate(parts):
        if isinstance(part, int):
            tokens += [one + number for one in ids(part)]
        else:
            tokens += [pico.BEGIN, *[pico.IMAGE] * (part[0] * part[1] // 4), pico.END]
            grids.append([1, *part])
    row = torch.tensor([tokens])
    tensors = {"input_ids": row, "attention_mask": torch.ones_like(row)}
    if grids:
        patches, vision = sum(rows * columns for _, rows, columns in grids), config.vision_config
        generator = torch.Generator().manual_seed(len(tokens))
        pixels = torch.randn(patches, 3 * vision.temporal_patch_size * vision.patch_size**2, generator=generator)
        tensors |= {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids), "mm_token_type_ids": (row == pico.IMAGE).long()}
    return Inputs(tensors, len(tokens), tuple(tokens), has_media=bool(grids))


PROMPTS = {
    "several images, towers": ("all", (3, WIDE, 5, SMALL, 2)), "text": ("text", (21,)), "image, then text": (None, (SMALL, 30)),
    "text, then image": ("all", (7, WIDE)), "image of the base": (None, (2, SMALL, 3)),
}  # fmt: skip


@pytest.mark.parametrize("way", ["chunks", "captured", "transformers"])
@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_rows_with_images_say_what_stock_says(family, way, request, tmp_path):
    """Adapters on text alone and on towers, prompts across borders of chunks, steps of rows with unlike offsets."""
    captures = request.getfixturevalue("replayed") if way == "captured" else None
    base = pico.build(family, tmp_path / "base", dtype="float32")
    adapters = {
        "all": pico.adapter(base, tmp_path / "all", targets="all"),
        "text": pico.adapter(base, tmp_path / "text", rank=20, rslora=True, seed=1),
    }
    stocks = {name: stock.with_adapter(stock.load_stock(base, dtype=torch.float32), path) for name, path in adapters.items()}
    stocks[None] = stock.load_stock(base, dtype=torch.float32)
    with trimtab.load(trimtab.plan(base, adapters=adapters, quant="none", dtype="float32", context=96, device="cpu")) as model:
        batch = Batch(model, rows=8, decode="eager" if way == "transformers" else "fused")
        batch.prompts = PrefillRunner(batch, "eager" if way == "transformers" else "static", (8, 16))
        rows = []
        for adapter, parts in PROMPTS.values():
            inputs = prompt_of(model, *parts)
            prompt = batch.begin(inputs, GenerateRequest(max_new_tokens=40), adapter=adapter).compute()
            assert (way == "transformers") != batch.prompts.holds(prompt)
            assert differ(prompt.logits, stock.next_logits(stocks[adapter], inputs.tensors, inputs.token_ids)) < TOLERANCE
            rows.append((batch.join(prompt).row, inputs, adapter))
        for step in range(4):
            if step == 2:  # the last row takes the place of one that leaves
                batch.leave(rows.pop(1)[0])
            found = batch.logits()
            for row, inputs, adapter in rows:
                wanted = stock.next_logits(stocks[adapter], inputs.tensors, row.token_ids)
                assert differ(found[row.number], wanted) < TOLERANCE, (step, inputs.token_ids)
                row.token_ids.append(int(wanted.argmax()))
            batch.write_last_tokens()
        assert not batch.steps.fallbacks and (captures is None or len(captures) >= 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_images_at_every_border_and_in_every_cache(family, monkeypatch):
    """The tests of the features, each once."""
    how = "chunks of 8 and 16"
    monkeypatch.setattr(test_prefill, "LENGTHS", (8, 25))
    monkeypatch.setattr(test_prefill, "SIZES", (((8, 16), 3),))
    test_prefill.test_a_prompt_in_chunks_is_the_prompt(family)
    test_prefill.test_a_picture_beside_every_border_of_a_chunk_is_the_picture(family)
    test_encoder_cache.test_pictures_that_are_missing_go_through_in_one_pass(family)
    test_encoder_cache.test_a_picture_that_was_seen_is_not_seen_again(family, how)
    for one in BATCHES:
        test_prefix_cache.test_a_chat_about_a_picture_goes_on_where_it_was_and_another_picture_is_another_chat(family, one)
    test_prefix_cache.test_every_chunk_behind_a_cached_picture_has_the_pictures_offset(family)
    test_tower_graphs.test_a_picture_is_the_same_bit_for_bit(family)
    test_tower_graphs.test_prompts_with_pictures_are_those_of_eager_towers(family)
    for test in (
        test_tower_graphs.test_on_a_cpu_the_towers_are_cut_before_transformers_own_pass,
        test_tower_graphs.test_on_a_cpu_a_prompt_is_cut_behind_its_towers_where_no_token_looks_ahead,
    ):
        with monkeypatch.context() as patch:
            test(family, patch)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    folder = talking_families.save("qwen3_5_vl", pico.build("qwen3_5_vl", tmp_path_factory.mktemp("qwen3_5_vl") / "base"))
    plan = trimtab.plan(
        folder, quant="none", dtype="float32", context=128, images=2, device="cpu", batch=2, prefix_cache="16MB",
        adapters={"all": pico.adapter(folder, folder.parent / "all", targets="all")},
    )  # fmt: skip
    theirs = [stock.load_stock(folder, dtype=torch.float32) for _ in range(2)]
    with trimtab.load(plan, decode="fused") as model:
        yield model, theirs[0], stock.with_adapter(theirs[1], folder.parent / "all")


def test_requests_to_a_server_say_what_stock_generates(seeing, monkeypatch):
    """One image, two, and the next turn of the chat behind them, whose state is kept at the end of the answer."""
    monkeypatch.setattr("trimtab.engine.prefill.prefix_cache.LEAST_SAVED_TOKENS", 16)
    model, theirs, adapted_theirs = seeing
    keeping(model, capacity=2**24)
    engine = LoadedEngine(model, rows=2)
    engine.batch.prompts = PrefillRunner(engine.batch, "static", (16, 64))
    assert engine.batch.prompts.is_on
    files = [BytesIO() for _ in range(2)]
    for file, size, name in zip(files, ((32, 32), (32, 48)), ("red", "blue"), strict=True):
        Image.new("RGB", size, name).save(file, "png")

    def ask(name, turns, **options):
        messages = [{"role": role, "content": parts} for role, parts in turns]
        return Job(name, messages, GenerateRequest(max_new_tokens=6), client="a", **options)

    def wanted(turns, one=theirs):
        inputs = engine.prepare(ask("", turns)).result().tensors
        with torch.no_grad():
            made = one.generate(**inputs, max_new_tokens=6, do_sample=False)
        token_ids = [
            one for one in made[0, inputs["input_ids"].shape[1] :].tolist() if one != theirs.generation_config.eos_token_id
        ]
        return model.processor.tokenizer.decode(token_ids, skip_special_tokens=True)

    def image(number):
        return {"type": "image", "image": files[number].getvalue()}

    text = {"type": "text", "text": "What is it?"}
    first = [("user", [image(0), text])]
    both = [("user", [image(0), text, image(1)])]
    ((one, usage), (two, _)) = told(engine, ask("1", first), ask("2", both))
    assert (one, two) == (wanted(first), wanted(both)) and usage["cached_tokens"] == 0
    ((again, usage),) = told(engine, ask("3", first))
    assert again == one and usage["cached_tokens"] == usage["prompt_tokens"]
    turn = [*first, ("assistant", [{"type": "text", "text": one}]), ("user", [text])]
    ((after, usage),) = told(engine, ask("4", turn))
    assert after == wanted(turn) and usage["cached_tokens"] >= 20
    ((adapted, usage),) = told(engine, ask("5", both, adapter="all"))
    assert usage["cached_tokens"] == 0
    assert adapted == wanted(both, adapted_theirs) != two
