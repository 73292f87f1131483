"""Which prefixes are stored in the fixed memory of the prefix cache, and which are evicted?"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from trimtab.errors import RequestError


@dataclass(frozen=True)
class Mark:
    """The placeholder tokens start .. end of an image or audio clip, with the digest of its content. The tokens alone are the
    same for every image."""

    start: int
    end: int
    digest: bytes


def scope_of(*parts: bytes | str) -> bytes:
    """Return the digest of a cached prefix's scope: no two different lists of parts have the same one. A scope separates prefixes
    that must never be shared: by client, the adapter's content and a secret of the process."""
    digest = hashlib.sha256()
    for part in parts:
        text = part.encode() if isinstance(part, str) else part
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.digest()


@dataclass(frozen=True)
class PrefixKey:
    """The key of a prefix: its scope, its tokens, which never change, and the content of images and audio among them."""

    scope: bytes
    token_ids: Sequence[int]
    marks: tuple[Mark, ...] = ()
    # By the tokens of a block, the digests of requested blocks.
    _blocks: dict[int, list[bytes]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def with_tokens(self, token_ids: Sequence[int]) -> PrefixKey:
        """Return the key of other tokens in the same scope. Digests of the common beginning are not computed again."""
        key = PrefixKey(self.scope, token_ids, self.marks)
        count = min(len(self.token_ids), len(token_ids))
        if list(self.token_ids[:count]) == list(token_ids[:count]):
            for size, digests in self._blocks.items():
                key._blocks[size] = digests[: count // size]
        return key

    def block(self, number: int, size: int) -> bytes:
        """Return the key of a block of `size` tokens, behind those before it."""
        digests = self._blocks.setdefault(size, [])
        while len(digests) <= number:
            start = len(digests) * size
            digests.append(self.digest(digests[-1] if digests else self.scope, start, start + size))
        return digests[number]

    def digest(self, parent: bytes, start: int, end: int, kind: bytes = b"block") -> bytes:
        """Return the key of tokens start .. end behind those whose key is `parent`."""
        digest = hashlib.sha256(kind + parent + array("q", self.token_ids[start:end]).tobytes())
        for mark in self.marks:
            if mark.start < end and mark.end > start:
                digest.update(array("q", (mark.start, mark.end)).tobytes() + mark.digest)
        return digest.digest()


@dataclass(frozen=True)
class Match:
    """The cached part of a prompt.

    tokens: how many need not be computed again. blocks: pages of its whole blocks, in order. snapshot: pages of the state after
    them, () where none is needed. shared_tokens: tokens in cached blocks, which is more where a snapshot is missing. offset:
    the value that was stored with the item at its end.
    """

    tokens: int = 0
    blocks: tuple[int, ...] = ()
    snapshot: tuple[int, ...] = ()
    shared_tokens: int = 0
    offset: int | None = None


@dataclass(frozen=True)
class Added:
    """Pages to fill. blocks: (number of the block, its page), in order. snapshot: pages of the state after all tokens."""

    blocks: tuple[tuple[int, int], ...] = ()
    snapshot: tuple[int, ...] = ()


@dataclass(eq=False)
class _Item:
    key: bytes
    parent: _Item | None
    pages: tuple[int, ...]
    offset: int | None = None
    needed_by: int = 0  # blocks and snapshots behind it
    tail: int | None = None  # of a snapshot: tokens behind its last whole block
    tails: Counter[int] = field(default_factory=Counter)  # of a block: tokens behind it -> count of snapshots
    note: object = None  # of a blob: the description of its bytes

    def hold(self, tail: int | None) -> None:
        """Be needed by a block, or by a snapshot of this tail."""
        self.needed_by += 1
        if tail is not None:
            self.tails[tail] += 1

    def release(self, tail: int | None) -> None:
        """Be needed by one less."""
        self.needed_by -= 1
        if tail is not None:
            self.tails[tail] -= 1
            self.tails += Counter()  # without those of none


class PrefixStore:
    """The index of `pages` pages. snapshot_pages: of one snapshot; 0 for families that resume behind any block.

    Errors: RequestError for sizes below one. A block of `block_tokens` tokens is one page, known by a digest of the scope, of all
    tokens before it and of those in it. A snapshot is the state after exactly n tokens. A blob is kept by a key alone. The least
    recently used item is evicted first; using a block uses all blocks before it. Not thread-safe.
    """

    def __init__(self, *, pages: int, block_tokens: int, snapshot_pages: int = 0) -> None:
        for name, value in (("pages", pages), ("block_tokens", block_tokens)):
            if value < 1:
                raise RequestError("must be at least 1", field=name, value=value)
        self.pages, self.block_tokens, self.snapshot_pages = pages, block_tokens, snapshot_pages
        self.counts: Counter[str] = Counter()  # of prompts, tokens and items: lookups, hits, hit_tokens, added, evicted
        self._items: OrderedDict[bytes, _Item] = OrderedDict()  # the one used longest ago comes first
        self._free: list[int] = []  # a heap: low numbers first, so that pages taken together often lie together
        self._untouched = 0  # pages from here on were never used

    @property
    def used_pages(self) -> int:
        return self._untouched - len(self._free)

    def __len__(self) -> int:
        return len(self._items)

    # Finding ----------------------------------------------------------------------------------------------------------

    def find(self, key: PrefixKey, *, limit: int, may_end_at: Callable[[int], bool] = lambda _: True) -> Match:
        """Return the longest cached prefix of at most `limit` tokens; the blocks that it needs count as used now.

        may_end_at: whether the prefix may end before this token.
        """
        path = self._path(key, limit)
        shared = len(path) * self.block_tokens
        if self.snapshot_pages:
            match = self._find_snapshot(key, path, limit, may_end_at)
        else:
            while path and not may_end_at(len(path) * self.block_tokens):
                path.pop()
            match = Match(len(path) * self.block_tokens, _pages(path), offset=path[-1].offset if path else None)
            self._use(path)
        return Match(match.tokens, match.blocks, match.snapshot, shared, match.offset)

    def _path(self, key: PrefixKey, limit: int) -> list[_Item]:
        """Return the cached blocks of a prefix, from its first token on."""
        path: list[_Item] = []
        size = self.block_tokens
        while (len(path) + 1) * size <= limit:
            item = self._items.get(key.block(len(path), size))
            if item is None:
                break
            path.append(item)
        return path

    def _find_snapshot(
        self, key: PrefixKey, path: list[_Item], limit: int, may_end_at: Callable[[int], bool]
    ) -> Match:  # fmt: skip
        for count in range(len(path), 0, -1):
            block, start = path[count - 1], count * self.block_tokens
            for tail in sorted(block.tails, reverse=True):
                if start + tail > limit or not may_end_at(start + tail):
                    continue
                item = self._items.get(key.digest(block.key, start, start + tail, b"snapshot"))
                if item is not None:
                    self._use([*path[:count], item])
                    return Match(start + tail, _pages(path[:count]), item.pages, 0, item.offset)
        return Match()

    def _use(self, path: Sequence[_Item]) -> None:
        for item in reversed(path):  # items that others need are used last, so they are never evicted before them
            self._items.move_to_end(item.key)

    # Adding -----------------------------------------------------------------------------------------------------------

    def add(self, key: PrefixKey, *, snapshot: bool = False, offset: int | None = None) -> Added:
        """Cache a prefix, as far as there is room. Return the pages that the caller has to fill now.

        snapshot: whether the state after all of its tokens can be stored. offset: the value that `find` returns with an item
        that ends after all marks of the key.
        """
        size, count = self.block_tokens, len(key.token_ids) // self.block_tokens
        path = self._path(key, len(key.token_ids))
        self._use(path)
        # Positions behind a prompt's last image are known there and not before.
        known_from = max((mark.end for mark in key.marks), default=0)
        for number, item in enumerate(path):
            if item.offset is None and (number + 1) * size >= known_from:
                item.offset = offset
        blocks: list[tuple[int, int]] = []
        kept = {id(item) for item in path}
        while len(path) < count:
            pages = self._take(1, kept, kept_pages=len(path))
            if pages is None:
                break
            parent = path[-1] if path else None
            number = len(path)
            item = _Item(key.block(number, size), parent, pages, offset if (number + 1) * size >= known_from else None)
            path.append(self._put(item))
            kept.add(id(item))
            blocks.append((number, pages[0]))
        self._use(path)
        offset = offset if len(key.token_ids) >= known_from else None
        taken = self._add_snapshot(key, path, offset) if snapshot and path and len(path) == count else ()
        self.counts["added"] += len(blocks) + bool(taken)
        return Added(tuple(blocks), taken)

    def _add_snapshot(self, key: PrefixKey, path: list[_Item], offset: int | None) -> tuple[int, ...]:
        if not self.snapshot_pages:
            return ()
        block, start, end = path[-1], len(path) * self.block_tokens, len(key.token_ids)
        digest = key.digest(block.key, start, end, b"snapshot")
        known = self._items.get(digest)
        if known is not None:
            self._use([*path, known])
            return ()
        pages = self._take(self.snapshot_pages, {id(item) for item in path}, kept_pages=len(path))
        if pages is None:
            return ()
        item = self._put(_Item(digest, block, pages, offset, tail=end - start))
        self._use([*path, item])
        return pages

    def _put(self, item: _Item) -> _Item:
        self._items[item.key] = item
        if item.parent is not None:
            item.parent.hold(item.tail)
        return item

    # Blobs ------------------------------------------------------------------------------------------------------------

    def find_blob(self, key: bytes) -> tuple[tuple[int, ...], Any] | None:
        """Return the pages of a blob and its note, None if it is not kept."""
        item = self._items.get(key)
        if item is None:
            return None
        self._items.move_to_end(key)
        return item.pages, item.note

    def add_blob(self, key: bytes, pages: int, note: object = None) -> tuple[int, ...] | None:
        """Return this many pages to fill for a blob that is not cached yet, None if there is no room."""
        page_numbers = self._take(pages) if key not in self._items else None
        if page_numbers is not None:
            self._put(_Item(key, None, page_numbers, note=note))
            self.counts["added"] += 1
        return page_numbers

    # Room -------------------------------------------------------------------------------------------------------------

    def _take(self, count: int, kept: Set[int] = frozenset(), *, kept_pages: int = 0) -> tuple[int, ...] | None:
        """Return free pages, None if there are too few after the least recently used items but `kept` are evicted. kept: ids of
        blocks, which have `kept_pages` pages."""
        if count > self.pages - kept_pages:
            return None
        while self.pages - self.used_pages < count:
            oldest = next(iter(self._items.values()))
            if id(oldest) in kept:
                return None
            self._forget(oldest)
        page_numbers = []
        for _ in range(count):
            if self._free:
                page_numbers.append(heapq.heappop(self._free))
            else:
                page_numbers.append(self._untouched)
                self._untouched += 1
        return tuple(page_numbers)

    def _forget(self, item: _Item) -> None:
        assert not item.needed_by, "an item that others need was used longer ago than they"
        del self._items[item.key]
        for page in item.pages:
            heapq.heappush(self._free, page)
        if item.parent is not None:
            item.parent.release(item.tail)
        self.counts["evicted"] += 1

    def clear(self) -> None:
        """Forget everything."""
        self._items.clear()
        self._free.clear()
        self._untouched = 0


def _pages(path: Sequence[_Item]) -> tuple[int, ...]:
    return tuple(page for item in path for page in item.pages)
