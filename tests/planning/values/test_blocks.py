"""What can move of a model, in which tiers, with how many bytes; and the reasons against."""

from dataclasses import replace

import pytest

from tests.anatomies import e_series, small
from trimtab.checkpoint.anatomy import ModuleRow, TensorRow
from trimtab.formats.record import packed_bytes
from trimtab.planning.values.blocks import blocks_of, quant_of, tied_paths, why_fixed

E2B = e_series("E2B")
EMBED = "model.language_model.embed_tokens"


def block(anatomy, path, quant="nf4-dq"):
    return {found.block_path: found for found in blocks_of(anatomy, quant)}[path]


def test_every_module_is_in_exactly_one_block_and_every_byte_is_counted_once():
    anatomy = e_series("E2B")
    blocks = blocks_of(anatomy, "none")
    assert [b.block_path for b in blocks] == list(dict.fromkeys(row.block for row in anatomy.rows))
    owned = sum(t.nbytes for row in anatomy.rows for t in row.tensors if t.tied_to is None)
    assert sum(b.movable_bytes + b.fixed_bytes for b in blocks) == owned


def test_a_decoder_layer_moves_its_linears_and_keeps_its_norms():
    found = block(e_series("E2B"), "model.language_model.layers.0")
    assert found.part == "language" and found.paid == "token" and found.allowed_tiers == ("resident", "stream", "disk", "host")
    assert len(found.leaves) == 9 and found.leaves[0].endswith("self_attn.q_proj")
    mlp = packed_bytes((6144, 1536), "nf4-dq", "bfloat16")
    assert found.load_transient_bytes == mlp + 6144 * 1536 * 2 and found.fixed_bytes == 2 * (1 + 256 + 256 + 4 * 1536 + 1536)


def test_a_block_buffer_is_the_packed_weights_with_each_part_aligned():
    found = block(e_series("E2B"), "model.language_model.layers.0")
    assert 0 < found.buffer_bytes - found.movable_bytes < 4 * len(found.leaves) * 256 and found.buffer_bytes % 256 == 0


def test_the_per_layer_table_can_be_gathered_and_nothing_else():
    found = block(e_series("E4B"), f"{EMBED}_per_layer")
    assert found.allowed_tiers == ("resident", "gather") and found.is_table and found.part == "table"
    assert found.movable_bytes == 5_637_144_576 and found.row_bytes == 21504
    assert "use gather" in found.refused["stream"] and found.flops_per_token == 0


def test_linears_cannot_be_gathered():
    assert "looked up by index" in block(e_series("E2B"), "model.language_model.layers.0").refused["gather"]


def test_a_tied_head_moves_nothing_and_says_with_what_it_is_tied():
    found = block(e_series("E2B"), "lm_head")
    assert found.allowed_tiers == ("resident",) and found.movable_bytes == found.fixed_bytes == 0
    assert EMBED in found.refused["stream"]


def test_an_untied_head_moves():
    found = block(small(head_tied=False), "lm_head")
    assert found.allowed_tiers == ("resident", "stream", "disk", "host") and found.movable_bytes == 1000 * 64 * 2


def test_the_token_table_of_the_e_series_stays_for_two_reasons():
    anatomy = e_series("E2B")
    reason = why_fixed(anatomy.by_path()[EMBED], anatomy)
    assert "Gemma4Model.forward reads its weight" in reason and "tied lm_head needs the whole matrix" in reason
    root = block(anatomy, "model.language_model")
    assert f"{EMBED}" not in root.leaves and root.fixed_bytes > 262144 * 1536 * 2


def test_norms_and_buffers_say_why_they_stay():
    anatomy = e_series("E2B")
    assert "stay on the execution device" in why_fixed(anatomy.by_path()["model.language_model.norm"], anatomy)


def test_towers_and_connectors_are_paid_by_picture_and_by_sound():
    paid = {b.block_path: b.paid for b in blocks_of(e_series("E2B"), "nf4")}
    assert paid["model.vision_tower.encoder.layers.3"] == paid["model.embed_vision"] == "image"
    assert paid["model.audio_tower.layers.3"] == paid["model.embed_audio"] == "audio"


def test_only_quantized_modules_are_packed():
    layer = "model.language_model.layers.0"
    plain, packed = block(small(), layer), block(small(quantized=True), layer)
    assert plain.movable_bytes == 64 * 64 * 2 and packed.movable_bytes == packed_bytes((64, 64), "nf4-dq", "bfloat16")
    assert plain.dense_bytes == 0 and packed.dense_bytes == 64 * 64 * 2


