"""Prompts in static chunks with weights in every tier: the logits are those of transformers' own pass over resident weights.

The disk tier is the spill file for blocks and the checkpoint file for tables. Captured prompts refuse decoder layers in the tiers
host and disk: the fallback is named, and such prompts go through transformers' own pass.
"""

from collections import Counter

import pytest

import trimtab
from tests.engine.prefill.test_prefill import (  # noqa: F401
    ON_GPU,
    REQUEST,
    TOLERANCE,
    answered,
    captured,
    differ,
    eager,
    ids,
    in_chunks,
    load,
    named,
    picture,
    replayed,
    through,
)
from tests.lent import lent
from tests.long_runs import crossed, slow_on_cpu
from tests.planning.values.test_execution import plan as narrow_plan
from trimtab.demo.demo import ADAPTERS
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine.batch.batch import Batch
from trimtab.engine.layers.leaves import FileRows, GatheredTable
from trimtab.engine.prefill.prefill import PrefillRunner

pytestmark = pytest.mark.skipif(ON_GPU, reason="static chunks on a CPU")
# Where everything that can leave the device goes -> the (tier, home) of decoder layers and of tables.
EVERYTHING = {
    "stream": ({"place": {"*": "stream", "table": "gather"}}, ("stream", "host"), ("gather", "host")),
    "disk": ({"device_map": {"": "disk"}}, ("disk", "disk"), ("gather", "file")),
    "host": ({"place": {"*": "host", "table": "gather"}}, ("host", "host"), ("gather", "host")),
}
LENGTHS = (1, 8, 9, 17, 40)
SIZES = (((8,), 1), ((8, 16), 3))


def homes(plan, part):
    """Return the (tier, home) pairs of a part's layers, or of its only block."""
    rows = [row for row in plan.placements if row.part == part]
    layers = [row for row in rows if row.block_path.rpartition(".")[2].isdecimal()]
    return Counter((row.tier, row.home) for row in layers or rows)


def poisoned(model):
    """Overwrite staging buffers once their block has left: reading one too late is seen."""
    if model.streamer is not None:
        model.streamer.poison = True
    return model


def check_chunks(batch, inputs, expected, **options):
    prompt = through(batch, inputs, **options)
    assert batch.prompts.holds(prompt)  # it went through in chunks
    batch.prompts.release(prompt)
    assert differ(answered(batch, inputs, **options), expected) < TOLERANCE


@pytest.mark.parametrize(("family", "where"), crossed(["llama", "gemma4", "gemma3n", "qwen3_moe"], EVERYTHING, rest=1))
def test_chunks_of_a_model_off_the_device_are_the_prompt(family, where, tmp_path):
    asked, decoder, table = EVERYTHING[where]
    with lent(family) as model:
        whole = eager(model)
        expected = {count: answered(whole, model.prepare(ids(count))) for count in LENGTHS}
    with load(family, tmp_path / "b", **asked) as model:
        assert set(homes(model.plan, "language")) == {decoder} and set(homes(model.plan, "table")) == {table}
        poisoned(model)
        for sizes, rows in SIZES:
            batch = in_chunks(model, sizes, rows)
            for count in LENGTHS:
                check_chunks(batch, model.prepare(ids(count)), expected[count])
            assert not named(batch)


def test_chunks_of_layers_in_all_tiers_are_the_prompt(tmp_path):
    tiers = ("resident", "stream", "disk", "host", "disk")
    place = {f"model.language_model.layers.{number}": tier for number, tier in enumerate(tiers)}
    with load("gemma4", tmp_path / "a") as model:
        expected = {count: answered(eager(model), model.prepare(ids(count))) for count in LENGTHS}
    with load("gemma4", tmp_path / "b", place=place) as model:
        assert {tier for tier, _ in homes(model.plan, "language")} == set(tiers)
        batch = in_chunks(poisoned(model), (8, 16))
        for count in LENGTHS:
            check_chunks(batch, model.prepare(ids(count)), expected[count])


@pytest.mark.parametrize("family", ["gemma4", "gemma3"])
def test_chunks_of_an_image_with_everything_on_disk_are_the_prompt(family, tmp_path):
    with lent(family) as model:
        expected = [answered(eager(model), picture(model, family, before)) for before in (1, 6, 12)]
    with load(family, tmp_path / "b", device_map={"": "disk"}) as model:
        assert set(homes(model.plan, "vision")) == {("disk", "disk")}
        batch = in_chunks(poisoned(model), (8, 16))
        for before, wanted in zip((1, 6, 12), expected, strict=True):
            check_chunks(batch, picture(model, family, before), wanted)


