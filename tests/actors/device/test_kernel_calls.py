"""Calls go to the GPU that owns their tensors, whichever one the thread has current."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero.actors.device.kernel_calls import on_owning_device
from layerzero.ops import table as ops_table
from tests.kernels import device as device_of
from tests.kernels import kernel


def test_a_thread_with_another_gpu_current_is_switched_for_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs that nobody has here: the call runs under its own, and leaves the thread as it was."""
    now = [0]
    seen: list[int] = []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        before, now[0] = now[0], index
        yield
        now[0] = before

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "device", device)

    def run(x: int) -> int:
        seen.append(now[0])
        return x + 1

    assert [on_owning_device(torch.device("cuda", index), run)(1) for index in (0, 1)] == [2, 2]
    assert seen == [0, 1] and now == [0]


def test_nothing_stands_around_a_call_where_there_is_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, and on the only GPU, the callable is itself."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert on_owning_device(torch.device("cpu"), len) is len
    assert on_owning_device(torch.device("cuda", 0), len) is len


def test_a_kernel_gets_addresses_that_it_takes_from_a_plan_of_other_addresses() -> None:
    """A plan is remembered by shapes and strides: the next operand may begin anywhere."""
    op = ops_table.get("rms_norm")
    seen: list[int] = []

    def run(x: Tensor, *rest: object) -> Any:
        seen.append(x.data_ptr() % 64)
        return op.reference(x, *rest)

    own = device_of([kernel("strict.rms_norm", run, alignment=64)])
    memory = torch.arange(4.0 * 8 + 16)
    first = -(memory.data_ptr() % 64) % 64 // 4
    for start in (first, first + 1):
        x = memory[start : start + 32].view(4, 8)
        full = op.build(x)[1]
        assert torch.equal(own.launch_planned(op, full)[0], op.reference(*full))
    assert seen == [0, 0]
