"""The execution and the output head that a plan chooses, and the plans of changed requests.

`choose_plan` makes a plan for every execution and head that the request allows, and takes the one with the least
expected seconds. `options_of` makes plans of changed requests: a table of changes that help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from math import ceil, prod
from typing import Any, Protocol

from trimtab.checkpoint.anatomy import DTYPE_BYTES, Anatomy
from trimtab.errors import DoesNotFitError, RequestError, TrimtabError, gib
from trimtab.formats.record import HEAD8, packed_bytes
from trimtab.planning.plan.plan import Plan
from trimtab.planning.plan.table import predicted_rate, rate_text
from trimtab.planning.values.blocks import quant_of
from trimtab.planning.values.byte_sizes import Rates
from trimtab.planning.values.cards import Card, find_card, larger_cards
from trimtab.planning.values.execution import (
    CAPTURED,
    CAPTURED_CHUNKS,
    CHUNKS,
    KERNEL_ROWS,
    LEAST_CAPABILITY,
    MODES,
    UNCAPTURED_CHUNKS,
    head_rows,
    unsupported_reason,
)
from trimtab.planning.values.kv_bytes import check_invariant, check_kv, why_not_int8
from trimtab.report.document import Document, Table, Text
from trimtab.request import DEFAULT_QUANT, LoadRequest

# Modes of a decode step, the fastest first.
FASTEST_FIRST = ("fused", "graph", "eager")
# Mean KL of next-token distributions, full head against 8 bits, on the demo model: the largest of eight measurements,
# without an adapter and with each of three, in 4 bits and in bfloat16 (bench/results/head8.json; it is that of
# "specialist" in 4 bits).
HEAD8_KL = 1.4e-4
# The shortest context that is offered.
LEAST_CONTEXT = 256
# The start of the error of an option that does not fit.
NEEDS = "needs "
NO_ADAPTERS, NO_PREFIX_CACHE = "no adapters", "no prefix cache"
# How many options with more memory are listed.
MOST_LARGER = 2
# Parts that read images and audio, as `--place` names them.
TOWERS = ("vision", "audio")
# Memory sizes of cards on the market.
CARD_GIB = (4, 6, 8, 10, 12, 16, 24, 32, 48, 80)

Planned = Callable[[Anatomy, str, str, str], Plan]


class WithChunks(Protocol):
    """Makes the plan of chunks of some sizes (`choose_chunks_of`)."""

    def __call__(self, chunks: tuple[int, ...], captured: bool, *, only_whole: bool, explains: bool) -> Plan: ...


class ModeRefusedError(Exception):
    """The user's placement excludes a decode mode. The message names the mode."""


def choose_plan(
    request: LoadRequest, heads: Mapping[str, Anatomy], machine: Any, planned: Planned, *, head_refused: str = ""
) -> Plan:
    """Return the plan with the least expected seconds among the heads and the executions that the request allows.

    heads: "full" and "int8" -> the anatomy with that head; the first is chosen unless the other keeps more of the
    decoder on the device and its kernel runs there. planned: (anatomy, head, mode, reason) -> plan. Errors: as
    `make_plan`.
    """
    check_kv(request.kv, next(iter(heads.values())))
    check_invariant(request.batch_invariant, next(iter(heads.values())))
    no_kernel = "" if machine.on_cpu else why_no_kernel(next(iter(heads.values())).dtype, machine.capability)

    def priced(anatomy: Anatomy, head: str, mode: str, reason: str) -> Plan:
        plan = planned(anatomy, head, mode, reason)
        if head != "int8" or machine.on_cpu:
            return plan
        return with_head_cost(plan, anatomy, capability=machine.capability)

    plans: dict[str, Plan] = {}
    errors: list[DoesNotFitError] = []
    for head, anatomy in heads.items():
        if plans and (no_kernel or not next(iter(plans.values())).blocks_off_device):
            break
        try:
            plans[head] = _fastest(request, anatomy, head, machine, priced)
        except DoesNotFitError as exc:
            errors.append(exc)
    if not plans:
        raise _nearest(errors)
    chosen, reason = _chosen_head(request, plans, machine, head_refused, no_kernel)
    plan = plans[chosen]
    slow = no_kernel or (f"its kernel computes up to {KERNEL_ROWS} rows" if request.batch > KERNEL_ROWS else "")
    if chosen == "int8" and slow and not machine.on_cpu:
        torch_s = torch_head_s(heads[chosen], plan.rates, rows=request.batch)
        reason += f"; {slow}: torch takes {1000 * torch_s:.1f} ms of each step for it, scaled from an H200"
    return replace(plan, execution=replace(plan.execution, head_reason=reason))


