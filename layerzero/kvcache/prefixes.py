"""Prefixes found by their content: pages that hold the same tokens behind the same tokens are filled once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from layerzero.kvcache.block_tables import PagedSequence
from layerzero.kvcache.paged_cache import PagedCache
from layerzero.ops import checks

KEY_BYTES = 16


class PageKeys:
    """The keys of a growing text's full pages: each depends on all tokens up to its page's end.

    `salt` goes into every key: texts of two salts (adapters, tenants) share nothing.
    Source: vLLM's hashes of blocks, chained over the parent's.
    """

    __slots__ = ("_keys", "_page_size", "_salt")

    def __init__(self, page_size: int, salt: bytes = b"") -> None:
        self._page_size = checks.need_int("page_size", page_size, low=1)
        self._salt = blake2b(salt, digest_size=KEY_BYTES).digest()
        self._keys: list[bytes] = []

    def of(self, tokens: Sequence[int], length: int) -> list[bytes]:
        """The keys of the pages that the first `length` of `tokens` fill; `tokens` only ever grows."""
        size = self._page_size
        for start in range(len(self._keys) * size, length - size + 1, size):
            parent = self._keys[-1] if self._keys else self._salt
            page = array("q", tokens[start : start + size]).tobytes()
            self._keys.append(blake2b(parent + page, digest_size=KEY_BYTES).digest())
        return self._keys[: length // size]


class PrefixCache:
    """The filled pages of a `PagedCache` by their keys.

    A page that no sequence owns any more stays here until the pool gives it out again, the one that has
    been free for longest first. Sharing copies nothing: a sequence begins with the pages themselves.

    Example:
        >>> from layerzero.kvcache import KVCacheSpec
        >>> pool = PagedCache(KVCacheSpec(num_kv_heads=2, head_dim=8), pages=8, page_size=4)
        >>> prefixes, tokens = PrefixCache(pool), list(range(10))
        >>> with prefixes.open(tokens, PageKeys(4)) as first:
        ...     span = first.extend(10)  # a model fills these places
        ...     prefixes.publish(first, tokens, PageKeys(4))
        >>> with prefixes.open(tokens, PageKeys(4)) as second:
        ...     second.length
        8
    """

    __slots__ = ("_cache", "_key_of", "_page_of")

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        """How many pages it knows."""
        return len(self._page_of)

    def match(self, tokens: Sequence[int], keys: PageKeys) -> list[int]:
        """The filled pages that `tokens` begin with; the last token is never among theirs: its row gives
        the logits.

        Raises: ValueError: `keys` are of pages of another size.
        """
        pages = []
        for key in self._keys(keys, tokens, len(tokens) - 1):
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def open(self, tokens: Sequence[int], keys: PageKeys) -> PagedSequence:
        """A sequence with the pages for `tokens`; those that are known are filled, as its length says.

        Raises: what `PagedCache.sequence` raises.
        """
        return self._cache.sequence(len(tokens), self.match(tokens, keys))

    def publish(self, sequence: PagedSequence, tokens: Sequence[int], keys: PageKeys, start: int = 0) -> None:
        """Let others find the pages of `sequence` that `tokens` fill; a model has filled them.

        `start` is the place up to which that was said before.
        """
        size = self._cache.page_size
        first = start // size
        if first == sequence.length // size:  # no page has become full
            return
        page_keys = self._keys(keys, tokens, sequence.length)
        for index in range(first, len(page_keys)):
            key, page = page_keys[index], sequence.pages[index]
            if key not in self._page_of and page not in self._key_of:
                self._page_of[key], self._key_of[page] = page, key
                self._cache.allocator.keep(page, self._forget)

    def _keys(self, keys: PageKeys, tokens: Sequence[int], length: int) -> list[bytes]:
        if keys._page_size != (size := self._cache.page_size):
            raise ValueError(f"keys needs those of pages of {size} tokens, got {keys._page_size}")
        return keys.of(tokens, length)

    def clear(self) -> None:
        """Forget every page; sequences keep theirs."""
        self._cache.allocator.forget(list(self._key_of))

    def _forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]
