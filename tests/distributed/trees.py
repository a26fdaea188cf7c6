"""A target of two layers whose heads lie on several ranks; all of them walk the same tree of drafts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import layerzero as lz

WORDS, WIDE, HEADS = 24, 32, 4
PARENTS = (-1, 0, 0, 0, 1, 1, 4, 2)  # three drafts behind the root, two behind the first of them, and so on


def _weight(rows: int, columns: int, seed: int) -> Tensor:
    drawn = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return drawn.mul_(columns**-0.5)


class Target:
    """One rank's heads; `ranks` of 1 is the whole model. Node n of a tree attends to what leads to it."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.words = _weight(WORDS, WIDE, 0) * WIDE**0.5
        self.own = [
            [_weight(WIDE, WIDE, 10 * layer + part).chunk(ranks, axis)[rank].contiguous()
             for part, axis in ((1, 0), (2, 0), (3, 0), (4, 1))]
            for layer in (1, 2)
        ]  # fmt: skip
        self.drafted: dict[int, Tensor] = {}
        self.said: dict[int, list[Any]] = {}

    def probs(self, tokens: Tensor, parents: tuple[int, ...]) -> Tensor:
        """The distributions (N, V) after each node, by one pass with the tree's mask."""
        x = self.words[tokens]
        mask = lz.tree_mask(parents)
        for q, k, v, out in self.own:
            parts = [lz.sync.linear(x, w).view(len(x), -1, WIDE // HEADS).transpose(0, 1) for w in (q, k, v)]
            heads = lz.sync.attention(*(part.unsqueeze(0) for part in parts), attn_mask=mask)
            mixed = lz.sync.linear(heads[0].transpose(0, 1).flatten(1).contiguous(), out)
            if self.ranks > 1:
                dist.all_reduce(mixed)
            x = x + mixed
        return torch.softmax(0.3 * lz.sync.linear(x, self.words), -1, dtype=torch.float64)

    def walk(self, numbers: list[int], tokens: list[list[int]], seeds: list[int]) -> list[list[Any]]:
        """What stays of each request's tree: the tokens and the path, the same on every rank."""
        found = []
        for number, own, seed in zip(numbers, tokens, seeds, strict=True):
            ids = torch.tensor(own)
            q = self.drafted.get(number, torch.zeros(len(own), WORDS, dtype=torch.float64))
            if self.ranks > 1:
                dist.broadcast(q, 0)
            p = self.probs(ids, PARENTS)
            said = lz.sync.verify_tree(q.unsqueeze(0), ids.unsqueeze(0), p.unsqueeze(0), PARENTS, seed=seed)
            found.append([part[0].tolist() for part in said])
            self.said[number] = found[-1]
        return found


def tree(number: int) -> tuple[list[int], Tensor]:
    """A drafted tree: tokens (N,), and what the children of each node were drawn from (N, V)."""
    draws = torch.Generator().manual_seed(number)
    q = torch.softmax(0.5 * torch.randn(len(PARENTS), WORDS, generator=draws).double(), -1)
    tokens = [int(torch.randint(WORDS, (), generator=draws))]
    tokens += [int(torch.multinomial(q[parent], 1, generator=draws)) for parent in PARENTS[1:]]
    return tokens, q
