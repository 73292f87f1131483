"""Adapters on whole models of two families give stock PEFT's logits, bit for bit, pictures and sounds included."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from tests import pico
from tests.engine.lora.toy_lora import read, with_our_layers
from tests.long_runs import crossed
from trimtab.adapters.adapter import match_adapter, read_adapter
from trimtab.checkpoint.anatomy import Anatomy
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.engine.loader.transformers_model import read_anatomy
from trimtab.engine.lora.layers import attach_fitted, detach, fit

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
VARIANTS: dict[str, dict[str, Any]] = {
    "every linear": {"targets": "all", "alpha_pattern": {"q_proj": 3}, "rank_pattern": {"o_proj": 2}},
    "dora": {"targets": "all", "dora": True}, "embedding": {"embeddings": True, "rslora": True},
    "saved norms and head": {"modules_to_save": ["norm", "lm_head"]}, "saved embedding": {"modules_to_save": ["embed_tokens"]},
}  # fmt: skip


@cache
def checkpoint_of(family: str, folder: Path) -> tuple[Path, Anatomy]:
    built = pico.build(family, folder / family)
    return built, read_anatomy(read_checkpoint(built), quant="none", dtype="bfloat16")


@pytest.mark.parametrize(("family", "variant"), crossed(["gemma4", "qwen2_5_vl"], VARIANTS, first=["gemma4"], rest=2))
def test_logits_equal_pefts(family: str, variant: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, anatomy = checkpoint_of(family, tmp_path_factory.getbasetemp() / "models")
    adapter = pico.adapter(folder, tmp_path / "adapter", **VARIANTS[variant])
    stock, model = pico.make_model(family), pico.make_model(family)
    given = pico.inputs(family, stock.config)
    store = with_our_layers(model)
    attach_fitted(fit(model, match_adapter(read_adapter(adapter), anatomy)), "one", read=read, device="cpu", store=store)
    with torch.no_grad():
        base = stock(**given).logits
        assert torch.equal(model(**given).logits, base)
        store.set("one")
        found = model(**given).logits
        assert torch.equal(found, PeftModel.from_pretrained(stock, adapter).eval()(**given).logits)
        assert not torch.equal(found, base)
        detach(model, "one")
        assert torch.equal(model(**given).logits, base)
