"""Processes timed block by block, in turn, on one core: a tree against another, or beside plain torch.

A tree is a folder, or what a repository of git had at a revision.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from layerzero.gates.sign_test import Answer, SignTest
from layerzero.spec.errors import ConfigurationError, FileRefusedError
from layerzero.spec.reasons import Reason, Rejected

WORKER: Final = Path(__file__).with_name("pace_worker.py")
# A block ends before most others get the core's next turn, and is long beside a pipe's wake-up.
BLOCK_NS: Final = 400_000
ROUNDS: Final = 800
# Stopping as soon as the answer is likely would favour extreme rounds in the ratio that is shown.
LEAST_ROUNDS: Final = 100
# What the yardsticks of a baseline are measured by: the same small product, whatever the call.
REFERENCE_WORDS: Final = "linear x=64x64:float32 weight=64x64:float32"
GIT: Final = "git:"
_WARM_BLOCKS: Final = 30
_SIZING_BLOCKS: Final = 5


class PacedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call in words, `rms_norm x=16x512:float32`; with `callers`, so many await it together."""

    call: str
    callers: Annotated[int, msgspec.Meta(ge=0)] = 0

    def __str__(self) -> str:
        return f"{self.call} ({self.callers} callers)" if self.callers else self.call


class PairedResult(msgspec.Struct, frozen=True):
    """The answer, how many rounds there were, the median ratio, and what the answer rests on."""

    call: str
    answer: Answer
    rounds: int
    ratio: float
    why: str


class PaceProcess:
    """A child process that times one call of one tree; `tree` None means the installed one."""

    def __init__(
        self, call: PacedCall, *, tree: Path | None = None, anchor: bool = False, device: str = "cpu",
        cpu: int | None = None,
    ) -> None:  # fmt: skip
        self.tree = tree
        self.name = str(call)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "LAYERZERO_PERFDB": "none"}
        if tree is not None:
            path = filter(None, (str(tree), os.environ.get("PYTHONPATH")))
            environment["PYTHONPATH"] = os.pathsep.join(path)
        pipe = subprocess.PIPE
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  a full pipe would stop it
        self._child = subprocess.Popen(
            [sys.executable, str(WORKER)],
            stdin=pipe, stdout=pipe, stderr=self._said, text=True, env=environment, cwd=tree,
        )  # fmt: skip
        self._order: dict[str, Any] = {
            "call": call.call, "callers": call.callers, "anchor": anchor, "device": device, "cpu": cpu,
        }  # fmt: skip
        self._calls = 1

    def start(self) -> None:
        """Wait until it is ready, and find how many calls a block takes.

        Raises: ConfigurationError: the call or the tree does not run, with what the process said.
        """
        self._write(json.dumps(self._order))
        measures = json.loads(self._read()).get("measures", "")
        if self.tree is not None and not Path(measures).is_relative_to(self.tree):
            raise _no_tree(self.tree, "layerzero of that tree", f"it imports {measures}")
        # The least of several: one that lost the core would pass for a full block of a few calls, which are
        # cold after each turn and take many times as long a call.
        while (took_ns := min(self.block() for _ in range(_SIZING_BLOCKS))) < BLOCK_NS:
            self._calls = min(
                max(int(self._calls * BLOCK_NS / max(took_ns, 1)), self._calls + 1), self._calls * 8
            )

    def use_calls_of(self, other: PaceProcess) -> None:
        """Run as many calls a block as another process does."""
        self._calls = other._calls

    def block(self) -> int:
        """The nanoseconds of one block."""
        self._write(str(self._calls))
        return int(self._read())

    def call_us(self, block_ns: float) -> float:
        """Microseconds a call, for a block that took so long."""
        return block_ns / self._calls / 1e3

    def _write(self, line: str) -> None:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(line + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            self._fail()

    def _read(self) -> str:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            self._fail()
        return line

    def _fail(self) -> None:
        self._child.wait()
        self._said.seek(0)
        last = self._said.read().strip().splitlines()[-1:] or ["it ended"]
        where = f" in {self.tree}" if self.tree else ""
        raise ConfigurationError(
            f"calls needs calls that run, {self.name!r}{where}: {last[0]}", call=self.name
        )

    def __enter__(self) -> PaceProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self._child.kill()
        self._child.communicate()
        self._said.close()


@contextmanager
def tree_of(against: str, folder: Path, judged: Path) -> Iterator[tuple[Path, str]]:
    """A tree to compare `judged` with, and what it is in words, while the block lasts.

    `against` is a folder, from `folder`, or `git:REVISION` of the repository that `folder` is in: that is
    copied, and the repository stays as it is.
    Raises: FileRefusedError: it is no tree, or `judged` itself (GATE_TREE).
    """
    with ExitStack() as stack:
        if against.startswith(GIT):
            tree = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="layerzero-gate-"))).resolve()
            description = _copy_revision(against.removeprefix(GIT), folder, tree)
        else:
            tree = (folder / against).resolve()
            description = f"the tree {tree}"
        if not (tree / "layerzero" / "__init__.py").is_file():
            raise _no_tree(against, "a tree with layerzero/", f"none in {description}")
        if tree == judged.resolve():
            raise _no_tree(against, "another tree than the one that is judged", description)
        yield tree, description


