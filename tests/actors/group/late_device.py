"""A device of a rank that answers before it has computed, in a thread; ranks add through `Sum`.

A step returns tensors that the thread fills in later, as CUDA does. Whoever reads them on the host before
that finds `UNREAD`.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor

UNREAD = -1
WAIT_S = 30.0


class Sum:
    """The devices' all-reduce."""

    def __init__(self, ranks: int) -> None:
        self._parts: list[Tensor | None] = [None] * ranks
        self._barrier = threading.Barrier(ranks)

    def __call__(self, rank: int, part: Tensor) -> Tensor:
        """The sum over all ranks; an aborted one raises on every device."""
        self._parts[rank] = part
        self._barrier.wait(WAIT_S)
        total = torch.stack([each for each in self._parts if each is not None]).sum(0)
        self._barrier.wait(WAIT_S)
        return total

    def abort(self) -> None:
        """Let every device go that waits."""
        self._barrier.abort()


class LateDevice:
    """One rank's device: jobs in order, the results whenever it comes to them."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._asked: list[tuple[Tensor, asyncio.Future[Tensor]]] = []
        self._asking = threading.Lock()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            with torch.inference_mode():
                try:
                    job()
                except BaseException as error:
                    self.error = self.error or error

    def launch(self, job: Callable[[], None]) -> None:
        """Compute `job` behind all that came before; nothing is waited for. A device that failed is lost."""

        def run() -> None:
            if self.error is None:
                job()

        self._copy_asked()  # a copy does not wait for what comes after it
        self._jobs.put(run)

    def to_host(self, tensor: Tensor) -> LateRead:
        """A read-back that starts here, behind what was launched; as `lz.to_host` on CUDA.

        Those that are asked for until the loop's turn ends, or until the next launch, come together.
        """
        loop = asyncio.get_running_loop()
        copied: asyncio.Future[Tensor] = loop.create_future()
        copied.add_done_callback(lambda read: read.cancelled() or read.exception())  # nobody may wait
        with self._asking:
            if not self._asked:
                loop.call_soon(self._copy_asked)
            self._asked.append((tensor, copied))
        return LateRead(copied)

    def _copy_asked(self) -> None:
        with self._asking:
            asked, self._asked = self._asked, []
        if not asked:
            return
        loop = asked[0][1].get_loop()

        def tell(values: list[Tensor]) -> None:
            for number, (_, copied) in enumerate(asked):
                if copied.done():
                    continue
                if values:
                    copied.set_result(values[number])
                else:
                    copied.set_exception(RuntimeError(f"device fault: {self.error}"))

        def copy() -> None:
            values = [] if self.error is not None else [tensor.clone() for tensor, _ in asked]
            loop.call_soon_threadsafe(tell, values)

        self._jobs.put(copy)

    def close(self) -> None:
        """End the thread."""
        self._jobs.put(None)
        self._thread.join(WAIT_S)


class LateRead:
    """What `to_host` gives."""

    def __init__(self, copied: asyncio.Future[Tensor]) -> None:
        self._copied = copied

    def __await__(self) -> Generator[Any, Any, Tensor]:
        return self._copied.__await__()

    @property
    def done(self) -> bool:
        """Whether awaiting it returns at once."""
        return self._copied.done()
