"""Prompts in chunks of still shapes say what transformers' own pass says: at every edge of a chunk, in every family.

On a CPU nothing is captured: the same passes run as they are, or, where a test needs it, a stand-in repeats them the way a graph
would. tests/gpu runs the same tests with graphs.
"""

import gc
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import trimtab
from tests import long_runs, pico
from tests.lent import DEVICE, lent
from tests.long_runs import skip_without_rings
from tests.planning.values.test_execution import plan as narrow_plan
from tests.raised import raising, refused
from tests.replays import Again, standing_in
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.demo.demo import ADAPTERS
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine.batch.batch import Batch
from trimtab.engine.calls.embedding import Embedding, PromptScores
from trimtab.engine.kv import kv_cache
from trimtab.engine.kv.sequence import Inputs
from trimtab.engine.loader import transformers_model
from trimtab.engine.memory.graph_cache import GraphCache
from trimtab.engine.passes import chunk_forward, media_embeddings
from trimtab.engine.passes.chunk_forward import Chunk, chunks_of
from trimtab.engine.passes.media_embeddings import Media
from trimtab.engine.prefill import prefill
from trimtab.engine.prefill.prefill import PrefillRunner
from trimtab.engine.prefill.stock_pass import whole_pass
from trimtab.errors import RequestError
from trimtab.planning.memory.activations import use_of
from trimtab.planning.memory.prompts import choose_chunks, prompt_graph_bytes
from trimtab.request import GenerateRequest, LoadRequest

ON_GPU = DEVICE != "cpu"
# Attention over padded or kept places adds in another order than over exactly as many: a float32 pass of a tiny model differs by
# a few rounding steps of its largest score (largest seen over all families: 1.4e-6). A place too many or too few moves it by 1e-2.
TOLERANCE = 1e-4 if ON_GPU else 2e-5
# On both sides of the families' window of 8 tokens, of chunks of 8 and 16, and of two of them.
LENGTHS = (1, 8, 9, 16, 25, 40) if ON_GPU else (1, 7, 8, 9, 16, 17, 25, 40)
# Sizes of chunks, and rows of the batch.
SIZES = (((8, 16), 1), ((8, 16), 3)) if ON_GPU else (((8,), 1), ((8, 16), 3), ((64,), 3))
OTHER_SIZES = (((16,), 3), ((8, 16), 1), ((64,), 1))
# What ends a capture on a GPU: experts that choose their rows on the host; Gemma 3n's sparse MLP, which brings a number from the
# host in every pass (transformers 5.23.0, Gemma3nTextMLP._gaussian_topk).
NOT_CAPTURED = ("mixtral", "qwen3_moe", "gemma4_moe", "gemma3n") if ON_GPU else ()
REQUEST = GenerateRequest(max_new_tokens=4)


def load(family, folder, **options):
    plan = trimtab.plan(
        pico.build(family, folder), **{"quant": "none", "dtype": "float32", "context": 96, "device": DEVICE} | options
    )
    return trimtab.load(plan, decode="auto")


def eager(model, rows=1):
    batch = Batch(model, rows=rows, decode="eager")
    batch.prompts = PrefillRunner(batch, "eager")
    return batch


def in_chunks(model, sizes, rows=1):
    skip_without_rings(model)
    # Steps as transformers runs them: prompts alone are in question. States of recurrent layers need the kernels' way.
    batch = Batch(model, rows=rows, decode="fused" if kv_cache.keeps_states(model.hf_model) else "eager")
    batch.prompts = PrefillRunner(batch, "auto" if ON_GPU else "static", sizes)
    assert batch.prompts.sizes == tuple(sizes)
    return batch


def through(batch, inputs, request=REQUEST, **options):
    return batch.begin(inputs, request, **options).compute()


def scores(batch, inputs, **options):
    """Return the scores of a prompt's last token and of the step after it, which reads every key and value; and how many tokens
    were reused."""
    return joined(batch, through(batch, inputs, **options))


def joined(batch, prompt):
    first = prompt.logits.clone()
    row = batch.join(prompt).row
    # The token that is fed back is the test's own: a tie would be another prompt.
    row.token_ids[-1] = 7
    batch.write_last_tokens()
    batch._ahead = None
    after = batch.logits()[row.number].clone()
    batch.leave(row)
    return torch.stack([first, after]).cpu(), row.cached_tokens


def answered(batch, inputs, **options):
    return scores(batch, inputs, **options)[0]


