"""Threads and tasks on one device, one test for each scenario of the ledger. No test measures time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

import layerzero as lz
import layerzero.sync
from layerzero.actors.device.local_device import LocalDevice
from layerzero.actors.device.registry import Registry
from layerzero.ops import table as ops_table
from layerzero.selection.decide import roofline_cost
from layerzero.selection.dispatch import DispatchState
from layerzero.selection.key import KeyBuilder
from layerzero.selection.modes import mode_bits
from layerzero.selection.plan import Plan, signature_of
from layerzero.selection.policy import Policy, make_rule
from layerzero.spec.call_spec import CallSpec, WorkEstimate
from layerzero.spec.errors import SelectionTimeoutError
from layerzero.spec.hardware import Hardware
from layerzero.spec.kernel import Kernel
from layerzero.spec.settings import Settings
from tests.crowds import Crowd
from tests.kernels import device, kernel

RMS = ops_table.get("rms_norm")


@pytest.fixture(autouse=True)
def switching_often() -> Iterator[None]:
    """Let threads take turns fifty times as often as usual, so that what can interleave does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def full(rows: int = 3, width: int = 8) -> Any:
    return RMS.build(torch.ones(rows, width))[1]


def plan(own: LocalDevice, args: Any, snapshot: DispatchState | None = None) -> Plan:
    return own.plan(RMS, signature_of(RMS, args), args, mode_bits(), snapshot)


def together(
    count: int, act: Callable[[int], object], meanwhile: Callable[[], object] | None = None
) -> list[Any]:
    """What `count` threads got from `act(number)`, all started at once, or the errors they raised."""
    gate = threading.Barrier(count + 1)
    results: list[Any] = [None] * count

    def run(number: int) -> None:
        gate.wait()
        try:
            results[number] = act(number)
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    gate.wait()
    if meanwhile is not None:
        meanwhile()
    for thread in threads:
        thread.join()
    return results


class Counting:
    """A cost model that counts what it was asked, and may do something first."""

    def __init__(self, before: Callable[[], object] | None = None) -> None:
        self.calls = 0
        self.before = before

    def __call__(
        self, one: Kernel, work: WorkEstimate, request: CallSpec, hardware: Hardware
    ) -> tuple[float, str]:
        self.calls += 1
        if self.before is not None:
            self.before()
        return roofline_cost(one, work, request, hardware)


def test_different_batches_are_decided_once_each() -> None:
    """CS-002: 100 threads over 20 batch sizes cause as many decisions as there are keys among them."""
    cost = Crowd(100)
    own = device([kernel("a.rms_norm")], cost=cost)
    cost.watch(own, RMS)
    calls = [full(rows) for rows in range(1, 21)]
    plans = together(100, lambda number: plan(own, calls[number % 20]))
    assert all(isinstance(p, Plan) for p in plans)
    assert cost.decisions == len(own.table(RMS).by_key)
    assert 4 < cost.decisions <= 20


def test_ten_thousand_selections_are_few_decisions() -> None:
    """CS-004: 10,000 lookups of 1,000 shapes from 8 threads cause fewer than 100 decisions."""
    own = device([kernel("a.rms_norm")])
    calls = [full(rows) for rows in range(1, 1001)]
    found = together(8, lambda _: [plan(own, calls[i % 1000]).kernel for i in range(1250)])
    assert sum(len(f) for f in found) == 10_000
    assert own.counters.total("selections") < 100


def test_threads_of_different_ops_do_not_mix() -> None:
    """CS-005: attention, norm and MLP from 12 threads at once each give their own op's result."""
    q, x = torch.randn(1, 2, 6, 8), torch.randn(5, 8)
    up, down = torch.randn(6, 8), torch.randn(8, 3)
    jobs: list[Callable[[], Any]] = [
        lambda: layerzero.sync.attention(q, q, q, is_causal=True),
        lambda: layerzero.sync.rms_norm(x),
        lambda: layerzero.sync.mlp(x, up, down),
    ]
    with lz.start(lz.Settings(warm="off")):
        alone = [job() for job in jobs]
        results = together(12, lambda number: [jobs[number % 3]() for _ in range(20)])
    for number, got in enumerate(results):
        assert all(torch.equal(one, alone[number % 3]) for one in got)


def names_are_whole(registry: Registry) -> bool:
    """Whether both indices of a registry tell one story; read in the order in which writers write."""
    listed = registry.for_op("rms_norm")
    return len({k.id for k in listed}) == len(listed) and all(k.op == "rms_norm" for k in listed)


def test_a_hundred_threads_read_the_registry_while_it_changes() -> None:
    """CS-006: readers see whole lists of kernels, never a kernel twice, while kernels come and go."""
    own = device([kernel("a.rms_norm")])
    extra = kernel("b.rms_norm")

    def write() -> None:
        for _ in range(200):
            own.registry.add(extra)
            own.registry.remove("b.rms_norm")

    seen = together(100, lambda _: all(names_are_whole(own.registry) for _ in range(50)), write)
    assert seen == [True] * 100
    assert [k.id for k in own.registry.for_op("rms_norm")] == ["a.rms_norm"]


