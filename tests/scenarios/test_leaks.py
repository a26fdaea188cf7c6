"""Nothing that is done again and again keeps growing: selections, hits, lanes, caches, policies, errors."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

import layerzero as lz
import layerzero.sync
from layerzero.kvcache import KVCacheSpec, PagedCache, PageKeys, PrefixCache
from tests.growth import growth_of

# Less than one small object for every second call of a round.
CALLS = 100
ALLOWED = CALLS // 2 * 48
X, WEIGHT = torch.randn(4, 8), torch.ones(8)
ROWS = itertools.count(1)
LOOP = asyncio.Runner()  # one for all rounds: each new loop leaves a name in Python's own cache of methods


@pytest.fixture(scope="module", autouse=True)
def runtime() -> Iterator[lz.Runtime]:
    """A runtime that remembers few calls, so that its caches are full before anything is counted."""
    with lz.start(lz.Settings(warm="off", device="cpu", max_keys=16), scoped=True) as opened:
        yield opened
    LOOP.close()


def hits() -> None:
    """Calls that were made before, blocking."""
    for _ in range(CALLS):
        layerzero.sync.rms_norm(X, WEIGHT)


def new_shapes() -> None:
    """Calls that were never made before: each is described, judged, priced and remembered."""
    for rows in itertools.islice(ROWS, CALLS):
        layerzero.sync.rms_norm(X[:1].expand(rows, 8), WEIGHT)


def records() -> None:
    """Selections that are asked about and never run."""
    for rows in itertools.islice(ROWS, CALLS):
        lz.dry_run("rms_norm", torch.empty(rows, 8, device="meta"), torch.empty(8, device="meta"))


def crowds() -> None:
    """Callers that share batches, one in ten of whom leaves early."""

    async def crowd() -> None:
        callers = [asyncio.ensure_future(lz.rms_norm(X, WEIGHT)) for _ in range(CALLS)]
        await asyncio.sleep(0)
        for caller in callers[::10]:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)

    LOOP.run(crowd())


def refusals() -> None:
    """Calls that are wrong: their errors hold the frames, the frames the arguments."""
    for _ in range(CALLS):
        with pytest.raises(ValueError, match="weight"):
            layerzero.sync.rms_norm(X, WEIGHT[:3])


def policies() -> None:
    """Rules of blocks, each a policy of its own with plans of its own."""
    for number in range(CALLS // 10):
        with lz.prefer("torch.*", f"other{number}.*", op="rms_norm"):
            layerzero.sync.rms_norm(X, WEIGHT)


CACHE = PagedCache(KVCacheSpec(num_kv_heads=1, head_dim=4), pages=64, page_size=4)
PREFIXES = PrefixCache(CACHE)


def pages() -> None:
    """Sequences that share prefixes, grow, are published, forked and closed; pages are given out again."""
    for start in itertools.islice(ROWS, CALLS // 10):
        tokens = list(range(start, start + 20))
        sequence = PREFIXES.open(tokens, PageKeys(4))
        sequence.extend(len(tokens) - sequence.length)
        PREFIXES.publish(sequence, tokens, PageKeys(4))
        sequence.close()
        own = CACHE.new()
        CACHE.extend([own], [9])
        fork = CACHE.fork(own)
        CACHE.extend([fork], [3])
        CACHE.free(fork)
        CACHE.free(own)


WORK = (hits, new_shapes, records, crowds, refusals, policies, pages)


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_what_is_done_again_and_again_leaves_nothing(work: Callable[[], None]) -> None:
    """T35: of some equal rounds one leaves less behind than an object for every second of its calls."""
    assert growth_of(work) < ALLOWED


def test_a_leak_of_one_small_object_a_call_is_seen() -> None:
    """The measure itself: a list that gets one tuple for each call grows beyond what is allowed."""
    kept: list[tuple[int]] = []

    def leak() -> None:
        for number in range(CALLS):
            layerzero.sync.rms_norm(X, WEIGHT)
            kept.append((number,))

    assert growth_of(leak) > ALLOWED and kept
