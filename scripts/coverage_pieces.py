"""The lines that the tests run, a few files at a time, in as many runs as the time for one needs.

    python -m scripts.coverage_pieces                        what is left, for 16 minutes; then the report
    python -m scripts.coverage_pieces --minutes 240          all of it in one run
    python -m scripts.coverage_pieces --only tests/observe   one folder, and its report

A piece is at most eight files of one folder, on two workers; what it ran is kept in build/coverage until the
tree changes. The exit status is 0 where all pieces ran and enough lines with them, 1 where a test failed or
lines are missing, 3 where pieces are left: run it again.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STORE = ROOT / "build" / "coverage"
# What needs a card, measures, or reads documents runs no line that others do not.
LEFT_OUT = frozenset({"cuda", "benchmarks", "docs", "data", "mutations"})
FILES, MINUTES, LEFT = 8, 16.0, 3
NOTHING_COLLECTED = 5


def pieces(only: str = "") -> Iterator[tuple[str, tuple[Path, ...]]]:
    """Names and test files of all pieces, or of those whose folder is `only` or in it."""
    tests = ROOT / "tests"
    folders = sorted({path.parent for path in tests.rglob("test_*.py")} - {tests})
    for folder in folders:
        where = folder.relative_to(ROOT)
        if where.parts[1] in LEFT_OUT or not (where / "x").is_relative_to(only):
            continue
        files = sorted(folder.glob("test_*.py"))
        for number, start in enumerate(range(0, len(files), FILES)):
            yield f"{'.'.join(where.parts[1:])}.{number}", tuple(files[start : start + FILES])


def tree_digest() -> str:
    """The commit with what is changed in files that git knows; the same for the same lines."""
    asked = (["rev-parse", "HEAD"], ["diff", "HEAD"])
    told = [subprocess.run(["git", *words], cwd=ROOT, capture_output=True).stdout for words in asked]
    return hashlib.sha256(b"\0".join(told)).hexdigest()[:16]


def run_piece(files: Sequence[Path], done: Path) -> bool:
    """Run one piece and keep its lines in `done`; False, and nothing kept, where a test failed."""
    room = done.with_suffix(".room")
    shutil.rmtree(room, ignore_errors=True)
    room.mkdir(parents=True)
    environment = {**os.environ, "COVERAGE_FILE": str(room / "data")}
    environment.setdefault("OMP_NUM_THREADS", "1")
    words = ["-q", "-p", "no:cacheprovider", "-o", "timeout=900", "--numprocesses=2", "--dist=loadfile"]
    ran = subprocess.run(
        [sys.executable, "-m", "coverage", "run", "-m", "pytest", *words, *map(str, files)],
        cwd=ROOT, env=environment,
    )  # fmt: skip
    good = ran.returncode in (0, NOTHING_COLLECTED)
    if good and any(room.iterdir()):
        combine(sorted(room.iterdir()), done)
    elif good:
        done.touch()
    shutil.rmtree(room)
    return good


def combine(sources: Sequence[Path], into: Path) -> None:
    """The lines of all files of `sources` in one; they stay."""
    words = ["combine", "--keep", "--quiet", f"--data-file={into}", *map(str, sources)]
    subprocess.run([sys.executable, "-m", "coverage", *words], cwd=ROOT, check=True)


def report(data: Path, bound: bool) -> int:
    """Print which lines did not run; 1 where they are too many and `bound` asks for it."""
    words = ["report", f"--data-file={data}", *([] if bound else ["--fail-under=0"])]
    return int(subprocess.run([sys.executable, "-m", "coverage", *words], cwd=ROOT).returncode != 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is left; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=MINUTES, help="no piece begins later (16)")
    parser.add_argument("--only", default="", help="a folder of tests")
    options = parser.parse_args(argv)
    store, begun = STORE / tree_digest(), time.monotonic()
    for old in STORE.glob("*"):
        if old != store:
            shutil.rmtree(old)
    every = dict(pieces(options.only))
    left = {name: files for name, files in every.items() if not (store / f"{name}.done").exists()}
    failed: list[str] = []
    for name, files in left.items():
        if time.monotonic() - begun > options.minutes * 60:
            break
        print(f"== {name}", flush=True)
        if not run_piece(files, store / f"{name}.done"):
            failed.append(name)
    done = [path for name in every if (path := store / f"{name}.done").exists()]
    print(f"{len(done)} of {len(every)} pieces ran; failed: {', '.join(failed) or 'none'}", flush=True)
    if failed or len(done) < len(every):
        return 1 if failed else LEFT
    combine([path for path in done if path.stat().st_size], store / "all")
    return report(store / "all", bound=not options.only)


if __name__ == "__main__":
    sys.exit(main())
