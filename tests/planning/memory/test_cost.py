"""Bytes of packed weights, of torch's allocator, of caches of keys, values and prefixes; seconds by tier."""

from dataclasses import replace

import pytest

import trimtab
from tests import pico
from tests.anatomies import e_series, qwen3_8b, small
from tests.engine.prefill.test_prefill import eager, ids
from tests.engine.prefill.test_prefix_cache import answer, scores
from tests.lent import lent
from tests.long_runs import crossed
from tests.raised import raised
from trimtab.checkpoint.anatomy import KVLayer
from trimtab.cli.commands.serve import configured, served_models, settings_of
from trimtab.cli.main import main, parser
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine.prefill.prefix_cache import PrefixCache
from trimtab.errors import RequestError, TrimtabError
from trimtab.formats.record import packed_bytes, packed_parts
from trimtab.planning.memory.activations import COEFFICIENTS, kv_cache_bytes, needs_of, patches_of, use_of
from trimtab.planning.memory.prefix_cache import BLOCK_TOKENS, pages_of, staging_bytes
from trimtab.planning.values.byte_sizes import Rates, Weights, Work, allocated_bytes, allocator_reserve_bytes, buffer_bytes, seconds
from trimtab.report.render import WIDTH, Lines
from trimtab.request import LoadRequest
from trimtab.serve.contract.settings import Settings
from trimtab.serve.pool import Pool
from trimtab.serve.worker.registry import ServedModel, check_sharing, read_registry

MIB = 2**20


def test_nf4_is_half_a_byte_a_weight_and_one_float_a_block():
    assert packed_parts((128, 64), "nf4", "bfloat16") == {"weight": 4096, "absmax": 4 * 128}
    assert packed_parts((128, 64), "fp4", "bfloat16") == packed_parts((128, 64), "nf4", "bfloat16")


def test_double_quantization_has_byte_scales_nested_scales_and_an_offset():
    parts = packed_parts((1024, 1024), "nf4-dq", "bfloat16")
    assert parts == {"weight": 524288, "absmax": 16384, "nested_absmax": 256, "offset": 4}


def test_an_odd_number_of_weights_is_padded_to_a_byte_and_a_block():
    assert packed_parts((1, 65), "nf4", "bfloat16") == {"weight": 33, "absmax": 8}
    assert packed_parts((1, 65), "nf4-dq", "bfloat16") == {"weight": 33, "absmax": 2, "nested_absmax": 4, "offset": 4}


def test_int8_has_one_float_an_output_row():
    assert packed_parts((7, 5), "int8", "bfloat16") == {"weight": 35, "SCB": 28}


def test_experts_are_counted_whole():
    assert packed_bytes((8, 16, 32), "none", "bfloat16") == 8 * 16 * 32 * 2
    assert packed_bytes((8, 16, 32), "none", "float32") == 8 * 16 * 32 * 4


def test_an_unknown_format_is_refused():
    error = raised(RequestError, packed_parts, (2, 2), "nf5", "bfloat16", match="no format of weights")
    assert (error.field, error.value) == ("quant", "nf5")


@pytest.mark.parametrize("quant", ["nf4", "nf4-dq", "fp4", "int8"])
def test_packed_bytes_are_those_of_bitsandbytes(quant):
    torch = pytest.importorskip("torch")
    from trimtab.engine.formats.bitsandbytes import quantize

    packed = quantize(torch.randn(192, 320, dtype=torch.bfloat16), quant)
    parts = {name: part.numel() * part.element_size() for name, part in packed.parts.items()}
    assert parts == packed_parts((192, 320), quant, "bfloat16")


def test_parts_in_a_block_buffer_start_at_256_bytes():
    assert buffer_bytes({"weight": 33, "absmax": 256, "offset": 4}) == 768


