"""Are the families' descriptions right, and is a step or chunk that is made of one what transformers' modules compute?

Tiny models of the real classes. The modules are the reference: eager steps of the same rows, and their own prompts. Planted faults
in a description are found and named before anything is computed with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import trimtab
from tests import pico
from tests.cuda_on_cpu import run
from tests.engine.batch.test_batch import to_the_end
from tests.engine.decode.test_graphs import joined, replayed  # noqa: F401 - replayed is a fixture
from tests.engine.decode.test_graphs import through as row_of
from tests.engine.kernels.test_fused_kernels import on_cpu  # noqa: F401 - a fixture
from tests.engine.prefill.test_prefill import through
from tests.long_runs import halved, slow_on_cpu
from tests.planning.values.test_execution import E4B
from tests.planning.values.test_execution import plan as gpu_plan
from trimtab.engine.batch.batch import Batch
from trimtab.engine.decode import step_choice
from trimtab.engine.families import check, families
from trimtab.engine.families.decoder import Decoder, UndescribedError
from trimtab.engine.kernels import delta_rule
from trimtab.engine.kv import kv_cache
from trimtab.engine.prefill.prefill import PrefillRunner
from trimtab.errors import AdapterError, DeviceError
from trimtab.request import GenerateRequest

TEXTS = ["gemma", "gemma2", "ministral3", "phi3", "olmo2", "olmo3", "glm", "glm4", "granite", "gpt_oss", "smollm3", "qwen2"]
NEW = [*TEXTS, "llava", "internvl", "seed_oss"]
MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe", "gemma4_moe", "qwen3_5_moe", "glm4_moe", "qwen3_vl_moe"]
DESCRIBED = ["gemma4", "gemma4_dense", "qwen3", "llama", "gemma3", "qwen2_5_vl", "qwen3_vl", "mistral3", "qwen3_5", *NEW, *MIXTURES]
# Their steps have what those of another one have; each is compared with stock in test_matrix.py.
ALIKE = {*MIXTURES, *TEXTS, "llama", "qwen3_vl", "mistral3", "llava", "internvl", "seed_oss"}
ALIKE -= {"gemma2", "ministral3", "phi3", "olmo3", "glm4", "granite", "gpt_oss", "smollm3", "gemma4_moe", "qwen3_5_moe", "glm4_moe"}
ASKED = [("a", list(range(5, 24)), {}), (None, [9, 8], {}), ("b", [4, 7, 11, 6], {})]
# bfloat16 logits: sums in another order, and adapters rounded once instead of twice.
TOLERANCE = 2**-5


@cache
def hf(family: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Transformers' own model of a family, random."""
    return pico.make_model(family, dtype=str(dtype).removeprefix("torch.")).eval()


def loaded(family: str, folder: Any, **options: Any) -> Any:
    base = pico.build(family, folder / "base")
    kinds: dict[str, dict[str, Any]] = {"a": {"rank": 4}, "b": {"rank": 20, "rslora": True, "seed": 1}}
    adapters = {name: pico.adapter(base, folder / name, **given) for name, given in kinds.items()}
    given = {"quant": "nf4-dq", "context": 96, "device": "cpu"} | options
    return trimtab.load(trimtab.plan(base, adapters=adapters, **given), decode="auto")


def compare(expected: Any, batch: Any, steps: int, tolerance: float) -> None:
    for _ in range(steps):
        wanted, found = expected.logits(), batch.logits()
        assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()
        for one in (expected, batch):
            for row, token in zip(one.active, wanted.argmax(-1).tolist(), strict=True):
                row.token_ids.append(token)
            one.write_last_tokens()


# Against the modules ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", DESCRIBED)
def test_a_description_is_right(family):
    model = hf(family)
    assert check.wrong(families.describe(model), model, torch.device("cpu"), torch.bfloat16, 256) is None


