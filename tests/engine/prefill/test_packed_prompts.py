"""Several prompts in one pass say what each says alone: in every family, at every edge, with adapters and kept beginnings.

On a CPU nothing is captured: the same passes run as they are, or a stand-in repeats them the way a graph would. tests/gpu runs the
same tests with graphs.
"""

import json

import pytest
import torch

import trimtab
from tests import ROOT, long_runs, pico
from tests.cuda_on_cpu.modules import prompts as cpu_module
from tests.engine.decode.test_graphs import replayed as steps_replayed  # noqa: F401
from tests.engine.kernels.test_fused_kernels import on_cpu as kernels_on_cpu  # noqa: F401
from tests.engine.prefill.test_prefill import (  # noqa: F401
    DEMO,
    DEVICE,
    ON_GPU,
    REQUEST,
    TOLERANCE,
    answered,
    captured,
    demo,
    differ,
    eager,
    ids,
    in_chunks,
    load,
    named,
    replayed,
)  # fmt: skip
from tests.lent import lent
from trimtab.demo.demo import ADAPTERS
from trimtab.engine.batch.batch import Batch
from trimtab.engine.kernels import dequantize
from trimtab.engine.kernels.dequantize import PromptKernels, wrong_add_rows
from trimtab.engine.prefill import packing as packed_prompts
from trimtab.engine.prefill.packing import ADAPTER_INSIDE, choose_shape, shapes_of
from trimtab.engine.prefill.prefill import PrefillRunner

# On both sides of the families' window of 8 tokens, and of rows of 8 and 16 places.
LENGTHS = (1, 7, 8, 9, 15, 16, 3, 12)
RESULTS = ROOT / "bench" / "results"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Shapes for prompts of a few tokens."""
    monkeypatch.setattr(packed_prompts, "LEAST_TOKENS", 16)


def together(batch, prompts, most_tokens=None):
    """Put waiting prompts through, together where that pays; returns how many passes it took."""
    waiting, passes = list(prompts), 0
    while waiting:
        through, tokens = batch.place_together(waiting, most_tokens)
        passes += 1
        if not through:
            assert tokens == 0
            one = waiting.pop(0)
            one.compute()
            batch.place(one)
            continue
        assert through[0] is waiting[0] and tokens <= (most_tokens or batch.prompts.most_packed)
        waiting = [one for one in waiting if one not in through]
    return passes


def both(batch, prompts):
    """Return the scores [rows, 2, V] of each placed prompt's last token and of the step after it."""
    first = {prompt: prompt.logits.clone() for prompt in prompts}
    placed = sorted(prompts, key=lambda prompt: batch.placed.index(prompt.row))
    for prompt in placed:
        prompt.row.request = REQUEST
        row = batch.join(prompt).row
        row.token_ids[-1] = 7
    batch.write_last_tokens()
    batch._ahead = None
    after = batch.logits().clone()
    found = [torch.stack([first[prompt], after[prompt.row.number]]).cpu() for prompt in prompts]
    for prompt in prompts:
        batch.leave(prompt.row)
    return found


def packing(batch, monkeypatch):
    """A batch whose prompts of 16 and 64 tokens go together, with the kernels of prompts compiled for a CPU."""
    wide(batch, monkeypatch, 256)
    batch.prompts = PrefillRunner(batch, "static", (16, 64))
    batch.prompts.captures, batch.prompts.staged_tables = True, []
    batch.prompts._kernels = PromptKernels(module=cpu_module(), adds=True)
    monkeypatch.setattr(packed_prompts.PackedPrefill, "_has_products", lambda self: True)
    monkeypatch.setattr(PrefillRunner, "has_room_for", lambda *given: True)
    return batch


def wide(batch, monkeypatch, tokens=64):
    monkeypatch.setattr(type(batch.prompts), "most_packed", property(lambda self: tokens))
    return batch


