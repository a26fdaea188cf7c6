"""The board: who is blocked and why, levels of a backend, quarantine across processes, and what is told."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from layerzero.health import (
    BreakerState,
    Health,
    HealthLevel,
    JsonQuarantineStore,
    QuarantineRecord,
    Transition,
)
from layerzero.spec.reasons import Reason
from layerzero.spec.settings import Settings
from tests.health.clocks import SETTINGS, Clock


class MemoryStore:
    """A store that keeps records in a list."""

    def __init__(self) -> None:
        self.records: list[QuarantineRecord] = []

    def load(self) -> list[QuarantineRecord]:
        return list(self.records)

    def save(self, record: QuarantineRecord) -> None:
        self.records.append(record)

    def forget(self, record: QuarantineRecord) -> None:
        self.records = [r for r in self.records if r.kernel != record.kernel]


def fail(health: Health, kernel: str, times: int = 3) -> None:
    for _ in range(times):
        health.failure(kernel, "RuntimeError: boom")


def test_a_healthy_board_costs_nothing() -> None:
    """Kernels that never failed have no entry anywhere."""
    health = Health(SETTINGS, Clock())
    health.success("a.b")
    assert (
        health.blocked_kernels() == {} and health.probing_kernels() == frozenset() and health.statuses() == ()
    )
    assert health.state("a.b") is BreakerState.CLOSED and health.take_probe("a.b") is None
    assert health.next_change() is None and health.level(["a.b"]) is HealthLevel.HEALTHY


def test_a_failing_kernel_is_blocked_probed_and_back() -> None:
    """Open, with the reason and the time left; on probation; closed after a good probe (T42, T46)."""
    clock = Clock()
    seen: list[Transition] = []
    health = Health(SETTINGS, clock, changed=seen.append)
    fail(health, "a.b")
    blocked = health.blocked_kernels()
    assert blocked["a.b"].reason is Reason.CIRCUIT_OPEN
    assert "boom" in str(blocked["a.b"]) and blocked["a.b"].counterfactual == "probed again in 4.0 s"
    assert health.next_change() == clock.now + 4.0
    clock.now += 4.0
    assert health.blocked_kernels() == {} and health.probing_kernels() == {"a.b"}
    probe = health.take_probe("a.b")
    assert probe is not None
    with probe:
        assert health.state("a.b") is BreakerState.HALF_OPEN
    assert health.probing_kernels() == frozenset() and health.state("a.b") is BreakerState.CLOSED
    assert [t.after for t in seen] == [BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED]


def test_tick_reports_what_time_changed() -> None:
    """Cooldowns that ended are told once."""
    clock = Clock()
    health = Health(SETTINGS, clock)
    fail(health, "a.b")
    fail(health, "c.d")
    assert health.tick() == ()
    clock.now += 4.0
    assert {t.kernel for t in health.tick()} == {"a.b", "c.d"} and health.tick() == ()


def test_the_first_cooldown_that_ends_is_the_next_change(caplog: pytest.LogCaptureFixture) -> None:
    """Of several kernels that rest, the one whose time comes first is waited for; each turn is an event."""
    clock = Clock()
    health = Health(SETTINGS, clock)
    with caplog.at_level(logging.INFO, "layerzero"):
        fail(health, "a.b")
        clock.now += 1.0
        fail(health, "c.d")
        assert health.next_change() == clock.now + 3.0
        clock.now += 3.0
        health.tick()
        assert health.next_change() == clock.now + 1.0
        probe = health.take_probe("a.b")
        assert probe is not None
        probe.succeed()
    events = [r.getMessage().split(" why=")[0] for r in caplog.records if "circuit." in r.getMessage()]
    assert events == [
        "circuit.opened kernel='a.b'", "circuit.opened kernel='c.d'", "circuit.half_opened kernel='a.b'",
        "circuit.closed kernel='a.b'",
    ]  # fmt: skip


def test_other_limits_hold_for_kernels_that_have_failed() -> None:
    """A board that is given stricter settings opens the circuit of a kernel that it knows already."""
    health = Health(SETTINGS, Clock())
    fail(health, "a.b", times=1)
    health.set_settings(SETTINGS.replace(failures_to_open=2))
    fail(health, "a.b", times=1)
    assert health.state("a.b") is BreakerState.OPEN


def test_quarantines_alone_are_copied_to_another_store() -> None:
    """A kernel that rests is back in a moment; in a file it would stay out."""
    health, store = Health(SETTINGS, Clock()), MemoryStore()
    fail(health, "a.b")
    health.quarantine("c.d", "wrong numbers")
    health.copy_to(store)
    assert [record.kernel for record in store.records] == ["c.d"]


def test_levels_of_a_backend() -> None:
    """Healthy without trouble, degraded with some, unhealthy with no kernel left, healthy again later."""
    clock = Clock()
    health = Health(SETTINGS, clock)
    kernels = ["a.one", "a.two"]
    assert health.level(kernels) is HealthLevel.HEALTHY
    health.failure("a.one", "x")
    assert health.level(kernels) is HealthLevel.DEGRADED
    fail(health, "a.one")
    assert health.level(kernels) is HealthLevel.DEGRADED
    health.quarantine("a.two", "wrong numbers")
    assert health.level(kernels) is HealthLevel.UNHEALTHY and health.level([]) is HealthLevel.HEALTHY
    health.lift("a.two")
    clock.now += 4.0
    health.tick()
    assert health.level(kernels) is HealthLevel.DEGRADED
    probe = health.take_probe("a.one")
    assert probe is not None and probe.succeed() is not None
    assert health.level(kernels) is HealthLevel.HEALTHY


def test_failures_are_logged_with_context(caplog: pytest.LogCaptureFixture) -> None:
    """Each failure, opening and quarantine is an event with the kernel, the cause and the request's facts."""
    clock = Clock()
    health = Health(SETTINGS, clock)
    with caplog.at_level(logging.INFO, "layerzero"):
        for _ in range(3):
            health.failure("a.b", "RuntimeError: boom", op="attention", dims={"Sq": 8})
        health.quarantine("a.b", "wrong numbers")
    text = caplog.text
    assert text.count("kernel.failed") == 3 and "'Sq': 8" in text and "boom" in text
    assert "circuit.opened" in text and "kernel.quarantined" in text and "wrong numbers" in text


