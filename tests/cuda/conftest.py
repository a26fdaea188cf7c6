"""Tests of this folder say in code that they want a GPU; one that takes all of its memory has it alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from layerzero._util.files import fcntl


@pytest.fixture(autouse=True)
def no_device_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable of the contract tests is no setting: a runtime that reads the environment refuses it."""
    monkeypatch.delenv("LAYERZERO_TEST_DEVICE", raising=False)


@pytest.fixture(autouse=True)
def card_memory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Workers share the card; a test marked `whole_card` waits for the others and keeps them waiting.

    Who wants it alone keeps the door, so that no further test begins before it.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if hasattr(request.config, "workerinput") else base
    alone = request.node.get_closest_marker("whole_card") is not None
    with Path(shared, "card.door").open("a") as door, Path(shared, "card.memory").open("a") as memory:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(memory, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()  # what this process keeps, no other has
