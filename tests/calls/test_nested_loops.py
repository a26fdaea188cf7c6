"""A batched function may run a loop of its own: what it awaits there never waits for the thread it is on."""

from __future__ import annotations

from pathlib import Path

from tests import children

# In a process of its own: what waits for its own thread ends no other way.
PROGRAM = """
import asyncio, torch, layerzero as lz

def inner(x):
    return x + 1

def outer(x):
    async def main():
        parts = await asyncio.gather(*(lz.batched(inner)(part) for part in x.split(1)))
        return torch.cat(parts) * await lz.linear(torch.ones(len(x), 2), torch.eye(2))
    return asyncio.run(main())

async def main():
    async with lz.start(lz.Settings(warm="off", inline_limit_us=0.0)):
        for _ in range(3):
            rows = [torch.full((1 + i % 2, 2), float(i)) for i in range(4)]
            outs = await asyncio.gather(*(lz.batched(outer)(x) for x in rows))
            assert all(torch.equal(out, x + 1) for out, x in zip(outs, rows)), outs
    print("ended")

asyncio.run(main())
"""


def test_a_loop_in_a_batched_function_waits_for_no_thread_of_its_own(tmp_path: Path) -> None:
    """Its batches are long ones, which go to the device's thread: the one that runs the function."""
    ended = children.run(PROGRAM, folder=tmp_path)
    assert ended.returncode == 0 and ended.stdout == "ended\n", ended.stderr
