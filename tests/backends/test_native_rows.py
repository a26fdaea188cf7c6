"""The compiled norms and rotations against float64, in every batch, over views and at odd widths."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from layerzero.backends.native import rows
from layerzero.ops import table
from layerzero.ops.op import Args
from layerzero.spec import tolerances
from layerzero.spec.kernel import Kernel, rejections
from layerzero.spec.reasons import Reason
from tests.backends import cases

NORM, ADDED, ROPE, _ = rows.KERNELS  # the last: tests/ops/paged/test_rope_append.py
pytestmark = list(cases.COMPILED)
SIZES = [(1, 1), (1, 15), (3, 16), (7, 33), (64, 256), (5, 4096), (4097, 17)]


def assert_right(kernel: Kernel, args: Args) -> tuple[Tensor, ...]:
    """The results are within tolerance of the reference in float64."""
    op = table.get(kernel.op)
    assert rejections(kernel, op.check(args), cases.HERE) == []
    out, truth, reference = (
        result if isinstance(result, tuple) else (result,)
        for result in (kernel.load()(*args), op.reference(*cases.widened(args)), op.reference(*args))
    )
    for got, wanted, plain in zip(out, truth, reference, strict=True):
        assert tolerances.mismatches(got, wanted, plain) == []
    return tuple(out)


def rotation(tokens: int, *, heads: int = 4, width: int = 32, index: torch.dtype = torch.int64) -> Args:
    """A call of `rope` over views of one projection."""
    packed = torch.randn(tokens, 3 * heads, width)
    q, k = packed[:, :heads], packed[:, heads : 2 * heads]
    angles = torch.rand(50, width // 2)
    return q, k, torch.randint(0, 50, (tokens,), dtype=index), angles.cos(), angles.sin(), False, None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("count", "width"), SIZES)
def test_norms_are_right(count: int, width: int, weighted: bool, dtype: torch.dtype) -> None:
    """With and without a weight, the sum that is normed is the one returned."""
    x, residual = torch.randn(count, width).to(dtype), (torch.randn(count, width) * 3).to(dtype)
    weight = torch.randn(width).to(dtype) if weighted else None
    assert_right(NORM, (x, weight, 1e-5))
    _, total = assert_right(ADDED, (x, residual, weight, 1e-5))
    assert torch.equal(total, x + residual)


def test_bfloat16_is_read_and_rounded_as_torch_does() -> None:
    """Every pattern of bits, ties, infinities and what is no number among them."""
    torch.manual_seed(0)
    x = (
        torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
        .to(torch.int16)
        .view(torch.bfloat16)
        .view(256, 256)
    )
    for residual in (torch.zeros_like(x), x.roll(1), x.flatten()[torch.randperm(1 << 16)].view(256, 256)):
        _, total = ADDED.load()(x, residual, None, 1e-5)
        torch.testing.assert_close(total, x + residual, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", [1, 64, 1500])
def test_rotations_are_right(tokens: int, index: torch.dtype, dtype: torch.dtype) -> None:
    """q and k are read where they lie; the outputs are dense."""
    q, k, *rest = rotation(tokens, index=index)
    q, k = assert_right(ROPE, (q.to(dtype), k.to(dtype), *rest))
    assert q.is_contiguous() and k.is_contiguous()


def test_rotations_of_other_forms_are_right() -> None:
    """More axes, a head that turns in part, tables in float64, positions with gaps between them."""
    q, k, _, cos, sin, *rest = rotation(12)
    many = (q.reshape(2, 6, 4, 32), k.reshape(2, 6, 4, 32), torch.arange(12).view(2, 6), cos, sin, *rest)
    assert_right(ROPE, many)
    assert_right(ROPE, (q, k, torch.arange(24)[::2], cos[:, :5], sin[:, :5], *rest))
    assert_right(ROPE, (q, k, torch.arange(12), cos.double(), sin.double(), *rest))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_in_every_batch(dtype: torch.dtype) -> None:
    """Bitwise, whatever stands beside it."""
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((70, 300), (70, 300), (300,)))
    norm, added, turn = NORM.load(), ADDED.load(), ROPE.load()
    whole, summed, args = norm(x, weight, 1e-6), added(x, residual, weight, 1e-6)[0], rotation(70)
    turned = turn(*args)[0]
    for row in (0, 13, 69):
        one = slice(row, row + 1)
        assert torch.equal(norm(x[one], weight, 1e-6), whole[one])
        assert torch.equal(added(x[one], residual[one], weight, 1e-6)[0], summed[one])
        assert torch.equal(turn(*(tensor[one] for tensor in args[:3]), *args[3:])[0], turned[one])


@pytest.mark.parametrize("position", [-1, 50])
def test_a_position_without_a_row_is_named(position: int) -> None:
    """Nothing is read outside of the tables."""
    args = list(rotation(4))
    args[2] = torch.tensor([0, 1, position, 3])
    with pytest.raises(ValueError, match="positions"):
        ROPE.load()(*args)


def test_what_they_do_not_take_is_refused() -> None:
    """float16, interleaved pairs, rows with gaps."""
    x = torch.randn(4, 16)
    norm, rope = table.get("rms_norm"), table.get("rope")

    def reasons(kernel: Kernel, args: Args) -> set[Reason]:
        op = norm if kernel is NORM else rope
        return {rejected.reason for rejected in rejections(kernel, op.check(args), cases.HERE)}

    q, k, positions, cos, sin, _, scale = rotation(4)
    assert Reason.DTYPE_UNSUPPORTED in reasons(NORM, (x.half(), None, 1e-6))
    assert reasons(NORM, (torch.randn(4, 32)[:, ::2], None, 1e-6))
    assert reasons(ROPE, (q, k, positions, cos, sin, True, scale))
