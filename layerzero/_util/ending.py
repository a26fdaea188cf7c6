"""The end of the process: threads that run native code are joined first.

A daemon thread that comes back from native code while the interpreter is taken down is ended by force, and
C++ on its stack answers that with `terminate`: the process aborts instead of returning its status.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable

from layerzero._util import log

EXIT_S = 20.0
# Long work looks at it between its steps.
ENDING = threading.Event()
STILL_RUNNING = "exit.thread_still_running"

_threads: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]] = weakref.WeakKeyDictionary()


def join_at_exit(thread: threading.Thread, stop: Callable[[], object] = lambda: None) -> None:
    """Wait for `thread` when the process ends, at most `EXIT_S` seconds for all of them together.

    `stop()` is called before: let it drop what has not begun.
    """
    _threads[thread] = stop


def end(timeout_s: float = EXIT_S) -> bool:
    """Stop every such thread and wait for them; False where the time was not enough."""
    ENDING.set()
    deadline = time.monotonic() + timeout_s
    alive = [(thread, stop) for thread, stop in list(_threads.items()) if thread.is_alive()]
    for _, stop in alive:
        stop()
    for thread, _ in alive:
        thread.join(max(0.0, deadline - time.monotonic()))
    running = [thread.name for thread, _ in alive if thread.is_alive()]
    for name in running:
        log.warning(STILL_RUNNING, thread=name, seconds=timeout_s)
    return not running


atexit.register(end)
