"""uvicorn with its connections bounded: in number, below the descriptors there are, and in time.

uvicorn accepts whatever comes and waits forever for the end of a request's headers. Some hundred connections
that say nothing then take every descriptor, and health checks fail. Here a connection beyond the bound takes
the place of the one that has been idle longest, and one whose headers do not arrive in time is closed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from layerzero._util import log
from layerzero.ops.checks import need_int, need_number

# asyncio accepts a backlog of connections at a time, some such times before it looks at the first of them.
BACKLOG = 128
ACCEPT_ROUNDS = 4
# What files, pipes and the event loop need beside connections.
RESERVED_DESCRIPTORS = 64
CLOSED = "server.connection_closed"
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
)


_Base: Any = AutoHTTPProtocol


def config(
    app: Any, *, max_connections: int | None = None, header_timeout_s: float = 10.0, **options: Any
) -> uvicorn.Config:
    """A `uvicorn.Config` whose connections are bounded; `options` are uvicorn's own.

    Args: max_connections, by default what the process's limit of descriptors leaves; header_timeout_s, the
        seconds that a connection may take until the headers of its next request are complete.
    Raises: ValueError, TypeError: a bound is no positive number, or does not fit the descriptors.
    """
    free_descriptors = descriptors_left()
    backlog = min(BACKLOG, max(8, free_descriptors // 16))
    max_possible = free_descriptors - RESERVED_DESCRIPTORS - ACCEPT_ROUNDS * backlog
    if max_connections is None:
        max_connections = max(1, max_possible)
    need_int("max_connections", max_connections, low=1, high=max(1, max_possible))
    need_number("header_timeout_s", header_timeout_s, low=0.0)
    bounds = {"max_connections": max_connections, "header_timeout_s": header_timeout_s}
    return uvicorn.Config(
        app, http=type("BoundedProtocol", (BoundedProtocol,), bounds), backlog=backlog, **options
    )


def descriptors_left() -> int:
    """Descriptors that this process may still open."""
    import resource  # which only Unix has

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    folder = Path("/proc/self/fd")
    used = sum(1 for _ in folder.iterdir()) if folder.exists() else 32
    return (soft if soft != resource.RLIM_INFINITY else 1 << 20) - used


class BoundedProtocol(_Base):  # type: ignore[misc]  # uvicorn chooses it
    """uvicorn's protocol, which knows since when it waits for a request."""

    max_connections: int
    header_timeout_s: float
    waits_since: float
    timer: Any = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.waits_since = self.loop.time()
        self.timer = self.loop.call_later(self.header_timeout_s, self.check_headers)
        if len(self.connections) > self.max_connections:
            self.make_room()

    def make_room(self) -> None:
        """Close the connection that has been idle longest; this one where all the others are served."""
        idle = [other for other in self.connections if other is not self and not other.serving]
        if not idle:
            self.transport.write(_BUSY)
            self.end("every connection is being served")
        else:
            min(idle, key=lambda other: other.waits_since).end("another connection needs its place")

    @property
    def serving(self) -> bool:
        """Whether a request whose headers are complete is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def check_headers(self) -> None:
        """Close a connection whose headers are late; look again later at every other."""
        now_s = self.loop.time()
        if self.serving:
            self.waits_since = now_s
        if now_s - self.waits_since >= self.header_timeout_s:
            self.end("its headers are late")
            return
        self.timer = self.loop.call_later(
            self.waits_since + self.header_timeout_s - now_s, self.check_headers
        )

    def end(self, why: str) -> None:
        """Close it; what was written is sent."""
        log.debug(CLOSED, why=why)
        self.connections.discard(self)
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.timer is not None:
            self.timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self.waits_since = self.loop.time()
        super().on_response_complete()
