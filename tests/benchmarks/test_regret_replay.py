"""Choosing again for the shapes of a record follows the measurements that are given, and runs no kernel."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from benchmarks.regret_blind import seen
from benchmarks.regret_replay import cases, choose, left_out, model_of, part_of
from layerzero.backends import load_builtin
from layerzero.measure.shapes import norm
from layerzero.perfdb import Measurement
from layerzero.perfdb.record import Launch
from layerzero.spec.errors import NoKernelFoundError
from layerzero.spec.hardware import hypothetical_gpu

H200 = hypothetical_gpu(90)
KERNELS = {kernel.id: kernel for kernel in load_builtin()}
CALL = norm("rms_norm", 64, 4096)
OURS, THEIRS = "torch.rms_norm.cuda", "flashinfer.rms_norm.rmsnorm"


def record(**launches: dict[str, float]) -> dict[str, Any]:
    return {
        "shapes": {
            f"{launch} {CALL}": {
                "group": "norms", "part": "held out", "launch": launch, "choice": 1.0, "kernels_us": times,
                "faster_but_not_admitted": {"liger.rms_norm.triton": 1.0},
            }
            for launch, times in launches.items()
        }
    }  # fmt: skip


def measured(kernel: str, us: float, launch: Launch) -> Measurement:
    site = cases(record(eager={OURS: 1.0, THEIRS: 2.0}), [CALL], H200)[0].site
    return Measurement(
        case=site, kernel=kernel, launch=launch, median_us=us, p95_us=us, variance=0.0, samples=15
    )


@pytest.mark.parametrize(("ours", "theirs", "wanted"), [(9.0, 20.0, OURS), (20.0, 9.0, THEIRS)])
def test_the_given_measurements_decide_by_launch(ours: float, theirs: float, wanted: str) -> None:
    """The kernel that is faster in graph rows is chosen for the graph row, whatever eager rows say."""
    rows = [
        measured(OURS, ours, "graph"), measured(THEIRS, theirs, "graph"),
        measured(OURS, theirs, "eager"), measured(THEIRS, ours, "eager"),
    ]  # fmt: skip
    [case] = cases(record(graph={OURS: 5.0, THEIRS: 6.0}), [CALL], H200)
    selection = choose(case, KERNELS, H200, model_of(rows, KERNELS, H200))
    assert selection.kernel == wanted
    assert set(case.times) == {OURS, THEIRS}


def test_rows_without_a_choice_are_left_out() -> None:
    """A call that is not listed, or that one kernel takes, gives no case; unknown kernels are refused."""
    assert cases(record(eager={OURS: 5.0, THEIRS: 6.0}), [], H200) == []
    assert cases(record(eager={OURS: 5.0}), [CALL], H200) == []
    [case] = cases(record(eager={"a": 5.0, "b": 6.0}), [CALL], H200)
    with pytest.raises(NoKernelFoundError):
        choose(case, KERNELS, H200, model_of([], KERNELS, H200))


def test_shapes_that_were_blind_once_are_told_apart() -> None:
    """A row that a record calls blind is blind no longer where its set was seen; others keep their part."""
    made = record(graph={OURS: 5.0, THEIRS: 6.0})
    [row] = made["shapes"].values()
    row["part"] = "blind"
    call = next(call for _, call in seen("cuda"))
    made["shapes"][f"graph {call}"] = row
    found = cases(made, [CALL, call], H200)
    assert [part_of(case) for case in found] == ["graph, blind", "graph, blind once"]


def test_a_call_left_out_is_chosen_for_from_the_others() -> None:
    """Each of two calls is judged by its own times and chosen for by the other's, transforms counted."""
    near = [
        msgspec.structs.replace(row, case=norm("rms_norm", rows, 4096).benchmark_case(H200))
        for rows, times in ((64, (9.0, 20.0)), (256, (30.0, 10.0)))
        for row in (measured(OURS, times[0], "graph"), measured(THEIRS, times[1], "graph"))
    ]
    found = {case.request.dim("N"): (regret, selection.kernel) for regret, case, selection in left_out(
        near, KERNELS, H200)}  # fmt: skip
    assert found == {64: (pytest.approx(20 / 9), THEIRS), 256: (pytest.approx(3.0), OURS)}
    assert {part_of(case) for _, case, _ in left_out(near, KERNELS, H200)} == {"graph, left out"}
