"""A kernel's curve: the floor of a launch, the multiple of the roofs, found out of a few points."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.selection.cost.latency_model import LatencyModel, fit


@given(st.floats(0.5, 500.0), st.floats(0.5, 50.0), st.lists(st.floats(0.95, 1.05), min_size=12, max_size=12))
def test_floor_and_multiple_are_found_again(floor: float, multiple: float, noise: list[float]) -> None:
    """Points over both regimes, off by up to 5 %, give a curve that is right within 25 % everywhere."""
    true = LatencyModel(floor, multiple)
    sizes = [floor / multiple * 2.0**step for step in range(-6, 6)]
    found = fit([(ideal, true.us(ideal) * off) for ideal, off in zip(sizes, noise, strict=True)])
    assert found.point_count == 12
    for ideal in sizes:
        assert abs(math.log(found.us(ideal) / true.us(ideal))) < math.log(1.25)


def test_one_point_lies_on_its_curve_within_a_factor_of_two() -> None:
    """A single measurement still gives a curve, which no longer call undercuts."""
    curve = fit([(2.0, 40.0)])
    assert 20.0 < curve.us(2.0) < 80.0
    assert curve.us(1.0) <= curve.us(2.0) <= curve.us(1e6)


def test_a_few_points_do_not_make_a_floor() -> None:
    """A kernel that was measured once, at a large size, is priced down to the floor of the others."""
    curve = fit([(400.0, 5000.0)], highest_us=250.0)
    assert curve.us(400.0) == pytest.approx(5000.0) and curve.floor_us == 250.0
    assert curve.us(20.0) < 400.0 < fit([(400.0, 5000.0)]).us(20.0)


def test_above_the_floor_size_decides() -> None:
    """Where the roofs need far more than a launch, the time grows with them."""
    curve = LatencyModel(10.0, 2.0)
    assert curve.us(1e4) == pytest.approx(2e4, rel=1e-3)
    assert curve.us(0.0) == 10.0
