"""The ordinary end of `asyncio.run` while a device computes: one line at debug level, and no error."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero.actors.device.worker import Worker
from layerzero.scheduler.core.pending_call import PENDING_CALL
from layerzero.scheduler.loop_driver import LoopDriver
from layerzero.scheduler.modes.readback import Readback
from layerzero.spec.settings import Settings
from tests.scheduler.devices import Device, Double
from tests.waiting import until

OP = Double()
HERE = (0, 0, 0)


class SlowDevice(Device):
    """A device that answers a launch at once and has run nothing before `gate` is set; its event thread is
    a real one."""

    completion = "host"

    def __init__(self, event_thread: Worker) -> None:
        super().__init__()
        self.ran = threading.Event()
        self.event_thread = event_thread
        self.waits = 0

    def launch(self, tensors: list[Tensor], sources: set[Any]) -> tuple[list[Tensor], Any]:
        """Copies behind an event that has not happened."""
        self.waits += 1
        return [tensor.clone() for tensor in tensors], self

    def synchronize(self) -> None:
        """Wait until the device has run."""
        assert self.ran.wait(60)

    def default_stream(self) -> tuple[int, int, int]:
        return HERE

    def modes_of(self, calls: Any) -> Any:
        return "modes"

    def notify_when_done(self, modes: Any, on_done: Callable[[Exception | None], object]) -> None:
        """Have the event thread wait for a batch."""

        def wait() -> None:
            self.synchronize()
            on_done(None)

        self.waits += 1
        self.event_thread.submit(wait)


@pytest.mark.parametrize("end", ["returns", "raises"])
def test_a_loop_closed_while_a_device_runs_leaves_one_debug_line(
    worker: Worker, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    """Three copies and two batches come back behind the loop's end: no error, no warning, one line."""
    device = SlowDevice(worker)

    async def main() -> None:
        streams: Any = device
        loop = asyncio.get_running_loop()
        driver = LoopDriver(loop, device, worker, Settings(), always_inline=True, streams=streams)
        readback = Readback(driver, worker, device)

        async def read() -> None:
            await readback.start(torch.ones(2), HERE)

        async def step(group: str) -> None:
            await driver.submit(PENDING_CALL.cls(OP, (1,), group, 1.0))

        tasks = []
        for count in (1, 2, 3):  # each its own copy, behind its own event
            tasks.append(asyncio.ensure_future(read()))
            await until(lambda count=count: device.waits == count)  # type: ignore[misc]
        tasks += [asyncio.ensure_future(step(group)) for group in ("g", "h")]
        await until(lambda: device.waits == 5)
        if end == "raises":
            raise LookupError("of the program")

    with caplog.at_level(logging.DEBUG, "layerzero"):
        if end == "raises":
            with pytest.raises(LookupError, match="of the program"):
                asyncio.run(main())
        else:
            asyncio.run(main())
        device.ran.set()
        assert worker.close(60)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("DEBUG", "loop_driver.loop_closed calls=1")
    ]
