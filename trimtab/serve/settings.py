"""How the server listens and what it allows, checked once at the edge."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from trimtab.errors import RequestError

LOOPBACK_NAMES = ("localhost",)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The largest of everything that a client may send. Bytes, pixels of one picture, seconds of one sound, counts."""

    body_bytes: int = 64 * 2**20
    image_pixels: int = 32 * 10**6
    audio_s: float = 300.0
    media_count: int = 16
    messages: int = 512
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    n: int = 8
    fetch_bytes: int = 16 * 2**20
    fetch_s: float = 10.0
    schema_bytes: int = 64 * 2**10


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `trimtab serve` was told.

    host, port: where it listens; 0 takes a free port. api_keys: any of them opens the door; required as soon as the host is
    not loopback. adapter_root: the only folder below which clients may load adapters (None: clients may load none).
    allow_fetch: host names that pictures and sounds may be fetched from (none by default). cors_origins: other sites whose
    pages may call (none by default). queue_limit: how many requests of a model may wait. retry: a request that had sent nothing when the worker died is answered by the next one. grace_s: how long
    running answers may take after SIGTERM. timeout_s: how long one answer may take (None: as long as it takes). page:
    whether `/` shows the page.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    adapter_root: Path | None = None
    allow_fetch: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    queue_limit: int = 64
    retry: bool = False
    grace_s: float = 30.0
    timeout_s: float | None = None
    page: bool = True
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise RequestError("must be between 0 and 65535", field="port", value=self.port)
        if self.queue_limit < 1:
            raise RequestError("must be at least 1", field="queue_limit", value=self.queue_limit)
        if self.grace_s < 0 or (self.timeout_s is not None and self.timeout_s <= 0):
            raise RequestError("a time must be above zero", field="timeout_s", value=self.timeout_s)
        if any(not key.strip() for key in self.api_keys):
            raise RequestError("an empty key opens nothing", field="api_key")
        if not is_loopback(self.host) and not self.api_keys:
            raise RequestError(
                "other machines can reach this address; an API key is required there", field="host", value=self.host,
                hint="Give --api-key (or TRIMTAB_API_KEY), or listen on 127.0.0.1",
            )  # fmt: skip
        if self.adapter_root is not None and not self.adapter_root.is_dir():
            raise RequestError("is not a folder", field="adapter_root", value=str(self.adapter_root))
        for origin in self.cors_origins:
            if origin == "*" or not origin.startswith(("http://", "https://")):
                raise RequestError(
                    "name each site in full, such as https://example.org", field="cors_origin", value=origin
                )
        for host in self.allow_fetch:
            if not host or "/" in host or ":" in host or "*" in host:
                raise RequestError("is not a host name", field="allow_fetch", value=host)

    def adapter_path(self, given: str) -> Path:
        """Return the folder that a client's path names, below adapter_root. Errors: RequestError for anything outside it.

        Links are followed before the check, and what the caller reads is the resolved path: a link that is swapped later
        leads nowhere new.
        """
        if self.adapter_root is None:
            raise RequestError(
                "this server loads no adapters for clients", field="lora_path", hint="Start it with --adapter-root"
            )
        root = self.adapter_root.resolve()
        try:
            found = (root / given).resolve()
        except (OSError, ValueError, RuntimeError) as exc:
            raise RequestError("is not a path", field="lora_path") from exc
        if "\0" in given or not found.is_relative_to(root) or found == root:
            # What lies outside is not said to exist or not.
            raise RequestError("is not below the server's adapter folder", field="lora_path", value=given)
        if not found.is_dir():
            raise RequestError("is not a folder", field="lora_path", value=given)
        return found


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address. A name counts only if it is `localhost`."""
    if host in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
