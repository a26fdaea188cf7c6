"""Attention calls of several callers in one launch: the same results, and no copies where none are needed."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import layerzero.ops.attention.batching as module
from layerzero.ops.attention.attention import ATTENTION, attention, attention_reference
from layerzero.ops.attention.batching import as_strided_batch
from layerzero.ops.op import Args, Batching, Op


def rule() -> Batching:
    """Attention's batching rule."""
    assert ATTENTION.batching is not None
    return ATTENTION.batching


class Launches:
    """Runs the reference and keeps the arguments of each launch."""

    def __init__(self) -> None:
        self.seen: list[Args] = []

    def __call__(self, args: Args) -> Any:
        self.seen.append(args)
        return attention_reference(*args)


def fused(lengths: Sequence[int], heads: int = 2, groups: int = 2, d: int = 4) -> list[tuple[Tensor, ...]]:
    """q, k, v (1, S, H, D) of each caller as views into one projection of everybody's tokens."""
    base = torch.randn(sum(lengths), (heads + 2 * groups) * d)
    widths = [heads * d, groups * d, groups * d]
    return [
        tuple(part.view(1, part.shape[0], -1, d) for part in rows.split_with_sizes(widths, 1))
        for rows in base.split_with_sizes(list(lengths))
    ]


@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=9
    ),
    layout=st.sampled_from(["BHSD", "BSHD"]),
    causal=st.booleans(),
    lse=st.booleans(),
    slopes=st.booleans(),
    limit=st.sampled_from([0, 1 << 30]),
)
def test_together_equals_one_by_one(
    lengths: list[tuple[int, int, int]], layout: str, causal: bool, lse: bool, slopes: bool, limit: int
) -> None:
    """Any mix of batch sizes and lengths gives each caller its own result, in order."""
    shared = torch.rand(4) if slopes else None
    calls = []
    for batch, q_len, k_len in lengths:
        q, k, v = (
            torch.randn(batch, 4, q_len, 3),
            torch.randn(batch, 2, k_len, 3),
            torch.randn(batch, 2, k_len, 5),
        )
        if layout == "BSHD":
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        calls.append(
            attention(q, k, v, is_causal=causal, layout=layout, return_lse=lse, alibi_slopes=shared)[1]
        )
    assert len({rule().batch_key(args) for args in calls}) == 1
    launch = Launches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "GATHER_BYTES", {"cpu": limit})
        results = rule().run(calls, launch)
    assert len(results) == len(calls)
    if limit:
        assert len(launch.seen) == len({pair[1:] for pair in lengths})
    for args, result in zip(calls, results, strict=True):
        assert_close(result, attention_reference(*args), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("turned", [False, True])
def test_equal_callers_of_one_projection_are_not_copied(turned: bool) -> None:
    """Operands sliced out of a fused projection meet as one strided view of it, in either layout."""
    callers = fused([3] * 5)
    layout = "BHSD" if turned else "BSHD"
    if turned:
        callers = [tuple(t.transpose(1, 2) for t in caller) for caller in callers]
    calls = [attention(*caller, layout=layout)[1] for caller in callers]
    launch = Launches()
    results = rule().run(calls, launch)
    (merged,) = launch.seen
    for position in range(3):
        assert merged[position].data_ptr() == calls[0][position].data_ptr()
        assert merged[position].untyped_storage()._cdata == calls[0][position].untyped_storage()._cdata
        assert merged[position].shape[0] == 5
    for args, result in zip(calls, results, strict=True):
        assert_close(result, attention_reference(*args))


def test_outputs_stand_behind_each_other() -> None:
    """Each caller's output is a row block of one tensor, in the callers' order."""
    calls = [attention(*caller, layout="BSHD")[1] for caller in fused([3] * 4)]
    results = rule().run(calls, Launches())
    step = results[0].numel() * results[0].element_size()
    assert [r.data_ptr() - results[0].data_ptr() for r in results] == [i * step for i in range(4)]
    assert all(r.view(3, -1).is_contiguous() for r in results)


def test_mixed_lengths_keep_their_order() -> None:
    """Callers of several lengths are launched by length, each where its spacing allows without a copy."""
    calls = [attention(*caller, layout="BSHD")[1] for caller in fused([2, 3, 2, 3, 2, 3])]
    launch = Launches()
    results = rule().run(calls, launch)
    assert [args[0].shape[:2] for args in launch.seen] == [(3, 2), (3, 3)]
    assert [args[0].data_ptr() for args in launch.seen] == [calls[0][0].data_ptr(), calls[1][0].data_ptr()]
    for args, result in zip(calls, results, strict=True):
        assert_close(result, attention_reference(*args))


def test_pieces_with_several_sequences_are_joined() -> None:
    """Callers that bring a batch of their own are recognised as parts of one tensor."""
    base = torch.randn(7, 2, 3, 4)
    view = as_strided_batch([base[:2], base[2:3], base[3:]])
    assert view is not None
    assert torch.equal(view, base) and view.data_ptr() == base.data_ptr()


def test_a_shared_operand_is_not_copied() -> None:
    """Keys that every caller shares are seen through a stride of 0."""
    shared = torch.randn(1, 2, 6, 4)
    view = as_strided_batch([shared, shared, shared])
    assert view is not None
    assert view.stride(0) == 0 and torch.equal(view, shared.expand(3, 2, 6, 4))


@pytest.mark.parametrize(
    "pieces",
    [
        lambda base, other: [base[0:1], base[1:2], base[3:4]],
        lambda base, other: [base[1:2], base[0:1]],
        lambda base, other: [base[0:1], other[0:1]],
        lambda base, other: [base[0:2], base[3:4]],
        lambda base, other: [base[0:1], base[1:4:2], base[3:4]],
        lambda base, other: [base[0:1], base[1:2].transpose(1, 2)],
        lambda base, other: [base[0:1], base[1:2, :1]],
        lambda base, other: [base[0:4:2], base[1:2]],
    ],
)
def test_what_is_not_equally_spaced_is_no_view(pieces: Any) -> None:
    """A gap, another order, another storage, other strides or shapes: no view."""
    assert as_strided_batch(pieces(torch.randn(4, 3, 3, 2), torch.randn(4, 3, 3, 2))) is None


def test_large_scattered_calls_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit, callers whose operands would have to be gathered are launched apart."""
    monkeypatch.setattr(module, "GATHER_BYTES", {"cpu": 1 << 10})
    calls = [attention(*(torch.randn(1, 2, 16, 8) for _ in range(3)))[1] for _ in range(3)]
    launch = Launches()
    rule().run(calls, launch)
    assert len(launch.seen) == 3
    assert all(seen is args for seen, args in zip(launch.seen, calls, strict=True))


def test_what_runs_alone() -> None:
    """A mask, dropout or slopes per sequence make a call nobody's partner."""
    q = torch.zeros(2, 2, 3, 4)
    assert rule().batch_key(attention(q, q, q)[1]) is not None
    assert rule().batch_key(attention(q, q, q, attn_mask=torch.ones(3, 3, dtype=torch.bool))[1]) is None
    assert rule().batch_key(attention(q, q, q, dropout_p=0.1)[1]) is None
    assert rule().batch_key(attention(q, q, q, alibi_slopes=torch.ones(2, 2))[1]) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"is_causal": True},
        {"scale": 0.3},
        {"window": (1, 1)},
        {"softcap": 2.0},
        {"alibi_slopes": torch.ones(2)},
        {"return_lse": True},
        {"layout": "BSHD"},
    ],
)
def test_other_flags_are_another_group(changes: dict[str, Any]) -> None:
    """Whatever changes the answer separates groups; lengths and batch sizes do not."""
    q = torch.zeros(2, 2, 3, 4)
    group = rule().batch_key(attention(q, q, q)[1])
    assert rule().batch_key(attention(q, q, q, **changes)[1]) != group
    longer = torch.zeros(1, 2, 9, 4)
    assert rule().batch_key(attention(longer, longer, longer)[1]) == group
    assert rule().batch_key(attention(q.half(), q.half(), q.half())[1]) != group
    other = torch.zeros(2, 4, 3, 4)
    assert rule().batch_key(attention(other, q, q)[1]) != group


