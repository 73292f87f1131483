"""What would a changed request give: a table of changes that help, and the one that a refusal names?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from math import ceil
from typing import Any

from trimtab.checkpoint.anatomy import Anatomy
from trimtab.errors import DoesNotFitError, RequestError, TrimtabError, gib
from trimtab.planning.candidates import Candidates, why_no_kernel
from trimtab.planning.placing import Given
from trimtab.planning.plan.plan import Plan
from trimtab.planning.plan.table import rate_text
from trimtab.planning.values.byte_sizes import why_not_int8
from trimtab.planning.values.cards import Card, find_card, larger_cards
from trimtab.report.document import Document, Table, Text
from trimtab.request import DEFAULT_QUANT, LoadRequest

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


# Changes that help ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Option:
    """One changed request. what: the argument that differs; needed_bytes: of the device, None if it does not fit; error: why
    not. is_rate_estimate: whether the rate depends on unmeasured values (a card's data sheet, `Phase.estimated_s`)."""

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
    """Return the plan of the request, and the plan after each single change. plan: makes the plan of a request. budget_bytes:
    of the execution device. on_cpu: whether that is the CPU, where a larger card or a tower in host memory does not help.
    capability: of the GPU. towers: those of TOWERS that the model has; media of others are in no plan. An 8-bit head without a
    usable kernel is listed only if the request does not fit otherwise. Of token pools, the largest that fits is listed; of more
    memory, the next two sizes that fit, or the next ones if none does."""
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


def advised(error: DoesNotFitError, given: Given, anatomy_of: Callable[[LoadRequest], Anatomy | None]) -> DoesNotFitError:
    """Return the error with the change of the request that helps most. anatomy_of: makes the anatomy of a request with another
    head or format, None if it is unknown."""
    request = given.request

    def tried(changed: LoadRequest, *, is_explained: bool = False) -> Plan | DoesNotFitError | None:
        is_same = (changed.head, changed.quant) == (request.head, request.quant)
        try:
            other = given.anatomy if is_same else anatomy_of(changed)
            left = given.adapters if changed.adapters or not request.adapters else {}
            if other is None:
                return None
            return Candidates(replace(given, request=changed, anatomy=other, adapters=left, is_explained=is_explained)).best()
        except DoesNotFitError as exc:
            return exc
        except TrimtabError:
            return None

    return _again(error, error.reason, error.smallest, *best_change(error, request, given.anatomy, tried))
