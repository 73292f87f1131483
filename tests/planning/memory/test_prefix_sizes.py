"""Prefix caches and pools that have no effect are refused by name, and a plan says how much of a prompt a small cache holds."""

import json
from dataclasses import replace

import pytest

import trimtab
from tests import pico
from tests.anatomies import e_series, qwen3_8b
from tests.engine.prefill.test_prefill import eager, ids
from tests.engine.prefill.test_prefix_cache import answer, scores
from tests.lent import lent
from tests.long_runs import crossed
from trimtab.checkpoint.anatomy import KVLayer
from trimtab.cli.commands.serve import configured, served_models, settings_of
from trimtab.cli.main import main, parser
from trimtab.demo.demo import FOLDER as DEMO
from trimtab.engine.prefill.prefix_cache import PrefixCache
from trimtab.errors import RequestError, TrimtabError
from trimtab.planning import Plan
from trimtab.planning.memory.prefix_cache import BLOCK_TOKENS, pages_of, staging_bytes
from trimtab.report.render import WIDTH, Lines
from trimtab.request import LoadRequest
from trimtab.serve.contract.settings import Settings
from trimtab.serve.pool import Pool
from trimtab.serve.worker.registry import ServedModel, check_sharing, read_registry

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
            assert first.cached_tokens == 0
            assert len(first.token_ids) == BLOCK_TOKENS + 6
            found = scores(batch, model.prepare([*first.token_ids[:-1], 200, 201]))[1]
            assert found == expected
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
    with pytest.raises(RequestError) as caught:
        trimtab.plan(base, **OPTIONS, prefix_cache=4096)
    error = caught.value
    assert error.field == "prefix_cache" and error.value == 4096 and "a snapshot of sliding or recurrent layers" in str(error)
    least = int(error.reason.split("at least ")[1].split()[0])
    assert trimtab.plan(base, **OPTIONS, prefix_cache=least).host["prefix_cache"] == least
    assert main(["plan", str(base), "--quant", "none", "--device", "cpu", "--context", "160", "--prefix-cache", "4096B"]) == 2
    assert "--prefix-cache 4096: must be at least" in capsys.readouterr().err
    plain = pico.build("llama", tmp_path / "plain")
    with pytest.raises(RequestError) as caught:
        trimtab.plan(plain, **OPTIONS, prefix_cache=4096)
    assert "snapshot" not in str(caught.value)


def test_sizes_of_known_models_by_hand():
    """E4B: 20 layers of 2 heads of 256 keep 512 places, 4 of 2 heads of 512 a block; Qwen3-8B: 36 of 8 heads of 128."""
    sizes = pages_of(e_series("E4B").kv_layers, "bfloat16", "full", context_tokens=4096)
    block = 4 * 2 * 32 * 2 * 512 * 2
    assert sizes.page_bytes == block
    assert sizes.snapshot_pages == -(-(20 * 2 * 512 * 2 * 256 * 2 + block) // block)
    qwen = pages_of(qwen3_8b().kv_layers, "bfloat16", "full", context_tokens=4096)
    assert (qwen.page_bytes, qwen.snapshot_pages) == (36 * 2 * 32 * 8 * 128 * 2, 0)


def test_a_plan_says_how_much_of_a_prompt_a_small_cache_holds(tmp_path):
    base = pico.build("gemma3", tmp_path)
    kv_layers = trimtab.plan(base, **OPTIONS)
    assert kv_layers.prefix_reason == "" and "prefix cache" not in str(kv_layers)
    with pytest.raises(RequestError) as caught:
        trimtab.plan(base, **OPTIONS, prefix_cache=4096)
    least = int(caught.value.reason.split("at least ")[1].split()[0])
    small = trimtab.plan(base, **OPTIONS, prefix_cache=least)
    assert f"hold {BLOCK_TOKENS} tokens of one prompt; a prompt that fills the context of 160" in small.prefix_reason
    assert f"prefix cache  {small.prefix_reason}" in str(small)
    assert "prefix cache  " in Lines(WIDTH).show(small.document())
    assert Plan.from_json(json.loads(json.dumps(small.to_json()))) == small
    assert small.to_json()["prefix_reason"] == small.prefix_reason
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
    with pytest.raises(TrimtabError) as caught:
        call()
    error = caught.value
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
