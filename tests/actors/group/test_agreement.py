"""Plan agreement: every interleaving of three ranks, with crashes, delays, refusals and late ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]  # public, not declared

from layerzero.actors.group import agreement
from layerzero.actors.group.agreement import (
    AgreementStore,
    PlanSchedule,
    VoteOutcome,
    answer,
    digest_of,
    propose,
)
from layerzero.actors.remote.stores import TorchStore

PLAN = b'{"kernels":["a","b"]}'
RANKS = 3


# -- the model check ------------------------------------------------------------------------------------

State = TypeVar("State")


@dataclass(frozen=True)
class Call:
    """A call of the store that a rank waits in."""

    method: str
    keys: tuple[str, ...]
    value: bytes = b""


class Waiting(Exception):
    """A rank has come as far as its replies reach, and waits in `args[0]`, a Call."""


class Replies:
    """A store that answers with the replies of a history, one after another."""

    def __init__(self, history: Sequence[Any]) -> None:
        self._history = list(history)

    def _reply(self, *call: Any) -> Any:
        if not self._history:
            raise Waiting(Call(*call))
        return self._history.pop(0)

    def set(self, key: str, value: bytes) -> None:
        self._reply("set", (key,), value)

    def get(self, key: str, timeout_s: float) -> Any:
        return self._reply("get", (key,))

    def wait(self, keys: Sequence[str], timeout_s: float) -> Any:
        return self._reply("wait", tuple(keys))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> Any:
        assert expected == b""
        return self._reply("compare_set", (key,), desired)


Side = Callable[[AgreementStore, float], VoteOutcome]
Make = Callable[[], list[Side]]
Answered = list[tuple[Any, dict[str, bytes]]]
Answers = Callable[[Call, dict[str, bytes]], Answered]
# A rank's history is what its calls were answered with; "lost" ends it. With the store it is the whole state.
Histories = tuple[tuple[Any, ...], ...]
Reached = tuple[Histories, frozenset[tuple[str, bytes]]]


def leads(plan: bytes = PLAN) -> Side:
    return lambda store, timeout_s: propose(store, "v1", plan, range(1, RANKS), timeout_s)


def votes(rank: int, objection: str | None = None) -> Side:
    return lambda store, timeout_s: answer(store, "v1", rank, lambda _: objection, timeout_s)


def sides(refuses: frozenset[int] = frozenset()) -> Make:
    """Rank 0 proposing, the others answering; those in `refuses` vote no."""
    ranks = [votes(rank, "no such kernel" if rank in refuses else None) for rank in range(1, RANKS)]
    return lambda: [leads(), *ranks]


def reached(start: State, follows: Callable[[State], Iterable[State]]) -> Iterator[tuple[State, set[State]]]:
    """Every state that can come of `start`, once, with those that follow it."""
    seen, left = {start}, [start]
    while left:
        state = left.pop()
        after = set(follows(state))
        yield state, after
        left.extend(after - seen)
        seen |= after


def outcomes(
    make: Make, crashes: int, answers: Answers | None = None
) -> Iterator[tuple[VoteOutcome | None, ...]]:
    """What the ranks concluded (None: crashed) in every end state of every order of calls and faults.

    A `get` whose key is missing may time out at any moment, which covers delays and late ranks; one whose key
    is stored may return None too, as if the time had run out before. At most `crashes` ranks stop.
    """

    def pending(histories: Histories) -> list[Any]:
        return [replayed(make, rank, history) for rank, history in enumerate(histories)]

    def follows(state: Reached) -> Iterator[Reached]:
        histories, frozen = state
        waits = pending(histories)
        for rank, call in enumerate(waits):
            if not isinstance(call, Call):
                continue
            for reply, store in (answers or replies)(call, dict(frozen)):
                yield with_one(histories, rank, reply), frozenset(store.items())
            if waits.count("lost") < crashes:
                yield with_one(histories, rank, "lost"), frozen

    nothing: Reached = (((),) * RANKS, frozenset())
    for (histories, _), after in reached(nothing, follows):
        if not after:
            ends = pending(histories)
            assert not any(isinstance(call, Call) for call in ends), "a rank waits for ever"
            yield tuple(end if isinstance(end, VoteOutcome) else None for end in ends)


def replies(call: Call, store: dict[str, bytes]) -> Answered:
    """Each reply that a call may get, with the store after it."""
    if call.method == "set":
        return [(None, {**store, call.keys[0]: call.value})]
    if call.method == "compare_set":
        stored = store.get(call.keys[0], call.value)
        return [(stored, {**store, call.keys[0]: stored})]
    if call.method == "wait":
        return [(tuple(key in store for key in call.keys), store)]
    (key,) = call.keys
    return [(None, store)] + ([(store[key], store)] if key in store else [])


def replayed(make: Make, rank: int, history: tuple[Any, ...]) -> Any:
    """The call that a rank waits in after `history`, its VoteOutcome where it is done, or "lost"."""
    if history and history[-1] == "lost":
        return "lost"
    try:
        return make()[rank](Replies(history), 0.0)
    except Waiting as waiting:
        return waiting.args[0]


@pytest.mark.parametrize("refuses", [(), (1,), (1, 2)], ids=["all agree", "one refuses", "two refuse"])
@pytest.mark.parametrize("crashes", [0, 1, 2])
def test_no_order_of_steps_and_faults_gives_two_outcomes(refuses: tuple[int, ...], crashes: int) -> None:
    """Whoever reaches an end reaches the same one, and nobody commits what somebody refused."""
    ends = set(outcomes(sides(frozenset(refuses)), crashes))
    assert len(ends) > 3
    for end in ends:
        plans = {outcome.plan for outcome in end if outcome is not None}
        assert len(plans) <= 1, end
        assert not refuses or plans <= {None}, end
    committed = any(outcome is not None and outcome.plan == PLAN for end in ends for outcome in end)
    assert committed == (not refuses)


def test_a_decision_that_is_simply_written_gives_two_outcomes() -> None:
    """The negative control: without compare-and-set the same search finds ranks that disagree."""

    def overwriting(call: Call, store: dict[str, bytes]) -> Answered:
        if call.method == "compare_set":
            return [(call.value, {**store, call.keys[0]: call.value})]
        return replies(call, store)

    ends = set(outcomes(sides(), 0, overwriting))
    assert any(len({outcome.plan for outcome in end if outcome is not None}) > 1 for end in ends)


# -- a plan that is agreed while steps are taken ----------------------------------------------------------

OLD, NEW = "old", digest_of(PLAN)
# With what each rank did in turn: "hold" the new plan, take a "step".
Moment = tuple[Histories, frozenset[tuple[str, bytes]], tuple[tuple[str, ...], ...]]


def standing(events: tuple[str, ...], at: int, by: Callable[[PlanSchedule, int], str]) -> list[str]:
    """The plan of each step of a rank that did `events`, where the new plan is for step `at`."""
    plans: list[str] = []
    order = PlanSchedule()
    order.add(OLD, 1, 1)
    order.adopt(OLD)
    for event in events:
        if event == "hold":
            order.add(NEW, 2, at)
        else:
            plans.append(by(order, len(plans) + 1))
    return plans


def led(order: PlanSchedule, number: int) -> str:
    return order.activate_due(number)


def test_the_newest_plan_that_is_due_holds_and_no_older_one_after_it() -> None:
    """Of two that are due at once, of one that a follower is named late, of one that is agreed too late."""
    order = PlanSchedule()
    order.add("first", 1, 1)
    assert order.activate_due(1) == "first" and not order.has_pending
    order.add("second", 2, 5)
    order.add("third", 3, 5)
    assert (order.activate_due(4), order.has_pending) == ("first", True)
    assert (order.activate_due(5), order.has_pending) == ("third", False)
    assert order.adopt("second") == "third" and not order.knows("second")
    order.add("second", 2, 5)
    assert (order.activate_due(6), order.has_pending) == ("third", False)


class Walk:
    """One moment: what every rank was answered, what stands in the store, what every rank did.

    Rank 0 takes `steps` steps whenever it likes; a follower takes rank 0's in their order, and waits with one
    whose plan it has voted for and not learned the outcome of. `alone`: followers go by the number only.
    """

    make = staticmethod(sides())
    known: ClassVar[dict[Any, Any]] = {}

    def __init__(self, state: Moment, at: int, alone: bool) -> None:
        self.histories, self.store, self.events = state
        self.alone = alone
        self.waits = [self._pending(rank) for rank in range(RANKS)]
        first = standing(self.events[0], at, led)
        by = led if alone else lambda order, number: order.adopt(first[number - 1])
        self.plans = (first, *(standing(own, at, by) for own in self.events[1:]))

    def _pending(self, rank: int) -> Any:
        at = (rank, self.histories[rank])
        if at not in self.known:
            self.known[at] = replayed(self.make, *at)
        return self.known[at]

    def follows(self, steps: int, crashes: int) -> Iterator[Moment]:
        """Every next moment."""
        for rank, step in enumerate(self.waits):
            if step == "lost":
                continue
            if isinstance(step, Call):
                for reply, store in replies(step, dict(self.store)):
                    yield with_one(self.histories, rank, reply), frozenset(store.items()), self.events
                if self.waits.count("lost") < crashes:
                    yield with_one(self.histories, rank, "lost"), self.store, self.events
            elif step.plan is not None and "hold" not in self.events[rank]:
                yield self.histories, self.store, with_one(self.events, rank, "hold")
            if self._may_step(rank, steps):
                yield self.histories, self.store, with_one(self.events, rank, "step")

    def _may_step(self, rank: int, steps: int) -> bool:
        first, count, wait = self.plans[0], len(self.plans[rank]), self.waits[rank]
        if rank == 0 or count >= len(first):
            return rank == 0 and count < steps
        undecided = isinstance(wait, Call) or wait.plan is not None
        return self.alone or first[count] == OLD or "hold" in self.events[rank] or not undecided


def with_one(all_of: tuple[Any, ...], rank: int, more: Any) -> tuple[Any, ...]:
    return (*all_of[:rank], (*all_of[rank], more), *all_of[rank + 1 :])


def walks(at: int, steps: int, crashes: int, *, alone: bool = False) -> Iterator[tuple[list[str], ...]]:
    """The plan of every step on every rank, for every order of voting, learning, stepping and crashing."""
    nothing: tuple[Any, ...] = ((),) * RANKS
    begin: Moment = (nothing, frozenset(), nothing)
    for moment, after in reached(begin, lambda moment: Walk(moment, at, alone).follows(steps, crashes)):
        if not after:
            yield Walk(moment, at, alone).plans


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("crashes", [0, 1])
def test_no_order_of_votes_and_steps_parts_the_ranks(at: int, crashes: int) -> None:
    """Whenever a rank learns of the plan: each step has one plan everywhere, and no rank waits for ever."""
    ends = list(walks(at, 2, crashes))
    plans = set()
    for first, *others in ends:
        assert len(first) == 2 or crashes
        for own in others:
            assert own == first[: len(own)]
            assert len(own) == len(first) or crashes
        plans.add(tuple(first))
    late = {("old", "old"), ("old", NEW)} | ({(NEW, NEW)} if at == 1 else set())
    assert plans >= (late if at < 3 else {("old", "old")})
    assert all(NEW not in first[: at - 1] for first in plans)


def test_a_step_number_alone_parts_the_ranks() -> None:
    """The negative control: followers that go by the number and not by rank 0's word run other plans."""
    assert any(own != first[: len(own)] for first, *others in walks(1, 2, 0, alone=True) for own in others)


