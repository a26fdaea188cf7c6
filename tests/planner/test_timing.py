"""Plans timed against each other: what cannot run is left out, and said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.measure.timing import time_kernels
from layerzero.planner import timing


def negate(x: Tensor) -> Tensor:
    return -x


def broken(*_: Any) -> None:
    raise RuntimeError("no such plan")


def test_a_plan_that_cannot_run_is_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    """The other has its time; where none runs, the error has every reason."""
    with lz.start(lz.Settings(warm="off"), scoped=True) as runtime:
        device = runtime.device("cpu")
        runs: dict[str, Any] = {"whole": negate, "apart": broken}
        found = timing.measure_plans(runs, [torch.ones(4)], device, "eager", ())
        assert list(found) == ["whole"] and found["whole"] > 0
        assert any("apart" in record.getMessage() for record in caplog.records)
        with pytest.raises(RuntimeError, match=r"no plan could be timed: .*no such plan"):
            timing.measure_plans({"apart": broken}, [torch.ones(4)], device, "eager", ())


def test_plans_that_no_graph_holds_are_timed_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that fails for all is followed by a second try without graphs."""
    tries: list[str] = []

    def capture_fails(runs: Any, calls: Any, device: Any, launch: Any, effort: Any) -> Any:
        tries.append(launch)
        return (
            ({}, {"whole": "capture failed"})
            if launch == "graph"
            else time_kernels(runs, calls, device, launch, effort)
        )

    monkeypatch.setattr(timing, "time_kernels", capture_fails)
    with lz.start(lz.Settings(warm="off"), scoped=True) as runtime:
        found = timing.measure_plans({"whole": negate}, [torch.ones(4)], runtime.device("cpu"), "graph", ())
    assert tries == ["graph", "eager"] and list(found) == ["whole"]
