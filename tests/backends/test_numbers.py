"""What kernels stumble over: wide windows, scales, NaN, negative views, autocast, mixed dtypes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.ops import table
from layerzero.ops.op import Args, Op
from layerzero.spec.capability import ACTIVATIONS
from layerzero.spec.errors import NoKernelFoundError
from layerzero.spec.kernel import Kernel
from layerzero.spec.settings import Settings
from tests import kernels
from tests.backends import cases


def of(*ops: str) -> pytest.MarkDecorator:
    """Every kernel of these ops that runs here."""
    found = [k for k in cases.RUNNABLE if k.op in ops]
    return pytest.mark.parametrize("kernel", found, ids=[k.id for k in found])


every_kernel = pytest.mark.parametrize("kernel", cases.RUNNABLE, ids=[k.id for k in cases.RUNNABLE])


def with_(op: str, args: Args, **changed: Any) -> Args:
    """The call with some arguments changed, as a user writes it."""
    names = inspect.signature(table.get(op).build).parameters
    built: Args = table.get(op).build(**(dict(zip(names, args, strict=True)) | changed))[1]
    return built


def alone(kernel: Kernel) -> Any:
    """What runs calls on a device that has this kernel alone; None for what selection refuses."""
    op, device = table.get(kernel.op), kernels.device([kernel], Settings(warm="off"))

    def run(args: Args) -> tuple[Tensor, ...] | None:
        own = tuple(a.clone() if at in op.written(args) else a for at, a in enumerate(args))
        try:
            with torch.no_grad():
                outs = cases.as_tuple(device.launch(op, own))
        except NoKernelFoundError:
            return None
        return (*outs, *(own[at] for at in op.written(args)))

    run.device = device  # type: ignore[attr-defined]
    return run


# -- windows --------------------------------------------------------------------------------------------

FAR = (sys.maxsize, 2**31 - 1, 2**31, 1 << 40)


@of("attention", "ragged_attention", "paged_attention")
@pytest.mark.parametrize("causal", [False, True])
def test_a_window_beyond_every_sequence_is_no_window(kernel: Kernel, causal: bool) -> None:
    """No sum of a position and a window overflows, on either side."""
    run, asks = alone(kernel), ("causal",) if causal else ()
    args = cases.call(cases.Case(kernel.op, asks, cases.base_of(kernel)), torch.float32)
    wanted = run(with_(kernel.op, args, window=(-1, -1)))
    near = run(with_(kernel.op, args, window=(2, -1)))
    for far in FAR:
        for window in ((far, far), (-1, far), (far, -1), [far, far]):
            got = run(with_(kernel.op, args, window=window))
            assert got is not None and torch.allclose(got[0], wanted[0], atol=1e-5), window
        if near is not None:
            got = run(with_(kernel.op, args, window=(2, far)))
            assert got is not None and torch.allclose(got[0], near[0], atol=1e-5)


# -- scales ---------------------------------------------------------------------------------------------


@of("attention", "ragged_attention", "paged_attention", "mla_attention")
@pytest.mark.parametrize("scale", [0.0, -0.0, -1.0, -0.3])
def test_a_scale_may_be_zero_or_less(kernel: Kernel, scale: float) -> None:
    """With as many queries as keys, where torch's own causal flag would be used; NaN nowhere."""
    run = alone(kernel)
    for asks in ((), ("causal",), ("causal", "gqa")):
        dims = {"Sq": 9, "Sk": 9} | cases.base_of(kernel)
        args = with_(kernel.op, cases.call(cases.Case(kernel.op, asks, dims), torch.float32), scale=scale)
        got, wanted = run(args), cases.as_tuple(table.get(kernel.op).reference(*args))
        assert (got is None) == ("scale_not_positive" not in kernel.capability.features)
        if got is not None:
            torch.testing.assert_close(got[0], wanted[0], atol=1e-5, rtol=1e-4)


def test_only_kernels_that_were_tried_take_a_scale_of_zero_or_less() -> None:
    """FlashAttention's maxima are those of scores before their scale: a negative one overflows there."""
    own = {"torch", "native", "reference", "triton"}
    claiming = {k.backend for k in cases.KERNELS if "scale_not_positive" in k.capability.features}
    assert claiming <= own
    assert not [
        k.id
        for k in cases.KERNELS
        if "scale_not_positive" in k.capability.features
        and k.backend == "torch" and k.capability.platforms == {"cuda"}
    ]  # fmt: skip


# -- NaN ------------------------------------------------------------------------------------------------


@of("mlp")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_row_of_nan_stays_one(kernel: Kernel, activation: str) -> None:
    """No activation makes a number of NaN, and no other row is touched."""
    case = cases.Case("mlp", (f"act_{activation}",), cases.base_of(kernel))
    args = cases.call(case, torch.float32)
    args[0][3, 5] = torch.nan
    got = alone(kernel)(args)
    if got is not None:
        hidden = got[0].isnan()
        assert hidden[3].all()
        assert not hidden[[0, 1, 2, 4, 5, 6, 7, 8]].any()


