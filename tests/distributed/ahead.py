"""What each rank runs of a sharded Llama whose requests run ahead of their readers; prints one JSON line.

The devices here are CPUs, which answer when they have computed, so `lz.run_ahead` would read each token
before the next step. Told that no read is done at once, it goes one step in front, as on CUDA. Rank 0 notes
in one list what it sends and what its requests read.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from generate import SamplingParams, generate  # noqa: E402
from models import llama  # noqa: E402
from tensor_parallel.llama import TensorParallelLlama  # noqa: E402

import layerzero as lz  # noqa: E402
from layerzero.actors.group.channel import LeaderChannel  # noqa: E402
from layerzero.actors.group.step_message import decode, unpack  # noqa: E402
from layerzero.api.readback import HostReadback  # noqa: E402

PROMPTS = [[3, 5, 7], [11, 2, 4, 6, 8, 10], [9], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]]
TOKENS = [10, 4, 10, 7]
GREEDY = {1, 3}  # requests that take their likeliest token, beside others that draw
PAGES = 64


def run_ahead() -> None:
    """Let no read-back be done at once."""
    HostReadback.done = property(lambda read: False)  # type: ignore[method-assign,assignment]


def read_first() -> None:
    """Let every read-back be done at once."""
    HostReadback.done = property(lambda read: True)  # type: ignore[method-assign,assignment]


async def texts(model: Any, events: list[Any] | None = None, stop: int | None = None) -> list[list[int]]:
    """What continues each prompt; the last request leaves behind the token `stop`."""

    async def one(number: int) -> list[int]:
        temperature = 0.0 if number in GREEDY else 1.0
        params = SamplingParams(max_tokens=TOKENS[number], temperature=temperature, seed=number)
        found: list[int] = []
        tokens = generate(model, PROMPTS[number], params)
        async for token in tokens:
            found.append(token)
            if events is not None:
                events.append(["read", number, len(found)])
            if number == len(PROMPTS) - 1 and token == stop:
                await tokens.aclose()
                break
        return found

    return list(await asyncio.gather(*map(one, range(len(PROMPTS)))))


def note_messages(events: list[Any]) -> None:
    """Note of each step message whether it brings tokens, and which requests' rows are in it."""
    send = LeaderChannel.send

    def noted(channel: LeaderChannel, frame: bytes, *, last: bool = False) -> None:
        message = decode(frame)
        if message.values:
            counts, columns, in_parts = unpack(message.values)
            brought = 0 not in in_parts or any(isinstance(part, torch.Tensor) for part in columns[0])
            events.append(["sent", list(message.requests), counts, brought])
        send(channel, frame, last=last)

    LeaderChannel.send = noted  # type: ignore[method-assign,assignment]


async def main() -> dict[str, Any]:
    """All modes on one group, and the whole model on rank 0 alone."""
    config = llama.LlamaConfig.read(llama.FOLDER)
    get, like = llama.weights_of(llama.FOLDER, "cpu", torch.float32), torch.empty(0)
    said: dict[str, Any] = {}
    async with lz.start(lz.Settings(device="cpu", inference=True)):
        async with lz.rank_group(timeout_s=60.0) as member:
            graphs = os.environ["PADDED"] == "1"
            model = TensorParallelLlama(config, get, member, like, PAGES, [2, 4] if graphs else None, graphs)
            free = model.cache.allocator.free_pages
            if member.rank:
                await member.follow()
                return {"rank": member.rank}
            read_first()
            said["first"] = await texts(model)
            run_ahead()
            events: list[Any] = []
            note_messages(events)
            said["ahead"] = await texts(model, events)
            said["events"] = list(events)
            said["stopped"] = await texts(model, stop=said["first"][-1][2])
            said["leaked"] = free - model.cache.allocator.free_pages
        read_first()
        said["alone"] = await texts(llama.load(pages=PAGES))
    return {"rank": 0, **said}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    sys.stdout.write(json.dumps(asyncio.run(main())) + "\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()
