"""Grouped keys read in place on the GPU: the CPU's tests, and real models' shapes, in bits and in bytes."""

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests.engine.passes.test_attention import *
from tests.engine.passes.test_attention import attention, layer, repeated, states

# (heads of keys, group, width) of one layer.
LAYERS = {
    "E4B, sliding": (2, 4, 256), "E4B, full": (2, 4, 512), "E2B, sliding": (1, 8, 256), "E2B, full": (1, 8, 512),
    "Qwen3-8B": (8, 4, 128),
}  # fmt: skip
PLACES = 4096


@pytest.mark.parametrize("tokens", [16, 65, 256, 1024])
@pytest.mark.parametrize("name", LAYERS)
def test_a_chunk_has_the_bits_of_repeated_keys_and_takes_less_by_them(name, tokens, uses):
    kv_heads, group, width = LAYERS[name]
    query, keys, values, mask = states(kv_heads, group, tokens, PLACES, width, torch.bfloat16)

    def measured(compute):
        """Return the result, and the most bytes that were allocated at once."""
        compute()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result, _ = compute()
        torch.cuda.synchronize()
        return result, torch.cuda.max_memory_allocated() - before

    found, taken = measured(lambda: attention(layer(group), query, keys, values, mask))
    assert uses == ["cuda"] * 2
    assert torch.equal(found, repeated(query, keys, values, mask))
    _, most = measured(lambda: sdpa_attention_forward(layer(group), query, keys, values, mask))
    # transformers copies nothing of a single head. The output is copied into another layout once; transformers' has it already.
    copies = 2 * kv_heads * group * PLACES * width * keys.element_size() if kv_heads > 1 else 0
    assert most - taken >= 0.95 * copies - found.nbytes


@pytest.mark.parametrize("tokens", [33, 65, 97, 129])
@pytest.mark.parametrize("name", [name for name, shape in LAYERS.items() if shape[0] == 1])
def test_a_last_block_of_one_token_is_right_with_one_head_of_keys(name, tokens, uses):
    """transformers' form is not, in torch 2.11 with heads of 512 values: it is compared with nothing here."""
    kv_heads, group, width = LAYERS[name]
    query, keys, values, mask = states(kv_heads, group, tokens, 512, width, torch.bfloat16)
    found, _ = attention(layer(group), query, keys, values, mask)
    scores = query.double() @ keys.double().transpose(-1, -2) / width**0.5 + mask.double()
    expected = (torch.softmax(scores, dim=-1) @ values.double()).transpose(1, 2)
    assert uses == ["cuda"]
    # One rounding of the weights and one of the sum, each at most 2^-9 of values up to 4.
    assert float((found.double() - expected).abs().max()) < 3e-2


@pytest.mark.parametrize("name", [name for name, shape in LAYERS.items() if shape[2] > 256])
def test_a_first_chunk_with_wide_heads_has_the_bits_of_repeated_keys(name, uses):
    kv_heads, group, width = LAYERS[name]
    query, keys, values, _ = states(kv_heads, group, 512, 512, width, torch.bfloat16)
    found, _ = attention(layer(group), query, keys, values, None)
    assert uses == ["cuda"] and torch.equal(found, repeated(query, keys, values, None))


@pytest.mark.parametrize("name", LAYERS)
def test_a_graph_of_a_chunk_repeats_its_bits(name):
    kv_heads, group, width = LAYERS[name]
    given = states(kv_heads, group, 128, 1024, width, torch.bfloat16)
    expected, _ = attention(layer(group), *given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, _ = attention(layer(group), *given)
    found.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, expected)
