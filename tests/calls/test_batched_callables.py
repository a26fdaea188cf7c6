"""What may be given to `batched` beside functions and methods, and how long it lives."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.actors.group.functions import CollectiveFunction
from layerzero.native import FAST_PATH
from tests.native.twins import both_paths as both_paths
from tests.waiting import until


async def crowd(call: Callable[..., Awaitable[Any]], size: int = 3) -> list[Any]:
    """The results of callers that came together, with two rows each."""
    return await asyncio.gather(*(call(torch.full((2, 4), float(i + 1))) for i in range(size)))


class Counting(torch.nn.Module):
    """A module that takes the rows of each caller, and notes them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def forward(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        self.seen.append(counts)
        return x + 1


class Calls:
    """An object that is called."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x * 2


class CallsLater:
    """An object whose call is a coroutine."""

    async def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


def scaled(factor: float, x: torch.Tensor) -> torch.Tensor:
    return x * factor


def nothing(x: torch.Tensor) -> tuple[()]:
    return ()


def positions(counts: torch.Tensor, /) -> torch.Tensor:
    return counts * 3


@pytest.mark.asyncio
async def test_a_module_is_called_as_it_stands() -> None:
    """With its hooks, and with `counts` where its forward names them."""
    plain = torch.nn.Linear(4, 4).requires_grad_(False)
    hooked: list[int] = []
    plain.register_forward_hook(lambda module, args, out: hooked.append(len(out)))
    outs = await crowd(lz.batched(plain))
    for i, out in enumerate(outs):
        torch.testing.assert_close(out, plain(torch.full((2, 4), float(i + 1))))
    assert hooked[0] == 6
    counting = Counting()
    await crowd(lz.batched(counting))
    assert counting.seen == [[2, 2, 2]]


@pytest.mark.asyncio
async def test_functions_of_c_partial_functions_and_objects_share_runs() -> None:
    """Each computes what it computes outside, whether or not its signature can be read."""
    calls = Calls()
    for fn, factor in (
        (torch.relu, 1),
        (torch.neg, -1),
        (partial(scaled, 5.0), 5),
        (calls, 2),
        (positions, 3),
    ):
        for i, out in enumerate(await crowd(lz.batched(fn))):
            assert torch.equal(out, torch.full((2, 4), float(i + 1) * factor)), fn
    assert calls.runs == 1
    with pytest.raises(TypeError, match="coroutine function CallsLater"):
        lz.batched(CallsLater())


@pytest.mark.asyncio
async def test_an_empty_tuple_is_no_result() -> None:
    """It is named like every other wrong one."""
    with pytest.raises(ValueError, match=r"nothing needs to return tensors of 2 rows .* got tuple"):
        await lz.batched(nothing)(torch.ones(2, 4))


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["closure", "module", "partial", "attribute"])
async def test_weights_that_a_function_holds_are_seen_before_its_first_run(kind: str) -> None:
    """The first crowd already runs apart, so that each of it may go backward."""
    linear = torch.nn.Linear(4, 4)

    def closed(x: torch.Tensor) -> torch.Tensor:
        return x @ linear.weight

    class Holds:
        def __init__(self) -> None:
            self.weight = linear.weight

        def run(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    holds = Holds()
    fn: Any = {"closure": closed, "module": linear, "partial": partial(closed), "attribute": holds.run}[kind]
    for out in await crowd(lz.batched(fn, key=kind)):
        out.sum().backward()
    assert linear.weight.grad is not None


@pytest.mark.parametrize("kind", ["closure", "object", "method"])
def test_a_function_that_nobody_wraps_any_more_is_let_go(kind: str) -> None:
    """With what it holds, also while the batcher remembers its groups."""

    def used() -> weakref.ref[Any]:
        module = Counting()

        def closed(x: torch.Tensor) -> torch.Tensor:
            return module(x, [])  # type: ignore[no-any-return]

        fn: Any = {"closure": closed, "object": module, "method": module.forward}[kind]
        asyncio.run(crowd(lz.batched(fn, key="passing")))
        return weakref.ref(module)

    def let_go() -> bool:
        gc.collect()
        return gone() is None

    gone = used()
    asyncio.run(until(let_go))  # the worker's thread may still be leaving the run
    assert gone() is None


@dataclass(frozen=True)
class Scale:
    """An object that equals every other of its `name`, whatever it multiplies with."""

    name: str
    factor: torch.Tensor = field(compare=False)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    __call__ = step


class Unhashable(Scale):
    """The same, where nothing can be looked up by value."""

    __hash__ = None  # type: ignore[assignment]


def scaled_by(scale: Scale, x: torch.Tensor) -> torch.Tensor:
    return scale.step(x)


WRAPPED: dict[str, Callable[[Scale], Callable[..., Any]]] = {
    "method": lambda scale: scale.step,
    "object": lambda scale: scale,
    "partial": lambda scale: partial(scaled_by, scale),
    "call": lambda scale: scale.__call__,
    "closure": lambda scale: lambda x: scale.step(x),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [Scale, Unhashable])
@pytest.mark.parametrize("wrapped", list(WRAPPED))
async def test_equal_objects_never_answer_for_each_other(wrapped: str, kind: type[Scale]) -> None:
    """Two equal objects with other weights are two functions, each with its own callers and numbers."""
    ones, tens = kind("same", torch.ones(4)), kind("same", torch.full((4,), 10.0))
    assert ones == tens
    calls = [lz.batched(WRAPPED[wrapped](scale), key="same") for scale in (ones, tens)]
    for _ in range(2):  # of a known kind too
        outs = await asyncio.gather(*(call(torch.ones(1, 4)) for call in calls for _ in range(2)))
        assert [out[0, 0].item() for out in outs] == [1.0, 1.0, 10.0, 10.0]
    assert lz.batched(ones.step, key="again") is lz.batched(ones.step, key="again")


def doubled(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2


def tripled(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 3


@pytest.mark.asyncio
async def test_a_method_that_was_replaced_is_not_the_old_one() -> None:
    """The function behind a method's name is a part of what it is, as its device is."""
    tripled.__qualname__ = doubled.__qualname__
    owner = Calls()
    first, second = (lz.batched(MethodType(fn, owner)) for fn in (doubled, tripled))
    assert (await first(torch.ones(1)), await second(torch.ones(1))) == (
        torch.full((1,), 2.0),
        torch.full((1,), 3.0),
    )
    assert lz.batched(scaled, device="cpu") is not lz.batched(scaled, device="meta")


class Slotted:
    """An object that nothing can refer to weakly."""

    __slots__ = ()

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_an_object_that_cannot_be_let_go_is_named() -> None:
    """A table that kept it alive would keep its weights too."""
    with pytest.raises(
        TypeError, match=r"fn needs an object with a weak reference .* got Slotted.step of Slotted"
    ):
        lz.batched(Slotted().step)


def test_functions_of_a_rank_group_use_the_compiled_path_when_it_is_ready() -> None:
    """A group joins when a process starts, before its compiled path is there."""
    module = FAST_PATH.module
    if module is None:
        pytest.skip("nothing is compiled here")
    try:
        FAST_PATH.use(None)
        early = CollectiveFunction(torch.neg, pure=False, name="early", device=torch.device("cpu"))
        assert early.entries is None
    finally:
        FAST_PATH.use(module)
    assert early.entries is not None
