"""What the batcher relies on: an op's argument tuple stands in the order of its signature."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable

import pytest
import torch

from layerzero.ops import table
from layerzero.selection.plan import signature_of
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
        assert signature_of(op, args) == signature
        op.check(again)


def nested(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its nested tensors a prototype
        return torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(5, 4)], layout=layout)


@pytest.mark.parametrize("name", table.names())
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: nested(torch.strided), "a nested one"),
        (lambda: nested(torch.jagged), "a nested one"),
        (lambda: torch.eye(4).to_sparse(), "sparse|dimensions"),
        (lambda: "text", "got str"),
    ],
    ids=["nested", "jagged", "sparse", "text"],
)
def test_an_operand_that_is_no_plain_tensor_is_named(
    name: str, wrong: Callable[[], object], says: str
) -> None:
    """Whatever stands in a tensor's place is refused, by the name of the argument (E6.11)."""
    op = table.get(name)
    names = list(inspect.signature(op.build).parameters)
    args = cases.call(next(iter(cases.cases(name))), torch.float32)
    places = [n for n, value in enumerate(args) if isinstance(value, torch.Tensor)]
    assert places
    for place in places:
        given = [*args[:place], wrong(), *args[place + 1 :]]
        with pytest.raises((ValueError, TypeError), match=f"^{names[place]} needs .*({says}|int32)"):
            op.check(op.build(**dict(zip(names, given, strict=True)))[1])


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        ("attention", "softcap", 1 << 70), ("mla_attention", "scale", -(1 << 63) - 1),
        ("add_rms_norm_quantize", "eps", 1 << 63), ("alibi", "k_len", 1 << 70),
        ("cross_entropy", "ignore_index", 1 << 64), ("quantize", "group_size", torch.ones(2)),
        ("add_rms_norm_quantize", "group_size", torch.ones(2)), ("verify_tree", "parents", 3),
    ],
)  # fmt: skip
def test_a_number_that_no_kernel_takes_is_refused(name: str, argument: str, value: object) -> None:
    """An int beyond 64 bits, or a tensor for an int, is the caller's error and no kernel's failure."""
    op = table.get(name)
    names = list(inspect.signature(op.build).parameters)
    args = cases.call(next(iter(cases.cases(name))), torch.float32)
    given = {**dict(zip(names, args, strict=True)), argument: value}
    with pytest.raises((ValueError, TypeError), match=f"^{argument} needs "):
        op.check(op.build(**given)[1])
