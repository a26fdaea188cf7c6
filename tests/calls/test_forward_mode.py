"""Tangents of forward-mode differentiation survive an await: such a call shares no run."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable

import pytest
import torch
import torch.autograd.forward_ad as forward
from torch import Tensor

import layerzero as lz
from tests import kernels
from tests.native.twins import both_paths as both_paths

WEIGHT = torch.randn(8, 8)


def tripled(x: Tensor) -> Tensor:
    return x * 3


CALLS: dict[str, tuple[Callable[[Tensor], Awaitable[Tensor]], Callable[[Tensor], Tensor]]] = {
    "op": (lambda x: lz.linear(x, WEIGHT), lambda x: x @ WEIGHT.mT),
    "function": (lz.batched(tripled), tripled),
}


@pytest.fixture(scope="module", autouse=True)
def derivatives() -> None:
    """Import what torch imports at its first tangent, which a loop's thread should not wait for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own
        with forward.dual_level():
            tripled(forward.make_dual(torch.ones(1), torch.ones(1)))


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("op", ["rms_norm", "linear", "attention"])
def test_tangents_come_through_blocking_and_bound_calls(op: str, bound: bool) -> None:
    """Of a call that is known from before as well; no kernel is blamed, and plain calls go on as before."""
    args = (
        tuple(torch.randn(1, 2, 4, 8) for _ in range(3)) if op == "attention" else (torch.randn(2, 8), WEIGHT)
    )
    args = (args[0], torch.randn(8)) if op == "rms_norm" else args
    call = lz.bind(op, *args) if bound else getattr(lz.sync, op)
    plain = [call(*args) for _ in range(4)][-1]
    with forward.dual_level():
        direction = torch.randn_like(args[0])
        out = call(forward.make_dual(args[0], direction), *args[1:])
        assert forward.unpack_dual(call(*args)).tangent is None
        tangent = forward.unpack_dual(out).tangent
        assert tangent is not None
    step = 1e-3
    slope = (call(args[0] + step * direction, *args[1:]) - call(args[0] - step * direction, *args[1:])) / (
        2 * step
    )
    torch.testing.assert_close(tangent, slope, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(call(*args), plain)
    selection = lz.select(op, *args)
    assert not any(r.reason.value == "CIRCUIT_OPEN" for c in selection.trace for r in c.rejected)


@pytest.mark.asyncio
@pytest.mark.parametrize("name", CALLS)
async def test_tangents_come_back(name: str) -> None:
    """Of every caller of a crowd, of a kind of call that is known from before, and of one caller alone."""
    call, expected = CALLS[name]
    plain = [torch.randn(1, 8) for _ in range(4)]
    await asyncio.gather(*map(call, plain))
    await asyncio.gather(*map(call, plain))
    with forward.dual_level():
        duals = [forward.make_dual(x, torch.randn(1, 8)) for x in plain]
        outs = [*await asyncio.gather(*map(call, duals)), await call(duals[0])]
        for dual, out in zip([*duals, duals[0]], outs, strict=True):
            given, tangent = forward.unpack_dual(dual).tangent, forward.unpack_dual(out).tangent
            assert given is not None and tangent is not None
            torch.testing.assert_close(tangent, expected(given))
    await asyncio.gather(*map(call, plain))


@pytest.mark.asyncio
async def test_the_plan_of_a_plain_call_serves_no_tangents() -> None:
    """Its kernel may have no derivative: the plan that is known from before answers plain calls alone."""

    def plain_only(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.from_numpy(x.detach().numpy() @ weight.detach().numpy().T)

    async with lz.start(lz.Settings(warm="off")) as runtime:
        runtime.add_kernel(kernels.kernel("plain.linear", plain_only, launch_us=0.001, gradient=False))
        rows = [torch.randn(1, 8) for _ in range(4)]
        for _ in range(3):
            await asyncio.gather(*(lz.linear(row, WEIGHT) for row in rows))
            await lz.linear(rows[0], WEIGHT)
        assert lz.which("linear", rows[0], WEIGHT) == "plain.linear"
        with forward.dual_level():
            dual = forward.make_dual(rows[0], torch.ones(1, 8))
            outs = [await lz.linear(dual, WEIGHT), *await asyncio.gather(lz.linear(dual, WEIGHT))]
            for out in (*outs, lz.sync.linear(dual, WEIGHT)):
                tangent = forward.unpack_dual(out).tangent
                assert tangent is not None
                torch.testing.assert_close(tangent, torch.ones(1, 8) @ WEIGHT.mT)
