"""The execution in a plan: which mode, which head and which prompts are chosen, what they take, and what refuses them."""

import ast
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import ROOT
from tests.anatomies import e_series, with_int8_head
from tests.raised import raised
from trimtab.checkpoint.anatomy import KVLayer
from trimtab.errors import DoesNotFitError, RequestError
from trimtab.planning import Machine, Plan, Rates, make_plan
from trimtab.planning import options as plan_options
from trimtab.planning.memory.activations import needs_of, prompts_kv_bytes, repeated_tokens, row_cache_bytes, use_of
from trimtab.planning.memory.prompts import ADAPTER_COLUMNS, ROOM_SLACK_BYTES, has_room, room_bytes, uncaptured_bytes
from trimtab.planning.memory.towers import BUFFERS, GRAPHS, POOL
from trimtab.planning.options import Option, options_document, options_of
from trimtab.planning.values.execution import StepWork, graph_count, prompt_launch_s, step_s, unsupported_reason
from trimtab.planning.values.rows import OUTSIDE_PEAK
from trimtab.report.render import Lines
from trimtab.request import LoadRequest

GIB, MIB = 2**30, 2**20
E4B = e_series("E4B")
H200 = Rates(pinned_h2d_Bps=52.4e9, device_Bps=3.54e12, launch_s=1.5e-5, device_flops=6.4e14, host_matmul_Bps=2e8)
ADAPTER = {"a": 81166336}


def card(gib, **extra) -> Machine:
    return Machine(
        execution_device="cuda:0", gpu_total_bytes=int(gib * GIB), gpu_free_bytes=int(gib * GIB) - 395 * MIB,
        host_available_bytes=100 * GIB, context_bytes=395 * MIB, **({"capability": (9, 0)} | extra),
    )  # fmt: skip


def plan(gib=8, *, anatomy=E4B, head="full", machine=None, refused="", is_advised=True, rates=H200, **asked) -> Plan:
    request = LoadRequest(model="m", quant="nf4-dq", head=head, **asked)
    return make_plan(
        request, anatomy, adapters=ADAPTER, machine=machine or card(gib), rates=rates, head8=with_int8_head(anatomy),
        head_refused=refused, is_advised=is_advised,
    )  # fmt: skip


def off_device(made: Plan) -> int:
    return sum(row.part in ("language", "head") and row.tier != "resident" for row in made.placements)


# Modes --------------------------------------------------------------------------------------------------------------------


def test_prompts_copy_no_part_of_an_adapter_that_changes_experts():
    request = LoadRequest(model="m", quant="nf4-dq", head="full", batch=2)
    made = [
        make_plan(request, E4B, adapters=ADAPTER, machine=card(24), rates=H200, expert_bytes=bytes_of).execution.prompt.bytes
        for bytes_of in (None, {"a": 80_000_000})
    ]
    assert made[0]["adapter_copy"] - made[1]["adapter_copy"] == 80_000_000


def test_steps_are_fused_where_model_card_and_format_allow_it():
    step = plan().execution.step
    assert step.mode == "fused" and step.reason.startswith("its decoder is described: trimtab's kernels")


@pytest.mark.parametrize(("changed", "asked", "machine", "mode", "why"), [
    ({"fused_unsupported": "its layers have experts"}, {}, {}, "graph", "no fused steps: its layers have experts"),
    ({}, {}, {"capability": (7, 5)}, "graph", "compute capability 7.5; trimtab's kernels need 8.0"),
    ({"capture_unsupported": "layer 3 keeps a state"}, {}, {}, "eager", "no graph steps: layer 3 keeps a state"),
    ({}, {"decode": "eager"}, {}, "eager", "requested"),
    ({}, {"decode": "graph"}, {}, "graph", "requested"),
])  # fmt: skip
def test_a_mode_that_cannot_be_had_is_left_with_its_reason(changed, asked, machine, mode, why):
    step = plan(anatomy=replace(E4B, **changed), machine=card(8, **machine), **asked).execution.step
    assert (step.mode, why in step.reason) == (mode, True)


@pytest.mark.parametrize("decode", ["graph", "fused"])
def test_a_mode_asked_for_by_name_that_cannot_be_had_is_an_error(decode):
    error = raised(RequestError, lambda: plan(anatomy=replace(E4B, capture_unsupported="layer 3 keeps a state"), decode=decode))
    assert (error.field, error.value) == ("decode", decode) and "layer 3 keeps a state" in str(error)