@pytest.mark.parametrize("family", [slow_on_cpu(one) if one in ALIKE else one for one in DESCRIBED])
@pytest.mark.parametrize("kv", ["full", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_step_of_mixed_rows_is_the_modules(family, kv, tmp_path):
    """In plain torch, adapters of two ranks and none, rows of unlike lengths, past the window of sliding layers."""
    with loaded(family, tmp_path, kv=kv) as model:
        compare(joined(model, "eager", ASKED, rows=4), joined(model, "fused", ASKED, rows=4), 4, TOLERANCE)


@pytest.mark.parametrize("family", ["qwen3", *(pytest.param(one, marks=pytest.mark.slow) for one in DESCRIBED if one != "qwen3")])
def test_a_step_from_the_kernels_is_the_modules(family, on_cpu, replayed, tmp_path):  # noqa: F811
    """The CUDA sources themselves, adapters by table."""
    from_the_kernels(family, on_cpu, tmp_path)


def test_recurrent_layers_in_16_bits_are_kernels_around_the_stacks_products(on_cpu, replayed, tmp_path):  # noqa: F811
    before = len(on_cpu.matvec.launches)
    from_the_kernels("qwen3_5", on_cpu, tmp_path, quant="none")
    launched = {name.partition("_")[0] for name in on_cpu.matvec.launches[before:]}
    assert "lora" in launched and not any(name.startswith("matvec") for name in launched)


def from_the_kernels(family, chosen, folder, **options):
    """Compare steps of these kernels with the modules'."""
    with loaded(family, folder, **options) as model:
        for shape in {one.shape for one in families.describe(model.hf_model).deltas.values()}:
            given = delta_rule.options(shape, torch.bfloat16)
            chosen.delta = run.CpuModule(delta_rule.source(), delta_rule.NAMES, options=given)
        expected, batch = (joined(model, way, ASKED, rows=4) for way in ("eager", "fused"))
        compare(expected, batch, 2, 2 * TOLERANCE)
        assert batch.steps.captures == 1 and not batch.steps.fallbacks
        assert {name.partition("_")[0] for name in chosen.small.launches} & {"turns", "rope"}  # OLMo turns by its module's own


def test_a_step_of_recurrent_layers_is_not_tried_twice(tmp_path):
    """A step that failed behind some layers has advanced their states."""
    with loaded("qwen3_5", tmp_path) as model:
        batch = joined(model, "fused", ASKED)

        def fail(*_: Any) -> None:
            raise torch.OutOfMemoryError("once")

        handle = model.hf_model.lm_head.register_forward_pre_hook(fail)
        with pytest.raises(Exception, match="once"):
            batch.step()
        handle.remove()
        assert [row.finish for row in batch.active] == ["error"] * 3 and batch.step() == []


@pytest.mark.parametrize("saved", ["linear_attn.norm", "conv1d"])
def test_a_saved_module_inside_a_recurrent_layer_is_refused(saved, tmp_path):
    """A convolution's weight is read as a tensor, so that rows with other adapters would take the base's."""
    base = pico.build("qwen3_5", tmp_path / "base")
    adapter = pico.adapter(base, tmp_path / "a", modules_to_save=[saved])
    name = saved.rpartition(".")[2]
    with pytest.raises(AdapterError, match=rf"layers\.0\.linear_attn\.{name}: a saved \w+ inside a recurrent layer"):
        trimtab.plan(base, adapters={"a": adapter}, device="cpu", context=96)


def test_prompts_of_recurrent_layers_are_not_prepared_without_their_kernels(tmp_path, monkeypatch):
    """The server starts, and modules compute."""
    with loaded("qwen3_5", tmp_path) as model:
        batch = Batch(model, rows=2, decode="fused")
        batch.prompts = PrefillRunner(batch, "static", (8,))
        assert batch.prompts.sizes
        batch.prompts.captures = True  # as on a GPU
        monkeypatch.setattr(batch.steps, "fused_step", lambda: None)
        batch.prompts.prepare(5, "a")
        assert not batch.prompts.graph_bytes


def test_an_adapter_attached_between_steps_is_examined(tmp_path):
    """On a linear layer that the description leaves out, so that a fused step would not add it."""
    with loaded("qwen3", tmp_path) as model:
        for name in ("a", "b"):
            model.unload_adapter(name)
        batch = joined(model, "fused", ASKED[1:2])
        batch.step()
        step = batch.steps.fused_step()
        step._outside = [model.hf_model.model.layers[0].self_attn.q_proj]
        model.load_adapter("a", tmp_path / "a")
        with pytest.raises(DeviceError, match="which its description does not have"):
            batch.steps.fused_step()
        model.unload_adapter("a")
        assert batch.steps.fused_step() is step


Change = Callable[[Batch, list[Any]], object]


def story(model: Any, changes: dict[int, Change], steps: int, *, look_ahead: bool) -> tuple[list[tuple[int, ...]], list[bool]]:
    """Return what each row of a batch said while rows came and went, and which steps were queued ahead. changes: before a step."""
    batch, ahead = joined(model, "fused", ASKED[:2], rows=4), []
    rows, run = list(batch.active), batch.steps.run
    if not look_ahead:
        batch.steps.may_look_ahead = lambda: False
    batch.steps.run = lambda state: ahead.append(state.ahead) or run(state)
    for number in range(steps):
        if number in changes:
            changes[number](batch, rows)
        batch.step()
    return [tuple(row.answer_ids) for row in rows], ahead


def comes(new_tokens: int = 40, **given: Any) -> Callable[[Batch, list[Any]], None]:
    def change(batch: Batch, rows: list[Any]) -> None:
        prepared = batch.model.prepare(ASKED[2][1], **ASKED[2][2])
        rows.append(row_of(batch, prepared, GenerateRequest(max_new_tokens=new_tokens), adapter=ASKED[2][0], **given))

    return change


def leaves(number: int) -> Callable[[Batch, list[Any]], None]:
    return lambda batch, rows: batch.leave(rows[number])


arrives, answers, ends = comes(), comes(group="answers"), comes(3)
CHANGES = [
    {}, {4: arrives}, {3: leaves(0)}, {3: leaves(0), 5: arrives, 6: leaves(1), 8: arrives}, {2: arrives, 3: arrives},
    {2: answers, 3: answers}, {2: answers, 5: answers}, {2: ends, 7: leaves(2), 8: arrives}, {2: ends, 3: arrives},
]  # fmt: skip


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory):
    with loaded("qwen3_5", tmp_path_factory.mktemp("recurrent")) as model:
        yield model


@pytest.mark.parametrize("changes", CHANGES, ids=range(len(CHANGES)))
def test_states_advance_once_whoever_comes_or_leaves_while_a_step_is_queued(recurrent, replayed, changes):  # noqa: F811
    """A step that was queued counts for the rows that it has, and who came since has the next one."""
    expected, never = story(recurrent, changes, 12, look_ahead=False)
    found, ahead = story(recurrent, changes, 12, look_ahead=True)
    assert sum(ahead) >= 8 and not any(never)
    for one, other in zip(found, expected, strict=True):
        assert one == other[: len(one)] and len(other) - len(one) <= len(found) - 2


def test_rows_of_a_queued_step_that_failed_end(tmp_path, replayed):  # noqa: F811
    with loaded("qwen3_5", tmp_path) as model:
        batch = joined(model, "fused", ASKED[:2], rows=4)
        run = batch.steps.run

        def fails(state: Any) -> Any:
            run(state)
            if state.ahead:
                raise RuntimeError("behind some layers")

        batch.step()
        batch.steps.run = fails
        assert len(batch.step()) == 2  # these tokens were computed before
        first = batch.active[0]
        assert first.reuse is None and first.logits is None  # nothing of its states is kept or copied
        assert batch.step() == [] and first.finish == "error" and "behind some layers" in str(first.error)


def test_a_fork_takes_a_state_of_the_prompt_alone(tmp_path):
    """Two answers of one prompt, the second begun before and behind the first one's first step."""
    with loaded("qwen3_5", tmp_path) as model:
        answers = []
        for steps in (0, 1):
            batch = Batch(model, rows=4, decode="fused")
            rows = []
            for number in range(2):
                inputs, request = model.prepare(ASKED[0][1]), GenerateRequest(max_new_tokens=6)
                rows.append(row_of(batch, inputs, request, adapter="a", group="answers"))
                for _ in range(steps if number == 0 else 0):
                    batch.step()
            answers += to_the_end(batch, rows)
        assert len(set(answers)) == 1


@pytest.mark.parametrize("forgets", [True, False])
def test_a_row_begins_without_the_state_of_the_one_that_left(tmp_path, monkeypatch, forgets):
    """False is the planted fault: a state that is not cleared changes the next row's scores."""
    with loaded("qwen3_5", tmp_path) as model:
        assert check.difference(model) is None  # it would find the fault
        if not forgets:
            monkeypatch.setattr(kv_cache.BatchedKVCache, "clear", lambda self, row: None)
        batch, fresh = (Batch(model, rows=1, decode="fused") for _ in range(2))
        for one in (batch, fresh):
            one.prompts = PrefillRunner(one, "static", (16,))
        batch.leave(batch.join(through(batch, model.prepare(ASKED[0][1]))).row)
        assert torch.equal(*[through(one, model.prepare(ASKED[2][1])).logits for one in (batch, fresh)]) is forgets


# Planted faults ---------------------------------------------------------------------------------------------------------


def changed(decoder: Decoder, number: int, **fields: Any) -> Decoder:
    layers = list(decoder.layers)
    layers[number] = replace(layers[number], **fields)
    return replace(decoder, layers=tuple(layers))


def with_attention(decoder: Decoder, number: int, **fields: Any) -> Decoder:
    return changed(decoder, number, mixer=replace(decoder.attentions[number], **fields))


def norm_form(decoder: Decoder) -> Decoder:
    norm = decoder.layers[1].before_mlp
    return changed(decoder, 1, before_mlp=replace(norm, form="inside" if norm.form != "inside" else "after"))


FAULTS = {
    "norm": (norm_form, "layer 1's norm before the MLP has other bits"),
    "window": (lambda d: with_attention(d, 0, window=(d.attentions[0].window or 0) + 1), "layer 0 has a window of"),
    "post norm": (
        lambda d: changed(d, 1, after_mlp=d.layers[1].before_mlp if d.layers[1].after_mlp is None else None),
        "layer 1 differs",
    ),
    "scale": (lambda d: with_attention(d, 1, scale=d.attentions[1].scale * 4), "layer 1's attention differs"),
    "values": (lambda d: with_attention(d, 1, v=d.attentions[1].k), "layer 1's attention differs"),
    "gate": (lambda d: changed(d, 1, mlp=replace(d.layers[1].mlp, gate=d.layers[1].mlp.up)), "layer 1 differs"),
    "softcap": (lambda d: with_attention(d, 1, softcap=0.05), "layer 1's attention differs"),
    "norms of heads": (lambda d: with_attention(d, 1, q_norm=None, k_norm=None), "layer 1's attention differs"),
}


def wrong(family: str, make: Any, dtype: torch.dtype = torch.float32) -> str:
    model = hf(family, dtype)
    return str(check.wrong(make(families.describe(model)), model, torch.device("cpu"), dtype, 256))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_planted_fault_is_found_and_named(family, fault):
    make, words = FAULTS[fault]
    # Roundings show in 16 bits, small differences in 32.
    assert words in wrong(family, make, torch.bfloat16 if fault == "norm" else torch.float32)


def grown(decoder: Decoder) -> Decoder:
    own = decoder.attentions[1]
    return with_attention(decoder, 1, growth=own.growth._replace(beta=own.growth.beta * 2))


OF_FAMILIES = {
    "softcap of scores": ("gemma2", lambda d: with_attention(d, 1, softcap=None), "layer 1's attention differs"),
    "softcap behind the head": ("gemma2", lambda d: replace(d, softcap=None), "the scores behind the head have other bits"),
    "window": ("gemma2", lambda d: with_attention(d, 0, window=9), "layer 0 has a window of 8, its description 9"),
    "window of all": ("phi3", lambda d: with_attention(d, 1, window=11), "layer 1 has a window of 12, its description 11"),
    "divisor": ("granite", lambda d: replace(d, divisor=None), "the scores behind the head have other bits"),
    "factor of embeddings": ("granite", lambda d: replace(d, embedding_scale=None), "the embedding of its tokens differs"),
    "factor of residuals": ("granite", lambda d: changed(d, 1, added=None), "layer 1 differs"),
    "growth": ("ministral3", grown, "layer 1's attention differs"),
    "sinks": ("gpt_oss", lambda d: with_attention(d, 1, has_sinks=False), "layer 1's attention differs"),
    "pairs": (
        "glm4",
        lambda d: with_attention(d, 1, shape=d.attentions[1].shape._replace(turn="write")),
        "layer 1's attention differs",
    ),
    "wide turns": (
        "olmo2",
        lambda d: with_attention(
            with_attention(d, 0, shape=d.attentions[0].shape._replace(turn="write")), 1,
            shape=d.attentions[1].shape._replace(turn="write"),
        ),
        "the rotation of full_attention has other bits",
    ),
    "wide norms": ("olmo2", lambda d: with_attention(d, 1, q_norm=d.attentions[1].k_norm), "norm of queries has 64 values"),
    "heads": (
        "phi3",
        lambda d: with_attention(d, 1, shape=d.attentions[1].shape._replace(kv_heads=4)),
        "layer 1's products has 128 values, its description 192",
    ),
    "norm in front of experts": (
        "gemma4_moe",
        lambda d: changed(d, 0, experts=replace(d.layers[0].experts, before=d.layers[0].before_mlp)),
        "layer 0 differs",
    ),
    "norm behind the MLP next to experts": (
        "gemma4_moe",
        lambda d: changed(d, 1, experts=replace(d.layers[1].experts, after_dense=d.layers[1].experts.after)),
        "layer 1 differs",
    ),
    "shared expert": (
        "glm4_moe",
        lambda d: changed(d, 1, experts=replace(d.layers[1].experts, shared=d.layers[0].mlp)),
        "layer 1 differs",
    ),
    "gate of a shared expert": (
        "qwen2_moe",
        lambda d: changed(d, 0, experts=replace(d.layers[0].experts, shared_gate=None)),
        "layer 0 differs",
    ),
    "state": (
        "qwen3_5",
        lambda d: changed(d, 0, mixer=replace(d.deltas[0], b=d.deltas[0].a)),
        "layer 0's attention differs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", OF_FAMILIES)
def test_a_planted_fault_of_a_family_is_found_and_named(fault):
    family, make, words = OF_FAMILIES[fault]
    assert words in wrong(family, make, torch.bfloat16 if fault == "wide turns" else torch.float32)


def test_a_step_that_forgets_its_state_is_found(monkeypatch):
    """The delta rule of one token, which starts from zeros instead of what the tokens in front left."""
    own = delta_rule.delta_net

    def forgets(made: Any, shape: Any, weights: Any, conv: Any, state: Any, *rest: Any, **more: Any) -> Any:
        if "tokens" not in more:
            state = torch.zeros_like(state)
        return own(made, shape, weights, conv, state, *rest, **more)

    monkeypatch.setattr(check.delta_rule, "delta_net", forgets)
    assert "layer 0's attention differs" in wrong("qwen3_5", lambda d: d)


def test_a_swapped_rotation_is_found():
    model = hf("gemma3", torch.float32)
    decoder = families.describe(model)
    layers = tuple(replace(one, mixer=replace(one.mixer, rope=list(decoder.ropes)[1])) for one in decoder.layers)
    for fault in (swapped_ropes(decoder), replace(decoder, layers=layers)):
        assert "layer" in str(check.wrong(fault, model, torch.device("cpu"), torch.float32, 512))


def swapped_ropes(decoder: Decoder) -> Decoder:
    first, second = decoder.ropes
    return replace(decoder, ropes={first: replace(decoder.ropes[first], kind=second), second: decoder.ropes[second]})


def shorter(decoder: Decoder) -> Decoder:
    return with_attention(decoder, 1, q=decoder.attentions[1].k)


AT_LOAD = {
    "a norm's rounding": ("qwen3", norm_form, "layer 1's norm before the MLP has other bits"),
    "a swapped rotation": ("gemma3", swapped_ropes, "layer"),
    "a softcap": ("gemma2", *OF_FAMILIES["softcap of scores"][1:]),
    "a window": ("gemma2", *OF_FAMILIES["window"][1:]),
    "a state of a row that left": ("qwen3_5", lambda d: d, "layer 0's state is that of a row that has left"),
    "another layer": ("qwen3", shorter, "layer 1's queries has 64 values, its description 128"),
    "no norm at all": (
        "qwen3",
        lambda d: changed(d, 1, before_mlp=replace(d.layers[1].before_mlp, module=None)),
        "its description does not fit its modules (AttributeError: 'NoneType' object has no attribute 'weight')",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fault", "is_planned"), halved(list(AT_LOAD), [True, False]))
def test_what_differs_is_named_by_the_load_and_the_modules_compute(fault, is_planned, tmp_path, monkeypatch):
    """Before the first step. is_planned: steps that the plan has fused, as on a GPU, else those that a caller asks for."""
    family, make, words = AT_LOAD[fault]
    right = families.describe
    monkeypatch.setattr(check, "describe", lambda one: make(right(one)))
    if "state" in fault:
        monkeypatch.setattr(kv_cache.BatchedKVCache, "clear", lambda self, row: None)
    plan = trimtab.plan(pico.build(family, tmp_path / "base"), quant="none", context=300, device="cpu")
    if is_planned:
        plan = replace(plan, execution=replace(plan.execution, step=replace(plan.execution.step, mode="fused")))
    with trimtab.load(plan, decode="auto" if is_planned else "fused") as model:
        assert [one.what for one in model.fallbacks] == ["fused step"] and words in model.fallbacks[0].why
        if is_planned:
            batch = joined(model, "auto", [(None, ASKED[0][1], {})])
            assert batch.steps.fused_step() is None
            compare(joined(model, "eager", [(None, ASKED[0][1], {})]), batch, 2, 0)
        else:
            with pytest.raises(DeviceError, match=re.escape(words)):
                joined(model, "fused", ASKED[1:2])


@pytest.mark.parametrize(
    ("mode", "decode", "times"), [("fused", "auto", 1), ("eager", "fused", 1), ("eager", "auto", 0), ("fused", "graph", 0)]
)
def test_a_description_is_compared_once_where_steps_are_made_of_it(mode, decode, times, tmp_path, monkeypatch):
    """And with no adapter, whatever a plan attaches."""
    wrong, calls = check.wrong, []
    monkeypatch.setattr(check, "wrong", lambda *given: calls.append(given[0]) or wrong(*given))
    base = pico.build("qwen3", tmp_path / "base")
    adapter = pico.adapter(base, tmp_path / "a", modules_to_save=["model.norm"])
    plan = trimtab.plan(base, adapters={"a": adapter}, quant="none", context=64, device="cpu")
    plan = replace(plan, execution=replace(plan.execution, step=replace(plan.execution.step, mode=mode)))
    with trimtab.load(plan, decode=decode) as model:
        assert len(calls) == times and not model.fallbacks
        if decode == "fused":
            for _ in range(2):
                joined(model, "fused", ASKED[1:2])
            assert len(calls) == 1


def test_modules_without_room_for_their_graph_are_not_captured():
    """Where a plan counts the graph of a fused step, whose kernels read pages in place, and its description differs."""
    for gib, words in ((8, None), (4, "layer 1 differs; cuda needs 265.0 MiB")):
        plan = gpu_plan(gib, kv_tokens=16384, batch=8, context_tokens=8192)
        assert plan.execution.step.mode == "fused"
        model = SimpleNamespace(
            plan=plan, anatomy=E4B, hf_model=None, device="cuda", adapters=(),
            adapter_store=SimpleNamespace(reads_on_host=lambda names: False),
        )  # fmt: skip
        choice = object.__new__(step_choice.StepChoice)
        vars(choice).update(model=model, mode="auto", rows=8, device=torch.device("cuda"))
        choice._difference = lambda: None
        assert choice._why_no_graph() is None
        choice._difference = lambda: "layer 1 differs"
        assert (words or "None") in str(choice._why_no_graph())


def test_an_adapter_on_a_layer_that_is_not_described_is_named(tmp_path, monkeypatch):
    with loaded("qwen3", tmp_path) as model:
        layer, groups = families.describe(model.hf_model).layers[1].mlp.down, Decoder.groups
        monkeypatch.setattr(Decoder, "groups", lambda self: [[g for g in same if g != [layer]] for same in groups(self)])
        with pytest.raises(DeviceError, match=r"changes model\.layers\.1\.mlp\.down_proj, which its desc"):
            joined(model, "fused", ASKED).step()


def test_a_context_beyond_a_rotation_is_named(tmp_path):
    """Phi-3's angles change with a text of more than 256 tokens."""
    words = "its rotation changes behind 256 tokens, and its context has 300"
    with loaded("phi3", tmp_path, context=300) as model, pytest.raises(DeviceError, match=words):
        joined(model, "fused", ASKED).step()


def test_what_is_not_described_says_why():
    with pytest.raises(UndescribedError, match="AltUp"):
        families.describe(hf("gemma3n"))
    with pytest.raises(UndescribedError, match="no description of MptForCausalLM"):
        families.describe(_small_mpt())


def _small_mpt() -> Any:
    from transformers import MptConfig, MptForCausalLM

    return MptForCausalLM(MptConfig(d_model=32, n_heads=2, n_layers=1, vocab_size=64))


def test_a_missing_attribute_is_named():
    model = pico.make_model("qwen3")
    del model.model.layers[1].self_attn.k_norm
    assert families.why_not(model) == "its Qwen3Attention has no k_norm"


def test_growing_rotations_and_unknown_layers_are_refused():
    growing = pico.make_model("llama")
    growing.model.rotary_emb.rope_type = "dynamic"
    assert families.why_not(growing) == "its rotation is dynamic"
    strange = pico.make_model("qwen3")
    strange.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(families.UnusableConfigError, match=r"its layers are of kinds \['linear_attention'\]"):
        families.why_not(strange)
