"""The memory of a real card: in pieces, and taken by another process; what is planned follows it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero.actors.device.local_device import LocalDevice
from layerzero.actors.device.memory import REFRESH_EVERY_S, WorkspaceBudget
from layerzero.actors.device.registry import Registry
from layerzero.ops import table as ops_table
from layerzero.scheduler.scheduled_device import ScheduledDevice
from layerzero.spec.errors import KernelExecutionError
from layerzero.spec.hardware import free_memory
from layerzero.spec.kernel import Kernel
from layerzero.spec.reasons import Reason
from layerzero.spec.settings import Settings
from tests import children
from tests.kernels import kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.whole_card,
    pytest.mark.timeout(900),  # it waits for what the others began
    pytest.mark.skipif(not torch.cuda.is_available(), reason="a card's memory needs a CUDA device"),
]
NORM = ops_table.get("rms_norm")
MIB, GIB = 1 << 20, 1 << 30


class Sized:
    """Kernels that state a workspace and allocate it, and the names of those that ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def __call__(self, name: str, workspace: int, launch_us: float) -> Kernel:
        """One of them; the cheapest wins where it fits."""

        def run(x: Tensor, weight: Tensor | None, eps: float) -> Any:
            self.ran.append(name)
            scratch = torch.empty(workspace, dtype=torch.uint8, device=x.device)
            del scratch
            return NORM.reference(x, weight, eps)

        made = kernel(f"{name}.rms_norm", run, launch_us=launch_us)
        object.__setattr__(made, "workspace_bytes", lambda request: workspace)
        return made


@pytest.fixture
def sized() -> Sized:
    return Sized()


HELD: list[Tensor | None] = []  # a test that fails would hold its memory for all behind it


class Clock:
    """The time that looks at free memory go by: a test says which call comes too early for one."""

    now = 0.0


@pytest.fixture
def opened() -> Iterator[Callable[[list[Kernel]], LocalDevice]]:
    """Makes devices of the card that know only what they are given."""
    gc.collect()  # what earlier tests held must not come free in the middle of this one
    torch.cuda.empty_cache()
    made: list[LocalDevice] = []

    def device(kernels: list[Kernel]) -> LocalDevice:
        settings = Settings(memory_headroom=0.0, perfdb=None)
        own = ScheduledDevice(torch.device("cuda:0"), settings, Registry(kernels, lambda _: []))
        own._inputs.budget = WorkspaceBudget(own.device, own.hardware, lambda: Clock.now)
        made.append(own)
        return own

    yield device
    for one in made:
        one.close()
    HELD.clear()
    torch.cuda.empty_cache()


def args(rows: int) -> tuple[Any, ...]:
    """A call; other rows are another decision."""
    return (torch.ones(rows, 64, device="cuda"), None, 1e-6)


def fresh(own: LocalDevice, rows: int) -> str:
    """The kernel that a new shape gets once the device may look again."""
    Clock.now += 2 * REFRESH_EVERY_S
    return own.launch_planned(NORM, args(rows))[1].kernel