def test_graphs_need_a_gpu():
    cpu = Machine(execution_device="cpu", host_available_bytes=64 * GIB)
    assert plan(machine=cpu).execution.step.mode == "eager" and plan(machine=cpu).execution.step.bytes == {}
    with pytest.raises(RequestError, match="CUDA graphs require a GPU"):
        plan(machine=cpu, decode="graph")


def test_the_cpu_takes_no_part_in_captured_steps():
    made = plan(3.2)
    assert made.execution.step.mode == "fused"
    assert {row.tier for row in made.placements if row.part == "language"} <= {"resident", "stream"}


def test_a_decoder_placed_on_the_host_by_hand_runs_eagerly_and_says_why():
    step = plan(place={"language": "host"}).execution.step
    assert step.mode == "eager" and "the CPU takes part in every step" in step.reason
    error = raised(RequestError, plan, place={"language": "host"}, decode="fused", match="the CPU takes part in every step")
    assert error.allowed == ("auto", "eager")  # no captured step is had with that placement


def test_unsupported_reasons_name_what_stands_in_the_way():
    def why(**changed):
        return unsupported_reason("fused", E4B, **({"quant": "nf4", "on_cpu": False, "capability": (8, 6)} | changed))

    assert not any(why(quant=quant) for quant in ("int4-g32", "int4-g128-zp", "int4-g128-zp-idx", "fp8-128x128"))
    assert all(quant in (why(quant=quant) or "") for quant in ("int8-g32", "int8-g128-idx", "int4-g32-zp-f32"))
    assert why() is None and "int8" in (why(quant="int8") or "") and "need 8.0" in (why(capability=(7, 5)) or "")


# Bytes --------------------------------------------------------------------------------------------------------------------


@given(gib=st.floats(2.6, 12), rows=st.sampled_from([1, 2, 8]))
@settings(deadline=None, max_examples=12)
def test_what_the_execution_takes_is_in_the_budget(gib, rows):
    try:
        made = plan(gib, batch=rows)
    except DoesNotFitError:
        return
    assert made.gpu_needed_bytes <= made.gpu_budget_bytes
    assert sum(count for name, count in made.gpu.items() if name not in OUTSIDE_PEAK) == made.gpu_peak_bytes
    for phase in (made.execution.step, made.execution.prompt):
        assert phase.bytes.items() <= made.gpu.items()


def test_captured_steps_hold_keys_and_values_of_every_row():
    made = plan(24, batch=4, context_tokens=2048)
    one = row_cache_bytes(E4B.kv_layers, "bfloat16", rows=1, context_tokens=2048)
    # E4B stores keys and values in 24 of 42 layers: 4 full ones of 2 x 512 and 20 of 2 x 256 over a window of 512.
    assert one == 2 * 2 * (4 * 2048 * 512 + 20 * 512 * 256) * 2
    assert made.gpu["kv_cache"] == 5 * one  # one more for a prompt on its way


def test_more_rows_and_adapters_capture_more_graphs():
    def count(mode, rows, has_adapters=False, context_tokens=4096):
        return graph_count(mode, rows=rows, context_tokens=context_tokens, has_adapters=has_adapters)

    assert (count("fused", 1), count("fused", 1, True), count("fused", 8, True)) == (1, 2, 8)
    assert (count("graph", 1), count("graph", 8, True)) == (5, 16)


def test_captured_prompts_need_no_cache_of_their_own():
    wide, narrow, eager = plan(8), plan(4.5, batch=2), plan(8, decode="eager")
    assert wide.execution.prompt.mode == "graph" and wide.execution.prompt.chunks == (16, 64, 128, 256, 512, 1024)
    assert eager.execution.prompt.mode == "eager" and eager.execution.prompt.chunks == ()
    # Where graphs of several rows would push layers off the device, chunks are not captured, and written into the row's buffers.
    assert narrow.execution.prompt.mode == "eager" and narrow.execution.prompt.chunks
    assert "take memory from the decoder, in static chunks of" in narrow.execution.prompt.reason
    one, three = (row_cache_bytes(E4B.kv_layers, "bfloat16", rows=rows, context_tokens=4096) for rows in (1, 3))
    assert wide.gpu["kv_cache"] == one < eager.gpu["kv_cache"] and narrow.gpu["kv_cache"] == three


