"""Transforms really run, are priced, and stand in the record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from layerzero.backends import load_builtin
from layerzero.ops import table as ops_table
from layerzero.selection.modes import mode_bits
from layerzero.selection.plan import signature_of
from layerzero.selection.record import render
from layerzero.selection.transform import COPY_LAUNCH_US, _copy_us, adapt, keep_aligned
from layerzero.spec.condition import parse_limit
from layerzero.spec.errors import NoKernelFoundError
from layerzero.spec.hardware import hypothetical_gpu
from layerzero.spec.kernel import Kernel, rejections
from layerzero.spec.reasons import Reason
from layerzero.spec.settings import Settings
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
    assert [str(t) for t in plan.selection_for_request().transforms] == ["layout BSHD -> BHSD"]


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
    assert plan.selection_for_request().transforms[0].kind == "cast"


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
    assert [(t.kind, t.after) for t in plan.selection_for_request().transforms] == [("cast", "float32")]
    wide = ATTENTION.reference(*(t.float() for t in full[:3]), *full[3:])
    assert torch.equal(out, wide.half()), "rounded once, behind the kernel"
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
    record = own.plan(ATTENTION, signature_of(ATTENTION, full), full, mode_bits()).selection_for_request()
    moved = record.candidate("a.attention").accepted
    assert moved is not None
    assert moved.total_us == moved.kernel_us + sum(t.cost_us for t in moved.transforms)
    assert record.kernel == "b.attention"


def test_a_copy_is_priced_by_its_operands_and_its_bytes() -> None:
    """Dense copies of three operands: a launch each, and what is read and written at the device's pace."""
    own = device([kernel("a.attention", contiguous=True)])
    q = torch.randn(1, 4, 2, 8)[..., ::2]
    full = ATTENTION.build(q, q, q)[1]
    record = own.plan(ATTENTION, signature_of(ATTENTION, full), full, mode_bits()).selection_for_request()
    (copied,) = record.transforms
    moved_us = 2 * ATTENTION.work(record.request).bytes / own.hardware.bandwidth * 1e6
    assert copied.kind == "contiguous"
    assert copied.cost_us == pytest.approx(3 * COPY_LAUNCH_US + moved_us)


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


