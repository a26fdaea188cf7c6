"""Plan agreement: how the ranks vote on a plan through a store that they share.

Rank 0 publishes a plan, every other rank votes, rank 0 decides by writing the outcome where none is stored
yet. A rank that waits too long writes an abort under the same key. The store keeps the first value, so that
every rank that learns an outcome learns the same one, whichever rank crashed, lagged or refused. No rank
decides alone, and no collective is used: a rank that hangs breaks nothing for the others.

A rank that refuses writes the abort before it votes, so that rank 0 waits for votes and reads none. Each
round trip to the store costs every rank its time. The model check in the tests runs `propose` and `answer`
against a store that returns every possible reply in every possible order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class AgreementStore(Protocol):
    """Keys and values that all ranks share, by the names of `torch.distributed.Store`.

    `get` waits for a key and returns None where it did not appear in time. `wait` waits for several and says
    for each whether it is stored. `compare_set` writes `desired` where `expected` is stored (b"": nothing is)
    and returns what is stored afterwards, as one indivisible step.
    """

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout_s: float) -> bytes | None: ...

    def wait(self, keys: Sequence[str], timeout_s: float) -> tuple[bool, ...]: ...

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes: ...


@dataclass(frozen=True, slots=True)
class VoteOutcome:
    """What all ranks concluded: the plan that was committed, or why none was."""

    plan: bytes | None
    reason: str = ""


_COMMIT, _ABORT = b"commit:", b"abort:"


def differing(votes: Mapping[int, str], ranks: Iterable[int]) -> str:
    """What each of `ranks` voted, in words."""
    return ", ".join(f"{votes[rank]!r} on rank {rank}" for rank in ranks)


def digest_of(plan: bytes) -> str:
    """The name of a plan: the first 16 hexadecimal digits of its SHA-256."""
    return hashlib.sha256(plan).hexdigest()[:16]


def propose(
    store: AgreementStore, prefix: str, plan: bytes, followers: Sequence[int], timeout_s: float
) -> VoteOutcome:
    """Rank 0's side: publish `plan` under `prefix`, wait for the votes of `followers`, decide."""
    store.set(f"{prefix}/plan", plan)
    keys = [f"{prefix}/vote/{rank}" for rank in followers]
    voted = store.wait(keys, timeout_s) if keys else ()
    absent = [rank for rank, present in zip(followers, voted, strict=True) if not present]
    word = _COMMIT + digest_of(plan).encode()
    if absent:
        word = _ABORT + "; ".join(f"rank {rank} did not vote in time" for rank in absent).encode()
    return _outcome(store.compare_set(f"{prefix}/outcome", b"", word), plan)


def answer(
    store: AgreementStore, prefix: str, rank: int, validate: Callable[[bytes], str | None], timeout_s: float
) -> VoteOutcome:
    """A follower's side: vote on the plan under `prefix`; `validate` returns its objection, or None."""

    def abort(reason: str) -> bytes:
        return store.compare_set(f"{prefix}/outcome", b"", _ABORT + f"rank {rank} {reason}".encode())

    plan = store.get(f"{prefix}/plan", timeout_s)
    if plan is None:
        return _outcome(abort("saw no plan in time"), None)
    if (objection := validate(plan)) is not None:
        word = abort(f"refuses: {objection}")
        store.set(f"{prefix}/vote/{rank}", b"no")
        return _outcome(word, plan)
    store.set(f"{prefix}/vote/{rank}", b"yes")
    outcome = store.get(f"{prefix}/outcome", timeout_s)
    return _outcome(abort("saw no decision in time") if outcome is None else outcome, plan)


def _outcome(word: bytes, plan: bytes | None) -> VoteOutcome:
    if word.startswith(_ABORT):
        return VoteOutcome(None, word[len(_ABORT) :].decode())
    if plan is None or word != _COMMIT + digest_of(plan).encode():
        # A commit needs every rank's vote for this very plan: another process wrote into the store.
        raise ValueError(f"the store's outcome {word!r} fits no plan that this rank voted for")
    return VoteOutcome(plan)


class PlanSchedule:
    """Which of the agreed plans a rank has in force at which step; knows neither store nor clock.

    The ranks learn an outcome at different moments, so a step's number alone does not say which plan holds.
    Rank 0 takes the newest plan whose step has come (`activate_due`) and names it in its step message; a
    follower takes the plan that the step message names (`adopt`). A plan that is agreed late holds from rank
    0's next step.
    """

    def __init__(self) -> None:
        self.active = ""
        self.version = 0
        self._pending: dict[str, tuple[int, int]] = {}

    def add(self, plan: str, version: int, activate_at: int) -> None:
        """Keep an agreed plan until its step; one that was agreed behind a newer one is none any more."""
        if version > self.version:
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
