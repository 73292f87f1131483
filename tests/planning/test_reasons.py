"""Why a block is where it is, in the words that are true of the plan; and predicted steps beside the recorded ones."""

import json
import struct
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bench import checkpoints
from tests import ROOT
from tests.anatomies import e_series, small
from tests.planning import test_planner
from tests.planning.test_planner import CPU, GIB, MIB, TABLE
from tests.planning.values.test_execution import H200, card
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.engine.loader import transformers_model
from trimtab.errors import gib
from trimtab.planning import Rates, make_plan, planner, search
from trimtab.planning.values.byte_sizes import allocator_reserve_bytes
from trimtab.request import LoadRequest

E2B = e_series("E2B")
# Loading peaks above running: next to nothing is computed, and one weight to be packed is as large as the rest.
HIGH_LOAD = small([(8192, 4096), (64, 64)], quantized=True, table=(4096, 8192))
SHORT = {"context_tokens": 16, "images": 0, "audio_s": 0.0}


def reason(made, path=TABLE):
    return next(row.reason for row in made.placements if row.block_path == path)


def reasons(made):
    return {row.reason for row in made.placements if row.tier != "resident"}


def plan(*given, **asked):
    """Return a plan whose execution takes the same whatever the budget."""
    return test_planner.plan(*given, **({"decode": "eager"} | asked))


def needed(peak_bytes, made):
    outside = made.gpu["cuda_context"] + made.gpu.get("kernels", 0)
    return peak_bytes + allocator_reserve_bytes(peak_bytes) + outside


def test_bytes_that_are_too_many_are_those_that_a_larger_budget_would_need():
    whole = plan()
    running = needed(whole.gpu_peak_bytes, whole)
    made = plan(gpu=6)
    assert reason(made) == f"moved, {gib(running - 6 * GIB)} over the budget of cuda:0: only indexed, 17.5 KiB per token"
    assert reasons(plan(gpu=running / GIB)) == set() and reason(plan(gpu=running / GIB)) == "fits"


def test_blocks_placed_by_hand_are_no_part_of_what_is_too_many():
    asked = {"place": {"vision": "stream", "audio": "stream"}}
    whole = plan(**asked)
    made = plan(gpu=5.8, **asked)
    over = needed(whole.gpu_peak_bytes, whole) - made.gpu_budget_bytes
    assert over > 0 and reason(made).startswith(f"moved, {gib(over)} over the budget of cuda:0")


def test_loading_peaks_too_high_only_where_running_fits_and_loading_does_not():
    whole = plan(HIGH_LOAD, **SHORT)
    running, loading = needed(whole.gpu_peak_bytes, whole), needed(whole.gpu_load_peak_bytes, whole)
    budget = loading - 16 * MIB
    assert running < budget
    made = plan(HIGH_LOAD, gpu=budget / GIB, **SHORT)
    assert reason(made) == ("moved, loading would peak 16.0 MiB above the budget of cuda:0: only indexed, 16.0 KiB per token")
    assert reason(plan(HIGH_LOAD, gpu=loading / GIB, **SHORT)) == "fits"


def test_what_is_as_fast_elsewhere_leaves_although_everything_fits():
    quick_host = Rates(device_Bps=1e9, host_Bps=1e10, transfer_s=1e-7)
    made = plan(HIGH_LOAD, machine=CPU, rates=quick_host, **SHORT)
    assert reasons(made) == {"would fit on the device, but is as fast in this tier: only indexed, 16.0 KiB per token"}
    assert reason(made, "model.language_model.layers.0") == "fits"
    slow_host = Rates(device_Bps=1e9, host_Bps=1e9, transfer_s=1e-3)
    assert reasons(plan(HIGH_LOAD, machine=CPU, rates=slow_host, **SHORT)) == set()


def test_a_memory_that_device_and_host_share_is_named_where_neither_budget_is_short():
    whole = plan(machine=CPU)
    needed_bytes = whole.gpu_needed_bytes - whole.gpu[planner.ITEM] + whole.host_peak_bytes
    machine = replace(CPU, host_available_bytes=needed_bytes - CPU.process_bytes - GIB)
    made = plan(machine=machine)
    over = gib(GIB)
    assert whole.gpu_needed_bytes - whole.gpu[planner.ITEM] < made.gpu_budget_bytes
    assert reason(made).startswith(f"moved, {over} more than the machine's memory: only indexed")
    # In host memory, the table would be in the same memory.
    assert reason(made).endswith(f"from the checkpoint file; {over} more than the machine's memory")
    enough = replace(CPU, host_available_bytes=needed_bytes - CPU.process_bytes)
    assert reasons(plan(machine=enough)) == set()


