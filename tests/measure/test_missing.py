"""What is measured again: calls without a row, and calls that a kernel takes which came later."""

from __future__ import annotations

import msgspec

from layerzero.measure.compare import find_uncovered
from layerzero.perfdb.record import BenchmarkCase, Measurement

SITES = [BenchmarkCase(op="rms_norm", dtype="bfloat16", dims=(("C", 128), ("N", n))) for n in (1, 2, 3)]


def row(site: BenchmarkCase, kernel: str, at: int) -> Measurement:
    return Measurement(
        case=site, kernel=kernel, timestamp=at, median_us=9.0, p95_us=9.0, variance=0.0, samples=15
    )


def test_a_kernel_that_came_later_makes_a_site_miss() -> None:
    """A site that was measured before a kernel's first time misses it; one measured after refused it."""
    rows = [
        row(SITES[0], "old", 10),
        row(SITES[1], "old", 30),
        row(SITES[1], "new", 30),
        row(SITES[2], "old", 40),
    ]
    asked = [(site, {"old", "new"}) for site in SITES]
    assert find_uncovered(asked, rows) == [True, False, False]
    assert find_uncovered([(site, {"old"}) for site in SITES], rows) == [False] * 3, (
        "it does not take the calls"
    )
    assert find_uncovered(asked, []) == [True] * 3


def test_a_kernel_without_any_time_is_tried_once() -> None:
    """A kernel that may fail everywhere has one call of its op measured again, not all of them."""
    rows = [row(site, "old", 10) for site in SITES]
    assert find_uncovered([(site, {"old", "never"}) for site in SITES], rows) == [True, False, False]


def test_a_kernel_that_casts_is_known_under_the_call() -> None:
    """A row under the type that a kernel computes in counts for the call's own site."""
    cast = msgspec.structs.replace(SITES[0], dtype="float16")
    rows = [row(SITES[0], "old", 10), row(cast, "casts", 10), row(SITES[1], "casts", 5)]
    assert find_uncovered([(SITES[0], {"old", "casts"})], rows) == [False]
