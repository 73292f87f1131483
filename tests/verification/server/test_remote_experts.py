"""A server that drops the part of an adapter on fused experts: named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import trimtab
from bench.planted import Both, Planted
from tests import pico
from tests.adapter_files import write_tensors
from tests.merging.changes.test_merge_experts import BOTH, stack_adapter
from tests.peers import tiny_llama
from trimtab.adapters.adapter import match_adapter, read_adapter
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.engine.loader.transformers_model import read_anatomy
from trimtab.verification.server.faults import write_faults
from trimtab.verification.server.verify import verify_remote

QUESTIONS = list(tiny_llama.QUESTIONS[:14])
FAMILY = "qwen3_moe"  # its files hold every expert's matrices apart, transformers fuses them


def build(folder):
    """Write the family's checkpoint with a tokenizer whose words alone can be said."""
    pico.build(FAMILY, folder, dtype="float32")
    tokenizer = tiny_llama.build_tokenizer(pico.VOCABULARY)
    tokenizer.save_pretrained(folder)
    words = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    is_word = torch.tensor([word.isascii() and word.isprintable() and not word.startswith("<|") for word in words])
    file = folder / "model.safetensors"
    tensors = load_file(str(file))
    head = torch.randn(tensors["lm_head.weight"].shape, generator=torch.Generator().manual_seed(0))
    head[: len(words)][~is_word] = 0
    head[len(words) :] = 0
    tensors["lm_head.weight"] = head
    save_file(tensors, str(file), metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return build(tmp_path_factory.mktemp("experts") / "base")


@pytest.fixture(scope="module")
def adapter(base):
    return stack_adapter(base, base.parent / "adapter", BOTH)


@pytest.fixture(scope="module")
def faults(base, adapter):
    spec = match_adapter(read_adapter(adapter), read_anatomy(read_checkpoint(base), quant="none", dtype="float32"))
    return write_faults(spec, base.parent / "faults", {})


def merged(base, adapter, name):
    """Load the base with an adapter merged into it, as a server that applies it right would answer."""
    out = base.parent / f"merged-{name}"
    trimtab.merge(base, out, adapters={"a": adapter})
    return load(out)


def load(folder):
    return trimtab.load(trimtab.plan(folder, quant="none", context=256), decode="eager")


def ask(base, adapter, model):
    with load(base) as plain:
        both = Both(Planted(model, {"m": None}), Planted(plain, {"b": None}))
        return verify_remote(
            base, adapters={"mine": adapter}, against="http://host/v1", remote_model="m", remote_base="b", quant="none",
            prompts=QUESTIONS, send_prompts=True, transport=both.transport(),
        )  # fmt: skip


def test_faults_of_an_adapter_on_experts_are_planted(faults):
    assert {"ignored", "scale", "expert part dropped", "one module dropped"} <= {fault.name for fault in faults[0]}


def test_an_adapter_on_experts_that_is_applied_whole_is_alive(base, adapter):
    with merged(base, adapter, "right") as model:
        report = ask(base, adapter, model)
    assert report.verdict.word == "alive", str(report)
    assert "expert part dropped" in report.verdict.excluded
    assert next(one.size for one in report.verdict.weighed if one.name == "expert part dropped") > 0.05


def test_a_fault_of_the_part_on_experts_is_named(base, adapter, faults):
    name = "expert part dropped"
    folder = next(fault.folder for fault in faults[0] if fault.name == name)
    with merged(base, folder, name.replace(" ", "-")) as model:
        report = ask(base, adapter, model)
    assert (report.verdict.word, report.verdict.fault) == ("wrong", name), str(report)


def by_expert(adapter, folder):
    """Write the adapter with a pair for each layer of each expert, as vLLM reads them."""
    tensors, found = load_file(str(adapter / "adapter_model.safetensors")), {}
    for name, value in tensors.items():
        head, mark, tail = name.partition(".experts.")
        if not mark:
            found[name] = value
            continue
        role = "A" if "lora_A" in tail else "B"
        rank = 3
        each = value.reshape(-1, rank, value.shape[1]) if role == "A" else value.reshape(len(value), rank, -1).permute(2, 0, 1)
        layers = ("gate_proj", "up_proj") if "base_layer" in tail else ("down_proj",)
        for expert, matrix in enumerate(each):
            parts = matrix.chunk(len(layers)) if role == "B" else [matrix] * len(layers)
            for layer, part in zip(layers, parts, strict=True):
                found[f"{head}.experts.{expert}.{layer}.lora_{role}.weight"] = part.clone()
    config = json.loads((adapter / "adapter_config.json").read_text("utf-8"))
    config |= {"target_parameters": None, "target_modules": [*config["target_modules"], "gate_proj", "up_proj", "down_proj"]}
    return write_tensors(folder, found, config)


def test_faults_of_pairs_of_single_experts_are_planted(base, adapter, faults, tmp_path):
    """The same faults as of the stacks' pairs, each an adapter that is read again."""
    anatomy = read_anatomy(read_checkpoint(base), quant="none", dtype="float32")
    spec = match_adapter(read_adapter(by_expert(adapter, tmp_path / "single")), anatomy)
    planted, _ = write_faults(spec, tmp_path / "faults", {})
    assert [fault.name for fault in planted] == [fault.name for fault in faults[0]]
    for fault in planted:
        if fault.folder is not None:
            own = match_adapter(read_adapter(fault.folder), anatomy)
            assert any(target.kind == "experts" for target in own.targets) is (fault.name != "expert part dropped")


def test_the_dropped_part_is_the_adapter_without_its_experts(base, adapter, faults):
    folder = next(fault.folder for fault in faults[0] if fault.name == "expert part dropped")
    assert "target_parameters" not in json.loads((folder / "adapter_config.json").read_text("utf-8"))
    kept, whole = (load_file(str(one / "adapter_model.safetensors")) for one in (folder, adapter))
    assert kept and set(kept) == {name for name in whole if ".experts" not in name}
