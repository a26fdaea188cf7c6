"""Write a million measurements and say how large the file is, how long it took, and what reading costs.

Run `python -m benchmarks.perfdb_size --rows 1000000 --json benchmarks/results/perfdb_size.json`. Rows are of
attention calls with eight sizes each, five kernels a site: what tuning writes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import anyio

from benchmarks.harness import environment, write
from layerzero.perfdb import BenchmarkCase, Environment, Measurement
from layerzero.perfdb.store import PerfDB, read_rows
from layerzero.spec.hardware import probe

BATCH = 5000
KERNELS = 5
LIMIT_MB = 500


def row(number: int) -> Measurement:
    """The measurement of that number: a kernel of five on the site that the number's rest names."""
    length = number // KERNELS + 1
    dims = {"B": 1, "D": 128, "Dv": 128, "G": 4, "Hk": 8, "Hq": 32, "Sk": length, "Sq": length}
    site = BenchmarkCase(
        op="attention", dtype="bfloat16", dtypes=("bfloat16",), features=("causal", "gqa"), layout="BHSD",
        dims=tuple(sorted(dims.items())),
    )  # fmt: skip
    return Measurement(
        case=site, kernel=f"vendor.attention.variant{number % KERNELS}", version="vendor-library 10.20.30",
        median_us=10.5 + number, p95_us=11.25 + number, variance=0.5, samples=15, timestamp=1_790_000_000,
    )  # fmt: skip


async def fill(path: Path, rows: int, here: Environment) -> float:
    """Write `rows` rows; the seconds it took."""
    started = time.perf_counter()
    async with PerfDB(path) as db:
        for start in range(0, rows, BATCH):
            await db.add(here, [row(n) for n in range(start, min(rows, start + BATCH))])
    return time.perf_counter() - started


def main() -> None:
    """Fill, read, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    here = Environment.of_hardware(probe("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "perf.sqlite"
        took = anyio.run(fill, path, options.rows, here)
        size = path.stat().st_size
        started = time.perf_counter()
        read = len(read_rows(path, here))
        reading = time.perf_counter() - started
    result = {
        "rows": options.rows, "bytes": size, "bytes_a_row": round(size / options.rows, 1),
        "mb_a_million_rows": round(size / options.rows, 1), "limit_mb": LIMIT_MB,
        "write_rows_a_second": round(options.rows / took), "read_rows": read,
        "read_seconds": round(reading, 2),
    }  # fmt: skip
    print(result)
    if options.json is not None:
        write(options.json, {"environment": environment(("aiosqlite",)), "result": result})


if __name__ == "__main__":
    main()
