"""Experts in host memory with slots on the card: when a plan chooses them, what they take, and what a step fetches."""

from dataclasses import replace

import pytest

from tests.anatomies import gemma_26b
from tests.planning.values.test_execution import GIB, H200, card, plan
from trimtab.errors import RequestError
from trimtab.planning import Plan
from trimtab.planning.memory.expert_slots import fetched_bytes, limits_of, slots_bytes, stacks_bytes
from trimtab.planning.values.blocks import blocks_of

MIXTURE = gemma_26b()
# Of one expert: gate, up and down in 4 bits, a byte for 64 values and a float32 for 256 of these.
EXPERT = 3 * 704 * 2816 // 2 + 3 * 704 * 2816 // 64 + 4 * -(-2 * 704 * 2816 // 64 // 256) + 4 * -(-704 * 2816 // 64 // 256)


@pytest.fixture(scope="module")
def eight():
    return plan(8, anatomy=MIXTURE)


def test_a_mixture_that_does_not_fit_keeps_its_experts_in_host_memory(eight):
    slots = eight.execution.expert_slots
    assert 40 < slots < 60 and not eight.blocks_off_device and not eight.is_whole
    assert eight.gpu["expert_slots"] == slots_bytes(MIXTURE, slots)
    assert eight.gpu_needed_bytes <= 8 * GIB < eight.gpu_needed_bytes + 2 * 30 * (EXPERT + 2**12)
    assert eight.host["experts"] == stacks_bytes(MIXTURE) and eight.host_peak_bytes > 30 * 128 * EXPERT
    assert eight.execution.step.mode == "fused" and eight.execution.prompt.mode == "graph"
    assert eight.disk_bytes == eight.staging_slots == 0 and Plan.from_json(eight.to_json()) == eight


def test_bytes_are_those_of_the_parts_of_an_expert():
    assert stacks_bytes(MIXTURE) == pytest.approx(30 * 128 * EXPERT, rel=1e-3)
    assert slots_bytes(MIXTURE, 50) - slots_bytes(MIXTURE, 40) == pytest.approx(30 * 10 * EXPERT, rel=1e-3)


def test_more_memory_gives_more_slots_and_faster_answers_until_all_is_resident():
    plans = [plan(gib, anatomy=MIXTURE, is_advised=False) for gib in (4, 6, 8, 10, 12, 16)]
    slots = [one.execution.expert_slots for one in plans]
    assert slots == sorted(slots[:-1]) + [0] and plans[-1].is_whole
    rates = [one.execution.tokens_per_s for one in plans]
    assert rates == sorted(rates) and rates[0] > 30 and plans[-1].gpu.get("expert_slots") is None


def test_a_step_fetches_what_has_no_slot():
    blocks = blocks_of(MIXTURE, "nf4-dq", are_apart=True)
    one, eight_rows = fetched_bytes(blocks, 1, 64), fetched_bytes(blocks, 8, 64)
    assert one == pytest.approx(30 * 8 * EXPERT / 2, rel=1e-2)
    assert eight_rows == pytest.approx(one / 8 * 128 * (1 - (15 / 16) ** 8), rel=1e-2)
    assert fetched_bytes(blocks, 1, 128) == 0


def test_more_rows_than_slots_read_experts_where_they_are():
    """Simulated, of 42 slots the least recently used: 16 even rows read 77.3 experts of a layer, 8 rows 37.1; 32 of 53 141.5."""
    blocks = blocks_of(MIXTURE, "nf4-dq", are_apart=True)
    for rows, slots, read in ((16, 42, 77.3), (8, 42, 37.1), (32, 53, 141.5)):
        assert fetched_bytes(blocks, rows, slots) == pytest.approx(30 * EXPERT * read, rel=0.08)
    assert fetched_bytes(blocks, 512, 50, in_turns=True) == pytest.approx(30 * EXPERT * 78, rel=1e-2)


@pytest.mark.parametrize("head", ["full", "auto"])
@pytest.mark.parametrize("gib", [6, 8, 12])
def test_slots_take_what_is_left_of_the_budget(gib, head):
    made = plan(gib, anatomy=MIXTURE, head=head, is_advised=False)
    each = 30 * (EXPERT + 2**12)
    assert made.execution.expert_slots and gib * GIB - made.gpu_needed_bytes < 2 * each


def test_a_head_that_makes_all_experts_resident_is_taken():
    full, auto = (plan(14.2, anatomy=MIXTURE, head=head, is_advised=False) for head in ("full", "auto"))
    assert full.execution.expert_slots and auto.is_whole and auto.execution.head == "int8"
    assert "keeps all experts on the device" in auto.execution.head_reason


def test_rows_of_a_batch_keep_captured_prompts():
    made = plan(8, anatomy=MIXTURE, batch=4, is_advised=False)
    assert made.execution.expert_slots and made.execution.prompt.mode == "graph"


def test_slots_of_a_saved_plan_agree_with_its_bytes(eight):
    for made, slots in ((eight, 0), (plan(24, anatomy=MIXTURE), 9)):
        values = made.to_json()
        values["execution"]["expert_slots"] = slots
        with pytest.raises(RequestError, match="does not agree"):
            Plan.from_json(values)


def test_a_plan_predicts_copies_in_front_of_computing(eight):
    slower = plan(8, anatomy=MIXTURE, machine=card(8), rates=replace(H200, pinned_h2d_Bps=H200.pinned_h2d_Bps / 4))
    taken = [fetched_bytes(blocks_of(MIXTURE, "nf4-dq", are_apart=True), 1, one.execution.expert_slots) for one in (eight, slower)]
    waits = [taken[0] / (0.97 * 52.4e9), taken[1] / (0.97 * 13.1e9)]
    assert slower.token_s - eight.token_s == pytest.approx(waits[1] - waits[0], rel=0.05)


@pytest.mark.parametrize("asked", [{"place": {"*layers.3": "stream"}}, {"decode": "eager"}, {"experts": "16bit"}])
def test_placements_and_modes_that_are_asked_for_have_no_slots(asked):
    anatomy = gemma_26b(None) if "experts" in asked else MIXTURE
    asked = {name: value for name, value in asked.items() if name != "experts"}
    assert plan(24 if "place" in asked else 8, anatomy=anatomy, **asked).execution.expert_slots == 0


def test_what_is_asked_to_stay_leaves_slots_to_the_rest():
    assert plan(8, anatomy=MIXTURE, place={"*layers.3": "resident"}, is_advised=False).execution.expert_slots


def test_experts_that_the_config_does_not_count_have_no_slots():
    rows = tuple(replace(row, chosen=0) if row.stacks else row for row in MIXTURE.rows)
    assert limits_of(replace(MIXTURE, rows=rows)) is None and limits_of(MIXTURE) == (8, 128)
    assert limits_of(gemma_26b(None)) is None


def test_the_table_says_where_experts_are(eight):
    line = next(line for line in str(eight).splitlines() if line.startswith("experts"))
    text = " ".join(str(eight).split())
    slots = eight.execution.expert_slots
    assert line and f"{slots} of 128 of each layer on the device at a time" in text
    assert f"{slots / 128:.0%} of the chosen ones are there" in text and "experts 10.97 GiB" in text
