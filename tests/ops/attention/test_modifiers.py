"""Sinks, score modifiers and block masks of `attention`: who takes them, and callers that meet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import layerzero as lz
from layerzero.ops.attention.attention import ATTENTION, attention, attention_reference
from layerzero.spec.reasons import Reason


@pytest.fixture(autouse=True)
def runtime() -> Iterator[lz.Runtime]:
    """A runtime in which nothing changes while a test looks."""
    with lz.start(lz.Settings.load(warm="off", device="cpu", batching="all")) as opened:
        yield opened


def operands(batch: int = 1, length: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v of four heads."""
    q, k, v = (torch.randn(batch, 4, length, 16) for _ in range(3))
    return q, k, v


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """What a block mask hides: the future."""
    return i >= j


def closer(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """A modifier."""
    return s - (i - j).abs() * (h + 1) * (b + 1)


ASKED: dict[str, Any] = {
    "sinks": (lambda: {"sinks": torch.ones(4)}, Reason.SINKS_UNSUPPORTED),
    "score_mod": (lambda: {"score_mod": closer}, Reason.SCORE_MOD_UNSUPPORTED),
    "block_mask": (
        lambda: {"block_mask": create_block_mask(causal, None, None, 6, 6, "cpu")},
        Reason.BLOCK_MASK_UNSUPPORTED,
    ),
}


@pytest.mark.parametrize("what", list(ASKED))
def test_who_lacks_it_says_so_and_who_answers_is_right(what: str) -> None:
    """Each kernel without it gives its reason, the explanation shows it, the result is the definition's."""
    make, reason = ASKED[what]
    q, k, v = operands()
    named = make()
    trace = lz.select("attention", q, k, v, **named)
    codes = {c.kernel: {r.reason for r in c.rejected} for c in trace.trace}
    assert reason in codes["torch.attention.sdpa_cpu"]
    assert reason not in codes["reference.attention"] and reason not in codes[trace.kernel]
    assert reason.value in str(lz.explain("attention", q, k, v, **named))
    want = attention_reference(*attention(q, k, v, **named)[1])
    torch.testing.assert_close(lz.sync.attention(q, k, v, **named), want)
    torch.testing.assert_close(asyncio.run(lz.attention(q, k, v, **named)), want)


async def all_of(*calls: Any) -> list[Any]:
    """Awaited together, three rounds, so that the second and third are known calls."""
    for _ in range(2):
        await asyncio.gather(*(make() for make in calls))
    return await asyncio.gather(*(make() for make in calls))


def test_callers_keep_their_own_sinks_modifiers_and_masks() -> None:
    """Calls that differ in nothing else meet, and each gets the answer of what it brought."""
    q, k, v = operands()
    few = create_block_mask(lambda b, h, i, j: i - j == 0, None, None, 6, 6, "cpu")
    many = create_block_mask(causal, None, None, 6, 6, "cpu")
    asked: list[dict[str, Any]] = [
        {"sinks": torch.zeros(4)},
        {"sinks": torch.arange(4.0)},
        {"sinks": torch.arange(4.0)},
        {"score_mod": closer},
        {"score_mod": lambda s, b, h, i, j: s * 0},
        {"block_mask": few},
        {"block_mask": many},
        {},
    ]
    calls = [lambda named=named: lz.attention(q, k, v, **named) for named in asked]
    for out, named in zip(asyncio.run(all_of(*calls)), asked, strict=True):
        torch.testing.assert_close(out, attention_reference(*attention(q, k, v, **named)[1]))


def test_callers_of_one_sink_share_a_batch(runtime: lz.Runtime) -> None:
    """The parameter of one layer does not keep its callers apart."""
    sinks = torch.randn(4)
    rule = ATTENTION.batching
    assert rule is not None
    one, other = (attention(*operands(), sinks=sinks)[1] for _ in range(2))
    assert rule.batch_key(one) == rule.batch_key(other) is not None
    assert rule.batch_key(attention(*operands(), sinks=sinks.clone())[1]) != rule.batch_key(one)
    launches: list[int] = []

    def launch(args: Any) -> Any:
        launches.append(args[0].shape[0])
        return attention_reference(*args)

    for out, args in zip(rule.run([one, other], launch), (one, other), strict=True):
        torch.testing.assert_close(out, attention_reference(*args))
    assert launches == [2]


def test_token_major_calls_of_other_lengths_keep_their_sinks() -> None:
    """Calls that would be one ragged launch are not where that op has no sinks."""
    sinks = torch.full((4,), 3.0)

    def call(length: int) -> Any:
        q = torch.randn(1, length, 4, 16, generator=torch.Generator().manual_seed(length))
        named: dict[str, Any] = {"layout": "BSHD", "sinks": sinks}
        return (q, named)

    given = [call(length) for length in (3, 5, 7, 9)]
    calls = [lambda q=q, named=named: lz.attention(q, q, q, **named) for q, named in given]
    for out, (q, named) in zip(asyncio.run(all_of(*calls)), given, strict=True):
        torch.testing.assert_close(out, attention_reference(*attention(q, q, q, **named)[1]))


def test_a_modifier_that_is_none_is_refused_after_one_that_is() -> None:
    """A plan made for a function does not run with a number."""
    q, k, v = operands()
    lz.sync.attention(q, k, v, score_mod=closer)
    with pytest.raises(TypeError, match="score_mod needs a callable"):
        lz.sync.attention(q, k, v, score_mod=3)  # type: ignore[call-overload]
    lz.sync.attention(q, k, v, block_mask=create_block_mask(causal, None, None, 6, 6, "cpu"))
    with pytest.raises(TypeError, match="block_mask needs a"):
        lz.sync.attention(q, k, v, block_mask=torch.ones(6, 6))


def test_parts_of_a_call_keep_their_places() -> None:
    """A call that is cut along its sequences shifts what modifiers and block masks are asked about."""
    q, k, v = operands(batch=3)
    blocks = create_block_mask(lambda b, h, i, j: i - j < b + 1, 3, None, 6, 6, "cpu")
    args = attention(q, k, v, score_mod=closer, block_mask=blocks)[1]
    assert ATTENTION.split is not None
    parts: list[Any] = [
        attention_reference(*ATTENTION.split.cut(args, start, stop)) for start, stop in ((0, 1), (1, 3))
    ]
    torch.testing.assert_close(torch.cat(parts), attention_reference(*args))
