"""mlp, every activation, against float64 written out; gradients and bad input."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero.ops.linear.mlp import GATES, MLP
from layerzero.spec.capability import ACTIVATIONS
from tests.ops.calls import call

SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: x.clamp(min=0),
}
GATE = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}


def operands(activation: str, dtype: torch.dtype, lead: tuple[int, ...] = (3,)) -> list[Tensor]:
    """x, w_up, w_down, b_up, b_down with C=12 and F=20."""
    wide = 40 if activation in GATES else 20
    shapes = ((*lead, 12), (wide, 12), (12, 20), (wide,), (12,))
    source = torch.Generator().manual_seed(1)
    return [torch.randn(s, generator=source).to(dtype) for s in shapes]


def oracle(activation: str, x: Tensor, up: Tensor, down: Tensor, b_up: Any, b_down: Any) -> Tensor:
    """The block in float64: the gate stands above what it multiplies."""
    hidden = x.double() @ up.double().T + (0 if b_up is None else b_up.double())
    if activation in GATE:
        hidden = SHAPES[GATE[activation]](hidden[..., :20]) * hidden[..., 20:]
    else:
        hidden = SHAPES[activation](hidden)
    return hidden @ down.double().T + (0 if b_down is None else b_down.double())


def test_every_activation_a_kernel_may_claim_exists() -> None:
    """The kernels' list and the op's are one."""
    for name in ACTIVATIONS:
        assert call(MLP, *operands(name, torch.float32)[:3], activation=name).shape == (3, 12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("lead", [(), (1,), (2, 3)])
def test_mlp_matches_float64(activation: str, dtype: torch.dtype, lead: tuple[int, ...]) -> None:
    """The result is the float64 block's, rounded to the output dtype, with any of the biases."""
    x, up, down, b_up, b_down = operands(activation, dtype, lead)
    for bias in ((b_up, b_down), (None, b_down), (b_up, None), (None, None)):
        wanted = oracle(activation, x, up, down, *bias).to(dtype)
        torch.testing.assert_close(call(MLP, x, up, down, *bias, activation=activation), wanted)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_right(activation: str) -> None:
    """Analytic and numeric gradients of every operand agree in float64."""
    given = [t.requires_grad_() for t in operands(activation, torch.float64, (1,))]
    assert torch.autograd.gradcheck(lambda *a: call(MLP, *a, activation=activation), given)


def test_no_rows_need_no_kernel() -> None:
    """An empty batch or sequence is answered by its shape."""
    x, up, down, *_ = operands("swiglu", torch.float32, (2, 0))
    assert MLP.empty is not None
    assert MLP.empty((x, up, down, None, None, "swiglu")) is not None
    assert call(MLP, x, up, down).shape == (2, 0, 12)


def test_bad_numbers_stay_in_their_row() -> None:
    """NaN shows in the row that holds it and in no other."""
    x, up, down, *_ = operands("swiglu", torch.float32)
    x[1, 0] = math.nan
    out = call(MLP, x, up, down)
    assert torch.isnan(out[1]).all()
    assert torch.isfinite(out[[0, 2]]).all()


X, UP, DOWN, B_UP, B_DOWN = operands("swiglu", torch.float32)
BAD: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    ((None, UP, DOWN), {}, TypeError, "x needs a torch.Tensor"),
    ((X.long(), UP, DOWN), {}, TypeError, "x needs a floating point dtype"),
    ((torch.tensor(1.0), UP, DOWN), {}, ValueError, "x needs a last axis of at least 1"),
    ((X, None, DOWN), {}, TypeError, "w_up needs a torch.Tensor"),
    ((X, UP[0], DOWN), {}, ValueError, "w_up needs 2 dimensions"),
    ((X, UP, DOWN[0]), {}, ValueError, "w_down needs 2 dimensions"),
    ((X, UP, DOWN.T), {}, ValueError, "w_down needs 12 rows"),
    ((X, UP, torch.ones(12, 0)), {}, ValueError, "w_down needs at least 1 column"),
    ((X, UP[:20], DOWN), {}, ValueError, r"w_up needs shape \(40, 12\), \(2F, C\) for swiglu"),
    ((X, UP, DOWN), {"activation": "relu"}, ValueError, r"w_up needs shape \(20, 12\), \(F, C\) for relu"),
    ((X, UP, DOWN, B_UP[:3]), {}, ValueError, "b_up needs 40 elements"),
    ((X, UP, DOWN, B_UP, UP), {}, ValueError, "b_down needs 1 dimensions"),
    ((X, UP, DOWN, None, B_UP), {}, ValueError, "b_down needs 12 elements"),
    ((X, UP, DOWN), {"activation": "swish"}, ValueError, "activation needs one of swiglu"),
    ((X, UP, DOWN), {"activation": None}, TypeError, "activation needs one of swiglu"),
    ((X, UP.to("meta"), DOWN), {}, ValueError, "w_up needs to be on cpu"),
]


@pytest.mark.parametrize(("given", "options", "error", "message"), BAD)
def test_bad_input_is_named(
    given: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Every misfit is a ValueError or TypeError that says which argument, what it needs and what it got."""
    with pytest.raises(error, match=message):
        call(MLP, *given, **options)


def test_the_request_names_activation_sizes_and_bias() -> None:
    """act_<kind>, bias for either bias, N, C and F; a gated block does three products, a plain one two."""
    request = MLP.check(MLP.build(X, UP, DOWN, None, B_DOWN)[1])
    assert request.features == {"act_swiglu", "bias"}
    assert request.dims == {"N": 3, "C": 12, "F": 20}
    plain = MLP.check(MLP.build(X, UP[:20], DOWN, activation="relu")[1])
    assert plain.features == {"act_relu"}
    assert MLP.work(request).flops == 1.5 * MLP.work(plain).flops
