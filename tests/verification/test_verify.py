"""`trimtab.verify`: every comparison gives the right verdict, and a wrong model or an idle adapter is found out."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import trimtab
from tests import ROOT, pico, stock
from tests.raised import raised
from trimtab.errors import AdapterError, CheckpointError, ParityError, RequestError
from trimtab.verification.verify import verify

DEVICE = os.environ.get("TRIMTAB_TEST_DEVICE", "cpu")
DEMO = ROOT / "trimtab" / "demo"
PROMPTS = [{"id": "one", "token_ids": list(range(40, 52))}, {"id": "two", "token_ids": list(range(90, 97))}]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return pico.build("llama", tmp_path_factory.mktemp("verify") / "base")


@pytest.fixture(scope="module")
def adapter(base):
    return pico.adapter(base, base.parent / "adapter")


@pytest.fixture(scope="module")
def merged(base, adapter):
    """The merge that PEFT makes."""
    stock.with_adapter(stock.load_stock(base), adapter).merge_and_unload().save_pretrained(base.parent / "merged")
    return base.parent / "merged"


@pytest.fixture(scope="module")
def quantized(base):
    """The report on a quantized model against the one that is not."""
    return ask(base, against="bf16", quant="nf4")


def changed(folder, out, change):
    """Copy a checkpoint and let `change` alter its tensors."""
    shutil.copytree(folder, out)
    file = next(out.glob("*.safetensors"))
    tensors = load_file(str(file))
    change(tensors)
    save_file(tensors, str(file), metadata={"format": "pt"})
    return out


def idle(adapter, out):
    return changed(adapter, out, lambda tensors: [t.zero_() for name, t in tensors.items() if "lora_B" in name])


def ask(model, **options):
    options = {"prompts": PROMPTS, "new_tokens": 5, "isolated": False} | options
    return verify(model, **options)


# Verdicts -------------------------------------------------------------------------------------------------------------


def test_streamed_tiers_are_the_resident_model(base, adapter):
    plan = trimtab.plan(base, adapters={"a": adapter}, context=128, place={"*": "stream"}, device=DEVICE)
    report = ask(plan, against="resident")
    assert (report.verdict, report.ok, report.adapter, report.findings) == ("same", True, "a", ())
    assert set(report.reference["tiers"]) == {"resident"} and "stream" in report.subject["tiers"]
    assert [row.same_text for row in report.prompts] == [True, True]
    assert [row.difference.positions for row in report.prompts] == [17, 12]
    assert set(report.layers) == {0.0} and len(report.layers) == 3
    report.check()


def test_trimtab_is_the_stock_stack(base, adapter):
    report = ask(base, adapters={"a": adapter}, against="stock", quant="nf4")
    assert (report.verdict, report.reference["engine"], report.reference["quant"]) == ("same", "stock", "nf4")
    assert report.floor.pairs  # the stock route measured its own


def test_an_active_adapter_differs_from_the_base_and_that_is_right(base, adapter):
    report = ask(base, adapters={"a": adapter}, against="base", quant="none")
    assert (report.verdict, report.expected, report.ok) == ("differs", "differs", True)
    assert not any("inactive" in finding for finding in report.findings)
    report.check()
    assert "so the adapter is active" in str(report)


def test_an_adapter_of_zeros_is_found_out(base, adapter, tmp_path):
    report = ask(base, adapters={"a": idle(adapter, tmp_path / "idle")}, against="base", quant="none")
    assert (report.verdict, report.ok) == ("same", False) and report.findings[0].startswith("adapter inactive: a")
    error = raised(ParityError, report.check, match="the adapter is inactive")
    assert (error.position, error.max_abs) == (-1, 0.0)


def test_quantized_weights_differ_from_bf16(quantized):
    report = quantized
    assert (report.verdict, report.ok) == ("differs", False)
    error = raised(ParityError, report.check)
    worst = report.worst_prompt.difference
    assert (error.position, error.max_abs, error.mean_abs, error.tolerance) == (
        worst.first_position, worst.max_abs, worst.mean_abs, report.floor.limits[report.worst_prompt.id].max_abs,
    )  # fmt: skip
    assert max(report.layers) > 0 and report.layers[0] == 0.0  # embeddings are not quantized


def test_steps_say_what_one_pass_says_but_for_their_kernels(base, adapter):
    report = ask(base, adapters={"a": adapter}, against="eager", quant="none")
    assert report.ok and report.verdict in ("same", "same within noise")
    assert [row.difference.top1_agreement for row in report.prompts] == [1.0] * len(report.prompts)


@pytest.mark.parametrize("against", ["single", "alone"])
def test_a_batch_is_each_row_alone_but_for_its_kernels(base, adapter, tmp_path, against):
    adapters = {"a": adapter}
    if against == "alone":
        adapters["b"] = pico.adapter(base, tmp_path / "b", seed=5)
    report = ask(base, adapters=adapters, against=against, quant="none")
    assert [row.adapter for row in report.prompts] == (["a", "a"] if against == "single" else ["a", "b", None] * 2)
    assert not any("batch" in name for name in report.floor.orders)
    # bf16 logits of a few units: another kernel may round a value to its neighbour (2^-6), an adapter moves it by 0.1.
    assert max(row.difference.max_abs for row in report.prompts) < 0.06 and report.layers == ()


def test_a_right_merge_is_within_the_rounding_it_cannot_avoid(base, adapter, merged):
    report = ask(base, adapters={"a": adapter}, against=merged)
    assert report.verdict in ("same", "same within noise") and report.ok
    assert any("rounded at random" in name for name in report.floor.orders)
    assert len(report.survival) == 14 and all(0.99 < row.survived < 1.01 for row in report.survival)
    assert all(row.base_kl > 10 * row.difference.kl_mean for row in report.prompts)


@pytest.mark.parametrize(
    "name, factor", [("model.layers.1.mlp.down_proj.weight", 1.05), ("model.layers.0.self_attn.q_proj.weight", 0.0)]
)
def test_a_wrong_weight_in_a_merge_is_found_out(base, adapter, merged, tmp_path, name, factor):
    wrong = changed(merged, tmp_path / "wrong", lambda tensors: tensors[name].mul_(factor))
    report = ask(base, adapters={"a": adapter}, against=wrong)
    assert (report.verdict, report.ok) == ("differs", False)
    row = next(row for row in report.survival if row.module_path == name.removesuffix(".weight"))
    assert not 0.99 < row.survived < 1.01 or row.noise > 0.5
    with pytest.raises(ParityError):
        report.check()


def test_a_merge_that_is_the_base_is_called_that(tmp_path):
    """The demo's style adapter answers otherwise than the base; a copy of the base is no merge of it."""
    report = verify(
        DEMO / "base", adapters={"style": DEMO / "adapters" / "style"}, against=shutil.copytree(DEMO / "base", tmp_path / "m"),
        prompts=[{"id": "q", "text": "Who rules Lorienth?"}], new_tokens=8, isolated=False,
    )  # fmt: skip
    (row,) = report.prompts
    assert (row.merged_matches, row.base_is_adapter, row.same_text, row.base_is_merged) == ("BASE", False, False, True)
    assert report.verdict == "differs" and "every merged answer is the base's" in report.findings[0]
    assert {survived.survived for survived in report.survival} == {0.0}


