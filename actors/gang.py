"""A gang: ranks that must decide alike, because they meet in collectives.

A plan is what every selection follows from: the kernels that may be chosen, the policy, whether measurements
count, the memory of the poorest rank. Ranks with one plan make the same choices for the same step without
another word. Rank 0 proposes it, all vote, one outcome holds (`agreement.py`), and it comes in force at a
named step. A rank that cannot follow fails the gang; nobody falls back alone. `scheduler/steps.py` takes the
steps.

This file blocks; `layerzero/api/gang.py` runs it beside an event loop.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

import msgspec
import torch

from layerzero import log
from layerzero.actors.agreement import AgreementStore, answer, carry_out, digest_of, propose
from layerzero.actors.broadcast import Follower, Leader
from layerzero.actors.local import LocalDevice
from layerzero.dispatch import Snapshot, Terms
from layerzero.errors import ConfigurationError, ConsistencyError, DeviceLostError, PolicyValidationError
from layerzero.kernel import Kernel
from layerzero.libraries import DISTRIBUTION
from layerzero.perfdb import versions_of
from layerzero.policy.policy import Policy
from layerzero.policy.rules import Action, Layer, Rule, make_rule

Mode = Literal["inference", "training"]


class Profile(msgspec.Struct, frozen=True):
    """What one rank brings: its hardware's `group`, versions, ready kernels with a digest of each."""

    rank: int
    group: str
    versions: dict[str, str]
    kernels: dict[str, str]
    policy: str
    costs: str
    memory: int


class Spelled(msgspec.Struct, frozen=True):
    """A rule of a policy as it is written, so that a rank that receives it checks it again."""

    action: Action
    patterns: tuple[str, ...]
    op: str
    when: tuple[str, ...]
    factor: float
    add_us: float
    layer: int
    source: str
    note: str

    @classmethod
    def of(cls, rule: Rule) -> Spelled:
        """The rule's spelling; a timeboxed one is in the plan while it holds."""
        boost = rule.boost
        return cls(
            rule.action,
            rule.patterns,
            rule.target,
            tuple(map(str, rule.when)),
            boost.factor,
            boost.add_us,
            rule.layer.value,
            rule.source,
            rule.note,
        )

    def rule(self) -> Rule:
        """The rule.

        Raises: PolicyValidationError: it is none.
        """
        return make_rule(
            self.action,
            self.patterns,
            op=self.op,
            when=self.when,
            factor=self.factor,
            add_us=self.add_us,
            layer=Layer(self.layer),
            source=self.source,
            note=self.note,
        )


class Agreed(msgspec.Struct, frozen=True):
    """A plan: what every selection of the gang follows from.

    `kernels` are the ids that each capability group may choose among; `memory` is the least free memory of
    any rank, in bytes; `measured` says whether all ranks hold the same measurements, so that these count;
    `activate_at` is the number of the step from which it holds.
    """

    version: int
    kernels: dict[str, tuple[str, ...]]
    rules: tuple[Spelled, ...]
    memory: int
    measured: bool
    tp_invariant: bool
    activate_at: int

    def encoded(self) -> bytes:
        """The canonical bytes that ranks vote on."""
        return msgspec.json.encode(self, order="deterministic")

    def policy(self) -> Policy:
        """The policy of the plan.

        Raises: PolicyValidationError: a rule is none.
        """
        return Policy(tuple(rule.rule() for rule in self.rules))


