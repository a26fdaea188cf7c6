"""A rank's part of a Llama, with the loop over it that a whole Llama has.

Rank 0 keeps the sequences. What it announces of a step is where each sequence's rows begin; the tokens of a
sequence that decodes are on every rank already, where the step before left them, and only a prompt's travel.
So rank 0 announces a step while the one before still computes, and every rank prepares it meanwhile. The
pages of a sequence go along once, and every rank keeps them, under the first of them, which no other sequence
holds. Rank 0 alone draws where a request has a rule of its own, and gives the tokens to the others on the
devices; the likeliest token is found on every rank, and rank 0's holds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Several
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch.distributed as dist
from models.llama import Llama, LlamaConfig, SampleArgs, WeightSource, kv_pool, sample_tokens
from torch import Tensor

import layerzero as lz
from layerzero.kvcache import AttentionMetadata, TokenRange
from layerzero.ops.host_copies import to_device_with_host_copy
from layerzero.parallel import Layout, TensorGroup, shard_weights

PAGES = 1024
VOCABULARY = ("embed_tokens", "lm_head")


def shard_of(config: LlamaConfig, group: TensorGroup) -> LlamaConfig:
    """The shape of one rank's share, with the whole vocabulary; fewer key heads than ranks are repeated.

    Raises: ValueError: the ranks do not divide it.
    """
    kv_heads = config.num_key_value_heads
    repeated = kv_heads < group.ranks and group.ranks % kv_heads == 0
    return replace(
        config,
        num_attention_heads=group.split("num_attention_heads", config.num_attention_heads),
        num_key_value_heads=1 if repeated else group.split("num_key_value_heads", kv_heads),
        intermediate_size=group.split("intermediate_size", config.intermediate_size),
    )


def same_checkpoint(get: WeightSource) -> dict[str, str]:
    """What `Layout` compares between ranks of the weights that `get` gives, where they come from a folder."""
    digest = getattr(get, "digest", None)
    return {} if digest is None else {"checkpoint": digest}


class RankSequence:
    """A sequence on a follower: pages that rank 0 named, as `AttentionMetadata` is made of them."""

    __slots__ = ("block_tables", "pages", "row")

    def __init__(self, block_tables: Any, pages: list[int]) -> None:
        self.block_tables, self.pages = block_tables, pages
        self.row = block_tables.allocate_row()
        block_tables.write(self.row, pages, [])

    def __del__(self) -> None:
        self.block_tables.free_row(self.row)


class RankLlama(Llama):
    """A part of a Llama on one rank: `step` and `sample_next` are steps of the group, which rank 0 leads."""

    def join(
        self,
        member: Any,
        name: str,
        *,
        alike: bool = True,
        buckets: Several[int] | None = None,
        graphs: bool | None = None,
    ) -> None:
        """Make this rank's part a member's; every rank does so before the first sequence is opened.

        `buckets` and `graphs` are those of `lz.StepRunner`: collectives of NCCL can be captured.
        """
        self._buckets, self._graphs = buckets, graphs
        self.attach(member)
        self._batched_logits = member.batched(
            self._logits_on_rank, name=f"{name} logits", alike=alike, unsent=("spans",)
        )
        self._batched_tokens = member.batched(
            self._tokens_on_rank,
            name=f"{name} tokens",
            alike=alike,
            replicated=True,
            unsent=("spans", "draws"),
        )
        # Made here, so that the rows of padding have the same pages on every rank.
        self._greedy_runner, self._logits_runner = self.runners

    def attach(self, member: Any) -> None:
        """Keep the pages of the sequences that rank 0 opens, as every rank of `member`'s group does."""
        self._member = member
        with self.cache.sequence(1) as probe:
            self._block_tables = probe.block_tables
        self._sequences: dict[int, RankSequence] = {}  # on a follower, by their first page
        self._known_pages: dict[int, list[int]] = {}  # on rank 0: pages that all know, by the first of them

    @cached_property
    def runners(self) -> tuple[lz.StepRunner, lz.StepRunner]:
        """What runs `greedy_step` and `logits_step` on this rank."""
        longest = min(self.config.max_position_embeddings, self.cache.allocator.total * self.cache.page_size)
        most = max(self._buckets) if self._buckets else 64
        greedy, logits = (
            lz.StepRunner(
                step,
                self.cache,
                max_model_len=longest,
                max_num_seqs=most,
                buckets=self._buckets or None,
                graphs=self._graphs,
            )
            for step in (self.greedy_step, self.logits_step)
        )
        return greedy, logits

    async def step(self, ids: Tensor, span: TokenRange) -> Tensor:
        """The logits (1, V) after the tokens `ids` (n,) of one sequence."""
        return await self._on_all_ranks(self._batched_logits, ids, span)

    async def sample_next(self, ids: Tensor, span: TokenRange, draw: SampleArgs) -> Tensor:
        """The token (1,) that follows `ids` (n,) of one sequence, on the device of rank 0."""
        return await self._on_all_ranks(self._batched_tokens, ids, span, draw, draw.is_greedy)

    async def _on_all_ranks(
        self, step: Callable[..., Awaitable[Tensor]], ids: Tensor, span: TokenRange, *draw: Any
    ) -> Tensor:
        pages = span.sequence.pages
        first = pages[0]
        new = [] if self._known_pages.get(first) is pages else pages
        result = await step(first, await self._input_ids(ids), span, first, span.start, new, *draw)
        if new:
            self._known_pages[first] = new
        return result

    async def _input_ids(self, ids: Tensor) -> Tensor:
        """`ids` as a step takes them: rows that every rank has, or on the device with what the host knows."""
        if self._member.holds(ids):
            return ids
        host = ids if ids.is_cpu else await lz.to_host(ids)
        return to_device_with_host_copy(host, self.cache.device)

    def _logits_on_rank(
        self,
        ids: Tensor,
        spans: list[TokenRange | None],
        firsts: list[int],
        starts: list[int],
        pages: list[list[int]],
        counts: list[int],
    ) -> Tensor:
        return self._logits_runner(self._ranges(spans, firsts, starts, pages, counts), ids)

    def _tokens_on_rank(
        self,
        ids: Tensor,
        spans: list[TokenRange | None],
        firsts: list[int],
        starts: list[int],
        pages: list[list[int]],
        draws: list[SampleArgs],
        greedy: list[bool],
        counts: list[int],
    ) -> Tensor:
        ranges = self._ranges(spans, firsts, starts, pages, counts)
        if all(greedy):
            return self._greedy_runner(ranges, ids)
        logits = self._logits_runner(ranges, ids)
        if self._member.rank:
            return self._of_rank0(ids.new_zeros(len(ranges)))
        with self._member.using_model("draw"):  # which no other rank chooses for
            return self._of_rank0(sample_tokens(logits, draws))

    def _ranges(
        self,
        spans: list[TokenRange | None],
        firsts: list[int],
        starts: list[int],
        pages: list[list[int]],
        counts: list[int],
    ) -> list[Any]:
        """Where each sequence's rows are: rank 0's own `spans`, and the same on a follower."""
        if not self._member.rank:
            return spans
        for first, new in zip(firsts, pages, strict=True):
            if new:
                self._sequences[first] = RankSequence(self._block_tables, new)
        sequences: list[Any] = [self._sequences[first] for first in firsts]
        return list(map(TokenRange, sequences, starts, counts))

    def greedy_step(self, metadata: AttentionMetadata, ids: Tensor) -> Tensor:
        """The likeliest token (B,) of each sequence after the rows `ids` (T,), rank 0's on every rank."""
        return self._of_rank0(super().greedy_step(metadata, ids))

    def _of_rank0(self, tokens: Tensor) -> Tensor:
        """Rank 0's `tokens`, on the device."""
        if self._member.ranks > 1:
            dist.broadcast(tokens, 0)
        return tokens


