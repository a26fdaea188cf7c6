"""A rank's part of a Llama, with the loop over it that a whole Llama has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from llama import Draw, Llama
from paging import Chunk
from torch import Tensor

import layerzero as lz


class Led(Llama):
    """A part of a Llama on one rank: `step` and `next` are steps of the gang, which rank 0 leads."""

    def lead(self, led: Callable[..., Awaitable[Tensor]]) -> None:
        """Let `led(number, ids, start, pages)` be the step that all ranks run."""
        self._led = led
        self._numbers = iter(range(1 << 62))

    async def step(self, ids: Tensor, chunk: Chunk) -> Tensor:
        """The logits (1, V) after the tokens `ids` (n,) of one sequence."""
        return await self._led(next(self._numbers), ids, chunk.start, chunk.sequence.pages)

    async def next(self, ids: Tensor, chunk: Chunk, draw: Draw) -> Tensor:
        """The token (1,) that follows; rank 0 alone draws it."""
        logits = await self.step(ids, chunk)
        token: Tensor = await lz.sample(
            logits, temperature=draw.temperature, top_p=draw.top_p, seed=draw.seed, offset=draw.offset
        )
        return token
