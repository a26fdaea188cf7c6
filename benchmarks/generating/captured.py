"""The model as captured graphs: a whole step in one (`lz.StepRunner`), or a layer each (`lz.compile`)."""

from __future__ import annotations

from models.llama import BLOCKING, Layer, Llama, SampleArgs, run_sync, sample_tokens
from torch import Tensor

import layerzero as lz
from layerzero.kvcache import TokenRange
from layerzero.kvcache.static_metadata import StaticMetadata


class Whole:
    """A model that answers `sample_next` by one graph a step, for sequences of at most `limit` tokens."""

    def __init__(self, model: Llama, limit: int, rows: int) -> None:
        self.model, self.config, self.cache = model, model.config, model.cache
        self.sequence = model.sequence
        # One bucket for the crowd, one for who is alone: each capture costs seconds.
        self.runner = lz.StepRunner(
            model.greedy_step, model.cache, max_model_len=limit, max_num_seqs=rows,
            buckets=sorted({1, rows}), graphs=True,
        )  # fmt: skip
        self._joined = lz.batched(self.sample_next_batch)

    async def sample_next(self, ids: Tensor, span: TokenRange, draw: SampleArgs) -> Tensor:
        """The token (1,) that follows `ids` (1,) of one sequence."""
        token: Tensor = await self._joined(ids, span, draw)
        return token

    def sample_next_batch(self, ids: Tensor, spans: list[TokenRange], draws: list[SampleArgs]) -> Tensor:
        """`sample_next` for all callers at once, each of which takes its likeliest token."""
        return self.runner(spans, ids)

    def close(self) -> None:
        """Give the pages of the padding back."""
        self.runner.close()


class Part:
    """One layer as a graph, from rows `x` (T, C) to rows; the first takes ids, the last one gives logits."""

    def __init__(self, model: Llama, index: int, frame: StaticMetadata) -> None:
        self.model, self.frame, self.index = model, frame, index
        self.layer: Layer = model.layers[index]
        self.norm = model.input_norm if index == 0 else model.layers[index - 1].next_norm
        self._graph = lz.compile(self._step, buckets=(frame.rows,))

    def run(self, x: Tensor, spans: list[TokenRange]) -> Tensor:
        """The layer for the rows of all callers at once."""
        self.frame.load(spans)
        out: Tensor = self._graph(x)
        return out

    def draw(self, x: Tensor, spans: list[TokenRange], draws: list[SampleArgs]) -> Tensor:
        """`run` of the last layer, and a token (1,) for each caller."""
        return sample_tokens(self.run(x, spans), draws)

    def _step(self, x: Tensor) -> Tensor:
        model, eps = self.model, self.model.config.rms_norm_eps
        if self.index == 0:
            x = lz.sync.embedding(x, model.embed_tokens)
        # Normed anew, so that one tensor goes from layer to layer and not two.
        normed = lz.sync.rms_norm(x, self.norm, eps=eps)
        at = self.frame.metadata(x.shape[0])
        normed, x = run_sync(self.layer.forward(BLOCKING, normed, x, at))
        if self.index < len(model.layers) - 1:
            return x
        logits: Tensor = lz.sync.linear(normed, model.lm_head)
        return logits


class Layered:
    """A model that answers `sample_next` by a graph a layer, each one await."""

    def __init__(self, model: Llama, limit: int, rows: int) -> None:
        self.model, self.config, self.cache = model, model.config, model.cache
        self.sequence = model.sequence
        self.frame = StaticMetadata(model.cache, limit, rows)
        self.parts = [Part(model, index, self.frame) for index in range(len(model.layers))]
        self._joined = [lz.batched(part.run) for part in self.parts[:-1]]
        self._last = lz.batched(self.parts[-1].draw)

    async def sample_next(self, ids: Tensor, span: TokenRange, draw: SampleArgs) -> Tensor:
        """The token (1,) that follows `ids` (1,) of one sequence."""
        x = ids
        for layer in self._joined:
            x = await layer(x, span)
        token: Tensor = await self._last(x, span, draw)
        return token

    def sample_next_batch(self, ids: Tensor, spans: list[TokenRange], draws: list[SampleArgs]) -> Tensor:
        """`sample_next` for all callers at once, without an await."""
        x = ids
        for part in self.parts[:-1]:
            x = part.run(x, spans)
        return self.parts[-1].draw(x, spans, draws)

    def close(self) -> None:
        """Give the pages of the padding back."""
        self.frame.close()
