"""How much device memory does a running request take: the KV cache, and the largest set of live intermediate tensors?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, prod
from types import MappingProxyType

from trimtab.checkpoint.anatomy import DTYPE_BYTES, Anatomy, KVLayer, ModuleRow, Part, TensorRow
from trimtab.checkpoint.config_limits import USUAL_CHOSEN
from trimtab.formats.record import DEQUANTIZED_BYTES, DEQUANTIZED_VALUES, stored_format
from trimtab.planning.values.blocks import Paid, quant_of, widened_bytes
from trimtab.planning.values.byte_sizes import (
    ADAPTER_PIECE_VALUES,
    FIRST,
    HEAD_CHUNK_VALUES,
    PAGE_TOKENS,
    Work,
    copy_bytes,
    paged_copy_bytes,
    pages_of,
    pool_tokens,
    position_bytes,
    step_copy_bytes,
)
from trimtab.request import DEFAULT_NEW_TOKENS, LoadRequest

# A prompt is computed in chunks of this many tokens; one chunk has all images and audio of its prompt.
PREFILL_CHUNK_TOKENS = 1024
# Tokens of a chat template around images and audio.
TEMPLATE_TOKENS = 64

FLOAT32_BYTES = 4
# Phases that share the memory of captured prompts.
IN_ROOM = ("prompt", "pictures", "sound")
# Cached results of functions that read every row of an anatomy: a search calls them a thousand times with the same
# arguments.
KEPT = 256

# name: (multiple, where it comes from). "x d" means in units of the model's dtype, "x f" in float32.
COEFFICIENTS: Mapping[str, tuple[float, str]] = MappingProxyType(
    {
        "hidden.held": (3, "x d: inputs_embeds, its text-only copy and the residual live through every layer"),
        "hidden.norm": (2, "x f: RMSNorm holds the float32 copy and its square or product (Gemma4RMSNorm._norm)"),
        "ple.held": (2, "x d: raw per-layer inputs and their combination with the projection live through every layer"),
        "ple.gemm": (2, "x d: the raw rows and the projection's output while per_layer_model_projection runs"),
        "ple.norm": (2, "x d: raw rows and the projection, next to two float32 copies inside per_layer_projection_norm"),
        "ple.norm_float": (2, "x f: the two float32 copies"),
        "attention.norm": (1, "x d: the query next to its two float32 copies inside q_norm"),
        "attention.norm_float": (2, "x f: the two float32 copies"),
        "attention.rope": (4, "x d: query, x*cos, rotate_half(x), its product (apply_rotary_pos_emb)"),
        "attention.output": (3, "x d: query, the kernel's output, its contiguous transpose (sdpa_attention_forward)"),
        "attention.repeat": (2, "x d: keys and values repeated to every query head (repeat_kv)"),
        "attention.mask": (2, "x 1 B: one boolean mask for full and one for sliding layers, [B, S, S_kv]"),
        "attention.mask_float": (1, "x d: the additive form that scaled_dot_product_attention makes of a boolean mask"),
        "mlp.gemm": (2, "x d: gate or activation next to the output being computed"),
        "mlp.product": (3, "x d: activation, up and their product"),
        "lora.input": (1, "x f: float32 copy of the input (adapters compute in float32)"),
        "lora.output": (1, "x f: the float32 update, next to the layer's output"),
        "lora.sum": (1, "x d: the sum of output and update"),
        "ordered.input": (1, "x d: the input in the order of a weight's columns (engine/kernels/layouts.py, in_order)"),
        "adapter.piece": (2.25, "x f: a piece of a weight and its update, the pair's factors (engine/lora/base_values.py)"),
        "int8.input": (3, "x 1 B: float16 and int8 copies of the input (bitsandbytes Linear8bitLt)"),
        "int8.output": (4, "x 1 B: the int32 product before it is scaled"),
        "dequantized": (1, "x d: a 4-bit weight dequantized whole for a product with several rows (matmul_4bit)"),
        "experts.rows": (1, "x top-k: rows a token becomes in fused experts"),
        "experts.sums": (1, "x f: the weighted output of each expert of a token (engine/lora/experts.py, kernels/experts.py)"),
        "logits.model": (3, "x d: logits, divided by the soft cap, after tanh"),
        "head8.chunk": (1, "x f: the weights of an 8-bit head that are computed with at a time (engine/formats/int8_head.py)"),
        "widened.chunk": (1, "x f: weights held in 16 bits, cast to be computed with (engine/formats/packed.py, WideShell)"),
        "logits.float": (3, "x f: generate's float32 copy, its sorted or masked form, probabilities"),
        "vision.pixels": (3, "x f: pixel patches as given, shifted, and cast"),
        "vision.hidden": (4, "x d: residual, norm output, clamped input, attention output"),
        "vision.pool": (16, "B a patch and soft token: one_hot int64, its float32 form, weights (Gemma4VisionPooler)"),
        "audio.conv": (4, "x d: a convolution's output, its normed copy, relu, and the contiguous transpose"),
        "audio.attention": (12, "x f: q, k, v in float32, keys and values again as windows of twice the length"),
        "audio.hidden": (4, "x d: residual, norm output, clamped input, output"),
    }
)  # fmt: skip

# Patches of one image and their soft tokens, by model type. For families that scale images by size: the largest that
# their processor makes by default.
PATCHES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "gemma4": (2520, 280), "gemma3": (4096, 256), "gemma3n": (2304, 256), "llava": (577, 576), "mistral3": (3025, 756),
        "qwen2_5_vl": (5120, 1280), "qwen3_5": (5120, 1280), "qwen3_vl": (5120, 1280), "": (4096, 1024),
    }
)  # fmt: skip
# Of a context: the tokens of prompts that pass, by whether prompts of rows are captured.
PASSING_DIVISORS = {False: 2, True: 4}
# One second of sound: spectrogram frames of 10 ms with 128 bands, soft tokens of 40 ms (Gemma 4 feature extractor).
FRAMES_PER_S, BANDS, SOUND_TOKENS_PER_S = 100, 128, 25


def patches_of(model_type: str) -> tuple[int, int]:
    """Return (patches, soft tokens) of one image for the longest known model type that is a prefix of the given one."""
    best = max((known for known in PATCHES if model_type.startswith(known)), key=len)
    return PATCHES[best]


@dataclass(frozen=True, kw_only=True)
class Use:
    """The tokens and patches of one request, for all rows of the batch together unless stated. prefill_tokens: of one chunk of
    the prompt, for one row. patches, sound_s: of one row's prompt. kv: the form of keys and values."""

    context_tokens: int
    prefill_tokens: int
    answer_tokens: int
    batch: int
    patches: int
    sound_s: float
    pool_tokens: int | None = None
    kv: str = "full"

    @property
    def prompt_tokens(self) -> int:
        return max(self.context_tokens - self.answer_tokens, 1)

    @property
    def passes(self) -> int:
        return ceil(self.prompt_tokens / self.prefill_tokens)

    @property
    def sound_tokens(self) -> int:
        return ceil(self.sound_s * SOUND_TOKENS_PER_S)

    def works(self) -> dict[Paid, Work]:
        """Return the work of a block in such a request, by kind."""
        prompt_rows = self.prompt_tokens * self.batch
        return {
            "token": Work(passes=self.passes, prompt_rows=prompt_rows, step_rows=self.batch),
            "image": Work(passes=bool(self.patches), prompt_rows=self.patches * self.batch, step_rows=0),
            "audio": Work(passes=bool(self.sound_s), prompt_rows=self.sound_tokens * self.batch, step_rows=0),
            "request": Work(passes=1, prompt_rows=prompt_rows, step_rows=0),
        }


