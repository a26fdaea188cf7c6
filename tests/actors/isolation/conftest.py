"""Workers of the distribution `wild-kernels`, whose pauses before they begin anew are short."""

from __future__ import annotations

import pytest

from layerzero.actors.isolation import isolated_worker
from layerzero.actors.isolation.worker_process import pause_s
from tests.actors.isolation import plugged


@pytest.fixture(autouse=True)
def wild(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 1 of the distribution is installed here."""
    monkeypatch.syspath_prepend(plugged.installed(1))


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that each new start had to wait; here it waits for a hundredth of them."""
    asked: list[float] = []

    def short(failures: int) -> float:
        asked.append(pause_s(failures))
        return asked[-1] / 100

    monkeypatch.setattr(isolated_worker, "pause_s", short)
    return asked