def test_prompts_of_a_small_card_are_captured_beside_copied_layers():
    made, several = plan(4), plan(4.5, batch=2)
    assert off_device(made) and made.execution.prompt.mode == "graph"
    assert off_device(several) and several.execution.prompt.mode == "eager"
    assert made.execution.prompt.seconds < several.execution.prompt.seconds / 3
    # Their nodes and the holes of one segment are all that they take beside what other passes need.
    assert made.gpu["prompt_graphs"] + made.gpu["fragments"] < 100 * MIB


def test_activations_are_counted_once_where_graphs_and_other_passes_share_memory():
    small, large, streamed = plan(8), plan(24), plan(4)
    small, streamed = (replace(one, request=replace(one.request, adapters={"a": "a"})) for one in (small, streamed))
    use = use_of(small.request, E4B, answer_tokens=small.answer_tokens)
    options = {"quant": "nf4-dq", "has_adapters": True, "has_rows": True, "chunk_tokens": 1024, "is_fused": True}
    needs = needs_of(E4B, use, is_unpacked_elsewhere=True, has_room=True, **options)
    counted = [needs.phases[name][1] for name in ("prompt", "pictures", "sound")]
    beside = max(needs.phases[name][1] for name in ("step", "adapter"))
    assert small.gpu["activations"] == needs.activation_bytes == max(counted) + beside
    assert needs.room_bytes == max(counted) and needs_of(E4B, use, **options).room_bytes == 0
    # Without a room the graphs' pool holds the activations of a chunk by itself, and slack.
    assert large.gpu["prompt_buffers"] - small.gpu["prompt_buffers"] == needs.phases["prompt"][1]
    assert large.gpu["prompt_graphs"] == 3 * small.gpu["prompt_graphs"] and "fragments" not in large.gpu
    # Captured towers have memory of their own: the room is that of a chunk.
    assert small.execution.towers.mode == "graph" and room_bytes(small, E4B) == counted[0] + ROOM_SLACK_BYTES
    assert room_bytes(streamed, E4B) == counted[1] + ROOM_SLACK_BYTES


@pytest.mark.parametrize(("batch", "gib", "shares"), [(1, 4, True), (1, 15.9, True), (1, 16, False), (2, 4, False)])
def test_prompts_share_memory_in_small_budgets_and_one_row(batch, gib, shares):
    assert has_room(batch, int(gib * GIB)) is shares


def test_keys_that_are_read_in_place_count_as_repeated_for_the_tokens_of_a_chunk_at_most():
    assert repeated_tokens(512, 4096, in_place=True) == 512
    assert repeated_tokens(512, 4096, in_place=False) == repeated_tokens(8192, 4096, in_place=True) == 4096


def test_images_that_may_be_cut_let_smaller_chunks_be_captured():
    """An image's 280 tokens need a chunk of 512 where they see each other, and none where each sees earlier ones only."""
    cut, whole = (plan(4, anatomy=replace(E4B, images_look_ahead=ahead)) for ahead in (False, True))
    assert cut.execution.prompt.mode == whole.execution.prompt.mode == "graph"
    assert cut.execution.prompt.chunks == (256,) and max(whole.execution.prompt.chunks) >= 280


def test_chunks_that_are_not_captured_count_what_stays_beside_towers():
    made = plan(4.5, images=1, batch=2)
    largest = max(row.weight.numel for row in E4B.rows if row.part == "language" and row.quantized and row.weight)
    assert made.execution.prompt.mode == "eager" and max(made.execution.prompt.chunks) >= 280
    assert made.gpu["prompt_buffers"] >= 2 * largest + 4 * 262144 and "prompt_graphs" not in made.gpu
    assert made.peak_phase == "pictures"


