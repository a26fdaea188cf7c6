"""The paged reference against loops over scalars, its checks and guards, and callers in one batch."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from layerzero.ops.paged.attention import PAGED_ATTENTION, paged_attention
from tests.ops.calls import assert_same, call, parts
from tests.ops.paged.paging import oracle, paged_call


def options_of(args: tuple[Any, ...]) -> dict[str, Any]:
    """The keywords of a call given as its argument tuple."""
    names = (
        "cu_seqlens_q",
        "is_causal",
        "scale",
        "window",
        "softcap",
        "layout",
        "return_lse",
        "k_scale",
        "v_scale",
    )
    return dict(zip(names, args[5:], strict=True))


def run(args: tuple[Any, ...]) -> Any:
    """Build, check, guard and compute with the reference."""
    return call(PAGED_ATTENTION, *args[:5], **options_of(args))


@pytest.mark.parametrize("page_size", [1, 8, 16, 32, 64])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_pages_of_every_size_and_layout_agree_with_a_loop(
    page_size: int, layout: str, index: torch.dtype
) -> None:
    """Prefill, chunks, decode, no query and no key in one call; what lengths do not reach is not read."""
    args, dense = paged_call(
        [5, 3, 1, 0, 2], [5, 21, 9, 4, 0], page_size=page_size, layout=layout, index=index, return_lse=True
    )
    out, lse = run(args)
    wanted, wanted_lse = oracle(args[0], dense, True)
    assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
    assert_close(lse.double(), wanted_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": False},
        {"window": (3, -1)},
        {"window": (3, 2), "is_causal": False},
        {"softcap": 1.5},
        {"scale": 0.7},
        {"window": (0, 0)},
    ],
)
def test_options_agree_with_a_loop(options: dict[str, Any]) -> None:
    """Each option alone, values of another width than keys."""
    args, dense = paged_call([4, 7], [12, 5], widths=(8, 6), return_lse=True, **options)
    causal = options.get("is_causal", True)
    rest = {name: value for name, value in options.items() if name != "is_causal"}
    wanted, wanted_lse = oracle(args[0], dense, causal, **rest)
    out, lse = run(args)
    assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
    assert_close(lse.double(), wanted_lse, atol=1e-5, rtol=1e-5)


def test_decode_is_the_last_row_of_prefill() -> None:
    """One query a sequence without offsets gives what the sequence's last query gives with them."""
    args, _ = paged_call([6], [20])
    full = run(args)
    alone = call(PAGED_ATTENTION, args[0][-1:], *args[1:5])
    assert_close(alone, full[-1:])


def test_a_table_changed_in_place_is_seen() -> None:
    """Two calls with one table object read what the table says at each call."""
    args, _ = paged_call([1, 1], [8, 8], decode=True)
    before = run(args)
    args[3][:, 0] = args[3].flip(0)[:, 0].clone()
    after = run(args)
    assert not torch.equal(before, after)
    assert_close(after, run((*args[:3], args[3].clone(), *args[4:])))


WRONG: list[tuple[str, type[Exception], dict[int, Any], str]] = [
    (
        "float table",
        TypeError,
        {3: torch.zeros(2, 4)},
        "block_tables needs dtype int32 or int64, got float32",
    ),
    (
        "int16 table",
        TypeError,
        {3: torch.zeros(2, 4).short()},
        "block_tables needs dtype int32 or int64, got int16",
    ),
    (
        "int16 lengths",
        TypeError,
        {4: torch.zeros(2).short()},
        "seq_lens needs dtype int32 or int64, got int16",
    ),
    ("three lengths", ValueError, {4: torch.zeros(3).int()}, "seq_lens needs 2 lengths"),
    ("short offsets", ValueError, {5: torch.zeros(2).int()}, "cu_seqlens_q needs 3 offsets for 2"),
    ("no offsets", ValueError, {5: None}, "q needs 2 rows, one for each of block_tables' rows, got 7"),
    ("negative page", ValueError, {3: torch.tensor([[0, -1, 2], [3, 4, 5]])}, r"got -1 at row 0, entry 1"),
    (
        "page out of range",
        ValueError,
        {3: torch.tensor([[0, 1, 2], [3, 99, 5]])},
        r"\[0, 7\), got 99 at row 1, entry 1",
    ),
    ("page twice", ValueError, {3: torch.tensor([[1, 1, 2], [3, 4, 5]])}, "page 1 at row 0, entries 0 and 1"),
    ("length beyond the table", ValueError, {4: torch.tensor([25, 9])}, r"lengths in \[0, 24\].*got 25 at 0"),
    ("negative length", ValueError, {4: torch.tensor([9, -1])}, "got -1 at 1"),
    ("falling offsets", ValueError, {5: torch.tensor([0, 9, 7])}, "never fall, got 9 and then 7 at 2"),
    ("offsets elsewhere", ValueError, {5: torch.tensor([0, 4, 6])}, "end at 7, the rows of q, got 6"),
    ("offsets from 1", ValueError, {5: torch.tensor([1, 4, 7])}, "start at 0, got 1"),
    ("an int64 pool", TypeError, {1: torch.zeros(7, 8, 2, 8).long()}, "k_cache needs one of .* got int64"),
    (
        "other values",
        TypeError,
        {2: torch.zeros(7, 8, 2, 8).double()},
        "v_cache needs dtype float32 like k_cache",
    ),
    (
        "other pages",
        ValueError,
        {2: torch.zeros(6, 8, 2, 8)},
        r"v_cache needs pages, tokens and heads \(.*\) like k_cache, got \(6, 8, 2\)",
    ),
    ("other width", ValueError, {0: torch.zeros(7, 4, 5)}, "k_cache needs head size 5 like q, got 8"),
    ("other heads", ValueError, {0: torch.zeros(7, 3, 8)}, "heads that divide q's 3, got 2"),
    ("layout", ValueError, {10: "BHSD"}, "layout needs one of NHD, HND, got 'BHSD'"),
    ("softcap", ValueError, {9: 0.0}, "softcap needs a number > 0"),
]


