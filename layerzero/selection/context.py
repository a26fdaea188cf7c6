"""What a decision depends on beside the request: kernels, policy, status, options, agreed terms."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from layerzero._util.version import VERSION
from layerzero.perfdb import versions_of
from layerzero.selection.policy.policy import EMPTY, Policy
from layerzero.selection.recent import RecentCache
from layerzero.sharing.work import code_of, digest_of
from layerzero.spec.call_spec import CallSpec, WorkEstimate
from layerzero.spec.gpu_map import preferred_on
from layerzero.spec.hardware import Hardware
from layerzero.spec.kernel import Kernel
from layerzero.spec.reasons import Rejected

if TYPE_CHECKING:
    from layerzero.selection.active_table import ActiveDispatchTable
    from layerzero.selection.dispatch import DispatchState

MAX_BLOCKS = 64  # policies of blocks whose states an agreement keeps
CostModel = Callable[[Kernel, WorkEstimate, CallSpec, Hardware], tuple[float, str]]


@dataclass(frozen=True, slots=True)
class KernelStatus:
    """What holds for kernels beyond their capability, at one moment.

    `blocked` maps a kernel to why it may not run (missing backend, failed load, open circuit, quarantine);
    `unready` are those that would have to be loaded first, `probing` those on probation. `compiled` holds
    (kernel, compile key) of what has been compiled; None counts everything as compiled.
    """

    blocked: Mapping[str, Rejected] = field(default_factory=dict)
    unready: frozenset[str] = frozenset()
    probing: frozenset[str] = frozenset()
    compiled: frozenset[tuple[str, str]] | None = None

    def facts_of(self, kernels: Sequence[Kernel]) -> tuple[Any, ...]:
        """What holds for some kernels, as values: who is blocked, unready, on probation; what is compiled."""
        ids = tuple(kernel.id for kernel in kernels)
        blocked = tuple((k, self.blocked[k].reason) for k in ids if k in self.blocked)
        unready, probing = (tuple(k for k in ids if k in some) for some in (self.unready, self.probing))
        compiled = None if self.compiled is None else sorted(b for b in self.compiled if b[0] in ids)
        return blocked, unready, probing, None if compiled is None else tuple(compiled)

    def is_ready(self, kernel: Kernel, request: CallSpec) -> bool:
        """Whether `kernel` could run `request` without loading or compiling anything."""
        if kernel.id in self.unready:
            return False
        return (
            self.compiled is None
            or kernel.compile_key is None
            or (kernel.id, kernel.compile_key(request)) in self.compiled
        )


class KernelLoadError(Exception):
    """A chosen kernel does not load; `why` is the verdict that it has from now on."""

    def __init__(self, kernel: str, why: Rejected) -> None:
        super().__init__(kernel)
        self.kernel, self.why = kernel, why


@dataclass(frozen=True, slots=True)
class SelectionOptions:
    """The settings that bear on a decision; `workspace_budget` is in bytes.

    `budget_is_agreed` says that it is what the poorest rank of a rank group has. `overlay` is the digest of
    what the deployment took from the kernels' capabilities. Within `payback_calls` compiling a module has to
    be repaid; None takes any gain.
    """

    strict: bool = False
    tie_band: float = 0.03
    default_gain: float = 0.05
    workspace_budget: int | None = None
    budget_is_agreed: bool = False
    overlay: str = ""
    payback_calls: int | None = None


@dataclass(frozen=True, slots=True)
class SelectionContext:
    """Everything that verdicts of one table depend on; equal contexts may share a table.

    `droppable_modes` are those of `modes` that are given up where no kernel has them.
    """

    kernels: tuple[Kernel, ...]
    hardware: Hardware
    policy: Policy = EMPTY
    status: KernelStatus = field(default_factory=KernelStatus)
    options: SelectionOptions = field(default_factory=SelectionOptions)
    modes: frozenset[str] = frozenset()
    droppable_modes: frozenset[str] = frozenset()
    cost_fingerprint: Hashable = None
    compile_fingerprint: Hashable = None
    dispatch_table: ActiveDispatchTable | None = None

    def without(self, kernel: str, why: Rejected) -> SelectionContext:
        """The same with one more kernel out of service."""
        status = replace(self.status, blocked={**self.status.blocked, kernel: why})
        return replace(self, status=status)

    def fingerprint(self, op: str) -> Hashable:
        """Equal for two contexts that decide every request of `op` alike."""
        # The kernels themselves, not their ids: a replaced implementation keeps its id.
        return (
            self.kernels,
            tuple(r for r in self.policy.rules if r.concerns(op)),
            self.status.facts_of(self.kernels),
            self.options,
            self.modes,
            self.cost_fingerprint,
            self.compile_fingerprint,
            # A table ahead is compared with the whole policy: it was solved under all of it.
            (self.dispatch_table.identity, self.policy.digest) if self.dispatch_table is not None else None,
        )

    def digest(self, op: str) -> str:
        """Equal in processes that decide every request of `op` alike, each on any device of the kind.

        A kernel is known by what it says of itself, its libraries' versions and the code that prices it; a
        policy with all its rules.
        """
        return digest_of(
            VERSION,
            op,
            tuple(map(_facts_of, self.kernels)),
            msgspec.structs.replace(self.hardware, device=self.hardware.platform),
            self.hardware.mma_family,
            preferred_on(op, self.hardware.sm) if self.hardware.sm is not None else (),
            self.policy.digest,
            self.status.facts_of(self.kernels),
            self.options,
            self.modes,
            self.droppable_modes,
            self.cost_fingerprint,
            None if self.dispatch_table is None else repr(self.dispatch_table.identity),
        )


@functools.lru_cache(maxsize=4096)
def _facts_of(kernel: Kernel) -> Hashable:
    """What a choice can follow from of one kernel, as values."""
    code = [code_of(f) for f in (kernel.workspace_bytes, kernel.copied_bytes, kernel.compile_key)]
    return (
        kernel.id, versions_of(kernel), digest_of(kernel.capability, kernel.efficiency, kernel.tiling, code),
        kernel.tie_break_order, kernel.slow_import, kernel.default, kernel.descriptor, kernel.isolated,
        kernel.co_requirements,
    )  # fmt: skip


@dataclass(slots=True, eq=False, repr=False)
class AgreedState:
    """What the ranks of a rank group agreed on, in place of a device's own health and measurements.

    `kernels` are the ids that may be chosen, `options` hold in place of this rank's settings, `modes` for
    every request; `cost` is what the ranks compared when they agreed, None where they price by estimates
    alone. `digest` is that of all ops so far with their kernels: equal on ranks that ran the same steps.
    `blocks` are the states of blocks with a policy of their own, by its digest: they record here, too.
    """

    kernels: frozenset[str]
    modes: frozenset[str] = frozenset()
    cost: CostModel | None = None
    options: SelectionOptions = SelectionOptions()
    blocks: RecentCache[str, DispatchState] = field(default_factory=lambda: RecentCache(MAX_BLOCKS))
    _kernels_run: list[str] = field(default_factory=list)
    _hash: Any = field(default_factory=hashlib.sha256)

    def record_call(self, kernel: str) -> None:
        """Count one call of an op, by the kernel that it takes."""
        self._kernels_run.append(kernel)

    @property
    def digest(self) -> str:
        """The digest of every call so far, in their order."""
        ran, self._kernels_run = self._kernels_run, []
        if ran:
            self._hash.update(";".join([*ran, ""]).encode())
        return str(self._hash.hexdigest()[:16])
