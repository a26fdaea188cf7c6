"""Signatures: everything that can change a kernel's answer, and nothing that changes with every step."""

from __future__ import annotations

import inspect
import linecache
from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero.ops import table
from layerzero.ops.op import SignedCall
from layerzero.ops.signature import IndexTensor, op_signature, type_key, value_key
from tests.ops.wild import GOOD


def _seven() -> int:
    return 7


def _sum_of(x: Tensor, scale: float) -> float:
    return float(x.sum()) + scale


def _pair(first: Any, second: Any) -> tuple[Any, Any]:
    return first, second


@op_signature(
    default={"seed": _seven, "peak": _sum_of, "other": "ids"},
    convert={"window": tuple},
    key={"seed": type_key, "heat": value_key, ("left", "right"): _pair},
)
def example(
    x: Tensor,
    ids: IndexTensor,
    bias: Tensor | None = None,
    *,
    scale: float = 2.0,
    seed: int | None = None,
    peak: float | None = None,
    other: IndexTensor | None = None,
    window: Any = None,
    heat: float | Tensor = 1.0,
    left: Any = None,
    right: Any = None,
) -> SignedCall:
    """An op's arguments of every kind."""
    raise NotImplementedError


X, IDS = torch.ones(2, 3), torch.arange(2)


def facts(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


@pytest.mark.parametrize("name", GOOD)
def test_a_signature_begins_with_the_op_and_the_arguments_stand_in_order(name: str) -> None:
    """Kernels take them by position; what a caller named stands under that name."""
    op, call = table.get(name), GOOD[name]
    signature, args = op.build(**call)
    names = list(inspect.signature(op.build).parameters)
    assert signature[0] == name == op.build.__name__ and len(args) == len(names)
    assert all(args[names.index(key)] is value for key, value in call.items() if isinstance(value, Tensor))
    assert hash(signature) == hash(op.build(**call)[0]) or "seed" in names


def test_operands_lie_flat_and_absent_ones_are_none() -> None:
    """An index tensor has no gradient to speak of; an operand that may be absent is one entry."""
    signature, args = example(X, IDS)
    assert signature == (
        "example", *facts(X), False, *facts(IDS), None, 2.0, int, 8.0, facts(IDS), None, (float, 1.0), None
    )  # fmt: skip
    assert args == (X, IDS, None, 2.0, 7, 8.0, IDS, None, 1.0, None, None)
    bias = torch.ones(3, requires_grad=True)
    assert example(X, IDS, bias)[0][10] == (*facts(bias), True)


@pytest.mark.parametrize(
    "changed",
    [torch.ones(3, 3), torch.ones(3, 2).t(), torch.ones(2, 3).half(), torch.ones(2, 3, requires_grad=True),
     torch.ones(2, 3, device="meta")],
    ids=["shape", "strides", "dtype", "gradient", "device"],
)  # fmt: skip
def test_every_fact_of_an_operand_tells_calls_apart(changed: Tensor) -> None:
    """Another signature for another shape, layout, dtype, device or gradient."""
    assert example(changed, IDS, peak=1.0)[0] != example(X, IDS, peak=1.0)[0]


def test_values_that_were_given_are_converted_and_not_replaced() -> None:
    """A default fills None alone; a list becomes what a signature can hold."""
    signature, args = example(X, IDS, seed=3, peak=0.0, other=X, window=[1, 2])
    assert args[4:8] == (3, 0.0, X, (1, 2)) and (1, 2) in signature


def test_a_seed_counts_by_type_and_a_number_by_type_and_value() -> None:
    """Every step has another seed; 1 and 1.0 and True are three numbers."""
    assert example(X, IDS, seed=3)[0] == example(X, IDS, seed=4)[0]
    by_tensor: Any = torch.tensor([3])
    assert example(X, IDS, seed=3)[0] != example(X, IDS, seed=by_tensor)[0]
    kinds: list[Any] = [1, 1.0, True, 2, torch.tensor(1.0)]
    assert len({example(X, IDS, heat=kind)[0] for kind in kinds}) == len(kinds)


def test_arguments_that_share_a_key_cost_nothing_where_all_are_absent() -> None:
    """None stands for all of them, and for no other combination."""
    assert example(X, IDS)[0][-1] is None
    assert example(X, IDS, right=0)[0][-1] == (None, 0)


def test_a_written_function_shows_its_lines_and_its_documentation() -> None:
    """A traceback has something to print, an editor a signature."""
    written: Any = example
    lines = linecache.getlines(written.__code__.co_filename)
    assert lines[0].startswith("def example(") and written.__doc__ == "An op's arguments of every kind."
    parameters = inspect.signature(example).parameters
    assert parameters["scale"].default == 2.0 and parameters["ids"].annotation == "Tensor"
