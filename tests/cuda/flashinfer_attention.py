"""Calls of attention as our ops and as FlashInfer's own functions take them.

The signatures are those of flashinfer-python 0.7.2.post1. Its FA2 templates answer, and for decoding its
kernel without tensor cores.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

import layerzero as lz
from layerzero.backends.flashinfer.common import module
from layerzero.ops.attention.lse import LN_2
from tests.references.measures import check_close

DEVICE = "cuda"
NOT_HERE = (lz.NoKernelFoundError, lz.BackendNotAvailableError)
WIDTH, WORKSPACE = 128, 128 << 20
# Both sides round: twice a dtype's tolerance. Sums of exponentials are float32; FlashInfer's exp2 is the
# card's approximation.
SCALE = 2.0
# Of log-sum-exps: kernels of torch round the scores to the dtype of the queries.
LSE_ATOL, LSE_RTOL = {torch.bfloat16: 4e-3, torch.float16: 1e-3}, 1e-4
WRONG = 1.25

Outputs = tuple[Tensor, ...]
Layout = Literal["NHD", "HND"]


@dataclass(frozen=True)
class Case:
    """One call by both; `ours` is told which of our kernels runs, and whether an argument is wrong.

    `kernels` are ids that must take part; `check` compares outputs, by tolerance where nothing else is said.
    """

    name: str
    op: str
    kernels: tuple[str, ...]
    ours: Callable[[str, bool], Outputs]
    theirs: Callable[[], Outputs]
    check: Callable[[Outputs, Outputs], None]


def close(ours: Outputs, theirs: Outputs) -> None:
    """The outputs that ours has, within the tolerance of the dtype; a log-sum-exp (float32) of base 2."""
    assert len(ours) <= len(theirs)
    for place, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        assert one.dtype == other.dtype and one.shape == other.shape
        if one.dtype == torch.float32 and place > 0:
            torch.testing.assert_close(one, other, atol=LSE_ATOL[ours[0].dtype], rtol=LSE_RTOL)
        else:
            check_close((one,), (other,), (f"output {place}",), SCALE)


def equal(ours: Outputs, theirs: Outputs) -> None:
    """Bit by bit."""
    assert len(ours) == len(theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def values(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers of a seed, made on the CPU, so that every card has the same."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def ints(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def number(value: float) -> Tensor:
    return torch.tensor(value, device=DEVICE)


def offsets(counts: Sequence[int]) -> Tensor:
    return ints([0, *itertools.accumulate(counts)])


def room() -> Tensor:
    """A wrapper's workspace: zero, for decode kernels count in it from the start."""
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=DEVICE)


def with_lse(call: Callable[..., Any], kernel: str) -> Outputs:
    """Output and log-sum-exp of base 2; the output alone of a kernel that has no other."""
    try:
        out, lse = call(backend=kernel, return_lse=True)
    except NOT_HERE:
        return (call(backend=kernel),)
    return out, lse / LN_2


