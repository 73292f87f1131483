"""Settings of the server: its address and its limits, checked once when they are made."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from trimtab.checkpoint.names import near_names
from trimtab.errors import RequestError
from trimtab.serve.contract.inside_root import look, outside
from trimtab.serve.contract.quotas import KeyLimits

# Paths that change the server for every client, or are expensive.
RELOAD = "/admin/reload"
ADMIN_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", RELOAD)
# The header with the unused fields of a request, in lenient mode.
IGNORED_HEADER = "x-trimtab-ignored"
# Limit of one image or audio clip -> limit of all in a request.
TOTALS = {"image_pixels": "request_pixels", "audio_s": "request_audio_s"}
_KEY = re.compile(r"[\x21-\x7e]+")
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of everything that a client may send.

    body_bytes: of a request; media_body_bytes: of one with images or audio, for models that take them. all_body_bytes:
    of all requests that are being received or answered. json_values, json_depth: number of values in a body (token ids
    of prompts that fit the context are not counted), and their nesting. image_pixels: of one image; request_pixels: of
    all images of one request. audio_s: seconds of one audio clip; audio_bytes: the same clip decoded; request_audio_s:
    seconds of all audio clips of one request. media_count: images and audio of one request. prompt_tokens: including
    those of the chat template and media (None: only the context is the limit). n: choices of one request, prompts times
    `n`. tools: of one request, and calls of one message; tools_bytes: their definitions together. embeddings: texts of
    one request. fetch_s: for one address from first to last byte. send_s: how long a client may read nothing of its
    stream before it counts as disconnected. connections: open at once. head_s, body_s: how long a request's head and
    its body may take to arrive. idle_s: how long a connection may stay open between two requests.
    """

    body_bytes: int = 2 * 2**20
    media_body_bytes: int = 64 * 2**20
    all_body_bytes: int = 256 * 2**20
    json_values: int = 16_384
    json_depth: int = 64
    image_pixels: int = 32 * 10**6
    # One largest image, or 16 images of 2 million pixels: a tower shrinks each image further (Gemma 4 to 0.65 million).
    request_pixels: int = 32 * 10**6
    audio_s: float = 300.0
    request_audio_s: float = 300.0
    audio_bytes: int = 256 * 2**20
    media_count: int = 16
    messages: int = 512
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    n: int = 8
    fetch_bytes: int = 16 * 2**20
    fetch_s: float = 10.0
    schema_bytes: int = 64 * 2**10
    tools: int = 128
    tools_bytes: int = 256 * 2**10
    embeddings: int = 256
    send_s: float = 60.0
    connections: int = 512
    head_s: float = 10.0
    body_s: float = 60.0
    idle_s: float = 75.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is None and item.default is None:
                continue
            is_number = isinstance(value, int if item.default is None or isinstance(item.default, int) else (int, float))
            if not is_number or isinstance(value, bool) or not 0 < value < math.inf:
                raise RequestError("must be above zero", field=item.name, value=value)

    @classmethod
    def of(cls, texts: dict[str, str]) -> Limits:
        """Return the limits with some of them set from text. An unset limit of all media of a request (`TOTALS`) is at
        least that of one. Errors: RequestError for an unknown name, an invalid number, or a single limit above its set
        total.
        """
        known = {item.name: item for item in fields(cls)}
        values: dict[str, float] = {}
        for name, text in texts.items():
            if name not in known:
                raise RequestError("is not a limit", field="limit", value=name, allowed=tuple(known), near=near_names(name, known))
            is_float = isinstance(known[name].default, float)
            try:
                values[name] = float(text) if is_float else int(text)
            except ValueError as exc:
                must = "must be a number" if is_float else "must be an integer"
                raise RequestError(must, field="limit", value=f"{name}={text}") from exc
        for single, total in TOTALS.items():
            if single not in values:
                continue
            if total not in values:
                values[total] = max(values[single], getattr(cls, total))
            elif values[single] > values[total]:
                raise RequestError(
                    f"is above {total}={texts[total]}, the limit of a whole request", field="limit",
                    value=f"{single}={texts[single]}", hint=f"Raise {total}, or leave it out",
                )  # fmt: skip
        try:
            return cls(**values)  # type: ignore[arg-type]
        except RequestError as exc:
            raise RequestError(exc.reason, field="limit", value=f"{exc.field}={texts.get(exc.field, exc.value)}") from exc


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of `trimtab serve`.

    host, port: of the listening socket; 0 takes a free port. api_keys: each gives access; required if the host is not
    loopback. admin_keys: each also gives access to ADMIN_PATHS, which a server with API keys and without these does not
    have. adapter_root: the only folder below which clients may load adapters (None: clients may load none).
    allow_fetch: host names that images may be fetched from (none by default). cors_origins: other sites whose pages may
    call this server (none by default). queue_limit: how many requests of a model may wait. retry: a request that had
    sent nothing when the worker died is answered by the next one. grace_s: how long running answers may take after
    SIGTERM. timeout_s: how long one answer may take, including its waiting time (None: no limit). page: whether `/`
    shows the page. key_limits: limits of some API keys. share_prefixes: whether clients of different keys use each
    other's cached prefixes; by timing, a client can then learn what others have sent. lenient: accept request fields
    without effect, and name them in the answer's IGNORED_HEADER. otel: a trace per request (`tracing.py`).
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    adapter_root: Path | None = None
    allow_fetch: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    queue_limit: int = 64
    retry: bool = False
    grace_s: float = 30.0
    timeout_s: float | None = None
    page: bool = True
    share_prefixes: bool = False
    lenient: bool = False
    otel: bool = False
    limits: Limits = Limits()
    key_limits: Mapping[str, KeyLimits] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise RequestError("must be between 0 and 65535", field="port", value=self.port)
        if self.queue_limit < 1:
            raise RequestError("must be at least 1", field="queue_limit", value=self.queue_limit)
        if not 0 <= self.grace_s < math.inf:
            raise RequestError("must be zero or above", field="grace_s", value=self.grace_s)
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise RequestError("must be above zero", field="timeout_s", value=self.timeout_s)
        self._check_door()
        if self.adapter_root is not None and not self.adapter_root.is_dir():
            raise RequestError("is not a folder", field="adapter_root", value=str(self.adapter_root))

    def _check_door(self) -> None:
        for name, keys in (("api_key", self.api_keys), ("admin_key", self.admin_keys)):
            if any(not _KEY.fullmatch(key) for key in keys):
                # The message does not contain the key, because messages are logged.
                raise RequestError("a key has visible ASCII characters, one at least, and no spaces", field=name)
        if set(self.admin_keys) & set(self.api_keys):
            raise RequestError("must not be an API key too: clients have those", field="admin_key")
        if not is_loopback(self.host) and not self.api_keys:
            raise RequestError(
                "other machines can reach this address; an API key is required there", field="host", value=self.host,
                hint="Give --api-key (or TRIMTAB_API_KEY), or listen on 127.0.0.1",
            )  # fmt: skip
        for origin in self.cors_origins:
            if not re.fullmatch(r"https?://[^/*\s]+", origin):
                raise RequestError("name each site in full, such as https://example.org", field="cors_origin", value=origin)
        for host in self.allow_fetch:
            if not _HOST.fullmatch(host):
                raise RequestError("is not a host name", field="allow_fetch", value=host)

    @property
    def allows_admin(self) -> bool:
        """Whether this server can be administered over HTTP: with an admin key, or on loopback without any keys."""
        return bool(self.admin_keys) or not self.api_keys

    def adapter_path(self, requested: str) -> Path:
        """Return the folder that a client's path names, below adapter_root. Errors: RequestError for anything outside
        it.

        Links are followed before the check, and the caller reads the resolved path, so a link that is replaced later
        has no effect. The adapter's files may be links too, but not out of the root. The worker checks again around
        each read.
        """
        if self.adapter_root is None:
            raise RequestError(
                "this server does not load adapters for clients", field="lora_path", hint="Start it with --adapter-root"
            )
        root = self.adapter_root.resolve()
        try:
            if "\0" in requested:
                raise ValueError("NUL")
            folder = (root / requested).resolve()
        except (OSError, ValueError, RuntimeError) as exc:
            raise outside() from exc
        look(folder, root)
        return folder


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address. A name counts only if it is `localhost`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Live:
    """The settings of a server, and the functions that receive each change."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._listeners: list[Callable[[Settings], None]] = []

    def listen(self, use: Callable[[Settings], None]) -> None:
        """Have a function called with each later settings."""
        self._listeners.append(use)

    def replace(self, settings: Settings) -> None:
        self.settings = settings
        for use in self._listeners:
            use(settings)