@pytest.mark.parametrize(
    ("asked", "counted"),
    [
        (0, 0),
        (1, 512),
        (513, 1024),
        (9 * MIB + 1, 9 * MIB + 512),
        (12 * MIB, 12 * MIB),
        (12 * MIB + MIB // 2, 12 * MIB + MIB // 2),  # 1.5 MiB of its 14 MiB segment are split off
        (13 * MIB + MIB // 2, 14 * MIB),  # half a MiB is not
    ],
)
def test_the_allocator_rounds_as_torch_does(asked, counted):
    assert allocated_bytes(asked) == counted


def test_the_reserve_is_a_share_with_a_floor():
    assert allocator_reserve_bytes(10) == 64 * MIB and allocator_reserve_bytes(100 * 2**30) == 3 * 2**30


def test_kv_cache_counts_both_of_keys_and_values_and_one_copy_of_the_largest_keys():
    layers = (KVLayer(0, 2, 16, None, None), KVLayer(1, 4, 16, None, None), KVLayer(2, 4, 16, None, 1))
    one = 3 * 16 * 2  # batch, head_dim, bytes
    assert kv_cache_bytes(layers, "bfloat16", batch=3, tokens=100, new_tokens=1) == (2 * 100 * (2 + 4) + 99 * 4) * one


def test_a_sliding_layer_holds_its_window_and_the_piece_that_came_last():
    layers = (KVLayer(0, 1, 8, 32, None),)
    held = kv_cache_bytes(layers, "float32", batch=1, tokens=1000, new_tokens=100)
    assert held == (2 * (31 + 100) + 31) * 8 * 4
    assert kv_cache_bytes(layers, "float32", batch=1, tokens=10, new_tokens=10) == 2 * 10 * 8 * 4


def test_kv_cache_bytes_are_those_of_transformers():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=8, hidden_size=16, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    cache, layers = transformers.DynamicCache(config=config), (KVLayer(0, 2, 8, 16, None), KVLayer(1, 2, 8, None, None))
    tokens = 0
    for new_tokens in (40, 30, 1):
        for layer in range(2):
            cache.update(*(torch.zeros(3, 2, new_tokens, 8) for _ in range(2)), layer)
        tokens += new_tokens
        held = sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values))
        copy = (tokens - new_tokens) * 3 * 2 * 8 * 4
        assert kv_cache_bytes(layers, "float32", batch=3, tokens=tokens, new_tokens=new_tokens) == held + copy


def test_every_coefficient_says_where_it_comes_from():
    assert all(multiple > 0 and len(origin.split()) > 3 for multiple, origin in COEFFICIENTS.values())


def test_a_model_type_takes_the_patches_of_the_longest_name_it_starts_with():
    assert patches_of("gemma4") == patches_of("gemma4_unified") == (2520, 280)
    assert patches_of("gemma3n") != patches_of("gemma3") and patches_of("never seen") == (4096, 1024)


def needs(anatomy=None, *, quant="nf4-dq", has_adapters=False, **asked):
    anatomy = anatomy or e_series("E2B")
    use = use_of(LoadRequest(model="m", **asked), anatomy, answer_tokens=256)
    return needs_of(anatomy, use, quant=quant, has_adapters=has_adapters)


def total(**asked):
    found = needs(**asked)
    return found.kv_cache_bytes + found.activation_bytes


@pytest.mark.parametrize("more", [{"quant": "none"}, {"quant": "int4-g32-idx"},
    {"context_tokens": 8192}, {"batch": 2}, {"images": 9}, {"audio_s": 600.0}, {"has_adapters": True},
])  # fmt: skip
def test_asking_for_more_needs_more(more):
    least = {"context_tokens": 2048, "images": 1, "audio_s": 1.0, "quant": "int4-g32"}
    grown = total(**(least | more))
    assert grown < total(**least) if more == {"quant": "none"} else grown > total(**least)


def test_the_worst_phase_is_named():
    assert needs(images=0, audio_s=0).phase == "prompt" and needs(images=40, audio_s=0, context_tokens=64).phase == "pictures"
    assert needs(images=0, audio_s=600, context_tokens=64).phase == "sound"


def test_a_model_without_towers_needs_nothing_for_pictures_and_sound():
    anatomy = e_series("E2B", towers=False)
    assert needs(anatomy, images=50, audio_s=3000) == needs(anatomy, images=0, audio_s=0)


def test_a_piece_of_the_prompt_holds_every_picture_and_sound():
    use = use_of(LoadRequest(model="m", images=10, audio_s=30.0), e_series("E2B"), answer_tokens=256)
    assert use.prefill_tokens == 10 * 280 + 750 + 64
    assert use_of(LoadRequest(model="m", context_tokens=100), e_series("E2B"), answer_tokens=256).prefill_tokens == 100


