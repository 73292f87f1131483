"""Does a Gemma 4 mobile model answer as transformers' own layers do, in every tier, with adapters on?"""

import itertools
import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import trimtab
from tests import mobile_files, pico, stock
from trimtab.engine.layers import leaves
from trimtab.errors import CheckpointError
from trimtab.stock import unsplit

pytest.importorskip("transformers.integrations.gemma_quant")
modeling_gemma4 = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")
# tier of the decoder -> placement, and where the rows of both tables are
TIERS = {
    "resident": ({"*": "resident"}, None), "stream": ({"language": "stream", "table": "gather"}, "host"),
    "disk": ({"language": "disk", "table": "gather"}, "file"), "host": ({"language": "host", "table": "gather"}, "host"),
}  # fmt: skip

VARIANTS = {"lora": {}, "dora": {"dora": True}, "rslora": {"rslora": True}, "saved": {"modules_to_save": ["norm"]}}


@pytest.fixture(scope="module", autouse=True)
def _factor_of_tables_is_rounded():
    """Tables have a factor that bfloat16 does not hold, as official models have: the square root of 64 hides its rounding."""
    kind = modeling_gemma4.Gemma4TextScaledWordEmbedding
    original = kind.__init__

    def made(self, count, width, padding, embed_scale=1.0):
        original(self, count, width, padding, embed_scale=embed_scale * 1.1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "__init__", made)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return mobile_files.write(pico.built("gemma4"), tmp_path_factory.mktemp("mobile"))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Return name -> an adapter on all parts."""
    root = tmp_path_factory.mktemp("adapters")
    return {name: pico.adapter(pico.built("gemma4"), root / name, targets="all", **more) for name, more in VARIANTS.items()}


@pytest.fixture(scope="module")
def adapter(adapters):
    return adapters["lora"]


def with_adapter(model, folder):
    """Add an adapter's change to a stock model by hooks of plain torch, as PEFT computes it: arXiv 2106.09685, 2402.09353."""
    tensors, settings = load_file(folder / "adapter_model.safetensors"), json.loads((folder / "adapter_config.json").read_text())
    scale = settings["lora_alpha"] / settings["r"] ** (0.5 if settings["use_rslora"] else 1)
    linear = torch.nn.functional.linear
    for name, A in tensors.items():
        path, _, role = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        if "lora" not in role:
            module = model.get_submodule(f"{path}.{role}")
            module.weight = torch.nn.Parameter(A.to(module.weight.dtype))
        if role != "lora_A":
            continue
        module, B = model.get_submodule(path), tensors[name.replace("lora_A", "lora_B")]
        magnitude = tensors.get(name.replace("lora_A.weight", "lora_magnitude_vector"))
        if magnitude is not None:
            weight = module.weight if type(module) is torch.nn.Linear else module._dequantize_weights(torch.bfloat16)
            magnitude = magnitude / torch.linalg.norm(weight.float() + linear(linear(torch.eye(A.shape[1]), A), B).T * scale, dim=1)

        def add(module, inputs, y, A=A, B=B, magnitude=magnitude):
            change = linear(linear(inputs[0].float(), A), B)
            if magnitude is None:
                return (y + change * scale).to(y.dtype)
            plain = y if getattr(module, "bias", None) is None else y - module.bias
            return (y + ((magnitude - 1) * plain + magnitude * change * scale)).to(y.dtype)

        module.register_forward_hook(add)
    return model


@pytest.fixture(scope="module")
def expected(folder, adapters):
    """The logits of transformers' own layers: without an adapter, and with each adapter's change."""
    model = mobile_files.stock(folder)
    given = pico.inputs("gemma4", model.config)
    found = {None: stock.logits(model, given)}
    found |= {name: stock.logits(with_adapter(mobile_files.stock(folder), one), given) for name, one in adapters.items()}
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(found.values(), 2))
    return given, found


def planned(folder, tier="resident", **options):
    """Return a plan with the rows of both tables where the tier says."""
    place, home = TIERS[tier]
    plan = trimtab.plan(folder, place=place, device="cpu", context=64, audio_s=1.0, **options)
    held = [one for one in plan.placements if "embed_tokens" in one.block_path]
    assert [one.tier for one in held] == [("resident" if home is None else "gather")] * 2
    rows = tuple(replace(one, home=home) if one in held and home else one for one in plan.placements)
    return replace(plan, placements=rows)


