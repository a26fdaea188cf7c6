"""Memory: what does not fit is not chosen, and what runs out is answered by something smaller, once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerzero.actors.device.local_device import LocalDevice
from layerzero.actors.device.memory import WorkspaceBudget
from layerzero.ops import table as ops_table
from layerzero.selection.modes import mode_bits
from layerzero.selection.plan import signature_of
from layerzero.selection.record import format_bytes
from layerzero.selection.workspace import workspace_budget
from layerzero.spec.errors import ConfigurationError, KernelExecutionError, NoKernelFoundError
from layerzero.spec.hardware import free_memory, probe
from layerzero.spec.kernel import Kernel
from layerzero.spec.reasons import Reason
from layerzero.spec.settings import Settings
from tests.kernels import device, kernel

RMS = ops_table.get("rms_norm")
ARGS = (torch.randn(16, 64), torch.randn(64), 1e-6)
GIB = 1 << 30


def sized(kernel_id: str, workspace: int, run: Callable[..., Any] | None = None, us: float = 5.0) -> Kernel:
    """A kernel that states a workspace."""
    made = kernel(kernel_id, run, launch_us=us)
    object.__setattr__(made, "workspace_bytes", lambda request: workspace)
    return made


def exhausted(*_: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 128.00 GiB")


def run(own: LocalDevice) -> tuple[Any, str]:
    plan = own.plan(RMS, signature_of(RMS, ARGS), ARGS, mode_bits())
    try:
        return plan.call(*ARGS), plan.kernel
    except Exception as error:
        result, used = own.recover(plan, ARGS, error)
        return result, used.kernel


def test_a_workspace_that_does_not_fit_is_a_reason() -> None:
    """MEMORY_HEADROOM_EXCEEDED, with what it needs, what there is, and what would help."""
    kernels = [sized("big.rms_norm", 5 * GIB, us=0.1), sized("small.rms_norm", 1024, us=90.0)]
    own = device(kernels, Settings(workspace_limit_bytes=GIB))
    plan = own.plan(RMS, signature_of(RMS, ARGS), ARGS, mode_bits())
    rejected = plan.selection.candidate("big.rms_norm").rejected
    assert plan.kernel == "small.rms_norm" and [r.reason for r in rejected] == [
        Reason.MEMORY_HEADROOM_EXCEEDED
    ]
    assert "at most 1.0 GiB, got 5.0 GiB" in str(rejected[0])
    assert rejected[0].counterfactual == "5.0 GiB of memory free"
    own.close()


def test_nothing_fits_is_an_error_that_says_so() -> None:
    """Where every kernel needs more than there is, the error names the memory."""
    own = device([sized("big.rms_norm", 5 * GIB)], Settings(workspace_limit_bytes=GIB))
    with pytest.raises(NoKernelFoundError, match="MEMORY_HEADROOM_EXCEEDED"):
        run(own)
    own.close()


def test_choices_follow_free_memory() -> None:
    """As memory fills up and empties the choice moves; looks are a second apart, a small change is none."""
    now, free = 0.0, 64 * GIB
    kernels = [sized("big.rms_norm", 8 * GIB, us=0.1), sized("small.rms_norm", 0, us=90.0)]
    own = device(kernels)
    own._inputs.budget = WorkspaceBudget(own.device, own.hardware, lambda: now, lambda _: free)
    own.workspace_budget._total = 80 * GIB

    def chosen(**more: int) -> str:
        args = (torch.randn(more.get("rows", 16), 64), *ARGS[1:])
        return own.plan(RMS, signature_of(RMS, args), args, mode_bits()).kernel

    assert chosen() == "big.rms_norm"
    free = 9 * GIB
    assert chosen(rows=17) == "big.rms_norm", "the last look was a moment ago"
    now = 2.0
    assert chosen(rows=18) == "small.rms_norm"
    assert chosen() == "small.rms_norm", "older plans are gone with the old generation"
    generation = own.dispatch_version
    now, free = 4.0, 9 * GIB + GIB // 2
    chosen(rows=19)
    assert own.dispatch_version == generation
    now, free = 6.0, 70 * GIB
    assert chosen(rows=20) == "big.rms_norm"
    own.close()


def test_what_the_first_calls_decide_stays_decided() -> None:
    """Free memory is known when a device opens: no look behind the first call drops the plan that it got."""
    own = device([sized("small.rms_norm", 1024), kernel("plain.rms_norm")])
    first = own.plan(RMS, signature_of(RMS, ARGS), ARGS, mode_bits())
    ran_behind = threading.Event()
    assert own.loader.submit(ran_behind.set) and ran_behind.wait(60)
    assert own.plan(RMS, signature_of(RMS, ARGS), ARGS, mode_bits()) is first
    assert own.counters.total("selections") == 1
    own.close()


def test_running_out_falls_back_to_the_smallest_once() -> None:
    """The kernel with the least workspace answers; no circuit counts it, a counter does."""
    kernels = [
        sized("big.rms_norm", 3000, exhausted, us=0.1), sized("middle.rms_norm", 2000, us=1.0),
        sized("small.rms_norm", 10, us=50.0),
    ]  # fmt: skip
    own = device(kernels)
    for _ in range(5):
        result, used = run(own)
        assert used == "small.rms_norm" and torch.allclose(result, RMS.reference(*ARGS))
    assert own.counters.get("out_of_memory", kernel="big.rms_norm") == 5
    assert own.counters.get("fallbacks", kernel="big.rms_norm", reason="OutOfMemoryError") == 5
    assert own.health.blocked_kernels() == {} and own.counters.total("failures") == 0
    own.close()


def test_running_out_twice_is_a_clear_error() -> None:
    """One smaller kernel is tried, not all: the error names both, what is free and what to do."""
    tried: list[str] = []

    def out(name: str) -> Callable[..., Any]:
        def run(*_: Any) -> Any:
            tried.append(name)
            raise torch.OutOfMemoryError("out of memory")

        return run

    costs = (("a", 2, 1.0), ("b", 0, 50.0), ("c", 1, 20.0))
    kernels = [sized(f"{n}.rms_norm", workspace, out(n), us=us) for n, workspace, us in costs]
    own = device(kernels)
    with pytest.raises(KernelExecutionError, match=r"so did b\.rms_norm .* are free: make the call smaller"):
        run(own)
    assert tried == ["a", "b"]
    own.close()


def test_running_out_on_the_cpu_is_noticed() -> None:
    """torch has no type of its own for it there; a real failing allocation falls back all the same."""

    def greedy(*_: Any) -> Any:
        return torch.empty(1 << 60)

    own = device([sized("big.rms_norm", 9, greedy, us=0.1), sized("small.rms_norm", 0, us=50.0)])
    assert run(own)[1] == "small.rms_norm"
    assert own.counters.total("out_of_memory") == 1
    own.close()


def test_the_score_matrix_is_priced_in_memory() -> None:
    """SDPA step by step states what it holds; a long sequence is refused where that does not fit."""
    from layerzero.backends import load_builtin

    attention = ops_table.get("attention")
    math = next(k for k in load_builtin() if k.id == "torch.attention.sdpa_math")
    own = device([math], Settings(workspace_limit_bytes=1 << 20))
    q = torch.zeros(1, 2, 1024, 8)
    _, full = attention.build(q, q, q)
    with pytest.raises(NoKernelFoundError, match=r"workspace needs at most 1\.0 MiB, got 16 MiB"):
        own.plan(attention, signature_of(attention, full), full, mode_bits())
    own.close()


def test_a_larger_kernel_is_not_tried() -> None:
    """Where all others state more workspace, running out is the answer."""
    own = device([sized("small.rms_norm", 1, exhausted, us=0.1), sized("big.rms_norm", 9, us=50.0)])
    with pytest.raises(KernelExecutionError, match="no smaller kernel takes the call"):
        run(own)
    own.close()


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 40), st.floats(0, 1), st.none() | st.integers(1, 1 << 41))
def test_room_never_exceeds_what_is_free(free: int, total: int, headroom: float, limit: int | None) -> None:
    """At first, room is a power of two within what is free less the headroom, and within the limit."""
    room = workspace_budget(free, total, headroom, limit, None)
    assert room <= max(0, free - headroom * total) + 1 and (limit is None or room <= limit)


def test_settings_are_checked() -> None:
    """Shares are from 0 to 1, the limit a whole number."""
    for wrong in ({"memory_headroom": 1.5}, {"check_rate": -0.1}, {"workspace_limit_bytes": 0}):
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            Settings(**cast(dict[str, Any], wrong))


def test_free_memory_is_some_of_it() -> None:
    """This machine has some memory free, and no more than it has."""
    assert 0 < free_memory(torch.device("cpu")) <= probe("cpu").memory_bytes
    assert [format_bytes(n) for n in (0, 1000, 1536, 5 * GIB)] == ["0 B", "1000 B", "1.5 KiB", "5.0 GiB"]
