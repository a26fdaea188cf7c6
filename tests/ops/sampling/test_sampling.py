"""sample, sample_topk, sample_topp: distributions, masks, reproducibility in any batch, bad input."""

import asyncio
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import layerzero as lz
from layerzero.ops.op import Args, Op
from layerzero.ops.sampling.draw import greedy_tokens, sample_from_weights, token_weights
from layerzero.ops.sampling.sampling import SAMPLE, SAMPLE_TOPK, SAMPLE_TOPP
from tests.ops.calls import call, together

DRAWS = 100_000


def chi_square_p(counts: Tensor, shares: Tensor) -> float:
    """The probability of counts at least this far from `shares`."""
    expected = shares.double() * counts.sum()
    live = expected > 0
    assert not counts[~live].any()
    statistic = ((counts[live] - expected[live]) ** 2 / expected[live]).sum()
    freedom = torch.tensor((int(live.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def counted(tokens: Tensor, vocab: int) -> Tensor:
    """How often each token came."""
    return torch.bincount(tokens, minlength=vocab).double()


LOGITS = torch.tensor([1.5, 0.2, -0.7, 2.1, 0.2, -3.0, 1.0, -math.inf])


@pytest.mark.parametrize("stream", ["seeds", "offsets", "rows"])
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4, 5, 6]),
        ({"top_k": 4}, [0, 1, 3, 6]),
        ({"top_p": 0.6}, [0, 3]),
        ({"top_k": 3, "top_p": 0.7, "temperature": 2.0}, [0, 3]),
    ],
)
def test_draws_follow_the_filtered_distribution(
    stream: str, options: dict[str, Any], kept: list[int]
) -> None:
    """1e5 draws over seeds, over offsets and over rows: chi-square p > 1e-3, nothing outside the mask."""
    rows = LOGITS.expand(DRAWS, -1)
    count = torch.arange(DRAWS)
    sources: dict[str, dict[str, Any]] = {
        "seeds": {"seed": count},
        "offsets": {"seed": torch.full((DRAWS,), 5), "offset": count},
        "rows": {"seed": 1},
    }
    tokens = call(SAMPLE, rows, **options, **sources[stream])
    shares = torch.zeros(8, dtype=torch.float64)
    shares[kept] = torch.softmax(LOGITS[kept].double() / options.get("temperature", 1.0), 0)
    assert chi_square_p(counted(tokens, 8), shares) > 1e-3


def test_topk_and_topp_are_sample_with_one_filter() -> None:
    """The same seeds give the same tokens through either name."""
    rows, seed = LOGITS.expand(500, -1), torch.arange(500)
    assert torch.equal(call(SAMPLE_TOPK, rows, 2, seed=seed), call(SAMPLE, rows, top_k=2, seed=seed))
    assert torch.equal(call(SAMPLE_TOPP, rows, 0.5, seed=seed), call(SAMPLE, rows, top_p=0.5, seed=seed))


def test_streams_of_different_seeds_are_independent() -> None:
    """Pairs of tokens drawn by two seeds fill the joint distribution; so do two offsets of one seed."""
    rows = torch.zeros(DRAWS, 4)
    count = torch.arange(DRAWS)
    first = call(SAMPLE, rows, seed=count)
    for other in (call(SAMPLE, rows, seed=count + DRAWS), call(SAMPLE, rows, seed=count, offset=1)):
        assert chi_square_p(counted(first * 4 + other, 16), torch.full((16,), 1 / 16)) > 1e-3


