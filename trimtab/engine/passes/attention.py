"""How does attention of one sequence read grouped keys and values in place, with the bits of transformers' repeated form?"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import cache
from inspect import getattr_static
from types import SimpleNamespace
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trimtab.planning import Plan
from trimtab.planning.values.execution import SMALL_BUDGET_BYTES

if TYPE_CHECKING:
    from trimtab.engine.formats.hf_types import Config, HFModel

    class GroupedAttention(nn.Module):
        config: Config
        num_key_value_groups: int
        head_dim: int


# Under this name transformers finds the function; no other model uses it.
NAME = "trimtab_grouped"
# Its name in `LoadedModel.fallbacks`.
WHAT = "attention without repeated keys"
# By device, the implementation whose bits do not depend on how heads and batch are divided. On a CPU torch's flash attention splits
# by lengths; on a GPU it takes no mask, and groups by itself without one.
_KERNELS = {"cpu": SDPBackend.FLASH_ATTENTION.value, "cuda": SDPBackend.EFFICIENT_ATTENTION.value}
# Wider heads of a query without a mask are repeated too (transformers 5.23.0, `use_gqa_in_sdpa`).
WIDEST_GROUPED = 256
# Arguments that change the computation, which are not handled here.
_UNKNOWN = ("position_bias", "cache", "softcap", "s_aux")
# Lengths of a trial: a last block of one query, keys on both sides of torch's padding of masks.
_TRIAL_TOKENS, _TRIAL_PLACES = 33, (33, 96)


def attention(
    module: object, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, **kwargs: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return ([B, T, H, D] contiguous, None), as `sdpa_attention_forward` of transformers with the same arguments.

    Shapes: query [B, H, T, D], key and value [B, KV, S, D], attention_mask [B or 1, 1 or H, T, S] or None.
    """
    if dropout == 0.0 and not any(kwargs.get(name) is not None for name in _UNKNOWN):
        is_masked_causally = attention_mask is None and (is_causal if is_causal is not None else getattr(module, "is_causal", True))
        attended = grouped(query, key, value, attention_mask, scaling=scaling, is_causal=bool(is_masked_causally))
        if attended is not None:
            return attended, None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )  # type: ignore[no-any-return]


def grouped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float | None, is_causal: bool
) -> Tensor | None:
    """Return [1, T, H, D] contiguous without repeating keys, None where transformers' form is needed.

    Shapes: query [1, H, T, D], key and value [1, KV, S, D], mask [1, 1, T, S] or None. is_causal: without a mask, T = S. The query
    [1, KV x G, T, D] is viewed as a batch of G with KV heads, and keys and values [1, KV, S, D] are expanded to that batch with a
    stride of 0 (docs/decisions/0024). Only the kernel that `_fused_sdp_choice` names per device counts.
    """
    batch, heads, tokens, width = query.shape
    kv_heads, places = key.shape[1], key.shape[2]
    if batch != 1 or tokens == 1 or heads == kv_heads or heads % kv_heads or value.shape[:3] != key.shape[:3]:
        return None
    if mask is None and ((width <= WIDEST_GROUPED and value.shape[3] == width) or (is_causal and tokens != places)):
        return None
    if mask is not None and mask.shape != (1, 1, tokens, places):
        return None
    if may_pack(query):
        return None
    group = heads // kv_heads
    by_group = query[0].unflatten(0, (kv_heads, group)).transpose(0, 1)
    keys, values = key.expand(group, -1, -1, -1), value.expand(group, -1, -1, -1)
    kernel = torch._fused_sdp_choice(by_group, keys, values, mask, 0.0, is_causal, scale=scaling)
    if kernel != _KERNELS.get(query.device.type):
        return None
    attended = scaled_dot_product_attention(by_group, keys, values, attn_mask=mask, is_causal=is_causal, scale=scaling)
    return attended.permute(2, 1, 0, 3).reshape(1, tokens, heads, value.shape[3]).contiguous()


