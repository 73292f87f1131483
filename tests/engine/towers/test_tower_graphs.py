"""Towers whose layers read and write buffers of their own compute what transformers' towers compute, in every family.

On a CPU nothing is captured: the layers run through the same buffers. tests/gpu runs the same tests with graphs.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import trimtab
from tests import pico
from tests.engine.prefill.test_encoder_cache import asked, tensors_of
from tests.engine.prefill.test_prefill import WITH_PICTURES, differ, eager, ids, in_chunks, load, picture, through
from tests.engine.prefill.test_prefix_cache import keeping, seen
from tests.lent import DEVICE, lent
from tests.long_runs import FIRST, crossed
from trimtab.engine.batch.batch import Batch
from trimtab.engine.lora.store import covered
from trimtab.engine.prefill import tower_passes
from trimtab.engine.towers import graphs
from trimtab.engine.towers import pieces as tower_pieces
from trimtab.engine.towers.graphs import MOST_CREDIT, MOST_SHAPES, Towers, padded_frames
from trimtab.engine.towers.pieces import NotKeptError, PausedError, TowerPieces, UnknownFormError, filled, form_of
from trimtab.errors import RequestError

ON_GPU = DEVICE != "cpu"
# Families here in whose decoder no token looks ahead, positions count up and later layers add nothing.
CHUNKED = ("gemma4", "mistral3")
LOOKING_TOO = (*FIRST, "gemma3")  # and one whose tokens of one image see each other
MODE = "auto" if ON_GPU else "static"


def towers_of(model, mode=MODE):
    why = []
    return Towers(model, mode, lambda reason, what: why.append(reason)), why


def features(model, family, seed, towers=None, *, name="get_image_features", adapter=None, **options):
    """Return the tensors of a tower's output for a picture; through `towers` where they are given."""
    model.adapter_store.set(adapter)
    given = {
        key: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
        for key, value in asked(model, family, seed if isinstance(seed, list) else [seed]).items()
    }
    serial = None if adapter is None else model.adapter_store.serials[adapter]
    compute = getattr(model.hf_model.model, name)
    with torch.no_grad():
        if towers is None:
            return tensors_of(compute(**given))
        with towers.running(adapter, serial, **options):
            return tensors_of(compute(**given))


def same(found, expected):
    assert len(found) == len(expected) >= 1
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("family", crossed(WITH_PICTURES, first=LOOKING_TOO))
def test_a_picture_is_the_same_bit_for_bit(family):
    with lent(family) as model:
        towers, why = towers_of(model)
        assert len(towers.layers) >= 2
        for seed in (1, 2, 3, 1):
            same(features(model, family, seed, towers), features(model, family, seed))
        # As it is, then with buffers: every layer of the second picture, and of each after it.
        each = towers.captured
        assert not why and each >= 2 and towers.replayed == 2 * each
        assert not any(name in vars(layer) for layer in towers.layers for name in ("forward",))
        # Several in one pass are another shape.
        for _ in range(2):
            same(features(model, family, [4, 5], towers), features(model, family, [4, 5]))
        same(features(model, family, 2, towers), features(model, family, 2))
        assert towers.captured == 2 * each


def test_each_layer_is_covered_and_a_changed_input_is_read():
    with lent("qwen3_vl") as model:
        towers, _ = towers_of(model)
        found = [features(model, "qwen3_vl", seed, towers) for seed in (1, 2, 3)]
        # Deepstack's parts come from layers in the middle: they are those of this picture.
        assert len(found[0]) > 1
        for one, other in zip(found[1], found[2], strict=True):
            assert not torch.equal(one, other)


def test_adapters_of_the_towers_have_graphs_of_their_own(tmp_path):
    base = pico.build("gemma3", tmp_path / "base")
    names = {name: pico.adapter(base, tmp_path / name, targets="all", seed=number) for number, name in enumerate("ab")}
    plan = trimtab.plan(base, adapters=names, quant="none", dtype="float32", context=96, device=DEVICE)
    with trimtab.load(plan, decode="auto") as model:
        towers, _ = towers_of(model)
        expected = {name: features(model, "gemma3", 1, adapter=name) for name in ("a", "b", None)}
        assert not torch.equal(expected["a"][0], expected["b"][0])
        for _ in range(3):
            for name, wanted in expected.items():
                same(features(model, "gemma3", 1, towers, adapter=name), wanted)
        layers = len(towers.layers)
        assert towers.captured == 3 * layers
        model.unload_adapter("a")
        same(features(model, "gemma3", 1, towers, adapter="b"), expected["b"])
        assert len(towers._graphs) == 2 * layers