def differ(found, expected):
    return float((found - expected).abs().max() / expected.abs().max())


def named(batch):
    """Return why prompts were not captured."""
    return [one.why for one in batch.steps.fallbacks if one.what.startswith("captured prompts")]


def ids(count):
    return [100 + (number * 7) % 190 for number in range(count)]


# What a chunk is -----------------------------------------------------------------------------------------------------


def test_a_prompt_is_the_largest_chunks_and_then_the_smallest_that_holds_the_rest():
    assert chunks_of(2100, (16, 64, 1024)) == [
        Chunk(0, 1024, 1024, False), Chunk(1024, 1024, 1024, False), Chunk(2048, 52, 64, True),
    ]  # fmt: skip
    assert chunks_of(1024, (16, 64, 1024)) == [Chunk(0, 1024, 1024, True)]
    assert chunks_of(1, (16, 64)) == [Chunk(0, 1, 16, True)]


def test_what_sees_each_other_is_never_split():
    media = Media(torch.zeros(1, 30, 1), reach=tuple(19 if 12 <= token < 20 else token for token in range(30)))
    chunks = chunks_of(30, (8, 16), may_end_at=media.may_end_at)
    assert [(chunk.start, chunk.count, chunk.size) for chunk in chunks] == [(0, 12, 16), (12, 16, 16), (28, 2, 8)]
    assert chunks_of(30, (7,), may_end_at=media.may_end_at) is None


# Every family --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", long_runs.FAMILIES)
def test_a_prompt_in_chunks_is_the_prompt(family):
    with lent(family) as model:
        whole = eager(model)
        expected = {count: answered(whole, model.prepare(ids(count))) for count in LENGTHS}
        for sizes, rows in SIZES:
            batch = in_chunks(model, sizes, rows)
            for again in range(3 if ON_GPU else 1):  # as it is, captured, replayed
                for count in LENGTHS:
                    found = answered(batch, model.prepare(ids(count)))
                    assert differ(found, expected[count]) < TOLERANCE, (sizes, rows, count, again)
            assert family in NOT_CAPTURED or not named(batch)


