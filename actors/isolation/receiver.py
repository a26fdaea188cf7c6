"""`Receiver`: the next message of a socket, asked for a few times before its thread sleeps on it."""

from __future__ import annotations

import os
import socket
import time

from layerzero.actors.isolation import frames

# Of the order of a sleep and its wake-up; longer for messages that usually take longer, up to a bound.
SPIN_S, MOST_SPIN_S = 60e-6, 400e-6
_PAUSE_S = 1e-3  # a longer wait is between two bursts of calls and says nothing of the next
# The most messages that are slept on after spins in vain, as where all cores have other work.
_MAX_SLEPT = 255


class Receiver:
    """One end of a socket of messages.

    To wake a thread that sleeps takes longer than a short call itself. So the next message is asked for
    without sleeping for `SPIN_S`, or twice as long as messages have taken of late, at most `MOST_SPIN_S`,
    where a second core can send it meanwhile. After one spin in vain, as in the pause between two bursts of
    calls, nothing changes; each further one doubles how many later messages are slept on, each spin that was
    not in vain halves it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._receive = connection.recv_into
        self._buffer = memoryview(bytearray(frames.MAX_MESSAGE))
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        self._can_spin = len(cores) > 1
        self._slept = self._to_sleep = 0
        self._usual_s = 0.0

    def receive(self) -> bytes:
        """The next message; empty once the other side is gone.

        Raises: BlockingIOError: none within the socket's own limit. OSError: the socket is broken.
        """
        began = time.perf_counter()
        if self._to_sleep or not self._can_spin:
            self._to_sleep -= 1
            count: int | None = self._receive(self._buffer)
        else:
            count = self._spin(began + max(SPIN_S, min(2.0 * self._usual_s, MOST_SPIN_S)))
            if count is None:
                self._to_sleep, self._slept = self._slept, min(2 * self._slept + 1, _MAX_SLEPT)
                count = self._receive(self._buffer)
            else:
                self._slept >>= 1
        waited = time.perf_counter() - began
        if waited < _PAUSE_S:
            self._usual_s += (waited - self._usual_s) / 4.0
        return bytes(self._buffer[:count])

    def _spin(self, end_s: float) -> int | None:
        while time.perf_counter() < end_s:
            try:
                return self._receive(self._buffer, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                os.sched_yield()
        return None
