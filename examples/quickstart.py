"""Sixty-four callers await one row each; they meet in one launch, which says why its kernel was chosen."""

import asyncio

import torch

import layerzero as lz


async def main() -> None:
    rows, weight = torch.randn(64, 4096).split(1), torch.ones(4096)
    async with lz.start(lz.Settings(inference=True)):
        outs = await asyncio.gather(*(lz.rms_norm(row, weight) for row in rows))
        print(len(outs), "callers met in this launch:")
        print(lz.last_selection())


asyncio.run(main())
