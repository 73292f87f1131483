"""Run by a test in a process of its own: the matvec kernels over tensors that lie right at a page nobody may touch.

A kernel that reads or writes one value beyond what it was given ends the process; on a GPU it would end the context, or
read another tensor unseen.
"""

import ctypes
import math
import mmap
import sys

import torch

from tests.cuda_on_cpu import modules
from tests.engine.kernels.test_matvec import H200, SHAPES, adapters_of, exact, group_of
from trimtab.engine.cuda import launch_config
from trimtab.engine.kernels import autotune, gemv4

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Fences:
    """Copies tensors to pages of their own, at their end (`at_end`) or at their beginning, with closed pages around."""

    def __init__(self, at_end):
        self.at_end, self.held = at_end, []

    def put(self, tensor):
        tensor = tensor.contiguous()
        nbytes = tensor.numel() * tensor.element_size()
        pages = -(-nbytes // PAGE) * PAGE
        memory = mmap.mmap(-1, pages + 2 * PAGE)
        start = PAGE + (pages - nbytes if self.at_end else 0)
        placed = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(tensor.shape)
        placed.copy_(tensor)
        address = placed.data_ptr() - start
        for closed in (address, address + PAGE + pages):
            assert LIBC.mprotect(closed, PAGE, 0) == 0
        self.held.append((memory, placed))
        return placed

    def close(self):
        """Open the pages again, or freeing them would be refused."""
        for memory, placed in self.held:
            start = placed.data_ptr() // PAGE * PAGE
            LIBC.mprotect(start - PAGE, PAGE, 3)
            LIBC.mprotect(start + len(memory) - 2 * PAGE, PAGE, 3)


def check(module, fences, rows, columns, n, quant, dtype):
    group = group_of(rows, columns, quant, dtype)
    codes = {name: fences.put(code) for name, code in group[0].codes.items()}
    group = [packed.with_parts({k: fences.put(v) for k, v in packed.parts.items()}, codes) for packed in group]
    x, out = fences.put(torch.randn(n, columns).to(dtype)), fences.put(torch.zeros(n, sum(rows), dtype=dtype))
    bias = [fences.put(torch.randn(one).to(dtype)) for one in rows]
    adapters = [
        [(fences.put(A), fences.put(B), scale) for A, B, scale in layer] for layer in adapters_of(rows, columns, [8, 4, 12])
    ]
    tables = gemv4.lora_args(adapters, torch.arange(n, dtype=torch.int32) % 3, 12)
    names = ("A_ptr", "B_ptr", "rank", "scale", "row_slots", "low")
    lora = gemv4.LoraArgs(*[fences.put(getattr(tables, name)) for name in names])
    found = {(cut.splits, cut.units % 2, cut.k_warps % 2): cut for cut in launch_config.cuts(rows, columns, n, **H200)}
    for cut in found.values():
        if cut.splits > 1:
            count = cut.splits * n * cut.grid * cut.units * 16
            module.scratch["parts"] = fences.put(torch.full((count,), gemv4.EMPTY, dtype=torch.int32))
        gemv4.matvec4(x, group, out, bias=bias, lora=lora, module=module, cut=cut)
        out.fill_(math.nan)
        gemv4.matvec4(x, group, out, module=module, cut=cut)
        assert autotune.relative_error(out, exact(x, group)) < autotune.LARGEST_ERROR
    if len(rows) == 1 or len(set(rows)) > 1:
        gate = gemv4.Gate("silu", fences.put(torch.randn(n, rows[0], dtype=torch.float32).to(dtype)))
        gemv4.matvec4(x, group[:1], fences.put(torch.zeros(n, rows[0], dtype=dtype)), gate=gate, module=module)
    else:
        gate = gemv4.Gate("gelu_tanh")
        gemv4.matvec4(x, group, fences.put(torch.zeros(n, rows[0], dtype=dtype)), lora=lora, gate=gate, module=module)
    first = gemv4.LoraArgs(*[fences.put(getattr(lora.member(0), name)) for name in names])
    for given in (x, None):
        gemv4.lora_add(fences.put(torch.zeros(n, rows[0], dtype=dtype)), first, module, x=given)


def main():
    torch.manual_seed(0)
    module = modules.products(7, multiprocessors=4)
    for at_end in (True, False):
        fences = Fences(at_end)
        for shape in SHAPES:
            check(module, fences, *shape)
        fences.close()
    print("nothing was touched beyond its end")


if __name__ == "__main__":
    sys.exit(main())
