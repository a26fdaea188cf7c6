"""Keys and values in eight bits: what append writes, what attention reads, and what is refused."""

# Values whose shape the code has checked, or that a table names.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import ctypes
import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import layerzero as lz
from layerzero.backends import native
from layerzero.formats.elements import encode_values
from layerzero.formats.errors import FormatError
from layerzero.ops import kv_formats
from layerzero.ops.attention.attention import ATTENTION
from layerzero.ops.op import Args
from layerzero.ops.paged.append import APPEND_KV
from layerzero.ops.paged.attention import PAGED_ATTENTION
from layerzero.ops.paged.mla import MLA_ATTENTION
from layerzero.ops.paged.ragged import RAGGED_ATTENTION
from layerzero.spec.reasons import Reason
from tests.backends import cases
from tests.ops.calls import assert_same, call
from tests.ops.paged.paging import oracle

CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
needs_compiler = [*cases.COMPILED]
every_code = pytest.mark.parametrize("codes", CODES, ids=str)
every_granularity = pytest.mark.parametrize("granularity", kv_formats.GRANULARITIES)


def compiled(test: Any) -> Any:
    """A test of the kernels that are compiled here."""
    for mark in needs_compiler:
        test = mark(test)
    return test


def pool(
    codes: torch.dtype, granularity: str, *, layout: str = "NHD", pages: int = 5, heads: int = 2,
    width: int = 8,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Empty keys and values and their scales, as `append_kv` takes them."""
    inner = (4, heads) if layout == "NHD" else (heads, 4)
    shape = (pages, *inner, width)
    axis = 2 if layout == "NHD" else 1
    caches = [torch.zeros(shape, dtype=torch.uint8).view(codes) for _ in range(2)]
    largest = kv_formats.ELEMENT_OF[codes].max_value
    scales = [
        torch.full(kv_formats.scale_shape(shape, axis, granularity), (5.0 + i) / largest) for i in range(2)
    ]
    return caches[0], caches[1], scales[0], scales[1]


def written(codes: torch.dtype, granularity: str, layout: str = "NHD", seed: int = 0) -> dict[str, Any]:
    """Keywords of attention over a pool with 11 tokens of one sequence and 6 of another."""
    k_cache, v_cache, k_scale, v_scale = pool(codes, granularity, layout=layout)
    random = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(17, 2, 8, generator=random) for _ in range(2))
    slots = torch.tensor([*range(8, 19), *range(0, 6)])
    named: dict[str, Any] = {"layout": layout, "k_scale": k_scale, "v_scale": v_scale}
    assert torch.equal(lz.sync.append_kv(k, v, k_cache, v_cache, slots, **named), slots)
    tables, lens = torch.tensor([[2, 3, 4], [0, 1, -9]]), torch.tensor([11, 6])
    q = torch.randn(2, 4, 8, generator=random)
    return {
        "q": q, "k_cache": k_cache, "v_cache": v_cache, "block_tables": tables, "seq_lens": lens, **named,
    }  # fmt: skip


def bits(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


# -- what append writes -----------------------------------------------------------------------------------


def hard_rows(codes: torch.dtype) -> Tensor:
    """Every code, all points halfway between two neighbours, what lies beside them, and what no code is."""
    every = torch.arange(256, dtype=torch.uint8).view(codes).double()
    values = every[every.isfinite()].unique()
    middles = (values[1:] + values[:-1]) / 2
    near = torch.cat([values, middles, middles.float().nextafter(torch.tensor(math.inf)).double()])
    odd = [math.inf, -math.inf, math.nan, 1e30, -1e30, 1e-45, -1e-45, 0.0, -0.0, 500.0, -60000.0]
    rows = torch.cat([near, torch.tensor(odd, dtype=torch.float64)]).float()
    return torch.cat([rows, rows.new_zeros(-rows.numel() % 24)]).view(-1, 1, 24)


@compiled
@every_code
@pytest.mark.parametrize("scale", [1.0, 0.3, 2.0**-20])
def test_the_compiled_kernel_rounds_every_number_as_the_definition_does(
    codes: torch.dtype, scale: float
) -> None:
    """All codes, ties, subnormals, infinities and NaN, to the bit, in vectors and in what is left of them."""
    rows = hard_rows(codes) * scale
    for width, granularity in itertools.product((24, 5, 1), ("tensor", "token")):
        k = rows[..., :width].contiguous()
        pages = -(-len(k) // 4)
        found: list[list[Tensor]] = []
        for run in (native.KERNELS[0].load(), APPEND_KV.reference):
            k_cache, v_cache, k_scale, v_scale = pool(codes, granularity, pages=pages, heads=1, width=width)
            if granularity == "tensor":
                k_scale.fill_(scale)
            run(k, k, k_cache, v_cache, torch.arange(len(k)), "NHD", k_scale, v_scale)
            found.append([bits(k_cache), bits(v_cache), k_scale.view(torch.int32), v_scale.view(torch.int32)])
        nan = found[1][2].view(torch.float32).isnan()
        assert torch.equal(found[0][2].view(torch.float32).isnan(), nan)
        for ours, theirs in zip(*found, strict=True):
            same = ours == theirs
            assert bool((same | nan if same.shape == nan.shape else same).all()), (width, granularity)


@every_code
@every_granularity
def test_what_was_appended_comes_back(codes: torch.dtype, granularity: str) -> None:
    """Within half a step of the format, by row; a scale of tokens is written where the token is."""
    for layout, dtype in itertools.product(("NHD", "HND"), (torch.float32, torch.bfloat16, torch.float16)):
        k_cache, v_cache, k_scale, v_scale = pool(codes, granularity, layout=layout)
        k, v = torch.randn(3, 2, 8).to(dtype), torch.randn(3, 2, 8).to(dtype)
        before = k_scale.clone()
        named: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale, "layout": layout}
        lz.sync.append_kv(k, v, k_cache, v_cache, torch.tensor([5, 19, 0]), **named)
        heads = 2 if layout == "NHD" else 1
        numbers = kv_formats.decode(k_cache, k_scale, heads)
        by_token = (numbers if layout == "NHD" else numbers.transpose(1, 2)).flatten(0, 1)
        step = {torch.int8: 0.02, torch.float8_e4m3fn: 0.07, torch.float8_e5m2: 0.13}[codes]
        assert (by_token[[5, 19, 0]] - k.float()).abs().max() <= step * k.float().abs().max()
        assert bool(bits(k_cache).float().sum() > 0) and torch.count_nonzero(by_token[[1, 7]]) == 0
        assert torch.equal(before, k_scale) == (granularity != "token")


@every_code
def test_a_slot_that_does_not_fit_leaves_codes_and_scales_alone(codes: torch.dtype) -> None:
    """Nothing is written where one of the slots is out of the pool, by every kernel that takes codes."""
    for run in (native.KERNELS[0].load(), APPEND_KV.reference, lz.sync.append_kv):
        k_cache, v_cache, k_scale, v_scale = pool(codes, "token")
        k = torch.randn(2, 2, 8)
        before = [bits(k_cache).clone(), k_scale.clone()]
        named: Any = {"layout": "NHD", "k_scale": k_scale, "v_scale": v_scale}
        slots = torch.tensor([0, 20])
        with pytest.raises(ValueError, match="got 20 at 1"):
            if run is lz.sync.append_kv:
                run(k, k, k_cache, v_cache, slots, **named)
            else:
                run(k, k, k_cache, v_cache, slots, *named.values())
        assert torch.equal(bits(k_cache), before[0]) and torch.equal(k_scale, before[1])


def test_a_row_with_nan_gives_nan_for_its_token_alone() -> None:
    """By token the scale is NaN; the tokens beside it stay what they were."""
    k_cache, v_cache, k_scale, v_scale = pool(torch.float8_e4m3fn, "token")
    k = torch.randn(3, 2, 8)
    k[1, 0, 3] = math.nan
    lz.sync.append_kv(k, k, k_cache, v_cache, torch.arange(3), k_scale=k_scale, v_scale=v_scale)
    numbers = kv_formats.decode(k_cache, k_scale, 2)[0]
    assert bool(numbers[1, 0].isnan().all()) and bool(numbers[[0, 2]].isfinite().all())
    assert bool(numbers[1, 1].isfinite().all())


# -- what attention reads -----------------------------------------------------------------------------------


@every_code
@every_granularity
def test_pages_of_codes_agree_with_a_loop_over_their_numbers(codes: torch.dtype, granularity: str) -> None:
    """Both layouts; what a table holds behind a length, codes and scales, is never read."""
    for layout in ("NHD", "HND"):
        named = written(codes, granularity, layout)
        heads = 2 if layout == "NHD" else 1
        dense = [
            kv_formats.decode(named[f"{part}_cache"], named[f"{part}_scale"], heads) for part in ("k", "v")
        ]
        dense = [part if layout == "NHD" else part.transpose(1, 2) for part in dense]
        rows = [part.flatten(0, 1) for part in dense]
        wanted, _ = oracle(
            named["q"], [(1, rows[0][8:19], rows[1][8:19]), (1, rows[0][:6], rows[1][:6])], True
        )
        if granularity == "token":
            held = torch.arange(4).view((4, 1) if layout == "NHD" else (1, 4)) < 2  # of page 1 by the second
            named["k_scale"][1] = torch.where(held, named["k_scale"][1], math.nan)
        found = lz.sync.paged_attention(**named)
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


@compiled
@every_code
def test_the_compiled_kernel_decodes_every_code(codes: torch.dtype) -> None:
    """256 tokens whose values are one code each, and queries that look at one of them alone."""
    every = torch.arange(256, dtype=torch.uint8).view(codes)
    numbers = every.float()
    v_cache = every.view(16, 16, 1, 1).expand(16, 16, 1, 8).contiguous()
    k_cache = torch.zeros(16, 16, 1, 8, dtype=torch.uint8).view(codes)
    one, tables = torch.ones(()), torch.arange(16).repeat(256, 1)
    args = PAGED_ATTENTION.build(
        torch.zeros(256, 1, 8), k_cache, v_cache, tables, torch.arange(1, 257), window=(0, 0),
        k_scale=one, v_scale=one * 0.5,
    )[1]  # fmt: skip
    found = native.KERNELS[1].load()(*args)[:, 0, 0]
    assert torch.equal(found.nan_to_num(nan=7.0), (numbers * 0.5).nan_to_num(nan=7.0))


@given(st.sampled_from(CODES), st.floats(2.0**-10, 2.0**10), st.integers(0, 99))
def test_twice_the_scale_of_values_is_twice_the_result(codes: torch.dtype, factor: float, seed: int) -> None:
    """Linear in the values' scale; a factor on keys is the same factor on the softmax's."""
    named = written(codes, "head", seed=seed)
    plain = lz.sync.paged_attention(**named)
    named["v_scale"] = named["v_scale"] * factor
    found = lz.sync.paged_attention(**named)
    torch.testing.assert_close(found, plain * factor, rtol=1e-5, atol=1e-6 * factor)
    named["v_scale"] = named["v_scale"] / factor
    named["k_scale"] = named["k_scale"] * factor
    found = lz.sync.paged_attention(**named, scale=8**-0.5 / factor)
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)


@every_code
@every_granularity
def test_callers_together_get_what_each_gets_alone(codes: torch.dtype, granularity: str) -> None:
    """One launch over one pool for two callers, and of two appends whose slots differ."""
    named = written(codes, granularity)
    q, tables, lens = named.pop("q"), named.pop("block_tables"), named.pop("seq_lens")
    calls: list[Args] = [
        PAGED_ATTENTION.build(
            q[i : i + 1], block_tables=tables[i : i + 1], seq_lens=lens[i : i + 1], **named
        )[1]
        for i in range(2)
    ]
    assert_same(PAGED_ATTENTION, calls)
    caches = pool(codes, granularity)
    rows, together = [torch.randn(2, 2, 8) for _ in range(2)], []
    slots = [torch.tensor([1, 2]), torch.tensor([9, 0])]
    for joined in (True, False):
        caches = pool(codes, granularity)
        scales = {"k_scale": caches[2], "v_scale": caches[3]}
        appends = [
            APPEND_KV.build(k, k, *caches[:2], slot, **scales)[1] for k, slot in zip(rows, slots, strict=True)
        ]
        if joined:
            assert APPEND_KV.batching is not None
            APPEND_KV.batching.run(appends, lambda args: APPEND_KV.reference(*args))
        else:
            for args in appends:
                APPEND_KV.reference(*args)
        together.append([*map(bits, caches[:2]), *caches[2:]])
    assert all(torch.equal(a, b) for a, b in zip(*together, strict=True))


# -- queries, keys and values that lie behind each other ----------------------------------------------------


def quantized(x: Tensor, codes: torch.dtype, granularity: str, heads: int) -> tuple[Tensor, Tensor]:
    """`x` as codes and its scales, heads at axis `heads`."""
    element = kv_formats.ELEMENT_OF[codes]
    shape = kv_formats.scale_shape(tuple(x.shape), heads, granularity)
    scale = torch.rand(shape) * 0.01 + 4.0 / element.max_value
    return encode_values(x / kv_formats.broadcast_scale(scale, x.dim(), heads), element), scale


@every_code
@every_granularity
@pytest.mark.parametrize("coded_queries", [True, False])
def test_dense_and_ragged_codes_are_attended_to_as_their_numbers(
    codes: torch.dtype, granularity: str, coded_queries: bool
) -> None:
    """Keys and values, or all three; both layouts; the result is bfloat16 where queries are codes."""
    sync: Any = lz.sync
    for layout, heads in (("BHSD", 1), ("BSHD", 2), ("ragged", 1)):
        shape = {"BHSD": (1, 2, 5, 8), "BSHD": (1, 5, 2, 8), "ragged": (5, 2, 8)}[layout]
        plain: list[Any] = []
        coded: list[Any] = []
        scales: dict[str, Any] = {}
        for name in ("q", "k", "v"):
            x = torch.randn(shape)
            if name != "q" or coded_queries:
                x, scales[f"{name}_scale"] = quantized(x, codes, granularity, heads)
                plain.append(kv_formats.decode(x, scales[f"{name}_scale"], heads))
            else:
                plain.append(x)
            coded.append(x)
        cu = torch.tensor([0, 2, 5])
        if layout == "ragged":
            found = call(RAGGED_ATTENTION, *coded, cu, is_causal=True, **scales)
            served = sync.ragged_attention(*coded, cu, is_causal=True, **scales)
            wanted = RAGGED_ATTENTION.reference(*plain, cu, cu, True)
        else:
            found = call(ATTENTION, *coded, is_causal=True, layout=layout, **scales)
            served = sync.attention(*coded, is_causal=True, layout=layout, **scales)
            wanted = ATTENTION.reference(*plain, is_causal=True, layout=layout)
        dtype = torch.bfloat16 if coded_queries else torch.float32
        near: dict[str, Any] = {"atol": 2e-2, "rtol": 2e-2} if coded_queries else {"atol": 1e-5, "rtol": 1e-5}
        assert found.dtype == served.dtype == dtype
        torch.testing.assert_close(found, wanted.to(dtype), **near)
        torch.testing.assert_close(served, wanted.to(dtype), **near)


# -- what is refused ----------------------------------------------------------------------------------------

E4M3 = torch.float8_e4m3fn
REFUSED: list[tuple[str, dict[str, Any], Reason]] = [
    ("no scale", {"k_scale": None, "v_scale": None}, Reason.SCALE_LAYOUT_MISMATCH),
    ("one scale", {"v_scale": None}, Reason.SCALE_LAYOUT_MISMATCH),
    ("half scale", {"k_scale": torch.ones((), dtype=torch.float16)}, Reason.SCALE_DTYPE_MISMATCH),
    ("three heads", {"k_scale": torch.ones(3)}, Reason.SCALE_SHAPE_MISMATCH),
    ("other pages", {"k_scale": torch.ones(4, 4, 2)}, Reason.SCALE_SHAPE_MISMATCH),
    ("two granularities", {"k_scale": torch.ones(2)}, Reason.SCALE_LAYOUT_MISMATCH),
    ("zero", {"k_scale": torch.zeros(())}, Reason.SCALE_NOT_POSITIVE),
    ("negative", {"v_scale": torch.tensor(-0.5)}, Reason.SCALE_NOT_POSITIVE),
    ("NaN", {"v_scale": torch.tensor(math.nan)}, Reason.SCALE_NOT_FINITE),
    ("infinite", {"k_scale": torch.tensor(math.inf)}, Reason.SCALE_NOT_FINITE),
    ("raw bytes", {"k_cache": torch.zeros(5, 4, 2, 8, dtype=torch.uint8)}, Reason.KV_DTYPE_MISMATCH),
]


@pytest.mark.parametrize(("what", "changes", "reason"), REFUSED, ids=[row[0] for row in REFUSED])
@pytest.mark.parametrize("op", ["append_kv", "paged_attention"])
def test_scales_that_do_not_fit_are_named_and_nothing_is_written(
    op: str, what: str, changes: dict[str, Any], reason: Reason
) -> None:
    """With a reason code, before any kernel is asked."""
    k_cache, v_cache, k_scale, v_scale = pool(E4M3, "tensor")
    named = {"k_cache": k_cache, "v_cache": v_cache, "k_scale": k_scale, "v_scale": v_scale} | changes
    k = torch.randn(2, 2, 8)
    with pytest.raises(FormatError, match=next(iter(changes))) as caught:
        if op == "append_kv":
            lz.sync.append_kv(k, k, slot_mapping=torch.tensor([0, 1]), **named)
        else:
            tables, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
            lz.sync.paged_attention(k[:1], block_tables=tables, seq_lens=lens, **named)
    assert caught.value.reason is reason
    assert not torch.count_nonzero(bits(k_cache)) and not torch.count_nonzero(bits(v_cache))


def test_a_scale_beside_numbers_is_refused() -> None:
    """A pool of numbers has no scales; one that is given would be dropped without a word."""
    cache, k = torch.zeros(2, 4, 2, 8), torch.randn(1, 2, 8)
    with pytest.raises(FormatError, match="k_scale needs None beside k_cache of float32"):
        lz.sync.append_kv(k, k, cache, cache.clone(), torch.tensor([0]), k_scale=torch.ones(()))


@pytest.mark.parametrize("read", ["e5m2", "int8", "by head"])
def test_a_pool_written_in_one_format_is_not_read_as_another(read: str) -> None:
    """Neither read nor written on; memory that is free may become a pool of any format."""
    named = written(E4M3, "tensor")
    before = bits(named["k_cache"]).clone()
    if read == "by head":
        named |= {"k_scale": torch.ones(2), "v_scale": torch.ones(2)}
    else:
        other = torch.float8_e5m2 if read == "e5m2" else torch.int8
        named |= {name: named[name].view(other) for name in ("k_cache", "v_cache")}
    with pytest.raises(
        FormatError, match="needs float8_e4m3fn with scales by tensor, as it was written"
    ) as caught:
        lz.sync.paged_attention(**named)
    assert caught.value.reason is Reason.KV_DTYPE_MISMATCH
    k = torch.randn(1, 2, 8)
    caches = {name: named[name] for name in ("k_cache", "v_cache", "k_scale", "v_scale")}
    with pytest.raises(FormatError, match="as it was written"):
        lz.sync.append_kv(k, k, slot_mapping=torch.tensor([0]), **caches)
    assert torch.equal(bits(named["k_cache"]), before)


def test_only_what_was_written_has_a_format() -> None:
    """Neither a check of the arguments nor a call that failed; memory of its own at an old address is new."""
    k, slots = torch.randn(1, 2, 8), torch.tensor([0])
    k_cache, v_cache, *by_tensor = pool(E4M3, "tensor")
    lz.validate("append_kv", k, k, k_cache, v_cache, slots, k_scale=by_tensor[0], v_scale=by_tensor[1])
    with pytest.raises(ValueError, match="slot_mapping"):
        lz.sync.append_kv(
            k, k, k_cache, v_cache, slots - 1, k_scale=by_tensor[0], v_scale=by_tensor[1]
        )  # fmt: skip
    scales = [torch.ones(5, 4, 2) for _ in range(2)]
    lz.sync.append_kv(k, k, k_cache, v_cache, slots, k_scale=scales[0], v_scale=scales[1])
    with pytest.raises(FormatError, match="scales by token, as it was written"):
        kv_formats.need_format("k_cache", k_cache, by_tensor[0])
    taken = torch.frombuffer(_bytes_at(k_cache), dtype=torch.int8).view(k_cache.shape)
    assert taken.data_ptr() == k_cache.data_ptr()
    kv_formats.need_format("k_cache", taken, by_tensor[0])


def _bytes_at(tensor: Tensor) -> Any:
    """The tensor's memory, for a storage of another's."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())


def test_pools_beyond_those_remembered_are_noted_by_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free is forgotten while others note theirs; none fails, and what lives is remembered."""
    monkeypatch.setattr(kv_formats, "_MOST_WRITTEN", 8)
    scale = torch.ones(())
    kept = [torch.zeros(4, 8, dtype=torch.int8) for _ in range(8)]

    def note(pools: int) -> None:
        for _ in range(pools):
            kv_formats.note_format(torch.zeros(4, 8, dtype=torch.int8), scale)

    for each in kept:
        kv_formats.note_format(each, scale)
    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(note, 300) for _ in range(8)]:
            done.result()
    for each in kept:
        with pytest.raises(FormatError, match="scales by tensor, as it was written"):
            kv_formats.need_format("pool", each, torch.ones(4))


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_that_are_written_need_memory_of_their_own(name: str) -> None:
    """Tokens that share one would be read with the scale of the last."""
    named: dict[str, Any] = dict(
        zip(("k_cache", "v_cache", "k_scale", "v_scale"), pool(E4M3, "token"), strict=True)
    )
    k = torch.randn(1, 2, 8)
    with pytest.raises(ValueError, match=f"{name} needs memory of its own"):
        shared = named[name][:, :1].expand(-1, 4, -1)
        lz.sync.append_kv(k, k, slot_mapping=torch.tensor([0]), **(named | {name: shared}))
    both: dict[str, Any] = {"k_scale": named[name], "v_scale": named[name]}
    with pytest.raises(ValueError, match="v_scale needs memory of its own, for it is written, got k_scale"):
        lz.sync.append_kv(k, k, slot_mapping=torch.tensor([0]), **(named | both))


@pytest.mark.parametrize("name", ["ckv_scale", "kpe_scale"])
def test_latent_scales_that_do_not_fit_are_named(name: str) -> None:
    """Latent pools have no heads; a scale by token is (N, P)."""
    ckv, kpe = (torch.zeros(2, 4, width, dtype=torch.uint8).view(E4M3) for width in (8, 4))
    named: dict[str, Any] = {"ckv_scale": torch.ones(2, 4), "kpe_scale": torch.ones(2, 4)}
    operands = (torch.randn(1, 2, 8), torch.randn(1, 2, 4), ckv, kpe, torch.tensor([[0]]), torch.tensor([3]))
    assert call(MLA_ATTENTION, *operands, scale=1.0, **named).shape == (1, 2, 8)
    for scale, reason in (
        (torch.ones(4), Reason.SCALE_SHAPE_MISMATCH),
        (torch.ones(2, 4).double(), Reason.SCALE_DTYPE_MISMATCH),
    ):
        with pytest.raises(FormatError, match=name) as caught:
            lz.sync.mla_attention(*operands, scale=1.0, **(named | {name: scale}))
        assert caught.value.reason is reason


def test_codes_of_two_formats_are_refused() -> None:
    """Keys and values share a format, and queries that are codes theirs."""
    q, one = torch.randn(1, 2, 3, 8), torch.ones(())
    codes: dict[str, Any] = {"q": q.to(E4M3), "k": q.to(E4M3), "v": q.to(E4M3)}
    scales: dict[str, Any] = {"q_scale": one, "k_scale": one, "v_scale": one}
    assert lz.sync.attention(**codes, **scales).dtype == torch.bfloat16
    for name in codes:
        with pytest.raises(FormatError, match="needs codes of") as caught:
            lz.sync.attention(**(codes | {name: q.to(torch.float8_e5m2)}), **scales)
        assert caught.value.reason is Reason.KV_DTYPE_MISMATCH


@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("name", ["q", "q_nope", "q_pe"])
def test_queries_of_codes_are_refused_by_name(name: str, codes: torch.dtype) -> None:
    """Queries over pages have no scale: no kernel meets codes there, raises and is blamed for them."""
    tables, lens = torch.tensor([[0]]), torch.tensor([2])
    with pytest.raises(TypeError, match=rf"^{name} needs one of float32, .* got float8"):
        if name == "q":
            pool = torch.randn(1, 2, 1, 8)
            lz.sync.paged_attention(torch.randn(1, 1, 8).to(codes), pool, pool, tables, lens)
        else:
            queries = {"q_nope": torch.randn(1, 1, 8), "q_pe": torch.randn(1, 1, 8)}
            queries[name] = queries[name].to(codes)
            pool = torch.randn(1, 2, 8)
            lz.sync.mla_attention(
                queries["q_nope"],
                queries["q_pe"],
                ckv_cache=pool,
                kpe_cache=pool,
                block_tables=tables,
                seq_lens=lens,
                scale=0.3,
            )
