"""The allocator of a pool's pages: reference counts, sharing, and eviction when none is free."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from layerzero.ops import checks
from layerzero.spec.errors import LayerZeroError


class PagesExhaustedError(LayerZeroError):
    """The pool has too few free pages; free sequences, or give the cache an eviction hook."""


class FreedPageError(LayerZeroError, ValueError):
    """A page without an owner was freed again or used."""


class ForeignPageError(LayerZeroError, ValueError):
    """A page id that this pool does not have."""


Evict = Callable[[int], object]
OnReuse = Callable[[int], object]


class PageAllocator:
    """`count` pages by number, each held by so many owners.

    A free page whose content is kept (`keep`) is given out last, the one that has been free for longest
    first, and can be had back as it is until then (`reclaim`).
    `evict(missing)` is asked to free at least `missing` pages before an allocation fails; what it frees is up
    to it. `version` rises with every change.

    Example:
        >>> allocator = PageAllocator(4)
        >>> pages = allocator.allocate(2)
        >>> allocator.incref(pages[:1])
        >>> allocator.free(pages)
        >>> allocator.free_pages, allocator.refcount(pages[0])
        (3, 1)
    """

    __slots__ = ("_free", "_idle", "_on_reuse", "_refcounts", "evict", "version")

    def __init__(self, count: int, evict: Evict | None = None) -> None:
        checks.need_int("count", count, low=1)
        self._refcounts = [0] * count
        self._free = list(range(count - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # free pages with content, the oldest first
        self._on_reuse: dict[int, OnReuse] = {}
        self.evict = evict
        self.version = 0

    @property
    def total(self) -> int:
        """All pages."""
        return len(self._refcounts)

    @property
    def free_pages(self) -> int:
        """Pages without an owner."""
        return len(self._free) + len(self._idle)

    @property
    def idle_pages(self) -> int:
        """Pages without an owner whose content is kept."""
        return len(self._idle)

    def refcount(self, page: int) -> int:
        """How many owners a page has.

        Raises: ForeignPageError: the pool has no such page.
        """
        if not isinstance(page, int) or not 0 <= page < len(self._refcounts):
            raise ForeignPageError(
                f"page needs an id in [0, {len(self._refcounts)}), got {page!r}", page=page
            )
        return self._refcounts[page]

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one owner each: all of them or none.

        Raises: PagesExhaustedError: too few are free, even after `evict`.
        """
        missing = count - self.free_pages
        if missing > 0 and self.evict is not None:
            self.evict(missing)
            missing = count - self.free_pages
        if missing > 0:
            raise PagesExhaustedError(
                f"needs {count} free pages, got {self.free_pages} of {self.total}",
                missing=missing,
                total=self.total,
            )
        pages = [self._free.pop() if self._free else self._pop_idle() for _ in range(count)]
        for page in pages:
            self._refcounts[page] = 1
        if pages:
            self.version += 1
        return pages

    def _pop_idle(self) -> int:
        page, _ = self._idle.popitem(last=False)
        self._on_reuse.pop(page)(page)
        return page

    def keep(self, page: int, on_reuse: OnReuse) -> None:
        """Give the page out late once it is free; `on_reuse(page)` is called when its content goes.

        Raises: FreedPageError: no sequence owns it. ForeignPageError: the pool has no such page.
        """
        self._checked([page])
        self._on_reuse[page] = on_reuse

    def forget(self, pages: Iterable[int]) -> None:
        """Keep these pages no longer: their content changes, or no prompt asks for it."""
        for page in pages:
            on_reuse = self._on_reuse.pop(page, None)
            if on_reuse is not None:
                on_reuse(page)
                if page in self._idle:
                    del self._idle[page]
                    self._free.append(page)

    def reclaim(self, pages: Iterable[int]) -> None:
        """One more owner for each page, among them free ones whose content is kept: all of them or none.

        Raises: FreedPageError: a page is free and not kept. ForeignPageError: an id is not of this pool.
        """
        pages = list(pages)
        for page in pages:
            if not self.refcount(page) and page not in self._idle:
                raise FreedPageError(f"page {page} needs an owner or kept content, got neither", page=page)
        self._add_owner(pages)

    def incref(self, pages: Iterable[int]) -> None:
        """One more owner for each page: all of them or none.

        Raises: FreedPageError: a page has no owner. ForeignPageError: an id is not of this pool.
        """
        self._add_owner(self._checked(pages))

    def _add_owner(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._idle.pop(page, None)
            self._refcounts[page] += 1
        if pages:
            self.version += 1

    def free(self, pages: Iterable[int]) -> None:
        """One owner less for each page; the last one frees it. All of them or none.

        Raises: FreedPageError: a page is free already. ForeignPageError: an id is not of this pool.
        """
        pages = self._checked(pages)
        for page in reversed(pages):
            self._refcounts[page] -= 1
            if not self._refcounts[page]:
                if page in self._on_reuse:
                    self._idle[page] = None
                else:
                    self._free.append(page)
        if pages:
            self.version += 1

    def _checked(self, pages: Iterable[int]) -> Sequence[int]:
        pages = list(pages)
        needed: dict[int, int] = {}
        for page in pages:
            needed[page] = needed.get(page, 0) + 1
            if self.refcount(page) < needed[page]:
                raise FreedPageError(f"page {page} needs an owner, got a page that was freed", page=page)
        return pages
