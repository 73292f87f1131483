"""Keys and values in 8 bits: the bits of the rounding, and every family, mode, layout and way of a prompt against plain
transformers with a cache of its own that is given rounded states (kv8_reference.py).

On a CPU nothing is captured: a stand-in repeats steps the way a graph would. tests/gpu runs the same tests with graphs.
"""

import json
import weakref
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, Qwen3NextConfig

import trimtab
from tests import ROOT, long_runs, pico, stock
from tests.checkpoint.test_anatomy import config_only
from tests.engine.batch.test_batch import DEVICE, through, to_the_end
from tests.engine.batch.test_company import (
    alone,
    batch_of,
    check,
    check_beside_spoilt,
    check_company,
    forks,
    keeping_prefixes,
    packed_with_cached_beginnings,
    with_pool,
)  # fmt: skip
from tests.engine.decode.test_graphs import replayed  # noqa: F401
from tests.engine.kv.kv8_reference import RoundedCache, greedy, rounded
from tests.planning.values.test_execution import E4B, H200, card
from tests.raised import refused
from trimtab.api import plan_request
from trimtab.checkpoint.anatomy import KVLayer
from trimtab.cli.main import main
from trimtab.demo.demo import ADAPTERS
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine.batch.batch import Batch
from trimtab.engine.calls.embedding import PromptScores
from trimtab.engine.kv import int8, kv_cache
from trimtab.engine.kv.int8 import read_states, round_states
from trimtab.engine.kv.kv_cache import LayerCache, PagedLayer
from trimtab.engine.memory.graph_cache import GraphCache
from trimtab.engine.tiers.reader import Reader
from trimtab.errors import RequestError, TrimtabError
from trimtab.planning import Plan, make_plan
from trimtab.planning import options as plan_options
from trimtab.planning.memory.activations import needs_of, row_cache_bytes, use_of
from trimtab.planning.values.byte_sizes import LAYER_KERNELS, NODE_BYTES, PAGE_TOKENS, ROUNDING_BYTES, check_kv, copy_bytes
from trimtab.planning.values.execution import graph_bytes
from trimtab.report.render import WIDTH, Lines
from trimtab.request import GenerateRequest, LoadRequest
from trimtab.serve.worker.registry import read_registry

pytestmark = pytest.mark.usefixtures("no_kept_anatomies")

# On both sides of the families' window of 8 tokens, and of one and two chunks of 16.
PROMPTS = [list(range(5, 5 + count)) for count in (3, 11, 20, 40)]
CONTEXT = 256
POOLS = (None, 448)  # tokens of a pool of pages; None: rows
# Two ways to sum in float32 differ in the last bits, and where a value lies between two steps one may round it up and the other
# down: a whole step of one of a token's numbers. Largest seen over all families: 6e-5, 1e-6 without such a step.
TOLERANCE = 1e-3


# The rounding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_has_the_bits_of_its_definition(dtype):
    generator = torch.Generator().manual_seed(1)
    for size in (1.0, 1e-3, 300.0):
        states = (torch.randn(3, 2, 50, 64, generator=generator) * size).to(dtype).to(DEVICE)
        states[0, 0, 0] = 0
        states[0, 1, 1, 5] = 60 * size  # one value far out
        held = round_states(states)
        assert held.dtype == torch.int8 and held.shape == (3, 2, 50, 68)
        found = read_states(held, dtype)
        assert torch.equal(found, rounded(states))
        step = states.float().abs().amax(-1, keepdim=True) / 127
        # Half a step, and what the dtype cannot say of a step's multiple.
        assert ((found - states).abs() <= step * (0.5 + 127 * torch.finfo(dtype).eps) + 1e-7).all()


