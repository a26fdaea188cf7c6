"""Workers of the distribution `wild-kernels`, whose pauses before they begin anew are short."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from layerzero.actors.isolation import isolated_worker, worker_process
from layerzero.actors.isolation.worker_process import pause_s
from tests.actors.isolation import plugged
from tests.popen import Forking


@pytest.fixture(scope="package", autouse=True)
def forks() -> Iterator[Forking]:
    """Workers of this interpreter find torch imported: its import is most of their start."""
    forking = Forking()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_process, "subprocess", forking)
        yield forking


@pytest.fixture
def fresh(forks: Forking) -> Iterator[None]:
    """Workers are new interpreters, as they are everywhere else."""
    forks.fresh = True
    yield
    forks.fresh = False


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
