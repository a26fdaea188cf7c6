"""Breaks each feature of the ledger in the smallest way, in a copy of the tree, and wants its proof red.

    python -m scripts.mutate                       every mutation of tests/mutations
    python -m scripts.mutate --rows T9 PS-010      those of some rows
    python -m scripts.mutate --sample 20 --seed 3  as many drawn at random
    python -m scripts.mutate --part 2/9            the second of nine parts, to try all in several runs
    python -m scripts.mutate --record FILE         what FILE does not have as killed, noted there as it comes
    python -m scripts.mutate --check               only whether each edit still applies

Every run of a proof is a process of its own. A mutation is killed if its proof fails under it and passes
without. The exit status is 0 where all that ran were killed, 1 where one was not, 2 where the request or the
data is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from scripts import ledger, mutations
from scripts.mutation_record import MutationRecord, ordered
from scripts.mutations import Mutation, MutationError

ROOT = Path(__file__).resolve().parents[1]
RUNNER = Path(__file__).resolve().parent / "proof_run.py"
LIMIT_S = 300.0
PART = 16  # mutations between two looks at what the tests that they turn red show without them
KILLED, SURVIVED, GONE = "killed", "SURVIVED", "does not apply"
RED, BROKEN, NOT_RUN = "proof not green", "breaks the import", "not run"
GOOD = (KILLED, NOT_RUN)
# What pytest-timeout says, and the tests' own waits (tests/children.py, tests/waiting.py).
LIMITS = (
    "Timeout (",
    "the child needs to end in ",
    "the condition did not come true within ",
    " did not end within ",
)


@dataclass(frozen=True, slots=True)
class Run:
    """What one process of pytest showed: its notes, exit status, whether its time ran out, last words."""

    notes: list[dict[str, Any]]
    status: int
    late: bool
    last: str = ""

    def first(self, outcome: str) -> dict[str, Any] | None:
        """The first note of one outcome."""
        return next((note for note in self.notes if note["outcome"] == outcome), None)

    @property
    def fault(self) -> str:
        """Why this run is red, empty where it is not."""
        failed = self.first("failed")
        if failed is not None:
            return f"{failed['node']}: {failed['said']}"
        if self.late:
            return "ended by the time limit"
        if self.status < 0:
            return f"died of {signal.Signals(-self.status).name}"
        if self.status in (0, 5) or (self.status == 4 and self.first("skipped")):  # a file skipped as a whole
            return ""
        return f"pytest ended with {self.status}: {self.last}"

    @property
    def by(self) -> str:
        """By what this run is red: its test's assertion, an error elsewhere, a limit, the process's end."""
        failed = self.first("failed")
        if failed is None:
            return "limit" if self.late else "end"
        if failed["said"].startswith("TimeoutError") or any(words in failed["said"] for words in LIMITS):
            return "limit"
        of_test = failed["said"].startswith(("assert", "AssertionError", "Failed: ", "ExceptionGroup: "))
        return "assertion" if of_test else "error"


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one mutation, and why."""

    mutation: Mutation
    verdict: str
    why: str
    by: str = ""


class Server:
    """The process that forks one for each run; it has imported the test tools and nothing of any tree."""

    def __init__(self) -> None:
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [sys.executable, "-u", str(RUNNER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=kept
        )
        self._answers: SimpleQueue[str] = SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line.decode())
        self._answers.put("")

    def run(self, request: dict[str, Any], limit_s: float) -> tuple[int, bool]:
        """The exit status of one run, and whether it was ended for time; its process group is gone then."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        child, late = int(self._answers.get() or self._gone()), False
        try:
            status = self._answers.get(timeout=limit_s)
        except Empty:
            late = True
            _kill_group(child)
            status = self._answers.get()
        _kill_group(child)
        return int(status or self._gone()), late

    def _gone(self) -> str:
        raise RuntimeError(f"the process that runs the proofs has ended with {self._process.wait()}")

    def close(self) -> None:
        """End it, and nothing else."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