def test_quarantine_outlives_the_process(tmp_path: Path) -> None:
    """A second board over the same store, device and environment starts with the kernel out."""
    store = JsonQuarantineStore(tmp_path / "quarantine")
    first = Health(SETTINGS, Clock(), store=store, device="cuda:0", environment="e1", wall=lambda: 5.0)
    first.quarantine("a.b", "wrong numbers")
    again = Health(SETTINGS, Clock(), store=store, device="cuda:0", environment="e1")
    blocked = again.blocked_kernels()["a.b"]
    assert blocked.reason is Reason.QUARANTINED and "wrong numbers" in str(blocked)
    for device, environment in (("cuda:1", "e1"), ("cuda:0", "e2")):
        assert (
            Health(SETTINGS, Clock(), store=store, device=device, environment=environment).blocked_kernels()
            == {}
        )
    again.lift("a.b")
    assert again.blocked_kernels() == {}
    assert Health(SETTINGS, Clock(), store=store, device="cuda:0", environment="e1").blocked_kernels() == {}


def test_a_quarantine_of_every_device_is_obeyed_and_lifted() -> None:
    """A record for "*" applies everywhere, and lifting removes it too."""
    store = MemoryStore()
    store.records.append(QuarantineRecord(kernel="a.b"))
    health = Health(SETTINGS, Clock(), store=store, device="cpu", environment="e1")
    assert "a.b" in health.blocked_kernels()
    health.lift("a.b")
    assert store.records == [] and health.blocked_kernels() == {}


def test_a_store_that_cannot_be_written_still_takes_the_kernel_out() -> None:
    """The error reaches the caller, and the kernel is out all the same."""

    class Full(MemoryStore):
        def save(self, record: QuarantineRecord) -> None:
            raise OSError("no space")

    health = Health(SETTINGS, Clock(), store=Full())
    with pytest.raises(OSError, match="no space"):
        health.quarantine("a.b", "wrong numbers")
    assert health.blocked_kernels()["a.b"].reason is Reason.QUARANTINED


def test_many_threads_failing_one_kernel_open_it_once() -> None:
    """Sixteen threads share one breaker; it opens once and counts every failure."""
    clock = Clock()
    seen: list[Transition] = []
    health = Health(Settings(failures_to_open=50), clock, changed=seen.append)
    start = threading.Barrier(16)

    def work() -> None:
        start.wait()
        fail(health, "a.b", 20)

    logging.getLogger("layerzero").disabled = True
    try:
        threads = [threading.Thread(target=work) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        logging.getLogger("layerzero").disabled = False
    assert [t.after for t in seen] == [BreakerState.OPEN]
    (standing,) = health.statuses()
    assert standing.failures == 320 and standing.opened == 1
