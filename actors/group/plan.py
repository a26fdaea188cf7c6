"""What each rank of a rank group brings, and the plan that all of them can follow.

A profile says what one rank has; the plan is a pure function of all profiles, rank 0's policy and the mode,
so that every rank can check it. `rank_group.py` carries the plan to the ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import msgspec

from layerzero._util import log
from layerzero._util.version import VERSION
from layerzero.actors.device.local_device import LocalDevice
from layerzero.actors.group.agreement import digest_of
from layerzero.actors.group.config import Mode
from layerzero.perfdb import versions_of
from layerzero.selection.context import AgreedState, CostModel, SelectionOptions
from layerzero.selection.policy.policy import Policy
from layerzero.selection.policy.rules import Action, Layer, Rule, make_rule
from layerzero.spec.errors import ConsistencyError
from layerzero.spec.hardware import Hardware
from layerzero.spec.kernel import Kernel


class RankProfile(msgspec.Struct, frozen=True):
    """What one rank brings: its hardware's `group`, versions, ready kernels with a digest of each.

    `memory` is what one workspace may take there, in bytes, or None where it is unknown.
    """

    rank: int
    hardware_class: str
    versions: dict[str, str]
    kernels: dict[str, str]
    policy: str
    costs: str
    memory: int | None
    knobs: SelectionOptions = SelectionOptions()


class SerializedRule(msgspec.Struct, frozen=True):
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
    def of(cls, rule: Rule) -> SerializedRule:
        """The rule's spelling; a timeboxed one is in the plan while it holds."""
        return cls(
            rule.action,
            rule.patterns,
            rule.target,
            tuple(map(str, rule.when)),
            rule.boost.factor,
            rule.boost.add_us,
            rule.layer.value,
            rule.source,
            rule.note,
        )

    def rule(self) -> Rule:
        """The rule.

        Raises: PolicyValidationError: it is none.
        """
        return make_rule(
            self.action, self.patterns, op=self.op, when=self.when, factor=self.factor, add_us=self.add_us,
            layer=Layer(self.layer), source=self.source, note=self.note,
        )  # fmt: skip


class AgreedPlan(msgspec.Struct, frozen=True):
    """A plan: what every selection of the rank group follows from.

    `kernels` are the ids that each capability group may choose among; `memory` is what one workspace may take
    on the rank that has the least, in bytes, None where no rank knows; `measured` says whether all ranks hold
    the same measurements, so that these count; `knobs` are rank 0's; `activate_at` is the number of the step
    from which it holds, or from the next one where the ranks agree later than that.
    """

    version: int
    kernels: dict[str, tuple[str, ...]]
    rules: tuple[SerializedRule, ...]
    memory: int | None
    measured: bool
    tp_invariant: bool
    activate_at: int
    knobs: SelectionOptions = SelectionOptions()

    def encoded(self) -> bytes:
        """The canonical bytes that ranks vote on."""
        return msgspec.json.encode(self, order="deterministic")

    def terms(self, hardware_class: str, cost: CostModel) -> AgreedState:
        """What selections of one capability group follow from, beside the policy.

        `cost` is what the rank had when it joined: later measurements are its own and count for no rank
        group.
        """
        return AgreedState(
            frozenset(self.kernels[hardware_class]),
            frozenset({"tp_invariant"}) if self.tp_invariant else frozenset(),
            cost=cost if self.measured else None,
            options=dataclasses.replace(self.knobs, workspace_budget=self.memory, budget_is_agreed=True),
        )

    def policy(self) -> Policy:
        """The policy of the plan.

        Raises: PolicyValidationError: a rule is none.
        """
        return Policy(tuple(rule.rule() for rule in self.rules))


