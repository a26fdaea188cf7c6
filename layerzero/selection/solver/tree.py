"""A decision tree over sizes: which kernel to run, as comparisons of one size with one number each.

A leaf takes the kernel with the least summed loss over its samples, never the most frequent winner. The tree
grows best first, by the split that saves most, so that its prefixes are trees themselves. How many leaves it
keeps is settled by samples that were held out: one leaf, the best single kernel, is among the sizes
compared, so that a tree is never kept for what only its own samples show.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]

# What a kernel that cannot take a sample loses there: more than any that can.
CANNOT = 1e3
MAX_LEAVES = 2048
FOLDS = 5
# A tree is kept in place of a smaller one where it loses less by more than so many standard errors of the
# difference, call by call.
_STANDARD_ERRORS = 1.0
_ROUNDING = 1e-12
# Losses count up to here when splits are scored: a share of the best cost. Set on published attention
# latencies (benchmarks/solver.py) with a tenth of the shapes held out; twice or half of it changes little.
_NEAR = 0.3


@dataclass(frozen=True, slots=True)
class Samples:
    """Sizes (samples, axes), and what each kernel costs there (samples, kernels) in microseconds.

    A kernel without a finite cost cannot take the sample. Of kernels that are alike the first is taken.
    """

    axes: tuple[str, ...]
    kernels: tuple[str, ...]
    sizes: Whole
    costs: Floats

    def losses(self) -> Floats:
        """What each kernel loses against the best one, as a share of the best one's cost."""
        best = np.min(np.where(np.isfinite(self.costs), self.costs, np.inf), axis=1, keepdims=True)
        with np.errstate(invalid="ignore"):
            losses = self.costs / np.maximum(best, _ROUNDING) - 1.0
        return np.where(np.isfinite(losses), losses, CANNOT)

    def take(self, rows: NDArray[np.bool_]) -> Samples:
        """Some of the samples."""
        return Samples(self.axes, self.kernels, self.sizes[rows], self.costs[rows])


@dataclass(slots=True)
class Node:
    """A leaf that takes kernel number `choice`, until it is split: sizes of `axis` up to `at` go `low`."""

    choice: int
    loss: float
    count: int
    axis: int = -1
    at: int = 0
    low: Node | None = None
    high: Node | None = None


@dataclass(frozen=True, slots=True)
class TreeSplit:
    """A split that could be made: by how much it lowers the score of its node, and where it is."""

    change: float
    axis: int
    at: int


@dataclass(frozen=True, slots=True)
class FittedTree:
    """A tree, and its mean loss over samples that it was not made from, beside the best single kernel's."""

    root: Node
    leaves: int
    held_out_loss: float
    held_out_fixed_loss: float


def best_split(sizes: Whole, losses: Floats) -> TreeSplit | None:
    """The split that lowers a node's score most; None where all sizes are equal. Both sides hold a sample.

    The score is the loss of the best single kernel, and how far the losses are from their mean: a split after
    which both sides still take one kernel may be what the next one needs. Of splits that are alike the one
    nearest the middle is taken, also where none lowers anything: what it leads to is judged later.
    """
    near = np.minimum(losses, _NEAR)
    count, total, near_total = len(sizes), losses.sum(axis=0), near.sum(axis=0)
    before = total.min() - float((near_total**2).sum()) / count
    widest: TreeSplit | None = None
    for axis in range(sizes.shape[1]):
        order = np.argsort(sizes[:, axis], kind="stable")
        column = sizes[order, axis]
        ends = np.flatnonzero(column[1:] != column[:-1])
        if not len(ends):
            continue
        low, near_low = np.cumsum(losses[order], axis=0)[ends], np.cumsum(near[order], axis=0)[ends]
        low_count = (ends + 1)[:, None]
        explained = near_low**2 / low_count + (near_total - near_low) ** 2 / (count - low_count)
        change = low.min(axis=1) + (total - low).min(axis=1) - explained.sum(axis=1) - before
        alike = np.flatnonzero(change <= change.min() + _ROUNDING * count)
        middle = alike[np.argmin(np.abs(ends[alike] + 1 - count / 2))]
        if widest is None or change[middle] < widest.change:
            widest = TreeSplit(float(change[middle]), axis, int(column[ends[middle]]))
    return widest


def grow(sizes: Whole, losses: Floats, leaves: int) -> tuple[Node, list[Node]]:
    """A tree of at most `leaves` leaves, and its inner nodes in the order in which they were split."""
    waiting: list[tuple[float, int, Node, Whole, TreeSplit]] = []
    done: list[Node] = []

    def leaf(rows: Whole) -> Node:
        sums = losses[rows].sum(axis=0)
        choice = int(np.argmin(sums))
        node = Node(choice, float(sums[choice]), len(rows))
        split = best_split(sizes[rows], losses[rows]) if node.loss > _ROUNDING * len(rows) else None
        if split is not None:
            heapq.heappush(waiting, (split.change, next(serial), node, rows, split))
        return node

    serial = itertools.count()
    root = leaf(np.arange(len(sizes)))
    while waiting and len(done) + 1 < leaves:
        _, _, node, rows, split = heapq.heappop(waiting)
        below = sizes[rows, split.axis] <= split.at
        node.axis, node.at = split.axis, split.at
        node.low, node.high = leaf(rows[below]), leaf(rows[~below])
        done.append(node)
    return root, done


