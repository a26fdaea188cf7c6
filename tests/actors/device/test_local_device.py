"""The local device: fallback inside a call, breakers as generations, loading in the background."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch

from layerzero.actors.device.local_device import LocalDevice
from layerzero.ops import table as ops_table
from layerzero.selection.dispatch import DispatchState
from layerzero.selection.modes import mode_bits
from layerzero.selection.plan import signature_of
from layerzero.selection.policy import Policy, make_rule
from layerzero.selection.record import Selection
from layerzero.spec.errors import KernelExecutionError, NoKernelFoundError, RuntimeClosedError
from layerzero.spec.kernel import Kernel
from layerzero.spec.reasons import Reason
from layerzero.spec.settings import Settings
from tests.clocks import FakeClock
from tests.crowds import Crowd
from tests.kernels import device, kernel
from tests.waiting import LIMIT_S

RMS = ops_table.get("rms_norm")


def args(rows: int = 3) -> Any:
    return RMS.build(torch.arange(float(rows * 8)).view(rows, 8) + 1.0)[1]


def selection(own: LocalDevice, full: Any) -> Selection:
    return own.plan(RMS, signature_of(RMS, full), full, mode_bits()).selection_for_request()


class Flaky:
    """A kernel that raises while `broken`, and counts its calls."""

    def __init__(self) -> None:
        self.broken = True
        self.calls = 0

    def __call__(self, *full: Any) -> Any:
        self.calls += 1
        if self.broken:
            raise RuntimeError("planted")
        return RMS.reference(*full)


def flaky_device(flaky: Flaky, clock: FakeClock | None = None, **settings: Any) -> LocalDevice:
    kernels = [kernel("flaky.rms_norm", flaky, launch_us=0.1), kernel("steady.rms_norm", launch_us=9.0)]
    return device(kernels, Settings(**settings), clock=clock or FakeClock())


def test_a_failing_kernel_is_replaced_inside_the_call(caplog: pytest.LogCaptureFixture) -> None:
    """The caller gets the next kernel's answer; the record, the counter, the order and the log say so."""
    own = flaky_device(Flaky())
    full = args()
    result, plan = own.launch_planned(RMS, full)
    assert torch.equal(result, RMS.reference(*full))
    record = plan.selection_for_request()
    assert (record.kernel, record.fallback) == ("steady.rms_norm", "flaky.rms_norm")
    assert "planted" in record.why
    assert own.counters.get("fallbacks", kernel="flaky.rms_norm", reason="RuntimeError") == 1
    assert [(r.levelname, r.getMessage().split(" error=")[0].split(" why=")[0]) for r in caplog.records] == [
        ("WARNING", "kernel.fell_back kernel='flaky.rms_norm' used='steady.rms_norm' op='rms_norm'"),
        ("WARNING", "kernel.failed kernel='flaky.rms_norm'"),
    ]
    assert all("planted" in r.getMessage() for r in caplog.records)
    assert caplog.records[1].getMessage().endswith("op='rms_norm'")


def test_a_circuit_opens_after_n_failures_and_the_trace_says_why() -> None:
    """After three failures the kernel leaves the snapshot; nobody calls it any more."""
    flaky = Flaky()
    own = flaky_device(flaky, failures_to_open=3)
    for _ in range(3):
        own.launch(RMS, args())
    assert flaky.calls == 3
    own.launch(RMS, args())
    assert flaky.calls == 3
    record = selection(own, args())
    assert record.kernel == "steady.rms_norm"
    assert [r.reason for r in record.candidate("flaky.rms_norm").rejected] == [Reason.CIRCUIT_OPEN]


def test_a_recovered_kernel_returns_through_a_probe() -> None:
    """After the cooldown one call probes; its success closes the circuit."""
    flaky, clock = Flaky(), FakeClock()
    own = flaky_device(flaky, clock, failures_to_open=1, cooldown_s=30.0)
    own.launch(RMS, args())
    assert selection(own, args()).kernel == "steady.rms_norm"
    clock.advance(29.0)
    assert selection(own, args()).kernel == "steady.rms_norm"
    flaky.broken = False
    clock.advance(2.0)
    assert selection(own, args()).kernel == "flaky.rms_norm"
    own.launch(RMS, args())
    assert flaky.calls == 2
    assert own.health.probing_kernels() == frozenset()
    own.launch(RMS, args())
    assert flaky.calls == 3


