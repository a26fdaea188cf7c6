"""How workers end, and what is not their fault: closing, faults here, what a library leaves behind."""

from __future__ import annotations

import dataclasses
import errno
import importlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import layerzero as lz
from layerzero.actors.isolation.descriptions import describe
from layerzero.actors.isolation.isolated_worker import IsolatedWorker
from layerzero.actors.isolation.worker_errors import WorkerError
from layerzero.actors.isolation.worker_process import WorkerProcess, pause_s
from layerzero.health import BreakerState
from layerzero.health.device_faults import lost_device
from tests.actors.isolation import plugged
from tests.actors.isolation.test_isolation import X, asking, chosen, opened, right, until, worker_of


@pytest.fixture(scope="module")
def steady() -> Iterator[lz.Runtime]:
    """One whose worker stays alive."""
    with opened() as runtime:
        yield runtime


class TestOneWorker:
    """What leaves the worker alive."""

    def test_outputs_are_on_the_cpu_whatever_the_callers_default_device_is(self, steady: lz.Runtime) -> None:
        """Under `torch.device("meta")`, where new tensors have no memory to be written."""
        call = steady.device().registry.callable_of("wild.rms_norm")
        with torch.device("meta"):
            result = call(X, None, 1e-6)
        torch.testing.assert_close(result, right(X))

    def test_what_this_process_lacks_is_not_the_workers_fault(
        self, steady: lz.Runtime, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No descriptor left, a call of more words than a message holds: an error, and the process lives."""
        pid = worker_of(steady).pid
        call = steady.device().registry.callable_of("wild.rms_norm")
        wide = torch.ones(2, 1 << 22)

        def none_left(*_: object) -> int:
            raise OSError(errno.EMFILE, "too many open files")

        with monkeypatch.context() as patch, pytest.raises(MemoryError, match="too many open files"):
            patch.setattr(os, "memfd_create", none_left)
            call(wide, None, 1e-6)
        with pytest.raises(ValueError, match="a call needs a message of at most"):
            call(X, "word" * 100_000, 1e-6)
        torch.testing.assert_close(call(wide, None, 1e-6), right(wide))
        assert worker_of(steady).pid == pid

    @pytest.mark.parametrize("seconds", [1e-9, 1e300])
    def test_a_time_limit_that_the_system_cannot_hold_is_one_all_the_same(
        self, steady: lz.Runtime, seconds: float
    ) -> None:
        """Its least and its greatest: 0 would be none."""
        life = worker_of(steady)._life
        assert life is not None
        kept = life.limit_s
        life.limit(seconds)
        limit = life.socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)
        life.limit(kept)
        assert any(limit)


def test_closing_does_not_wait_for_a_call_that_hangs(tmp_path: Path) -> None:
    """The call ends with an error, nothing is held against its kernel, and later requests do not wait."""
    settings = lz.Settings(
        plugins=("wild",), isolate={"wild": "process"}, warm="off", state_dir=str(tmp_path)
    )
    runtime = lz.Runtime(settings)
    runtime.device().warm(["wild.rms_norm"])
    call = runtime.device().registry.callable_of("wild.rms_norm")
    worker, raised = worker_of(runtime), []

    def hang() -> None:
        try:
            call(asking(plugged.HANG), None, 1e-6)
        except WorkerError as error:
            raised.append(error)

    thread = threading.Thread(target=hang)
    thread.start()
    until(worker._lock.locked)
    pid = worker.pid
    began = time.monotonic()
    runtime.close()
    thread.join()
    assert time.monotonic() - began < settings.isolate_timeout_s - 10
    assert len(raised) == 1 and not worker.running and not Path(f"/proc/{pid}").exists()
    assert [s.name for s in runtime.counters.snapshot() if s.name == "isolated_deaths"] == []
    with pytest.raises(lz.BackendNotAvailableError, match="closed"):
        worker.start()


def test_a_process_that_a_library_left_behind_does_not_hide_the_workers_end(tmp_path: Path) -> None:
    """It has what the worker printed to, in a session of its own."""
    module = f"""
import sys; sys.path.insert(0, {str(plugged.installed(1))!r})
import dataclasses, subprocess, wild_kernels
kernel = wild_kernels.kernels()[0]
def load():
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    open({str(tmp_path / "left")!r}, "a").write(f"{{left.pid}} ")
    return kernel.load()
made = lambda: dataclasses.replace(
    kernel, id="made.rms_norm", backend="made", load=load, origin="leaves:made"
)
"""
    (tmp_path / "leaves.py").write_text(module)
    settings = lz.Settings(isolate={"made": "process"}, warm="off", cooldown_s=0.05)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        try:
            with lz.start(settings, scoped=True) as runtime:
                runtime.add_kernel(importlib.import_module("leaves").made())
                runtime.device().warm(["made.rms_norm"])
                worker = worker_of(runtime, "made")
                assert worker.pid is not None
                os.kill(worker.pid, signal.SIGKILL)
                until(lambda: worker.starts == 2 and worker.running)
            until(lambda: not [t for t in threading.enumerate() if t.name == "layerzero-said-made"])
        finally:
            for left in (tmp_path / "left").read_text().split():
                os.kill(int(left), signal.SIGKILL)


def test_a_kernel_that_loses_its_card_ends_its_process_and_not_its_callers(tmp_path: Path) -> None:
    """As a crash of the kernel: the text of the fault would say that the caller's own card is lost."""
    module = f"""
import sys; sys.path.insert(0, {str(plugged.installed(1))!r})
import dataclasses, wild_kernels
def run(*args):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
made = lambda: dataclasses.replace(
    wild_kernels.kernels()[0], id="made.rms_norm", backend="made", load=lambda: run, origin="loses:made"
)
"""
    (tmp_path / "loses.py").write_text(module)
    with (
        pytest.MonkeyPatch.context() as patch,
        lz.start(lz.Settings(isolate={"made": "process"}, warm="off"), scoped=True) as runtime,
    ):
        patch.syspath_prepend(tmp_path)
        runtime.add_kernel(importlib.import_module("loses").made())
        runtime.device().warm(["made.rms_norm"])
        with pytest.raises(WorkerError, match="WORKER_CRASHED") as raised:
            runtime.device().registry.callable_of("made.rms_norm")(X, None, 1e-6)
        assert lost_device(raised.value) is None
        assert "illegal memory access" in raised.value.said
        assert runtime.device().health.state("made.rms_norm") is BreakerState.OPEN


@pytest.mark.parametrize("thread", ["layerzero-said-bare", "layerzero-isolated-bare"])
def test_a_thread_that_cannot_be_started_leaves_no_process_and_may_be_tried_again(thread: str) -> None:
    """As where the system has no more of them for a while: an error at once, and then a worker as ever."""
    begun: list[WorkerProcess] = []
    worker = IsolatedWorker("bare", None, 5.0, lambda *what: None, lambda *what: None)
    start, make = threading.Thread.start, WorkerProcess.__init__

    def refuse(self: threading.Thread) -> None:
        if self.name == thread:
            raise RuntimeError("can't start new thread")
        start(self)

    def made(life: WorkerProcess, *args: Any) -> None:
        make(life, *args)
        begun.append(life)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            patch.setattr(WorkerProcess, "__init__", made)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                worker.start()
            assert all(life.process.returncode is not None for life in begun)
        worker.start()
        assert worker.running
    finally:
        worker.close()


def test_an_alias_that_takes_the_place_of_a_kernel_is_refused_and_leaves_no_process() -> None:
    """The runtime does not open; the process that described the plugin is gone."""
    started: list[IsolatedWorker] = []
    with pytest.MonkeyPatch.context() as patch:
        begin = IsolatedWorker.start

        def start(worker: IsolatedWorker) -> None:
            started.append(worker)
            begin(worker)

        patch.setattr(IsolatedWorker, "start", start)
        patch.setenv("PYTHONPATH", "")
        python = sys.executable
        for plugins in ((f"torch=mine@{python}",), ("wild", f"wild=wild@{python}")):
            described = dataclasses.replace(
                importlib.import_module("wild_kernels").kernels()[0],
                id="mine.rms_norm.native" if plugins[0].startswith("torch") else "wild.rms_norm",
                backend="mine" if plugins[0].startswith("torch") else "wild",
            )
            answer = msgspec.msgpack.encode(describe([described]))
            patch.setattr(
                IsolatedWorker, "describe", lambda worker, _, answer=answer: (worker.start(), answer)[1]
            )
            with pytest.raises(lz.ConfigurationError, match=r"two kernels are named"):
                lz.Runtime(lz.Settings(plugins=plugins, warm="off"))
    assert len(started) == 2 and not any(worker.running for worker in started)


def test_a_worker_that_failed_a_whole_night_still_begins_anew() -> None:
    """The pause doubles up to a minute, for any number of failures: an error there ends the supervision."""
    assert [pause_s(failures) for failures in (1, 2, 7, 8, 5000)] == [1.0, 2.0, 60.0, 60.0, 60.0]


LOADS = """
import dataclasses, os, wild_kernels
from pathlib import Path
folder = Path({folder!r})
def load():
    with open(folder / "tries", "a") as tries:
        tries.write("x")
    if (folder / "fails").exists():
        exec((folder / "fails").read_text())
    return wild_kernels.rms_norm
def made(name, **fields):
    return dataclasses.replace(wild_kernels.kernels()[0], id=name, backend="made", **fields)
sound = lambda: made("made.rms_norm", origin="{module}:sound")
frail = lambda: made("made.rms_norm.frail", load=load, origin="{module}:frail")
"""


@pytest.mark.parametrize("fault", ["raise ImportError('a library that is gone')", "os.abort()"])
def test_a_kernel_that_does_not_load_again_rests_alone(
    tmp_path: Path, fault: str, pauses: list[float]
) -> None:
    """Its backend's other kernel serves from the new process; it comes back itself once it loads.

    One under whose loading processes end is quarantined after two of them; each start waits longer.
    """
    module = f"loads_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(LOADS.format(folder=str(tmp_path), module=module))
    settings = lz.Settings(isolate={"made": "process"}, isolate_timeout_s=20.0, warm="off", cooldown_s=0.05)
    with pytest.MonkeyPatch.context() as patch, lz.start(settings, scoped=True) as runtime:
        patch.syspath_prepend(tmp_path)
        loads = importlib.import_module(module)
        runtime.add_kernel(loads.sound())
        runtime.add_kernel(loads.frail())
        device = runtime.device()
        device.warm(["made.rms_norm", "made.rms_norm.frail"])

        def serves(kernel: str) -> bool:
            with lz.prefer(kernel):
                torch.testing.assert_close(lz.sync.rms_norm(X), right(X))
            return chosen().kernel == kernel

        def state(kernel: str) -> BreakerState:
            device.health.tick()
            return device.health.state(kernel)

        assert serves("made.rms_norm") and serves("made.rms_norm.frail")
        worker = worker_of(runtime, "made")
        assert worker.pid is not None
        (tmp_path / "fails").write_text(fault)
        os.kill(worker.pid, signal.SIGKILL)
        until(lambda: serves("made.rms_norm"))
        assert worker.starts == 2 and worker.loaded == ("made.rms_norm",)
        assert not serves("made.rms_norm.frail") and state("made.rms_norm.frail") is not BreakerState.CLOSED
        until(lambda: not serves("made.rms_norm.frail") and len((tmp_path / "tries").read_text()) >= 3)
        until(lambda: serves("made.rms_norm"))
        if "abort" in fault:
            until(lambda: state("made.rms_norm.frail") is BreakerState.QUARANTINED)
            assert pauses[:2] == [1.0, 2.0] and pauses == sorted(set(pauses))
        else:
            assert worker.starts == 2
            (tmp_path / "fails").unlink()
            until(lambda: serves("made.rms_norm.frail"))
            until(lambda: serves("made.rms_norm"))
