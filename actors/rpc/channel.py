"""The side channel: length-prefixed msgpack frames over a unix or TCP socket, for control that must be quick.

A call of a Ray actor takes a millisecond; a frame to the same process takes some tens of microseconds. No
code and no tensor travels here: bodies are plain values. The listener sends a challenge, the dialler proves
that it knows the device's secret, and only then is a frame read.

    frame = 4 bytes, big-endian length of the rest; one msgpack message
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from contextlib import suppress

from layerzero._util import log
from layerzero.actors.rpc.connection import HANDSHAKE_S, Connection, Handler
from layerzero.actors.rpc.frames import Address
from layerzero.actors.rpc.sockets import abstract_name, send_small_frames, system_name

MAX_UNAUTHENTICATED = 32  # connections without a handshake; one takes a round trip
_LOG_EVERY_S = 10.0


class Listener:
    """The listening end of one device: a unix socket and a TCP port.

    Of those who have not proved themselves the latest `MAX_UNAUTHENTICATED` are heard; one log line in ten
    seconds tells how many were refused.

    On Linux the socket has one of the abstract names, which vanish with their owner, however it ends;
    elsewhere it is in a folder of this user alone. A connection ends `silence_s` seconds after the other host
    was heard of last.
    """

    def __init__(
        self,
        handlers: dict[str, Handler],
        *,
        node: str,
        host: str,
        secret: bytes,
        silence_s: float | None = None,
    ) -> None:
        self._handlers = handlers
        self._node = node
        self._host = host
        self._secret = secret
        self._silence_s = silence_s
        self._folder = ""
        self._servers: list[asyncio.Server] = []
        self._unauthenticated: dict[Connection, None] = {}  # the latest last
        self._refused = 0
        self._logged_at_s = -_LOG_EVERY_S
        self.connections: dict[str, Connection] = {}

    async def open(self) -> Address:
        """Begin to listen, and say where."""
        loop = asyncio.get_running_loop()
        path = abstract_name()
        if not path and hasattr(loop, "create_unix_server"):
            self._folder = tempfile.mkdtemp(prefix="lz-")  # 0700
            path = os.path.join(self._folder, "channel")
        if path:
            self._servers.append(await loop.create_unix_server(self._accept, system_name(path)))
        tcp = await loop.create_server(self._accept, self._host, 0)
        self._servers.append(tcp)
        port = tcp.sockets[0].getsockname()[1]
        return Address(path, self._host, port, self._node, self._secret)

    def _accept(self) -> Connection:
        return Connection(
            self._handlers,
            secret=self._secret,
            client=None,
            on_connect=self._on_connect,
            on_ready=self._on_ready,
            on_close=self._on_close,
        )

    def _on_connect(self, connection: Connection) -> None:
        _limit_silence(connection, self._silence_s)
        self._unauthenticated[connection] = None
        if len(self._unauthenticated) > MAX_UNAUTHENTICATED:
            first = next(iter(self._unauthenticated))
            del self._unauthenticated[first]
            first.refuse(f"no handshake before {MAX_UNAUTHENTICATED} others came")

    def _on_ready(self, connection: Connection) -> None:
        self._unauthenticated.pop(connection, None)
        self.connections[connection.peer] = connection

    def _on_close(self, connection: Connection) -> None:
        self._unauthenticated.pop(connection, None)
        if connection.refused and not connection.peer:
            self._refused += 1
            now_s = asyncio.get_running_loop().time()
            if now_s - self._logged_at_s >= _LOG_EVERY_S:
                log.warning("channel.unauthenticated", refused=self._refused, last=connection.refused)
                self._refused, self._logged_at_s = 0, now_s
        if self.connections.get(connection.peer) is connection:
            del self.connections[connection.peer]

    def close(self) -> None:
        """Stop listening and end every connection."""
        for server in self._servers:
            server.close()
        for connection in [*self.connections.values(), *self._unauthenticated]:
            connection.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


async def connect(
    address: Address,
    *,
    client: str,
    node: str,
    handlers: dict[str, Handler] | None = None,
    silence_s: float | None = None,
) -> Connection:
    """Dial a device's channel: its unix socket on its own node, else TCP.

    It ends `silence_s` seconds after the other host was heard of last.

    Raises: OSError: no process listens, or no host answers. DeviceLostError: the handshake failed.
    """
    loop = asyncio.get_running_loop()

    def made() -> Connection:
        return Connection(handlers or {}, secret=address.secret, client=client)

    connection: Connection | None = None
    if address.path and address.node == node:
        with suppress(OSError):  # another network namespace, or another folder of temporary files
            _, connection = await loop.create_unix_connection(made, system_name(address.path))
    if connection is None:
        # The system alone would try for two minutes, more and more rarely.
        async with asyncio.timeout(HANDSHAKE_S):
            _, connection = await loop.create_connection(made, address.host, address.port)
        _limit_silence(connection, silence_s)
    await connection.ready
    connection.peer = f"{address.host}:{address.port}"
    return connection


def _limit_silence(connection: Connection, silence_s: float | None) -> None:
    with suppress(OSError):  # it has ended already, which its reader meets
        send_small_frames(connection._transport.get_extra_info("socket"), silence_s)
