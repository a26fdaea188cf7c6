"""Sliding windows, one-sided and two-sided, and which of window, mask and causal go together."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
import layerzero.sync
from layerzero.ops import table
from layerzero.spec.hardware import hypothetical_gpu
from layerzero.spec.kernel import Kernel, rejections
from layerzero.spec.reasons import Reason
from tests.backends import cases

ATTENTION = table.get("attention")
WINDOWS = [(3, 0), (3, -1), (-1, 3), (0, 0), (0, 4), (2, 5), (64, 64), (-1, -1)]


@pytest.fixture(autouse=True)
def own_runtime() -> Iterator[None]:
    """A runtime of the test's own, with nothing loading behind it."""
    with lz.start(lz.Settings(warm="off")):
        yield


def band(queries: int, keys: int, left: int, right: int, causal: bool) -> Tensor:
    """The mask that a window means, (Sq, Sk), from its definition."""
    ahead = torch.arange(keys) - (torch.arange(queries)[:, None] + keys - queries)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if left >= 0:
        seen &= ahead >= -left
    if right >= 0:
        seen &= ahead <= right
    return seen & (ahead <= 0) if causal else seen


def heads(count: int, length: int, width: int = 32) -> Tensor:
    """(1, count, length, width) of normal numbers."""
    return torch.randn(1, count, length, width, generator=torch.Generator().manual_seed(length + count))


@pytest.mark.parametrize("size", [256, 1024])
@pytest.mark.parametrize("queries", [1, 1536])
def test_windows_of_model_sizes_equal_the_band(size: int, queries: int) -> None:
    """E6.18: prefill and decode with windows of 256 and 1,024, in every kernel that takes them."""
    q, k, v = heads(2, queries), heads(1, 1536), heads(1, 1536) * 2
    window = (size - 1, 0)
    mask = band(queries, 1536, *window, False)
    want = ATTENTION.reference(q.double(), k.double(), v.double(), mask).float()
    record = lz.select("attention", q, k, v, window=window)
    assert len(record.order) >= 3 and "window" in record.request.features
    for name in record.order:
        out = layerzero.sync.attention(q, k, v, window=window, backend=name)
        torch.testing.assert_close(out, want, atol=2e-5, rtol=1e-4)


WITH_WINDOWS = [
    k for k in cases.RUNNABLE
    if "window" in k.capability.features and k.op in ("attention", "ragged_attention", "paged_attention")
]  # fmt: skip


@pytest.mark.parametrize("kernel", WITH_WINDOWS, ids=[k.id for k in WITH_WINDOWS])
def test_a_kernel_with_windows_has_one_sided_ones(kernel: Kernel) -> None:
    """`window` is one feature because whoever has it takes bounds on either side alone, and none."""
    op = table.get(kernel.op)
    asks = ("prefill",) if kernel.op == "paged_attention" else ()
    args = list(cases.call(cases.Case(kernel.op, asks, cases.base_of(kernel)), torch.float32))
    names = list(inspect.signature(op.build).parameters)
    run = kernel.load()
    compared = 0
    for window in WINDOWS:
        for causal in (False, True):
            args[names.index("window")], args[names.index("is_causal")] = window, causal
            if rejections(kernel, op.check(tuple(args)), cases.HERE):
                continue
            torch.testing.assert_close(run(*args), op.reference(*args), atol=2e-5, rtol=1e-4)
            compared += 1
    assert compared >= 4, f"{kernel.id} takes {compared} of these calls"


def flags(window: bool, mask: str, causal: bool, combine: bool) -> dict[str, Any]:
    """The keywords of one combination over 6 queries and 9 keys."""
    generator = torch.Generator().manual_seed(8)
    named: dict[str, Any] = {"is_causal": causal, "combine_mask": combine}
    if window:
        named["window"] = (4, 1)
    if mask == "bool":
        named["attn_mask"] = torch.rand(6, 9, generator=generator) > 0.3
    if mask == "float":
        named["attn_mask"] = torch.randn(6, 9, generator=generator)
    return named


# Every combination of what hides keys, and whether it is legal: only a mask beside `is_causal` has two
# readings, so it has to be asked for.
LEGAL = [
    (window, mask, causal, combine, mask == "none" or not causal or combine)
    for window in (False, True)
    for mask in ("none", "bool", "float")
    for causal in (False, True)
    for combine in (False, True)
]


@pytest.mark.parametrize(("window", "mask", "causal", "combine", "legal"), LEGAL)
def test_legal_combinations_mean_one_mask_and_illegal_ones_are_refused(
    window: bool, mask: str, causal: bool, combine: bool, legal: bool
) -> None:
    """E6.18: what is accepted equals one explicit mask in every kernel that takes it; the rest is named."""
    q, k, v = heads(4, 6), heads(2, 9), heads(2, 9) * 2
    named = flags(window, mask, causal, combine)
    if not legal:
        with pytest.raises(ValueError, match="attn_mask with is_causal=True needs combine_mask=True"):
            lz.select("attention", q, k, v, **named)
        return
    seen = band(6, 9, *((4, 1) if window else (-1, -1)), causal)
    bias = torch.zeros(6, 9, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    given = named.get("attn_mask")
    if given is not None:
        bias = bias.masked_fill(~given, -torch.inf) if mask == "bool" else bias + given
    want = ATTENTION.reference(q.double(), k.double(), v.double(), bias).float()
    order = lz.select("attention", q, k, v, **named).order
    assert order
    for name in order:
        out = layerzero.sync.attention(q, k, v, backend=name, **named)
        torch.testing.assert_close(out, want, atol=2e-5, rtol=1e-4)


def test_a_kernel_without_windows_says_so() -> None:
    """FlashInfer's prefill has none: a call with one names WINDOW_UNSUPPORTED, not a wrong result."""
    q = torch.zeros(1, 128, 4, 64, dtype=torch.bfloat16)
    request = ATTENTION.check(ATTENTION.build(q, q, q, window=(64, 0), layout="BSHD")[1])
    request = request.replace(platform="cuda")
    kernel = next(k for k in cases.KERNELS if k.id == "flashinfer.attention.fa2")
    assert [r.reason for r in rejections(kernel, request, hypothetical_gpu(90))] == [
        Reason.WINDOW_UNSUPPORTED
    ]