def common_plan(
    profiles: Sequence[Profile],
    policy: Policy,
    mode: Mode,
    *,
    version: int = 1,
    activate_at: int = 1,
    tp_invariant: bool = False,
) -> Agreed:
    """The plan that all `profiles` can follow; a pure function of them, so that every rank can check it.

    Raises: ConsistencyError: a rank brings other versions or another policy, in training mode; no kernel is
        common to a group.
    """
    first = profiles[0]
    for other in profiles[1:]:
        found = _differences(first, other)
        if found and mode == "training":
            raise ConsistencyError(
                f"rank {other.rank} needs what rank 0 has, got other {'; '.join(found)}",
                votes={p.rank: digest_of(msgspec.json.encode(p.versions)) for p in profiles},
            )
        if found:
            log.warning("gang.ranks_differ", rank=other.rank, differences=found, mode=mode)
    kernels: dict[str, tuple[str, ...]] = {}
    for group in sorted({p.group for p in profiles}):
        held = [p.kernels for p in profiles if p.group == group]
        common = tuple(sorted(k for k, d in held[0].items() if all(h.get(k) == d for h in held[1:])))
        if not common:
            raise ConsistencyError(f"ranks of {group} need a kernel in common, got none")
        kernels[group] = common
    return Agreed(
        version=version,
        kernels=kernels,
        rules=tuple(Spelled.of(rule) for rule in policy.rules),
        memory=min(p.memory for p in profiles),
        measured=len({p.costs for p in profiles}) == 1,
        tp_invariant=tp_invariant,
        activate_at=activate_at,
    )


def _differences(first: Profile, other: Profile) -> list[str]:
    found = [
        f"{name} {other.versions.get(name, 'none')} for {first.versions.get(name, 'none')}"
        for name in sorted({*first.versions, *other.versions})
        if other.versions.get(name) != first.versions.get(name)
    ]
    if other.policy != first.policy:
        found.append(f"policy {other.policy[:12] or 'none'} for {first.policy[:12] or 'none'}")
    if other.group == first.group and other.kernels != first.kernels:
        missing = sorted(first.kernels.items() ^ other.kernels.items())
        found.append("kernels " + ", ".join(dict.fromkeys(name for name, _ in missing)))
    return found


def profile_of(device: LocalDevice, rank: int) -> Profile:
    """What `device` brings to a gang; loads nothing, so kernels that are not ready are not in it."""
    hardware = device.hardware
    fingerprint = getattr(device.costs, "fingerprint", None)
    ops = sorted({kernel.op for kernel in device.kernels()})
    costs = [] if fingerprint is None else [str(fingerprint(op)) for op in ops]
    return Profile(
        rank=rank,
        group=f"{hardware.name} sm{hardware.sm}" if hardware.sm is not None else hardware.name,
        versions={
            "layerzero": importlib.metadata.version(DISTRIBUTION),
            "torch": hardware.torch,
            "cuda": hardware.cuda or "",
            "driver": hardware.driver or "",
        },
        kernels={kernel.id: _digest_of_kernel(kernel) for kernel in able(device)},
        policy=device.snapshot.policy.digest if device.snapshot.policy else "",
        costs=hashlib.sha256("\n".join(costs).encode()).hexdigest()[:16],
        memory=free_memory(device.device),
    )


def able(device: LocalDevice) -> list[Kernel]:
    """The kernels that a device could run this moment."""
    platform = device.hardware.platform
    kernels = [k for k in device.kernels() if platform in k.capability.platforms]
    absent = {*device.registry.blocked(), *device.health.blocked(), *device.registry.unready()}
    return [kernel for kernel in kernels if kernel.id not in absent]