def test_what_is_not_a_number_reads_as_none_and_zeros_as_zeros():
    states = torch.ones(1, 1, 3, 8, device=DEVICE)
    states[0, 0, 0, 3], states[0, 0, 1, 2] = float("nan"), float("inf")
    found = read_states(round_states(states), torch.float32)
    assert found[0, 0, :2].isnan().all() and torch.equal(found[0, 0, 2], states[0, 0, 2])
    assert not read_states(torch.zeros(2, 2, 4, 12, dtype=torch.int8, device=DEVICE), torch.bfloat16).any()


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU reads in one kernel")
def test_reading_a_long_context_takes_little_beside_its_result():
    states = torch.randn(1, 2, 2053, 256).to(torch.bfloat16)
    held = round_states(states)
    assert torch.equal(read_states(held, torch.bfloat16), rounded(states))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        found = read_states(held, torch.bfloat16)
    live = most = 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda one: one.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    # As float32 a head takes 2 MiB, and its product the same.
    assert found.nbytes <= most <= found.nbytes + 1.5 * 2**20


# Every family --------------------------------------------------------------------------------------------------------


def planned(folder, **options):
    given = {"quant": "none", "dtype": "float32", "context": 128, "device": DEVICE, "batch": 4, "kv": "int8"}
    return trimtab.plan(folder, **given | options)


def distance(found, expected):
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("family", long_runs.FAMILIES)
def test_every_family_says_what_transformers_says_of_rounded_states(family):
    folder = pico.built(family)
    reference = stock.load_stock(folder, device=DEVICE, dtype=torch.float32)
    expected = [greedy(reference, prompt, 24) for prompt in PROMPTS]
    for kv_tokens in POOLS:
        with trimtab.load(planned(folder, kv_tokens=kv_tokens)) as model:
            assert [list(model.answer(prompt, max_new_tokens=24).token_ids) for prompt in PROMPTS] == [
                answer for answer, _ in expected
            ]
            is_captured = model.anatomy.fused_unsupported is None and not model.adapter_store.reads_on_host(())
            modes = ["eager", "fused"] if is_captured else ["eager"]
            for decode in modes:
                for sizes in ((), (16, 64)):
                    if DEVICE == "cpu" and len(modes) > 1 and not bool(kv_tokens) ^ bool(sizes) ^ (decode == "fused"):
                        continue  # every two of layout, mode and way of a prompt meet in the others, and a server's three
                    batch = batch_of(model, decode, sizes, 4)
                    request = GenerateRequest(max_new_tokens=24)
                    rows = [through(batch, model.prepare(prompt), request).row for prompt in PROMPTS]
                    found = batch.logits().cpu()
                    wanted = torch.stack([logits[1] for _, logits in expected])
                    assert distance(found, wanted) < TOLERANCE, (decode, sizes)
                    batch.cache.positions[: len(PROMPTS)] -= 1  # the step was only looked at: do it again
                    assert to_the_end(batch, rows) == [tuple(answer) for answer, _ in expected], (decode, sizes)
                    kinds = [layer for layer in batch.cache.layers if isinstance(layer, LayerCache)]
                    held = [layer for layer in kinds if layer.is_initialized]
                    assert held and all(one.keys.dtype == one.values.dtype == torch.int8 for one in held)


def test_a_row_fills_its_context_to_the_last_position(tmp_path):
    folder = pico.build("gemma4", tmp_path)
    reference = stock.load_stock(folder, device=DEVICE, dtype=torch.float32)
    prompt = list(range(5, 45))
    expected, _ = greedy(reference, prompt, 24)
    for kv_tokens, decode, sizes in ((None, "eager", ()), (128, "fused", (16, 64))):
        with trimtab.load(planned(folder, context=64, batch=3, kv_tokens=kv_tokens)) as model:
            batch = batch_of(model, decode, sizes, 3)
            row = through(batch, model.prepare(prompt), GenerateRequest(max_new_tokens=24)).row
            assert to_the_end(batch, [row]) == [tuple(expected)] and len(row.token_ids) == 64


