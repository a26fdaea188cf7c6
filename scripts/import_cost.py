"""Measure what `import layerzero` costs after `import torch`: `python -m scripts.import_cost`."""

import json
import os
import statistics
import subprocess
import sys

ROUNDS = 9
PROBE = """
import json, sys, time
import torch
before, begin, cpu = set(sys.modules), time.perf_counter(), time.process_time()
import layerzero
spent, cpu = time.perf_counter() - begin, time.process_time() - cpu
added = sorted({name.partition(".")[0] for name in set(sys.modules) - before})
print(json.dumps({"ms": spent * 1e3, "ms of CPU time": cpu * 1e3, "added": added}))
"""


def main() -> int:
    """Print the median and the worst of nine fresh interpreters, and which top-level modules came along."""
    # An installed package has its bytecode; the first round writes that of a checkout and is not counted.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", PROBE]
    runs = [
        json.loads(subprocess.run(command, check=True, capture_output=True, env=env).stdout)
        for _ in range(1 + ROUNDS)
    ][1:]
    for unit in ("ms", "ms of CPU time"):
        times = [run[unit] for run in runs]
        print(f"import layerzero: {statistics.median(times):.1f} {unit}, worst of {ROUNDS}: {max(times):.1f}")
    print("loads besides torch:", " ".join(runs[0]["added"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
