"""Verified drafts: distributed as the target alone, whatever the draft; the same alone and in any batch."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

import layerzero as lz
from layerzero.ops.sampling import verify
from layerzero.ops.sampling.verify import tree_depth

DRAWS = 100_000
TREE = (-1, 0, 0, 1, 1, 2)


def distributions(*shape: int, seed: int, sharp: float = 1.0) -> Tensor:
    """Random rows that sum to 1, (..., V)."""
    return torch.softmax(sharp * torch.randn(shape, generator=torch.Generator().manual_seed(seed)), -1)


def drafted(q: Tensor, rows: int, parents: tuple[int, ...] | None = None, seed: int = 0) -> Tensor:
    """(rows, K) tokens, each drawn from its place's (or its parent's) distribution."""
    generator = torch.Generator().manual_seed(seed)
    places = range(len(q)) if parents is None else [max(p, 0) for p in parents]
    return torch.stack([torch.multinomial(q[at], rows, True, generator=generator) for at in places], 1)


def fits(tokens: Tensor, p: Tensor) -> bool:
    """Whether tokens look drawn from p: a chi-square test at one in a million."""
    counts = torch.bincount(tokens, minlength=len(p)).double()
    return float(stats.chisquare(counts, p.double() / p.double().sum() * len(tokens)).pvalue) > 1e-6


@pytest.mark.parametrize("sharp", [0.3, 3.0])
def test_a_chain_is_distributed_as_the_target_alone(sharp: float) -> None:
    """1e5 rows: the first token, the second behind each first, and the one after all that stayed."""
    q, p = distributions(3, 6, seed=1, sharp=sharp), distributions(4, 6, seed=2, sharp=sharp)
    d = drafted(q, DRAWS)
    tokens, accepted = lz.sync.verify_chain(
        q.expand(DRAWS, -1, -1), d, p.expand(DRAWS, -1, -1), seed=torch.arange(DRAWS)
    )
    assert fits(tokens[:, 0], p[0])
    for place in (1, 2, 3):
        reached = accepted >= place
        assert reached.sum() > 1000
        assert fits(tokens[reached, place], p[place])
        for first in range(6):  # independence: the second token does not know the first
            behind = reached & (tokens[:, 0] == first)
            if place == 1 and behind.sum() > 2000:
                assert fits(tokens[behind, 1], p[1])


def test_a_chain_that_skips_the_rest_is_not() -> None:
    """The control: drawing from the target instead of what it has more than the draft fails the same test."""
    q, p = distributions(1, 6, seed=1, sharp=2.0), distributions(2, 6, seed=2, sharp=2.0)
    d = drafted(q, DRAWS)
    tokens, accepted = lz.sync.verify_chain(
        q.expand(DRAWS, -1, -1), d, p.expand(DRAWS, -1, -1), seed=torch.arange(DRAWS)
    )
    again = torch.multinomial(p[0], DRAWS, True, generator=torch.Generator().manual_seed(5))
    assert fits(tokens[:, 0], p[0])
    assert not fits(torch.where(accepted == 0, again, tokens[:, 0]), p[0])


@pytest.mark.parametrize("parents", [(-1, 0, 0, 0), TREE, (-1, 0, 1, 2)], ids=["star", "tree", "chain"])
def test_a_tree_is_distributed_as_the_target_alone(parents: tuple[int, ...]) -> None:
    """The first token whatever stayed, and the token behind each node that stayed."""
    q, p = distributions(len(parents), 5, seed=3), distributions(len(parents), 5, seed=4)
    d = drafted(q, DRAWS, parents)
    tokens, nodes, accepted = lz.sync.verify_tree(
        q.expand(DRAWS, -1, -1), d, p.expand(DRAWS, -1, -1), parents, seed=torch.arange(DRAWS)
    )
    assert fits(tokens[:, 0], p[0])
    for node in range(1, len(parents)):
        here = (nodes == node).any(-1)
        place = int((nodes[here] == node).long().argmax(-1)[0]) + 1
        if here.sum() > 2000:
            assert fits(tokens[here, place], p[node])
    assert int(accepted.max()) == tree_depth(parents)


@given(st.integers(1, 5), st.integers(0, 6), st.integers(2, 9), st.integers(0, 2**31))
def test_what_stays_was_drafted_and_the_rest_is_minus_one(rows: int, k: int, v: int, seed: int) -> None:
    """Property: accepted counts, tokens and fill agree, for every shape, no draft at all included."""
    q, p = distributions(rows, k, v, seed=seed), distributions(rows, k + 1, v, seed=seed + 1)
    d = torch.randint(0, v, (rows, k), generator=torch.Generator().manual_seed(seed))
    tokens, accepted = lz.sync.verify_chain(q, d, p, seed=seed)
    for row in range(rows):
        stays = int(accepted[row])
        assert 0 <= stays <= k
        assert tokens[row, :stays].tolist() == d[row, :stays].tolist()
        assert 0 <= int(tokens[row, stays]) < v
        assert (tokens[row, stays + 1 :] == -1).all()


def test_a_draft_that_is_the_target_stays_whole() -> None:
    """Acceptance of 1, and a bonus token."""
    p = distributions(50, 5, 8, seed=0)
    d = torch.stack([drafted(row[:4], 1)[0] for row in p])
    tokens, accepted = lz.sync.verify_chain(p[:, :4], d, p, seed=0)
    assert (accepted == 4).all() and (tokens[:, :4] == d).all() and (tokens[:, 4] >= 0).all()


def test_a_draft_that_the_target_excludes_goes() -> None:
    """Acceptance of 0: not even by rounding does a token of probability 0 stay."""
    q = torch.tensor([1.0, 0.0, 0.0]).expand(500, 1, 3)
    p = torch.tensor([0.0, 0.5, 0.5]).expand(500, 2, 3)
    tokens, accepted = lz.sync.verify_chain(q, torch.zeros(500, 1, dtype=torch.int64), p, seed=0)
    assert (accepted == 0).all() and (tokens[:, 0] > 0).all() and (tokens[:, 1] == -1).all()
    tokens, nodes, accepted = lz.sync.verify_tree(
        q.expand(500, 2, 3), torch.zeros(500, 2, dtype=torch.int64), p, (-1, 0), seed=0
    )
    assert (accepted == 0).all() and (tokens[:, 0] > 0).all() and (nodes == -1).all()


def test_a_seed_decides_the_same_alone_and_in_a_batch() -> None:
    """Awaited together with strangers, a row gets the tokens that it gets alone."""
    q, p = distributions(8, 3, 11, seed=5), distributions(8, 4, 11, seed=6)
    d = torch.randint(0, 11, (8, 3), generator=torch.Generator().manual_seed(1))
    alone = [
        lz.sync.verify_chain(q[i : i + 1], d[i : i + 1], p[i : i + 1], seed=i, offset=2) for i in range(8)
    ]

    async def main() -> list[Any]:
        calls = (
            lz.verify_chain(q[i : i + 1], d[i : i + 1], p[i : i + 1], seed=i, offset=2) for i in range(8)
        )
        return list(await asyncio.gather(*calls))

    for one, met in zip(alone, asyncio.run(main()), strict=True):
        assert torch.equal(one[0], met[0]) and torch.equal(one[1], met[1])
    last = lz.sync.verify_chain(q, d, p, seed=0, offset=3)[0]
    assert not torch.equal(last, lz.sync.verify_chain(q, d, p, seed=0, offset=4)[0])


def test_attention_under_a_tree_mask_is_each_paths_own() -> None:
    """The nodes' outputs under the mask equal causal attention over each path by itself."""
    generator = torch.Generator().manual_seed(0)
    past, heads, wide = 5, 2, 16
    q, k, v = (torch.randn(1, heads, past + len(TREE), wide, generator=generator) for _ in range(3))
    mask = torch.cat([torch.ones(len(TREE), past, dtype=torch.bool), lz.tree_mask(TREE)], 1)
    out = lz.sync.attention(q[:, :, past:], k, v, attn_mask=mask)
    for node in range(len(TREE)):
        path = [node]
        while TREE[path[0]] >= 0:
            path.insert(0, TREE[path[0]])
        rows = [*range(past), *(past + n for n in path)]
        one = lz.sync.attention(q[:, :, past + node : past + node + 1], k[:, :, rows], v[:, :, rows])
        assert torch.allclose(out[:, :, node : node + 1], one, atol=1e-5)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"draft_probs": torch.ones(2, 3)}, ValueError, "draft_probs"),
    ({"draft_tokens": torch.ones(2, 3)}, TypeError, "draft_tokens"),
    ({"draft_tokens": torch.ones(2, 2, dtype=torch.int64)}, ValueError, r"draft_tokens needs shape \(2, 3\)"),
    ({"target_probs": torch.ones(2, 3, 5)}, ValueError, r"target_probs needs shape \(2, 4, 5\)"),
    (
        {"target_probs": torch.ones(2, 4, 5, dtype=torch.float64)},
        TypeError,
        "target_probs needs torch.float32",
    ),
    ({"draft_tokens": torch.full((2, 3), 5)}, ValueError, "draft_tokens"),
    (
        {"draft_probs": torch.full((2, 3, 5), -0.1)},
        ValueError,
        "draft_probs needs probabilities of at least 0",
    ),
    ({"seed": torch.ones(3, dtype=torch.int64)}, ValueError, "seed needs 2 elements like draft_probs' rows"),
    ({"offset": 1.5}, TypeError, "offset"),
]


