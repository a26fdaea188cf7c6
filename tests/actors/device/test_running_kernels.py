"""The journal: a killed process leaves the name of its kernel, an orderly end leaves nothing."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from layerzero.actors.device.running_kernels import (
    CRASH_MEMORY_S,
    CRASHES_TO_QUARANTINE,
    CrashRecords,
    RunningKernelLog,
    read,
    read_crash_log,
)
from layerzero.actors.remote.ray_actor import DeviceSpec, _folder
from layerzero.health.device_faults import lost_device
from layerzero.native import KERNEL_NOTES
from layerzero.spec.errors import BackendNotAvailableError
from layerzero.spec.settings import Settings
from tests import children
from tests.users import NOBODY, needs_root, planted, shared

__all__ = ["shared"]

KILLED = """
import os, signal, sys
from pathlib import Path
from layerzero.actors.device.running_kernels import RunningKernelLog
from layerzero.native import KERNEL_NOTES

module = KERNEL_NOTES.load() if sys.argv[2] == "compiled" else None
journal = RunningKernelLog(Path(sys.argv[1]), "gpu-0", "ab12", module)
journal.wrap("quick.op", lambda: None)()
journal.wrap("slow.op", lambda: os.kill(os.getpid(), signal.SIGKILL))()
"""


@pytest.fixture(params=["python", "compiled"])
def twin(request: pytest.FixtureRequest) -> Any:
    """What notes the calls: Python, or the compiled module."""
    if request.param == "python":
        return None
    try:
        return KERNEL_NOTES.load()
    except BackendNotAvailableError as error:
        pytest.skip(f"the journal's twin is not there: {error}")


def test_a_killed_process_leaves_its_kernel(tmp_path: Path, twin: Any) -> None:
    """The kernel in flight is blamed, the one that had ended is not; the next life finds a clean folder."""
    journals = tmp_path / "journals"
    journals.mkdir()
    done = children.run(KILLED, str(journals), "python" if twin is None else "compiled", folder=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [flight.kernel for flight in read(journals / "gpu-0.ab12.journal")] == ["slow.op"]
    assert read_crash_log(journals, "gpu-1") == []
    assert read_crash_log(journals, "gpu-0") == ["slow.op"]
    assert read_crash_log(journals, "gpu-0") == []
    assert list(journals.iterdir()) == []


def test_flights_of_several_threads(tmp_path: Path, twin: Any) -> None:
    """Each thread has a slot of its own; a kernel that raises has ended too."""
    journal = RunningKernelLog(tmp_path, "cpu-0", "1", twin)
    inside, go = threading.Barrier(3), threading.Event()

    def wait() -> None:
        inside.wait()
        go.wait()

    threads = [threading.Thread(target=journal.wrap(name, wait)) for name in ("a.x", "b.x")]
    for thread in threads:
        thread.start()
    inside.wait()
    assert sorted(flight.kernel for flight in journal.running_kernels()) == ["a.x", "b.x"]
    go.set()
    for thread in threads:
        thread.join()

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        journal.wrap("c.x", fail)()
    assert journal.running_kernels() == []
    journal.mark_suspects()
    assert "c.x" in [flight.kernel for flight in journal.running_kernels()]
    journal.close()
    assert read_crash_log(tmp_path, "cpu-0") == []


def test_results_and_arguments_pass_through(tmp_path: Path, twin: Any) -> None:
    """The journal changes nothing about a call."""
    journal = RunningKernelLog(tmp_path, "cpu-0", "1", twin)
    assert journal.wrap("a.x", lambda a, b: (b, a))(1, 2) == (2, 1)


def test_journals_of_one_process_keep_apart(tmp_path: Path, twin: Any) -> None:
    """A thread that notes in two journals by turns has a slot in each; both say when the kernel began."""
    first, second = (RunningKernelLog(tmp_path, "cpu-0", name, twin) for name in ("1", "2"))
    seen: list[list[str]] = []

    def look() -> None:
        seen.append([flight.kernel for journal in (first, second) for flight in journal.running_kernels()])
        assert all(0 <= flight.seconds < 60 for flight in first.running_kernels() + second.running_kernels())

    second.wrap("c.x", lambda: None)()
    first.wrap("a.x", second.wrap("b.x", look))()
    first.wrap("a.x", look)()
    assert seen == [["a.x", "b.x"], ["a.x"]]
    for journal, last in ((first, "a.x"), (second, "b.x")):
        journal.mark_suspects()
        assert [flight.kernel for flight in journal.running_kernels()] == [last]


def test_a_journal_keeps_nothing_alive_that_is_dropped(tmp_path: Path, twin: Any) -> None:
    """A plan that is planned anew takes its noted callable along."""

    class Kernel:
        noted: Any = None

        def __call__(self) -> None:
            pass

    kernel = Kernel()
    gone = weakref.ref(kernel)
    kernel.noted = RunningKernelLog(tmp_path, "cpu-0", "1", twin).wrap("a.x", kernel)
    kernel.noted()
    del kernel
    gc.collect()
    assert gone() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_notes_nothing_in_its_parents_journal(tmp_path: Path, twin: Any) -> None:
    """What a child runs, names, closes or dies under: the parent's journal says what the parent runs."""
    journal = RunningKernelLog(tmp_path, "gpu-0", "1", twin)
    noted = journal.wrap("fatal.x", lambda deadly: os.kill(os.getpid(), signal.SIGKILL) if deadly else None)
    noted(False)
    child = os.fork()
    if not child:
        journal.wrap("childs.x", lambda: None)()
        assert journal.running_kernels() == []
        journal.close()
        noted(True)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert journal.running_kernels() == []
    journal.wrap("parents.x", lambda: shutil.copytree(tmp_path, tmp_path / "then"))()
    assert [flight.kernel for flight in read(tmp_path / "then" / journal.path.name)] == ["parents.x"]
    journal.close()
    assert not journal.path.exists()