@pytest.mark.slow
@pytest.mark.parametrize("family", pico.FAMILIES)
def test_a_prompt_in_chunks_of_other_sizes_is_the_prompt(family, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SIZES", OTHER_SIZES)
    test_a_prompt_in_chunks_is_the_prompt(family)


# The sizes that models are given, and prompts on both sides of their borders: on a CPU, in every run, of the smaller ones.
REAL_SIZES = {"all": (16, 64, 128, 256, 512, 1024), "64": (64,), "256": (256,)}
REAL_LENGTHS = (63, 64, 65, 128, 129, 255, 257, 511, 513, 1024, 1025, 1100, 2048, 2049)
SHORT = (63, 64, 65, 127, 128, 129, 255, 256, 257, 1025, 2048)


@pytest.mark.parametrize(("family", "sizes", "lengths"), [
    *((family, sizes, SHORT) for family, sizes in (("gemma4", "all"), ("llama", "64"), ("llama", "256")) if not ON_GPU),
    *(long_runs.slow_on_cpu(family, sizes, REAL_LENGTHS)
      for family in ("gemma4", "llama", "gemma3", "gemma3n", "qwen3_vl") for sizes in REAL_SIZES),
])  # fmt: skip
def test_a_prompt_in_chunks_of_the_real_sizes_is_the_prompt(family, sizes, lengths):
    with lent(family, context=2304) as model:
        whole, batch = eager(model), in_chunks(model, REAL_SIZES[sizes])
        for count in lengths:
            expected = answered(whole, model.prepare(ids(count)))
            assert differ(answered(batch, model.prepare(ids(count))), expected) < TOLERANCE, count
        assert family in NOT_CAPTURED or not named(batch)


WITH_PICTURES = (
    "gemma4", "gemma4_dense", "gemma3", "qwen2_5_vl", "qwen3_vl", "mistral3",
    # Unpacked, it runs eagerly on a GPU, as its plan says.
    *(() if DEVICE == "cuda" else ("qwen3_5_vl",)),
)  # fmt: skip
BEFORE = range(1, 13) if ON_GPU else (1, 3, 5, 6, 7, 8, 11, 12)  # tokens before a picture; with 5 or 7 it ends where a chunk does
LOOKING = long_runs.crossed(WITH_PICTURES, first=(*long_runs.FIRST, "gemma3"))  # whose tokens of one image see each other


def picture(model, family, before):
    """Return the family's prompt with a picture, behind so many more tokens of text."""
    tensors = dict(pico.inputs(family, model.hf_model.config))
    for name in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"):
        if name in tensors:
            text = torch.tensor([ids(before)]) if name == "input_ids" else torch.full((1, before), int(name == "attention_mask"))
            tensors[name] = torch.cat([text, tensors[name]], dim=1).to(tensors[name].dtype)
    tensors = {name: value.to(DEVICE, model.dtype if value.is_floating_point() else None) for name, value in tensors.items()}
    token_ids = tuple(tensors["input_ids"][0].tolist())
    return Inputs(tensors, len(token_ids), token_ids, has_media=True)


@pytest.mark.parametrize("family", LOOKING)
def test_a_picture_beside_every_border_of_a_chunk_is_the_picture(family):
    with lent(family) as model:
        whole = eager(model)
        batch = in_chunks(model, (8, 16))
        looks_ahead = split = 0
        for before in BEFORE:
            inputs = picture(model, family, before)
            expected = answered(whole, inputs)
            for _ in range(3 if ON_GPU else 1):
                assert differ(answered(batch, inputs), expected) < TOLERANCE, before
            media = media_embeddings.media_of(model.hf_model, inputs.tensors)
            seen = [place for place, token in enumerate(inputs.token_ids) if token == pico.IMAGE]
            ends = [chunk.start for chunk in chunks_of(inputs.prompt_tokens, (8, 16), may_end_at=media.may_end_at)]
            split += any(seen[0] < end <= seen[-1] for end in ends)
            looks_ahead += bool(media.masks)
        assert looks_ahead == (len(BEFORE) if family in ("gemma3", "gemma4_dense") else 0)
        assert (split == 0) == bool(looks_ahead) == media_embeddings.images_look_ahead(model.hf_model.config)
        assert not named(batch)


def test_a_picture_that_no_chunk_holds_goes_through_as_before():
    with lent("gemma3") as model:
        inputs = picture(model, "gemma3", 3)
        batch = in_chunks(model, (3,))
        prompt = batch.begin(inputs, REQUEST)
        assert not batch.prompts.takes(prompt)
        assert torch.equal(answered(batch, inputs), answered(eager(model), inputs))


@pytest.mark.parametrize("family", ["gemma4", "gemma3n"])
def test_layers_with_the_keys_of_others_see_one_token_of_the_last_chunk(family, tmp_path):
    with load(family, tmp_path) as model:
        batch = in_chunks(model, (8, 16))
        prompt = through(batch, model.prepare(ids(20)))  # whatever is made on first use is
        batch.prompts.release(prompt)
        layers = model.hf_model.get_decoder().layers
        shared = [layer.self_attn.is_kv_shared_layer for layer in layers]
        seen = {number: [] for number in range(len(layers))}
        hooks = [
            layer.mlp.register_forward_pre_hook(lambda module, args, number=number: seen[number].append(args[0].shape[-2]))
            for number, layer in enumerate(layers)
        ]
        prompt = through(batch, model.prepare(ids(20)))
        for hook in hooks:
            hook.remove()
        if not ON_GPU:  # a replay calls no module
            assert [seen[number] for number in range(len(layers))] == [[1] if one else [16, 8] for one in shared]
        assert any(shared) and not all(shared)


def test_what_a_row_held_before_is_gone():
    with lent("llama") as model:
        for rows in (1, 2):
            batch = in_chunks(model, (16,), rows)
            expected = answered(batch, model.prepare(ids(9)))
            for layer in batch.cache.layers:
                layer.keys.fill_(float("nan"))
                layer.values.fill_(float("inf"))
            assert torch.equal(answered(batch, model.prepare(ids(9))), expected)


def test_attention_of_another_kind_is_named(tmp_path):
    with load("llama", tmp_path) as model:
        model.hf_model.config._attn_implementation = "flex_attention"
        batch = Batch(model, rows=1)
        batch.prompts = PrefillRunner(batch, "static")
        assert not batch.prompts.is_on
        assert named(batch) == ["its attention is flex_attention, not sdpa or eager"]


def read(batch, count, adapter=None):
    """Return an embedding, a prompt's own log-probabilities, and `scores` of the answer without another pass: all in chunks."""
    inputs, is_through = batch.model.prepare(ids(count)), False
    embedding = Embedding(batch.model, inputs, adapter=adapter, pooling="mean", batch=batch)
    while not embedding.step():
        pass
    prompt = batch.begin(inputs, REQUEST, adapter=adapter, returns_states=True)
    own = PromptScores(batch.model, inputs, adapter=adapter, top=0)
    while not is_through:
        is_through = prompt.step()
        own.read(prompt)
    values = [scored[token][0] for scored, token in zip(own.scores, inputs.token_ids[1:], strict=True)]
    return embedding.pooled.cpu(), torch.tensor(values), joined(batch, prompt)[0]


def is_whole(model, found, count, adapter=None, tolerance=TOLERANCE):
    """Whether `read` found what transformers' own pass of the whole text has."""
    model.adapter_store.set(adapter)
    whole = whole_pass(model, model.prepare(ids(count)), output_hidden_states=True)
    own = torch.log_softmax(whole.logits[0, :-1].cpu(), dim=-1).gather(1, torch.tensor(ids(count)[1:])[:, None])[:, 0]
    expected = whole.hidden_states[-1][0].mean(0).cpu(), own, answered(eager(model), model.prepare(ids(count)), adapter=adapter)
    return all(differ(one, other) < tolerance for one, other in zip(found, expected, strict=True) if other.numel())


@pytest.mark.parametrize("family", ["gemma4", "llama", "qwen3", *([] if ON_GPU else ["qwen3_5"])])  # there: test_recurrent.py
def test_states_in_chunks_are_those_of_one_pass_of_the_whole_text(family):
    with lent(family) as model:
        batch = in_chunks(model, (8, 16), rows=3)
        assert all(is_whole(model, read(batch, count), count) for count in (1, 16, 43))


def test_a_text_that_lost_its_row_starts_again_and_counts_no_token_twice():
    with lent("llama") as model:
        batch = in_chunks(model, (8,), rows=3)
        inputs, alone = model.prepare(ids(20)), read(batch, 20)
        embedding = Embedding(model, inputs, pooling="mean", batch=batch)
        prompt, scores = batch.begin(inputs, REQUEST, returns_states=True), PromptScores(model, inputs, adapter=None, top=0)
        for one, reads in ((embedding, lambda: None), (prompt, lambda: scores.read(prompt))):
            one.step(), reads()
            batch.prompts.evict(batch.cache.prompt_row, None)
            while not (one.step(), reads())[0]:
                pass
        values = [scored[token][0] for scored, token in zip(scores.scores, inputs.token_ids[1:], strict=True)]
        assert torch.equal(embedding.pooled.cpu(), alone[0]) and torch.equal(torch.tensor(values), alone[1])


def test_states_are_captured_the_second_time_and_computed_once_for_scores_and_their_answer(demo, request, monkeypatch):
    if not ON_GPU:
        request.getfixturevalue("replayed")
    batch, forms, found = captured(demo, (16, 64)), [], []
    own, graphs = batch.prompts.computed, batch.prompts._graphs
    noted = lambda key, *args, **options: (forms.append((key[0], len(graphs))), own(key, *args, **options))[1]  # noqa: E731
    monkeypatch.setattr(batch.prompts, "computed", noted)
    for known in ((0, 0, 0, 0, 1, 2), (3,) * 6):
        found.append(read(batch, 140, "style"))
        assert is_whole(demo, found[-1], 140, "style") and not named(batch)
        assert [(form.size, count) for form, count in forms] == list(zip((64, 64, 16) * 2, known, strict=True))
        assert all(form.returns_states for form, _ in forms)
        forms.clear()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))  # the first embedding was not captured
    buffers = batch.prompts.chunk_forward()._buffers[1, 64]  # states are where a plan counts embeddings
    assert buffers.embeddings.shape == (1, 64, demo.hf_model.config.get_text_config().hidden_size) and not buffers.deep