def test_per_layer_inputs_count_while_they_are_projected_and_normed():
    asked = {"quant": "none", "images": 0, "audio_s": 0, "context_tokens": 1024}
    values = 1024 * 42 * 256
    activations = needs(e_series("E4B"), **asked).activation_bytes
    # Raw rows and their projection in bfloat16 beside two float32 copies: 12 bytes a value; hidden states come on top.
    assert 12 * values <= activations < 14 * values


def test_experts_count_their_repeated_rows():
    few, many = needs(small([(64, 64)], experts=0)), needs(small([(64, 64)], experts=4, hidden=64))
    assert many.activation_bytes >= few.activation_bytes


@pytest.mark.parametrize(("inner", "hidden", "row_bytes"), [(64, 4096, 5 * 4096 + 2 * 64), (8192, 1024, 4 * 8192 + 2 * 1024)])
def test_experts_count_a_row_for_each_that_a_token_chooses(inner, hidden, row_bytes):
    """A float32 sum, and half of what both stacks make in bfloat16, as kernels compute them; or all of that, as modules do."""

    def activations(chosen):
        wide = small([(inner, hidden)], experts=32, hidden=hidden)
        rows = tuple(replace(row, chosen=chosen) if row.kind == "experts" else row for row in wide.rows)
        asked = {"quant": "none", "context_tokens": 512, "images": 0, "audio_s": 0}
        return needs(replace(wide, rows=rows), **asked).phases["prompt"][1]

    assert activations(22) - activations(10) == 512 * 12 * row_bytes
    assert activations(0) == activations(8)  # the usual number


RATES = Rates()
STEP = Work(passes=1, prompt_rows=512, step_rows=1)


WEIGHTS = Weights(nbytes=50_000_000, flops=200_000_000, leaves=9)


def cost(tier, home="host", weights=WEIGHTS, work=STEP, **machine):
    machine = {"pinned": True, "on_cpu": False} | machine
    return seconds(tier, home, weights, work, RATES, **machine)


def test_tiers_cost_more_the_farther_the_weights_are():
    steps = [cost("resident")[1], cost("stream")[1], cost("disk", "disk")[1]]
    assert steps == sorted(steps) and steps[0] < steps[1] < steps[2]
    assert cost("host")[1] > cost("resident")[1]


def test_a_streamed_block_costs_its_copy_at_the_measured_rate():
    assert cost("stream")[1] == pytest.approx(50_000_000 / RATES.pinned_h2d_Bps + RATES.transfer_s)
    assert cost("stream", pinned=False)[1] == pytest.approx(50_000_000 / RATES.pageable_h2d_Bps + RATES.transfer_s)
    assert cost("stream", on_cpu=True)[1] == pytest.approx(50_000_000 / RATES.host_Bps + RATES.transfer_s)


def test_a_tower_costs_nothing_a_token():
    request_s, step_s = cost("stream", work=Work(passes=1, prompt_rows=2520, step_rows=0))
    assert request_s > 0 and step_s == 0


def test_a_part_that_the_request_does_not_use_costs_nothing():
    assert cost("disk", "disk", work=Work(passes=0, prompt_rows=0, step_rows=0)) == (0, 0)


def test_a_gathered_table_costs_its_rows_and_not_its_size():
    table = Weights(nbytes=5_637_144_576, flops=0, leaves=1, row_bytes=21504)
    host, file = cost("gather", "host", table)[1], cost("gather", "file", table)[1]
    assert host == pytest.approx(RATES.launch_s + RATES.transfer_s + 21504 / RATES.pinned_h2d_Bps)
    assert file == pytest.approx(host + RATES.disk_access_s + 21504 / RATES.disk_Bps)


def test_a_rate_of_zero_is_refused():
    with pytest.raises(RequestError, match="disk_Bps"):
        Rates(disk_Bps=0)


OPTIONS = {"quant": "none", "dtype": "float32", "context": 160, "device": "cpu"}


