"""Captured modes are values, hold on any thread, and a change across an await has a name."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from layerzero.scheduler.modes.torch_modes import (
    Modes,
    apply_modes,
    capture,
    check_unchanged,
    must_run_inline,
    restore,
)
from layerzero.spec.errors import ModeChangedError
from tests.native.twins import both_paths as both_paths


@contextmanager
def deterministic() -> Iterator[None]:
    """Deterministic algorithms for a block."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


ENTER: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad mode": torch.no_grad,
    "inference mode": torch.inference_mode,
    "deterministic algorithms": deterministic,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def entered(names: tuple[str, ...]) -> ExitStack:
    """A block under several modes."""
    stack = ExitStack()
    for name in names:
        stack.enter_context(ENTER[name]())
    return stack


COMBINATIONS = [c for n in range(len(ENTER) + 1) for c in itertools.combinations(ENTER, n)]


@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_every_combination_is_one_object_and_holds_on_another_thread(names: tuple[str, ...]) -> None:
    """Capturing twice gives the same object, and a thread that applies it captures that object."""
    plain = capture()
    with entered(names):
        modes = capture()
        assert capture() is modes
    assert (modes is plain) is (not names)
    seen: list[Modes] = []

    def run() -> None:
        for _ in range(2):
            with apply_modes(modes):
                seen.append(capture())
            seen.append(capture())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert seen == [modes, plain, modes, plain]
    assert capture() is plain


def test_applied_also_leaves_modes() -> None:
    """Plain modes hold inside a block that has entered all of them, which find themselves back after it."""
    plain = capture()
    with entered(tuple(ENTER)):
        inside = capture()
        with apply_modes(plain):
            assert capture() is plain
            assert torch.ones(2, requires_grad=True).mul(2).requires_grad
        assert capture() is inside


def test_applied_restores_after_an_error() -> None:
    """An error inside the block leaves the thread as it was."""
    plain = capture()
    with torch.inference_mode():
        modes = capture()
    with pytest.raises(KeyError), apply_modes(modes):
        raise KeyError("inside")
    assert capture() is plain


def test_autocast_dtypes_are_different_modes() -> None:
    """bfloat16 and float16 autocast are not one group."""
    with torch.autocast("cpu", torch.bfloat16):
        one = capture()
    with torch.autocast("cpu", torch.float16):
        other = capture()
    assert one is not other
    assert one.autocast == (("cpu", torch.bfloat16),)


@pytest.mark.parametrize("name", ENTER)
def test_a_changed_mode_is_named(name: str) -> None:
    """The error says which mode changed, and unchanged modes raise nothing."""
    before = capture()
    check_unchanged(before)
    # Entering inference mode also turns grad mode off: compare with a block where it is off already.
    outer = torch.no_grad() if name == "inference mode" else ExitStack()
    with outer:
        before = capture()
        with ENTER[name](), pytest.raises(ModeChangedError, match=name) as raised:
            check_unchanged(before)
    assert raised.value.context["mode"] == name


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("inference mode", "grad mode"),  # which it turns off, and which cannot be set inside of it
        ("deterministic algorithms", "deterministic algorithms"),
        ("autocast", "autocast"),
    ],
)
def test_only_the_grad_mode_is_put_back(name: str, named: str) -> None:
    """Of the others a caller is told: what it computes next would be another's."""
    before = capture()
    with torch.no_grad():
        restore(before)
        assert capture() is before
    with ENTER[name](), pytest.raises(ModeChangedError, match=named):
        restore(before)


@pytest.mark.asyncio
async def test_a_neighbour_that_awaits_under_a_mode_is_found_out() -> None:
    """A coroutine that suspends inside `no_grad` changes the modes of another one, which is told."""

    async def neighbour() -> None:
        with torch.no_grad():
            await asyncio.sleep(0)

    before = capture()
    task = asyncio.create_task(neighbour())
    await asyncio.sleep(0)
    with pytest.raises(ModeChangedError, match="grad mode"):
        check_unchanged(before)
    await task
    check_unchanged(before)


class Watch(TorchFunctionMode):
    """A function mode that does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Trace(TorchDispatchMode):
    """A dispatch mode that does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_modes_that_see_every_operation_bar_queueing() -> None:
    """Function and dispatch modes and functorch transforms are named; a default device is none of them."""
    assert must_run_inline() is None
    with Watch():
        assert must_run_inline() == "the torch function mode Watch"
    with Trace():  # type: ignore[no-untyped-call]
        assert must_run_inline() == "a torch dispatch mode"
    with torch.device("cpu"):
        assert must_run_inline() is None
    seen: list[str | None] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        seen.append(must_run_inline())
        return x * 2

    torch.func.vmap(inner)(torch.ones(3))
    assert seen == ["a functorch transform"]
    assert must_run_inline() is None
