"""The compiled products against float64, in every batch and at every edge of their tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor

from layerzero.backends.native import products
from layerzero.ops import table
from layerzero.ops.op import Args
from layerzero.spec import tolerances
from layerzero.spec.kernel import Kernel, rejections
from layerzero.spec.reasons import Reason
from tests.backends import cases

LINEAR, MLP = map(cases.of_any_vendor, products.KERNELS)
MISSING = cases.why_not_here(LINEAR)
pytestmark = [
    *cases.COMPILED,
    pytest.mark.skipif(bool(MISSING), reason=MISSING or "runs here"),
]

# Rows, columns and inner length on and off the edges of tiles, panels, blocks and depths.
SIZES = [
    (1, 1, 1), (1, 16, 384), (5, 15, 383), (6, 17, 385), (7, 33, 64), (12, 32, 1), (95, 48, 800),
    (97, 40, 96), (193, 31, 769), (400, 130, 20),
]  # fmt: skip


def linear_call(rows: int, columns: int, inner: int, *, bias: bool = True) -> Args:
    weight = torch.randn(columns, inner) * inner**-0.5
    return torch.randn(rows, inner), weight, torch.randn(columns) if bias else None


def mlp_call(rows: int, width: int, hidden: int, activation: str = "gelu", *, bias: bool = True) -> Args:
    up, down = torch.randn(hidden, width) * width**-0.5, torch.randn(width, hidden) * hidden**-0.5
    biases = (torch.randn(hidden), torch.randn(width)) if bias else (None, None)
    return torch.randn(rows, width), up, down, *biases, activation


def assert_right(kernel: Kernel, args: Args) -> Tensor:
    """The result is within tolerance of the reference in float64."""
    op = table.get(kernel.op)
    assert rejections(kernel, op.check(args), cases.HERE) == []
    out: Tensor = kernel.load()(*args)
    truth = op.reference(*cases.widened(args))
    assert tolerances.mismatches(out, truth, op.reference(*args)) == []
    return out


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_right_at_every_edge(size: tuple[int, int, int], bias: bool) -> None:
    """Every rest of rows, columns and inner length gives the product within tolerance."""
    torch.manual_seed(0)
    assert_right(LINEAR, linear_call(*size, bias=bias))
    rows, width, hidden = size
    assert_right(MLP, mlp_call(rows, width, hidden, bias=bias))


@pytest.mark.parametrize("activation", products.ACTIVATIONS)
@pytest.mark.parametrize("rows", [3, 400])
def test_every_activation_is_the_named_one(activation: str, rows: int) -> None:
    """The four activations, on few rows and in blocks."""
    torch.manual_seed(1)
    assert_right(MLP, mlp_call(rows, 48, 80, activation))


BITS: list[tuple[Kernel, Callable[..., Args], tuple[int, int, int]]] = [
    (LINEAR, linear_call, (500, 130, 900)),
    (MLP, mlp_call, (500, 72, 900)),
    (MLP, mlp_call, (500, 31, 33)),
]


@pytest.mark.parametrize("activation", products.ACTIVATIONS)
def test_an_activation_is_right_over_its_whole_range(activation: str) -> None:
    """Between its flat ends, at them, and where there is no number."""
    functions: dict[str, Callable[..., Tensor]] = {
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
        "relu": torch.relu,
        "silu": torch.nn.functional.silu,
    }
    function = functions[activation]
    x = torch.cat([torch.linspace(-12, 12, 32000), torch.tensor([-200.0, -88.0, 88.0, 200.0])]).view(-1, 1)
    one = torch.ones(1, 1)
    out = MLP.load()(x, one, one, None, None, activation)
    assert (out - function(x.double())).abs().max() <= 1.5e-6
    ends = torch.tensor([torch.nan, torch.inf, -torch.inf]).view(-1, 1)
    # In float64: in float32 torch's own gelu makes NaN of infinity on some CPUs.
    wanted = function(ends.double()).float()
    torch.testing.assert_close(
        MLP.load()(ends, one, one, None, None, activation), wanted, equal_nan=True, rtol=0, atol=0
    )


@pytest.mark.parametrize(("kernel", "make", "size"), BITS)
def test_a_row_has_its_bits_in_every_batch_and_for_any_number_of_threads(
    kernel: Kernel, make: Callable[..., Args], size: tuple[int, int, int]
) -> None:
    """Rows alone, in parts and all together are bitwise equal, on one thread and on several."""
    torch.manual_seed(2)
    args = make(*size)
    run = kernel.load()
    with threads(1):
        whole = run(*args)
    for count in (1, 2, 3):
        with threads(count):
            assert torch.equal(run(*args), whole)
            for begin, end in ((0, 1), (0, 7), (3, 104), (90, 301), (499, 500)):
                assert torch.equal(run(args[0][begin:end], *args[1:]), whole[begin:end])


def test_a_product_follows_its_weight() -> None:
    """Weights edited behind torch's back, replaced, or made anew at the same address are never remembered."""
    torch.manual_seed(3)
    edits: list[Callable[[Tensor], object]] = [
        lambda weight: weight.data.mul_(-2),
        lambda weight: weight.numpy().fill(0.5),
        lambda weight: weight.add_(1),
        lambda weight: setattr(weight, "data", torch.randn(48, 64)),
    ]
    for _ in range(3):
        args = linear_call(32, 48, 64)
        for edit in edits:
            assert_right(LINEAR, args)
            edit(args[1])
        assert_right(LINEAR, args)
        del args


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_reaches_its_row_alone(value: float) -> None:
    """A NaN or an infinity in one row gives what torch gives there, and leaves the other rows alone."""
    torch.manual_seed(4)
    args = linear_call(20, 40, 50)
    clean = LINEAR.load()(*args)
    args[0][7, 3] = value
    out = LINEAR.load()(*args)
    want = torch.nn.functional.linear(*args)
    torch.testing.assert_close(out[7], want[7], equal_nan=True, rtol=1e-4, atol=1e-4)
    others = [row for row in range(20) if row != 7]
    assert torch.equal(out[others], clean[others])
    relu = mlp_call(4, 8, 8, "relu")
    relu[0][2, 1] = torch.nan
    assert MLP.load()(*relu)[2].isnan().all()