# Rows and prompts ----------------------------------------------------------------------------------------------------


def test_prompts_that_wait_for_their_rows_do_not_meet():
    with lent("gemma4") as model:
        alone = {count: answered(eager(model), model.prepare(ids(count))) for count in (9, 20, 30)}
        for rows in (1, 3):
            batch = in_chunks(model, (8,), rows)
            slow = batch.begin(model.prepare(ids(30)), REQUEST)
            slow.step()
            other = through(batch, model.prepare(ids(20)))  # the row for prompts is taken: it goes another way
            assert batch.prompts.holds(slow) and not batch.prompts.holds(other)
            assert differ(other.logits.cpu(), alone[20][0]) < TOLERANCE
            row = batch.join(other).row
            slow.compute()
            if rows == 1:
                batch.leave(row)
            assert differ(joined(batch, slow)[0], alone[30]) < TOLERANCE


def test_a_prompt_that_was_through_and_lost_its_place_goes_through_again():
    with lent("gemma4") as model:
        batch = in_chunks(model, (16,))
        first = through(batch, model.prepare(ids(20)))
        second = through(batch, model.prepare(ids(9)))
        batch.leave(batch.join(second).row)
        assert first.done_tokens == 0 and not batch.prompts.holds(first)
        assert differ(joined(batch, first)[0], answered(eager(model), model.prepare(ids(20)))) < TOLERANCE


