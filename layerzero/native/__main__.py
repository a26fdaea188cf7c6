"""`python -m layerzero.native`: compile the awaited path's twin and the journal's, once for this machine.

With `--all` the CPU kernels' modules as well, side by side.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from layerzero.native import FAST_PATH, KERNEL_NOTES, building
from layerzero.native.compiling import library
from layerzero.spec.errors import BackendNotAvailableError


def main(arguments: list[str] | None = None) -> int:
    """Compile and load; 0 also where that is impossible, since everything works without."""
    parser = argparse.ArgumentParser(prog="python -m layerzero.native", description=__doc__)
    parser.add_argument("--all", action="store_true", help="the CPU kernels' modules as well")
    kernels = parser.parse_args(arguments).all
    started = time.perf_counter()
    try:
        if kernels or not FAST_PATH.compiled:
            print("layerzero.native: compiling, once for this machine ...", flush=True)
        if kernels:
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                list(pool.map(lambda name: library(name).get(), building.SOURCES))
        KERNEL_NOTES.load()
        FAST_PATH.load()
    except BackendNotAvailableError as error:
        print(f"layerzero.native: goes without: {error}")
        return 0
    print(f"layerzero.native: ready after {time.perf_counter() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