def test_eight_bits_are_what_is_computed_with(tmp_path):
    """The reference of full keys and values is further away than the tolerance, or nothing above would be shown."""
    folder = pico.build("qwen3", tmp_path)
    with trimtab.load(planned(folder)) as small, trimtab.load(planned(folder, kv="full")) as whole:
        logits = []
        for model in (small, whole):
            batch = Batch(model, rows=1)
            through(batch, model.prepare(PROMPTS[2]), GenerateRequest(max_new_tokens=4))
            logits.append(batch.logits().cpu())
        assert 3 * TOLERANCE < distance(*logits) < 0.2


# Rows, prompts and cached beginnings ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    names = {name: DEMO / "adapters" / name for name in ADAPTERS}
    with trimtab.load(planned(DEMO / "base", adapters=names, context=CONTEXT, batch=2)) as one:
        yield one


# A step that one way rounds up and another down moves a logarithm of a probability by about 1e-3.
SAID_TOLERANCE = 2e-2


# Each mode, each way of a prompt and each layout; all of their combinations are slow tests.
WAYS = [("eager", (), None), ("fused", (16, 64), 4 * CONTEXT), ("graph", (16, 64), None)]
OTHER_WAYS = [
    long_runs.slow_on_cpu(decode, sizes, tokens)
    for decode in ("eager", "fused", "graph") for sizes in ((), (16, 64)) for tokens in (None, 4 * CONTEXT)
    if (decode, sizes, tokens) not in WAYS
]  # fmt: skip


@pytest.mark.parametrize(("decode", "sizes", "tokens"), [*WAYS, *OTHER_WAYS])
def test_an_answer_is_the_same_alone_and_in_company(model, replayed, decode, sizes, tokens):  # noqa: F811
    with_pool(model, tokens)
    check_company(model, decode, sizes, tolerance=SAID_TOLERANCE)


@pytest.mark.parametrize("tokens", [long_runs.slow_on_cpu(None), 5 * CONTEXT], ids=["rows", "pages"])
def test_prompts_that_go_together_and_cached_beginnings(model, replayed, monkeypatch, tokens):  # noqa: F811
    with_pool(model, tokens)
    with packed_with_cached_beginnings(model, monkeypatch, tolerance=SAID_TOLERANCE):
        fields = (*model.prefix_cache.layout.blocks, *model.prefix_cache.layout.rings)
        assert fields and all(field.dtype == torch.int8 for field in fields)


@pytest.mark.parametrize("sizes", [(), (16, 64)], ids=["eager prompts", "chunks"])
def test_a_cached_beginning_changes_no_token(model, sizes):
    with_pool(model, None)
    beginning = "Say something about the sea and the colour of it " * 6
    asked = [(None, beginning), (None, beginning + "and then of the sky")]
    expected = [alone(batch_of(model, "eager", sizes, 2), ask) for ask in asked]
    with keeping_prefixes(model):
        found = [alone(batch_of(model, "eager", sizes, 2), ask) for ask in (*asked, asked[0])]
        assert model.prefix_cache.numbers()["hit_tokens"] >= PAGE_TOKENS
        check(dict(enumerate(found)), [*expected, expected[0]], set(), tolerance=SAID_TOLERANCE)


def test_forks_and_rows_that_move_keep_their_bits(model):
    with_pool(model, None)
    ask = (None, "Say something about the sea and the colour of it " * 3)
    expected = [token for token, _ in alone(batch_of(model, "eager", (), 1), ask)]
    batch = batch_of(model, "eager", (16, 64), 4)
    rows = forks(batch, ask, 3)
    batch.leave(rows.pop(0))  # the last row moves into its place
    assert to_the_end(batch, rows) == [tuple(expected)] * 2


def test_pictures_and_sounds_are_rounded_too(model):
    with_pool(model, None)
    batch = batch_of(model, "eager", (16, 64), 2)
    media = [{"image": DEMO / "images" / "image_1.png"}, {"audio": DEMO / "sounds" / "audio_1.wav"}]
    for one, question in zip(media, ("What do you see?", "What do you hear?"), strict=True):
        row = through(batch, model.prepare(question, **one), GenerateRequest(max_new_tokens=24)).row
        assert to_the_end(batch, [row]) == [model.answer(question, **one, max_new_tokens=24).token_ids]


