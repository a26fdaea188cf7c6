"""Backends in processes of their own: a real compiled kernel crashes, hangs and lies; callers get answers."""

from __future__ import annotations

import dataclasses
import importlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
import layerzero.sync
from layerzero.actors.isolation.arena import HostArena
from layerzero.actors.isolation.isolated_worker import IsolatedWorker
from layerzero.actors.isolation.worker_errors import WorkerError, fault_error
from layerzero.health import BreakerState
from layerzero.perfdb import versions_of
from layerzero.selection.cost.roofline import ROOFLINE
from layerzero.selection.record import Selection
from layerzero.spec.reasons import Reason
from tests.actors.isolation import plugged
from tests.popen import Fork

X = torch.randn(6, 32)
PATIENCE_S = 60.0


def asking(what: float) -> Tensor:
    """Rows whose first element asks the kernel for something."""
    rows = X.clone()
    rows[0, 0] = what
    return rows


def right(rows: Tensor, scale: float = 1.0) -> Tensor:
    """What the op means, times what the kernel's version says of itself."""
    return scale * torch.nn.functional.rms_norm(rows, rows.shape[-1:], eps=1e-6)


def chosen() -> Selection:
    """What this thread ran last."""
    selection = lz.last_selection()
    assert selection is not None
    return selection


def until(holds: Callable[[], bool]) -> None:
    """Wait for what happens on another thread; a machine that is busy takes its time."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.01)


@contextmanager
def opened() -> Iterator[lz.Runtime]:
    """A runtime in which `wild` runs in a process of its own, rests briefly, and is preferred."""
    settings = lz.Settings(
        plugins=("wild",), isolate={"wild": "process"}, isolate_timeout_s=1.0, warm="off", cooldown_s=0.05
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(plugged.installed(1))
        patch.setenv("LAYERZERO_PREFER", "rms_norm=wild")
        with lz.start(settings) as runtime:
            runtime.device().warm(["wild.rms_norm"])
            yield runtime


@pytest.fixture
def runtime() -> Iterator[lz.Runtime]:
    """One whose worker may be ended."""
    with opened() as runtime:
        yield runtime


@pytest.fixture(scope="class")
def steady() -> Iterator[lz.Runtime]:
    """One for tests that leave its worker alive."""
    with opened() as runtime:
        yield runtime


def worker_of(runtime: lz.Runtime, backend: str = "wild", place: str = "process") -> IsolatedWorker:
    """The worker of a backend."""
    assert runtime.isolation is not None
    return runtime.isolation.workers()[backend, place]


def state_of(runtime: lz.Runtime) -> BreakerState:
    """How the kernel is."""
    runtime.device().health.tick()
    return runtime.device().health.state("wild.rms_norm")


class TestOneWorker:
    """What leaves the worker alive."""

    def test_a_kernel_in_a_process_of_its_own_answers(self, steady: lz.Runtime) -> None:
        """Right numbers, in memory of the caller's; the kernel's library is not imported here."""
        result = layerzero.sync.rms_norm(X)
        assert chosen().kernel == "wild.rms_norm"
        again = layerzero.sync.rms_norm(2 * X[:, ::2])  # strided, and of other sizes
        layerzero.sync.rms_norm(-X)  # in the first call's places
        torch.testing.assert_close(result, right(X))
        torch.testing.assert_close(again, right(2 * X[:, ::2]))
        torch.testing.assert_close(
            layerzero.sync.rms_norm(torch.randn(2000, 512)).pow(2).mean(-1), torch.ones(2000)
        )
        assert worker_of(steady).pid != os.getpid() and "wild_kernels._wild" not in sys.modules
        with pytest.raises(ValueError, match="x needs"):
            layerzero.sync.rms_norm(torch.tensor(1.0))
        rows = [(b.backend, b.place, b.torch) for b in lz.doctor(imports=False).isolated]
        assert rows == [("wild", "process", str(torch.__version__))]

    def test_an_error_comes_with_its_class_and_the_workers_traceback(self, steady: lz.Runtime) -> None:
        """The next kernel answers; without one the error is the kernel's; the process lives on."""
        pid = worker_of(steady).pid
        torch.testing.assert_close(
            layerzero.sync.rms_norm(asking(plugged.RAISE)), right(asking(plugged.RAISE))
        )
        call = steady.device().registry.callable_of("wild.rms_norm")
        with pytest.raises(ValueError, match="the operand asked for an error") as raised:
            call(asking(plugged.RAISE), None, 1e-6)
        assert 'File "' in raised.value.__notes__[0] and "in rms_norm" in raised.value.__notes__[0]
        assert worker_of(steady).pid == pid

    def test_an_output_of_another_shape_is_refused_at_every_call(self, steady: lz.Runtime) -> None:
        """A kernel that was right at its first run and lies later: the next kernel answers."""
        layerzero.sync.rms_norm(X)
        torch.testing.assert_close(
            layerzero.sync.rms_norm(asking(plugged.SHORT)), right(asking(plugged.SHORT))
        )
        call = steady.device().registry.callable_of("wild.rms_norm")
        with pytest.raises(RuntimeError, match=r"output 0 needs \(6, 32\) of float32 on cpu, .* \(6, 31\)"):
            call(asking(plugged.SHORT), None, 1e-6)

    def test_a_kernel_that_writes_outside_its_outputs_reaches_nobodys_tensors(
        self, steady: lz.Runtime
    ) -> None:
        """It has a copy of its operands; the same code in this process overwrites the caller's."""
        rows = asking(plugged.SCRIBBLE)
        steady.device().registry.callable_of("wild.rms_norm")(rows, None, 1e-6)
        assert torch.equal(rows, asking(plugged.SCRIBBLE))
        kernel = importlib.import_module("wild_kernels").kernels()[0]
        kernel.load()(rows, None, 1e-6)
        assert not rows.any()

    def test_a_worker_that_answers_nonsense_is_an_error_and_no_code(self, steady: lz.Runtime) -> None:
        """A pickle, a cut message, words of another protocol: refused as what they are."""
        worker = worker_of(steady)
        for nonsense in (pickle.dumps(print), b"\1\x81", b"\2", b"\1" + b"\xc1" * 40):
            assert isinstance(fault_error("made", nonsense, worker._unavailable), WorkerError)