@dataclass(frozen=True)
class Pages:
    """Sequences of these lengths, their pages strewn over a pool that has three more."""

    lengths: tuple[int, ...]
    size: int

    def counts(self) -> list[int]:
        return [-(-n // self.size) for n in self.lengths]

    def pool(self) -> int:
        return sum(self.counts()) + 3

    def shape(self, heads: int, layout: Layout) -> tuple[int, int, int, int]:
        """Of a pool of keys or values."""
        inner = (self.size, heads) if layout == "NHD" else (heads, self.size)
        return (self.pool(), *inner, WIDTH)

    def ids(self) -> Tensor:
        order = torch.randperm(self.pool(), generator=torch.Generator().manual_seed(7))
        return ints(order[: sum(self.counts())].tolist())

    def table(self) -> Tensor:
        """One row a sequence, padded with page 0."""
        counts = self.counts()
        rows = [own.tolist() for own in self.ids().split(counts)]
        return torch.stack([ints(row + [0] * (max(counts) - len(row))) for row in rows])

    def last(self) -> Tensor:
        return ints([(n - 1) % self.size + 1 for n in self.lengths])


def paged(
    name: str, dtype: torch.dtype, pages: Pages, heads: tuple[int, int], queries: tuple[int, ...],
    layout: Layout, kernels: tuple[str, ...], scales: tuple[float, float] | None = None,
) -> Case:  # fmt: skip
    """Decoding where `queries` is empty, else a prefill whose queries are each sequence's last tokens.

    With `scales`, of keys and of values, the pool holds codes of eight bits.
    """
    scale = WIDTH**-0.5
    kept = dtype if scales is None else torch.float8_e4m3fn

    def operands() -> tuple[Tensor, Tensor, Tensor]:
        shape = pages.shape(heads[1], layout)
        q = values(sum(queries) or len(pages.lengths), heads[0], WIDTH, seed=1, dtype=dtype)
        k, v = (
            (values(*shape, seed=seed) / by).to(kept)
            for seed, by in zip((2, 3), scales or (1, 1), strict=True)
        )
        return q, k, v

    def ours(kernel: str, wrong: bool) -> Outputs:
        named = {} if scales is None else dict(zip(("k_scale", "v_scale"), map(number, scales), strict=True))
        call = partial(
            lz.sync.paged_attention, *operands(), pages.table(), ints(pages.lengths),
            cu_seqlens_q=offsets(queries) if queries else None, scale=scale * (WRONG if wrong else 1.0),
            layout=layout, **named,
        )  # fmt: skip
        return with_lse(call, kernel)

    def theirs() -> Outputs:
        library = module("flashinfer")
        q, k, v = operands()
        table = (offsets(pages.counts()), pages.ids(), pages.last())
        sizes = (*heads, WIDTH, pages.size)
        types = {"q_data_type": dtype, "kv_data_type": kept}
        if queries:
            prefill = library.BatchPrefillWithPagedKVCacheWrapper(room(), layout, backend="fa2")
            prefill.plan(offsets(queries), *table, *sizes, causal=True, sm_scale=scale, **types)
            return tuple(prefill.run(q, (k, v), return_lse=True))
        decode = library.BatchDecodeWithPagedKVCacheWrapper(room(), layout, backend="fa2")
        decode.plan(*table, *sizes, sm_scale=scale, **types)
        k_scale, v_scale = scales or (None, None)
        return tuple(decode.run(q, (k, v), k_scale=k_scale, v_scale=v_scale, return_lse=True))

    return Case(name, "paged_attention", kernels, ours, theirs, close)


def ragged(
    name: str, dtype: torch.dtype, queries: tuple[int, ...], heads: tuple[int, int], causal: bool,
    kernels: tuple[str, ...],
) -> Case:  # fmt: skip
    """Sequences behind each other, each over its own keys."""
    scale = WIDTH**-0.5

    def operands() -> tuple[Tensor, Tensor, Tensor]:
        return (
            values(sum(queries), heads[0], WIDTH, seed=4, dtype=dtype),
            values(sum(queries), heads[1], WIDTH, seed=5, dtype=dtype),
            values(sum(queries), heads[1], WIDTH, seed=6, dtype=dtype),
        )

    def ours(kernel: str, wrong: bool) -> Outputs:
        factor = WRONG if wrong else 1.0
        call = partial(
            lz.sync.ragged_attention, *operands(), offsets(queries), is_causal=causal, scale=scale * factor
        )
        return with_lse(call, kernel)

    def theirs() -> Outputs:
        q, k, v = operands()
        starts = offsets(queries)
        wrapper = module("flashinfer").BatchPrefillWithRaggedKVCacheWrapper(room(), "NHD", backend="fa2")
        wrapper.plan(
            starts,
            starts,
            *heads,
            WIDTH,
            causal=causal,
            sm_scale=scale,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
        return tuple(wrapper.run(q, k, v, return_lse=True))

    return Case(name, "ragged_attention", kernels, ours, theirs, close)


def latent(name: str, pages: Pages, queries: tuple[int, ...]) -> Case:
    """Multi-head latent attention over pages, in bfloat16 and DeepSeek's widths."""
    heads, widths, scale = 16, (512, 64), 192**-0.5
    counts = queries or (1,) * len(pages.lengths)

    def operands() -> tuple[Tensor, ...]:
        made = partial(values, dtype=torch.bfloat16)
        rows, pool = sum(counts), (pages.pool(), pages.size)
        return (
            made(rows, heads, widths[0], seed=8), made(rows, heads, widths[1], seed=9),
            made(*pool, widths[0], seed=10), made(*pool, widths[1], seed=11),
        )  # fmt: skip

    def ours(kernel: str, wrong: bool) -> Outputs:
        call = partial(
            lz.sync.mla_attention, *operands(), pages.table(), ints(pages.lengths),
            cu_seqlens_q=offsets(queries) if queries else None, scale=scale * (WRONG if wrong else 1.0),
        )  # fmt: skip
        return with_lse(call, kernel)

    def theirs() -> Outputs:
        library = module("flashinfer.mla")
        q_nope, q_pe, ckv, kpe = operands()
        wrapper = library.BatchMLAPagedAttentionWrapper(room(), backend="fa2")
        wrapper.plan(
            metadata=library.MLAPlanMetadata.csr(
                qo_indptr=offsets(counts), kv_indptr=offsets(pages.counts()), kv_indices=pages.ids(),
                kv_len_arr=ints(pages.lengths),
            ),
            num_heads=heads, head_dim_ckv=widths[0], head_dim_kpe=widths[1], page_size=pages.size,
            causal=True, sm_scale=scale, q_data_type=q_nope.dtype, kv_data_type=ckv.dtype,
            query_layout="split", kv_cache_layout="split", lse_mode="basee",
        )  # fmt: skip
        out, lse = wrapper.run(
            query=(q_nope, q_pe), kv_cache=(ckv, kpe), return_lse=True, return_lse_base_on_e=True
        )
        return out, lse / LN_2

    return Case(name, "mla_attention", ("reference.mla_attention",), ours, theirs, close)
