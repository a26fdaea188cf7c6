"""Transforms really run, are priced, and stand in the record."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerzero.dispatch import mode, positional
from layerzero.errors import NoKernelFoundError
from layerzero.ops import table as ops_table
from layerzero.reasons import Reason
from layerzero.settings import Settings
from tests.kernels import device, kernel

ATTENTION = ops_table.get("attention")
RMS = ops_table.get("rms_norm")


def test_a_layout_transform_runs_and_is_undone() -> None:
    """NO-035: a BHSD kernel serves a BSHD call; it sees BHSD, the caller gets BSHD."""
    seen: list[Any] = []

    def body(*args: Any) -> Any:
        seen.append((tuple(args[0].shape), args[10]))
        return ATTENTION.reference(*args)

    own = device([kernel("a.attention", body, layouts=frozenset({"BHSD"}))])
    q = torch.randn(2, 5, 3, 8)
    full = ATTENTION.build(q, q, q, layout="BSHD", return_lse=True)[1]
    (out, lse), plan = own.launch_planned(ATTENTION, full)
    want, want_lse = ATTENTION.reference(*full)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    assert seen == [((2, 3, 5, 8), "BHSD")]
    assert [str(t) for t in plan.record().transforms] == ["layout BSHD -> BHSD"]


def test_strict_mode_refuses_the_same_call() -> None:
    """E7.3: strict mode names the transform that it refuses."""
    own = device([kernel("a.attention", layouts=frozenset({"BHSD"}))], Settings(strict=True))
    q = torch.randn(2, 5, 3, 8)
    full = ATTENTION.build(q, q, q, layout="BSHD")[1]
    with pytest.raises(NoKernelFoundError, match="STRICT_NEEDS_TRANSFORM") as caught:
        own.launch(ATTENTION, full)
    reasons = {r.reason for c in caught.value.trace for r in c.rejected}
    assert reasons == {Reason.LAYOUT_UNSUPPORTED, Reason.STRICT_NEEDS_TRANSFORM}


def test_a_cast_widens_and_comes_back() -> None:
    """A float32-only kernel serves bfloat16: it computes in float32, the caller gets bfloat16."""
    seen: list[torch.dtype] = []

    def body(*args: Any) -> Any:
        seen.append(args[0].dtype)
        return RMS.reference(*args)

    own = device([kernel("a.rms_norm", body, dtypes=frozenset({"float32"}))])
    full = RMS.build(torch.randn(3, 8).bfloat16(), torch.ones(8).bfloat16())[1]
    out, plan = own.launch_planned(RMS, full)
    assert (seen, out.dtype) == ([torch.float32], torch.bfloat16)
    assert plan.record().transforms[0].kind == "cast"


def test_a_cast_never_narrows() -> None:
    """float64 is not served by a float32 kernel."""
    own = device([kernel("a.rms_norm", dtypes=frozenset({"float32"}))])
    with pytest.raises(NoKernelFoundError, match="DTYPE_UNSUPPORTED"):
        own.launch(RMS, RMS.build(torch.randn(3, 8).double())[1])


def test_mixed_operands_are_cast_to_one_dtype() -> None:
    """EC-013: q in float16 with k and v in bfloat16 runs in float32 and gives q's dtype."""
    own = device([kernel("a.attention", mixed_dtypes=False)])
    q = torch.randn(1, 2, 4, 8)
    full = ATTENTION.build(q.half(), q.bfloat16(), q.bfloat16())[1]
    out, plan = own.launch_planned(ATTENTION, full)
    assert out.dtype == torch.float16
    assert [t.kind for t in plan.record().transforms] == ["cast"]
    strict = device([kernel("a.attention", mixed_dtypes=False)], Settings(strict=True))
    with pytest.raises(NoKernelFoundError, match="DTYPES_MIXED"):
        strict.launch(ATTENTION, full)


def test_a_dense_copy_is_made_for_a_kernel_that_needs_one() -> None:
    """EC-008: expanded and strided operands arrive contiguous; the caller's tensor is untouched."""
    seen: list[bool] = []

    def body(*args: Any) -> Any:
        seen.append(args[0].is_contiguous())
        return RMS.reference(*args)

    own = device([kernel("a.rms_norm", body, contiguous=True, last_stride1=True)])
    x = torch.randn(8, 6).t()
    out = own.launch(RMS, RMS.build(x)[1])
    torch.testing.assert_close(out, RMS.reference(x, None, 1e-6))
    assert seen == [True]
    assert not x.is_contiguous()


def test_the_cost_of_a_transform_is_exactly_what_it_adds() -> None:
    """T40: total cost is the kernel's plus its transforms', and a transform can lose the race."""
    cheap = kernel("a.attention", launch_us=5.0, layouts=frozenset({"BHSD"}))
    native = kernel("b.attention", launch_us=5.2, layouts=frozenset({"BSHD"}))
    own = device([cheap, native], Settings(tie_band=0.0))
    q = torch.randn(1, 4, 2, 8)
    full = ATTENTION.build(q, q, q, layout="BSHD")[1]
    record = own.plan(ATTENTION, positional(ATTENTION, full), full, mode()).record()
    moved = record.candidate("a.attention").accepted
    assert moved is not None
    assert moved.total_us == moved.kernel_us + sum(t.cost_us for t in moved.transforms)
    assert record.kernel == "b.attention"


def test_an_aligned_kernel_never_sees_a_misaligned_operand() -> None:
    """EC-005: the plan of an aligned call also serves a misaligned one of the same signature, by a copy."""
    seen: list[int] = []

    def body(*args: Any) -> Any:
        seen.append(args[0].data_ptr() % 64)
        return RMS.reference(*args)

    own = device([kernel("a.rms_norm", body, alignment=64)])
    base = torch.randn(64 * 8 + 16)
    start = (-base.data_ptr() // 4) % 16
    aligned = base[start : start + 64].view(8, 8)
    misaligned = base[start + 1 : start + 65].view(8, 8)
    for x in (aligned, misaligned):
        torch.testing.assert_close(own.launch(RMS, RMS.build(x)[1]), RMS.reference(x, None, 1e-6))
    assert seen == [0, 0]
