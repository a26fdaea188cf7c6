"""A target that several ranks share: all of them verify, and accept alike.

Rank 0 has the generation and the draft. A round's manifest carries the tokens, the filters and the seed that
decide, the draft's distributions follow over the ranks' collective, and each rank verifies for itself: it has
the text, keeps its own cache, and is caught before the next collective where it accepted otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import anyio
import torch
from torch import Tensor

from layerzero import sync
from layerzero.actors.group.join import Member
from layerzero.spec.errors import ConsistencyError
from layerzero.speculative.generation import Round, shares

Head = list[Any]  # of one request in a manifest: where it begins, how many drafts, whether one is kept, draws


class Cache(Protocol):
    """One rank's keys and values of a sequence; setting `length` to less forgets what stands behind."""

    length: int


@dataclass(slots=True)
class _Open:
    """What a rank knows of one sequence: `goes_on` is where its last verdict leaves the cache."""

    cache: Cache
    goes_on: int = 0
    begun: bool = False
    bonus: int | None = None  # drawn behind drafts that all stayed: of the text unless rank 0 had drafted on
    last: Tensor | None = None  # the distribution after the last draft


class Coordinated:
    """A target over the ranks of a gang; every rank makes one, rank 0 opens sequences of it.

    `open(limit)` gives a rank's own cache and `close(cache)` takes it back. `forward(caches, ids, counts)`
    gives the logits (T, V) after each token of `ids` (T,), `counts` of them for each cache, which it adds to.
    `spread(rows)` fills a float64 tensor (K, V) on every rank with rank 0's. `settled(sequence, tokens)` is
    told on every rank the tokens of the text, in order; the last ones may be more than rank 0 asked for.
    """

    def __init__(
        self,
        member: Member,
        *,
        open: Callable[[int], Any],
        close: Callable[[Any], None],
        forward: Callable[[Sequence[Any], Tensor, Sequence[int]], Tensor],
        spread: Callable[[Tensor], object],
        vocab: int,
        device: torch.device | str = "cpu",
        settled: Callable[[int, list[int]], None] | None = None,
        model: str = "target",
    ) -> None:
        self._member, self._rank = member, member.rank
        self._open, self._close, self._forward, self._spread = open, close, forward, spread
        self._vocab, self._device, self._settled = vocab, device, settled
        self._sequences: dict[int, _Open] = {}
        self._drafted: dict[int, Tensor] = {}  # on rank 0: the rows that the next step spreads
        self._numbers = itertools.count()
        self._verify = member.batched(self._verified, name=f"{model} verify", model=model)
        self._forget = member.batched(self._forgotten, name=f"{model} forget", model=model)

    @property
    def open_sequences(self) -> int:
        """Sequences that this rank keeps a cache of."""
        return len(self._sequences)

    @asynccontextmanager
    async def sequence(self, limit: int) -> AsyncIterator[SharedSequence]:
        """On rank 0: a sequence of at most `limit` tokens, a target for `speculative.generate`.

        Raises: what `open` raises. The other ranks open theirs at the first round: they have room then.
        """
        number = next(self._numbers)
        own = self._sequences[number] = _Open(self._open(limit))
        try:
            yield SharedSequence(self, number, limit)
        finally:
            if own.begun and self._member.failure is None:
                with anyio.CancelScope(shield=True):
                    await self._forget(f"forget {number}", number)
            elif self._sequences.pop(number, None) is not None:
                self._close(own.cache)

    def close(self) -> None:
        """Take back every cache of this rank: what is left of a gang that has failed."""
        for number in list(self._sequences):
            self._close(self._sequences.pop(number).cache)

    # -- what every rank runs --------------------------------------------------------------------

    def _forgotten(self, sequences: list[int]) -> list[None]:
        for number in sequences:
            each = self._sequences.pop(number)
            self._settle(number, each, [])
            self._close(each.cache)
        return [None] * len(sequences)

    def _verified(
        self, ids: Tensor, sequences: list[int], heads: list[Head], counts: list[int]
    ) -> list[tuple[int, list[int]]]:
        """Each request's verdict, the same on every rank."""
        own = [self._resumed(number, head) for number, head in zip(sequences, heads, strict=True)]
        logits = self._forward([each.cache for each in own], ids, counts)
        places = [head[1] for head in heads]
        rows = torch.zeros(sum(places), self._vocab, dtype=torch.float64, device=logits.device)
        if self._rank == 0:
            torch.cat([self._drafted.pop(number) for number in sequences], out=rows)
        self._spread(rows)
        found = []
        parts = zip(
            sequences, heads, own, ids.split(counts), logits.split(counts), rows.split(places), strict=True
        )
        for number, head, each, tokens, seen, probs in parts:
            found.append(self._verdict(number, head, each, tokens, seen, probs))
        return found

    def _resumed(self, number: int, head: Head) -> _Open:
        """The sequence, taken back to where rank 0 goes on.

        Raises: ConsistencyError: what this rank accepted does not lead there.
        """
        start, limit = head[0], head[2]
        each = self._sequences.get(number)
        if each is None:
            each = self._sequences[number] = _Open(self._open(limit))
        each.begun = True
        if start != each.goes_on:
            raise ConsistencyError(
                f"sequence {number} needs to go on from {each.goes_on} on rank {self._rank}, got {start} "
                "from rank 0: it accepted other drafts"
            )
        each.cache.length = start
        if head[3]:
            each.bonus = None
        return each

    def _settle(self, number: int, each: _Open, tokens: list[int]) -> None:
        """Tell what is certain: a token that waited to be, and `tokens` behind it."""
        certain = tokens if each.bonus is None else [each.bonus, *tokens]
        each.bonus = None
        if self._settled is not None and certain:
            self._settled(number, certain)

    def _verdict(
        self, number: int, head: Head, each: _Open, tokens: Tensor, logits: Tensor, probs: Tensor
    ) -> tuple[int, list[int]]:
        start, places, _, kept, seed, offset, temperature, top_k, top_p = head
        p = shares(logits[-places - 1 :], temperature=temperature, top_k=top_k, top_p=top_p)
        if kept:
            assert each.last is not None
            p = torch.cat([each.last.unsqueeze(0), p])
        drafted = tokens[-places:]
        out, accepted = sync.verify_chain(
            probs.unsqueeze(0), drafted.unsqueeze(0), p.unsqueeze(0), seed=seed, offset=offset
        )
        stays, *found = torch.cat([accepted, out[0]]).tolist()
        text = start + len(tokens) - places
        each.goes_on = text + stays  # what did not stay is forgotten when rank 0 goes on from there
        each.last = p[-1]
        whole = stays == places
        self._settle(number, each, found[: stays + (not whole)])
        each.bonus = found[stays] if whole else None
        return stays, found

    async def verified(self, number: int, limit: int, length: int, round_: Round) -> tuple[int, list[int]]:
        """On rank 0: have all ranks verify one round of a sequence.

        Raises: ValueError: the draft has another vocabulary.
        """
        places, vocab = round_.probs.shape
        if vocab != self._vocab:
            raise ValueError(f"draft needs the target's vocabulary of {self._vocab} tokens, got {vocab}")
        drawing = round_.drawing
        draws = [drawing.seed, drawing.offset, drawing.temperature, drawing.top_k, drawing.top_p]
        head: Head = [length, places, limit, round_.kept, *draws]
        self._drafted[number] = round_.probs.to(self._device, torch.float64)
        ids = torch.cat([round_.fresh.to(self._device), round_.drafted.to(self._device)])
        try:
            found: tuple[int, list[int]] = await self._verify(number, ids, number, head)
        finally:
            self._drafted.pop(number, None)
        return found


class SharedSequence:
    """One sequence of a `Coordinated` target, on rank 0; a `speculative.Verifier`.

    `number` is what every rank knows it by.
    """

    def __init__(self, target: Coordinated, number: int, limit: int) -> None:
        self._target, self.number, self._limit = target, number, limit
        self.length = 0

    async def verify(self, round_: Round) -> tuple[int, list[int]]:
        """How many drafts stay and the tokens, as every rank finds them."""
        found = await self._target.verified(self.number, self._limit, self.length, round_)
        self.length += len(round_.fresh) + len(round_.drafted)
        return found

    def rollback(self, length: int) -> None:
        """Forget the tokens from `length` on; the ranks do so at the next round."""
        self.length = min(self.length, length)