def _copy_revision(revision: str, folder: Path, tree: Path) -> str:
    """Put into `tree` what `folder` had at a revision; what that is in words.

    Raises: FileRefusedError: there is no git, no repository, no such revision in it, or a link out of it.
    """
    commit = _git(
        revision, folder, "rev-parse", "--verify", "--end-of-options", revision + "^{commit}"
    ).strip()
    words = _git(revision, folder, "show", "--no-patch", "--format=%h of %cs: %s", commit).strip()
    packed = tree / "revision.tar"
    _git(revision, folder, "archive", f"--output={packed}", commit)
    try:
        with tarfile.open(packed) as archive:
            archive.extractall(tree, filter="data")
    except tarfile.TarError as error:
        raise _no_tree(GIT + revision, "a commit without links out of it", str(error)) from error
    packed.unlink()
    return f"the commit {words}"


def _git(revision: str, folder: Path, *words: str) -> str:
    try:
        completed = subprocess.run(
            ["git", *words], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace",
        )  # fmt: skip
    except OSError as error:
        raise _no_tree(GIT + revision, "the program git", str(error.strerror)) from error
    if completed.returncode != 0:
        description = (completed.stderr.strip().splitlines() or ["git said nothing"])[-1]
        raise _no_tree(GIT + revision, f"a commit of the repository around {folder}", description)
    return completed.stdout


def _no_tree(name: str | Path, needs: str, got: str) -> FileRefusedError:
    return FileRefusedError.of(name, Rejected(Reason.GATE_TREE, "against", needs, got[:200]))


def compare_paces(
    call: PacedCall, first: Path | None, second: Path | None, *, slower: float, rounds: int = ROUNDS,
    device: str = "cpu",
) -> PairedResult:  # fmt: skip
    """Whether `second` is slower than `first` by more than the share `slower`, in at most so many rounds.

    Raises: ConfigurationError: the call does not run in one of the trees.
    """
    cpu = _core()
    with ExitStack() as stack:
        ours = stack.enter_context(PaceProcess(call, tree=first, device=device, cpu=cpu))
        theirs = stack.enter_context(PaceProcess(call, tree=second, device=device, cpu=cpu))
        ours.start()
        theirs.start()
        theirs.use_calls_of(ours)
        test = SignTest()
        ratios: list[float] = []
        for first_us, second_us in _rounds((ours, theirs), rounds):
            ratios.append(second_us / first_us)
            test.add(ratios[-1] > 1 + slower)
            if test.answer != "undecided" and test.rounds >= LEAST_ROUNDS:
                break
    why = f"{test.above} of {test.rounds} rounds above"
    return PairedResult(str(call), test.answer, test.rounds, statistics.median(ratios), why)


def measure_beside_torch(call: PacedCall, *, rounds: int, device: str = "cpu") -> list[tuple[float, ...]]:
    """Microseconds a call of a fixed product, of plain torch as the call runs, and of the call; by round.

    Raises: ConfigurationError: the call does not run.
    """
    cpu = _core()
    with ExitStack() as stack:
        processes = [
            stack.enter_context(PaceProcess(each, anchor=anchor, device=device, cpu=cpu))
            for each, anchor in ((PacedCall(REFERENCE_WORDS), True), (call, True), (call, False))
        ]
        for process in processes:
            process.start()
        return list(_rounds(processes, rounds))


def _rounds(processes: Sequence[PaceProcess], rounds: int) -> Iterator[tuple[float, ...]]:
    """Microseconds a call of each, round by round; each order in turn, so that a drift favours none."""
    # The first one has waited while the last one started: none may begin colder than the others.
    for _ in range(_WARM_BLOCKS):
        for process in processes:
            process.block()
    for number in range(rounds):
        order = processes if number % 2 else processes[::-1]
        sums = dict.fromkeys(processes, 0.0)
        for process in (*order, *order[::-1]):
            sums[process] += process.call_us(process.block()) / 2
        yield tuple(sums.values())


def _core() -> int | None:
    """The core that both share; None where a process cannot be bound to one."""
    return max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
