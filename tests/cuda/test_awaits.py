"""Awaited calls of a GPU through the compiled twin: what it answers for, and what stays with Python."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.native import FAST_PATH
from layerzero.selection.modes import REHEARSAL
from layerzero.spec.errors import BackendNotAvailableError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="awaits of a GPU need a CUDA device"),
]


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    """The twin and a runtime of the process, in use while a test runs."""
    before = FAST_PATH.module
    try:
        FAST_PATH.load()
    except BackendNotAvailableError as error:
        pytest.skip(f"nothing to compile with: {error}")
    with lz.start(lz.Settings(device="cuda", warm="off", perfdb=None)):
        yield
    FAST_PATH.use(before)


def twice(x: Tensor) -> Tensor:
    """A function over rows."""
    return x * 2


def doubled() -> Any:
    """`twice`, awaited, by an entry of its own."""
    return lz.batched(twice, key="twice of a GPU")


def test_calls_on_the_default_stream_are_known() -> None:
    """The second round of a crowd is found by the twin, and its results are right."""
    entry = doubled()

    async def caller(number: int) -> list[float]:
        x = torch.full((1, 4), float(number), device="cuda")
        first = await entry(x)
        assert entry.entries.find((first,), {}) is not None
        return [*(await entry(first))[0].tolist()]

    async def crowd() -> list[list[float]]:
        return await asyncio.gather(*map(caller, range(4)))

    assert asyncio.run(crowd()) == [[4.0 * number] * 4 for number in range(4)]


def test_a_stream_of_ones_own_is_not_known() -> None:
    """What the twin learned on the default stream does not answer for another one."""
    entry = doubled()
    x = torch.ones(1, 4, device="cuda")

    async def caller() -> bool:
        await entry(x)
        known = entry.entries.find((x,), {}) is not None
        with torch.cuda.stream(torch.cuda.Stream()):
            return known and entry.entries.find((x,), {}) is None

    async def crowd() -> list[bool]:
        return list(await asyncio.gather(caller(), caller()))

    assert asyncio.run(crowd()) == [True, True]


def test_a_ticket_tells_another_stream_from_its_own() -> None:
    """A known call that comes back on another stream than it left on leaves it to Python to say so."""
    entry = doubled()
    x = torch.ones(1, 4, device="cuda")

    async def caller() -> list[bool]:
        await entry(x)
        ticket = entry.entries.find((x,), {})
        with torch.cuda.stream(torch.cuda.Stream()):
            elsewhere = ticket.unchanged()
        return [ticket.unchanged(), elsewhere]

    async def crowd() -> list[list[bool]]:
        return list(await asyncio.gather(caller(), caller()))

    assert asyncio.run(crowd()) == [[True, False]] * 2


def test_ops_are_known_unless_a_capture_is_rehearsed() -> None:
    """A memo answers for an op's calls; inside a rehearsal the choice is another, made in Python."""
    x, weight = (torch.ones(shape, device="cuda") for shape in ((1, 8), (8,)))
    memo = lz.rms_norm.__closure__

    async def caller() -> Tensor:
        await lz.rms_norm(x, weight)
        return await lz.rms_norm(x, weight)

    async def crowd() -> list[Tensor]:
        return await asyncio.gather(*(caller() for _ in range(3)))

    known = next(cell.cell_contents for cell in memo or () if hasattr(cell.cell_contents, "entries"))
    outs = asyncio.run(crowd())
    assert known.entries.size >= 1
    assert all(torch.allclose(out, torch.ones_like(out)) for out in outs)

    async def rehearsed() -> bool:
        await caller()
        usual = known.entries.find((x, weight), {}) is not None
        REHEARSAL.on = True
        try:
            return usual and known.entries.find((x, weight), {}) is None
        finally:
            REHEARSAL.on = False

    async def pair() -> list[Any]:
        return list(await asyncio.gather(rehearsed(), rehearsed()))

    assert asyncio.run(pair()) == [True, True]
