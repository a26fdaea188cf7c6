"""`Receiver`: the next message of a socket, asked for a few times before its thread sleeps on it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import TypeVar

from layerzero.actors.isolation import frames

# Of the order of a sleep and its wake-up; longer for messages that usually take longer, up to a bound.
SPIN_S, MOST_SPIN_S = 60e-6, 400e-6
_PAUSE_S = 1e-3  # a longer wait is between two bursts of calls and says nothing of the next
# The most messages that are slept on after spins in vain, as where all cores have other work.
_MAX_SLEPT = 255
Found = TypeVar("Found")


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
        self._usual_s = self._began_s = 0.0

    @property
    def spins(self) -> bool:
        """Whether `spin` would look for the next message, and not leave it to be slept on."""
        return self._can_spin and not self._to_sleep

    def receive(self) -> bytes:
        """The next message; empty once the other side is gone.

        Raises: BlockingIOError: none within the socket's own limit. OSError: the socket is broken.
        """
        message = self.spin(self.take)
        return self.sleep() if message is None else message

    def spin(self, look: Callable[[], Found | None]) -> Found | None:
        """What `look` finds, at the socket or elsewhere, before its thread has to sleep; None in vain."""
        self._began_s = time.perf_counter()
        if not self.spins:
            self._to_sleep -= 1
            return None
        result = self._spin(self._began_s + max(SPIN_S, min(2.0 * self._usual_s, MOST_SPIN_S)), look)
        if result is None:
            self._to_sleep, self._slept = self._slept, min(2 * self._slept + 1, _MAX_SLEPT)
        else:
            self._slept >>= 1
            self._learn()
        return result

    def take(self) -> bytes | None:
        """The message that is there; raises as `receive`."""
        try:
            return bytes(self._buffer[: self._receive(self._buffer, 0, socket.MSG_DONTWAIT)])
        except BlockingIOError:
            return None

    def sleep(self) -> bytes:
        """The message that comes after a spin in vain; raises as `receive`."""
        message = bytes(self._buffer[: self._receive(self._buffer)])
        self._learn()
        return message

    def _learn(self) -> None:
        waited_s = time.perf_counter() - self._began_s
        if waited_s < _PAUSE_S:
            self._usual_s += (waited_s - self._usual_s) / 4.0

    def _spin(self, end_s: float, look: Callable[[], Found | None]) -> Found | None:
        while (result := look()) is None:
            os.sched_yield()
            if time.perf_counter() >= end_s:
                return None
        return result
