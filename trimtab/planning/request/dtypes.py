"""The floating-point type in which a model computes on a card, and the reason.

Compute capability below 8.0 (GTX 16, RTX 20, T4) emulates bfloat16. There float16 is used if a family's activations
stay within its range, which is measured while loading (`engine/float16_check.py`); float32 if they are known to exceed
it. With float32, unquantized weights stay in the 16 bits of their file and are cast at each use: the same values, half
the memory.

Gemma exceeds float16 (65,504): Gemma 3 in its norms (github.com/huggingface/transformers/issues/36822), Gemma 4 in the
first layers' MLP (github.com/unslothai/unsloth/pull/5092) and in its vision tower
(github.com/huggingface/transformers/pull/46277).

Not known: other families that were released in bfloat16 and exceed float16. The check while loading detects them.
"""

from __future__ import annotations

# bf16 arithmetic begins with compute capability 8.0 (CUDA C++ Programming Guide, arithmetic instructions).
LEAST_BF16 = (8, 0)
# Prefixes of model_type.
BEYOND_FLOAT16 = ("gemma",)


# The start of the reason of a requested type.
ASKED = "asked for"


def reason_of(dtype: str, capability: tuple[int, int] | None, model_type: str) -> str:
    """Return the cost of a requested type on a device, "" if there is none. model_type: of the model's config."""
    if dtype == "float16" and model_type.startswith(BEYOND_FLOAT16):
        return f"{ASKED}; activations of this family ({model_type}) exceed float16, and loading does not measure a requested type"
    if dtype != "bfloat16" or capability is None or capability >= LEAST_BF16:
        return ""
    return f"{ASKED}; bfloat16 is emulated on compute capability {capability[0]}.{capability[1]}"


def was_chosen(dtype_reason: str) -> bool:
    """Whether the plan chose the type for this reason, without a request."""
    return bool(dtype_reason) and not dtype_reason.startswith(ASKED)


def keeps_16bit(dtype: str, dtype_reason: str) -> bool:
    """Whether unquantized weights stay in 16 bits in memory while the model computes in float32: only if the plan chose
    float32. A request for float32 gets float32 weights, which take twice the memory and need no cast at each use.
    """
    return dtype == "float32" and was_chosen(dtype_reason)


def choose_dtype(model_type: str, capability: tuple[int, int] | None) -> tuple[str, str]:
    """Return the type in which a model computes on a device, and why it is not bfloat16 ("" if it is). capability: compute
    capability; None for a CPU and for an unknown card."""
    if capability is None or capability >= LEAST_BF16:
        return "bfloat16", ""
    emulated = f"bfloat16 is emulated on compute capability {capability[0]}.{capability[1]}"
    if model_type.startswith(BEYOND_FLOAT16):
        return "float32", f"{emulated}, and activations of this family ({model_type}) exceed float16"
    return "float16", f"{emulated}; activations are measured while loading"