class Tree:
    """A copy of the checkout in which one proof at a time is run; nothing in it reaches the checkout."""

    def __init__(self, source: Path, place: Path) -> None:
        self.source = source
        self.root, self.temp = place / "c", place / "t"  # short: a socket's path is
        self.server = Server()
        for name in listed(source):
            target = self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target, follow_symlinks=False)

    @contextlib.contextmanager
    def edited(self, mutation: Mutation) -> Iterator[None]:
        """The copy with one mutation applied.

        Raises: MutationError: it does not apply.
        """
        path = self.root / mutation.file
        if not path.is_file():
            raise MutationError(f"{mutation.file} does not exist ({mutation.place})")
        before = path.read_text()
        after = mutation.applied(before)
        try:
            self._write(path, after)
            yield
        finally:
            self._write(path, before)

    def _write(self, path: Path, text: str) -> None:
        # Compiled Python is told from its source by size and second, which an edit may leave alone.
        path.write_text(text)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def run(self, nodes: Sequence[str], limit_s: float, *, stop_at_first: bool = False) -> Run:
        """One pytest over `nodes` in a process group of its own, which is gone when this returns."""
        self.temp.mkdir()
        notes = self.temp / "notes"
        notes.touch()
        # The copy keeps its compiled Python: to compile all of it takes longer than most proofs.
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        request = {
            "root": str(self.root),
            "home": str(self.source),
            "notes": str(notes),
            "out": str(self.temp / "out"),
            "arguments": [
                "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *(["-x"] if stop_at_first else []), *nodes,
            ],
            "variables": kept | {
                "PYTHONPATH": str(self.root), "TMPDIR": str(self.temp), "HYPOTHESIS_PROFILE": "mutation",
                "LZ_WAIT_S": str(limit_s / 3),
            },
        }  # fmt: skip
        try:
            status, late = self.server.run(request, limit_s)
            lines = notes.read_text().splitlines()
            out = (self.temp / "out").read_text(errors="replace").strip().splitlines() or [""]
            return Run([json.loads(line) for line in lines], status, late, out[-1][:300])
        finally:
            shutil.rmtree(self.temp, ignore_errors=True)
            shutil.rmtree(self.root / ".hypothesis", ignore_errors=True)  # it remembers failing examples


class Plain:
    """What proofs show without a mutation: one process for many, and one more for who is not green in it."""

    def __init__(self) -> None:
        self._notes: list[dict[str, Any]] = []
        self._alone: dict[tuple[str, ...], Run] = {}

    def look(self, tree: Tree, proofs: Sequence[str], limit_s: float) -> None:
        """Run many proofs in one process."""
        if proofs:
            self._notes += tree.run(proofs, limit_s * len(proofs)).notes

    def of(self, tree: Tree, proof: tuple[str, ...], limit_s: float) -> Run:
        """The run of one proof."""
        own = [[note for note in self._notes if belongs(note["node"], node)] for node in proof]
        if all(any(note["outcome"] == "passed" for note in notes) for notes in own):
            together = Run([note for notes in own for note in notes], 0, False)
            if not together.fault:
                return together
        if proof not in self._alone:
            self._alone[proof] = tree.run(proof, limit_s)
        return self._alone[proof]


def belongs(node: str, proof: str) -> bool:
    """Whether a test is what a proof names: itself, one of its cases, one in the file or folder."""
    return node == proof or node.startswith((f"{proof}[", f"{proof}::", f"{proof}/"))


def listed(source: Path) -> list[str]:
    """The files of a checkout: what git tracks or would track, and exists."""
    told = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=source, check=True, capture_output=True, text=True,
    )  # fmt: skip
    names = (name for name in dict.fromkeys(told.stdout.split("\0")) if name)
    return [name for name in names if (source / name).is_symlink() or (source / name).is_file()]


def under(tree: Tree, mutation: Mutation, limit_s: float) -> Run | Result:
    """The run of a mutation's proof under it; what came of it where it does not apply."""
    try:
        with tree.edited(mutation):
            return tree.run(mutation.proof, limit_s, stop_at_first=True)
    except MutationError as error:
        return Result(mutation, GONE, str(error))
    except UnicodeDecodeError:
        return Result(mutation, GONE, f"{mutation.file} is no text")


def witnesses(mutation: Mutation, run: Run | Result) -> tuple[str, ...]:
    """The tests that have to be green without a mutation: the one it turned red, all if it ended them."""
    if isinstance(run, Result) or not run.fault:
        return ()
    failed = run.first("failed")
    return (failed["node"],) if failed and run.first("uncollected") is None else mutation.proof


