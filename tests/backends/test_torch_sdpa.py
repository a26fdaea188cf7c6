"""What is special about attention out of torch: alignment, empty rows, structure, no global state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero.ops import table
from layerzero.ops.op import Args
from layerzero.spec.hardware import Hardware
from layerzero.spec.kernel import Kernel, rejections
from layerzero.spec.reasons import Reason
from tests.backends import cases

ATTENTION = table.get("attention")
BY_ID = {k.id: k for k in cases.KERNELS}
# Of any lengths; what takes few of them is tested by itself.
HERE = [k for k in cases.RUNNABLE if k.op == "attention" and "Sq" not in cases.base_of(k)]
on_cpu = pytest.mark.parametrize("kernel", HERE, ids=[k.id for k in HERE])
GPU_KERNELS = [k for k in cases.KERNELS if k.op == "attention" and "cuda" in k.capability.platforms]


def build(*args: Tensor, **named: Any) -> Args:
    built: Args = ATTENTION.build(*args, **named)[1]
    return built


def first(out: Any) -> Tensor:
    tensor: Tensor = out[0] if isinstance(out, tuple) else out
    return tensor


def heads(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@on_cpu
def test_causal_is_bottom_right(kernel: Kernel) -> None:
    """Two queries before five keys: the last sees all five, the first four."""
    q, k, v = heads(1, 2, 2, 8), heads(1, 2, 5, 8, seed=1), heads(1, 2, 5, 8, seed=2)
    run = kernel.load()
    out = first(run(*build(q, k, v, is_causal=True)))
    last = first(run(*build(q[:, :, 1:], k, v)))
    earlier = first(run(*build(q[:, :, :1], k[:, :, :4], v[:, :, :4])))
    torch.testing.assert_close(out, torch.cat([earlier, last], 2))


@on_cpu
def test_one_causal_query_sees_every_key(kernel: Kernel) -> None:
    """A decode step is the same with and without the flag."""
    q, k, v = heads(2, 4, 1, 16), heads(2, 4, 33, 16, seed=1), heads(2, 4, 33, 16, seed=2)
    run = kernel.load()
    assert torch.equal(first(run(*build(q, k, v, is_causal=True))), first(run(*build(q, k, v))))


@on_cpu
def test_a_future_token_changes_nothing(kernel: Kernel) -> None:
    """Keys and values after a query leave its bits alone, even when they are huge."""
    q, k, v = (heads(1, 2, 40, 16, seed=s) for s in range(3))
    run = kernel.load()
    before = first(run(*build(q, k, v, is_causal=True)))
    k[:, :, 25:], v[:, :, 25:] = 1e4, -1e4
    after = first(run(*build(q, k, v, is_causal=True)))
    assert torch.equal(before[:, :, :25], after[:, :, :25])
    assert not torch.equal(before[:, :, 25:], after[:, :, 25:])


@on_cpu
def test_masked_content_is_irrelevant(kernel: Kernel) -> None:
    """What a mask hides may be anything finite."""
    q, k, v = (heads(2, 2, 9, 16, seed=s) for s in range(3))
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    mask[0, ..., 5:] = False
    run = kernel.load()
    before = first(run(*build(q, k, v, attn_mask=mask)))
    k[0, :, 5:], v[0, :, 5:] = 300.0, -300.0
    assert torch.equal(before, first(run(*build(q, k, v, attn_mask=mask))))


@on_cpu
@pytest.mark.parametrize("how", ["bool", "float", "causal", "window"])
def test_rows_that_see_nothing_are_zero(kernel: Kernel, how: str) -> None:
    """A query without a key gives zeros, and -inf where the log-sum-exp is asked for."""
    q, k, v = heads(1, 2, 6, 16), heads(1, 2, 4, 16, seed=1), heads(1, 2, 4, 16, seed=2)
    mask = torch.ones(6, 4, dtype=torch.bool)
    mask[:2] = False
    named: dict[str, dict[str, Any]] = {
        "bool": {"attn_mask": mask},
        "float": {"attn_mask": torch.zeros(6, 4).masked_fill(~mask, -torch.inf)},
        "causal": {"is_causal": True},
        "window": {"window": (1, 0)},
    }
    args = build(q, k, v, **named[how], return_lse="lse" in kernel.capability.features)
    out = kernel.load()(*args)
    assert torch.equal(first(out)[:, :, :2], torch.zeros(1, 2, 2, 16))
    assert first(out)[:, :, 2:].abs().min() > 0
    if isinstance(out, tuple):
        assert torch.isneginf(out[1][:, :, :2]).all() and torch.isfinite(out[1][:, :, 2:]).all()


@on_cpu
def test_equal_values_come_out_as_they_went_in(kernel: Kernel) -> None:
    """Weights sum to one: constant values give the constant."""
    q, k = heads(1, 4, 50, 32) * 10, heads(1, 4, 70, 32, seed=1) * 10
    out = first(kernel.load()(*build(q, k, torch.full((1, 4, 70, 32), 0.75), is_causal=True)))
    torch.testing.assert_close(out, torch.full_like(out, 0.75))


def test_dropout_keeps_the_mean_and_follows_the_seed() -> None:
    """Dropout zeroes weights and scales the rest; the same seed drops the same."""
    kernel = BY_ID["torch.attention.sdpa_cpu"]
    q, k = heads(1, 1, 64, 8) * 0.01, heads(1, 1, 512, 8, seed=1)
    args = build(q, k, torch.ones(1, 1, 512, 8), dropout_p=0.5)
    torch.manual_seed(3)
    one = first(kernel.load()(*args))
    torch.manual_seed(3)
    assert torch.equal(one, first(kernel.load()(*args)))
    assert one.std() > 0.01, "rounding alone would be a thousandth of that"
    assert abs(one.mean().item() - 1.0) < 0.05
    refused = rejections(BY_ID["torch.attention.sdpa_flash_cpu"], ATTENTION.check(args), cases.HERE)
    assert [r.reason for r in refused] == [Reason.DROPOUT_UNSUPPORTED]


def test_a_learned_mask_gets_its_gradient_or_a_refusal() -> None:
    """Kernels that give a mask no gradient refuse it; the default's equals the reference's."""
    q, k, v = (heads(1, 2, 5, 8, seed=s).double() for s in range(3))
    mask = heads(5, 5, seed=4).double().requires_grad_()
    args = build(q, k, v, attn_mask=mask)
    reasons = rejections(BY_ID["torch.attention.sdpa_flash_cpu"], ATTENTION.check(args), cases.HERE)
    assert [r.field for r in reasons] == ["mask_grad"]
    kernel = BY_ID["torch.attention.sdpa_cpu"]
    assert not rejections(kernel, ATTENTION.check(args), cases.HERE)
    ours = torch.autograd.grad(first(kernel.load()(*args)).sum(), mask)[0]
    torch.testing.assert_close(ours, torch.autograd.grad(ATTENTION.reference(*args).sum(), mask)[0])


def test_a_gradient_through_the_lse_is_refused() -> None:
    """torch's kernels return a log-sum-exp without a gradient: only the reference takes that call."""
    q = heads(1, 2, 5, 8).requires_grad_()
    request = ATTENTION.check(build(q, q, q, return_lse=True))
    accepting = [k.id for k in HERE if not rejections(k, request, cases.HERE)]
    assert accepting == ["reference.attention"]


