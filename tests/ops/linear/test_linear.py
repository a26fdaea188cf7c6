"""linear against float64, its empty cases, gradients and bad input."""

import math
from typing import Any

import pytest
import torch

from layerzero import sync
from layerzero.formats.errors import FormatDtypeError
from layerzero.ops.linear.linear import LINEAR
from layerzero.spec.reasons import Reason
from tests.ops.calls import call


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lead", [(), (1,), (5,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("biased", [True, False])
def test_linear_matches_float64(dtype: torch.dtype, lead: tuple[int, ...], biased: bool) -> None:
    """The result is the float64 product, rounded to the output dtype."""
    x, w = torch.randn(*lead, 37, dtype=dtype), torch.randn(19, 37, dtype=dtype)
    b = torch.randn(19, dtype=dtype) if biased else None
    oracle = x.double() @ w.double().T + (0 if b is None else b.double())
    torch.testing.assert_close(call(LINEAR, x, w, b), oracle.to(dtype))


def test_sums_are_float32() -> None:
    """A sum that float16 could not hold half way through is right when its end fits."""
    x = torch.tensor([[60000.0, 60000.0, -60000.0, -60000.0]], dtype=torch.float16)
    assert call(LINEAR, x, torch.ones(1, 4, dtype=torch.float16)).item() == 0.0


def test_strided_operands_are_taken() -> None:
    """Transposed rows and a transposed weight give what their copies give."""
    x, w = torch.randn(8, 4).T, torch.randn(8, 6).T
    torch.testing.assert_close(call(LINEAR, x, w), call(LINEAR, x.contiguous(), w.contiguous()))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_numbers_stay_in_their_row(bad: float) -> None:
    """NaN and infinity show in the row that holds them and in no other."""
    x = torch.ones(3, 4)
    x[1, 1] = bad
    out = call(LINEAR, x, torch.ones(2, 4))
    assert not torch.isfinite(out[1]).any()
    assert torch.isfinite(out[[0, 2]]).all()


def test_empty_calls_need_no_kernel() -> None:
    """No rows, no columns: nothing; no inputs: the bias."""
    bias = torch.arange(3.0)
    for x, w, b, wanted in (
        (torch.empty(0, 4), torch.ones(3, 4), bias, torch.empty(0, 3)),
        (torch.empty(2, 0, 4), torch.ones(3, 4), None, torch.empty(2, 0, 3)),
        (torch.ones(2, 4), torch.ones(0, 4), None, torch.empty(2, 0)),
        (torch.ones(2, 0), torch.ones(3, 0), bias, bias.expand(2, 3)),
        (torch.ones(2, 0), torch.ones(3, 0), None, torch.zeros(2, 3)),
    ):
        assert LINEAR.empty is not None
        assert LINEAR.empty((x, w, b)) is not None
        assert torch.equal(call(LINEAR, x, w, b), wanted)


def test_gradients_are_right() -> None:
    """Analytic and numeric gradients of every operand agree in float64."""
    operands = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 4), (3, 4), (3,))]
    assert torch.autograd.gradcheck(lambda x, w, b: call(LINEAR, x, w, b), operands)


X, W, X8 = torch.ones(2, 4), torch.ones(3, 4), torch.ones(2, 8)
BAD: list[tuple[tuple[Any, ...], type[Exception], str]] = [
    (([1.0], W), TypeError, "x needs a torch.Tensor, got list"),
    ((torch.tensor(1.0), W), ValueError, "x needs at least 1 dimension"),
    ((X.long(), W), TypeError, "x needs a floating point dtype, got int64"),
    ((X, None), TypeError, "weight needs a torch.Tensor, got NoneType"),
    ((X, torch.ones(4)), ValueError, "weight needs 2 dimensions, got 1"),
    ((X, W.long()), TypeError, "weight needs a floating point dtype"),
    ((X, W, W[:, 0].to(torch.float8_e5m2)), TypeError, "bias needs numbers, not codes .* got float8_e5m2"),
    ((X, torch.ones(3, 5)), ValueError, "x needs a last axis of 5"),
    ((X, W, torch.ones(4)), ValueError, "bias needs 3 elements"),
    ((X, W, 0.0), TypeError, "bias needs a torch.Tensor, got float"),
    ((X, W.to("meta")), ValueError, "weight needs to be on cpu like x"),
    ((X, W, torch.ones(3, device="meta")), ValueError, "bias needs to be on cpu like x"),
]


@pytest.mark.parametrize(("operands", "error", "message"), BAD)
def test_bad_input_is_named(operands: tuple[Any, ...], error: type[Exception], message: str) -> None:
    """Every misfit is a ValueError or TypeError that says which argument, what it needs and what it got."""
    with pytest.raises(error, match=message):
        call(LINEAR, *operands)


CODES = {"w": torch.ones(16, 8), "vector": torch.ones(8), "experts": torch.ones(2, 16, 8)}


@pytest.mark.parametrize(
    ("name", "argument", "run"),
    [
        ("linear", "weight", lambda w: sync.linear(X8, w["w"])),
        ("mlp", "w_up", lambda w: sync.mlp(X8, w["w"], torch.ones(8, 16), activation="gelu")),
        ("mlp", "w_down", lambda w: sync.mlp(X8, torch.ones(8, 8), w["w"][:8], activation="gelu")),
        ("rms_norm_linear", "weight", lambda w: sync.rms_norm_linear(X8, None, w["w"])),
        (
            "linear_cross_entropy",
            "weight",
            lambda w: sync.linear_cross_entropy(X8, w["w"], torch.tensor([0, 1])),
        ),
        ("moe", "w_up", lambda w: sync.moe(X8, X8[:, :2], w["experts"], torch.ones(2, 8, 8), top_k=1)),
        ("rms_norm", "weight", lambda w: sync.rms_norm(X8, w["vector"])),
        ("layer_norm", "bias", lambda w: sync.layer_norm(X8, None, w["vector"])),
    ],
)
def test_codes_without_their_scales_are_no_weights(name: str, argument: str, run: Any) -> None:
    """float8 holds numbers over a scale: every op of plain weights names the operand and the reason."""
    with pytest.raises(FormatDtypeError, match=rf"^{argument} needs numbers, not codes") as raised:
        run({each: weight.to(torch.float8_e4m3fn) for each, weight in CODES.items()})
    assert raised.value.reason is Reason.SCALE_LAYOUT_MISMATCH


def test_the_request_holds_sizes_and_the_bias() -> None:
    """N rows, C columns, K inputs; bias is a feature."""
    request = LINEAR.check(LINEAR.build(torch.ones(2, 5, 4), W, torch.ones(3))[1])
    assert request.dims == {"N": 10, "C": 3, "K": 4}
    assert request.features == {"bias"}
    assert LINEAR.work(request).flops == 2 * 10 * 3 * 4
