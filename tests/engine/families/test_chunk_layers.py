"""The layers of a prompt's chunk in the kernels of a step: the scores of transformers' own pass, in every form of a chunk."""

import pytest
import torch

import trimtab
from tests import pico
from tests.cuda_on_cpu import run
from tests.engine.decode.test_graphs import demo
from tests.engine.families.test_last_layers import ADAPTERS, BFLOAT16_TOLERANCE, batch_of
from tests.engine.kernels.test_fused_kernels import on_cpu  # noqa: F401 - a fixture
from tests.engine.prefill.test_packed_prompts import both, together, wide
from tests.engine.prefill.test_prefill import DEVICE, ON_GPU, REQUEST, TOLERANCE, answered, differ, eager, ids, through  # fmt: skip
from tests.long_runs import skip_without_rings
from trimtab.engine.families.chunk import ChunkLayers
from trimtab.engine.prefill import packing

# On both sides of a chunk of 8 and 16 tokens and of the window of 8; several chunks, the last one nearly empty and full.
LENGTHS = (1, 7, 8, 9, 15, 16, 17, 40, 48)
WITH_ADAPTER = (9, 17, 40)  # padded, a last chunk of one token, and several chunks
# gemma4: keys and values shared by the last layers, an input of each layer's own. dense: neither, and keys that are the values.
# qwen3, gemma3: one norm and one rotation, and two of each. qwen3_vl: positions along three axes. gemma2, gpt_oss: eager attention
# that caps scores, and that has sinks; experts as they are. ministral3: queries grow. phi3: joined products. olmo3: norms behind,
# of all heads together. glm4: pairs turn. granite: factors. gemma4_moe: experts next to the MLP. glm4_moe, qwen3_moe: in
# some layers, with a shared one and without. smollm3: a layer without a rotation.
FAMILIES = (
    "gemma4", "gemma4_dense", "qwen3", "gemma3", "qwen3_5", "gemma2", "gpt_oss", "ministral3", "phi3", "olmo3", "glm4", "granite",
    "gemma4_moe", "glm4_moe", "smollm3",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_vl", "qwen3_moe", "qwen3_vl_moe", "olmo2", "llama", "qwen2")),
)  # fmt: skip


def load(family, folder, **options):
    base = pico.build(family, folder / "base")
    adapters = {name: pico.adapter(base, folder / name, **given) for name, given in ADAPTERS.items()}
    given = {"quant": "none", "dtype": "float32", "context": 96, "device": DEVICE, "adapters": adapters} | options
    return trimtab.load(trimtab.plan(base, **given), decode="auto")


# In float32 the gated delta rule has no kernels, and grouped products of experts cannot be captured (torch 2.11).
IN_16_BITS = ("qwen3_5", "gpt_oss", "gemma4_moe", "glm4_moe", "qwen3_moe", "qwen3_vl_moe")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    if ON_GPU and request.param in IN_16_BITS:
        pytest.skip("a GPU captures it in 16 bits, and this test is of float32")
    with load(request.param, tmp_path_factory.mktemp(request.param)) as found:
        skip_without_rings(found)
        yield found


@pytest.mark.parametrize("name", [None, *ADAPTERS])
def test_chunks_of_every_length_have_the_scores_of_transformers_own_pass(model, name):
    expected, batch = eager(model), batch_of(model)
    for tokens in LENGTHS if name is None else WITH_ADAPTER:
        for _ in range(2 if ON_GPU else 1):  # as it is, then captured
            found = answered(batch, model.prepare(ids(tokens)), adapter=name)
        assert differ(found, answered(expected, model.prepare(ids(tokens)), adapter=name)) < TOLERANCE, tokens
    assert batch.prompts._forward.firsts.__self__ is batch.prompts.firsts


@pytest.mark.parametrize("options", [{"kv": "int8"}, {"batch": 4, "kv_tokens": 160}], ids=["kv int8", "pages"])
def test_other_forms_of_the_cache_are_written_as_the_modules_write_them(tmp_path, options, monkeypatch):
    passes, own = [], ChunkLayers._mlp
    monkeypatch.setattr(ChunkLayers, "_mlp", lambda self, *given: passes.append(1) or own(self, *given))
    with load("gemma4", tmp_path, **options) as model:
        rows = options.get("batch", 1)
        modules, batch = batch_of(model, rows=rows), batch_of(model, rows=rows)
        modules.prompts.firsts = modules.prompts.lasts = None
        modules.steps.fused_step = lambda: None
        for tokens in (9, 40):
            wanted, found = (through(one, model.prepare(ids(tokens))).logits for one in (modules, batch))
            assert differ(found.cpu(), wanted.cpu()) < TOLERANCE, tokens
        assert len(passes) >= 2 * batch.prompts.firsts.first_shared and modules.prompts._forward.firsts is None


