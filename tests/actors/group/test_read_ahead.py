"""A follower that prepares its steps: read while it runs those before, in order, errors in their place."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from torch import Tensor

from layerzero.actors.group import steps
from layerzero.actors.group.channel import LeaderChannel
from layerzero.actors.group.join import RankHandle
from layerzero.spec.errors import ConfigurationError, DeviceLostError
from layerzero.spec.reasons import Reason
from tests.actors.group.test_join import Rank, rank_group, rows
from tests.waiting import LIMIT_S


async def lead(member: RankHandle, seen: Rank, count: int = 3) -> None:
    """One request in so many steps, of which rank 0 waits for none."""
    step = member.batched(lambda x: x, name="step", alike=False)
    for number in range(count):
        await step("request", rows(float(number)).expand(number + 1, 8))


def test_a_step_is_prepared_while_the_one_before_it_runs() -> None:
    """The first step ends when the third has been prepared, on another thread, with no gradient recorded."""
    third, prepared, ran = threading.Event(), [], []

    async def obey(member: RankHandle, seen: Rank) -> None:
        def prepare(counts: list[int]) -> None:
            prepared.append(
                (counts, threading.current_thread() is runs[-1], torch.is_inference_mode_enabled())
            )
            if len(prepared) == 3:
                third.set()

        def step(x: Tensor) -> Tensor:
            runs.append(threading.current_thread())
            ran.append((len(x), third.wait(LIMIT_S)))
            return x

        runs: list[threading.Thread] = [threading.current_thread()]
        member.batched(step, name="step", alike=False, prepare=prepare)
        await member.follow()

    _, errors = rank_group([lead, obey])
    assert errors == [None, None]
    assert ran == [(1, True), (2, True), (3, True)]
    assert [counts for counts, _, _ in prepared] == [[1], [2], [3]]
    assert not any(on_same for _, on_same, _ in prepared)


def test_what_preparing_a_step_raises_comes_after_the_steps_before_it() -> None:
    """Two steps run; then the follower has the error itself, and rank 0 its words."""
    ran: list[int] = []

    async def obey(member: RankHandle, seen: Rank) -> None:
        def prepare(counts: list[int]) -> None:
            if counts == [3]:
                raise ConfigurationError("no place for three rows")

        def step(x: Tensor) -> Tensor:
            ran.append(len(x))
            return x

        member.batched(step, name="step", alike=False, prepare=prepare)
        await member.follow()

    async def lead_on(member: RankHandle, seen: Rank) -> None:
        await lead(member, seen)
        async with asyncio.timeout(LIMIT_S):
            while member.failure is None:  # noqa: ASYNC110  the channel's thread says it
                await asyncio.sleep(0.001)
        member.group.raise_if_failed()

    _, (leads, follows) = rank_group([lead_on, obey])
    assert ran == [1, 2]
    assert isinstance(follows, ConfigurationError)
    assert isinstance(leads, DeviceLostError) and "no place for three rows" in str(leads)


@pytest.mark.parametrize("ahead", [True, False], ids=["reading ahead", "not reading ahead"])
@pytest.mark.parametrize("sent", [1, 6], ids=["in its last step", "with steps before it"])
def test_a_collective_that_broke_with_rank_0_is_a_lost_device(
    monkeypatch: pytest.MonkeyPatch, ahead: bool, sent: int
) -> None:
    """A library's own error in a follower's step; a heartbeat and step messages of before are on its line."""
    monkeypatch.setattr(steps, "MAX_ANNOUNCED", 2)
    begun, gone = threading.Event(), threading.Event()

    async def lead_and_vanish(member: RankHandle, seen: Rank) -> None:
        channel = member.group.channel
        assert isinstance(channel, LeaderChannel)
        await lead(member, seen, sent)

        def vanish() -> None:
            begun.wait(LIMIT_S)
            channel._send_heartbeat()
            channel.close()
            gone.set()

        await asyncio.to_thread(vanish)

    async def obey(member: RankHandle, seen: Rank) -> None:
        member.batched(broken, name="step", alike=False, prepare=(lambda counts: None) if ahead else None)
        await member.follow()

    def broken(x: Tensor) -> Tensor:
        begun.set()
        assert gone.wait(LIMIT_S)
        raise RuntimeError("Connection closed by peer")

    _, (_, follows) = rank_group([lead_and_vanish, obey])
    assert isinstance(follows, DeviceLostError) and "rank 0 is gone" in str(follows)
    assert follows.context["reason"] is Reason.DEVICE_LOST
    assert str(follows.__cause__) == "Connection closed by peer"


@pytest.mark.parametrize("ahead", [True, False], ids=["reading ahead", "not reading ahead"])
def test_what_a_step_raises_beside_a_rank_0_that_lives_is_its_own_error(ahead: bool) -> None:
    """Rank 0 sends heartbeats on: nothing is lost but the follower, and rank 0 has its words."""
    failed = threading.Event()

    async def lead_on(member: RankHandle, seen: Rank) -> None:
        await lead(member, seen, 1)
        member.group.when_failed(lambda why: failed.set())
        assert await asyncio.to_thread(failed.wait, LIMIT_S)
        member.group.raise_if_failed()

    async def obey(member: RankHandle, seen: Rank) -> None:
        def step(x: Tensor) -> Tensor:
            raise RuntimeError("a mistake in the program")

        member.batched(step, name="step", alike=False, prepare=(lambda counts: None) if ahead else None)
        await member.follow()

    _, (leads, follows) = rank_group([lead_on, obey])
    assert type(follows) is RuntimeError and str(follows) == "a mistake in the program"
    assert isinstance(leads, DeviceLostError) and "a mistake in the program" in str(leads)


def test_a_follower_reads_no_more_than_its_limit_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs in a step leaves the others in its line, where rank 0 notices that it takes nothing."""
    monkeypatch.setattr(steps, "MAX_ANNOUNCED", 2)
    prepared: list[int] = []
    highest: list[int] = []
    all_sent = threading.Event()

    async def lead_on(member: RankHandle, seen: Rank) -> None:
        await lead(member, seen, 6)
        all_sent.set()

    async def obey(member: RankHandle, seen: Rank) -> None:
        def step(x: Tensor) -> Tensor:
            assert all_sent.wait(LIMIT_S)
            highest.append(len(prepared) - len(x))
            return x

        member.batched(step, name="step", alike=False, prepare=lambda counts: prepared.append(counts[0]))
        await member.follow()

    _, errors = rank_group([lead_on, obey])
    assert errors == [None, None]
    assert prepared == [1, 2, 3, 4, 5, 6] and len(highest) == 6
    assert max(highest) <= 2


@pytest.mark.parametrize("ahead", [True, False], ids=["reading ahead", "not reading ahead"])
def test_a_slow_step_outlives_a_rank_0_that_left_in_order(
    monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """Rank 0 did its part of it: the follower's step ends, then its walk does."""
    monkeypatch.setattr(steps, "ENDS_BY_ITSELF_S", 0.05)
    left, ran = threading.Event(), []

    async def obey(member: RankHandle, seen: Rank) -> None:
        def step(x: Tensor) -> Tensor:
            assert member.group.channel is not None
            member.group.channel.wait_for_hang_up()  # type: ignore[union-attr]
            ran.append(left.wait(0.3))
            return x

        member.batched(step, name="step", alike=False, prepare=(lambda counts: None) if ahead else None)
        await member.follow()

    _, errors = rank_group([lead, obey])
    assert errors == [None, None]
    assert ran == [False] * 3
