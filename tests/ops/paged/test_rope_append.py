"""rope_append_kv: both ops at once, for every caller its own; what does not fit writes nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.ops.paged.rope_append import ROPE_APPEND_KV
from tests.backends import cases

KERNELS = [k for k in cases.RUNNABLE if k.op == "rope_append_kv"]
Call = dict[str, Any]


def rows(count: int, heads: int, seed: int, width: int = 16) -> Tensor:
    return torch.randn(count, heads, width, generator=torch.Generator().manual_seed(seed))


def call(slots: list[int], seed: int = 0, dtype: torch.dtype = torch.float32, **named: Any) -> Call:
    """A call of two heads of keys and four of queries, into a pool of 4 pages of 8 tokens full of sevens."""
    cos, sin = lz.rope_tables(16, 32)
    layout = named.setdefault("layout", "NHD")
    inner = (8, 2) if layout == "NHD" else (2, 8)
    count = len(slots)
    made = {
        "q": rows(count, 4, seed + 1).to(dtype), "k": rows(count, 2, seed + 2).to(dtype),
        "v": rows(count, 2, seed + 3, 8).to(dtype), "positions": torch.arange(count) * 3 + seed, "cos": cos,
        "sin": sin, "k_cache": torch.full((4, *inner, 16), 7.0, dtype=dtype),
        "v_cache": torch.full((4, *inner, 8), 7.0, dtype=dtype), "slot_mapping": torch.tensor(slots),
    }  # fmt: skip
    return made | named


def apart(made: Call) -> tuple[Tensor, Tensor, Tensor]:
    """What `rope` and `append_kv` make of a call, in pools of their own."""
    own: Call = {name: value.clone() if isinstance(value, Tensor) else value for name, value in made.items()}
    names = ("q", "k", "positions", "cos", "sin")
    q, k = lz.sync.rope(*(own[name] for name in names), interleaved=own.get("interleaved", False))
    pools: Call = {name: own[name] for name in ("k_cache", "v_cache", "slot_mapping", "layout")}
    lz.sync.append_kv(k, own["v"], **pools)
    return q, own["k_cache"], own["v_cache"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kernel", KERNELS, ids=[k.id for k in KERNELS])
def test_it_is_a_rotation_and_an_append(kernel: lz.Kernel, layout: str, dtype: torch.dtype) -> None:
    """Out of a projection's columns, by both kinds of index; nothing beside the slots changes."""
    with lz.start(lz.Settings(warm="off"), scoped=True):
        for index in (torch.int32, torch.int64):
            made = call([9, 0, 31, 17, 2], dtype=dtype, layout=layout)
            projected = rows(5, 6, 4).to(dtype)
            made |= {"q": projected[:, :4], "k": projected[:, 4:]}
            made |= {name: made[name].to(index) for name in ("positions", "slot_mapping")}
            wanted = apart(made)
            q = kernel.load()(*ROPE_APPEND_KV.build(**made)[1])
            for got, right in zip((q, made["k_cache"], made["v_cache"]), wanted, strict=True):
                torch.testing.assert_close(got, right)


def test_no_cast_stands_before_pools_that_are_written() -> None:
    """A kernel of wider numbers would write into copies: in half precision it is refused, warm or not."""
    made = call([9, 0, 31, 17, 2], dtype=torch.float16)
    wanted = apart(made)
    with lz.start(lz.Settings(warm="off"), scoped=True):
        trace = lz.select("rope_append_kv", **made).trace
        assert [c.kernel for c in trace if c.eligible] == ["reference.rope_append_kv"]
        with pytest.raises(lz.NoKernelFoundError, match="DTYPE_UNSUPPORTED"):
            lz.sync.rope_append_kv(**made, backend="native.rope_append_kv.rows")
        turned = lz.sync.rope_append_kv(**made)
    assert all(map(torch.equal, (turned, made["k_cache"], made["v_cache"]), wanted))


