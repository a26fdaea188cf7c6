"""The guard of numerics: a kernel that lies by one part in a hundred is found, proved and kept out."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from layerzero.actors.device.local_device import LocalDevice
from layerzero.health import JsonQuarantineStore
from layerzero.ops import table as ops_table
from layerzero.selection.modes import mode_bits
from layerzero.selection.plan import signature_of
from layerzero.spec.kernel import Kernel
from layerzero.spec.settings import Settings
from tests.kernels import device, kernel
from tests.waiting import LIMIT_S

RMS = ops_table.get("rms_norm")
SAMPLE = ops_table.get("sample")


def lying(by: float, after: int = 0) -> Callable[..., Any]:
    """The reference times `1 + by`, from the call number `after` on."""
    calls = 0

    def run(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return RMS.reference(*args) * (1 + by if calls > after else 1)

    return run


def kernels(run: Callable[..., Any]) -> list[Kernel]:
    return [kernel("some.rms_norm", run, launch_us=0.1), kernel("other.rms_norm", launch_us=90.0)]


def call(own: LocalDevice, dtype: torch.dtype = torch.float32, seed: int = 0) -> str:
    """Run one call as the API does; the kernel that ran."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(32, 64, generator=generator).to(dtype) for _ in range(2))
    args = (x, weight[0], 1e-6)
    plan = own.plan(RMS, signature_of(RMS, args), args, mode_bits())
    plan.call(*args)
    return plan.kernel


def settled(own: LocalDevice, counter: str, count: int) -> None:
    """Wait until the guard's thread has said `counter` so often."""
    end = time.monotonic() + LIMIT_S
    while own.counters.total(counter) < count:
        assert time.monotonic() < end, f"{counter} stays at {own.counters.total(counter)}"
        time.sleep(0.002)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_part_in_a_hundred_is_found(dtype: torch.dtype, tmp_path: Path) -> None:
    """The first sampled call convicts; the next runs elsewhere, here and in a later process."""
    store = JsonQuarantineStore(tmp_path)
    own = device(kernels(lying(0.01)), Settings(check_rate=1.0), store=store)
    assert call(own, dtype) == "some.rms_norm"
    settled(own, "numerics_failures", 1)
    assert call(own, dtype) == "other.rms_norm"
    why = own.health.blocked_kernels()["some.rms_norm"].got
    assert "wrong numbers: output 0" in why and "N=32 C=64" in why and str(dtype)[6:] in why
    own.close()
    later = device(kernels(lying(0.0)), store=store)
    assert call(later, dtype) == "other.rms_norm"
    later.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_right_kernel_is_never_convicted(dtype: torch.dtype) -> None:
    """Rounding in any dtype passes, call after call."""
    own = device(kernels(lying(0.0)), Settings(check_rate=1.0))
    for seed in range(12):
        call(own, dtype, seed)
        settled(own, "numerics_checked", seed + 1)
    assert own.counters.total("numerics_failures") == 0 and call(own, dtype) == "some.rms_norm"
    own.close()


def test_it_is_found_at_the_configured_rate() -> None:
    """At a rate of a tenth, calls 1, 11, 21 ... are checked: a lie that begins later is found by the next."""
    own = device(kernels(lying(0.01, after=5)), Settings(check_rate=0.1))
    ran = []
    for _ in range(11):
        ran.append(call(own))
        settled(own, "numerics_checked", 1)
    settled(own, "numerics_failures", 1)
    assert ran == ["some.rms_norm"] * 11
    assert own.counters.total("numerics_checked") == 2 and call(own) == "other.rms_norm"
    own.close()


def test_nothing_is_checked_by_default() -> None:
    """Without a rate, plans hold the kernel itself; the negative control of the others."""
    own = device(kernels(lying(0.01)))
    for _ in range(5):
        assert call(own) == "some.rms_norm"
    assert own.counters.total("numerics_checked") == 0
    own.close()


def test_the_rate_can_be_switched_on_and_off() -> None:
    """`configure(check_rate=...)` reaches plans that exist already, both ways."""
    own = device(kernels(lying(0.0)))
    call(own)
    own.set_settings(Settings(check_rate=1.0))
    call(own)
    settled(own, "numerics_checked", 1)
    own.set_settings(Settings())
    call(own)
    assert own.counters.total("numerics_checked") == 1
    own.close()


def test_operands_changed_after_the_call_do_not_matter() -> None:
    """The guard compares what the kernel saw, whatever the caller does with it next."""
    own = device(kernels(lying(0.0)), Settings(check_rate=1.0))
    args = (torch.randn(64, 64), torch.randn(64), 1e-6)
    plan = own.plan(RMS, signature_of(RMS, args), args, mode_bits())
    for turn in range(5):
        result = plan.call(*args)
        args[0].zero_()
        result.fill_(7.0)
        args[0].normal_()
        settled(own, "numerics_checked", turn + 1)
    assert own.counters.total("numerics_failures") == 0
    own.close()


@pytest.mark.parametrize("inference", [False, True])
def test_operands_changed_during_the_call_convict_nobody(inference: bool) -> None:
    """A caller that is gone may write to what its batch still reads: such a call is counted, not judged."""
    with torch.inference_mode(inference):
        x, weight = torch.randn(64, 64), torch.randn(64)
    overwritten = False

    def run(*args: Any) -> Any:
        if overwritten:
            x.fill_(3.0)
        return RMS.reference(*args)

    own = device(kernels(run), Settings(check_rate=1.0))
    args = (x, weight, 1e-6)
    with torch.inference_mode(inference):
        plan = own.plan(RMS, signature_of(RMS, args), args, mode_bits())
        plan.call(*args)
        settled(own, "numerics_checked", 1)
        overwritten = True
        plan.call(*args)
        x.normal_()
        overwritten = False
        plan.call(*args)
    settled(own, "numerics_checked", 2)
    assert own.counters.total("numerics_skipped") == 1 and own.counters.total("numerics_failures") == 0
    own.close()


def test_ops_that_draw_are_left_alone() -> None:
    """Two draws may differ and both be right: no sampling op is checked."""
    own = device([kernel("some.sample")], Settings(check_rate=1.0))
    args = SAMPLE.build(torch.randn(2, 9))[1]
    own.plan(SAMPLE, signature_of(SAMPLE, args), args, mode_bits()).call(*args)
    assert own.counters.total("numerics_checked") == 0
    own.close()
