"""A rank group: ranks that must decide alike, because they meet in collectives.

A plan is what every selection follows from: the kernels that may be chosen, the policy, whether measurements
count, the memory of the poorest rank. Ranks with one plan make the same choices for the same step without
another word. Rank 0 proposes it, all vote, one outcome holds (`agreement.py`), and it comes in force at a
named step. A rank that cannot follow fails the rank group; no rank falls back alone. `actors/group/steps.py`
takes the steps.

This file blocks; `actors/group/join.py` runs it beside an event loop.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import msgspec

from layerzero._util import log
from layerzero.actors.device.local_device import LocalDevice
from layerzero.actors.group.agreement import (
    AgreementStore,
    PlanSchedule,
    answer,
    differing,
    digest_of,
    propose,
)
from layerzero.actors.group.channel import FollowerChannel, LeaderChannel
from layerzero.actors.group.config import GroupConfig
from layerzero.actors.group.plan import (
    AgreedPlan,
    RankProfile,
    common_plan,
    missing_kernels,
    profile_of,
)
from layerzero.selection.dispatch import DispatchState
from layerzero.spec.errors import ConfigurationError, ConsistencyError, DeviceLostError, PolicyValidationError
from layerzero.spec.reasons import Reason

T = TypeVar("T")
SENT_BEFORE_S = 0.1  # what a follower finds within it lay on its line


class RankGroup:
    """One rank's membership: `join`, agree on plans, `fail` or `close`.

    `plan_digest` names the plan in force, `state_for` returns what the selections of one model are made in.
    `channel` connects this rank with rank 0, or rank 0 with all others; `same_hardware_as_rank0` says whether
    the ops that both ran can be compared.
    """

    def __init__(self, device: LocalDevice, store: AgreementStore, config: GroupConfig) -> None:
        self.device, self.config = device, config
        self.rank, self.ranks, self.epoch = config.rank, config.ranks, config.epoch
        self.timeout_s = config.timeout_s
        self.failure: str | None = None
        self.agreed_plan: AgreedPlan | None = None
        self.channel: LeaderChannel | FollowerChannel | None = None
        self.same_hardware_as_rank0 = True
        self.take_channel: Callable[[], bool] | None = None  # from another thread, which reads ahead
        self._hardware_class = ""
        self._store = store
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._plans: dict[str, AgreedPlan] = {}
        self._schedule = PlanSchedule()
        self._version = 0  # the last that this rank proposed or answered; the store keeps every outcome
        self._voted_for = ""  # the plan whose outcome this rank has not learned yet
        self._states: dict[str, DispatchState] = {}
        self._costs = device.costs
        self._ended = self._closed = False
        self._comparisons = 0
        self._on_failure: list[Callable[[str], None]] = []

    # -- joining and agreeing ---------------------------------------------------------------------

    def join(self) -> AgreedPlan:
        """Meet the other ranks, compare what each brings, and agree on the first plan.

        Raises: DeviceLostError: a rank did not come in time. ConsistencyError: what the ranks bring differs
            in training mode, or a rank refuses the plan; every rank raises the same error.
        """
        try:
            agreed = self._exchange_and_agree()
        except BaseException:
            self.close()
            raise
        self.activate_plan(1, digest_of(agreed.encoded()))
        self._raise_if_closed()
        return agreed

    def _raise_if_closed(self) -> None:
        """Raises: DeviceLostError: `close` was called while this rank was joining."""
        with self._lock:
            closed, channel = self._closed, self.channel
        if closed:
            if channel is not None:
                channel.close()
            raise DeviceLostError(f"rank {self.rank} left while it was joining", retryable=True)

    def _exchange_and_agree(self) -> AgreedPlan:
        prefix = f"rank_group/{self.epoch}"
        nonce = secrets.token_hex(8).encode()
        if self._store.compare_set(f"{prefix}/joined/{self.rank}", b"", nonce) != nonce:
            raise ConsistencyError(
                f"rank {self.rank} needs to join epoch {self.epoch} once, and another process has "
                "joined as it; ranks that start again need a new epoch"
            )
        self.device.wait_for_costs(self.timeout_s)
        self._costs = self.device.costs
        profile = profile_of(self.device, self.rank)
        self._hardware_class = profile.hardware_class
        self._store.set(f"{prefix}/profile/{self.rank}", msgspec.json.encode(profile))
        profiles = self._of_ranks(f"{prefix}/profile", f"join the rank group of {self.ranks}", RankProfile)
        self.same_hardware_as_rank0 = profiles[0].hardware_class == profile.hardware_class
        self._raise_if_closed()
        self.channel = self._open_channel(f"{prefix}/address")
        # Computed on every rank: where rank 0 refuses, all refuse, with the same message.
        config = self.config
        plan = common_plan(
            profiles, self.device.snapshot.policy, config.mode, tp_invariant=config.tp_invariant
        )
        return self._agree(plan if self.rank == 0 else None, 1)

    def _open_channel(self, key: str) -> LeaderChannel | FollowerChannel:
        config = self.config
        if self.rank == 0:
            # An attribute at once: `close` on another thread ends the wait for the followers.
            self.channel = leader = LeaderChannel(
                range(1, self.ranks), config.host, self.timeout_s, config.token
            )
            self._store.set(key, leader.address)
            leader.accept(self.timeout_s, self.fail)
            return leader
        address = self._store.get(key, self.timeout_s)
        if address is None:
            raise DeviceLostError("rank 0 did not open its channel in time", retryable=True)
        return FollowerChannel(self.rank, address, self.timeout_s, self.timeout_s, config.token)

    def _of_ranks(self, prefix: str, task: str, kind: type[T]) -> list[T]:
        """What each rank has stored. Raises: DeviceLostError: one did not do its `task` in time."""
        values: list[T] = []
        for rank in range(self.ranks):
            data = self._store.get(f"{prefix}/{rank}", self.timeout_s)
            if data is None:
                late = f"rank {rank} did not {task} within {self.timeout_s:g} s"
                raise DeviceLostError(late, retryable=True)
            values.append(msgspec.json.decode(data, type=kind))
        return values

    def need_same(self, values: Mapping[str, str]) -> None:
        """Compare `values` with every rank's, in the store: no collective is used.

        Raises: ConsistencyError, on every rank: one has others. DeviceLostError: one gave none in time.
        """
        self._comparisons += 1
        prefix = f"rank_group/{self.epoch}/same/{self._comparisons}"
        self._store.set(f"{prefix}/{self.rank}", msgspec.json.encode(values))
        values_by_rank = self._of_ranks(prefix, f"say its {', '.join(values)}", dict[str, Any])
        for name in dict.fromkeys(name for one in values_by_rank for name in one):
            votes = {rank: str(one.get(name)) for rank, one in enumerate(values_by_rank)}
            others = [rank for rank, vote in votes.items() if vote != votes[0]]
            if others:
                raise ConsistencyError(
                    f"{name} needs to be rank 0's {votes[0]!r} on every rank, got {differing(votes, others)}",
                    votes=votes,
                    reason=Reason.RANKS_DIFFER,
                )

    def propose(self, plan: AgreedPlan) -> AgreedPlan:
        """On rank 0: agree on another plan with the followers, who answer in `agree`.

        It holds from its step, or from the next one where that step has been taken by the time they agree.
        Raises: ConsistencyError: a rank refused or did not answer; the old plan stays. ConfigurationError:
            the plan's version is not above those before it.
        """
        return self._agree(plan, plan.version)

    def agree(self, version: int) -> AgreedPlan:
        """On a follower: answer rank 0's proposal of plan `version`.

        Raises: ConsistencyError: this rank or another refused; the old plan stays. ConfigurationError: the
            version is not above those before it.
        """
        return self._agree(None, version)

    def _agree(self, plan: AgreedPlan | None, version: int) -> AgreedPlan:
        with self._lock:
            if version <= self._version:
                raise ConfigurationError(f"version needs to be above {self._version}, got {version}")
            self._version = version
        prefix = f"rank_group/{self.epoch}/plan/{version}"
        if plan is not None and (objection := self._objection(plan)) is not None:
            raise ConsistencyError(f"rank 0 cannot follow its own plan: {objection}")
        try:
            if plan is not None:
                outcome = propose(self._store, prefix, plan.encoded(), range(1, self.ranks), self.timeout_s)
            else:
                outcome = answer(self._store, prefix, self.rank, self._vote, self.timeout_s)
            if outcome.plan is None:
                raise ConsistencyError(f"the ranks did not agree on plan {version}: {outcome.reason}")
            agreed = msgspec.json.decode(outcome.plan, type=AgreedPlan)
            with self._lock:
                digest = digest_of(outcome.plan)
                self._plans[digest] = agreed
                self._schedule.add(digest, agreed.version, agreed.activate_at)
            return agreed
        finally:
            with self._changed:
                self._voted_for = ""
                self._changed.notify_all()

    def _vote(self, plan: bytes) -> str | None:
        try:
            agreed = msgspec.json.decode(plan, type=AgreedPlan)
            agreed.policy()
        except (msgspec.DecodeError, PolicyValidationError) as error:
            return f"the plan cannot be read: {error}"
        objection = self._objection(agreed)
        if objection is None:
            with self._lock:
                self._voted_for = digest_of(plan)
        return objection

    def _objection(self, plan: AgreedPlan) -> str | None:
        """What this rank has against a plan: kernels that it cannot run."""
        kernels = plan.kernels.get(self._hardware_class)
        if kernels is None:
            return f"it has nothing for {self._hardware_class}"
        missing = missing_kernels(self.device, kernels)
        return f"cannot run {', '.join(missing[:5])}" if missing else None

    def activate_plan(self, number: int, digest: str | None = None) -> None:
        """Put the plan of step `number` in force: on rank 0 its own choice, elsewhere the one that it named.

        Rank 0 may have learned that all agree before this rank has, which waits for that here.
        """
        order = self._schedule
        if not order.has_pending and (digest is None or digest == order.active):
            return  # every step between two plans
        with self._changed:
            before = self._schedule.active
            if digest is None:
                active = self._schedule.activate_due(number)
            else:
                self._changed.wait_for(
                    lambda: self._schedule.knows(digest) or self._voted_for != digest, self.timeout_s
                )
                active = self._schedule.adopt(digest)
            if active == before:
                return
            self.agreed_plan = agreed = self._plans[active]
            self._plans = {d: plan for d, plan in self._plans.items() if plan.version >= agreed.version}
            self._states = {}
        log.info("rank_group.plan_active", version=agreed.version, plan=active, rank=self.rank, step=number)

    @property
    def plan_digest(self) -> str:
        """The digest of the plan in force."""
        return self._schedule.active

    def state_for(self, model: str = "") -> DispatchState:
        """What selections of one model are made in, under the plan in force.

        Each model's choices are its own: they share the plan, and change with it at the same step.
        Raises: ConsistencyError: this rank has not joined.
        """
        state = self._states.get(model)
        if state is None:
            if self.agreed_plan is None:
                raise ConsistencyError(f"rank {self.rank} needs to join before its first step")
            state = self.device.agreed_snapshot(
                self.agreed_plan.policy(), self.agreed_plan.terms(self._hardware_class, self._costs)
            )
            state = self._states.setdefault(model, state)
        return state

    def selections_digest(self, model: str = "") -> str:
        """The digest of the ops that this rank has run for one model under the plan in force."""
        state = self._states.get(model)
        return state.agreed_terms.digest if state is not None and state.agreed_terms is not None else ""

    def raise_if_failed(self) -> None:
        """Refuse to continue in a rank group that has failed.

        Raises: DeviceLostError: it has.
        """
        if self.failure is not None:
            raise DeviceLostError(f"the rank group has failed: {self.failure}", retryable=True)

    def confirm(self, number: int, selections_digest: str) -> None:
        """After step `number`: release its results only when all ranks say that they ran the same ops.

        Raises: ConsistencyError: a rank ran others. DeviceLostError: one has failed, or says nothing in time.
        """
        if isinstance(self.channel, LeaderChannel):
            self.channel.confirm_step(number, selections_digest.encode(), self.timeout_s)
        elif isinstance(self.channel, FollowerChannel):
            self.channel.report_step(
                number, selections_digest.encode() if self.same_hardware_as_rank0 else b""
            )

    def failure_reason(self) -> str | None:
        """Why the rank group has failed, waiting a moment for what a rank said before it broke a
        collective, or on a follower for a heartbeat of rank 0. The rank takes no further step.
        """
        if isinstance(self.channel, LeaderChannel):
            if self.failure is None:
                self.channel.wait_for_reason()
            if self.failure in (None, self.channel.failure):
                return self.channel.reasons()
        if (
            self.failure is None
            and isinstance(self.channel, FollowerChannel)
            and (self.take_channel is None or self.take_channel())
        ):
            asked_s = time.monotonic()
            try:
                # What was sent before, a step message or a heartbeat, says nothing of now.
                while self.channel.receive(heartbeat=True) or time.monotonic() - asked_s < SENT_BEFORE_S:
                    pass
            except DeviceLostError as error:
                return str(error)
        return self.failure

    # -- failing and closing ----------------------------------------------------------------------

    def fail(self, why: str) -> None:
        """End the rank group for every rank: tell rank 0, and who breaks what this rank waits in."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self.failure = why
            to_notify = list(self._on_failure)
        log.warning("rank_group.failed", rank=self.rank, epoch=self.epoch, why=why)
        self.device.counters.add("rank_group_failures", rank=str(self.rank))
        if isinstance(self.channel, FollowerChannel):
            self.channel.fail(f"rank {self.rank} cannot follow: {why}")
        if self.config.on_failure is not None:
            self.config.on_failure(why)
        for notify in to_notify:
            notify(why)

    def when_failed(self, notify: Callable[[str], None]) -> None:
        """Call `notify(why)` once when the rank group fails, on the thread that noticed; now if it has."""
        with self._lock:
            self._on_failure.append(notify)
            why = self.failure
        if why is not None:
            notify(why)

    @contextmanager
    def fail_on_error(self) -> Iterator[None]:
        """Fail the rank group with whatever the block raises about it."""
        try:
            yield
        except (ConsistencyError, DeviceLostError) as error:
            self.fail(str(error))
            raise

    def close(self, last_frame: bytes = b"") -> None:
        """Leave; rank 0 says `last` to the others where the rank group has not failed. Idempotent."""
        with self._lock:
            self._ended = True
            closed, self._closed = self._closed, True
        if last_frame and isinstance(self.channel, LeaderChannel) and self.failure is None:
            with suppress(DeviceLostError):  # who has gone before needs no last word
                self.channel.send(last_frame, last=True)
        self.failure = self.failure or "it was closed"
        if self.channel is not None and not closed:
            self.channel.close()
