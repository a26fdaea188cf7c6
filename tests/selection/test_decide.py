"""Deciding among those that accept: costs, the tie band, the default's place, boosts, readiness, reasons."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerzero.actors.device.local_device import LocalDevice
from layerzero.ops import table as ops_table
from layerzero.selection import modes
from layerzero.selection.context import KernelStatus, SelectionContext, SelectionOptions
from layerzero.selection.decide import decide
from layerzero.selection.key import grid
from layerzero.selection.modes import (
    DETERMINISTIC,
    capturing_mode_bits,
    capturing_mode_bits_without_grad,
    mode_bits,
)
from layerzero.selection.plan import signature_of
from layerzero.selection.policy import Policy, make_rule
from layerzero.selection.record import Selection
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.kernel import Kernel
from layerzero.spec.reasons import Reason, Rejected
from layerzero.spec.settings import Settings
from tests.kernels import device, kernel

RMS = ops_table.get("rms_norm")
REQUEST = CallSpec(op="rms_norm", dims={"N": 4, "C": 8}, dtypes=("float32",))


def choose(kernels: list[Kernel], policy: Policy | None = None, **knobs: Any) -> Selection:
    own = device(kernels)
    standing = KernelStatus(unready=frozenset(k.id for k in kernels if k.slow_import))
    context = SelectionContext(
        tuple(kernels), own.hardware, policy or Policy(), standing, SelectionOptions(**knobs)
    )
    return decide(RMS, REQUEST, context)


def test_the_cheapest_wins_outside_of_the_band() -> None:
    """A clear difference decides by cost, and the sentence says the figure."""
    selection = choose([kernel("slow.rms_norm", launch_us=50.0), kernel("fast.rms_norm", launch_us=5.0)])
    assert selection.kernel == "fast.rms_norm"
    assert selection.why.startswith("cheapest at 5.")
    assert selection.order == ("fast.rms_norm", "slow.rms_norm")


def test_inside_the_band_the_fixed_order_decides() -> None:
    """Two kernels within 3 % are settled by rank, whichever was measured faster today."""
    for first, second in ((100.0, 101.0), (101.0, 100.0)):
        kernels = [
            kernel("a.rms_norm", launch_us=first, rank=20),
            kernel("b.rms_norm", launch_us=second, rank=10),
        ]
        selection = choose(kernels)
        assert selection.kernel == "b.rms_norm"
        assert "first in fixed order among 2" in selection.why


def test_the_library_default_keeps_its_place_unless_beaten_by_enough() -> None:
    """A gain below the minimum leaves the default; a larger one takes over."""
    for challenger, expected in ((97.0, "d.rms_norm"), (80.0, "c.rms_norm")):
        selection = choose(
            [kernel("d.rms_norm", launch_us=100.0, default=True), kernel("c.rms_norm", launch_us=challenger)]
        )
        assert selection.kernel == expected
    assert "cheapest" in selection.why


def test_a_default_that_is_wrong_is_not_shielded() -> None:
    """The guard speaks only among those that accept."""
    selection = choose(
        [
            kernel("d.rms_norm", launch_us=1.0, default=True, dtypes=frozenset({"float16"})),
            kernel("c.rms_norm", launch_us=90.0),
        ]
    )
    assert selection.kernel == "c.rms_norm"
    assert selection.why == "the only kernel that takes the request"


def test_a_boost_changes_the_comparison_and_not_the_expectation() -> None:
    """The record keeps the honest cost beside the boosted one."""
    policy = Policy((make_rule("boost", "slow.rms_norm", factor=0.01),))
    selection = choose(
        [kernel("slow.rms_norm", launch_us=50.0), kernel("fast.rms_norm", launch_us=5.0)], policy
    )
    assert selection.kernel == "slow.rms_norm"
    assert selection.expected_us > 50.0
    accepted = selection.candidate("slow.rms_norm").accepted
    assert accepted is not None and accepted.total_us == pytest.approx(accepted.kernel_us * 0.01)


def test_an_unready_kernel_waits_for_its_turn() -> None:
    """READY is part of the verdict: the better kernel is named as chosen when warm."""
    selection = choose(
        [kernel("cold.rms_norm", launch_us=1.0, cold=True), kernel("warm.rms_norm", launch_us=9.0)]
    )
    assert (selection.kernel, selection.when_warm) == ("warm.rms_norm", "cold.rms_norm")
    alone = choose([kernel("cold.rms_norm", launch_us=1.0, cold=True)])
    assert (alone.kernel, alone.when_warm) == ("cold.rms_norm", None)


def test_a_blocked_kernel_says_why_in_the_trace() -> None:
    """Standing enters the trace with its reason and is never chosen."""
    kernels = [kernel("a.rms_norm", launch_us=1.0), kernel("b.rms_norm", launch_us=9.0)]
    blocked = {"a.rms_norm": Rejected(Reason.QUARANTINED, "health", "no quarantine", "wrong by 1 %")}
    own = device(kernels)
    context = SelectionContext(tuple(kernels), own.hardware, status=KernelStatus(blocked))
    selection = decide(RMS, REQUEST, context)
    assert selection.kernel == "b.rms_norm"
    assert [r.reason for r in selection.candidate("a.rms_norm").rejected] == [Reason.QUARANTINED]


def test_strict_determinism_takes_only_batch_invariant_kernels() -> None:
    """determinism="strict" asks every request for it."""
    kernels = [kernel("a.rms_norm", launch_us=1.0), kernel("b.rms_norm", launch_us=9.0, batch_invariant=True)]
    own: LocalDevice = device(kernels, Settings(determinism="strict"))
    full = RMS.build(torch.randn(3, 8))[1]
    record = own.plan(RMS, signature_of(RMS, full), full, mode_bits()).selection_for_request()
    assert record.kernel == "b.rms_norm"
    assert [r.reason for r in record.candidate("a.rms_norm").rejected] == [Reason.NOT_BATCH_INVARIANT]


@pytest.mark.parametrize("inference", [False, True])
def test_deterministic_mode_of_torch_reaches_the_request(
    inference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.use_deterministic_algorithms filters kernels, and leaves the other mode's plans alone.

    Also where a runtime never differentiates, and so asks for fewer of torch's modes.
    """
    monkeypatch.setattr(modes, "_is_capturing", lambda: False)  # a torch without CUDA cannot say
    own = device(
        [kernel("a.rms_norm", launch_us=1.0, deterministic=False), kernel("b.rms_norm", launch_us=9.0)],
        Settings(inference=inference),
    )
    full = RMS.build(torch.randn(3, 8))[1]
    signature = signature_of(RMS, full)
    assert own.plan(RMS, signature, full, own.mode()).kernel == "a.rms_norm"
    plain = own.mode(), capturing_mode_bits(), capturing_mode_bits_without_grad()
    torch.use_deterministic_algorithms(True)
    try:
        assert own.plan(RMS, signature, full, own.mode()).kernel == "b.rms_norm"
        strict = own.mode(), capturing_mode_bits(), capturing_mode_bits_without_grad()
        assert [after - before for before, after in zip(plain, strict, strict=True)] == [DETERMINISTIC] * 3
    finally:
        torch.use_deterministic_algorithms(False)
    assert own.plan(RMS, signature, full, own.mode()).kernel == "a.rms_norm"


