"""The detector of circles itself, and that the suite's own locks are under it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from layerzero.observe.counters import Counters
from tests.kernels import device, kernel
from tests.lock_order import _LOCK, _RLOCK, LockOrder, Watched


@pytest.fixture
def order() -> LockOrder:
    return LockOrder()


def locks(order: LockOrder, *names: str, make: Any = _LOCK) -> list[Watched]:
    return [Watched(make(), name, order) for name in names]


def test_two_locks_in_both_orders_are_a_circle_though_nobody_waited(order: LockOrder) -> None:
    """One thread alone shows it."""
    one, other = locks(order, "one", "other")
    with one, other:
        pass
    assert order.circle() == []
    with other, one:
        pass
    assert order.circle() in (["one", "other", "one"], ["other", "one", "other"])
    assert "is waited for while" in order.told(order.circle()) and __file__ in order.told(order.circle())


def test_a_circle_of_three_is_found_over_threads(order: LockOrder) -> None:
    """Each thread takes two; no two threads disagree about a pair."""
    sites = locks(order, "a", "b", "c")

    def pair(first: Watched, second: Watched) -> None:
        with first, second:
            pass

    for at in range(3):
        thread = threading.Thread(target=pair, args=(sites[at], sites[(at + 1) % 3]))
        thread.start()
        thread.join()
    assert len(order.circle()) == 4 and set(order.circle()) == {"a", "b", "c"}


def test_two_instances_made_at_one_line_have_no_order(order: LockOrder) -> None:
    """A site that waits for itself is a circle of one."""
    one, twin = locks(order, "same", "same")
    with one, twin:
        pass
    assert order.circle() == ["same", "same"]


def test_taking_the_same_lock_again_and_trying_without_waiting_are_no_edges(order: LockOrder) -> None:
    """A re-entrant lock, and an attempt that returns at once, can make nobody wait."""
    (again,) = locks(order, "again", make=_RLOCK)
    one, other = locks(order, "one", "other")
    with again, again, one:
        assert other.acquire(blocking=False)
        other.release()
    with other, one:
        pass
    assert set(order.edges) == {("again", "one"), ("other", "one")} and order.circle() == []


@pytest.mark.parametrize("make", [_LOCK, _RLOCK])
def test_a_condition_lets_go_while_it_waits(order: LockOrder, make: Any) -> None:
    """What is taken during the wait is not taken under the condition's lock."""
    held, other = locks(order, "held", "other", make=make)
    condition = threading.Condition(held)  # type: ignore[arg-type]
    ready = threading.Event()

    def wake() -> None:
        ready.wait(10)
        with condition:
            condition.notify()

    thread = threading.Thread(target=wake)
    thread.start()
    with condition:
        ready.set()
        assert condition.wait(10)
        with other:
            pass
    thread.join()
    assert set(order.edges) == {("held", "other")}


def test_the_librarys_own_locks_are_watched() -> None:
    """Locks of a device and of its counters tell the suite's order; those of others are plain."""
    own = device([kernel("some.rms_norm")])
    assert isinstance(own._lock, Watched) and "actors/device/local_device.py:" in own._lock.site
    assert isinstance(Counters()._lock, Watched)
    assert not isinstance(threading.Lock(), Watched)
    own.close()
