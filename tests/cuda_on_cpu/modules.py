"""The package's own kernel modules on the CPU: what `load` of `attention_and_norms`, `gemv4` and `embed_and_logits` give on a GPU.

Pass them where a `nvrtc.Module` goes; `launches` says which kernels ran.
"""

from __future__ import annotations

from typing import Any

from tests.cuda_on_cpu.run import CpuModule
from trimtab.engine.formats import int8_head
from trimtab.engine.kernels import attention_and_norms, dequantize, embed_and_logits, gemm4, gemv4

ATTEND_NAMES = ("attend", "attend_combine")


class _Kept(dict):
    """What a module keeps; attention is compiled for each kind of layer when it is first asked for."""

    def __init__(self, source: str, **facts: Any) -> None:
        super().__init__()
        self.source, self.facts = source, facts

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, options: Any) -> CpuModule:
        return self.setdefault(options, CpuModule(self.source, ATTEND_NAMES, options=options, **self.facts))


def small(order: int = 0, *, multiprocessors: int = 16, source: str | None = None, attend: str | None = None) -> CpuModule:
    """Return the kernels of engine/kernels/attention_and_norms.py. order: of threads and blocks. source, attend: other sources than
    its own."""
    facts = {"order": order, "multiprocessors": multiprocessors}
    module = CpuModule(source or attention_and_norms.source(), attention_and_norms.NAMES, **facts)
    module.attention = _Kept(attend or attention_and_norms.source("attend.cu"), **facts)
    attention_and_norms.prepare(module)
    return module


def products(order: int = 0, *, multiprocessors: int = 16, source: str | None = None) -> CpuModule:
    """Return the kernels of engine/kernels/gemv4.py."""
    module = CpuModule(source or gemv4.source(), gemv4.NAMES, order=order, multiprocessors=multiprocessors)
    gemv4.prepare(module)
    return module


def step_ends(order: int = 0, *, source: str | None = None) -> CpuModule:
    """Return the kernels of engine/kernels/embed_and_logits.py."""
    module = CpuModule(source or embed_and_logits.source(), embed_and_logits.NAMES, order=order)
    embed_and_logits.prepare(module)
    return module


def prompts(order: int = 0, *, source: str | None = None) -> CpuModule:
    """Return the kernels of engine/kernels/dequantize.py."""
    return CpuModule(source or dequantize.source(), dequantize.NAMES, order=order)


def rows(order: int = 0, *, source: str | None = None) -> CpuModule:
    """Return the kernels of engine/kernels/gemm4.py."""
    return CpuModule(source or gemm4.source(), gemm4.NAMES, order=order)


def heads(order: int = 0) -> CpuModule:
    """Return the kernel of engine/formats/int8_head.py."""
    return CpuModule(int8_head.source(), int8_head.NAMES, order=order)


def launches(module: CpuModule) -> list[str]:
    """Return the names of what a module launched, attention last."""
    return module.launches + [name for attention in module.attention.values() for name in attention.launches]
