"""What a decoding step costs the paged cache: every way is measured and gives its pages back."""

from __future__ import annotations

from benchmarks.paged import steps


def test_every_way_is_measured_and_leaks_nothing() -> None:
    """Objects and numbers, reserved and page by page, and a crowd that changes."""
    found = steps(callers=3, context=20, tokens=4, page_size=8)
    ways = {f"{way}, {how}" for way in ("objects", "numbers") for how in ("reserved", "page by page")}
    assert {name for name, row in found.items() if isinstance(row, dict)} == ways | {"changing, reserved"}
    assert all(row["best_us"] > 0 for row in found.values() if isinstance(row, dict))
    assert found["pages_leaked"] == 0
