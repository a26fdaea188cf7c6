"""Steps of a rank group that are announced while the step before computes; and what goes wrong meanwhile.

Two ranks are threads of this process, each with a device that answers late (`late_device.py`). A token is
read on rank 0's host only when the devices have computed it, and a gate says when they do.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, not declared

import layerzero as lz
from layerzero.actors.group import functions
from layerzero.actors.group.join import RankHandle
from layerzero.actors.group.step_message import MAX_VALUES, decode, unpack
from layerzero.api import readback
from layerzero.kvcache import PageAllocator, PagesExhaustedError
from layerzero.spec.errors import ConfigurationError, ConsistencyError, DeviceLostError
from tests.actors.group.late_device import UNREAD, WAIT_S, LateDevice, Sum

RANKS, STEPS, MODULUS = 2, 6, 997
PAGES = 8
WIDE = 8  # of a row, so that each begins where 64 bytes do: a copy on the host would find nothing yet


class Rank:
    """One rank's model: the next token of each row, from all ranks' parts of it."""

    def __init__(self, member: RankHandle, total: Sum, gates: Gates) -> None:
        self.member, self._total, self._gates = member, total, gates
        self.device = LateDevice()
        self.launched = 0
        self.raise_at: dict[int, Exception] = {}  # by step, on the host
        self.fault_at: int | None = None  # the step that the device fails in
        self.step = member.batched(self._step, name="step", replicated=True)

    def _step(self, ids: Tensor) -> Tensor:
        number, self.launched = self.launched, self.launched + 1
        if number in self.raise_at:
            raise self.raise_at[number]
        out = torch.full_like(ids, UNREAD)

        def compute() -> None:
            self._gates.wait(number)
            if number == self.fault_at:
                self._total.abort()
                raise RuntimeError("an illegal address")
            out.copy_(self._total(self.member.rank, ids * (self.member.rank + 1) + 1) % MODULUS)

        self.device.launch(compute)
        self._gates.launched(self.member.rank, number)
        return out


class Gates:
    """When the devices may compute a step: once `until` says so of the steps that ranks have launched."""

    def __init__(self, until: Callable[[int, list[int]], bool] = lambda step, launched: True) -> None:
        self._until, self._changed = until, threading.Condition()
        self._launched = [0] * RANKS
        self.opened = 0  # every step before is computed whatever else

    def launched(self, rank: int, step: int) -> None:
        with self._changed:
            self._launched[rank] = step + 1
            self._changed.notify_all()

    def open(self, steps: int) -> None:
        """Let the first `steps` be computed."""
        with self._changed:
            self.opened = steps
            self._changed.notify_all()

    def wait(self, step: int) -> None:
        with self._changed:
            ready = self._changed.wait_for(
                lambda: step < self.opened or self._until(step, self._launched), WAIT_S
            )
        if not ready:
            raise TimeoutError(f"step {step} was never let through, launched: {self._launched}")


def one_behind() -> Gates:
    """No device computes a step before every rank has launched the next one."""
    return Gates(lambda step, launched: min(launched) > min(step + 1, STEPS - 1))


def row(token: int) -> Tensor:
    """A token as a step takes it."""
    return torch.full((1, WIDE), token)


def text(first: int, steps: int) -> list[int]:
    """What follows `first`, in one process."""
    tokens = []
    for _ in range(steps):
        first = sum(first * (rank + 1) + 1 for rank in range(RANKS)) % MODULUS
        tokens.append(first)
    return tokens


Lead = Callable[[Rank], Any]


def run_ranks(
    monkeypatch: pytest.MonkeyPatch, lead: Lead, gates: Gates | None = None, **altered: Any
) -> tuple[list[Rank], list[BaseException | None]]:
    """Rank 0 runs `lead`, rank 1 follows; `altered` is set on rank 1's model. Neither may hang."""
    store, total, gates = HashStore(), Sum(RANKS), gates or Gates()
    ranks: list[Any] = [None] * RANKS
    errors: list[BaseException | None] = [None] * RANKS

    async def main(index: int) -> None:
        async with (
            lz.start(lz.Settings(inference=True, perfdb=None), scoped=True),
            lz.rank_group(RANKS, rank=index, store=store, epoch=0, timeout_s=WAIT_S) as member,
        ):
            rank = ranks[index] = Rank(member, total, gates)
            for name, value in altered.items():
                setattr(rank, name, value if index else getattr(rank, name))
            if index:
                await member.follow()
            else:
                monkeypatch.setattr(readback, "to_host", rank.device.to_host)
                await lead(rank)

    def run(index: int) -> None:
        try:
            asyncio.run(main(index))
        except BaseException as error:
            errors[index] = error
            # A collective that waits for a rank that has gone is broken by a watchdog, not at once.
            threading.Timer(2.0, total.abort).start()

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    for rank in ranks:
        rank.device.close()
    return ranks, errors


