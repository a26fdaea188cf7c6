"""What a rank does about a step that waits on its GPU for a rank that has gone."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.actors.group import steps as steps_module
from layerzero.actors.group.channel import FollowerChannel
from layerzero.actors.group.steps import StepWatch


class HungUp(FollowerChannel):
    """Rank 0 has hung up, without a word."""

    def __init__(self) -> None:
        pass

    def wait_for_hang_up(self) -> None:
        """At once."""

    def was_left(self) -> bool:
        """Never in order."""
        return False


class LaunchedStep:
    """The event behind a step's launches: done when the collectives have been aborted."""

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.recorded = 0

    def record(self) -> None:
        """Count it."""
        self.recorded += 1

    def query(self) -> bool:
        """Whether the GPU has done what was launched."""
        return self.aborted.is_set()


def test_a_step_that_hangs_on_the_gpu_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host left it long ago: what was launched waits in a collective, and its readers with it."""
    event = LaunchedStep()
    told: list[str] = []
    lost: list[lz.DeviceLostError] = []
    monkeypatch.setattr(steps_module, "ENDS_BY_ITSELF_S", 0.05)
    monkeypatch.setattr(steps_module, "_abort_collectives", event.aborted.set)
    group: Any = SimpleNamespace(
        device=SimpleNamespace(device=torch.device("cpu")),
        channel=HungUp(), failure=None, rank=2, timeout_s=0.05,
    )  # fmt: skip
    watch = StepWatch(group, lost.append)
    watch._event = event  # type: ignore[assignment]  # a GPU's

    def fail(why: str) -> None:
        told.append(why)
        group.failure = why
        watch.on_thread(watch._let_go)

    group.fail = fail
    group.when_failed = lambda notify: None
    with watch.around(7):
        pass
    assert event.recorded == 1
    watch.start()
    assert event.aborted.wait(20)
    assert told == ["rank 0 is gone: it hung up while rank 2 was in step 7"]
    assert lost == [], "it ended when its collectives were aborted"