@pytest.mark.parametrize("family", crossed(WITH_PICTURES, first=LOOKING_TOO))
def test_prompts_with_pictures_are_those_of_eager_towers(family):
    with lent(family) as model:
        batch, plain = in_chunks(model, (8, 16, 32)), in_chunks(model, (8, 16, 32))
        batch.prompts.towers = Towers(model, MODE, batch.prompts.fall_back)
        plain.prompts.towers = Towers(model, "eager", plain.prompts.fall_back)
        for number in range(3):
            inputs = picture(model, family, 9 + number)
            found, expected = through(batch, inputs), through(plain, inputs)
            assert differ(found.logits, expected.logits) < (1e-4 if ON_GPU else 1e-6)
            for one, prompt in ((batch, found), (plain, expected)):
                one.leave(one.join(prompt).row)
        assert batch.prompts.towers.replayed and not batch.steps.fallbacks


def test_towers_are_a_piece_of_their_own():
    with lent("gemma3") as model:
        batch = in_chunks(model, (32,))
        prompt = batch.begin(picture(model, "gemma3", 9), trimtab.GenerateRequest(max_new_tokens=4))
        assert prompt.needs_towers
        assert prompt.step() is False and prompt.chunk_tokens == 0 and prompt.done_tokens == 0
        assert not prompt.needs_towers and prompt.step() is True and prompt.chunk_tokens == 32
        plain = batch.begin(model.prepare([5, 6, 7]), trimtab.GenerateRequest(max_new_tokens=4))
        assert not plain.needs_towers


def test_few_layers_are_captured_at_once_while_rows_are_answered(monkeypatch):
    monkeypatch.setattr(graphs, "LAYERS_AT_ONCE", 1)
    with lent("gemma4") as model:
        towers, _ = towers_of(model)
        counts = []
        for seed in range(4):
            same(features(model, "gemma4", seed, towers, is_busy=True), features(model, "gemma4", seed))
            counts.append((towers.captured, towers.replayed))
        assert counts == [(0, 0), (1, 0), (2, 1), (2, 3)]


# Pieces --------------------------------------------------------------------------------------------------------------


def lose_outputs(monkeypatch):
    """Let no output of a layer be there in the next piece."""
    again = tower_pieces._Output.again

    def lost(output):
        output.tensors = None
        return again(output)

    monkeypatch.setattr(tower_pieces._Output, "again", lost)


def answering(model, monkeypatch, positions, rows=3, make=None):
    """Return a batch that answers one text, whose towers go through in pieces of so many positions."""
    monkeypatch.setattr(tower_passes, "PIECE_POSITIONS", positions)
    monkeypatch.setattr(tower_passes, "PIECE_S", 3600.0)
    batch = in_chunks(model, (16, 64), rows) if make is None else make()
    request = trimtab.GenerateRequest(max_new_tokens=60)
    text = batch.begin(model.prepare(ids(9)), request).compute()
    batch.ends = frozenset()
    return batch, batch.join(text).row


@pytest.mark.parametrize(("family", "mode"), crossed(WITH_PICTURES, [MODE, "eager"], rest=1))
def test_a_pass_that_is_cut_between_layers_is_the_pass(family, mode, monkeypatch):
    with lent(family) as model:
        plain = in_chunks(model, (16, 64), 3)
        plain.prompts.towers = Towers(model, "eager", plain.prompts.fall_back)
        batch, row = answering(model, monkeypatch, 1)
        batch.prompts.towers = towers = Towers(model, mode, batch.prompts.fall_back)
        counts = []
        for number in range(3):
            inputs = picture(model, family, 9 + number)
            expected = through(plain, inputs)
            prompt, pieces = batch.begin(inputs, trimtab.GenerateRequest(max_new_tokens=4)), 0
            while prompt.needs_towers:
                assert prompt.step() is False and prompt.chunk_tokens == 0 and prompt.done_tokens == 0
                batch.step()  # others go on in between
                pieces += 1
            prompt.compute()
            assert differ(prompt.logits, expected.logits) < (1e-4 if ON_GPU else 1e-6)
            counts.append(pieces)
            plain.leave(plain.join(expected).row)
            batch.leave(batch.join(prompt).row)
        assert not batch.steps.fallbacks and row.finish is None
        # One layer in each piece; those that were captured are.
        assert counts[0] == len(towers.all_layers) and set(counts) == {counts[0]}
        assert not towers.layers or towers.replayed >= 2


