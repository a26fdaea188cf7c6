"""Values between places: what was measured comes back, and what stands together counts about as one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.perfdb import BenchmarkCase
from layerzero.selection.cost.kriging import NOISE, covariance, covariance_matrix
from layerzero.selection.cost.measured_points import (
    LAYOUT_OCTAVES,
    MAX_CLUSTER,
    MeasuredPoint,
    split_clusters,
)

POINT = st.lists(st.floats(0.0, 12.0), min_size=2, max_size=2)


def value(positions: Sequence[Sequence[float]], values: Sequence[float], at: Sequence[float]) -> float:
    weights = np.linalg.solve(covariance_matrix(positions), values)
    return float(covariance([math.dist(at, there) for there in positions]) @ weights)


@given(st.lists(st.tuples(POINT, st.floats(-3.0, 3.0)), min_size=1, max_size=12))
def test_the_weights_solve_their_equations(measured: list[tuple[list[float], float]]) -> None:
    """At each place the sum over all, and its own share of noise, is what was measured there."""
    positions, values = [p for p, _ in measured], [v for _, v in measured]
    weights = np.linalg.solve(covariance_matrix(positions), values)
    for at, own, weight in zip(positions, values, weights, strict=True):
        assert value(positions, values, at) + NOISE * weight == pytest.approx(own, abs=1e-6)


def test_a_crowd_does_not_outvote_the_rest() -> None:
    """Between one place and ten that stand together on the other side, the value is near the middle."""
    crowd = [[4.0, 0.01 * n] for n in range(10)]
    found = value([[0.0, 0.0], *crowd], [0.0] + [1.0] * 10, [2.0, 0.0])
    assert 0.4 < found < 0.6


def test_a_trend_is_followed_between_places() -> None:
    """Between two places the value lies between theirs, nearer to the nearer one's."""
    near, far = value([[0.0], [4.0]], [0.0, 1.0], [1.0]), value([[0.0], [4.0]], [0.0, 1.0], [3.0])
    assert 0.1 < near < 0.4 and 0.6 < far < 0.9


def paged(m: int, p: int) -> MeasuredPoint:
    dims = (("B", 16), ("D", 128), ("M", m), ("N", 16 * m), ("P", p))
    return MeasuredPoint(BenchmarkCase(op="paged_attention", dtype="bfloat16", dims=dims), "eager", 1.0)


def test_pages_stand_where_their_tokens_do() -> None:
    """Sequences of equal length in pages of another size stand nearer than sequences twice as long."""
    [crowd] = split_clusters([paged(64, 16), paged(32, 32), paged(128, 16)])
    own, other, longer = crowd.distances(paged(64, 16).position)
    assert own == 0.0 < other < longer == pytest.approx(1.0, abs=0.01)


def dense(b: int, hq: int, hk: int) -> MeasuredPoint:
    dims = (("B", b), ("D", 128), ("G", hq // hk), ("Hk", hk), ("Hq", hq), ("Sk", 4096), ("Sq", 1))
    return MeasuredPoint(BenchmarkCase(op="attention", dtype="bfloat16", dims=dims), "eager", 1.0)


def test_sequences_and_heads_fill_a_machine_alike() -> None:
    """Twice the sequences of half the heads stand nearer than twice the sequences."""
    [crowd] = split_clusters([dense(8, 32, 8), dense(16, 16, 4), dense(16, 32, 8)])
    own, alike, more = crowd.distances(dense(8, 32, 8).position)
    assert own == 0.0 < alike < more


def test_kernels_with_places_in_common_get_their_own_weights() -> None:
    """A kernel's weights are those that it would have if no other kernel had been measured."""
    sizes = [(b, hq) for b in (1, 4, 16, 64) for hq in (8, 16, 32)]
    places = [dense(b, hq, 8) for b, hq in sizes]
    for n, place in enumerate(places):
        place.times = place.offsets = {"a": 0.1 * n} | ({"b": math.sin(n)} if n % 3 else {})
    [crowd], [alone] = split_clusters(places), split_clusters(places)
    crowd.weights("a")
    assert np.array_equal(crowd.weights("b"), alone.weights("b"))


def test_an_axis_that_nobody_has_counts() -> None:
    """A call of another layout stands half an octave from every place, with no axis for it among them."""
    place = MeasuredPoint(
        BenchmarkCase(op="rms_norm", dtype="float32", layout="a", dims=(("C", 64),)), "eager", 1.0
    )
    other = MeasuredPoint(
        BenchmarkCase(op="rms_norm", dtype="float32", layout="b", dims=(("C", 64),)), "eager", 1.0
    )
    [crowd] = split_clusters([place])
    assert crowd.distances(other.position) == [pytest.approx(LAYOUT_OCTAVES)]


def test_large_crowds_are_halved_and_none_is_lost() -> None:
    """Every place gets a crowd of bearable size; neighbours along the longest axis share one."""
    sizes = [(("C", 128 << (n % 3)), ("N", 1 << n // 30)) for n in range(3 * MAX_CLUSTER)]
    places = [
        MeasuredPoint(BenchmarkCase(op="rms_norm", dtype="float32", dims=dims), "eager", 1.0)
        for dims in sizes
    ]
    found = split_clusters(places)
    assert {id(p) for crowd in found for p in crowd.points} == {id(p) for p in places}
    assert all(len(crowd.points) <= MAX_CLUSTER for crowd in found) and len(found) == 4
    assert places[0].cluster is places[1].cluster is not places[-1].cluster
