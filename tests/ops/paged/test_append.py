"""Appending to pages: every place, layout and dtype; what does not fit is refused and nothing is written."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.ops import table
from layerzero.ops.op import Args
from layerzero.ops.paged.append import APPEND_KV, slot_conflicts
from layerzero.spec.errors import KernelExecutionError
from tests import kernels
from tests.backends import cases

KERNELS = [k for k in cases.RUNNABLE if k.op == "append_kv"]


def call(
    slot_mapping: list[int],
    *,
    pages: int = 4,
    page_size: int = 8,
    layout: str = "NHD",
    dtype: Any = torch.float32,
    index: torch.dtype = torch.int64,
    heads: int = 2,
    widths: tuple[int, int] = (8, 8),
) -> Args:
    """A call whose rows are random and whose pool is full of sevens."""
    k, v = (torch.randn(len(slot_mapping), heads, width).to(dtype) for width in widths)
    inner = (page_size, heads) if layout == "NHD" else (heads, page_size)
    pools = [torch.full((pages, *inner, width), 7.0, dtype=dtype) for width in widths]
    args: Args = APPEND_KV.build(k, v, *pools, torch.tensor(slot_mapping, dtype=index), layout=layout)[1]
    return args


def by_token(pool: Tensor, layout: str) -> Tensor:
    """The pool as (places, Hk, D)."""
    return (pool if layout == "NHD" else pool.transpose(1, 2)).flatten(0, 1)


@pytest.mark.parametrize("kernel", KERNELS, ids=[k.id for k in KERNELS])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 2, 8, 16, 32, 64])
def test_every_token_is_in_its_place_and_nothing_else_changes(
    kernel: lz.Kernel, layout: str, page_size: int
) -> None:
    """Random places, both kinds of index, rows that are pieces of a wider projection."""
    run = kernel.load()
    for index in (torch.int32, torch.int64):
        places = random.sample(range(3 * page_size), min(11, 3 * page_size))
        args = call(places, pages=3, page_size=page_size, layout=layout, index=index, widths=(8, 4))
        wide = torch.randn(len(places), 6, 8)
        k, v = wide[:, 1:3], wide[:, 3:5, :4]
        assert run(k, v, *args[2:]) is args[4]
        for rows, pool in ((k, args[2]), (v, args[3])):
            found = by_token(pool, layout)
            for row, place in zip(rows, places, strict=True):
                assert torch.equal(found[place], row)
            untouched = [at for at in range(found.shape[0]) if at not in places]
            assert bool((found[untouched] == 7.0).all())


@pytest.mark.parametrize("kernel", KERNELS, ids=[k.id for k in KERNELS])
@pytest.mark.parametrize(
    ("slot_mapping", "message"),
    [([0, 32], "got 32 at 1"), ([-1, 0], "got -1 at 0"), ([5, 6, 5], "got 5 at 0 and 2")],
)
def test_slots_that_do_not_fit_change_nothing(
    kernel: lz.Kernel, slot_mapping: list[int], message: str
) -> None:
    """Out of range or named twice: refused before the first write, by every kernel."""
    for index in (torch.int32, torch.int64):
        args = call(slot_mapping, index=index)
        with pytest.raises(ValueError, match=message):
            kernel.load()(*args)
        assert bool((args[2] == 7.0).all()) and bool((args[3] == 7.0).all())


def changed(args: Args, **changes: Any) -> Args:
    """The call with some arguments, by name, exchanged."""
    names = ("k", "v", "k_cache", "v_cache", "slot_mapping", "layout", "k_scale", "v_scale")
    return tuple(changes.get(name, value) for name, value in zip(names, args, strict=True))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k": torch.zeros(2, 8)}, ValueError, "k needs 3 dimensions"),
        ({"k": [1]}, TypeError, "k needs a torch.Tensor"),
        ({"v": torch.zeros(3, 2, 8)}, ValueError, r"v needs tokens and heads \(2, 2\) like k, got \(3, 2\)"),
        ({"v": torch.zeros(2, 2, 8).half()}, TypeError, "v needs dtype float32 like k, got float16"),
        ({"slot_mapping": torch.zeros(2)}, TypeError, "slot_mapping needs dtype int32 or int64, got float32"),
        (
            {"slot_mapping": torch.zeros(2).short()},
            TypeError,
            "slot_mapping needs dtype int32 or int64, got int16",
        ),
        (
            {"slot_mapping": torch.zeros(3).long()},
            ValueError,
            "slot_mapping needs 2 places like k's tokens, got 3",
        ),
        ({"layout": "HND"}, ValueError, "k_cache needs heads and head size"),
        ({"layout": "DHN"}, ValueError, "layout needs one of NHD, HND"),
        ({"k_cache": torch.zeros(4, 8, 2, 4)}, ValueError, r"k_cache needs heads and head size \(2, 8\)"),
        (
            {"k_cache": torch.zeros(4, 8, 2, 8).int()},
            TypeError,
            "k_cache needs one of .* got int32",
        ),
        (
            {"v_cache": torch.zeros(5, 8, 2, 8)},
            ValueError,
            r"v_cache needs pages, tokens and heads \(4, 8, 2\) like k_cache, got \(5, 8, 2\)",
        ),
        ({"v_cache": torch.zeros(4, 8, 2, 8).half()}, TypeError, "v_cache needs dtype float32 like k_cache"),
        ({"k_cache": torch.zeros(8, 2, 8).expand(4, 8, 2, 8)}, ValueError, "k_cache needs memory of its own"),
        ({"k_cache": torch.zeros(4, 8, 2, 8, device="meta")}, ValueError, "k_cache needs to be on cpu"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes: dict[str, Any], error: Any, message: str) -> None:
    """Before any kernel is asked, and nothing is written."""
    args = call([1, 2])
    k, v, k_cache, v_cache, slot_mapping, layout, *_ = changed(args, **changes)
    with pytest.raises(error, match=message):
        lz.sync.append_kv(k, v, k_cache, v_cache, slot_mapping, layout=layout)
    assert bool((args[2] == 7.0).all()) and bool((args[3] == 7.0).all())


def test_a_gradient_is_refused() -> None:
    """A pool holds numbers, not graphs."""
    args = call([1])
    with pytest.raises(ValueError, match="append_kv has no gradient"):
        lz.sync.append_kv(args[0].requires_grad_(), *args[1:5])


def test_no_token_writes_nothing() -> None:
    """An empty call gives its empty slot_mapping."""
    args = call([])
    assert lz.sync.append_kv(*args[:5]) is args[4]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_callers_of_one_pool_are_written_at_once(layout: str) -> None:
    """64 callers with their own tokens and slot_mapping: one launch, and what one call a caller writes."""
    whole = call(random.sample(range(512), 96), pages=64, layout=layout)
    launched: list[Args] = []

    def launch(args: Args) -> Any:
        launched.append(args)
        return APPEND_KV.reference(*args)

    bounds = [0, *range(1, 33), *range(34, 97, 2)]
    calls = [
        (whole[0][a:b], whole[1][a:b], *whole[2:4], whole[4][a:b].to(torch.int32 if a % 2 else torch.int64),
         layout)
        for a, b in itertools.pairwise(bounds)
    ]  # fmt: skip
    assert len({APPEND_KV.batching.batch_key(args) for args in calls}) == 1  # type: ignore[union-attr]
    results = APPEND_KV.batching.run(calls, launch)  # type: ignore[union-attr]
    assert len(launched) == 1
    assert all(result is args[4] for result, args in zip(results, calls, strict=True))
    apart = [pool.clone().fill_(7.0) for pool in whole[2:4]]
    for args in calls:
        APPEND_KV.reference(*args[:2], *apart, *args[4:])
    assert torch.equal(whole[2], apart[0]) and torch.equal(whole[3], apart[1])


def test_two_pools_do_not_join() -> None:
    """Nor do two layouts of one memory, nor another dtype of the rows."""
    rule = APPEND_KV.batching
    assert rule is not None
    args = call([1])
    others = [
        call([1]),
        changed(args, k_cache=args[2].transpose(1, 2), v_cache=args[3].transpose(1, 2), layout="HND"),
        changed(args, k=args[0].half(), v=args[1].half()),
    ]
    assert rule.batch_key(args) not in [rule.batch_key(other) for other in others]
    assert rule.batch_key(args) == rule.batch_key(changed(call([9]), k_cache=args[2], v_cache=args[3]))


@pytest.mark.asyncio
async def test_callers_who_claim_one_place_are_refused_and_the_others_written() -> None:
    """Nobody can tell whose the place is; both learn of it, and everybody else is served."""
    args = call(list(range(6)))
    slot_mapping = [3, 9, 4, 9, 5, 1]

    async def one(at: int) -> Any:
        k, v = args[0][at : at + 1], args[1][at : at + 1]
        return await lz.append_kv(k, v, args[2], args[3], torch.tensor([slot_mapping[at]]))

    got = await asyncio.gather(*map(one, range(6)), return_exceptions=True)
    wrong = [at for at, value in enumerate(got) if isinstance(value, ValueError)]
    assert wrong == [1, 3] and "got 9, which two callers name" in str(got[1])
    pool = by_token(args[2], "NHD")
    for at in (0, 2, 4, 5):
        assert torch.equal(pool[slot_mapping[at]], args[0][at])
    assert bool((pool[9] == 7.0).all())


@pytest.mark.asyncio
async def test_a_caller_with_a_wrong_slot_is_refused_alone() -> None:
    """Slots are looked at when a call joins."""
    args = call([0, 1, 2])
    calls = [
        lz.append_kv(args[0][at : at + 1], args[1][at : at + 1], args[2], args[3], torch.tensor([slot]))
        for at, slot in enumerate([0, 99, 2])
    ]
    got = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(got[1], ValueError) and "got 99 at 0" in str(got[1])
    assert torch.equal(args[2][0, 2], args[0][2]) and torch.equal(args[2][0, 0], args[0][0])


def test_three_callers_of_one_place_are_all_refused() -> None:
    """Also the first of them, whom the third one's claim comes too late for."""
    places = [torch.tensor(own) for own in ([1, 2], [3], [2], [4], [2, 5])]
    assert sorted(slot_conflicts(places)) == [0, 2, 4]
    assert slot_conflicts(places[1:2] + places[3:4]) == {}


