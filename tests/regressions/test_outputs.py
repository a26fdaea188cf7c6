"""A kernel that returns something else than its op promises has failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from layerzero.ops import table
from layerzero.spec.errors import KernelExecutionError
from layerzero.spec.settings import Settings
from tests.clocks import FakeClock
from tests.kernels import device, kernel

OP = table.get("rms_norm")
ARGS = OP.build(torch.randn(4, 64), torch.randn(64))[1]

WRONG: dict[str, Callable[..., Any]] = {
    "shape": lambda *args: torch.zeros(3, 64),
    "dtype": lambda *args: torch.zeros(4, 64, dtype=torch.float16),
    "device": lambda *args: torch.zeros(4, 64, device="meta"),
    "outputs": lambda *args: (torch.zeros(4, 64), torch.zeros(4, 64)),
    "tuple of one": lambda *args: (torch.zeros(4, 64),),
    "NoneType": lambda *args: None,
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_output_is_replaced_and_counted(what: str) -> None:
    """The next kernel answers inside the same call, and the record says what was wrong."""
    made = device(
        [kernel("bad.rms_norm.k", WRONG[what], launch_us=1.0), kernel("good.rms_norm.k", launch_us=50.0)]
    )
    result, plan = made.launch_planned(OP, ARGS)
    made.close()
    torch.testing.assert_close(result, OP.reference(*ARGS))
    assert plan.kernel == "good.rms_norm.k"
    assert what in plan.selection.why
    assert made.counters.get("fallbacks", kernel="bad.rms_norm.k", reason="RuntimeError") == 1


def test_a_wrong_output_without_another_kernel_raises() -> None:
    """Nobody gets an output of the wrong shape, on any run."""
    made = device([kernel("bad.rms_norm.k", WRONG["shape"])])
    for _ in range(2):
        with pytest.raises(KernelExecutionError, match=r"needs shape \(4, 64\)"):
            made.launch_planned(OP, ARGS)
    made.close()


def test_outputs_are_compared_again_now_and_then() -> None:
    """A kernel that was right and changes later is found by the sample, and by no hit before it."""
    shape, clock = [4, 64], FakeClock()
    settings = Settings(output_check_s=5.0, warm="off", perfdb=None)
    changing = kernel("bad.rms_norm.k", lambda *args: torch.zeros(*shape), launch_us=1.0)
    made = device([changing, kernel("good.rms_norm.k", launch_us=50.0)], settings=settings, clock=clock)
    made.launch_planned(OP, ARGS)
    shape[0] = 3
    assert made.launch_planned(OP, ARGS)[0].shape == (3, 64)
    clock.advance(5.0)
    for _ in range(2):  # until a run was right
        result, plan = made.launch_planned(OP, ARGS)
        assert result.shape == (4, 64) and "needs shape (4, 64)" in plan.selection.why
    shape[0] = 4
    assert made.launch_planned(OP, ARGS)[1].kernel == "bad.rms_norm.k"
    shape[0] = 3
    made.set_settings(settings.replace(output_check_s=0.0))
    made.launch_planned(OP, ARGS)
    made.close()
    clock.advance(50.0)
    assert not clock.waiting


def test_the_comparison_leaves_the_plan_after_a_right_run() -> None:
    """A hit calls the kernel's callable itself."""
    made = device([kernel("good.rms_norm.k")])
    first = made.launch_planned(OP, ARGS)[1].call
    again = made.launch_planned(OP, ARGS)[1].call
    made.close()
    assert first is again
    assert first.__name__ != "compared"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("error", [KeyboardInterrupt, asyncio.CancelledError, SystemExit])
def test_what_is_no_kernel_fault_passes_through(error: type[BaseException]) -> None:
    """An interrupt inside a kernel reaches the caller and counts against nobody."""

    def interrupted(*args: Any) -> Any:
        raise error

    made = device(
        [kernel("bad.rms_norm.k", interrupted, launch_us=1.0), kernel("good.rms_norm.k", launch_us=50.0)]
    )
    with pytest.raises(error):
        made.launch_planned(OP, ARGS)
    made.close()
    assert not made.health.blocked_kernels()
    assert made.counters.total("fallbacks") == 0
