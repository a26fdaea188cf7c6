"""Pipeline stages of a Llama: each rank has some of the layers, and hands its rows to the next.

    torchrun --nproc-per-node 2 examples/tensor_parallel/run.py --stages
    torchrun --nproc-per-node 4 examples/tensor_parallel/run.py --stages 2     # of two ranks each

What a stage chooses does not depend on its rank: its ops see whole heads and whole columns, or those of its
share where several ranks are one stage. On CUDA a stage's part of a step that decodes is one captured graph.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from models.llama import BLOCKING, LlamaConfig, WeightSource, run_sync, sample_tokens
from torch import Tensor

import layerzero as lz
from layerzero.kvcache import AttentionMetadata
from layerzero.ops.host_copies import to_device_with_host_copy, to_host_values
from layerzero.parallel import Layout, Pipeline, stage_weights
from tensor_parallel.llama import PAGES, TensorParallelLlama, same_checkpoint


class PipelineLlama(TensorParallelLlama):
    """One rank's layers of a Llama, or its share of them; what the last stage gives comes back to rank 0."""

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
        tp: int = 1,
        sequence: bool = False,
        batches: int = 0,
    ) -> None:
        """`tp` ranks share each stage; `batches` is `Pipeline`'s, the others are `TensorParallelLlama`'s.

        Where ranks share rows (`sequence`), a stage's rows are not its sequences, and nothing is captured.
        Raises: ConsistencyError: another rank has another checkpoint. ValueError: there are fewer layers than
            stages, or the ranks of a stage divide no size.
        """
        self.layout = layout = Layout(
            member, tp=tp, pp=member.ranks // tp, sequence=sequence, same=same_checkpoint(get)
        )
        layers, tied = config.num_hidden_layers, config.tie_word_embeddings
        of_stage = partial(stage_weights, layout=layout, layers=layers, like=like, tied=tied)
        stage = replace(config, num_hidden_layers=len(layout.layers(layers)))
        self.share_out(stage, get, layout.tensor, like, pages, vocabulary=sequence, of_stage=of_stage)
        self._like, self._words = like, config.vocab_size
        self.pipeline = Pipeline(layout, batches=batches)
        self._buckets, self._graphs = buckets, False if sequence else graphs
        self.attach(member)
        # Made here, so that the rows of padding have the same pages on every rank.
        self._greedy_runner, self._logits_runner = self.runners
        self._batched_logits = self.pipeline.batched(
            self._logits_on_stage,
            name="stage logits",
            carries=self._carried,
            returns=self._returned,
            unsent=("spans",),
        )
        self._batched_tokens = self.pipeline.batched(
            self._tokens_on_stage,
            name="stage tokens",
            carries=self._carried,
            returns=self._returned,
            finish=self._drawn,
            unsent=("spans", "draws"),
        )

    async def _input_ids(self, ids: Tensor) -> Tensor:
        """`ids` on the host, where a step message takes them; the first stage moves all rows at once."""
        return ids if ids.is_cpu else await lz.to_host(ids)

    def _carried(self, rows: int) -> Tensor:
        """The residual stream of so many rows, or a rank's own of them."""
        return self._like.new_empty(self.shares.share_of_rows(rows), self.config.hidden_size)

    def _returned(self, ids: Tensor, *columns: Any, counts: list[int]) -> Tensor:
        """Tokens (B,) of the host where all of them are greedy, else logits (B, V)."""
        greedy = columns[5] if len(columns) > 5 else [False]
        if all(greedy):
            return torch.empty(len(counts), dtype=ids.dtype)
        return self._like.new_empty(len(counts), self._words)

    def _logits_on_stage(
        self,
        x: Tensor | None,
        ids: Tensor,
        spans: list[Any],
        firsts: list[int],
        starts: list[int],
        pages: list[list[int]],
        counts: list[int],
    ) -> Tensor:
        return self._run(self._logits_runner, self._ranges(spans, firsts, starts, pages, counts), ids, x)

    def _tokens_on_stage(
        self,
        x: Tensor | None,
        ids: Tensor,
        spans: list[Any],
        firsts: list[int],
        starts: list[int],
        pages: list[list[int]],
        draws: list[Any],
        greedy: list[bool],
        counts: list[int],
    ) -> Tensor:
        runner = self._greedy_runner if all(greedy) else self._logits_runner
        return self._run(runner, self._ranges(spans, firsts, starts, pages, counts), ids, x)

    def _run(self, runner: lz.StepRunner, ranges: list[Any], ids: Tensor, x: Tensor | None) -> Tensor:
        """This stage's part of a step: by a graph where each sequence has one row."""
        if ids.device != self.cache.device:
            ids = to_device_with_host_copy(ids, self.cache.device)
        before = [] if x is None else [x]
        if x is not None and len(x) != len(ranges):  # prompts: rows that no sequence has alone
            forward = self.greedy_step if runner is self._greedy_runner else self.logits_step
            return forward(self.cache.attention_metadata(ranges), ids, *before)
        return runner(ranges, ids, *before)

    def logits_step(self, metadata: AttentionMetadata, ids: Tensor, *before: Tensor) -> Tensor:
        """The rows (T, C) for the next stage, after what `before` passed on; the last gives logits."""
        x = before[0] if before else run_sync(self.embed(BLOCKING, ids))
        normed = lz.sync.rms_norm(x, self.input_norm, eps=self.config.rms_norm_eps)
        for layer in self.layers:
            normed, x = run_sync(layer.forward(BLOCKING, normed, x, metadata))
        return run_sync(self.head(BLOCKING, normed, metadata)) if self.layout.last else x

    def greedy_step(self, metadata: AttentionMetadata, ids: Tensor, *before: Tensor) -> Tensor:
        """The same; the last stage gives the likeliest token (B,) of each sequence."""
        out = self.logits_step(metadata, ids, *before)
        return lz.sync.sample(out, temperature=0.0, seed=0) if self.layout.last else out

    def _drawn(self, results: Tensor, *columns: Any) -> Tensor:
        """The tokens on the host, where the next step of each sequence begins."""
        draws, greedy = columns[5:7]
        if all(greedy):
            return to_host_values(results)
        with self._member.using_model("draw"):  # which no other rank chooses for
            return to_host_values(sample_tokens(results, draws))
