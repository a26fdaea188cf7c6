"""What a choice says of memory: workspace and copies together, held against blocks that can be had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from layerzero.actors.device.local_device import LocalDevice
from layerzero.actors.device.memory import WorkspaceBudget
from layerzero.ops import table as ops_table
from layerzero.selection.record import Transform, render
from layerzero.selection.workspace import transform_bytes
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.errors import KernelExecutionError, NoKernelFoundError
from layerzero.spec.hardware import free_memory
from layerzero.spec.kernel import Kernel
from layerzero.spec.reasons import Reason
from layerzero.spec.settings import Settings
from tests.kernels import device, kernel

NORM = ops_table.get("rms_norm")
GIB = 1 << 30
GPU = torch.device("cuda:0")


def sized(name: str, workspace: int, run: Callable[..., Any] | None = None, **more: Any) -> Kernel:
    made = kernel(name, run, **more)
    object.__setattr__(made, "workspace_bytes", lambda request: workspace)
    return made


def args(rows: int = 16, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    return (torch.randn(rows, 64, dtype=dtype), torch.randn(64, dtype=dtype), 1e-6)


def test_the_record_holds_what_a_call_allocates() -> None:
    """Workspace and temporaries of every candidate, in the trace, in the text and in JSON."""
    strided = torch.randn(64, 32).t()
    own = device(
        [sized("dense.rms_norm", 3 * GIB, contiguous=True), sized("any.rms_norm", 0, launch_us=90.0)]
    )
    selection = own.table(NORM).recompute(own.table(NORM).describe((strided, None, 1e-6), own.mode()))
    accepted = selection.candidate("dense.rms_norm").accepted
    assert accepted is not None and accepted.workspace_bytes == 3 * GIB
    assert accepted.temporary_bytes >= strided.nbytes
    assert accepted.memory_bytes == accepted.workspace_bytes + accepted.temporary_bytes
    assert "allocating 3.0 GiB" in render(selection)
    plain = next(c for c in selection.as_plain()["candidates"] if c["kernel"] == "dense.rms_norm")
    assert plain["accepted"]["workspace_bytes"] == 3 * GIB
    own.close()


@pytest.mark.parametrize(
    ("kinds", "dtype", "size"),
    [((), "float16", 0), (("layout",), "float16", 0), (("contiguous",), "float16", 1000),
     (("cast",), "bfloat16", 2000), (("cast", "contiguous"), "float16", 3000)],
)  # fmt: skip
def test_copies_are_counted_and_views_are_not(kinds: tuple[Any, ...], dtype: str, size: int) -> None:
    """A dense copy takes what the call moves, a cast what that is in the wider dtype, a layout nothing."""
    transforms = [Transform(kind, dtype, "float32") for kind in kinds]
    assert transform_bytes(transforms, CallSpec(op="rms_norm", dtype=dtype), 1000.0) == size


def test_a_copy_that_does_not_fit_is_a_reason() -> None:
    """The workspace alone would fit, with its copies it does not; the reason says what the copies take."""
    strided = torch.randn(512, 512).t()
    kernels = [
        sized("dense.rms_norm", 1 << 20, contiguous=True, launch_us=0.1),
        sized("any.rms_norm", 0, launch_us=900.0),
    ]
    own = device(kernels, Settings(workspace_limit_bytes=3 << 19))
    own.workspace_budget.refresh(own.settings)
    table = own.table(NORM)
    selection = table.recompute(table.describe((strided, None, 1e-6), own.mode()))
    (reason,) = selection.candidate("dense.rms_norm").rejected
    assert selection.kernel == "any.rms_norm" and reason.reason is Reason.MEMORY_HEADROOM_EXCEEDED
    assert "of it for copies" in reason.got
    uncopied = table.recompute(table.describe((torch.randn(512, 512), None, 1e-6), own.mode()))
    assert uncopied.kernel == "dense.rms_norm"
    own.close()


class Card:
    """The memory of a GPU that is not here, as torch and the driver would tell it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.reserved, self.allocated, self.pieces, self.looks = 0, 0, 0, 0, 0
        monkeypatch.setattr(torch.cuda, "mem_get_info", self._info)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: self.reserved)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.allocated)
        stats = "inactive_split_bytes.all.current"
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {stats: self.pieces})

    def _info(self, device: torch.device) -> tuple[int, int]:
        self.looks += 1
        return self.free, 80 * GIB


def on_card(kernels: list[Kernel], clock: Callable[[], float]) -> LocalDevice:
    """A CPU device that thinks its memory is the card's."""
    own = device(kernels, Settings(memory_headroom=0.0))
    own._inputs.budget = WorkspaceBudget(GPU, own.hardware, clock)
    own.workspace_budget._total = 80 * GIB
    return own


def test_pieces_are_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """E11.3: memory in pieces is no block: no large workspace is planned in it."""
    card = Card(monkeypatch)
    card.free, card.reserved, card.allocated = 6 * GIB, 70 * GIB, 30 * GIB
    assert free_memory(GPU) == 46 * GIB
    now = 0.0
    own = on_card([sized("big.rms_norm", 8 * GIB, launch_us=0.1), sized("small.rms_norm", 0)], lambda: now)

    def chosen(rows: int) -> str:
        return own.launch_planned(NORM, args(rows))[1].kernel

    assert chosen(16) == "big.rms_norm"
    now, card.pieces = 2.0, 40 * GIB
    assert free_memory(GPU) == 6 * GIB
    assert chosen(17) == "small.rms_norm"
    now, card.pieces = 4.0, 0
    assert chosen(18) == "big.rms_norm"
    own.close()


def test_pressure_from_outside_is_followed_and_nothing_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """E11.5: another process takes and returns memory: choices follow, each call runs at most two kernels."""
    card, now, runs = Card(monkeypatch), 0.0, list[str]()

    def running(name: str, needed: int) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            runs.append(name)
            if card.free < needed:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return NORM.reference(*given)

        return run

    made = [
        sized(f"{name}.rms_norm", size, running(name, size), launch_us=us)
        for name, size, us in (("big", 8 * GIB, 0.1), ("middle", GIB, 20.0), ("small", 1 << 20, 90.0))
    ]
    own = on_card(made, lambda: now)
    seen = []
    for step, free in enumerate([64, 64, 20, 7, 3, 0.5, 0.5, 0.5, 0.0001, 3, 64]):
        card.free, now = int(free * GIB), now + 0.4  # looks are a second apart: some choices come too late
        before = len(runs)
        try:
            seen.append(own.launch_planned(NORM, args(step + 1))[1].kernel.split(".")[0])
        except (KernelExecutionError, NoKernelFoundError) as error:
            assert "free" in str(error)
            seen.append("none")
        assert len(runs) - before <= 2, "one kernel and one fallback, whatever the memory does"
    assert seen[0] == seen[1] == "big" and "none" in seen and seen.count("small") >= 1
    for step, (free, kernel_id) in enumerate([(3 * GIB, "middle"), (GIB // 2, "small"), (3 * GIB, "middle")]):
        card.free, now = free, now + 2.0
        before = len(runs)
        own.launch_planned(NORM, args(30 + step))
        assert runs[before:] == [kernel_id], "followed, and not found out by failing"
    card.free = 64 * GIB
    for step in range(3):
        now += 2.0
        assert own.launch_planned(NORM, args(20 + step))[1].kernel == "big.rms_norm"
    assert card.looks <= 2 * len(runs)
    own.close()
