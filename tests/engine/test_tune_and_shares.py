"""What `trimtab tune` refuses, measures and writes; what takes the device's memory, share by share."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

import trimtab
from tests import pico
from tests.serve.observe.test_metrics import MODEL, label, samples
from trimtab.cli import main
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine import memory_shares
from trimtab.engine import tune as tune_model
from trimtab.engine.batch.batch import Batch
from trimtab.engine.cuda import launch_config, shipped_configs
from trimtab.engine.cuda.nvrtc import ProductCuts
from trimtab.engine.families import families
from trimtab.engine.kernels import autotune, gemv4
from trimtab.engine.kernels.device_kernels import DeviceKernels
from trimtab.engine.memory import rates
from trimtab.errors import DeviceError, RequestError
from trimtab.process import user_cache
from trimtab.report.render import Lines
from trimtab.serve.observe.metrics import Metrics

TARGET = shipped_configs.Target("a card", (9, 0), 132, 232448, "source")
WAYS = launch_config.cuts((2560,), 2048, 1, multiprocessors=132, shared_bytes=232448)
KEY = ("cut", (2560,), 2048, 1, False)


@pytest.mark.parametrize(
    ("flags", "field"), [(["--rows", "0"], "--rows"), (["--rows", "9"], "--rows"), (["--device", "cpu"], "device")]
)
def test_what_cannot_be_tuned_is_refused_before_anything_is_loaded(flags, field, capsys, monkeypatch):
    monkeypatch.setattr("trimtab.load", lambda *_, **__: pytest.fail("loaded"))
    assert main.main(["tune", str(DEMO / "base"), "--json", *flags]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["fields"]["field"] == field


@pytest.fixture
def model(monkeypatch, tmp_path):
    """Return a model of one product on a card that is not there; `steps` is what was timed."""
    done = []
    product = SimpleNamespace(groups=[[SimpleNamespace(kind="nf4", shape=(2560, 2048))]], n=1, gate=None, key=KEY)
    module = SimpleNamespace(products=ProductCuts({KEY: WAYS[1]}))

    class Tuned(DeviceKernels):
        def products(self, *_):
            return [product]

        def tune(self, groups, dtype, counts, *, progress=None):
            done.append(counts)
            module.products.chosen[KEY] = WAYS[2]
            module.products.measured = {KEY}
            autotune.keep_tuned(module)
            return 1

    batch = SimpleNamespace(steps=SimpleNamespace(kernels=Tuned(matvec=module)))
    monkeypatch.setattr(tune_model, "Batch", lambda model, rows: batch)
    monkeypatch.setattr(families, "why_not", lambda model: None)
    monkeypatch.setattr(families, "describe", lambda model: SimpleNamespace(groups=list))
    monkeypatch.setattr(gemv4, "target_of", lambda module: TARGET)
    monkeypatch.setattr(autotune, "releases", lambda: {"torch": "2.9"})
    monkeypatch.setattr(user_cache, "user_cache_path", lambda name: tmp_path / name)
    plan = SimpleNamespace(request=SimpleNamespace(model="m"))
    return SimpleNamespace(device=torch.device("cuda:0"), hf_model=None, dtype=torch.bfloat16, plan=plan, steps=done, batch=batch)


def test_the_fastest_of_each_product_is_kept_and_reported(model):
    report, document = tune_model.tune_model(model, rows=2)
    assert model.steps == [[1, 2]]
    best = dataclasses.replace(WAYS[2], estimated_us=0.0)
    assert shipped_configs.kept(TARGET) == {KEY: best}
    assert shipped_configs.from_text(shipped_configs.to_text(document)) == (TARGET, {KEY: best})
    assert (report.card, report.products) == ("a card", 1)
    assert report.known == ({"product": "2560 x 2048", "rows": 1, "cut": str(WAYS[2]), "status": shipped_configs.MEASURED},)
    assert "2560 x 2048 1 " in " ".join(str(report).split())


def test_a_card_whose_kernels_are_not_used_says_why(model):
    model.batch.steps.kernels = DeviceKernels(left_out={"fused 4-bit products": "slower here"})
    with pytest.raises(DeviceError, match="fused 4-bit products: slower here"):
        tune_model.tune_model(model)


def test_a_model_without_such_kernels_has_nothing_to_tune(model, monkeypatch):
    monkeypatch.setattr(families, "why_not", lambda model: "there are no fused kernels for Llama")
    with pytest.raises(RequestError, match="nothing to tune: there are no fused kernels for Llama"):
        tune_model.tune_model(model)


MIB = 2**20


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return pico.build("gemma4", tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    return pico.adapter(base, tmp_path_factory.mktemp("adapter") / "adapter")


def loaded(base, **options):
    return trimtab.load(trimtab.plan(base, context=64, device="cpu", images=0, audio_s=0.0, quant="nf4-dq", **options))


def by_name(shares):
    return {one.name: one for one in shares}


def test_weights_on_the_device_are_what_was_planned(base):
    with loaded(base, place={"*": "resident"}) as model:
        weights = by_name(model.memory_shares())["weights"]
        # Rounding of each tensor's place in the arena, 256 B for each.
        assert weights.planned_bytes <= weights.measured_bytes <= weights.planned_bytes + 256 * 400
    with loaded(base, place={"language": "stream"}) as model:
        streamed = by_name(model.memory_shares())
        assert streamed["weights"].measured_bytes < weights.measured_bytes
        assert 0 < streamed["staging"].measured_bytes <= streamed["staging"].planned_bytes


def test_adapters_and_keys_and_values_are_measured(base, adapter):
    with loaded(base, adapters={"a": adapter}) as model:
        before = by_name(model.memory_shares())
        planned = before["adapters"].planned_bytes
        # On a CPU an adapter is used where it lies: aligned in one piece, in the file's own type or in float32.
        assert planned / 2 <= before["adapters"].measured_bytes <= 2 * planned and before["kv cache"].measured_bytes == 0
        model.unload_adapter("a")
        assert by_name(model.memory_shares())["adapters"].measured_bytes == 0
        batch = Batch(model, rows=2)
        batch.join(batch.begin(model.prepare([5, 6, 7]), trimtab.request.GenerateRequest(max_new_tokens=2)).compute())
        kept = by_name(model.memory_shares(batch))["kv cache"]
        assert kept.measured_bytes == batch.cache.nbytes() > 0


def test_what_cannot_be_measured_has_no_figure(base):
    with loaded(base) as model:
        process = by_name(model.memory_shares())["process"]
        assert (process.planned_bytes, process.measured_bytes) == (model.plan.gpu_needed_bytes, None)
        assert "-" in Lines().show(memory_shares.shares_document(model.memory_shares())).splitlines()[-1]


@pytest.mark.parametrize("is_estimate", [False, True])
def test_the_shares_of_a_gpu_add_up_to_the_process(monkeypatch, is_estimate):
    plan = SimpleNamespace(
        gpu={"weights": 1000, "fixed": 24, "adapters": 50, "kv_cache": 60, "activations": 70, "workspaces": 8, "kernels": 9,
             "graphs": 11, "cuda_context": 300, "allocator_reserve": 40, "staging": 30, "unpacked_weights": 5},
        gpu_needed_bytes=1700,
    )  # fmt: skip
    model = SimpleNamespace(
        device=torch.device("cuda:0"), plan=plan, weight_bytes=1020, streamer=None, adapter_store=SimpleNamespace(holders={}),
        prefix_cache=None, unpacked=SimpleNamespace(nbytes=5),
        memory=lambda: {"gpu_peak_bytes": 1155},
    )  # fmt: skip
    batch = SimpleNamespace(
        cache=SimpleNamespace(nbytes=lambda: 60), steps=SimpleNamespace(graph_bytes=10),
        prompts=SimpleNamespace(graph_bytes=1, layouts=SimpleNamespace(nbytes=0)),
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1205)
    monkeypatch.setattr(memory_shares, "process_on_gpu", lambda device: (1520, is_estimate))
    shares = by_name(memory_shares.shares_of(model, batch))
    assert shares["process"].is_estimate is is_estimate and shares["process"].measured_bytes == 1520
    measured = {name: one.measured_bytes for name, one in shares.items() if one.measured_bytes is not None}
    assert measured["activations, with workspaces and buffers"] == 70 and measured["allocator slack"] == 50
    assert (shares["unpacked weights"].planned_bytes, shares["unpacked weights"].measured_bytes) == (5, 5)
    assert shares["workspaces"].planned_bytes == 8 and shares["workspaces"].measured_bytes is None
    text = Lines().show(memory_shares.shares_document(tuple(shares.values())))
    if is_estimate:
        assert shares["graphs"].measured_bytes is shares["context and kernels"].measured_bytes is None
        assert text.splitlines()[-1].endswith("~1.5 KiB")
    else:
        assert sum(measured.values()) == 2 * 1520  # the shares, and the process
        assert "~" not in text


def test_without_the_drivers_figure_the_process_is_an_estimate(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="u", multi_processor_count=24))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * MIB)
    monkeypatch.setattr(rates.gpus, "process_bytes", lambda uuid: None)
    assert rates.process_on_gpu("cuda:0") == ((131 + 2 * 24 + 5) * MIB, True)
    monkeypatch.setattr(rates.gpus, "process_bytes", lambda uuid: 7 * MIB)
    assert rates.process_on_gpu("cuda:0") == (7 * MIB, False)


def test_the_server_counts_each_share():
    share = {"name": "weights", "planned_bytes": 5, "measured_bytes": 6, "is_estimate": False}
    unknown = share | {"name": "process", "measured_bytes": None}
    numbers = MODEL["numbers"] | {"memory_shares": [share, unknown]}
    found = samples(Metrics(), MODEL | {"numbers": numbers})
    assert found["trimtab_gpu_share_bytes", label(model="demo", share="weights", kind="measured")] == 6
    assert found["trimtab_gpu_share_bytes", label(model="demo", share="process", kind="planned")] == 5
    assert ("trimtab_gpu_share_bytes", label(model="demo", share="process", kind="measured")) not in found