def test_numbers_that_are_none_stay_with_their_row(model):
    with_pool(model, 3 * CONTEXT)
    none = round_states(torch.full((1, 64), float("nan"), device=DEVICE))[0, -4:]

    def spoil(layer, number):
        if isinstance(layer, LayerCache) and layer.is_initialized:
            for held in (layer.keys, layer.values):
                part = held[:, PAGE_TOKENS:] if isinstance(layer, PagedLayer) else held[number]
                part[..., -4:] = none

    check_beside_spoilt(model, spoil)


def test_batch_invariant_answers_are_the_same_in_8_bits(tmp_path):
    folder = pico.build("gemma4", tmp_path)
    with trimtab.load(planned(folder, batch=3, batch_invariant=True)) as model:  # in pages: test_paged_rows.py
        answers = list(model.batch([{"prompt": prompt, "max_new_tokens": 20} for prompt in PROMPTS[:3]], rows=3))
        found = [one.token_ids for one in answers]
        assert found == [model.answer(prompt, max_new_tokens=20).token_ids for prompt in PROMPTS[:3]]


def test_scores_of_a_prompt_and_embeddings_are_of_rounded_states(tmp_path):
    """They go through in pieces with a cache, which is the plan's: whatever the pieces are, the numbers are those of one."""
    folder = pico.build("llama", tmp_path)
    reference = stock.load_stock(folder, device=DEVICE, dtype=torch.float32)
    ids = list(range(5, 45))  # more than a piece
    with torch.no_grad():
        config = reference.config.get_text_config()
        whole = reference(input_ids=torch.tensor([ids], device=DEVICE), past_key_values=RoundedCache(config=config))
        wanted = torch.log_softmax(whole.logits[0].float(), -1).cpu()
    with trimtab.load(planned(folder)) as model:
        scores = PromptScores(model, model.prepare(ids), adapter=None, top=0)
        while not scores.step():
            pass
        found = [one[token][0] for one, token in zip(scores.scores, ids[1:], strict=True)]
        assert max(abs(a - float(wanted[at, ids[at + 1]])) for at, a in enumerate(found)) < TOLERANCE
        full = torch.log_softmax(model.logits(ids).float(), -1)
        assert max(abs(a - float(full[at, ids[at + 1]])) for at, a in enumerate(found)) > 3 * TOLERANCE


# The plan ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma4", "gemma3"])
def test_a_plan_counts_what_is_kept_and_says_the_form(family, tmp_path):
    folder = pico.build(family, tmp_path)
    for kv_tokens in (None, 1000):
        whole, small = (planned(folder, context=512, batch=8, kv_tokens=kv_tokens, kv=kv) for kv in ("full", "int8"))
        assert "keys and values in" not in str(whole) and "8-bit keys and values" in str(small)
        assert small.gpu["kv_cache"] < whole.gpu["kv_cache"] / 3  # float32: 4 bytes a value
        assert small.token_s > whole.token_s and trimtab.Plan.from_json(json.loads(json.dumps(small.to_json()))) == small
        assert small.to_json()["request"]["kv"] == "int8"
        with trimtab.load(small) as model:
            batch = Batch(model, rows=8)
            through(batch, model.prepare([5, 6, 7]), GenerateRequest(max_new_tokens=2))
            rows = batch.cache.held_rows / 8
            assert batch.cache.nbytes() <= small.gpu["kv_cache"] * rows