def may_pack(query: Tensor) -> bool:
    """Return whether torch may pack keys for a query before it multiplies, and sum in another order then: in 16 bits on a CPU with
    AVX512, by the number of heads (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, `need_pack`)."""
    is_short = query.device.type == "cpu" and query.element_size() == 2
    return is_short and "AVX512" in torch.backends.cpu.get_cpu_capability()


# A model -------------------------------------------------------------------------------------------------------------


def begin_trials(hf_model: HFModel, device: torch.device, dtype: torch.dtype, undo: ExitStack) -> Future[str | None]:
    """Begin `why_other` for the decoder's attention, on a GPU next to other work: its first kernels take up to a second to load.
    Returns what gives the first reason. undo: of a load; one that fails waits for the end."""
    kinds = list(dict.fromkeys((module.num_key_value_groups, module.head_dim) for module in _modules(hf_model)))

    def tried() -> str | None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread: to make a context on the first GPU is none of its work
        return next((why for group, width in kinds if (why := why_other(group, width, device, dtype)) is not None), None)

    pool = ThreadPoolExecutor(1, "trimtab-attention")
    future = pool.submit(tried)
    pool.shutdown(wait=False)
    undo.callback(wait, [future])
    return future


def use_in(hf_model: HFModel, tried: Future[str | None]) -> str | None:
    """Let the decoder's attention modules use this form. Return why they stay as they are, None if nothing differs.

    tried: of `begin_trials`. Model and decoder keep their config: masks are made as before. Attention modules read a view of it in
    which only the name of the attention differs, and that only while it is "sdpa".
    """
    if (why := tried.result()) is not None:
        return why
    modules = list(_modules(hf_model))
    views: dict[int, Config] = {}
    for module in modules:
        if id(module.config) not in views:
            views[id(module.config)] = _view(module.config)
        module.config = views[id(module.config)]
    return None


def _modules(hf_model: HFModel) -> Iterator[GroupedAttention]:
    return filter(_is_grouped, hf_model.get_decoder().modules())


def _is_grouped(module: nn.Module) -> TypeGuard[GroupedAttention]:
    groups, width = getattr(module, "num_key_value_groups", 1), getattr(module, "head_dim", None)
    if not isinstance(groups, int) or groups <= 1 or not isinstance(width, int):
        return False
    return getattr(getattr(module, "config", None), "_attn_implementation", None) == "sdpa"


def _view(config: Config) -> Config:
    """Return a config with the same attributes, also later ones, that names this attention where the other says "sdpa"."""
    kind = type(config)
    own: property = getattr_static(kind, "_attn_implementation")

    def named(self: Config) -> str | None:
        name: str | None = own.fget(self) if own.fget is not None else None
        return NAME if name == "sdpa" else name

    covered = type(kind.__name__, (kind,), {"_attn_implementation": property(named, own.fset)})
    one: Config = object.__new__(covered)
    object.__setattr__(one, "__dict__", vars(config))
    return one


