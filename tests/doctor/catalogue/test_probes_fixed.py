"""Whether the probes of A and B can say "fixed": each is shown a stack without its bug, made of what upstream does right.

What a bug needs is taken away where that is possible (nothing quantized), and PEFT's dispatch, where it is the bug, is
replaced by transformers' own load_adapter, which keeps the map.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from trimtab.doctor.catalogue import read_entry
from trimtab.doctor.facts.bug import FIXED, NOT_APPLICABLE, Seen
from trimtab.doctor.facts.probe_kit import Kit, quiet
from trimtab.doctor.probes.runner import FOLDER, read_catalogue

PATHS = {entry.bug.id: entry.path for entry in read_catalogue(FOLDER)}


class UnquantizedKit(Kit):
    """Loads every model unquantized."""

    def load(self, path: Path, *, quant: str = "none", **kwargs: Any) -> Any:
        return super().load(path, **kwargs)


class NativeKit(Kit):
    """Loads adapters as transformers does: nothing is dispatched again, and options of PEFT mean nothing."""

    def peft(self, model: Any, adapter: Path, **kwargs: Any) -> Any:
        model.load_adapter(str(adapter))
        return model.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("probes")


def seen_by(bug_id: str, kit: Kit) -> Seen:
    with quiet():
        seen: Seen = read_entry(PATHS[bug_id]).probe(kit)
    return seen


@pytest.mark.parametrize("bug_id", ["A1", "A2", "A3", "A4", "A5", "A6", "A7", "B1", "B2", "B3", "B4", "B5", "B6"])
def test_nothing_quantized_and_no_second_dispatch_are_fixed(folder, bug_id):
    seen = seen_by(bug_id, (UnquantizedKit if bug_id < "B" else NativeKit)(folder))
    assert seen.state == FIXED, seen.evidence


@pytest.mark.parametrize("bug_id", ["A8", "A9"])
def test_weights_that_are_not_repacked_are_fixed(folder, monkeypatch, bug_id):
    monkeypatch.setattr("bitsandbytes.nn.modules._convert_weight_packed_for_cpu", lambda weight, state: (weight, state))
    seen = seen_by(bug_id, Kit(folder))
    if seen.state == NOT_APPLICABLE:
        pytest.skip(seen.evidence)
    assert seen.state == FIXED, seen.evidence


def test_options_that_reach_accelerate_are_fixed(folder, monkeypatch):
    import peft.peft_model

    class PassingKit(Kit):
        def peft(self, model, adapter, *, offload_buffers=None, ephemeral_gpu_offload=None, **kwargs):
            if offload_buffers is None:
                return None  # the base's own folder would be used
            watched = peft.peft_model.dispatch_model
            monkeypatch.setattr(
                peft.peft_model, "dispatch_model", lambda *a, **k: watched(*a, offload_buffers=offload_buffers, **k)
            )
            return super().peft(model, adapter, **kwargs)

    assert seen_by("B7", PassingKit(folder)).state == FIXED


def test_input_moved_to_the_matrices_is_fixed(folder, monkeypatch):
    from peft.tuners.lora import Linear

    forward = Linear.forward

    def moved(self, x, *args, **kwargs):
        for matrix in (*self.lora_A.values(), *self.lora_B.values()):
            matrix.weight = nn.Parameter(matrix.weight.to(x.device), requires_grad=False)
        return forward(self, x, *args, **kwargs)

    monkeypatch.setattr(Linear, "forward", moved)
    assert seen_by("B8", Kit(folder)).state == FIXED


def test_lora_of_an_offloaded_layer_with_a_hook_is_fixed(folder):
    class HookedKit(Kit):
        def load(self, path, **kwargs):
            from accelerate.hooks import AlignDevicesHook, add_hook_to_module

            model = super().load(path, **kwargs)
            native = model.load_adapter

            def load_adapter(*args, **named):
                native(*args, **named)
                for name, module in model.named_modules():
                    if name.endswith("lora_A.default"):
                        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))

            model.load_adapter = load_adapter
            return model

    assert seen_by("B9", HookedKit(folder)).state == FIXED
