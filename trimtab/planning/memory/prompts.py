"""How much device memory do chunked prompts take: graphs, buffers between passes, inputs?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from trimtab.checkpoint.anatomy import DTYPE_BYTES, Anatomy
from trimtab.formats.record import stored_format
from trimtab.planning.memory.activations import FLOAT32_BYTES, KEPT, Use, needs_of, use_of
from trimtab.planning.plan.plan import Plan
from trimtab.planning.values.blocks import quant_of
from trimtab.planning.values.byte_sizes import LAYER_KERNELS as KV8_KERNELS
from trimtab.planning.values.byte_sizes import NODE_BYTES, copy_bytes
from trimtab.planning.values.execution import CAPTURED, SMALL_BUDGET_BYTES

# Allocator slack of a separate graph pool (towers): bytes beyond its tensors, in segments that torch never joins, per
# captured kernel. No run that measures it is recorded.
POOL_SLACK_BYTES = 3 * 2**10
# Planned bytes of a kernel in a captured tower: its node in the driver's memory, and its slack in torch's.
KERNEL_BYTES = NODE_BYTES + POOL_SLACK_BYTES
# Bytes beyond the live tensors of a pass: holes between them in the shared segment.
ROOM_SLACK_BYTES = 24 * 2**20
# Outside that segment: segments of 2 MiB for small tensors (12 MiB with E4B), and copies of tensors that outlive a
# pass.
BESIDE_ROOM_BYTES = 16 * 2**20
# With smaller chunks, a prompt of 512 tokens takes as long as without capture, because every chunk unpacks every
# weight.
LEAST_LARGEST = 128
# Kernels of one pass: of a 4-bit weight two for its scales, one to unpack, one product; of an adapter the float32 input, two
# products, scaling and sum; of everything else in a layer (norms, rotation, attention, gates); and around layers.
QUANTIZED_KERNELS, PLAIN_KERNELS, ADAPTER_KERNELS, LAYER_KERNELS, OTHER_KERNELS = 4, 1, 5, 40, 120
# Graphs of one chunk size: a prompt of one chunk, and, for the largest size, a first and a later chunk of a longer prompt.
GRAPHS_OF_LONG_PROMPTS = 3
# Parts of a model whose 4-bit weights are unpacked by the kernels of prompts.
UNPACKED_PARTS = ("language", "vision", "audio", "connector")
# Embeddings of the input tokens, and the additions of up to three layers.
EMBEDDINGS = 4
INDEX_BYTES = 8
# Columns after each row of an unpacked weight, for adapters (engine/batched_lora/columns.py): three for each rank of up
# to three layers of rank 32, filled up to a multiple of 64.
ADAPTER_COLUMNS = 352


def prompt_graph_bytes(
    anatomy: Anatomy, use: Use, chunks: Sequence[int], *, quant: str, has_adapters: bool, adapter_bytes: int = 0
) -> int:
    """Return the device bytes of prompts captured in chunks of these sizes, without keys and values, in a separate
    pool.

    adapter_bytes: of the largest adapter; captured passes read it from a separate buffer. 0 without chunks.
    """
    counted = prompt_bytes(
        anatomy, use, chunks, quant=quant, has_adapters=has_adapters, adapter_copy_bytes=adapter_bytes, has_room=False
    )
    return sum(counted.values())


def planned_graphs(chunks: Sequence[int], context_tokens: int) -> int:
    """Return how many graphs are planned; the runtime keeps this many and drops the least recently used."""
    return len(chunks) + (GRAPHS_OF_LONG_PROMPTS if context_tokens > max(chunks) else 0)


def has_room(batch: int, budget_bytes: int) -> bool:
    """Whether captured prompts share the memory of passes without a graph (engine/memory/shared_pool.py): for one answer at a
    time, within a small budget. With several rows, a process ended with a segmentation fault of unknown cause."""
    return batch == 1 and budget_bytes < SMALL_BUDGET_BYTES


def prompt_bytes(
    anatomy: Anatomy, use: Use, chunks: Sequence[int], *, quant: str, has_adapters: bool, adapter_copy_bytes: int = 0,
    has_room: bool,
) -> dict[str, int]:  # fmt: skip
    """Return the bytes of captured prompts by item: the nodes of their graphs, in the driver's memory; inputs, and the
    buffer for the largest unpacked 4-bit weight. Without shared memory also the pool of the graphs: the activations of
    one chunk of the largest size, and slack. With shared memory, `activations.needs_of` has the activations.

    adapter_copy_bytes: 0 if graphs read adapters in place.
    """
    if not chunks:
        return {}
    kernels = planned_graphs(chunks, use.context_tokens) * kernels_of(anatomy, has_adapters=has_adapters, kv=use.kv)
    counted = uncaptured_bytes(anatomy, chunks, quant=quant, has_adapters=has_adapters)
    counted |= {"prompt_graphs": kernels * (NODE_BYTES if has_room else KERNEL_BYTES)}
    if not has_room:
        piece = max(chunks)
        one = replace(use, prefill_tokens=piece, batch=1)
        needs = needs_of(anatomy, one, quant=quant, has_adapters=has_adapters, chunk_tokens=piece, is_unpacked_elsewhere=True)
        # For 8-bit keys and values: chunks that read more and more positions are captured one after the other. The
        # memory of a smaller copy is too small for a larger one, and each is half of the next.
        copies = copy_bytes(anatomy.kv_layers, anatomy.dtype, use.kv, rows=1, context_tokens=use.context_tokens, new_tokens=piece)
        counted["prompt_buffers"] += needs.phases["prompt"][1] + copies
    return counted | ({"adapter_copy": adapter_copy_bytes} if adapter_copy_bytes else {})


def room_bytes(plan: Plan, anatomy: Anatomy) -> int:
    """Return the size of the segment that the passes and graphs of a plan's prompts share (engine/memory/shared_pool.py)."""
    prompt, use = plan.execution.prompt, use_of(plan.request, anatomy, answer_tokens=plan.answer_tokens)
    needs = needs_of(
        anatomy, use, quant=plan.request.quant, has_adapters=bool(plan.request.adapters), has_rows=True,
        chunk_tokens=max(prompt.chunks), is_unpacked_elsewhere=True, is_fused=plan.execution.step.mode == "fused",
        has_room=True,
    )  # fmt: skip
    towers = plan.execution.towers
    if towers is not None and towers.mode in CAPTURED:  # they have separate memory
        return needs.phases["prompt"][1] + ROOM_SLACK_BYTES
    return needs.room_bytes + ROOM_SLACK_BYTES