def test_a_prompt_that_nobody_wants_any_more_frees_the_row(tmp_path):
    with load("llama", tmp_path) as model:
        batch = in_chunks(model, (8,))
        prompt = batch.begin(model.prepare(ids(20)), REQUEST)
        prompt.step()
        del prompt
        gc.collect()
        assert batch.prompts.holds(through(batch, model.prepare(ids(9))))


def test_stand_ins_are_not_written_over_a_prompt():
    with lent("llama") as model:
        batch = in_chunks(model, (8,))
        batch.steps._choice.is_captured, batch.steps.prepare = True, lambda expected, sizes: None
        prompt = through(batch, model.prepare(ids(20)))
        expected = prompt.logits.clone()
        with pytest.raises(RequestError, match="requests are running"):
            batch.prepare()
        assert prompt.done_tokens == 20 and batch.prompts.holds(prompt)
        batch.join(prompt)
        assert differ(expected.cpu(), answered(eager(model), model.prepare(ids(20)))[0]) < TOLERANCE


@pytest.mark.parametrize("comes_back", [False, True])
def test_an_adapter_that_goes_while_its_prompt_is_on_its_way_is_named(demo, comes_back):
    demo.load_adapter("leaving", DEMO / "adapters" / "style")
    batch = in_chunks(demo, (16,))
    prompt = batch.begin(demo.prepare(ids(40)), REQUEST, adapter="leaving")
    prompt.step()
    demo.unload_adapter("leaving")
    if comes_back:
        demo.load_adapter("leaving", DEMO / "adapters" / "specialist")
    error = refused(prompt.step)
    assert (error.field, error.value) == ("adapter", "leaving")
    if comes_back:
        demo.unload_adapter("leaving")


# Captured ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def replayed(monkeypatch):
    """Prompts that go the way of captured ones without a GPU; gives the list of all captures."""
    return standing_in(monkeypatch, "a prompt")


def captured(model, sizes, rows=1):
    batch = in_chunks(model, sizes, rows)
    batch.prompts.captures = True
    return batch


@pytest.fixture(scope="module")
def demo():
    adapters = {name: DEMO / "adapters" / name for name in ADAPTERS}
    plan = trimtab.plan(
        DEMO / "base", quant="none", dtype="float32", adapters=adapters, context=384, audio_s=1.0, device=DEVICE,
        place={"table": "gather"},
    )  # fmt: skip
    with trimtab.load(plan, decode="auto") as loaded:
        yield loaded


@pytest.mark.skipif(ON_GPU, reason="stands for what a GPU does")
def test_a_form_is_captured_the_second_time_and_then_replayed(demo, replayed):
    batch = captured(demo, (16, 64))
    for name in (None, "style"):
        expected = {count: answered(eager(demo), demo.prepare(ids(count)), adapter=name) for count in (9, 40, 150)}
        counts = []
        for _ in range(3):
            for count, wanted in expected.items():
                assert differ(answered(batch, demo.prepare(ids(count)), adapter=name), wanted) < TOLERANCE, (name, count)
            counts.append((len(replayed), sum(one.replays for one in replayed)))
            # (16, last), (64, last), and of 150 tokens a first, a later and a last chunk.
        first = counts[0][0]
        assert [count - first for count, _ in counts] == [0, 5, 5]
        assert [replays - counts[0][1] for _, replays in counts] == [0, 5, 10]
    assert not named(batch)


