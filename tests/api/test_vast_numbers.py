"""Numbers that no float holds are errors that name their argument, and blocks of a policy are used again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch

import layerzero as lz
import layerzero.sync
from layerzero.selection.policy import make_rule

X = torch.ones(2, 8)
GIVEN: dict[str, Callable[[Any], Any]] = {
    "timeout": lambda vast: asyncio.run(awaited(lz.rms_norm(X, timeout=vast))),
    "timeout of a function": lambda vast: asyncio.run(awaited(lz.batched(Rows().same)(X, timeout=vast))),
    "priority": lambda vast: asyncio.run(awaited(lz.rms_norm(X, priority=vast))),
    "eps": lambda vast: layerzero.sync.rms_norm(X, eps=vast),
    "dim": lambda vast: layerzero.sync.layer_norm(X, eps=-vast),
    "for_s": lambda vast: lz.lock("rms_norm", "reference", for_s=vast),
    "until": lambda vast: make_rule("deny", "x", until=vast),
    "add_us": lambda vast: make_rule("boost", "x", add_us=vast),
    "factor": lambda vast: make_rule("boost", "x", factor=vast),
    "hang_s": lambda vast: lz.Settings(hang_s=vast),
}
NAMES = {"timeout of a function": "timeout", "dim": "eps"}


class Rows:
    def same(self, x: torch.Tensor) -> torch.Tensor:
        return x


async def awaited(call: Any) -> Any:
    return await call


@pytest.mark.parametrize("exponent", [400, 5000])
@pytest.mark.parametrize("name", GIVEN)
def test_a_vast_number_is_an_error_of_its_argument(name: str, exponent: int) -> None:
    """Larger than any float, and too long for Python to write."""
    with lz.start(lz.Settings(device="cpu", warm="off"), scoped=True):
        with pytest.raises((ValueError, lz.ConfigurationError)) as raised:
            GIVEN[name](10**exponent)
        assert (
            str(raised.value).startswith(f"{NAMES.get(name, name)} needs ") and len(str(raised.value)) < 200
        )


def names(block: Any) -> list[str]:
    """The kernels before, inside, inside once more, behind the inner block, and behind both."""
    seen = [lz.which("rms_norm", X)]
    with block:
        seen.append(lz.which("rms_norm", X))
        with block:
            seen.append(lz.which("rms_norm", X))
        seen.append(lz.which("rms_norm", X))
    return [*seen, lz.which("rms_norm", X)]


@pytest.mark.parametrize("make", [lambda: lz.disable(), lambda: lz.prefer("reference")])
def test_a_block_of_a_policy_may_be_entered_again(make: Callable[[], Any]) -> None:
    """Behind itself, inside itself, as a decorator, and from several tasks at once."""
    block = make()

    inside = block(lambda: lz.which("rms_norm", X))

    async def task(turns: int) -> list[str]:
        seen = []
        for _ in range(2):
            with block:
                await asyncio.sleep(0)
                seen.append(lz.which("rms_norm", X))
                for _ in range(turns):
                    await asyncio.sleep(0)
            seen.append(lz.which("rms_norm", X))
        return seen

    async def behind() -> str:
        """Under the rules behind its first step, too."""
        await asyncio.sleep(0)
        return lz.which("rms_norm", X)

    assert asyncio.run(block(behind)()) == inside()

    async def crowd() -> list[list[str]]:
        return list(await asyncio.gather(*(task(turns) for turns in (0, 3, 1))))

    with lz.start(lz.Settings(device="cpu", warm="off"), scoped=True):
        usual, reference = lz.which("rms_norm", X), "reference.rms_norm"
        assert usual != reference
        for _ in range(2):
            assert names(block) == [usual, reference, reference, reference, usual]
            assert (inside(), lz.which("rms_norm", X)) == (reference, usual)
        assert asyncio.run(crowd()) == [[reference, usual, reference, usual]] * 3


def test_blocks_that_end_out_of_order_restore_what_was_around_each() -> None:
    """And one that ends where it never began says so."""
    with lz.start(lz.Settings(device="cpu", warm="off"), scoped=True):
        usual = lz.which("rms_norm", X)
        first, second = lz.disable(), lz.prefer("reference")
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert lz.which("rms_norm", X) == usual
        second.__exit__(None, None, None)
        assert lz.which("rms_norm", X) == "reference.rms_norm"  # what was around it when it began
        with pytest.raises(RuntimeError, match=r"prefer\('reference'\) needs to end where it began"):
            second.__exit__(None, None, None)
    assert lz.which("rms_norm", X)


def doubled(x: torch.Tensor, names: list[list[str]]) -> torch.Tensor:
    """Notes the kernel that an op inside it would take."""
    for each in names:
        each.append(lz.which("rms_norm", x))
    return x * 2


def test_what_is_awaited_is_awaited_under_the_rules() -> None:
    """Of a batched function, an op and whatever returns a coroutine, as of a coroutine function."""
    block, seen = lz.prefer("reference"), list[str]()

    async def one() -> None:
        await asyncio.sleep(0)
        seen.append(lz.which("rms_norm", X))

    async def crowd() -> None:
        await block(lz.batched(doubled))(X, seen)
        await block(lambda: one())()
        await block(lz.rms_norm)(X)
        selection = lz.last_selection()
        assert selection is not None
        seen.append(selection.kernel)

    with lz.start(lz.Settings(device="cpu", warm="off"), scoped=True):
        asyncio.run(crowd())
    assert seen == ["reference.rms_norm"] * 3


def test_a_generator_is_told_to_enter_the_block_itself() -> None:
    """Its steps come when their caller wants them, and would run outside of the rules."""

    def steps() -> Iterator[int]:
        yield 1

    async def stream() -> AsyncIterator[int]:
        yield 1

    for generator in (steps, stream):
        with pytest.raises(
            TypeError, match=rf"prefer\('reference'\) needs .* got the .*{generator.__name__}: enter"
        ):
            lz.prefer("reference")(generator)