def test_a_weight_that_is_unpacked_into_room_of_its_own_is_counted_once():
    asked = LoadRequest(model="m", quant="nf4-dq", images=0, audio_s=0.0, context_tokens=256)
    use = use_of(asked, E4B, answer_tokens=64)

    def prompt(**given):
        found = needs_of(E4B, use, quant="nf4-dq", has_adapters=False, has_rows=True, chunk_tokens=16, **given)
        return found.phases["prompt"][1]

    largest = max(row.weight.numel for row in E4B.rows if row.part == "language" and row.quantized and row.weight)
    # With few tokens nothing else is as large: the difference is a whole weight, less what is next in size.
    assert 0 < prompt() - prompt(is_unpacked_elsewhere=True) <= 2 * largest

    def buffers(quant, *, has_adapters=False):
        return uncaptured_bytes(E4B, (16,), quant=quant, has_adapters=has_adapters)["prompt_buffers"]

    assert buffers("nf4-dq") > 2 * largest > buffers("int8") == buffers("int8", has_adapters=True)
    # Behind each of the 10240 rows of the gate, or more of a wider layer, the columns of adapters.
    assert buffers("nf4-dq", has_adapters=True) - buffers("nf4-dq") >= 2 * ADAPTER_COLUMNS * 10240


@pytest.mark.parametrize(("gib", "head", "least"), [(4, "full", 95), (3.2, "auto", 75), (3.7, "auto", 390)])
def test_a_small_card_streams_little(gib, head, least):
    """Measured with plans that captured no prompts: 97 and 78 tokens per second (bench/results/cards.json, run 4)."""
    made = plan(gib, head=head)
    assert made.execution.step.mode == "fused" and least < made.execution.tokens_per_s < 1.15 * least + 40
    assert made.gpu_needed_bytes <= gib * GIB


# The head -----------------------------------------------------------------------------------------------------------------


def test_eight_bits_keep_the_decoder_on_a_card_of_4_gib():
    whole, chosen = plan(4), plan(4, head="auto")
    assert off_device(whole) and not off_device(chosen) and (chosen.execution.head, chosen.request.head) == ("int8", "int8")
    assert "more decoder blocks" in chosen.execution.head_reason and "KL" in chosen.execution.head_reason
    assert chosen.execution.tokens_per_s > 3 * whole.execution.tokens_per_s


@pytest.mark.parametrize("gpu, refused, reason", [
    (8, None, "the whole decoder stays on the device"), (4, "adapter a changes lm_head", "adapter a changes lm_head"),
], ids=["the decoder fits", "an adapter on the head"])  # fmt: skip
def test_the_head_stays_full(gpu, refused, reason):
    execution = plan(gpu, head="auto", **({"refused": refused} if refused else {})).execution
    assert (execution.head, execution.head_reason) == ("full", reason)


def test_a_head_asked_for_is_taken():
    assert plan(4, head="full").execution.head == "full"


@pytest.mark.parametrize(("machine", "anatomy", "why"), [
    ({"capability": (7, 5)}, E4B, "its kernel needs compute capability 8.0, the card has 7.5"),
    ({}, replace(E4B, dtype="float16"), "its kernel computes in bfloat16, the model in float16"),
    ({}, replace(E4B, dtype="float32"), "its kernel computes in bfloat16, the model in float32"),
])  # fmt: skip
def test_the_plan_takes_eight_bits_only_where_their_kernel_runs(machine, anatomy, why):
    execution = plan(4, head="auto", machine=card(4, **machine), anatomy=anatomy).execution
    assert (execution.head, execution.head_reason) == ("full", f"8 bits would be computed by torch: {why}")
    usual = plan(4, head="auto", machine=card(4, capability=None)).execution
    assert usual.head == "int8"  # a capability that nobody asked for excludes nothing


def asked_int8(rows=1, decode="auto", **machine):
    request = LoadRequest(model="m", quant="nf4-dq", head="int8", batch=rows, decode=decode)
    return make_plan(request, with_int8_head(E4B), adapters={}, machine=card(24, **machine), rates=H200).execution


def test_eight_bits_asked_for_without_their_kernel_are_taken_and_cost_what_torch_takes():
    """Measured on an H200, E4B, one row: 175 us by the kernel, 3,260 by torch (bench/results/head8.json)."""
    kernel, torch_way = asked_int8(decode="graph"), asked_int8(decode="graph", capability=(7, 5))
    assert (kernel.head, kernel.head_reason) == ("int8", "requested")
    assert torch_way.head == "int8" and torch_way.head_reason.startswith("requested; its kernel needs compute capability")
    added_s = torch_way.step.seconds - kernel.step.seconds
    assert added_s == pytest.approx(3.26e-3 - 0.175e-3, rel=0.3)  # by 3.54 TB/s, the full head read at 4.3
    assert f"torch takes {1000 * added_s:.1f} ms of each step" in torch_way.head_reason
    assert torch_way.prompt.seconds - kernel.prompt.seconds == pytest.approx(added_s)


