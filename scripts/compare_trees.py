"""Two trees of this repository in one run, in turns: what each row costs now over what it cost then.

    python -m scripts.compare_trees OLD_TREE [--bench hot_path|demo] [--rounds N] [--out FILE]

OLD_TREE is a checkout, as `git worktree add --detach DIR COMMIT` makes one. Both are measured by this tree's
`benchmarks/tree_rows.py`, in processes of their own that take turns; a ratio is the median over the rounds of
new over old, with its quartiles. Above 1: it costs more now.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import environment, write

ROOT = Path(__file__).resolve().parents[1]


def measured(tree: Path, bench: str) -> dict[str, float]:
    """Microseconds by row, with the package of a tree.

    Raises: RuntimeError: another tree's package was imported, or the rows could not be measured.
    """
    told = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "tree_rows.py"), bench],
        cwd=tree, env=told, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{tree}: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    if Path(answer["tree"]) != tree.resolve():
        raise RuntimeError(f"the package of {tree} needs to be measured, got that of {answer['tree']}")
    rows: dict[str, float] = answer["us"]
    return rows


def compared(old: list[dict[str, float]], new: list[dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Medians of both and the ratios round by round, of the rows that both have."""
    rows: dict[str, dict[str, Any]] = {}
    for name in sorted(set(old[0]) & set(new[0])):
        before, after = [one[name] for one in old], [one[name] for one in new]
        ratios = sorted(now / then for now, then in zip(after, before, strict=True))
        quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        rows[name] = {
            "old_us": round(statistics.median(before), 3),
            "new_us": round(statistics.median(after), 3),
            "ratio": round(statistics.median(ratios), 3),
            "quartiles": [round(quartiles[0], 3), round(quartiles[2], 3)],
            "rounds": [round(ratio, 3) for ratio in ratios],
        }
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure both in turns, print, write where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("old", type=Path, help="a checkout of the older commit")
    parser.add_argument("--bench", choices=("hot_path", "demo"), default="hot_path")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, help="where the JSON goes")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds needs to be at least 1, got {options.rounds}")
    trees = {"old": options.old.resolve(), "new": ROOT}
    found: dict[str, list[dict[str, float]]] = {"old": [], "new": []}
    for number in range(options.rounds):
        for side in ("old", "new") if number % 2 else ("new", "old"):
            found[side].append(measured(trees[side], options.bench))
    rows = compared(found["old"], found["new"])
    git = ["git", "-C", str(trees["old"]), "rev-parse", "HEAD"]
    old_commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    record: dict[str, Any] = {"environment": environment(), "old": old_commit, "rounds": options.rounds}
    record |= {"rows": rows, "worst": max(row["ratio"] for row in rows.values())}
    for name, row in rows.items():
        print(f"{name:40} {row['old_us']:10.2f} {row['new_us']:10.2f} {row['ratio']:7.3f} {row['quartiles']}")
    if options.out is not None:
        write(options.out, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
