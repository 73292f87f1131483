"""Who may send a request: by its key, its address, and the size and type of its body?"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Callable, Sequence

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from trimtab.serve.api.body import BodyLimits, Budget, Incoming
from trimtab.serve.api.messages_api import as_anthropics
from trimtab.serve.api.routes import ANTHROPICS, REQUESTS
from trimtab.serve.contract.errors import http_error
from trimtab.serve.contract.head_lines import DifferentKeysError, Lines, credential_of, is_loopback, repeated, value_of
from trimtab.serve.contract.settings import ADMIN_PATHS, Settings
from trimtab.serve.http.live import Live
from trimtab.serve.media.addresses import MAPPED, NAT64

OPEN_PATHS = ("/health", "/ready")
POST_PATHS = (*REQUESTS, *ADMIN_PATHS)
# The network from which one IPv6 host can take addresses. RFC 4291 section 2.5.1, RFC 6177.
_OF_ONE_CLIENT = 64
THIS_MACHINE = "this machine"


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
        if (name := repeated(lines)) is not None:
            return http_error(400, f"The header {name} is repeated; send one line", code="repeated_header")
        if self._is_local and not _names_this_machine(value_of(lines, "host")):
            return http_error(421, "This server answers requests for this machine's own names only", code="wrong_host")
        try:
            credential = credential_of(lines, has_keys=bool(self._keys or self._admin_keys))
        except DifferentKeysError:
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


def _names_this_machine(host: bytes) -> bool:
    """Whether a Host header names a loopback address; browsers always send one, so none at all is no browser."""
    text = host.decode("latin-1").strip().lower()
    name = text.partition("]")[0] + "]" if text.startswith("[") else text.partition(":")[0]
    return not text or name.endswith(".localhost") or is_loopback(name)


def client_network(address: str) -> str:
    """Return the network of the client at an address: a client with many addresses must not get many turns.

    An IPv6 client is its /64, in which a host can take any address; an address with an IPv4 address inside
    (IPv4-mapped, NAT64) is that one. All of loopback is this machine. A text that is no IP address is returned
    unchanged.
    """
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv6Address) and (ip in MAPPED or ip in NAT64):
        ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    if ip.is_loopback:
        return THIS_MACHINE
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    return str(ipaddress.IPv6Network((int(ip), _OF_ONE_CLIENT), strict=False))
