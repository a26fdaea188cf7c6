"""The board over all kernels of one device: who is out, who is on probation, what persists."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from enum import StrEnum

from layerzero._util import log
from layerzero.health.breaker import MAX_WHY, Breaker, BreakerState, BreakerStatus, Probe, Transition
from layerzero.health.store import QuarantineRecord, QuarantineStore
from layerzero.spec.reasons import Reason, Rejected
from layerzero.spec.settings import Settings

KERNEL_FAILED = "kernel.failed"
KERNEL_QUARANTINED = "kernel.quarantined"
CIRCUIT_OPENED = "circuit.opened"
CIRCUIT_HALF_OPENED = "circuit.half_opened"
CIRCUIT_CLOSED = "circuit.closed"


class HealthLevel(StrEnum):
    """How a backend is: no kernel in trouble, some, or none left to serve."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    UNHEALTHY = "unhealthy"


class Health:
    """The board over all kernels of one device: who is out, who is on probation, what persists.

    `changed` is called after each transition, outside every lock, from the thread that caused it: make the
    next dispatch state there. `device` and `environment` select the quarantine records of `store` that apply.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
        *,
        store: QuarantineStore | None = None,
        device: str = "*",
        environment: str = "*",
        changed: Callable[[Transition], None] | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._wall = wall
        self._device = device
        self._environment = environment
        self._changed = changed
        self._breakers: dict[str, Breaker] = {}
        self.adopt(store)

    def set_settings(self, settings: Settings) -> None:
        """Put other limits in force, for breakers that exist and for those to come."""
        self._settings = settings
        for breaker in self._all():
            breaker.set_settings(settings)

    def adopt(self, store: QuarantineStore | None) -> None:
        """Remember quarantines there from now on; those that are there hold at once.

        Raises: OSError: it cannot be read.
        """
        self._store = store
        for record in store.load() if store is not None else ():
            if record.device in ("*", self._device) and record.environment in ("*", self._environment):
                self._breaker(record.kernel).quarantine(self._clock(), record.why or "quarantined earlier")

    def copy_to(self, store: QuarantineStore | None) -> None:
        """Write the quarantines in force to another store.

        Raises: OSError: it cannot be read or written.
        """
        if store is not None:
            store.load()
            for status in self.statuses():
                if status.state is BreakerState.QUARANTINED:
                    store.save(self._record(status.kernel, status.why))

    def failure(self, kernel: str, why: str, **facts: object) -> Transition | None:
        """A call of `kernel` failed; `facts` (op, sizes, dtype) go to the log."""
        log.warning(KERNEL_FAILED, kernel=kernel, why=why[:MAX_WHY], **facts)
        return self._breaker(kernel).failure(self._clock(), why)

    def rest(self, kernel: str, why: str) -> Transition | None:
        """Take `kernel` out of service for a cooldown, at once."""
        return self._breaker(kernel).rest(self._clock(), why)

    def success(self, kernel: str) -> None:
        """A call of `kernel` succeeded; worth saying only for a kernel that has failed before."""
        breaker = self._breakers.get(kernel)
        if breaker is not None:
            breaker.success(self._clock())

    def take_probe(self, kernel: str) -> Probe | None:
        """A place for one call of a half-open kernel, or None; a kernel without trouble needs no probe."""
        breaker = self._breakers.get(kernel)
        return None if breaker is None else breaker.take_probe()

    def quarantine(self, kernel: str, why: str) -> Transition | None:
        """Take `kernel` out on this device until `lift`, in later processes too.

        Raises: OSError: the store cannot be written; the kernel is out of service in this process anyway.
        """
        transition = self._breaker(kernel).quarantine(self._clock(), why)
        if self._store is not None:
            self._store.save(self._record(kernel, why))
        return transition

    def lift(self, kernel: str) -> Transition | None:
        """End the quarantine of `kernel`, stored record included."""
        if self._store is not None:
            self._store.forget(self._record(kernel, ""))
            self._store.forget(QuarantineRecord(kernel=kernel))
        breaker = self._breakers.get(kernel)
        return None if breaker is None else breaker.lift(self._clock())

    def tick(self) -> tuple[Transition, ...]:
        """Let time act on every breaker."""
        now_s = self._clock()
        return tuple(t for breaker in self._all() if (t := breaker.tick(now_s)) is not None)

    def next_change(self) -> float | None:
        """The clock's time at which the next cooldown ends, or None."""
        return min(
            (next_s for breaker in self._all() if (next_s := breaker.next_probe_at) is not None), default=None
        )

    def state(self, kernel: str) -> BreakerState:
        """The state of the breaker of `kernel`."""
        breaker = self._breakers.get(kernel)
        return BreakerState.CLOSED if breaker is None else breaker.state

    def blocked_kernels(self) -> dict[str, Rejected]:
        """Kernel id to the reason why it must not run now; kernels on probation are in `probing`."""
        now_s = self._clock()
        rejections: dict[str, Rejected] = {}
        for breaker in self._all():
            breaker.tick(now_s)
            status = breaker.status(now_s)
            if status.state is BreakerState.OPEN:
                cure = f"probed again in {max(0.0, (status.next_probe_at or now_s) - now_s):.1f} s"
                rejections[status.kernel] = Rejected(
                    Reason.CIRCUIT_OPEN, "health", "a closed circuit", status.why, cure
                )
            elif status.state is BreakerState.QUARANTINED:
                rejections[status.kernel] = Rejected(
                    Reason.QUARANTINED, "health", "no quarantine", status.why, "quarantine lifted"
                )
        return rejections

    def probing_kernels(self) -> frozenset[str]:
        """Kernels on probation: each call of them takes a probe first."""
        return frozenset(b.kernel for b in self._all() if b.state is BreakerState.HALF_OPEN)

    def level(self, kernels: Iterable[str]) -> HealthLevel:
        """How a backend with these kernels is; a kernel without trouble counts as healthy."""
        names, now_s = list(kernels), self._clock()
        failed = [self._breakers[name].status(now_s) for name in names if name in self._breakers]
        out = sum(status.state in (BreakerState.OPEN, BreakerState.QUARANTINED) for status in failed)
        if names and out == len(names):
            return HealthLevel.UNHEALTHY
        troubled = any(s.state is not BreakerState.CLOSED or s.recent_failures > 0 for s in failed)
        return HealthLevel.DEGRADED if troubled else HealthLevel.HEALTHY

    def statuses(self) -> tuple[BreakerStatus, ...]:
        """One record for each kernel that ever failed here, by id."""
        now_s = self._clock()
        return tuple(sorted((b.status(now_s) for b in self._all()), key=lambda s: s.kernel))

    def _all(self) -> list[Breaker]:
        return list(self._breakers.values())  # one C call: no other thread can insert meanwhile

    def _breaker(self, kernel: str) -> Breaker:
        breaker = self._breakers.get(kernel)
        if breaker is None:
            new = Breaker(self._settings, self._clock, kernel=kernel, changed=self._state_changed)
            breaker = self._breakers.setdefault(kernel, new)  # atomic: every thread gets the same one
        return breaker

    def _record(self, kernel: str, why: str) -> QuarantineRecord:
        return QuarantineRecord(
            kernel=kernel,
            device=self._device,
            environment=self._environment,
            why=why[:MAX_WHY],
            timestamp=self._wall(),
        )

    def _state_changed(self, transition: Transition) -> None:
        if transition.after is BreakerState.OPEN:
            log.warning(CIRCUIT_OPENED, kernel=transition.kernel, why=transition.why)
        elif transition.after is BreakerState.QUARANTINED:
            log.error(KERNEL_QUARANTINED, kernel=transition.kernel, why=transition.why)
        else:
            event = CIRCUIT_CLOSED if transition.after is BreakerState.CLOSED else CIRCUIT_HALF_OPENED
            log.info(event, kernel=transition.kernel, why=transition.why)
        if self._changed is not None:
            self._changed(transition)
