"""Sixty-four callers await one row each; they meet in few launches, and each says in whose company it ran."""

import asyncio

import torch

import layerzero as lz


async def caller(row: torch.Tensor, weight: torch.Tensor) -> lz.Selection | None:
    await lz.rms_norm(row, weight)
    return lz.last_selection()


async def main() -> None:
    rows, weight = torch.randn(64, 4096).split(1), torch.ones(4096)
    async with lz.start(lz.Settings(inference=True)):
        selections = await asyncio.gather(*(caller(row, weight) for row in rows))
        print({f"{s.kernel} over {s.request.dims['N']} rows" for s in selections if s is not None})
        print(lz.explain("rms_norm", torch.cat(rows), weight))


asyncio.run(main())
