"""On which socket does a server listen, taken before any worker process starts?"""

from __future__ import annotations

import errno
import socket

from trimtab.errors import RequestError

# How many connections wait in the system.
BACKLOG = 2048


def address_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket, with the port that it really has."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in str(host) else f"http://{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Errors: RequestError if the address is in use or not this machine's."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as exc:
        raise RequestError("is not an address of this machine", field="host", value=host) from exc
    listener = socket.socket(family, kind, proto)
    try:
        # On Windows the option would let two servers share a port; elsewhere it only skips the wait after a restart.
        if hasattr(socket, "SO_EXCLUSIVEADDRUSE"):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as exc:
        listener.close()
        if exc.errno in (errno.EADDRINUSE, errno.EACCES):
            why = "is in use" if exc.errno == errno.EADDRINUSE else "is in use, or may not be taken by this user"
            raise RequestError(why, field="port", value=port, hint="Give another --port, or 0 for a free one") from exc
        raise RequestError(f"cannot be listened on ({exc.strerror})", field="host", value=host) from exc
    return listener
