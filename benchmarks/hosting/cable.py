"""The cable between two network namespaces: a process that carries their packets, and what happens to them.

    python benchmarks/hosting/cable.py CONTROL NAMESPACE ADDRESS NAMESPACE ADDRESS

Linux can do the same with netem, which not every kernel has; this needs /dev/net/tun and root. Each end is
an interface `eth0`. A direction is the number of the host that it leads to. What is told to the control
socket, a file, holds from the next packet on: packets that were under way still arrive, and TCP is told
nothing.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import json
import os
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

INTERFACE = "eth0"
_TUNSETIFF, _TUN, _NO_PI = 0x400454CA, 0x0001, 0x1000
_NEWNET = 0x40000000
_PACKET = 1 << 16
_MOST = 20_000  # packets that may be under way in one direction
_AT_ONCE = 64


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """A block of this thread in a namespace; sockets and threads that it makes stay there."""
    with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{namespace}") as wanted:
        _enter(wanted.fileno())
        try:
            yield
        finally:
            _enter(before.fileno())


def _enter(file: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(file, _NEWNET):
        raise OSError(ctypes.get_errno(), "a network namespace cannot be entered")


class Direction:
    """What happens to packets that lead to one host, and those that are under way."""

    def __init__(self) -> None:
        self.delay_s = self.loss = 0.0
        self.carried = self.lost = 0
        self.under_way: list[tuple[float, int, bytes]] = []
        self._numbers = itertools.count()
        self._share = 0.0  # of a packet that is to be lost

    def take(self, packet: bytes, now_s: float) -> None:
        """Lose a packet, or let it arrive after the delay.

        Losses are spread evenly: by chance one packet is lost many times in a row now and then, and TCP
        waits twice as long after each.
        """
        self._share = self._share + self.loss if self.loss else 0.0
        if self._share >= 1.0 or len(self.under_way) > _MOST:
            self._share = max(0.0, self._share - 1.0)
            self.lost += 1
            return
        self.carried += 1
        heapq.heappush(self.under_way, (now_s + self.delay_s, next(self._numbers), packet))

    def due(self, now_s: float) -> Iterator[bytes]:
        """The packets that arrive now."""
        while self.under_way and self.under_way[0][0] <= now_s:
            yield heapq.heappop(self.under_way)[2]


def _interface(namespace: str, address: str) -> int:
    """A file that reads what a namespace sends, and writes what it receives."""
    with inside(namespace):
        file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), _TUN | _NO_PI))
    for words in (f"address add {address}/24 dev {INTERFACE}", f"link set {INTERFACE} up"):
        subprocess.run(["ip", "-n", namespace, *words.split()], check=True)
    return file


def main(control: str, *ends: str) -> None:
    """Carry packets until the process is killed."""
    files = {number: _interface(*ends[2 * number - 2 : 2 * number]) for number in (1, 2)}
    directions = {1: Direction(), 2: Direction()}
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(control)
        listener.listen()
        selector.register(listener, selectors.EVENT_READ)
        for number, file in files.items():
            selector.register(file, selectors.EVENT_READ, 3 - number)  # what one end sends leads to the other
        while True:
            first = min(
                (each.under_way[0][0] for each in directions.values() if each.under_way), default=None
            )
            wait_s = None if first is None else max(0.0, first - time.monotonic())
            for key, _ in selector.select(wait_s):
                if key.data is None:
                    _obey(listener, directions)
                else:
                    _read(key.fd, directions[key.data])
            for number, direction in directions.items():
                for packet in direction.due(time.monotonic()):
                    with suppress(OSError):  # an interface that is full, or goes
                        os.write(files[number], packet)


def _read(file: int, direction: Direction) -> None:
    with suppress(BlockingIOError):
        for _ in range(_AT_ONCE):
            direction.take(os.read(file, _PACKET), time.monotonic())


def _obey(listener: socket.socket, directions: dict[int, Direction]) -> None:
    """Change the directions that a message names; the answer says what each has carried and lost."""
    with listener.accept()[0] as peer:
        said: dict[str, dict[str, float]] = json.loads(peer.recv(_PACKET))
        for number, values in said.items():
            for name, value in values.items():
                setattr(directions[int(number)], name, value)
        counts = {number: (each.carried, each.lost) for number, each in directions.items()}
        peer.sendall(json.dumps(counts).encode())


def tell(control: str, said: dict[int, dict[str, float]]) -> dict[int, tuple[int, int]]:
    """Change some directions; how many packets each has carried and lost so far."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(10.0)
        peer.connect(control)
        peer.sendall(json.dumps(said).encode())
        counts: dict[str, Any] = json.loads(peer.recv(_PACKET))
        return {int(number): (carried, lost) for number, (carried, lost) in counts.items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
