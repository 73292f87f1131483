"""Keys and values in pages: a row has as many positions as its request needs, in any free pages of one pool.

    pool = PagePool(tokens, rows, context_tokens, device)
    pages = pool.take(prompt_tokens + max_new_tokens)     # page numbers; DoesNotFitError if too few are free
    pool.bind(row, pages)                                 # the row's table has them from here on
    pool.move(2, 0); pool.unbind(0); pool.give(pages)

A layer's keys are [H, P, D]: page p has the positions p * PAGE_TOKENS and following, for every layer the same pages. `PageTable`
says which page has a row's places i * PAGE_TOKENS and following: [rows, pages] int32 on the device, read by captured steps at
its address. Page NONE marks places that a row does not have: it is never written and reads as zeros. Writes to such a place
(padding of a chunk, steps of rows that have finished) go to page SCRAP, which is never read.

Pages of a row are set on the host and written in the order of the stream: a step that was queued before does not see them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trimtab.errors import DoesNotFitError
from trimtab.planning.values.kv_bytes import FIRST, NONE, PAGE_TOKENS, SCRAP, pages_of

if TYPE_CHECKING:
    from trimtab.engine.kv.kv_cache import BatchedKVCache
    from trimtab.engine.kv.sequence import TokenSequence


@dataclass(frozen=True, eq=False)
class PageTable:
    """Which pages hold each row's places. table [rows, pages] int32; places: of a row, if it had them all."""

    table: Tensor
    places: int

    def rows(self, pool: Tensor, count: int, places: int | None = None) -> Tensor:
        """Return a copy of the first places of the first rows: pool [H, P, D] -> [count, H, places, D]."""
        return self.of(pool, self.table[:count], places or self.places)

    def of(self, pool: Tensor, table: Tensor, places: int) -> Tensor:
        """Return a copy of the first places of rows of the table [n, pages]: [n, H, places, D]."""
        heads, width = pool.shape[0], pool.shape[-1]
        pages = table[:, : -(-places // PAGE_TOKENS)]
        whole = pool.view(heads, -1, PAGE_TOKENS * width).index_select(1, pages.reshape(-1))
        return whole.view(heads, pages.shape[0], -1, width).transpose(0, 1)[:, :, :places]

    def written(self, places: Tensor, table: Tensor | None = None) -> Tensor:
        """Return the addresses of rows' places: [n] -> [n] one place of each of the first rows; with table [n, pages], places
        [n, S] -> [n, S]; int64."""
        if table is None:
            return self.written(places[:, None], self.table[: places.shape[0]])[:, 0]
        pages = table.gather(1, places // PAGE_TOKENS).clamp(min=SCRAP)
        return pages * PAGE_TOKENS + places % PAGE_TOKENS


class PagePool:
    """The pages of one batch: which are free, and the table of its rows. tokens: that the pool holds, whole pages of them."""

    def __init__(self, tokens: int, rows: int, context_tokens: int, device: torch.device) -> None:
        self.device, self.pages = device, tokens // PAGE_TOKENS
        self.places = (FIRST + self.pages) * PAGE_TOKENS
        table = torch.full((rows, pages_of(context_tokens)), NONE, dtype=torch.int32, device=device)
        self.table = PageTable(table, context_tokens)
        self._free = list(range(FIRST + self.pages - 1, FIRST - 1, -1))
        self._bound: dict[int, tuple[int, ...]] = {}

    @property
    def free_tokens(self) -> int:
        """How many more tokens there are pages for."""
        return len(self._free) * PAGE_TOKENS

    @property
    def tokens(self) -> int:
        """How many tokens the pool holds."""
        return self.pages * PAGE_TOKENS

    def fits(self, tokens: int) -> bool:
        """Whether a row of this many tokens finds room now."""
        return pages_of(tokens) <= len(self._free)

    def take(self, tokens: int) -> tuple[int, ...]:
        """Return the pages of a row of this many tokens, reserved until `give`. Errors: DoesNotFitError."""
        count = pages_of(tokens)
        if count > len(self._free):
            raise DoesNotFitError(
                f"keys and values of {tokens} tokens: {self.free_tokens} of the pool's {self.tokens} are free", block=None,
                device=str(self.device), needed_bytes=0, budget_bytes=0,
                hint="Wait until an answer ends, request fewer tokens, or plan with more kv_tokens",
            )  # fmt: skip
        return tuple(self._free.pop() for _ in range(count))

    def give(self, pages: Sequence[int]) -> None:
        """Take pages back."""
        self._free += reversed(pages)

    def bind(self, row: int, pages: Sequence[int]) -> None:
        """Let a row's places be in these pages."""
        self._bound[row] = tuple(pages)
        entries = torch.full((self.table.table.shape[1],), NONE, dtype=torch.int32, pin_memory=self._is_gpu)
        entries[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self.table.table[row].copy_(entries, non_blocking=True)

    def unbind(self, row: int) -> None:
        """Let a row have no places."""
        if self._bound.pop(row, None) is not None:
            self.table.table[row].fill_(NONE)

    def move(self, source: int, target: int) -> None:
        """Move another row's places to a row."""
        self._bound.pop(target, None)
        self.table.table[target].copy_(self.table.table[source])
        if source in self._bound:
            self._bound[target] = self._bound.pop(source)
        self.table.table[source].fill_(NONE)

    def of_row(self, row: int, tokens: int | None = None) -> Tensor:
        """Return the pages of a row's first tokens (None: of all its places), int64 on the device."""
        pages = self._bound.get(row, ())[: None if tokens is None else pages_of(tokens)]
        numbers = torch.tensor(pages, dtype=torch.long, pin_memory=self._is_gpu and bool(pages))
        return numbers.to(self.device, non_blocking=True)

    def pages_at(self, row: int) -> tuple[int, ...]:
        """Return the pages of a row, on the host."""
        return self._bound.get(row, ())

    @property
    def _is_gpu(self) -> bool:
        return self.device.type == "cuda"


class RowPages:
    """Which of a batch's requests have which pages; every request has room where rows share no pool."""

    def __init__(self, cache: BatchedKVCache, context_tokens: int) -> None:
        self.cache, self.context_tokens = cache, context_tokens
        # Gives pages back when it is called, or when the request is garbage-collected.
        self._given: weakref.WeakKeyDictionary[TokenSequence, weakref.finalize[..., TokenSequence]] = weakref.WeakKeyDictionary()

    def has_room(self, row: TokenSequence) -> bool:
        """Whether keys and values of a prompt and the longest answer to it find room now."""
        pool = self.cache.pool
        return pool is None or row.pages is not None or pool.fits(self._most_tokens(row))

    def reserve(self, *rows: TokenSequence) -> None:
        """Keep room for prompts and the longest answers to them until the rows leave or are forgotten. Errors: DoesNotFitError."""
        pool = self.cache.pool
        for row in rows:
            if pool is not None and row.pages is None:
                row.pages = pool.take(self._most_tokens(row))
                self._given[row] = weakref.finalize(row, pool.give, row.pages)

    def bind(self, row: TokenSequence, number: int) -> None:
        """Let the keys and values of a request be written to a row of the cache. Errors: as `reserve`."""
        self.reserve(row)
        self.cache.bind(number, row.pages)

    def forget(self, row: TokenSequence) -> None:
        """Give back the room of a request that has no row, or no longer."""
        give = self._given.pop(row, None)
        if give is not None:
            give()
            row.pages = None

    def forget_all(self, row: TokenSequence) -> None:
        """Let no row of the cache have pages, those that this request lent them."""
        self.cache.unbind_all()
        self.forget(row)

    def vacate(self, row: TokenSequence) -> int:
        """Take a request's row of the cache away and free its pages. Returns the number of that row."""
        number = row.number
        row.move(-1)
        self.cache.bind(number, None)
        self.forget(row)
        return number

    @contextmanager
    def unbound_on_error(self, numbers: Sequence[int]) -> Iterator[None]:
        """Leave rows of the cache without pages if they are not filled after all: padded steps write to rows without a request."""
        try:
            yield
        except BaseException:
            for number in numbers:
                self.cache.bind(number, None)
            raise

    def numbers(self) -> dict[str, int]:
        """Return the values for metrics: tokens of the pool, and those that requests have reserved; nothing without a pool."""
        pool = self.cache.pool
        return {} if pool is None else {"kv_tokens": pool.tokens, "kv_reserved_tokens": pool.tokens - pool.free_tokens}

    def _most_tokens(self, row: TokenSequence) -> int:
        return min(row.prompt_tokens + row.request.answer_tokens, self.context_tokens)
