"""Rows that answer together on the GPU: the CPU's tests with the device changed."""

import torch

import trimtab
from tests.engine.batch.test_batch import *
from tests.serve.worker.test_killed import *
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine.batch.batch import Batch
from trimtab.request import GenerateRequest


def test_a_complete_prompt_gets_its_row_without_waiting_for_the_device():
    """Behind a step a wait of the host would keep that step's tokens back until the prompt is through."""
    plan = trimtab.plan(DEMO / "base", quant="nf4-dq", dtype="bfloat16", context=256, device="cuda", batch=3)
    with trimtab.load(plan, decode="auto") as model:
        batch = Batch(model, rows=3)
        batch.ends = frozenset()
        batch.prepare()
        for asks_for_waits in (False, False, True):
            prompt = batch.begin(model.prepare(list(range(5, 90))), GenerateRequest(max_new_tokens=4))
            torch.cuda.set_sync_debug_mode("error" if asks_for_waits else "default")
            try:
                prompt.compute()
                batch.place(prompt)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            batch.join(prompt)
