"""One life as its client knows it: which requests it lets begin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from layerzero.actors.remote.restarts import ActorIncarnation
from layerzero.actors.rpc.frames import Address

pytestmark = pytest.mark.asyncio

THERE: Any = SimpleNamespace(peer_closed=False)
GONE: Any = SimpleNamespace(peer_closed=True)


def life() -> ActorIncarnation:
    """A life without a channel."""
    return ActorIncarnation("generation", Address("", "127.0.0.1", 0, "node", b""))


async def test_only_what_is_waited_for_may_begin() -> None:
    """What nobody sent, or was cancelled or answered, begins no more; what may have begun is remembered."""
    one = life()
    assert not one.begin(0, THERE)
    number = one.numbers.new_number()
    assert one.begin(number, THERE)
    assert number in one.started
    one.numbers.ack(number)
    assert not one.begin(number, THERE)


async def test_a_life_that_is_over_lets_nothing_begin() -> None:
    """Its requests go to the next one; so does one whose leave would reach nobody."""
    one = life()
    number = one.numbers.new_number()
    assert not one.begin(number, GONE)
    one.end("a test")
    assert not one.begin(number, THERE)
    assert one.started == set()