def test_a_failed_probe_opens_the_circuit_again_and_the_caller_still_gets_an_answer() -> None:
    """A half-open kernel that fails costs its caller nothing but time."""
    flaky, clock = Flaky(), FakeClock()
    own = flaky_device(flaky, clock, failures_to_open=1, cooldown_s=30.0)
    own.launch(RMS, args())
    clock.advance(31.0)
    full = args()
    assert torch.equal(own.launch(RMS, full), RMS.reference(*full))
    assert flaky.calls == 2
    assert selection(own, full).kernel == "steady.rms_norm"


def test_half_open_admits_the_configured_probes_only() -> None:
    """Of 50 callers at the edge exactly N reach the kernel; the others run elsewhere."""
    entered = threading.Semaphore(0)
    leave = threading.Event()
    reached: list[int] = []
    broken = [True]

    def body(*full: Any) -> Any:
        if broken[0]:
            raise RuntimeError("planted")
        reached.append(1)
        entered.release()
        leave.wait(10)
        return RMS.reference(*full)

    clock = FakeClock()
    kernels = [kernel("flaky.rms_norm", body, launch_us=0.1), kernel("steady.rms_norm", launch_us=9.0)]
    own = device(kernels, Settings(failures_to_open=1, probes=2), clock=clock)
    own.launch(RMS, args())
    broken[0] = False
    clock.advance(31.0)
    full = args()
    own.plan(RMS, signature_of(RMS, full), full, mode_bits())
    barrier = threading.Barrier(50)

    def call() -> None:
        barrier.wait()
        own.launch(RMS, full)

    threads = [threading.Thread(target=call) for _ in range(50)]
    for thread in threads:
        thread.start()
    assert entered.acquire(timeout=LIMIT_S) and entered.acquire(timeout=LIMIT_S)
    assert not entered.acquire(timeout=0.3)
    leave.set()
    for thread in threads:
        thread.join(10)
    assert len(reached) == 2


def probed_device(*kernels: Kernel) -> LocalDevice:
    """A device whose kernel `flaky` is on probation, with its only place for a probe taken."""
    flaky, clock = Flaky(), FakeClock()
    first = kernel("flaky.rms_norm", flaky, launch_us=0.1)
    own = device([first, *kernels], Settings(failures_to_open=1, probes=1), clock=clock)
    own.launch(RMS, args())
    clock.advance(31.0)
    own.plan(RMS, signature_of(RMS, args()), args(), mode_bits())
    assert own.health.take_probe("flaky.rms_norm") is not None
    return own


def test_a_call_that_is_no_probe_says_who_answered_it(caplog: pytest.LogCaptureFixture) -> None:
    """The record names the kernel that ran, with its own transforms; a counter and an event say it, too."""
    own = probed_device(kernel("dense.rms_norm", launch_us=9.0, contiguous=True))
    full = RMS.build(torch.rand(3, 16)[:, ::2])[1]
    with caplog.at_level(logging.DEBUG, "layerzero"):
        result, plan = own.launch_planned(RMS, full)
    record = plan.selection_for_request()
    assert torch.equal(result, RMS.reference(*full))
    assert (record.kernel, record.fallback) == ("dense.rms_norm", "flaky.rms_norm")
    assert [each.kind for each in record.transforms] == ["contiguous"] and "on probation" in record.why
    accepted = record.candidate("dense.rms_norm").accepted
    assert accepted is not None and record.expected_us == accepted.kernel_us + accepted.transform_us
    assert own.counters.get("fallbacks", kernel="flaky.rms_norm", reason="CIRCUIT_OPEN") == 1
    assert "kernel.fell_back" in caplog.text
    assert own.health.probing_kernels() == {"flaky.rms_norm"}