def beside_a_text(model, family, monkeypatch, positions):
    """Return a prompt with an image, its logits in transformers' own pass, and a batch that answers a text. Towers go through in
    pieces of so many positions."""
    inputs = picture(model, family, 9)
    expected = through(eager(model), inputs).logits
    batch, _ = answering(model, monkeypatch, positions, make=lambda: Batch(model, rows=3))
    return inputs, expected, batch


@pytest.mark.skipif(ON_GPU, reason="a GPU runs these prompts in chunks of fixed shapes")
@pytest.mark.parametrize("family", crossed(WITH_PICTURES, first=LOOKING_TOO))
def test_on_a_cpu_the_towers_are_cut_before_transformers_own_pass(family, monkeypatch):
    with lent(family) as model:
        inputs, expected, batch = beside_a_text(model, family, monkeypatch, 1)
        assert not batch.prompts.sizes
        prompt, pieces = batch.begin(inputs, trimtab.GenerateRequest(max_new_tokens=4)), 0
        while not prompt.step():
            assert prompt.chunk_tokens == 0 and prompt.done_tokens == 0
            batch.step()
            pieces += 1
        assert torch.equal(prompt.logits, expected)
        assert pieces == len(batch.prompts.towers.all_layers) >= 2 and not batch.steps.fallbacks


