"""Predicted steps of one row and of eight beside the recorded ones (bench/results/families.json, experts.json), 4-bit weights on
a whole card."""

import json
import struct
from dataclasses import replace

import pytest
import torch

from bench import checkpoints
from tests import ROOT
from tests.planning.values.test_execution import H200, card
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.engine.loader import transformers_model as hf
from trimtab.planning import make_plan
from trimtab.request import LoadRequest

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
    return hf.anatomy_of(
        hf.probe(checkpoint, "bfloat16"), checkpoint, quant="nf4-dq",
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
