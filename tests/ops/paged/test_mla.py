"""The MLA reference against loops over scalars, its checks, and callers in one batch."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from layerzero.ops.op import Args
from layerzero.ops.paged.mla import MLA_ATTENTION, mla_attention
from tests.ops.calls import assert_same, call
from tests.ops.paged.paging import oracle, paged_call


def latent_call(queries: list[int], lengths: list[int], **options: Any) -> tuple[Args, Any]:
    """A call over pools cut from one pool of width 16 + 4, and its dense sequences."""
    args, dense = paged_call(queries, lengths, heads=(3, 1), widths=(20, 20))
    pool = args[1][:, :, 0]
    ckv, kpe = pool[..., :16].contiguous(), pool[..., 16:].contiguous()
    q = args[0]
    full = mla_attention(
        q[..., :16], q[..., 16:], ckv, kpe, *args[3:5], cu_seqlens_q=args[5], scale=0.3, **options
    )[1]
    return full, [(count, keys, keys[..., :16]) for count, keys, _ in dense]


@pytest.mark.parametrize("causal", [True, False])
def test_latent_pages_agree_with_a_loop(causal: bool) -> None:
    """Scores are over both parts, values are the first."""
    args, dense = latent_call([3, 1, 2], [3, 17, 9], is_causal=causal, return_lse=True)
    names = ("cu_seqlens_q", "scale", "is_causal", "return_lse", "ckv_scale", "kpe_scale")
    out, lse = call(MLA_ATTENTION, *args[:6], **dict(zip(names, args[6:], strict=True)))
    q = torch.cat(args[:2], -1)
    wanted, wanted_lse = oracle(q, dense, causal, scale=0.3)
    assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
    assert_close(lse.double(), wanted_lse, atol=1e-5, rtol=1e-5)


WRONG: list[tuple[type[Exception], dict[int, Any], str]] = [
    (ValueError, {1: torch.zeros(3, 2, 4)}, "q_pe needs"),
    (ValueError, {3: torch.zeros(1, 8, 4)}, "kpe_cache needs pages"),
    (ValueError, {3: torch.zeros(6, 8, 5)}, "kpe_cache needs width 4 like q_pe, got 5"),
    (TypeError, {3: torch.zeros(6, 8, 4).double()}, "kpe_cache needs dtype float32"),
    (TypeError, {7: None}, "scale needs a number"),
    (ValueError, {4: torch.tensor([[0, 0, 1]])}, "page 0 at row 0, entries 0 and 1"),
    (ValueError, {5: torch.tensor([99])}, "seq_lens needs lengths"),
]


@pytest.mark.parametrize(("error", "change", "message"), WRONG)
def test_what_does_not_fit_is_named(error: type[Exception], change: dict[int, Any], message: str) -> None:
    """The same words as for paged attention."""
    args, _ = latent_call([3], [17])
    wrong = tuple(change.get(position, value) for position, value in enumerate(args))
    with pytest.raises(error, match=message):
        MLA_ATTENTION.check(wrong)
        assert MLA_ATTENTION.validate_values is not None
        MLA_ATTENTION.validate_values(wrong)


def test_callers_over_one_pool_share_a_launch() -> None:
    """Both parts of the queries join; both pools stay the callers'."""
    args, _ = latent_call([2, 3], [9, 17], return_lse=True)
    cu = args[6]
    calls = []
    for row in range(2):
        mine = slice(int(cu[row]), int(cu[row + 1]))
        own = torch.tensor([0, mine.stop - mine.start])
        tables = (args[4][row : row + 1], args[5][row : row + 1])
        calls.append((args[0][mine], args[1][mine], *args[2:4], *tables, own, *args[7:]))
    (launched,) = assert_same(MLA_ATTENTION, calls)
    assert launched[2] is args[2] and launched[3] is args[3]
