"""What repeated work leaves behind: bytes that Python still holds, round after round of the same."""

from __future__ import annotations

import gc
import itertools
import os
import tracemalloc
from collections.abc import Callable

WARM_ROUNDS, ROUNDS = 12, 5
# The stress suite repeats each round so many times more.
TIMES = 200 if os.environ.get("LZ_STRESS") == "1" else 1


def growth_of(work: Callable[[], object]) -> int:
    """The fewest bytes by which one of some equal rounds grew what is held, after rounds that fill caches.

    A leak grows in every round; what is filled, cleared or counted now and then stands still in one of them.
    """
    for _ in range(WARM_ROUNDS):
        work()
    gc.collect()
    gc.freeze()  # what other tests hold takes longest to look through, and is not counted
    tracemalloc.start()
    try:
        sizes = []
        for _ in range(ROUNDS + 1):
            for _ in range(TIMES):
                work()
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    return min(after - before for before, after in itertools.pairwise(sizes)) // TIMES
