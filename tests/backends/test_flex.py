"""Flex attention on the CPU: compiled by shape, right for whatever its blocks leave out, never in a call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
import layerzero.sync
from layerzero.backends.torch_kernels import flex_programs as programs
from layerzero.backends.torch_kernels.flex import BATCHES, KERNELS, LENGTHS
from layerzero.backends.torch_kernels.flex_programs import BLOCK
from layerzero.ops import table
from layerzero.runtime import current
from layerzero.selection.key import grid
from layerzero.spec.hardware import probe
from layerzero.spec.kernel import rejections
from layerzero.spec.reasons import Reason
from tests.backends.cases import why_not_here

ATTENTION = table.get("attention")
FLEX = KERNELS[0]
HERE = probe("cpu")


@pytest.fixture(scope="module")
def flex() -> Any:
    """The kernel's callable, where torch can compile it."""
    missing = why_not_here(FLEX)
    if missing:
        pytest.skip(missing)
    return FLEX.load()


def operands(queries: int, keys: int, width: int = 16, batch: int = 2) -> list[Tensor]:
    """Four query heads over two key heads."""
    generator = torch.Generator().manual_seed(queries + keys)
    shapes = ((batch, 4, queries, width), (batch, 2, keys, width), (batch, 2, keys, width))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def error(flex: Any, q: Tensor, k: Tensor, v: Tensor, **flags: Any) -> float:
    """The largest difference of a call to the reference in float64, in units of what is allowed."""
    args = ATTENTION.build(q, k, v, **flags)[1]
    assert not rejections(FLEX, ATTENTION.check(args), HERE)
    wide = tuple(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
    got, truth = flex(*args).double(), ATTENTION.reference(*wide)
    assert got.shape == truth.shape
    return float(((got - truth).abs() / (2e-5 + 1e-5 * truth.abs())).max())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (0, 0), (3, 2), (130, -1), (-1, 130), (129, 300), (1000, 1000)])
