"""ALiBi's slopes against the paper's, its bias against a loop, and against attention's own."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from layerzero.ops.attention.alibi import ALIBI, _slopes, alibi, alibi_reference, alibi_slopes
from layerzero.ops.attention.attention import attention, attention_reference


def paper_slopes(heads: int) -> list[float]:
    """The recursion that the paper's authors published."""

    def power_of_two(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(n.bit_length() - 1 - 3)))
        return [start * start**i for i in range(n)]

    if heads & (heads - 1) == 0:
        return power_of_two(heads)
    below = 1 << (heads.bit_length() - 1)
    return power_of_two(below) + paper_slopes(2 * below)[0::2][: heads - below]


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 7, 8, 12, 16, 25, 32, 40, 71])
def test_slopes(heads: int) -> None:
    """Powers of two and every other number of heads give the authors' slopes."""
    assert alibi_slopes(heads).tolist() == pytest.approx(paper_slopes(heads))
    assert alibi_slopes(heads, dtype=torch.float64).dtype == torch.float64


def test_slopes_belong_to_the_caller() -> None:
    """What a caller does to its slopes does not reach the next caller."""
    alibi_slopes(8).zero_()
    assert float(alibi_slopes(8)[0]) == 0.5


def test_slopes_are_cached_within_bounds_from_any_thread() -> None:
    """Sixteen threads over more head counts than the cache holds agree; the cache stays bounded."""
    with ThreadPoolExecutor(16) as pool:
        for _ in range(3):
            got = list(pool.map(lambda n: alibi_slopes(n).tolist(), range(1, 200)))
            assert all(len(slopes) == n for n, slopes in enumerate(got, 1))
            assert got[11] == pytest.approx(paper_slopes(12))
    info = _slopes.cache_info()
    assert info.maxsize is not None and info.currsize <= info.maxsize


@pytest.mark.parametrize(("q_len", "k_len"), [(3, 3), (1, 5), (2, 5), (5, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bias(q_len: int, k_len: int, dtype: torch.dtype) -> None:
    """Entry (h, i, j) is -slope * |i + k_len - q_len - j|, rounded once."""
    slopes = alibi_slopes(3, dtype=dtype)
    _, args = alibi(slopes, q_len, k_len)
    ALIBI.check(args)
    out = alibi_reference(*args)
    (spec,) = ALIBI.outputs(args)
    assert (tuple(out.shape), str(out.dtype)) == (spec.shape, f"torch.{spec.dtype}")
    for h in range(3):
        for i in range(q_len):
            for j in range(k_len):
                exact = -float(slopes[h]) * abs(i + k_len - q_len - j)
                assert float(out[h, i, j]) == float(torch.tensor(exact, dtype=torch.float64).to(dtype))


def test_bias_as_a_mask_equals_slopes() -> None:
    """Attention with slopes is attention with the bias added."""
    q, k, v = torch.randn(2, 6, 4, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    slopes = alibi_slopes(6)
    by_slopes = attention_reference(*attention(q, k, v, alibi_slopes=slopes)[1])
    by_mask = attention_reference(*attention(q, k, v, attn_mask=alibi_reference(slopes, 4, 7))[1])
    assert_close(by_slopes, by_mask)


def test_gradient() -> None:
    """Slopes are differentiable."""
    slopes = alibi_slopes(3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: alibi_reference(s, 3, 4), (slopes,))


def test_empty_lengths() -> None:
    """No queries or no keys give an empty bias."""
    assert ALIBI.empty is not None
    assert ALIBI.empty(alibi(alibi_slopes(3), 0, 4)[1]).shape == (3, 0, 4)
    assert ALIBI.empty(alibi(alibi_slopes(3), 4, 0)[1]).shape == (3, 4, 0)
    assert ALIBI.empty(alibi(alibi_slopes(3), 4, 4)[1]) is None


def test_the_call_is_described() -> None:
    """Heads and lengths are the request's sizes; the bias is what moves."""
    request = ALIBI.check(alibi(alibi_slopes(3), 4, 5)[1])
    assert request.dims == {"Hq": 3, "Sq": 4, "Sk": 5}
    assert ALIBI.work(request).bytes == 4 * 3 * 4 * 5
    assert alibi(alibi_slopes(3), 4, 5)[0] == alibi(alibi_slopes(3), 4, 5)[0]
    assert len({alibi(alibi_slopes(3), q, k)[0] for q in (3, 4) for k in (3, 4)}) == 4


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((0.5, 3, 3), TypeError, "slopes needs a torch.Tensor, got float"),
        ((torch.ones(2, 2), 3, 3), ValueError, "slopes needs 1 dimensions, got 2"),
        ((torch.ones(0), 3, 3), ValueError, "slopes needs at least 1 head"),
        ((torch.ones(2, dtype=torch.int64), 3, 3), TypeError, "slopes needs a floating point dtype"),
        ((torch.ones(2), -1, 3), ValueError, "q_len needs an int >= 0, got -1"),
        ((torch.ones(2), 3, 2.0), TypeError, "k_len needs an int, got float"),
    ],
)
def test_bad_input_is_named(args: Any, error: type[Exception], message: str) -> None:
    """The error says which argument, what it needs, what it got."""
    with pytest.raises(error, match=message):
        ALIBI.check(alibi(*args)[1])


@pytest.mark.parametrize(
    ("heads", "error"), [(0, ValueError), (-4, ValueError), ("8", TypeError), (True, TypeError)]
)
def test_bad_head_counts_are_named(heads: Any, error: type[Exception]) -> None:
    """The number of heads is an int of at least 1."""
    with pytest.raises(error, match="heads needs an int"):
        alibi_slopes(heads)