def test_an_operand_that_is_left_out_has_no_address() -> None:
    """The others are looked at all the same, and copied where they begin between two boundaries."""
    seen: list[Any] = []
    pair = replace(RMS, operands=(1, 0))
    call = keep_aligned(pair, 64, lambda x, weight, eps: seen.append((x.data_ptr() % 64, weight)))
    base = torch.zeros(64)
    start = (-base.data_ptr() // 4) % 16
    call(base[start + 1 : start + 9], None, 1e-6)
    call(base[start : start + 8], None, 1e-6)
    assert seen == [(0, None), (0, None)]


def test_what_an_op_writes_is_never_copied() -> None:
    """A misaligned pool is written in place, where a misaligned operand beside it is copied."""
    append = ops_table.get("append_kv")
    base = torch.zeros(3, 65)
    k, v, pool = (each[1 if each.data_ptr() % 64 == 0 else 0 :][:2].view(2, 1, 1) for each in base)
    seen: list[Any] = []
    full = (k, v, pool, pool, torch.arange(2), "NHD", None, None)
    keep_aligned(append, 64, lambda *args: seen.extend(args))(*full)
    assert seen[0].data_ptr() % 64 == 0 and seen[0] is not k
    assert seen[2] is pool and seen[3] is pool


def _bounded(seen: list[int], limits: tuple[str, ...], **more: Any) -> Kernel:
    """A fast kernel that fails beyond 8 sequences times heads, as a launch with too large a grid does."""

    def body(*args: Any) -> Any:
        seen.append(args[0].shape[0])
        if args[0].shape[0] * args[0].shape[1 if args[10] == "BHSD" else 2] > 8:
            raise RuntimeError("grid too large")
        return ATTENTION.reference(*args)

    return kernel("small.attention", body, launch_us=0.001, limits=limits, **more)


GRID = ("B * Hq <= 8 else CUDA_BLOCK_LIMIT_EXCEEDED",)


@pytest.mark.parametrize("batch", [5, 7, 8, 12])
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_a_batch_above_a_kernels_bound_is_split_and_merged(batch: int, layout: str, return_lse: bool) -> None:
    """NO-015: equal parts within the bound, each with its own mask and slopes, joined to one result."""
    seen: list[int] = []
    own = device([_bounded(seen, GRID, layouts=frozenset({"BHSD"})), kernel("any.attention", launch_us=9e5)])
    q = torch.randn(batch, 2, 5, 8) if layout == "BHSD" else torch.randn(batch, 5, 2, 8)
    mask = torch.rand(batch, 1, 5, 5) > 0.3
    slopes = torch.rand(batch, 2)
    full = ATTENTION.build(
        q, q * 2, q * 3, attn_mask=mask, alibi_slopes=slopes, layout=layout, return_lse=return_lse
    )[1]
    outs, plan = own.launch_planned(ATTENTION, full)
    torch.testing.assert_close(outs, ATTENTION.reference(*full))
    record = plan.selection_for_request()
    assert record.kernel == "small.attention" and not record.fallback
    assert sum(seen) == batch and max(seen) <= 4 and max(seen) - min(seen) <= max(seen) // 2 + 1
    assert "split B -> parts of at most 4" in [str(t) for t in record.transforms]
    assert "split B -> parts of at most 4" in render(record)


def test_a_split_is_priced_for_its_launches_and_its_join() -> None:
    """Twice the parts cost as many launches more; where another kernel is cheaper, nothing is split."""
    seen: list[int] = []
    bounded = _bounded(seen, GRID)
    prices = []
    for batch in (8, 16):
        own = device([bounded])
        q = torch.zeros(batch, 2, 1, 8)
        full = ATTENTION.build(q, q, q)[1]
        record = own.plan(ATTENTION, signature_of(ATTENTION, full), full, mode_bits()).selection_for_request()
        copied = _copy_us(ATTENTION, record.request, own.hardware)
        prices.append(record.transforms[0].cost_us - copied)
    launch = bounded.efficiency.launch_us
    assert prices == pytest.approx([launch, 3 * launch])
    q = torch.zeros(9, 2, 1, 8)
    full = ATTENTION.build(q, q, q)[1]
    own = device([bounded, kernel("any.attention", launch_us=0.002)])
    record = own.plan(ATTENTION, signature_of(ATTENTION, full), full, mode_bits()).selection_for_request()
    assert record.kernel == "any.attention" and record.candidate("small.attention").accepted is not None


def test_a_split_has_its_gradient() -> None:
    """The parts' gradients are the whole call's."""
    own = device([_bounded([], GRID)])
    q, k, v = (torch.randn(6, 2, 3, 8, requires_grad=True) for _ in range(3))
    full = ATTENTION.build(q, k, v, is_causal=True)[1]
    grads = [
        torch.autograd.grad(out.square().sum(), (q, k, v))
        for out in (own.launch(ATTENTION, full), ATTENTION.reference(*full))
    ]
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize(
    "limits",
    [
        ("Hq * D <= 8 else CUDA_BLOCK_LIMIT_EXCEEDED",),  # a smaller batch does not help
        # Lengths are rounded in keys: one plan serves several.
        ("B * Sq <= 8 else CUDA_BLOCK_LIMIT_EXCEEDED",),
        ("B <= 4 else BATCH_TOO_LARGE",),  # not a grid's bound
    ],
)
def test_what_a_smaller_batch_does_not_mend_is_not_split(limits: tuple[str, ...]) -> None:
    """Such a kernel stays refused, with its reason."""
    own = device([_bounded([], limits)])
    q = torch.zeros(6, 2, 3, 8)
    full = ATTENTION.build(q, q, q)[1]
    with pytest.raises(NoKernelFoundError) as caught:
        own.launch(ATTENTION, full)
    assert [r.reason for r in caught.value.trace[0].rejected] == [parse_limit(limits[0]).reason]


def test_cuda_kernels_take_a_batch_beyond_their_grid_in_parts() -> None:
    """Flash out of torch, 65,536 sequences times heads, on an imagined GPU: two parts, and said so."""
    q = torch.zeros(2048, 32, 1, 8, dtype=torch.float16)
    request = ATTENTION.check(ATTENTION.build(q, q, q)[1]).replace(platform="cuda")
    gpu = hypothetical_gpu(90)
    flash = next(k for k in load_builtin(op="attention") if k.id == "torch.attention.sdpa_flash")
    refused = rejections(flash, request, gpu)
    assert [r.reason for r in refused] == [Reason.CUDA_BLOCK_LIMIT_EXCEEDED]
    adapted = adapt(ATTENTION, flash, request, refused, gpu, request)
    assert adapted is not None
    now, transforms = adapted
    assert not rejections(flash, now, gpu) and [t.size for t in transforms] == [2047]


@pytest.mark.parametrize("op", ["add_rms_norm", "add_layer_norm", "add_rms_norm_quantize"])
def test_no_cast_stands_before_a_sum_that_is_rounded_and_normed(op: str) -> None:
    """In float32 it would be normed unrounded; a norm alone is cast there and back."""
    features = frozenset({"no_weight", "quant_int8", "scale_per_row"})
    x = torch.randn(3, 8).bfloat16()

    def launched(name: str, *operands: torch.Tensor) -> Any:
        wide = kernel(f"a.{name}", op=name, dtypes=frozenset({"float32"}), features=features)
        return device([wide]).launch_planned(ops_table.get(name), ops_table.get(name).build(*operands)[1])

    with pytest.raises(NoKernelFoundError, match="DTYPE_UNSUPPORTED"):
        launched(op, x, x)
    assert [t.kind for t in launched("rms_norm", x)[1].selection_for_request().transforms] == ["cast"]