@pytest.mark.parametrize("family", long_runs.FAMILIES)
def test_prompts_of_any_length_say_together_what_each_says_alone(family, monkeypatch):
    with lent(family) as model:
        whole = eager(model)
        expected = [answered(whole, model.prepare(ids(count))) for count in LENGTHS]
        batch = wide(in_chunks(model, (8, 16), 9), monkeypatch)
        if batch.prompts.packs.why_not() is not None:
            assert ON_GPU
            pytest.skip(batch.prompts.packs.why_not())
        for _ in range(3 if ON_GPU else 1):  # as it is, captured, replayed
            prompts = [batch.begin(model.prepare(ids(count)), REQUEST) for count in LENGTHS]
            assert together(batch, prompts) < len(LENGTHS)
            for found, wanted, count in zip(both(batch, prompts), expected, LENGTHS):
                assert differ(found, wanted) < TOLERANCE, count
        assert batch.prompts.packs.passes


@pytest.mark.parametrize("family", ["llama", "gemma4", "gemma3", "qwen3_vl"])
def test_prompts_with_kept_beginnings_go_on_together_where_each_stopped(family, monkeypatch):
    with lent(family) as model:
        model.keep_prefixes(2**20)
        begins = [[100 + (number * 7 + who) % 190 for number in range(64)] for who in range(3)]
        asks = [[*begin[:count], *ids(more)] for begin, count, more in zip(begins, (64, 33, 64), (5, 9, 12))]
        asks.append(ids(7))
        expected = [answered(eager(model), model.prepare(ask), client=None) for ask in asks]
        batch = wide(in_chunks(model, (8, 16), 9), monkeypatch)
        for begin, count in zip(begins, (64, 33, 64)):
            answered(batch, model.prepare(begin[:count]))
        for _ in range(3 if ON_GPU else 1):
            prompts = [batch.begin(model.prepare(ask), REQUEST) for ask in asks]
            assert together(batch, prompts) == 1 or ON_GPU  # where there is no room for graphs each goes alone
            assert [prompt.row.cached_tokens > 0 for prompt in prompts] == [True, True, True, False]
            for prompt in prompts:
                prompt.row.reuse = None  # what is kept stays as it is
            for found, wanted in zip(both(batch, prompts), expected):
                assert differ(found, wanted) < TOLERANCE


def test_a_prompt_has_a_place_in_such_a_pass_if_what_is_not_kept_is_short():
    with lent("llama") as model:
        model.keep_prefixes(2**20)
        begin = [100 + number % 90 for number in range(64)]
        batch = in_chunks(model, (8, 16), 9)
        answered(batch, model.prepare(begin))
        for ask, is_short in ((ids(16), True), (ids(17), False), ([*begin, *ids(9)], True), ([*begin, *ids(17)], False)):
            prompt = batch.begin(model.prepare(ask), REQUEST)
            assert batch.prompts.packs.has_place(prompt) == (is_short and batch.prompts.packs.why_not() is None)
            assert prompt.row.reuse is None and prompt.row.cached_tokens == 0  # nothing is reused yet


def test_each_prompt_of_a_pass_has_its_own_adapter(demo, monkeypatch):  # noqa: F811
    names = [None, *ADAPTERS, None, ADAPTERS[1]]
    counts = (9, 16, 12, 3, 14, 10)
    alone = eager(demo)
    expected = [answered(alone, demo.prepare(ids(count)), adapter=name) for name, count in zip(names, counts)]
    batch = wide(in_chunks(demo, (16, 64), 9), monkeypatch, 128)
    for _ in range(3 if ON_GPU else 1):
        prompts = [batch.begin(demo.prepare(ids(count)), REQUEST, adapter=name) for name, count in zip(names, counts)]
        together(batch, prompts)
        for found, wanted in zip(both(batch, prompts), expected):
            assert differ(found, wanted) < TOLERANCE
    assert batch.prompts.packs.passes >= (0 if ON_GPU else 1)


@pytest.mark.skipif(ON_GPU, reason="stands for what a GPU does")
def test_a_pass_is_captured_the_second_time_and_serves_prompts_of_other_lengths(demo, replayed, monkeypatch):  # noqa: F811
    batch = wide(captured(demo, (16, 64), 9), monkeypatch, 128)
    batch.prompts.staged_tables = []
    monkeypatch.setattr(packed_prompts.PackedPrefill, "why_not", lambda self: None)
    monkeypatch.setattr(packed_prompts.PackedPrefill, "_table", lambda self: None)
    sets = [(9, 16, 12, 3), (1, 2, 3), (16, 15, 14, 13), (5, 6, 7)]
    for number, counts in enumerate(sets):
        expected = [answered(eager(demo), demo.prepare(ids(count))) for count in counts]
        prompts = [batch.begin(demo.prepare(ids(count)), REQUEST) for count in counts]
        assert together(batch, prompts) == 1
        for found, wanted in zip(both(batch, prompts), expected):
            assert differ(found, wanted) < TOLERANCE
        assert len(replayed) == (number > 0) and sum(one.replays for one in replayed) == number
    assert not named(batch)


