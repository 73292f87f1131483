"""What are the Machine and Rates of a card that is not in this machine, estimated from its profile?"""

from __future__ import annotations

from dataclasses import replace

from trimtab.planning.values.blocks import Machine
from trimtab.planning.values.byte_sizes import Rates
from trimtab.planning.values.cards import MIB, Card

# The driver's share of an idle card.
DRIVER_BYTES = 256 * MIB
# A bare context grows with the multiprocessors: 524 MiB with 132 of them (H200, driver 580), 391 with the stacks of 512 bytes that
# this process requests instead of 1 KiB. Kernels are counted by the plan (planning/values/execution.py).
THREAD_STACK_BYTES = 512
CONTEXT_BASE_BYTES, CONTEXT_BYTES_EACH = 131 * MIB, 2 * MIB
# The share of a data sheet's figure that copies and products reach: an H200 copies 4.2 of 4.8 TB/s. Products were not
# measured on small cards: the share within their power limits is assumed.
MEMORY_SHARE, FLOPS_SHARE = 0.87, 0.6
# Host memory of a process before any weight, and the addition of its first forward on a GPU (engine/memory/rates.py).
PROCESS_BYTES = (1024 + 850) * MIB


def context_bytes(multiprocessors: int) -> int:
    """Return the approximate bytes of a bare CUDA context on a card."""
    return CONTEXT_BASE_BYTES + CONTEXT_BYTES_EACH * multiprocessors


def machine_of(card: Card, *, host_available_bytes: int) -> Machine:
    """Return a machine with this card and nothing running on it."""
    context = min(context_bytes(card.multiprocessors), card.memory_bytes // 2)
    major, _, minor = card.capability.partition(".")
    return Machine(
        execution_device="cuda:0", gpu_total_bytes=card.memory_bytes,
        gpu_free_bytes=max(card.memory_bytes - DRIVER_BYTES - context, 0), host_available_bytes=host_available_bytes,
        context_bytes=context, process_bytes=PROCESS_BYTES, capability=(int(major), int(minor)),
    )  # fmt: skip


def rates_of(card: Card) -> Rates:
    """Return the rates of a machine with this card. Bandwidth, link and arithmetic are the data sheet's values times the share that
    programs reach; the host's rates are assumptions."""
    assumed = Rates()
    return replace(
        assumed,
        pinned_h2d_Bps=card.link_Bps,
        # A pageable copy uses the driver's page-locked buffer: the host copies every byte once more.
        pageable_h2d_Bps=1 / (1 / card.link_Bps + 1 / assumed.host_Bps),
        device_Bps=card.bandwidth_GBps * 1e9 * MEMORY_SHARE,
        device_flops=card.tflops * 1e12 * FLOPS_SHARE,
    )
