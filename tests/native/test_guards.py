"""What a guard makes of any data: the compiled check and Python give the same copies and errors."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from layerzero.native import FAST_PATH
from layerzero.ops import table
from tests.native.twins import compiled as compiled
from tests.ops.wild import BAD, GOOD, Call, fresh

OPS = sorted(GOOD)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INDEX = (torch.int64, torch.int32)
ODD = (math.nan, math.inf, -math.inf, -1.0, -0.0, 0.0, 0.5, 1.0, 2.0, 1e-40, 60000.0)
# What `checks.compiled` is asked for by each op whose check is one pass over its arguments.
WHOLE = {
    "sample": "rows_within", "sample_topk": "rows_within", "sample_topp": "rows_within",
    "verify_chain": "proposals", "verify_tree": "proposals",
}  # fmt: skip

element = st.sampled_from(ODD)
whole_number = st.sampled_from((-(1 << 40), -1, 0, 1, 2, 3, 5, 6, 9, 1 << 40))


def formed(tensor: Tensor, form: str) -> Tensor:
    """The same numbers: dense, between others in memory, with axes swapped, of a class, or without memory."""
    if form == "apart":
        wide = tensor.new_zeros((*tensor.shape, 3))
        wide[..., 1] = tensor
        return wide[..., 1]
    if form == "swapped" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if form == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=False)
    if form == "graph" and tensor.is_floating_point():
        return tensor.clone().requires_grad_()
    if form == "subclass":
        return tensor.as_subclass(_Own)
    return tensor.to("meta") if form == "meta" else tensor


class _Own(Tensor):
    pass


FORMS = ["dense"] * 20 + ["apart", "swapped", "parameter", "graph", "subclass", "meta"]


@st.composite
def calls(draw: st.DrawFn, op: str) -> Call:
    """A good or a bad call of an op, with a few elements, dtypes and layouts of any kind, perhaps no row."""
    call = fresh(op)
    bad = [(name, value) for name, values in BAD[op].items() for value in values]
    if draw(st.sampled_from([False] * 3 + [True])):
        name, value = draw(st.sampled_from(bad))
        call[name] = value.clone()
    floating = draw(st.sampled_from(FLOATS))
    for name, value in call.items():
        if not isinstance(value, Tensor):
            continue
        kind = draw(st.sampled_from(FLOATS)) if name in ("temperature", "top_p", "p") else floating
        other = value.to(kind if value.is_floating_point() else draw(st.sampled_from(INDEX)))
        if draw(st.sampled_from([False] * 5 + [True])):
            some = element if other.is_floating_point() else whole_number
            place = draw(st.integers(0, other.numel() - 1))
            other.view(-1)[place] = torch.tensor(draw(some), dtype=torch.float64).to(other.dtype)
        call[name] = formed(other, draw(st.sampled_from(FORMS)))
    if op in WHOLE and draw(st.sampled_from([False] * 5 + [True])):
        call |= {name: value[:0] for name, value in call.items() if isinstance(value, Tensor)}
    return call


def gist(op: str, call: Call) -> Any:
    """What the guard gives: an error's words, or all that a kernel sees of each copy."""
    args = table.get(op).build(**call)[1]
    guard: Any = table.get(op).validate_values
    try:
        given_back = guard(args)
    except (ValueError, RuntimeError) as error:
        return type(error), str(error).split("\n")[0]
    assert isinstance(given_back, tuple) and len(given_back) == len(args)
    seen: list[Any] = []
    for own, theirs in zip(given_back, args, strict=True):
        if own is theirs:
            seen.append("itself")
            continue
        assert own.untyped_storage().data_ptr() != theirs.untyped_storage().data_ptr()
        seen.append((type(own), own.dtype, own.shape, own.stride(), own.requires_grad, own.tolist()))
    return seen


@pytest.mark.parametrize("op", OPS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_guard_says_the_same_compiled_and_in_python(op: str, data: st.DataObject) -> None:
    """Of any dtypes, strides, numbers that are none, rows that are none, and tensors that nobody may read."""
    call = data.draw(calls(op))
    module = FAST_PATH.module
    ours = gist(op, call)
    try:
        FAST_PATH.use(None)
        theirs = gist(op, call)
    finally:
        FAST_PATH.use(module)
    assert repr(ours) == repr(theirs)  # by their words: NaN is no NaN's equal


@pytest.mark.parametrize("op", sorted(WHOLE))
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_odd_number_is_judged_alike(op: str, dtype: torch.dtype, compiled: Any) -> None:
    """One of them among good ones, first or last, in each argument."""
    for name, value in GOOD[op].items():
        if not isinstance(value, Tensor):
            continue
        for odd in ODD if value.is_floating_point() else (-1, 0, 1 << 40):
            for place in (0, -1):
                call = fresh(op)
                if value.is_floating_point():
                    call = {n: _cast(v, dtype) for n, v in call.items()}
                call[name].view(-1)[place] = odd
                ours = gist(op, call)
                FAST_PATH.use(None)
                theirs = gist(op, call)
                FAST_PATH.use(compiled)
                assert repr(ours) == repr(theirs), (name, odd, place)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


@pytest.mark.parametrize("op", sorted(WHOLE))
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_usual_call_is_checked_in_one_pass(op: str, dtype: torch.dtype, compiled: Any) -> None:
    """The compiled check knows each dtype, and what it refuses is no call that Python has to judge."""
    call = {n: _cast(v, dtype) for n, v in fresh(op).items()}
    bounds = () if WHOLE[op] == "proposals" else (_bounds(op),)
    answer = getattr(compiled, WHOLE[op])(table.get(op).build(**call)[1], *bounds)
    assert isinstance(answer, tuple)
    for name, values in BAD[op].items():
        wrong = {**call, name: values[0].to(call[name].dtype)}
        assert getattr(compiled, WHOLE[op])(table.get(op).build(**wrong)[1], *bounds) is None, name


def _bounds(op: str) -> dict[str, tuple[float, float]]:
    """The bounds of the arguments behind the logits, in their order."""
    high = {"temperature": 1e300, "top_k": 99, "k": 99, "top_p": 1, "p": 1}
    names = inspect.signature(table.get(op).build).parameters
    return {name: (1 if name == "k" else 0, high[name]) for name in names if name in high}


@pytest.mark.parametrize("op", sorted(WHOLE))
def test_large_operands_are_left_to_torch(op: str, compiled: Any) -> None:
    """One thread under the interpreter's lock looks at little; the guard says the same of more."""
    call = fresh(op)
    for name in ("logits", "draft_probs", "target_probs"):
        if name in call:
            call[name] = torch.nn.functional.pad(call[name], (0, 1 << 15))
    args = table.get(op).build(**call)[1]
    bounds = () if WHOLE[op] == "proposals" else (_bounds(op),)
    assert getattr(compiled, WHOLE[op])(args, *bounds) is NotImplemented
    guard: Any = table.get(op).validate_values
    assert len(guard(args)) == len(args)
    last = args[2 if op.startswith("verify") else 0]
    last.view(-1)[-1] = math.nan
    with pytest.raises(ValueError, match="needs"):
        guard(args)