@torch.no_grad()
def why_other(group: int, width: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return where this form's bits differ from those of keys repeated in memory, on random values; None where all are equal.

    group: query heads of a head of keys. width: of a head. transformers repeats one head of keys with a stride of 0, which meets
    the branch above: on an H200, heads of 512 values were wrong for 33, 65, 97 ... tokens (torch 2.11). So they are copied here.
    """
    generator = torch.Generator(device=device).manual_seed(width)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    module = SimpleNamespace(num_key_value_groups=group, is_causal=True)
    unmasked = [(_TRIAL_TOKENS, False)] if width > WIDEST_GROUPED else []
    for kv_heads in (1, 2):
        for places, has_mask in (*unmasked, *((places, True) for places in _TRIAL_PLACES)):
            query = random(1, _TRIAL_TOKENS, group * kv_heads, width).transpose(1, 2)
            states = random(1, kv_heads, places, width), random(1, kv_heads, places, width)
            hidden = random(1, 1, _TRIAL_TOKENS, places) > 1
            hidden[..., 0] = False
            mask = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, float("-inf")) if has_mask else None
            found, _ = attention(module, query, *states, mask)
            copies = [state.repeat_interleave(group, dim=1) for state in states]
            expected, _ = sdpa_attention_forward(SimpleNamespace(is_causal=True), query, *copies, mask)
            if not torch.equal(found, expected):
                most = float((found.float() - expected.float()).abs().max())
                return f"{group} query heads of width {width} on {places} places: up to {most:.2g} away from repeated keys"
    return None


ALL_ATTENTION_FUNCTIONS.register(NAME, attention)


# Compute capabilities (major) on which torch prefers cuDNN's attention (2.9 and later).
PREFERRED_ON = (9, 10)


class AttentionGuard:
    """The open models that need a process without cuDNN's attention, and the setting that returns after them. A setting that the
    user changes in between is seen only where it is on. Reasons: docs/decisions/0023."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the collector may drop a model while this thread holds it
        self._models: list[object] = []
        self._before = False

    def leave_out(self, model: object) -> Callable[[], object]:
        """Switch cuDNN's attention off until the returned function is called, or the model is collected."""
        token = object()
        with self._lock:
            self._before = self._before or torch.backends.cuda.cudnn_sdp_enabled()
            self._models.append(token)
            torch.backends.cuda.enable_cudnn_sdp(False)
        release = weakref.finalize(model, self._release, token)
        release.atexit = False
        return release

    @property
    def is_forced(self) -> bool:
        """Whether cuDNN's attention would be on if it were not for an open model."""
        with self._lock:
            return bool(self._models) and self._before and not torch.backends.cuda.cudnn_sdp_enabled()

    def _release(self, token: object) -> None:
        with self._lock:
            self._models.remove(token)
            if not self._models and self._before:
                self._before = False
                torch.backends.cuda.enable_cudnn_sdp(True)


@cache
def of_this_process() -> AttentionGuard:
    """Return the process's guard: the setting belongs to the process, not to a model."""
    return AttentionGuard()


def is_left_out(plan: Plan) -> bool:
    """Whether a model of this plan computes without cuDNN's attention: on a GPU, within a small budget."""
    return plan.execution_device != "cpu" and plan.gpu_budget_bytes < SMALL_BUDGET_BYTES


def prefers_cudnn(device: torch.device) -> bool:
    """Whether torch would take cuDNN's attention on this device if it were on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in PREFERRED_ON


def why_without(plan: Plan, device: torch.device) -> str | None:
    """Return why a model whose own budget is large computes without cuDNN's attention now, None if it does not."""
    if is_left_out(plan) or not prefers_cudnn(device) or not of_this_process().is_forced:
        return None
    gib = SMALL_BUDGET_BYTES // 2**30
    return f"another open model of this process has a GPU budget below {gib} GiB, where it takes memory that no plan counts"


def most_tokens(hf_model: HFModel) -> int | None:
    """Return how many tokens a text has at most before its rotations change, None if they never do."""
    return min(growing_rotations(hf_model).values(), default=None)


def growing_rotations(hf_model: HFModel, context_tokens: int = sys.maxsize) -> dict[nn.Module, int]:
    """Return the modules whose angles change within a text of the context, and up to how many tokens they do not."""
    found: dict[nn.Module, int] = {}
    for module in hf_model.modules():
        if (kinds := vars(module).get("rope_type")) is None:
            continue
        config = getattr(module, "config", None)
        for name, kind in kinds.items() if isinstance(kinds, Mapping) else ((None, kinds),):
            if config is not None and kind == "longrope":
                own = config.rope_parameters if name is None else config.rope_parameters[name]
                found[module] = int(own["original_max_position_embeddings"])
            elif config is not None and kind is not None and "dynamic" in kind:
                found[module] = int(config.max_position_embeddings)
    return {module: most for module, most in found.items() if most < context_tokens}
