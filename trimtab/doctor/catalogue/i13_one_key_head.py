"""I13: attention with one key head computes wrong heads for a last block of one query."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, NOT_APPLICABLE, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit

BUG = Bug(
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
    evidence="run",
)  # fmt: skip

NEEDS_GPU = True
HEADS, TOKENS, PLACES, WIDTH = 8, 33, 64, 512
# Equal sums in one kernel differ by roundings of bfloat16, 2^-8 of values up to 4; other heads differ by about their own size.
MOST = 0.1


def probe(kit: Kit) -> Seen:
    """Attend with a key head that is repeated as a view, and with the same keys copied in memory."""
    import torch

    if not torch.cuda.is_available():
        return Seen(NOT_APPLICABLE, "no GPU that torch can use")
    generator = torch.Generator(device="cuda").manual_seed(0)

    def random(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(1, heads, tokens, WIDTH, generator=generator, device="cuda").to(torch.bfloat16)

    query, keys, values = random(HEADS, TOKENS), random(1, PLACES), random(1, PLACES)
    mask = torch.ones(1, 1, TOKENS, PLACES, dtype=torch.bool, device="cuda").tril(PLACES - TOKENS)

    def attend(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask).float()

    view_of_keys, view_of_values = (one.expand(1, HEADS, PLACES, WIDTH) for one in (keys, values))
    away = attend(view_of_keys, view_of_values) - attend(view_of_keys.contiguous(), view_of_values.contiguous())
    most = float(away.abs().max())
    return Seen(PRESENT if most > MOST else FIXED, f"{TOKENS} tokens: up to {most:.2g} away from keys in memory")
