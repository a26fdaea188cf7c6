"""What torch switches for its own functions is heard: implementations of attention, defaults, subclasses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import layerzero as lz
from layerzero.ops import table
from tests.backends import cases
from tests.native.twins import both_paths as both_paths
from tests.operators.calls import call_of
from tests.ops.calls import parts

Q = torch.randn(2, 4, 7, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def settled() -> Iterator[Any]:
    """A choice that does not change when something has been loaded in the background."""
    with lz.start(lz.Settings(warm="off")) as runtime:
        yield runtime


def chosen() -> str:
    """The kernel of the last call."""
    selection = lz.last_selection()
    assert selection is not None
    return selection.kernel


def test_only_the_implementations_that_sdpa_kernel_names_are_taken() -> None:
    """By a reason code, in a call that was made before outside, and never afterwards."""
    told: Any = None
    for _ in range(3):
        lz.sync.attention(Q, Q, Q, is_causal=True)
        outside = chosen()
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            got = lz.sync.attention(Q, Q, Q, is_causal=True)
            assert chosen() in ("torch.attention.sdpa_flash_cpu", "torch.attention.by_sequence")
            torch.testing.assert_close(got, scaled_dot_product_attention(Q, Q, Q, is_causal=True))
            asyncio.run(lz.attention(Q, Q, Q, is_causal=True))
            assert chosen() in ("torch.attention.sdpa_flash_cpu", "torch.attention.by_sequence")
            torch.ops.layerzero.attention(Q, Q, Q, is_causal=True)
            assert chosen() in ("torch.attention.sdpa_flash_cpu", "torch.attention.by_sequence")
            told = lz.explain("attention", Q, Q, Q, is_causal=True)
        with sdpa_kernel([SDPBackend.MATH]):
            lz.sync.attention(Q, Q, Q, is_causal=True)
            assert chosen() in (
                "torch.attention.sdpa_cpu",
                "torch.attention.sdpa_math",
                "reference.attention",
            )
        lz.sync.attention(Q, Q, Q, is_causal=True)
        assert chosen() == outside
    rejected = {str(r.reason) for r in told.selection.candidate("reference.attention").rejected}
    assert rejected == {"SDPA_BACKEND_DISABLED"}
    assert "sdpa_kernel needs math, got math switched off" in str(told)


def test_a_list_that_nothing_here_is_on_is_refused_with_what_would_help() -> None:
    """The memory-efficient kernel has no build for the CPU."""
    with (
        sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]),
        pytest.raises(lz.NoKernelFoundError, match="sdpa_efficient: PLATFORM_MISMATCH"),
    ):
        lz.sync.attention(Q, Q, Q)
    lz.sync.rms_norm(Q)  # other ops have no such implementations


@pytest.mark.parametrize("name", table.names())
def test_default_dtype_and_device_change_no_result(name: str) -> None:
    """What an op makes on its way has the dtype and device of its arguments."""
    call = call_of(cases.Case(name))
    assert call is not None
    op = getattr(lz.sync, name)

    def fresh() -> dict[str, Any]:
        return {k: v.clone() if isinstance(v, Tensor) else v for k, v in call.named().items()}

    wanted = parts(op(**fresh()))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            got = parts(op(**fresh()))
            traced = parts(call.operator(*call.flat)) if not call.op.writes else ()
    finally:
        torch.set_default_dtype(before)
    for out, right in zip((*got, *traced), (*wanted, *wanted[: len(traced)]), strict=True):
        assert out.dtype is right.dtype and out.device == right.device
        torch.testing.assert_close(out.float(), right.float(), rtol=1e-4, atol=1e-5)


def test_deterministic_algorithms_are_asked_for() -> None:
    """By the name of torch's own switch."""
    torch.use_deterministic_algorithms(True)
    try:
        lz.sync.rms_norm(Q)
        selection = lz.last_selection()
        assert selection is not None and "deterministic" in selection.request.modes
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_lower_precision_of_products_is_torchs() -> None:
    """`set_float32_matmul_precision` changes a product as it changes torch's own."""
    x, weight = torch.randn(64, 128), torch.randn(32, 128)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        got = lz.sync.linear(x, weight, backend="torch")
        assert torch.equal(got, torch.nn.functional.linear(x, weight))
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.filterwarnings("ignore:.*is_fx_tracing")
def test_jagged_tensors_are_rows_and_sequences() -> None:
    """Norms and products take their values, attention each of the sequences; gradients follow."""
    weight = torch.randn(8)
    rows = [torch.randn(3, 8), torch.randn(5, 8)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    out = lz.sync.rms_norm(nested, weight)
    for got, row in zip(out.unbind(), rows, strict=True):
        torch.testing.assert_close(got, lz.sync.rms_norm(row, weight))
    sequences = [torch.randn(n, 4, 16, requires_grad=True) for n in (3, 1, 6)]
    heads = torch.nested.as_nested_tensor(sequences, layout=torch.jagged)
    for layout in ("BHSD", "BSHD"):
        q = heads.transpose(1, 2) if layout == "BHSD" else heads
        seen = lz.sync.attention(q, q, q, is_causal=True, layout=layout)
        if layout == "BHSD":
            seen = seen.transpose(1, 2)
        for got, one in zip(seen.unbind(), sequences, strict=True):
            alone = one[None]
            wanted = lz.sync.attention(alone, alone, alone, is_causal=True, layout="BSHD")[0]
            torch.testing.assert_close(got, wanted)
        seen.values().sum().backward()
    assert all(s.grad is not None for s in sequences)
    with pytest.raises(TypeError, match="attention of jagged tensors needs no alibi_slopes"):
        lz.sync.attention(heads, heads, heads, layout="BSHD", alibi_slopes=torch.ones(4))
    with pytest.raises(TypeError, match="q needs its jagged axis where BHSD has tokens, 2, got 1"):
        lz.sync.attention(heads, heads, heads)
    # Parts of padded rows lie with gaps, and as many values may be other sequences.
    starts, lengths = torch.tensor([0, 2]), torch.tensor([3, 4])
    gaps = torch.nested.narrow(torch.randn(2, 7, 4, 16), 1, starts, lengths, layout=torch.jagged)
    with pytest.raises(TypeError, match="q needs sequences without gaps between them"):
        lz.sync.attention(gaps, gaps, gaps, layout="BSHD")
    dense = gaps.contiguous()
    for got, one in zip(
        lz.sync.attention(dense, dense, dense, layout="BSHD").unbind(), dense.unbind(), strict=True
    ):
        torch.testing.assert_close(got, lz.sync.attention(one[None], one[None], one[None], layout="BSHD")[0])
    k, same, v = (
        torch.nested.as_nested_tensor([torch.randn(n, 4, 16) for n in each], layout=torch.jagged)
        for each in ((3, 4), (3, 4), (4, 3))
    )
    assert lz.sync.attention(k, k, same, layout="BSHD").shape[0] == 2
    with pytest.raises(TypeError, match=r"v needs sequences as long as k's, got offsets \[0, 4, 7\] and"):
        lz.sync.attention(k, k, v, layout="BSHD")


def test_an_unknown_subclass_is_refused_by_name() -> None:
    """One that has no rule for what the op is made of, blocking, awaited and as an operator."""

    class Odd(Tensor):
        @staticmethod
        def __new__(cls: Any, inner: Tensor) -> Any:
            return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner: Tensor) -> None: ...

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            raise NotImplementedError(f"Odd has no {func}")

    odd = Odd(torch.randn(2, 8))
    named = "rms_norm needs tensors for which plain torch can compute it, got Odd: Odd has no aten"
    for run in (lz.sync.rms_norm, torch.ops.layerzero.rms_norm, lambda x: asyncio.run(lz.rms_norm(x))):
        with pytest.raises(TypeError, match=named):
            run(odd)
