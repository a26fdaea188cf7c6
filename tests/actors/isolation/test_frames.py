"""Calls as messages to a worker: which share one, and what comes out of it there."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from layerzero.actors.isolation.frames import CALL, NUMBER, CallCommand, Frame, decode, flatten, key_of
from layerzero.spec.call_spec import OutputSpec

X = torch.ones(2, 3)


def sent(*args: Any) -> list[Any]:
    """What the worker gets of a call, its tensors as new ones of their shape."""
    order = msgspec.msgpack.decode(
        Frame("k", args, [OutputSpec((2, 3), "float32")]).message[len(CALL) + NUMBER.size :], type=CallCommand
    )
    return [
        decode(value, lambda device, offset, shape, dtype: torch.ones(*shape, dtype=dtype))
        for value in order.args
    ]


@pytest.mark.parametrize("values", [(1, True, 1.0), (0, False, 0.0), ("a", None), (torch.int8, torch.int16)])
def test_values_of_another_type_are_calls_of_another_shape(values: tuple[Any, ...]) -> None:
    """1, True and 1.0 are equal, and a kernel may tell them apart."""
    assert len({key_of((X, value)) for value in values}) == len(values)
    assert len({key_of((X, (X, value))) for value in values}) == len(values)
    for value in values:
        got = sent(X, value)[1]
        assert got == value and got.__class__ is value.__class__


def test_groups_of_tensors_arrive_as_they_were() -> None:
    """Each tensor is placed once, in the order of the flattened arguments, on addresses that kernels take."""
    args = (X, (X.half(), 3), None)
    out = sent(*args)
    assert (
        torch.equal(out[0], X) and torch.equal(out[1][0], X.half()) and out[1][1:] == (3,) and out[2] is None
    )
    frame = Frame("k", args, [OutputSpec((2, 3), "float32")])
    assert [position for position, _, _ in frame.operands] == [0, 1]
    assert [each.__class__ for each in flatten(args)] == [torch.Tensor, torch.Tensor, int, type(None)]
    assert len({offset for _, _, offset in frame.operands} | {frame.outputs[0][1]}) == 3