class TensorParallelLlama(RankLlama):
    """One rank's share of a Llama: some heads and some inner channels of each layer."""

    def __init__(
        self,
        config: LlamaConfig,
        get: WeightSource,
        member: Any,
        like: Tensor,
        pages: int = PAGES,
        buckets: Several[int] | None = None,
        graphs: bool | None = None,
        *,
        sequence: bool = False,
    ) -> None:
        """`like` has the dtype and the device of the weights; `join` says what the others are.

        With `sequence` the ranks share the rows of the norms, the table of tokens and the head, too.
        Raises: ConsistencyError: another rank has another checkpoint. ValueError: the ranks divide no size.
        """
        layout = Layout(member, tp=member.ranks, sequence=sequence, same=same_checkpoint(get))
        self.share_out(config, get, layout.tensor, like, pages, vocabulary=sequence)
        self.join(member, "share", buckets=buckets, graphs=graphs)

    def share_out(
        self,
        config: LlamaConfig,
        get: WeightSource,
        group: TensorGroup,
        like: Tensor,
        pages: int,
        *,
        vocabulary: bool = False,
        of_stage: Callable[[WeightSource], WeightSource] = lambda get: get,
    ) -> None:
        """Make the model of one rank of `group`; `of_stage` names the weights of its layers alone."""
        shard = shard_of(config, group)
        if vocabulary:
            shard = replace(shard, vocab_size=group.split("vocab_size", config.vocab_size))
        part = shard_weights(
            get, group, kv_heads=config.num_key_value_heads, whole=() if vocabulary else VOCABULARY
        )
        super().__init__(shard, of_stage(part), kv_pool(shard, like.device, like.dtype, pages, 16))
        self.shares, self.vocabulary = group, group if vocabulary else self.vocabulary
        for layer in self.layers:
            layer.shares = group