@of("moe")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sigmoid_scores_have_ratios_where_all_round_to_zero(kernel: Kernel, dtype: torch.dtype) -> None:
    """Logits of -200 and -201: their scores are 0 in float32, their ratio is e."""
    x, logits, up, down, *rest = cases.call(cases.Case("moe", ("scores_sigmoid",)), dtype)
    logits = torch.full_like(logits, -300.0)
    logits[:, 2], logits[:, 4] = -200.0, -201.0
    got = alone(kernel)((x, logits, up, down, *rest))
    assert (got is None) == (dtype not in cases.dtypes(kernel))
    if got is None:
        return
    ahead = logits.clone()
    ahead[:, 2], ahead[:, 4] = 1.0, 0.0  # softmax of these two alone has the same ratio
    ahead[:, [0, 1, 3]] = -torch.inf
    own = [*rest]
    own[1] = "softmax"
    wanted = table.get("moe").reference(x, ahead, up, down, *own)
    torch.testing.assert_close(got[0], wanted, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)


# -- negative views -------------------------------------------------------------------------------------


@every_kernel
def test_what_only_a_flag_negates_is_read_negated(kernel: Kernel) -> None:
    """Each operand as the imaginary part of a conjugate is: memory with the other sign."""
    op, run, compared = table.get(kernel.op), alone(kernel), 0
    for dtype in cases.dtypes(kernel):
        always = cases.needed(kernel)
        asks = [always, *((*always, ask) for ask in cases.ASKS.get(kernel.op, ()))]
        calls = (cases.call(cases.Case(kernel.op, ask, cases.base_of(kernel)), dtype) for ask in asks)
        taken = next(((own, out) for own in calls if (out := run(own)) is not None), None)
        if taken is None:
            has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
            assert (kernel.backend, dtype, has_bfloat16) == ("onednn", torch.bfloat16, False), dtype
            continue
        args, wanted = taken
        for at, value in enumerate(args):
            if not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            negated = torch._neg_view(-value) if value.itemsize > 1 else value  # pyright: ignore[reportPrivateImportUsage]
            got = (
                run((*args[:at], negated, *args[at + 1 :]))
                if at not in op.writes
                else _into(run, op, args, at)
            )
            for mine, right in zip(got, wanted, strict=True):
                same = torch.allclose(mine.float(), right.float(), atol=1e-2, rtol=1e-2, equal_nan=True)
                assert same, (dtype, at)
            compared += 1
    assert compared


def _into(run: Any, op: Op, args: Args, at: int) -> tuple[Tensor, ...]:
    """The results of a call that writes into a negative view at `at`, which no copy of it would be."""
    own = [a.clone() if position in op.written(args) else a for position, a in enumerate(args)]
    own[at] = torch._neg_view(-own[at])  # pyright: ignore[reportPrivateImportUsage]
    outs = cases.as_tuple(run.device.launch(op, tuple(own)))
    return (*outs, *(own[position] for position in op.written(args)))


# -- autocast -------------------------------------------------------------------------------------------


def _failures(kernel: Kernel) -> Iterator[str]:
    """Calls that fail under autocast of the CPU, in words."""
    op, run = table.get(kernel.op), alone(kernel)
    asks = [(), *((ask,) for ask in cases.ASKS.get(kernel.op, ()))]
    for dtype in cases.dtypes(kernel):
        for ask in asks:
            args = cases.call(cases.Case(kernel.op, ask, cases.base_of(kernel)), dtype)
            for cast in (torch.bfloat16, torch.float16):
                try:
                    with torch.autocast("cpu", dtype=cast):
                        run(args)
                except lz.LayerZeroError as error:
                    yield f"{op.name} {ask} {dtype} under {cast}: {error}"


@every_kernel
def test_autocast_opens_no_circuit(kernel: Kernel) -> None:
    """What a kernel cannot do under autocast is refused, and not met as its failure."""
    assert not list(_failures(kernel))


# -- sums that are returned -----------------------------------------------------------------------------

_SUMS = ("add_rms_norm", "add_layer_norm")


@of(*_SUMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_the_sum_that_is_normed_is_the_one_returned(
    kernel: Kernel, dtype: torch.dtype, wide: torch.dtype
) -> None:
    """Beside weights in a wider dtype, too, and where rounding moves the sum far: rows about 1000."""
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(9, 64, generator=generator).add(500).to(dtype) for _ in range(2))
    plain = kernel.op == "add_rms_norm"
    for kind in (dtype, wide):
        vectors = [torch.randn(64, generator=generator).to(kind) for _ in range(1 if plain else 2)]
        args: Args = (x, residual, *vectors, 1e-6)
        got = alone(kernel)(args)
        if got is None:
            continue
        assert torch.equal(got[1], x + residual)
        normed = table.get(kernel.op.removeprefix("add_")).reference(got[1], *vectors, 1e-6)
        torch.testing.assert_close(got[0], normed, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("op", _SUMS)
def test_no_cast_stands_before_a_sum_that_is_returned(op: str) -> None:
    """The runtime as it comes takes mixed operands, by a kernel that does."""
    x = torch.randn(5, 64).bfloat16()
    weight = torch.randn(64)
    out, total = getattr(lz.sync, op)(x, x, weight)
    record = lz.last_selection()
    assert record is not None and not record.transforms
    assert out.dtype == total.dtype == torch.bfloat16
    assert "reference" not in record.kernel
