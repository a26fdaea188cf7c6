"""Kernels that compile by unit: ready for what is compiled, in the background for what is not."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from layerzero.actors.device.local_device import LocalDevice
from layerzero.ops import table as ops_table
from layerzero.ops.rehearsal import dummy_args
from layerzero.selection.modes import mode_bits
from layerzero.selection.plan import signature_of
from layerzero.selection.record import Selection
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.kernel import Kernel
from layerzero.spec.reasons import Reason
from layerzero.spec.settings import Settings
from tests.backends import cases
from tests.kernels import device, kernel

RMS = ops_table.get("rms_norm")


class Compiler:
    """A kernel's compiler: notes what it compiled, waits where it is told to, fails where it is told to."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.compiled: list[str] = []
        self.broken = False

    def kernel(self) -> Kernel:
        plain = kernel("units.rms_norm", launch_us=0.1)
        return replace(plain, compile_key=lambda request: request.dtype, compile=self.build)

    def build(self, request: CallSpec) -> None:
        self.release.wait(10)
        if self.broken:
            raise RuntimeError("planted: the compiler is missing")
        self.compiled.append(request.dtype)


def made(compiler: Compiler, **settings: Any) -> LocalDevice:
    """A device with a kernel that compiles by dtype and a slower one that does not."""
    return device([compiler.kernel(), kernel("steady.rms_norm", launch_us=9.0)], Settings(**settings))


def chosen(own: LocalDevice, dtype: torch.dtype = torch.float32) -> Selection:
    """The selection for a call of that dtype."""
    full = RMS.build(torch.ones(3, 8, dtype=dtype))[1]
    return own.plan(RMS, signature_of(RMS, full), full, mode_bits()).selection_for_request()


def until(condition: Any) -> None:
    """Wait for the background thread."""
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("the background thread did not get there")


def test_a_call_takes_the_next_best_while_its_unit_compiles() -> None:
    """One dtype is compiled in the background and promoted; another one waits for its own turn."""
    compiler = Compiler()
    own = made(compiler)
    first = chosen(own)
    assert (first.kernel, first.when_warm) == ("steady.rms_norm", "units.rms_norm")
    compiler.release.set()
    until(lambda: chosen(own).kernel == "units.rms_norm")
    assert compiler.compiled == ["float32"]
    assert chosen(own, torch.bfloat16).kernel == "steady.rms_norm"
    until(lambda: chosen(own, torch.bfloat16).kernel == "units.rms_norm")
    assert compiler.compiled == ["float32", "bfloat16"]


def test_a_unit_that_does_not_compile_blocks_its_kernel_once() -> None:
    """With its reason; nobody tries again."""
    compiler = Compiler()
    compiler.broken = True
    compiler.release.set()
    own = made(compiler)
    chosen(own)
    until(lambda: chosen(own).candidate("units.rms_norm").rejected)  # blocked first, then planned anew
    assert "units.rms_norm" in own.registry.blocked()
    record = chosen(own)
    (reason,) = record.candidate("units.rms_norm").rejected
    assert reason.reason is Reason.KERNEL_LOAD_FAILED
    assert "the compiler is missing" in reason.got
    assert record.when_warm is None


def test_eager_calls_wait_for_what_they_need() -> None:
    """Who asks for readiness before traffic gets the best kernel from the first call on."""
    assert chosen(made(Compiler(), warm="eager")).kernel == "units.rms_norm"


def test_warming_a_request_makes_its_unit_ready() -> None:
    """What `warmup` does for each call of a manifest; a second time compiles nothing."""
    compiler = Compiler()
    compiler.release.set()
    own = made(compiler, warm="off")
    request = chosen(own).request
    own.warm(("units.rms_norm",), request)
    own.warm(("units.rms_norm",), request)
    assert chosen(own).kernel == "units.rms_norm"
    assert compiler.compiled == ["float32"]


@pytest.mark.parametrize("op", ["attention", "ragged_attention", "paged_attention", "mla_attention"])
def test_a_rehearsal_is_a_call_like_the_one_asked_for(op: str) -> None:
    """Same sizes but for the pool's pages, same dtype, same flags."""
    base = {"C": 32, "R": 16} if op == "mla_attention" else {"D": 32}
    compared = 0
    for case in cases.cases(op, base):
        request = ops_table.get(op).check(cases.call(case, torch.bfloat16))
        flags = {"causal", "prefill", "gqa", "window", "softcap", "lse"}
        if request.features - flags - {"scale"} or request.dims.get("Dv", 0) != request.dims.get("D", 0):
            continue
        again = ops_table.get(op).check(dummy_args(request, torch.device(request.device)))
        assert again.features & flags == request.features & flags, str(case)
        assert {k: v for k, v in again.dims.items() if k not in ("N", "W")} == {
            k: v for k, v in request.dims.items() if k not in ("N", "W")
        }
        assert again.dtype == request.dtype
        compared += 1
    assert compared >= 6
