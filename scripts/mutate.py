"""Breaks each feature of the ledger in the smallest way, in a copy of the tree, and wants its proof red.

    python -m scripts.mutate                       every mutation of tests/mutations
    python -m scripts.mutate --rows T9 PS-010      those of some rows
    python -m scripts.mutate --sample 20 --seed 3  as many drawn at random
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from scripts import ledger, mutations
from scripts.mutations import Mutation, MutationError

ROOT = Path(__file__).resolve().parents[1]
RUNNER = Path(__file__).resolve().parent / "proof_run.py"
LIMIT_S = 900.0
KILLED, SURVIVED, GONE = "killed", "SURVIVED", "does not apply"
RED, BROKEN, NOT_RUN = "proof not green", "breaks the import", "not run"
GOOD = (KILLED, NOT_RUN)


@dataclass(frozen=True, slots=True)
class Run:
    """What one process of pytest showed: its notes, its exit status, whether it was ended for time."""

    notes: list[dict[str, Any]]
    status: int
    late: bool

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
        return f"pytest ended with {self.status}" if self.status not in (0, 5) else ""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one mutation, and why."""

    mutation: Mutation
    verdict: str
    why: str


class Tree:
    """A copy of the checkout in which one proof at a time is run; nothing in it reaches the checkout."""

    def __init__(self, source: Path, place: Path) -> None:
        self.source, self.place = source, place
        self.root, self.temp = place / "c", place / "t"  # short: a socket's path is
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
        command = [
            sys.executable, str(RUNNER), str(notes), str(self.source), "-q", "-p", "no:cacheprovider", "-p",
            "no:xdist", *(["-x"] if stop_at_first else []), *nodes,
        ]  # fmt: skip
        variables = os.environ | {
            "PYTHONPATH": str(self.root), "TMPDIR": str(self.temp), "HYPOTHESIS_PROFILE": "mutation",
        }  # fmt: skip
        try:
            with (self.temp / "out").open("wb") as out:
                process = subprocess.Popen(
                    command, cwd=self.root, env=variables, stdin=subprocess.DEVNULL, stdout=out,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
                late = False
                try:
                    process.wait(limit_s)
                except subprocess.TimeoutExpired:
                    late = True
                finally:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            lines = notes.read_text().splitlines()
            return Run([json.loads(line) for line in lines], process.returncode, late)
        finally:
            shutil.rmtree(self.temp, ignore_errors=True)
            shutil.rmtree(self.root / ".hypothesis", ignore_errors=True)  # it remembers failing examples


def listed(source: Path) -> list[str]:
    """The files of a checkout: what git tracks or would track, and exists."""
    told = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=source, check=True, capture_output=True, text=True,
    )  # fmt: skip
    names = (name for name in dict.fromkeys(told.stdout.split("\0")) if name)
    return [name for name in names if (source / name).is_symlink() or (source / name).is_file()]


def tried(tree: Tree, mutation: Mutation, limit_s: float) -> Result:
    """Apply one mutation, run its proof, and where that is red run it without the mutation too."""
    try:
        with tree.edited(mutation):
            under = tree.run(mutation.proof, limit_s, stop_at_first=True)
    except MutationError as error:
        return Result(mutation, GONE, str(error))
    except UnicodeDecodeError:
        return Result(mutation, GONE, f"{mutation.file} is no text")
    if stranger := under.first("stranger"):
        return Result(mutation, RED, f"the proof imports the tree itself: {stranger['said']}")
    if under.fault == "":
        return _unharmed(mutation, under)
    plain = tree.run(mutation.proof, limit_s)
    if plain.fault:
        return Result(mutation, RED, plain.fault)
    if plain.first("passed") is None:
        return Result(mutation, NOT_RUN, _skipped(plain))
    if uncollected := under.first("uncollected"):
        return Result(mutation, BROKEN, f"{uncollected['node']}: {uncollected['said']}")
    return Result(mutation, KILLED, under.fault)


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
    trees: SimpleQueue[Tree] = SimpleQueue()
    pool = ThreadPoolExecutor(jobs)
    stopped = threading.Event()

    def one(mutation: Mutation) -> Result:
        if why := lacking(mutation):
            return Result(mutation, NOT_RUN, why)
        tree = trees.get()
        try:
            return (
                Result(mutation, NOT_RUN, "stopped") if stopped.is_set() else tried(tree, mutation, limit_s)
            )
        finally:
            trees.put(tree)

    try:
        for number in range(jobs):
            trees.put(Tree(source, scratch / str(number)))
        yield from pool.map(one, chosen)
    finally:
        stopped.set()
        end_children(scratch)
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
    if options.sample is not None:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    return chosen


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.mutate", description=__doc__.split("\n")[0])
    parser.add_argument("--rows", nargs="+", metavar="ID", help="only the mutations of these rows")
    parser.add_argument("--sample", type=int, metavar="N", help="only as many, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="what --sample draws with")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="proofs at a time, each in its copy")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="seconds a proof may take")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every result there")
    parser.add_argument("--check", action="store_true", help="only see whether each mutation applies")
    return parser


def main(words: Sequence[str] | None = None, source: Path = ROOT) -> int:
    """Run what the command line asks for, print each verdict, and return the exit status."""
    options = arguments().parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        rows = ledger.rows(source / "docs" / "ledger.md")
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
        outcomes = [shown(r) for r in results(source, chosen, jobs=options.jobs, limit_s=options.limit)]
        counts = Counter(result.verdict for result in outcomes)
        print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "nothing to run")
    if options.json:
        told = [{**asdict(r.mutation), "verdict": r.verdict, "why": r.why} for r in outcomes]
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    return int(any(result.verdict not in GOOD for result in outcomes))


def shown(result: Result) -> Result:
    """Print one result as it comes, and return it."""
    print(f"{result.verdict:<15} {', '.join(result.mutation.rows)}: {result.why}", flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
