"""Context-local overrides: what `prefer`, `disable` and `backend=` add to the process's policy.

A ContextVar names overrides only (and the runtime of a test that opened one `scoped`): handlers, pool
threads and second loops must all see the one runtime of the process.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextvars import ContextVar
from weakref import ref

from layerzero.actors.device.local_device import LocalDevice
from layerzero.runtime import Runtime
from layerzero.selection.dispatch import DispatchState
from layerzero.selection.policy import EMPTY, Policy, merge, request_lock

_MAX_VIEWS = 256


class Scope:
    """The policy of one context, and optionally the runtime that was opened for it alone."""

    __slots__ = ("_views", "policy", "runtime")

    def __init__(self, policy: Policy = EMPTY, runtime: Runtime | None = None) -> None:
        self.policy = policy
        self.runtime = runtime
        self._views: dict[tuple[LocalDevice, str, str | None], tuple[DispatchState, DispatchState]] = {}

    def nested(self, policy: Policy) -> Scope:
        """A scope within this one, with more rules."""
        return Scope(merge(self.policy, policy), self.runtime)

    @property
    def key(self) -> Hashable:
        """Equal for scopes under which a function computes the same; it keeps no runtime alive."""
        return self.policy.digest, None if self.runtime is None else ref(self.runtime)

    def generation(self, device: LocalDevice) -> int:
        """A number that changes where what was captured in this scope has to be captured anew."""
        return device.dispatch_version

    def snapshot(self, device: LocalDevice, op: str, backend: str | None) -> DispatchState:
        """The device's snapshot under this scope's policy, and under `backend=` for one op.

        Raises: PolicyValidationError: `backend` names no kernel of the op.
        """
        if backend is not None and not isinstance(backend, str):
            raise TypeError(f"backend needs a kernel id or a backend's name, got {type(backend).__name__}")
        base = device.snapshot
        key = (device, op, backend)
        cached = self._views.get(key)
        if cached is not None and cached[0] is base:
            return cached[1]
        policy = self.policy
        if backend is not None:
            device.registry.complete(op)
            kernel_ids = frozenset(kernel.id for kernel in device.registry.for_op(op))
            policy = merge(policy, request_lock(op, backend, known_kernels=kernel_ids))
        view = device.state_for_policy(merge(base.policy, policy)) if policy else base
        if len(self._views) > _MAX_VIEWS:
            self._views = {}
        self._views[key] = (base, view)
        return view


ROOT = Scope()
SCOPE: ContextVar[Scope | None] = ContextVar("layerzero_scope", default=None)
