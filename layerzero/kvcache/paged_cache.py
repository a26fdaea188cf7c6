"""Sequences in pages of one pool: no copy to grow, shared prefixes, block tables as kernels take them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from weakref import WeakSet, ref

import torch
from torch import Tensor

from layerzero.kvcache.attention_metadata import AttentionMetadata, MetadataBuilder
from layerzero.kvcache.block_allocator import Evict, PageAllocator
from layerzero.kvcache.block_tables import BlockTables, PagedSequence, TokenRange
from layerzero.kvcache.protocol import KVCacheSpec, Sequences
from layerzero.ops import checks, host_copies, kv_formats
from layerzero.ops.paged.append import append_kv_reference
from layerzero.ops.paged.checks import LAYOUTS, gather_numbers, page_axes

OPEN_CACHES: WeakSet[PagedCache] = WeakSet()  # of this process, for what watches it


class PagedCache:
    """A pool of `pages` pages of `page_size` tokens for each of `layers` layers, in layout NHD or HND.

    All layers keep a token in the same slot, so that one table and one list of slots serve them all. `append`
    writes one sequence's tokens at once. For a model, sequences grow first and `append_kv` writes layer by
    layer: `prepare_batch` grows many of them and returns the metadata of a forward pass; `extend` gives their
    slots alone. Where each sequence has a coroutine of its own, `sequence` opens it as an object whose
    `extend` gives a token range, and `attention_metadata` serves the ranges of a whole batch.

    A fork shares all pages; the first of its sharers to grow copies the last one (copy on write), so that the
    page a sequence writes is always its own. `evict(missing)` is called before the pool runs out; it may free
    sequences of this cache.

    With a `pool_dtype` of codes each layer's `scales` are what `append_kv`, `paged_attention` take beside its
    pools: those of tokens are written with them, those of a tensor or of heads begin at 1 and are the
    caller's to set, before the first token.

    Example:
        >>> cache = PagedCache(KVCacheSpec(num_kv_heads=2, head_dim=8), pages=8, page_size=4)
        >>> sequences = [cache.new(), cache.new()]
        >>> metadata = cache.prepare_batch(sequences, [3, 5])
        >>> metadata.seq_lens.tolist(), metadata.cu_seqlens_q.tolist()
        ([3, 5], [0, 3, 8])
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        *,
        pages: int,
        page_size: int = 16,
        layout: str = "NHD",
        layers: int = 1,
        evict: Evict | None = None,
    ) -> None:
        checks.need_int("pages", pages, low=1)
        checks.need_int("page_size", page_size, low=1)
        checks.need_int("layers", layers, low=1)
        checks.need_choice("layout", layout, LAYOUTS)
        self.spec = spec
        self.page_size = page_size
        self.layout = layout
        self._sequences: Sequences[PagedSequence] = Sequences()
        self._block_tables = BlockTables()
        self._metadata_builder = MetadataBuilder(self._block_tables, page_size, torch.device(spec.device))
        self.pools: tuple[tuple[Tensor, Tensor], ...] = tuple(
            (self._pool(pages, spec.head_dim), self._pool(pages, spec.head_dim_v)) for _ in range(layers)
        )
        self.scales: tuple[tuple[Tensor, Tensor] | tuple[None, None], ...] = tuple(
            (self._scales(keys), self._scales(values)) if spec.is_coded else (None, None)
            for keys, values in self.pools
        )
        self.allocator = PageAllocator(pages, evict)  # behind the pools, which say what memory they want
        OPEN_CACHES.add(self)

    def _pool(self, pages: int, width: int) -> Tensor:
        heads, size = self.spec.num_kv_heads, self.page_size
        shape = (pages, size, heads, width) if self.layout == "NHD" else (pages, heads, size, width)
        return self.spec.zeros(*shape, dtype=self.spec.pool_dtype)

    def _scales(self, pool: Tensor) -> Tensor:
        heads = page_axes(self.layout)[1]
        shape = kv_formats.scale_shape(tuple(pool.shape), heads, self.spec.scale_granularity)
        turned = len(shape) == 3 and self.layout == "NHD"  # a head's tokens beside each other, as in HND
        scale = self.spec.zeros(*(shape[i] for i in (0, 2, 1)) if turned else shape, dtype=torch.float32)
        scale.fill_(1.0)
        if turned:
            scale = scale.transpose(1, 2)
        kv_formats.note_format(pool, scale)
        return scale

    @property
    def k_cache(self) -> Tensor:
        """The keys of the first layer; `pools` holds every layer's keys and values."""
        return self.pools[0][0]

    @property
    def v_cache(self) -> Tensor:
        """The values of the first layer."""
        return self.pools[0][1]

    @property
    def device(self) -> torch.device:
        """Where the pools are."""
        return self.pools[0][0].device

    @property
    def version(self) -> int:
        """Rises with every change of whose pages are whose."""
        return self.allocator.version

    def new(self) -> int:
        """A sequence without tokens; it holds no page yet."""
        return self._open().number

    def _open(self) -> PagedSequence:
        sequence = PagedSequence(self._sequences.next, ref(self), self.allocator, self._block_tables)
        self._sequences.add(sequence)
        return sequence

    def sequence(self, tokens: int, pages: Sequence[int] = ()) -> PagedSequence:
        """A new sequence with the pages for `tokens` tokens, so that growing up to there cannot fail.

        It begins with `pages`, which others have filled: it has their tokens already, and shares them.
        Raises: ValueError: a pool of this size could never hold it; `pages` hold more than `tokens`.
            PagesExhaustedError: it cannot now. FreedPageError: a page is free, and its content not kept.
        """
        capacity = self.allocator.total * self.page_size
        if not 1 <= checks.need_int("tokens", tokens) <= capacity:
            raise ValueError(f"tokens needs 1 to {capacity}, what the whole pool holds, got {tokens}")
        length = len(pages) * self.page_size
        if length > tokens:
            raise ValueError(f"pages needs at most tokens' {tokens}, got {len(pages)} that hold {length}")
        self.allocator.reclaim(pages)
        opened = self._open()
        opened.set_state(length, list(pages), length)
        try:
            self._ensure_capacity([(opened, tokens - length)])
        except Exception:
            self.free(opened.number)
            raise
        return opened

    def fork(self, sequence: int) -> int:
        """A sequence over the same pages; the first that appends to the last one copies it."""
        source = self._sequences.get(sequence)
        used = source.pages[: self.pages_for(source.length)]
        self.allocator.incref(used)
        forked = self._open()
        for state, pages in ((source, source.pages), (forked, used)):
            state.set_state(source.length, pages, source.length)
        return forked.number

    def rollback(self, sequence: int, tokens: int) -> None:
        """Forget all tokens but the first `tokens`; the sequence's own pages stay reserved for it.

        Raises: ValueError: the sequence has fewer.
        """
        state = self._sequences.get(sequence)
        if not 0 <= checks.need_int("tokens", tokens) <= state.length:
            raise ValueError(f"tokens needs 0 to {state.length}, what the sequence has, got {tokens}")
        pages_needed, pages_used = self.pages_for(tokens), self.pages_for(state.length)
        shared = [page for page in state.pages[pages_needed:pages_used] if self.allocator.refcount(page) > 1]
        pages = [page for entry, page in enumerate(state.pages) if entry < pages_needed or page not in shared]
        self.allocator.forget(state.pages[tokens // self.page_size :])  # written anew from here on
        self.allocator.free(shared)
        state.set_state(tokens, pages, tokens)
        self.allocator.version += 1

    def reserve(self, sequence: int, tokens: int) -> None:
        """Take the pages for `tokens` tokens in all now, so that growing up to there cannot fail.

        Raises: PagesExhaustedError: the pool has too few; nothing has changed.
        """
        checks.need_int("tokens", tokens, low=0)
        state = self._sequences.get(sequence)
        self._ensure_capacity([(state, max(0, tokens - state.length))])

    def extend(self, sequences: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Slots (T,) int64 for the next counts[i] tokens of sequences[i]: all of them or none.

        The lengths count the tokens from here on; write them with `append_kv` before anything reads them.
        Raises: PagesExhaustedError: the pool is full and `evict` freed too little; nothing has changed.
            ValueError: a sequence is there twice, a count is negative. FreedSequenceError,
            UnknownSequenceError.
        """
        slot_mapping = self._metadata_builder.slot_mapping(self._extend(sequences, counts, 0))
        return torch.tensor(slot_mapping, dtype=torch.int64, device=self.spec.device)

    def prepare_batch(self, sequences: Sequence[int], counts: Sequence[int]) -> AttentionMetadata:
        """Grow sequences[i] by counts[i] tokens, at least one each, and return where their rows are.

        Raises: what `extend` raises, and like it changes all of them or none.
        """
        if not len(sequences):
            raise ValueError("sequences needs at least one, got none")
        return self._metadata_builder.build(self._extend(sequences, counts, 1))

    def attention_metadata(self, ranges: Sequence[TokenRange]) -> AttentionMetadata:
        """The metadata of the tokens of `ranges`, one range after the other.

        It reads what the ranges name and no sequence: any thread may ask, also while others grow or are
        freed.
        Raises: ValueError: there is none, or one is of another cache.
        """
        if not ranges:
            raise ValueError("ranges needs at least one, got none")
        return self._metadata_builder.build(ranges)

    def slot_mapping(self, ranges: Sequence[TokenRange]) -> list[int]:
        """The slots of the tokens of `ranges`, one range after the other."""
        return self._metadata_builder.slot_mapping(ranges)

    def _extend(self, sequences: Sequence[int], counts: Sequence[int], low: int) -> list[TokenRange]:
        if len(sequences) != len(counts) or len(set(sequences)) != len(sequences):
            raise ValueError(
                f"sequences needs each sequence once, with one count each, got {list(sequences)} and "
                f"{list(counts)}"
            )
        if counts and (set(map(type, counts)) != {int} or min(counts) < low):
            for count in counts:
                checks.need_int("counts", count, low=low)
        states = self._sequences.get_many(sequences)
        seq_lens = [state.length + count for state, count in zip(states, counts, strict=True)]
        growing = [row for row, state in enumerate(states) if seq_lens[row] > state.capacity]
        if growing:
            self._ensure_capacity([(states[at], counts[at]) for at in growing], states)
        if any(counts):
            self.allocator.version += 1
        return [state.grow(count) for state, count in zip(states, counts, strict=True)]

    def append(self, sequence: int, keys: Tensor, values: Tensor) -> None:
        """Write tokens behind the sequence's, into pages that are its own; all of them or none.

        Raises: ValueError: the cache has several layers. What `extend` raises; TypeError.
        """
        if len(self.pools) > 1:
            raise ValueError(
                f"append needs a cache of one layer, got {len(self.pools)}; extend gives slots for append_kv"
            )
        count = self.spec.check(keys, values)
        for name, scale in zip(("k_scale", "v_scale"), self.scales[0], strict=True):
            kv_formats.need_valid_scale(name, scale)
        slot_mapping = self.extend([sequence], [count])
        if count:
            append_kv_reference(
                keys, values, self.k_cache, self.v_cache, slot_mapping, self.layout, *self.scales[0]
            )

    def pages_for(self, tokens: int) -> int:
        """How many pages so many tokens of a sequence take."""
        return -(-tokens // self.page_size)

    def _ensure_capacity(
        self, growth: Sequence[tuple[PagedSequence, int]], others: Sequence[PagedSequence] = ()
    ) -> None:
        """Pages for so many more tokens of each sequence, the one that each writes next unshared.

        Raises: FreedSequenceError: the eviction hook freed one of them, or one of `others`.
        """
        refcounts: dict[int, int] = {}
        need: list[tuple[PagedSequence, int, int]] = []  # pages to add; the shared page's entry, or -1
        for state, count in growth:
            page_count = max(0, self.pages_for(state.length + count) - len(state.pages))
            entry, shared = state.length // self.page_size, -1
            if count and state.length % self.page_size:
                page = state.pages[entry]
                remaining = refcounts.setdefault(page, self.allocator.refcount(page))
                if remaining > 1:  # the last of several sharers that grow at once keeps the page
                    refcounts[page], shared = remaining - 1, entry
            need.append((state, page_count, shared))
        new_pages = self.allocator.allocate(sum(more + (shared >= 0) for _, more, shared in need))
        # Pages of a sequence that is gone would never be freed.
        try:
            self._sequences.get_many([state.number for state in (*others, *(state for state, _ in growth))])
        except ValueError:
            self.allocator.free(new_pages)
            raise
        for state, page_count, shared in need:
            pages = list(state.pages)
            if shared >= 0:
                self._copy_page(pages, shared, new_pages.pop(0))
            pages += new_pages[:page_count]
            del new_pages[:page_count]
            state.set_state(state.length, pages, self._capacity_of(state.length, pages))

    def _capacity_of(self, length: int, pages: list[int]) -> int:
        """Up to how many tokens `pages` are a sequence's own; none behind its last used one is shared."""
        entry = length // self.page_size
        if length % self.page_size and self.allocator.refcount(pages[entry]) > 1:
            return length
        return len(pages) * self.page_size

    def _copy_page(self, pages: list[int], entry: int, copy: int) -> None:
        last = pages[entry]
        by_token = [
            scale for layer in self.scales for scale in layer if scale is not None and scale.dim() > 1
        ]
        for pool in (*(pool for layer in self.pools for pool in layer), *by_token):
            pool[copy].copy_(pool[last])
        pages[entry] = copy
        self.allocator.free([last])

    def free(self, sequence: int) -> None:
        """Give the sequence's pages back; those that forks share stay."""
        freed = self._sequences.pop(sequence)
        freed.set_state(freed.length, freed.pages, 0)
        self.allocator.free(freed.pages)

    def length(self, sequence: int) -> int:
        """The sequence's tokens."""
        return self._sequences.get(sequence).length

    def pages(self, sequence: int) -> tuple[int, ...]:
        """The sequence's pages in order."""
        return tuple(self._sequences.get(sequence).pages)

    def block_tables(
        self, sequences: Sequence[int], *, dtype: torch.dtype = torch.int32
    ) -> tuple[Tensor, Tensor]:
        """`block_tables` (B, M) and `seq_lens` (B,) of some sequences, as `paged_attention` takes them.

        M is the longest sequence's pages; shorter rows end in zeros or in pages that no length reaches. On a
        device both come with host copies, so that kernels which plan by lengths need not wait for it.
        """
        states = [self._sequences.get(sequence) for sequence in sequences]
        seq_lens = [state.length for state in states]
        with torch.inference_mode(False):
            width = self.pages_for(max(seq_lens, default=0))
            block_tables = self._block_tables.gather([state.row for state in states], width)
            seq_lens_tensor = torch.tensor(seq_lens, dtype=dtype, device="cpu")
        on_device = partial(host_copies.to_device_with_host_copy, device=self.spec.device)
        return on_device(block_tables.to(dtype)), on_device(seq_lens_tensor)

    def read(self, sequence: int, layer: int = 0) -> tuple[Tensor, Tensor]:
        """A copy of the sequence's keys and values in one layer, (S, heads, width), as numbers of `dtype`."""
        state = self._sequences.get(sequence)
        pages = torch.tensor(state.pages, dtype=torch.int64, device=self.spec.device)
        keys, values = (
            gather_numbers(pool, scale, pages, state.length, self.layout, self.spec.dtype).to(self.spec.dtype)
            for pool, scale in zip(self.pools[layer], self.scales[layer], strict=True)
        )
        return keys, values

    def sequences(self) -> list[int]:
        """Every live sequence."""
        return self._sequences.numbers()

    def allocated_bytes(self) -> int:
        """Bytes of the pages that have an owner."""
        allocator = self.allocator
        tokens = (allocator.total - allocator.free_pages) * self.page_size
        return tokens * self.spec.pooled_token_bytes * len(self.pools)