def test_steps_of_more_rows_than_the_kernel_of_eight_bits_takes_cost_what_torch_takes():
    eight, nine = asked_int8(8), asked_int8(9)
    assert eight.head_reason == "requested" and "up to 8 rows" in nine.head_reason
    assert nine.step.seconds - eight.step.seconds > 5e-3


def test_eight_bits_without_their_kernel_are_the_last_resort_of_a_head_left_to_the_plan():
    with pytest.raises(DoesNotFitError):
        plan(2, head="full")
    made = plan(2, head="auto", machine=card(2, capability=(7, 5)))
    assert made.execution.head == "int8" and "the full head does not fit" in made.execution.head_reason
    assert "its kernel needs compute capability 8.0" in made.execution.head_reason


# Seconds ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "work", "adapters", "measured"),
    [  # bench/results/decode.json and cards.json, NVIDIA H200
        ("fused", {"device_bytes": 3.316e9, "layers": 42, "linears": 341}, True, 384.9),
        ("fused", {"device_bytes": 3.316e9, "layers": 42, "linears": 341}, False, 408.2),
        ("graph", {"device_bytes": 3.316e9, "layers": 42, "linears": 341}, True, 107.9),
        ("fused", {"device_bytes": 3.316e9, "layers": 42, "linears": 341, "link_bytes": 718e6, "tail_bytes": 1342e6}, True, 70.4),
    ],
)  # fmt: skip
def test_predicted_seconds_are_near_measured_ones(mode, work, adapters, measured):
    whole = {"link_bytes": 0, "other_s": 0.0, "tail_bytes": 0} | work
    whole = {name: int(value) if name.endswith("bytes") else value for name, value in whole.items()}
    predicted = 1 / step_s(mode, StepWork(**whole), H200, link_Bps=H200.pinned_h2d_Bps, has_adapters=adapters)
    assert abs(predicted / measured - 1) < 0.1


@pytest.mark.parametrize(
    ("linears", "skipped", "passes", "measured_ms"),
    [  # ttft_ms (512 tokens) and longest_ttft_ms (4,080) of bench/results/cards.json, runs 4 and 5, NVIDIA H200
        ("E4B", None, 1, (219.6, 237.1, 201.7, 209.2)), ("E4B", None, 8, (763.6, 747.6, 825.3, 728.8)),
        ("E2B", None, 1, (155.1,)), ("E2B", None, 8, (489.2,)),
        (253, 0, 1, (126.2,)), (253, 0, 8, (1042.5,)),  # Qwen3-8B
    ],
)  # fmt: skip
def test_predicted_seconds_of_prompts_that_are_not_captured_are_near_measured_ones(linears, skipped, passes, measured_ms):
    """Within a third: a first pass takes longer than the others by what every request begins with."""
    if isinstance(linears, str):
        anatomy = e_series(linears)
        shared = {f"layers.{layer.layer}" for layer in anatomy.kv_layers if layer.shares is not None}
        rows = [row for row in anatomy.rows if row.kind == "linear" and row.part in ("language", "head")]
        linears, skipped = len(rows), sum(row.block.endswith(tuple(shared)) for row in rows)
    for launch_s in (4e-6, 1.5e-5):  # whatever the machine's own launches take
        found = prompt_launch_s(linears, skipped, 0, passes=passes, is_captured=False, has_adapters=True, launch_s=launch_s)
        assert all(abs(1000 * found / measured - 1) < 1 / 3 for measured in measured_ms)


