"""What a worker answers: to each request one answer, of its own, whatever its kernels fork and raise."""

from __future__ import annotations

import importlib
import mmap
import re
import signal
import subprocess
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import layerzero as lz
from layerzero.actors.isolation import frames, worker_process
from layerzero.actors.isolation.isolated_worker import IsolatedWorker
from layerzero.actors.isolation.worker_errors import WorkerError, fault_error
from layerzero.health.device_faults import lost_device
from layerzero.spec.reasons import Reason
from tests.actors.isolation import plugged
from tests.actors.isolation.test_isolation import X, asking, opened, right, until, worker_of


@contextmanager
def made(folder: Path, body: str) -> Iterator[tuple[IsolatedWorker, Callable[..., Any]]]:
    """The worker of a program's own kernel, and that kernel's callable; `body` defines `run`."""
    name = f"says_{folder.name.replace('-', '_')}"
    module = f"""
import sys; sys.path.insert(0, {str(plugged.installed(1))!r})
import dataclasses, os, socket, torch, wild_kernels
{textwrap.dedent(body)}
made = lambda: dataclasses.replace(
    wild_kernels.kernels()[0], id="made.rms_norm", backend="made", load=lambda: run, origin="{name}:made"
)
"""
    (folder / f"{name}.py").write_text(module)
    settings = lz.Settings(isolate={"made": "process"}, isolate_timeout_s=20.0, warm="off")
    with pytest.MonkeyPatch.context() as patch, lz.start(settings, scoped=True) as runtime:
        patch.syspath_prepend(folder)
        runtime.add_kernel(importlib.import_module(name).made())
        runtime.device().warm(["made.rms_norm"])
        yield worker_of(runtime, "made"), runtime.device().registry.callable_of("made.rms_norm")


def test_a_kernel_that_forks_and_returns_in_both_processes_answers_once() -> None:
    """The copy of the process says nothing and ends: no later call takes its answer for its own."""
    with opened() as runtime:
        call = runtime.device().registry.callable_of("wild.rms_norm")
        pid = worker_of(runtime).pid
        before = _children(pid)  # what ends with it what it starts
        torch.testing.assert_close(call(asking(plugged.FORK), None, 1e-6), right(asking(plugged.FORK)))
        for turn in range(200):
            rows = torch.randn(6, 32)
            torch.testing.assert_close(call(rows, None, 1e-6), right(rows))
            time.sleep(0.001 if turn < 100 else 0.0)
        assert worker_of(runtime).pid == pid
        status = call(asking(plugged.ENDED), None, 1e-6)[
            0, 0
        ]  # the copy ends by itself, when it has its turn
        assert status == 0 and _children(pid) == before


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="this system has no such memory")
def test_what_a_kernel_forks_has_no_hold_on_later_answers() -> None:
    """The pages that both sides share are not in the copy of a process, which may still write then."""
    with opened() as runtime:
        call = runtime.device().registry.callable_of("wild.rms_norm")
        call(torch.randn(6, 32), None, 1e-6)
        smaps = Path(f"/proc/{worker_of(runtime).pid}/smaps").read_text()
    areas = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.M)
    flags = [re.search(r"^VmFlags: (.*)$", area, re.M) for area in areas if "memfd:layerzero" in area]
    assert flags and all(each is not None and "dc" in each[1].split() for each in flags)


def _children(pid: int | None) -> list[int]:
    """The living processes that one has forked."""
    living = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return sorted(each for each in living if _parent(each) == pid)


def _parent(pid: int) -> int:
    """The process that a living process was forked from; 0 for one that has ended."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return 0
    return 0 if state == "Z" else int(parent)


def test_an_answer_that_nobody_asked_for_ends_the_process_and_is_never_a_later_calls(tmp_path: Path) -> None:
    """A kernel that writes to its process's socket by itself: the next call gets an error, no old numbers."""
    body = """
    def run(x, weight, eps):
        for name in os.listdir("/proc/self/fd"):
            try:
                held = socket.socket(fileno=os.dup(int(name)))
            except OSError:
                continue
            with held:
                if held.type == socket.SOCK_SEQPACKET:
                    held.send(bytes(9)); held.send(b"\\0")
        return wild_kernels.rms_norm(x, weight, eps)
    """
    with made(tmp_path, body) as (worker, call):
        first = worker.pid
        with pytest.raises(WorkerError, match="answered what it was not asked") as raised:
            call(X, None, 1e-6)
        assert raised.value.reason is Reason.WORKER_CRASHED
        until(lambda: worker.running and worker.pid != first)