def uncaptured_bytes(anatomy: Anatomy, chunks: Sequence[int], *, quant: str, has_adapters: bool) -> dict[str, int]:
    """Return the bytes of prompts whose chunks are not captured, by item: inputs, and the buffer for the largest unpacked 4-bit
    weight, which stay allocated while towers run. `activations.needs_of` has a chunk's activations."""
    unpacked = _unpacked_bytes(anatomy, quant, has_adapters=has_adapters)
    return {"prompt_buffers": unpacked + _input_bytes(anatomy, chunks)}


def choose_chunks(sizes: Sequence[int], bytes_of: Callable[[Sequence[int]], int], left: int) -> tuple[int, ...]:
    """Return the sizes of chunks that fit into `left` bytes: the largest that fits, and as many smaller ones as fit.

    sizes: ascending, those that the request can use. The largest counts most: a prompt of several chunks reads every
    weight as often, while padding costs only arithmetic. Empty if no size of LEAST_LARGEST or more fits, unless none is
    requested.
    """
    least = min(LEAST_LARGEST, max(sizes, default=0))
    largest = next((size for size in reversed(sizes) if size >= least and bytes_of((size,)) <= left), None)
    if largest is None:
        return ()
    chosen: tuple[int, ...] = (largest,)
    for size in reversed([size for size in sizes if size < largest]):
        if bytes_of((size, *chosen)) <= left:
            chosen = (size, *chosen)
    return chosen


@lru_cache(maxsize=KEPT)
def kernels_of(anatomy: Anatomy, *, has_adapters: bool, kv: str = "full") -> int:
    """Return the approximate number of kernels of a pass through the decoder."""
    layers, total = set(), OTHER_KERNELS
    for row in anatomy.rows:
        if row.part != "language" or row.kind != "linear":
            continue
        total += QUANTIZED_KERNELS if row.quantized else PLAIN_KERNELS
        total += ADAPTER_KERNELS if has_adapters else 0
        layers.add(row.block)
    added = sum(layer.shares is None for layer in anatomy.kv_layers) * KV8_KERNELS if kv == "int8" else 0
    return total + LAYER_KERNELS * len(layers) + added


def _unpacked_bytes(anatomy: Anatomy, quant: str, *, has_adapters: bool) -> int:
    """Return the bytes of the largest unpacked 4-bit weight of the decoder and of the towers, which share the buffer. The
    decoder's weights have the columns of adapters in bfloat16."""
    columns = ADAPTER_COLUMNS if has_adapters and anatomy.dtype == "bfloat16" else 0
    is_packed = stored_format(quant_of(anatomy, quant)).is_dequantized
    return _largest_weight(anatomy, columns) * DTYPE_BYTES[anatomy.dtype] if is_packed else 0


@lru_cache(maxsize=KEPT)
def _largest_weight(anatomy: Anatomy, columns: int) -> int:
    rows = [row for row in anatomy.rows if row.part in UNPACKED_PARTS and row.quantized and row.weight]
    added = {"language": columns}
    return max((row.weight.numel + added.get(row.part, 0) * row.weight.shape[0] for row in rows if row.weight), default=0)


def _input_bytes(anatomy: Anatomy, chunks: Sequence[int]) -> int:
    total = anatomy.vocab_size * FLOAT32_BYTES
    for size in chunks:
        embeddings = EMBEDDINGS * size * anatomy.hidden_size * DTYPE_BYTES[anatomy.dtype]
        total += 4 * size * INDEX_BYTES + embeddings + 3 * size * size
    return total