def judged(tree: Tree, plain: Plain, mutation: Mutation, run: Run | Result, limit_s: float) -> Result:
    """What came of a mutation: where its proof is red under it, whether that is green without."""
    if isinstance(run, Result):
        return run
    if stranger := run.first("stranger"):
        return Result(mutation, RED, f"the proof imports the tree itself: {stranger['said']}")
    if run.fault == "":
        return _unharmed(mutation, run)
    without = plain.of(tree, witnesses(mutation, run), limit_s)
    if without.fault:
        return Result(mutation, RED, without.fault)
    if without.first("passed") is None:
        return Result(mutation, NOT_RUN, _skipped(without))
    if uncollected := run.first("uncollected"):
        return Result(mutation, BROKEN, f"{uncollected['node']}: {uncollected['said']}")
    return Result(mutation, KILLED, run.fault, run.by)


def _unharmed(mutation: Mutation, under: Run) -> Result:
    if under.first("passed") is None:
        return Result(mutation, NOT_RUN, _skipped(under))
    return Result(mutation, SURVIVED, f"{mutation.kills} The proof passes: {' '.join(mutation.proof)}")


def _skipped(run: Run) -> str:
    note = run.first("skipped")
    return f"its proof is skipped here: {note['said']}" if note else "its proof holds no test"


def lacking(mutation: Mutation) -> str:
    """What this machine lacks of what a mutation's proof needs; empty where nothing."""
    if mutation.needs == "cuda":
        import torch  # here, so that --help and --check need none

        return "" if torch.cuda.is_available() else "needs a CUDA device"
    return f"needs {mutation.needs}" if mutation.needs else ""


def results(source: Path, chosen: Sequence[Mutation], *, jobs: int, limit_s: float) -> Iterator[Result]:
    """What came of each, in the order of `chosen`; every copy is gone at the end, however it comes."""
    scratch = Path(tempfile.mkdtemp(prefix="lzm-"))
    scratch.chmod(0o711)  # proofs about other users' files have another user there
    made: list[Tree] = []
    trees: SimpleQueue[Tree] = SimpleQueue()
    pool, plain, stopped = ThreadPoolExecutor(jobs), Plain(), threading.Event()

    def lent(work: Callable[..., Any], *operands: Any) -> Any:
        tree = trees.get()
        try:
            return work(tree, *operands)
        finally:
            trees.put(tree)

    def one(mutation: Mutation) -> Run | Result:
        if why := lacking(mutation) or ("stopped" if stopped.is_set() else ""):
            return Result(mutation, NOT_RUN, why)
        run: Run | Result = lent(under, mutation, limit_s)
        return run

    def verdict(mutation: Mutation, run: Run | Result) -> Result:
        result: Result = lent(judged, plain, mutation, run, limit_s)
        return result

    try:
        for number in range(jobs):
            made.append(Tree(source, scratch / str(number)))
            trees.put(made[-1])
        for start in range(0, len(chosen), PART):
            part = chosen[start : start + PART]
            runs = list(pool.map(one, part))
            nodes = sorted({node for pair in zip(part, runs, strict=True) for node in witnesses(*pair)})
            shares = [nodes[number::jobs] for number in range(jobs)]
            list(pool.map(lambda tree, share: plain.look(tree, share, limit_s), made, shares))
            yield from pool.map(verdict, part, runs)
    finally:
        stopped.set()
        end_children(scratch)
        for tree in made:
            tree.server.close()
        pool.shutdown(wait=True, cancel_futures=True)
        shutil.rmtree(scratch, ignore_errors=True)


def end_children(scratch: Path) -> None:
    """Kill the proofs that still run below `scratch`: only a run that was broken off has any."""
    for folder in Path("/proc").glob("[0-9]*") if Path("/proc").is_dir() else ():
        with contextlib.suppress(OSError):
            if Path(os.readlink(folder / "cwd")).is_relative_to(scratch):
                os.kill(int(folder.name), signal.SIGKILL)


