"""The last layers of a prompt in the kernels of a step: the scores of transformers' own pass, with every kind of adapter."""

import gc
import weakref

import pytest

import trimtab
from tests import pico
from tests.cuda_on_cpu import run
from tests.engine.decode.test_graphs import demo
from tests.engine.kernels.test_fused_kernels import on_cpu  # noqa: F401 - a fixture
from tests.engine.prefill.test_prefill import DEVICE, LENGTHS, ON_GPU, TOLERANCE, answered, differ, eager, ids, through
from trimtab.engine.batch.batch import Batch
from trimtab.engine.batched_lora.table import AdapterSlots
from trimtab.engine.families.chunk import LastLayers
from trimtab.engine.prefill.prefill import PrefillRunner
from trimtab.planning.values.byte_sizes import PAGE_TOKENS

# bfloat16, other kernels: as of a whole step in tests/engine/kernels/test_fused_kernels.py.
BFLOAT16_TOLERANCE = 2**-4
ADAPTERS = {"plain": {}, "other": {"rank": 20, "seed": 2}, "dora": {"dora": True, "seed": 3}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("last")
    base = pico.build("gemma4", folder / "base")
    adapters = {name: pico.adapter(base, folder / name, **given) for name, given in ADAPTERS.items()}
    with trimtab.load(base, quant="none", dtype="float32", context=96, device=DEVICE, adapters=adapters) as found:
        yield found


def batch_of(model, *, sizes=(8, 16), rows=1):
    batch = Batch(model, rows=rows, decode="fused")
    batch.prompts = PrefillRunner(batch, "auto" if ON_GPU else "static", sizes)
    return batch


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", [None, *ADAPTERS])
def test_a_prompt_has_the_scores_of_transformers_own_pass(model, name, rows):
    expected, batch = eager(model, rows), batch_of(model, rows=rows)
    for tokens in LENGTHS if name is None else (9, 17, 40):
        for _ in range(2 if ON_GPU else 1):  # as it is, then captured
            found = answered(batch, model.prepare(ids(tokens)), adapter=name)
        assert differ(found, answered(expected, model.prepare(ids(tokens)), adapter=name)) < TOLERANCE, tokens
        assert batch.prompts._forward.lasts.__self__ is batch.prompts.lasts


def test_what_they_do_is_what_the_answer_is_made_of(model, monkeypatch):
    """A planted fault: the place of the last token, one too far."""
    expected, batch = eager(model), batch_of(model)
    own = LastLayers._begin

    def begin(self, h, *states):
        self._position.add_(1)
        own(self, h, *states)

    monkeypatch.setattr(LastLayers, "_begin", begin)
    found, wanted = (answered(one, model.prepare(ids(9))) for one in (batch, expected))
    assert differ(found[0], wanted[0]) > TOLERANCE


def test_states_in_8_bits_stay_with_the_modules(tmp_path):
    base = pico.build("gemma4", tmp_path / "base")
    with trimtab.load(base, quant="none", dtype="float32", context=96, device=DEVICE, kv="int8") as model:
        batch = batch_of(model)
        answered(batch, model.prepare(ids(9)))
        assert batch.prompts.lasts is None and batch.prompts._forward.lasts is None


def test_states_in_pages_are_read_there(tmp_path):
    base = pico.build("gemma4", tmp_path / "base")
    given = {"quant": "none", "dtype": "float32", "context": 96, "device": DEVICE}
    plan = trimtab.plan(base, **given, batch=4, kv_tokens=96 + 2 * PAGE_TOKENS)
    with trimtab.load(trimtab.plan(base, **given)) as plain, trimtab.load(plan) as model:
        batch, expected = batch_of(model, rows=4), eager(plain)
        assert batch.cache.pool is not None
        for tokens in (9, 40, 17, 90):
            found, wanted = (answered(one, one.model.prepare(ids(tokens))) for one in (batch, expected))
            assert differ(found, wanted) < TOLERANCE, tokens
            assert batch.prompts._forward.lasts.__self__ is batch.prompts.lasts


def test_steps_of_modules_have_prompts_of_modules(model):
    for batch in (eager(model), Batch(model, rows=1, decode="eager")):
        batch.prompts = PrefillRunner(batch, "static", (16,))
        answered(batch, model.prepare(ids(9)))
        assert batch.prompts.lasts is None and batch.prompts._forward.lasts is None


def test_an_adapter_with_norms_of_its_own_leaves_them_to_the_modules(tmp_path):
    """They go back to the kernels when it is gone; both ways have graphs of their own."""
    base = pico.build("gemma4", tmp_path / "base")
    norms = pico.adapter(base, tmp_path / "norms", seed=4, modules_to_save=["input_layernorm"])
    plan = trimtab.plan(base, quant="none", dtype="float32", context=96, device=DEVICE, adapters={"norms": norms})
    with trimtab.load(plan, decode="auto") as model:
        batch = Batch(model, rows=1)
        batch.prompts = PrefillRunner(batch, "auto" if ON_GPU else "static", (16,))
        batch.steps._choice.is_fusable = True  # as in the mode "fused", whose step refuses such an adapter
        for name in ("norms", None):
            wanted, found = (through(one, model.prepare(ids(9)), adapter=name).logits for one in (eager(model), batch))
            assert differ(found.cpu(), wanted.cpu()) < TOLERANCE and batch.prompts._forward.lasts is None
        model.unload_adapter("norms")
        batch = batch_of(model)
        wanted, found = (answered(one, model.prepare(ids(9))) for one in (eager(model), batch))
        assert differ(found, wanted) < TOLERANCE and batch.prompts._forward.lasts is not None


def test_nothing_is_allocated_in_a_pass_and_tables_go_with_their_adapters(model):
    batch = batch_of(model)
    answered(batch, model.prepare(ids(9)), adapter="plain")
    lasts = batch.prompts.lasts
    buffers = dict(lasts.step._buffers)
    assert buffers
    for name in (None, "dora", "plain"):
        answered(batch, model.prepare(ids(12)), adapter=name)
    # The step after the prompt makes the buffers of its own ends.
    ours = {key for key in lasts.step._buffers if key not in buffers}
    assert not ours and all(lasts.step._buffers[key] is one for key, one in buffers.items())
    serial = model.adapter_store.serial_of("dora")
    key = ("dora", serial)
    assert key in lasts._tables
    lasts.select(("gone", 1), None, ())
    lasts.select("layout", None, ())
    assert ("gone", 1) not in lasts._tables and key in lasts._tables
    lasts.select("another", None, {"another"})
    assert "layout" not in lasts._tables and None in lasts._tables


@pytest.mark.skipif(ON_GPU or run.why_not() is not None, reason="the sources, compiled by g++")
@pytest.mark.parametrize("place", ["resident", pytest.param("streamed", marks=pytest.mark.slow)])
def test_the_sources_themselves_compute_them_with_the_adapter_in_the_products(on_cpu, place):  # noqa: F811
    """The demo model in 4 bits; an adapter of its own, one that is no plain LoRA, and none."""
    with demo(place) as model:
        expected = eager(model)
        batch = Batch(model, rows=1, decode="fused")
        batch.prompts = PrefillRunner(batch, "static", (16, 64))
        for name in (None, "specialist", "rslora-dora"):
            wanted = answered(expected, model.prepare(ids(21)), adapter=name)
            before = len(on_cpu.matvec.launches)
            prompt = through(batch, model.prepare(ids(21)), adapter=name)
            # Of the pass itself: attention, two groups of the MLP and two of the layer's own input, in each last layer.
            lasts = batch.prompts.lasts
            launched = [one for one in on_cpu.matvec.launches[before:] if one.startswith("matvec")]
            assert len(launched) >= 5 * (len(lasts.layers) - lasts.first)
            assert differ(prompt.logits, wanted[0]) < BFLOAT16_TOLERANCE
            assert isinstance(lasts._table, AdapterSlots) == (name == "specialist")
            if name is None:
                buffers = set(lasts.step._buffers)
            batch.leave(batch.join(prompt).row)
        assert set(lasts.step._buffers) == buffers  # whichever adapter comes first, no pass makes one
        assert batch.steps.fallbacks == []
        # The adapter counts: another one's scores are further away.
        other = answered(expected, model.prepare(ids(21)))
        mine = answered(batch, model.prepare(ids(21)), adapter="specialist")
        assert differ(mine[0], other[0]) > BFLOAT16_TOLERANCE
        # Tables have addresses alone: what is unloaded is nobody's.
        held = weakref.ref(next(leaf.adapters["specialist"].A for leaf in lasts._groups[0] if "specialist" in leaf.adapters))
        model.unload_adapter("specialist")
        gc.collect()
        assert held() is None