def test_every_band_of_one_shape_is_one_program(
    flex: Any, causal: bool, window: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One-sided, two-sided, narrower and wider than a block: data of the same program."""
    q, k, v = operands(256, 384)
    flex(*ATTENTION.build(q, k, v)[1])
    monkeypatch.setattr(programs, "_compiled", lambda shape: pytest.fail(f"compiled {shape}"))
    assert error(flex, q, k, v, is_causal=causal, window=window, scale=0.3) <= 1


def test_queries_before_the_first_key_see_nothing(flex: Any) -> None:
    """More queries than keys: whole blocks without a key give zeros."""
    q, k, v = operands(384, 128)
    assert error(flex, q, k, v, is_causal=True) <= 1
    args = ATTENTION.build(q, k, v, is_causal=True)[1]
    assert not flex(*args)[:, :, : 384 - 128].any()


def test_block_sparse_masks_and_random_ones(flex: Any) -> None:
    """Blocks that a mask leaves out, leaves whole and cuts; one mask for all heads, or each head its own."""
    q, k, v = operands(256, 256)
    generator = torch.Generator().manual_seed(3)
    blocks = torch.tensor([[True, False], [True, True]]).repeat_interleave(BLOCK, 0)
    blocks = blocks.repeat_interleave(BLOCK, 1)
    cut = blocks & (torch.rand(2, 4, 256, 256, generator=generator) > 0.3)
    cut[1, 2, 7] = False
    for mask in (blocks, cut, cut[:, :1], cut[0]):
        assert error(flex, q, k, v, attn_mask=mask) <= 1
    assert error(flex, q, k, v, attn_mask=cut, is_causal=True, combine_mask=True, window=(50, 0)) <= 1


def test_what_lies_in_a_hidden_block_does_not_matter(flex: Any) -> None:
    """A block that none of a block of queries sees is not read for them: not even NaN changes a bit."""
    q, k, v = operands(256, 384)
    flags: dict[str, Any] = {"is_causal": True, "window": (BLOCK - 1, 0)}
    want = flex(*ATTENTION.build(q, k, v, **flags)[1])[:, :, BLOCK:]
    k[:, :, :BLOCK], v[:, :, :BLOCK] = torch.nan, torch.nan
    got = flex(*ATTENTION.build(q, k, v, **flags)[1])
    assert torch.equal(got[:, :, BLOCK:], want) and got[:, :, :BLOCK].isnan().any()


def test_soft_cap_and_slopes_are_data(flex: Any) -> None:
    """Other numbers of one kind, and slopes of each sequence, are the same program."""
    q, k, v = operands(128, 256)
    for cap, slopes in ((1.5, torch.rand(4)), (20.0, torch.rand(2, 4)), (3.0, torch.rand(4).bfloat16())):
        assert error(flex, q, k, v, softcap=cap, alibi_slopes=slopes.float(), is_causal=True) <= 1
    made = [shape for shape in programs.PROGRAMS._made if shape[3:5] == (128, 256)]
    assert len(made) == 1 and made[0].softcap and not made[0].masked


def test_operands_that_are_one_tensor_do_not_spoil_a_program(flex: Any) -> None:
    """The first call with one tensor for all three, the next with three."""
    q = torch.randn(1, 4, 128, 16)
    assert error(flex, q, q, q) <= 1
    assert error(flex, q, torch.randn(1, 4, 128, 16), torch.randn(1, 4, 128, 16)) <= 1
    with torch.inference_mode():
        assert error(flex, q.clone(), q.clone(), q.clone()) <= 1


def test_torchs_defaults_do_not_reach_a_program(flex: Any) -> None:
    """Compiled and run under another default device and dtype, and in inference mode."""
    q, k, v = operands(256, 128, batch=1)
    args = ATTENTION.build(q, k, v, softcap=2.0, is_causal=True)[1]
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"), torch.inference_mode():
            out = flex(*args)
    finally:
        torch.set_default_dtype(before)
    torch.testing.assert_close(out.clone(), ATTENTION.reference(*args), atol=2e-5, rtol=1e-4)


def test_what_it_does_not_take_has_its_reason() -> None:
    """Lengths between the points, gradients, a log-sum-exp, other dtypes: each by name."""
    q, k, v = operands(128, 128)

    def reasons(**changes: Any) -> set[Reason]:
        flags = {n: c for n, c in changes.items() if n not in "qkv"}
        tensors = [changes.get(n, t) for n, t in (("q", q), ("k", k), ("v", v))]
        request = ATTENTION.check(ATTENTION.build(*tensors, **flags)[1])
        return {r.reason for r in rejections(FLEX, request, HERE)} - {
            Reason.ISA_MISSING,
            Reason.TORCH_TOO_OLD,
        }

    assert reasons() == set()
    assert reasons(q=q[:, :, :100].contiguous()) == {Reason.SIZE_UNSUPPORTED}
    assert reasons(return_lse=True) == {Reason.LSE_UNSUPPORTED}
    assert reasons(attn_mask=torch.zeros(128, 128)) == {Reason.MASK_FLOAT_UNSUPPORTED}
    assert reasons(**{n: t.half() for n, t in zip("qkv", (q, k, v), strict=True)}) == {
        Reason.DTYPE_UNSUPPORTED
    }
    request = ATTENTION.check(ATTENTION.build(q, k, v)[1]).replace(modes=frozenset({"grad"}))
    assert Reason.NO_GRADIENT in {r.reason for r in rejections(FLEX, request, HERE)}


def test_one_key_is_one_shape() -> None:
    """Every size it takes is a point of the key's grid, and a length whole blocks."""
    assert all(grid(size) == size for size in (*LENGTHS, *BATCHES))
    assert not any(length % BLOCK for length in LENGTHS)


@pytest.fixture
def runtime() -> Iterator[None]:
    """A runtime in which calls do not wait for compilers, and nothing is loaded behind them."""
    with lz.start(lz.Settings(warm="off")):
        yield


def test_a_call_never_waits_for_its_compiler(
    flex: Any, runtime: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A soft cap runs on what is ready until its shape's program is compiled; other shapes go on so."""
    compiled: list[Any] = []
    monkeypatch.setattr(programs, "PROGRAMS", programs.Programs())

    def compile_instead(shape: Any) -> Any:
        compiled.append(shape)
        return _stand_in

    monkeypatch.setattr(programs, "_compiled", compile_instead)
    q, k, v = operands(2048, 2048, width=64, batch=1)
    flags: dict[str, Any] = {"softcap": 20.0, "is_causal": True}
    cold = lz.select("attention", q, k, v, **flags)
    assert cold.kernel == "reference.attention" and cold.when_warm == FLEX.id and not compiled
    current().device().warm([FLEX.id], cold.request)
    warm = lz.select("attention", q, k, v, **flags)
    assert warm.kernel == FLEX.id and len(compiled) == 1
    other = lz.select("attention", q[:, :, :1536].contiguous(), k, v, **flags)
    assert other.kernel == "reference.attention" and other.when_warm == FLEX.id and len(compiled) == 1


def _stand_in(q: Tensor, *_: Any) -> Tensor:
    return torch.zeros_like(q)
