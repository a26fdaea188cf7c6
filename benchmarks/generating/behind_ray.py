"""The same forward behind Ray Serve: `@serve.batch` over whole requests, one replica."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(ROOT / "benchmarks"), str(ROOT / "examples")]
sys.path[:0] = PATHS

import ray  # noqa: E402
from ray import serve  # noqa: E402
from starlette.requests import Request  # noqa: E402

MOST, WAIT_S = 64, 0.01


@serve.deployment(max_ongoing_requests=256, ray_actor_options={"num_cpus": 1})
class Completions:
    """One replica: requests that come within `WAIT_S` of the first run as one batch."""

    def __init__(self, pages: int, threads: int) -> None:
        sys.path[:0] = PATHS
        import torch
        from models import llama

        import layerzero as lz

        torch.set_num_threads(threads)
        lz.start(lz.Settings(device="cpu", inference=True, warm="eager")).__enter__()
        self.model = llama.load(pages=pages)

    @serve.batch(max_batch_size=MOST, batch_wait_timeout_s=WAIT_S)
    async def together(self, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """All requests of a batch; the replica's loop stays free for who comes next."""
        from generating.together import complete

        return await asyncio.to_thread(complete, self.model, asked)

    async def __call__(self, request: Request) -> dict[str, Any]:
        """One request over HTTP."""
        answer: dict[str, Any] = await self.together(await request.json())
        return answer


def main() -> None:
    """Serve on the port that the command line names until SIGTERM."""
    port, pages, threads = (int(word) for word in sys.argv[1:4])
    # A cluster of its own, whatever else runs on this machine.
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    deployment: Any = Completions
    serve.run(deployment.bind(pages, threads), route_prefix="/v1/completions")
    print("ready", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
