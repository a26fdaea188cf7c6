"""A process may end while a better kernel is being loaded, and while torch works on threads of ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.popen import Fork
from tests.waiting import LIMIT_S

PROGRAM = """
import time, torch, layerzero as lz
x, w = torch.randn(4, 16), torch.randn(16, 16)
lz.sync.linear(x, w); lz.sync.rms_norm(x); q = torch.randn(1, 2, 4, 8); lz.sync.attention(q, q, q)
time.sleep({delay})
"""


def ended(program: str, **variables: str) -> int:
    """The status that a program ends with, without an abort; it finds torch imported."""
    command, pipe = [sys.executable, "-c", program], subprocess.PIPE
    with Fork(command, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **variables}) as process:
        try:
            _, said = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()  # where it came late
    assert "terminate" not in said, said
    assert process.returncode is not None
    return process.returncode


@pytest.mark.parametrize("delay", [0.0, pytest.param(0.09, marks=pytest.mark.slow), 0.11, 0.3])
def test_a_process_ends_cleanly_while_a_kernel_loads(delay: float) -> None:
    """Before the load begins, as it begins and in the middle of it: exit status 0 and no abort."""
    assert ended(PROGRAM.format(delay=delay)) == 0


BUSY = """
import asyncio, os, signal, sys, threading, time, torch, layerzero as lz

# Whoever began the tests may have interrupts ignored, as `nohup make test &` does.
signal.signal(signal.SIGINT, signal.default_int_handler)
begun = threading.Event()

def slow(x):
    begun.set()
    end = time.thread_time() + 1  # of the processor: a busy machine takes longer over it
    while time.thread_time() < end:
        x = x @ x / 100
    return x

async def main():
    lz.configure(inline_limit_us=0.0)
    calls = [asyncio.ensure_future(lz.batched(slow)(torch.randn(1, 700, 700))) for _ in range(3)]
    while not begun.is_set():
        await asyncio.sleep(0.001)
    {end}
    await asyncio.gather(*calls)

asyncio.run(main())
"""
TUNING = """
import asyncio, threading, layerzero as lz

begun = threading.Event()

async def main():
    asyncio.ensure_future(lz.tune(ops=["linear"], quick=True, progress=lambda *_: begun.set()))
    while not begun.is_set():
        await asyncio.sleep(0.01)
    raise SystemExit(3)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("sys.exit(3)", 3),
        ("raise RuntimeError('of the program')", 1),
        ("os.kill(os.getpid(), signal.SIGINT); await asyncio.sleep(60)", -signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGTERM); await asyncio.sleep(60)", -signal.SIGTERM),
    ],
    ids=["exit", "error", "interrupt", "terminate"],
)
@pytest.mark.parametrize("native", ["on", pytest.param("off", marks=pytest.mark.slow)])
def test_a_process_returns_its_own_status_while_the_worker_computes(
    end: str, status: int, native: str
) -> None:
    """However the program ends, torch's work on the device's thread aborts nothing."""
    assert ended(BUSY.format(end=end), LAYERZERO_NATIVE=native) == status


def test_a_process_returns_its_own_status_while_kernels_are_measured() -> None:
    """A tuning ends behind the call that it measures."""
    assert ended(TUNING) == 3