def test_shared_memory_cannot_be_cut_by_the_other_side() -> None:
    """Sealed: a worker that could shrink it would end the process that reads it."""
    arena, descriptor = HostArena.create(1000)
    try:
        for size in (0, arena.size // 2, 2 * arena.size):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)


def test_a_crash_rests_the_backend_which_comes_back_and_a_second_one_quarantines_it(
    runtime: lz.Runtime,
) -> None:
    """SIGSEGV, then abort, in C: each caller gets the next kernel's right answer within the same call."""
    worker = worker_of(runtime)
    first = worker.pid
    torch.testing.assert_close(layerzero.sync.rms_norm(asking(plugged.SEGV)), right(asking(plugged.SEGV)))
    selection = chosen()
    assert "SIGSEGV" in selection.why and "WORKER_CRASHED" in selection.why
    until(lambda: worker.running and worker.starts == 2 and state_of(runtime) is BreakerState.HALF_OPEN)
    torch.testing.assert_close(layerzero.sync.rms_norm(X), right(X))
    assert chosen().kernel == "wild.rms_norm" and state_of(runtime) is BreakerState.CLOSED
    assert worker.pid not in (first, None)
    torch.testing.assert_close(layerzero.sync.rms_norm(asking(plugged.ABORT)), right(asking(plugged.ABORT)))
    assert "SIGABRT" in chosen().why
    assert state_of(runtime) is BreakerState.QUARANTINED
    counted = runtime.counters.snapshot().items()
    assert [value for series, value in counted if series.name == "isolated_deaths"] == [2]


def test_a_hang_ends_at_the_time_limit_and_without_another_kernel_the_error_has_reason_and_status(
    runtime: lz.Runtime,
) -> None:
    """The C code holds the interpreter's lock for ever: the next kernel answers, the process begins anew.

    Killed as the system does where memory runs out, under a lock: an error of this library, with its cause.
    """
    worker = worker_of(runtime)
    torch.testing.assert_close(layerzero.sync.rms_norm(asking(plugged.HANG)), right(asking(plugged.HANG)))
    assert "WORKER_HUNG" in chosen().why
    until(lambda: worker.running and worker.starts == 2 and state_of(runtime) is BreakerState.HALF_OPEN)
    lz.lock("rms_norm", "wild")
    with pytest.raises(lz.KernelExecutionError, match="WORKER_CRASHED") as raised:
        layerzero.sync.rms_norm(asking(plugged.KILL))
    cause = raised.value.__cause__
    assert isinstance(cause, WorkerError)
    assert (cause.reason, cause.status) == (Reason.WORKER_CRASHED, -signal.SIGKILL)


def test_a_worker_killed_while_idle_is_begun_anew(runtime: lz.Runtime) -> None:
    """No kernel is blamed: it rests with its process, and two such ends quarantine nothing."""
    worker = worker_of(runtime)
    for starts in (2, 3):
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        until(lambda starts=starts: worker.running and worker.starts == starts)  # type: ignore[misc]
        until(lambda: state_of(runtime) is BreakerState.HALF_OPEN)
        torch.testing.assert_close(layerzero.sync.rms_norm(X), right(X))
    assert chosen().kernel == "wild.rms_norm"


def test_two_versions_and_two_environments_serve_side_by_side(tmp_path: Path) -> None:
    """One process, two versions of one distribution, which need two versions of one library."""
    python = plugged.environment(tmp_path / "env", plugged.installed(2))
    settings = lz.Settings(
        plugins=("wild", f"wild_2=wild@{python}"), isolate={"wild_*": "process"}, warm="off"
    )  # what runs elsewhere already stays there
    with lz.start(settings) as runtime:
        assert {"wild.rms_norm", "wild_2.rms_norm"} <= runtime.kernel_ids("rms_norm")
        for backend, scale in (("wild", 1.0), ("wild_2", 2.0)):
            lz.lock("rms_norm", backend)
            torch.testing.assert_close(layerzero.sync.rms_norm(X), right(X, scale))
        assert sys.modules["wild_library"].VERSION == 1
        infos = {i.id: i for i in lz.list_kernels("rms_norm", backend="wild_2")}
        assert infos["wild_2.rms_norm"].state == "ready"
        second = worker_of(runtime, "wild_2", python)
        assert second.hello is not None
        pid = second.pid
    assert pid is not None and not Path(f"/proc/{pid}").exists()


def test_an_environment_of_another_version_is_refused(tmp_path: Path) -> None:
    """The kernel is blocked with WORKER_VERSION, and others answer."""
    start = "import layerzero._util.version as v; v.VERSION = '0.0.1'"
    python = plugged.environment(tmp_path / "env", plugged.installed(1), start=start)
    with lz.start(
        lz.Settings(plugins=("wild",), isolate={"wild": python}, warm="off"), scoped=True
    ) as runtime:
        runtime.device().warm(["wild.rms_norm"])
        blocked = runtime.device().registry.blocked()["wild.rms_norm"]
        assert blocked.reason is Reason.WORKER_VERSION and "got 0.0.1" in blocked.got
        torch.testing.assert_close(layerzero.sync.rms_norm(X), right(X))


@pytest.mark.parametrize("place", ["/nowhere/python", "empty"])
def test_an_environment_that_cannot_serve_is_refused(place: str, tmp_path: Path) -> None:
    """No interpreter, and one without this library: blocked with what it said."""
    if place == "empty":
        import venv

        venv.create(tmp_path / "env", with_pip=False, symlinks=True)
        place = str(tmp_path / "env" / "bin" / "python")
    with lz.start(
        lz.Settings(plugins=("wild",), isolate={"wild": place}, warm="off"), scoped=True
    ) as runtime:
        runtime.device().warm(["wild.rms_norm"])
        blocked = runtime.device().registry.blocked()["wild.rms_norm"]
        assert blocked.reason is Reason.WORKER_FAILED
        # What is left of a longer message where folders have long names.
        assert "exit status 1" in blocked.got or "/nowhere/python" in blocked.got


def test_what_cannot_run_apart_is_refused_by_name() -> None:
    """An op that writes its operands, a gradient, a capture: what is written elsewhere nobody here sees."""
    with lz.start(lz.Settings(isolate={"torch": "process"}, warm="off"), scoped=True) as runtime:
        registry = runtime.device().registry
        registry.for_op("append_kv")
        assert registry.blocked()["torch.append_kv.native"].reason is Reason.ISOLATION_UNSUPPORTED
        wanting = X.clone().requires_grad_()
        chosen = lz.select("rms_norm", wanting)
        codes = {r.reason for c in chosen.trace if c.kernel == "torch.rms_norm.native" for r in c.rejected}
        assert Reason.NO_GRADIENT in codes


def test_a_kernel_that_a_program_made_says_where_it_comes_from(tmp_path: Path) -> None:
    """By its origin, which its process imports; without one it is refused by name. Patterns are reported."""
    module = "from wild_kernels import *\nimport dataclasses\n"
    module += (
        "made = lambda: dataclasses.replace(kernels()[0], id='made.rms_norm', backend='made', origin=O)\n"
    )
    (tmp_path / "made_here.py").write_text(module + "O = 'made_here:made'\n")
    settings = lz.Settings(isolate={"made": "process", "nobody.*": "process"}, warm="off")
    with pytest.MonkeyPatch.context() as patch, lz.start(settings, scoped=True) as runtime:
        patch.syspath_prepend(tmp_path)
        made = importlib.import_module("made_here").made()
        runtime.add_kernel(made)
        runtime.add_kernel(dataclasses.replace(made, id="made.rms_norm.lost", origin=""))
        runtime.device().warm(["made.rms_norm", "made.rms_norm.lost"])
        blocked = runtime.device().registry.blocked()
        assert "needs an origin" in blocked["made.rms_norm.lost"].got
        torch.testing.assert_close(layerzero.sync.rms_norm(X, backend="made"), right(X))
        states = {row.backend: row.state for row in lz.doctor(imports=False).isolated}
        assert states == {"nobody.*": "matches no kernel", "made": str(worker_of(runtime, "made").pid)}


def test_what_was_measured_here_says_nothing_of_a_kernel_that_runs_apart() -> None:
    """Neither a shipped table nor this machine's rows: it is priced by estimates, its process included."""
    with lz.start(lz.Settings(warm="off", perfdb=None), scoped=True):
        here = {c.kernel: c.accepted for c in lz.select("rms_norm", X).trace}["torch.rms_norm.native"]
    with lz.start(lz.Settings(warm="off", perfdb=None, isolate={"torch": "process"}), scoped=True) as runtime:
        apart = {c.kernel: c.accepted for c in lz.select("rms_norm", X).trace}["torch.rms_norm.native"]
        kernel = runtime.device().registry.get("torch.rms_norm.native")
    assert here is not None and apart is not None and kernel is not None
    assert apart.kernel_us > here.kernel_us + 30 and apart.source == ROOFLINE
    assert versions_of(kernel) == "isolated process"


def test_callers_of_several_threads_share_a_worker(runtime: lz.Runtime) -> None:
    """Each gets its own rows, also where one of them crashes the process under the others."""
    wrong: list[int] = []

    def ask(seed: int) -> None:
        rows = torch.randn(seed + 1, 16, generator=torch.Generator().manual_seed(seed))
        for turn in range(20):
            given = asking(plugged.SEGV)[:, :16] if (seed, turn) == (3, 10) else rows
            if not torch.allclose(layerzero.sync.rms_norm(given), right(given), atol=1e-5):
                wrong.append(seed)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def runs(pid: int) -> bool:
    """Whether a process is there, and not only its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    """A parent that is killed leaves no process behind: none that hangs, and none that one started."""
    program = f"""
import sys; sys.path[:0] = [{str(plugged.installed(1))!r}, {str(Path(__file__).parents[3])!r}]
import threading, torch, layerzero as lz, layerzero.sync
runtime = lz.start(lz.Settings(plugins=("wild",), isolate={{"wild": "process"}}, warm="off")).__enter__()
lz.lock("rms_norm", "wild")
layerzero.sync.rms_norm(torch.ones(2, 4))
started = int(layerzero.sync.rms_norm(torch.full((2, 4), {plugged.START}))[0, 0])
print(runtime.isolation.workers()["wild", "process"].pid, started, flush=True)
layerzero.sync.rms_norm(torch.full((2, 4), {plugged.HANG}))
"""
    parent = Fork([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    left = parent.stdout.readline().split()
    assert len(left) == 2 and all(Path(f"/proc/{pid}").exists() for pid in left)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(PATIENCE_S)
    parent.stdout.close()
    for pid in map(int, left):
        until(lambda pid=pid: not runs(pid))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"wild": "thread"}, r'"process" or the absolute path of a Python interpreter'),
        ({"Wild": "process"}, "globs over kernel ids"),
        ({"wild": "python3"}, "absolute path"),
        ("wild", "globs over kernel ids"),
        ({"wild": None}, "globs over kernel ids"),
    ],
)
def test_a_place_that_is_none_is_refused(value: Any, said: str) -> None:
    """By the setting's name, with what it needs."""
    with pytest.raises(lz.ConfigurationError, match=rf"isolate needs .*{said}"):
        lz.Settings(isolate=value)


def test_the_setting_is_read_from_variables_and_files(tmp_path: Path) -> None:
    """As text in a variable, as a mapping in YAML."""
    read = lz.Settings.load(env={"LAYERZERO_ISOLATE": "flashinfer=process, hub.*=/opt/env/bin/python"})
    assert read.isolate == {"flashinfer": "process", "hub.*": "/opt/env/bin/python"}
    (tmp_path / "lz.yaml").write_text('isolate: {flashinfer: process, "hub.*": process}\n')
    assert lz.Settings.load(tmp_path / "lz.yaml", env={}).isolate == {
        "flashinfer": "process",
        "hub.*": "process",
    }
