"""The generation server on one of two hosts, for `test_cut_server.py`: the cable to a replica of it fails."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch

import httpx

from benchmarks.hosting.namespaces import ADDRESSES, cut, mend, shape
from tests.distributed.test_server_fleet import all_running, on_loop, streamed
from tests.examples.serving import Running, asked, serving
from tests.waiting import LIMIT_S

HANG_S = 10.0  # a busy machine is silent for seconds; Ray gives a node up later than that
DELAY_S = 0.15
PATIENCE_S = 5.0  # that a request waits for a replica where none serves; for the first ones there is time
SEEDS = range(6)
MORE: dict[str, Any] = {"max_tokens": 120, "extra_body": {"ignore_eos": True}}


class Trial:
    """What clients of the server get while the cable fails, and while it holds."""

    def __init__(self, server: Running, cable: str) -> None:
        self.server, self.cable, self.service = server, cable, server.service
        (self.far,) = [d.name for d in self.pool.devices.values() if d.address.host == ADDRESSES[2]]

    @property
    def pool(self) -> Any:
        """The devices of the server's replicas."""
        return self.service.pool

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[asyncio.Future[list[str]]]:
        """Streams that have all begun, at both replicas."""
        first = asyncio.Event()
        texts = asyncio.ensure_future(streamed(self.server, SEEDS, first, **MORE))
        begun = asyncio.ensure_future(first.wait())
        await asyncio.wait({texts, begun}, return_when="FIRST_COMPLETED")
        assert first.is_set(), texts.result()
        assert self.service.router.load(self.far), "none at the other host"
        yield texts

    async def half_open(self, towards: int) -> dict[str, Any]:
        """No packet of one direction passes, in the middle of streams and under new requests."""
        moved, began = self.service.moved, time.monotonic()
        async with self.streams() as texts:
            cut(self.cable, towards)
            try:
                got = await asyncio.wait_for(texts, LIMIT_S)
                statuses = [(await self.completion()).status_code for _ in range(3)]
            finally:
                mend(self.cable)
        seconds = time.monotonic() - began
        await asyncio.to_thread(all_running, self.server)
        print(f"half open towards {towards}: {seconds:.1f} s, and {time.monotonic() - began - seconds:.1f} s")
        return {"texts": got, "moved": self.service.moved - moved, "statuses": statuses}

    async def forgetful(self, towards: int) -> dict[str, Any]:
        """The same, where a request that moves begins anew: nothing keeps a token from coming twice."""
        from server import replica

        with patch.object(replica, "generate", from_the_start):
            return await self.half_open(towards)

    async def delay(self) -> dict[str, Any]:
        """A slow line is no lost one."""
        moved = self.service.moved
        async with self.streams() as texts:
            shape(self.cable, delay_s=DELAY_S)
            try:
                got = await asyncio.wait_for(texts, LIMIT_S)
            finally:
                shape(self.cable, delay_s=0.0)
        return {"texts": got, "moved": self.service.moved - moved}

    async def nobody(self) -> dict[str, Any]:
        """The only replica that serves is cut off: in the middle of a stream, and before a request."""
        near = next(name for name in self.pool.devices if name != self.far)
        assert await asyncio.to_thread(on_loop, self.server, self.pool.drain(LIMIT_S, on=near))
        first = asyncio.Event()
        self.pool._patience_s = PATIENCE_S
        stream = asyncio.ensure_future(self.events(first))
        await asyncio.wait({stream, asyncio.ensure_future(first.wait())}, return_when="FIRST_COMPLETED")
        began = time.monotonic()
        cut(self.cable)
        try:
            answer, last = await asyncio.gather(self.completion(), stream)
        finally:
            mend(self.cable)
        return {
            "seconds": time.monotonic() - began,
            "status": answer.status_code,
            "codes": [each["error"]["code"] for each in (answer.json(), last)],
            "left": [self.service.active, self.service.router.load(self.far)],
        }

    async def completion(self) -> httpx.Response:
        """The answer to a request that is no stream."""
        async with httpx.AsyncClient(timeout=LIMIT_S) as client:
            return await client.post(f"{self.server.url}/v1/completions", json=asked(max_tokens=4))

    async def events(self, first: asyncio.Event) -> dict[str, Any]:
        """The last event of a stream."""
        given = asked(max_tokens=400, ignore_eos=True, stream=True)
        event: dict[str, Any] = {}
        async with (
            httpx.AsyncClient(timeout=LIMIT_S) as client,
            client.stream("POST", f"{self.server.url}/v1/completions", json=given) as answer,
        ):
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    first.set()
        return event


async def from_the_start(choice: Any, so_far: Sequence[Any] = ()) -> AsyncIterator[Any]:
    """A replica's tokens, those of them too that were delivered."""
    from server.replica import generate

    async for item in generate(choice):
        yield item


async def trials(server: Running, cable: str) -> dict[str, Any]:
    """All of them, one after the other."""
    trial = Trial(server, cable)
    said: dict[str, Any] = {"whole": await streamed(server, SEEDS, asyncio.Event(), **MORE)}
    said["delay"] = await trial.delay()
    said["towards the replica"] = await trial.half_open(2)
    said["towards the server"] = await trial.half_open(1)
    said["without the guard"] = await trial.forgetful(1)
    said["nobody"] = await trial.nobody()
    return said


def main(address: str, cable: str) -> None:
    """Print what became of the requests."""
    os.environ |= {"LAYERZERO_HANG_S": str(HANG_S), "LAYERZERO_PLACEMENT_TIMEOUT_S": str(LIMIT_S),
                   "LAYERZERO_MAX_RESTARTS": "100", "LAYERZERO_STATE_DIR": ""}  # fmt: skip
    from server import app as server_app

    options = server_app.Options(pages=128, cluster=address, replicas=2)
    with serving(options, host=ADDRESSES[1]) as server:
        print("SAID " + json.dumps(asyncio.run(trials(server, cable))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
