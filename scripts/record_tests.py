"""Run tests and write what came of each as JSON, with the environment they ran in.

    python -m scripts.record_tests benchmarks/results/cuda_tests_h200.json tests/cuda

The file is written anew before and after every test and names the one that runs, so that a process that dies
loses nothing and says where. The exit status is pytest's.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import environment, write

ORDER = ("passed", "skipped", "failed")


class Recorder:
    """A pytest plugin: one entry a test with its name, outcome, seconds and why it did not pass."""

    def __init__(self, target: Path, options: list[str]) -> None:
        self.target = target
        self.found: dict[str, dict[str, Any]] = {}
        self.record: dict[str, Any] = {"environment": environment(), "options": options, "running": None}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note which test runs."""
        self.record["running"] = nodeid
        self.write()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the worst phase of a test; its seconds are those of all three."""
        entry = self.found.setdefault(
            report.nodeid, {"test": report.nodeid, "outcome": "passed", "seconds": 0.0}
        )
        entry["seconds"] = round(entry["seconds"] + report.duration, 3)
        if ORDER.index(report.outcome) > ORDER.index(entry["outcome"]):
            entry |= {"outcome": report.outcome, "why": _why(report)}

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Write what is known now."""
        del nodeid
        self.record["running"] = None
        self.write()

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be collected is an entry too."""
        if report.failed:
            self.found[report.nodeid] = {
                "test": report.nodeid, "outcome": "failed", "seconds": 0.0, "why": _why(report),
            }  # fmt: skip

    def write(self) -> None:
        """The record as it stands."""
        tests = list(self.found.values())
        counts = dict(Counter(entry["outcome"] for entry in tests))
        write(self.target, self.record | {"counts": counts, "tests": tests})


def _why(report: Any) -> str:
    """A skip's reason, or the end of a failure."""
    said = report.longrepr
    return str(said[2] if isinstance(said, tuple) else said)[-1500:]


def record(target: Path, options: list[str]) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run pytest with `options`, writing to `target`; its exit status, and the entries by test."""
    recorder = Recorder(target, options)
    recorder.write()
    status = int(pytest.main(options, plugins=[recorder]))
    recorder.write()
    print(f"{target}: {dict(Counter(entry['outcome'] for entry in recorder.found.values()))}")
    return status, recorder.found


def main() -> int:
    """Run pytest over the given paths and options."""
    target, *options = sys.argv[1:]
    return record(Path(target), options)[0]


if __name__ == "__main__":
    sys.exit(main())
