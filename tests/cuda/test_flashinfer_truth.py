"""Our own kernels beside FlashInfer's functions on a card: numbers that neither torch nor we have made.

FlashInfer is called by its own functions and not through our adapters. Of ours, every kernel of `OURS` takes
part that does not refuse the call; those that a case names must. Each comparison is made again with one
argument wrong, and has to fail then. FlashInfer compiles a module for each op and dtype at its first call,
which takes minutes: `-k` chooses some, and each dtype may have a process of its own.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.backends.flashinfer.common import module
from tests.cuda.flashinfer_attention import (
    DEVICE,
    NOT_HERE,
    WIDTH,
    WRONG,
    Case,
    Layout,
    Outputs,
    Pages,
    close,
    equal,
    ints,
    latent,
    offsets,
    paged,
    ragged,
    values,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"),
    pytest.mark.filterwarnings("ignore"),  # FlashInfer's, of what it brings itself
    pytest.mark.timeout(480),  # it compiles
]
OURS = ("triton", "cuda", "torch", "reference")
LAYOUTS: tuple[Layout, ...] = ("NHD", "HND")
HALVES = (torch.bfloat16, torch.float16)


# -- rows ------------------------------------------------------------------------------------------------


def norm(name: str, dtype: torch.dtype, shape: tuple[int, int], residual: bool) -> Case:
    """`rms_norm`, or `add_rms_norm` with both outputs."""
    eps = 1e-5

    def operands() -> tuple[Tensor, Tensor, Tensor]:
        x, other = (values(*shape, seed=seed, dtype=dtype) for seed in (12, 14))
        return x, other, values(shape[1], seed=13, dtype=dtype)

    def ours(kernel: str, wrong: bool) -> Outputs:
        x, other, weight = operands()
        weight = weight * WRONG if wrong else weight
        if residual:
            return lz.sync.add_rms_norm(x, other, weight, eps=eps, backend=kernel)
        return (lz.sync.rms_norm(x, weight, eps=eps, backend=kernel),)

    def theirs() -> Outputs:
        library = module("flashinfer.norm")
        x, other, weight = operands()
        if not residual:
            return (library.rmsnorm(x, weight, eps),)
        library.fused_add_rmsnorm(x, other, weight, eps)  # overwrites both
        return x, other

    op = "add_rms_norm" if residual else "rms_norm"
    known = "triton.add_rms_norm.fused" if residual else "torch.rms_norm.cuda"
    return Case(name, op, (f"reference.{op}", known), ours, theirs, close)


def turned_by_flashinfer(
    q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> tuple[Tensor, Tensor]:
    table = torch.cat([cos, sin], -1).contiguous()
    out = module("flashinfer.rope").apply_rope_with_cos_sin_cache(
        positions, q.flatten(1), k.flatten(1), WIDTH, table, is_neox=not interleaved
    )
    return out[0].view_as(q), out[1].view_as(k)


def rope(name: str, dtype: torch.dtype, interleaved: bool, turned: int) -> Case:
    """Queries and keys, `turned` of 128 dimensions."""
    places, heads = 300, (8, 2)

    def operands() -> list[Tensor]:
        rows = 33
        angles = values(places, turned // 2, seed=15) * 3
        positions = torch.randint(0, places - 1, (rows,), generator=torch.Generator().manual_seed(16))
        q, k = (values(rows, n, WIDTH, seed=17 + n, dtype=dtype) for n in heads)
        return [q, k, positions.to(DEVICE), angles.cos(), angles.sin()]

    def ours(kernel: str, wrong: bool) -> Outputs:
        q, k, positions, cos, sin = operands()
        positions = positions + 1 if wrong else positions
        return tuple(lz.sync.rope(q, k, positions, cos, sin, interleaved=interleaved, backend=kernel))

    def theirs() -> Outputs:
        return turned_by_flashinfer(*operands(), interleaved=interleaved)

    return Case(name, "rope", ("reference.rope",), ours, theirs, close)


@dataclass(frozen=True)
class Appended:
    """Three sequences that get tokens at once: slots for ours, sequences and positions for theirs."""

    dtype: torch.dtype
    layout: Layout
    pages = Pages((17, 1, 40), 16)
    new = (5, 1, 40)

    def rows(self, heads: int, seed: int) -> Tensor:
        return values(sum(self.new), heads, WIDTH, seed=seed, dtype=self.dtype)

    def pools(self) -> tuple[Tensor, Tensor]:
        shape = self.pages.shape(2, self.layout)
        return values(*shape, seed=22, dtype=self.dtype), values(*shape, seed=23, dtype=self.dtype)

    def places(self) -> list[tuple[int, int]]:
        """Sequence and position of each new token: a sequence's last ones."""
        ends = zip(self.pages.lengths, self.new, strict=True)
        return [(row, at) for row, (length, count) in enumerate(ends) for at in range(length - count, length)]

    def slots(self, wrong: bool) -> Tensor:
        table, size = self.pages.table().tolist(), self.pages.size
        found = [table[row][at // size] * size + at % size for row, at in self.places()]
        return ints(found[1:] + found[:1] if wrong else found).long()

    def written_by_flashinfer(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        pools, pages = self.pools(), self.pages
        rows, positions = (ints(each) for each in zip(*self.places(), strict=True))
        module("flashinfer.page").append_paged_kv_cache(
            k, v, rows, positions, pools, pages.ids(), offsets(pages.counts()), pages.last(),
            kv_layout=self.layout,
        )  # fmt: skip
        return pools


def append(name: str, dtype: torch.dtype, layout: Layout) -> Case:
    """New keys and values into pages, bit by bit."""
    new = Appended(dtype, layout)

    def ours(kernel: str, wrong: bool) -> Outputs:
        pools = new.pools()
        k, v = new.rows(2, seed=20), new.rows(2, seed=21)
        lz.sync.append_kv(k, v, *pools, new.slots(wrong), layout=layout, backend=kernel)
        return pools

    def theirs() -> Outputs:
        return new.written_by_flashinfer(new.rows(2, seed=20), new.rows(2, seed=21))

    return Case(name, "append_kv", ("reference.append_kv", "torch.append_kv.cuda"), ours, theirs, equal)


def turned_append(name: str, dtype: torch.dtype, layout: Layout) -> Case:
    """Rotation and append in one kernel of ours; two functions of FlashInfer's."""
    new = Appended(dtype, layout)

    def operands() -> list[Tensor]:
        angles = values(64, WIDTH // 2, seed=15) * 3
        positions = ints([at for _, at in new.places()]).long()
        rows = [new.rows(8, seed=19), new.rows(2, seed=20), new.rows(2, seed=21)]
        return [*rows, positions, angles.cos(), angles.sin()]

    def ours(kernel: str, wrong: bool) -> Outputs:
        q, k, v, positions, cos, sin = operands()
        pools = new.pools()
        positions = positions + 1 if wrong else positions
        turned = lz.sync.rope_append_kv(
            q, k, v, positions, cos, sin, *pools, new.slots(False), layout=layout, backend=kernel
        )
        return turned, *pools

    def theirs() -> Outputs:
        q, k, v, *places = operands()
        turned, keys = turned_by_flashinfer(q, k, *places, interleaved=False)
        return turned, *new.written_by_flashinfer(keys, v)

    kernels = ("reference.rope_append_kv", "triton.rope_append_kv.heads")
    return Case(name, "rope_append_kv", kernels, ours, theirs, close)


# -- sampling --------------------------------------------------------------------------------------------

DRAWS, VOCAB = 8192, 1000


def sampling(name: str, top_k: int, top_p: float, temperature: float) -> Case:
    """Draws of a distribution that FlashInfer's filters have renormalized: by chi-square, and none beyond it.

    FlashInfer draws from a generator of its own, so that tokens cannot be compared one by one.
    """

    def logits() -> Tensor:
        return values(1, VOCAB, seed=24) * 2

    def ours(kernel: str, wrong: bool) -> Outputs:
        heat = temperature * (WRONG if wrong else 1.0)
        many = logits().expand(DRAWS, VOCAB).contiguous()
        seeds = torch.arange(DRAWS, device=DEVICE)
        return (lz.sync.sample(many, temperature=heat, top_k=top_k, top_p=top_p, seed=seeds, backend=kernel),)

    def theirs() -> Outputs:
        library, probs = module("flashinfer.sampling"), (logits() / temperature).softmax(-1)
        probs = library.top_k_renorm_probs(probs, top_k) if top_k else probs
        return (library.top_p_renorm_probs(probs, top_p) if top_p < 1 else probs,)

    return Case(name, "sample", ("reference.sample", "triton.sample.rows"), ours, theirs, drawn_from)


def drawn_from(ours: Outputs, theirs: Outputs) -> None:
    """Tokens as often as their shares say: what is rarer than 5 in all draws is counted as one."""
    (tokens,), shares = ours, theirs[0][0].double()
    counts = torch.bincount(tokens, minlength=VOCAB).double()
    assert counts[shares == 0].sum() == 0, "a token was drawn that FlashInfer filters out"
    wanted = shares / shares.sum() * DRAWS
    often = wanted >= 5
    pairs = [(counts[often], wanted[often]), (counts[~often].sum()[None], wanted[~often].sum()[None])]
    apart = sum(float(((got - want) ** 2 / want.clamp_min(1e-9)).sum()) for got, want in pairs)
    degrees = int(often.sum())
    # Six deviations above the mean of a chi-square of so many degrees.
    assert apart <= degrees + 6 * (2 * degrees) ** 0.5, f"chi-square {apart:.1f} of {degrees} degrees"


def greedy(name: str) -> Case:
    """The one token that a top-k of 1 leaves, which FlashInfer's sampler cannot draw otherwise."""

    def ours(kernel: str, wrong: bool) -> Outputs:
        logits = values(64, VOCAB, seed=25)
        return (lz.sync.sample(-logits if wrong else logits, top_k=1, seed=3, backend=kernel),)

    def theirs() -> Outputs:
        probs = values(64, VOCAB, seed=25).softmax(-1)
        return (module("flashinfer.sampling").top_k_sampling_from_probs(probs, 1).long(),)

    return Case(name, "sample", ("reference.sample", "triton.sample.rows"), ours, theirs, equal)


# -- cases -----------------------------------------------------------------------------------------------

RAGGED = ("torch.ragged_attention.flash",)
DECODE = ("reference.paged_attention", "triton.paged_attention.decode")
PREFILL = ("reference.paged_attention", "triton.paged_attention.rows")
CODES = ("triton.paged_attention.decode_codes", "cuda.paged_attention.codes")
HEADS: tuple[tuple[tuple[int, int], Layout], ...] = (((32, 8), "NHD"), ((8, 8), "HND"), ((8, 2), "NHD"))
LENGTHS = (1, 20, 129, 64)


def cases() -> list[Case]:
    """All, in the order in which FlashInfer's modules are compiled."""
    found = []
    for dtype in HALVES:
        word = str(dtype).removeprefix("torch.")
        for heads, layout in HEADS:
            of = f"{heads[0]}over{heads[1]}-{layout}-{word}"
            pages = Pages(LENGTHS, 16)
            found += [
                paged(f"decode-{of}", dtype, pages, heads, (), layout, DECODE),
                paged(f"prefill-{of}", dtype, pages, heads, (1, 16, 5, 64), layout, PREFILL),
            ]
        found += [
            ragged(f"ragged-causal-{word}", dtype, (1, 70, 33), (16, 4), True, RAGGED),
            ragged(f"ragged-full-{word}", dtype, (64, 5), (8, 8), False, RAGGED),
            *(norm(f"rms_norm-{n}x{c}-{word}", dtype, (n, c), False) for n, c in ((1, 4096), (37, 1024))),
            *(norm(f"add_rms_norm-{n}x{c}-{word}", dtype, (n, c), True) for n, c in ((3, 4096), (65, 512))),
            rope(f"rope-halves-{word}", dtype, False, WIDTH),
            rope(f"rope-pairs-{word}", dtype, True, WIDTH),
            rope(f"rope-part-{word}", dtype, False, 64),
            *(append(f"append-{layout}-{word}", dtype, layout) for layout in LAYOUTS),
            *(turned_append(f"rope-append-{layout}-{word}", dtype, layout) for layout in LAYOUTS),
        ]
    return [
        *found,
        paged("decode-codes", HALVES[0], Pages(LENGTHS, 16), (32, 8), (), "NHD", CODES, (0.02, 0.03)),
        latent("latent-decode", Pages(LENGTHS, 16), ()),
        latent("latent-prefill", Pages(LENGTHS, 32), (1, 16, 5, 64)),
        sampling("sample-all", 0, 1.0, 1.0),
        sampling("sample-top_k", 40, 1.0, 0.8),
        sampling("sample-top_p", 0, 0.9, 1.0),
        sampling("sample-both", 50, 0.8, 1.2),
        greedy("sample-greedy"),
    ]


each = pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)


def ran(case: Case, wrong: bool) -> dict[str, Outputs]:
    """Outputs by kernel, of each of ours that takes the call; it alone has run."""
    found = {}
    for info in lz.list_kernels(case.op):
        if info.backend not in OURS or info.state == "blocked":
            continue
        try:
            found[info.id] = case.ours(info.id, wrong)
        except NOT_HERE:
            continue
        last = lz.last_selection()
        assert last is not None and last.kernel == info.id
    return found


@each
def test_our_kernels_say_what_flashinfer_says(case: Case) -> None:
    """Those that the case names, and every other of ours that takes the call."""
    theirs = case.theirs()
    found = ran(case, wrong=False)
    assert set(case.kernels) <= set(found), f"these refused: {set(case.kernels) - set(found)}"
    for kernel, outs in found.items():
        try:
            case.check(outs, theirs)
        except AssertionError as error:
            raise AssertionError(f"{kernel}: {error}") from error


@each
def test_a_wrong_argument_is_seen(case: Case) -> None:
    """A scale, a weight, a place, a temperature that is not what FlashInfer got: no kernel passes."""
    theirs = case.theirs()
    for outs in ran(case, wrong=True).values():
        with pytest.raises(AssertionError):
            case.check(outs, theirs)