def answer_tokens_of(request: LoadRequest) -> int:
    """Return the answer length that weights the seconds of a plan: the requested one, at most context - 1. The default length
    is at most half the context."""
    is_default = request.answer_tokens == DEFAULT_NEW_TOKENS
    most = request.context_tokens // 2 if is_default else request.context_tokens - 1
    return max(1, min(request.answer_tokens, most))


def use_of(
    request: LoadRequest, anatomy: Anatomy, *, answer_tokens: int | None = None,
) -> Use:  # fmt: skip
    """Return the use of a request, with images and audio only if the model has a tower for them. answer_tokens: None is the
    request's planned answer length."""
    answer_tokens = answer_tokens_of(request) if answer_tokens is None else answer_tokens
    patches, soft = patches_of(anatomy.model_type)
    images = request.images if "vision" in anatomy.parts else 0
    sound_s = request.audio_s if "audio" in anatomy.parts else 0.0
    media = images * soft + ceil(sound_s * SOUND_TOKENS_PER_S)
    chunk_tokens = PREFILL_CHUNK_TOKENS if anatomy.can_chunk else request.context_tokens
    piece = max(chunk_tokens, media + TEMPLATE_TOKENS if media else 0)
    return Use(
        context_tokens=request.context_tokens, prefill_tokens=min(request.context_tokens, piece),
        answer_tokens=min(answer_tokens, max(request.context_tokens - 1, 1)), batch=request.batch,
        patches=images * patches, sound_s=sound_s,
        pool_tokens=None if request.kv_tokens is None else pool_tokens(
            request.kv_tokens, rows=request.batch, context_tokens=request.context_tokens
        ),
        kv=request.kv,
    )  # fmt: skip


