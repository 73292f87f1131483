"""Who may send a request, by its key and address, and how is its body received, limited before it is parsed, and validated?"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trimtab.errors import RequestError, TrimtabError
from trimtab.serve.api import schemas
from trimtab.serve.api.messages_api import as_anthropics
from trimtab.serve.api.routes import ANTHROPICS, REQUESTS
from trimtab.serve.contract.errors import http_error
from trimtab.serve.contract.log import ONCE, Lines, value_of
from trimtab.serve.contract.settings import ADMIN_PATHS, Limits, Live, Settings, is_loopback
from trimtab.serve.media.addresses import MAPPED, NAT64
from trimtab.serve.media.cut_media import CUT_BYTES, cut_media

OPEN_PATHS = ("/health", "/ready")
POST_PATHS = (*REQUESTS, *ADMIN_PATHS)
# The network from which one IPv6 host can take addresses. RFC 4291 section 2.5.1, RFC 6177.
_OF_ONE_CLIENT = 64
THIS_MACHINE = "this machine"
_ONCE = {name.encode(): name for name in ONCE}

# Bytes that every body may have outside the budget, so that large bodies never block small ones.
FREE_BYTES = 64 * 2**10
# A body is kept in memory up to this size, and in a temporary file above it.
MEMORY_BYTES = 2**20
# Bodies up to this size are parsed in a separate thread, at the same time as larger ones: a few milliseconds at most.
SMALL_BYTES = 16 * 2**10
WINDOW_BYTES = 64 * 2**10
RETRY_AFTER_S = 2.0
ITEMS = 4
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(set(range(256)) - set(_STEPS))
_BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=-_"

log = logging.getLogger("trimtab.serve")

Asked = TypeVar("Asked", bound=BaseModel)
Result = TypeVar("Result")


class BodyTooLargeError(RequestError):
    """The body has more bytes than its path allows."""

    def __init__(self, limit_bytes: int, *, hint: str = "") -> None:
        self.limit_bytes = limit_bytes
        super().__init__(f"has more than {limit_bytes} bytes", field="body", hint=hint)


class BodiesFullError(TrimtabError):
    """The budget of all requests' bodies is used up; `retry_after_s`: seconds until a retry."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes, self.retry_after_s = budget_bytes, RETRY_AFTER_S
        super().__init__(
            f"The bodies of all running requests have reached the limit of {budget_bytes} bytes",
            hint=f"Try again in {RETRY_AFTER_S:.0f} seconds",
        )


class TemporaryFolderError(TrimtabError):
    """The temporary folder cannot store a body that is too large for memory."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"The server's temporary folder takes no more of this body ({reason})",
            hint=f"Bodies of up to {MEMORY_BYTES} bytes do not need it. The operator frees space, or sets TMPDIR to another folder",
        )


@dataclass(frozen=True)
class BodyLimits:
    """The limits of one path. most_bytes: size of the whole body. text_bytes: size without base64, and of any text with
    non-ASCII characters; smaller than most_bytes if images and audio are accepted.
    """

    most_bytes: int
    text_bytes: int
    most_values: int
    most_depth: int


class Budget:
    """The bytes of all bodies that are being received or answered."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self.used_bytes = most_bytes, 0

    def take(self, count: int) -> None:
        """Count bytes in. Errors: BodiesFullError."""
        if self.used_bytes + count > self._most_bytes:
            raise BodiesFullError(self._most_bytes)
        self.used_bytes += count

    def give_back(self, count: int) -> None:
        self.used_bytes -= count


class Incoming:
    """An ASGI `receive` that refuses a body as soon as it exceeds a limit, independent of its headers.

    Errors, raised where it is awaited: BodyTooLargeError, BodiesFullError, RequestError for depth and number of values.
    """

    def __init__(self, receive: Receive, limits: BodyLimits, budget: Budget, lines: Lines) -> None:
        self._receive, self._limits, self._budget = receive, limits, budget
        self._counter = JsonCounter(limits)
        self._seen_bytes = self._taken_bytes = 0
        self._claimed_bytes = 0
        with suppress(ValueError):
            self._claimed_bytes = int(value_of(lines, "content-length"))

    async def __call__(self) -> Message:
        if max(self._claimed_bytes, self._seen_bytes) > self._limits.most_bytes:
            raise self._too_large()
        message = await self._receive()
        data = message.get("body", b"")
        if data:
            self._count(data)
        return message

    def _count(self, data: bytes) -> None:
        self._seen_bytes += len(data)
        if self._seen_bytes > self._limits.most_bytes:
            raise self._too_large()
        wanted_bytes = max(0, self._seen_bytes - FREE_BYTES) - self._taken_bytes
        self._budget.take(wanted_bytes)
        self._taken_bytes += wanted_bytes
        for start in range(0, len(data), WINDOW_BYTES):
            self._counter.feed(data[start : start + WINDOW_BYTES])

    def _too_large(self) -> BodyTooLargeError:
        return BodyTooLargeError(self._limits.most_bytes)

    def close(self) -> None:
        """Release the body's share of the budget. Called after the answer, because the values from the body exist until
        then.
        """
        self._budget.give_back(self._taken_bytes)
        self._taken_bytes = 0