def test_temperature_zero_takes_the_first_of_the_largest() -> None:
    """Greedy whatever seed and filters say, also where rows differ in temperature."""
    rows = torch.tensor([[0.0, 2.0, 2.0], [1.0, -1.0, 0.5], [-math.inf, -math.inf, -5.0]])
    assert call(SAMPLE, rows, temperature=0.0, top_k=2, top_p=0.3).tolist() == [1, 0, 2]
    mixed = call(SAMPLE, rows, temperature=torch.tensor([0.0, 1.0, 0.0]), seed=3)
    assert mixed[[0, 2]].tolist() == [1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_temperature_of_zero_is_one_rule_as_a_number_and_as_a_tensor(dtype: torch.dtype) -> None:
    """Ties, infinities, NaN and rows of nothing give the same tokens by either way."""
    nan, inf = float("nan"), float("inf")
    odd = [
        [1.0, 3.0, 3.0, 0.0],
        [nan, 1.0, 2.0, 0.0],
        [-inf] * 4,
        [0.0, inf, 1.0, 2.0],
        [-0.0, 0.0, -1.0, 0.0],
    ]
    rows = torch.cat([torch.tensor(odd), torch.randint(0, 3, (200, 4)).float()]).to(dtype)
    zeros = torch.zeros(len(rows), dtype=torch.float64)
    plain = greedy_tokens(rows)
    assert plain.tolist() == sample_from_weights(token_weights(rows, zeros, 0, 1.0), 3, 0).tolist()
    assert plain[:5].tolist() == [1, -1, -1, -1, 0]
    good = rows[plain >= 0]
    assert SAMPLE.reference(good, 0.0, 0, 1.0, 3, 0).tolist() == plain[plain >= 0].tolist()


def test_a_tiny_temperature_is_greedy_without_nan() -> None:
    """Dividing by the smallest number there is leaves the largest logit."""
    assert call(SAMPLE, torch.tensor([[3.0, 5.0, 4.0]]), temperature=5e-324, seed=1).tolist() == [1]


def test_seeds_repeat_and_missing_seeds_follow_the_default_generator() -> None:
    """One seed, one answer; without a seed `torch.manual_seed` decides, and two calls differ."""
    rows = torch.zeros(64, 1000)
    assert torch.equal(call(SAMPLE, rows, seed=9), call(SAMPLE, rows, seed=9))
    assert not torch.equal(call(SAMPLE, rows, seed=9), call(SAMPLE, rows, seed=10))
    torch.manual_seed(4)
    first, second = call(SAMPLE, rows), call(SAMPLE, rows)
    torch.manual_seed(4)
    assert torch.equal(call(SAMPLE, rows), first)
    assert not torch.equal(first, second)


def test_the_signature_does_not_hold_seed_or_offset() -> None:
    """They change with every step; what decides between kernels does not."""
    rows = torch.zeros(2, 8)
    assert SAMPLE.build(rows)[0] == SAMPLE.build(rows, seed=5, offset=77)[0]
    assert SAMPLE.build(rows)[0] != SAMPLE.build(rows, seed=torch.arange(2))[0]
    assert SAMPLE.build(rows)[0] != SAMPLE.build(rows, temperature=0.5)[0]


@pytest.mark.parametrize("vocab", [1, 7, 1001, 32000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_draws_the_same_alone_and_among_64(vocab: int, dtype: torch.dtype) -> None:
    """64 callers with their own temperature, filters, seed and offset: one launch, everyone's own token."""
    calls = [
        SAMPLE.build(
            (torch.randn(1, vocab) * 3).to(dtype),
            temperature=(0.0, 0.7, 1.0, 1.3)[i % 4],
            top_k=(0, 5, 50)[i % 3],
            top_p=(1.0, 0.9)[i % 2],
            seed=i // 2,
            offset=i % 5,
        )[1]
        for i in range(64)
    ]
    results, launched = together(SAMPLE, calls)
    assert len(launched) == 1
    assert [r.tolist() for r in results] == [SAMPLE.reference(*args).tolist() for args in calls]


numbers = {
    "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    "top_k": st.integers(0, 9),
    "top_p": st.sampled_from([0.0, 0.4, 0.95, 1.0]),
    "seed": st.integers(-(1 << 70), 1 << 70) | st.none(),
    "offset": st.integers(0, 1 << 65),
}


@st.composite
def sample_call(draw: st.DrawFn) -> Args:
    """A call over one to four rows whose arguments are numbers, missing, or one for each row."""
    rows = draw(st.integers(1, 4))
    options: dict[str, Any] = {}
    for name, values in numbers.items():
        form = draw(st.sampled_from(["missing", "number", "tensor"]))
        if form == "number":
            options[name] = draw(values)
        elif form == "tensor":
            each = [draw(values.filter(lambda v: v is not None and abs(v) < 1 << 63)) for _ in range(rows)]
            options[name] = torch.tensor(each)
    logits = torch.randn(rows, 8, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return SAMPLE.build(logits, **options)[1]


@given(st.lists(sample_call(), min_size=1, max_size=6))
def test_any_mix_of_numbers_and_tensors_batches(calls: list[Args]) -> None:
    """Callers with scalars and callers with tensors meet in one launch and get what they get alone."""
    results, launched = together(SAMPLE, calls)
    assert len(launched) == 1
    for args, result in zip(calls, results, strict=True):
        assert torch.equal(result, SAMPLE.reference(*args))


def test_equal_numbers_stay_numbers_in_a_batch() -> None:
    """Only seeds become tensors where callers agree, so that plain kernels keep their plain arguments."""
    calls = [SAMPLE_TOPK.build(torch.randn(1, 8), 3, temperature=0.5, seed=i)[1] for i in range(3)]
    _, (merged,) = together(SAMPLE_TOPK, calls)
    assert merged[1:3] == (3, 0.5) and merged[4] == 0
    assert merged[3].tolist() == [0, 1, 2]
    assert SAMPLE_TOPK.check(merged).features == {"seed_per_row"}
    assert SAMPLE_TOPK.check(calls[0]).features == frozenset()


def test_rows_that_were_split_are_rejoined_without_a_copy() -> None:
    """Logits that come as the views of one batch are used where they lie."""
    base = torch.randn(6, 8)
    calls = [SAMPLE_TOPP.build(piece, 0.9, seed=i)[1] for i, piece in enumerate(base.split([1, 3, 2]))]
    _, (merged,) = together(SAMPLE_TOPP, calls)
    assert merged[0].data_ptr() == base.data_ptr()


def test_no_rows_need_no_kernel() -> None:
    """No rows, no tokens."""
    assert call(SAMPLE, torch.empty(0, 8)).shape == (0,)


def test_sampling_has_no_gradient() -> None:
    """The ops say so."""
    assert not any(op.differentiable for op in (SAMPLE, SAMPLE_TOPK, SAMPLE_TOPP))


L = torch.zeros(2, 4)
BAD_ROW = torch.tensor([[0.0, 0.0], [0.0, math.nan]])
BAD: list[tuple[Op, tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    (SAMPLE, (None,), {}, TypeError, "logits needs a torch.Tensor"),
    (SAMPLE, (L[0],), {}, ValueError, "logits needs 2 dimensions, got 1"),
    (SAMPLE, (L.long(),), {}, TypeError, "logits needs a floating point dtype"),
    (SAMPLE, (torch.ones(2, 0),), {}, ValueError, "logits needs a last axis of at least 1"),
    (SAMPLE, (BAD_ROW,), {}, ValueError, "logits needs a finite largest value in each row, got nan in row 1"),
    (SAMPLE, (BAD_ROW.new_full((3, 2), -math.inf),), {}, ValueError, "got -inf in row 0"),
    (SAMPLE, (torch.tensor([[0.0], [math.inf]]),), {}, ValueError, "got inf in row 1"),
    (SAMPLE, (L,), {"temperature": -0.1}, ValueError, "temperature needs a finite number"),
    (SAMPLE, (L,), {"temperature": math.inf}, ValueError, "temperature needs a finite number"),
    (SAMPLE, (L,), {"temperature": "hot"}, TypeError, "temperature needs a number"),
    (SAMPLE, (L,), {"temperature": torch.ones(3)}, ValueError, "temperature needs 2 elements"),
    (
        SAMPLE,
        (L,),
        {"temperature": torch.tensor([1.0, -1.0])},
        ValueError,
        "temperature needs values in .* row 1",
    ),
    (
        SAMPLE,
        (L,),
        {"temperature": torch.tensor([math.nan, 1.0])},
        ValueError,
        "temperature .* got nan in row 0",
    ),
    (SAMPLE, (L,), {"top_k": -1}, ValueError, "top_k needs an int in"),
    (SAMPLE, (L,), {"top_k": 1.5}, TypeError, "top_k needs an int"),
    (SAMPLE, (L,), {"top_k": torch.ones(2)}, TypeError, "top_k needs dtype int32 or int64"),
    (SAMPLE, (L,), {"top_k": torch.tensor([1, -2])}, ValueError, "top_k needs values in .* got -2 in row 1"),
    (SAMPLE, (L,), {"top_p": 1.01}, ValueError, "top_p needs a finite number in"),
    (
        SAMPLE,
        (L,),
        {"top_p": torch.tensor([0.5, 1.5])},
        ValueError,
        "top_p needs values in .* got 1.5 in row 1",
    ),
    (SAMPLE, (L,), {"seed": 0.5}, TypeError, "seed needs an int"),
    (SAMPLE, (L,), {"seed": torch.arange(3)}, ValueError, "seed needs 2 elements"),
    (SAMPLE, (L,), {"seed": torch.arange(2, device="meta")}, ValueError, "seed needs to be on cpu"),
    (SAMPLE, (L,), {"offset": True}, TypeError, "offset needs an int"),
    (SAMPLE_TOPK, (L, 0), {}, ValueError, "k needs an int in"),
    (SAMPLE_TOPK, (L, torch.tensor([1, 0])), {}, ValueError, "k needs values in .* got 0 in row 1"),
    (SAMPLE_TOPK, ([0.0], 1), {}, TypeError, "logits needs a torch.Tensor"),
    (SAMPLE_TOPP, (L, None), {}, TypeError, "p needs a number"),
    (SAMPLE_TOPP, (L, torch.tensor([0.5, -0.5])), {}, ValueError, "p needs values in .* got -0.5 in row 1"),
    (SAMPLE_TOPP, ([0.0], 1.0), {}, TypeError, "logits needs a torch.Tensor"),
]


@pytest.mark.parametrize(("op", "operands", "options", "error", "message"), BAD)
def test_bad_input_is_named(
    op: Op, operands: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Every misfit is a ValueError or TypeError that says which argument, what it needs and what it got."""
    with pytest.raises(error, match=message):
        call(op, *operands, **options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_token_is_an_error_however_it_is_called(temperature: float) -> None:
    """Blocking, bound, awaited alone and awaited in company: never -1 on the CPU."""
    said = "logits needs a finite largest value in each row, got nan in row 1"
    with pytest.raises(ValueError, match=said):
        lz.sync.sample(BAD_ROW, temperature=temperature, seed=1)
    with pytest.raises(ValueError, match=said):
        lz.bind("sample", torch.zeros(2, 2), temperature=temperature, seed=1)(BAD_ROW)

    async def alone() -> None:
        for _ in range(6):  # the first ones queue, the later ones run at once
            with pytest.raises(ValueError, match=said):
                await lz.sample(BAD_ROW, temperature=temperature, seed=1)

    asyncio.run(alone())


def test_of_a_seed_the_low_64_bits_count() -> None:
    """Whether or not such a call was made before."""
    logits = torch.zeros(5, 11)
    for seed, same in ((1 << 64, 0), (-1 << 70, 0), ((1 << 63) + 2, 2 - (1 << 63))):
        assert torch.equal(lz.sync.sample(logits, seed=seed), lz.sync.sample(logits, seed=same))
        assert SAMPLE.check(SAMPLE.build(logits, seed=seed, offset=seed)[1]).op == "sample"