def test_a_merge_of_an_idle_adapter_proves_nothing(base, adapter, tmp_path):
    report = ask(base, adapters={"a": idle(adapter, tmp_path / "idle")}, against=shutil.copytree(base, tmp_path / "copy"))
    assert report.verdict == "same" and "proves nothing" in report.findings[0]
    assert all(row.survived == 1.0 and row.delta_norm == 0 for row in report.survival)


@pytest.mark.slow
def test_a_route_in_its_own_process_records_its_peak(base):
    report = ask(base, against="resident", quant="none", isolated=True, prompts=PROMPTS[:1])
    assert report.verdict == "same"
    assert all(route["memory"]["host_peak_bytes"] > 100 * 2**20 for route in (report.reference, report.subject))


@pytest.mark.slow
def test_the_stock_side_runs_under_another_interpreter(base, adapter):
    """The other one has another transformers, PEFT and bitsandbytes, and no trimtab installed."""
    other = os.environ.get("TRIMTAB_OTHER_PYTHON")
    if not other:
        pytest.skip("TRIMTAB_OTHER_PYTHON names no interpreter with the stock stack")
    report = ask(base, adapters={"a": adapter}, against="stock", quant="nf4", python=other, prompts=PROMPTS[:1])
    assert report.verdict == "same"
    assert report.reference["versions"]["transformers"] != report.versions["transformers"]


def test_the_built_in_prompts_are_used(base):
    report = verify(base, against="resident", quant="none", new_tokens=2, isolated=False)
    assert [row.id for row in report.prompts] == ["p01_lora_short", "p02_hypertension_short", "p03_medical_tutor"]


# Refusals -------------------------------------------------------------------------------------------------------------


def refused(model, **options):
    return raised(RequestError, ask, model, **options)


def test_an_unknown_comparison_is_refused_with_what_exists(base):
    found = refused(base, against="graph")
    assert found.field == "against" and "resident" in found.allowed and "graph" not in found.allowed


