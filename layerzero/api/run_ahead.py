"""`run_ahead`: a loop over tokens that keeps the device one step in front of its reader."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable

from torch import Tensor

from layerzero.api.readback import HostRead, to_host
from layerzero.ops import checks


async def run_ahead(
    step: Callable[[Tensor], Awaitable[Tensor]], ids: Tensor, *, max_steps: int | None = None
) -> AsyncGenerator[Tensor, None]:
    """Yield on the host what `step` returns, step after step, each step begun with the result before it.

    On CUDA step n + 1 is launched from result n on the device before n is on the host, so that the device
    computes while the reader decides. Leaving the loop drops what ran ahead: at most one step. Give pages
    back behind the loop, not inside it; on one stream their next sequence comes after that step. On a
    device that answers when it has computed, nothing runs ahead. The results are the same either way.

    Args: `step` takes `ids` and returns what the next step takes, both on the same device. `max_steps` ends
        the loop after so many results; None never does.
    Raises: ValueError: `max_steps` is below 1. TypeError: `step` returned no tensor. What `step` raises.

    Example:
        >>> import asyncio, contextlib, torch, layerzero as lz
        >>> async def main():
        ...     async def step(ids):
        ...         return ids + 1
        ...     async with contextlib.aclosing(lz.run_ahead(step, torch.tensor([5]), max_steps=3)) as tokens:
        ...         return [int(token) async for token in tokens]
        >>> asyncio.run(main())
        [6, 7, 8]
    """
    if max_steps is not None:
        checks.need_int("max_steps", max_steps, low=1)
    steps = 0
    reading: HostRead | None = None
    while max_steps is None or steps < max_steps:
        ids = await step(ids)
        started = to_host(ids)
        steps += 1
        if reading is not None:
            yield await reading
            reading = None
        if started.done:
            yield await started
        else:
            reading = started
    if reading is not None:
        yield await reading
