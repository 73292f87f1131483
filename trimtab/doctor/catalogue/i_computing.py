"""Which operations compute wrongly, slowly, or take memory?"""

from __future__ import annotations

import copy
import os
import sys
import time
from typing import Any

from trimtab.doctor.facts.bug import FIXED, NOT_APPLICABLE, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit, error_of, seen

I1_WINDOW_ZERO = Bug(
    title="The cache of a model with num_kv_shared_layers = 0 keeps everything: no sliding window is used",
    symptom="silent: layers with a sliding window keep all keys and values; the answer is the same, the memory grows "
    "with the context",
    trigger="Gemma 4 without KV-shared layers (26B-A4B, 31B), or Gemma 3n configured so",
    cause="transformers cache_utils.py cuts the list of layers with [:-num_kv_shared_layers], and [:-0] is empty; "
    "each layer then gets the default, unlimited cache",
    affected=(Affected("transformers", fixed_in="5.19.0"),),
    versions="5.6.2 run: no layer of the cache has a window; 5.23.0 run: right; the cut is in 5.18.0 and no longer "
    "in 5.19.0 (read in the wheels)",
    way_round="a newer transformers; past_key_values with a cache built by hand",
    trimtab="the plan asks the installed cache itself for its windows, so the bytes it counts are those that "
    "transformers' own generation uses; batches lay the cache out by hand, with windows",
    evidence="run",
)  # fmt: skip


def i1_window_zero(kit: Kit) -> Seen:
    """Count the windows in the cache for a model with one sliding layer of two and none that shares."""
    import transformers

    path = kit.checkpoint("gemma4_moe")
    config = transformers.AutoConfig.from_pretrained(path).get_text_config()
    layers = transformers.DynamicCache(config=config).layers
    windows = sum(bool(getattr(layer, "is_sliding", False)) for layer in layers)
    sliding = list(config.layer_types).count("sliding_attention")
    shared = config.num_kv_shared_layers
    text = f"{windows} of {sliding} sliding layers have a window in the cache (num_kv_shared_layers is {shared})"
    return Seen(FIXED if windows == sliding else PRESENT, text)


I8_LATE_STREAMER = Bug(
    title="generate hands tokens to a streamer one step late on Apple GPUs",
    symptom="silent: the first token arrives after the second forward pass; one forward pass more than tokens",
    trigger="generate(streamer=...) with the model on \"mps\", and a cache that can be cropped or is not returned",
    cause="transformers generation/utils.py DeferredStopCheck reads the stop flag a step later to save a wait; it is "
    "for mps alone, CUDA and the CPU use StopCheck, which is immediate",
    affected=(Affected("transformers", since="5.18.0"),),
    versions="5.23.0: for mps (its own is_supported asked); in 5.18.0 and not in 5.15.0 (read in the wheels); on the "
    "CPU tokens arrive at once in 5.6.2 and 5.23.0 (run); 5.6.2 has no such class",
    way_round="none needed unless the delay matters",
    trackers=("huggingface/transformers#47975 (merged)",),
    trimtab="it runs on CUDA and on the CPU, where the check is immediate",
    evidence="source",
)  # fmt: skip


def i8_late_streamer(kit: Kit) -> Seen:
    """Read the devices with a deferred stop check, and count the steps before each token on the CPU."""
    import torch
    from transformers.generation import utils

    late = _steps_late(kit)
    if late:
        return Seen(PRESENT, f"on the CPU each token arrives {late} step(s) late")
    deferred = getattr(utils, "DeferredStopCheck", None)
    if deferred is None:
        return Seen(FIXED, "tokens arrive in the step that made them; there is no deferred check")
    kinds = [kind for kind in ("cuda", "mps") if deferred.is_supported(torch.device(kind), None, False, is_assistant=False)]
    if not kinds:
        return Seen(FIXED, "no device defers the stop check")
    has = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    text = f"the stop check is deferred on {', '.join(kinds)}; on the CPU tokens arrive in the step that made them"
    return Seen(PRESENT if any(has[kind] for kind in kinds) else NOT_APPLICABLE, text)


def _steps_late(kit: Kit) -> int:
    """Return the number of extra forward passes before the first token arrived."""
    model = kit.load(kit.checkpoint("llama"))
    passes: list[int] = []
    arrived: list[int] = []

    class Streamer:
        def put(self, tokens: Any) -> None:
            arrived.append(len(passes))

        def end(self) -> None:
            pass

    model.register_forward_hook(lambda *_: passes.append(1))
    model.generate(**kit.inputs(model), max_new_tokens=3, do_sample=False, eos_token_id=None, streamer=Streamer())
    return arrived[1] - 1  # the first put is the prompt


