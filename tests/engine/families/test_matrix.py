"""Every family in every tier with every kind of adapter says what stock transformers with PEFT says.

In float32, so that a wrong operation is far from a rounding. One row and mixed rows, prompts in chunks of fixed shapes (with an
image and a sound where the family has them), steps behind them. All combinations are slow tests; each family, and each tier with
each kind of adapter, is in every run.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch

import trimtab
from tests import pico, stock
from tests.engine.loader.test_load import OLD
from tests.engine.prefill.test_prefill import differ, ids, picture
from tests.long_runs import skip_without_rings, slow_on_cpu
from trimtab.engine.batch.batch import Batch
from trimtab.engine.prefill.prefill import PrefillRunner
from trimtab.errors import RequestError
from trimtab.request import GenerateRequest

pytestmark = pytest.mark.skipif(OLD, reason="its modules differ from the descriptions")

FAMILIES = (*pico.FAMILIES, *pico._OTHERS)
TIERS = ("resident", "stream", "disk", "host", "gather")
KINDS: dict[str, dict[str, Any] | None] = {
    "none": None, "lora": {"targets": "all"}, "rslora": {"rslora": True, "rank": 8}, "dora": {"dora": True},
    "saved head": {"modules_to_save": ["lm_head"]}, "saved norm": {"modules_to_save": ["norm"]},
}  # fmt: skip
PAIRS = list(product(TIERS, KINDS))
# float32: attention, the delta rule, experts and adapters add in another order (largest seen: 2.3e-5). An adapter changes 1e-3.
TOLERANCE = 5e-5


def cases() -> list[Any]:
    """Every combination; of each family one in every run, another pair of tier and kind each."""
    return [
        pytest.param(family, *pair) if number % len(PAIRS) == place else slow_on_cpu(family, *pair)
        for number, family in enumerate(FAMILIES) for place, pair in enumerate(PAIRS)
    ]  # fmt: skip


class Theirs:
    """The stock model with two adapters, and without."""

    def __init__(self, folder: Any, adapters: dict[str, Any]) -> None:
        self.model = stock.load_stock(folder, dtype=torch.float32)
        for name, path in adapters.items():
            if name == "a":
                self.model = stock.with_adapter(self.model, path)
            else:
                self.model.load_adapter(str(path), name)

    def logits(self, adapter: str | None, inputs: Any, token_ids: list[int]) -> torch.Tensor:
        if adapter is not None:
            self.model.set_adapter("default" if adapter == "a" else adapter)
        with self.model.disable_adapter() if adapter is None and hasattr(self.model, "disable_adapter") else nullcontext():
            return stock.next_logits(self.model, inputs.tensors, token_ids)


def planned(folder: Any, adapters: dict[str, Any], tier: str) -> Any:
    options = {"quant": "none", "dtype": "float32", "context": 96, "device": "cpu", "images": 1, "audio_s": 1.0}
    try:
        return trimtab.plan(folder, adapters=adapters, place={"*": tier}, **options)
    except RequestError:
        assert tier == "gather"  # a tied table alone leaves nothing to gather
        return trimtab.plan(folder, adapters=adapters, **options)


@pytest.mark.parametrize(("family", "tier", "kind"), cases())
def test_rows_say_what_stock_says(family, tier, kind, tmp_path):
    base = pico.built(family)
    options = KINDS[kind]
    if kind == "saved norm" and family.startswith("qwen3_5"):  # those inside recurrent layers are refused
        options = {"modules_to_save": ["language_model.norm" if family.endswith("_vl") else "model.norm"]}
    names = [] if options is None else ["a", "b"]
    adapters = {name: pico.adapter(base, tmp_path / name, **options, seed=number) for number, name in enumerate(names)}
    theirs = Theirs(base, adapters)
    with trimtab.load(planned(base, adapters, tier)) as model:
        skip_without_rings(model)
        if model.streamer is not None:
            model.streamer.poison = True
        looks = bool(pico.inputs(family, model.hf_model.config).keys() & {"pixel_values", "input_features"})
        is_described = model.anatomy.fused_unsupported is None
        for rows, asked in ((1, [names[0] if names else None]), (4, [None, *names])):
            batch = Batch(model, rows=rows, decode="fused" if is_described else "eager")
            batch.steps.mode = "auto" if kind == "saved norm" else batch.steps.mode  # such a norm is a fallback, as on a GPU
            batch.prompts = PrefillRunner(batch, "static", (8, 16))
            going = []
            for number, name in enumerate(asked):
                inputs = model.prepare(ids(9 + 8 * number))
                if looks and number == len(asked) - 1:
                    inputs = picture(model, family, 3)
                prompt = batch.begin(inputs, GenerateRequest(max_new_tokens=30), adapter=name)
                while not prompt.step():
                    pass
                wanted = theirs.logits(name, inputs, list(inputs.token_ids))
                assert differ(prompt.logits, wanted) < TOLERANCE, (rows, name)
                assert name is None or differ(theirs.logits(None, inputs, list(inputs.token_ids)), wanted) > 20 * TOLERANCE
                going.append((batch.join(prompt).row, inputs))
            for step in range(2):
                found = batch.logits()
                for row, inputs in going:
                    wanted = theirs.logits(row.adapter, inputs, row.token_ids)
                    assert differ(found[row.number], wanted) < TOLERANCE, (rows, row.adapter, step)
                    row.token_ids.append(int(wanted.argmax()))
                batch.write_last_tokens()
            fallbacks = {one.why for one in batch.steps.fallbacks}
            assert fallbacks == ({"an adapter replaces the weights of a norm"} if is_described and kind == "saved norm" else set())