def test_no_workspace_is_planned_in_pieces(
    sized: Sized, opened: Callable[[list[Kernel]], LocalDevice]
) -> None:
    """Every second piece of a block is freed: half of it is unused, no 8 GiB can be had, none are tried."""
    own = opened([sized("big", 8 * GIB, 0.1), sized("small", MIB, 90.0)])
    assert fresh(own, 8) == "big.rms_norm"
    torch.cuda.empty_cache()
    size = min(torch.cuda.mem_get_info()[0] - 4 * GIB, 64 * GIB) // (128 * MIB) * (128 * MIB)
    pieces = HELD
    whole = torch.empty(size, dtype=torch.uint8, device="cuda")
    rest = torch.cuda.mem_get_info()[0] - 4 * GIB
    rest_held = torch.empty(max(rest, 0), dtype=torch.uint8, device="cuda")
    del whole
    pieces += [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(size // (64 * MIB))]
    pieces[::2] = [None] * len(pieces[::2])
    pieces.append(rest_held)
    del rest_held
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    assert unused >= size // 2 >= 16 * GIB
    assert free_memory(torch.device("cuda:0")) < 8 * GIB
    sized.ran.clear()
    assert fresh(own, 9) == "small.rms_norm"
    selection = own.table(NORM).recompute(own.table(NORM).describe(args(10), own.mode()))
    (reason,) = selection.candidate("big.rms_norm").rejected
    assert reason.reason is Reason.MEMORY_HEADROOM_EXCEEDED
    assert sized.ran == ["small"] and own.counters.total("out_of_memory") == 0
    with pytest.raises(torch.OutOfMemoryError):  # the control: it is not there, whatever is unused
        torch.empty(8 * GIB, dtype=torch.uint8, device="cuda")
    pieces.clear()
    torch.cuda.empty_cache()
    assert fresh(own, 11) == "big.rms_norm"


# Holds all but so many MiB of the card for each number it finds in its file, and says so in another.
HOLDER = """
import sys, time
from pathlib import Path
import torch
asked, done = map(Path, sys.argv[1:])
held, last, until = [], "", time.monotonic() + 90.0  # whoever asks may have been killed
torch.zeros(1, device="cuda")
while time.monotonic() < until:
    text = asked.read_text() if asked.exists() else ""
    if text == "end":
        break
    if text and text != last:
        last = text
        held.clear()
        torch.cuda.empty_cache()
        spare = torch.cuda.mem_get_info()[0] - (int(text) << 20)
        if spare > 0:
            held.append(torch.empty(spare, dtype=torch.uint8, device="cuda"))
        done.write_text(text)
    time.sleep(0.02)
"""


class Holder:
    """Another process that takes memory of the card, all but what it is told to leave."""

    def __init__(self, folder: Path) -> None:
        self._asked, self._done = folder / "asked", folder / "done"
        self.child = children.Child(HOLDER, str(self._asked), str(self._done), folder=folder)

    def leave(self, mib: int) -> None:
        """Wait until so much is left."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        text = str(mib)
        self._tell(text)
        until = time.monotonic() + 60.0
        while not self._done.exists() or self._done.read_text() != text:
            assert self.child.is_alive() and time.monotonic() < until, self.child.err.read_text()
            time.sleep(0.01)

    def _tell(self, text: str) -> None:
        draft = self._asked.with_suffix(".new")
        draft.write_text(text)
        draft.replace(self._asked)

    def end(self) -> None:
        """Let it go."""
        self._tell("end")
        self.child.ended(30.0)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    made = Holder(tmp_path)
    yield made
    made.end()


def test_memory_that_another_process_takes_is_followed(
    sized: Sized, opened: Callable[[list[Kernel]], LocalDevice], holder: Holder
) -> None:
    """Choices follow what another process takes and returns; a call runs one kernel and one fallback."""
    own = opened([sized("big", 16 * GIB, 0.1), sized("middle", 2 * GIB, 20.0), sized("small", MIB, 90.0)])
    assert fresh(own, 16) == "big.rms_norm"
    holder.leave(6 * 1024)
    sized.ran.clear()
    # A plan of before: the kernel runs out, the one that states least answers, and nobody else is tried.
    assert own.launch_planned(NORM, args(16))[1].kernel == "small.rms_norm"
    assert sized.ran == ["big", "small"] and own.counters.total("out_of_memory") == 1
    assert own.health.blocked_kernels() == {}
    sized.ran.clear()
    torch.cuda.empty_cache()
    assert fresh(own, 17) == "middle.rms_norm"
    torch.cuda.empty_cache()
    holder.leave(512)
    assert fresh(own, 18) == "small.rms_norm"
    assert sized.ran == ["middle", "small"] and own.counters.total("out_of_memory") == 1
    holder.leave(100 * 1024)
    assert fresh(own, 19) == "big.rms_norm"


def test_nothing_left_is_a_clear_error(
    sized: Sized, opened: Callable[[list[Kernel]], LocalDevice], holder: Holder
) -> None:
    """Two kernels are tried, not three; the error says what is free and what to do."""
    kernels = [sized("big", 16 * GIB, 0.1), sized("middle", 12 * GIB, 20.0), sized("small", 8 * GIB, 90.0)]
    own = opened(kernels)
    assert fresh(own, 16) == "big.rms_norm"
    holder.leave(1024)
    sized.ran.clear()
    with pytest.raises(
        KernelExecutionError, match=r"(?s)so did small\.rms_norm .* are free: make the call smaller"
    ) as told:
        own.launch_planned(NORM, args(16))
    assert isinstance(told.value.__cause__, torch.OutOfMemoryError)
    assert sized.ran == ["big", "small"]