def choose_chunks_of(
    with_chunks: WithChunks, *, is_captured: bool, has_room: bool, least_tokens: int = 0, most_tokens: int = max(CHUNKS)
) -> Plan:
    """Return the plan with the most sizes of captured chunks that keep the whole decoder on the device, else the one
    with the least expected seconds: captured chunks with copied layers may be faster than the whole decoder without
    them.

    least_tokens: the smallest size of the largest chunk. most_tokens: the most tokens of a chunk, unless least_tokens
    is larger. with_chunks: makes the plan of some sizes, captured or not; () is transformers' own pass. only_whole:
    whether only a plan with the whole decoder on the device is useful; any other may be refused. explains: whether an
    error has to name the sufficient budget. has_room: whether graphs share the memory of other passes. Then graphs are
    possible together with layers that are copied in every step, and the seconds of a prompt and an answer decide.
    Otherwise graphs would take memory from the layers.
    Errors: as `with_chunks` raises for the sizes that need the least.
    """
    if not is_captured:
        return with_chunks((), False, only_whole=False, explains=True)
    plans: list[Plan] = []
    is_beside = False  # whether one of them has both captured chunks and copied layers
    refused: list[tuple[int, ...]] = [()]
    most = min(size for size in CHUNKS if size >= max(most_tokens, least_tokens))
    for captured, choices in ((True, CAPTURED_CHUNKS), (False, UNCAPTURED_CHUNKS)):
        for chunks in (tuple(size for size in sizes if size <= most) for sizes in choices):
            if max(chunks) < least_tokens:
                continue
            try:
                plan = with_chunks(chunks, captured, only_whole=captured and not has_room, explains=False)
            except DoesNotFitError:
                if not captured:
                    refused.append(chunks)
                continue
            if not plan.blocks_off_device and (captured or not is_beside):
                return plan
            if has_room or not captured:
                plans.append(plan)
                is_beside |= captured
    if plans:
        return min(plans, key=lambda plan: plan.expected_s)
    errors = []
    for chunks in refused:
        try:
            return with_chunks(chunks, False, only_whole=False, explains=True)
        except DoesNotFitError as exc:
            errors.append(exc)
    raise _nearest(errors)


def _nearest(errors: Sequence[DoesNotFitError]) -> DoesNotFitError:
    """Return the error of the plan that lacks the least memory: its budget is the smallest sufficient one. Plans that
    need a larger budget of two devices come last.
    """
    return min(errors, key=lambda error: (error.needs_both, error.needed_bytes - error.budget_bytes))