def repeated_tokens(new_tokens: int, all_tokens: int, *, in_place: bool) -> int:
    """Return the tokens whose keys and values are counted as repeated to every query head in a pass of a prompt.

    in_place: for one sequence within a small budget, cuDNN's attention is disabled and torch's memory-efficient kernel
    reads them in place (engine/passes/attention.py). The pass's new tokens are then counted: a first chunk without a
    mask may repeat them.
    """
    return min(new_tokens, all_tokens) if in_place else all_tokens


# A value of a recurrent layer's state: float32. Windows of convolutions are of the model's dtype, and 3 % of it.
STATE_BYTES = 4


def kv_cache_bytes(
    layers: tuple[KVLayer, ...], dtype: str, *, batch: int, tokens: int, new_tokens: int, kv: str = "full"
) -> int:  # fmt: skip
    """Return the most that transformers' DynamicCache holds while `new_tokens` are added to reach `tokens`.

    Full layers hold every token; a sliding layer keeps a view of window - 1 tokens whose storage is the whole chunk
    until the next call. The cache grows by torch.cat, so the old keys of the largest layer exist together with the new
    ones.
    Source: transformers 5.23.0 cache_utils.py, DynamicLayer.update and DynamicSlidingWindowLayer.update.
    """
    total, copied = 0, 0
    for layer in layers:
        if layer.shares is not None:
            continue
        token_bytes = batch * position_bytes(layer, dtype, kv)
        total += 2 * batch * layer.state_values * STATE_BYTES  # the state before and after a pass
        cached = tokens if layer.window is None else min(tokens, layer.window - 1 + new_tokens)
        before = max(cached - new_tokens, 0)
        total += 2 * cached * token_bytes
        copied = max(copied, before * token_bytes)
    return total + copied


def passing_tokens(context_tokens: int, *, is_chunked: bool) -> int:
    """Return how many tokens prompts may have together that pass a longer one between its pieces. is_chunked: whether prompts of
    rows go through in chunks that are captured; then only those that need no row pass."""
    return context_tokens // PASSING_DIVISORS[is_chunked]