def test_a_crash_is_told_as_one_where_a_copy_of_the_process_keeps_its_socket() -> None:
    """Not as a hang, after the whole limit: the end of the process is what ends the wait."""
    settings = lz.Settings(plugins=("wild",), isolate={"wild": "process"}, isolate_timeout_s=20.0, warm="off")
    with lz.start(settings) as runtime:
        runtime.device().warm(["wild.rms_norm"])
        call = runtime.device().registry.callable_of("wild.rms_norm")
        with pytest.raises(WorkerError, match="SIGSEGV") as raised:
            call(asking(plugged.LEAVE), None, 1e-6)
        assert raised.value.reason is Reason.WORKER_CRASHED and "rms_norm" in raised.value.said


def test_an_error_of_the_system_in_a_kernel_is_the_kernels(tmp_path: Path) -> None:
    """OSError at a call, at taking the memory of a larger call, and at the next start: the process lives."""
    body = """
    import __main__ as serve
    kept = getattr(serve, "HostArena", None)
    def none_left(*_):
        serve.HostArena = kept
        raise OSError(24, "too many open files")
    def run(x, weight, eps):
        serve.HostArena = none_left if x[0, 0] == 1 else kept
        if x[0, 0] == 2: raise OSError("no such device")
        return wild_kernels.rms_norm(x, weight, eps)
    """
    with made(tmp_path, body) as (worker, call):
        pid = worker.pid
        with pytest.raises(OSError, match="no such device"):
            call(torch.full((6, 32), 2.0), None, 1e-6)
        call(torch.ones(6, 32), None, 1e-6)
        with pytest.raises(OSError, match="too many open files"):
            call(torch.ones(2, 1 << 22), None, 1e-6)
        call(torch.zeros(6, 32), None, 1e-6)
        torch.testing.assert_close(call(torch.zeros(2, 1 << 22), None, 1e-6), torch.zeros(2, 1 << 22))
        assert worker.pid == pid


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ('ValueError("half of \\ud83d a letter")', r"half of \\ud83d a letter"),
        ("Silent()", "Silent"),
        ('ValueError("long " * 200_000)', "long long"),
    ],
)
def test_an_error_whose_text_is_none_ends_no_process(tmp_path: Path, raised: str, said: str) -> None:
    """Half of a letter, a text that cannot be made, one without end: an error like another."""
    body = f"""
    class Silent(ValueError):
        def __str__(self): raise KeyError("no text")
    def run(x, weight, eps):
        raise {raised}
    """
    with made(tmp_path, body) as (worker, call):
        pid = worker.pid
        with pytest.raises(ValueError, match=said):
            call(X, None, 1e-6)
        assert worker.pid == pid


def test_a_description_that_no_message_holds_is_an_error(tmp_path: Path) -> None:
    """The process lives, and says what it could not send."""
    (tmp_path / "wordy.py").write_text(
        "import dataclasses, wild_kernels\nkernel = wild_kernels.kernels()[0]\n"
        "kernels = [dataclasses.replace(kernel, id=f'wild.rms_norm.v{n}') for n in range(5000)]\n"
    )
    info = tmp_path / "wordy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wordy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[layerzero.backends]\nwordy = wordy:kernels\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        worker = IsolatedWorker("wordy", None, 5.0, lambda *what: None, lambda *what: None)
        try:
            with pytest.raises(ValueError, match=f"at most {frames.MAX_MESSAGE} bytes"):
                worker.describe("wordy")
            assert worker.starts == 1 and worker.running
        finally:
            worker.close()


def test_a_workers_word_does_not_lose_the_callers_card() -> None:
    """A fault with the text of a lost device is an error of the process, whatever it says."""
    text = "CUDA error: an illegal memory access was encountered"
    fault = frames.FAULT + msgspec.msgpack.encode(frames.Fault("RuntimeError", text, ""))
    worker = IsolatedWorker("liar", None, 1.0, lambda *what: None, lambda *what: None)
    assert (
        lost_device(RuntimeError(text))
        and lost_device(fault_error("made", fault, worker._unavailable)) is None
    )


def test_a_killed_process_that_a_driver_keeps_holds_up_no_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits for a card: the call ends, closing too, and the next process waits for its end."""
    kept, limits = threading.Event(), []
    with opened() as runtime:
        worker = worker_of(runtime)
        life = worker._life
        assert life is not None

        def wait(timeout: float | None = None) -> int:
            limits.append(timeout)
            if not kept.wait(timeout or 10.0):
                raise subprocess.TimeoutExpired("worker", timeout or 10.0)
            return -signal.SIGKILL

        monkeypatch.setattr(worker_process, "END_S", 0.1)
        monkeypatch.setattr(life.process, "wait", wait)
        call = runtime.device().registry.callable_of("wild.rms_norm")
        with pytest.raises(WorkerError, match="WORKER_HUNG"):
            call(asking(plugged.HANG), None, 1e-6)
    kept.set()
    assert limits and None not in limits
    assert (
        life.process.returncode == -signal.SIGKILL
    )  # its status was taken, later: no process is left behind