def common_plan(
    profiles: Sequence[RankProfile],
    policy: Policy,
    mode: Mode,
    *,
    version: int = 1,
    activate_at: int = 1,
    tp_invariant: bool = False,
) -> AgreedPlan:
    """The plan that all `profiles` can follow; a pure function of them, so that every rank can check it.

    Raises: ConsistencyError: a rank brings other versions or another policy, in training mode; no kernel is
        common to a group.
    """
    first = profiles[0]
    for other in profiles[1:]:
        differences = _differences(first, other)
        if differences and mode == "training":
            raise ConsistencyError(
                f"rank {other.rank} needs what rank 0 has, got other {'; '.join(differences)}",
                votes={p.rank: digest_of(msgspec.json.encode(p.versions)) for p in profiles},
            )
        if differences:
            log.warning("rank_group.ranks_differ", rank=other.rank, differences=differences, mode=mode)
    kernels: dict[str, tuple[str, ...]] = {}
    for hardware_class in sorted({p.hardware_class for p in profiles}):
        kernel_sets = [p.kernels for p in profiles if p.hardware_class == hardware_class]
        common = tuple(
            sorted(k for k, d in kernel_sets[0].items() if all(h.get(k) == d for h in kernel_sets[1:]))
        )
        if not common:
            raise ConsistencyError(f"ranks of {hardware_class} need a kernel in common, got none")
        kernels[hardware_class] = common
    return AgreedPlan(
        version=version,
        kernels=kernels,
        rules=tuple(SerializedRule.of(rule) for rule in policy.rules),
        memory=min((p.memory for p in profiles if p.memory is not None), default=None),
        measured=len({p.costs for p in profiles}) == 1,
        tp_invariant=tp_invariant,
        activate_at=activate_at,
        knobs=first.knobs,
    )


def _differences(first: RankProfile, other: RankProfile) -> list[str]:
    differences = [
        f"{name} {other.versions.get(name, 'none')} for {first.versions.get(name, 'none')}"
        for name in sorted({*first.versions, *other.versions})
        if other.versions.get(name) != first.versions.get(name)
    ]
    if other.policy != first.policy:
        differences.append(f"policy {other.policy[:12] or 'none'} for {first.policy[:12] or 'none'}")
    if other.knobs != first.knobs:
        differences.append(f"settings {other.knobs} for {first.knobs}")
    if other.hardware_class == first.hardware_class and other.kernels != first.kernels:
        missing = sorted(first.kernels.items() ^ other.kernels.items())
        differences.append("kernels " + ", ".join(dict.fromkeys(name for name, _ in missing)))
    return differences


def profile_of(device: LocalDevice, rank: int) -> RankProfile:
    """What `device` brings to a rank group; loads nothing, so kernels that are not ready are not in it."""
    hardware = device.hardware
    fingerprint = getattr(device.costs, "fingerprint", None)
    ops = sorted({kernel.op for kernel in device.kernels()})
    costs = [] if fingerprint is None else [str(fingerprint(op)) for op in ops]
    return RankProfile(
        rank=rank,
        hardware_class=_hardware_class(hardware),
        versions={
            "layerzero": VERSION,
            "torch": hardware.torch,
            "cuda": hardware.cuda or "",
            "driver": hardware.driver or "",
        },
        kernels={kernel.id: _digest_of_kernel(kernel) for kernel in runnable_kernels(device)},
        policy=device.snapshot.policy.digest if device.snapshot.policy else "",
        costs=digest_of("\n".join(costs).encode()),
        memory=device.workspace_budget.current_bytes(device.settings),
        knobs=SelectionOptions(
            device.settings.strict, device.settings.tie_band, device.settings.default_gain
        ),
    )


def _hardware_class(hardware: Hardware) -> str:
    """The name that only ranks which price alike share: the hardware's, and its roofs."""
    roofs = msgspec.json.encode((hardware.peak_flops, hardware.bandwidth), order="deterministic")
    sm = f" sm{hardware.sm}" if hardware.sm is not None else ""
    return f"{hardware.name}{sm} ({digest_of(roofs)[:8]})"


def runnable_kernels(device: LocalDevice) -> list[Kernel]:
    """The kernels that a device could run this moment."""
    registry, platform = device.registry, device.hardware.platform
    kernels = [k for k in device.kernels() if platform in k.capability.platforms]
    absent = {*registry.blocked(), *device.health.blocked_kernels(), *registry.unready()}
    return [kernel for kernel in kernels if kernel.id not in absent]


def missing_kernels(device: LocalDevice, kernels: Iterable[str]) -> list[str]:
    """Those of `kernels`, by id, that a device could not run this moment."""
    runnable = {kernel.id for kernel in runnable_kernels(device)}
    return [name for name in kernels if name not in runnable]


@functools.lru_cache(maxsize=4096)
def _digest_of_kernel(kernel: Kernel) -> str:
    """What two ranks compare of a kernel: its capability and the versions of its libraries."""
    capability = msgspec.to_builtins(kernel.capability, order="deterministic")
    return digest_of(msgspec.json.encode((versions_of(kernel), capability), order="deterministic"))
