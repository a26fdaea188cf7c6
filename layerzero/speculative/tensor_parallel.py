"""A target that several ranks share: all of them verify, and accept alike.

Rank 0 has the generation and the draft. A round's step message carries the tokens, the filters and the seed
that decide, the draft's distributions follow over the ranks' collective, and each rank verifies for itself:
it has the text, keeps its own cache, and is caught before the next collective where it accepted otherwise.
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
from layerzero.actors.group.join import RankHandle
from layerzero.spec.errors import ConsistencyError
from layerzero.speculative.generation import DraftBatch, token_probs

# Of one request in a step message: where it begins, how many drafts, whether one is kept, draws.
Head = list[Any]


class RankCache(Protocol):
    """One rank's keys and values of a sequence; setting `length` to less forgets what follows."""

    length: int


@dataclass(slots=True)
class _RankSequence:
    """What a rank knows of one sequence: `resume_length` is where its last verdict leaves the cache."""

    cache: RankCache
    resume_length: int = 0
    begun: bool = False
    bonus: int | None = None  # drawn behind drafts that all stayed: of the text unless rank 0 had drafted on
    last: Tensor | None = None  # the distribution after the last draft


class TensorParallelTarget:
    """A target over the ranks of a rank group; every rank makes one, rank 0 opens sequences of it.

    `open(limit)` gives a rank's own cache and `close(cache)` takes it back. `forward(caches, ids, counts)`
    gives the logits (T, V) after each token of `ids` (T,), `counts` of them for each cache, which it adds to.
    `broadcast(rows)` fills a float64 tensor (K, V) on every rank with rank 0's. `on_tokens(sequence, tokens)`
    is given on every rank the tokens of the text, in order; the last ones may be more than rank 0 asked for.
    """

    def __init__(
        self,
        member: RankHandle,
        *,
        open: Callable[[int], Any],
        close: Callable[[Any], None],
        forward: Callable[[Sequence[Any], Tensor, Sequence[int]], Tensor],
        broadcast: Callable[[Tensor], object],
        vocab_size: int,
        device: torch.device | str = "cpu",
        on_tokens: Callable[[int, list[int]], None] | None = None,
        model: str = "target",
    ) -> None:
        self._member, self._rank = member, member.rank
        self._open, self._close, self._forward, self._broadcast = open, close, forward, broadcast
        self._vocab_size, self._device, self._on_tokens = vocab_size, device, on_tokens
        self._sequences: dict[int, _RankSequence] = {}
        self._drafted: dict[int, Tensor] = {}  # on rank 0: the rows that the next step spreads
        self._numbers = itertools.count()
        self._verify = member.batched(self._verify_on_rank, name=f"{model} verify", model=model)
        self._forget = member.batched(self._forget_on_rank, name=f"{model} forget", model=model)

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
        rank_sequence = self._sequences[number] = _RankSequence(self._open(limit))
        try:
            yield SharedSequence(self, number, limit)
        finally:
            if rank_sequence.begun and self._member.failure is None:
                with anyio.CancelScope(shield=True):
                    await self._forget(f"forget {number}", number)
            elif self._sequences.pop(number, None) is not None:
                self._close(rank_sequence.cache)

    def close(self) -> None:
        """Take back every cache of this rank: what is left of a rank group that has failed."""
        for number in list(self._sequences):
            self._close(self._sequences.pop(number).cache)

    # -- what every rank runs --------------------------------------------------------------------

    def _forget_on_rank(self, sequences: list[int]) -> list[None]:
        for number in sequences:
            each = self._sequences.pop(number)
            self._report_tokens(number, each, [])
            self._close(each.cache)
        return [None] * len(sequences)

    def _verify_on_rank(
        self, ids: Tensor, sequences: list[int], heads: list[Head], counts: list[int]
    ) -> list[tuple[int, list[int]]]:
        """Each request's verdict, the same on every rank."""
        rank_sequences = [self._resume(number, head) for number, head in zip(sequences, heads, strict=True)]
        logits = self._forward([each.cache for each in rank_sequences], ids, counts)
        places = [head[1] for head in heads]
        rows = torch.zeros(sum(places), self._vocab_size, dtype=torch.float64, device=logits.device)
        if self._rank == 0:
            torch.cat([self._drafted.pop(number) for number in sequences], out=rows)
        self._broadcast(rows)
        parts = ids.split(counts), logits.split(counts), rows.split(places)
        each = zip(sequences, heads, rank_sequences, *parts, strict=True)
        return [self._verdict(*one) for one in each]

    def _resume(self, number: int, head: Head) -> _RankSequence:
        """The sequence, taken back to where rank 0 continues.

        Raises: ConsistencyError: what this rank accepted does not lead there.
        """
        start, limit = head[0], head[2]
        each = self._sequences.get(number)
        if each is None:
            each = self._sequences[number] = _RankSequence(self._open(limit))
        each.begun = True
        if start != each.resume_length:
            raise ConsistencyError(
                f"sequence {number} needs to continue from {each.resume_length} on rank {self._rank}, got "
                f"{start} from rank 0: it accepted other drafts"
            )
        each.cache.length = start
        if head[3]:
            each.bonus = None
        return each

    def _report_tokens(self, number: int, each: _RankSequence, tokens: list[int]) -> None:
        """Tell what is certain: a token that waited to be, and `tokens` behind it."""
        certain = tokens if each.bonus is None else [each.bonus, *tokens]
        each.bonus = None
        if self._on_tokens is not None and certain:
            self._on_tokens(number, certain)

    def _verdict(
        self, number: int, head: Head, each: _RankSequence, tokens: Tensor, logits: Tensor, probs: Tensor
    ) -> tuple[int, list[int]]:
        start, num_drafts, _, bonus_known, seed, offset, temperature, top_k, top_p = head
        p = token_probs(logits[-num_drafts - 1 :], temperature=temperature, top_k=top_k, top_p=top_p)
        if bonus_known:
            assert each.last is not None
            p = torch.cat([each.last.unsqueeze(0), p])
        drafted = tokens[-num_drafts:]
        out, accepted = sync.verify_chain(
            probs.unsqueeze(0), drafted.unsqueeze(0), p.unsqueeze(0), seed=seed, offset=offset
        )
        num_accepted, *out_tokens = torch.cat([accepted, out[0]]).tolist()
        text = start + len(tokens) - num_drafts
        each.resume_length = text + num_accepted  # what did not stay is forgotten when rank 0 continues there
        each.last = p[-1]
        all_accepted = num_accepted == num_drafts
        self._report_tokens(number, each, out_tokens[: num_accepted + (not all_accepted)])
        each.bonus = out_tokens[num_accepted] if all_accepted else None
        return num_accepted, out_tokens

    async def verify_on_all_ranks(
        self, number: int, limit: int, length: int, batch: DraftBatch
    ) -> tuple[int, list[int]]:
        """On rank 0: have all ranks verify one round of a sequence.

        Raises: ValueError: the draft has another vocabulary.
        """
        num_drafts, vocab_size = batch.draft_probs.shape
        if vocab_size != self._vocab_size:
            raise ValueError(
                f"draft needs the target's vocabulary of {self._vocab_size} tokens, got {vocab_size}"
            )
        drawing = batch.sampling
        draws = [drawing.seed, drawing.offset, drawing.temperature, drawing.top_k, drawing.top_p]
        head: Head = [length, num_drafts, limit, batch.bonus_known, *draws]
        self._drafted[number] = batch.draft_probs.to(self._device, torch.float64)
        ids = torch.cat([batch.new_tokens.to(self._device), batch.draft_tokens.to(self._device)])
        try:
            verdict: tuple[int, list[int]] = await self._verify(number, ids, number, head)
        finally:
            self._drafted.pop(number, None)
        return verdict


class SharedSequence:
    """One sequence of a `TensorParallelTarget` target, on rank 0; a `speculative.Verifier`.

    `number` is what every rank knows it by.
    """

    def __init__(self, target: TensorParallelTarget, number: int, limit: int) -> None:
        self._target, self.number, self._limit = target, number, limit
        self.length = 0

    async def verify(self, batch: DraftBatch) -> tuple[int, list[int]]:
        """How many drafts stay and the tokens, as every rank finds them."""
        verdict = await self._target.verify_on_all_ranks(self.number, self._limit, self.length, batch)
        self.length += len(batch.new_tokens) + len(batch.draft_tokens)
        return verdict

    def rollback(self, length: int) -> None:
        """Forget the tokens from `length` on; the ranks do so at the next round."""
        self.length = min(self.length, length)