def free_memory(device: torch.device) -> int:
    """The bytes that are free on a device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@functools.lru_cache(maxsize=4096)
def _digest_of_kernel(kernel: Kernel) -> str:
    """What two ranks compare of a kernel: its capability and the versions of its libraries."""
    what = msgspec.json.encode(
        (versions_of(kernel), msgspec.to_builtins(kernel.capability, order="deterministic")),
        order="deterministic",
    )
    return hashlib.sha256(what).hexdigest()[:16]


class Gang:
    """One rank's membership: `join`, agree on plans, `fail` or `close`.

    `plan` is the digest of the plan in force and `snapshot` what selections under it are made in; `line` is
    the way to the other ranks; `leads_group` says whether rank 0 has hardware like this rank's.
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
        self.plan = ""
        self.snapshot: Snapshot | None = None
        self.line: Leader | Follower | None = None
        self._group = ""
        self.leads_group = True
        self._store, self._host, self.timeout_s = store, host, timeout_s
        self._tp_invariant = tp_invariant
        self._on_failure = on_failure
        self._waiting: Agreed | None = None
        self._lock = threading.Lock()
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
        self._activate(agreed)
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
        self.device.expected()
        mine = profile_of(self.device, self.rank)
        self._group = mine.group
        self._store.put(f"{where}/profile/{self.rank}", msgspec.json.encode(mine))
        profiles = [self._profile(where, rank) for rank in range(self.ranks)]
        self.leads_group = profiles[0].group == mine.group
        self._stay()
        if self.rank == 0:
            leader = self.line = Leader(range(1, self.ranks), self._host)
            self._store.put(f"{where}/address", leader.address)
            leader.accept(self.timeout_s, self.fail)
        else:
            address = self._store.take(f"{where}/address", self.timeout_s)
            if address is None:
                raise DeviceLostError("rank 0 did not open its line in time", retryable=True)
            self.line = Follower(self.rank, address, self.timeout_s)
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
        """On rank 0: agree on another plan with the followers, who answer in `agree`; it holds from its step.

        Raises: ConsistencyError: a rank refused or did not answer; the old plan stays.
        """
        return self._later(self._agree(plan, plan.version))

    def agree(self, version: int) -> Agreed:
        """On a follower: answer rank 0's proposal of plan `version`.

        Raises: ConsistencyError: this rank or another refused; the old plan stays.
        """
        return self._later(self._agree(None, version))

    def _agree(self, plan: Agreed | None, version: int) -> Agreed:
        where = f"gang/{self.epoch}/plan/{version}"
        if plan is not None:
            side = propose(where, plan.encoded(), range(1, self.ranks))
            objection = self._objection(plan)
            if objection is not None:
                raise ConsistencyError(f"rank 0 cannot follow its own plan: {objection}")
        else:
            side = answer(where, self.rank, self._vote)
        outcome = carry_out(side, self._store, self.timeout_s)
        if outcome.plan is None:
            raise ConsistencyError(f"the ranks did not agree on plan {version}: {outcome.reason}")
        return msgspec.json.decode(outcome.plan, type=Agreed)

    def _vote(self, plan: bytes) -> str | None:
        try:
            agreed = msgspec.json.decode(plan, type=Agreed)
            agreed.policy()
        except (msgspec.DecodeError, PolicyValidationError) as error:
            return f"the plan cannot be read: {error}"
        return self._objection(agreed)

    def _objection(self, plan: Agreed) -> str | None:
        """What this rank has against a plan: kernels that it cannot run."""
        wanted = plan.kernels.get(self._group)
        if wanted is None:
            return f"it has nothing for {self._group}"
        here = {kernel.id for kernel in able(self.device)}
        missing = [kernel for kernel in wanted if kernel not in here]
        if missing:
            return f"cannot run {', '.join(missing[:5])}"
        return None

    def _later(self, agreed: Agreed) -> Agreed:
        with self._lock:
            self._waiting = agreed
        return agreed

    def turn(self, number: int) -> None:
        """Put the plan that waits in force if its step has come."""
        with self._lock:
            waiting = self._waiting
            if waiting is None or number < waiting.activate_at:
                return
            self._waiting = None
        self._activate(waiting)

    def _activate(self, agreed: Agreed) -> None:
        terms = Terms(
            frozenset(agreed.kernels[self._group]),
            frozenset({"tp_invariant"}) if agreed.tp_invariant else frozenset(),
            measured=agreed.measured,
        )
        self.snapshot = self.device.agreed_snapshot(agreed.policy(), terms)
        self.agreed, self.plan = agreed, digest_of(agreed.encoded())
        log.info("gang.plan_active", version=agreed.version, plan=self.plan, rank=self.rank)

    @property
    def decided(self) -> str:
        """The digest of what this rank has chosen under the plan in force."""
        terms = self.snapshot.terms if self.snapshot is not None else None
        return terms.decided if terms is not None else ""

    def check(self) -> None:
        """Refuse to go on in a gang that has failed.

        Raises: DeviceLostError: it has.
        """
        if self.failure is not None:
            raise DeviceLostError(f"the gang has failed: {self.failure}", retryable=True)

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
                self.line.send(last)
        self.failure = self.failure or "it was closed"
        if self.line is not None and not closed:
            self.line.close()
