"""A pool that is too small for its requests computes little twice, however short its readers pause."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch

from layerzero.kvcache import KVCacheSpec, PagedCache, PagedRequests, PrefixCache
from layerzero.kvcache.requests import IDLE_S

SPEC = KVCacheSpec(num_kv_heads=1, head_dim=1, dtype=torch.int64)
REQUESTS, PROMPT, DRAWN = 20, 10, 30


async def computed(pauses: int) -> int:
    """Tokens computed for twenty texts in twenty pages; readers pause so many turns at each token."""
    cache = PagedCache(SPEC, pages=20, page_size=8)
    requests = PagedRequests(cache, prefixes=PrefixCache(cache))
    counts = []

    async def one(number: int) -> None:
        tokens = [number * 1000 + place for place in range(PROMPT)]
        with requests.open(number) as request:
            while len(tokens) < PROMPT + DRAWN:
                async with request.step(tokens, 64) as span:
                    await asyncio.sleep(0)
                    counts.append(span.count)
                if span.end == len(tokens):
                    tokens.append(number * 1000 + len(tokens))
                    request.is_idle = True
                    for _ in range(pauses):
                        await asyncio.sleep(0)
                    request.is_idle = False

    await asyncio.gather(*map(one, range(REQUESTS)))
    return sum(counts)


@pytest.mark.parametrize("pauses", [0, 1, 5])
def test_a_reader_that_pauses_does_not_lose_its_pages(pauses: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that took each other's pages at every token computed each text a dozen times."""
    monkeypatch.setattr("layerzero.kvcache.requests.monotonic", lambda: 0.0)
    assert asyncio.run(computed(pauses)) < 1.6 * REQUESTS * (PROMPT + DRAWN)


def test_a_reader_that_stays_away_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """From half a second on, to the moment, and not once it reads again."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("layerzero.kvcache.requests.monotonic", lambda: clock.now)
    requests = PagedRequests(PagedCache(SPEC, pages=2, page_size=8))
    with requests.open() as request:
        assert not request.is_idle and not request._is_left()
        request.is_idle = True
        for seconds, left in ((0.0, False), (IDLE_S - 0.01, False), (IDLE_S, True)):
            clock.now = seconds
            assert request.is_idle and request._is_left() is left
        request.is_idle = False
        assert not request.is_idle and not request._is_left()
