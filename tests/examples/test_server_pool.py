"""A pool too small for the requests of the moment: who streams goes on streaming, with the same text."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

for package in ("openai", "starlette", "uvicorn", "prometheus_client", "tokenizers", "safetensors"):
    pytest.importorskip(package, reason=f"the server needs {package}: pip install 'layerzero-runtime[test]'")

from server import app as server_app  # noqa: E402  the skips come first

from tests.examples import loopback  # noqa: E402
from tests.examples.serving import NOTHING, PROMPT, Running, asked, client_of, serving  # noqa: E402


@pytest.mark.asyncio
async def test_a_pool_too_small_for_all_changes_no_text() -> None:
    """Requests that together need four times the pool: streams never break, and every text is that of a
    large pool."""
    requests = [
        asked(seed=seed, max_tokens=15 + seed % 5, prompt=PROMPT[: 6 + seed], stream=True)
        for seed in range(12)
    ]

    async def texts(running: Running) -> list[str]:
        async with loopback.AsyncClient(base_url=running.url, timeout=200) as client:

            async def one(request: dict[str, Any]) -> str:
                parts = []
                async with client.stream("POST", "/v1/completions", json=request) as response:
                    assert response.status_code == 200
                    async for line in response.aiter_lines():
                        if line.startswith("data: {"):
                            parts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                assert line == "" or line == "data: [DONE]"
                return "".join(parts)

            return list(await asyncio.gather(*(one(request) for request in requests)))

    with serving(server_app.Options(pages=400, page_size=4, strict=True)) as large:
        expected = await texts(large)
        assert large.metrics()["preemptions_total", ()] == 0
    with serving(server_app.Options(pages=16, page_size=4, strict=True)) as small:
        assert await texts(small) == expected
        assert small.metrics()["preemptions_total", ()] > 0
        assert small.settled() == NOTHING


def test_a_full_pool_lets_the_next_one_wait() -> None:
    """A request that the pool cannot hold beside another waits for it and is answered; nothing is refused."""
    with serving(server_app.Options(pages=32)) as server, client_of(server) as client:
        whole = client.completions.create(**asked(max_tokens=112, temperature=0)).choices[0]
        with client.completions.create(**asked(max_tokens=500, temperature=0), stream=True) as held:
            events = iter(held)
            assert next(events).choices
            beside = client.completions.create(**asked(max_tokens=112, temperature=0)).choices[0]
            assert (beside.text, beside.finish_reason) == (whole.text, whole.finish_reason)
        assert server.settled() == NOTHING