def check(source: Path, chosen: Sequence[Mutation]) -> list[Result]:
    """The mutations that do not apply to the tree as it is."""
    refused = []
    for mutation in chosen:
        try:
            mutation.applied((source / mutation.file).read_text())
        except (MutationError, OSError) as error:
            refused.append(Result(mutation, GONE, str(error)))
    return refused


def wanted(every: list[Mutation], options: argparse.Namespace, names: dict[str, str]) -> list[Mutation]:
    """The mutations that the command line asks for; `names` gives the name of the row that has an id.

    Raises: MutationError: it names a row that the ledger lacks, or one without a mutation.
    """
    chosen = every
    if options.rows:
        of_row: dict[str, list[Mutation]] = {}
        for mutation in every:
            for name in {names[row] for row in mutation.rows}:
                of_row.setdefault(name, []).append(mutation)
        for row in options.rows:
            if row not in names:
                raise MutationError(f"--rows: the ledger has no row {row}")
            if names[row] not in of_row:
                raise MutationError(f"--rows: no mutation is named for {row}")
        asked = [mutation for row in options.rows for mutation in of_row[names[row]]]
        chosen = [mutation for mutation in every if mutation in asked]
    if options.part:
        number, parts = part_of(options.part)
        chosen = chosen[number - 1 :: parts]
    if options.sample is not None:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    return chosen


def part_of(text: str) -> tuple[int, int]:
    """Which part of how many `--part K/N` names.

    Raises: MutationError: it is not two numbers, or K is not one of 1 to N.
    """
    number, _, parts = text.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise MutationError(f"--part needs K/N with K from 1 to N, got {text}")
    return int(number), int(parts)


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.mutate", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rows", nargs="+", metavar="ID", help="only the mutations of these rows")
    parser.add_argument("--part", default="", metavar="K/N", help="only the Kth of N parts")
    parser.add_argument("--sample", type=int, metavar="N", help="only as many, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="what --sample draws with")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="proofs at a time, each in its copy")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="seconds a proof may take")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every result there")
    parser.add_argument("--record", type=Path, metavar="FILE", help="go on where FILE ends")
    parser.add_argument("--check", action="store_true", help="only see whether each mutation applies")
    return parser


def main(words: Sequence[str] | None = None, source: Path = ROOT) -> int:
    """Run what the command line asks for, print each verdict, and return the exit status."""
    options = arguments().parse_args(words)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return _asked(options, source)
    finally:
        signal.signal(signal.SIGTERM, before)


def _asked(options: argparse.Namespace, source: Path) -> int:
    try:
        rows = ledger.rows(source / "REQUIREMENTS.md")
        every = mutations.read(source / "tests" / "mutations", rows)
        chosen = wanted(every, options, {name: row.name for row in rows for name in row.ids})
        if options.jobs < 1 or options.limit <= 0:
            raise MutationError("--jobs needs at least 1, --limit more than 0")
    except MutationError as error:
        print(error, file=sys.stderr)
        return 2
    if options.check:
        outcomes = [shown(result) for result in check(source, chosen)]
        print(f"{len(chosen) - len(outcomes)} of {len(chosen)} apply")
    else:
        outcomes = list(_tried(source, chosen, options))
        counts = Counter(result.verdict for result in outcomes)
        print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "nothing to run")
    if options.json:
        told = [{**asdict(r.mutation), "verdict": r.verdict, "why": r.why, "by": r.by} for r in outcomes]
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    return int(any(result.verdict not in GOOD for result in outcomes))


def _tried(source: Path, chosen: Sequence[Mutation], options: argparse.Namespace) -> Iterator[Result]:
    """What came of each, told and recorded as it comes."""
    limits = {"jobs": options.jobs, "limit_s": options.limit}
    if options.record is None:
        yield from map(shown, results(source, chosen, **limits))
        return
    record = MutationRecord(options.record)
    left = ordered(mutation for mutation in chosen if record.verdict(mutation) != KILLED)
    for result in results(source, left, **limits):
        record.add(result.mutation, result.verdict, result.why, result.by)
        yield shown(result)


def shown(result: Result) -> Result:
    """Print one result as it comes, and return it."""
    by = f" by {result.by}" if result.by else ""
    print(f"{result.verdict + by:<20} {', '.join(result.mutation.rows)}: {result.why}", flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