@pytest.mark.parametrize(("what", "error", "change", "message"), WRONG, ids=[w[0] for w in WRONG])
def test_what_does_not_fit_is_named(
    what: str, error: type[Exception], change: dict[int, Any], message: str
) -> None:
    """Shapes and dtypes at the check, page ids and lengths at the guard, before anything is computed."""
    args, _ = paged_call([4, 3], [16, 9])
    wrong = tuple(change.get(position, value) for position, value in enumerate(args))
    assert what
    with pytest.raises(error, match=message):
        _, full = paged_attention(*wrong[:5], **options_of(wrong))
        PAGED_ATTENTION.check(full)
        assert PAGED_ATTENTION.validate_values is not None
        PAGED_ATTENTION.validate_values(full)


def test_a_page_may_serve_two_sequences() -> None:
    """Forks of one prefix share its pages: that is no double ownership."""
    args, dense = paged_call([1, 1], [8, 8], decode=True)
    args[3][1, 0] = args[3][0, 0]
    shared = [dense[0], dense[0]]
    assert_close(run(args).double(), oracle(args[0], shared, True)[0], atol=1e-5, rtol=1e-5)


def callers(*, mixed_index: bool = False) -> list[tuple[Any, ...]]:
    """Prefill, chunked prefill and decode callers over one pool, tables of different widths."""
    args, _ = paged_call([3, 4, 1, 1], [3, 17, 9, 24], return_lse=True)
    q, k, v, table, lens, cu, *flags = args
    made = []
    for row in range(4):
        mine = slice(int(cu[row]), int(cu[row + 1]))
        decode = row >= 2
        own = None if decode else torch.tensor([0, mine.stop - mine.start], dtype=torch.int32)
        index = torch.int64 if mixed_index and row % 2 else torch.int32
        width = int(-(-lens[row] // 8))
        rows: Tensor = table[row : row + 1, :width].to(index)
        made.append((q[mine], k, v, rows, lens[row : row + 1].to(index), own, *flags))
    return made


@pytest.mark.parametrize("mixed_index", [False, True])
def test_callers_over_one_pool_share_a_launch(mixed_index: bool) -> None:
    """Queries and tables stand behind each other; keys and values are the callers' own pool, not a copy."""
    calls = callers(mixed_index=mixed_index)
    (launched,) = assert_same(PAGED_ATTENTION, calls)
    assert launched[1] is calls[0][1] and launched[2] is calls[0][2]
    assert launched[0].shape[0] == 9 and launched[5].tolist() == [0, 3, 7, 8, 9]


def test_decoding_callers_stay_a_decode() -> None:
    """Callers with one query each need no offsets in the batch either."""
    (launched,) = assert_same(PAGED_ATTENTION, callers()[2:])
    assert launched[5] is None and launched[3].shape == (2, 3)


def test_callers_over_other_pools_or_flags_do_not_join() -> None:
    """The pool's memory and every flag decide the group."""
    rule = PAGED_ATTENTION.batching
    assert rule is not None
    args = callers()[3]
    other_pool = (args[0], args[1].clone(), *args[2:])
    other_scale = (*args[:7], 0.5, *args[8:])
    groups = {rule.batch_key(args), rule.batch_key(other_pool), rule.batch_key(other_scale)}
    assert len(groups) == 3 and rule.shared_operands(args) == (1, 2)


def test_no_query_gives_nothing() -> None:
    """A call without queries has results of no row."""
    args, _ = paged_call([0, 0], [4, 9], return_lse=True)
    out, lse = parts(run(args))
    assert out.shape == (0, 4, 8) and lse.shape == (0, 4)


def test_gradients_flow_to_queries_and_pages() -> None:
    """The reference is differentiable; pages that no table names get zeros."""
    args, _ = paged_call([2], [9], dtype=torch.float64)
    q, k, v = (args[0].requires_grad_(), *(p.nan_to_num(0.0).requires_grad_() for p in args[1:3]))
    PAGED_ATTENTION.reference(q, k, v, *args[3:]).sum().backward()
    assert q.grad is not None and k.grad is not None and v.grad is not None
    assert int((v.grad.abs().sum((1, 2, 3)) > 0).sum()) == 2
