"""Sequences in pages of one pool: no copy to grow, shared prefixes, block tables as kernels take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from layerzero.kvcache.pages import Evict, PageAllocator
from layerzero.kvcache.protocol import Sequences, Spec
from layerzero.ops import checks, mirrors
from layerzero.ops.append import append_kv_reference
from layerzero.ops.paged_checks import LAYOUTS, gather


@dataclass(slots=True)
class _Paged:
    length: int = 0
    pages: list[int] = field(default_factory=list)


class PagedCache:
    """A pool of `pages` pages of `page_size` tokens for each of `layers` layers, in layout NHD or HND.

    All layers keep a token in the same slot, so that one table and one list of slots serve them all. Two ways
    in: `append` writes one sequence's tokens at once; `extend` gives slots for the next tokens of many
    sequences, which `append_kv` then writes layer by layer. A fork shares all pages; the first of its sharers
    to grow copies the last one (copy on write), so that the page a sequence writes is always its own.
    `evict(missing)` is called before the pool runs out; it may free sequences of this cache.
    """

    __slots__ = ("_sequences", "allocator", "layout", "page_size", "pools", "spec")

    def __init__(
        self,
        spec: Spec,
        *,
        pages: int,
        page_size: int = 16,
        layout: str = "NHD",
        layers: int = 1,
        evict: Evict | None = None,
    ) -> None:
        checks.need_int("page_size", page_size, low=1)
        checks.need_int("layers", layers, low=1)
        checks.need_choice("layout", layout, LAYOUTS)
        self.spec = spec
        self.page_size = page_size
        self.layout = layout
        self.allocator = PageAllocator(pages, evict)
        self._sequences: Sequences[_Paged] = Sequences()
        self.pools: tuple[tuple[Tensor, Tensor], ...] = tuple(
            (self._pool(pages, spec.width), self._pool(pages, spec.value_width)) for _ in range(layers)
        )

    def _pool(self, pages: int, width: int) -> Tensor:
        heads, size = self.spec.heads, self.page_size
        shape = (pages, size, heads, width) if self.layout == "NHD" else (pages, heads, size, width)
        return self.spec.zeros(*shape)

    @property
    def k_pages(self) -> Tensor:
        """The keys of the first layer; `pools` holds every layer's keys and values."""
        return self.pools[0][0]

    @property
    def v_pages(self) -> Tensor:
        """The values of the first layer."""
        return self.pools[0][1]

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
        used = source.pages[: self._pages_for(source.length)]
        self.allocator.share(used)
        return self._sequences.add(_Paged(source.length, used))

    def reserve(self, sequence: int, tokens: int) -> None:
        """Take the pages for `tokens` tokens in all now, so that growing up to there cannot fail.

        Raises: PagesExhaustedError: the pool has too few; nothing has changed.
        """
        checks.need_int("tokens", tokens, low=0)
        state = self._sequences.get(sequence)
        self._make_room([(sequence, state, max(0, tokens - state.length))])

    def extend(self, sequences: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Slots (T,) int64 for the next counts[i] tokens of sequences[i]: all of them or none.

        The lengths count the tokens from here on; write them with `append_kv` before anything reads them.
        Raises: PagesExhaustedError: the pool is full and `evict` freed too little; nothing has changed.
            ValueError: a sequence stands there twice, a count is negative. FreedSequenceError,
            UnknownSequenceError.
        """
        if len(sequences) != len(counts) or len(set(sequences)) != len(sequences):
            raise ValueError(
                f"sequences needs each sequence once, with one count each, got {list(sequences)} and "
                f"{list(counts)}"
            )
        wanted = [
            (sequence, self._sequences.get(sequence), checks.need_int("counts", count, low=0))
            for sequence, count in zip(sequences, counts, strict=True)
        ]
        self._make_room(wanted)
        size = self.page_size
        slots: list[int] = []
        for _, state, count in wanted:
            places = range(state.length, state.length + count)
            slots += [state.pages[at // size] * size + at % size for at in places]
            state.length += count
        if slots:
            self.allocator.epoch += 1
        return torch.tensor(slots, dtype=torch.int64, device=self.spec.device)

    def append(self, sequence: int, keys: Tensor, values: Tensor) -> None:
        """Write tokens behind the sequence's, into pages that are its own; all of them or none.

        Raises: ValueError: the cache has several layers. What `extend` raises; TypeError.
        """
        if len(self.pools) > 1:
            raise ValueError(
                f"append needs a cache of one layer, got {len(self.pools)}; extend gives slots for append_kv"
            )
        count = self.spec.check(keys, values)
        slots = self.extend([sequence], [count])
        if count:
            append_kv_reference(keys, values, self.k_pages, self.v_pages, slots, self.layout)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _make_room(self, wanted: Sequence[tuple[int, _Paged, int]]) -> None:
        """Pages for so many more tokens of each sequence, the one each goes on writing unshared."""
        holders: dict[int, int] = {}
        need: list[tuple[_Paged, int, int]] = []  # pages to add; the shared page's entry, or -1
        for _, state, count in wanted:
            more = max(0, self._pages_for(state.length + count) - len(state.pages))
            entry, shared = state.length // self.page_size, -1
            if count and state.length % self.page_size:
                page = state.pages[entry]
                left = holders.setdefault(page, self.allocator.holders(page))
                if left > 1:  # the last of several sharers that grow at once keeps the page
                    holders[page], shared = left - 1, entry
            need.append((state, more, shared))
        taken = self.allocator.take(sum(more + (shared >= 0) for _, more, shared in need))
        # An eviction hook that freed one of these would leave pages that nobody owns.
        try:
            for sequence, _, _ in wanted:
                self._sequences.get(sequence)
        except ValueError:
            self.allocator.give_back(taken)
            raise
        for state, more, shared in need:
            if shared >= 0:
                self._copy_page(state, shared, taken.pop(0))
            state.pages += taken[:more]
            del taken[:more]

    def _copy_page(self, state: _Paged, entry: int, copy: int) -> None:
        last = state.pages[entry]
        for pool in (pool for layer in self.pools for pool in layer):
            pool[copy].copy_(pool[last])
        state.pages[entry] = copy
        self.allocator.give_back([last])

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

        M is the longest sequence's pages; shorter rows end in zeros that no length reaches. On a device both
        come with their host copies, so that kernels which plan by lengths need not wait for it.
        """
        states = [self._sequences.get(sequence) for sequence in sequences]
        used = [state.pages[: self._pages_for(state.length)] for state in states]
        width = max(map(len, used), default=0)
        rows = [pages + [0] * (width - len(pages)) for pages in used]
        table = torch.tensor(rows, dtype=dtype, device="cpu").reshape(len(states), width)
        lengths = torch.tensor([state.length for state in states], dtype=dtype, device="cpu")
        device = self.spec.device
        return mirrors.on_device(table, device), mirrors.on_device(lengths, device)

    def read(self, sequence: int, layer: int = 0) -> tuple[Tensor, Tensor]:
        """A dense copy of the sequence's keys and values in one layer, (S, heads, width)."""
        state = self._sequences.get(sequence)
        pages = torch.tensor(state.pages, dtype=torch.int64, device=self.spec.device)
        keys, values = (gather(pool, pages, state.length, self.layout) for pool in self.pools[layer])
        return keys, values

    def sequences(self) -> list[int]:
        """Every live sequence."""
        return self._sequences.numbers()

    def bytes_held(self) -> int:
        """Bytes of the pages that somebody holds."""
        allocator = self.allocator
        held = (allocator.total - allocator.free_pages) * self.page_size
        return held * self.spec.token_bytes * len(self.pools)