@pytest.mark.parametrize("family", ["llama", "gemma4", "gemma3n", "mistral3"])
def test_the_copies_that_attention_reads_are_counted(family, tmp_path, monkeypatch):
    """Those alive at a time in a step of all rows: of one layer, and of layers whose keys and values later ones read."""
    live, most = {}, [0]

    def watched(held, dtype):
        found = read_states(held, dtype)
        live[id(found)] = found.nbytes
        weakref.finalize(found, live.pop, id(found))
        most[0] = max(most[0], sum(live.values()))
        return found

    with trimtab.load(planned(pico.build(family, tmp_path))) as model:
        layers, context = model.anatomy.kv_layers, 128
        batch = Batch(model, rows=4)
        for prompt in PROMPTS:
            through(batch, model.prepare(prompt), GenerateRequest(max_new_tokens=4))
        monkeypatch.setattr(int8, "read_states", watched)
        batch.step()
    given = {"rows": 4, "context_tokens": context, "new_tokens": 1}
    counted = copy_bytes(layers, "float32", "int8", **given)
    rounding = max(4 * layer.kv_heads * layer.head_dim * ROUNDING_BYTES for layer in layers)
    # The layers that are read again come last: what others need for themselves may be gone by then.
    assert 0 < most[0] <= counted - rounding <= 1.1 * most[0]
    assert copy_bytes(layers, "float32", "full", **given) == 0
    of_batch = {kv: needs(model.anatomy, kv) for kv in ("full", "int8")}
    assert of_batch["int8"] - of_batch["full"] == counted


def test_a_chunk_that_reads_a_ring_and_itself_is_counted(tmp_path, monkeypatch):
    """A window and a chunk may be more than the context: the chunk's padding is read too."""
    seen = []

    def watched(held, dtype):
        found = read_states(held, dtype)
        seen.append(2 * found.nbytes)  # keys and values of a layer are alive together
        return found

    with trimtab.load(planned(pico.build("mistral3", tmp_path), context=40, batch=2)) as model:
        layers = model.anatomy.kv_layers
        batch = batch_of(model, "eager", (32,), 2)
        monkeypatch.setattr(int8, "read_states", watched)
        through(batch, model.prepare(list(range(5, 42))), GenerateRequest(max_new_tokens=2))
    given = {"rows": 1, "context_tokens": 40, "new_tokens": 32}
    rounding = max(32 * layer.kv_heads * layer.head_dim * ROUNDING_BYTES for layer in layers)
    assert max(seen) <= copy_bytes(layers, "float32", "int8", **given) - rounding


@pytest.mark.parametrize("kv, kv_tokens, decode", [("int8", None, "fused"), ("int8", 40960, "graph"), ("full", 40960, "graph")])
def test_copies_of_captured_steps_are_counted_beside_prompts(kv, kv_tokens, decode):
    """A graph keeps its memory while prompts run: their activations and the copies are never in each other's place."""
    given = {"quant": "nf4-dq", "head": "full", "context_tokens": 4096, "batch": 32, "images": 0, "audio_s": 0.0}

    def made(**options):
        request = LoadRequest(model="m", **given, **options)
        return make_plan(request, E4B, adapters={}, machine=card(80), rates=H200)

    plain, copying = made(decode=decode), made(decode=decode, kv=kv, kv_tokens=kv_tokens)
    # One full layer's keys and values in bf16, and in pages once more as they are kept; with 8 bits also of the layers (one of each
    # kind) that later ones read.
    full, sliding = 2 * 32 * 4096 * 2 * 512 * 2, 2 * 32 * 512 * 2 * 256 * 2
    pages = 2 * 32 * 4096 * 2 * (516 if kv == "int8" else 1024) if kv_tokens else 0
    copies = pages + (2 * full + sliding if kv == "int8" else 0)
    assert copies <= copying.gpu["kv_copies"] <= 1.01 * copies and "kv_copies" not in plain.gpu
    saved = plain.gpu["kv_cache"] - copying.gpu["kv_cache"]
    assert copying.gpu_peak_bytes >= plain.gpu_peak_bytes - saved + copies
    assert copying.gpu["activations"] < plain.gpu["activations"] + copies / 2
    assert "kv_copies" not in made(decode="fused", kv_tokens=40960).gpu  # our kernels read pages where they are


