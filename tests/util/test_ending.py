"""The end of a process while threads of ours run: what runs is waited for, within a bound."""

from __future__ import annotations

from pathlib import Path

from tests.children import Child

PROGRAM = """
import threading
from layerzero._util import ending
from layerzero.actors.device.worker import Worker

worker, ran = Worker("worker-ending"), []
running, release = threading.Event(), threading.Event()

def first():
    running.set()
    release.wait()
    ran.append("first")

worker.submit(first)
worker.submit(lambda: ran.append("second"))
assert running.wait(60)
assert not ending.end(0.01), "it waited for a job that does not end"
release.set()
assert ending.end(60) and not worker.running
print(ran, ending.ENDING.is_set())
"""


def test_the_job_that_runs_is_waited_for_and_those_behind_it_are_dropped(tmp_path: Path) -> None:
    """The bound holds where the job goes on; the next wait finds it done, and the queue never ran."""
    done = Child(PROGRAM, folder=tmp_path).ended()
    assert (done.returncode, done.stdout) == (0, "['first'] True\n"), done.stderr
    assert "exit.thread_still_running" in done.stderr and "worker-ending" in done.stderr