def test_the_host_budget_is_named_only_for_what_it_keeps_off_the_host():
    made = plan(e_series("E4B"), gpu=3.5, host=1.5)
    by_tier = {}
    for row in made.placements:
        by_tier.setdefault((row.tier, row.home), set()).add(row.reason.endswith("; the host budget is 1.50 GiB"))
    assert by_tier == {
        ("resident", "device"): {False}, ("stream", "host"): {False}, ("disk", "disk"): {True}, ("gather", "file"): {True}
    }  # fmt: skip
    roomy = plan(e_series("E4B"), gpu=3.5, host=16)
    assert not any("host budget" in row.reason for row in roomy.placements)


def test_what_stays_says_when_it_is_read_only_where_something_had_to_leave():
    made = plan(gpu=2.5)
    assert reason(made, "model.language_model.layers.0") == "stays: read at every token"
    assert "read once per image" in reason(made, "model.vision_tower")
    assert "read once per audio clip" in reason(made, "model.audio_tower") and reason(plan(), "model.vision_tower") == "fits"


def test_a_place_given_by_hand_is_the_reason():
    made = plan(gpu=2.3, place={"audio": "host"})
    assert reason(made, "model.audio_tower") == "requested: place audio=host"
    assert reason(made, "model.vision_tower").startswith("moved, ")


def test_a_block_that_cannot_move_says_why_and_a_movable_one_never_does():
    """No anatomy here has such blocks: what a block is read for, and what it refuses, is its own (`blocks.py`)."""
    why = SimpleNamespace(asked={}, too_much="", far="")
    fixed = SimpleNamespace(block_path="b", movable_bytes=0, refused={"stream": "nothing of it can be read later"})
    assert search.Reasons.of(why, fixed, SimpleNamespace(tier="resident")) == "nothing of it can be read later"
    free = SimpleNamespace(block_path="b", movable_bytes=1, refused=fixed.refused, paid="request")
    assert search.Reasons.of(why, free, SimpleNamespace(tier="resident")) == "fits"
    why.too_much = "1 B over the budget of cuda:0"
    assert search.Reasons.of(why, free, SimpleNamespace(tier="resident")) == "stays: read once per request"


# Bytes per second that the runs measured on their cards: their recorded predictions, solved for it with the constants of then.
RATES = {"NVIDIA H200": 3.455e12, "NVIDIA H100 80GB HBM3": 2.6e12}
# Runs of one model on cards of one kind differed by up to 10 %.
NEAR = 0.15
# Of each kind of layer one: attention alone, few heads, recurrent, experts.
OFTEN = ("qwen3-8b", "gemma3-4b", "qwen3.5-9b", "26b-a4b", "qwen3.5-35b-a3b")
TYPES = {torch.bfloat16: "BF16", torch.float32: "F32"}


def recorded():
    rows = [row for row in read("families") if row["engine"] == "trimtab" and row.get("gpu") in RATES]
    rows += [row | {"model": row["case"].split(":")[0]} for row in read("experts") if not row.get("slots")]
    marks = {row["model"]: () if row["model"] in OFTEN else pytest.mark.slow for row in rows}
    return [pytest.param(row, id=row["model"], marks=marks[row["model"]]) for row in rows if "rows8_tok_s" in row]


def read(name):
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())["rows"]


def anatomy_of(size, folder):
    """Return the anatomy of a model of released sizes, from a checkpoint that has headers alone."""
    config = checkpoints.config_of(size)
    config.dtype, config.architectures = torch.bfloat16, [checkpoints.CLASSES[size]]
    headers, end = {}, 0
    for name, one in checkpoints.empty_model(config, size).state_dict().items():
        if not (name == "lm_head.weight" and config.get_text_config().tie_word_embeddings):
            headers[name] = {"dtype": TYPES[one.dtype], "shape": list(one.shape), "data_offsets": [end, end + one.nbytes]}
            end += one.nbytes
    text = json.dumps(headers).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)  # sparse
    config.save_pretrained(folder)
    checkpoint = read_checkpoint(folder)
    return transformers_model.anatomy_of(
        transformers_model.probe(checkpoint, "bfloat16"), checkpoint, quant="nf4-dq",
        experts="nf4-dq" if getattr(config.get_text_config(), "num_experts", None) else "auto",
    )  # fmt: skip


@pytest.mark.parametrize("row", recorded())
def test_predicted_steps_are_near_the_recorded_ones(row, tmp_path):
    rates = replace(H200, device_Bps=RATES[row.get("gpu", "NVIDIA H200")])
    anatomy = anatomy_of(row["model"], tmp_path)
    for rows, measured in ((1, row["tok_s"]), (8, row["rows8_tok_s"] / 8)):
        request = LoadRequest(model="m", quant="nf4-dq", head="full", batch=rows, context_tokens=2048)
        step = make_plan(request, anatomy, adapters={"a": 2**26}, machine=card(141), rates=rates, head8=anatomy).execution.step
        assert step.mode == "fused"
        assert abs(1 / step.seconds / measured - 1) < NEAR, (rows, 1 / step.seconds, measured)
