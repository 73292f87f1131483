"""The probe: what it says of a checkpoint is what transformers' own from_pretrained makes of it, bit for bit."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import initialization

from tests import pico, stock
from tests.long_runs import crossed
from tests.raised import raised
from trimtab.checkpoint.folder import read_checkpoint
from trimtab.demo.demo import FOLDER
from trimtab.engine.loader import processor as hf_processor
from trimtab.engine.loader import transformers_model
from trimtab.engine.loader.tracing import Traced
from trimtab.engine.tiers.reader import read_small
from trimtab.errors import CheckpointError, RequestError
from trimtab.formats.packed import split_packed

pytestmark = pytest.mark.usefixtures("no_kept_anatomies")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    return cache(lambda family: pico.build(family, folder / family))


def edited(folder: Path, change) -> Path:
    """Apply a change to the tensors of a one-file checkpoint."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def configured(folder: Path, **values: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({k: v for k, v in (json.loads(file.read_text()) | values).items() if v is not ...}))
    return folder


def load_reference(folder: Path, dtype: str = "bfloat16") -> tuple[Any, dict[str, Any]]:
    config = transformers.AutoConfig.from_pretrained(folder)
    found = getattr(transformers, config.architectures[0])
    return found.from_pretrained(folder, dtype=getattr(torch, dtype), output_loading_info=True)


def tensors_of(model: Any) -> dict[str, Tensor]:
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return dict(named)


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def groups(named) -> list[list[str]]:
    found: dict[int, list[str]] = {}
    for name, value in named:
        found.setdefault(id(value), []).append(name)
    return sorted(names for names in found.values() if len(names) > 1)


def check_equal(folder: Path, dtype: str = "bfloat16") -> transformers_model.Probe:
    """Compare the probe of a folder with stock's model of it, and return the probe."""
    checkpoint = read_checkpoint(folder)
    probe = transformers_model.probe(checkpoint, dtype)
    reference, info = load_reference(folder, dtype)
    expected, found = tensors_of(reference), tensors_of(probe.model)
    assert list(found) == list(expected)
    assert type(probe.model) is type(reference) and not probe.model.training
    for name, tensor in expected.items():
        source = probe.sources.get(name)
        made = found[name] if source is None else source.replay(lambda n: read_small({n: checkpoint.tensors[n]})[n])
        assert (source is not None) == isinstance(found[name], Traced), name
        facts = [(t.dtype, t.shape, t.stride()) for t in (made, tensor)]
        assert facts[0] == facts[1], name
        assert torch.equal(bits(made), bits(tensor)), name
    assert groups(probe.model.named_parameters(remove_duplicate=False)) == groups(
        reference.named_parameters(remove_duplicate=False)
    )
    assert list(probe.model.state_dict()) == list(reference.state_dict())
    assert probe.config.to_dict() == reference.config.to_dict()
    assert probe.model.generation_config.to_dict() == reference.generation_config.to_dict()
    assert set(probe.unexpected) == set(info["unexpected_keys"])
    return probe


# Equal to stock -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", pico.FAMILIES)
def test_every_family_is_what_stock_loads(family, built):
    probe = check_equal(built(family))
    assert probe.missing == () and probe.unexpected == () and probe.sources


@pytest.mark.parametrize(
    ("family", "dtype"), crossed(["gemma4", "gemma3", "mixtral"], ["float16", "float32"], first=["gemma4"], rest=1)
)
def test_a_cast_is_what_stock_casts(family, dtype, built):
    assert not any(source.is_leaf for source in check_equal(built(family), dtype).sources.values())


@pytest.mark.parametrize("family", ["gemma4", "qwen3_moe"])
def test_a_float32_file_is_cast_to_the_model(family, tmp_path):
    check_equal(pico.build(family, tmp_path, dtype="float32"))


@pytest.mark.parametrize("family", ["gemma4", "mixtral"])
def test_shards_are_one_checkpoint(family, tmp_path):
    folder = pico.build(family, tmp_path, shards=3)
    assert len(read_checkpoint(folder).files) >= 3
    check_equal(folder)


def test_names_of_the_base_model_alone_are_found(tmp_path):
    def strip(tensors):
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    check_equal(edited(pico.build("llama", tmp_path), strip))


