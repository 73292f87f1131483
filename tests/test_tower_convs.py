"""Slow convolutions of towers that are cut give the bits of transformers' own modules, and steps run between the slices."""

from __future__ import annotations

import io
from contextlib import suppress

import numpy as np
import pytest
import soundfile
import torch
from torch import nn
from transformers.models.gemma3n.configuration_gemma3n import Gemma3nAudioConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nAudioEncoder
from transformers.models.gemma4.configuration_gemma4 import Gemma4AudioConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4AudioModel

import trimtab
from trimtab.demo.line import FOLDER as DEMO
from trimtab.runtime import tower_convs, tower_passes
from trimtab.runtime.batch import Batch
from trimtab.runtime.hf_prefill import covered
from trimtab.runtime.tower_convs import slow_convolutions
from trimtab.runtime.tower_graphs import in_parts
from trimtab.runtime.tower_pieces import PausedError, TowerPieces

CONVOLUTIONS = {
    "gemma4": lambda: nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
    "padded before": lambda: nn.Conv2d(3, 8, 3, stride=2, bias=False),
    "patches": lambda: nn.Conv2d(3, 8, 4, stride=4),
    "whisper": lambda: nn.Conv1d(12, 16, 3, stride=2, padding=1),
    "groups": lambda: nn.Conv1d(12, 12, 5, padding=2, groups=12),
    "wide": lambda: nn.Conv2d(3, 8, (5, 3), stride=(1, 2), padding=(4, 1), dilation=(2, 1)),
}


@pytest.fixture(autouse=True)
def without_onednn():
    """Every CPU computes 16-bit convolutions as one without instructions for them does."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(before)


@pytest.fixture
def small_slices(monkeypatch):
    monkeypatch.setattr(tower_convs, "SLICE_PRODUCTS", 2**15)


def cut(convolution, x):
    """Return a convolution's output computed in slices, and how many there were."""
    shapes = []

    def compute(function, part):
        shapes.append(part.shape)
        return function(part)

    with torch.no_grad():
        return tower_convs.sliced(convolution, x, compute), len(shapes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_slices_have_the_bits_of_the_whole(name, dtype, small_slices):
    torch.manual_seed(0)
    convolution = CONVOLUTIONS[name]().to(dtype)
    counts = set()
    for size in (9, 10, 31, 32, 33, 64, 65, 66, 67, 200, 601):
        shape = (1, 3, size, 16) if isinstance(convolution, nn.Conv2d) else (1, 12, size * 8)
        x = torch.randn(shape).to(dtype)
        given = [x, torch.cat([x, x.flip(2)])]
        if x.dim() == 4:
            given.append(x.contiguous(memory_format=torch.channels_last))
        for one in given:
            found, count = cut(convolution, one)
            with torch.no_grad():
                assert torch.equal(found, convolution(one))
            counts.add(count)
    assert min(counts) == 1 and max(counts) >= 4


def test_slices_are_odd_and_none_is_a_small_rest():
    for outputs in (1, 2, 910, 911, 1366, 1367, 4000):
        borders = tower_convs._borders(outputs, tower_convs.SLICE_PRODUCTS // 910)
        sizes = [last - first for first, last in zip(borders, borders[1:], strict=False)]
        assert sum(sizes) == outputs and all(size == 911 for size in sizes[:-1])
        assert len(sizes) == 1 or 911 // 2 < sizes[-1] < 1.5 * 911


def test_only_16_bit_convolutions_without_onednn_are_slow(monkeypatch):
    convolution = nn.Conv2d(3, 8, 3)
    assert not tower_convs.is_slow(convolution)
    assert tower_convs.is_slow(convolution.bfloat16()) and tower_convs.is_slow(convolution.half())
    assert not tower_convs.is_slow(convolution.to("meta"))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    torch._C._set_mkldnn_enabled(True)
    for supported in (True, False):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda supported=supported: supported)
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda supported=supported: not supported)
        assert tower_convs.is_slow(nn.Conv2d(3, 8, 3).bfloat16()) is not supported
        assert tower_convs.is_slow(nn.Conv2d(3, 8, 3).half()) is supported


def gemma4_tower():
    config = Gemma4AudioConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, subsampling_conv_channels=[128, 4],
        output_proj_dims=16,
    )  # fmt: skip
    tower = Gemma4AudioModel(config)

    def heard(features, mask):
        found = tower(features, mask, return_dict=True)
        return found.last_hidden_state, found.attention_mask

    return tower, heard