I12_CUDNN_ATTENTION = Bug(
    title="Attention fails on a nearly full card after prompts of many lengths: \"Expected mha_graph.execute(...)\"",
    symptom="RuntimeError: Expected mha_graph.execute(handle, variant_pack, workspace_ptr.get()).is_good() to be true, but "
    "got false; before it, memory outside torch grows with each new length of a prompt",
    trigger="scaled_dot_product_attention in bfloat16 or float16 on compute capability 9.0 or 10.x, prompts of many "
    "lengths, little free device memory",
    cause="torch prefers cuDNN's attention there; a maintainer suspects the kernels that cuDNN compiles for each new shape "
    "and keeps in the driver's memory, which torch neither counts nor gives back",
    affected=(Affected("torch", since="2.9.0"),),
    versions="2.11.0 with CUDA 13.0 run on an H200: on nearly full cards the error came within 200 prompts of many lengths, "
    "and did not without cuDNN's attention; default since 2.9.0 (pytorch pull request 162073, read)",
    way_round="torch.backends.cuda.enable_cudnn_sdp(False)",
    trackers=("pytorch/pytorch#190321 (closed, cause not confirmed there)", "pytorch/pytorch#190727 (closed)"),
    trimtab="while a model with a budget below 16 GiB is open, its process leaves cuDNN's attention out",
    evidence="run", needs_gpu=True,
)  # fmt: skip


def i12_cudnn_attention(kit: Kit) -> Seen:
    """Attend at 24 new lengths on the GPU, and measure the memory taken outside torch."""
    import torch

    if not torch.cuda.is_available():
        return Seen(NOT_APPLICABLE, "no GPU that torch can use")
    if torch.cuda.get_device_capability() < (9, 0):
        return Seen(NOT_APPLICABLE, "torch prefers cuDNN's attention on compute capability 9.0 and 10.x")

    def attend(length: int) -> None:
        one = torch.zeros(1, 8, length, 128, dtype=torch.bfloat16, device="cuda")
        torch.nn.functional.scaled_dot_product_attention(one, one, one, is_causal=True)
        torch.cuda.synchronize()

    def outside() -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    lengths = range(40, 40 + 24 * 8, 8)
    attend(32)
    before = outside()
    for length in lengths:
        attend(length)
    grown = outside() - before
    text = f"{len(lengths)} lengths took {grown / 2**20:.1f} MiB of the driver's memory"
    # Less than 4 MiB may be other memory of the driver. An assumption: this probe has not run on such a card.
    return Seen(PRESENT if grown >= 4 * 2**20 else FIXED, text)


I13_ONE_KEY_HEAD = Bug(
    title="Gemma 4 E2B on a GPU answers prompts of 33, 65, 97 ... tokens from wrong attention, silently",
    symptom="the last position of a prompt is wrong in layers with one head of keys and heads of 512 values, and with it the "
    "first token; one length in 32",
    trigger="a CUDA GPU, sdpa attention with a mask or heads wider than 256, one head of keys for several of queries, and a prompt "
    "or chunk of 32 n + 1 tokens",
    cause="transformers' repeat_kv repeats one head as a view with a head stride of 0; torch's memory-efficient kernel takes such "
    "keys and a block of one query for a decode step, and computes the query's other heads (kernel_forward.h, "
    "advance_to_block)",
    affected=(Affected("torch"),),
    versions="2.11.0 with CUDA 13.0 run on an H200: heads of 512 values wrong by up to 0.57 of the largest value, widths of 64, "
    "128 and 256 right; 2.13.0 has the branch (read); pytorch pull requests 191984 and 192138 repair it (read)",
    way_round="a prompt of another length, or torch.backends.cuda.enable_mem_efficient_sdp(False)",
    owner=("torch", "transformers"),
    trackers=("pytorch/pytorch#191937 (the same branch, with a bias)", "pytorch/pytorch#192138 (closed)"),
    trimtab="a prompt alone reads its keys with the groups as the batch, which does not meet the branch",
    evidence="run", needs_gpu=True,
)  # fmt: skip


