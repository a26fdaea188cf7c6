"""Requests in a pool that is too small for all: who waits, who gives pages back, and that nothing is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerzero.kvcache import (
    KVCacheSpec,
    PagedCache,
    PagedRequest,
    PagedRequests,
    PagesExhaustedError,
    PrefixCache,
    TokenRange,
)
from layerzero.spec.errors import OverloadedError

SPEC = KVCacheSpec(num_kv_heads=1, head_dim=1, dtype=torch.int64)
SIZE = 4
Pause = Callable[[], Awaitable[object]]


def pool(pages: int, *, prefixes: bool = True, **more: Any) -> PagedRequests:
    """A pool of `pages` pages of four tokens."""
    cache = PagedCache(SPEC, pages=pages, page_size=SIZE)
    return PagedRequests(cache, prefixes=PrefixCache(cache) if prefixes else None, **more)


def fill(cache: PagedCache, tokens: Sequence[int], span: TokenRange) -> int:
    """Write the tokens of `span` as a model would, and draw the next from all that lie before: their sum.

    Every place must hold the token that stands there, whoever filled it.
    """
    pages = span.sequence.pages
    keys = cache.k_cache.view(-1)
    for place in range(span.start, span.end):
        keys[pages[place // SIZE] * SIZE + place % SIZE] = tokens[place] * 1000 + place
    slots = [pages[place // SIZE] * SIZE + place % SIZE for place in range(span.end)]
    assert keys[slots].tolist() == [token * 1000 + place for place, token in enumerate(tokens[: span.end])]
    return (sum(tokens[: span.end]) * 31 + span.end) % 97


async def answer(
    requests: PagedRequests, prompt: list[int], count: int, pause: Pause, chunk: int = 6, client: str = ""
) -> list[int]:
    """The tokens that `fill` draws behind a prompt."""
    tokens = list(prompt)
    with requests.open(client) as request:
        while len(tokens) < len(prompt) + count:
            async with request.step(tokens, chunk) as span:
                await pause()
                drawn = fill(requests.cache, tokens, span)
                await pause()
            if span.end == len(tokens):
                tokens.append(drawn)
                await pause()  # the client reads
    return tokens[len(prompt) :]


def nothing_left(requests: PagedRequests) -> None:
    """Every page is free, nobody waits."""
    allocator = requests.cache.allocator
    assert allocator.free_pages == allocator.total
    assert requests.waiting == 0 and requests.waiting_tokens == 0


REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 2),  # a common beginning
        st.integers(1, 14),  # tokens of the prompt
        st.integers(1, 14),  # tokens to draw
        st.one_of(st.none(), st.integers(0, 60)),  # pauses until its client goes
        st.sampled_from("ab"),
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=200, deadline=None)
@given(REQUESTS, st.integers(7, 16), st.booleans(), st.integers(0, 999))
def test_a_pool_too_small_for_all_gives_the_tokens_of_a_large_one(
    crowd: list[tuple[int, int, int, int | None, str]], pages: int, prefixes: bool, seed: int
) -> None:
    """Whatever the order of steps: preempted requests go on with the same tokens, those that leave leave
    nothing, every page is free at the end."""
    chance = random.Random(seed)
    prompts = [[first + 5] * SIZE + [token % 3 for token in range(size)] for first, size, *_ in crowd]

    async def pause() -> None:
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)

    async def run(requests: PagedRequests, leave: bool) -> list[Any]:
        async def one(prompt: list[int], count: int, patience: int | None, client: str) -> Any:
            task = asyncio.ensure_future(answer(requests, prompt, count, pause, client=client))
            if leave and patience is not None:
                for _ in range(patience):
                    await asyncio.sleep(0)
                task.cancel()
            return (await asyncio.gather(task, return_exceptions=True))[0]

        lives = (
            one(prompt, count, patience, client)
            for prompt, (_, _, count, patience, client) in zip(prompts, crowd, strict=True)
        )
        return list(await asyncio.wait_for(asyncio.gather(*lives), 60))

    small = pool(max(pages, max(-(-(len(p) + c[2]) // SIZE) for p, c in zip(prompts, crowd, strict=True))),
                 prefixes=prefixes)  # fmt: skip
    large = pool(500, prefixes=False)
    expected, answers = asyncio.run(run(large, False)), asyncio.run(run(small, True))
    nothing_left(small)
    nothing_left(large)
    assert large.preemptions == 0
    for truth, given_out in zip(expected, answers, strict=True):
        assert given_out == truth or isinstance(given_out, asyncio.CancelledError)


def run(*lives: Any) -> list[Any]:
    """What coroutines return that run side by side, each within a minute."""

    async def all_of_them() -> list[Any]:
        return list(await asyncio.wait_for(asyncio.gather(*lives), 60))

    return asyncio.run(all_of_them())


async def turn() -> None:
    """One turn of the loop."""
    await asyncio.sleep(0)


def test_the_youngest_gives_its_pages_back() -> None:
    """Two that grow beyond the pool together: the first is never preempted, the second is, and ends later."""
    requests = pool(6, prefixes=False)
    ended: list[str] = []
    opened: list[PagedRequest] = []

    async def one(name: str) -> list[int]:
        tokens = [len(name)] * 4
        with requests.open() as request:
            opened.append(request)
            while len(tokens) < 20:
                async with request.step(tokens, 8) as span:
                    await turn()
                    drawn = fill(requests.cache, tokens, span)
                if span.end == len(tokens):
                    tokens.append(drawn)
            ended.append(name)
        return tokens

    first, second = run(one("old"), one("young"))
    assert ended == ["old", "young"]
    assert [request.preemptions for request in opened] == [0, requests.preemptions]
    assert requests.preemptions >= 1
    assert run(one("old"))[0] == first and run(one("young"))[0] == second
    nothing_left(requests)


def test_who_rests_between_steps_is_preempted_at_once() -> None:
    """A client that reads nothing holds no page against one that is older."""
    requests = pool(4, prefixes=False)

    async def lives() -> None:
        tokens = [1] * 8
        with requests.open() as old, requests.open() as young:
            for request in (old, young):
                async with request.step(tokens[:4], 8) as span:
                    fill(requests.cache, tokens, span)
            async with young.step(tokens, 8):
                pass  # two pages, and it rests
            async with old.step(tokens, 8):
                pass
            assert young.sequence is not None
            async with old.step([1] * 12, 8):
                assert young.sequence is None and young.preemptions == 1
            old.close()
            async with young.step([*tokens, 1], 8) as span:
                assert (span.start, span.end) == (0, 8)

    run(lives())
    nothing_left(requests)


@pytest.mark.parametrize("waits_first", [False, True])
def test_who_takes_no_token_holds_no_page_against_anybody(waits_first: bool) -> None:
    """A request whose caller reads nothing gives way to one that comes, and to one that grows."""
    requests = pool(4)

    async def lives() -> None:
        tokens = list(range(SIZE * 3))
        with requests.open() as old, requests.open() as young:
            async with old.step(tokens, 99) as span:
                fill(requests.cache, tokens, span)
            old.is_idle = not waits_first
            begins = asyncio.ensure_future(answer(requests, [5] * 5, 1, turn))
            while not requests.waiting and not begins.done():
                await turn()
            old.is_idle = True
            assert len(await begins) == 1 and old.preemptions == 1
            old.is_idle = False
            async with old.step(tokens, 99) as span:
                fill(requests.cache, tokens, span)
            old.is_idle = True
            for count in (1, SIZE + 1, SIZE * 3):
                async with young.step([7] * count, 99) as span:
                    fill(requests.cache, [7] * count, span)
            assert (old.preemptions, young.preemptions) == (2, 0)

    run(lives())
    nothing_left(requests)


def test_new_requests_do_not_overtake_one_that_was_preempted() -> None:
    """A preempted request goes on before one that has not begun, though that one would fit."""
    requests = pool(5, prefixes=False)
    order: list[str] = []

    async def one(name: str, count: int) -> None:
        tokens = [1] * 4
        with requests.open() as request:
            while len(tokens) < 4 + count:
                async with request.step(tokens, 100) as span:
                    await turn()
                order.append(name)
                tokens += [1] * (span.end == len(tokens))

    async def late() -> None:
        while not requests.preemptions:
            await turn()
        order.append("-")
        await one("c", 1)

    run(one("a", 14), one("b", 14), late())
    behind = order[order.index("-") + 1 :]
    assert requests.preemptions == 1
    assert behind.index("b") < behind.index("c"), order
    nothing_left(requests)


def test_clients_begin_by_the_tokens_they_were_served() -> None:
    """One with twenty long requests, and one that comes behind them all: they take turns."""
    requests = pool(3, prefixes=False)
    order: list[str] = []

    async def one(client: str) -> None:
        with requests.open(client) as request:
            async with request.step([1] * 8, 8):
                order.append(client)
                await turn()

    run(*(one("many") for _ in range(20)), one("few"), one("few"))
    assert order[:5] == ["many", "many", "few", "many", "few"], order


def test_a_client_that_rested_has_saved_nothing() -> None:
    """It starts level with the one that was served least, not with the tokens it has left over."""
    requests = pool(8, prefixes=False)

    async def lives() -> None:
        with requests.open("old") as old:
            async with old.step([1] * 12, 12):
                pass
            with requests.open("new") as new:
                assert requests._turn(new)[:2] == (2, 12)

    run(lives())


def test_a_prefix_is_computed_once_and_shared() -> None:
    """The second request begins behind the pages that the first has filled; they are the same pages."""
    requests = pool(8)

    async def lives() -> None:
        tokens = list(range(11))
        with requests.open() as first, requests.open() as second:
            async with first.step(tokens, 100) as span:
                fill(requests.cache, tokens, span)
            async with second.step([*tokens[:10], 99], 100) as span:
                assert (span.start, span.end) == (8, 11)
                fill(requests.cache, [*tokens[:10], 99], span)
            assert first.sequence is not None and second.sequence is not None
            assert first.sequence.pages[:2] == second.sequence.pages[:2]
            assert requests.cache.allocator.free_pages == 4
            with requests.open(salt=b"another") as third:
                async with third.step(tokens, 100) as span:
                    assert span.start == 0

    run(lives())
    assert (requests.prompt_tokens, requests.reused_tokens) == (33, 8)
    nothing_left(requests)


def test_what_failed_is_not_shared() -> None:
    """A step that raised has filled nothing: its pages are computed again, and nobody finds them."""
    requests = pool(8)
    tokens = list(range(9))

    async def lives() -> None:
        with requests.open() as first:
            with pytest.raises(RuntimeError, match="device"):
                async with first.step(tokens, 100):
                    raise RuntimeError("device")
            async with first.step(tokens, 100) as span:
                assert (span.start, span.end) == (0, 9)
            with requests.open() as second:
                async with second.step(tokens, 100) as span:
                    assert span.start == 8

    run(lives())
    nothing_left(requests)


def test_a_queue_that_is_full_is_refused() -> None:
    """Tokens that wait are bounded; who has begun is never refused."""
    requests = pool(4, prefixes=False, max_waiting_tokens=10)

    async def one() -> str:
        try:
            with requests.open() as request:
                async with request.step([1] * 6, 6):
                    await turn()
        except OverloadedError as error:
            assert error.retry_after > 0
            return "refused"
        return "served"

    assert run(*(one() for _ in range(5))) == ["served", "served", "refused", "refused", "refused"]
    nothing_left(requests)


@pytest.mark.parametrize(
    ("tokens", "limit", "message"),
    [
        ([], 4, "tokens needs 1 to 16"),
        ([1] * 17, 4, "tokens needs 1 to 16"),
        ([1], 0, "limit needs"),
    ],
)
def test_a_step_that_cannot_be_is_named(tokens: list[int], limit: int, message: str) -> None:
    """Nothing to compute, more than the pool holds, no room for a row."""
    requests = pool(4)

    async def lives() -> None:
        with requests.open() as request, pytest.raises(ValueError, match=f"^{message}"):
            async with request.step(tokens, limit):
                pass

    run(lives())
    nothing_left(requests)


def test_a_step_too_many_is_named() -> None:
    """Two at once, one behind the end, one without new tokens."""
    requests = pool(4)

    async def lives() -> None:
        with requests.open() as request:
            async with request.step([1], 4):
                with pytest.raises(ValueError, match="another step of it runs"):
                    await request.step([1, 2], 4).__aenter__()
            with pytest.raises(ValueError, match="tokens needs more than the 1"):
                await request.step([1], 4).__aenter__()
        request.close()
        with pytest.raises(ValueError, match="it was closed"):
            await request.step([1, 2], 4).__aenter__()

    run(lives())
    nothing_left(requests)


def test_pages_that_another_holds_are_an_error_and_no_wait_for_ever() -> None:
    """Where no request of the pool can give pages back, the one that needs them is told."""
    requests = pool(4)

    async def lives() -> None:
        assert requests.capacity == 16
        with requests.cache.sequence(12), requests.open() as request:
            assert requests.capacity == 4
            with pytest.raises(PagesExhaustedError, match="no request holds one"):
                async with request.step([1] * 8, 8):
                    pass
            async with request.step([1] * 4, 8):
                assert requests.capacity == 4
            with pytest.raises(PagesExhaustedError):
                async with request.step([1] * 5, 8):
                    pass

    run(lives())
    nothing_left(requests)


def test_closing_a_request_that_waits_ends_its_wait() -> None:
    """Another task closes it: the waiter gets an error, and the next one goes on."""
    requests = pool(2, prefixes=False)

    async def lives() -> None:
        with requests.open() as holder, requests.open() as waiter:
            async with holder.step([1] * 8, 8):
                wait = asyncio.ensure_future(waiter.step([1] * 8, 8).__aenter__())
                await turn()
                assert requests.waiting == 1 and requests.waiting_tokens == 8
                waiter.close()
                with pytest.raises(ValueError, match="it was closed"):
                    await wait

    run(lives())
    nothing_left(requests)