@pytest.mark.skipif(ON_GPU, reason="a GPU runs these prompts in chunks of fixed shapes")
@pytest.mark.parametrize("family", crossed(WITH_PICTURES, first=LOOKING_TOO))
def test_on_a_cpu_a_prompt_is_cut_behind_its_towers_where_no_token_looks_ahead(family, monkeypatch):
    with lent(family) as model:
        inputs, expected, batch = beside_a_text(model, family, monkeypatch, 10**6)
        prompt, sizes = batch.begin(inputs, trimtab.GenerateRequest(max_new_tokens=4)), []
        while not prompt.step(5):
            sizes.append(prompt.chunk_tokens)
            assert prompt.needs_towers is (family not in CHUNKED)
            batch.step()
        sizes.append(prompt.chunk_tokens)
        count = inputs.prompt_tokens
        chunks = [*[5] * ((count - 1) // 5), (count - 1) % 5 + 1]
        assert sizes == [0, *(chunks if family in CHUNKED else [count])]
        assert differ(prompt.logits, expected) < 2e-5
        batch.join(prompt)
        assert len(batch.step()) == 2 and not batch.steps.fallbacks


@pytest.mark.skipif(ON_GPU, reason="a GPU runs these prompts in chunks of fixed shapes")
def test_a_prompt_whose_adapter_goes_behind_its_towers_is_refused(tmp_path, monkeypatch):
    base = pico.build("gemma4", tmp_path / "base")
    folder = pico.adapter(base, tmp_path / "a")
    with trimtab.load(base, adapters={"a": folder}, quant="none", dtype="float32", context=96, device="cpu") as model:
        batch, _ = answering(model, monkeypatch, 10**6, make=lambda: Batch(model, rows=3))
        inputs = picture(model, "gemma4", 9)
        prompt = batch.begin(inputs, trimtab.GenerateRequest(max_new_tokens=4), adapter="a")
        assert prompt.step(5) is False and not prompt.needs_towers
        model.unload_adapter("a")
        model.load_adapter("a", folder)
        with pytest.raises(RequestError, match="unloaded while"):
            prompt.step(5)


@pytest.mark.skipif(ON_GPU, reason="a GPU runs these prompts in chunks of fixed shapes")
def test_transformers_own_pass_goes_through_whole_where_it_cannot_be_cut(tmp_path, monkeypatch):
    with load("gemma3", tmp_path) as model:
        inputs = picture(model, "gemma3", 9)
        expected = through(eager(model), inputs).logits
        batch, _ = answering(model, monkeypatch, 1, make=lambda: Batch(model, rows=3))
        lose_outputs(monkeypatch)
        assert torch.equal(through(batch, inputs).logits, expected)
        assert [one.what for one in batch.steps.fallbacks] == ["towers in pieces"]


@pytest.mark.skipif(ON_GPU, reason="a GPU runs these prompts in chunks of fixed shapes")
@pytest.mark.parametrize("whose", ["its own", "another prompt's"])
def test_a_pass_that_is_not_cut_any_more_behind_its_towers_is_counted_once(whose, monkeypatch):
    """The cache has no room, so that every pass computes the towers."""
    with lent("gemma3") as model:
        inputs = seen(model, "gemma3", 9)
        expected = through(eager(model), inputs).logits
        cache = keeping(model)
        monkeypatch.setattr(cache, "put_blob", lambda key, value: None)
        batch, _ = answering(model, monkeypatch, 10**6, make=lambda: Batch(model, rows=3))
        prompt, counts = batch.begin(inputs, trimtab.GenerateRequest(max_new_tokens=4)), cache.encoder_counts
        assert prompt.step() is False and prompt in batch.prompts.tower_passes.paused
        assert (counts["lookups"], counts["hits"], counts["passes"]) == (1, 0, 1)
        if whose == "its own":
            lose_outputs(monkeypatch)
        else:
            batch.prompts.towers.may_cut = False
        assert prompt.step() is True and not batch.prompts.towers.may_cut
        assert torch.equal(prompt.logits, expected) and prompt not in batch.prompts.tower_passes.paused
        assert (counts["lookups"], counts["hits"], counts["passes"]) == (1, 0, 1)


def test_pieces_are_as_large_as_they_may_be_and_whole_where_nobody_waits(monkeypatch):
    def pieces(batch):
        prompt, count = batch.begin(picture(batch.model, "gemma3", 9), trimtab.GenerateRequest(max_new_tokens=4)), 0
        while prompt.needs_towers:
            prompt.step()
            count += 1
        prompt.compute()
        batch.leave(batch.join(prompt).row)
        return count

    with lent("gemma3") as model:
        batch, row = answering(model, monkeypatch, 10**6)
        assert pieces(batch) == 1
        monkeypatch.setattr(tower_passes, "PIECE_POSITIONS", 1)
        assert pieces(batch) == len(batch.prompts.towers.all_layers) == 2
        batch.leave(row)
        assert pieces(batch) == 1


def test_a_prompt_whose_adapter_goes_between_the_pieces_is_refused(tmp_path, monkeypatch):
    base = pico.build("gemma3", tmp_path / "base")
    folder = pico.adapter(base, tmp_path / "a", targets="all")
    plan = trimtab.plan(base, adapters={"a": folder}, quant="none", dtype="float32", context=96, device=DEVICE)
    with trimtab.load(plan, decode="auto") as model:
        batch, _ = answering(model, monkeypatch, 1)
        prompt = batch.begin(picture(model, "gemma3", 9), trimtab.GenerateRequest(max_new_tokens=4), adapter="a")
        assert prompt.step() is False and prompt in batch.prompts.tower_passes.paused
        model.unload_adapter("a")
        with pytest.raises(RequestError, match="adapter"):
            prompt.step()


class Reading(torch.nn.Module):
    """Layers, and code between them that reads an output again, or writes into it."""

    def __init__(self, how):
        super().__init__()
        self.layers, self.how = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3)), how

    def forward(self, x):
        if self.how == "reads twice":
            return self.twice(x)
        first = self.layers[0](x)
        if self.how == "writes":
            first += 1
        between = first * 2 if self.how == "reads" else first
        del first
        if self.how == "holds":
            self.held = between
        return self.layers[2](self.layers[1](between))

    def twice(self, x):
        x = self.layers[0](x)
        extra = x.sum(dim=0)
        x = self.layers[1](x)
        x = self.layers[2](x)
        return x + extra


def cut(model, x):
    """Return what a pass of pieces of one layer gives, and how often it stopped."""
    pieces, stops = TowerPieces(None), 0
    forwards = {layer: lambda *args, inner=layer.forward: pieces.run(inner, args, {}) for layer in model.layers}
    while True:
        pieces.begin(1)
        try:
            with torch.no_grad(), covered(forwards):
                return model(x), stops
        except PausedError:
            stops += 1


@pytest.mark.parametrize("how, counts", [("plain", {2}), ("holds", {2}), ("reads", {2}), ("writes", {0, 1})])
def test_what_somebody_holds_is_kept_and_what_is_written_into_is_not_cut(how, counts):
    model, x = Reading(how), torch.randn(2, 4)
    found, stops = cut(model, x)
    assert torch.equal(found, model(x)) and stops in counts


