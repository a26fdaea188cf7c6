"""What is known about calls, kept where the compiled twin finds it in one step.

For a blocking op these are the plans of one generation (`BlockingCallCache`). For an awaited op a memo holds
everything between a call's arguments and its pending call: plan, group, size, modes. Both belong to one
generation of a device of the process's runtime; another runtime, policy or health verdict empties them. Calls
that more than bits describe (scopes, subclasses, autocast, modes that see every operation, CUDA streams
beside the default one) never enter.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any
from weakref import WeakSet

from layerzero.actors.device.local_device import LocalDevice
from layerzero.calls.scope import SCOPE
from layerzero.native import FAST_PATH, UNUSED
from layerzero.ops.op import Args, Op
from layerzero.runtime import ACTIVE
from layerzero.scheduler.core.pending_call import PendingCall
from layerzero.scheduler.modes.torch_modes import restore
from layerzero.scheduler.scheduled_device import ScheduledDevice
from layerzero.selection.dispatch import DispatchState
from layerzero.selection.modes import REHEARSAL
from layerzero.selection.plan import Plan


def _parameters(op: Op) -> tuple[tuple[str, ...], tuple[Any, ...], int] | None:
    """Names, what has a default, and how many may be positional; None where the twin cannot bind them."""
    parameters = tuple(inspect.signature(op.build).parameters.values())
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY) for p in parameters):
        return None
    return (
        tuple(p.name for p in parameters),
        # Only whether there is one matters: what it is, the full arguments say.
        tuple(... if p.default is p.empty else None for p in parameters),
        sum(p.kind is not p.KEYWORD_ONLY for p in parameters),
    )


def _has_drawn(op: Op, kwargs: dict[str, Any]) -> bool:
    """Whether a call's seed was drawn for it: the twin would run every later call with that one."""
    return op.stochastic and kwargs.get("seed") is None


class _CallCache:
    """What the caches of blocking and awaited calls share: the twin's `entries`, and how many were known."""

    __slots__ = ("__weakref__", "_before", "_known", "_op", "count_known", "entries")

    def __init__(self, op: Op) -> None:
        self._op = op
        self.entries: Any = None
        self._before = 0  # of twins that are gone
        self._known = count()
        self.count_known = self._known.__next__  # for calls that Python answers; threads lose no increment
        _CACHES.add(self)
        FAST_PATH.on_ready(self.install)
        ACTIVE.on_change(self.clear)

    def install(self, module: Any) -> None:
        """Begin with the compiled twin, or go without."""
        raise NotImplementedError

    def clear(self) -> None:
        """Keep nothing alive that belonged to a runtime which is gone."""
        if self.entries is not None:
            self.entries.forget()

    def _answer_by(self, entries: Any) -> None:
        if self.entries is not None:
            self._before += self.entries.hits
        self.entries = entries

    def known_calls(self) -> tuple[str, int]:
        """The op, and how many of its calls were known."""
        by_python = int(repr(self._known)[len("count(") : -1])
        return self._op.name, self._before + by_python + (0 if self.entries is None else self.entries.hits)


_CACHES: WeakSet[_CallCache] = WeakSet()


def remembered_calls() -> dict[str, int]:
    """Calls of each op in this process whose plan was known; those in a scope or with `backend=` left out."""
    totals: Counter[str] = Counter()
    for name, known in [cache.known_calls() for cache in list(_CACHES)]:
        totals[name] += known
    return dict(totals)


class BlockingCallCache(_CallCache):
    """One op's plans of blocking calls while the compiled twin is there, else None.

    `last` notes a thread's last plan, `recover` continues where a kernel raised.
    """

    __slots__ = ("_last", "_recover")

    def __init__(self, op: Op, last: Any, recover: Callable[..., Any]) -> None:
        self._last = last
        self._recover = recover
        super().__init__(op)

    def install(self, module: Any) -> None:
        """Begin with the compiled twin, or go without."""
        parameters = _parameters(self._op)
        if module is None or parameters is None:
            self._answer_by(None)
            return
        self._answer_by(module.PlanCache(*parameters, ACTIVE, SCOPE, REHEARSAL, self._last, self._recover))

    def remember(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], full: Args, device: LocalDevice,
        snapshot: DispatchState, plan: Plan,
    ) -> None:  # fmt: skip
        """Keep the plan of a call that the current policy governs; the first one has the twin loaded soon."""
        if self.entries is not None:
            if _has_drawn(self._op, kwargs):
                return
            self.entries.remember(args, kwargs, full, ACTIVE.devices, device, snapshot, plan)
        elif not FAST_PATH.requested:
            FAST_PATH.requested = True
            if FAST_PATH.state == UNUSED:
                device.loader.run_later(FAST_PATH.start)


def find_nothing(args: Args, kwargs: dict[str, Any]) -> PendingCall | None:
    """A cache's `find` while nothing compiled is there to answer."""
    return None


class AwaitedCallCache(_CallCache):
    """One op's memo while the compiled twin is there, else None."""

    __slots__ = ("_ways", "call", "find")

    def __init__(self, op: Op) -> None:
        self.find: Callable[..., Any] = find_nothing
        self.call: Callable[..., Any] | None = None
        self._ways: tuple[Any, ...] | None = None
        super().__init__(op)

    def serve(self, last: Any, follow: Callable[..., Any], validate: Callable[[Args], Args] | None) -> None:
        """Make compiled coroutines from here on: `last` notes a thread's last plan, `follow` takes what is
        not known or not queued at once, `validate` checks the values of a known call."""
        self._ways = (last, restore, follow, validate)
        self.install(FAST_PATH.module)

    def install(self, module: Any) -> None:
        """Begin a memo of the compiled twin, or go without."""
        parameters = _parameters(self._op)
        if module is None or parameters is None or self._ways is None:
            self._answer_by(None)
            self.find, self.call = find_nothing, None
            return
        self._answer_by(module.CallCache(self._op, *parameters, ACTIVE, SCOPE, REHEARSAL, *self._ways))
        self.find, self.call = self.entries.find, self.entries.call

    def remember(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], full: Args, device: ScheduledDevice, plan: Plan,
        pending: PendingCall,
    ) -> bool:  # fmt: skip
        """Keep a call that the current policy governs; whether it can be found again."""
        if not device.settings.max_keys:
            return False
        facts, modes = plan.batch_facts, pending.modes
        if self.entries is None or pending.snapshot is not None or SCOPE.get() is not None:
            return False
        if facts is None or facts.shared_positions is None or _has_drawn(self._op, kwargs):
            return False
        if device.capture_modes() is not modes or ACTIVE.devices.get(device.device) is not device:
            return False
        remembered: bool = self.entries.remember(
            args, kwargs, full, facts.shared_positions,
            (ACTIVE.devices, device, device.snapshot, device.loop_drivers.by_loop),
            plan, pending.batch_key, modes, facts.tokens, facts.size_bytes, plan.expected_us,
        )  # fmt: skip
        return remembered