def i13_one_key_head(kit: Kit) -> Seen:
    """Attend with a key head that is repeated as a view, and with the same keys copied in memory."""
    import torch

    if not torch.cuda.is_available():
        return Seen(NOT_APPLICABLE, "no GPU that torch can use")
    heads, tokens, places, width = 8, 33, 64, 512
    generator = torch.Generator(device="cuda").manual_seed(0)

    def random(count: int, length: int) -> torch.Tensor:
        return torch.randn(1, count, length, width, generator=generator, device="cuda").to(torch.bfloat16)

    query, keys, values = random(heads, tokens), random(1, places), random(1, places)
    mask = torch.ones(1, 1, tokens, places, dtype=torch.bool, device="cuda").tril(places - tokens)

    def attend(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask).float()

    view_of_keys, view_of_values = (one.expand(1, heads, places, width) for one in (keys, values))
    away = attend(view_of_keys, view_of_values) - attend(view_of_keys.contiguous(), view_of_values.contiguous())
    most = float(away.abs().max())
    # Equal sums in one kernel differ by roundings of bfloat16, 2^-8 of values up to 4; other heads by about their own size.
    return Seen(PRESENT if most > 0.1 else FIXED, f"{tokens} tokens: up to {most:.2g} away from keys in memory")


I14_FROZEN_LAST_TOKEN = Bug(
    title="First tokens of a frozen bfloat16 model on a CPU are slow: the head is multiplied as a batch",
    symptom="prefill is slow by a constant: 0.1 s for a head of 32,000 x 1,024, more for larger ones; no error, right numbers",
    trigger="a CPU with AVX512-BF16, a bfloat16 head whose weight needs no gradient (as PEFT leaves it), and "
    "`logits_to_keep=1`, which makes a view of the last position",
    cause="torch.matmul folds a batch of one into a matrix only where the strides fit or the weight needs a gradient; a dimension "
    "of size 1 has a stride that does not (LinearAlgebra.cpp, should_fold), and oneDNN's batched product is slow there",
    affected=(Affected("torch"),),
    versions="2.13.0+cpu run on an AMD EPYC with AVX512-BF16: 12.3 ms instead of 0.34 for 8,192 x 1,024, the same bits; float16 "
    "and float32 are not slower",
    way_round="head.weight.requires_grad_(True) under inference_mode, or hidden[:, -1] in place of hidden[:, -1:]",
    trackers=(
        "pytorch/pytorch#186148 (closed: the same strides on a GPU)",
        "pytorch/pytorch#151934 (open: such batched products on a CPU)",
    ),
    trimtab="a weight that is not quantized is multiplied with a matrix of rows on a CPU",
    evidence="run",
)  # fmt: skip


def i14_frozen_last_token(kit: Kit) -> Seen:
    """Multiply the last of 64 positions alternately as a view with three dimensions and as a matrix."""
    import torch

    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    if supported is None or not supported():
        return Seen(NOT_APPLICABLE, "this CPU has no AVX512-BF16, or this torch does not say so")
    weight = torch.zeros(8192, 1024, dtype=torch.bfloat16)
    last = torch.zeros(1, 64, 1024, dtype=torch.bfloat16)[:, -1:]

    def seconds(x: torch.Tensor) -> float:
        start = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        return time.perf_counter() - start

    with torch.inference_mode():
        times = [(seconds(last), seconds(last[0])) for _ in range(7)]
    view, matrix = (min(column) for column in zip(*times, strict=True))
    text = f"{1000 * view:.2f} ms as a view of a prompt, {1000 * matrix:.2f} ms as a matrix"
    # A factor of 36 was measured; without the bug, both times are equal within a third.
    return Seen(PRESENT if view >= 5 * matrix else FIXED, text)