def test_code_between_layers_never_computes_with_what_was_not_kept():
    with pytest.raises(NotKeptError, match="sum reads what a layer returned"):
        cut(Reading("reads twice"), torch.randn(2, 4))
    gone = torch.Tensor._make_subclass(tower_pieces._NotKept, torch.empty(2, 4, device="meta"))
    assert gone.shape == (2, 4) and gone.dtype == torch.float32 and gone.numel() == 8
    for read in (lambda: torch.ones(2, 4).add_(gone), lambda: gone[0], lambda: gone.to("cpu"), lambda: torch.cat([gone])):
        with pytest.raises(NotKeptError):
            read()


def test_a_family_that_cannot_be_cut_goes_through_whole(tmp_path, monkeypatch):
    with load("gemma3", tmp_path) as model:
        batch, _ = answering(model, monkeypatch, 1)
        plain = in_chunks(model, (16, 64), 3)
        lose_outputs(monkeypatch)
        inputs = picture(model, "gemma3", 9)
        found, expected = through(batch, inputs), through(plain, inputs)
        assert differ(found.logits, expected.logits) < (1e-4 if ON_GPU else 1e-6)
        assert [one.what for one in batch.steps.fallbacks] == ["towers in pieces"], batch.steps.fallbacks
        assert not batch.prompts.towers.may_cut


def test_a_cut_pass_that_goes_on_with_other_inputs_begins_anew():
    layers = [torch.nn.Linear(4, 4) for _ in range(2)]
    pieces = TowerPieces(None)

    def passed(x):
        for layer in layers:
            x = pieces.run(layer.forward, (x,), {})
        return x

    with torch.no_grad():
        pieces.begin(1)
        with pytest.raises(PausedError):
            passed(torch.ones(2, 4))
        pieces.begin(None)
        x = torch.ones(3, 4)  # one of two images is cached by now, say
        assert torch.equal(passed(x), layers[1](layers[0](x)))


def test_a_piece_also_ends_after_a_time():
    clock = [0.0]
    layers = [torch.nn.Linear(4, 4) for _ in range(6)]
    pieces, x, ran = TowerPieces(None, lambda: clock[0]), torch.randn(2, 4), []

    def passed():
        clock[0] += 5.0  # what runs again before the first layer counts for nothing
        result = x
        for number, layer in enumerate(layers):

            def compute(value, layer=layer, number=number):
                clock[0] += 0.4
                ran[-1].append(number)
                return layer(value)

            result = pieces.run(compute, (result,), {})
        return result

    with torch.no_grad():
        expected = torch.nn.Sequential(*layers)(x)
        for _ in range(2):
            ran.append([])
            pieces.begin(10**6, 1.0)
            with pytest.raises(PausedError) if not ran[:-1] else nullcontext():
                found = passed()
    assert ran == [[0, 1, 2], [3, 4, 5]] and torch.equal(found, expected)


# Shapes --------------------------------------------------------------------------------------------------------------


def counting(most_bytes=2**62):
    towers = object.__new__(Towers)
    model = SimpleNamespace(device=torch.device("cpu"), plan=SimpleNamespace(execution=SimpleNamespace(towers=None)))
    model.adapter_store = SimpleNamespace(serials={})
    model.hf_model = SimpleNamespace(config=SimpleNamespace(model_type="other"))
    model.plan.tiers, model.anatomy = dict, SimpleNamespace(rows=(), unknown_towers=())
    Towers.__init__(towers, model, "eager", lambda why, what: None)
    towers.is_on, towers.most_bytes = True, most_bytes
    layer = torch.nn.Identity()
    layer.forward = lambda x: x + 1
    towers.layers, towers.all_layers = [layer], {layer: "resident"}
    return towers, layer


def passed(towers, layer, size):
    with towers.running(None, None):
        assert torch.equal(layer(torch.zeros(size)), torch.ones(size))


