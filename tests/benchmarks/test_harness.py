"""What every benchmark is measured with: when a measurement may begin."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kernels import device, kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
harness: Any = importlib.import_module("harness")


@pytest.mark.parametrize("when_warm", [None, "better.rms_norm"])
def test_a_measurement_waits_for_what_compiles_behind_the_calls(when_warm: str | None) -> None:
    """And goes on where what was loaded takes the place of the kernel that ran."""
    own = device([kernel("a.rms_norm")])
    done: list[str] = []

    def compiles() -> None:
        time.sleep(0.2)
        done.append("compiled")

    own.loader.run_later(compiles)
    selection = SimpleNamespace(when_warm=when_warm)
    assert harness.settled(harness.Plan(), own, selection) == (when_warm is None)
    assert done == ["compiled"]
    own.close()


def test_a_quick_run_waits_for_nothing() -> None:
    """It only shows that every row runs."""
    own = device([kernel("a.rms_norm")])
    assert harness.settled(harness.Plan.quick(), own, SimpleNamespace(when_warm="better.rms_norm"))
    own.close()
