"""Executors for the loop driver's tests: they compute with plain numbers and can be told to fail or to
wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from layerzero.scheduler.core.pending_call import Failure
from tests.clocks import VirtualLoop


class Double:
    """An op whose calls batch; `pure` as asked."""

    name = "double"

    def __init__(self, pure: bool = True) -> None:
        self.pure = pure


class Device:
    """Doubles the first argument of every call; a `poison` argument fails the whole batch, as a kernel does.

    `gate`, when given, holds every batch until it is set. `runs` are the sizes of what was run.
    """

    spans = None

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.gate = gate
        self.entered = threading.Event()
        self.runs: list[int] = []
        self.threads: set[str] = set()
        self.modes: list[Any] = []

    def execute(self, op: Any, calls: Sequence[tuple[Any, ...]], modes: Any, snapshot: Any) -> list[Any]:
        self.runs.append(len(calls))
        self.threads.add(threading.current_thread().name)
        self.modes.append(modes)
        self.entered.set()
        if self.gate is not None:
            assert self.gate.wait(30)
        if any(args[0] == "poison" for args in calls):
            failed = Failure(ValueError("a poisoned call"))
            return [failed] * len(calls)
        return [args[0] * 2 for args in calls]


class Later(Device):
    """A device that answers a launch at once and has run it later, one launch after another.

    Its time is the loop's: a batch takes `pass_s`, whatever its size, as one that reads a model's weights
    does, and its launch takes `host_s` of the loop's thread. It is also what copies its results (`launch`),
    the thread that waits for them (`submit`), and the streams of a driver (`default_stream`, `modes_of`,
    `notify_when_done`), which say when it has run what was launched.
    """

    spans = None

    completion = "stream"

    def __init__(self, loop: asyncio.AbstractEventLoop, pass_s: float, host_s: float = 0.0) -> None:
        super().__init__()
        self.loop, self.pass_s, self.host_s = loop, pass_s, host_s
        self.free_at = loop.time()

    def execute(self, op: Any, calls: Sequence[tuple[Any, ...]], modes: Any, snapshot: Any) -> list[Any]:
        if self.host_s:
            assert isinstance(self.loop, VirtualLoop)
            self.loop.spend(self.host_s)
        self.free_at = max(self.free_at, self.loop.time()) + self.pass_s
        return super().execute(op, calls, modes, snapshot)

    def launch(self, tensors: list[Tensor], sources: set[Any]) -> tuple[list[Tensor], Any]:
        """Copies that are there when all that was launched before them has run."""
        return [tensor.clone() for tensor in tensors], _Done()

    def submit(self, job: Callable[[], object]) -> None:
        """Run `job` when the device has come so far."""
        self.loop.call_at(self.free_at, job)

    def default_stream(self) -> tuple[int, int, int]:
        """One stream is all there is."""
        return 0, 0, 0

    def modes_of(self, tickets: Sequence[Any]) -> Any:
        """The modes of a batch: all callers have the same here."""
        return "modes"

    def notify_when_done(self, modes: Any, on_done: Callable[[Exception | None], object]) -> None:
        """Call `on_done` when everything launched so far has run."""
        self.loop.call_at(self.free_at, on_done, None)


class _Done:
    def synchronize(self) -> None:
        """It is called when it is true."""