def test_a_shape_that_comes_often_keeps_its_graph_while_others_come_once():
    towers, layer = counting()
    for _ in range(MOST_CREDIT + 4):
        passed(towers, layer, 1)
    for size in range(2, MOST_SHAPES + 1):
        passed(towers, layer, size)
        passed(towers, layer, size)
    assert len(towers._shapes) == MOST_SHAPES == towers.captured
    before = towers.captured
    for size in range(100, 108):  # once each: nothing is captured for them
        passed(towers, layer, size)
    assert towers.captured == before
    for _ in range(4):  # again and again: the one used least goes
        passed(towers, layer, 200)
    assert towers.captured == before + 1 and len(towers._shapes) == MOST_SHAPES
    replayed = towers.replayed
    passed(towers, layer, 1)
    assert towers.replayed == replayed + 1


def test_a_shape_larger_than_planned_runs_as_it_is():
    towers, layer = counting(most_bytes=100)
    for _ in range(3):
        passed(towers, layer, 8)
        passed(towers, layer, 1000)
    assert towers.captured == 1 and towers.buffer_bytes <= 100


def test_a_form_is_all_that_is_not_in_tensors():
    def made(*args, **kwargs):
        tensors = []
        return form_of((args, kwargs), tensors, lambda one: tuple(one.tolist())), tensors

    x, y = torch.zeros(2, 3), torch.ones(4)
    lengths = torch.tensor([0, 2, 5], dtype=torch.int32)
    form, tensors = made(x, (y, None), cu_seqlens=lengths, flag=True)
    assert tensors[0] is x and tensors[1] is y and len(tensors) == 2
    args, kwargs = filled(form, iter(tensors))
    assert args[0] is x and args[1] == (y, None) and kwargs["flag"] is True
    assert torch.equal(kwargs["cu_seqlens"], lengths) and kwargs["cu_seqlens"].dtype == torch.int32
    assert made(x, (y, None), cu_seqlens=lengths, flag=True)[0] == form
    assert made(x, (y, None), cu_seqlens=lengths + 1, flag=True)[0] != form
    assert made(x, (y, None), cu_seqlens=lengths, flag=False)[0] != form
    assert made(x.half(), (y, None), cu_seqlens=lengths, flag=True)[0] != form and made(1)[0] != made(True)[0]
    with pytest.raises(UnknownFormError, match="SimpleNamespace"):
        made(SimpleNamespace())


# Sounds --------------------------------------------------------------------------------------------------------------


def sounds(model, frames, *, seed=0, count=1, valid=None):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(count, frames, dtype=torch.bool)
    for row, length in enumerate(valid or [frames] * count):
        mask[row, :length] = True
    return torch.randn(count, frames, 128, generator=generator).to(DEVICE), mask.to(DEVICE)


def heard(model, given, towers=None):
    owner = model.hf_model.model
    with torch.no_grad():
        if towers is None:
            return owner.get_audio_features(*given, return_dict=True)
        with towers.running(None, None):
            return owner.get_audio_features(*given, return_dict=True)


@pytest.mark.parametrize("frames", [30, 31, 33, 127, 128, 150, 191])
def test_a_sound_that_is_padded_is_the_sound(frames):
    with lent("gemma4") as model:
        towers, why = towers_of(model)
        model.adapter_store.none()
        for seed in range(3):
            given = sounds(model, frames, seed=seed, count=2, valid=[frames, frames - 5])
            found, expected = heard(model, given, towers), heard(model, given)
            assert torch.equal(found.attention_mask, expected.attention_mask)
            mask = expected.attention_mask
            # More rows in a product are another kernel: roundings of float32.
            assert found.pooler_output.shape == expected.pooler_output.shape
            assert differ(found.pooler_output[mask], expected.pooler_output[mask]) < 1e-5
        assert not why and towers.replayed


def test_what_lies_in_the_padding_changes_nothing(monkeypatch):
    with lent("gemma4") as model:
        features, mask = sounds(model, 200, valid=[150])
        with torch.no_grad():
            model.adapter_store.none()
            expected = heard(model, (features, mask))
            features[:, 150:] = 1e3
            found = heard(model, (features, mask))
        real = expected.attention_mask
        assert torch.equal(found.pooler_output[real], expected.pooler_output[real]) and real.sum() == 38


def test_sounds_of_few_lengths_share_graphs():
    with lent("gemma4") as model:
        towers, _ = towers_of(model)
        model.adapter_store.none()
        for frames in (130, 150, 170, 192, 191):
            heard(model, sounds(model, frames), towers)
        assert len(towers._shapes) == 1
    assert [padded_frames(frames) for frames in (1, 128, 129, 3000, 3072, 5000)] == [128, 128, 192, 3072, 3072, 5000]