def prompts_kv_bytes(
    layers: tuple[KVLayer, ...], dtype: str, *, context_tokens: int, new_tokens: int, kv: str = "full"
) -> int:  # fmt: skip
    """Return the most that prompts in progress hold in addition to the buffers of several rows: a first one of a row, a first one
    that needs none, and those that pass, whose sliding layers may hold every token (serve/scheduling/in_progress.py)."""
    one = kv_cache_bytes(layers, dtype, batch=1, tokens=context_tokens, new_tokens=new_tokens, kv=kv)
    token_bytes = sum(2 * position_bytes(layer, dtype, kv) for layer in layers if layer.shares is None)
    return 2 * one + passing_tokens(context_tokens, is_chunked=False) * token_bytes


def row_cache_bytes(
    layers: tuple[KVLayer, ...], dtype: str, *, rows: int, context_tokens: int, pool: int | None = None, kv: str = "full"
) -> int:  # fmt: skip
    """Return the bytes of the fixed key and value buffers of `rows` sequences: every position of a full layer, or the `pool` of
    tokens that the rows share (engine/kv/sequence.py), and the window of a sliding layer (engine/kv/kv_cache.py)."""
    total = 0
    for layer in layers:
        if layer.shares is None:
            positions = rows * (context_tokens if layer.window is None else min(layer.window, context_tokens))
            if pool is not None and layer.window is None:
                positions = (FIRST + pages_of(pool)) * PAGE_TOKENS
            total += 2 * positions * position_bytes(layer, dtype, kv) + rows * layer.state_values * STATE_BYTES
    return total


@dataclass(frozen=True)
class Widths:
    """Widths of one part's layers: D, query, MLP and the largest weight that is dequantized at once, in numbers.

    own_bytes: of the largest weight that is dequantized for one row as well, and of its temporary values. chosen: experts of a
    token.
    """

    hidden: int
    query: int
    mlp: int
    dequantized: int
    expert: int = 0
    own_bytes: int = 0
    chosen: int = 0


@lru_cache(maxsize=KEPT)
def widths_of(anatomy: Anatomy, part: Part, *, quant: str) -> Widths:
    """Return the widest linears of a part: linears with "attn" or "attention" in the path are attention, all others MLP."""
    hidden = query = mlp = dequantized = expert = own_bytes = chosen = 0
    for row in anatomy.rows:
        if row.part != part:
            continue
        if row.kind == "experts":
            expert = max(expert, sum(one.shape[1] for one in row.stacks))
            chosen = max(chosen, row.chosen or USUAL_CHOSEN)
            own_bytes = max(own_bytes, *(_expert_bytes(one, row.made) for one in row.stacks if row.form_of(one)), 0)
        weight = row.weight
        if row.kind != "linear" or weight is None or not _is_layer(row):
            continue
        out_features, in_features = weight.shape[0], prod(weight.shape[1:])
        own_bytes = max(own_bytes, _own_bytes(row, anatomy, quant))
        if row.quantized and stored_format(row.stored or quant).is_dequantized:
            dequantized = max(dequantized, weight.numel)
        if "attn" in row.module_path or "attention" in row.module_path:
            query = max(query, out_features, in_features)
        else:
            mlp = max(mlp, out_features, in_features)
        hidden = max(hidden, min(out_features, in_features))
    return Widths(hidden, query, mlp, dequantized, expert, own_bytes, chosen)


def _expert_bytes(stack: TensorRow, made: str | None) -> int:
    """Return the bytes of dequantizing one expert: its values and scales, of GGML's and files' also its values before the cast."""
    count = max(stack.shape[0], 1)
    if made is not None and stored_format(made).is_coded:
        return (stack.nbytes + stack.numel) // count
    return 2 * stack.nbytes // count + DEQUANTIZED_BYTES * min(stack.numel // count, DEQUANTIZED_VALUES)


@lru_cache(maxsize=KEPT)
def _own_elsewhere(anatomy: Anatomy, quant: str) -> int:
    """Return the bytes of dequantizing the largest weight of a file's own format outside the layers: a head, a connector."""
    return max((_own_bytes(row, anatomy, quant) for row in anatomy.rows if not _is_layer(row)), default=0)