def choices(root: Node, sizes: Whole) -> Whole:
    """The kernel numbers that a tree takes for many samples."""
    chosen = np.empty(len(sizes), np.int64)
    waiting = [(root, np.arange(len(sizes)))]
    while waiting:
        node, rows = waiting.pop()
        if node.low is None or node.high is None:
            chosen[rows] = node.choice
        else:
            below = sizes[rows, node.axis] <= node.at
            waiting += [(node.low, rows[below]), (node.high, rows[~below])]
    return chosen


def folds_of(samples: Samples, folds: int = FOLDS) -> Whole:
    """The fold of each sample, by a hash of its sizes: the same on every machine, whatever the order."""
    whole = np.ascontiguousarray(samples.sizes, dtype="<i8")
    digests = [hashlib.blake2b(row.tobytes(), digest_size=4).digest() for row in whole]
    return np.array([int.from_bytes(digest, "little") % folds for digest in digests], dtype=np.int64)


def fit(samples: Samples, *, folds: int = FOLDS, max_leaves: int = MAX_LEAVES) -> FittedTree:
    """The tree whose number of leaves loses least on held-out samples; one leaf where there are too few.

    Raises: ValueError: there is no sample, or no kernel.
    """
    if not samples.costs.size:
        raise ValueError(f"samples need sizes and costs, got {samples.costs.shape}")
    losses, ladder = samples.losses(), _ladder(max_leaves)
    fold = folds_of(samples, folds)
    lost = [
        _held_out_losses(samples.sizes, losses, fold == number, ladder)
        for number in range(folds)
        if 0 < np.count_nonzero(fold == number) < len(fold)
    ]
    if not lost:
        root, _ = grow(samples.sizes, losses, 1)
        return FittedTree(root, 1, math.nan, math.nan)
    held_out = np.concatenate(lost)
    means = held_out.mean(axis=0)
    best = int(np.argmin(means))
    extra_loss = held_out - held_out[:, [best]]
    errors = extra_loss.std(axis=0) / math.sqrt(len(held_out))
    size = int(np.argmax(means - means[best] <= _STANDARD_ERRORS * errors))
    root, done = grow(samples.sizes, losses, ladder[size])
    return FittedTree(root, len(done) + 1, float(means[size]), float(means[0]))


def _ladder(max_leaves: int) -> list[int]:
    """The numbers of leaves that are compared: 1, 2, 3, 4, 6, 8, 12, ..."""
    sizes, step = [1], 1
    while sizes[-1] < max_leaves:
        sizes += [2 * step, 3 * step]
        step *= 2
    return [size for size in sizes if size <= max_leaves]


def _held_out_losses(
    sizes: Whole, losses: Floats, fold_mask: NDArray[np.bool_], ladder: Sequence[int]
) -> Floats:
    """The loss at each held-out sample (samples, trees) of the tree of each size: one tree, by its splits."""
    root, done = grow(sizes[~fold_mask], losses[~fold_mask], ladder[-1])
    inner, outer = sizes[fold_mask], losses[fold_mask]
    rows_of: dict[int, Whole] = {id(root): np.arange(len(inner))}
    current = outer[:, root.choice].copy()
    columns, leaf_count = [], 1
    for size in ladder:
        for node in done[leaf_count - 1 : size - 1]:
            rows = rows_of.pop(id(node))
            assert node.low is not None and node.high is not None
            below = inner[rows, node.axis] <= node.at
            for side, part in ((node.low, rows[below]), (node.high, rows[~below])):
                rows_of[id(side)] = part
                current[part] = outer[part, side.choice]
        leaf_count = max(leaf_count, size)
        columns.append(current.copy())
    return np.stack(columns, axis=1)


def collapse(node: Node) -> Node:
    """Join neighbours that take one kernel, in place; returns the node."""
    if node.low is None or node.high is None:
        return node
    low, high = collapse(node.low), collapse(node.high)
    if low.low is None and high.low is None and low.choice == high.choice:
        node.choice, node.loss = low.choice, low.loss + high.loss
        node.low = node.high = None
    return node


def leaves_of(
    root: Node, bounds: Sequence[tuple[int, int]]
) -> Iterator[tuple[Node, tuple[tuple[int, int], ...]]]:
    """Every leaf with its range along each axis, both ends included; `bounds` are those of the whole."""
    waiting: list[tuple[Node, tuple[tuple[int, int], ...]]] = [(root, tuple(bounds))]
    while waiting:
        node, box = waiting.pop()
        if node.low is None or node.high is None:
            yield node, box
            continue
        first, last = box[node.axis]
        for side, part in ((node.high, (node.at + 1, last)), (node.low, (first, node.at))):
            waiting.append((side, (*box[: node.axis], part, *box[node.axis + 1 :])))
