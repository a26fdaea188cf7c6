"""Measure what `import layerzero` costs after `import torch`: `python -m scripts.import_cost`."""

import json
import statistics
import subprocess
import sys

ROUNDS = 9
PROBE = """
import json, sys, time
import torch
before, begin = set(sys.modules), time.perf_counter()
import layerzero
spent = time.perf_counter() - begin
added = sorted({name.partition(".")[0] for name in set(sys.modules) - before})
print(json.dumps({"ms": spent * 1e3, "added": added}))
"""


def main() -> int:
    """Print the median and the worst of nine fresh interpreters, and which top-level modules came along."""
    runs = [
        json.loads(subprocess.run([sys.executable, "-c", PROBE], check=True, capture_output=True).stdout)
        for _ in range(ROUNDS)
    ]
    times = [run["ms"] for run in runs]
    print(
        f"import layerzero: {statistics.median(times):.1f} ms median, {max(times):.1f} ms worst of {ROUNDS}"
    )
    print("loads besides torch:", " ".join(runs[0]["added"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
