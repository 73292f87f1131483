"""The memory that graphs of prompts share with passes that are not captured."""

import gc

import pytest
import torch

import trimtab
from tests import pico
from tests.engine.prefill.test_prefill import DEVICE, TOLERANCE, answered, differ, eager, ids, picture
from trimtab.engine.batch.batch import Batch
from trimtab.engine.cuda.nvrtc import side_stream
from trimtab.engine.memory.graph_cache import GraphCache
from trimtab.engine.memory.shared_pool import PrefillMemoryPool

MIB = 2**20
GPU = torch.device("cuda", 0)


class Owner:
    def __init__(self):
        self.dropped = 0

    def drop_graphs(self):
        self.dropped += 1


@pytest.fixture
def room():
    made = PrefillMemoryPool(GPU, 64 * MIB)
    assert not made.is_made and made.make() and made.make()
    yield made
    made.release()


def computed(x, w):
    y = x
    for _ in range(4):
        y = torch.nn.functional.gelu(y @ w) / 8
    return y


def test_graphs_and_other_passes_use_the_same_bytes(room):
    x, w = (torch.randn(1024, 1024, device=GPU) for _ in range(2))
    computed(x, w)
    with side_stream(GPU) as side, torch.cuda.stream(side):
        expected = computed(x, w)  # the library's memory for this stream is allocated outside
    graphs, output = GraphCache(lambda: room.handle), torch.zeros_like(expected)
    held = room.held_bytes
    for number in range(3):
        with room.using():
            passed = computed(x, w)
        kept = passed.clone()
        del passed
        assert room.check() and torch.equal(kept, expected)
        with side_stream(GPU) as side:
            torch.cuda.synchronize()
            graph, _ = graphs.record(side, lambda: output.copy_(computed(x, w)))
        graphs[number,] = graph
        output.zero_()
        graph.replay()
        assert torch.equal(output, expected) and room.check()
    assert room.held_bytes <= held + 4 * MIB and held >= 64 * MIB
    reserved = torch.cuda.memory_reserved()
    graphs.clear()  # a graph that is alive keeps the pool
    del graph
    room.release()
    assert not room.is_made and reserved - torch.cuda.memory_reserved() >= 64 * MIB


def test_what_a_pass_leaves_drops_the_graphs_once(room):
    owner = Owner()
    room.owners.add(owner)
    with room.using():
        left = torch.ones(MIB, device=GPU)
    assert not room.check() and owner.dropped == 1 and room.left_bytes >= 4 * MIB
    assert room.check() and owner.dropped == 1
    del left
    assert room.check() and room.left_bytes == 0


def test_a_room_that_the_device_has_no_memory_for_is_not_made():
    room = PrefillMemoryPool(GPU, 2**42)
    assert not room.make() and not room.is_made
    with room.using():
        assert torch.ones(3, device=GPU).sum() == 3


def test_a_room_is_lent_only_where_the_budget_has_no_other(room):
    room.lend(room.nbytes)
    assert room.is_made
    room.lend(room.nbytes - 1)
    assert not room.is_made and room.make()


@pytest.mark.parametrize("family", ["llama", "gemma4", "qwen3"])
def test_prompts_beside_copied_layers_are_captured_and_the_same(family, tmp_path):
    folder = pico.build(family, tmp_path / "base")
    adapter = pico.adapter(folder, tmp_path / "a", targets="all")
    options = {
        "quant": "none", "dtype": "float32", "context": 96, "device": DEVICE, "gpu_memory": "8GiB", "adapters": {"a": adapter},
    }  # fmt: skip
    with trimtab.load(trimtab.plan(folder, **options), decode="auto") as model:
        whole = eager(model)
        expected = {
            (count, name): answered(whole, model.prepare(ids(count)), adapter=name)
            for count in (9, 40, 70) for name in ("a", None)
        }  # fmt: skip
    plan = trimtab.plan(folder, place={"language": "stream"}, **options)
    assert plan.execution.prompt.mode == "graph", plan.execution.prompt.reason
    with trimtab.load(plan, decode="auto") as model:
        model.forget_batch()
        batch = Batch(model, rows=1)
        for again in range(4):
            for (count, name), wanted in expected.items():
                found = answered(batch, model.prepare(ids(count)), adapter=name)
                assert differ(found, wanted) < TOLERANCE, (family, count, name, again)
            if again == 1:
                model.embed([ids(20)])  # lends the room, where it has to be
        assert len(batch.prompts._graphs) >= 2 and model.prompt_room.is_made
        assert not [one for one in model.fallbacks if one.what.startswith("captured prompts")], model.fallbacks
        del batch
    gc.collect()


def test_images_between_captured_prompts_change_nothing(tmp_path):
    """Towers that are copied in for each pass compute in the room, between replays of graphs that write there."""

    folder = pico.build("gemma4", tmp_path / "base")
    options = {"quant": "none", "dtype": "float32", "context": 96, "device": DEVICE, "gpu_memory": "8GiB", "images": 1}
    with trimtab.load(trimtab.plan(folder, **options), decode="auto") as model:
        whole = eager(model)
        inputs = picture(model, "gemma4", 3)
        expected = [answered(whole, one) for one in (model.prepare(ids(40)), inputs)]
    with trimtab.load(trimtab.plan(folder, place={"vision": "stream"}, **options), decode="auto") as model:
        model.forget_batch()
        batch = Batch(model, rows=1)
        left = []
        for again in range(4):
            for one, wanted in zip((model.prepare(ids(40)), inputs), expected, strict=True):
                assert differ(answered(batch, one), wanted) < TOLERANCE, again
            left.append(model.prompt_room.left_bytes)
        # What the first image's pass makes for good stays; no later one leaves anything, so that graphs are kept.
        assert model.prompt_room.is_made and len(set(left)) == 1 and len(batch.prompts._graphs) >= 2
