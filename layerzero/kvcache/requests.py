"""Requests that share a pool of pages: who may begin, who waits, and who gives pages back when they run out.

A request holds the pages of its tokens and grows page by page. When none is free, one that is idle, or else
the youngest, gives all of its pages back, waits, and is computed again from its tokens: no request fails, and
the oldest that is read always continues. New requests begin in an order that is fair to clients by the tokens
they were served.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Sequence
from time import monotonic

import anyio

from layerzero._util import log
from layerzero.kvcache.block_allocator import PagesExhaustedError
from layerzero.kvcache.block_tables import PagedSequence, TokenRange
from layerzero.kvcache.paged_cache import PagedCache
from layerzero.kvcache.prefixes import PageKeys, PrefixCache
from layerzero.ops import checks
from layerzero.spec.errors import OverloadedError

PREEMPTED = "kvcache.request_preempted"
IDLE_S = 0.5  # a reader is away that takes nothing for so long: others look as often


class PagedRequest:
    """One request of a `PagedRequests`, which gave it; a context manager that gives its pages back.

    Each `step` says which of the request's tokens are to be computed now; a request that was preempted is
    asked for all of them again. Set `is_idle` while no reader takes what the steps gave: after half a second
    the request gives its pages to any other that needs them.
    """

    __slots__ = (
        "_charged", "_idle_since", "_is_stepping", "_is_yielding", "_pool", "age", "arrival", "client",
        "keys", "preemptions", "sequence",
    )  # fmt: skip

    def __init__(self, pool: PagedRequests, arrival: int, client: Hashable, keys: PageKeys) -> None:
        self._pool, self.arrival, self.client, self.keys = pool, arrival, client, keys
        self.age: int | None = None  # the number of its first admission
        self.sequence: PagedSequence | None = None
        self.preemptions = self._charged = 0
        self._idle_since: float | None = None
        self._is_stepping = self._is_yielding = False

    @property
    def is_idle(self) -> bool:
        """Whether no reader takes what the steps gave."""
        return self._idle_since is not None

    @is_idle.setter
    def is_idle(self, is_idle: bool) -> None:
        self._idle_since = monotonic() if is_idle else None

    def _is_left(self) -> bool:
        """Whether it was idle for long: of one that only sends, others would take pages at every token."""
        return self._idle_since is not None and monotonic() - self._idle_since >= IDLE_S

    def step(self, tokens: Sequence[int], limit: int) -> _Step:
        """An async context manager that gives the range of `tokens` to compute now, at most `limit` of them.

        It waits for pages. Within it the pages stay the request's; leaving it says that they are filled, or,
        by an exception, that they are not. `tokens` are the prompt and what was drawn, and only ever grow.
        Raises: OverloadedError: more tokens wait than may. ValueError: the pool could never hold them.
            PagesExhaustedError: pages are missing that no request of this pool holds.
        """
        return _Step(self, tokens, limit)

    def close(self) -> None:
        """Give the pages back and leave; nothing the second time."""
        self._pool._close(self)

    def __enter__(self) -> PagedRequest:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class _Step:
    """One step of a request, as `PagedRequest.step` describes it."""

    __slots__ = ("_limit", "_request", "_span", "_tokens")

    def __init__(self, request: PagedRequest, tokens: Sequence[int], limit: int) -> None:
        self._request, self._tokens = request, tokens
        self._limit = checks.need_int("limit", limit, low=1)

    async def __aenter__(self) -> TokenRange:
        request, pool = self._request, self._request._pool
        span = pool._try_step(request, self._tokens, self._limit)
        if span is None:
            span = await pool._wait(request, self._tokens, self._limit)
        request._is_stepping, self._span = True, span
        return span

    async def __aexit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self._request._pool._end_step(self._request, self._tokens, self._span, filled=kind is None)


class PagedRequests:
    """The requests of one pool, of one event loop; nothing else takes pages of the pool.

    `max_waiting_tokens` bounds the tokens of requests that have not begun; None bounds nothing. A client is
    whom a request is opened for: among those that wait, the one whose running requests were served the fewest
    tokens begins next; a client that comes, or comes back, starts level with the one that was served least.
    Source: Sheng et al., OSDI 2024 (virtual token counter).
    """

    def __init__(
        self, cache: PagedCache, *, prefixes: PrefixCache | None = None, max_waiting_tokens: int | None = None
    ) -> None:
        if max_waiting_tokens is not None:
            checks.need_int("max_waiting_tokens", max_waiting_tokens, low=1)
        if prefixes is not None and prefixes._cache is not cache:
            raise ValueError("prefixes needs those of the cache's own pages, got another cache's")
        self.cache, self.prefixes, self.max_waiting_tokens = cache, prefixes, max_waiting_tokens
        self.preemptions = self.prompt_tokens = self.reused_tokens = 0
        self._arrivals = self._ages = 0
        self._running: list[PagedRequest] = []  # those with pages, the oldest first
        self._waiting: dict[PagedRequest, tuple[anyio.Event, int]] = {}  # with the tokens that they wait with
        self._served: dict[Hashable, int] = {}  # tokens of clients that have requests
        self._open: dict[PagedRequest, None] = {}

    def open(self, client: Hashable = None, *, salt: bytes = b"") -> PagedRequest:
        """A request of `client`; it shares prefixes with requests of the same `salt`."""
        request = PagedRequest(self, self._arrivals, client, PageKeys(self.cache.page_size, salt))
        self._arrivals += 1
        self._open[request] = None
        self._served.setdefault(client, min(self._served.values(), default=0))
        return request

    @property
    def capacity(self) -> int:
        """Tokens that a request may have: all of the pool but the pages that no request here holds."""
        sequences = (request.sequence for request in self._running)
        pages = {page for sequence in sequences if sequence is not None for page in sequence.pages}
        return (self.cache.allocator.free_pages + len(pages)) * self.cache.page_size

    @property
    def waiting(self) -> int:
        """Requests that wait for pages."""
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of requests that have not begun."""
        return sum(tokens for request, (_, tokens) in self._waiting.items() if request.age is None)

    # -- one step ---------------------------------------------------------------------------------------

    def _try_step(self, request: PagedRequest, tokens: Sequence[int], limit: int) -> TokenRange | None:
        """The range to compute now, or None where the request has to wait."""
        capacity = self.cache.allocator.total * self.cache.page_size
        if not 1 <= len(tokens) <= capacity:
            raise ValueError(f"tokens needs 1 to {capacity}, what the whole pool holds, got {len(tokens)}")
        if request not in self._open or request._is_stepping:
            state = "another step of it runs" if request in self._open else "it was closed"
            raise ValueError(f"step needs a request that is open and at rest, but {state}")
        if request.sequence is None and not self._try_begin(request, tokens):
            return None
        sequence = request.sequence
        assert sequence is not None
        count = min(limit, len(tokens) - sequence.length)
        if count < 1:
            raise ValueError(f"tokens needs more than the {sequence.length} that are computed already")
        if sequence.length + count > sequence.capacity and not self._try_grow(request, sequence, count):
            return None
        self._served[request.client] += max(0, len(tokens) - request._charged)
        request._charged = max(len(tokens), request._charged)
        return sequence.extend(count)

    def _try_grow(self, request: PagedRequest, sequence: PagedSequence, count: int) -> bool:
        """Pages for `count` more tokens, from younger requests where none is free."""
        end = sequence.length + count
        missing = self.cache.pages_for(end) - len(sequence.pages)
        while self._may_go(request):
            if missing <= self.cache.allocator.free_pages:
                self.cache.reserve(sequence.number, end)
                return True
            if not self._take_from_idle(request) and not self._take_from_youngest(request):
                break
        return False

    def _try_begin(self, request: PagedRequest, tokens: Sequence[int]) -> bool:
        """Give a request that holds no pages those for all of its tokens, where they are free."""
        allocator = self.cache.allocator
        pages = self.prefixes.match(tokens, request.keys) if self.prefixes is not None else []
        if not self._may_go(request):
            return False
        while True:
            unused = sum(not allocator.refcount(page) for page in pages)
            missing = self.cache.pages_for(len(tokens)) - len(pages) + unused
            spare = bool(self._running)  # a request that runs may need a page soon
            if missing + spare <= allocator.free_pages:
                break
            if not self._running:
                raise PagesExhaustedError(
                    f"needs {missing} free pages, got {allocator.free_pages} of {allocator.total}, "
                    "and no request holds one",
                    missing=missing, total=allocator.total,
                )  # fmt: skip
            if not self._take_from_idle(request):
                return False
        request.sequence = self.cache.sequence(len(tokens), pages)
        if request.age is None:
            request.age, self._ages = self._ages, self._ages + 1
            self.prompt_tokens += len(tokens)
            self.reused_tokens += request.sequence.length
        bisect.insort(self._running, request, key=lambda running: running.age or 0)
        return True

    def _take_from_idle(self, request: PagedRequest) -> bool:
        """Have the youngest of those without a reader give its pages back; False where there is none."""
        idle = [other for other in self._running if other is not request and other._is_left()]
        if idle:
            self._preempt(idle[-1])
        return bool(idle)

    def _take_from_youngest(self, request: PagedRequest) -> bool:
        """Have the youngest give its pages back; False where `request` has to wait for that, or is it."""
        youngest = self._running[-1]
        if youngest is not request and any(other._is_yielding for other in self._running):
            return False
        if youngest._is_stepping:
            youngest._is_yielding = True  # it gives them back behind its step
            return False
        self._preempt(youngest)
        return youngest is not request

    def _end_step(
        self, request: PagedRequest, tokens: Sequence[int], span: TokenRange, *, filled: bool
    ) -> None:
        request._is_stepping = False
        sequence = request.sequence
        if sequence is None:  # closed meanwhile
            return
        if not filled:
            sequence.length = span.start
        elif self.prefixes is not None:
            self.prefixes.publish(sequence, tokens, request.keys, span.start)
        if request._is_yielding:
            self._preempt(request)

    def _preempt(self, request: PagedRequest) -> None:
        request.preemptions += 1
        self.preemptions += 1
        length = request.sequence.length if request.sequence is not None else 0
        log.debug(PREEMPTED, age=request.age, tokens=length, times=request.preemptions)
        self._release(request)

    def _release(self, request: PagedRequest) -> None:
        if request.sequence is not None:
            request.sequence.close()
            request.sequence = None
            self._running.remove(request)
        request._is_yielding = False
        self._wake()

    def _close(self, request: PagedRequest) -> None:
        if request not in self._open:
            return
        del self._open[request]
        if all(other.client != request.client for other in self._open):
            del self._served[request.client]
        if request in self._waiting:
            self._waiting.pop(request)[0].set()
        self._release(request)

    # -- whose turn it is -------------------------------------------------------------------------------

    def _turn(self, request: PagedRequest) -> tuple[int, int, int]:
        """What orders those that wait: who has pages, who had some, who was served least."""
        if request.age is None:
            return 2, self._served[request.client], request.arrival
        return (0 if request.sequence is not None else 1), request.age, 0

    def _may_go(self, request: PagedRequest) -> bool:
        turn = self._turn(request)
        return all(other is request or turn < self._turn(other) for other in self._waiting)

    async def _wait(self, request: PagedRequest, tokens: Sequence[int], limit: int) -> TokenRange:
        """The range of a request that waits, once it may go; then the next one looks."""
        bound = self.max_waiting_tokens
        if request.age is None and bound is not None:
            count = self.waiting_tokens + len(tokens)
            if count > bound:
                raise OverloadedError(
                    f"{count} tokens would wait for pages, of at most {bound}", retry_after=1.0, waiting=count
                )
        try:
            while True:
                event = anyio.Event()
                self._waiting[request] = event, len(tokens)
                if self._running or not self._may_go(request):  # else no request is left to wake it
                    with anyio.move_on_after(IDLE_S):  # nothing tells that another is idle by now
                        await event.wait()
                span = self._try_step(request, tokens, limit)
                if span is not None:
                    return span
        finally:
            self._waiting.pop(request, None)
            self._wake()

    def _wake(self) -> None:
        if self._waiting:
            self._waiting[min(self._waiting, key=self._turn)][0].set()
