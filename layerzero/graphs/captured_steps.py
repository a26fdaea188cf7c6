"""Captured steps by key; of too many the least recently used go, so that months of traffic fill no memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from layerzero._util import log

EVICTED = "graph.evicted"
NOT_CAPTURED = "graph.not_captured_yet"
MAX_GRAPHS = 128


class Replayable(Protocol):
    """A step ready to run again on its static inputs; `outputs` are its static results.

    `version` is that of the plans it holds, read before they were recorded.
    """

    outputs: tuple[Tensor, ...]
    pool: Any
    version: int

    def replay(self) -> None: ...


class CapturedStep(NamedTuple):
    """One step, the buffers it reads and the memory that it keeps, in bytes."""

    static: tuple[Tensor, ...]
    recorded: Replayable
    nbytes: int


class CapturedSteps:
    """At most `max_graphs` captured steps of at most `max_bytes` together; one is kept whatever it takes.

    Several functions may share one: a bound then holds for all of them, their graphs share memory, and
    `lock` lets one of them run at a time; `streams` is where each device's last one ran. A step counts as
    used when it is found. `evictions` is how many were let go for room. `count(name, device)` hears of each,
    and of each call that ran without a graph while its kernels load; log events say more.
    """

    def __init__(
        self,
        max_graphs: int = MAX_GRAPHS,
        max_bytes: int | None = None,
        count: Callable[[str, Any], object] = lambda _, __: None,
    ) -> None:
        """Raises: ValueError: a bound below 1."""
        for name, bound in (("max_graphs", max_graphs), ("max_graph_bytes", max_bytes)):
            if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int) or bound < 1):
                raise ValueError(f"{name} needs an int >= 1, got {bound!r}")
        self.max_graphs, self.max_bytes = max_graphs, max_bytes
        self.evictions = self.nbytes = 0
        self.lock = threading.Lock()
        self.pools: dict[Any, Any] = {}
        self.streams: dict[Any, Any] = {}
        self._count = count
        self._not_before: dict[Any, int] = {}  # by device, the version whose kernels load
        self._steps: OrderedDict[Hashable, CapturedStep] = OrderedDict()

    def __len__(self) -> int:
        return len(self._steps)

    def find(self, key: Hashable, version: int) -> CapturedStep | None:
        """The step of a key, if it holds the plans of this version."""
        step = self._steps.get(key)
        if step is None or step.recorded.version != version:
            return None
        self._steps.move_to_end(key)
        return step

    def add(self, key: Hashable, step: CapturedStep, *, name: str, device: Any) -> None:
        """Keep a step, in place of an older one of its key; of too many the longest unused go.

        To be called behind its capture, which has waited for the device: no step that goes is still running.
        """
        self._remove(key)
        self._steps[key] = step
        self.nbytes += step.nbytes
        while len(self._steps) > 1 and (why := self._excess()):
            oldest = next(iter(self._steps))
            self._remove(oldest)
            self.evictions += 1
            log.info(EVICTED, step=name, why=why, kept=len(self._steps), kept_bytes=self.nbytes)
            self._count("graph_evictions", device)

    def is_loading(self, device: Any, version: int) -> bool:
        """Whether a kernel that a step of this version needs was loading when one was last to be captured."""
        return self._not_before.get(device) == version

    def wait_for_load(self, device: Any, version: int, *, name: str, why: str) -> None:
        """Capture nothing on a device before something has been loaded there, which is another version."""
        self._not_before[device] = version
        log.info(NOT_CAPTURED, step=name, why=why)

    def count_uncaptured(self, device: Any) -> None:
        """A call ran without a graph, since kernels that one needs load."""
        self._count("graph_uncaptured_calls", device)

    def clear(self) -> None:
        """Let all go."""
        self._steps.clear()
        self.nbytes = 0

    def _excess(self) -> str:
        """Which bound the steps exceed; empty where none."""
        if len(self._steps) > self.max_graphs:
            return f"more than {self.max_graphs} graphs"
        if self.max_bytes is not None and self.nbytes > self.max_bytes:
            return f"more than {self.max_bytes} bytes"
        return ""

    def _remove(self, key: Hashable) -> None:
        step = self._steps.pop(key, None)
        if step is not None:
            self.nbytes -= step.nbytes