# -- over real stores -----------------------------------------------------------------------------------


def tcp_stores(count: int) -> list[Any]:
    """One server and clients of it, as torchrun's ranks have."""
    wait = timedelta(seconds=10)
    server = TCPStore("127.0.0.1", 0, None, True, wait, wait_for_workers=False)
    clients = [
        TCPStore("127.0.0.1", server.port, None, False, wait, wait_for_workers=False) for _ in range(count)
    ]
    return [server, *clients]


@pytest.fixture(params=["hash", "tcp"])
def stores(request: pytest.FixtureRequest) -> list[Any]:
    """One store client a rank."""
    if request.param == "hash":
        store = HashStore()
        return [TorchStore(store) for _ in range(RANKS)]
    server, *clients = tcp_stores(RANKS)
    request.addfinalizer(lambda: server)
    return [TorchStore(client) for client in clients]


def together(sides: list[tuple[Side, Any, float]]) -> list[VoteOutcome]:
    """The outcome of each side, all run at once in threads."""
    with ThreadPoolExecutor(len(sides)) as threads:
        ends = [threads.submit(side, store, timeout_s) for side, store, timeout_s in sides]
        return [end.result() for end in ends]


def test_ranks_that_accept_commit(stores: list[Any]) -> None:
    """Three ranks, no objection: all have the plan."""
    ends = together([(side, store, 5.0) for side, store in zip(sides()(), stores, strict=True)])
    assert [end.plan for end in ends] == [PLAN] * 3


