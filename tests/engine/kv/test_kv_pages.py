"""Keys and values in pages: the pool's accounts, and attention over pages equals attention over rows in one piece, bit for bit."""

import json
import math

import pytest
import torch

from bench.kv_waste import mixes
from tests import ROOT
from tests.cuda_on_cpu.modules import launches
from tests.cuda_on_cpu.modules import small as cpu_module
from tests.engine.kernels.test_fused import random
from tests.long_runs import slow_on_cpu
from trimtab.engine.kernels import attention_and_norms, selfcheck
from trimtab.engine.kv.sequence import PagePool
from trimtab.errors import DoesNotFitError
from trimtab.planning.values.byte_sizes import FIRST, NONE, PAGE_TOKENS, SCRAP, pages_of, pool_tokens

# Of the mixes of bench/kv_waste.py in the docs.
TITLES = (
    "texts of 512, answers of 128", "texts of 513, answers of 128",
    "half texts of 512, a quarter images of 283 and audio of 152; answers of 128", "16 to 768 in, 16 to 256 out",
    "16 to 128 in, 16 to 64 out",
)  # fmt: skip


# The pool ------------------------------------------------------------------------------------------------------------


def test_a_pool_gives_whole_pages_and_says_what_is_left():
    pool = PagePool(6 * PAGE_TOKENS, 3, 300, torch.device("cpu"))
    first = pool.take(PAGE_TOKENS + 1)
    assert first == (FIRST, FIRST + 1) and pool.free_tokens == 4 * PAGE_TOKENS
    assert pool.fits(4 * PAGE_TOKENS) and not pool.fits(4 * PAGE_TOKENS + 1)
    with pytest.raises(DoesNotFitError, match="257 tokens: 256 of the pool's 384 are free"):
        pool.take(4 * PAGE_TOKENS + 1)
    second = pool.take(4 * PAGE_TOKENS)
    assert not set(first) & set(second) and pool.free_tokens == 0
    pool.give(first)
    assert pool.take(1) == (FIRST,)


def test_tables_follow_rows_that_move_and_leave():
    pool = PagePool(8 * PAGE_TOKENS, 3, 200, torch.device("cpu"))
    one, two = pool.take(100), pool.take(64)
    pool.bind(0, one)
    pool.bind(2, two)
    table = pool.table.table
    assert table.tolist() == [[*one, NONE, NONE], [NONE] * 4, [*two, NONE, NONE, NONE]]
    pool.move(2, 0)
    assert table.tolist() == [[*two, NONE, NONE, NONE], [NONE] * 4, [NONE] * 4]
    assert pool.pages_at(0) == two and pool.pages_at(2) == () and pool.of_row(0).tolist() == list(two)
    pool.unbind(0)
    assert not table.any() and pool.pages_at(0) == ()


