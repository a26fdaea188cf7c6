"""The row rule: a batch gives every caller what it gets alone, and copies nothing it need not."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from layerzero.ops.batching import RowBatching, as_view_of_base, concat_rows
from layerzero.ops.linear.embedding import EMBEDDING
from layerzero.ops.linear.linear import LINEAR
from layerzero.ops.linear.mlp import MLP
from layerzero.ops.norm.layer_norm import LAYER_NORM
from layerzero.ops.norm.rms_norm import ADD_RMS_NORM, RMS_NORM
from layerzero.ops.op import Args, Op, operand_identity
from tests.native.twins import both_paths as both_paths
from tests.ops.calls import assert_same, together

WIDTH = 6
WEIGHT, BIAS = torch.randn(WIDTH), torch.randn(WIDTH)
MATRIX, UP, DOWN = torch.randn(9, WIDTH), torch.randn(8, WIDTH), torch.randn(WIDTH, 4)
TABLE = torch.randn(11, WIDTH)


def build(op: Op, lead: tuple[int, ...], spread: bool) -> Args:
    """A call of `op` over rows (*lead, WIDTH); `spread` rows lie apart in memory."""
    wide = torch.randn(*lead, WIDTH * 2)
    x = wide[..., ::2] if spread else wide[..., :WIDTH].contiguous()
    operands: dict[Op, tuple[Any, ...]] = {
        RMS_NORM: (x, WEIGHT),
        ADD_RMS_NORM: (x, x + 1, WEIGHT),
        LAYER_NORM: (x, WEIGHT, BIAS),
        LINEAR: (x, MATRIX),
        MLP: (x, UP, DOWN),
        EMBEDDING: (torch.randint(11, lead), TABLE),
    }
    return op.build(*operands[op])[1]


leads = st.lists(st.integers(1, 4), min_size=0, max_size=3).map(tuple)


@pytest.mark.parametrize(
    "op", [RMS_NORM, ADD_RMS_NORM, LAYER_NORM, LINEAR, MLP, EMBEDDING], ids=lambda op: op.name
)
@given(calls=st.lists(st.tuples(leads, st.booleans()), min_size=1, max_size=8))
def test_a_batch_gives_everyone_what_it_gets_alone(op: Op, calls: list[tuple[tuple[int, ...], bool]]) -> None:
    """Callers with any number of rows in any leading shape, scalars and single rows included."""
    made = [build(op, lead, spread) for lead, spread in calls]
    assert_same(op, made)


@given(
    cuts=st.lists(st.tuples(st.integers(0, 7), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=4),
    touching=st.booleans(),
)
def test_rows_of_any_strides_are_joined_in_order(cuts: list[tuple[int, int, int]], touching: bool) -> None:
    """Pieces with rows of other strides, single rows among them, also where one begins as another ends."""
    buffer, at, pieces = torch.arange(96.0).view(24, 4), 0, []
    for start, count, step in cuts:
        first = at if touching else start
        piece = buffer[first : first + (count - 1) * step + 1 : step]
        pieces.append(piece)
        at = first + count * step
        if at > 14:
            break
    assert torch.equal(concat_rows(pieces), torch.cat(pieces))


def test_a_single_row_of_a_strided_tensor_is_not_the_start_of_dense_ones() -> None:
    """Its stride leads past the rows that follow it in memory."""
    big = torch.randn(3, 3, WIDTH)
    pieces = [big[0:1, 0], big[1]]
    assert torch.equal(concat_rows(pieces), torch.cat(pieces))


def test_rows_that_touch_in_two_storages_are_no_view_of_one() -> None:
    """Two arrays over one buffer lie side by side, and neither tensor's storage reaches into the other's."""
    whole = np.arange(32, dtype=np.float32).reshape(8, 4)
    pieces = [torch.from_numpy(whole[:5]), torch.from_numpy(whole[5:])]
    assert as_view_of_base(pieces) is None
    assert torch.equal(concat_rows(pieces), torch.from_numpy(whole))


def test_rows_seen_through_a_minus_sign_are_no_rows_of_their_neighbours() -> None:
    """Conjugates and negatives share memory with what they are taken of."""
    whole = torch.randn(4, WIDTH, dtype=torch.complex64)
    pieces = [whole[:2], whole[2:].conj()]
    assert torch.equal(concat_rows(pieces), torch.cat(pieces))
    signs = [whole[:2].imag, whole[2:].conj().imag]
    assert torch.equal(concat_rows(signs), torch.cat(signs))


@pytest.mark.parametrize("op", [RMS_NORM, ADD_RMS_NORM, LAYER_NORM, LINEAR, MLP], ids=lambda op: op.name)
def test_pieces_of_one_batch_are_used_where_they_lie(op: Op) -> None:
    """The outputs of one batch, given back together, are its base: the same memory, no gather."""
    base = torch.randn(10, WIDTH)
    calls = []
    for piece in base.split([1, 4, 2, 3]):
        _, *rest = build(op, tuple(piece.shape[:-1]), False)
        if op is ADD_RMS_NORM:
            rest[0] = piece
        calls.append((piece, *rest))
    (merged,) = assert_same(op, calls)
    assert merged[0].data_ptr() == base.data_ptr()
    if op is ADD_RMS_NORM:
        assert merged[1].data_ptr() == base.data_ptr()


def test_leading_axes_come_back_and_go_in_again_without_a_copy() -> None:
    """(2, 3, C) and (4, C) come out of one batch as views of it and are one tensor in the next."""
    first = [build(LINEAR, (2, 3), False), build(LINEAR, (4,), False)]
    results, _ = together(LINEAR, first)
    assert [tuple(r.shape) for r in results] == [(2, 3, 9), (4, 9)]
    back = torch.randn(5, 9)
    _, (merged,) = together(LINEAR, [LINEAR.build(r, back)[1] for r in results])
    assert merged[0].data_ptr() == results[0].data_ptr()
    assert merged[0].shape == (10, 9)


def test_ids_of_one_batch_are_used_where_they_lie() -> None:
    """Rows without a trailing axis follow the same rule."""
    ids = torch.randint(11, (7,))
    (merged,) = assert_same(EMBEDDING, [EMBEDDING.build(p, TABLE)[1] for p in ids.split([3, 1, 3])])
    assert merged[0].data_ptr() == ids.data_ptr()


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2), (0, 1, 1, 2), (2, 1, 0)])
def test_reordered_missing_and_repeated_pieces_are_gathered(order: tuple[int, ...]) -> None:
    """Anything but the exact cover in its order is one gather, and right."""
    base = torch.randn(9, WIDTH)
    pieces = base.split([2, 3, 4])
    chosen = [pieces[i] for i in order]
    assert as_view_of_base(chosen) is None
    (merged,) = assert_same(LINEAR, [LINEAR.build(p, MATRIX)[1] for p in chosen])
    assert merged[0].untyped_storage().data_ptr() != base.untyped_storage().data_ptr()


def test_a_run_inside_the_base_is_a_view_too() -> None:
    """Neighbours that leave out the first and the last piece lie together all the same."""
    pieces = torch.randn(9, WIDTH).split([2, 3, 1, 3])
    joined = as_view_of_base(pieces[1:3])
    assert joined is not None
    assert joined.data_ptr() == pieces[1].data_ptr()
    assert torch.equal(joined, torch.cat(pieces[1:3]))


@given(cuts=st.lists(st.integers(0, 3), min_size=1, max_size=6), columns=st.booleans())
def test_joined_rows_are_the_rows(cuts: list[int], columns: bool) -> None:
    """Whatever the pieces, empty ones and column slices included, joining is concatenating."""
    base = torch.randn(sum(cuts), WIDTH)
    pieces = (base[:, 1:4] if columns else base).split(cuts)
    assert torch.equal(concat_rows(pieces), torch.cat(pieces))


def test_tensors_that_only_touch_are_not_joined() -> None:
    """Rows that repeat one row (stride 0), or that differ in stride, are no base."""
    row = torch.randn(1, WIDTH)
    assert as_view_of_base([row.expand(2, WIDTH), row.expand(2, WIDTH)]) is None
    base = torch.randn(4, WIDTH)
    assert as_view_of_base([base[:2], base[2:].T.contiguous().T]) is None
    assert as_view_of_base([torch.tensor(1.0), torch.tensor(2.0)]) is None


def other_weight() -> Tensor:
    """Equal values in other memory."""
    return MATRIX.clone()


def test_only_the_same_weights_share_a_launch() -> None:
    """Rows meet over one tensor in memory; equal values elsewhere, another view or another scalar do not."""
    x = torch.randn(2, WIDTH)
    assert LINEAR.batching is not None and RMS_NORM.batching is not None
    same = LINEAR.batching.batch_key(LINEAR.build(x, MATRIX)[1])
    assert same == LINEAR.batching.batch_key(LINEAR.build(torch.randn(7, WIDTH), MATRIX)[1])
    copy = other_weight()
    half = MATRIX[:, :3]
    for args in (
        LINEAR.build(x, copy)[1],
        LINEAR.build(x, MATRIX, torch.ones(9))[1],
        LINEAR.build(x[:, :3], half)[1],
        LINEAR.build(x.double(), MATRIX)[1],
        LINEAR.build(x.to("meta"), MATRIX)[1],
    ):
        assert LINEAR.batching.batch_key(args) != same
    one = RMS_NORM.batching.batch_key(RMS_NORM.build(x, WEIGHT, eps=1e-6)[1])
    assert one != RMS_NORM.batching.batch_key(RMS_NORM.build(x, WEIGHT, eps=1e-5)[1])
    assert operand_identity(MATRIX) != operand_identity(copy)


def test_a_rule_may_refuse_a_call() -> None:
    """`fits` says which calls may join at all."""
    rule = RowBatching(accepts=lambda args: bool(args[1] == 0.0))
    assert rule.batch_key((torch.ones(2, 3), 0.0)) is not None
    assert rule.batch_key((torch.ones(2, 3), 0.5)) is None


def test_size_is_rows_and_bytes() -> None:
    """What a batch is bounded by: rows over all leading axes, and the bytes of the rows."""
    assert RowBatching().batch_cost((torch.ones(2, 3, 4),)) == (6, 96)
    assert RowBatching(trailing_axes=0).batch_cost((torch.ones(2, 3, dtype=torch.int64),)) == (6, 48)
    assert RowBatching(trailing_axes=2).batch_cost((torch.ones(5, 2, 4),)) == (5, 160)
    assert RowBatching().batch_cost((torch.ones(4),)) == (1, 16)


def test_operands_and_outputs_may_differ_in_trailing_axes() -> None:
    """One number for all, or one for each operand and each output."""
    rule = RowBatching(row_operands=(0, 1), trailing_axes=(2, 0), output_trailing_axes=(2, 0))
    calls = [(torch.randn(n, 2, 3), torch.arange(n)) for n in (1, 4)]
    results = rule.run(calls, lambda args: (args[0] + 1, args[1] * 2))
    for (x, ids), (more, twice) in zip(calls, results, strict=True):
        assert torch.equal(more, x + 1)
        assert torch.equal(twice, ids * 2)
    with pytest.raises(ValueError, match="argument"):
        RowBatching(row_operands=(0, 1), trailing_axes=(1,))