@on_cpu
def test_no_kernel_switches_torch_for_others(kernel: Kernel) -> None:
    """torch's process-wide switches stand as they stood."""

    def switches() -> tuple[bool, ...]:
        cuda = torch.backends.cuda
        return (
            cuda.flash_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        )

    before = switches()
    q = heads(1, 2, 5, 8)
    kernel.load()(*build(q, q, q, is_causal=True))
    assert switches() == before


H200 = Hardware(
    platform="cuda", device="cuda:0", name="H200", vendor="nvidia", sm=90, torch="2.11.0", cuda="13.0"
)


@pytest.mark.parametrize(
    ("kernel", "asks", "dims", "reason"),
    [
        ("sdpa_flash", (), {"D": 320}, Reason.HEAD_DIM_TOO_LARGE),
        ("sdpa_flash", (), {"D": 84}, Reason.HEAD_DIM_ALIGNMENT),
        ("sdpa_flash", ("mask_bool",), {}, Reason.MASK_BOOL_UNSUPPORTED),
        ("sdpa_efficient", ("gqa",), {}, Reason.GQA_UNSUPPORTED),
        ("sdpa_cudnn", ("mask_bool", "empty_rows"), {}, Reason.EMPTY_ROWS_UNSAFE),
        ("sdpa", ("mask_bool", "empty_rows"), {}, Reason.EMPTY_ROWS_UNSAFE),
        ("sdpa_cudnn", ("softcap",), {}, Reason.SOFTCAP_UNSUPPORTED),
    ],
)
def test_what_cuda_kernels_refuse(
    kernel: str, asks: tuple[str, ...], dims: dict[str, int], reason: Reason
) -> None:
    """Head sizes, masks and groups that a CUDA kernel cannot take are its reasons, on any machine."""
    args = cases.call(cases.Case("attention", asks, dims), torch.bfloat16)
    request = ATTENTION.check(args).replace(platform="cuda")
    assert [r.reason for r in rejections(BY_ID[f"torch.attention.{kernel}"], request, H200)] == [reason]


@pytest.mark.parametrize("size", [65535, 65536])
def test_batch_times_heads_has_an_edge(size: int) -> None:
    """65535 thread blocks are launched, one more is refused."""
    request = ATTENTION.check(cases.call(cases.Case("attention"), torch.bfloat16)).replace(platform="cuda")
    request = request.replace(dims={**request.dims, "B": size, "Hq": 1, "Hk": 1, "G": 1})
    got = [r.reason for r in rejections(BY_ID["torch.attention.sdpa_flash"], request, H200)]
    assert got == ([] if size == 65535 else [Reason.CUDA_BLOCK_LIMIT_EXCEEDED])
