"""Plan agreement without I/O: what each rank asks of the store, step by step, and what it concludes.

Rank 0 puts a plan up, every other rank votes, rank 0 decides by writing the outcome where nothing stands yet.
Whoever waits too long writes an abort to the same place. The store keeps the first word, so that every rank
that learns an outcome learns the same one, whoever crashed, lagged or refused in between. No rank decides
alone, and no collective is used, so that a rank that hangs breaks nothing for the others.

Who refuses writes that abort too, before it votes, so that rank 0 waits for votes and reads none. Each way to
the store and back costs all of them its time.

Each side is a generator: it yields a `Put`, `Take`, `Meet` or `Swap`, is sent the answer, and returns an
`VoteOutcome`. `carry_out` drives one against a store; the model check in the tests drives all of them through
every order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class AgreementStore(Protocol):
    """Keys and values that all ranks share.

    `take` waits for a key and gives None where it did not appear in time; `meet` waits for several and says
    of each whether it is there; `swap` writes where nothing stands and returns what stands there afterwards,
    as one indivisible step.
    """

    def put(self, key: str, value: bytes) -> None: ...

    def take(self, key: str, timeout_s: float) -> bytes | None: ...

    def meet(self, keys: Sequence[str], timeout_s: float) -> tuple[bool, ...]: ...

    def swap(self, key: str, value: bytes) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Put:
    """Write `value` under `key`."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Take:
    """Wait for `key`; the answer is None where the time is up."""

    key: str


@dataclass(frozen=True, slots=True)
class Meet:
    """Wait for all of `keys`; the answer has False for each that is missing when the time is up."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Swap:
    """Write `value` under `key` unless something stands there; the answer is what stands there."""

    key: str
    value: bytes


Step = Put | Take | Meet | Swap
Reply = bytes | None | tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class VoteOutcome:
    """What all ranks concluded: the plan that was committed, or why none was."""

    plan: bytes | None
    reason: str = ""


Side = Generator[Step, Any, VoteOutcome]
_COMMIT, _ABORT = b"commit:", b"abort:"


def digest_of(plan: bytes) -> str:
    """The name of a plan: the first 16 hexadecimal digits of its SHA-256."""
    return hashlib.sha256(plan).hexdigest()[:16]


def propose(where: str, plan: bytes, followers: Sequence[int]) -> Side:
    """Rank 0's side: put `plan` up under `where`, collect the votes of `followers`, decide."""
    yield Put(f"{where}/plan", plan)
    votes = yield Meet(tuple(f"{where}/vote/{rank}" for rank in followers))
    late = [rank for rank, present in zip(followers, votes, strict=True) if not present]
    absent = [f"rank {rank} did not vote in time" for rank in late]
    word = _ABORT + "; ".join(absent).encode() if absent else _COMMIT + digest_of(plan).encode()
    return _outcome((yield Swap(f"{where}/outcome", word)), plan)


def answer(where: str, rank: int, validate: Callable[[bytes], str | None]) -> Side:
    """A follower's side: vote on the plan under `where`, as `validate` objects or not; learn the outcome."""
    plan = yield Take(f"{where}/plan")
    if plan is None:
        word = _ABORT + f"rank {rank} saw no plan in time".encode()
        return _outcome((yield Swap(f"{where}/outcome", word)), None)
    objection = validate(plan)
    if objection is None:
        yield Put(f"{where}/vote/{rank}", b"yes")
        word = yield Take(f"{where}/outcome")
        if word is None:
            word = yield Swap(f"{where}/outcome", _ABORT + f"rank {rank} saw no decision in time".encode())
    else:
        word = yield Swap(f"{where}/outcome", _ABORT + f"rank {rank} refuses: {objection}".encode())
        yield Put(f"{where}/vote/{rank}", b"no")
    return _outcome(word, plan)


class PlanSchedule:
    """Which of the agreed plans a rank has in force at which step; knows neither store nor clock.

    The ranks learn an outcome at different moments, so a step's number alone does not say which plan holds.
    Rank 0 takes the newest plan whose step has come (`lead`) and names it in its step message; a follower
    takes the plan that the step message names (`follow`). A plan that is agreed late holds from rank 0's next
    step.
    """

    def __init__(self) -> None:
        self.active = ""
        self.version = 0
        self._pending: dict[str, tuple[int, int]] = {}

    def add(self, plan: str, version: int, activate_at: int) -> None:
        """Keep an agreed plan until its step."""
        self._pending[plan] = (version, activate_at)

    def knows(self, plan: str) -> bool:
        """Whether a plan is in force, or may be taken."""
        return plan == self.active or plan in self._pending

    @property
    def has_pending(self) -> bool:
        """Whether a plan is held that may come in force."""
        return bool(self._pending)

    def activate_due(self, number: int) -> str:
        """On rank 0: the plan of step `number`, in force from now on."""
        due = [
            (version, plan) for plan, (version, activate_at) in self._pending.items() if activate_at <= number
        ]
        if due:
            self._activate(max(due)[1])
        return self.active

    def adopt(self, digest: str) -> str:
        """On a follower: the plan of a step, the one that rank 0 named; the old one where that is unknown."""
        if digest in self._pending:
            self._activate(digest)
        return self.active

    def _activate(self, plan: str) -> None:
        self.active, self.version = plan, self._pending[plan][0]
        self._pending = {other: entry for other, entry in self._pending.items() if entry[0] > self.version}


def _outcome(word: bytes | None, plan: bytes | None) -> VoteOutcome:
    assert word is not None
    if word.startswith(_ABORT):
        return VoteOutcome(None, word[len(_ABORT) :].decode())
    if plan is None or word != _COMMIT + digest_of(plan).encode():
        # A commit needs every rank's vote for this very plan: the store was written by somebody else.
        raise ValueError(f"the store's outcome {word!r} fits no plan that this rank voted for")
    return VoteOutcome(plan)


def carry_out(side: Side, store: AgreementStore, timeout_s: float) -> VoteOutcome:
    """Drive one side against a store; each wait takes at most `timeout_s` seconds. Blocks the thread."""
    reply: Reply = None
    try:
        while True:
            step = side.send(reply)
            reply = None
            if isinstance(step, Put):
                store.put(step.key, step.value)
            elif isinstance(step, Take):
                reply = store.take(step.key, timeout_s)
            elif isinstance(step, Meet):
                reply = store.meet(step.keys, timeout_s) if step.keys else ()
            else:
                reply = store.swap(step.key, step.value)
    except StopIteration as end:
        outcome: VoteOutcome = end.value
        return outcome
