"""rms_norm, add_rms_norm and layer_norm against float64, at the edges of their dtypes, and on bad input."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero.ops.norm.layer_norm import ADD_LAYER_NORM, LAYER_NORM
from layerzero.ops.norm.rms_norm import ADD_RMS_NORM, RMS_NORM
from layerzero.ops.op import Op
from tests.ops.calls import call

WIDTHS = (1, 111, 4096, 4100)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def rms_oracle(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The formula, in float64."""
    wide = x.double()
    out = wide / torch.sqrt((wide * wide).sum(-1, keepdim=True) / x.shape[-1] + eps)
    return out if weight is None else out * weight.double()


def layer_oracle(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """The formula, in float64."""
    shifted = x.double() - x.double().mean(-1, keepdim=True)
    out = shifted / torch.sqrt((shifted * shifted).mean(-1, keepdim=True) + eps)
    out = out if weight is None else out * weight.double()
    return out if bias is None else out + bias.double()


def rows(width: int, dtype: torch.dtype, lead: tuple[int, ...] = (3,)) -> Tensor:
    """Random rows, the same on every run."""
    return torch.randn(*lead, width, generator=torch.Generator().manual_seed(width)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm_matches_float64(width: int, dtype: torch.dtype, weighted: bool) -> None:
    """The result is the float64 formula's, rounded to the output dtype."""
    x = rows(width, dtype)
    weight = rows(width, dtype, ()) if weighted else None
    assert_rounded(call(RMS_NORM, x, weight, eps=1e-6), rms_oracle(x, weight, 1e-6))


def assert_rounded(got: Tensor, oracle: Tensor) -> None:
    """`got` is the oracle within torch's default tolerance of its dtype."""
    torch.testing.assert_close(got, oracle.to(got.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm_matches_float64(width: int, dtype: torch.dtype) -> None:
    """With weight and bias, with one of them, with none."""
    x, weight, bias = rows(width, dtype, (2, 2)), rows(width, dtype, ()), rows(width, dtype, ()) - 1
    for w, b in ((weight, bias), (weight, None), (None, bias), (None, None)):
        assert_rounded(call(LAYER_NORM, x, w, b), layer_oracle(x, w, b, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm_returns_the_norm_of_the_sum_it_returns(width: int, dtype: torch.dtype) -> None:
    """The second result is x + residual in x's dtype; the first is that tensor's norm."""
    x, residual, weight = rows(width, dtype), rows(width, dtype) * 2, rows(width, dtype, ())
    normed, total = call(ADD_RMS_NORM, x, residual, weight)
    assert torch.equal(total, x + residual)
    assert_rounded(normed, rms_oracle(total, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_add_layer_norm_returns_the_norm_of_the_sum_it_returns(width: int, dtype: torch.dtype) -> None:
    """The second result is x + residual in x's dtype; the first is that tensor's norm."""
    x, residual = rows(width, dtype), rows(width, dtype) * 2
    weight, bias = rows(width, dtype, ()), rows(width, dtype, ()) - 1
    normed, total = call(ADD_LAYER_NORM, x, residual, weight, bias)
    assert torch.equal(total, x + residual)
    assert_rounded(normed, layer_oracle(total, weight, bias, 1e-5))


def test_squares_do_not_overflow_half_precision() -> None:
    """300 squared exceeds float16's largest number, its norm is 1."""
    x = torch.full((2, 64), 300.0, dtype=torch.float16)
    assert torch.equal(call(RMS_NORM, x), torch.ones_like(x))


def test_a_large_mean_does_not_hide_the_variance() -> None:
    """Layer norm shifts before it squares."""
    x = rows(64, torch.float32) + 1e4
    assert_rounded(call(LAYER_NORM, x), layer_oracle(x, None, None, 1e-5))


def test_denormals_are_not_flushed_into_garbage() -> None:
    """Rows below the smallest normal number give what float64 gives: next to nothing, and finite."""
    x = torch.full((1, 8), 1e-40)
    assert_rounded(call(RMS_NORM, x), rms_oracle(x, None, 1e-6))
    assert_rounded(call(LAYER_NORM, x), layer_oracle(x, None, None, 1e-5))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_numbers_stay_in_their_row(bad: float) -> None:
    """NaN and infinity show in the row that holds them and in no other."""
    x = torch.ones(3, 8)
    x[1, 2] = bad
    for out in (call(RMS_NORM, x), call(LAYER_NORM, x), call(ADD_RMS_NORM, x, torch.ones(3, 8))[0]):
        assert torch.isnan(out[1]).any()
        assert torch.isfinite(out[[0, 2]]).all()


@pytest.mark.parametrize("op", [RMS_NORM, LAYER_NORM])
def test_weights_of_another_dtype_keep_the_rows_dtype(op: Op) -> None:
    """A float32 weight over bfloat16 rows, as checkpoints store it, gives bfloat16."""
    x, weight = rows(32, torch.bfloat16), rows(32, torch.float32, ())
    out = call(op, x, weight)
    assert out.dtype is torch.bfloat16
    assert op.check(op.build(x, weight)[1]).dtypes == ("bfloat16", "float32")


@pytest.mark.parametrize("op", [RMS_NORM, LAYER_NORM, ADD_RMS_NORM])
def test_no_rows_need_no_kernel(op: Op) -> None:
    """An empty batch or sequence is answered by its shape."""
    x = torch.empty(2, 0, 8)
    operands = (x, x) if op is ADD_RMS_NORM else (x,)
    out = op.empty(op.build(*operands)[1]) if op.empty else None
    assert out is not None
    assert all(p.shape == x.shape for p in (out if isinstance(out, tuple) else (out,)))


def test_gradients_are_right() -> None:
    """Analytic and numeric gradients of every operand agree in float64."""
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    r = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    w = torch.randn(5, dtype=torch.float64, requires_grad=True)
    b = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: call(RMS_NORM, x, w), (x, w))
    assert torch.autograd.gradcheck(lambda x, r, w: call(ADD_RMS_NORM, x, r, w), (x, r, w))
    assert torch.autograd.gradcheck(lambda x, w, b: call(LAYER_NORM, x, w, b), (x, w, b))


X = torch.ones(2, 8)
BAD: list[tuple[Op, tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    (RMS_NORM, ([1.0],), {}, TypeError, "x needs a torch.Tensor, got list"),
    (RMS_NORM, (torch.ones(2, 8, dtype=torch.int64),), {}, TypeError, "x needs a floating point dtype"),
    (RMS_NORM, (torch.tensor(1.0),), {}, ValueError, "x needs a last axis of at least 1"),
    (RMS_NORM, (torch.ones(2, 0),), {}, ValueError, "x needs a last axis of at least 1"),
    (RMS_NORM, (X, torch.ones(7)), {}, ValueError, "weight needs 8 elements"),
    (RMS_NORM, (X, torch.ones(1, 8)), {}, ValueError, "weight needs 1 dimensions"),
    (RMS_NORM, (X, "ones"), {}, TypeError, "weight needs a torch.Tensor, got str"),
    (RMS_NORM, (X, torch.ones(8, device="meta")), {}, ValueError, "weight needs to be on cpu like x"),
    (RMS_NORM, (X,), {"eps": -1e-6}, ValueError, "eps needs a finite number"),
    (RMS_NORM, (X,), {"eps": math.nan}, ValueError, "eps needs a finite number"),
    (RMS_NORM, (X,), {"eps": "1e-6"}, TypeError, "eps needs a number, got str"),
    (RMS_NORM, (X.to_sparse(),), {}, ValueError, "x needs a strided tensor"),
    (ADD_RMS_NORM, (X, None), {}, TypeError, "residual needs a torch.Tensor"),
    (ADD_RMS_NORM, (X, torch.ones(8)), {}, ValueError, r"residual needs shape \(.*\) like x, got \(8,\)"),
    (ADD_RMS_NORM, (X, X.half()), {}, TypeError, "residual needs x's dtype float32, got float16"),
    (ADD_RMS_NORM, (X, X.to("meta")), {}, ValueError, "residual needs to be on cpu"),
    (ADD_RMS_NORM, (X, X, torch.ones(9)), {}, ValueError, "weight needs 8 elements"),
    (LAYER_NORM, (X, None, torch.ones(9)), {}, ValueError, "bias needs 8 elements"),
    (LAYER_NORM, (X, None, [0.0]), {}, TypeError, "bias needs a torch.Tensor"),
    (LAYER_NORM, (X, torch.ones(8), torch.ones(8, device="meta")), {}, ValueError, "bias needs to be on cpu"),
    (LAYER_NORM, (X,), {"eps": True}, TypeError, "eps needs a number, got bool"),
]


@pytest.mark.parametrize(("op", "operands", "options", "error", "message"), BAD)
def test_bad_input_is_named(
    op: Op, operands: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Every misfit is a ValueError or TypeError that says which argument, what it needs and what it got."""
    with pytest.raises(error, match=message):
        call(op, *operands, **options)


def test_the_request_says_what_is_missing_and_what_is_extra() -> None:
    """Features: no_weight without a weight, bias with one."""
    w = torch.ones(8)
    wanted = [
        ((X,), {"no_weight"}),
        ((X, w), set()),
        ((X, w, w), {"bias"}),
        ((X, None, w), {"no_weight", "bias"}),
    ]
    for operands, features in wanted:
        request = LAYER_NORM.check(LAYER_NORM.build(*operands)[1])
        assert request.features == features
        assert request.dims == {"N": 2, "C": 8}


def test_the_signature_tells_calls_apart() -> None:
    """Shape, strides, dtype, gradient, a missing weight and eps each change it."""
    w = torch.ones(8)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((X,), {}), ((X, w), {}), ((X.half(),), {}), ((torch.ones(3, 8),), {}), ((torch.ones(8, 2).T,), {}),
        ((X.clone().requires_grad_(),), {}), ((X,), {"eps": 1e-3}), ((X.to("meta"),), {}),
    ]  # fmt: skip
    signatures = {RMS_NORM.build(*operands, **options)[0] for operands, options in calls}
    assert len(signatures) == len(calls)
    assert RMS_NORM.build(X)[0] == RMS_NORM.build(torch.zeros(2, 8))[0]
