"""`trimtab tune`: what it refuses, in which order it measures, and what it writes."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from trimtab.cli import main as cli
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine import tune as tune_model
from trimtab.engine.cuda import launch_config as cuts
from trimtab.engine.cuda import shipped_configs as launch_configs
from trimtab.engine.cuda.nvrtc import ProductCuts
from trimtab.engine.families import families
from trimtab.engine.kernels import autotune as tuning
from trimtab.engine.kernels import gemv4 as matvec
from trimtab.engine.kernels.device_kernels import DeviceKernels
from trimtab.errors import DeviceError, RequestError
from trimtab.process import user_cache as own_folder

TARGET = launch_configs.Target("a card", (9, 0), 132, 232448, "source")
WAYS = cuts.cuts((2560,), 2048, 1, multiprocessors=132, shared_bytes=232448)
KEY = ("cut", (2560,), 2048, 1, False)


@pytest.mark.parametrize(
    ("flags", "field"), [(["--rows", "0"], "--rows"), (["--rows", "9"], "--rows"), (["--device", "cpu"], "device")]
)
def test_what_cannot_be_tuned_is_refused_before_anything_is_loaded(flags, field, capsys, monkeypatch):
    monkeypatch.setattr("trimtab.load", lambda *_, **__: pytest.fail("loaded"))
    assert cli.main(["tune", str(DEMO / "base"), "--json", *flags]) == 2
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
            tuning.keep_tuned(module)
            return 1

    batch = SimpleNamespace(steps=SimpleNamespace(kernels=Tuned(matvec=module)))
    monkeypatch.setattr(tune_model, "Batch", lambda model, rows: batch)
    monkeypatch.setattr(families, "why_not", lambda model: None)
    monkeypatch.setattr(families, "describe", lambda model: SimpleNamespace(groups=list))
    monkeypatch.setattr(matvec, "target_of", lambda module: TARGET)
    monkeypatch.setattr(tuning, "releases", lambda: {"torch": "2.9"})
    monkeypatch.setattr(own_folder, "user_cache_path", lambda name: tmp_path / name)
    plan = SimpleNamespace(request=SimpleNamespace(model="m"))
    return SimpleNamespace(device=torch.device("cuda:0"), hf_model=None, dtype=torch.bfloat16, plan=plan, steps=done, batch=batch)


def test_the_fastest_of_each_product_is_kept_and_reported(model):
    report, document = tune_model.tune_model(model, rows=2)
    assert model.steps == [[1, 2]]
    best = dataclasses.replace(WAYS[2], estimated_us=0.0)
    assert launch_configs.kept(TARGET) == {KEY: best}
    assert launch_configs.from_text(launch_configs.to_text(document)) == (TARGET, {KEY: best})
    assert (report.card, report.products) == ("a card", 1)
    assert report.known == (
        {"product": "2560 x 2048", "rows": 1, "cut": str(WAYS[2]), "status": launch_configs.MEASURED},
    )  # fmt: skip
    assert "2560 x 2048, 1 rows" in str(report)


def test_a_card_whose_kernels_are_not_used_says_why(model):
    model.batch.steps.kernels = DeviceKernels(left_out={"fused 4-bit products": "slower here"})
    with pytest.raises(DeviceError, match="fused 4-bit products: slower here"):
        tune_model.tune_model(model)


def test_a_model_without_such_kernels_has_nothing_to_tune(model, monkeypatch):
    monkeypatch.setattr(families, "why_not", lambda model: "there are no fused kernels for Llama")
    with pytest.raises(RequestError, match="nothing to tune: there are no fused kernels for Llama"):
        tune_model.tune_model(model)
