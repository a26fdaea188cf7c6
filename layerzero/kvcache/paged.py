"""Sequences in pages of one pool: no copy to grow, shared prefixes, block tables as kernels take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from layerzero.kvcache.pages import Evict, PageAllocator
from layerzero.kvcache.protocol import Sequences, Spec
from layerzero.ops import checks
from layerzero.ops.paged_checks import LAYOUTS, gather


@dataclass(slots=True)
class _Paged:
    length: int = 0
    pages: list[int] = field(default_factory=list)


class PagedCache:
    """A pool of `pages` pages of `page_size` tokens, `k_pages` and `v_pages` in layout NHD or HND.

    A fork shares all pages; the first append to a page that is shared copies that page (copy on write), so
    that the page a sequence writes is always its own. `evict(missing)` is called before the pool runs out;
    it may free sequences of this cache.
    """

    __slots__ = ("_sequences", "allocator", "k_pages", "layout", "page_size", "spec", "v_pages")

    def __init__(
        self, spec: Spec, *, pages: int, page_size: int = 16, layout: str = "NHD", evict: Evict | None = None
    ) -> None:
        checks.need_int("page_size", page_size, low=1)
        checks.need_choice("layout", layout, LAYOUTS)
        self.spec = spec
        self.page_size = page_size
        self.layout = layout
        self.allocator = PageAllocator(pages, evict)
        self._sequences: Sequences[_Paged] = Sequences()
        self.k_pages = self._pool(pages, spec.width)
        self.v_pages = self._pool(pages, spec.value_width)

    def _pool(self, pages: int, width: int) -> Tensor:
        heads, size = self.spec.heads, self.page_size
        shape = (pages, size, heads, width) if self.layout == "NHD" else (pages, heads, size, width)
        return torch.zeros(shape, dtype=self.spec.dtype, device=self.spec.device)

    @property
    def epoch(self) -> int:
        """Rises with every change of whose pages are whose."""
        return self.allocator.epoch

    def new(self) -> int:
        """A sequence without tokens; it holds no page yet."""
        return self._sequences.add(_Paged())

    def fork(self, sequence: int) -> int:
        """A sequence over the same pages; whoever appends first to the last one copies it."""
        source = self._sequences.get(sequence)
        self.allocator.share(source.pages)
        return self._sequences.add(_Paged(source.length, list(source.pages)))

    def append(self, sequence: int, keys: Tensor, values: Tensor) -> None:
        """Write tokens behind the sequence's, into pages that are its own; all of them or none.

        Raises: PagesExhaustedError: the pool is full and `evict` freed too little; nothing has changed.
            FreedSequenceError, UnknownSequenceError, ValueError, TypeError.
        """
        count = self.spec.check(keys, values)
        state = self._sequences.get(sequence)
        if not count:
            return
        self._make_room(sequence, state, count)
        size, done = self.page_size, 0
        while done < count:
            entry, slot = divmod(state.length + done, size)
            step = min(size - slot, count - done)
            for pool, given in ((self.k_pages, keys), (self.v_pages, values)):
                page = pool[state.pages[entry]]
                place = (
                    page[slot : slot + step]
                    if self.layout == "NHD"
                    else page.transpose(0, 1)[slot : slot + step]
                )
                place.copy_(given[done : done + step])
            done += step
        state.length += count
        self.allocator.epoch += 1

    def _make_room(self, sequence: int, state: _Paged, count: int) -> None:
        """Pages for `count` more tokens, the one that is partly full unshared."""
        used = state.length % self.page_size
        last = state.pages[-1] if used else -1
        shared = last >= 0 and self.allocator.holders(last) > 1
        more = -(-(state.length + count) // self.page_size) - len(state.pages)
        taken = self.allocator.take(more + shared)
        # An eviction hook that freed this very sequence would leave pages that nobody owns.
        try:
            self._sequences.get(sequence)
        except ValueError:
            self.allocator.give_back(taken)
            raise
        if shared:
            copy = taken.pop(0)
            for pool in (self.k_pages, self.v_pages):
                pool[copy].copy_(pool[last])
            state.pages[-1] = copy
            self.allocator.give_back([last])
        state.pages.extend(taken)

    def free(self, sequence: int) -> None:
        """Give the sequence's pages back; those that forks share stay."""
        self.allocator.give_back(self._sequences.pop(sequence).pages)

    def length(self, sequence: int) -> int:
        """The sequence's tokens."""
        return self._sequences.get(sequence).length

    def pages(self, sequence: int) -> tuple[int, ...]:
        """The sequence's pages in order."""
        return tuple(self._sequences.get(sequence).pages)

    def tables(self, sequences: Sequence[int], *, dtype: torch.dtype = torch.int32) -> tuple[Tensor, Tensor]:
        """`block_tables` (B, M) and `context_lens` (B,) of some sequences, as `paged_attention` takes them.

        M is the longest sequence's pages; shorter rows end in zeros that no length reaches.
        """
        states = [self._sequences.get(sequence) for sequence in sequences]
        width = max((len(state.pages) for state in states), default=0)
        rows = [state.pages + [0] * (width - len(state.pages)) for state in states]
        device = self.spec.device
        table = torch.tensor(rows, dtype=dtype, device=device).reshape(len(states), width)
        return table, torch.tensor([state.length for state in states], dtype=dtype, device=device)

    def read(self, sequence: int) -> tuple[Tensor, Tensor]:
        """A dense copy of the sequence's keys and values, (S, heads, width)."""
        state = self._sequences.get(sequence)
        pages = torch.tensor(state.pages, dtype=torch.int64, device=self.spec.device)
        return (
            gather(self.k_pages, pages, state.length, self.layout),
            gather(self.v_pages, pages, state.length, self.layout),
        )

    def sequences(self) -> list[int]:
        """Every live sequence."""
        return self._sequences.numbers()

    def bytes_held(self) -> int:
        """Bytes of the pages that somebody holds."""
        allocator = self.allocator
        return (allocator.total - allocator.free_pages) * self.page_size * self.spec.token_bytes