def _own_bytes(row: ModuleRow, anatomy: Anatomy, quant: str) -> int:
    weight = row.weight
    if weight is None or not row.quantized or not stored_format(row.stored or quant).is_own:
        return 0
    whole, step = stored_format(row.stored or quant).at_once(weight.numel)
    return whole * DTYPE_BYTES[anatomy.dtype] + DEQUANTIZED_BYTES * min(whole, step)


def _is_layer(row: ModuleRow) -> bool:
    return row.block.rpartition(".")[2].isdecimal()


@dataclass(frozen=True)
class Needs:
    """The worst phase of a request: its name, its KV cache bytes, and the bytes of all other live tensors.

    phases: every phase's (kv, activations), for the chart and for advice. room_bytes: the part of `activation_bytes`
    that only prompts and towers use (engine/memory/shared_pool.py); 0 if prompts are not captured.
    """

    phase: str
    kv_cache_bytes: int
    activation_bytes: int
    phases: Mapping[str, tuple[int, int]]
    room_bytes: int = 0


@lru_cache(maxsize=KEPT)
def needs_of(
    anatomy: Anatomy,
    use: Use,
    *,
    quant: str,
    has_adapters: bool,
    has_rows: bool = False,
    chunk_tokens: int = 0,
    is_unpacked_elsewhere: bool = False,
    is_fused: bool = False,
    in_place: bool = False,
    has_room: bool = False,
) -> Needs:
    """Return the most memory of a request in addition to weights.

    has_rows: whether steps are captured: then every sequence has fixed buffers for its keys and values, as it has where several
    are decoded together. A prompt is computed alone, in an additional cache; in captured chunks of
    up to `chunk_tokens` it is written into such a buffer, one more than there are rows where there are several. Without
    captured chunks prompts of several rows are in progress in every phase (`prompts_kv_bytes`). Not counted: keys and
    values of prompts that need no row, where chunks are captured.
    is_unpacked_elsewhere: whether a prompt's 4-bit weights are unpacked into room that is counted by itself. is_fused: whether
    steps read pages of keys and values where they are. in_place: whether a chunk reads grouped keys where they are
    (`repeated_tokens`). has_room: whether such chunks are captured: the memory of their graphs serves every pass of prompts and
    towers, and nothing else.

    The forward is read as moments, each a sum of tensors that are alive together. Not covered: workspaces of cuBLAS and cuDNN,
    `output_hidden_states`, eager attention, training.
    """
    kind = quant_of(anatomy, quant)
    is_captured, has_rows = has_rows, has_rows or use.batch > 1
    one = _Counter(anatomy, replace(use, batch=1), kind, has_adapters)
    prompt = _Counter(
        anatomy, replace(use, batch=1), kind, has_adapters, is_unpacked_elsewhere=is_unpacked_elsewhere,
        reads_in_place=chunk_tokens > 0 and (in_place or has_room),
    )  # fmt: skip
    several = _Counter(anatomy, use, kind, has_adapters)
    layers, dtype = anatomy.kv_layers, anatomy.dtype
    piece = chunk_tokens or use.prefill_tokens
    rows = use.batch + (1 if chunk_tokens and use.batch > 1 else 0)
    pool, context, kv = use.pool_tokens, use.context_tokens, use.kv
    fixed = row_cache_bytes(layers, dtype, rows=rows, context_tokens=context, pool=pool, kv=kv) if has_rows else 0
    paged = paged_copy_bytes(layers, dtype, rows=1, context_tokens=context, kv=kv) if pool is not None else 0
    prompt_copies = paged + copy_bytes(layers, dtype, kv, rows=1, context_tokens=context, new_tokens=min(piece, context))
    # For captured steps they are permanently in the graphs' memory, and counted there (execution.step_bytes).
    step_copies = 0 if is_captured else step_copy_bytes(
        layers, dtype, kv, rows=use.batch, context_tokens=context, is_paged=pool is not None, is_fused=is_fused
    )  # fmt: skip
    if use.batch > 1 and not chunk_tokens:
        fixed += prompts_kv_bytes(layers, dtype, context_tokens=context, new_tokens=piece, kv=kv)
    stepped = fixed or kv_cache_bytes(layers, dtype, batch=use.batch, tokens=context, new_tokens=1, kv=kv)
    is_apart = use.batch == 1 and not chunk_tokens
    own = kv_cache_bytes(layers, dtype, batch=1, tokens=context, new_tokens=piece, kv=kv) if is_apart else 0
    phases: dict[str, tuple[int, int]] = {
        "prompt": (fixed + own, prompt.text(piece, use.context_tokens) + prompt_copies),
        "step": (stepped, several.text(1, use.context_tokens) + step_copies),
    }
    if use.patches:
        phases["pictures"] = (fixed, one.pictures())
    if use.sound_s:
        phases["sound"] = (fixed, one.sound())
    if has_adapters:
        phases["adapter"] = (max(kv_bytes for kv_bytes, _ in phases.values()), adapter_piece_bytes(anatomy))
    phase = max(phases, key=lambda name: sum(phases[name]))
    if has_room:
        room = max(phases[name][1] for name in IN_ROOM if name in phases)
        beside = max(activations for name, (_, activations) in phases.items() if name not in IN_ROOM)
        kv_bytes = max(kv_bytes for kv_bytes, _ in phases.values())
        return Needs(phase, kv_bytes, room + beside, phases=MappingProxyType(phases), room_bytes=room)
    return Needs(phase, *phases[phase], phases=MappingProxyType(phases))


