"""Calls of operators: the contract tests' cases, as the arguments that torch gets."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerzero.operators.schema import OperatorSchema, schemas_of
from layerzero.ops import table
from layerzero.ops.op import Args, Op
from tests.backends import cases


class OperatorCall(NamedTuple):
    """A call of an op, and the same call of its operator."""

    op: Op
    case: cases.Case
    full: Args
    schema: OperatorSchema
    flat: tuple[Any, ...]

    @property
    def operator(self) -> Any:
        """torch's operator."""
        return getattr(torch.ops.layerzero, self.schema.name).default

    def named(self) -> dict[str, Any]:
        """The op's arguments by name."""
        return dict(zip(inspect.signature(self.op.build).parameters, self.full, strict=True))


def call_of(case: cases.Case, *, grad: bool = False) -> OperatorCall | None:
    """The calls of a case in float32; None where torch's schemas have no word for an argument."""
    op = table.get(case.op)
    full = cases.call(case, torch.float32)
    if grad:
        full = tuple(
            a.detach().clone().requires_grad_()
            if isinstance(a, Tensor) and a.dtype is torch.float32 and at in op.operands
            else a
            for at, a in enumerate(full)
        )
    named = dict(zip(inspect.signature(op.build).parameters, full, strict=True))
    schemas = [s for s in schemas_of(op) if all(named[k] == v for k, v in s.fixed.items())]
    if any(named[name] is not None for name in schemas[0].without_type):
        return None
    return OperatorCall(op, case, full, schemas[0], schemas[0].packer()(*full, None))


def calls(op: str) -> Iterator[OperatorCall]:
    """The plain call of an op, the one with gaps between rows, and each thing asked alone."""
    asked = [cases.Case(op), cases.Case(op, strided=True)]
    asked += [cases.Case(op, (ask,)) for ask in cases.ASKS.get(op, ())]
    yield from (call for call in map(call_of, asked) if call is not None)