def _fastest(request: LoadRequest, anatomy: Anatomy, head: str, machine: Any, planned: Planned) -> Plan:
    """Return the plan of the fastest mode that is supported and fits.

    If part of the decoder leaves the device, eager steps may place it differently (the CPU computes some of it): then
    the least expected seconds decide.
    """
    requested = request.decode if request.decode in MODES else None
    refused: dict[str, str] = {}
    excluded: tuple[str, ...] = ()  # by the user's placement
    errors: list[DoesNotFitError] = []
    plans: list[Plan] = []
    for mode in FASTEST_FIRST if requested is None else (requested,):
        # On a CPU, the plain counterpart of the fused kernels can be requested for comparison.
        on_cpu = machine.on_cpu and not (requested == mode == "fused")
        quant = quant_of(anatomy, request.quant)
        why = unsupported_reason(mode, anatomy, quant=quant, on_cpu=on_cpu, capability=machine.capability)
        if plans and (mode == "graph" or not _cpu_may_pay(plans[0])):
            continue  # the same bytes as the steps planned already, and slower
        if why is None:
            try:
                plans.append(planned(anatomy, head, mode, _mode_reason(mode, requested, refused, plans, machine)))
                if not plans[-1].blocks_off_device:
                    break
            except ModeRefusedError as exc:
                why, excluded = str(exc), CAPTURED
            except DoesNotFitError as exc:
                errors.append(exc)
                why = f"needs {gib(exc.needed_bytes)}" if exc.needed_bytes else "does not fit"
        if why is not None:
            refused[mode] = why
    if plans:
        return min(plans, key=lambda plan: plan.expected_s)
    if errors:
        raise _nearest(errors)
    facts: dict[str, Any] = {
        "quant": quant_of(anatomy, request.quant), "on_cpu": machine.on_cpu, "capability": machine.capability,
    }  # fmt: skip
    raise RequestError(
        f"decode steps cannot run this way: {refused[requested or 'eager']}", field="decode", value=request.decode,
        allowed=("auto", *(mode for mode in MODES if mode not in excluded and unsupported_reason(mode, anatomy, **facts) is None)),
        hint="Omit it to use an available mode",
    )  # fmt: skip


def _mode_reason(mode: str, requested: str | None, refused: Mapping[str, str], before: Sequence[Plan], machine: Any) -> str:
    if requested is not None:
        return "asked for"
    if machine.on_cpu:
        return "the CPU computes"
    if before:
        return f"faster here than {before[-1].execution.step.mode} steps, which compute every layer on the GPU"
    why = "; ".join(f"no {name} steps: {reason}" for name, reason in refused.items())
    if mode == "fused":
        return "its decoder is described: trimtab's kernels, the fastest way that this model and card support"
    return why or "the fastest way that this model and card support"


def _cpu_may_pay(plan: Plan) -> bool:
    """Return whether the CPU may compute a layer faster than the layer can be copied to the device."""
    return 2 * plan.rates.host_matmul_Bps > plan.rates.pinned_h2d_Bps


def _chosen_head(request: LoadRequest, plans: Mapping[str, Plan], machine: Any, refused: str, no_kernel: str) -> tuple[str, str]:
    """Return the chosen head and the reason. refused: why it must stay full; no_kernel: why the 8-bit kernel cannot
    run.
    """
    first = next(iter(plans))
    if request.head != "auto":
        return first, "asked for"
    if machine.on_cpu:
        return first, "the CPU computes"
    if refused:
        return first, refused
    if len(plans) == 1:
        if first == "int8":
            return first, f"the full head does not fit; {_cost()}"
        if plans[first].blocks_off_device:
            return first, f"8 bits would be computed by torch: {no_kernel}" if no_kernel else "8 bits do not fit either"
        return first, "the whole decoder stays on the device"
    whole, small = plans["full"], plans["int8"]
    kept = whole.blocks_off_device - small.blocks_off_device
    if kept > 0 and small.expected_s < whole.expected_s:
        rates = f"{predicted_rate(small.execution)} instead of {predicted_rate(whole.execution)} predicted"
        return "int8", f"keeps {kept} more decoder blocks on the device, {rates}; {_cost()}"
    if kept > 0:
        return "full", "8 bits keep more of the decoder on the device, but are not faster"
    return "full", "8 bits would not keep more of the decoder on the device"


def _cost() -> str:
    return f"mean KL up to {HEAD8_KL:.1e} on the demo model, head='full' gives the logits of transformers"


# Changes that help ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Option:
    """One changed request. what: the argument that differs; needed_bytes: of the device, None if it does not fit;
    error: why not. is_rate_estimate: whether the rate depends on unmeasured values (a card's data sheet,
    `Phase.estimated_s`).
    """

    what: str
    needed_bytes: int | None
    tokens_per_s: float | None
    head: str = ""
    mode: str = ""
    error: str = ""
    is_rate_estimate: bool = False


