"""The hand-written loop as a captured graph that feeds itself: the most of plain torch.distributed."""

from __future__ import annotations

from typing import Any

import torch
from generating import by_hand


class Replayed(by_hand.Paged):
    """A crowd of fixed size whose step lies in one graph; its tokens, lengths and places move on inside it.

    Without a GPU the step runs as it is written.
    """

    def __init__(self, cache: by_hand.Paged, n: int, limit: int) -> None:
        bound: Any = cache.attention
        plan, tail = bound.binding.plan, bound.binding.tail  # which no capture binds anew
        super().__init__(cache.model, lambda *tensors: plan.call(*tensors, *tail))
        device = self.cache.device
        self.rows = torch.arange(n, device=device)
        self.ids, self.positions = self.rows.clone(), self.rows.clone()
        self.lengths = torch.zeros(n, dtype=torch.int32, device=device)
        self.near = torch.zeros(n, -(-limit // self.cache.page_size), dtype=torch.int32, device=device)
        self._graph: Any = None

    def start(self, sequences: list[Any], context: int) -> None:
        """Let the crowd stand behind `context` tokens."""
        self.near.copy_(torch.tensor([each.pages for each in sequences]))
        self.positions.fill_(context - 1)
        self.lengths.fill_(context)
        self.ids.copy_(self.rows % self.model.config.vocab_size)

    def begin(self) -> None:
        """Give each sequence's next token its place."""
        size = self.cache.page_size
        self.positions += 1
        self.lengths += 1
        self.slots = self.near[self.rows, self.positions // size].long() * size + self.positions % size

    def _once(self) -> None:
        self.ids.copy_(by_hand.step(self, self.ids).argmax(-1))

    def capture(self) -> None:
        """Make the graph, if there is a GPU; the crowd has to start again behind this."""
        if self.cache.device.type != "cuda":
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._once()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._once()

    def __call__(self) -> None:
        """One step."""
        if self._graph is None:
            self._once()
        else:
            self._graph.replay()
