"""A module that has to be compiled first repays that within the calls that are expected, or is left alone."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
import torch

from layerzero.ops import table as ops_table
from layerzero.selection.context import KernelStatus, SelectionContext, SelectionOptions
from layerzero.selection.decide import decide
from layerzero.selection.modes import mode_bits
from layerzero.selection.plan import signature_of
from layerzero.selection.policy import Policy, make_rule
from layerzero.selection.record import Selection
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.kernel import Kernel
from layerzero.spec.settings import Settings
from tests.kernels import device, kernel

RMS = ops_table.get("rms_norm")
REQUEST = CallSpec(op="rms_norm", dims={"N": 4, "C": 8}, dtypes=("float32",))
# 40 s over ten million calls are 4 us a call.
CALLS = 10_000_000


def module(name: str, launch_us: float, *, built: bool = False, compile_s: float = 40.0) -> Kernel:
    """A kernel whose module is compiled for `compile_s`, unless it is `built`."""
    made = kernel(name, launch_us=launch_us, cold=True)
    return dataclasses.replace(made, compile_s=compile_s, on_disk=lambda _: built)


def choose(*kernels: Kernel, policy: Policy | None = None, calls: int | None = CALLS) -> Selection:
    standing = KernelStatus(unready=frozenset(k.id for k in kernels if k.slow_import))
    options = SelectionOptions(payback_calls=calls)
    context = SelectionContext(kernels, device(kernels).hardware, policy or Policy(), standing, options)
    return decide(RMS, REQUEST, context)


READY = kernel("ready.rms_norm", launch_us=10.0)


@pytest.mark.parametrize(
    ("launch_us", "calls", "compiled"),
    [(7.5, CALLS, False), (5.0, CALLS, True), (7.5, 10 * CALLS, True), (5.0, CALLS // 10, False)],
)
def test_a_module_is_compiled_where_its_gain_repays_that(
    launch_us: float, calls: int, compiled: bool
) -> None:
    """2.5 us a call repay 40 s after 16 million calls, 5 us after 8 million."""
    selection = choose(READY, module("built.rms_norm", launch_us), calls=calls)
    assert selection.kernel == "ready.rms_norm"
    assert selection.when_warm == ("built.rms_norm" if compiled else None)


def test_the_record_says_what_compiling_would_cost_and_after_how_many_calls_it_is_repaid() -> None:
    """In the trace, in the text of an explanation, and in its JSON."""
    selection = choose(READY, module("built.rms_norm", 7.5), module("worse.rms_norm", 20.0))
    accepted = selection.candidate("built.rms_norm").accepted
    assert accepted is not None
    assert accepted.note == "not compiled: 40 s are repaid after 16,000,000 calls, of 10,000,000 expected"
    assert accepted.note in str(selection) and accepted.note in str(selection.as_plain())
    worse = selection.candidate("worse.rms_norm").accepted
    assert worse is not None and worse.note == "chosen when warm"  # nobody asked whether it should be


@pytest.mark.parametrize(
    "free",
    [
        pytest.param({"built": True}, id="on disk"),
        pytest.param({"compile_s": 0.0}, id="no time to compile"),
    ],
)
def test_what_is_on_disk_or_compiles_in_no_time_has_no_price(free: dict[str, Any]) -> None:
    """Loading takes seconds at the most, behind the calls."""
    assert choose(READY, module("built.rms_norm", 7.5, **free)).when_warm == "built.rms_norm"


def test_a_user_can_have_any_gain_compiled() -> None:
    """By the setting for all kernels, by a preference or a lock for some."""
    small = module("built.rms_norm", 7.5)
    assert choose(READY, small, calls=None).when_warm == small.id
    for rule in (make_rule("boost", "built.*", factor=0.9), make_rule("lock", "built.*", op="rms_norm")):
        selection = choose(READY, small, policy=Policy((rule,)))
        assert small.id in (selection.kernel, selection.when_warm), rule


def test_the_next_best_that_is_there_is_loaded_instead() -> None:
    """A module that is not worth it hides none that needs no compiler."""
    other = module("other.rms_norm", 8.5, built=True)
    selection = choose(READY, module("built.rms_norm", 7.5), other)
    assert (selection.kernel, selection.when_warm) == ("ready.rms_norm", "other.rms_norm")


def test_where_nothing_is_ready_the_cheapest_is_compiled() -> None:
    """There is nothing to serve the call meanwhile."""
    selection = choose(module("built.rms_norm", 7.5), module("other.rms_norm", 8.5))
    assert (selection.kernel, selection.when_warm) == ("built.rms_norm", None)


def test_a_device_compiles_only_what_repays_itself() -> None:
    """On the paths of a call: nothing is compiled behind it, until the setting asks for any gain."""
    loads: list[str] = []
    compiled = threading.Event()

    def load() -> Any:
        loads.append("built.rms_norm")
        compiled.set()
        return RMS.reference

    made = dataclasses.replace(
        kernel("built.rms_norm", load=load, launch_us=7.5, cold=True),
        compile_s=40.0, on_disk=lambda _: False,
    )  # fmt: skip
    own = device([READY, made], Settings(warm="background", compile_processes=0))
    full = RMS.build(torch.randn(4, 8))[1]

    def planned() -> Selection:
        return own.plan(RMS, signature_of(RMS, full), full, mode_bits()).selection_for_request()

    assert planned().when_warm is None
    own.loader._thread.close(60.0)
    assert loads == [] and planned().kernel == "ready.rms_norm"

    other = device([READY, made], Settings(warm="background", compile_processes=0, payback_calls=None))
    assert other.plan(RMS, signature_of(RMS, full), full, mode_bits()).selection.when_warm == made.id
    compiled.wait(60.0)
    other.loader._thread.close(60.0)
    assert loads == ["built.rms_norm"]
    later = other.plan(RMS, signature_of(RMS, full), full, mode_bits())
    assert (later.kernel, later.selection.when_warm) == ("built.rms_norm", None)