def test_without_a_generation_config_stock_reads_the_model_config(tmp_path):
    folder = pico.build("llama", tmp_path)
    (folder / "generation_config.json").unlink()
    check_equal(folder)
    configured(folder, top_k=7)
    assert transformers_model.probe(read_checkpoint(folder)).model.generation_config.to_dict() == (
        load_reference(folder)[0].generation_config.to_dict()
    )


def test_the_model_knows_where_it_came_from(built):
    probe = transformers_model.probe(read_checkpoint(built("llama")))
    assert probe.model.name_or_path == probe.config._name_or_path == str(built("llama"))


# Ties -----------------------------------------------------------------------------------------------------------------


def test_a_head_that_alone_is_in_the_file_owns_the_embedding(tmp_path):
    folder = edited(pico.build("qwen3", tmp_path), lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    probe = check_equal(folder)
    assert probe.sources["model.embed_tokens.weight"].leaves == ("lm_head.weight",)
    assert probe.ties == {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.mark.parametrize(("factor", "ties"), [(1, {"lm_head.weight": "model.embed_tokens.weight"}), (2, {})])
def test_two_stored_ends_of_a_tie_are_tied_only_if_equal(tmp_path, factor, ties):
    folder = edited(pico.build("qwen3", tmp_path), lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] * factor}))
    assert check_equal(folder).ties == ties


# Missing, unexpected, wrong -------------------------------------------------------------------------------------------


def test_missing_tensors_are_refused_all_of_them_by_name(tmp_path):
    lost = ["model.layers.0.mlp.down_proj.weight", "model.layers.1.input_layernorm.weight", "model.norm.weight"]
    folder = edited(pico.build("llama", tmp_path), lambda t: [t.pop(name) for name in lost])
    error = raised(CheckpointError, lambda: transformers_model.probe(read_checkpoint(folder)))
    assert error.path == str(folder)
    assert f"3 tensors of LlamaForCausalLM are missing: {', '.join(lost)}." in str(error)


def test_one_missing_tensor_is_the_error_s_tensor(tmp_path):
    folder = edited(pico.build("llama", tmp_path), lambda t: t.pop("model.norm.weight"))
    assert raised(CheckpointError, lambda: transformers_model.probe(read_checkpoint(folder))).tensor_name == "model.norm.weight"


def test_one_expert_of_a_fused_weight_that_is_missing_is_refused(tmp_path):
    folder = edited(pico.build("mixtral", tmp_path), lambda t: t.pop(next(n for n in t if ".experts.2.w1" in n)))
    error = raised(CheckpointError, lambda: transformers_model.probe(read_checkpoint(folder)))
    assert "cat on " in str(error) or "another shape" in str(error)


def test_missing_tensors_are_never_allocated(tmp_path):
    """10 GB of weights that no file has: the refusal makes the process grow by less than a tenth of that."""
    resource = pytest.importorskip("resource")
    folder = pico.e_series("e2b", tmp_path)
    save_file({"model.language_model.norm.weight": torch.zeros(1536)}, folder / "model.safetensors")
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
    with pytest.raises(CheckpointError, match="tensors of Gemma4ForConditionalGeneration are missing: "):
        transformers_model.probe(read_checkpoint(folder))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes - before < 2**30


def test_missing_clip_bounds_keep_stock_s_initial_value(tmp_path):
    lost = ["model.vision_tower.encoder.layers.0.self_attn.q_proj.input_max", "model.language_model.layers.0.layer_scalar"]
    folder = edited(pico.build("gemma4", tmp_path), lambda t: [t.pop(name) for name in lost])
    probe = check_equal(folder)
    assert probe.missing == tuple(sorted(lost)) and probe.model.get_buffer(lost[0]).item() == float("inf")
    assert probe.model.get_buffer(lost[1]).item() == 1


@pytest.mark.parametrize(("family", "name", "is_known"), [
    ("llama", "model.layers.9.more", False), ("gemma4", "model.language_model.layers.4.self_attn.k_proj.weight", True),
])  # fmt: skip
def test_an_extra_tensor_is_reported_but_for_projections_of_kv_shared_layers(tmp_path, family, name, is_known):
    folder = edited(pico.build(family, tmp_path), lambda t: t.update({name: torch.zeros(128, 64)}))
    assert check_equal(folder).unexpected == (() if is_known else (name,))


