"""The device's thread: order, first use, close, collection, errors, fork."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import weakref

import pytest
import torch

from layerzero._util.fork_safety import renew_after_fork
from layerzero.actors.device.worker import Worker
from layerzero.spec.errors import RuntimeClosedError


def named(name: str) -> list[threading.Thread]:
    """Live threads of that name."""
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_jobs_run_in_order_on_one_named_daemon_thread() -> None:
    """The thread starts with the first job, and closing runs what is queued and ends it."""
    worker = Worker("worker-order")
    assert named("worker-order") == [] and not worker.running
    seen: list[tuple[int, str, bool]] = []

    def job(index: int) -> None:
        seen.append((index, threading.current_thread().name, worker.inside))

    for index in range(100):
        worker.submit(lambda index=index: job(index))  # type: ignore[misc]
    assert worker.running and not worker.inside
    (thread,) = named("worker-order")
    assert thread.daemon
    assert worker.close(10)
    assert seen == [(index, "worker-order", True) for index in range(100)]
    assert named("worker-order") == [] and not worker.running


def test_jobs_have_the_callers_number_of_threads() -> None:
    """`torch.set_num_threads` reaches a thread that began before it; each job has its own caller's."""
    worker, seen = Worker("worker-threads"), []
    before = torch.get_num_threads()
    try:
        for number in (2, 1, 3, 1):
            torch.set_num_threads(number)
            worker.submit(lambda: seen.append(torch.get_num_threads()))
    finally:
        torch.set_num_threads(before)
    assert worker.close(10)
    assert seen == [2, 1, 3, 1] and torch.get_num_threads() == before


def test_a_closed_worker_takes_nothing() -> None:
    """Submitting after close is an error; closing twice, or before the first job, is none."""
    worker = Worker("worker-closed")
    assert worker.close() and worker.close()
    with pytest.raises(RuntimeClosedError, match="worker-closed"):
        worker.submit(lambda: None)


def test_closing_from_many_threads_loses_no_job() -> None:
    """Whatever `submit` accepted runs, however submits and closes interleave."""
    for _ in range(20):
        worker = Worker("worker-race")
        accepted: list[int] = []
        ran: list[int] = []

        def feed(worker: Worker = worker, accepted: list[int] = accepted, ran: list[int] = ran) -> None:
            for index in range(50):
                try:
                    worker.submit(lambda index=index: ran.append(index))  # type: ignore[misc]
                except RuntimeClosedError:
                    return
                accepted.append(index)

        threads = [threading.Thread(target=feed) for _ in range(4)]
        threads += [threading.Thread(target=worker.close) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert worker.close(10)
        assert sorted(ran) == sorted(accepted)


def test_a_job_that_raises_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    """The error is logged and the next job runs."""
    worker = Worker("worker-error")
    done = threading.Event()

    def fail() -> None:
        raise ValueError("a job of ours")

    with caplog.at_level(logging.ERROR, logger="layerzero"):
        worker.submit(fail)
        worker.submit(done.set)
        assert done.wait(10)
    assert worker.close(10)
    assert "a job of ours" in caplog.text


def test_close_says_when_it_could_not_wait() -> None:
    """A job longer than the timeout gives False, and a later close waits for it."""
    worker = Worker("worker-slow")
    release = threading.Event()
    worker.submit(release.wait)
    assert not worker.close(0.01)
    release.set()
    assert worker.close(10)


def test_a_job_may_close_its_own_worker() -> None:
    """Closing from inside does not wait for itself."""
    worker = Worker("worker-inside")
    closed: list[bool] = []
    worker.submit(lambda: closed.append(worker.close()))
    assert worker.close(10)
    assert closed == [True]


def test_jobs_and_workers_are_not_kept() -> None:
    """A finished job's objects go at once, and the thread of a dropped worker ends."""

    class Thing:
        """Something that can be watched."""

    worker = Worker("worker-dropped")
    thing = Thing()
    gone = weakref.ref(thing)
    ran = threading.Event()

    def job(thing: Thing = thing) -> None:
        ran.set()

    worker.submit(job)
    del thing, job
    assert ran.wait(10)
    waited = time.monotonic() + 10
    while gone() is not None and time.monotonic() < waited:
        time.sleep(0.001)
    assert gone() is None
    (thread,) = named("worker-dropped")
    del worker
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_begins_with_no_thread_and_an_empty_queue() -> None:
    """The child, forked while a job runs and another waits, runs only its own job on its own thread."""
    worker = Worker("worker-fork")
    running, release = threading.Event(), threading.Event()

    def first() -> None:
        running.set()
        release.wait()

    worker.submit(first)
    ran: list[str] = []
    worker.submit(lambda: ran.append("parent's"))
    assert running.wait(10)
    assert worker._lock.acquire()  # as another thread may hold it at the moment of the fork
    child = os.fork()
    if child == 0:
        code = 1
        try:
            fresh = not worker.running
            worker.submit(lambda: ran.append("child's"))
            code = 0 if fresh and worker.close(10) and ran == ["child's"] else 2
        finally:
            os._exit(code)
    worker._lock.release()
    release.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert worker.close(10)
    assert ran == ["parent's"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_only_children_are_renewed() -> None:
    """`after_fork` runs in the child and not in the parent."""

    class Thing:
        """Counts renewals."""

        renewed = 0

        def after_fork(self) -> None:
            self.renewed += 1

    thing = Thing()
    renew_after_fork(thing)
    child = os.fork()
    if child == 0:
        os._exit(thing.renewed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert thing.renewed == 0