class JsonCounter:
    """Counts depth and values of JSON text in chunks. The count of invalid JSON is arbitrary; a parser refuses it. Outside strings
    every JSON value except the first follows a comma, a colon or a bracket, and a string is between two quotes once escaped quotes
    are removed."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._depth = self._values = self._quotes = self._text_bytes = 0
        self._carry = b""
        self._is_inside = False
        # State of the string in which the last chunk ended.
        self._string_bytes, self._is_ascii = 0, True

    def feed(self, data: bytes) -> None:
        """Count one chunk. Errors: RequestError at the first exceeded limit."""
        data, self._carry = self._carry + data, b""
        if b"\\" in data:
            if (len(data) - len(data.rstrip(b"\\"))) % 2:  # the escaped character is in the next chunk
                data, self._carry = data[:-1], b"\\"
            data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
        if self._limits.text_bytes < self._limits.most_bytes:
            self._text_bytes += len(data.translate(None, _BASE64))
            if self._text_bytes > self._limits.text_bytes:
                raise _too_long(self._limits.text_bytes)
        pieces = data.split(b'"')
        # In JSON, a string follows a comma, a colon or a bracket: at most two per value, its key and itself.
        self._quotes += len(pieces) - 1
        self._check_values(self._quotes // 4)
        self._count_texts(pieces)
        outside = b"".join(pieces[1::2] if self._is_inside else pieces[::2])
        self._is_inside ^= len(pieces) % 2 == 0
        self._values += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        self._check_values(self._values)
        steps = outside.translate(None, _NO_BRACKETS)
        if steps:
            depths = list(accumulate(map(_STEPS.__getitem__, steps), initial=self._depth))
            self._depth = depths[-1]
            if max(depths) > self._limits.most_depth:
                raise RequestError(f"is nested deeper than {self._limits.most_depth} levels", field="body")

    def _check_values(self, count: int) -> None:
        if count > self._limits.most_values:
            raise RequestError(f"has more than {self._limits.most_values} values", field="body")

    def _count_texts(self, pieces: list[bytes]) -> None:
        """Refuse a long text that is not ASCII: Python would need four bytes for each of its characters."""
        if self._is_inside:
            self._add_to_text(pieces[0])
        if len(pieces) > 1:
            self._string_bytes, self._is_ascii = 0, True
            if self._is_inside ^ (len(pieces) % 2 == 0):
                self._add_to_text(pieces[-1])

    def _add_to_text(self, piece: bytes) -> None:
        self._string_bytes += len(piece)
        self._is_ascii &= piece.isascii() and b"\\u" not in piece
        if self._string_bytes > self._limits.text_bytes and not self._is_ascii:
            raise _too_long(self._limits.text_bytes)


def _too_long(limit_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(limit_bytes, hint="Only images and audio in base64 may take more")


class Reader:
    """Parses and validates bodies in separate threads, never on the event loop: small ones never wait for larger ones,
    and very large ones are read one at a time.

    Long base64 is first removed from a large body (`request.state.cut`). The rest has a limit, because a parser holds
    the GIL from the first byte of a string to its last. lenient: fields without effect are accepted, and named in
    `request.state.ignored`.
    """

    def __init__(self, limits: Limits, *, lenient: bool = False) -> None:
        self.use(limits, lenient=lenient)
        self._small = ThreadPoolExecutor(1, thread_name_prefix="trimtab-small-body")
        self._many = ThreadPoolExecutor(2, thread_name_prefix="trimtab-body")
        self._one = ThreadPoolExecutor(1, thread_name_prefix="trimtab-large-body")

    def use(self, limits: Limits, *, lenient: bool) -> None:
        """Use other limits from now on."""
        self._body_bytes, self._lenient = limits.body_bytes, lenient
        # The parsed part of a large body: its text, and images and audio that are too small to be removed.
        self._parsed_bytes = limits.body_bytes + limits.media_count * CUT_BYTES
        # Several items of a response's input may form one message.
        self._most = {"messages": limits.messages, "tools": limits.tools, "input": ITEMS * limits.messages}

    async def read(self, kind: type[Asked], request: Request) -> tuple[Asked, int]:
        """Return a body as one of wire's shapes, and how many bytes it had. Errors: as Incoming; RequestError."""
        buffer = _Held()
        ignored: list[str] | None = [] if self._lenient else None
        request.state.ignored, request.state.cut = ignored, {}
        try:
            await _receive(request, buffer)
            read = partial(schemas.read, kind, ignored=ignored, most=self._most)
            if buffer.size <= MEMORY_BYTES:
                return await self.run(buffer.size, lambda: read(buffer.whole())), buffer.size
            body, request.state.cut = await self.run(buffer.size, lambda: cut_media(buffer.whole()))
            if len(body) > self._parsed_bytes:
                raise _too_long(self._body_bytes)
            return await self.run(buffer.size, lambda: read(body)), buffer.size
        finally:
            buffer.close()

    async def run(self, size: int, work: Callable[[], Result]) -> Result:
        """Return the result of work on a body of a size, done in a thread."""
        threads = self._small if size <= SMALL_BYTES else self._many if size <= self._body_bytes else self._one
        return await asyncio.get_running_loop().run_in_executor(threads, work)