def test_a_graph_of_a_step_is_counted_with_the_kernels_that_8_bits_add():
    """As many as a layer's own operations launch, views and empty tensors left out."""
    launched = []

    class Launched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if not func.is_view and func is not torch.ops.aten.empty.memory_format:
                launched.append(func)
            return func(*args, **(kwargs or {}))

    cache = kv_cache.BatchedKVCache(2, 64, torch.device("cpu"), kv="int8")
    layer = LayerCache(cache, 64, is_ring=False)
    states = torch.randn(2, 2, 1, 8).to(torch.bfloat16)
    layer.lazy_initialization(round_states(states), round_states(states))
    with Launched():
        layer.update(states, states)
    # A CPU reads each row and head by itself, a GPU all keys or values of a layer at once.
    reads = launched.count(torch.ops.aten.mul.out)
    assert reads == 2 * 2 * 2 and len(launched) - reads + 2 == LAYER_KERNELS
    own = sum(layer.shares is None for layer in E4B.kv_layers)
    for mode in ("graph", "fused"):
        added = graph_bytes(mode, E4B, kv="int8") - graph_bytes(mode, E4B)
        assert added == own * LAYER_KERNELS * NODE_BYTES > 800 * 2**10


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU has graphs")
@pytest.mark.parametrize("copies", [{}, {"kv_copies": 1}], ids=["no copies", "copies"])
@pytest.mark.parametrize("decode", ["graph", "fused"])
def test_the_largest_copies_are_captured_first(model, replayed, monkeypatch, decode, copies):  # noqa: F811
    """What a graph keeps of smaller ones would hold no larger one, and the plan counts the largest once."""
    execution = model.plan.execution
    step = replace(execution.step, bytes={**execution.step.bytes, **copies})
    monkeypatch.setattr(model, "plan", replace(model.plan, execution=replace(execution, step=step)))
    with_pool(model, None)
    monkeypatch.setattr("trimtab.engine.decode.decode_step.SMALLEST_PLACES", 16)
    batch = batch_of(model, decode, (), 4)
    seen = []
    recorded = GraphCache._recorded

    def noted(self, *args):
        seen.append(batch.cache.seen_places)
        return recorded(self, *args)

    monkeypatch.setattr(GraphCache, "_recorded", noted)
    batch.prepare()
    assert (seen[0] == CONTEXT) == bool(copies) and max(seen[1:]) < CONTEXT
    captures = batch.steps.captures
    batch.prepare()
    assert batch.steps.captures == captures


def needs(anatomy, kv):
    """Return the activations of a step of 4 rows."""
    request = LoadRequest(model="x", context_tokens=128, batch=4, images=0, audio_s=0.0, kv=kv)
    use = use_of(request, anatomy, answer_tokens=4)
    return needs_of(anatomy, use, quant="none", has_adapters=False).phases["step"][1]


def test_it_is_asked_for_by_name_and_never_chosen(tmp_path):
    folder = pico.build("llama", tmp_path)
    assert LoadRequest(model="x").kv == "full" and trimtab.plan(folder, device="cpu").request.kv == "full"
    error = refused(LoadRequest, model="x", kv="int4")
    assert error.field == "kv" and error.allowed == ("full", "int8")


