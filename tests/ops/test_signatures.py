"""What the lane relies on: an op's argument tuple stands in the order of its signature."""

from __future__ import annotations

import inspect

import pytest
import torch

from layerzero.dispatch import positional
from layerzero.ops import table
from tests.backends import cases


@pytest.mark.parametrize("name", table.names())
def test_the_argument_tuple_has_the_signatures_order(name: str) -> None:
    """A merged call is only a tuple: its signature is built from it by position."""
    op = table.get(name)
    parameters = list(inspect.signature(op.build).parameters)
    for case in cases.cases(name):
        args = cases.call(case, torch.float32)
        signature, again = op.build(**dict(zip(parameters, args, strict=True)))
        assert len(again) == len(args)
        assert all(a is b or a == b for a, b in zip(again, args, strict=True))
        assert positional(op, args) == signature
        op.check(again)