@pytest.mark.skipif(ON_GPU, reason="stands for what a GPU does")
def test_adapters_of_one_layout_share_their_graphs(demo, replayed):
    folder = DEMO / "adapters" / "style"
    demo.load_adapter("other", folder)
    try:
        with torch.no_grad():
            for one in demo.adapter_store.holders["other"].fitting.plain:
                one.leaf.adapters["other"].B.mul_(-1)
        batch = captured(demo, (16,))
        names = ["style", "other", None, "specialist", "rslora-dora"]
        expected = {name: answered(eager(demo), demo.prepare(ids(12)), adapter=name) for name in names}
        assert all(differ(expected[a], expected[b]) > 1e-3 for a in names for b in names if a != b)
        for _ in range(3):
            for name in names:
                assert differ(answered(batch, demo.prepare(ids(12)), adapter=name), expected[name]) < TOLERANCE, name
        # One graph for both of the first layout, the base's, one of another rank, and the one with addresses of its own.
        assert len(replayed) == 4 and len(batch.prompts.layouts) == 2
        assert [one.serial is not None for one in batch.prompts._graphs.values()].count(True) == 1
    finally:
        demo.unload_adapter("other")


@pytest.mark.skipif(ON_GPU, reason="stands for what a GPU does")
def test_saved_connectors_are_not_those_of_a_layout_and_a_batch_that_goes_leaves_none(demo, replayed, tmp_path):
    """One adapter is another one with a connector of its own: both have the same places in their pieces of memory."""
    style, other, name = DEMO / "adapters" / "style", tmp_path / "other", "embed_{}.embedding_projection.weight"
    shutil.copytree(style, other)
    config = json.loads((style / "adapter_config.json").read_text()) | {"modules_to_save": ["embedding_projection"]}
    (other / "adapter_config.json").write_text(json.dumps(config))
    values = load_file(style / "adapter_model.safetensors")
    for file in (DEMO / "base").glob("*.safetensors"):
        found = {key: value for key, value in load_file(file).items() if key.endswith(name.format(key.split(".")[1][6:]))}
        values |= {f"base_model.model.{key}": -value for key, value in found.items()}
    save_file(values, other / "adapter_model.safetensors")
    image = demo.prepare("What is there?", image=DEMO / "images" / "image_1.png")
    demo.load_adapter("other", other)
    try:
        expected = {one: answered(eager(demo), image, adapter=one) for one in ("style", "other")}
        assert differ(*expected.values()) > 1e-2
        batch = captured(demo, (16, 64, 128))
        for _ in range(2):
            for one, wanted in expected.items():
                assert differ(answered(batch, image, adapter=one), wanted) < TOLERANCE, one
        assert len(batch.prompts.layouts) == 2
        del batch
        gc.collect()
        held = (vars(one).get("adapters", {}) for one in demo.hf_model.modules())
        assert not [key for adapters in held for key in adapters if key.startswith("\0")]
    finally:
        demo.unload_adapter("other")


@pytest.mark.skipif(ON_GPU, reason="stands for what a GPU does")
def test_an_adapter_that_comes_back_under_its_name_is_another(demo, replayed):
    batch = captured(demo, (16,))
    demo.load_adapter("again", DEMO / "adapters" / "style")
    for _ in range(3):
        style = answered(batch, demo.prepare(ids(12)), adapter="again")
    demo.unload_adapter("again")
    demo.load_adapter("again", DEMO / "adapters" / "specialist")
    try:
        expected = answered(eager(demo), demo.prepare(ids(12)), adapter="again")
        assert differ(style, expected) > 1e-3
        for _ in range(3):
            assert differ(answered(batch, demo.prepare(ids(12)), adapter="again"), expected) < TOLERANCE
    finally:
        demo.unload_adapter("again")


@pytest.mark.skipif(ON_GPU, reason="stands for what a GPU does")
def test_what_cannot_be_captured_runs_as_it_is_and_is_named(demo, replayed, monkeypatch):
    monkeypatch.setattr(GraphCache, "_recorded", raising(RuntimeError("no graph today")))
    batch = captured(demo, (16,))
    expected = answered(eager(demo), demo.prepare(ids(40)))
    for _ in range(3):
        assert differ(answered(batch, demo.prepare(ids(40))), expected) < TOLERANCE
    assert "captured prompts: capturing failed: RuntimeError: no graph today" in [
        f"{one.what}: {one.why}" for one in batch.steps.fallbacks
    ]