def options_of(
    request: LoadRequest, plan: Callable[[LoadRequest], Plan], *, budget_bytes: int, on_cpu: bool = False,
    capability: tuple[int, int] | None = None, towers: Sequence[str] = TOWERS,
) -> list[Option]:  # fmt: skip
    """Return the plan of the request, and the plan after each single change. plan: makes the plan of a request.
    budget_bytes: of the execution device. on_cpu: whether that is the CPU, where a larger card or a tower in host
    memory does not help. capability: of the GPU. towers: those of TOWERS that the model has; media of others are in no
    plan. An 8-bit head without a usable kernel is listed only if the request does not fit otherwise. Of token pools,
    the largest that fits is listed; of more memory, the next two sizes that fit, or the next ones if none does.
    """
    options: list[Option] = []

    def tried(what: str, changed: LoadRequest) -> Option | None:
        try:
            made = plan(changed)
        except DoesNotFitError as exc:
            return Option(what=what, needed_bytes=None, tokens_per_s=None, error=f"{NEEDS}{gib(exc.needed_bytes)}")
        except TrimtabError as exc:
            if changed.kv != request.kv and isinstance(exc, RequestError) and exc.field == "kv":
                return None  # `check_kv`: this model does not support it, with any memory
            return Option(what=what, needed_bytes=None, tokens_per_s=None, error=str(exc).splitlines()[0])
        no_kernel = "" if on_cpu else why_no_kernel(made.request.dtype, capability)
        if changed.head == "int8" != request.head and no_kernel and options[0].needed_bytes is not None:
            return None
        return Option(
            what=what, needed_bytes=made.gpu_needed_bytes, tokens_per_s=made.execution.tokens_per_s,
            head=made.execution.head, mode=made.execution.step.mode,
            is_rate_estimate=made.execution.step.estimated_s > 0 or request.card is not None,
        )  # fmt: skip

    for what, changed in _changes(request, on_cpu=on_cpu, towers=towers):
        options += [one for one in (tried(what, changed),) if one is not None]
    pools = [(_pools(request), 1)]
    pools += [] if on_cpu else [(sizes, MOST_LARGER) for sizes in _larger(request, budget_bytes)]
    for changes, most in pools:
        listed: list[Option] = []
        for what, changed in changes:
            listed += [one for one in (tried(what, changed),) if one is not None]
            if sum(one.needed_bytes is not None for one in listed) == most:
                break
        options += [one for one in listed if one.needed_bytes is not None] or listed[:most]
    return options


def _changes(request: LoadRequest, *, on_cpu: bool, towers: Sequence[str]) -> Iterator[tuple[str, LoadRequest]]:
    yield "as asked", request
    for head in ("full", "int8"):
        if request.head != head:
            yield f"head={head!r}", replace(request, head=head)
    if request.kv == "full":
        yield "kv='int8'", replace(request, kv="int8")
    for share in (2, 4):
        if request.context_tokens // share >= LEAST_CONTEXT:
            tokens = request.context_tokens // share
            yield f"context={tokens}", replace(request, context_tokens=tokens)
    if request.batch > 1:
        yield _with_rows(request, 1)
    if request.images and "vision" in towers:
        yield "images=0", replace(request, images=0)
    if request.audio_s and "audio" in towers:
        yield "audio_s=0", replace(request, audio_s=0.0)
    if towers and not on_cpu and not request.place and request.device_map is None:
        place = dict.fromkeys(towers, "host")
        yield f"place={place}", replace(request, place=place)