@lru_cache(maxsize=KEPT)
def adapter_piece_bytes(anatomy: Anatomy) -> int:
    """Return the bytes that a server needs between two steps to prepare an adapter: one chunk of its largest weight.

    Prompts keep their keys and values during this; activations of prompts and steps are not alive then.
    """
    weights = (row.weight for row in anatomy.rows if row.kind in ("linear", "embedding"))
    largest = max((weight.numel for weight in weights if weight is not None), default=0)
    return ceil(COEFFICIENTS["adapter.piece"][0] * FLOAT32_BYTES * min(largest, ADAPTER_PIECE_VALUES))


@dataclass(frozen=True)
class _Scanned:
    """Sizes from an anatomy's rows. head8, ple_projection, narrow: numbers of the largest such weight (narrow: stored in fewer
    bits than the compute dtype); ple: width of the tables of every layer; convolutions: (channels, spatial dimensions) of the
    audio tower's, outside the repeated layers."""

    head8: int
    ple: int
    ple_projection: int
    narrow: int
    convolutions: tuple[tuple[int, int], ...]


@lru_cache(maxsize=KEPT)
def _scanned(anatomy: Anatomy) -> _Scanned:
    weights = [(row, row.weight) for row in anatomy.rows if row.weight is not None]
    tables = [weight.shape[1] for row, weight in weights if row.gather_only]
    ple = sum(width for width in tables if width != anatomy.hidden_size)
    return _Scanned(
        head8=max((weight.numel for row, weight in weights if row.is_head8), default=0),
        ple=ple,
        ple_projection=max(
            (w.numel for row, w in weights if row.kind == "linear" and row.quantized and w.shape[0] == ple), default=0
        ),
        narrow=max((weight.numel for row, weight in weights if not row.quantized and widened_bytes(row, anatomy.dtype)), default=0),
        convolutions=tuple(
            (weight.shape[0], len(weight.shape) - 2)
            for row, weight in weights
            if row.part == "audio" and row.kind == "other" and not _is_layer(row) and len(weight.shape) >= 3
        ),
    )