def gemma3n_tower():
    config = Gemma3nAudioConfig(
        hidden_size=32, conf_num_hidden_layers=2, conf_num_attention_heads=2, sscp_conv_channel_size=(8, 4),
        vocab_size=8,
    )  # fmt: skip
    tower = Gemma3nAudioEncoder(config)

    def heard(features, mask):
        found = tower(features, ~mask, return_dict=True)
        return found.last_hidden_state, found.audio_mel_mask

    return tower, heard


class Holder(nn.Module):
    def __init__(self, tower):
        super().__init__()
        self.tower = tower


@pytest.mark.parametrize("make", [gemma4_tower, gemma3n_tower])
@pytest.mark.parametrize("frames", [5, 64, 333])
def test_an_audio_tower_that_is_cut_within_its_convolutions_is_the_tower(make, frames, small_slices):
    torch.manual_seed(0)
    tower, heard = make()
    tower = tower.bfloat16().eval()
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 8)
    layers = list(getattr(tower, "layers", None) or tower.conformer)
    slow = list(slow_convolutions(Holder(tower), ["tower"], layers))
    assert [len(one.convolutions) for one in slow] == [1, 1]
    features, mask = torch.randn(2, frames, 128), torch.ones(2, frames, dtype=torch.bool)
    mask[1, frames - frames // 3 :] = False
    features = features.bfloat16()
    with torch.no_grad():
        expected = heard(features, mask)
        pieces = TowerPieces(None)
        for count in range(1, 1000):
            pieces.begin(10**9, 0.0)
            forwards = {
                layer: lambda *args, inner=layer.forward, **kwargs: pieces.run(inner, args, kwargs) for layer in layers
            }
            with suppress(PausedError), covered(forwards), covered(in_parts(slow, pieces)):
                found, passes = heard(features, mask), count
                break
        whole = []
        for one in slow:
            with covered({c: lambda x, c=c: whole.append((c, x)) or type(c).forward(c, x) for c in one.convolutions}):
                heard(features, mask)
        both = sum(cut(convolution, x)[1] for convolution, x in whole)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) and not torch.isnan(one.float()).any()
    assert passes == both + len(layers)
    assert frames < 333 or both >= 8
    assert not any("forward" in vars(module) for module in tower.modules())


def test_steps_run_between_the_slices_of_a_sound(monkeypatch):
    """Nobody's next token waits for a whole convolution."""
    monkeypatch.setattr(tower_passes, "PIECE_S", 0.0)
    monkeypatch.setattr(tower_convs, "SLICE_PRODUCTS", 2**22)
    out = io.BytesIO()
    soundfile.write(out, np.random.default_rng(1).standard_normal(16_000) / 8, 16_000, format="WAV")
    with trimtab.load(
        trimtab.plan(DEMO / "base", device="cpu", context=256, quant="none", prefix_cache="4MB")
    ) as model:
        inputs = model.prepare("?", audio=out.getvalue())

        def through(batch):
            request = trimtab.GenerateRequest(max_new_tokens=4)
            prompt, pieces = batch.begin(inputs, request, client=f"{batch.active}"), 0
            while not prompt.step():
                assert not prompt.chunk_tokens and not prompt.done_tokens
                batch.step()
                pieces += 1
            return prompt, prompt.logits, pieces

        batch = Batch(model, rows=3)
        alone, expected, count = through(batch)
        assert count == 0
        batch.leave(batch.join(alone).row)
        text = batch.begin(model.prepare([5, 6, 7]), trimtab.GenerateRequest(max_new_tokens=60))
        while not text.step():
            pass
        batch.ends = frozenset()
        row = batch.join(text).row
        _, found, count = through(batch)
        assert torch.equal(found, expected) and not batch.steps.fallbacks
        audio_layers = sum("audio" in path and path.rpartition(".")[2].isdecimal() for path in model.plan.tiers())
        # 1 s is 99 frames: 25 positions of the second convolution in slices of 3, the last of 4, and the first one whole. What
        # is left then is the decoder's pass.
        assert count == 8 + 1 + audio_layers
        # For each of the two clients one look-up, which found nothing.
        counts = model.prefix_cache.encoder_counts
        assert (counts.lookups, counts.hits, counts.passes) == (2, 0, 2)
        assert row.finish is None and len(row.token_ids) == 3 + 1 + count
