"""A merged checkpoint is the base but for what the adapters change: files, names, ties, several adapters, taking one out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests import merged_models, pico, stock
from tests.merged_models import load, peft_merged, state_of, tensors_of, ulps
from tests.raised import refused
from trimtab.merging import merge
from trimtab.merging.changes.delta import Change, merged

# What stays as it was -------------------------------------------------------------------------------------------------


def test_files_names_shapes_dtypes_and_metadata_are_the_bases(tmp_path: Path) -> None:
    base = pico.build("gemma3", tmp_path / "base", shards=3)
    (base / "tokenizer.json").write_text('{"made": "up"}')
    (base / "chat_template.jinja").write_text("{{ x }}")
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "rag.jinja").write_text("{{ y }}")
    (base / "pytorch_model.bin").write_bytes(b"the same weights once more")
    adapter = pico.adapter(base, tmp_path / "adapter", targets="all")
    merge(base, tmp_path / "out", adapters={"a": adapter})
    names = {path.relative_to(base).as_posix() for path in base.rglob("*") if path.is_file()} - {"pytorch_model.bin"}
    out = tmp_path / "out"
    written = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert written == names | {"trimtab_merge.json"}
    for name in names:
        if not name.endswith(".safetensors"):
            assert (out / name).read_bytes() == (base / name).read_bytes(), name
            continue
        with safe_open(base / name, "pt") as old, safe_open(out / name, "pt") as new:
            assert list(old.keys()) == list(new.keys()) and old.metadata() == new.metadata()
            for key in old.keys():  # noqa: SIM118 - a file, not a dict
                a, b = old.get_tensor(key), new.get_tensor(key)
                assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_tensors_without_an_adapter_are_the_bases_bytes(tmp_path: Path) -> None:
    base = pico.build("gemma4", tmp_path / "base", shards=2)
    adapter = pico.adapter(base, tmp_path / "adapter")
    report = merge(base, tmp_path / "out", adapters={"a": adapter})
    old, new = tensors_of(base), tensors_of(tmp_path / "out")
    same = {name for name in old if old[name].dtype == new[name].dtype and torch.equal(old[name], new[name])}
    assert set(old) - same == set(report.changed) and len(same) == report.untouched


def test_without_an_adapter_or_another_form_nothing_is_copied(tmp_path: Path) -> None:
    base = pico.build("qwen3", tmp_path / "base", shards=2)
    for adapters in (None, {}, []):
        error = refused(merge, base, tmp_path / "out", adapters=adapters, match="would be a copy")
        assert error.field == "adapters" and merged_models.left_over(tmp_path) == ["base"]


def test_adapters_can_be_a_list_or_one_path(tmp_path: Path) -> None:
    base = pico.build("qwen3", tmp_path / "base")
    adapter = pico.adapter(base, tmp_path / "law")
    reports = [merge(base, tmp_path / f"out{number}", adapters=given) for number, given in enumerate(([adapter], adapter))]
    assert [[(part.name, part.weight) for part in report.adapters] for report in reports] == [[("law", 1.0)]] * 2


def test_in_the_same_dtype_and_without_an_adapter_the_files_are_copies(tmp_path: Path) -> None:
    base = pico.build("qwen3", tmp_path / "base", shards=2)
    report = merge(base, tmp_path / "out", dtype="bf16")
    assert not report.changed
    for file in report.files:
        assert (base / file.name).read_bytes() == (tmp_path / "out" / file.name).read_bytes()
        assert file.sha256 == file.base_sha256


def test_the_record_names_every_file_by_its_hash(tmp_path: Path) -> None:
    import hashlib

    base = pico.build("llama", tmp_path / "base", shards=2)
    adapter = pico.adapter(base, tmp_path / "adapter", alpha_pattern={"q_proj": 1})
    report = merge(base, tmp_path / "out", adapters={"law": (adapter, 0.5)})
    record = merged_models.read_record(tmp_path / "out")
    assert record == json.loads(json.dumps(report.record()))

    def sha(path: Path) -> str:
        return hashlib.sha256(path.read_bytes()).hexdigest()

    assert record["base_files"] == {name: sha(base / name) for name in record["base_files"]}
    assert {name: facts["sha256"] for name, facts in record["files"].items()} == {
        name: sha(tmp_path / "out" / name) for name in record["files"]
    }
    (own,) = record["adapters"]
    assert (own["name"], own["folder"], own["weight"], own["modules"]) == ("law", "adapter", 0.5, 14)
    assert own["scales"] == {"0.25": 2, "2": 12} and own["files"] == {name: sha(adapter / name) for name in own["files"]}
    assert str(tmp_path) not in json.dumps(record) and set(record["versions"]) == {"trimtab", "torch", "transformers", "python"}
    assert "14 changed, 7 copied, 0 added" in str(report) and "law x 0.5" in str(report)


# Ties -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gemma4", "qwen3"])
def test_a_head_tied_to_a_changed_table_gets_a_weight_of_its_own(family: str, tmp_path: Path) -> None:
    # PEFT's merge changes the head through the tie, so that its merged model does not answer as its adapter did.
    base = pico.build(family, tmp_path / "base", shards=2)
    adapter = pico.adapter(base, tmp_path / "adapter", embeddings=True)
    report = merge(base, tmp_path / "out", adapters={"a": adapter}, check=True)
    assert report.check is not None and report.check.passed and report.added == ("lm_head.weight",)
    old, new = state_of(base), state_of(tmp_path / "out")
    table = next(name for name in old if name.endswith("embed_tokens.weight"))
    assert torch.equal(new["lm_head.weight"], old[table]) and not torch.equal(new[table], old[table])
    unmerged = stock.with_adapter(load(base), adapter)
    again = load(tmp_path / "out")
    inputs = pico.inputs(family, again.config)
    largest = (stock.logits(unmerged, inputs) - stock.logits(again, inputs)).abs().max()
    base_logits = stock.logits(load(base), inputs)
    # The merged weights are rounded to bfloat16 once more than the adapter's product: far below the adapter's effect.
    assert largest < 0.1 * (stock.logits(unmerged, inputs) - base_logits).abs().max()


def test_a_tied_head_stays_tied_if_only_other_modules_change(tmp_path: Path) -> None:
    base = pico.build("qwen3", tmp_path / "base")
    adapter = pico.adapter(base, tmp_path / "adapter")
    assert not merge(base, tmp_path / "out", adapters={"a": adapter}).added
    model = load(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight


# Several adapters -----------------------------------------------------------------------------------------------------


def two(tmp_path: Path, dtype: str = "bfloat16") -> tuple[Path, Path, Path]:
    base = pico.build("llama", tmp_path / "base", dtype=dtype, shards=2)
    one = pico.adapter(base, tmp_path / "one", seed=1)
    return base, one, pico.adapter(base, tmp_path / "two", seed=2, rslora=True)


def test_two_adapters_equal_pefts_merges_in_turn(tmp_path: Path) -> None:
    base, one, other = two(tmp_path, "float32")
    merge(base, tmp_path / "out", adapters={"one": one, "two": other})
    expected, found = peft_merged(base, one, other), state_of(tmp_path / "out")
    # The same two float32 sums in the same order.
    assert {ulps(found[name], expected[name]) for name in found} == {0}


def test_a_weight_scales_the_whole_change(tmp_path: Path) -> None:
    base, one, _ = two(tmp_path, "float32")
    merge(base, tmp_path / "half", adapters={"one": (one, 0.5)}, check=True)
    merge(base, tmp_path / "whole", adapters={"one": one})
    old, half, whole = (tensors_of(folder) for folder in (base, tmp_path / "half", tmp_path / "whole"))
    for name in old:
        change = whole[name].double() - old[name].double()
        # Each of the two results is rounded to float32 once.
        torch.testing.assert_close(half[name].double() - old[name].double(), change / 2, rtol=0, atol=2.0**-22)


def test_an_adapter_comes_out_again_within_one_rounding(tmp_path: Path) -> None:
    base, one, other = two(tmp_path)
    merge(base, tmp_path / "with", adapters={"one": one})
    merge(tmp_path / "with", tmp_path / "without", adapters={"one": (one, -1)})
    old, between, new = (tensors_of(folder) for folder in (base, tmp_path / "with", tmp_path / "without"))
    exact = total = 0
    for name, a in old.items():
        b, c = between[name], new[name]
        step = spacing(b) + spacing(c)
        # base + delta is rounded once to bfloat16, and what is left after - delta once more: half a step each, and the
        # float32 sums before are 2^16 times finer.
        assert ((c.double() - a.double()).abs() <= 0.5 * step * (1 + 2**-12)).all(), name
        # Where the sum has no larger exponent than the base, its rounding is at most half of the base's own step, and
        # taking the change out again finds the base; unless it is exactly half, when either neighbour is as near.
        safe = spacing(b) < spacing(a)
        assert torch.equal(a[safe], c[safe]), name
        exact += int((a == c).sum())
        total += a.numel()
    assert exact / total > 0.9
    del other


def spacing(values: torch.Tensor) -> torch.Tensor:
    exponent = torch.frexp(values.double().abs())[1] - 1
    return torch.ldexp(torch.ones_like(values, dtype=torch.float64), exponent) * 2.0**-7


def test_a_change_of_few_bits_comes_out_bit_for_bit(tmp_path: Path) -> None:
    # Values and products with few bits: every sum is exact in float32, so nothing is ever rounded.
    base, one, _ = two(tmp_path, "float32")
    coarse(base), coarse(one)
    merge(base, tmp_path / "with", adapters={"one": one})
    merge(tmp_path / "with", tmp_path / "without", adapters={"one": (one, -1)})
    old, between, new = (tensors_of(folder) for folder in (base, tmp_path / "with", tmp_path / "without"))
    assert any(not torch.equal(old[name], between[name]) for name in old)
    assert all(torch.equal(old[name], new[name]) for name in old)
    record = merged_models.read_record(tmp_path / "without")
    assert record["adapters"][0]["weight"] == -1 and record["base_record"] == merged_models.read_record(tmp_path / "with")


def coarse(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        tensors = {name: (tensor * 64).round() / 64 for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata=metadata)


def test_the_order_of_plain_adapters_is_the_order_of_sums_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    base, *values = (torch.randn(size, generator=generator) for size in ((8, 16), (8, 4), (4, 16), (8, 4), (4, 16)))
    first, second = Change("d", 0.5, 2.0, *values[:2]), Change("p", -1.0, 0.5, *values[2:])
    one = merged(base.clone(), 0, 8, [first, second])
    other = merged(base.clone(), 0, 8, [second, first])
    # Two float32 sums of three terms in another order: each rounds by at most 2^-24 of the largest partial sum.
    torch.testing.assert_close(one, other, rtol=0, atol=2.0**-24 * 4 * float(one.abs().max() + base.abs().max()))


# Forms ----------------------------------------------------------------------------------------------------------------


def test_another_dtype_is_written_with_the_config_that_says_so(tmp_path: Path) -> None:
    base = pico.build("gemma4", tmp_path / "base", dtype="float32", shards=2)
    adapter = pico.adapter(base, tmp_path / "adapter")
    report = merge(base, tmp_path / "out", adapters={"a": adapter}, dtype="bf16", check=True)
    assert report.check is not None and report.check.passed and report.dtype == "bfloat16"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "out").values() if tensor.is_floating_point()} == {torch.bfloat16}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    total = sum(tensor.nbytes for tensor in tensors_of(tmp_path / "out").values())
    assert index["metadata"]["total_size"] == total
    expected, found = peft_merged(base, adapter), state_of(tmp_path / "out")
    assert all(torch.equal(found[name], expected[name].to(torch.bfloat16)) for name in found)


def test_the_index_of_an_untied_merge_counts_the_new_head(tmp_path: Path) -> None:
    base = pico.build("qwen3", tmp_path / "base", shards=3)
    merge(base, tmp_path / "out", adapters=pico.adapter(base, tmp_path / "adapter", embeddings=True))
    merged_models.load(tmp_path / "out").save_pretrained(tmp_path / "again", max_shard_size="100KB")
    own, stock = (json.loads((tmp_path / name / "model.safetensors.index.json").read_text()) for name in ("out", "again"))
    assert own["metadata"] == stock["metadata"]