def test_what_cannot_go_together_goes_alone(demo, monkeypatch):  # noqa: F811
    batch = wide(in_chunks(demo, (16, 64), 3), monkeypatch, 128)
    picture = demo.prepare("What is there?", image=DEMO / "images" / "image_1.png")
    begin = lambda inputs: batch.begin(inputs, REQUEST)  # noqa: E731
    text = lambda count: begin(demo.prepare(ids(count)))  # noqa: E731
    choose = batch.prompts.packs.choose
    assert choose([text(9)]) is None
    assert choose([begin(picture), text(9), text(9)]) is None
    assert choose([text(90), text(9), text(9)]) is None
    found = choose([text(9), begin(picture), text(90), text(12), text(10), text(11)])
    # As many as there are rows.
    assert [len(one.inputs.token_ids) for one in found.prompts] == [9, 12, 10] and (found.size, found.rows) == (16, 4)
    assert choose([text(9), text(9)], 16) is None
    short = text(9)
    batch.place_together([short, text(9)])
    assert choose([text(9), text(9)]) is None  # one row is left
    assert in_chunks(demo, (16,), 1).prompts.packs.choose([text(9), text(9)]) is None


def test_choices_of_one_prompt_copy_it_instead(demo, monkeypatch):  # noqa: F811
    batch = wide(in_chunks(demo, (16,), 6), monkeypatch)

    def begun(count, group=""):
        return batch.begin(demo.prepare(ids(count)), REQUEST, group=group)

    first, second, other = begun(9, "one"), begun(9, "one"), begun(12)
    assert batch.place_together([first, second, other])[0] == [first, other]
    assert batch.prompts.packs.choose([second, begun(10)]) is None
    assert second.step() and second.source is first.row


def test_a_prompt_that_waits_in_the_row_of_prompts_is_not_disturbed(demo, monkeypatch):  # noqa: F811
    expected = {count: answered(eager(demo), demo.prepare(ids(count))) for count in (40, 9, 12)}
    batch = wide(in_chunks(demo, (16,), 4), monkeypatch)
    slow = batch.begin(demo.prepare(ids(40)), REQUEST)
    slow.step()
    others = [batch.begin(demo.prepare(ids(count)), REQUEST) for count in (9, 12)]
    assert together(batch, others) == 1 and batch.prompts.holds(slow)
    slow.compute()
    batch.place(slow)
    for found, count in zip(both(batch, [*others, slow]), (9, 12, 40)):
        assert differ(found, expected[count]) < TOLERANCE


def test_rows_that_left_make_room_for_a_whole_pass(demo, monkeypatch):  # noqa: F811
    batch = wide(in_chunks(demo, (16,), 4), monkeypatch)
    first = [batch.begin(demo.prepare(ids(count)), REQUEST) for count in (9, 12, 10)]
    together(batch, first)
    batch.leave(first[0].row)  # before it has joined
    expected = {count: answered(eager(demo), demo.prepare(ids(count))) for count in (12, 10, 5, 6)}
    others = [batch.begin(demo.prepare(ids(count)), REQUEST) for count in (5, 6)]
    assert together(batch, others) == 1
    assert [prompt.row.number for prompt in (*first[1:], *others)] == [0, 1, 2, 3]
    for found, count in zip(both(batch, [*first[1:], *others]), (12, 10, 5, 6)):
        assert differ(found, expected[count]) < TOLERANCE


# Pure ----------------------------------------------------------------------------------------------------------------

SIZES = (16, 64, 128, 256, 512, 1024)