def test_size_counts_query_tokens_and_bytes() -> None:
    """A batch is bounded by query tokens and by operand bytes."""
    q, k = torch.zeros(2, 5, 4, 8), torch.zeros(2, 7, 2, 8)
    assert rule().batch_cost(attention(q, k, k, layout="BSHD")[1]) == (10, 4 * (q.numel() + 2 * k.numel()))


class Eager(Launches):
    """Finds whatever is one launch for several lengths cheaper than a launch each."""

    is_unconstrained = True

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __call__(self, args: Args, op: Op | None = None) -> Any:
        self.ops.append("attention" if op is None else op.name)
        return super().__call__(args) if op is None else op.reference(*args)

    def expected_us(self, args: Args, op: Op | None = None) -> float:
        return 1.0 if op is None else 0.0


@pytest.mark.parametrize(
    "option",
    [
        {}, {"window": (1, 0)}, {"softcap": 0.5}, {"alibi_slopes": torch.tensor([0.5, 0.25])},
        {"sinks": torch.tensor([0.3, -0.7])}, {"return_lse": True}, {"layout": "BHSD"},
    ],
    ids=lambda option: next(iter(option), "none"),
)  # fmt: skip
def test_what_ragged_attention_has_not_is_launched_by_lengths(option: dict[str, Any]) -> None:
    """However cheap one launch for all would be; without any of it that is what is launched."""
    axis = 2 if option.get("layout") == "BHSD" else 1
    calls = []
    for tokens in (3, 5):
        q, k, v = (torch.randn(1, *((2, tokens) if axis == 2 else (tokens, 2)), 4) for _ in range(3))
        calls.append(ATTENTION.build(q, k, v, **{"layout": "BSHD", "is_causal": True, **option})[1])
    launch = Eager()
    results = rule().run(calls, launch)
    assert launch.ops == (["attention"] * 2 if option else ["ragged_attention"])
    for args, result in zip(calls, results, strict=True):
        assert_close(result, attention_reference(*args))