@pytest.mark.parametrize("tier", TIERS)
def test_logits_are_those_of_transformers_own_layers(folder, adapters, expected, tier):
    given, truth = expected
    with trimtab.load(planned(folder, tier, adapters=adapters)) as model:
        for name, logits in truth.items():
            model.adapter_store.set(name)
            assert torch.equal(stock.logits(model.hf_model, given), logits), name


def test_rows_in_host_memory_are_read_by_the_device(folder, expected, monkeypatch):
    """Packed tables too: a host that fetched the rows of each step would hold up the next one."""
    monkeypatch.setattr(leaves, "seen_by", lambda part, device: part)
    given, truth = expected
    with trimtab.load(planned(folder, "stream")) as model:
        found = [one for one in model.hf_model.modules() if isinstance(one, leaves.GatheredTable)]
        assert len(found) == 2 and all(one.stored is not None and not one.asks_host for one in found)
        for one in found:
            one.source.read = None  # nothing is fetched by the host
        assert torch.equal(stock.logits(model.hf_model, given), truth[None])


def test_a_plan_counts_the_bytes_of_the_file(folder):
    plan = planned(folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    packed = {name.rpartition(".")[0] for name in tensors if name.endswith(("weight_scale", "embedding_scale"))}
    stored = {name: t for name, t in tensors.items() if name.rpartition(".")[0] in packed}
    modules = [one for one in plan.unquantized if "linear" in one.module_path or "proj" in one.module_path]
    with trimtab.load(plan) as model:
        layers = [one for module in model.hf_model.modules() if (one := getattr(module, "stored", None)) and one.kind != "none"]
        held = sum(part.nbytes for one in layers for part in one.parts.values())
    assert held == sum(t.nbytes for t in stored.values()) and plan.gpu["weights"] == held + sum(one.bytes for one in modules)


def test_a_merge_is_the_sum_in_float64_rounded_once(folder, adapter, tmp_path):
    trimtab.merge(folder, tmp_path / "merged", adapters=adapter, check=True)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    sides = ("weight_scale", "activation_scale", "cache_scale", "embedding_scale", "_quantized")
    assert not [name for name in merged if name.endswith(sides)]
    assert "quantization_config" not in (tmp_path / "merged" / "config.json").read_text()
    lora = load_file(adapter / "adapter_model.safetensors")
    modules = dict(mobile_files.stock(folder).named_modules())
    for path in ("lm_head", "model.language_model.layers.0.mlp.up_proj", "model.language_model.embed_tokens",
                 "model.language_model.embed_tokens_per_layer", "model.audio_tower.layers.0.self_attn.q_proj.linear"):  # fmt: skip
        module, stem = modules[path], f"base_model.model.{path}.lora"
        is_table = "embed" in path
        scale = module.embedding_scale if is_table else module.weight_scale
        if is_table:
            q = module._dequantize_weights(module.embedding_quantized, scale.new_ones(scale.shape))
        else:
            q = (module._dequantize_weights(torch.float32) / scale).round()
        exact = q.double() * scale.double().repeat_interleave(q.shape[1] // scale.shape[1], 1)
        if f"{stem}_A.weight" in lora:
            exact += lora[f"{stem}_B.weight"].double() @ lora[f"{stem}_A.weight"].double() * 2
        assert bool(((merged[f"{path}.weight"].double() - exact).abs() <= 2**-8 * exact.abs() + 1e-12).all()), path


def test_the_stock_route_of_verify_is_transformers_own_model(folder, expected):
    given, truth = expected
    model = unsplit.load_unsplit(str(folder), "auto", "bfloat16", "cpu")
    assert torch.equal(stock.logits(model, given), truth[None]) and unsplit.dense_note(str(folder)) == []


def test_an_adapters_text_is_the_same_in_two_tiers(folder, adapter):
    texts = []
    for tier in ("resident", "disk"):
        with trimtab.load(planned(folder, tier, adapters={"one": adapter})) as model:
            texts.append(model.answer([5, 6, 7, 8], adapter="one", max_new_tokens=6).token_ids)
    assert texts[0] == texts[1]


def test_a_table_that_shares_its_weight_with_the_head_is_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "tied")
    (file,) = (tmp_path / "tied").glob("*.safetensors")
    save_file({name: t for name, t in load_file(file).items() if not name.startswith("lm_head")}, file, {"format": "pt"})
    config = json.loads((tmp_path / "tied" / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    (tmp_path / "tied" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="a quantized table that lm_head.weight shares") as caught:
        trimtab.plan(tmp_path / "tied", device="cpu")
    assert caught.value.tensor_name == "model.language_model.embed_tokens.weight"