def test_shapes_are_few(monkeypatch):
    monkeypatch.undo()
    shapes = shapes_of(SIZES, 1024)
    assert shapes == [(16, 16), (64, 4), (64, 8), (64, 16), (128, 2), (128, 4), (128, 8), (256, 2), (256, 4), (512, 2)]
    assert shapes_of(SIZES, 512) == [shape for shape in shapes if shape[0] * shape[1] <= 512]
    assert shapes_of((16,), 16) == []


def test_prompts_go_together_where_that_saves_time(monkeypatch):
    monkeypatch.undo()
    assert choose_shape([60, 50, 64, 10], SIZES, 1024) == ((64, 4), [0, 1, 2, 3])
    assert choose_shape([500, 512], SIZES, 1024) == ((512, 2), [0, 1])
    assert choose_shape([500, 512], SIZES, 512) is None
    # The first one always takes part; a long one waits for its own pass.
    assert choose_shape([60, 900, 50], SIZES, 1024) == ((64, 4), [0, 2])
    assert choose_shape([900, 60, 50], SIZES, 1024) is None
    assert choose_shape([60], SIZES, 1024) is None
    members = choose_shape([64] * 20, SIZES, 1024)[1]
    assert members == list(range(16))


def test_over_weights_with_adapters_inside_passes_are_chosen_as_they_were_measured():
    """Prompts that fill a measured shape go together where that took less time than as many alone."""
    rows = json.loads((RESULTS / "together_h100.json").read_text(encoding="utf-8"))["rows"]
    alone = {row["tokens"]: row["ms"] for row in rows if row["what"] == "alone"}
    passes = {(row["tokens"], row["prompts"]): row["ms"] for row in rows if row["what"] == "together"}
    faster = {shape: ms < shape[1] * alone[shape[0]] for shape, ms in passes.items() if shape[0] in alone}
    assert len(faster) == 9 and list(faster.values()).count(False) == 1
    for (tokens, count), pays in faster.items():
        choice = choose_shape([tokens] * count, [tokens], tokens * count, ADAPTER_INSIDE)
        assert (choice == ((tokens, count), list(range(count)))) == pays, (tokens, count)


# DeviceKernels -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_with_adapters_of_their_own_are_the_sum_of_their_products(dtype):
    for order in (0, 1, 7):
        assert wrong_add_rows(cpu_module(order), dtype, tokens=(16, 32)) is None


def test_a_kernel_that_gives_rows_the_next_ones_adapter_is_named():
    source = dequantize.source().replace("blockIdx.y * tile / tokens", "blockIdx.y * tile / tokens / 2")
    assert "relative error" in wrong_add_rows(cpu_module(source=source), torch.bfloat16, tokens=(16,))


@pytest.mark.skipif(ON_GPU, reason="stands for what a GPU does")
def test_rows_of_a_pass_and_of_the_step_after_it_find_their_adapters_in_tables(
    kernels_on_cpu, steps_replayed, replayed, tmp_path, monkeypatch  # noqa: F811
):  # fmt: skip
    """Thread by thread: prompts with an adapter and without, whose kernels are those of a GPU, are the modules' own."""
    base = pico.build("llama", tmp_path / "base")
    adapters = {name: pico.adapter(base, tmp_path / name, rank=rank) for name, rank in (("a", 4), ("b", 20))}
    plan = trimtab.plan(base, quant="nf4-dq", adapters=adapters, context=128, device=DEVICE, batch=6)
    names, counts = ["a", None, "a", None, "b"], (5, 9, 12, 15, 7)
    with trimtab.load(plan, decode="graph") as model:
        alone = eager(model)
        expected = [answered(alone, model.prepare(ids(count)), adapter=name) for name, count in zip(names, counts)]
        batch = packing(Batch(model, rows=6), monkeypatch)
        for _ in range(2):
            prompts = [batch.begin(model.prepare(ids(count)), REQUEST, adapter=name) for name, count in zip(names, counts)]
            assert together(batch, prompts) == 2  # the rank of "b" is too high for a pass
            for found, wanted in zip(both(batch, prompts), expected):
                # bfloat16: sums in another order move a score by a few steps of 2^-8 of the largest.
                assert differ(found, wanted) < 2**-5
        packed = [key for key in batch.prompts._graphs if key[0].rows > 1]
        assert packed and all(key[0].by_table for key in packed) and not named(batch)