def test_the_record_survives_json() -> None:
    """A selection is plain data: kernel, reasons and prices come back from JSON as they were."""
    import msgspec

    selection = choose(
        [
            kernel("a.rms_norm", launch_us=1.0),
            kernel("b.rms_norm", dtypes=frozenset({"float16"}), gradient=False),
        ]
    )
    again = msgspec.json.decode(msgspec.json.encode(selection), type=Selection)
    assert again == selection


@pytest.mark.parametrize(
    ("size", "point"), [(0, 0), (1, 1), (4, 4), (5, 6), (6, 6), (7, 8), (9, 12), (13, 16), (1000, 1024)]
)
def test_the_grid_is_fixed(size: int, point: int) -> None:
    """Stored measurements and keys rely on these points."""
    assert grid(size) == point


def test_what_is_ready_already_is_never_waited_for() -> None:
    """A cold kernel that moves the margins but is not taken itself promises nothing that comes later."""
    selection = choose(
        [
            kernel("d.rms_norm", launch_us=100.0, default=True),
            kernel("c.rms_norm", launch_us=96.0, rank=10),
            kernel("cold.rms_norm", launch_us=94.0, cold=True, rank=20),
        ]
    )
    assert (selection.kernel, selection.when_warm) == ("d.rms_norm", None)