@pytest.mark.parametrize("damage", [b"", b"short", b"X" * 4160])
def test_a_file_that_is_no_journal_blames_nobody(tmp_path: Path, damage: bytes) -> None:
    """It is removed all the same."""
    (tmp_path / "gpu-0.ff.journal").write_bytes(damage)
    (tmp_path / "gpu-0.ff.kernels").write_text("a.x\n")
    assert read_crash_log(tmp_path, "gpu-0") == []
    assert not (tmp_path / "gpu-0.ff.journal").exists()


def test_two_deaths_within_a_day_condemn(tmp_path: Path) -> None:
    """Also over two processes; an older death is forgiven; a damaged file is set aside."""
    assert CRASHES_TO_QUARANTINE == 2
    assert CrashRecords(tmp_path, "gpu-0").add(["a.x"], time_s=1000.0) == []
    assert CrashRecords(tmp_path, "gpu-0").add(["a.x", "b.x"], time_s=2000.0) == ["a.x"]
    assert CrashRecords(tmp_path, "gpu-0").add(["b.x"], time_s=2000.0 + CRASH_MEMORY_S + 1) == []
    (tmp_path / "gpu-0.crashes").write_text("{")
    assert CrashRecords(tmp_path, "gpu-0").count("a.x") == 0
    assert (tmp_path / "gpu-0.crashes.damaged").read_text() == "{"


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("CUDA error: an illegal memory access was encountered", True),
        ("CUDA error: uncorrectable ECC error encountered", True),
        ("CUDA error: GPU device has fallen off the bus", True),
        ("CUDA error: unspecified launch failure", True),
        ("CUDA error: invalid argument", False),
        ("CUDA out of memory. Tried to allocate 2 GiB", False),
        ("an illegal memory access was encountered", False),
    ],
)
def test_faults_that_end_a_process(text: str, lost: bool) -> None:
    """Driver, ECC and bus faults are a lost device, found behind wrappers too; argument errors are not."""
    assert (lost_device(RuntimeError(text)) is not None) is lost
    wrapped: Any = KeyError("outer")
    wrapped.__cause__ = RuntimeError(text)
    assert (lost_device(wrapped) is not None) is lost
    assert os.getpid() > 0