def test_what_a_row_has_no_page_for_is_written_to_nobodys():
    pool = PagePool(4 * PAGE_TOKENS, 2, 256, torch.device("cpu"))
    pool.bind(0, pool.take(70))
    places = torch.tensor([0, 63, 64, 127, 128, 255])
    written = pool.table.written(places[None], pool.table.table[:1])[0].tolist()
    assert written[:4] == [FIRST * 64, FIRST * 64 + 63, FIRST * 64 + 64, FIRST * 64 + 127]
    assert [one // PAGE_TOKENS for one in written[4:]] == [SCRAP, SCRAP]
    assert pool.table.written(torch.tensor([3, 3])).tolist() == [FIRST * 64 + 3, SCRAP * 64 + 3]


def test_a_pool_is_for_several_rows_that_share_less_than_their_contexts():
    assert pool_tokens(None, rows=8, context_tokens=1024) is None and pool_tokens(4096, rows=1, context_tokens=1024) is None
    assert pool_tokens(8192, rows=8, context_tokens=1024) is None and pool_tokens(4000, rows=8, context_tokens=1024) == 4032
    assert [pages_of(one) for one in (1, 64, 65)] == [1, 1, 2]


def test_the_committed_shares_of_waste_are_those_of_pages_rounded_up_and_those_of_the_docs():
    """By another route: bench/kv_waste.py reserves the pages of a batch, here lengths are rounded up to whole pages."""
    root = ROOT
    rows = {row["mix"]: row for row in json.loads((root / "bench/results/kv_waste.json").read_text("utf-8"))["rows"]}
    page = (root / "docs/operate.md").read_text("utf-8")
    assert set(rows) == set(mixes())
    for (name, mix), title in zip(mixes().items(), TITLES, strict=True):
        allocated = sum(math.ceil((prompt + answer) / 64) * 64 for prompt, answer in mix)
        wasted = 1 - sum(map(sum, mix)) / allocated
        early = 1 - sum(prompt + answer // 2 for prompt, answer in mix) / allocated
        row = rows[name]
        assert (row["allocated_tokens"], row["wasted"], row["early"]) == (allocated, round(wasted, 4), round(early, 4))
        assert row["allocated_bytes"] == allocated * row["bytes_per_token"]
        assert f"| {title} | {100 * wasted:.1f} % | {100 * early:.1f} % |" in page


# Attention -----------------------------------------------------------------------------------------------------------


def paged(keys, values, positions, *, extra=3, seed=0):
    """Return (pool of keys, pool of values, their PagePool): the rows' places scattered over pages in a random order, with NaN in
    every place that no row has seen."""
    n, heads, places, dim = keys.shape
    needed = n * pages_of(places) + extra
    pool = PagePool(needed * PAGE_TOKENS, n, places, torch.device("cpu"))
    order = torch.randperm(needed, generator=torch.Generator().manual_seed(seed)).tolist()
    kept = [torch.full((heads, pool.places, dim), math.nan, dtype=keys.dtype) for _ in range(2)]
    for row in range(n):
        # No more pages than its position needs.
        count = pages_of(min(int(positions[row]) + 1, places))
        pool.bind(row, [FIRST + order.pop() for _ in range(count)])
        seen = min(int(positions[row]) + 1, places)
        at = pool.table.written(torch.arange(seen)[None], pool.table.table[row : row + 1])[0]
        for to, source in zip(kept, (keys, values), strict=True):
            to[:, at] = source[row, :, :seen]
    return *kept, pool


SHAPES = [(8, 2, 256), (8, 2, 512), (16, 1, 512), (10, 1, 128), (4, 2, 64), (6, 2, 80)]


@pytest.mark.parametrize("heads, kv_heads, dim", [SHAPES[0], *(slow_on_cpu(*shape) for shape in SHAPES[1:3]), *SHAPES[3:]])
def test_attention_over_pages_has_the_bits_of_attention_over_rows(heads, kv_heads, dim):
    module, n, places = cpu_module(1, multiprocessors=6), 3, 300
    keys, values = (random(n, kv_heads, places, dim, seed=s) for s in (1, 2))
    q = random(n, heads, dim)
    for length in (1, 32, 64, 65, 200, 300, 1000):
        positions = torch.tensor([length - 1, max(0, length - 50), 31])
        pool_keys, pool_values, pool = paged(keys, values, positions, seed=length)
        out, wanted = (torch.full((n, heads * dim), math.nan, dtype=torch.bfloat16) for _ in range(2))
        attention_and_norms.attend(q, keys, values, positions, dim**-0.5, None, wanted, None, module)
        attention_and_norms.attend(q, pool_keys, pool_values, positions, dim**-0.5, None, out, None, module, pages=pool.table)
        assert torch.equal(out, wanted), length
        exact = selfcheck.attend_exact(q, keys, values, positions, dim**-0.5, None)
        assert selfcheck.relative_error(out, exact) < 2.2e-3
    assert "attend" in launches(module)


@pytest.mark.parametrize(
    ("mode", "heads", "kv_heads", "dim"),
    [
        (mode, *shape) if (place + number) % len(attention_and_norms.MODES) == 0 else slow_on_cpu(mode, *shape)
        for number, mode in enumerate(attention_and_norms.MODES)
        for place, shape in enumerate([(8, 2, 256), (4, 1, 512), (6, 2, 80), (4, 2, 24)])
    ],
)
def test_a_step_writes_its_place_to_its_page_and_nothing_else(heads, kv_heads, dim, mode):
    module, n, places = cpu_module(1, multiprocessors=6), 4, 200
    parts = attention_and_norms.MODES[mode]
    keys, values = (random(n, kv_heads, places, dim, seed=s) for s in (1, 2))
    qkv = random(n, (heads + parts * kv_heads) * dim)
    q_weight, k_weight = random(dim, seed=1), random(dim, seed=2)
    cos, sin = random(n, dim, seed=3), random(n, dim, seed=4)
    positions = torch.tensor([199, 64, 63, 5])
    found = paged(keys, values, positions)
    pool = found[2]
    pool.unbind(3)  # a row that nobody has any more
    is_ours = attention_and_norms.why_not(heads, kv_heads, dim, torch.bfloat16) is None
    for one in found[:2]:
        one[:, : PAGE_TOKENS if is_ours else None].nan_to_num_(0.0)  # torch reads what is masked
    before = [one.clone() for one in found[:2]]
    outs = [torch.full((n, heads * dim), math.nan, dtype=torch.bfloat16) for _ in range(2)]
    queries = torch.empty(n, heads, dim, dtype=torch.bfloat16)
    given = [qkv, heads, attention_and_norms.HeadNorms(q_weight, k_weight, 1e-6), cos, sin]
    rest = [positions, positions, dim**-0.5, None]
    attention_and_norms.rope_and_attention(*given, keys, values, *rest, outs[0], queries, None, module, mode=mode)
    attention_and_norms.rope_and_attention(*given, *found[:2], *rest, outs[1], queries, None, module, mode=mode, pages=pool.table)
    assert torch.equal(outs[0][:3], outs[1][:3]) or (
        not is_ours and selfcheck.relative_error(outs[1][:3], outs[0][:3].double()) < 2e-3
    )
    at = pool.table.written(positions)
    for to, source, was in zip(found[:2], (keys, values), before, strict=True):
        if mode != "shared":
            assert torch.equal(to[:, at[:3]], torch.stack([source[i, :, int(positions[i])] for i in range(3)], 1))
            was[:, at] = to[:, at]
            assert int(at[3]) // PAGE_TOKENS == SCRAP
        assert torch.equal(to.nan_to_num(7.0), was.nan_to_num(7.0))


def test_the_check_before_the_first_step_passes_and_names_what_is_wrong():
    kinds = ((4, 2, 64),)
    assert selfcheck.check_pages(cpu_module(1, multiprocessors=3), kinds) is None
    changed = attention_and_norms.source("attend.cu").replace("max(page_of(newest), 1)", "1")
    said = selfcheck.check_pages(cpu_module(1, multiprocessors=3, attend=changed), kinds)
    assert said == "attention over pages (own), 4 heads over 2, 64 each: other bits"


def test_a_kernel_that_looks_into_the_wrong_page_is_found():
    """The comparison above can fail: each of these changes gives other bits."""
    source = attention_and_norms.source("attend.cu")
    keys, values, q = random(1, 2, 300, 64, seed=1), random(1, 2, 300, 64, seed=2), random(1, 4, 64)
    positions, out = torch.tensor([299]), torch.empty(1, 256, dtype=torch.bfloat16)
    pool_keys, pool_values, pool = paged(keys, values, positions)
    wanted = selfcheck.attend_exact(q, keys, values, positions, 1.0, None)
    for right, wrong in (
        ("page * PAGE + at % PAGE", "page * PAGE"), ("pages + at / PAGE", "pages + at / (2 * PAGE)"),
        ("next_page = page_of(at + 2 * TILE)", "next_page = page_of(at + TILE)"), ("v_at = v_next;", ""),
    ):  # fmt: skip
        assert source.count(right) == 1, right
        module = cpu_module(1, multiprocessors=1, attend=source.replace(right, wrong))
        attention_and_norms.attend(q, pool_keys, pool_values, positions, 1.0, None, out, None, module, pages=pool.table)
        assert not selfcheck.relative_error(out, wanted) < 1e-2, right
