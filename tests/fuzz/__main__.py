"""Fuzz the parsers: `python -m tests.fuzz policy http --runs 1000000`, or `--all`.

Where atheris is installed (`pip install .[stress]`), its coverage decides which inputs are kept and changed
further; without it, or with `--plain`, every input is a change of the corpus. Each target runs in a process
of its own, `--jobs` at once. An input that breaks its target is written to `--out`, to be kept in the corpus
with the mend. `--record` writes what was run as JSON, after each target. The exit status is 1 where an input
broke its target.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import logging
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))  # where the server's parser is


@dataclass(frozen=True)
class Ran:
    """What became of one target.

    `cpu_s` is None where several ran at once, `said` is what broke or the end of what went wrong, and
    `ended` the exit status.
    """

    parser: str
    engine: str
    runs: int
    seconds: float
    cpu_s: float | None
    new_corpus: int
    crashes: int
    ended: int
    said: str


def _guided(name: str, runs: int, seed: int, out: Path) -> None:
    """Fuzz by atheris, which ends the process."""
    atheris: Any = importlib.import_module("atheris")

    from tests.fuzz.changes import MAX_LEN, mutated

    with atheris.instrument_imports(include=["layerzero", "server", "zipfile"]):
        from tests.fuzz.targets import CORPUS, TARGETS
    target = TARGETS[name]
    corpus = target.corpus()

    def run(data: bytes) -> None:
        if error := target.broken_by(data):
            _keep(out, name, data, error)

    def change(data: bytes, max_size: int, changes_seed: int) -> bytes:
        random = Random(changes_seed)
        if random.random() < 0.4:
            return bytes(atheris.Mutate(data, max_size))[:max_size]
        return mutated(data, corpus, target.words, random)[:max_size]

    found = out / "corpus" / name
    found.mkdir(parents=True, exist_ok=True)
    options = [f"-runs={runs}", f"-seed={seed}", f"-max_len={MAX_LEN}", "-timeout=25", "-rss_limit_mb=4096"]
    arguments = [name, *options, f"-artifact_prefix={out}/{name}-", str(found), str(CORPUS / name)]
    atheris.Setup(arguments, run, custom_mutator=change)
    atheris.Fuzz()


def _plain(name: str, runs: int, seed: int, out: Path) -> None:
    """Fuzz by changes of the corpus alone."""
    from tests.fuzz.changes import mutated
    from tests.fuzz.targets import TARGETS

    target, random = TARGETS[name], Random(seed)
    corpus = target.corpus()
    for _ in range(runs):
        data = mutated(random.choice(corpus), corpus, target.words, random)
        if error := target.broken_by(data):
            _keep(out, name, data, error)


def _keep(out: Path, name: str, data: bytes, error: Exception) -> None:
    """Write an input that broke its target, one for each kind of error and place."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = f"{place.tb_frame.f_code.co_filename}:{place.tb_lineno}" if place else ""
    digest = hashlib.sha256(f"{type(error).__name__} {where}".encode()).hexdigest()[:10]
    path = out / f"{name}-{digest}.input"
    if not path.exists():
        path.write_bytes(data)
        print(f"BROKEN {name}: {type(error).__name__}: {str(error)[:200]} at {where}: {path}", flush=True)


def _one(name: str, given: argparse.Namespace) -> Ran:
    """A target in a process of its own."""
    engine = "plain" if given.plain or not importlib.util.find_spec("atheris") else "guided"
    words = [sys.executable, "-m", "tests.fuzz", name, "--here", "--runs", f"{given.runs}"]
    words += ["--seed", f"{given.seed}", "--out", str(given.out), *(["--plain"] if given.plain else [])]
    found, began_s, before_s = given.out / "corpus" / name, time.monotonic(), _children_s()
    kept = len(list(found.glob("*")))
    try:
        done = subprocess.run(
            words, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=given.limit_s
        )
        broken = [line for line in done.stdout.splitlines() if line.startswith("BROKEN")]
        ended = done.returncode or int(bool(broken))
        said = "\n".join(broken) or (done.stderr[-2000:] if ended else "")
    except subprocess.TimeoutExpired:
        broken, ended, said = [], 1, f"not through after {given.limit_s:g} s"
    cpu_s = round(_children_s() - before_s, 1) if given.jobs == 1 else None
    seconds, new = round(time.monotonic() - began_s, 1), len(list(found.glob("*"))) - kept
    return Ran(name, engine, given.runs, seconds, cpu_s, new, len(broken), ended, said)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _recorder(path: Path | None) -> Callable[[list[dict[str, Any]]], None]:
    """What writes rows to a file, where there is one."""
    if path is None:
        return lambda rows: None
    from benchmarks.harness import environment, write  # here: it imports torch

    facts = environment()
    return lambda rows: write(path, {"environment": facts, "rows": rows})


def _all(names: list[str], given: argparse.Namespace, one: Callable[[str, argparse.Namespace], Ran]) -> int:
    """Every target, told and recorded as it ends; the exit status."""
    rows: list[dict[str, Any]] = []
    record = _recorder(given.record)
    with ThreadPoolExecutor(max(1, given.jobs)) as pool:
        for ran in pool.map(lambda name: one(name, given), names):
            state = "BROKEN" if ran.ended else "ok"
            print(f"{ran.parser:16} {ran.runs} runs {ran.seconds:8.1f} s {state}", flush=True)
            print(ran.said, end="\n" if ran.said else "")
            rows.append(asdict(ran))
            record(rows)
    return int(any(row["ended"] for row in rows))


def main() -> int:
    """Read the command line and fuzz; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help="targets; `python -m tests.fuzz` prints them")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=3600.0)
    parser.add_argument("--plain", action="store_true", help="not guided by coverage: faster by a factor")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "fuzz")
    parser.add_argument("--record", type=Path, help="a JSON file of what was run")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.here:
        logging.getLogger("layerzero").disabled = True
        engine = _guided if importlib.util.find_spec("atheris") and not given.plain else _plain
        engine(given.names[0], given.runs, given.seed, given.out.resolve())
        return 0
    from tests.fuzz.targets import TARGETS

    unknown = sorted(set(given.names) - set(TARGETS))
    if unknown or not (given.names or given.all):
        parser.error(f"names need some of {', '.join(TARGETS)}, got {', '.join(unknown) or 'none'}")
    return _all(list(TARGETS) if given.all else given.names, given, _one)


if __name__ == "__main__":
    raise SystemExit(main())
