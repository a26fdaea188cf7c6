"""A backend in a process of its own on a card: one shared allocation, and an event in each direction."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import layerzero as lz
import layerzero.sync

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="shared memory of a card needs a CUDA device"),
]


def test_an_isolated_kernel_answers_in_stream_order_on_a_card() -> None:
    """Operands of slow producers, several streams, sizes that grow; and the next kernel when it dies."""
    weight = torch.randn(1024, device="cuda")
    with lz.start(lz.Settings(device="cuda", isolate={"torch": "process"}, warm="off")) as runtime:
        lz.lock("rms_norm", "torch")
        for rows in (4, 512, 4096, 4):
            streams = [torch.cuda.Stream() for _ in range(2)]
            for stream in streams:
                with torch.cuda.stream(stream):
                    x = torch.zeros(rows, 1024, device="cuda")
                    torch.cuda._sleep(20_000_000)  # what writes the operand ends long after the call
                    x += 3.0
                    got = layerzero.sync.rms_norm(x, weight)
                    x.zero_()
                    torch.testing.assert_close(got, weight.expand(rows, -1), atol=1e-4, rtol=1e-4)
        lz.unlock()
        assert runtime.isolation is not None
        worker = runtime.isolation.workers()["torch", "process"]
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while worker.starts < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        x = torch.full((4, 1024), 3.0, device="cuda")
        torch.testing.assert_close(
            layerzero.sync.rms_norm(x, weight), weight.expand(4, -1), atol=1e-4, rtol=1e-4
        )
