"""Which calls one decision tree answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerzero.ops.linear.linear import LINEAR
from layerzero.selection.solver.families import family_of
from layerzero.spec.call_spec import CallSpec

REQUEST = LINEAR.check(LINEAR.build(torch.ones(4, 8), torch.ones(3, 8))[1])


@pytest.mark.parametrize(
    "change",
    [
        {"op": "mlp"},
        {"dtype": "bfloat16"},
        {"dtypes": ("float32", "bfloat16")},
        {"features": frozenset({"bias"})},
        {"layout": "BSHD"},
        {"contiguous": False},
        {"modes": frozenset({"capture"})},
        {"dims": {"N": 4, "C": 3}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_calls_that_differ_in_more_than_sizes_have_trees_of_their_own(change: dict[str, Any]) -> None:
    """A tree compares sizes alone; what else tells kernels apart is the tree's."""
    assert family_of(REQUEST.replace(**change)) != family_of(REQUEST)


def test_sizes_are_no_part_of_a_family() -> None:
    """Nor are the features that change no time, nor the order of dtypes."""
    other: CallSpec = REQUEST.replace(dims={"K": 1, "N": 2, "C": 3})
    assert family_of(other) == family_of(REQUEST)
    mixed = [REQUEST.replace(dtypes=dtypes) for dtypes in (("a", "b", "b"), ("b", "a"))]
    assert family_of(mixed[0]) == family_of(mixed[1])