@pytest.mark.skipif(ON_GPU, reason="stands for what a GPU does")
def test_a_replay_that_computes_something_else_is_not_used(demo, replayed, monkeypatch):
    monkeypatch.setattr(Again, "replay", lambda self: None)
    batch = captured(demo, (16,))
    expected = answered(eager(demo), demo.prepare(ids(40)))
    for _ in range(3):
        assert differ(answered(batch, demo.prepare(ids(40))), expected) < TOLERANCE
    assert any("a replay's results differ" in one.why for one in batch.steps.fallbacks)


@pytest.mark.skipif(ON_GPU, reason="stands for what a GPU does")
def test_tables_that_the_device_cannot_read_are_staged(demo, replayed):
    batch = captured(demo, (16, 64))
    gathered = [module for module in demo.hf_model.modules() if isinstance(module, prefill.leaves.GatheredTable)]
    assert gathered
    seen = [vars(table)["seen"] for table in gathered]
    try:
        for table in gathered:
            vars(table)["seen"] = None
        batch.prompts.staged_tables = gathered
        expected = answered(eager(demo), demo.prepare(ids(90)))
        for _ in range(3):
            assert differ(answered(batch, demo.prepare(ids(90))), expected) < TOLERANCE
        assert len(replayed) == 2 and not any(table.reads_staged for table in gathered)
        # What stands for a picture has the row of another token.
        token = next(iter(batch.prompts.placeholders))
        expected = answered(eager(demo), demo.prepare([*ids(30), token, *ids(9)]))
        for _ in range(3):
            assert differ(answered(batch, demo.prepare([*ids(30), token, *ids(9)])), expected) < TOLERANCE
    finally:
        for table, value in zip(gathered, seen, strict=True):
            vars(table)["seen"] = value


@pytest.mark.parametrize("name", [None, *ADAPTERS])
def test_the_demo_says_the_same_with_pictures_sounds_and_adapters(demo, name):
    media = [{"image": DEMO / "images" / "image_1.png"}, {"audio": DEMO / "sounds" / "audio_1.wav"}, {}]
    batch = in_chunks(demo, (16, 64, 128))
    for given in media:
        inputs = demo.prepare("What is there?", **given)
        expected = answered(eager(demo), inputs, adapter=name)
        for _ in range(3 if ON_GPU else 1):
            assert differ(answered(batch, inputs, adapter=name), expected) < TOLERANCE


# Where they are used -------------------------------------------------------------------------------------------------


def test_eager_batches_capture_nothing(demo):
    batch = Batch(demo, rows=1, decode="eager")
    assert not batch.prompts.is_on and not batch.prompts.captures
    if not ON_GPU:
        assert not Batch(demo, rows=2).prompts.is_on


def test_prompts_are_captured_in_the_planned_sizes(demo, monkeypatch):
    prompts, before = Batch(demo, rows=1).prompts, demo.plan
    prompts.captures = True
    phase = replace(before.execution.prompt, mode="graph", chunks=(64, 256))
    monkeypatch.setattr(demo, "plan", replace(before, execution=replace(before.execution, prompt=phase)))
    assert prompts._fitting(None)[0] == (64, 256) and prompts.captures
    monkeypatch.setattr(demo, "plan", before)
    assert prompts._fitting(None)[0] == before.execution.prompt.chunks and prompts.captures == ON_GPU


def test_more_rows_than_planned_capture_prompts_where_the_plan_leaves_room(demo, monkeypatch):
    batch = Batch(demo, rows=2)
    monkeypatch.setattr(batch.steps._choice, "is_captured", False)
    prompts = batch.prompts
    prompts.captures = True
    every, before = tuple(size for size in chunk_forward.CHUNKS if size <= 384), demo.plan
    assert every == (16, 64, 128, 256)
    cases = [(every, every), ((64, 128, 256), every[1:]), ((256,), (256,)), ((128,), (128,))]
    for fitting, sizes in cases:
        for spare, wanted in ((0, sizes), (-1, None)):
            prompts.counted_bytes = 0
            budget = before.gpu_needed_bytes + prompts.extra_bytes(fitting) + spare
            demo.plan = replace(before, gpu_budget_bytes=budget)
            prompts.captures = True
            try:
                chosen = prompts._fitting(None)[0]
                if wanted is not None:
                    assert chosen == wanted
                elif fitting != (128,):
                    assert prompts.extra_bytes(chosen) < prompts.extra_bytes(fitting)
                else:  # not captured, but in the chunks that the plan counts
                    assert chosen == before.execution.prompt.chunks and prompts.captures == (not chosen)
                    prompts.captures = True
                    assert "more than the plan and the captured steps" in prompts._why_not(None)
                # What the plan has counted for them is theirs.
                prompts.captures, prompts.counted_bytes = True, prompts.extra_bytes(every)
                demo.plan = replace(before, gpu_budget_bytes=before.gpu_needed_bytes)
                assert prompts._fitting(None)[0] == every
            finally:
                demo.plan = before


