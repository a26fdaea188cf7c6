"""What attention over pages checks: shapes once per new kind of call, page ids and lengths once per call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.formats.errors import FormatError
from layerzero.ops import checks, kv_formats
from layerzero.ops.attention.arguments import MlaArgs, PagedArgs
from layerzero.ops.op import Args
from layerzero.spec.call_spec import OutputSpec
from layerzero.spec.reasons import Reason

LAYOUTS = ("NHD", "HND")
QUERY_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
POOL_DTYPES = (*QUERY_DTYPES, *kv_formats.CODE_DTYPES)


def page_axes(layout: str) -> tuple[int, int]:
    """The axes of a pool that hold a page's tokens and its heads."""
    return (1, 2) if layout == "NHD" else (2, 1)


def check_queries(name: str, queries: Any) -> None:
    """`queries` as numbers (T, heads, D): codes have no scale here."""
    checks.need_tensor(name, queries, rank=3)
    if queries.dtype not in QUERY_DTYPES:
        allowed_dtypes = ", ".join(checks.dtype_name(dtype) for dtype in QUERY_DTYPES)
        raise TypeError(f"{name} needs one of {allowed_dtypes}, got {checks.dtype_name(queries.dtype)}")


def check_cache(name: str, pool: Any, q: Tensor, rank: int) -> None:
    """`pool` as pages of keys or values beside `q`: numbers or codes, of `rank` axes, no page empty."""
    checks.need_tensor(name, pool, rank=rank, floating=False)
    if pool.dtype not in POOL_DTYPES:
        allowed_dtypes = ", ".join(checks.dtype_name(dtype) for dtype in POOL_DTYPES)
        raise FormatError(
            name, f"one of {allowed_dtypes}", checks.dtype_name(pool.dtype), Reason.KV_DTYPE_MISMATCH,
            kind=TypeError,
        )  # fmt: skip
    checks.need_same_device("q", q, **{name: pool})
    if 0 in pool.shape[1:]:
        raise ValueError(
            f"{name} needs pages of at least one token, head and element, got shape {tuple(pool.shape)}"
        )


def check_pair(k_cache: Tensor, v_cache: Tensor) -> None:
    """Pools of keys and of values with the same pages, tokens and heads, of one dtype."""
    sizes, expected = tuple(v_cache.shape[:3]), tuple(k_cache.shape[:3])
    checks.need_like("v_cache", "pages, tokens and heads {}", sizes, expected, "k_cache")
    kv_formats.need_same_dtype("v_cache", v_cache, "k_cache", k_cache)


def check_tables(q: Tensor, block_tables: Any, seq_lens: Any, cu_seqlens_q: Any) -> dict[str, int]:
    """Shapes and dtypes of the metadata; gives the sizes B, T and M (pages a table row can name)."""
    checks.need_index("block_tables", block_tables, rank=2)
    checks.need_index("seq_lens", seq_lens, rank=1)
    batch = block_tables.shape[0]
    if seq_lens.shape[0] != batch:
        raise ValueError(f"seq_lens needs {batch} lengths like block_tables' rows, got {seq_lens.shape[0]}")
    checks.need_same_device("q", q, block_tables=block_tables, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q)
    if cu_seqlens_q is not None:
        check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, batch, "block_tables' rows")
    elif q.shape[0] != batch:
        raise ValueError(
            f"q needs {batch} rows, one for each of block_tables' rows, got {q.shape[0]}; several queries of "
            f"a sequence need cu_seqlens_q"
        )
    return {"B": batch, "T": q.shape[0], "M": block_tables.shape[1]}


def check_cu_seqlens(name: str, offsets: Any, batch: int, like: str) -> None:
    """`offsets` as int32 or int64 (batch + 1,)."""
    checks.need_index(name, offsets, rank=1)
    if offsets.shape[0] != batch + 1:
        raise ValueError(f"{name} needs {batch + 1} offsets for {batch} of {like}, got {offsets.shape[0]}")