def test_what_fails_beside_a_kernel_on_probation_is_not_held_against_that_kernel() -> None:
    """The next kernel raises, once: the one after it answers, and who raised is blamed by name."""
    broken = Flaky()
    broken.broken = False
    second = kernel("second.rms_norm", broken, launch_us=5.0)
    own = probed_device(second, kernel("third.rms_norm", launch_us=9.0))
    broken.broken = True
    before, calls = own.health.statuses(), broken.calls
    _, plan = own.launch_planned(RMS, args())
    assert (plan.kernel, plan.selection.fallback) == ("third.rms_norm", "second.rms_norm")
    assert broken.calls == calls + 1
    (flaky,) = (s for s in own.health.statuses() if s.kernel == "flaky.rms_norm")
    assert flaky in before
    assert own.counters.get("fallbacks", kernel="second.rms_norm", reason="RuntimeError") == 1


def test_a_kernel_on_probation_that_nothing_stands_beside_says_so() -> None:
    """Where no other kernel takes the call, a call that is no probe is an error by name."""
    own = probed_device(kernel("dense.rms_norm", launch_us=9.0))
    own.set_policy(Policy((make_rule("lock", "flaky.rms_norm", op="rms_norm"),)))
    with pytest.raises(KernelExecutionError, match=r"flaky\.rms_norm .*on probation.* no other kernel"):
        own.launch(RMS, args())


def test_when_everybody_fails_the_first_error_is_the_cause() -> None:
    """KernelExecutionError names the kernel and chains what it raised."""

    def broken(*full: Any) -> Any:
        raise RuntimeError("planted")

    own = device([kernel("a.rms_norm", broken, launch_us=0.1), kernel("b.rms_norm", broken)])
    with pytest.raises(KernelExecutionError, match=r"a\.rms_norm raised RuntimeError: planted") as caught:
        own.launch(RMS, args())
    assert caught.value.kernel == "a.rms_norm"
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_bad_data_blames_the_caller_and_no_kernel() -> None:
    """An id out of range is a ValueError about ids, and no circuit hears of it."""
    embedding = ops_table.get("embedding")
    own = device([kernel("a.embedding"), kernel("b.embedding")], Settings(failures_to_open=1))
    full = embedding.build(torch.tensor([1, 99]), torch.zeros(4, 8))[1]
    with pytest.raises(ValueError, match="ids"):
        own.launch(embedding, full)
    assert own.health.blocked_kernels() == {}


def test_an_impure_op_is_never_repeated() -> None:
    """A kernel that may have changed its inputs fails the call; no other kernel runs."""
    from dataclasses import replace

    impure = replace(RMS, pure=False)
    other = Flaky()
    other.broken = False
    own = device([kernel("flaky.rms_norm", Flaky(), launch_us=0.1), kernel("steady.rms_norm", other)])
    with pytest.raises(KernelExecutionError, match="changes its inputs"):
        own.launch(impure, args())
    assert other.calls == 0


def test_a_cold_kernel_is_loaded_in_the_background_and_then_chosen() -> None:
    """A call never waits for a slow import: it runs on what is ready, and the trace says what comes."""
    release, loaded = threading.Event(), threading.Event()

    def load() -> Any:
        release.wait(10)
        loaded.set()
        return RMS.reference

    kernels = [
        kernel("slow.rms_norm", load=load, cold=True, launch_us=0.1),
        kernel("steady.rms_norm", launch_us=9.0),
    ]
    own = device(kernels)
    first = selection(own, args())
    assert (first.kernel, first.when_warm) == ("steady.rms_norm", "slow.rms_norm")
    candidate = first.candidate("slow.rms_norm").accepted
    assert candidate is not None and not candidate.ready
    release.set()
    assert loaded.wait(10)
    own.loader._thread.close(10)
    assert selection(own, args()).kernel == "slow.rms_norm"


def test_a_kernel_that_does_not_load_is_blocked_with_its_reason() -> None:
    """The import error stands in the trace, and loading is tried once."""
    tries: list[int] = []

    def load() -> Any:
        tries.append(1)
        raise ImportError("no such library")

    kernels = [
        kernel("gone.rms_norm", load=load, cold=True, launch_us=0.1),
        kernel("steady.rms_norm", launch_us=9.0),
    ]
    own = device(kernels)
    own.launch(RMS, args())
    own.loader._thread.close(10)
    own.launch(RMS, args(5))
    record = selection(own, args())
    assert record.kernel == "steady.rms_norm"
    assert [r.reason for r in record.candidate("gone.rms_norm").rejected] == [Reason.BACKEND_IMPORT_FAILED]
    assert tries == [1]


