"""Arguments written in a shell become the op's arguments, or an error that says how to write them."""

import click
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from layerzero.cli.common import call_arguments
from layerzero.ops import table

ATTENTION = table.get("attention")
SAMPLE = table.get("sample")


def attention(*words: str) -> tuple[object, ...]:
    """The full arguments of attention for q, k, v of one shape and these further words."""
    return call_arguments.build_call(ATTENTION, words, "1x2x3x8:bf16")[1]


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    dtype=st.sampled_from(sorted(call_arguments.DTYPES)),
)
def test_a_shape_comes_out_as_it_was_written(sizes: list[int], dtype: str) -> None:
    """Any sizes and any dtype name give a tensor of exactly that shape, without memory."""
    text = f"x={'x'.join(map(str, sizes))}:{dtype}"
    (tensor, *_) = call_arguments.build_call(table.get("rms_norm"), [text])[1]
    assert tensor.shape == tuple(sizes)
    assert tensor.dtype == call_arguments.DTYPES[dtype]
    assert tensor.device.type == "meta"


def test_one_size_is_a_tensor_where_the_argument_takes_only_tensors() -> None:
    """`weight=8` is an axis of 8, and `scalar` has none."""
    args = call_arguments.build_call(table.get("rms_norm"), ["x=4x8", "weight=8"])[1]
    assert args[1].shape == (8,)
    assert call_arguments.build_call(table.get("rms_norm"), ["x=scalar"])[1][0].shape == ()


@pytest.mark.parametrize(
    ("text", "value"), [("40", 40), ("0.5", 0.5), ("none", None), ("-1", -1), ("1e-3", 1e-3)]
)
def test_a_number_stays_a_number_where_both_are_taken(text: str, value: object) -> None:
    """`temperature=40` is forty, not an axis of forty."""
    assert call_arguments.build_call(SAMPLE, ["logits=4x8", f"temperature={text}"])[1][1] == value


def test_a_tensor_is_taken_where_both_are() -> None:
    """A dtype or an `x` marks a tensor."""
    seed = call_arguments.build_call(SAMPLE, ["logits=4x8", "seed=4:i64"])[1][4]
    assert isinstance(seed, Tensor) and seed.dtype == torch.int64


def test_plain_values_are_read_as_python_would() -> None:
    """Booleans, tuples and words."""
    args = attention("is_causal=true", "window=-1,0", "layout=BSHD", "scale=0.25")
    assert args[4] is True
    assert (-1, 0) in args
    assert "BSHD" in args
    assert args[5] == 0.25


def test_grad_marks_a_tensor() -> None:
    """`:grad` asks for the kernels that have a backward."""
    assert call_arguments.build_call(table.get("rms_norm"), ["x=4x8:f32:grad"])[1][0].requires_grad


def test_a_shape_for_all_leaves_named_and_optional_arguments_alone() -> None:
    """`--shape` fills q, k and v, never the mask, and never what was given."""
    args = call_arguments.build_call(ATTENTION, ["k=1x2x5x8:bf16"], "1x2x3x8:bf16")[1]
    assert [tuple(a.shape) for a in args[:3]] == [(1, 2, 3, 8), (1, 2, 5, 8), (1, 2, 3, 8)]
    assert args[3] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["q"], "needs NAME=VALUE"),
        (["=4"], "needs NAME=VALUE"),
        (["is_casual=true"], "did you mean is_causal"),
        (["q=1x2", "q=1x2"], "given twice"),
        (["q=1x-2"], "q needs SHAPE"),
        (["q=1xx2"], "q needs SHAPE"),
        (["q="], "q needs SHAPE"),
        (["q=1x2:bf17"], "a dtype among"),
        (["q=1x2:nn"], "a dtype among"),
        (["q=1x2:bf16:f32"], "at most one dtype"),
        (["q=1x2:i64:grad"], "a float dtype"),
        (["q=9999999999999"], r"at most 2\*\*40"),
        (["q=1000000000000x1000000000000"], "a shape that torch can hold"),
        (["q=1x2x3x8"], "attention also needs k and v; attention takes q: Tensor"),
    ],
)
def test_a_word_that_does_not_parse_is_explained(words: list[str], message: str) -> None:
    """The message names the argument, what it needs and what it got."""
    with pytest.raises(click.UsageError, match=message):
        call_arguments.build_call(ATTENTION, words)
