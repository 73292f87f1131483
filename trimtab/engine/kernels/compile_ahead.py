"""Which sources and variants a model's kernels need on a card that was never seen: compiled at once, before the first is checked.

NVRTC takes 0.3 to 4 s for each of about 30 variants, without Python's lock. One after the other, in the order of the checks, they
take 12 s of a first load (E4B, H200); at once they take as long as the slowest. Compiled code goes to the user's cache folder
(nvrtc.py), where the checks look; without that folder nothing is done here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from trimtab.engine.cuda import nvrtc
from trimtab.engine.cuda.nvrtc import Job
from trimtab.engine.formats.packed import Packed
from trimtab.engine.kernels import attention_and_norms as fused
from trimtab.engine.kernels import dequantize as prompt_kernels
from trimtab.engine.kernels import embed_and_logits as ends
from trimtab.engine.kernels import gemm4 as many_rows
from trimtab.engine.kernels import gemv4 as matvec
from trimtab.engine.kernels import layouts
from trimtab.errors import DeviceError


def jobs(
    weights: Sequence[tuple[Sequence[Packed], bool]], attention: Sequence[fused.AttentionShape], module: nvrtc.Module,
    dtype: torch.dtype, *, checked: Sequence[int], counts: Sequence[int], has_many: bool = False,
) -> list[Job]:  # fmt: skip
    """Return the sources and variants to compile for products of these weights (a group, whether two are multiplied) and these
    kinds of attention (heads, kv heads, head size).

    module: of the products; it knows the limits of the card. checked: row counts of the checks. counts: row counts of the
    steps. has_many: steps of more rows too.
    """
    wanted = [Job(fused.source(), (), "fused.cu"), Job(ends.source(), (), "ends.cu")]
    wanted.append(Job(prompt_kernels.source(), (), "prompt.cu"))
    own = [packed for group, _ in weights for packed in group if "scale" in packed.parts]
    others = {layouts.options(packed) for packed in own if layouts.layout(packed) is not None}
    wanted += [Job(prompt_kernels.source(), options, "prompt.cu") for options in others]
    if has_many:
        wanted += [Job(many_rows.source(), options, "rows.cu") for options in ((), *others)]
    for kind in attention:
        if fused.why_not(*kind[:3], dtype) is None:
            wanted += [
                Job(fused.source("attend.cu"), fused.attention_options(kind, dtype, turn=turn), "attend.cu")
                for turn in (True, False)
            ]
    variants: dict[tuple[str, ...], None] = {}
    for group, pair in weights:
        if any(matvec.why_not(packed, dtype, module.device) for packed in group):
            continue
        for one in (group[part] for part in layouts.runs(group)):
            for n in counts:
                config = matvec.config_of(one, n, module, pair=pair)
                for normed in () if config is None else (False, True) if config[0].normed else (False,):
                    cut = None if config is None else config[0]
                    variants[matvec.options(one[0], dtype, cut, members=len(one), pair=pair, normed=normed)] = None
            for n in checked:
                plain = matvec.choose(one, n, module)
                variants[matvec.options(one[0], dtype, plain, members=len(one))] = None
    return wanted + [Job(matvec.source(), (*options, *module.common), "matvec4.cu") for options in variants]


def compile_ahead(
    weights: Sequence[tuple[Sequence[Packed], bool]], attention: Sequence[fused.AttentionShape], device: torch.device,
    dtype: torch.dtype, *, checked: Sequence[int], counts: Sequence[int], has_many: bool = False,
    norm: matvec.NormForm = matvec.PLAIN,
) -> None:  # fmt: skip
    """Compile the sources and variants that `jobs` returns for a device, in parallel. One that does not compile is named by its
    check."""
    if nvrtc.why_not(device) is not None or not nvrtc.keeps_compiled():
        return
    with suppress(DeviceError):  # the next load reports the reason
        module = matvec.load(device, norm)
        try:
            wanted = jobs(weights, attention, module, dtype, checked=checked, counts=counts, has_many=has_many)
            nvrtc.compile_all(wanted, module.capability)
        finally:
            module.close()