@pytest.mark.parametrize("quant", [slow_on_cpu("none"), "nf4-dq"])
def test_the_demo_on_disk_says_the_same_with_media_and_adapters(quant):
    media = [{"image": DEMO / "images" / "image_1.png"}, {"audio": DEMO / "sounds" / "audio_1.wav"}, {}]
    options = {
        "quant": quant, "dtype": "float32", "context": 384, "audio_s": 1.0, "device": "cpu",
        "adapters": {name: DEMO / "adapters" / name for name in ADAPTERS},
    }  # fmt: skip
    cases = [(name, given) for name in (None, *ADAPTERS) for given in media]
    with trimtab.load(trimtab.plan(DEMO / "base", **options)) as model:
        whole = eager(model)
        expected = [answered(whole, model.prepare("What is there?", **given), adapter=name) for name, given in cases]
    with trimtab.load(trimtab.plan(DEMO / "base", device_map={"": "disk"}, **options)) as model:
        assert set(homes(model.plan, "language")) == set(homes(model.plan, "audio")) == {("disk", "disk")}
        batch = in_chunks(poisoned(model), (16, 64, 128))
        for (name, given), wanted in zip(cases, expected, strict=True):
            check_chunks(batch, model.prepare("What is there?", **given), wanted, adapter=name)


@pytest.mark.parametrize("family", ["llama", "gemma4"])
def test_rows_of_a_table_in_the_file_are_staged_for_a_replay(family, tmp_path, replayed):  # noqa: F811
    """A graph cannot read a file: the host copies the rows of a chunk's tokens before each replay."""
    with load(family, tmp_path / "a") as model:
        expected = {count: answered(eager(model), model.prepare(ids(count))) for count in (9, 40)}
    path = {"llama": "model.embed_tokens", "gemma4": "model.language_model.embed_tokens_per_layer"}[family]
    with load(family, tmp_path / "b", device_map={"": "cpu", path: "disk"}) as model:
        assert set(homes(model.plan, "table")) == {("gather", "file")}
        batch = captured(model, (16,))
        (table,) = batch.prompts.staged_tables
        assert isinstance(table, GatheredTable) and isinstance(table.source, FileRows)
        for _ in range(4):
            for count, wanted in expected.items():
                assert differ(answered(batch, model.prepare(ids(count))), wanted) < TOLERANCE
        assert replayed and all(one.replays for one in replayed) and not table.reads_staged
        assert not named(batch)


def test_streamed_layers_are_fetched_by_the_pass_itself(replayed):  # noqa: F811
    plan = trimtab.plan(
        DEMO / "base", quant="nf4-dq", context=384, audio_s=1.0, device="cpu",
        place={f"model.language_model.layers.{number}": "stream" for number in range(1, 5)},
    )  # fmt: skip
    with trimtab.load(plan, decode="auto") as model:
        model.streamer.poison = True
        batch = captured(model, (16,))
        expected = answered(eager(model), model.prepare(ids(40)))
        for _ in range(3):
            # In bfloat16 a padded product may round its sums elsewhere: a few steps of 2^-8 of the largest score.
            assert differ(answered(batch, model.prepare(ids(40))), expected) < 2**-5
        assert len(replayed) == 3


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_captured_prompts_refuse_layers_that_the_cpu_reads_and_transformers_pass_runs(tier, tmp_path, monkeypatch):
    with load("gemma4", tmp_path / "a") as model:
        expected = answered(eager(model), model.prepare(ids(40)))
    with load("gemma4", tmp_path / "b", place={"model.language_model.layers.3": tier}) as model:
        batch = Batch(poisoned(model), rows=1, decode="eager")
        with monkeypatch.context() as patched:  # as on a GPU
            patched.setattr(PrefillRunner, "captures", property(lambda self: True, lambda self, value: None), raising=False)
            batch.prompts = PrefillRunner(batch, "auto")
            assert not batch.prompts.is_on
        assert named(batch) == [f"model.language_model.layers.3 is in tier {tier}: the CPU takes part in every chunk"]
        prompt = through(batch, model.prepare(ids(40)))
        assert not batch.prompts.holds(prompt)
        del prompt
        assert differ(answered(batch, model.prepare(ids(40))), expected) < TOLERANCE


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_plan_with_such_a_layer_names_the_tier_and_captures_no_prompts(tier):
    made = narrow_plan(8, place={"model.language_model.layers.3": tier})
    prompt, step = made.execution.prompt, made.execution.step
    assert (prompt.mode, prompt.chunks, step.mode) == ("eager", (), "eager")
    assert f"is placed in tier {tier}: the CPU takes part in every step" in step.reason
    assert prompt.reason.startswith("steps are not captured")