def test_a_folder_of_another_architecture_is_refused_with_every_difference(base, adapter, tmp_path):
    found = refused(base, adapters={"a": adapter}, against=pico.build("qwen3", tmp_path / "other"))
    assert found.field == "against"
    assert "architectures is ['Qwen3ForCausalLM'], the model's is ['LlamaForCausalLM']" in str(found)
    assert "model_type is qwen3" in str(found)


def test_a_folder_that_holds_no_model_is_refused(base, adapter, tmp_path):
    with pytest.raises(CheckpointError):
        ask(base, adapters={"a": adapter}, against=tmp_path)


@pytest.mark.parametrize(
    "against, words", [("base", "an adapter to compare with"), ("alone", "two adapters"), ("bf16", "quantized load")]
)
def test_a_comparison_that_lacks_its_subject_is_refused(base, against, words):
    assert words in str(refused(base, against=against, quant="none"))


def test_a_merged_folder_needs_the_adapter(base, tmp_path):
    found = refused(base, against=shutil.copytree(base, tmp_path / "copy"))
    assert found.field == "adapter" and "adapters=" in found.hint


def test_one_of_several_adapters_must_be_named(base, adapter):
    found = refused(base, adapters={"a": adapter, "b": adapter}, against="resident")
    assert (found.field, found.allowed) == ("adapter", ("a", "b"))
    found = refused(base, adapters={"one": adapter, "two": adapter}, adapter="ono", against="resident")
    assert found.value == "ono" and found.allowed == ("one", "two") and found.near == ("one",)


def test_an_adapter_of_another_model_is_refused_before_a_route_runs(base, tmp_path):
    other = pico.build("gemma4", tmp_path / "gemma4")
    error = raised(AdapterError, lambda: ask(base, adapters={"a": pico.adapter(other, tmp_path / "a")}, against="resident"))
    assert len(error.problems) > 1


def test_pictures_for_a_model_that_only_reads_are_refused_together(base, tmp_path):
    (tmp_path / "a.png").write_bytes(b"x")
    found = refused(base, prompts=[{"id": name, "text": "x", "image": str(tmp_path / "a.png")} for name in ("p", "q")])
    assert found.field == "prompts" and "p has an image" in str(found) and "q has an image" in str(found)


def test_pictures_that_were_not_planned_are_refused(tmp_path):
    plan = trimtab.plan(DEMO / "base", context=128, images=0, audio_s=0, device="cpu")
    found = refused(plan, prompts=None)
    assert found.field == "prompts" and "images=1" in found.hint


def test_batches_of_pictures_alone_are_refused(base):
    picture = DEMO / "images" / "image_1.png"
    found = refused(DEMO / "base", against="single", quant="none", prompts=[{"id": "p", "text": "?", "image": str(picture)}])
    assert found.field == "prompts"


def test_options_that_are_part_of_a_plan_are_refused_beside_one(base):
    plan = trimtab.plan(base, context=128, device="cpu")
    assert refused(plan, quant="nf4").field == "quant" and refused(plan, adapters={}).field == "adapters"
    assert refused(plan, against="single").hint.startswith("Plan with batch=2")


def test_an_interpreter_without_a_stock_route_is_refused(base):
    assert refused(base, against="resident", python="python3").field == "python"
    # Before anything is read: the model is missing too.
    assert refused("no/such/model", against="stock", python="no-such-python").field == "python"


def test_no_new_tokens_are_refused(base):
    assert refused(base, new_tokens=0).field == "new_tokens"


def test_weights_kept_unquantized_have_no_stock_route(base):
    plan = trimtab.plan(base, context=128, keep_unquantized=["*.q_proj"], device="cpu")
    assert "keep_unquantized" in str(refused(plan, against="stock"))


def test_a_report_is_json(quantized):
    values = json.loads(json.dumps(quantized.to_json(), allow_nan=False))
    assert (values["verdict"], values["ok"], values["prompts"][0]["id"]) == ("differs", False, "one")
    assert len(values["prompts"][0]["difference"]["max_abs_by_position"]) == 17
    assert torch.__version__.startswith(values["versions"]["torch"].partition("+")[0])


def test_a_request_is_planned_as_it_says(base, adapter, tmp_path):
    request = trimtab.LoadRequest(
        model=str(base), adapters={"a": str(adapter)}, context_tokens=128, place={"*": "stream"}, device=DEVICE
    )
    report = ask(request, against="resident")
    assert report.verdict == "same" and "stream" in report.subject["tiers"]
    report = ask(request, against=shutil.copytree(base, tmp_path / "copy"))
    assert report.reference["quant"] == report.subject["quant"] == "none" and not report.ok
