"""Run tests and write what came of each as JSON, with the environment they ran in.

    python -m scripts.record_tests benchmarks/results/cuda_tests_h200.json tests/cuda

The exit status is pytest's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.harness import environment


def outcomes(junit: Path) -> list[dict[str, Any]]:
    """One entry a test: name, outcome, seconds, and why it was skipped or failed."""
    found = []
    for case in ET.parse(junit).iter("testcase"):
        said = next(iter(case), None)
        outcome = {"failure": "failed", "error": "failed", "skipped": "skipped"}.get(
            said.tag if said is not None else "", "passed"
        )
        entry: dict[str, Any] = {
            "test": f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}",
            "outcome": outcome,
            "seconds": round(float(case.get("time", 0)), 3),
        }
        if outcome != "passed" and said is not None:
            entry["why"] = (said.get("message") or "")[:500]
        found.append(entry)
    return found


def main() -> int:
    """Run pytest over the given paths and options."""
    target, *options = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", f"--junitxml={junit}", *options]
        status = subprocess.run(command, check=False).returncode
        tests = outcomes(junit)
    counted = Counter(entry["outcome"] for entry in tests)
    record = {"environment": environment(), "options": options, "counts": dict(counted), "tests": tests}
    Path(target).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{target}: {dict(counted)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