@pytest.mark.parametrize("names", [(None,) * 4, ("plain", None, "dora", "plain")], ids=["base", "adapters"])
def test_several_prompts_of_one_pass_go_through_them_too(model, names, monkeypatch):
    monkeypatch.setattr(packing, "LEAST_TOKENS", 16)
    expected, batch = eager(model), wide(batch_of(model, rows=5), monkeypatch)
    if batch.prompts.packs.why_not() is not None:
        pytest.skip(batch.prompts.packs.why_not())
    if ON_GPU and any(names):
        pytest.skip("a table of adapters is of 16 bits, and this test of float32")
    lengths = (7, 16, 3, 12)
    prompts = [batch.begin(model.prepare(ids(count)), REQUEST, adapter=name) for count, name in zip(lengths, names, strict=True)]
    passes, own = [], ChunkLayers._mlp
    monkeypatch.setattr(ChunkLayers, "_mlp", lambda self, mlp, x, rows, h: passes.append(rows) or own(self, mlp, x, rows, h))
    assert together(batch, prompts) < len(lengths)
    assert max(passes) > 1
    for found, count, name in zip(both(batch, prompts), lengths, names, strict=True):
        assert differ(found, answered(expected, model.prepare(ids(count)), adapter=name)) < TOLERANCE, count


@pytest.mark.skipif(ON_GPU, reason="a table of adapters is of 16 bits, and this test of float32")
def test_rows_of_a_pass_have_their_own_adapters_in_routers(tmp_path, monkeypatch):
    """Experts take the tokens of all rows as one; what adds adapters by row must see the rows: Gemma 4's router has a linear."""
    monkeypatch.setattr(packing, "LEAST_TOKENS", 16)
    base = pico.build("gemma4_moe", tmp_path / "base")
    adapter = pico.adapter(base, tmp_path / "all", targets=r".*router\.proj")
    plan = trimtab.plan(base, quant="none", dtype="float32", context=96, device=DEVICE, adapters={"all": adapter})
    with trimtab.load(plan, decode="auto") as model:
        changed = [path for path, leaf in model.hf_model.named_modules() if getattr(leaf, "adapters", None)]
        assert any("router.proj" in path for path in changed)
        expected, batch = eager(model), wide(batch_of(model, rows=5), monkeypatch)
        prompts = [
            batch.begin(model.prepare(ids(count)), REQUEST, adapter=name) for count, name in ((7, None), (16, "all"), (12, None))
        ]
        assert together(batch, prompts) < 3
        for found, (count, name) in zip(both(batch, prompts), ((7, None), (16, "all"), (12, None)), strict=True):
            assert differ(found, answered(expected, model.prepare(ids(count)), adapter=name)) < TOLERANCE, count


def test_modules_of_experts_get_no_pass_of_several_adapters(model, request):
    """They take the tokens of all rows as one, so a layer inside them would find the adapters of other rows."""
    is_mixture = request.node.callspec.id in IN_16_BITS[1:]
    batch = batch_of(model, rows=5)
    assert model.adapter_store.names
    batch.steps.fused_step = lambda: None
    assert (batch.prompts.packs.why_not() == "modules of experts take the tokens of all rows as one") is is_mixture


def test_a_chunk_before_the_end_of_a_rotation_keeps_its_angles(tmp_path):
    """Phi-3 turns by other angles from 256 tokens on: padding is not counted, and a longer context is refused."""
    for context, beyond in ((256, False), (300, True)):
        with load("phi3", tmp_path / str(context), context=context) as model:
            expected, batch = eager(model), batch_of(model)
            assert batch.prompts.is_on is not beyond
            if beyond:
                assert any("its rotation changes behind 256 tokens" in one.why for one in batch.steps.fallbacks)
            else:
                batch.prompts.sizes = (48,)
                found = answered(batch, model.prepare(ids(250)))
                assert differ(found, answered(expected, model.prepare(ids(250)))) < TOLERANCE


FAULTS = {
    "the input of the layer before": ("_input", lambda made: made.flip(-1)),
    "attention": ("_attend", lambda made: made.flip(-1)),
    "the MLP": ("_mlp", lambda made: made.flip(-1)),
}


@pytest.mark.parametrize("what", FAULTS)
def test_what_they_do_is_what_the_answer_is_made_of(model, monkeypatch, what):
    name, change = FAULTS[what]
    own = getattr(ChunkLayers, name)
    monkeypatch.setattr(ChunkLayers, name, lambda *given: change(own(*given)))
    found, wanted = (answered(one, model.prepare(ids(9))) for one in (batch_of(model), eager(model)))
    assert differ(found[0], wanted[0]) > TOLERANCE


def test_an_input_is_that_of_the_layer_before_and_no_other(model):
    """What a pass that failed has left is nobody's input."""
    batch = batch_of(model)
    wanted = answered(batch, model.prepare(ids(9)))
    batch.prompts.firsts._made = torch.zeros(1, 16, 8), torch.full((16, 8), float("nan"))
    assert torch.equal(answered(batch, model.prepare(ids(9))), wanted)


@pytest.mark.skipif(ON_GPU or run.why_not() is not None, reason="the sources, compiled by g++")
def test_the_sources_themselves_compute_them(on_cpu):  # noqa: F811
    """The demo model in 4 bits, bfloat16: an adapter, and none."""
    with demo() as model:
        expected, batch = eager(model), batch_of(model, sizes=(16, 64))
        for name in (None, "specialist"):
            before = len(on_cpu.small.launches)
            wanted, found = (answered(one, model.prepare(ids(21)), adapter=name)[0] for one in (expected, batch))
            assert differ(found, wanted) < BFLOAT16_TOLERANCE
            launched = on_cpu.small.launches[before:]
            layers = batch.prompts.firsts.first_shared
            assert sum(one.startswith("rope_write") for one in launched) == layers
            assert launched.count("add_norm") >= 3 * layers + 1