# A cache that is too small --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "kv"), crossed(pico.FAMILIES, ["full", "int8"]))
def test_the_planned_pages_are_those_of_the_runtime_and_the_least_cache_is_one_that_hits(family, kv):
    with lent(family, context=160, kv=kv) as model:
        pages = pages_of(model.anatomy.kv_layers, model.anatomy.dtype, kv, context_tokens=160)
        # The next turn of a chat: one that other prompts begin with may be evicted for the answer.
        count = BLOCK_TOKENS + 5 if pages.snapshot_pages else BLOCK_TOKENS
        for capacity, expected in ((pages.bytes_of(BLOCK_TOKENS), count), (pages.bytes_of(BLOCK_TOKENS) - 1, 0)):
            cache = model.prefix_cache = PrefixCache(model, capacity)
            batch = eager(model)
            first = answer(batch, model.prepare(ids(BLOCK_TOKENS)))
            assert first.cached_tokens == 0 and len(first.token_ids) == BLOCK_TOKENS + 6
            assert scores(batch, model.prepare([*first.token_ids[:-1], 200, 201]))[1] == expected
            if expected:
                assert (cache.layout.page_bytes, cache.store.snapshot_pages) == (pages.page_bytes, pages.snapshot_pages)
            cache.close()
        model.prefix_cache = None
        with pytest.raises(RequestError, match=f"at least {pages.bytes_of(BLOCK_TOKENS)} bytes") as caught:
            model.keep_prefixes(pages.bytes_of(BLOCK_TOKENS) - 1)
        assert caught.value.field == "prefix_cache" and caught.value.value == pages.bytes_of(BLOCK_TOKENS) - 1
        model.keep_prefixes(pages.bytes_of(BLOCK_TOKENS))


def test_a_cache_that_no_prompt_could_resume_from_is_refused_by_the_plan(tmp_path, capsys):
    base = pico.build("gemma3", tmp_path)
    error = raised(RequestError, trimtab.plan, base, prefix_cache=4096, **OPTIONS)
    assert error.field == "prefix_cache" and error.value == 4096 and "a snapshot of sliding or recurrent layers" in str(error)
    least = int(error.reason.split("at least ")[1].split()[0])
    assert trimtab.plan(base, **OPTIONS, prefix_cache=least).host["prefix_cache"] == least
    assert main(["plan", str(base), "--quant", "none", "--device", "cpu", "--context", "160", "--prefix-cache", "4096B"]) == 2
    assert "--prefix-cache 4096: must be at least" in capsys.readouterr().err
    plain = pico.build("llama", tmp_path / "plain")
    assert "snapshot" not in str(raised(RequestError, trimtab.plan, plain, prefix_cache=4096, **OPTIONS))