I15_GRAPH_POOL = Bug(
    title="A second CUDA graph cannot be captured into a memory pool once the first one is gone",
    symptom="RuntimeError: it->second->use_count > 0 INTERNAL ASSERT FAILED at CachingHostAllocator.h (or "
    "CUDACachingAllocator.cpp), and every later capture into that pool fails too",
    trigger="a CUDA graph captured with pool= of a pool that others used before, all of whose graphs were deleted, with a "
    "torch.cuda.MemPool that is still held",
    cause="a graph that is deleted lowers the pool's count in the allocator of page-locked memory to 0, where a MemPool counts "
    "for the device's allocator only, and a capture asserts that the count is above 0",
    affected=(Affected("torch"),),
    versions="2.11.0 with CUDA 13.0 on an H100: captures into a held MemPool failed so in trimtab's tests, and no longer once "
    "a graph was kept; reported by others for CUDA 12.8 on a B200; this probe has not run on a GPU; pools of page-locked memory "
    "came with pytorch pull request 167507 (read)",
    way_round="keep one graph of the pool, however small, or take a new pool",
    trackers=(
        "vllm-project/vllm#53679 (closed: the same assertion of page-locked memory after a trial capture)",
        "huggingface/transformers#48312 (open: that of the device's allocator, continuous batching)",
        "vllm-project/vllm#28426 (closed: that of the device's allocator, piecewise graphs)",
    ),
    trimtab="one graph of a single kernel stays in the pool that prompts share",
    evidence="tracker", needs_gpu=True,
)  # fmt: skip


def i15_graph_pool(kit: Kit) -> Seen:
    """Capture a graph into a pool that is kept alive, delete it, and capture another one."""
    import torch

    if not torch.cuda.is_available():
        return Seen(NOT_APPLICABLE, "no GPU that torch can use")
    if not hasattr(torch.cuda, "MemPool"):
        return Seen(NOT_APPLICABLE, f"torch {torch.__version__} has no torch.cuda.MemPool")
    pool: Any = torch.cuda.MemPool()
    value = torch.zeros(1, device="cuda")

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool.id):
            value.add_(1)

    capture()
    fault = error_of(capture, RuntimeError, "use_count > 0")
    return seen(fault, "two graphs were captured into one pool, the second after the first was gone")


I16_ROW_SCALES = Bug(
    title="4-bit weights whose rows are not whole blocks of 64 values get wrong scales on CPUs with AVX512, silently",
    symptom="silent: dequantized values are off by up to 2.5 standard deviations of the weight, a layer's outputs by 23 %. With "
    "AVX512-BF16 a forward without gradients fails instead: RuntimeError: shape '[1152, 67]' is invalid for input of size 77472",
    trigger="a 4-bit weight with rows of a multiple of 16 values that are not whole blocks, such as 4,304 in Gemma 3's vision "
    "tower, computed or dequantized on an x86 CPU with AVX512; other row lengths, other CPUs and GPUs are right",
    cause="bitsandbytes csrc/cpu_ops.cpp dequantizeBlockwise4bitCpu begins each row with a new block; quantize_4bit counts blocks "
    "over the flattened weight. The branch for ARM leaves such rows to the scalar code, the one for AVX512 does not. "
    "functional.py _convert_weight_packed_for_cpu counts in rows too, and its reshape fails",
    affected=(Affected("bitsandbytes", since="0.49.0"),),
    versions="bitsandbytes 0.49.2, 0.50.0 and 0.50.2, run on an AMD EPYC: nf4 and fp4, float32, bfloat16 and float16; 0.49.0, "
    "0.50.1 and the main branch of August 2026 have the branch, 0.48.2 has not (read)",
    way_round="unpack as one row: quant_state.shape = torch.Size((1, numel)), then .view(shape); for a whole model "
    "llm_int8_skip_modules (mind H4)",
    trimtab="it unpacks such a weight as one row, and multiplies with that; `verify` names the stock side's layers that are wrong",
    evidence="run",
)  # fmt: skip


def i16_row_scales(kit: Kit) -> Seen:
    """Unpack 24 rows of 80 values as rows and as one row, and compare both with code * absmax."""
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = torch.randn(24, 80, generator=torch.Generator().manual_seed(0))
    packed, state = quantize_4bit(weight, blocksize=64, quant_type="nf4")
    stored = packed.flatten()
    places = torch.stack((stored >> 4, stored & 15), dim=1).flatten().long()
    true = state.code[places] * state.absmax.repeat_interleave(64)
    one_row = copy.copy(state)
    one_row.shape = torch.Size((1, true.numel()))
    away, away_as_one = (float((dequantize_4bit(packed, one).flatten() - true).abs().max()) for one in (state, one_row))
    text = f"24 rows of 80 values: up to {away:.2g} away from code * absmax, {away_as_one:.2g} as one row"
    # Other roundings differ by 1e-6 of a scale; other scales by about their own size.
    if away > 0.01:
        return Seen(PRESENT, text)
    if os.name == "nt" or "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return Seen(NOT_APPLICABLE, f"not shown here, without bitsandbytes' code for AVX512: {text}")
    return Seen(FIXED, text)