def test_the_device_is_in_the_key() -> None:
    """CS-007 and CS-019: two devices never share a remembered choice."""
    maker = KeyBuilder(RMS, [kernel("a.rms_norm")], ())
    request = CallSpec(op="rms_norm", platform="cuda", device="cuda:0", dims={"N": 4, "C": 8})
    assert maker.key(request) != maker.key(request.replace(device="cuda:1"))


def test_99_readers_and_a_writer() -> None:
    """CS-008: every reader runs some implementation that the writer had put there, whole."""
    own = device([kernel("a.rms_norm", lambda x, *_: torch.full_like(x, 0.0))])
    written: list[int] = []

    def write() -> None:
        for version in range(50):
            own.registry.replace(kernel("a.rms_norm", lambda x, *_, v=version: torch.full_like(x, float(v))))
            own.refresh()
            written.append(int(own.launch(RMS, full())[0, 0]))

    def read(_: int) -> list[int]:
        args = full()
        return [int(own.launch(RMS, args).unique().item()) for _ in range(20)]

    seen = together(99, read, write)
    assert [s for s in seen if not isinstance(s, list)] == []
    assert all(0 <= value < 50 for values in seen for value in values)
    assert written == list(range(50)), "who has replaced a kernel runs the new one"


def test_a_kernel_that_comes_during_a_decision_waits_for_the_next() -> None:
    """CS-010: a decision goes over the kernels it began with; the next generation knows the new one."""
    added: list[str] = []

    def add() -> None:
        if not added:
            added.append("b.rms_norm")
            own.registry.add(kernel("b.rms_norm", launch_us=0.1))
            own.refresh()

    own = device([kernel("a.rms_norm", launch_us=9.0)], cost=Counting(add))
    first = plan(own, full()).selection_for_request()
    assert [c.kernel for c in first.trace] == ["a.rms_norm"]
    assert plan(own, full()).kernel == "b.rms_norm"


def test_a_slow_decision_never_reaches_a_newer_generation() -> None:
    """CS-011 and CS-030: what was decided before an invalidation is not found after it."""
    denied: list[int] = []

    def deny() -> None:
        if not denied:
            denied.append(1)
            own.set_policy(Policy((make_rule("deny", "a.rms_norm"),)))

    own = device(
        [kernel("a.rms_norm", launch_us=1.0), kernel("b.rms_norm", launch_us=9.0)], cost=Counting(deny)
    )
    old = plan(own, full())
    assert old.kernel == "a.rms_norm"
    assert plan(own, full()).kernel == "b.rms_norm"


def test_health_is_asked_again_before_a_bound_kernel_runs() -> None:
    """CS-012: a kernel that is quarantined after it was bound does not run once more."""
    runs: list[int] = []

    def watched(*args: Any) -> Any:
        runs.append(1)
        return RMS.reference(*args)

    x = torch.randn(3, 8)
    with lz.start(lz.Settings(warm="off")) as runtime:
        runtime.add_kernel(kernel("watched.rms_norm", watched))
        with lz.prefer("watched.rms_norm"):
            bound = lz.bind("rms_norm", x)
            bound(x)
            assert len(runs) == 1
            runtime.device("cpu").health.quarantine("watched.rms_norm", "wrong by one percent")
            torch.testing.assert_close(bound(x), RMS.reference(x, None, 1e-6))
    assert len(runs) == 1


def test_settings_do_not_change_under_a_call() -> None:
    """CS-015: a Settings is immutable; configuring puts another one in force."""
    settings = Settings()
    with pytest.raises(AttributeError):
        settings.max_keys = 8  # type: ignore[misc]
    with lz.start(settings):
        assert lz.configure(max_keys=8) is not settings
        assert (settings.max_keys, lz.get_config().max_keys) == (4096, 8)


def test_a_tensor_that_moved_is_not_run_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """CS-017 and CS-020: operands of two devices are refused by name, bound or not, and so are those of
    another device than the one that a callable was bound for."""
    weight = torch.ones(8)
    with lz.start(lz.Settings(warm="off")):
        bound: Any = lz.bind("rms_norm", torch.randn(3, 8), weight)
        for call in (bound, layerzero.sync.rms_norm):
            with pytest.raises(ValueError, match="weight needs to be on meta like x, got cpu"):
                call(torch.randn(3, 8, device="meta"), weight)
            assert call(torch.randn(3, 8, device="meta"), weight.to("meta")).is_meta, "only shapes"
        monkeypatch.setattr(bound.binding._device, "device", torch.device("cuda", 0))
        with pytest.raises(ValueError, match="needs tensors on cuda:0, got cpu"):
            bound(torch.randn(4, 8), weight)