def messages(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """What the step messages that rank 0 sends from here on bring: counts, columns, columns in parts."""
    from layerzero.actors.group.channel import LeaderChannel

    sent: list[list[Any]] = []
    send = LeaderChannel.send

    def noted(channel: LeaderChannel, frame: bytes, **options: Any) -> None:
        if values := decode(frame).values:
            sent.append(unpack(values))
        send(channel, frame, **options)

    monkeypatch.setattr(LeaderChannel, "send", noted)
    return sent


async def tokens_of(
    rank: Rank, request: int, *, steps: int = STEPS, stop: int | None = None
) -> AsyncIterator[int]:
    """A request as anybody writes it: a loop over `lz.run_ahead`, which ends behind `stop`."""

    async def step(ids: Tensor) -> Tensor:
        out: Tensor = await rank.step(request, ids)
        return out

    async with aclosing(lz.run_ahead(step, row(request), max_steps=steps)) as tokens:
        async for token in tokens:
            yield int(token[0, 0])
            if int(token[0, 0]) == stop:
                return


async def whole(rank: Rank, request: int, **options: Any) -> list[int]:
    return [token async for token in tokens_of(rank, request, **options)]


def test_a_step_is_announced_launched_and_followed_before_the_devices_have_the_tokens_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing computes step n before all have launched n + 1: whoever read tokens first would hang."""
    sent, found = messages(monkeypatch), []
    gates = one_behind()

    async def lead(rank: Rank) -> None:
        found.extend(await asyncio.gather(*(whole(rank, request) for request in (3, 5, 8))))

    _, errors = run_ranks(monkeypatch, lead, gates)
    assert errors == [None, None]
    assert found == [text(first, STEPS) for first in (3, 5, 8)]
    values, *rows = [columns[0] for _, columns, _ in sent]
    assert values[:, 0].tolist() == [3, 5, 8], "the first tokens come from the host"
    assert rows == [[[step, 0, 3]] for step in range(1, STEPS)], "the others are named and not brought"


def test_tokens_are_the_same_whether_each_is_read_first_or_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that reads every token before its next step, beside one that runs ahead."""
    found: dict[str, list[int]] = {}

    async def lead(rank: Rank) -> None:
        found["behind"] = await whole(rank, 4)
        ids, first = row(4), []
        for _ in range(STEPS):
            ids = await rank.step(4, ids)
            first.append(int((await readback.to_host(ids))[0, 0]))
        found["first"] = first
        ids, by_value = row(4), []
        for _ in range(STEPS):
            ids = (await readback.to_host(await rank.step(4, ids))).clone()
            by_value.append(int(ids[0, 0]))
        found["by value"] = by_value

    assert run_ranks(monkeypatch, lead)[1] == [None, None]
    assert found == dict.fromkeys(("behind", "first", "by value"), text(4, STEPS))


def test_a_caller_that_holds_its_token_for_long_goes_on_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks keep the results of some steps only; a later step brings the token, and the text is the same."""
    monkeypatch.setattr(functions, "MAX_KEPT_STEPS", 2)
    found: list[int] = []

    async def lead(rank: Rank) -> None:
        held = await rank.step(7, row(7))
        assert rank.member.holds(held)
        await whole(rank, 9)
        assert not rank.member.holds(held)
        assert len(rank.member._results._by_step) == len(rank.member._results._step_by_memory) == 2
        found.append(int((await readback.to_host(await rank.step(7, held)))[0, 0]))

    assert run_ranks(monkeypatch, lead)[1] == [None, None]
    assert found == text(7, 2)[1:]


class Requests:
    """Requests with a page each: what each found, and how it ended."""

    def __init__(self) -> None:
        self.pages = PageAllocator(PAGES)
        self.tokens: dict[int, list[int]] = {}
        self.errors: dict[int, BaseException] = {}

    async def run(self, rank: Rank, request: int, on_token: Any = None, **options: Any) -> None:
        pages = self.pages.allocate(1)
        found = self.tokens[request] = []
        try:
            async for token in tokens_of(rank, request, **options):
                found.append(token)
                if on_token is not None:
                    on_token(token)
        except BaseException as error:
            self.errors[request] = error
        finally:
            self.pages.free(pages)


def test_a_request_cancelled_between_its_launch_and_its_read_costs_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It leaves with a step launched and none read: the others' texts are whole, its pages come back."""
    requests, gates = Requests(), Gates(lambda step, launched: False)

    async def lead(rank: Rank) -> None:
        tasks = [asyncio.ensure_future(requests.run(rank, request)) for request in (3, 5, 8)]
        while rank.launched < 2:  # noqa: ASYNC110  launched by another thread
            await asyncio.sleep(0.001)
        tasks[-1].cancel()
        await asyncio.sleep(0)
        gates.open(STEPS)
        await asyncio.gather(*tasks, return_exceptions=True)

    assert run_ranks(monkeypatch, lead, gates)[1] == [None, None]
    assert {r: requests.tokens[r] for r in (3, 5)} == {r: text(r, STEPS) for r in (3, 5)}
    assert requests.tokens[8] == [] and isinstance(requests.errors[8], asyncio.CancelledError)
    assert requests.pages.free_pages == PAGES


def test_a_stop_token_is_found_one_step_late_and_its_step_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text ends where it ends without running ahead; one row more was computed, for nobody."""
    requests, stop = Requests(), text(3, STEPS)[2]
    # The device computes no step of the first request before the next one is launched.
    gates = Gates(lambda step, launched: step > 2 or min(launched) > step + 1)

    async def lead(rank: Rank) -> None:
        await requests.run(rank, 3, stop=stop)
        assert requests.pages.free_pages == PAGES
        await requests.run(rank, 5)

    ranks, errors = run_ranks(monkeypatch, lead, gates)
    assert errors == [None, None]
    assert requests.tokens == {3: text(3, 3), 5: text(5, STEPS)}
    assert [rank.launched for rank in ranks] == [4 + STEPS] * RANKS


@pytest.mark.parametrize("where", ["before its step", "beside its token"])
def test_what_one_request_raises_is_its_own(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """No page for the next token while a step runs ahead, or an error in its own loop: the others go on."""
    requests, gates = Requests(), one_behind()
    error = PagesExhaustedError("none is free") if where == "before its step" else ValueError("its own")

    async def lead(rank: Rank) -> None:
        step, calls = rank.step, [0]

        async def full(request: int, ids: Tensor) -> Tensor:
            calls[0] += request == 8
            if request == 8 and calls[0] == 4:
                raise error
            out: Tensor = await step(request, ids)
            return out

        def raising(token: int) -> None:
            if token == text(8, 3)[-1]:
                raise error

        if where == "before its step":
            rank.step = full
        await asyncio.gather(
            *(requests.run(rank, r, raising if r == 8 and rank.step is step else None) for r in (3, 5, 8))
        )

    assert run_ranks(monkeypatch, lead, gates)[1] == [None, None]
    assert requests.tokens == {3: text(3, STEPS), 5: text(5, STEPS), 8: text(8, 3)}
    assert requests.errors == {8: error}
    assert requests.pages.free_pages == PAGES


def test_a_follower_that_raises_with_a_step_in_flight_fails_every_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 cannot run step 3 while step 2 computes: all get the reason, nothing hangs, pages come back."""
    requests = Requests()

    async def lead(rank: Rank) -> None:
        await asyncio.gather(*(requests.run(rank, request) for request in (3, 5, 8)))

    _, errors = run_ranks(monkeypatch, lead, raise_at={3: ValueError("no weights")})
    assert errors[0] is None and isinstance(errors[1], ValueError)
    assert set(requests.errors) == {3, 5, 8}
    for request, error in requests.errors.items():
        assert isinstance(error, DeviceLostError) and "no weights" in str(error)
        assert requests.tokens[request] == text(request, 3), "what was computed before is delivered"
    assert requests.pages.free_pages == PAGES


def test_a_device_that_fails_with_two_steps_in_flight_fails_every_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1's device breaks in step 2 with step 3 behind it: every caller's read raises, nothing hangs."""
    requests, gates = Requests(), one_behind()

    async def lead(rank: Rank) -> None:
        await asyncio.gather(*(requests.run(rank, request) for request in (3, 5, 8)))

    run_ranks(monkeypatch, lead, gates, fault_at=2)
    assert set(requests.errors) == {3, 5, 8}
    for request, error in requests.errors.items():
        assert isinstance(error, RuntimeError) and "device fault" in str(error)
        assert requests.tokens[request] == text(request, 2)
    assert requests.pages.free_pages == PAGES


def test_what_only_rank_0_needs_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object of rank 0's stays there; the other ranks get None for each caller."""
    seen: dict[int, list[Any]] = {}
    rule = object()  # which no message could bring

    def keep(member: RankHandle) -> Any:
        def step(x: Tensor, rules: list[Any]) -> Tensor:
            seen.setdefault(member.rank, []).append(rules)
            return x

        return member.batched(step, name="keep", unsent=("rules",))

    async def lead(rank: Rank) -> None:
        await asyncio.gather(*(rank.rules(n, torch.ones(1), rule) for n in range(2)))  # type: ignore[attr-defined]

    made = Rank.__init__

    def with_rules(self: Rank, *args: Any) -> None:
        made(self, *args)
        self.rules = keep(self.member)  # type: ignore[attr-defined]

    monkeypatch.setattr(Rank, "__init__", with_rules)
    assert run_ranks(monkeypatch, lead)[1] == [None, None]
    assert seen == {0: [[rule] * 2], 1: [[None] * 2]}


def test_bad_arguments_of_batched_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter that is none, values that nothing sends, a result that cannot be kept."""

    async def lead(rank: Rank) -> None:
        def step(x: Tensor) -> Tensor:
            return x

        with pytest.raises(ValueError, match="unsent needs parameters among x, got rules"):
            rank.member.batched(step, name="a", unsent=("rules",))
        with pytest.raises(ConfigurationError, match="replicated and unsent need send=True"):
            rank.member.batched(step, name="b", send=False, replicated=True)
        listed = rank.member.batched(lambda x: [1], name="c", replicated=True)
        with pytest.raises(TypeError, match="c needs to return a tensor, as it is replicated, got list"):
            await listed("r", torch.ones(1, 1))

    run_ranks(monkeypatch, lead)


def test_only_rows_as_they_were_kept_are_named() -> None:
    """Rows of a result, one by one or together; not what was written since, looks otherwise or is a copy."""
    kept = functions.ReplicatedResults()
    whole = torch.arange(12).view(6, 2)
    kept.keep(4, whole)
    assert kept.find(whole) == (4, 0, 6) and kept.find(whole[2:5]) == (4, 2, 3)
    others = (whole.clone(), whole[:, :1], whole.flatten(), whole.view(torch.float64), whole[::2], whole.t())
    assert [kept.find(each) for each in others] == [None] * len(others)
    assert kept.parts(whole[1:4], [whole[1:2], whole[2:4]]) == [[4, 1, 3]]
    own = torch.ones(1, 2, dtype=torch.int64)
    pieces = [whole[3:4], whole[4:5], whole[:1], own, whole[1:2]]
    mixed: Any = kept.parts(torch.cat(pieces), pieces)
    assert mixed[:2] == [[4, 3, 2], [4, 0, 1]] and mixed[2].tolist() == [[1, 1]] and mixed[3] == [4, 1, 1]
    assert kept.join_parts(mixed).tolist() == [[6, 7], [8, 9], [0, 1], [1, 1], [2, 3]]
    whole[0, 0] = 7
    assert kept.find(whole) is None, "its rows are others now"
    for foreign in ([5, 0, 1], [4, 5, 2]):
        with pytest.raises(ConsistencyError, match="got results of 4"):
            kept.join_parts([foreign])
    large = torch.zeros(MAX_VALUES // 8 + 1, dtype=torch.int64)
    for odd in (large, torch.zeros(0, 2), torch.zeros(2, 4).t(), torch.tensor(1)):
        kept.keep(5, odd)
        assert kept.find(odd) is None