@pytest.mark.parametrize("kernel", KERNELS, ids=[k.id for k in KERNELS])
def test_rows_of_a_pool_are_read_before_any_is_written(kernel: lz.Kernel) -> None:
    """Keys, values and queries that lie in the slots of other tokens."""
    made = call([1, 0], v=rows(2, 2, 3))
    made["v_cache"] = made["k_cache"].clone()
    made["k_cache"][0, :2], made["v_cache"][0, :2] = rows(2, 2, 5), rows(2, 2, 6)
    made |= {"q": made["k_cache"][0, :2], "k": made["k_cache"][0, :2], "v": made["v_cache"][0, :2]}
    wanted = apart(made)
    q = kernel.load()(*ROPE_APPEND_KV.build(**made)[1])
    for got, right in zip((q, made["k_cache"], made["v_cache"]), wanted, strict=True):
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"slot_mapping": torch.tensor([3, 32])}, r"slot_mapping needs places in \[0, 32\), got 32 at 1"),
        ({"slot_mapping": torch.tensor([3, 3])}, "slot_mapping needs each place once"),
        ({"positions": torch.tensor([0, 32])}, "positions needs"),
        ({"q": rows(3, 4, 1)}, "k needs tokens"),
        ({"q": rows(2, 4, 1)[None]}, "q needs"),
        ({"k_cache": torch.zeros(4, 8, 2, 16, dtype=torch.int8)}, "k_cache needs a pool of numbers"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changed: Call, message: str) -> None:
    """Before anything is written; also by the kernels themselves, whoever calls them."""
    made = call([3, 4]) | changed
    before = made["v_cache"].clone()
    with lz.start(lz.Settings(warm="off"), scoped=True):
        with pytest.raises((ValueError, TypeError), match=message):
            lz.sync.rope_append_kv(**made)
        for kernel in KERNELS if "slot_mapping" in changed else ():
            with pytest.raises(ValueError, match=message):
                kernel.load()(*ROPE_APPEND_KV.build(**made)[1])
    assert torch.equal(made["v_cache"], before)


def test_a_gradient_is_refused() -> None:
    """What is written into a pool has none."""
    made = call([3])
    with lz.start(lz.Settings(warm="off"), scoped=True), pytest.raises(ValueError, match="has no gradient"):
        lz.sync.rope_append_kv(**made | {"q": made["q"].requires_grad_()})


ARGUMENTS = (
    "q",
    "k",
    "v",
    "positions",
    "slot_mapping",
    "cos",
    "sin",
    "k_cache",
    "v_cache",
    "interleaved",
    "layout",
)


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_callers_that_differ_in_one_argument_get_their_own(argument: str) -> None:
    """Their rows come back to each, and their tokens lie in the places and the pool that each named."""
    first, second = call([1, 6]), call([4, 0])
    other = call([4, 0], seed=20, layout="HND", interleaved=True)
    shared = {name: first[name] for name in ("cos", "sin", "k_cache", "v_cache")}
    second |= shared
    if argument == "layout":
        second |= {name: other[name] for name in ("layout", "k_cache", "v_cache")}
    elif argument != "slot_mapping":
        second[argument] = other[argument]
    if argument in ("k_cache", "v_cache"):
        second[argument] = torch.zeros_like(first[argument])

    async def together() -> list[Tensor]:
        return list(await asyncio.gather(lz.rope_append_kv(**first), lz.rope_append_kv(**second)))

    with lz.start(lz.Settings(batching="all", inline_limit_us=0.0, warm="off"), scoped=True) as runtime:
        wanted = apart(first), apart(second)
        outs = asyncio.run(together())
        joined = max(runtime.device("cpu").loop_drivers.stats().sizes)
    assert joined == (2 if argument in ("q", "k", "v", "positions", "slot_mapping") else 1)
    for made, out, (turned, _, _) in zip((first, second), outs, wanted, strict=True):
        torch.testing.assert_close(out, turned)
        for pool, alone in ((made["k_cache"], 1), (made["v_cache"], 2)):
            tokens, right = (
                (each if made["layout"] == "NHD" else each.transpose(1, 2)).flatten(0, 1)[
                    made["slot_mapping"]
                ]
                for each in (pool, wanted[0 if made is first else 1][alone])
            )
            torch.testing.assert_close(tokens, right)


def test_callers_of_one_place_are_refused_and_others_served() -> None:
    """Two name one slot; the third gets its own rows, not theirs."""
    pool = call([0])
    calls = [
        call([slot], seed=slot) | {n: pool[n] for n in ("k_cache", "v_cache", "cos", "sin")}
        for slot in (5, 2, 5)
    ]
    calls[2]["q"] = rows(1, 4, 77)

    async def together() -> list[Any]:
        return await asyncio.gather(*(lz.rope_append_kv(**one) for one in calls), return_exceptions=True)

    with lz.start(lz.Settings(batching="all", inline_limit_us=0.0, warm="off"), scoped=True):
        right = apart(calls[1])[0]
        got = asyncio.run(together())
    assert [isinstance(each, ValueError) for each in got] == [True, False, True]
    torch.testing.assert_close(got[1], right)
    assert bool((pool["k_cache"].flatten(0, 1)[5] == 7.0).all())
