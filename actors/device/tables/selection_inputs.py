"""SelectionInputs: what the selections of one device follow from, beside the policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from layerzero._util import log
from layerzero.actors.device.memory import WorkspaceBudget
from layerzero.actors.device.registry import Registry
from layerzero.health import Health
from layerzero.observe.counters import Counters
from layerzero.selection.context import (
    AgreedState,
    CostModel,
    KernelStatus,
    SelectionContext,
    SelectionOptions,
)
from layerzero.selection.policy.policy import Policy
from layerzero.selection.record import Selection
from layerzero.sharing.work import CHOICE, SHARED
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.hardware import Hardware
from layerzero.spec.settings import Settings

if TYPE_CHECKING:
    from layerzero.graphs.proof import Proofs
    from layerzero.selection.active_table import ActiveDispatchTable
    from layerzero.selection.dispatch import Chooser

CHOICE_UNREADABLE = "sharing.choice_unreadable"


@dataclass(eq=False)
class SelectionInputs:
    """Kernels, health, prices, proofs and memory of one device, as one `SelectionContext` an op.

    `cost` prices kernels, `dispatch_table` decides before run time where there is one.
    """

    settings: Settings
    _hardware: Hardware
    _registry: Registry
    _health: Health
    budget: WorkspaceBudget
    cost: CostModel
    _counters: Counters
    dispatch_table: ActiveDispatchTable | None = None
    _proofs: Proofs | None = None
    _ops_with_workspace: dict[str, bool] = field(default_factory=dict)

    @property
    def proofs(self) -> Proofs:
        """What is proved about captures; without any, every kernel has what it declares."""
        if self._proofs is None:
            from layerzero.graphs.proof import Proofs, ProofStore

            self._proofs = Proofs(self._hardware, ProofStore.within(self.settings.state_dir))
        return self._proofs

    @property
    def chooser(self) -> Chooser | None:
        """What takes the choices of other processes; None where the settings share none."""
        return self._choose_for_all if self.settings.shared_choices_s else None

    def _choose_for_all(self, key: str, request: CallSpec, choose: Callable[[], Selection]) -> Selection:
        """The choice of `key`: what another process chose, else `choose()`, left for the others."""
        choices: list[Selection] = []

        def work() -> bytes:
            choices.append(choose())
            return msgspec.msgpack.encode(choices[0])

        answer = SHARED.once(CHOICE._replace(fresh_s=self.settings.shared_choices_s or 0.0), key, work)
        if not answer.leader:
            return choices[0]
        try:
            selection = msgspec.msgpack.decode(answer.body, type=Selection)
        except msgspec.MsgspecError as error:  # a checkout of this very version that is not ours
            log.warning(CHOICE_UNREADABLE, op=request.op, leader=answer.leader, why=str(error))
            return choose()
        self._counters.add("choices_shared", op=request.op)
        return msgspec.structs.replace(selection, why=f"{selection.why} (chosen by {answer.leader})")

    def states_workspace(self, op: str) -> bool:
        """Whether a kernel of the op states a workspace, so that free memory bears on the choice."""
        sized = self._ops_with_workspace.get(op)
        if sized is None:
            stated = (kernel.workspace_bytes is not None for kernel in self._registry.for_op(op))
            sized = self._ops_with_workspace[op] = any(stated)
        return sized

    def context(
        self, op: str, policy: Policy, terms: AgreedState | None, middlewares: tuple[object, ...]
    ) -> SelectionContext:
        """What one op is selected from; under `terms`, what all ranks of a group agreed on."""
        settings = self.settings
        kernels = self._registry.for_op(op)
        if self._proofs is not None or settings.graph_strict or settings.state_dir is not None:
            kernels = self.proofs.apply(kernels, strict=settings.graph_strict)
        # Ranks must decide alike: what only this one knows (health, prices, free memory) has no say.
        if terms is not None:
            return SelectionContext(
                kernels=tuple(kernel for kernel in kernels if kernel.id in terms.kernels),
                hardware=self._hardware,
                policy=policy,
                status=KernelStatus(),
                options=terms.options,
                modes=terms.modes,
                droppable_modes=frozenset() if terms.options.strict else terms.modes,
            )
        budget_bytes = None
        # Ops whose kernels need no room keep their tables while free memory moves.
        if any(kernel.workspace_bytes for kernel in kernels):
            free_bytes = self.budget.bytes  # None before the first look
            budget_bytes = settings.workspace_limit_bytes if free_bytes is None else free_bytes
        options = SelectionOptions(
            settings.strict, settings.tie_band, settings.default_gain, budget_bytes,
            payback_calls=settings.payback_calls,
        )  # fmt: skip
        fingerprint = getattr(self.cost, "fingerprint", None)
        return SelectionContext(
            kernels=kernels,
            hardware=self._hardware,
            policy=policy,
            status=self._status(),
            options=self._registry.with_overlay(options),
            modes=frozenset({"batch_invariant"}) if settings.determinism == "strict" else frozenset(),
            cost_fingerprint=fingerprint(op) if fingerprint else None,
            # What a table remembers, and what the compiler makes of a selection, follows from these, too.
            compile_fingerprint=(
                settings.max_keys,
                settings.inference,
                settings.warm,
                *map(id, middlewares),
            ),
            dispatch_table=self.dispatch_table,
        )

    def _status(self) -> KernelStatus:
        registry, health = self._registry, self._health
        blocked = {**registry.blocked(), **health.blocked_kernels()}
        # None: a call waits for the compiler rather than take the next best kernel.
        compiled = None if self.settings.warm == "eager" else registry.compiled_units()
        return KernelStatus(blocked, registry.unready(), health.probing_kernels(), compiled)