def test_the_largest_chunk_that_fits_comes_first():
    def count(sizes):
        return sum(sizes) + 10 * len(sizes)

    assert choose_chunks((16, 64, 128, 256), count, 10**6) == (16, 64, 128, 256)
    assert choose_chunks((16, 64, 128, 256), count, 300) == (16, 256)
    assert choose_chunks((16, 64, 128, 256), count, 265) == (16, 64, 128)
    assert choose_chunks((16, 64, 128, 256), count, 220) == (64, 128)
    assert choose_chunks((16, 64, 128, 256), count, 137) == ()
    assert choose_chunks((16, 64), count, 137) == (16, 64)  # of a context of few tokens
    assert choose_chunks((), count, 137) == ()


def test_bytes_of_captured_prompts_grow_with_what_is_captured(tmp_path):
    folder = pico.e_series("e4b", tmp_path)
    anatomy = transformers_model.read_anatomy(read_checkpoint(folder), quant="nf4-dq", dtype="bfloat16")
    request = LoadRequest(model=str(folder), quant="nf4-dq", context_tokens=2048)
    use = use_of(request, anatomy, answer_tokens=256)

    def count(chunks, **options):
        return prompt_graph_bytes(anatomy, use, chunks, **{"quant": "nf4-dq", "has_adapters": False} | options)

    assert count(()) == 0
    assert count((16, 64)) < count((16, 64, 512)) < count((16, 64, 512, 1024))
    assert count((512,)) < count((512,), has_adapters=True)
    assert count((512,), adapter_bytes=12345) - count((512,)) == 12345
    # Pictures and other rows of the request are not in a captured prompt.
    wide = replace(use, patches=2520, batch=8)
    assert prompt_graph_bytes(anatomy, wide, (512,), quant="nf4-dq", has_adapters=False) == count((512,))


def test_the_count_imports_no_torch():
    code = "import sys, trimtab.planning.memory.prompts; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(("given", "batch", "mode"), [((4.5,), 2, "eager"), ((4,), 1, "graph")])
def test_more_rows_than_were_planned_keep_the_planned_chunks(given, batch, mode):
    """A pass of transformers' own would have a cache that a plan with chunks does not count."""
    prompts = object.__new__(PrefillRunner)
    planned = narrow_plan(*given, batch=batch)
    assert planned.execution.prompt.mode == mode and planned.execution.prompt.chunks
    prompts.model = SimpleNamespace(plan=planned, prefill_tokens=planned.prefill_tokens)
    prompts.batch, prompts.captures = SimpleNamespace(rows=3, context_tokens=4096), True
    prompts.extra_bytes, prompts.left_bytes = (lambda sizes: 2**30), (lambda: 2**20)
    assert prompts._fitting(None) == (planned.execution.prompt.chunks, 2**30, 2**20) and not prompts.captures
    prompts.captures, prompts.extra_bytes = True, lambda sizes: 2**10 * len(sizes)
    assert prompts._fitting(None)[0] and prompts.captures  # where graphs have room there are graphs


def test_positions_and_values_of_images_that_do_not_fit_are_named(monkeypatch):
    """A model that gives positions of fewer tokens, and one whose tower gives more values than places."""

    class Model(torch.nn.Module):
        def __init__(self, **given):
            super().__init__()
            self.decoder, self.given = torch.nn.Identity(), given

        def get_decoder(self):
            return self.decoder

        def forward(self, **_):
            return self.decoder(inputs_embeds=torch.zeros(1, 4, 8), **self.given)

    monkeypatch.setattr(media_embeddings.kv_cache, "prompt_cache", lambda model: None)
    where = torch.tensor([[False, True, False, False]])
    for given, words in (
        ({"position_ids": torch.zeros(3, 1, 3)}, r"positions of shape \[3, 3\] for 4 tokens"),
        ({"deepstack_visual_embeds": [torch.zeros(2, 8)], "visual_pos_masks": where}, "layer 0 adds 2 values at 1 places"),
    ):
        with pytest.raises(RuntimeError, match=words):
            media_embeddings.media_of(Model(**given), {})
