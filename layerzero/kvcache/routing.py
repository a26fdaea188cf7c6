"""Which replica continues a prompt: where its pages are known and the load is low, in one price."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from layerzero.kvcache.prefixes import PageKeys
from layerzero.ops import checks


class PrefixRouter:
    """Prompts by the replicas that have computed them, as far as this router has seen them placed.

    A request goes where it adds the least to what has to be computed: the tokens of its prompt that a replica
    does not know, those that it still has to compute for others, and `request_tokens` for each request that
    draws there. At most `max_pages` pages are known, of all replicas together; the least recently used go.

    Sources: the one price of NVIDIA Dynamo's router; the index of what was sent where, bounded by use, as
    SGLang's router and Ray Serve's keep it; vLLM's chained hashes of blocks.

    Example:
        >>> router = PrefixRouter(page_size=2)
        >>> with router.open([1, 2, 3, 4, 5]) as first:
        ...     first.place(["a", "b"])
        'a'
        >>> with router.open([1, 2, 3, 4, 9]) as second:
        ...     second.place(["b", "a"]), second.cached_tokens
        ('a', 4)
    """

    __slots__ = ("_drawing", "_holders", "_known", "_max_pages", "_page_size", "_pending", "_request_tokens")

    def __init__(self, page_size: int = 16, *, max_pages: int = 1 << 16, request_tokens: int = 128) -> None:
        self._page_size = checks.need_int("page_size", page_size, low=1)
        self._max_pages = checks.need_int("max_pages", max_pages, low=1)
        self._request_tokens = checks.need_int("request_tokens", request_tokens, low=0)
        self._holders: OrderedDict[bytes, dict[str, None]] = OrderedDict()
        self._known = 0
        self._pending: dict[str, int] = {}  # tokens of prompts that are not computed yet
        self._drawing: dict[str, int] = {}  # requests behind their first token

    def __len__(self) -> int:
        """How many pages it knows, one counted for each replica that has it."""
        return self._known

    def open(self, tokens: Sequence[int], salt: bytes = b"") -> RoutedRequest:
        """A request with the prompt `tokens`, to be placed; `salt` as for `PageKeys`."""
        return RoutedRequest(self, tokens, salt)

    def load(self, replica: str) -> int:
        """What is under way at a replica, in tokens."""
        return self._pending.get(replica, 0) + self._request_tokens * self._drawing.get(replica, 0)

    def forget(self, replica: str) -> None:
        """Know nothing any more of what a replica has computed: it is gone, or has begun anew."""
        for key in [key for key, holders in self._holders.items() if replica in holders]:
            del self._holders[key][replica]
            self._known -= 1
            if not self._holders[key]:
                del self._holders[key]

    def _cached_pages(self, keys: Sequence[bytes], replicas: Sequence[str]) -> dict[str, int]:
        """How many of the first pages each replica has."""
        cached = dict.fromkeys(replicas, 0)
        for number, key in enumerate(keys):
            holders = self._holders.get(key, {})
            still = [replica for replica in replicas if cached[replica] == number and replica in holders]
            if not still:
                break
            for replica in still:
                cached[replica] = number + 1
        return cached

    def _add(self, keys: Sequence[bytes], replica: str) -> None:
        for key in reversed(keys):  # a page goes behind the one that follows it
            holders = self._holders.setdefault(key, {})
            self._known += replica not in holders
            holders[replica] = None
            self._holders.move_to_end(key)
        while self._known > self._max_pages:
            self._known -= len(self._holders.popitem(last=False)[1])


class RoutedRequest:
    """One request of a `PrefixRouter`: `place` it, say when it draws, and close it at its end.

    `replica` is where it is, `cached_tokens` how many of its prompt's tokens were known there.
    """

    __slots__ = ("_drew", "_keys", "_router", "_tokens", "_work", "cached_tokens", "replica")

    def __init__(self, router: PrefixRouter, tokens: Sequence[int], salt: bytes) -> None:
        self._router, self._tokens = router, tokens
        self._keys = PageKeys(router._page_size, salt)
        self._work, self._drew = 0, False
        self.replica: str | None = None
        self.cached_tokens = 0

    def __enter__(self) -> RoutedRequest:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def place(self, replicas: Iterable[str]) -> str:
        """The replica to send it to; where it was before, if it was anywhere, is relieved of it.

        Of equal ones the one with fewer requests that draw, then the first.
        Raises: ValueError: there is none.
        """
        names, router, count = list(replicas), self._router, len(self._tokens)
        if not names:
            raise ValueError("replicas needs at least one, got none")
        self.close()
        keys = self._keys.of(self._tokens, count - 1)  # the last token's row gives the logits
        cached = router._cached_pages(keys, names)

        def price(replica: str) -> tuple[int, int]:
            unknown = count - cached[replica] * router._page_size
            return unknown + router.load(replica), router._drawing.get(replica, 0)

        self.replica = min(names, key=price)
        self.cached_tokens = cached[self.replica] * router._page_size
        self._work = count - self.cached_tokens
        router._pending[self.replica] = router._pending.get(self.replica, 0) + self._work
        router._add(self._keys.of(self._tokens, count), self.replica)
        return self.replica

    def drew(self) -> None:
        """Its first token is there: the prompt is computed."""
        if self.replica is not None and not self._drew:
            self._drew = True
            self._router._pending[self.replica] -= self._work
            self._router._drawing[self.replica] = self._router._drawing.get(self.replica, 0) + 1

    def publish(self, tokens: Sequence[int]) -> None:
        """Know the prompt and what was drawn behind it, which a later prompt may begin with."""
        if self.replica is not None:
            self._router._add(self._keys.of(tokens, len(tokens) - 1), self.replica)

    def close(self) -> None:
        """It is over, or goes elsewhere."""
        if self.replica is None:
            return
        load = self._router._drawing if self._drew else self._router._pending
        load[self.replica] -= 1 if self._drew else self._work
        if not load[self.replica]:
            del load[self.replica]
        self.replica, self._drew = None, False
