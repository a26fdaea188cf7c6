"""The rope op against complex numbers in float64, its properties, bad input, batching."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from layerzero.ops.op import Batching
from layerzero.ops.rope.rope import ROPE, rope, rope_reference
from layerzero.ops.rope.scaling import rope_tables, xpos_table


def run(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Build, check, guard and compute a call with the reference."""
    _, full = rope(*args, **options)
    ROPE.check(full)
    assert ROPE.validate_values is not None
    ROPE.validate_values(full)
    out = rope_reference(*full)
    for spec, part in zip(ROPE.outputs(full), out, strict=True):
        assert (tuple(part.shape), f"torch.{spec.dtype}") == (spec.shape, str(part.dtype))
    return out


def turned(x: Tensor, positions: Tensor, rotary: int, base: float, interleaved: bool) -> Tensor:
    """Each pair of features as one complex number times exp(i * angle), in float64."""
    out = x.double().clone()
    for place in torch.cartesian_prod(*(torch.arange(n) for n in x.shape[:-1])).reshape(-1, x.dim() - 1):
        token = tuple(place.tolist())
        position = int(positions[token[:-1]])
        for pair in range(rotary // 2):
            one, two = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + rotary // 2)
            angle = position * base ** (-2 * pair / rotary)
            z = complex(float(out[token][one]), float(out[token][two])) * complex(
                math.cos(angle), math.sin(angle)
            )
            out[token][one], out[token][two] = z.real, z.imag
    return out


@given(
    lead=st.lists(st.integers(1, 3), max_size=2),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    half=st.integers(1, 4),
    extra=st.integers(0, 2),
    interleaved=st.booleans(),
    index=st.sampled_from([torch.int32, torch.int64]),
)
def test_reference_turns_pairs(
    lead: list[int], heads: tuple[int, int], half: int, extra: int, interleaved: bool, index: torch.dtype
) -> None:
    """Any leading axes, head counts, partial width and convention equal the complex product."""
    width, rotary = 2 * (half + extra), 2 * half
    q, k = torch.randn(*lead, heads[0], width), torch.randn(*lead, heads[1], width)
    positions = torch.randint(0, 50, lead, dtype=index)
    cos, sin = rope_tables(width, 50, rotary_dim=rotary)
    got = run(q, k, positions, cos, sin, interleaved=interleaved)
    for x, out in zip((q, k), got, strict=True):
        expected = turned(x, positions, rotary, 10000.0, interleaved)
        assert_close(out.double(), expected, atol=2e-6, rtol=2e-6)
        assert torch.equal(out[..., rotary:], x[..., rotary:])


def test_conventions_are_distinguishable() -> None:
    """Interleaved and rotate-half agree at position 0 only, and each is the other with features permuted."""
    q = torch.randn(4, 2, 8)
    cos, sin = rope_tables(8, 16)
    positions = torch.arange(4)
    half, _ = run(q, q, positions, cos, sin)
    woven, _ = run(q, q, positions, cos, sin, interleaved=True)
    assert torch.equal(half[0], woven[0])
    for position in range(1, 4):
        assert (half[position] - woven[position]).abs().max() > 1e-2
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    permuted, _ = run(q[..., order], q[..., order], positions, cos, sin)
    assert_close(permuted, woven[..., order])


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_distance_only(interleaved: bool) -> None:
    """q . k is the same for every pair of positions of one distance."""
    q, k = torch.randn(1, 1, 16, dtype=torch.float64), torch.randn(1, 1, 16, dtype=torch.float64)
    cos, sin = rope_tables(16, 200)
    scores = []
    for start in (0, 3, 100):
        turned_q, _ = run(q, q, torch.tensor([start + 7]), cos, sin, interleaved=interleaved)
        turned_k, _ = run(k, k, torch.tensor([start]), cos, sin, interleaved=interleaved)
        scores.append(float((turned_q * turned_k).sum()))
    assert scores == pytest.approx([scores[0]] * 3, abs=1e-5)


def test_xpos_decays_with_distance() -> None:
    """Scores depend on the distance only and each pair's part shrinks by zeta ** (distance / scale_base)."""
    cos, sin = rope_tables(8, 64)
    scale = xpos_table(8, 64, scale_base=16.0)
    q = torch.zeros(1, 1, 8, dtype=torch.float64)
    q[..., 0] = q[..., 4] = 1.0
    zeta = 0.4 / 1.4
    for start, distance in ((0, 5), (20, 5), (10, 30)):
        far = torch.tensor([start + distance])
        near = torch.tensor([start])
        with_scale = (
            run(q, q, far, cos, sin, xpos_scale=scale)[0] * run(q, q, near, cos, sin, xpos_scale=scale)[1]
        )
        without = run(q, q, far, cos, sin)[0] * run(q, q, near, cos, sin)[1]
        ratio = float(with_scale.sum() / without.sum())
        assert ratio == pytest.approx(zeta ** (distance / 16.0), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_turned_in_float32(dtype: torch.dtype) -> None:
    """The result is the float32 result, rounded once."""
    q = torch.randn(5, 2, 16).to(dtype)
    cos, sin = rope_tables(16, 5)
    got, _ = run(q, q, torch.arange(5), cos, sin)
    wide, _ = run(q.float(), q.float(), torch.arange(5), cos, sin)
    assert torch.equal(got, wide.to(dtype))


def test_gradient() -> None:
    """The reference's gradient is the numeric one."""
    q = torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=True)
    k = torch.randn(3, 1, 6, dtype=torch.float64, requires_grad=True)
    cos, sin = rope_tables(6, 8, rotary_dim=4)
    scale = xpos_table(6, 8, rotary_dim=4)
    for interleaved in (False, True):
        assert torch.autograd.gradcheck(
            lambda a, b, woven=interleaved: rope_reference(a, b, torch.arange(3), cos, sin, woven, scale),
            (q, k),
        )


def valid() -> dict[str, Any]:
    """Arguments of a valid call: 3 tokens, 4 and 2 heads of 8."""
    cos, sin = rope_tables(8, 16)
    return {
        "q": torch.zeros(3, 4, 8),
        "k": torch.zeros(3, 2, 8),
        "positions": torch.arange(3),
        "cos": cos,
        "sin": sin,
    }


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": None}, TypeError, "q needs a torch.Tensor, got NoneType"),
    ({"k": [0.0]}, TypeError, "k needs a torch.Tensor, got list"),
    ({"cos": 1.0}, TypeError, "cos needs a torch.Tensor, got float"),
    ({"positions": [0, 1, 2]}, TypeError, "positions needs a torch.Tensor, got list"),
    ({"q": torch.zeros(8)}, ValueError, r"q needs shape \(..., heads, head size\), got \(8,\)"),
    ({"q": torch.zeros(3, 0, 8)}, ValueError, r"q needs shape"),
    ({"k": torch.zeros(3, 0, 8)}, ValueError, r"k needs shape"),
    (
        {"q": torch.zeros(3, 4, 7), "k": torch.zeros(3, 2, 7)},
        ValueError,
        "q needs an even head size .* got 7",
    ),
    (
        {"q": torch.zeros(3, 4, 0), "k": torch.zeros(3, 2, 0)},
        ValueError,
        "q needs an even head size .* got 0",
    ),
    ({"k": torch.zeros(3, 2, 6)}, ValueError, "k needs head size 8 like q, got 6"),
    ({"k": torch.zeros(4, 2, 8)}, ValueError, r"k needs tokens \(3,\) like q, got \(4,\)"),
    ({"q": torch.zeros(3, 4, 8, dtype=torch.int64)}, TypeError, "q needs a floating point dtype"),
    ({"positions": torch.arange(4)}, ValueError, r"positions needs shape \(3,\).* got \(4,\)"),
    ({"positions": torch.zeros(3)}, TypeError, "positions needs dtype int32 or int64, got float32"),
    ({"positions": torch.zeros(3, dtype=torch.int16)}, TypeError, "positions needs dtype int32 or int64"),
    ({"positions": torch.tensor([0, 16, 1])}, ValueError, r"positions needs ids in \[0, 16\).* got 16"),
    ({"positions": torch.tensor([0, -1, 1])}, ValueError, r"positions needs ids in \[0, 16\).* got -1"),
    ({"cos": torch.zeros(16)}, ValueError, "cos needs 2 dimensions, got 1"),
    ({"cos": torch.zeros(16, 5)}, ValueError, r"cos needs shape .* \[1, 4\], got \(16, 5\)"),
    ({"cos": torch.zeros(0, 4)}, ValueError, "cos needs shape"),
    ({"sin": torch.zeros(16, 3)}, ValueError, r"sin needs shape \(16, 4\) like cos"),
    ({"sin": torch.zeros(16, 4, dtype=torch.bfloat16)}, TypeError, "sin needs dtype float32 or float64"),
    ({"xpos_scale": torch.zeros(8, 4)}, ValueError, r"xpos_scale needs shape \(16, 4\) like cos"),
    ({"interleaved": 1}, TypeError, "interleaved needs a bool, got int"),
    ({"k": torch.zeros(3, 2, 8, device="meta")}, ValueError, "k needs to be on cpu like q, got meta"),
    ({"sin": torch.zeros(16, 4, device="meta")}, ValueError, "sin needs to be on cpu like q, got meta"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD)
def test_bad_input_is_named(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    """The error says which argument, what it needs, what it got."""
    with pytest.raises(error, match=message):
        run(**(valid() | changes))


def test_the_call_is_described() -> None:
    """Sizes by axis, features in use, the index dtype among the dtypes."""
    request = ROPE.check(rope(**valid())[1])
    assert request.dims == {"N": 3, "Hq": 4, "Hk": 2, "D": 8, "R": 8}
    assert request.features == frozenset()
    assert request.dtypes == ("float32", "float32", "int64")
    cos, sin = rope_tables(8, 16, rotary_dim=4)
    scale = xpos_table(8, 16, rotary_dim=4)
    partial = valid() | {"cos": cos, "sin": sin, "interleaved": True, "xpos_scale": scale}
    request = ROPE.check(rope(**partial)[1])
    assert request.features == {"interleaved", "partial_rotary", "xpos"}
    assert ROPE.work(request).bytes == 2 * 4 * (3 * 4 * 8 + 3 * 2 * 8)


def test_no_tokens_give_empty_outputs() -> None:
    """A call without tokens computes nothing."""
    call: dict[str, Any] = valid() | {
        "q": torch.zeros(0, 4, 8),
        "k": torch.zeros(0, 2, 8),
        "positions": torch.arange(0),
    }
    assert ROPE.empty is not None
    out = ROPE.empty(rope(**call)[1])
    assert [t.shape for t in out] == [(0, 4, 8), (0, 2, 8)]
    assert ROPE.empty(rope(**valid())[1]) is None


def test_signature_is_stable_and_complete() -> None:
    """Equal calls share a signature; any changed property gives another."""
    assert rope(**valid())[0] == rope(**valid())[0]
    changes: list[dict[str, Any]] = [
        {},
        {"q": torch.zeros(3, 5, 8)},
        {"q": torch.zeros(3, 8, 4).transpose(1, 2)},
        {"q": torch.zeros(3, 4, 8).half()},
        {"q": torch.zeros(3, 4, 8, requires_grad=True)},
        {"k": torch.zeros(3, 4, 8)},
        {"k": torch.zeros(3, 2, 8).half()},
        {"positions": torch.arange(3, dtype=torch.int32)},
        {"positions": torch.arange(6)[::2]},
        {"cos": torch.zeros(17, 4)},
        {"sin": torch.zeros(17, 4)},
        {"interleaved": True},
        {"xpos_scale": torch.zeros(16, 4)},
    ]
    build: Any = rope
    assert len({build(**(valid() | change))[0] for change in changes}) == len(changes)


@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=6), interleaved=st.booleans())
def test_together_equals_one_by_one(lengths: list[int], interleaved: bool) -> None:
    """Tokens of several callers over one pair of tables are turned by one launch."""
    cos, sin = rope_tables(8, 32)
    calls = []
    for index, length in enumerate(lengths):
        lead = (length,) if index % 2 else (1, length)
        q, k, positions = torch.randn(*lead, 4, 8), torch.randn(*lead, 2, 8), torch.randint(0, 32, lead)
        calls.append(rope(q, k, positions, cos, sin, interleaved=interleaved)[1])
    assert ROPE.batching is not None
    rule: Batching = ROPE.batching
    assert len({rule.batch_key(args) for args in calls}) == 1
    launches = []

    def launch(args: Any) -> Any:
        launches.append(args)
        return rope_reference(*args)

    results = rule.run(calls, launch)
    assert len(launches) == 1
    for args, result in zip(calls, results, strict=True):
        assert_close(tuple(result), rope_reference(*args))


def test_other_tables_are_another_group() -> None:
    """Tables are the same by memory, not by value."""
    assert ROPE.batching is not None
    call = valid()
    build: Any = rope
    group = ROPE.batching.batch_key(build(**call)[1])
    assert ROPE.batching.batch_key(build(**(call | {"q": torch.ones(3, 4, 8)}))[1]) == group
    assert ROPE.batching.batch_key(build(**(call | {"cos": call["cos"].clone()}))[1]) != group
    assert ROPE.batching.batch_key(build(**call, interleaved=True)[1]) != group
