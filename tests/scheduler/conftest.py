"""The scheduler's tests run under a detector of blocking calls in event loops."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from blockbuster import blockbuster_ctx

from layerzero.actors.device.worker import Worker


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[None]:
    """Fail a test whose loop thread makes a blocking call."""
    with blockbuster_ctx() as detector:
        if (
            "coverage" in sys.modules and sys.gettrace() is not None
        ):  # its tracer locks at a file's first line
            detector.functions["threading.Lock.acquire"].deactivate()
        yield


@pytest.fixture
def worker() -> Iterator[Worker]:
    """A device's thread that has ended when the test has."""
    worker = Worker("test-device")
    yield worker
    assert worker.close(10)