def test_one_objection_aborts_for_all_with_its_reason(stores: list[Any]) -> None:
    """The reason of the rank that refused reaches every rank."""
    reason = f"kernel {agreement.digest_of(PLAN)[:2]}… is not installed"
    ranks = [leads(), votes(1), votes(2, reason)]
    ends = together([(side, store, 5.0) for side, store in zip(ranks, stores, strict=True)])
    assert [end.plan for end in ends] == [None] * 3
    assert len({end.reason for end in ends}) == 1
    assert "rank 2 refuses" in ends[0].reason and reason in ends[0].reason


def test_a_rank_that_never_votes_aborts_for_all(stores: list[Any]) -> None:
    """Rank 2 is hung: the others abort in their time, and rank 2 learns it when it comes back."""
    ends = together([(leads(), stores[0], 0.2), (votes(1), stores[1], 5.0)])
    assert [end.plan for end in ends] == [None, None]
    assert "rank 2 did not vote in time" in ends[0].reason
    assert votes(2)(stores[2], 0.2) == ends[0]


def test_a_leader_that_dies_after_its_proposal_aborts_for_all(stores: list[Any]) -> None:
    """No rank waits for a decision that never comes."""
    stores[0].set("v1/plan", PLAN)
    ends = together([(votes(rank), store, 0.2) for rank, store in zip((1, 2), stores[1:], strict=True)])
    assert [end.plan for end in ends] == [None, None]
    assert ends[0] == ends[1]


def test_an_outcome_that_no_rank_voted_for_is_refused() -> None:
    """A store that another process wrote into is an error, never a plan."""
    store = TorchStore(HashStore())
    store.set("v1/plan", PLAN)
    store.set("v1/outcome", b"commit:0123456789abcdef")
    with pytest.raises(ValueError, match="fits no plan"):
        votes(1)(store, 1.0)
