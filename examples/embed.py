"""An embedding service in one process: every request is its own coroutine, and requests meet in batches.

    python examples/embed.py "living alone in the woods" [--device cpu|cuda]

It embeds a few hundred sentences of old books with all-MiniLM-L6-v2, all at once, and prints the nearest to
the query. `make demo` compares the same service with other ways of serving it.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

import torch
from models.minilm import MiniLM, read_sentences
from torch import Tensor

import layerzero as lz


class Service:
    """What a request handler calls."""

    def __init__(self, model: MiniLM) -> None:
        self.model = model

    async def embed(self, text: str) -> Tensor:
        """The embedding of one text in host memory, (C,) float32; texts awaited together are batched."""
        return await lz.to_host(await self.model.embed(text))


async def nearest(
    query: str, sentences: Sequence[str], device: str, count: int = 3
) -> list[tuple[float, str]]:
    """The `count` sentences nearest to `query`, with their cosine similarities."""
    async with lz.start(lz.Settings(device=device, inference=True)):
        service = Service(MiniLM(device))
        query_row, *rows = await asyncio.gather(*(service.embed(text) for text in (query, *sentences)))
    similarity, index = (torch.stack(rows) @ query_row).topk(count)
    return [(float(s), sentences[int(i)]) for s, i in zip(similarity, index, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and print."""
    parser = argparse.ArgumentParser(description="Find the sentences nearest to a query.")
    parser.add_argument("query", nargs="?", default="living alone in the woods")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    for similarity, sentence in asyncio.run(nearest(options.query, read_sentences(), options.device)):
        print(f"{similarity:.3f}  {sentence}")


if __name__ == "__main__":
    main()
