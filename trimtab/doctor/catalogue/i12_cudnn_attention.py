"""I12: cuDNN's attention takes device memory outside torch for every new length."""

from __future__ import annotations

from trimtab.doctor.facts.bug import FIXED, NOT_APPLICABLE, PRESENT, Affected, Bug, Seen
from trimtab.doctor.facts.probe_kit import Kit

BUG = Bug(
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
    evidence="run",
)  # fmt: skip

NEEDS_GPU = True
LENGTHS = range(40, 40 + 24 * 8, 8)
# Less than this may be other memory of the driver. An assumption: this probe has not run on such a card.
LEAST_GROWTH_BYTES = 4 * 2**20


def probe(kit: Kit) -> Seen:
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

    attend(32)
    before = outside()
    for length in LENGTHS:
        attend(length)
    grown = outside() - before
    text = f"{len(LENGTHS)} lengths took {grown / 2**20:.1f} MiB of the driver's memory"
    return Seen(PRESENT if grown >= LEAST_GROWTH_BYTES else FIXED, text)