def test_copies_of_a_prompt_hide_behind_launches_and_towers_are_launched_once():
    text, seen = (plan(4.5, head="full", context_tokens=4096, images=count, audio_s=0.0, batch=2) for count in (0, 1))
    assert text.execution.prompt.mode == seen.execution.prompt.mode == "eager"
    assert sum(row.request_s for row in text.placements) < text.execution.prompt.seconds
    passes = -(-(4096 - text.answer_tokens) // max(text.execution.prompt.chunks))
    towers = sum(row.kind == "linear" and row.part == "vision" for row in E4B.rows)
    linears = sum(row.kind == "linear" and row.part in ("language", "head") for row in E4B.rows)
    most = prompt_launch_s(linears, 0, towers, passes=passes, is_captured=False, has_adapters=True, launch_s=0.0)
    assert text.execution.prompt.seconds < seen.execution.prompt.seconds < most


def test_a_prompt_that_is_cut_enters_layers_that_share_keys_once():
    counts = {"is_captured": False, "has_adapters": True, "launch_s": 0.0}
    one, eight = (prompt_launch_s(300, 200, 0, passes=passes, **counts) for passes in (1, 8))
    assert eight == pytest.approx(one + 7 * one / 3)
    assert prompt_launch_s(300, 200, 100, passes=1, **counts) == pytest.approx(4 / 3 * one)
    assert prompt_launch_s(300, 0, 0, passes=1, is_captured=False, has_adapters=True, launch_s=1e-3) == 300 * 19 * 1e-3
    assert prompt_launch_s(300, 0, 100, passes=1, is_captured=True, has_adapters=True, launch_s=1e-3) == 300 * 45e-6


def test_of_the_changes_that_fit_the_one_with_the_fastest_answers_is_named():
    error = raised(DoesNotFitError, plan, 2.2, head="full")
    assert (error.option, error.option_bytes) == ("head='int8'", 0)
    whole = with_int8_head(E4B)
    assert plan(2.2, head="int8", anatomy=whole).execution.tokens_per_s > (
        plan(2.2, head="full", context_tokens=512).execution.tokens_per_s
    )


@pytest.mark.parametrize("asked", [{"decode": "fused"}, {"decode": "graph", "context_tokens": 32768}, {"context_tokens": 131072}])
def test_the_budget_that_an_error_names_is_the_smallest_of_all_ways_to_run(asked):
    """Prompts in static chunks need no cache beside the row's own: captured steps may need less than what was tried last."""

    def made(budget_bytes):
        request = LoadRequest(model="m", quant="nf4-dq", gpu_memory_bytes=budget_bytes, **asked)
        return make_plan(request, E4B, adapters=ADAPTER, machine=card(80), rates=H200, is_advised=False)

    error = raised(DoesNotFitError, made, GIB)
    assert made(error.needed_bytes).gpu_needed_bytes <= error.needed_bytes
    for fewer in (1, 100 * MIB, 400 * MIB):
        with pytest.raises(DoesNotFitError):
            made(error.needed_bytes - fewer)


@pytest.mark.parametrize(("gib", "asked"), [
    (0.9, {"head": "auto"}),
    pytest.param(1.2, {"head": "full", "batch": 4}, marks=pytest.mark.slow),
    pytest.param(2.0, {"head": "full", "context_tokens": 131072}, marks=pytest.mark.slow),
])  # fmt: skip
def test_the_named_changes_fit_and_no_smaller_ones_do(gib, asked):
    from trimtab.planning.options import _smaller

    error = raised(DoesNotFitError, plan, gib, **asked)
    values = dict(part.split("=") for part in error.option.split(" and "))
    changed = asked | {"context_tokens" if name == "context" else name: ast.literal_eval(value) for name, value in values.items()}
    kinds = {what: tries for tries in _smaller(LoadRequest(model="m", quant="nf4-dq", **asked), E4B) for what, _ in tries}

    def is_enough(fewer):
        try:
            return plan(gib, is_advised=False, **fewer | {"anatomy": with_int8_head(E4B) if fewer["head"] == "int8" else E4B})
        except DoesNotFitError:
            return False

    assert is_enough(changed) and error.option_bytes == 0
    for part in error.option.split(" and "):
        place = [what for what, _ in kinds[part]].index(part)
        name = "context_tokens" if part.startswith("context") else part.partition("=")[0]
        before = asked.get(name, 4096) if place == 0 else getattr(kinds[part][place - 1][1], name)
        assert not is_enough(changed | {name: before}), part


def test_a_prefix_cache_that_the_host_has_no_room_for_is_named():
    error = raised(DoesNotFitError, plan, 8, prefix_cache_bytes=200 * GIB)
    assert (error.device, error.option) == ("host", "no prefix cache")


@pytest.mark.parametrize("kv, value_bytes, scale_bytes", [("full", 2, 0), ("int8", 1, 4)])
def test_sliding_windows_are_counted_for_every_row_beside_pages(kv, value_bytes, scale_bytes):
    """Four full layers of E4B have pages, twenty sliding ones a window for every row: as bench/kv_pages.py found it on a GPU."""
    pages, whole = (plan(80, batch=32, context_tokens=4096, kv_tokens=kept, kv=kv) for kept in (20480, None))
    head, wide = 256 * value_bytes + scale_bytes, 512 * value_bytes + scale_bytes
    windows = 33 * 20 * 2 * 2 * 512 * head  # 32 rows and a prompt's; 20 layers; keys and values; 2 heads; 512 places
    token = 4 * 2 * 2 * wide
    assert pages.gpu["kv_cache"] == (20480 + 2 * 64) * token + windows and whole.gpu["kv_cache"] == 33 * 4096 * token + windows
    if kv == "full":
        results = json.loads((ROOT / "bench/results/kv_pages.json").read_text(encoding="utf-8"))
        held = {row["layout"]: row["held"] for row in results["rows"] if row["what"] == "bytes"}
        assert held == {"pages": pages.gpu["kv_cache"], "whole": whole.gpu["kv_cache"]}
    text = (ROOT / "docs/operate.md").read_text(encoding="utf-8")
    per_row = f"{windows / 33 / 2**20:.1f}".removesuffix(".0")
    assert f"{token:,}\n  bytes per token" in text or f"{token:,} bytes per token" in text
    assert f"{per_row} MiB per row" in text
    if kv == "full":
        assert f"for 32 rows {windows / 2**20:.0f} MiB" in text


# Options, files ------------------------------------------------------------------------------------------------------------


def few_changes(monkeypatch):
    """Let options be of few kinds beside more memory: each of the others costs a plan."""
    changes, kept = plan_options._changes, ("as asked", "head=", "kv=")
    monkeypatch.setattr(
        plan_options, "_changes", lambda *given, **named: [one for one in changes(*given, **named) if one[0].startswith(kept)]
    )


def test_options_say_what_each_change_gives(monkeypatch):
    few_changes(monkeypatch)

    def made(request):
        return make_plan(request, E4B, adapters=ADAPTER, machine=card(4), rates=H200, head8=with_int8_head(E4B), is_advised=False)

    request = LoadRequest(model="m", quant="nf4-dq", head="auto")
    options = {one.what: one for one in options_of(request, made, budget_bytes=4 * GIB)}
    assert options["as asked"].head == "int8" and options["head='full'"].head == "full"
    assert options["head='full'"].tokens_per_s < options["as asked"].tokens_per_s
    assert options["gpu_memory='6GiB'"].head == "full" and options["gpu_memory='6GiB'"].tokens_per_s > 300
    lines = Lines().show(options_document(list(options.values()))).splitlines()
    assert len(lines) == 3 + len(options)  # a first line of names, a last one about the rate that is an estimate
    assert lines[0].split() == ["option", "device", "memory", "tokens/s", "head", "steps"]


@pytest.mark.parametrize(("gib", "is_listed"), [(4, False), (2, True)])
def test_options_list_eight_bits_without_their_kernel_only_where_nothing_else_fits(gib, is_listed, monkeypatch):
    few_changes(monkeypatch)
    monkeypatch.setattr(plan_options, "_larger", lambda *given: [])
    machine = card(gib, capability=(7, 5))

    def made(request):
        anatomy = with_int8_head(E4B) if request.head == "int8" else E4B
        return make_plan(request, anatomy, adapters=ADAPTER, machine=machine, rates=H200, is_advised=False)

    request = LoadRequest(model="m", quant="nf4-dq", head="full")
    for capability, listed in (((7, 5), is_listed), (None, True)):
        options = options_of(request, made, budget_bytes=int(gib * GIB), capability=capability)
        assert any(one.what == "head='int8'" and one.needed_bytes for one in options) == listed


def test_the_reason_of_an_option_that_cannot_be_planned_stands_in_the_last_column():
    error = "quant='nf5': unknown choice (choices: " + ", ".join(["nf4"] * 20) + ")"
    options = [
        Option(what="as asked", needed_bytes=GIB, tokens_per_s=100.0, head="full", mode="fused"),
        Option(what="batch=1", needed_bytes=None, tokens_per_s=None, error="needs 4.00 GiB"),
        Option(what="head='int8'", needed_bytes=None, tokens_per_s=None, error=error),
    ]
    lines = Lines().show(options_document(options)).splitlines()
    assert lines[2].split() == ["batch=1", "needs", "4.00", "GiB", "-", "-", "-"]
    assert lines[3].endswith(f"-  -     {error}") and lines[1].endswith("full  fused")
    assert lines[1].index("fused") == lines[3].index("quant") == lines[0].index("steps")


# Towers --------------------------------------------------------------------------------------------------------------------


def test_towers_are_captured_where_they_lie_on_the_device_and_their_bytes_are_in_the_budget():
    made, without = plan(8), plan(8, images=0, audio_s=0.0)
    towers = made.execution.towers
    assert towers.mode == "graph" and set(towers.bytes) == {GRAPHS, BUFFERS, POOL}
    assert all(made.gpu[name] == count > 10 * MIB for name, count in towers.bytes.items())
    # What a picture takes while it is not captured is counted still.
    assert made.gpu_needed_bytes >= without.gpu_needed_bytes + sum(towers.bytes.values())
    assert made.gpu_needed_bytes <= made.gpu_budget_bytes and "tower_graphs" in OUTSIDE_PEAK
    assert without.execution.towers is None and not set(without.gpu) & {GRAPHS, BUFFERS, POOL}
    assert "towers       graph, " in str(made) and "towers" not in str(without)


def test_the_decoder_comes_before_captured_towers():
    streamed, small = plan(4, head="auto").execution.towers, plan(4).execution.towers
    assert streamed.mode == small.mode == "eager" and not streamed.bytes
    assert streamed.reason.startswith("model.vision_tower") and small.reason.startswith("model.vision_tower")
    assert plan(4.5, batch=2).execution.towers.reason == "prompts are not captured"
    assert plan(4, head="auto", images=0, audio_s=0.0).execution.tokens_per_s == pytest.approx(
        plan(4, head="auto").execution.tokens_per_s, rel=0.05
    )
    whole = plan(8)
    taken = sum(whole.execution.towers.bytes.values())
    left = whole.gpu_budget_bytes - whole.gpu_needed_bytes + taken
    # Half of what is left over is for adapters that come later.
    tight = plan(8, gpu_memory_bytes=whole.gpu_budget_bytes - left + 2 * taken - MIB)
    assert tight.execution.towers.mode == "eager" and "of the budget may be used" in tight.execution.towers.reason
    assert plan(8, gpu_memory_bytes=whole.gpu_budget_bytes - left + 2 * taken).execution.towers.mode == "graph"


def test_longer_sounds_and_more_pictures_need_more_buffers():
    few, pictures, sounds = plan(24), plan(24, images=4), plan(24, audio_s=60.0)
    for more in (pictures, sounds):
        assert more.execution.towers.bytes[BUFFERS] > few.execution.towers.bytes[BUFFERS]
        assert more.execution.towers.bytes[GRAPHS] == few.execution.towers.bytes[GRAPHS]


def test_a_plan_of_several_rows_counts_what_prompts_in_progress_hold_where_none_is_captured():
    """Two prompts of a whole context, one that grows in each, and those that pass with half a context in every layer."""
    layer = KVLayer(layer=0, kv_heads=2, head_dim=8, window=None, shares=None)
    sliding = KVLayer(layer=1, kv_heads=2, head_dim=8, window=16, shares=None)
    position = 2 * 8 * 2  # bytes of keys in bfloat16
    one = 2 * 100 * position + 2 * (15 + 20) * position + 80 * position
    found = prompts_kv_bytes((layer, sliding), "bfloat16", context_tokens=100, new_tokens=20)
    assert found == 2 * one + 50 * 2 * 2 * position
    two, three = (plan(80, decode="eager", batch=rows, context_tokens=2048).gpu["kv_cache"] for rows in (2, 3))
    row_bytes = three - two
    assert two - 2 * row_bytes >= 2.5 * row_bytes


def test_a_step_of_more_rows_is_predicted_as_it_was_measured():
    measured = json.loads((ROOT / "bench" / "results" / "company.json").read_text())["rows"][0]  # E4B on an H200, context 1,024
    for rows, name in ((1, "alone_ms"), (8, "full_ms")):
        predicted = 1000 * plan(140, batch=rows, context_tokens=1024).execution.step.seconds
        assert predicted == pytest.approx(measured[name], rel=0.1)  # a table's cards are predicted within 10 %