def test_threads_call_at_once() -> None:
    """Calls of several threads share no room."""
    torch.manual_seed(5)
    calls = [mlp_call(rows, 40, 96) for rows in (10, 200, 333, 64)] * 4
    run = MLP.load()
    alone = [run(*args) for args in calls]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda args: run(*args), calls))
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


def test_leading_axes_and_a_single_row_keep_their_shape() -> None:
    """(..., K) gives (..., C), and no axis but the last one counts."""
    torch.manual_seed(6)
    _, weight, bias = linear_call(1, 24, 32)
    x = torch.randn(2, 3, 5, 32)
    out = LINEAR.load()(x, weight, bias)
    assert out.shape == (2, 3, 5, 24)
    assert torch.equal(LINEAR.load()(x[1, 2, 4], weight, bias), out[1, 2, 4])


def test_limits_are_named() -> None:
    """Another dtype, strided operands and gated activations are refused with their reasons."""
    x, weight, bias = linear_call(4, 8, 16)
    check = table.get("linear").check
    half = check((x.bfloat16(), weight.bfloat16(), None))
    assert {r.reason for r in rejections(LINEAR, half, cases.HERE)} == {Reason.DTYPE_UNSUPPORTED}
    strided = check((x, torch.randn(16, 8).t(), bias))
    assert Reason.NOT_CONTIGUOUS in {r.reason for r in rejections(LINEAR, strided, cases.HERE)}
    gated = table.get("mlp").check(
        (torch.randn(4, 8), torch.randn(32, 8), torch.randn(8, 16), None, None, "swiglu")
    )
    assert {r.reason for r in rejections(MLP, gated, cases.HERE)} == {Reason.ACTIVATION_UNSUPPORTED}


def test_what_a_call_takes_beside_its_output_is_stated() -> None:
    """Weights in panels, and hidden rows of as many blocks as there are threads."""
    linear = table.get("linear").check(linear_call(1000, 32, 64))
    assert LINEAR.workspace_bytes is not None and MLP.workspace_bytes is not None
    assert LINEAR.workspace_bytes(linear) == 32 * 64 * 4
    with threads(2):
        few = table.get("mlp").check(mlp_call(10, 32, 64))
        many = table.get("mlp").check(mlp_call(1000, 32, 64))
        assert MLP.workspace_bytes(few) == (2 * 32 * 64 + 10 * 64) * 4
        assert MLP.workspace_bytes(many) == (2 * 32 * 64 + 2 * products.BLOCK * 64) * 4
