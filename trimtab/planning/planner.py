"""The planner: the plan of one request on one machine.

All blocks stay on the execution device if they fit. Otherwise gathered tables leave first, because fetching rows is
very cheap, then blocks in the order of the seconds that each freed byte costs: towers and connectors run once per image
or audio clip, decoder layers at every token. They move to host memory. Blocks that do not fit there go to disk; the
rows of a table then stay in the checkpoint file. `search.py` finds the cheapest such placement within every budget.

Pure: the same anatomy, request, machine and rates give the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from trimtab.checkpoint.anatomy import Anatomy, first_equal
from trimtab.errors import DoesNotFitError
from trimtab.planning.candidates import Candidates
from trimtab.planning.cpu_seconds import with_cpu_seconds
from trimtab.planning.memory.activations import PREFILL_CHUNK_TOKENS, use_of
from trimtab.planning.memory.media import NO_MEDIA, MediaMemory
from trimtab.planning.memory.towers import with_towers
from trimtab.planning.memory.unpacked import with_unpacked
from trimtab.planning.options import advised
from trimtab.planning.placing import Given
from trimtab.planning.plan.plan import Plan, Stamps
from trimtab.planning.values.byte_sizes import Rates
from trimtab.planning.values.machine import Machine
from trimtab.request import LoadRequest


def make_plan(
    request: LoadRequest,
    anatomy: Anatomy,
    *,
    adapters: Mapping[str, int],
    machine: Machine,
    rates: Rates,
    checkpoint_stamps: Stamps = (),
    adapter_stamps: Mapping[str, Stamps] | None = None,
    disk_free_bytes: int | None = None,
    prefill_chunk_tokens: int = PREFILL_CHUNK_TOKENS,
    head8: Anatomy | None = None,
    head_refused: str = "",
    is_advised: bool = True,
    held_bytes: int = 0,
    media: MediaMemory = NO_MEDIA,
    anatomy_of: Callable[[LoadRequest], Anatomy | None] | None = None,
) -> Plan:
    """Return the placement and the execution with the least expected seconds within the request's budgets.

    adapters: name -> bytes on the execution device. disk_free_bytes: of the spill folder, None if not known. head8: the
    anatomy with an 8-bit output head, for a request that leaves the head to the plan; head_refused: why it must stay
    full. is_advised: whether an error names the change that helps most, which needs more plans. anatomy_of: makes the
    anatomy of a request with another head or format, for that; None: no such change is tried, or only with `head8`.
    held_bytes: of adapters that stay in host memory, as a server keeps them. media: host memory of a server's images
    and audio.
    Errors: RequestError for placements that cannot be followed and executions that are unavailable, DoesNotFitError
    with the smallest sufficient budget.
    """
    given = Given(
        request=request, anatomy=first_equal(anatomy), adapters=adapters, machine=machine, rates=rates,
        disk_free_bytes=disk_free_bytes, chunk_tokens=prefill_chunk_tokens, head8=None if head8 is None else first_equal(head8),
        head_refused=head_refused, held_bytes=held_bytes, media=media,
    )  # fmt: skip
    try:
        plan = Candidates(given).best()
    except DoesNotFitError as exc:
        if not is_advised:
            raise
        known_of = anatomy_of or (lambda changed: given.head8 if changed.quant == request.quant else None)
        raise advised(exc, given, known_of) from None
    anatomy = given.anatomy
    shared = machine.host_available_bytes + machine.process_bytes if machine.on_cpu else None
    plan = with_unpacked(plan if machine.on_cpu else with_towers(plan, anatomy), anatomy, shared_bytes=shared)
    if machine.on_cpu:
        plan = with_cpu_seconds(plan, anatomy, use_of(plan.request, anatomy, chunk_tokens=prefill_chunk_tokens))
    return replace(plan, checkpoint_stamps=tuple(checkpoint_stamps), adapter_stamps=dict(adapter_stamps or {}))
