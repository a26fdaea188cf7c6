"""Batching off, row-wise or all, call by call: how many launches a round of callers becomes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz

X, WEIGHT = torch.randn(1, 16), torch.randn(8, 16)
Q = torch.randn(1, 2, 4, 8)
POOL = torch.zeros(4, 16, 1, 16)
ROUND = 8


def doubled(x: Tensor, names: list[str]) -> Tensor:
    """A function over rows."""
    return x * 2


CALLS: dict[str, Callable[..., Awaitable[Any]]] = {
    "linear": lambda **how: lz.linear(X, WEIGHT, **how),
    "attention": lambda **how: lz.attention(Q, Q, Q, **how),
    "append_kv": lambda **how: lz.append_kv(X[None], X[None], POOL, POOL, next_slot(), **how),
    "batched": lambda **how: lz.batched(doubled)(X, "name", **how),
}
_slots: Iterator[int] = iter(())


def next_slot() -> Tensor:
    """A slot that no call of a round has had."""
    global _slots  # noqa: PLW0603  the calls of one table draw from one source
    place = next(_slots, None)
    if place is None:
        _slots = iter(range(64))
        place = next(_slots)
    return torch.tensor([place])


def sizes(setting: str, name: str, wanted: list[str | None]) -> dict[int, int]:
    """Batches by size after a round of callers that want this batching, under a runtime's setting."""

    async def every() -> None:
        calls = [CALLS[name](**({} if how is None else {"batching": how})) for how in wanted]
        await asyncio.gather(*calls)

    with lz.start(lz.Settings(batching=setting, warm="off"), scoped=True) as runtime:  # type: ignore[arg-type]
        asyncio.run(every())
        found: dict[int, int] = runtime.device("cpu").loop_drivers.stats().sizes
        return found


TOGETHER, APART = {ROUND: 1}, {1: ROUND}


@pytest.mark.parametrize("setting", ["all", "rows", "off"])
@pytest.mark.parametrize(
    ("name", "how", "expected"),
    [
        ("linear", "all", TOGETHER), ("linear", "rows", TOGETHER), ("linear", "off", APART),
        ("attention", "all", TOGETHER), ("attention", "rows", APART), ("attention", "off", APART),
        ("append_kv", "all", TOGETHER), ("append_kv", "rows", TOGETHER), ("append_kv", "off", APART),
        ("batched", "all", TOGETHER), ("batched", "rows", TOGETHER), ("batched", "off", APART),
    ],
)  # fmt: skip
def test_a_call_says_how_it_batches(setting: str, name: str, how: str, expected: dict[int, int]) -> None:
    """What a call wants goes before what the runtime says."""
    assert sizes(setting, name, [how] * ROUND) == expected


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("setting", ["all", "rows", "off"])
def test_a_call_that_says_nothing_follows_the_runtime(setting: str, name: str) -> None:
    """Also a function given to `lz.batched`."""
    assert sizes(setting, name, [None] * ROUND) == sizes("all", name, [setting] * ROUND)


@pytest.mark.parametrize("name", CALLS)
def test_callers_who_want_it_off_do_not_hold_the_others_apart(name: str) -> None:
    """Three alone, five together, whatever order they come in."""
    assert sizes("all", name, ["off", None, None, "off", "all", None, "off", None]) == {1: 3, 5: 1}


def test_rows_and_all_meet() -> None:
    """Both mean the same for rows, so they share a launch."""
    assert sizes("off", "linear", ["rows", "all"] * 4) == TOGETHER


def test_results_do_not_depend_on_the_switch() -> None:
    """The same rows come back, in the order of their callers."""
    rows = torch.randn(6, 16)

    async def outputs(how: Any) -> Tensor:
        return torch.cat(await asyncio.gather(*[lz.linear(row[None], WEIGHT, batching=how) for row in rows]))

    for how in ("off", "rows", "all"):
        torch.testing.assert_close(asyncio.run(outputs(how)), rows @ WEIGHT.T)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("wrong", ["of", "", True, 1])
def test_another_word_is_refused_by_name(name: str, wrong: Any) -> None:
    """Also where the call would have run at once."""
    with pytest.raises((ValueError, TypeError), match="batching needs one of all, rows, off"):
        asyncio.run(CALLS[name](batching=wrong))  # type: ignore[arg-type]