@pytest.mark.parametrize("fault", [ImportError("no such library"), RuntimeError("planted"), SystemExit(3)])
def test_a_kernel_that_does_not_load_inside_a_call_gives_way_to_the_next(
    fault: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller has the next kernel's answer; trace, event and counter name the one that did not load."""
    tries: list[int] = []

    def load() -> Any:
        tries.append(1)
        raise fault

    own = device(
        [kernel("gone.rms_norm", load=load, launch_us=0.1), kernel("steady.rms_norm", launch_us=9.0)]
    )
    for rows in (3, 3, 5):
        full = args(rows)
        torch.testing.assert_close(own.launch(RMS, full), RMS.reference(*full))
    record = selection(own, args())
    assert record.kernel == "steady.rms_norm" and tries == [1]
    (why,) = record.candidate("gone.rms_norm").rejected
    failed = Reason.KERNEL_LOAD_FAILED if type(fault) is RuntimeError else Reason.BACKEND_IMPORT_FAILED
    assert why.reason is failed and str(fault) in why.got
    assert own.counters.get("load_failures", kernel="gone.rms_norm") == 1
    assert [each.levelname for each in caplog.records if "kernel.load_failed" in each.getMessage()] == [
        "WARNING"
    ]


def test_where_no_kernel_loads_the_error_has_each_ones_reason() -> None:
    """Nothing is left that may answer: the verdicts say which library failed, in the words of its error."""

    def load() -> Any:
        raise ImportError("no such library")

    own = device([kernel(f"{name}.rms_norm", load=load) for name in ("gone", "lost")])
    with pytest.raises(NoKernelFoundError, match="BACKEND_IMPORT_FAILED") as caught:
        own.launch(RMS, args())
    got = [reason.got for each in caught.value.trace for reason in each.rejected]
    assert got == ["ImportError: no such library"] * 2


def test_a_policy_swap_keeps_the_tables_it_cannot_concern() -> None:
    """A rule on one op leaves every other op's plans as they are; a hit stays a hit."""
    linear = ops_table.get("linear")
    own = device([kernel("a.rms_norm"), kernel("b.rms_norm", launch_us=9.0), kernel("a.linear")])
    own.launch(RMS, args())
    own.launch(linear, linear.build(torch.zeros(2, 4), torch.zeros(3, 4))[1])
    kept, dropped = own.snapshot.tables["linear"], own.snapshot.tables["rms_norm"]
    own.set_policy(Policy((make_rule("deny", "a.rms_norm", op="rms_norm"),)))
    assert own.snapshot.tables["linear"] is kept
    assert own.snapshot.tables.get("rms_norm") is not dropped
    assert selection(own, args()).kernel == "b.rms_norm"


def stale_reads(own: LocalDevice) -> list[str]:
    """What 8 threads chose against the policy that 300 swaps had put in force before they asked."""
    denied = [Policy((make_rule("deny", f"{k}.rms_norm", op="rms_norm"),)) for k in ("a", "b")]
    turn = [0]
    wrong: list[str] = []
    stop = threading.Event()
    lock = threading.Lock()

    def read() -> None:
        full = args()
        signature, bits = signature_of(RMS, full), mode_bits()
        while not stop.is_set():
            with lock:
                expected = "b.rms_norm" if turn[0] % 2 == 0 else "a.rms_norm"
                got = own.plan(RMS, signature, full, bits).kernel
            if got != expected:
                wrong.append(got)

    own.set_policy(denied[0])
    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for number in range(1, 300):
        with lock:
            own.set_policy(denied[number % 2])
            turn[0] = number
    stop.set()
    for thread in threads:
        thread.join()
    return wrong


def test_a_selection_after_a_swap_never_comes_from_before_it() -> None:
    """I1: readers that start after the swap returned see the new policy, with 8 threads and 300 swaps."""
    assert (
        stale_reads(device([kernel("a.rms_norm", launch_us=1.0), kernel("b.rms_norm", launch_us=5.0)])) == []
    )


def test_tables_that_outlive_their_rules_are_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """I1's negative control: without the comparison of fingerprints the same readers are wrong."""

    def keeps_all(self: DispatchState, version: int, policy: Policy, context: Any) -> DispatchState:
        return DispatchState(version, policy, dict(self.tables))

    monkeypatch.setattr(DispatchState, "successor", keeps_all)
    assert stale_reads(device([kernel("a.rms_norm", launch_us=1.0), kernel("b.rms_norm", launch_us=5.0)]))


def test_one_computation_for_a_key_however_many_threads_ask() -> None:
    """I2: a hundred threads at one new key cause one decision."""
    cost = Crowd(100)
    own = device([kernel("a.rms_norm")], cost=cost)
    cost.watch(own, RMS)
    selections = asked_by_100(own)
    assert (own.table(RMS).computed, cost.decisions) == (1, 1)
    assert [type(s) for s in selections] == [Selection] * 100
    assert len({id(s) for s in selections}) == 1


def asked_by_100(own: LocalDevice) -> list[Any]:
    """What 100 threads got that ask for one new key at once: a selection, or the error they met."""
    full = args()
    signature, bits = signature_of(RMS, full), mode_bits()
    barrier = threading.Barrier(100)
    got: list[Any] = []

    def ask() -> None:
        barrier.wait()
        try:
            got.append(own.plan(RMS, signature, full, bits).selection)
        except Exception as error:
            got.append(error)

    threads = [threading.Thread(target=ask) for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got


def test_a_failed_decision_is_shared_and_not_remembered() -> None:
    """Every waiter gets the refusal; the next call asks again."""
    own = device([kernel("a.rms_norm", dtypes=frozenset({"float64"}))], Settings(strict=True))
    for _ in range(2):
        with pytest.raises(NoKernelFoundError, match="DTYPE_UNSUPPORTED"):
            selection(own, args())
    assert own.table(RMS).computed == 2
    planted = RuntimeError("planted")
    cost = Crowd(100, planted)
    own = device([kernel("a.rms_norm")], cost=cost)
    cost.watch(own, RMS)
    assert {id(error) for error in asked_by_100(own)} == {id(planted)}
    assert (own.table(RMS).computed, cost.decisions) == (1, 1)
    cost.count, cost.error = 1, None
    assert selection(own, args()).kernel == "a.rms_norm"


def test_tables_are_bounded() -> None:
    """More signatures than `max_keys` never make a table larger than that."""
    own = device([kernel("a.rms_norm")], Settings(max_keys=16))
    for rows in range(1, 200):
        own.launch(RMS, args(rows))
        own.launch(RMS, RMS.build(torch.ones(2, rows))[1])  # each width has a key of its own
    table = own.table(RMS)
    assert max(len(hot) for hot in table.by_signature) <= 16
    assert len(table.by_key) <= 16


@pytest.mark.parametrize("batches", [1, 2])
def test_a_call_that_comes_again_and_again_is_decided_once(batches: int) -> None:
    """200 other calls in a table of 16 push each other out, and never the one that is used between them."""
    own = device([kernel("a.rms_norm")], Settings(max_keys=16))
    hot, others = RMS.build(torch.ones(3, 64))[1], range(1, 200)
    own.launch(RMS, hot)
    for number in others:
        for step in range(batches):
            own.launch(RMS, RMS.build(torch.ones(2, 1000 * step + number))[1])
        own.launch(RMS, hot)
    assert own.table(RMS).computed == 1 + len(others) * batches


def test_without_room_every_call_is_decided_anew() -> None:
    """max_keys=0 remembers nothing, and answers."""
    own = device([kernel("a.rms_norm")], Settings(max_keys=0))
    for _ in range(3):
        own.launch(RMS, args())
    assert own.table(RMS).computed == 3
    assert not any(own.table(RMS).by_signature) and len(own.table(RMS).by_key) == 0


def test_what_is_remembered_grows_as_old_as_the_settings_allow() -> None:
    """After `plan_ttl_s` a call is decided anew, each time; without it never; a change counts at once."""
    clock = FakeClock()
    own = device([kernel("a.rms_norm")], Settings(plan_ttl_s=10.0), clock=clock)
    held = own.plan(RMS, signature_of(RMS, args()), args(), own.mode())
    for passed, decided in ((9.0, False), (2.0, True), (8.0, False), (2.0, True)):
        before = own.table(RMS)
        clock.advance(passed)
        assert (own.table(RMS) is not before) == decided
        own.launch(RMS, args())
    assert held.call(*args()) is not None  # a call that began under an older plan ends under it
    own.set_settings(Settings())
    kept = own.table(RMS)
    clock.advance(1e6)
    assert own.table(RMS) is kept
    own.set_settings(Settings(plan_ttl_s=5.0))
    kept = own.table(RMS)
    clock.advance(6.0)
    assert own.table(RMS) is not kept
    own.close()
    clock.advance(100.0)


def test_a_forked_child_lets_plans_grow_as_old_as_its_parent() -> None:
    """The parent's timers do not exist there: the child has its own."""
    clock = FakeClock()
    own = device([kernel("a.rms_norm")], Settings(plan_ttl_s=10.0), clock=clock)
    clock._due.clear()
    own.reset_after_fork()
    own.launch(RMS, args())
    kept = own.table(RMS)
    clock.advance(11.0)
    assert own.table(RMS) is not kept
    own.close()


def test_a_forked_child_tries_a_kernel_that_rests_when_its_time_has_come() -> None:
    """A circuit that was open at the fork ends in the child, too."""
    flaky, clock = Flaky(), FakeClock()
    own = flaky_device(flaky, clock, failures_to_open=1, cooldown_s=30.0)
    own.launch(RMS, args())
    flaky.broken = False
    clock._due.clear()
    own.reset_after_fork()
    assert selection(own, args()).kernel == "steady.rms_norm"
    clock.advance(31.0)
    assert selection(own, args()).kernel == "flaky.rms_norm"
    own.close()


def test_a_forked_child_reads_the_measurements_that_its_parent_was_reading() -> None:
    """The thread that read them is not there: the child reads them itself."""
    own = device([kernel("a.rms_norm", launch_us=0.1), kernel("b.rms_norm", launch_us=9.0)])
    build = lambda: lambda kernel, *_: (1.0 if kernel.backend == "b" else 5.0, "measured")  # noqa: E731
    never = threading.Event()
    own.loader.run_later = lambda job: never  # type: ignore[method-assign]  # a thread that is gone
    own.load_costs(build, at_once=False)
    del own.loader.run_later
    own.reset_after_fork()
    own.wait_for_costs(LIMIT_S)
    assert selection(own, args()).kernel == "b.rms_norm"
    own.reset_after_fork()
    assert own._costs_loading is None
    own.close()


def test_a_closed_device_refuses_and_leaves_no_thread() -> None:
    """After close every call raises, and the device's threads are gone."""
    own = flaky_device(Flaky())
    own.worker.submit(lambda: None)
    own.close()
    assert not own.worker.running
    with pytest.raises(RuntimeClosedError, match="closed"):
        own.launch(RMS, args())


def test_kernels_can_be_replaced_while_they_run() -> None:
    """FS-014: a call in flight finishes with the implementation it began with."""
    began, go = threading.Event(), threading.Event()

    def slow(*full: Any) -> Any:
        began.set()
        go.wait(10)
        return RMS.reference(*full) * 0 + 1

    own = device([kernel("a.rms_norm", slow)])
    out: list[Any] = []
    thread = threading.Thread(target=lambda: out.append(own.launch(RMS, args())))
    thread.start()
    assert began.wait(10)
    own.registry.replace(kernel("a.rms_norm", lambda *full: RMS.reference(*full) * 0 + 2))
    own.refresh()
    assert float(own.launch(RMS, args())[0, 0]) == 2.0
    go.set()
    thread.join(10)
    assert float(out[0][0, 0]) == 1.0


def test_duplicate_ids_are_refused() -> None:
    """EC-027: a second kernel of one id is a ValueError that names it."""
    own = device([kernel("a.rms_norm")])
    with pytest.raises(ValueError, match=r"a\.rms_norm"):
        own.registry.add(kernel("a.rms_norm"))