def test_sizes_of_known_models_by_hand():
    """E4B: 20 layers of 2 heads of 256 keep 512 places, 4 of 2 heads of 512 a block; Qwen3-8B: 36 of 8 heads of 128."""
    sizes = pages_of(e_series("E4B").kv_layers, "bfloat16", "full", context_tokens=4096)
    block = 4 * 2 * 32 * 2 * 512 * 2
    assert sizes.page_bytes == block and sizes.snapshot_pages == -(-(20 * 2 * 512 * 2 * 256 * 2 + block) // block)
    qwen = pages_of(qwen3_8b().kv_layers, "bfloat16", "full", context_tokens=4096)
    assert (qwen.page_bytes, qwen.snapshot_pages) == (36 * 2 * 32 * 8 * 128 * 2, 0)


def test_a_plan_says_how_much_of_a_prompt_a_small_cache_holds(tmp_path):
    base = pico.build("gemma3", tmp_path)
    kv_layers = trimtab.plan(base, **OPTIONS)
    assert kv_layers.prefix_reason == "" and "prefix cache" not in str(kv_layers)
    error = raised(RequestError, trimtab.plan, base, prefix_cache=4096, **OPTIONS)
    least = int(error.reason.split("at least ")[1].split()[0])
    small = trimtab.plan(base, **OPTIONS, prefix_cache=least)
    assert f"hold {BLOCK_TOKENS} tokens of one prompt; a prompt that fills the context of 160" in small.prefix_reason
    assert f"prefix cache  {small.prefix_reason}" in str(small) and "prefix cache  " in Lines(WIDTH).show(small.document())
    assert trimtab.plan(base, **OPTIONS, prefix_cache="64MiB").prefix_reason == ""


def test_a_state_of_a_recurrent_layer_is_a_part_of_a_snapshot_and_of_the_buffer():
    """Qwen3.5-9B: recurrent layers have 32 heads of 128 x 128 and a window of 4 of 8,192 values, full ones 4 heads of 256."""
    recurrent, full = (KVLayer(0, 0, 0, None, None, state_values=32 * 128 * 128 + 4 * 8192), KVLayer(3, 4, 256, None, None))
    sizes = pages_of([recurrent, recurrent, recurrent, full], "bfloat16", "full", context_tokens=4096)
    block, state = 2 * 32 * 4 * 256 * 2, 4 * (32 * 128 * 128 + 4 * 8192)
    assert sizes.page_bytes == block and sizes.snapshot_pages == -(-(3 * state + block) // block)
    assert staging_bytes([replace(recurrent, state_values=2**24)], "bfloat16", context_tokens=4096) == 2**26


def test_a_chat_goes_on_without_its_default_cache_where_that_is_too_small(monkeypatch, capsys):
    import io

    monkeypatch.setattr("trimtab.cli.chat.chat.PREFIX_CACHE", "8KiB")
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    asked = ["chat", str(DEMO / "base"), "--quant", "none", "--device", "cpu", "--context", "256", "--no-history"]
    assert main([*asked, "--max-new-tokens", "2"]) == 0
    assert "the default prefix cache must be at least" in capsys.readouterr().err
    assert main([*asked, "--max-new-tokens", "2", "--prefix-cache", "8KiB"]) == 2


# Options without an effect --------------------------------------------------------------------------------------------


def refused(call):
    error = raised(TrimtabError, call)
    assert isinstance(error, RequestError) and "has no effect" in str(error) and error.hint
    return error.field


def test_a_pool_of_one_row_is_refused(tmp_path):
    base = pico.build("llama", tmp_path)
    assert refused(lambda: trimtab.plan(base, **OPTIONS, kv_tokens=512)) == "kv_tokens"
    assert refused(lambda: trimtab.load(base, **OPTIONS, kv_tokens=512)) == "kv_tokens"
    assert main(["plan", str(base), "--device", "cpu", "--context", "160", "--kv-tokens", "512"]) == 2
    assert trimtab.plan(base, **OPTIONS, kv_tokens=192, batch=2).pool_tokens == 192
    request = LoadRequest(model=str(base), context_tokens=160, kv_tokens=512)
    assert refused(lambda: ServedModel(name="m", request=request, rows=1)) == "kv_tokens"
    assert ServedModel(name="m", request=request, rows=2).rows == 2 and ServedModel(name="m", request=request).rows is None
    (tmp_path / "models.toml").write_text(f'[models.m]\npath = "{base}"\ncontext = 160\nkv_tokens = 512\nrows = 1\n')
    with pytest.raises(TrimtabError, match="kv_tokens.*has no effect with one row"):
        read_registry(tmp_path / "models.toml")


def served(*arguments):
    options = configured(parser().parse_args(["serve", *map(str, arguments)]))
    return served_models(options), settings_of(options)


def test_sharing_without_a_prefix_cache_is_refused(tmp_path):
    models, settings = served(DEMO / "base", "--share-prefix-cache")
    assert refused(lambda: check_sharing(models, settings)) == "share_prefix_cache"
    assert refused(lambda: Pool(models, settings)) == "share_prefix_cache"
    check_sharing(models, Settings())
    check_sharing(*served(DEMO / "base", "--share-prefix-cache", "--prefix-cache", "64MiB"))
    written = f'model = "{DEMO / "base"}"\nshare_prefix_cache = true\n'
    (tmp_path / "serve.toml").write_text(written)
    assert refused(lambda: check_sharing(*served("--config", tmp_path / "serve.toml"))) == "share_prefix_cache"
    (tmp_path / "serve.toml").write_text(written + 'prefix_cache = "64MiB"\n')
    check_sharing(*served("--config", tmp_path / "serve.toml"))


@pytest.mark.parametrize("more", [(), ("--ray", "--print-config", "-")], ids=["here", "for a cluster"])
def test_the_command_refuses_sharing_before_anything_is_loaded(more, capsys):
    pytest.importorskip("ray") if more else None
    assert main(["serve", str(DEMO / "base"), "--port", "0", "--share-prefix-cache", *more]) == 2
    assert "--share-prefix-cache: has no effect" in capsys.readouterr().err