class _Counter:
    """Sums of live tensors at each moment, in bytes."""

    def __init__(
        self, anatomy: Anatomy, use: Use, quant: str, has_adapters: bool, *, is_unpacked_elsewhere: bool = False,
        reads_in_place: bool = False,
    ) -> None:  # fmt: skip
        self.anatomy, self.use, self.has_adapters = anatomy, use, has_adapters
        self.dtype_bytes = DTYPE_BYTES[anatomy.dtype]
        self.casts_inputs, self.copies_inputs = stored_format(quant).casts_inputs, stored_format(quant).has_index
        scanned = _scanned(anatomy)
        self.head8 = self.f("head8.chunk", min(HEAD_CHUNK_VALUES, scanned.head8))
        # Also the product of a chunk, before it is written into the output.
        self.widened = self.f("widened.chunk", min(HEAD_CHUNK_VALUES, scanned.narrow))
        self.widened += _own_elsewhere(anatomy, quant)
        self.widths = {part: widths_of(anatomy, part, quant=quant) for part in ("language", "vision", "audio")}
        self.ple = scanned.ple
        self.ple_weight = 0 if self.casts_inputs or is_unpacked_elsewhere else scanned.ple_projection
        self.is_unpacked_elsewhere, self.reads_in_place = is_unpacked_elsewhere, reads_in_place

    def d(self, name: str, width: float) -> float:
        """Return coefficient x width in the model's dtype."""
        return COEFFICIENTS[name][0] * width * self.dtype_bytes

    def f(self, name: str, width: float) -> float:
        """Return coefficient x width in float32."""
        return COEFFICIENTS[name][0] * width * FLOAT32_BYTES

    def extra(self, in_features: int, out_features: int) -> float:
        """Return the bytes that adapters or int8 add to one linear per row."""
        added = 0.0
        if self.has_adapters:
            # An adapter inside its layer's product (engine/batched_lora/columns.py) needs less: its extended bfloat16 input is no
            # larger than the float32 copy, and its float32 sums have fewer values than the update.
            added += self.f("lora.input", in_features) + self.f("lora.output", out_features) + self.d("lora.sum", out_features)
        if self.casts_inputs:
            added += COEFFICIENTS["int8.input"][0] * in_features + COEFFICIENTS["int8.output"][0] * out_features
        return added

    def layer(self, wide: Widths, rows: int, pairs: int, *, masked: bool, repeated: int) -> float:
        """Return the worst moment of one attention + MLP layer, without tensors that are alive in all layers.

        rows: tokens in it. pairs: query-key pairs of a full mask. repeated: tokens whose keys and values are repeated.
        """
        query, mlp = wide.query, wide.mlp
        weight = max(self.d("dequantized", wide.dequantized) if rows > 1 else 0.0, wide.own_bytes)
        mask = self.d("attention.mask_float", pairs) if masked else 0.0
        normed = wide.hidden * self.dtype_bytes
        ordered = self.d("ordered.input", wide.hidden) if self.copies_inputs else 0.0
        pairs_of = rows * COEFFICIENTS["experts.rows"][0] * wide.chosen  # of tokens and their experts
        return (
            max(
                rows * (normed + self.d("attention.norm", query) + self.f("attention.norm_float", query)),
                rows * (normed + self.d("attention.rope", query)),
                rows * (normed + self.d("attention.output", query)) + self.d("attention.repeat", repeated * query) + mask,
                rows * (normed + query * self.dtype_bytes + self.extra(wide.hidden, query)) + weight,
                rows * (normed + ordered + self.d("mlp.gemm", mlp)) + weight,
                rows * (normed + self.d("mlp.product", mlp)),
                rows * (normed + self.d("mlp.gemm", mlp) + self.extra(wide.hidden, mlp)),
                rows * (normed + mlp * self.dtype_bytes + self.extra(mlp, wide.hidden)) + weight,
                pairs_of * wide.expert * self.dtype_bytes,
                # Half of the outputs of both stacks is more than an inner row and A x of ranks up to D / 8 - 8.
                pairs_of * (self.f("experts.sums", wide.hidden) + wide.expert // 2 * self.dtype_bytes) + wide.own_bytes,
                rows * self.f("hidden.norm", wide.hidden),
            )
            + self.widened
        )

    def text(self, new_tokens: int, all_tokens: int) -> int:
        """Return the activations of adding new tokens to a context, for every row of the batch."""
        rows, hidden, dtype_bytes = new_tokens * self.use.batch, self.anatomy.hidden_size, self.dtype_bytes
        wide = replace(self.widths["language"], hidden=hidden)
        wide = replace(wide, dequantized=0) if self.is_unpacked_elsewhere else wide
        many = new_tokens > 1
        pairs = rows * all_tokens if many else 0
        fixed = rows * self.d("hidden.held", hidden) + COEFFICIENTS["attention.mask"][0] * pairs
        largest_kv = max((layer.kv_heads * layer.head_dim for layer in self.anatomy.kv_layers), default=0)
        repeats = many and largest_kv < wide.query
        repeated = repeated_tokens(rows, rows // new_tokens * all_tokens, in_place=self.reads_in_place) if repeats else 0
        layer = self.layer(wide, rows, pairs, masked=many, repeated=repeated) + rows * self.d("ple.held", self.ple)
        first = rows * max(
            self.d("ple.norm", self.ple) + self.f("ple.norm_float", self.ple),
            self.d("ple.gemm", self.ple) + self.extra(hidden, self.ple),
        )
        gemm = rows * self.d("ple.gemm", self.ple) + (self.d("dequantized", self.ple_weight) if rows > 1 else 0.0)
        logits = self.use.batch * (
            self.d("logits.model", self.anatomy.vocab_size) + self.f("logits.float", self.anatomy.vocab_size)
        )
        head = rows * hidden * dtype_bytes + logits + self.head8 + self.widened
        return ceil(max(fixed + layer, fixed + first, fixed + gemm, head))

    def pictures(self) -> int:
        """Return the activations of all images of a batch in one pass of the vision tower."""
        wide, batch = self.widths["vision"], self.use.batch
        rows = self.use.patches * batch
        pairs = batch * self.use.patches * patches_of(self.anatomy.model_type)[0]
        pixels = self.f("vision.pixels", wide.hidden or self.anatomy.hidden_size)
        pooled = COEFFICIENTS["vision.pool"][0] * rows * patches_of(self.anatomy.model_type)[1]
        fixed = rows * (self.d("vision.hidden", wide.hidden) + FLOAT32_BYTES * wide.hidden) + pairs
        layer = self.layer(wide, rows, pairs, masked=True, repeated=0)
        pool = pooled + rows * self.f("hidden.norm", wide.hidden)
        return ceil(max(fixed + layer, fixed + pool, rows * pixels) + self._embedded())

    def sound(self) -> int:
        """Return the activations of all audio clips of a batch in one pass of the audio tower."""
        wide, batch = self.widths["audio"], self.use.batch
        frames = ceil(self.use.sound_s * FRAMES_PER_S) * batch
        worst, time, bands, before = 0.0, float(frames), float(BANDS), frames * BANDS * self.dtype_bytes
        for channels, kernel_dims in _scanned(self.anatomy).convolutions:
            time, bands = time / 2, bands / 2 if kernel_dims == 2 else 1.0
            after = channels * time * bands
            worst = max(worst, before + self.d("audio.conv", after))
            before = ceil(after * self.dtype_bytes)
        rows = self.use.sound_tokens * batch
        fixed = rows * self.d("audio.hidden", wide.hidden)
        layer = max(self.layer(wide, rows, 0, masked=False, repeated=0), rows * self.f("audio.attention", wide.hidden))
        return ceil(max(worst, fixed + layer) + self._embedded())

    def _embedded(self) -> int:
        """Return the prompt's embeddings and raw per-layer inputs, made before the towers run."""
        rows = self.use.prefill_tokens * self.use.batch
        return rows * (2 * self.anatomy.hidden_size + self.ple) * self.dtype_bytes