def validate_cu_seqlens(name: str, offsets: Tensor, tokens: int, what: str) -> Tensor:
    """A copy of offsets that start at 0, never fall and end at the number of tokens.

    The offsets themselves where they are not read (`checks.can_read_values`).
    Raises: ValueError: they do not; the position is named.
    """
    private_offsets: Tensor | None = checks.native_check("offsets_to", offsets, tokens)
    if private_offsets is not None:
        return private_offsets
    if not checks.can_read_values(offsets):
        return offsets
    private_offsets = checks.private_copy(offsets)
    values: list[int] = private_offsets.tolist()
    if values[0] != 0:
        raise ValueError(f"{name} needs to start at 0, got {values[0]}")
    for position, (before, after) in enumerate(itertools.pairwise(values)):
        if after < before:
            raise ValueError(
                f"{name} needs offsets that never fall, got {before} and then {after} at {position + 1}"
            )
    if values[-1] != tokens:
        raise ValueError(f"{name} needs to end at {tokens}, {what}, got {values[-1]}")
    return private_offsets


def validate_block_tables(
    block_tables: Tensor, seq_lens: Tensor, pages: int, page_size: int
) -> tuple[Tensor, Tensor]:
    """Copies of tables and lengths: lengths that fit, pages that exist, none twice in one sequence.

    Only the entries that a length reaches are read: what follows them may be anything. Two sequences
    may share a page, as forks of one prefix do; one sequence that holds a page twice owns it doubly. Both are
    given back as they are where they are not read (`checks.can_read_values`).
    Raises: ValueError: an entry does not fit; sequence and entry are named.
    """
    private_copies: tuple[Tensor, Tensor] | None = checks.native_check(
        "pages_of", block_tables, seq_lens, pages, page_size
    )
    if private_copies is not None:
        return private_copies
    if not (checks.can_read_values(block_tables) and checks.can_read_values(seq_lens)):
        return block_tables, seq_lens
    tables, lengths = checks.private_copy(block_tables), checks.private_copy(seq_lens)
    width = tables.shape[1]
    for row, length in enumerate(lengths.tolist()):
        if not 0 <= length <= width * page_size:
            raise ValueError(
                f"seq_lens needs lengths in [0, {width * page_size}] ({width} pages of {page_size} "
                f"tokens a row of block_tables), got {length} at {row}"
            )
        used: list[int] = tables[row, : -(-length // page_size)].tolist()
        if (wrong := checks.wrong_place(used, pages)) is not None:
            entry, earlier = wrong
            needs = f"page ids in [0, {pages})" if earlier is None else "each page once a sequence"
            where = f"entry {entry}" if earlier is None else f"entries {earlier} and {entry}"
            got = used[entry] if earlier is None else f"page {used[entry]}"
            raise ValueError(f"block_tables needs {needs}, got {got} at row {row}, {where}")
    return tables, lengths


def validate_paged_metadata(args: Args, table: int, tokens: str, pages: int, page_size: int) -> Args:
    """The arguments with copies of tables, lengths and offsets, which are at `table` and after it.

    `tokens` names the argument whose rows the offsets count, the first.
    """
    tables, lengths = validate_block_tables(args[table], args[table + 1], pages, page_size)
    offsets = args[table + 2]
    if offsets is not None:
        offsets = validate_cu_seqlens("cu_seqlens_q", offsets, args[0].shape[0], f"the rows of {tokens}")
    return *args[:table], tables, lengths, offsets, *args[table + 3 :]


def cache_features(q: Tensor, *pools: Tensor) -> dict[str, bool]:
    """What a pool asks of a kernel: another dtype than q's, elements that are not contiguous in a row.

    Both are features and no dtypes or strides of the request, for no cast of q may reach a pool.
    """
    requested = {f"kv_{checks.dtype_name(pool.dtype)}": True for pool in pools if pool.dtype != q.dtype}
    return requested | {"kv_strided": not checks.last_stride_is_one(pools)}


def query_offsets(tokens: int, cu_seqlens_q: Tensor | None) -> list[int]:
    """Where each sequence's queries start, and the end; one query a sequence without cu_seqlens_q."""
    return list(range(tokens + 1)) if cu_seqlens_q is None else cu_seqlens_q.tolist()


def gather_pages(pool: Tensor, pages: Tensor, length: int, layout: str) -> Tensor:
    """A sequence's first `length` tokens out of its pages, (length, H, D); a copy."""
    # Codes are copied as bytes, which every device can.
    coded = kv_formats.is_coded(pool)
    pages_of_sequence = (pool.view(torch.uint8) if coded else pool).index_select(0, pages.long())
    pages_of_sequence = pages_of_sequence.view(pool.dtype) if coded else pages_of_sequence
    if layout == "HND":
        pages_of_sequence = pages_of_sequence.transpose(1, 2)
    return pages_of_sequence.reshape(-1, *pages_of_sequence.shape[2:])[:length]


def gather_numbers(
    pool: Tensor, scale: Tensor | None, pages: Tensor, length: int, layout: str, dtype: torch.dtype
) -> Tensor:
    """`gather_pages` of a pool that may hold codes: numbers in float32, in float64 beside queries of it."""
    tokens = gather_pages(pool, pages, length, layout)
    if scale is None:
        return tokens
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if scale.dim() > 1:
        return tokens.to(wide) * gather_pages(scale.unsqueeze(-1), pages, length, layout).to(wide)
    return kv_formats.decode(tokens, scale, 1, wide)


def sequences_of(
    call: PagedArgs | MlaArgs, q: Tensor, pools: Sequence[tuple[Tensor, Tensor | None]], layout: str
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Each sequence's rows of `q`, and its tokens as numbers out of two pools with their scales."""
    starts, size = query_offsets(q.shape[0], call.cu_seqlens_q), pools[0][0].shape[page_axes(layout)[0]]
    for row, length in enumerate(call.seq_lens.tolist()):
        pages = call.block_tables[row, : -(-length // size)]
        first, second = (gather_numbers(pool, scale, pages, length, layout, q.dtype) for pool, scale in pools)
        yield q[starts[row] : starts[row + 1]], first, second


def validate_codes(call: Any, pairs: kv_formats.Pairs = kv_formats.POOLS) -> None:
    """What is looked at with every call over codes.

    Raises: FormatError: a scale is no positive number, or a pool was written in another format.
    """
    for scale, pool in pairs:
        kv_formats.need_valid_scale(scale, getattr(call, scale))
        kv_formats.need_format(pool, getattr(call, pool), getattr(call, scale))


def results_over_queries(values: int, return_lse: int, validate: Callable[[Args], Args]) -> dict[str, Any]:
    """`outputs` and `empty` of an op over queries (T, Hq, D), its first argument.

    The result is (T, Hq, width of the argument at `values`) in numbers of q's kind, with float32 (T, Hq)
    beside it where the argument at `return_lse` says so. Without queries the metadata is still validated.
    """

    def outputs(args: Args) -> tuple[OutputSpec, ...]:
        q, width = args[0], args[values].shape[-1]
        out = OutputSpec((*q.shape[:2], width), checks.dtype_name(kv_formats.number_dtype(q)))
        return (out, OutputSpec(tuple(q.shape[:2]), "float32")) if args[return_lse] else (out,)

    def empty(args: Args) -> Tensor | tuple[Tensor, Tensor] | None:
        q = args[0]
        if q.shape[0]:
            return None
        validate(args)
        out = q.new_zeros((*q.shape[:2], args[values].shape[-1]), dtype=kv_formats.number_dtype(q))
        return (out, q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)) if args[return_lse] else out

    return {"outputs": outputs, "empty": empty}
