"""A caller may change its answer in place, whoever shared its batch: as alone, and no neighbour sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
import layerzero.sync
from tests.calls.test_own_answers import CALLS, Call, parts
from tests.native.twins import both_paths as both_paths

MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad}
SHAPES: Call = {"x": torch.randn(2, 3, 8), "weight": torch.randn(8), "eps": 1e-6}  # two axes of rows


def served(main: Callable[[], Awaitable[Any]]) -> Any:
    """What `main` returns on a loop with a runtime that joins whatever may be joined."""

    async def inside() -> Any:
        async with lz.start(lz.Settings(batching="all", inline_limit_us=0.0, warm="off")):
            return await main()

    return asyncio.run(inside())


async def crowd(op: str, call: Call, mode: Any) -> list[tuple[Tensor, ...]]:
    """What four callers get of one call; under a mode that they leave again."""

    async def one() -> tuple[Tensor, ...]:
        with mode():
            return parts(await getattr(lz, op)(**call))

    await asyncio.gather(*(one() for _ in range(4)))
    return await asyncio.gather(*(one() for _ in range(4)))


def crowds() -> Iterator[Any]:
    seen: dict[str, int] = {}
    for op, call, _ in [*CALLS, ("rms_norm", SHAPES, {})]:
        seen[op] = seen.get(op, -1) + 1
        for mode in MODES:
            yield pytest.param(op, call, mode, id=f"{op}{seen[op]}-{mode}")


@pytest.mark.parametrize(("op", "call", "mode"), list(crowds()))
def test_an_answer_is_no_view_to_autograd(op: str, call: Call, mode: str) -> None:
    """Each part is changed in place, with a gradient where it may have one; the others count nothing."""
    with MODES[mode]():
        alone = parts(getattr(lz.sync, op)(**call))
    first, second, *_ = served(lambda: crowd(op, call, MODES[mode]))
    before = [part._version for part in second]
    gain = torch.ones((), requires_grad=True)
    for part, by_itself in zip(first, alone, strict=True):
        assert not part._is_view() or by_itself._is_view()
        if part.dtype in (torch.float32, torch.bfloat16) and not part._is_view():
            part.mul_(gain)
            assert part.requires_grad
        else:
            part.zero_()
    assert [part._version for part in second] == before


def double(x: Tensor) -> Tensor:
    return x * 2


def test_a_neighbours_change_ends_nobodys_backward() -> None:
    """An adapter's gradient needs the rows that it was given, which another caller's `relu_` leaves alone."""
    adapter = torch.randn(8, 8, requires_grad=True)
    heads = torch.randn(1, 2, 3, 8)
    ragged: Call = {"q": torch.randn(1, 5, 2, 8), "k": torch.randn(1, 5, 2, 8), "v": torch.randn(1, 5, 2, 8)}

    async def answers() -> list[list[Tensor]]:
        return [
            await asyncio.gather(*(lz.linear(torch.randn(2, 8), torch.ones(8, 8)) for _ in range(2))),
            await asyncio.gather(*(lz.batched(double)(torch.randn(2, 8)) for _ in range(2))),
            await asyncio.gather(*(lz.attention(heads, heads, heads) for _ in range(2))),
            await asyncio.gather(*(lz.attention(**ragged, layout="BSHD") for _ in range(2))),
        ]

    for mine, other in served(answers):
        loss = (mine @ adapter).sum()
        other.relu_()
        loss.backward()
    assert adapter.grad is not None


def test_rows_with_a_graph_keep_it() -> None:
    """What a batched function returned with a graph goes on in it."""
    gain = torch.ones((), requires_grad=True)
    hidden = {"gain": gain}  # where nobody looks before the first run
    call = lz.batched(lambda x: x * hidden["gain"], key="hidden gain")

    async def both() -> list[Tensor]:
        return await asyncio.gather(*(call(torch.ones(2, 2)) for _ in range(2)))

    torch.stack(served(both)).sum().backward()
    assert gain.grad is not None and float(gain.grad) == 8


def same_for_all(x: Tensor) -> Tensor:
    return torch.zeros(1, 3).expand(len(x), 3)


def test_rows_that_are_one_in_memory_are_each_callers_own() -> None:
    """What one caller writes into its row of an expanded result is in no other's."""

    async def both() -> list[Tensor]:
        call = lz.batched(same_for_all)
        return await asyncio.gather(*(call(torch.ones(1, 2)) for _ in range(2)))

    first, second = served(both)
    first.add_(1)
    assert not second.any()