@pytest.mark.parametrize(("change", "kind", "words"), WRONG)
def test_what_does_not_fit_is_named(change: dict[str, Any], kind: type[Exception], words: str) -> None:
    """Each argument by its name, awaited, where the data is looked at."""
    good: dict[str, Any] = {
        "draft_probs": distributions(2, 3, 5, seed=0),
        "draft_tokens": torch.zeros(2, 3, dtype=torch.int64),
        "target_probs": distributions(2, 4, 5, seed=1),
        "seed": 1,
        "offset": 0,
    }

    async def main() -> None:
        await asyncio.gather(lz.verify_chain(**good), lz.verify_chain(**(good | change)))

    with pytest.raises(kind, match=words):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("parents", "kind", "words"),
    [
        ((), ValueError, "parents needs -1 for node 0"),
        ((0, 0), ValueError, "parents needs -1 for node 0"),
        ((-1, 1), ValueError, "parents needs 0 to 0 for node 1, got 1"),
        ((-1, -1), ValueError, "parents needs 0 to 0 for node 1, got -1"),
        ((-1, 0.0), TypeError, "parents needs a sequence of ints"),
        ((-1, 0, 0), ValueError, "parents needs 2 nodes"),
    ],
)
def test_parents_that_are_no_tree_are_refused(parents: Any, kind: type[Exception], words: str) -> None:
    """The node that is wrong is named."""
    p = distributions(2, 2, 5, seed=0)
    with pytest.raises(kind, match=words):
        lz.sync.verify_tree(p, torch.zeros(2, 2, dtype=torch.int64), p, parents)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_rounding_leaves_nothing_of_is_drawn_from_the_target(dtype: torch.dtype) -> None:
    """Rounded rows may sum to more than one: behind a refused draft no token has more of p than of q."""
    q, p = torch.tensor([2.0**-8, 1.0], dtype=dtype), torch.tensor([0.0, 1.0], dtype=dtype)
    drafted = torch.zeros(5, 1, dtype=torch.int64)
    tokens, accepted = lz.sync.verify_chain(
        q.expand(5, 1, 2), drafted, p.expand(5, 2, 2), seed=torch.arange(5)
    )
    assert tokens.tolist() == [[1, -1]] * 5 and accepted.tolist() == [0] * 5
    node = torch.zeros(5, 2, dtype=torch.int64)
    tokens, path, accepted = lz.sync.verify_tree(
        q.expand(5, 2, 2), node, p.expand(5, 2, 2), (-1, 0), seed=torch.arange(5)
    )
    assert tokens.tolist() == [[1, -1]] * 5 and path.tolist() == [[-1]] * 5 and accepted.tolist() == [0] * 5


def test_the_token_of_a_root_is_not_looked_at() -> None:
    """It was not drafted, so it may be anything; another one outside the vocabulary is named."""
    q = distributions(2, 3, 4, seed=1)
    for tokens, fits_ in (([[99, 1, 2], [-1, 0, 3]], True), ([[0, 1, 2], [0, 4, 3]], False)):
        args = (q, torch.tensor(tokens), q, (-1, 0, 1), 5, 0)
        for look in (verify._validate_values, verify._looked_through):  # compiled where it can be, and not
            if fits_:
                assert look(args)[1].tolist() == tokens
            else:
                with pytest.raises(ValueError, match="draft_tokens"):
                    look(args)
