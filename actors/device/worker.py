"""The thread of a device: it runs what is too slow for the caller's thread, one thing after another."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

import torch

from layerzero._util import log
from layerzero._util.ending import join_at_exit
from layerzero._util.fork_safety import renew_after_fork
from layerzero.spec.errors import RuntimeClosedError

Job = Callable[[], object]

JOB_FAILED = "worker.job_failed"


class Worker:
    """One daemon thread, started by the first job; jobs run in the order of `submit`.

    A forked child has no such thread: there the worker begins anew, with an empty queue. A job reports its
    own result; what it raises is logged and the thread continues. When the process ends, the job that runs is
    waited for and those behind it are dropped.
    """

    __slots__ = ("__weakref__", "_closed", "_lock", "_queue", "_thread", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._begin()
        self._closed = False
        renew_after_fork(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._queue: SimpleQueue[tuple[Job, int] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> None:
        """Run `job()` on the worker's thread, with as many threads for torch's loops as the calling one has.

        Raises: RuntimeClosedError: the worker is closed.
        """
        threads = torch.get_num_threads()  # `set_num_threads` reaches one thread
        # Under the lock, so that no job lands behind the end mark of a concurrent close.
        with self._lock:
            if self._closed:
                raise RuntimeClosedError(f"worker {self.name!r} is closed")
            if self._thread is None:
                self._start()
            self._queue.put((job, threads))

    def _start(self) -> None:
        self._thread = threading.Thread(target=_work, args=(self._queue,), name=self.name, daemon=True)
        # A worker without a reference ends its thread; at exit `join_at_exit` does, in order.
        weakref.finalize(self, self._queue.put, None).atexit = False
        self._thread.start()
        join_at_exit(self._thread, partial(_drop, self._queue))

    @property
    def running(self) -> bool:
        """Whether its thread has been started and lives."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def inside(self) -> bool:
        """Whether the calling thread is the worker's."""
        return self._thread is threading.current_thread()

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish the queued jobs, end the thread and wait for it; False if `timeout_s` was not enough.

        A second close only waits. Called by one of its own jobs it does not wait.
        """
        with self._lock:
            thread = self._thread
            if not self._closed:
                self._closed = True
                if thread is not None:
                    self._queue.put(None)
        # A job that closes its own worker would wait for itself.
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def give_up(self) -> None:
        """Leave the job that runs, which hangs, to its thread; later ones have another."""
        with self._lock:
            queue, self._queue = self._queue, SimpleQueue()
            with suppress(Empty):
                while True:
                    self._queue.put(queue.get_nowait())
            queue.put(None)
            self._start()

    def after_fork(self) -> None:
        """In a forked child: no thread yet, an empty queue."""
        self._begin()


def _drop(queue: SimpleQueue[tuple[Job, int] | None]) -> None:
    """Let the thread end behind the job that it runs."""
    try:
        while True:
            queue.get_nowait()
    except Empty:
        queue.put(None)


def _work(queue: SimpleQueue[tuple[Job, int] | None]) -> None:
    # Holds the queue, not the worker: a worker without a reference can be collected.
    while (queued := queue.get()) is not None:
        job, threads = queued
        del queued
        try:
            # Asked first: nearly every job wants the number of the one before it.
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            job()
        except Exception as error:
            log.error(JOB_FAILED, thread=threading.current_thread().name, error=repr(error))
        del job  # its tensors would live until the next job