I17_SNAPSHOT_REFERENCES = Bug(
    title="A process ends by a segmentation fault some time after torch described one of its memory pools",
    symptom="Segmentation fault in memory_snapshot, or anywhere else in Python's memory allocator, after many CUDA graphs or pools "
    "of memory were made",
    trigger="torch.cuda.MemPool.snapshot() or torch.cuda.memory_snapshot(pool.id), of a pool whose number is above 256 (before "
    "Python 3.12, by the rules of its integers, also of a smaller one)",
    cause="the function behind both takes the numbers out of its tuple of arguments as borrowed references, and releases them; "
    "Python 3.12 spares its own integers up to 256, and frees a larger one twice",
    affected=(Affected("torch"),),
    versions="2.11.0 with CUDA 13.0 on an H100: processes that had run many of trimtab's tests ended so in two of two runs, the "
    "next free block of Python's allocator was -1; other releases were not run",
    way_round="torch.cuda.memory._snapshot(), which takes no id, and choose the segments by their segment_pool_id",
    trimtab="segments are requested without a pool's id",
    evidence="run", needs_gpu=True,
)  # fmt: skip


def i17_snapshot_references(kit: Kit) -> Seen:
    """Request a snapshot of a pool that does not exist, and count the references to its id."""
    import torch

    ask: Any = getattr(torch._C, "_cuda_memorySnapshot", None)
    if ask is None or not torch.cuda.is_available():
        return Seen(NOT_APPLICABLE, "no GPU that torch can use")
    number = int("1000003")  # a separate object, outside Python's cached integers
    held = [number] * 8  # it stays alive after any release
    before = sys.getrefcount(number)
    try:
        ask((0, number, False))
    except (RuntimeError, TypeError):  # releases that need two numbers, or none
        try:
            ask((0, number))
        except (RuntimeError, TypeError):
            return Seen(NOT_APPLICABLE, f"torch {torch.__version__} describes all pools at once")
    lost = before - sys.getrefcount(number)
    if lost > 0:
        _give_back(number, lost)
        return Seen(PRESENT, f"{lost} reference(s) to the pool's number were released in one call")
    return Seen(FIXED, f"the number has its {len(held)} references as before")


def _give_back(number: int, count: int) -> None:
    """Restore the references of an object that has lost some."""
    import ctypes

    for _ in range(count):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(number))


I18_FP8_BLOCKS = Bug(
    title="FP8 weights whose sides are not multiples of 128 are dequantized with the scales of other blocks, silently",
    symptom="silent: a weight of 192 rows with two scales gets 96 rows of each, not 128 and 64; where the number of scales does "
    "not divide the side: ValueError: Weight shape (...) not divisible by scale grid (...)",
    trigger="an FP8 checkpoint (quant_method fp8, blocks) loaded with dequantize=True, or on a machine without FP8 kernels, with a "
    "weight whose rows or columns are no multiple of the block",
    cause="integrations/finegrained_fp8.py Fp8Dequantize._dequantize_one takes the size of a block from the shapes of weight and "
    "scales, not from weight_block_size",
    affected=(Affected("transformers", since="5.8.0"),),
    versions="transformers 5.23.0, run; 5.8.0 to 5.20.0 have the lines (read); 5.6.2 refuses such weights by name (read)",
    way_round="none by option: dequantize such weights by weight_block_size, and load the result",
    trimtab="it takes the size of a block from weight_block_size; `verify` shows the difference to the stock stack",
    evidence="run",
)  # fmt: skip


def i18_fp8_blocks(kit: Kit) -> Seen:
    """Dequantize 192 rows of ones with the scales 1 and 2 of blocks of 128, and count the rows of each."""
    import torch

    try:
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize

        dequantize = Fp8Dequantize(None)._dequantize_one
    except (ImportError, AttributeError) as exc:
        return Seen(NOT_APPLICABLE, f"this release dequantizes FP8 elsewhere ({exc})")
    weight = torch.ones(192, 128).to(torch.float8_e4m3fn)
    try:
        found = dequantize(weight, torch.tensor([[1.0], [2.0]]))
    except Exception as exc:
        return Seen(PRESENT, f"{type(exc).__name__}: {exc}")
    ones = int((found[:, 0].float() == 1).sum())
    text = f"192 rows in blocks of 128: the first scale reaches {ones} rows"
    return Seen(FIXED if ones == 128 else PRESENT, text)
