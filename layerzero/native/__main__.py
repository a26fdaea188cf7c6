"""`python -m layerzero.native`: compile the awaited path's twin and the journal's, once for this machine."""

from __future__ import annotations

import sys
import time

from layerzero.native import FAST_PATH, KERNEL_NOTES
from layerzero.spec.errors import BackendNotAvailableError


def main() -> int:
    """Compile and load; 0 also where that is impossible, since everything works without."""
    started = time.perf_counter()
    if not FAST_PATH.compiled:
        print("layerzero.native: compiling, once for this machine (about 20 s) ...", flush=True)
    try:
        KERNEL_NOTES.load()
        FAST_PATH.load()
    except BackendNotAvailableError as error:
        print(f"layerzero.native: goes without: {error}")
        return 0
    print(f"layerzero.native: ready after {time.perf_counter() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