def _pools(request: LoadRequest) -> list[tuple[str, LoadRequest]]:
    """Return the request with smaller and smaller token pools, down to one context."""
    sizes, tokens = [], request.kv_tokens or request.batch * request.context_tokens
    while request.batch > 1 and tokens > request.context_tokens:
        tokens = max(tokens // 2, request.context_tokens)
        sizes.append(tokens)
    return [(f"kv_tokens={tokens}", replace(request, kv_tokens=tokens)) for tokens in sizes]


def _larger(request: LoadRequest, budget_bytes: int) -> list[list[tuple[str, LoadRequest]]]:
    """Return the request with more and more memory: of this card and, in a plan for an absent card, on larger cards."""
    card = None if request.card is None else find_card(request.card)
    if card is not None and request.gpu_memory_bytes is None:
        budget_bytes = card.memory_bytes  # the driver's share alone is no reason for another card
    sizes = [size * 2**30 for size in CARD_GIB if size * 2**30 > budget_bytes * 1.02]
    if card is not None:
        sizes = [size for size in sizes if size <= card.memory_bytes]
    titles = [] if card is None else larger_cards(card)
    return [
        [(f"gpu_memory='{size // 2**30}GiB'", replace(request, gpu_memory_bytes=size)) for size in sizes],
        [(f"card={title!r}", replace(request, card=title, gpu_memory_bytes=None)) for title in titles],
    ]


def with_larger_card(error: DoesNotFitError, request: LoadRequest, plan: Callable[[LoadRequest], Plan]) -> DoesNotFitError:
    """Return the error of a request for a card, with the smallest larger card that it fits on, unless a larger budget of this
    card is enough. plan: makes a request's plan."""
    card, smallest = find_card(request.card or ""), error.smallest
    for title in larger_cards(card) if error.needed_bytes > card.memory_bytes else ():
        with suppress(TrimtabError):
            plan(replace(request, card=title, gpu_memory_bytes=None))
            smallest += f" (card={title!r})"
            break
    return _again(
        error, f"{error.reason}, estimated from the data sheet of {card.title}", smallest, error.option, error.option_bytes
    )


def _again(error: DoesNotFitError, reason: str, smallest: str, option: str, option_bytes: int) -> DoesNotFitError:
    return DoesNotFitError(
        reason, block=error.block, device=error.device, needed_bytes=error.needed_bytes, budget_bytes=error.budget_bytes,
        needs_both=error.needs_both, smallest=smallest, option=option, option_bytes=option_bytes, hint=error.hint,
    )  # fmt: skip


Tried = Callable[..., "Plan | DoesNotFitError | None"]


def best_change(error: DoesNotFitError, request: LoadRequest, anatomy: Anatomy, tried: Tried) -> tuple[str, int]:
    """Return the change of a refused request that helps most, and the smallest budget with it (0: the present one is enough).

    Of single changes that fit, each the least of its kind, that is the one with the fastest answers, and "no adapters" only if no
    other fits; then the least changes that fit together; then the one that lowers the smallest budget most; ("", 0) if none does.
    anatomy: of the model, which decides the supported changes. tried: (request, is_explained=...) -> its plan, its error, or None
    if there is no such model.
    """
    kinds, rates = _smaller(request, anatomy), {}
    for tries in kinds:
        if isinstance(last := tried(tries[-1][1]), Plan):
            (what, changed), made = _least(tries, tried, last)
            rates[what] = made.execution.tokens_per_s * changed.batch
    if rates:
        return max(rates, key=lambda what: (what != NO_ADAPTERS, rates[what])), 0
    chosen = [tries[-1] for tries in kinds]
    if len(kinds) > 1 and isinstance(last := tried(_combined(request, chosen)), Plan):
        for place, tries in enumerate(kinds):
            beside = [("", request), *(one for one in chosen if one is not chosen[place])]
            least = [(what, _combined(request, [*beside, (what, one)])) for what, one in (("", request), *tries)]
            (name, _), last = _least(least, tried, last)
            chosen[place] = next(((what, one) for what, one in tries if what == name), ("", request))
        return " and ".join(what for what, _ in chosen if what), 0
    if error.device == "host":  # each of these takes a search, and little else lowers it
        chosen = [one for one in chosen if one[0] == NO_PREFIX_CACHE]
    needs: dict[str, int] = {}
    for what, changed in () if error.needs_both else chosen:
        one = tried(changed, is_explained=True)
        if isinstance(one, DoesNotFitError) and (one.device, one.needs_both) == (error.device, False):
            needs[what] = one.needed_bytes
    best = min(needs, key=lambda what: needs[what], default="")
    return (best, needs[best]) if best and needs[best] < error.needed_bytes else ("", 0)


def _least(tries: Sequence[tuple[str, LoadRequest]], tried: Tried, last: Plan) -> tuple[tuple[str, LoadRequest], Plan]:
    """Return the first of ever smaller requests that fits, and its plan. last: that of the last one."""
    low, high = 0, len(tries) - 1
    while low < high:
        middle = (low + high) // 2
        if isinstance(made := tried(tries[middle][1]), Plan):
            high, last = middle, made
        else:
            low = middle + 1
    return tries[high], last


def _combined(request: LoadRequest, changes: Sequence[tuple[str, LoadRequest]]) -> LoadRequest:
    """Return the request with several changes; one row has no token pool."""
    values = {name: value for _, changed in changes for name, value in _differences(request, changed).items()}
    combined = replace(request, **values)
    return replace(combined, kv_tokens=None) if combined.batch == 1 else combined


def _differences(request: LoadRequest, changed: LoadRequest) -> dict[str, Any]:
    pairs = ((item.name, getattr(request, item.name), getattr(changed, item.name)) for item in fields(LoadRequest))
    return {name: after for name, before, after in pairs if before != after}


def _halved(count: int) -> Iterator[int]:
    """Yield half of a count, half of that, and so on, down to 0."""
    while count:
        count //= 2
        yield count


def _smaller(request: LoadRequest, anatomy: Anatomy) -> list[list[tuple[str, LoadRequest]]]:
    """Return the reductions of a request: for each kind, from the smallest to the largest."""
    contexts = []
    tokens = request.context_tokens // 2
    while tokens >= LEAST_CONTEXT:
        contexts.append((f"context={tokens}", replace(request, context_tokens=tokens)))
        tokens //= 2
    batches = [_with_rows(request, rows) for rows in _halved(request.batch) if rows]
    images = [(f"images={count}", replace(request, images=count)) for count in _halved(request.images)]
    sounds = [(f"audio_s={length}", replace(request, audio_s=float(length))) for length in _halved(ceil(request.audio_s))]
    kinds = [[(NO_ADAPTERS, replace(request, adapters={}))]] if request.adapters else []
    kinds += [contexts, batches, _pools(request), images, sounds]
    if request.head == "full":
        kinds.append([("head='int8'", replace(request, head="int8"))])
    if request.kv == "full" and why_not_int8(anatomy) is None:
        kinds.append([("kv='int8'", replace(request, kv="int8"))])
    if request.decode != "auto":
        kinds.append([("decode='auto'", replace(request, decode="auto"))])
    if request.prefix_cache_bytes:
        kinds.append([(NO_PREFIX_CACHE, replace(request, prefix_cache_bytes=0))])
    if request.place or request.device_map is not None:
        kinds.append([("no manual placements", replace(request, place={}, device_map=None))])
    if request.quant != DEFAULT_QUANT and anatomy.prequantized is None:
        kinds.append([(f"quant={DEFAULT_QUANT!r}", replace(request, quant=DEFAULT_QUANT))])
    return [tries for tries in kinds if tries]


def _with_rows(request: LoadRequest, rows: int) -> tuple[str, LoadRequest]:
    """Return a request with this many rows, and its further changes: one row has no token pool."""
    if rows == 1 and request.kv_tokens is not None:
        return "batch=1 without kv_tokens", replace(request, batch=1, kv_tokens=None)
    return f"batch={rows}", replace(request, batch=rows)


def options_document(options: Sequence[Option], *, card: Card | None = None) -> Document:
    """Return the options as a table. card: the profile that all figures are estimated from."""
    rows = []
    mark = "" if card is None else "~"
    for one in options:
        needed = "-" if one.needed_bytes is None else f"{mark}{gib(one.needed_bytes)}"
        if one.error.startswith(NEEDS):
            needed = one.error.replace(NEEDS, NEEDS + mark, 1)
        rate = "-" if one.tokens_per_s is None else f"{'~' * one.is_rate_estimate}{rate_text(one.tokens_per_s)}"
        why = one.error if one.error and needed == "-" else one.mode or "-"
        rows.append((one.what, needed, rate, one.head or "-", why))
    note = "~: an estimate from the data sheet of the card; nothing was measured" if card is not None else ""
    if card is None and any(one.is_rate_estimate for one in options):
        note = "~ of keys and values in 8 bits: an estimate, never measured"
    return Document("", [Table(("option", "device memory", "tokens/s", "head", "steps"), rows, has_note=True), Text(note)])


def advised(
    error: DoesNotFitError, request: LoadRequest, anatomy: Anatomy, adapters: Mapping[str, int], plan: Callable[..., Plan],
    anatomy_of: Callable[[LoadRequest], Anatomy | None],
) -> DoesNotFitError:  # fmt: skip
    """Return the error with the change of the request that helps most. plan: makes a plan of another request. anatomy_of: makes
    the anatomy of a request with another head or format, None if it is unknown."""

    def tried(changed: LoadRequest, *, is_explained: bool = False) -> Plan | DoesNotFitError | None:
        is_same = (changed.head, changed.quant) == (request.head, request.quant)
        try:
            other = anatomy if is_same else anatomy_of(changed)
            left = adapters if changed.adapters or not request.adapters else {}
            return None if other is None else plan(changed, anatomy=other, adapters=left, is_explained=is_explained)
        except DoesNotFitError as exc:
            return exc
        except TrimtabError:
            return None

    return _again(error, error.reason, error.smallest, *best_change(error, request, anatomy, tried))


# The kernel of an 8-bit head (engine/formats/int8_head.py) computes up to KERNEL_ROWS rows in bfloat16. torch computes all other
# cases: it converts the 8 bits to float32, one chunk at a time, which takes longer than the full head. Heads that the kernel
# refuses for their width or bias are not covered: only loading knows them.
KERNEL_DTYPE = "bfloat16"
# Rows of a step -> seconds of torch's product with 8 bits, as a multiple of the full head's in bfloat16: E4B on an H200
# (bench/results/head8.json). More rows take at least as long. Other cards take the multiple as an estimate.
TORCH_MULTIPLES = {1: 10.4, 2: 13.5, 4: 14.1, 8: 17.9}


def why_no_kernel(dtype: str, capability: tuple[int, int] | None) -> str:
    """Return why a GPU cannot run the kernel for a model of this dtype, "" if it can or its capability is not known."""
    if capability is not None and capability < LEAST_CAPABILITY:
        have, need = (".".join(map(str, one)) for one in (capability, LEAST_CAPABILITY))
        return f"its kernel needs compute capability {need}, the card has {have}"
    if dtype != KERNEL_DTYPE:
        return f"its kernel computes in {KERNEL_DTYPE}, the model in {dtype}"
    return ""


def torch_head_s(anatomy: Anatomy, rates: Rates, *, rows: int) -> float:
    """Return the predicted seconds of one step's 8-bit head in torch, in addition to reading its bytes once."""
    weights = [row.weight for row in head_rows(anatomy) if row.weight is not None]
    full_bytes = sum(prod(weight.shape) * DTYPE_BYTES[KERNEL_DTYPE] for weight in weights)
    small_bytes = sum(packed_bytes(weight.shape, HEAD8, weight.dtype) for weight in weights)
    multiple = max(found for count, found in TORCH_MULTIPLES.items() if count <= max(rows, 1))
    return (full_bytes * multiple - small_bytes) / rates.device_Bps


def with_head_cost(plan: Plan, anatomy: Anatomy, *, capability: tuple[int, int] | None) -> Plan:
    """Return the plan of an 8-bit head on a GPU with the seconds that torch adds if the kernel does not run: to every
    step, and to a prompt, of which only the last token enters the head.
    """
    step, prompt = plan.execution.step, plan.execution.prompt
    no_kernel, rows = why_no_kernel(anatomy.dtype, capability), plan.request.batch
    if no_kernel or rows > KERNEL_ROWS:
        step = replace(step, seconds=step.seconds + torch_head_s(anatomy, plan.rates, rows=rows))
    if no_kernel:
        prompt = replace(prompt, seconds=prompt.seconds + torch_head_s(anatomy, plan.rates, rows=1))
    return replace(plan, execution=replace(plan.execution, step=step, prompt=prompt))
