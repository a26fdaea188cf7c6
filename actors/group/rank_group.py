"""A gang: ranks that must decide alike, because they meet in collectives.

A plan is what every selection follows from: the kernels that may be chosen, the policy, whether measurements
count, the memory of the poorest rank. Ranks with one plan make the same choices for the same step without
another word. Rank 0 proposes it, all vote, one outcome holds (`agreement.py`), and it comes in force at a
named step. A rank that cannot follow fails the gang; nobody falls back alone. `actors/group/steps.py` takes
the steps.

This file blocks; `actors/group/join.py` runs it beside an event loop.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec

from layerzero._util import log
from layerzero.actors.device.local_device import LocalDevice
from layerzero.actors.group.agreement import AgreementStore, Succession, answer, carry_out, digest_of, propose
from layerzero.actors.group.channel import Follower, Leader
from layerzero.actors.group.plan import Agreed, Mode, Profile, common_plan, lacking, profile_of
from layerzero.selection.dispatch import Snapshot
from layerzero.spec.errors import ConfigurationError, ConsistencyError, DeviceLostError, PolicyValidationError


class Gang:
    """One rank's membership: `join`, agree on plans, `fail` or `close`.

    `plan` is the digest of the plan in force, `under` gives what selections of one model are made in; `line`
    is the way to the other ranks; `leads_group` says whether rank 0 has hardware like this rank's.
    Raises: ConfigurationError: the rank or the mode is none.
    """

    def __init__(
        self,
        device: LocalDevice,
        store: AgreementStore,
        *,
        rank: int,
        ranks: int,
        epoch: int = 0,
        mode: Mode = "inference",
        tp_invariant: bool = False,
        host: str = "127.0.0.1",
        timeout_s: float = 30.0,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        if ranks < 1 or not 0 <= rank < ranks:
            raise ConfigurationError(f"rank needs 0 to {ranks - 1}, got {rank}")
        if mode not in ("inference", "training"):
            raise ConfigurationError(f"mode needs 'inference' or 'training', got {mode!r}")
        self.device, self.rank, self.ranks, self.epoch = device, rank, ranks, epoch
        self.mode: Mode = mode
        self.failure: str | None = None
        self.agreed: Agreed | None = None
        self.line: Leader | Follower | None = None
        self._group = ""
        self.leads_group = True
        self._store, self._host, self.timeout_s = store, host, timeout_s
        self._tp_invariant = tp_invariant
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._plans: dict[str, Agreed] = {}
        self._order = Succession()
        self._version = 0  # the last that this rank proposed or answered; the store keeps every outcome
        self._voted = ""  # for a plan whose outcome this rank has not learned yet
        self._snapshots: dict[str, Snapshot] = {}
        self._costs = device.costs
        self._told = self._closed = False

    # -- joining and agreeing ---------------------------------------------------------------------

    def join(self) -> Agreed:
        """Meet the other ranks, compare what each brings, and agree on the first plan.

        Raises: DeviceLostError: a rank did not come in time. ConsistencyError: what the ranks bring differs
            in
            training mode, or a rank refuses the plan; every rank raises alike.
        """
        try:
            agreed = self._joined()
        except BaseException:
            self.close()
            raise
        self.turn(1, digest_of(agreed.encoded()))
        self._stay()
        return agreed

    def _stay(self) -> None:
        """Give up where `close` was called while this rank was joining.

        Raises: DeviceLostError: it was.
        """
        with self._lock:
            closed, line = self._closed, self.line
        if closed:
            if line is not None:
                line.close()
            raise DeviceLostError(f"rank {self.rank} left while it was joining", retryable=True)

    def _joined(self) -> Agreed:
        where = f"gang/{self.epoch}"
        own = secrets.token_hex(8).encode()
        if self._store.swap(f"{where}/seat/{self.rank}", own) != own:
            raise ConsistencyError(
                f"rank {self.rank} needs to join epoch {self.epoch} once, and somebody has; ranks that start "
                "again need a new epoch"
            )
        self.device.expected(self.timeout_s)
        self._costs = self.device.costs
        mine = profile_of(self.device, self.rank)
        self._group = mine.group
        self._store.put(f"{where}/profile/{self.rank}", msgspec.json.encode(mine))
        profiles = [self._profile(where, rank) for rank in range(self.ranks)]
        self.leads_group = profiles[0].group == mine.group
        self._stay()
        if self.rank == 0:
            leader = self.line = Leader(range(1, self.ranks), self._host, self.timeout_s)
            self._store.put(f"{where}/address", leader.address)
            leader.accept(self.timeout_s, self.fail)
        else:
            address = self._store.take(f"{where}/address", self.timeout_s)
            if address is None:
                raise DeviceLostError("rank 0 did not open its line in time", retryable=True)
            self.line = Follower(self.rank, address, self.timeout_s, self.timeout_s)
        # Every rank computes it: what rank 0 refuses, all refuse, with the same words.
        plan = common_plan(profiles, self.device.snapshot.policy, self.mode, tp_invariant=self._tp_invariant)
        return self._agree(plan if self.rank == 0 else None, 1)

    def _profile(self, where: str, rank: int) -> Profile:
        found = self._store.take(f"{where}/profile/{rank}", self.timeout_s)
        if found is None:
            raise DeviceLostError(
                f"rank {rank} did not join the gang of {self.ranks} within {self.timeout_s:g} s",
                retryable=True,
            )
        return msgspec.json.decode(found, type=Profile)

    def propose(self, plan: Agreed) -> Agreed:
        """On rank 0: agree on another plan with the followers, who answer in `agree`.

        It holds from its step, or from the next one where that step has been taken by the time they agree.
        Raises: ConsistencyError: a rank refused or did not answer; the old plan stays. ConfigurationError:
            the plan's version is not above those before it.
        """
        return self._agree(plan, plan.version)

    def agree(self, version: int) -> Agreed:
        """On a follower: answer rank 0's proposal of plan `version`.

        Raises: ConsistencyError: this rank or another refused; the old plan stays. ConfigurationError: the
            version is not above those before it.
        """
        return self._agree(None, version)

    def _agree(self, plan: Agreed | None, version: int) -> Agreed:
        with self._lock:
            if version <= self._version:
                raise ConfigurationError(f"version needs to be above {self._version}, got {version}")
            self._version = version
        where = f"gang/{self.epoch}/plan/{version}"
        if plan is not None:
            side = propose(where, plan.encoded(), range(1, self.ranks))
            objection = self._objection(plan)
            if objection is not None:
                raise ConsistencyError(f"rank 0 cannot follow its own plan: {objection}")
        else:
            side = answer(where, self.rank, self._vote)
        try:
            outcome = carry_out(side, self._store, self.timeout_s)
            if outcome.plan is None:
                raise ConsistencyError(f"the ranks did not agree on plan {version}: {outcome.reason}")
            agreed = msgspec.json.decode(outcome.plan, type=Agreed)
            with self._lock:
                digest = digest_of(outcome.plan)
                self._plans[digest] = agreed
                self._order.hold(digest, agreed.version, agreed.activate_at)
            return agreed
        finally:
            with self._news:
                self._voted = ""
                self._news.notify_all()

    def _vote(self, plan: bytes) -> str | None:
        try:
            agreed = msgspec.json.decode(plan, type=Agreed)
            agreed.policy()
        except (msgspec.DecodeError, PolicyValidationError) as error:
            return f"the plan cannot be read: {error}"
        objection = self._objection(agreed)
        if objection is None:
            with self._lock:
                self._voted = digest_of(plan)
        return objection

    def _objection(self, plan: Agreed) -> str | None:
        """What this rank has against a plan: kernels that it cannot run."""
        wanted = plan.kernels.get(self._group)
        if wanted is None:
            return f"it has nothing for {self._group}"
        missing = lacking(self.device, wanted)
        if missing:
            return f"cannot run {', '.join(missing[:5])}"
        return None

    def turn(self, number: int, named: str | None = None) -> None:
        """Put the plan of step `number` in force: on rank 0 its own choice, elsewhere the one that it named.

        Rank 0 may have learned that all agree before this rank has, which waits for that here.
        """
        order = self._order
        if not order.waits and (named is None or named == order.now):
            return  # every step between two plans
        with self._news:
            before = self._order.now
            if named is None:
                now = self._order.lead(number)
            else:
                self._news.wait_for(lambda: self._order.holds(named) or self._voted != named, self.timeout_s)
                now = self._order.follow(named)
            if now == before:
                return
            self.agreed = agreed = self._plans[now]
            self._plans = {plan: kept for plan, kept in self._plans.items() if kept.version >= agreed.version}
            self._snapshots = {}
        log.info("gang.plan_active", version=agreed.version, plan=now, rank=self.rank, step=number)

    @property
    def plan(self) -> str:
        """The digest of the plan in force."""
        return self._order.now

    def under(self, model: str = "") -> Snapshot:
        """What selections of one model are made in, under the plan in force.

        Each model's choices are its own: they share the plan, and change with it at the same step.
        Raises: ConsistencyError: this rank has not joined.
        """
        found = self._snapshots.get(model)
        if found is None:
            if self.agreed is None:
                raise ConsistencyError(f"rank {self.rank} needs to join before its first step")
            found = self.device.agreed_snapshot(
                self.agreed.policy(), self.agreed.terms(self._group, self._costs)
            )
            found = self._snapshots.setdefault(model, found)
        return found

    def decided(self, model: str = "") -> str:
        """The digest of the ops that this rank has run for one model under the plan in force."""
        found = self._snapshots.get(model)
        return found.terms.decided if found is not None and found.terms is not None else ""

    def check(self) -> None:
        """Refuse to go on in a gang that has failed.

        Raises: DeviceLostError: it has.
        """
        if self.failure is not None:
            raise DeviceLostError(f"the gang has failed: {self.failure}", retryable=True)

    def confirm(self, number: int, decided: str) -> None:
        """After step `number`: let nobody have its results before all ranks say that they ran the same ops.

        Raises: ConsistencyError: a rank ran others. DeviceLostError: one has failed, or says nothing in time.
        """
        if isinstance(self.line, Leader):
            self.line.confirmed(number, decided.encode(), self.timeout_s)
        elif isinstance(self.line, Follower):
            self.line.say(number, decided.encode() if self.leads_group else b"")

    def why(self) -> str | None:
        """Why the gang has failed, waiting a moment for what a rank said before it broke a collective."""
        if self.failure is None and isinstance(self.line, Leader):
            self.line.heard()
            return self.failure or self.line.failure
        return self.failure

    # -- failing and closing ----------------------------------------------------------------------

    def fail(self, why: str) -> None:
        """End the gang for every rank: tell rank 0, let `on_failure` break what this rank is waiting in."""
        with self._lock:
            if self._told:
                return
            self._told = True
            self.failure = why
        log.warning("gang.failed", rank=self.rank, epoch=self.epoch, why=why)
        self.device.counters.add("gang_failures", rank=str(self.rank))
        if isinstance(self.line, Follower):
            self.line.fail(f"rank {self.rank} cannot follow: {why}")
        if self._on_failure is not None:
            self._on_failure(why)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Fail the gang with whatever the block raises about it."""
        try:
            yield
        except (ConsistencyError, DeviceLostError) as error:
            self.fail(str(error))
            raise

    def close(self, last: bytes = b"") -> None:
        """Leave; rank 0 says `last` to the others where the gang has not failed. Idempotent."""
        with self._lock:
            self._told = True
            closed, self._closed = self._closed, True
        if last and isinstance(self.line, Leader) and self.failure is None:
            with suppress(DeviceLostError):  # who has gone before needs no last word
                self.line.send(last, last=True)
        self.failure = self.failure or "it was closed"
        if self.line is not None and not closed:
            self.line.close()
