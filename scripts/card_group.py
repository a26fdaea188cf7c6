"""Run the tests of some kernels, then measure how accurate those kernels are, in one process.

    python -m scripts.card_group TESTS.json ACCURACY.json PYTEST_OPTIONS...

Both make the calls of `tests/backends/cases.py`, so what a library compiles it compiles once. ACCURACY.json
is `benchmarks.accuracy`'s table of the kernels that the contract ran. The exit status is pytest's.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from scripts.record_tests import record
from scripts.support_matrix import PROOFS


def main() -> int:
    """Tests first: a table without them says little."""
    target, accuracy, *options = sys.argv[1:]
    status, found = record(Path(target), options)
    ran = set()
    for test, entry in found.items():
        parameter = re.search(r"\[([a-z0-9_.]+)\]$", test)
        if test.startswith(PROOFS["cuda"]) and parameter is not None and entry["outcome"] != "skipped":
            ran.add(parameter[1])
    if ran:
        from benchmarks.accuracy import table_of
        from tests.backends import cases

        table_of([kernel for kernel in cases.RUNNABLE if kernel.id in ran], Path(accuracy))
    return status


if __name__ == "__main__":
    sys.exit(main())