def test_a_decision_may_ask_for_itself() -> None:
    """CS-023: a decision that asks again for its own key on its own thread is answered, not blocked."""
    inner: list[Plan] = []

    def again() -> None:
        if not inner:
            inner.append(None)  # type: ignore[arg-type]  # the place is taken before the second question
            inner[0] = plan(own, full())

    own = device([kernel("a.rms_norm")], cost=Counting(again))
    outer = plan(own, full())
    assert outer.kernel == inner[0].kernel == "a.rms_norm"


def test_waiting_for_a_decision_has_an_end() -> None:
    """CS-024: a thread that waits for another's decision longer than the limit gets SelectionTimeoutError."""
    entered, leave = threading.Event(), threading.Event()

    def stall() -> None:
        entered.set()
        leave.wait(30)

    own = device([kernel("a.rms_norm")], cost=Counting(stall))
    table = own.table(RMS)
    table._timeout_s = 0.01
    args = full()
    first = threading.Thread(target=lambda: plan(own, args))
    first.start()
    assert entered.wait(30)
    with pytest.raises(SelectionTimeoutError, match="rms_norm"):
        plan(own, args)
    leave.set()
    first.join()
    assert plan(own, args).kernel == "a.rms_norm"


def test_a_kernel_removed_between_choice_and_run_still_runs() -> None:
    """CS-025 and EC-028: a plan holds its implementation; the next call does not find the kernel."""
    own = device([kernel("a.rms_norm", launch_us=0.1), kernel("b.rms_norm", launch_us=9.0)])
    args = full()
    held = plan(own, args)
    own.registry.remove("a.rms_norm")
    own.refresh()
    torch.testing.assert_close(held.call(*args), RMS.reference(*args))
    assert (held.kernel, plan(own, args).kernel) == ("a.rms_norm", "b.rms_norm")


def test_dropping_from_many_threads_keeps_the_bound() -> None:
    """CS-026 and EC-030: 8 threads over 400 shapes leave no table above its limit and lose no answer."""
    own = device([kernel("a.rms_norm")], Settings(max_keys=16))
    calls = [full(rows, width) for rows in range(1, 41) for width in range(1, 11)]
    found = together(8, lambda number: {plan(own, calls[(i * 7 + number) % 400]).kernel for i in range(400)})
    assert found == [{"a.rms_norm"}] * 8
    table = own.table(RMS)
    # A thread that has looked at the size may still insert once: one entry a thread beyond the limit.
    assert max(len(table.by_key), *(len(hot) for hot in table.by_signature)) <= 16 + 8


def test_one_leader_however_often_the_race_is_run() -> None:
    """CS-028: 8 threads meet at a new key 300 times; each time one of them decides."""
    cost = Crowd(8)
    own = device([kernel("a.rms_norm")], cost=cost)
    cost.watch(own, RMS)
    calls = [full(3, width) for width in range(1, 301)]
    gate = threading.Barrier(8)

    def run(_: int) -> int:
        for args in calls:
            gate.wait()
            plan(own, args)
        return 1

    assert together(8, run) == [1] * 8
    assert cost.decisions == len(own.table(RMS).by_key)


def test_a_thousand_threads_select_at_once() -> None:
    """CS-029: 1,000 threads at one new key all get the plan of one decision."""
    cost = Crowd(1000)
    own = device([kernel("a.rms_norm")], cost=cost)
    cost.watch(own, RMS)
    args = full()
    plans = together(1000, lambda _: plan(own, args))
    assert {p.kernel for p in plans} == {"a.rms_norm"}
    assert cost.decisions == 1


def test_adding_and_removing_from_many_threads_keeps_the_indices() -> None:
    """CS-032: after 8 threads added and removed their own kernels, both indices agree and nothing is left."""
    own = device([kernel("a.rms_norm")])

    def churn(number: int) -> int:
        mine = kernel(f"k{number}.rms_norm")
        for _ in range(100):
            own.registry.add(mine)
            own.registry.remove(mine.id)
        return number

    assert together(8, churn) == list(range(8))
    assert [k.id for k in own.registry.all()] == ["a.rms_norm"]
    assert own.registry.for_op("rms_norm") == own.registry.all()


def test_each_device_judges_by_its_own_facts() -> None:
    """CS-018: two devices of one process with different hardware choose differently for one call."""
    here = device(
        [
            kernel("a.rms_norm", launch_us=0.1, isa=frozenset({"imagined"})),
            kernel("b.rms_norm", launch_us=9.0),
        ]
    )
    able = msgspec.structs.replace(here.hardware, isa=here.hardware.isa | {"imagined"})
    there = device(here.kernels(), hardware=able)
    assert (plan(here, full()).kernel, plan(there, full()).kernel) == ("b.rms_norm", "a.rms_norm")
