"""PolicyLayers: what file, environment and program ask for, merged into the policy of the moment."""

from __future__ import annotations

from collections.abc import Callable

from layerzero._util import log
from layerzero._util.clock import Clock
from layerzero._util.clock_timer import ClockTimer
from layerzero.ops import table as ops_table
from layerzero.selection.policy import EMPTY, Policy, check_names, environment_policy, load_policy, merge
from layerzero.spec.errors import PolicyValidationError
from layerzero.spec.settings import Settings

UNMATCHED = "policy.rule_unmatched"


class PolicyLayers:
    """`external` is the policy of file and environment, `program` that of the program, which wins.

    Not thread-safe: the runtime's lock guards it.
    """

    def __init__(self, clock: Clock, on_due: Callable[[], None]) -> None:
        self.external: Policy = EMPTY
        self.program: Policy = EMPTY
        self._clock = clock
        self._next_change: float | None = None
        self.timer = ClockTimer(clock, lambda: self._next_change, on_due)

    @staticmethod
    def load_external(settings: Settings, kernel_ids: Callable[[], frozenset[str]]) -> Policy:
        """The policy of file and environment; names that no op and none of `kernel_ids()` has are logged.

        Raises: PolicyLoadError: the file is no valid policy.
            PolicyValidationError: the settings are strict and a name matches nothing.
        """
        environment = environment_policy()
        if environment:
            known_ops = frozenset(ops_table.names())
            for finding in check_names(environment, known_ops=known_ops, known_kernels=kernel_ids()):
                if settings.strict:
                    raise PolicyValidationError(finding.message, rule=finding.rule)
                log.warning(UNMATCHED, rule=str(finding.rule), message=finding.message)
        return merge(_load_file(settings, kernel_ids), environment)

    def merged(self) -> Policy:
        """The policy of this moment; `timer` calls `on_due()` when a timeboxed rule begins or ends."""
        active = merge(self.external, self.program).active_at(self._clock.now())
        self._next_change = active.next_change
        self.timer.arm()
        return active.policy


def _load_file(settings: Settings, kernel_ids: Callable[[], frozenset[str]]) -> Policy:
    if settings.policy is None:
        return EMPTY
    loaded = load_policy(
        settings.policy,
        known_ops=frozenset(ops_table.names()),
        known_kernels=kernel_ids(),
        strict=settings.strict,
    )
    for finding in loaded.findings:
        log.warning(UNMATCHED, rule=str(finding.rule), message=finding.message)
    return loaded.policy
