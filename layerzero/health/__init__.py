"""Which kernels may serve now: a circuit breaker for each, quarantine that outlives the process, one board.

    CLOSED --failures_to_open failures within window_s--> OPEN --cooldown--> HALF_OPEN
    HALF_OPEN --a probe succeeds--> CLOSED        HALF_OPEN --a probe fails or hangs--> OPEN, cooldown doubled
    any state --quarantine--> QUARANTINED --lift--> CLOSED

Nothing here runs on the hot path. A closed breaker is the absence of an entry in `Health.blocked_kernels()`,
which is read when a dispatch state is made; a half-open kernel is served by a plan that takes a `Probe` for
each call. All times are seconds of one monotonic clock, passed in.
"""

from layerzero.health.board import Health as Health
from layerzero.health.board import HealthLevel as HealthLevel
from layerzero.health.breaker import Breaker as Breaker
from layerzero.health.breaker import BreakerState as BreakerState
from layerzero.health.breaker import BreakerStatus as BreakerStatus
from layerzero.health.breaker import Probe as Probe
from layerzero.health.breaker import Transition as Transition
from layerzero.health.store import JsonQuarantineStore as JsonQuarantineStore
from layerzero.health.store import QuarantineRecord as QuarantineRecord
from layerzero.health.store import QuarantineStore as QuarantineStore
