"""embedding: rows by id, the padding row's gradient, ids that are wrong."""

from typing import Any

import pytest
import torch

from layerzero.ops.linear.embedding import EMBEDDING
from tests.ops.calls import call

TABLE = torch.randn(7, 3)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lead", [(), (4,), (2, 3)])
def test_rows_are_the_tables(index: torch.dtype, dtype: torch.dtype, lead: tuple[int, ...]) -> None:
    """Each id gives its row, bit for bit."""
    ids = torch.randint(7, lead, dtype=index)
    table = TABLE.to(dtype)
    assert torch.equal(call(EMBEDDING, ids, table), table[ids.long()])


@pytest.mark.parametrize("padding_idx", [2, -5])
def test_the_padding_row_gets_no_gradient(padding_idx: int) -> None:
    """Its row of the gradient is zero, from the front or from the end; every other row counts its ids."""
    table = TABLE.clone().requires_grad_()
    call(EMBEDDING, torch.tensor([2, 1, 1, 2]), table, padding_idx=padding_idx).sum().backward()
    assert table.grad is not None
    assert table.grad[2].eq(0).all()
    assert table.grad[1].eq(2).all()


def test_gradients_are_right() -> None:
    """Analytic and numeric gradients agree in float64, repeated ids included."""
    table = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 1], [1, 3]])
    assert torch.autograd.gradcheck(lambda t: call(EMBEDDING, ids, t), (table,))


def test_a_table_may_be_a_view() -> None:
    """Every other row of a wider table."""
    wide = torch.randn(14, 6)[::2, ::2]
    assert torch.equal(call(EMBEDDING, torch.tensor([6, 0]), wide), wide[[6, 0]])


def test_empty_calls_need_no_kernel() -> None:
    """No ids, or rows of no columns: the shape is the answer."""
    assert call(EMBEDDING, torch.empty(2, 0, dtype=torch.int64), TABLE).shape == (2, 0, 3)
    assert call(EMBEDDING, torch.tensor([1]), torch.empty(4, 0)).shape == (1, 0)
    assert call(EMBEDDING, torch.empty(0, dtype=torch.int64), torch.empty(0, 3)).shape == (0, 3)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([0, 7, 9]), r"ids needs ids in \[0, 7\) \(weight's rows\), got 7 at position 1"),
        (torch.tensor([[0, 1], [2, -1]]), r"got -1 at position \(1, 1\)"),
        (torch.tensor(8), r"got 8$"),
        (torch.tensor([1, 1 << 40]), r"got 1099511627776 at position 1"),
    ],
)
def test_an_id_out_of_range_is_named_with_its_position(ids: torch.Tensor, message: str) -> None:
    """The first offender, where it stands, and the range."""
    with pytest.raises(ValueError, match=message):
        call(EMBEDDING, ids, TABLE)


IDS = torch.tensor([1, 2])
BAD: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    (([1, 2], TABLE), {}, TypeError, "ids needs a torch.Tensor, got list"),
    ((IDS.float(), TABLE), {}, TypeError, "ids needs dtype int32 or int64, got float32"),
    ((IDS.bool(), TABLE), {}, TypeError, "ids needs dtype int32 or int64, got bool"),
    ((IDS, None), {}, TypeError, "weight needs a torch.Tensor"),
    ((IDS, TABLE[0]), {}, ValueError, "weight needs 2 dimensions"),
    ((IDS, TABLE.long()), {}, TypeError, "weight needs a floating point dtype"),
    ((IDS, TABLE.to("meta")), {}, ValueError, "weight needs to be on cpu like ids"),
    ((IDS, TABLE), {"padding_idx": 7}, ValueError, r"padding_idx needs an int in \[-7, 6\], got 7"),
    ((IDS, TABLE), {"padding_idx": -8}, ValueError, r"padding_idx needs an int in \[-7, 6\], got -8"),
    ((IDS, TABLE), {"padding_idx": 1.0}, TypeError, "padding_idx needs an int, got float"),
]


@pytest.mark.parametrize(("operands", "options", "error", "message"), BAD)
def test_bad_input_is_named(
    operands: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Every misfit is a ValueError or TypeError that says which argument, what it needs and what it got."""
    with pytest.raises(error, match=message):
        call(EMBEDDING, *operands, **options)


def test_the_request_holds_both_dtypes_and_the_padding() -> None:
    """The dtype is the table's; the ids' stands beside it."""
    request = EMBEDDING.check(EMBEDDING.build(IDS.int(), TABLE.half(), padding_idx=0)[1])
    assert (request.dtype, request.dtypes) == ("float16", ("int32", "float16"))
    assert request.dims == {"N": 2, "V": 7, "C": 3}
    assert request.features == {"padding_idx"}