def test_fused_experts_move_unquantized():
    found = block(small([(64, 64)], experts=4, quantized=True), "model.language_model.layers.0")
    assert found.leaves == ("model.language_model.layers.0.mlp.up_proj", "model.language_model.layers.0.experts")
    assert found.movable_bytes == packed_bytes((64, 64), "nf4-dq", "bfloat16") + 4 * 3 * 64 * 64 * 2


def test_a_step_reads_the_experts_that_its_tokens_chose():
    """Two of four, each as likely: one row reads half of them, two three quarters; where the config does not say how many, all."""
    anatomy, path = small([(64, 64)], experts=4), "model.language_model.layers.0"
    rows = tuple(replace(row, chosen=2) if row.kind == "experts" else row for row in anatomy.rows)
    every, found = block(anatomy, path, "none"), block(replace(anatomy, rows=rows), path, "none")
    stacks = 4 * 3 * 64 * 64 * 2
    assert found.movable_bytes == every.movable_bytes == every.read_bytes(1) and found.expert_bytes == stacks
    assert [found.movable_bytes - found.read_bytes(count) for count in (1, 2, 3)] == [stacks // 2, stacks // 4, stacks // 8]
    assert every.flops_per_token - found.flops_per_token == stacks // 2


def test_a_bias_stays_on_the_device():
    bias = TensorRow("lin.bias", (8,), "bfloat16", False, ("lin.bias",))
    weight = TensorRow("lin.weight", (8, 4), "bfloat16", False, ("lin.weight",))
    row = ModuleRow("lin", "Linear", "language", "linear", "lin", (weight, bias))
    (found,) = blocks_of(replace(small(), rows=(row,)), "none")
    assert (found.movable_bytes, found.fixed_bytes, found.fixed_allocated_bytes) == (64, 16, 512)


def test_int8_packs_beside_a_float16_copy():
    found = block(small([(64, 64)], quantized=True), "model.language_model.layers.0", "int8")
    assert found.load_transient_bytes == 64 * 64 * (2 + 2 + 1) + 4 * 64


def test_a_packed_checkpoint_packs_nothing_at_load():
    anatomy = replace(small(quantized=True), prequantized="nf4")
    found = block(anatomy, "model.language_model.layers.0", "nf4")
    assert found.dense_bytes == 0 and found.load_transient_bytes == found.movable_bytes


def test_auto_is_the_checkpoints_format_and_else_the_default():
    assert quant_of(replace(small(), prequantized="int8"), "auto") == "int8"
    assert quant_of(small(), "auto") == "nf4-dq" and quant_of(small(), "fp4") == "fp4"


def test_a_table_beside_linears_stays():
    anatomy = small(table=(100, 32))
    rows = tuple(replace(row, block="model.language_model") if row.gather_only else row for row in anatomy.rows)
    rows = tuple(replace(row, block="model.language_model") if row.kind == "linear" else row for row in rows)
    found = block(replace(anatomy, rows=rows), "model.language_model")
    assert "model.language_model.embed_tokens_per_layer" not in found.leaves and not found.is_table


def test_ties_are_known_from_both_ends():
    tied = tied_paths(e_series("E2B"))
    assert tied == {"lm_head.weight": f"{EMBED}.weight", f"{EMBED}.weight": "lm_head.weight"}


@pytest.mark.parametrize("name", ["E2B", "E4B"])
def test_blocks_of_a_full_model_are_those_of_its_layers(name):
    blocks = blocks_of(e_series(name), "nf4-dq")
    layers = {"E2B": 35, "E4B": 42}[name]
    assert len(blocks) == 1 + layers + 1 + 1 + 16 + 1 + 1 + 12 + 1 + 1


def test_the_hand_written_e2b_is_that_of_the_real_classes(tmp_path):
    pytest.importorskip("transformers")
    from tests import pico
    from trimtab.checkpoint.folder import read_checkpoint
    from trimtab.engine.loader import transformers_model

    real = transformers_model.read_anatomy(read_checkpoint(pico.e_series("e2b", tmp_path)), quant="nf4-dq", dtype="bfloat16")
    ours = {b.block_path: b for b in blocks_of(E2B, "nf4-dq")}
    theirs = {b.block_path: b for b in blocks_of(real, "nf4-dq")}
    assert ours.keys() == theirs.keys() and set(real.kv_layers) == set(E2B.kv_layers)
    for path, block_ in theirs.items():
        assert (block_.movable_bytes, block_.allowed_tiers) == (ours[path].movable_bytes, ours[path].allowed_tiers), path
        # Small fixed tensors (a tower's output norm, the scale of a table) are not written down by hand.
        assert 0 <= block_.fixed_bytes - ours[path].fixed_bytes < 20_000, path
