"""Decision trees over sizes: what they lose at calls that they do not know, and that no choice is better."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.selection.solver.families import grid_below, grid_points
from layerzero.selection.solver.ranges import Entry, compile_lookup
from layerzero.selection.solver.tree import CANNOT, Samples, choices, collapse, fit, leaves_of


def crossing(noise: float = 0.0, count: int = 40, seed: int = 1) -> Samples:
    """Two kernels that cross along each of two axes, as an exclusive or: no single split saves anything."""
    draw = np.random.default_rng(seed)
    sizes = np.array([[a, b] for a in range(1, count + 1) for b in range(1, count + 1)], dtype=np.int64)
    first = (sizes[:, 0] <= count // 2) == (sizes[:, 1] <= count // 2)
    costs = np.where(first[:, None], [1.0, 2.0], [2.0, 1.0]) * draw.lognormal(0.0, noise, (len(sizes), 2))
    return Samples(("N", "K"), ("a", "b"), sizes, costs)


def test_a_split_is_found_where_none_saves_anything_by_itself() -> None:
    """Four leaves for an exclusive or, and nothing lost where it was not seen."""
    fitted = fit(crossing())
    assert fitted.leaves == 4 and fitted.held_out_loss == 0.0 and fitted.held_out_fixed_loss > 0.4


def test_noise_is_not_learned() -> None:
    """Two equal kernels under noise: one leaf, whatever their samples show."""
    draw = np.random.default_rng(3)
    sizes = np.arange(1, 401, dtype=np.int64)[:, None]
    samples = Samples(("N",), ("a", "b"), sizes, draw.lognormal(0.0, 0.05, (400, 2)))
    fitted = fit(samples)
    assert fitted.leaves <= 3 and fitted.held_out_loss <= fitted.held_out_fixed_loss * 1.05


@given(st.integers(0, 200), st.integers(2, 60), st.integers(1, 4), st.integers(1, 3))
def test_a_tree_never_loses_more_than_the_best_fixed_choice_on_its_samples(
    seed: int, count: int, kernels: int, axes: int
) -> None:
    """Leaves cover everything once, take what is cheapest over their samples, and nothing that cannot run."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 12, (count, axes))
    costs = draw.uniform(1.0, 5.0, (count, kernels))
    costs[draw.uniform(size=costs.shape) < 0.2] = np.inf
    costs[:, 0] = np.where(np.isfinite(costs[:, 0]), costs[:, 0], 4.0)
    names = tuple(f"axis{i}" for i in range(axes))
    samples = Samples(names, tuple(map(str, range(kernels))), sizes.astype(np.int64), costs)
    losses = samples.losses()
    root = collapse(fit(samples).root)
    chosen = choices(root, samples.sizes)
    assert losses[np.arange(count), chosen].sum() <= losses.sum(axis=0).min() + 1e-9
    assert losses[np.arange(count), chosen].sum() < CANNOT or losses.sum(axis=0).min() >= CANNOT
    bounds = list(zip(sizes.min(axis=0).tolist(), sizes.max(axis=0).tolist(), strict=True))
    boxes = [Entry(dict(zip(names, box, strict=True)), leaf.choice) for leaf, box in leaves_of(root, bounds)]
    look_up = compile_lookup(boxes)
    for row, kernel in zip(samples.sizes.tolist(), chosen.tolist(), strict=True):
        assert look_up(dict(zip(names, row, strict=True))) == kernel
    assert look_up(dict.fromkeys(names, 0)) is None and look_up(dict.fromkeys(names, 99)) is None


def test_samples_that_hold_nothing_are_refused() -> None:
    """Without a sample or a kernel there is nothing to decide."""
    with pytest.raises(ValueError, match="samples need sizes and costs"):
        fit(Samples(("N",), (), np.zeros((0, 1), np.int64), np.zeros((0, 0))))


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([], "at least one"),
        ([Entry({"N": (1, 4)}, 1), Entry({"K": (1, 4)}, 2)], "axes"),
        ([Entry({"N": (4, 1)}, 1)], "a range"),
        ([Entry({"N": (1, 4)}, 1), Entry({"N": (4, 8)}, 2)], "differ in one size"),
        ([Entry({"N": (1, 4)}, 1), Entry({"N": (1, 4)}, 2)], "differ in one size"),
    ],
)
def test_ranges_that_are_no_tree_are_refused(entries: list[Entry[int]], says: str) -> None:
    """Overlapping, empty, or over other axes: a file that a solver did not write."""
    with pytest.raises(ValueError, match=says):
        compile_lookup(entries)


def test_a_look_up_names_the_missing_axis() -> None:
    """A call whose sizes have other names is no call of the table's."""
    look_up = compile_lookup([Entry({"N": (1, 4)}, "a"), Entry({"N": (9, 12)}, "b")])
    assert [look_up({"N": n}) for n in (0, 1, 4, 5, 8, 9, 12, 13)] == [
        None,
        "a",
        "a",
        None,
        None,
        "b",
        "b",
        None,
    ]
    with pytest.raises(KeyError):
        look_up({"M": 3})


def test_the_grid_downwards_is_the_grid() -> None:
    """Each point's neighbour below, and all points that stand for a span."""
    points = grid_points(1, 5000)
    assert [grid_below(size) for size in points[1:]] == points[:-1] and grid_below(1) == 0
    assert grid_points(13, 17) == [16, 24] and grid_points(16, 16) == [16]