def test_a_wrong_shape_is_refused_with_both(tmp_path):
    folder = edited(pico.build("llama", tmp_path), lambda t: t.update({"model.norm.weight": torch.zeros(32)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is \[32\], the model's is \[64\]"):
        transformers_model.probe(read_checkpoint(folder))


# What cannot be followed ----------------------------------------------------------------------------------------------


def planted(monkeypatch, change) -> None:
    """Make the Llama class one that does something else at the end of its constructor.

    Where `transformers_model` looks it up: the first import of transformers.processing_utils puts a second `transformers` into
    sys.modules (its direct_transformers_import runs the package again), so that this file's may be another one.
    """

    class LlamaForCausalLM(transformers.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            change(self)

    monkeypatch.setattr(transformers_model.transformers, "LlamaForCausalLM", LlamaForCausalLM)


def test_an_operation_in_place_while_loading_is_refused(built, monkeypatch):
    class LlamaForCausalLM(transformers.LlamaForCausalLM):
        def tie_weights(self, *args, **kwargs):
            super().tie_weights(*args, **kwargs)
            if isinstance(self.model.norm.weight, Traced):
                self.model.norm.weight.mul_(2)

    monkeypatch.setattr(transformers_model.transformers, "LlamaForCausalLM", LlamaForCausalLM)
    with pytest.raises(CheckpointError, match=r"mul_ on model\.norm\.weight: it writes in place"):
        transformers_model.probe(read_checkpoint(built("llama")))


def test_a_buffer_that_nothing_computes_is_refused(built, monkeypatch):
    planted(monkeypatch, lambda model: model.register_buffer("scales", torch.empty(3), persistent=False))
    error = raised(
        CheckpointError, lambda: transformers_model.probe(read_checkpoint(built("llama"))), match="without assigning a value"
    )
    assert error.tensor_name == "scales"


def test_a_tensor_that_the_loader_leaves_without_data_is_refused(built, monkeypatch):
    class LlamaForCausalLM(transformers.LlamaForCausalLM):
        def tie_weights(self, *args, **kwargs):
            super().tie_weights(*args, **kwargs)
            self.model.norm.weight = nn.Parameter(torch.empty(64, device="meta"))

    monkeypatch.setattr(transformers_model.transformers, "LlamaForCausalLM", LlamaForCausalLM)
    error = raised(CheckpointError, lambda: transformers_model.probe(read_checkpoint(built("llama"))), match="cannot be traced")
    assert error.tensor_name == "model.norm.weight"


# Configs --------------------------------------------------------------------------------------------------------------


def test_an_unknown_model_type_is_refused_by_name(tmp_path):
    folder = configured(pico.build("llama", tmp_path), model_type="llama9", architectures=["Llama9ForCausalLM"])
    error = raised(CheckpointError, lambda: transformers_model.read_config(read_checkpoint(folder)))
    for words in ("'llama9'", "Llama9ForCausalLM", transformers.__version__):
        assert words in str(error)


def test_an_unknown_class_of_a_known_model_type_is_refused_by_name(tmp_path):
    folder = configured(pico.build("llama", tmp_path), architectures=["LlamaForEverything"])
    error = raised(CheckpointError, lambda: transformers_model.probe(read_checkpoint(folder)))
    assert "LlamaForEverything" in str(error) and transformers.__version__ in str(error)


def test_code_of_the_checkpoint_is_never_run(tmp_path):
    folder = pico.build("llama", tmp_path / "model")
    for name in ("configuration_own", "modeling_own"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').write('x')\n")
    own = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    configured(folder, model_type="own", architectures=["OwnModel"], auto_map=own)
    with pytest.raises(CheckpointError, match=r"auto_map.*never run"):
        transformers_model.probe(read_checkpoint(folder))
    assert not (tmp_path / "ran").exists()


def test_a_value_that_the_config_class_refuses_names_the_value(tmp_path):
    folder = configured(pico.build("gemma4", tmp_path), image_token_id="three")
    with pytest.raises(CheckpointError, match=r"config\.json is refused.*image_token_id"):
        transformers_model.read_config(read_checkpoint(folder))


def test_without_architectures_the_class_follows_from_the_config(tmp_path):
    folder = configured(pico.build("llama", tmp_path), architectures=...)
    assert type(transformers_model.probe(read_checkpoint(folder)).model) is transformers.LlamaForCausalLM


def test_another_quantization_is_refused_by_name(tmp_path):
    folder = configured(pico.build("llama", tmp_path), quantization_config={"quant_method": "exl3", "bits": 4})
    with pytest.raises(CheckpointError, match="EXL3"):
        transformers_model.probe(read_checkpoint(folder))


def test_a_quantization_config_is_taken_out_of_the_config_and_its_parts(tmp_path):
    bnb = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    folder = pico.build("gemma3", tmp_path)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    configured(folder, quantization_config=bnb, text_config=text | {"quantization_config": bnb})
    config = transformers_model.read_config(read_checkpoint(folder))
    assert not hasattr(config, "quantization_config") and not hasattr(config.text_config, "quantization_config")


# The process ----------------------------------------------------------------------------------------------------------


def test_the_process_is_as_before(built, capfd):
    logging = transformers.utils.logging
    before = (torch.get_default_dtype(), logging.get_verbosity(), logging.is_progress_bar_enabled())
    checkpoint = read_checkpoint(built("gemma4"))
    capfd.readouterr()  # of the first test that builds it
    transformers_model.probe(checkpoint)
    assert (torch.get_default_dtype(), logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert not torch.empty_like(torch.empty(2, device="meta"), device="cpu").is_meta
    assert "".join(capfd.readouterr()) == ""


def test_probes_of_two_threads_do_not_mix(built):
    checkpoints = [read_checkpoint(built(family)) for family in ("llama", "qwen3")]
    found: dict[int, transformers_model.Probe] = {}

    def work(place: int) -> None:
        found[place] = transformers_model.probe(checkpoints[place % 2], "bfloat16" if place % 2 else "float16")

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[place].model.dtype for place in range(4)] == [torch.float16, torch.bfloat16] * 2
    assert [type(found[place].model).__name__ for place in range(2)] == ["LlamaForCausalLM", "Qwen3ForCausalLM"]


def test_a_probe_starts_no_thread_and_fills_no_parameter(built, tmp_path, monkeypatch):
    """Tensors without data have nothing to read in parallel, and random numbers for them go nowhere."""
    filled = []

    def refuse(thread):
        raise AssertionError(f"{thread} is started")

    (tmp_path / "config.json").write_text((built("llama") / "config.json").read_text())
    monkeypatch.setattr(threading.Thread, "start", refuse)
    for name in ("normal_", "ones_", "zeros_"):
        monkeypatch.setitem(initialization.TORCH_INIT_FUNCTIONS, name, lambda *a, **k: filled.append(a))
    for folder in (built("llama"), tmp_path):
        transformers_model.probe(read_checkpoint(folder))
    assert not filled
    assert transformers_model.NO_THREADS not in os.environ


def test_declared_shapes_are_those_of_the_files(built, tmp_path):
    for family in ("gemma4", "mixtral"):
        folder = tmp_path / family
        folder.mkdir()
        (folder / "config.json").write_text((built(family) / "config.json").read_text())
        declared, real = transformers_model.probe(read_checkpoint(folder)), transformers_model.probe(read_checkpoint(built(family)))
        sizes = [{n: (t.shape, t.dtype) for n, t in tensors_of(p.model).items()} for p in (declared, real)]
        assert sizes[0] == sizes[1]
        assert declared.ties == real.ties and set(declared.sources) == set(real.sources)


# bitsandbytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", crossed(pico.FAMILIES))  # the rows of every family: tests/checkpoint/test_anatomy.py
def test_the_linears_left_alone_are_stock_s(family, built):
    reference = stock.load_stock(built(family), "nf4")
    converted = {path for path, module in reference.named_modules() if type(module).__name__ == "Linear4bit"}
    model = transformers_model.probe(read_checkpoint(built(family))).model
    left = transformers_model.stock_unquantized(model, "nf4")
    linears = {path for path, module in model.named_modules() if type(module) is nn.Linear}
    assert linears - set(left) == converted and all(left.values())
    assert transformers_model.stock_unquantized(model, "none") == {}


def test_int8_leaves_the_same_linears_alone(built):
    reference = stock.load_stock(built("gemma4"), "int8")
    converted = {path for path, module in reference.named_modules() if type(module).__name__ == "Linear8bitLt"}
    model = transformers_model.probe(read_checkpoint(built("gemma4"))).model
    linears = {path for path, module in model.named_modules() if type(module) is nn.Linear}
    assert linears - set(transformers_model.stock_unquantized(model, "int8")) == converted


def test_two_different_ends_of_a_tie_are_both_left_alone(tmp_path):
    folder = edited(pico.build("qwen3", tmp_path), lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] * 2}))
    assert set(transformers_model.stock_unquantized(transformers_model.probe(read_checkpoint(folder)).model, "nf4")) == {"lm_head"}


@pytest.mark.parametrize("quant", ["nf4", "nf4-dq", "int8"])
def test_packed_weights_are_leaves_of_their_logical_shape(quant, built, tmp_path):
    stock.load_stock(built("gemma3"), quant).save_pretrained(tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    packed = split_packed(checkpoint)[1]
    probe, plain = transformers_model.probe(checkpoint), transformers_model.probe(read_checkpoint(built("gemma3")))
    assert len(packed) > 20
    assert probe.unexpected == ()
    leaves = {name: source.leaves[0] for name, source in probe.sources.items() if source.leaves[0] in packed}
    assert sorted(leaves.values()) == sorted(packed) and all(probe.sources[name].is_leaf for name in leaves)
    for name, tensor in tensors_of(probe.model).items():
        assert tensor.shape == tensors_of(plain.model)[name].shape and tensor.dtype == tensors_of(plain.model)[name].dtype


# Processors -----------------------------------------------------------------------------------------------------------


def test_a_folder_without_a_tokenizer_or_processor_says_so(built, tmp_path):
    for load, what in ((transformers_model.load_tokenizer, "tokenizer"), (transformers_model.load_processor, "processor")):
        error = raised(CheckpointError, load, built("gemma4"), match="has no tokenizer files")
        assert error.path == str(built("gemma4"))
        broken = pico.build("gemma4", tmp_path / what)
        (broken / "tokenizer.json").write_text("{")
        with pytest.raises(CheckpointError, match=f"has no usable {what} "):
            load(broken)


def test_a_broken_generation_config_is_refused(tmp_path):
    folder = pico.build("llama", tmp_path)
    (folder / "generation_config.json").write_text("{")
    assert raised(CheckpointError, transformers_model.read_generation_config, folder).path.endswith("generation_config.json")


class CountedTokenizer:
    """A tokenizer of 1,000 words that counts how often it computes its special ids."""

    def __init__(self):
        self.computed, self.added_tokens_decoder = 0, {}

    def get_vocab(self):
        return {f"word{number}": number for number in range(1000)}

    @property
    def all_special_ids(self):
        self.computed += 1
        return [0, 1, 2]


def test_special_ids_are_computed_once_not_for_each_token(tmp_path):
    tokenizer = CountedTokenizer()
    hf_processor.check_tokenizer(tokenizer, tmp_path, 1000)
    assert tokenizer.computed == 1


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed")
def test_without_torchvision_a_processor_reads_its_tokenizer_once(monkeypatch):
    """A vocabulary of 262,144 tokens takes seconds, and transformers asks for torchvision after it has read it."""
    base, loads = transformers.PreTrainedTokenizerBase, []
    read = base._from_pretrained.__func__
    counted = classmethod(lambda kind, *given, **named: (loads.append(kind), read(kind, *given, **named))[1])
    monkeypatch.setattr(base, "_from_pretrained", counted)
    processor = hf_processor.load_processor(FOLDER / "base")
    assert len(loads) == 1 and processor.tokenizer.vocab_size > 1000
    with pytest.raises(RequestError, match="videos need torchvision"):
        processor.video_processor("video")