def test_layers_that_keep_another_state_are_refused_by_name(tmp_path, monkeypatch):
    text = pico._TEXT | {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_key_head_dim": 32,
        "linear_num_value_heads": 4, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    config = Qwen3NextConfig(**text, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    anatomy = config_only(tmp_path / "next", config, "Qwen3NextForCausalLM")
    check_kv("full", anatomy)
    error = refused(check_kv, "int8", anatomy, match="layer 0 keeps a Linear")
    assert error.field == "kv" and error.allowed == ("full",)
    monkeypatch.setattr(kv_cache, "why_not", lambda hf_model: "layer 0 keeps a MambaLayer")
    with pytest.raises(RequestError, match="8-bit keys and values of LlamaForCausalLM: layer 0 keeps a MambaLayer"):
        planned(pico.build("llama", tmp_path), quant="nf4")


def test_heads_that_a_scale_does_not_fit_behind_are_refused(tmp_path):
    config = LlamaConfig(**pico._TEXT | {"head_dim": 30})
    anatomy = config_only(tmp_path, config, "LlamaForCausalLM")
    check_kv("full", anatomy)
    with pytest.raises(RequestError, match="heads of 30 values are no multiple of 4"):
        check_kv("int8", anatomy)


def test_seconds_that_were_never_measured_are_marked_everywhere(tmp_path):
    request = LoadRequest(model="m", quant="nf4-dq", head="full", context_tokens=4096, batch=8)
    whole, small = (make_plan(replace(request, kv=kv), E4B, adapters={}, machine=card(40), rates=H200) for kv in ("full", "int8"))
    step = small.execution.step
    assert whole.execution.step.estimated_s == 0 == small.execution.prompt.estimated_s
    assert step.seconds - whole.execution.step.seconds == pytest.approx(step.estimated_s) and step.estimated_s > 0
    assert small.to_json()["execution"]["step"]["estimated_s"] == step.estimated_s
    assert trimtab.Plan.from_json(json.loads(json.dumps(small.to_json()))) == small
    rate, added = f"{small.execution.tokens_per_s:.0f} tokens/s", f"{step.estimated_s * 1e3:.2f} ms"
    small.draw(tmp_path / "plan.svg")
    forms = [str(small), Lines(WIDTH).show(small.document()), (tmp_path / "plan.svg").read_text(encoding="utf-8")]
    for text in (" ".join(form.split()) for form in forms):
        assert f"~{rate}" in text and f" {rate}" not in text and "8-bit keys and values" in text
    for text in (" ".join(form.split()) for form in forms[:2]):
        assert f"~{added} of a step is an estimate, never measured" in text
    for form in (str(whole), Lines(WIDTH).show(whole.document())):
        assert "~" not in form and "estimate" not in form and "8-bit" not in form

    def made(request):
        return make_plan(request, E4B, adapters={}, machine=card(40), rates=H200)

    lines = Lines().show(plan_options.options_document(plan_options.options_of(request, made, budget_bytes=2**35))).splitlines()
    assert [line.split()[0] for line in lines if "~" in line] == ["kv='int8'", "~"] and "never measured" in lines[-1]
    plain = plan_options.options_of(replace(request, batch=1), made, budget_bytes=2**35)
    assert "~" not in Lines().show(plan_options.options_document([one for one in plain if "kv" not in one.what]))


def test_the_bytes_that_the_docs_name_are_those_that_the_plan_counts():
    qwen = tuple(KVLayer(layer=number, kv_heads=8, head_dim=128, window=None, shares=None) for number in range(36))
    text = (ROOT / "docs" / "fit-a-model.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.partition("| counted, bf16, GiB |")[2].splitlines()[2:6]]
    assert len(rows) == 4
    for what, *named in rows:
        layers = qwen if what.startswith("Qwen3-8B") else E4B.kv_layers
        many, _, tokens = what.rpartition(", ")[2].removesuffix(" tokens").rpartition(" rows of ")
        use = {"rows": int(many or 1), "context_tokens": int(tokens.replace(",", ""))}
        full, small = (row_cache_bytes(layers, "bfloat16", **use, kv=kv) for kv in ("full", "int8"))
        copy = copy_bytes(layers, "bfloat16", "int8", **use, new_tokens=1)
        assert named == [f"{count / 2**30:.2f}" for count in (full, small, copy)]


def odd_heads():
    """Return Gemma 4 E4B as if one layer had heads of 30 values, which 8 bits cannot hold."""
    first, *others = E4B.kv_layers
    return replace(E4B, kv_layers=(replace(first, head_dim=30), *others))


def test_what_a_model_cannot_have_is_not_advised():
    request = LoadRequest(model="x", quant="nf4-dq", context_tokens=4096, batch=8)
    for anatomy, is_possible in ((E4B, True), (odd_heads(), False)):
        kinds = [tries[0][0] for tries in plan_options._smaller(request, anatomy)]
        assert ("kv='int8'" in kinds) == is_possible and "batch=4" in kinds


def test_options_have_no_row_for_what_a_model_cannot_have():
    for anatomy, is_possible in ((E4B, True), (odd_heads(), False)):

        def made(request, anatomy=anatomy):
            return make_plan(request, anatomy, adapters={}, machine=card(40), rates=H200)

        request = LoadRequest(model="m", quant="nf4-dq", head="full", decode="fused", context_tokens=4096)
        named = [one.what for one in plan_options.options_of(request, made, budget_bytes=2**34)]
        assert ("kv='int8'" in named) == is_possible and "context=2048" in named


def test_a_plan_file_that_asks_for_what_a_model_cannot_have_is_refused_before_weights_are_read(tmp_path, monkeypatch):
    made = planned(pico.build("llama", tmp_path))
    monkeypatch.setattr(kv_cache, "why_not", lambda hf_model: "layer 0 keeps a state")
    monkeypatch.setattr(Reader, "__init__", lambda *_: pytest.fail("weights are read"))
    for plan in (made, replace(made, request=replace(made.request, kv="full", batch_invariant=True))):
        error = refused(trimtab.load, Plan.from_json(plan.to_json()), match="LlamaForCausalLM.*: layer 0 keeps a state")
        assert error.field == ("batch_invariant" if plan.request.batch_invariant else "kv")


def test_verify_refuses_what_it_would_not_compare(tmp_path):
    folder = pico.build("llama", tmp_path)
    assert refused(lambda: trimtab.verify(LoadRequest(model=str(folder), kv="int8"), against="resident")).field == "kv"


def test_options_have_a_row_for_it(tmp_path):
    folder = pico.build("llama", tmp_path)
    request = LoadRequest(model=str(folder), device="cpu", quant="none", dtype="float32", context_tokens=512, batch=4)
    by_name = {row.what: row for row in plan_options.options_of(request, plan_request, budget_bytes=2**34)}
    assert by_name["kv='int8'"].needed_bytes < by_name["as asked"].needed_bytes
    assert 0 < by_name["kv='int8'"].tokens_per_s < by_name["as asked"].tokens_per_s
    again = plan_options.options_of(replace(request, kv="int8"), plan_request, budget_bytes=2**34)
    assert "kv='int8'" not in {row.what for row in again}


def test_the_command_line_takes_it(tmp_path, capsys):
    folder = str(pico.build("llama", tmp_path))
    given = ["plan", folder, "--quant", "none", "--dtype", "float32", "--device", "cpu", "--context", "64"]
    assert main([*given, "--kv", "int8"]) == 0
    assert "keys and values int8" in " ".join(capsys.readouterr().out.split())
    assert main([*given, "--options"]) == 0
    assert "--kv int8" in capsys.readouterr().out
    assert main([*given, "--kv", "int4"]) != 0
    assert "kv" in capsys.readouterr().err


def test_a_registry_file_takes_it(tmp_path):
    file = tmp_path / "models.toml"
    file.write_text('[models.one]\npath = "/somewhere"\nkv = "int8"\n', encoding="utf-8")
    assert read_registry(file)[0].request.kv == "int8"
    file.write_text('[models.one]\npath = "/somewhere"\nkv = "int4"\n', encoding="utf-8")
    with pytest.raises(TrimtabError, match="int4"):
        read_registry(file)


def test_a_run_over_many_prompts_resumes_in_the_same_form_only(tmp_path, capsys):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "Hello"}\n', encoding="utf-8")
    given = ["run", str(DEMO / "base"), "--quant", "none", "--device", "cpu", "--max-new-tokens", "3"]
    given += ["--prompts", str(prompts), "--out", str(out)]
    assert main([*given, "--kv", "int8"]) == 0 and main([*given, "--kv", "int8"]) == 0
    capsys.readouterr()
    assert main(given) == 2
    assert "answers of another run (kv differ)" in " ".join(capsys.readouterr().err.split())