class _Held:
    """The bytes of one body: in memory, or in a temporary file if they are many."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._held_bytes = self.size = 0
        self._file: Any = None

    async def add(self, data: bytes) -> None:
        self._pieces.append(data)
        self._held_bytes += len(data)
        self.size += len(data)
        if self._held_bytes > MEMORY_BYTES:
            pieces, self._pieces, self._held_bytes = self._pieces, [], 0
            await asyncio.to_thread(self._write, pieces)

    def _write(self, pieces: list[bytes]) -> None:
        with _told_of_disk():
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115
            self._file.writelines(pieces)

    def whole(self) -> bytes | bytearray:
        """Return all bytes. They can be read once; then their file is removed."""
        pieces, self._pieces = self._pieces, []
        if self._file is None:
            return b"".join(pieces)
        data, place = bytearray(self.size), 0
        with _told_of_disk(), memoryview(data) as view:
            self._file.writelines(pieces)
            self._file.seek(0)
            # In chunks, so that other threads get the GIL in between.
            while read := self._file.readinto(view[place : place + WINDOW_BYTES]):
                place += read
        self.close()
        return data

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # its unwritten bytes are not needed
                file.close()


@contextmanager
def _told_of_disk() -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        reason = exc.strerror or type(exc).__name__
        log.error("a body cannot be kept in the temporary folder: %s", reason)
        raise TemporaryFolderError(reason) from exc


async def _receive(request: Request, buffer: _Held) -> None:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        if data := message.get("body", b""):
            await buffer.add(data)
        if not message.get("more_body", False):
            return


# Keys and addresses ---------------------------------------------------------------------------------------------------


class AccessMiddleware:
    """Checks the key and counts the bytes of a body before anything reads it. body_limits: the limits of each path.

    Without a key a web page in a browser here could call the server: the Host header has to be this machine (a name that resolves
    to it is refused), and a POST has to be JSON (which a browser sends to another site only after a preflight). The credential is
    read once, into `request.state.credential`.
    """

    def __init__(self, app: ASGIApp, live: Live, body_limits: Callable[[str], BodyLimits]) -> None:
        self._app, self._body_limits = app, body_limits
        self._budget = Budget(live.settings.limits.all_body_bytes)
        self.use(live.settings)
        live.listen(self.use)

    def use(self, settings: Settings) -> None:
        """From now on, accept the keys of these settings."""
        self._admin_keys = [_digest(key.encode()) for key in settings.admin_keys]
        self._keys = [_digest(key.encode()) for key in settings.api_keys]
        self._allows_admin = settings.allows_admin
        self._is_local = not settings.api_keys and is_loopback(settings.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no route is a websocket's, under any server
            await send({"type": "websocket.close", "code": 1008})
            return
        lines = scope["headers"]
        refused = self._refusal(scope, lines)
        if refused is not None:
            if scope["path"] in ANTHROPICS:
                refused = as_anthropics(refused)
            await refused(scope, receive, send)
            return
        incoming = Incoming(receive, self._body_limits(scope["path"]), self._budget, lines)
        try:
            await self._app(scope, incoming, send)
        finally:
            incoming.close()

    def _refusal(self, scope: Scope, lines: Lines) -> Response | None:
        """Return the reason to refuse a request; else set its credential and return None."""
        if (name := _repeated(lines)) is not None:
            return http_error(400, f"The header {name} is repeated; send one line", code="repeated_header")
        if self._is_local and not _names_this_machine(value_of(lines, "host")):
            return http_error(421, "This server answers requests for this machine's own names only", code="wrong_host")
        credential = _credential_of(lines, has_keys=bool(self._keys or self._admin_keys))
        if credential is None:
            words = "The headers authorization and x-api-key have different keys; send one of them"
            return http_error(400, words, code="different_keys")
        scope.setdefault("state", {})["credential"] = credential.decode("latin-1")
        # An admin key may use every route.
        if self._keys and not self._is_open(scope) and not _is_one_of(credential, [*self._keys, *self._admin_keys]):
            return http_error(
                401, "A valid API key is required: Authorization: Bearer KEY", kind="authentication_error",
                code="invalid_api_key", headers={"www-authenticate": "Bearer"},
            )  # fmt: skip
        if scope["path"] in ADMIN_PATHS:
            if not self._allows_admin:
                words = "This server is not administered over HTTP: it was started with API keys and without --admin-key"
                return http_error(403, words, kind="permission_error", code="admin_off")
            if self._admin_keys and not _is_one_of(credential, self._admin_keys):
                words = "An admin key is required: Authorization: Bearer KEY"
                return http_error(403, words, kind="permission_error", code="admin_key_needed")
        if scope["method"] == "POST" and scope["path"] in POST_PATHS:
            kind = value_of(lines, "content-type").partition(b";")[0].strip().lower()
            if kind != b"application/json" or value_of(lines, "content-encoding") not in (b"", b"identity"):
                return http_error(415, "Send JSON: Content-Type: application/json, not compressed", code="not_json")
        return None

    def _is_open(self, scope: Scope) -> bool:
        path = scope["path"]
        # The page itself holds no secret: it takes the key from its user and sends it with each request.
        return path in OPEN_PATHS or path == "/" or path.startswith("/page/")


def _repeated(lines: Lines) -> str | None:
    """Return the first name of ONCE that has two lines, None if there is none."""
    seen: set[bytes] = set()
    for name, _ in lines:
        if name in _ONCE:
            if name in seen:
                return _ONCE[name]
            seen.add(name)
    return None


def _credential_of(lines: Lines, *, has_keys: bool) -> bytes | None:
    """Return the key that a request sends, b"" without one: `Authorization: Bearer KEY`, or Anthropic's `x-api-key:
    KEY`. An empty line is none. Other schemes than Bearer have no key.

    lines: without repeated ones. has_keys: whether the server has keys; without any, the client's key is ignored.
    None for two different keys, because a proxy could have checked the other one.
    """
    kind, _, key = value_of(lines, "authorization").partition(b" ")
    keys = [key.strip()] if kind.lower() == b"bearer" and key.strip() else []
    if own := value_of(lines, "x-api-key"):
        keys.append(own)
    if has_keys and len(set(keys)) > 1:
        return None
    return keys[0] if keys else b""


def client_of(credential: str, settings: Settings) -> str:
    """Return the owner of the prefixes that a request may reuse: its key, or one common owner if there are no keys or they are
    shared.

    credential: of an admitted request. Timing reveals nothing about other clients: a prefix is found only by the
    key that cached it.
    """
    return "" if settings.share_prefixes else _digest_of_key(credential, settings)


def sender_of(credential: str, address: str, settings: Settings) -> str:
    """Return the client that a request counts for in the queue: its key, or its address if there are no keys.

    credential: as in `client_of`. Behind a proxy, all requests without keys have the proxy's address.
    """
    return _digest_of_key(credential, settings) or client_network(address)


def _digest_of_key(credential: str, settings: Settings) -> str:
    """Return the label of an admitted request's key, "" if there are no keys."""
    return _digest(b"client " + credential.encode("latin-1")).hex() if settings.api_keys else ""


def _is_one_of(credential: bytes, keys: Sequence[bytes]) -> bool:
    """Whether a credential is one of the keys. keys: digests."""
    # Every key is compared, in constant time each; digests have one length, for keys of any length.
    digest = _digest(credential)
    matches = [hmac.compare_digest(digest, known) for known in keys]
    return any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


@lru_cache(64)  # requests of one client have the same
def _names_this_machine(host: bytes) -> bool:
    """Whether a Host header names a loopback address; browsers always send one, so none at all is no browser."""
    text = host.decode("latin-1").strip().lower()
    name, bracket, rest = text.partition("]") if text.startswith("[") else (text.partition(":")[0], "", "")
    return not text or name.endswith(".localhost") or (rest[:1] in ("", ":") and is_loopback(name + bracket))


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address of a text, or the IPv4 address inside it (IPv4-mapped, NAT64); None for any other text."""
    try:
        ip = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    is_inside = isinstance(ip, ipaddress.IPv6Address) and (ip in MAPPED or ip in NAT64)
    return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if is_inside else ip


def client_network(address: str) -> str:
    """Return the network of the client at an address: a client with many addresses must not get many turns.

    An IPv6 client is its /64, in which a host can take any address; an address with an IPv4 address inside
    (IPv4-mapped, NAT64) is that one. All of loopback is this machine. A text that is no IP address is returned
    unchanged.
    """
    ip = _address(address)
    if ip is None:
        return address
    if ip.is_loopback:
        return THIS_MACHINE
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    return str(ipaddress.IPv6Network((int(ip), _OF_ONE_CLIENT), strict=False))