# -- other users ----------------------------------------------------------------------------------------


@needs_root
@pytest.mark.parametrize("what", ["folder", "link"])
def test_another_users_folder_is_refused_and_its_journals_blame_nobody(
    shared: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Who made the folder first would choose what is overwritten, and which kernels are taken out."""
    victim = shared / "victim"
    victim.write_bytes(b"mine")
    here = shared / f"layerzero-{os.getuid()}"
    whole = RunningKernelLog(shared / "own", "gpu-0", "ab12")
    whole.wrap("innocent.op", whole.mark_suspects)()
    evidence = whole.path.read_bytes()

    def plant() -> None:
        theirs = here if what == "folder" else shared / "theirs"
        (theirs / "pool").mkdir(parents=True)
        (theirs / "pool" / "gpu-0.crashes-new").symlink_to(victim)
        (theirs / "pool" / "gpu-0.ff.journal").write_bytes(evidence)
        (theirs / "pool" / "gpu-0.ff.kernels").write_bytes(b"innocent.op\n")
        if what == "link":
            here.symlink_to(theirs)

    planted(shared, plant)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    spec = DeviceSpec(pool="pool", name="gpu-0", settings=Settings(), opener="", secret=b"")
    with pytest.raises(PermissionError, match=str(NOBODY)):
        _folder(spec)
    for attempt in (
        lambda: read_crash_log(here / "pool", "gpu-0"),
        lambda: RunningKernelLog(here / "pool", "gpu-0", "1"),
        lambda: CrashRecords(here / "pool", "gpu-0").add(["a.x"], time_s=1.0),
    ):
        with pytest.raises(PermissionError):
            attempt()
    assert victim.read_bytes() == b"mine"


def test_a_folder_that_others_can_write_blames_nobody(tmp_path: Path) -> None:
    """Nor is a journal begun in it."""
    tmp_path.chmod(0o777)
    for attempt in (
        lambda: read_crash_log(tmp_path, "gpu-0"),
        lambda: RunningKernelLog(tmp_path, "gpu-0", "1"),
    ):
        with pytest.raises(PermissionError, match="writable by no other user"):
            attempt()


def test_a_file_or_link_at_a_journals_place_is_not_overwritten(tmp_path: Path) -> None:
    """It is made where nothing stands."""
    (tmp_path / "mine").write_bytes(b"mine")
    for name in ("gpu-0.1.journal", "gpu-0.2.kernels"):
        (tmp_path / name).symlink_to(tmp_path / "mine")
    for generation in ("1", "2"):
        with pytest.raises(FileExistsError):
            RunningKernelLog(tmp_path, "gpu-0", generation)
    assert (tmp_path / "mine").read_bytes() == b"mine"


@pytest.mark.parametrize("what", ["no text", "a pipe"])
def test_names_that_cannot_be_read_blame_nobody(tmp_path: Path, what: str) -> None:
    """The device starts all the same."""
    journal = RunningKernelLog(tmp_path, "gpu-0", "ab")
    journal.wrap("a.x", journal.mark_suspects)()
    journal.mark_suspects()
    names = tmp_path / "gpu-0.ab.kernels"
    names.unlink()
    if what == "no text":
        names.write_bytes(b"a.x\xff\n")
    else:
        os.mkfifo(names)
    assert read_crash_log(tmp_path, "gpu-0") == [] and os.listdir(tmp_path) == []


def test_the_last_journal_of_a_folder_takes_it_along(tmp_path: Path) -> None:
    """No empty folder stays for each pool that was; deaths that were noted do, and neighbours."""
    first, second = (RunningKernelLog(tmp_path / "pool", name, "1") for name in ("gpu-0", "gpu-1"))
    first.close()
    assert (tmp_path / "pool").is_dir()
    second.close()
    assert os.listdir(tmp_path) == []
    CrashRecords(tmp_path / "pool", "gpu-0").add(["a.x"], time_s=1.0)
    RunningKernelLog(tmp_path / "pool", "gpu-0", "2").close()
    assert os.listdir(tmp_path / "pool") == ["gpu-0.crashes"]