def test_a_failed_append_is_never_repeated() -> None:
    """It may have written: no other kernel runs, and the batcher does not halve its batch."""
    runs: list[int] = []

    def broken(*args: Any) -> Any:
        runs.append(args[4].shape[0])
        raise RuntimeError("half way")

    own = [
        kernels.kernel("bad.append_kv", broken, launch_us=0.1, layouts=frozenset({"NHD"})),
        kernels.kernel("good.append_kv", layouts=frozenset({"NHD"}), launch_us=9.0),
    ]
    args = call([0, 1, 2, 3])

    async def all_at_once() -> list[Any]:
        calls = [
            lz.append_kv(args[0][at : at + 1], args[1][at : at + 1], args[2], args[3], args[4][at : at + 1])
            for at in range(4)
        ]
        return await asyncio.gather(*calls, return_exceptions=True)

    with lz.start(lz.Settings(warm="off"), scoped=True) as runtime:
        for kernel in own:
            runtime.add_kernel(kernel)
        lz.prefer("append_kv", "bad.append_kv")
        got = asyncio.run(all_at_once())
    assert runs == [4]
    assert [type(error) for error in got] == [KernelExecutionError] * 4
    assert "no other kernel may repeat it" in str(got[0])
    assert bool((args[2] == 7.0).all())


