"""The ragged reference against loops over scalars, its checks, and callers in one batch."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from layerzero.ops.paged.ragged import RAGGED_ATTENTION, ragged_attention
from tests.ops.calls import assert_same, call, parts
from tests.ops.paged.paging import oracle


def operands(
    queries: list[int], keys: list[int], heads: tuple[int, int] = (4, 2), dv: int = 6, seed: int = 0
) -> tuple[list[Tensor], list[tuple[int, Tensor, Tensor]]]:
    """q, k, v, both offsets, and the sequences one by one."""
    random = torch.Generator().manual_seed(seed)
    q = torch.randn(sum(queries), heads[0], 8, generator=random)
    k = torch.randn(sum(keys), heads[1], 8, generator=random)
    v = torch.randn(sum(keys), heads[1], dv, generator=random)
    offsets = [torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()]) for n in (queries, keys)]
    dense = list(zip(queries, k.split(keys), v.split(keys), strict=True))
    return [q, k, v, *offsets], dense


@pytest.mark.parametrize("keys", [4, 6])
def test_offsets_of_the_queries_are_judged_by_the_keys_too(keys: int) -> None:
    """One tensor for both: fewer keys would be read beyond their end, and of more some would be left out."""
    (q, k, v, offsets, _), _ = operands([2, 3], [2, keys - 2])
    with pytest.raises(ValueError, match="cu_seqlens_k needs"):
        call(RAGGED_ATTENTION, q, k, v, offsets)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", [{}, {"window": (2, 1)}, {"softcap": 1.5}, {"scale": 0.6}])
def test_sequences_agree_with_a_loop(causal: bool, options: dict[str, Any]) -> None:
    """More keys than queries, fewer, none of either."""
    given, dense = operands([3, 5, 0, 2, 4], [7, 5, 3, 0, 2])
    out, lse = call(RAGGED_ATTENTION, *given, is_causal=causal, return_lse=True, **options)
    wanted, wanted_lse = oracle(given[0], dense, causal, **options)
    assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
    assert_close(lse.double(), wanted_lse, atol=1e-5, rtol=1e-5)


def test_keys_have_the_queries_offsets_by_default() -> None:
    """Self attention needs one set of offsets."""
    given, _ = operands([3, 5], [3, 5])
    assert torch.equal(call(RAGGED_ATTENTION, *given[:4]), call(RAGGED_ATTENTION, *given))


WRONG: list[tuple[type[Exception], dict[int, Any], str]] = [
    (TypeError, {3: torch.zeros(3)}, "cu_seqlens_q needs dtype int32 or int64, got float32"),
    (ValueError, {3: torch.zeros(0).int()}, "cu_seqlens_q needs at least one offset"),
    (ValueError, {4: torch.zeros(2).int()}, "cu_seqlens_k needs 3 offsets for 2"),
    (ValueError, {4: torch.tensor([0, 9, 7])}, "cu_seqlens_k needs offsets that never fall"),
    (ValueError, {3: torch.tensor([0, 3, 7])}, "cu_seqlens_q needs to end at 8, the rows of q, got 7"),
    (ValueError, {1: torch.zeros(8, 3, 8)}, "v needs tokens and heads"),
    (ValueError, {0: torch.zeros(8, 3, 8)}, "k needs heads that divide q's 3, got 2"),
    (ValueError, {0: torch.zeros(8, 4, 5)}, "k needs head size 5 like q, got 8"),
]


@pytest.mark.parametrize(("error", "change", "message"), WRONG)
def test_what_does_not_fit_is_named(error: type[Exception], change: dict[int, Any], message: str) -> None:
    """Shapes and dtypes at the check, offsets at the guard."""
    given, _ = operands([3, 5], [3, 5])
    wrong = [change.get(position, value) for position, value in enumerate(given)]
    with pytest.raises(error, match=message):
        call(RAGGED_ATTENTION, *wrong)


def test_callers_share_a_launch() -> None:
    """Pieces of one projection join without a copy; offsets are shifted."""
    given, _ = operands([3, 5, 2], [3, 5, 2])
    calls = []
    for start, stop in ((0, 3), (3, 8), (8, 10)):
        q, k, v = (t[start:stop] for t in given[:3])
        own = torch.tensor([0, stop - start])
        calls.append(ragged_attention(q, k, v, own, is_causal=True, return_lse=True)[1])
    (launched,) = assert_same(RAGGED_ATTENTION, calls)
    assert launched[0].data_ptr() == given[0].data_ptr()
    assert launched[3].tolist() == [0, 3, 8, 10] and launched[4].tolist() == [0, 3, 8, 10]


def test_no_query_gives_nothing() -> None:
    """A call without queries has results of no row."""
    given, _ = operands([0], [4])
    out, lse = parts(call(RAGGED_ATTENTION, *given, return_lse=True))
    assert out.shape == (0, 4, 6) and lse.shape == (0, 4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_jagged_tensor_s_parts_are_ragged_operands() -> None:
    """values() and offsets() of a nested tensor go in as they are; the result is torch's own (E6.11)."""
    random = torch.Generator().manual_seed(3)
    rows = [torch.randn(length, 4, 8, generator=random) for length in (3, 1, 6)]
    nested: Any = torch.nested.nested_tensor(rows, layout=torch.jagged)
    out = call(RAGGED_ATTENTION, *[nested.values()] * 3, nested.offsets())
    heads_first = nested.transpose(1, 2)
    own = torch.nn.functional.scaled_dot_product_attention(heads_first, heads_first, heads_first)
    assert_close(out, own.transpose(1, 2).values(), atol=1e-5, rtol=1e-5)
