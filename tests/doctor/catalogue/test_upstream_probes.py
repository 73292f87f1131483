"""Whether a probe of the catalogue can say both: "fixed" where the trouble is taken away, and nothing of what is not its own.

What a bug needs (a split, a quantized layer, a family) is taken from the tiny models; PEFT's dispatch, where it is the bug, is
replaced by transformers' own load_adapter, which keeps the map. The states that each release must give are in tests/upstream.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from tests.upstream.expected import SETS, set_of
from trimtab.doctor.catalogue import read_catalogue
from trimtab.doctor.facts.bug import FIXED, NOT_APPLICABLE, PRESENT, Seen
from trimtab.doctor.facts.probe_kit import Kit, quiet

PROBES = {entry.bug.id: entry.probe for entry in read_catalogue()}
# What these need is a split model or a quantized one.
NEED_SPLIT_OR_QUANTIZED = ("C1", "C2", "C3", "C4", "C7", "D2", "D4", "F1", "F5", "G1", "H1", "H2", "H4", "I4", "I10")
NEED_GEMMA4 = ("D1", "D3", "I7")
NEVER_LOAD = (
    "A8", "A9", "B8", "C6", "C8", "D5", "E4", "F3", "F4", "G2", "I1", "I7", "I9", "I11", "I12", "I13", "I14", "I15", "I16",
    "I17", "I18", "I19", "I20", "I21", "I22", "I23", "I24", "I25",
)  # fmt: skip


class WholeKit(Kit):
    """Nothing is split or quantized."""

    def load(self, path: Path, *, device_map: Any = None, quant: str = "none", **kwargs: Any) -> Any:
        kwargs.pop("quantization_config", None)
        return super().load(path, **kwargs)

    def peft(self, model: Any, adapter: Path, **kwargs: Any) -> Any:
        kwargs.pop("device_map", None)
        return super().peft(model, adapter, **kwargs)


class UnquantizedKit(Kit):
    """Loads every model unquantized."""

    def load(self, path: Path, *, quant: str = "none", **kwargs: Any) -> Any:
        return super().load(path, **kwargs)


class NativeKit(Kit):
    """Loads adapters as transformers does: nothing is dispatched again, and options of PEFT mean nothing."""

    def peft(self, model: Any, adapter: Path, **kwargs: Any) -> Any:
        model.load_adapter(str(adapter))
        return model.eval()


class LlamaKit(Kit):
    """Every family is Llama, which has no towers and no per-layer widths."""

    def checkpoint(self, name: str = "gemma4", **text: Any) -> Path:
        return super().checkpoint("llama", **text)


class BrokenKit(Kit):
    """Loading fails with an error that is no known bug."""

    error: type[Exception] = RuntimeError

    def load(self, path: Path, **kwargs: Any) -> Any:
        raise self.error("the kit itself is broken")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("probes")


def probe(bug_id: str, kit: Kit) -> Seen:
    with quiet():
        seen = PROBES[bug_id](kit)
    assert isinstance(seen, Seen)
    return seen


@pytest.mark.parametrize(("bug_id", "kit"), [
    *((f"A{number}", UnquantizedKit) for number in range(1, 8)), *((f"B{number}", NativeKit) for number in range(1, 7)),
    *((one, WholeKit) for one in NEED_SPLIT_OR_QUANTIZED), *((one, LlamaKit) for one in NEED_GEMMA4),
])  # fmt: skip
def test_without_what_a_bug_needs_the_probe_says_fixed(bug_id, kit, folder):
    seen = probe(bug_id, kit(folder))
    assert seen.state == FIXED, seen.evidence


@pytest.mark.parametrize("bug_id", [bug_id for bug_id in PROBES if bug_id not in NEVER_LOAD])
def test_an_error_of_the_probe_itself_is_not_taken_for_the_bug(bug_id, folder):
    for error in (RuntimeError, ValueError, TypeError, AttributeError, KeyError, AssertionError, ImportError):
        kit = BrokenKit(folder)
        kit.error = error
        with pytest.raises(error, match="the kit itself is broken"):
            probe(bug_id, kit)


def test_a_device_map_key_that_upstream_refuses_is_fixed(folder, monkeypatch):
    import accelerate.big_modeling

    def refuse(model: Any, device_map: dict[str, Any]) -> None:
        raise ValueError(f"no such modules: {list(device_map)}")

    monkeypatch.setattr(accelerate.big_modeling, "check_device_map", refuse)
    seen = probe("C5", Kit(folder))
    assert seen.state == FIXED and "model.multi_modal_projector" in seen.evidence


def test_a_map_that_compares_whole_names_is_fixed(folder, monkeypatch):
    from transformers.integrations import accelerate as integration

    def expand(device_map: dict[str, Any], names: list[str]) -> dict[str, Any]:
        found = {}
        for name in names:
            under = [key for key in device_map if key == "" or f"{name}.".startswith(f"{key}.")]
            found[name] = device_map[max(under, key=len)]
        return found

    monkeypatch.setattr(integration, "expand_device_map", expand)
    assert probe("C6", Kit(folder)).state == FIXED


def test_a_map_that_never_splits_a_layer_is_fixed(folder, monkeypatch):
    import accelerate

    own = accelerate.infer_auto_device_map

    def whole_layers(model: Any, **kwargs: Any) -> Any:
        return own(model, no_split_module_classes=list(model._no_split_modules), **kwargs)

    monkeypatch.setattr(accelerate, "infer_auto_device_map", whole_layers)
    assert probe("C8", Kit(folder)).state == FIXED


@pytest.mark.parametrize(
    "bug_id, message", [("E1", "missing adapter keys"), ("E2", "missing adapter keys"), ("E3", "v_proj was not expected")]
)
def test_an_adapter_file_that_peft_refuses_is_fixed(bug_id, message, folder, monkeypatch):
    kit = Kit(folder)
    seen = probe(bug_id, kit)  # writes its adapter with the real PEFT
    assert seen.state == PRESENT

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(message)

    monkeypatch.setattr(kit, "peft", refuse)
    seen = probe(bug_id, kit)
    assert (seen.state, seen.evidence) == (FIXED, f"refused: RuntimeError: {message}")


def test_the_streamer_is_fixed_where_no_device_waits_and_present_where_the_cpu_does(folder, monkeypatch):
    from transformers.generation import utils

    if not hasattr(utils, "DeferredStopCheck"):
        assert probe("I8", Kit(folder)).state == FIXED
        return
    monkeypatch.setattr(utils.DeferredStopCheck, "is_supported", staticmethod(lambda *args, **kwargs: False))
    assert probe("I8", Kit(folder)).state == FIXED
    own = utils.StopCheck.__call__

    def late(self: Any, unfinished: Any, tokens: Any, length: int) -> bool:
        held, self.held = getattr(self, "held", None), tokens
        return own(self, unfinished, held, length) if held is not None else False

    monkeypatch.setattr(utils.StopCheck, "__call__", late)
    seen = probe("I8", Kit(folder))
    assert (seen.state, "1 step(s) late" in seen.evidence) == (PRESENT, True)


@pytest.mark.parametrize(("counts_in_rows", "capability", "system", "state"), [
    (True, "AVX512", "posix", PRESENT), (False, "AVX512", "posix", FIXED), (False, "AVX2", "posix", NOT_APPLICABLE),
    (False, "AVX512", "nt", NOT_APPLICABLE),
])  # fmt: skip
def test_scales_of_rows_are_judged_by_what_is_unpacked(counts_in_rows, capability, system, state, folder, monkeypatch):
    functional = pytest.importorskip("bitsandbytes.functional")
    import torch

    def unpack(packed: Any, quant_state: Any) -> Any:
        rows, width = quant_state.shape
        at = torch.arange(rows * width)
        row, column, size = at // width, at % width, quant_state.blocksize
        block = row * (width // size) + column // size if counts_in_rows else at // size
        codes = torch.stack((packed.flatten() >> 4, packed.flatten() & 15), dim=1).flatten().long()
        return (quant_state.code[codes] * quant_state.absmax[block]).view(rows, width)

    monkeypatch.setattr(functional, "dequantize_4bit", unpack)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setitem(PROBES["I16"].__globals__, "os", type("FakeOs", (), {"name": system}))
    seen = probe("I16", Kit(folder))
    assert (seen.state, seen.evidence.endswith(", 0 as one row")) == (state, True)


@pytest.mark.parametrize(
    ("releases", "takes", "state"), [(True, 3, PRESENT), (False, 3, FIXED), (True, 2, PRESENT), (False, 1, NOT_APPLICABLE)]
)
def test_references_that_a_snapshot_releases_are_counted_and_given_back(releases, takes, state, folder, monkeypatch):
    import ctypes

    import torch

    def snapshot(asked: Any) -> Any:
        if len(asked) != takes:
            raise RuntimeError("mempool_id must be a tuple of other integers")
        if releases:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(asked[1]))
        return {"segments": []}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_memorySnapshot", snapshot, raising=False)
    for _ in range(20):
        assert probe("I17", Kit(folder)).state == state


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_processor_that_loads_without_torchvision_is_fixed(folder, monkeypatch):
    import transformers

    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", lambda path: object())
    assert probe("I9", Kit(folder)).state == FIXED


def test_a_probe_of_other_hardware_says_why_it_does_not_apply(folder, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    seen = probe("D5", Kit(folder))
    assert (seen.state, "no GPU here" in seen.evidence) == (NOT_APPLICABLE, True)
    monkeypatch.setattr(Kit, "version", lambda self, package: None)
    seen = probe("F3", Kit(folder))
    assert (seen.state, "torchao" in seen.evidence) == (NOT_APPLICABLE, True)


def test_the_limits_of_another_quantizer_are_named_with_their_place(folder, monkeypatch):
    monkeypatch.setattr(Kit, "version", lambda self, package: "1.0" if package == "hqq" else None)
    seen = probe("F3", Kit(folder))
    assert seen.state == PRESENT
    assert "hqq checks maps for cpu and disk (transformers/quantizers/quantizer_hqq.py:" in seen.evidence


def test_lora_on_shared_experts_is_seen_on_the_routed_ones(folder):
    kit = Kit(folder)
    if set_of({name: kit.version(name) for name in SETS["newest"]}) != "newest":
        pytest.skip("the entry is of the newest releases")
    seen = probe("I24", kit)
    assert (seen.state, ".mlp.experts.lora_A." in seen.evidence) == (PRESENT, True)


def test_windows_is_read_in_the_installed_source(folder, monkeypatch):
    monkeypatch.setitem(PROBES["G2"].__globals__, "os", type("FakeOs", (), {"name": "nt"}))
    seen = probe("G2", Kit(folder))
    assert (seen.state, "peft/peft_model.py:" in seen.evidence) == (PRESENT, True)
    monkeypatch.setitem(PROBES["G2"].__globals__, "installed_source", lambda *_: None)
    assert probe("G2", Kit(folder)).state == FIXED


@pytest.mark.parametrize("bug_id", ["A8", "A9"])
def test_weights_that_are_not_repacked_are_fixed(folder, monkeypatch, bug_id):
    monkeypatch.setattr("bitsandbytes.nn.modules._convert_weight_packed_for_cpu", lambda weight, state: (weight, state))
    seen = probe(bug_id, Kit(folder))
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

    assert probe("B7", PassingKit(folder)).state == FIXED


def test_input_moved_to_the_matrices_is_fixed(folder, monkeypatch):
    from peft.tuners.lora import Linear

    forward = Linear.forward

    def moved(self, x, *args, **kwargs):
        for matrix in (*self.lora_A.values(), *self.lora_B.values()):
            matrix.weight = nn.Parameter(matrix.weight.to(x.device), requires_grad=False)
        return forward(self, x, *args, **kwargs)

    monkeypatch.setattr(Linear, "forward", moved)
    assert probe("B8", Kit(folder)).state == FIXED


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

    assert probe("B9", HookedKit(folder)).state == FIXED


def test_an_attribute_that_a_configuration_does_not_have_is_fixed(folder, monkeypatch):
    """Its cause says so: AttributeError lets `getattr` give its default."""
    import transformers

    bare = SimpleNamespace(get_text_config=SimpleNamespace)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_: bare)
    assert probe("I7", LlamaKit(folder)) == Seen(FIXED, "getattr gives None")