def test_the_table_says_what_is_written() -> None:
    """The ops that write pools alone change operands, and say which."""
    impure = {name: table.get(name).writes for name in table.names() if not table.get(name).pure}
    assert impure == {"append_kv": (2, 3, 6, 7), "rope_append_kv": (6, 7)}


@pytest.mark.parametrize("kernel", KERNELS, ids=[k.id for k in KERNELS])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_rows_of_the_pool_itself_are_read_before_any_is_written(kernel: lz.Kernel, layout: str) -> None:
    """Tokens that move up by one place in their pool, keys out of values, and rows with gaps between them."""
    slot_mapping = [1, 2, 3, 6]
    for dtype, step, crossed in itertools.product((torch.float32, torch.bfloat16), (1, 2), (False, True)):
        _, _, k_cache, v_cache, places, *_ = call(slot_mapping, layout=layout, dtype=dtype)
        for pool in (k_cache, v_cache):
            pool.normal_()
        k, v = (_rows_of(pool, layout, step) for pool in (k_cache, v_cache))
        if crossed:
            k, v = v, k
        copies = [rows.clone() for rows in (k, v)]
        wanted = [pool.clone() for pool in (k_cache, v_cache)]
        APPEND_KV.reference(*copies, *wanted, places, layout)
        kernel.load()(k, v, k_cache, v_cache, places, layout, None, None)
        assert torch.equal(k_cache, wanted[0]) and torch.equal(v_cache, wanted[1]), (dtype, step, crossed)


def _rows_of(pool: Tensor, layout: str, step: int) -> Tensor:
    """The first page's tokens 0 to 3, or every second one, as a view (4, Hk, D)."""
    page = pool[0] if layout == "NHD" else pool[0].transpose(0, 1)
    return page[: 4 * step : step]


def test_rows_of_the_pool_itself_are_copied_for_a_user_too() -> None:
    """`[0, 1, 2]` to the places 1, 2, 3 gives 0, 0, 1, 2, blocking and awaited."""
    for awaited in (False, True):
        pool = torch.arange(4.0).view(1, 4, 1, 1).repeat(1, 1, 1, 8)
        other, places = pool.clone(), torch.tensor([1, 2, 3])
        args = pool[0, :3], other[0, :3], pool, other, places
        if awaited:

            async def main(args: Args = args) -> None:
                await lz.append_kv(*args)

            asyncio.run(main())
        else:
            lz.sync.append_kv(*args)
        assert pool[0, :, 0, 0].tolist() == other[0, :, 0, 0].tolist() == [0, 0, 1, 2]
