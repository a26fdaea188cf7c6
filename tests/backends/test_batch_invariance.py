"""Kernels that claim `batch_invariant`: a row alone has the bits that it has in any batch, at any place."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.ops import table
from layerzero.ops.attention.arguments import RaggedArgs
from layerzero.ops.norm.rms_norm import rms_norm_reference
from layerzero.ops.op import Args
from layerzero.spec.kernel import Kernel, rejections
from tests import kernels
from tests.backends import cases
from tests.backends.placed import at, strides

CLAIMING = [k for k in cases.RUNNABLE if k.capability.batch_invariant]
ROWS = 37
# The rows that are also computed alone; the others are compared between batches.
ALONE = (0, 1, 7, 15, 16, 17, 31, 36)
# The ops that write into pages, and where each has its slot_mapping.
WRITING = {"append_kv": 4, "rope_append_kv": 8}
# The operands of each op that have one entry a row: of a batch, a sequence, a token or a head.
ALONG = {
    "add_layer_norm": (0, 1), "add_rms_norm": (0, 1), "add_rms_norm_quantize": (0, 1), "alibi": (0,),
    "append_kv": (0, 1, 4),
    "attention": (0, 1, 2), "cross_entropy": (0, 1), "dequantize": (0, 1, 4), "embedding": (0,),
    "fused_experts": (0, 1, 2), "select_experts": (0,),
    "layer_norm": (0,), "linear": (0,), "linear_cross_entropy": (0, 2), "quantize": (0, 4),
    "quantized_linear": (0,), "mla_attention": (0, 1, 4, 5), "mlp": (0,), "paged_attention": (0, 3, 4),
    "rms_norm": (0,), "rms_norm_linear": (0,), "rope": (0, 1, 2), "rope_append_kv": (0, 1, 2, 3, 8),
    "sample": (0, 4), "sample_topk": (0, 3), "sample_topp": (0, 3),
    "verify_chain": (0, 1, 2, 3), "verify_tree": (0, 1, 2, 4),
}  # fmt: skip
# Widths on and off every vector size, and where a matrix kernel chooses another blocking.
_WIDTHS: tuple[dict[str, int], ...] = (
    {},
    {"C": 31, "K": 64},
    {"C": 384, "K": 384},
    {"C": 1536, "K": 384},
    {"C": 768, "K": 3072},
)
# Sizes by op, for the ops whose kernels depend on them.
SIZES: dict[str, tuple[dict[str, int], ...]] = {
    **dict.fromkeys(("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm"), _WIDTHS),
    **dict.fromkeys(("linear", "quantized_linear", "embedding", "quantize", "dequantize"), _WIDTHS),
    "mlp": ({}, {"C": 384, "F": 1536}),
    "attention": ({}, {"Sq": 33, "Sk": 65, "D": 64}),
    "paged_attention": ({}, {"P": 16, "D": 64}, {"P": 1}),
    "mla_attention": ({}, {"P": 64, "D": 40}),
}
# No kernel promises bits for a loss of training, for a norm with its product, nor for experts, whose products
# choose their sums by how many rows each of them gets: strict determinism refuses them by name.
REFUSED = {"linear_cross_entropy", "moe", "rms_norm_linear"}
# Only kernels of GPUs promise bits for these: on a CPU strict determinism refuses them.
ON_GPUS = {"add_rms_norm_quantize"}
# Asks that make one number of all rows, or masks that belong to a place in the batch.
APART = {"mean", "mask_bool", "mask_float", "mask_wide", "empty_rows"}


def asks(op: str) -> list[tuple[str, ...]]:
    """Every single ask under which rows stay apart; seeds are always per row."""
    seeds = ("seed_per_row",) if op.startswith(("sample", "verify")) else ()
    shared = {
        "quantize": {"scale_per_tensor", "scale_per_block"}, "dequantize": {"scale_per_block"}
    }.get(op, set())  # fmt: skip
    apart = APART | shared | set(seeds)
    return [seeds, *((*seeds, ask) for ask in cases.ASKS.get(op, ()) if ask not in apart)]


def taken(op: str, args: Args, rows: Sequence[int], each: int) -> Args:
    """The call of these rows alone, in memory of its own; `each` query tokens belong to one row."""
    if op == "ragged_attention":
        return _sequences(args, rows)
    index = torch.tensor(rows, device=args[0].device)
    wide = (index[:, None] * each + torch.arange(each, device=index.device)).flatten()
    queries = {"paged_attention": (0,), "mla_attention": (0, 1)}.get(op, ())
    changed = list(args)
    for position in ALONG[op]:
        if isinstance(args[position], Tensor) and args[position].dim():
            changed[position] = args[position][wide if position in queries else index].clone()
    offsets = {"paged_attention": 5, "mla_attention": 6}.get(op)
    if offsets is not None and args[offsets] is not None:
        changed[offsets] = torch.arange(len(rows) + 1, device=index.device) * each
    return tuple(changed)


def _sequences(args: Args, rows: Sequence[int]) -> Args:
    call = RaggedArgs._make(args)
    ends: dict[str, Any] = {}
    for name, cu in (("q", call.cu_seqlens_q), ("k", call.cu_seqlens_k)):
        spans = [slice(int(cu[row]), int(cu[row + 1])) for row in rows]
        call = of_tokens(call, name, functools.partial(_cut, spans))
        ends[f"cu_seqlens_{name}"] = torch.tensor([0, *(s.stop - s.start for s in spans)]).cumsum(0).to(cu)
    return call._replace(**ends)


def _cut(spans: Sequence[slice], tokens: Tensor) -> Tensor:
    return torch.cat([tokens[span] for span in spans])


def _pick(index: Tensor, tokens: Tensor) -> Tensor:
    return tokens[index.to(tokens.device)]


def of_tokens(call: RaggedArgs, name: str, change: Callable[[Tensor], Tensor]) -> RaggedArgs:
    """The queries, or the keys and values, as `change` makes them of these, with their scales by token."""
    names = [name, f"{name}_scale"] if name == "q" else ["k", "v", "k_scale", "v_scale"]
    parts = {each: getattr(call, each) for each in names}
    changed: dict[str, Any] = {
        each: change(t) for each, t in parts.items() if isinstance(t, Tensor) and t.dim() > 1
    }
    return call._replace(**changed)


def pieces(op: str, run: Callable[..., Any], args: Args, rows: int, each: int) -> list[tuple[Tensor, ...]]:
    """What each row of a call gets."""
    if op in WRITING:
        slots, (out, *written) = args[WRITING[op]], cases.results(table.get(op), run, args)
        pools = [tensor for tensor in written if tensor.dim() > 3]  # the scales of a pool are not its rows
        tokens = [pool.transpose(1, 2) if "HND" in args else pool for pool in pools]
        found = [pool.flatten(0, 1)[slots] for pool in tokens]
        found += [out] if out.is_floating_point() else []  # an append gives its slots back
        return [tuple(part[row] for part in found) for row in range(rows)]
    outs = cases.as_tuple(run(*args))
    if op == "ragged_attention":
        cu = args[3].tolist()
        return [tuple(out[a:b] for out in outs) for a, b in itertools.pairwise(cu)]
    return [tuple(out[row * each : (row + 1) * each] for out in outs) for row in range(rows)]


def per_row(op: str, args: Args, rows: int) -> int:
    """The query tokens that belong to one row: several where a paged call is a prefill."""
    return args[0].shape[0] // rows if op in ("paged_attention", "mla_attention") else 1


def sequences(args: Args) -> Args:
    """A ragged call of ROWS sequences of mixed lengths, in place of the cases' three."""
    call = RaggedArgs._make(args)
    lengths = torch.randint(0, 9, (ROWS,), generator=torch.Generator().manual_seed(1))
    pick = torch.Generator().manual_seed(2)
    ends: dict[str, Any] = {}
    for name, counts in (("q", lengths), ("k", lengths * 3 + 1)):
        tokens = torch.randint(0, len(getattr(call, name)), (int(counts.sum()),), generator=pick)
        call = of_tokens(call, name, functools.partial(_pick, tokens))
        ends[f"cu_seqlens_{name}"] = torch.tensor([0, *counts.cumsum(0).tolist()], device=call.q.device)
    return call._replace(**ends)


def differing(
    kernel: Kernel, run: Callable[..., Any], dtype: torch.dtype, dims: dict[str, int], ask: Any
) -> str:
    """Where a row's bits depend on its company, or on its place in it; empty where they do not."""
    op = kernel.op
    batch = {"attention": "B", "alibi": "Hq"}.get(op, "N")
    args = cases.call(cases.Case(op, ask, {**dims, batch: ROWS}), dtype)
    args = sequences(args) if op == "ragged_attention" else args
    if rejections(
        kernel, table.get(op).check(args).replace(modes=frozenset({"batch_invariant"})), cases.HERE
    ):
        return ""
    each = per_row(op, args, ROWS)
    with torch.no_grad():
        wanted = pieces(op, run, taken(op, args, range(ROWS), each), ROWS, each)
        for row in ALONE:
            (alone,) = pieces(op, run, taken(op, args, [row], each), 1, each)
            if not all(map(torch.equal, alone, wanted[row])):
                return f"{kernel.id} {dtype} {dims} {ask}: row {row} alone and among {ROWS}"
        backwards = list(range(ROWS))[::-1]
        shuffled = torch.randperm(ROWS, generator=torch.Generator().manual_seed(3)).tolist()
        for order in (backwards, shuffled, shuffled[:2], shuffled[:7], shuffled[:16]):
            together = pieces(op, run, taken(op, args, order, each), len(order), each)
            for place, row in enumerate(order):
                if not all(map(torch.equal, together[place], wanted[row])):
                    return f"{kernel.id} {dtype} {dims} {ask}: row {row} at place {place} of {len(order)}"
    return ""


@functools.cache
def loaded(kernel: Kernel) -> Any:
    return kernel.load()


def sized(op: str, every: bool) -> Iterator[tuple[dict[str, int], tuple[str, ...]]]:
    """(sizes, asks) of calls: each ask in the first sizes, and in `every` other or in one of them in turn.

    On a device every size is asked: what its kernels choose by it is more.
    """
    first, *others = SIZES.get(op, ({},))
    for number, ask in enumerate(asks(op)):
        yield first, ask
        for place, dims in enumerate(others):
            if every or cases.DEVICE != "cpu" or number == 0 or place == number % len(others):
                yield dims, ask


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "every"])
@pytest.mark.parametrize("kernel", CLAIMING, ids=[k.id for k in CLAIMING])
def test_a_row_has_its_own_bits_alone_and_in_any_batch_at_any_place(kernel: Kernel, every: bool) -> None:
    """Every op, dtype and feature, in one size or `every`, in memory of its own each time."""
    tried = 0
    for dtype in cases.dtypes(kernel):
        for dims, ask in sized(kernel.op, every):
            assert not (found := differing(kernel, loaded(kernel), dtype, dims, ask)), found
            tried += 1
    assert tried


@pytest.mark.parametrize("kernel", CLAIMING, ids=[k.id for k in CLAIMING])
def test_a_row_has_its_own_bits_however_the_batch_lies_in_memory(kernel: Kernel) -> None:
    """Rows of a larger matrix, rows whose columns are dense: a row alone is always dense."""
    op, batch = table.get(kernel.op), {"attention": "B", "alibi": "Hq"}.get(kernel.op, "N")
    device = kernels.device([kernel], lz.Settings(determinism="strict", warm="off"), cases.DEVICE)
    asked = [("inputs_quantized",)] if kernel.op == "quantized_linear" else asks(kernel.op)[:3]
    asked = [cases.asking(kernel, *asks) for asks in asked]
    if kernel.id == "triton.add_rms_norm_quantize.group":  # nothing that is asked of rows is asked of groups
        asked = [("scale_per_group",)]
    compared = 0
    for dtype in cases.dtypes(kernel):
        for dims, ask in itertools.product(SIZES.get(kernel.op, ({},))[:3], asked):
            sizes = {**cases.base_of(kernel), **dims, batch: ROWS}
            args = cases.call(cases.Case(kernel.op, ask, sizes), dtype)
            args = sequences(args) if kernel.op == "ragged_attention" else args
            each = per_row(kernel.op, args, ROWS)
            positions = ALONG.get(kernel.op, (0, 1, 2))
            for way in ("gaps between rows", "columns first"):
                lying = tuple(
                    at(a, max(1, kernel.capability.alignment // a.itemsize), strides(a)[way])
                    if p in positions and isinstance(a, Tensor) and a.dim() > 1
                    else a
                    for p, a in enumerate(args)
                )
                try:
                    dense, other = (
                        pieces(kernel.op, lambda *own: device.launch(op, own), own, ROWS, each)
                        for own in (args, lying)
                    )
                except lz.NoKernelFoundError:
                    continue
                for row, (mine, theirs) in enumerate(zip(dense, other, strict=True)):
                    assert all(map(torch.equal, mine, theirs)), (dtype, dims, ask, way, row)
                compared += 1
    assert compared


def test_every_op_can_be_served_under_strict_determinism() -> None:
    """An op without such a kernel would be refused there, and an op without rows here would go untested."""
    served = {k.op for k in cases.KERNELS if k.capability.batch_invariant}
    assert served | REFUSED == set(table.names())
    missing = set(table.names()) - ALONG.keys() - REFUSED - {"ragged_attention"}
    assert not missing, f"say in ALONG which operands of {missing} have rows"


# -- the controls: kernels that claim it and are not ------------------------------------------------------


def _by_size(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Another order of sums from sixteen rows on, as tuned kernels have."""
    if x.shape[0] < 16:
        return rms_norm_reference(x, weight, eps)
    return (x * (x.flip(-1).pow(2).sum(-1, keepdim=True) / x.shape[-1] + 1e-7).rsqrt()) * weight


def _by_place(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The last row of every batch is rounded differently, as a kernel's tail loop may do."""
    out = rms_norm_reference(x, weight, eps)
    if len(out) > 1:
        out[-1] = torch.nextafter(out[-1], out[-1] + 1)
    return out


def _by_neighbour(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rows share one scale, as a quantizing kernel with one scale a batch does."""
    scale = x.abs().max() / 127
    return rms_norm_reference((x / scale).round() * scale, weight, eps)


LIARS = {
    "bad.rms_norm.by_size": _by_size,
    "bad.rms_norm.by_place": _by_place,
    "bad.rms_norm.by_neighbour": _by_neighbour,
}


@pytest.mark.parametrize("name", LIARS)
def test_a_kernel_that_lies_is_caught(name: str) -> None:
    """The check finds each of the three ways in which company can show."""
    lying = kernels.kernel(name, LIARS[name], batch_invariant=True)
    assert differing(lying, LIARS[name], torch.float32, {"C": 384}, ())
    honest = kernels.kernel("good.rms_norm", batch_invariant=True)
    assert not differing(honest, honest.load(), torch.float32, {"C": 384}, ())


# -- through the batcher -------------------------------------------------------------------------------------


def strict(calls: Callable[[], list[Any]]) -> list[Any]:
    """The results of calls that are awaited together, under strict determinism."""

    async def every() -> list[Any]:
        return await asyncio.gather(*calls())

    with lz.start(lz.Settings(determinism="strict", warm="off"), scoped=True):
        return asyncio.run(every())


def awaited(op: str, args: Args) -> Any:
    """The op's awaitable function with a full argument tuple."""
    names = list(inspect.signature(table.get(op).build).parameters)
    return getattr(lz, op)(**dict(zip(names, args, strict=True)))


def own(op: str, out: Any, args: Args) -> tuple[Tensor, ...]:
    """A caller's part of a result; of an append what is in its slots, and what it gives beside."""
    if op not in WRITING:
        return cases.as_tuple(out)
    at = WRITING[op]
    pools = args[2:4] if op == "append_kv" else args[6:8]
    beside = () if op == "append_kv" else (out,)
    return (*(pool.flatten(0, 1)[args[at]] for pool in pools), *beside)


@pytest.mark.skipif(cases.DEVICE != "cpu", reason="asks what a CPU refuses")
@pytest.mark.parametrize("op", sorted(ON_GPUS))
def test_what_no_kernel_of_a_cpu_promises_is_refused(op: str) -> None:
    """By the name of the promise, not answered in whatever order the sums come."""
    args = cases.call(cases.Case(op, asks(op)[0]), torch.float32)
    with pytest.raises(lz.NoKernelFoundError, match='takes it given determinism="default"'):
        strict(lambda: [awaited(op, args)])


@pytest.mark.parametrize(
    "op",
    sorted({*ALONG, "ragged_attention"} - REFUSED - (ON_GPUS if cases.DEVICE == "cpu" else set())),
)
def test_an_awaited_row_has_its_own_bits_in_any_company(op: str) -> None:
    """Callers of one row each, together in two orders and one by one: batching rules keep bits too."""
    batch = {"attention": "B", "alibi": "Hq"}.get(op, "N")
    ask = {"quantized_linear": ("inputs_quantized",)}.get(op, asks(op)[0])
    args = cases.call(cases.Case(op, ask, {batch: ROWS}), torch.float32)
    args = sequences(args) if op == "ragged_attention" else args
    each = per_row(op, args, ROWS)
    apart = [taken(op, args, [row], each) for row in range(ROWS)]
    for kernel in cases.KERNELS:  # compiled before a loop asks: the folder for it is made at first use
        if kernel.backend == "native" and not cases.why_not_here(kernel):
            kernel.load()
    lonely = [own(op, strict(lambda a=a: [awaited(op, a)])[0], a) for a in apart[:6]]  # type: ignore[misc]
    for order in (apart, apart[::-1]):
        if op in WRITING:
            for position in table.get(op).written(args):
                args[position].zero_()
        outs = strict(lambda calls=order: [awaited(op, a) for a in calls])  # type: ignore[misc]
        outs = outs if order is apart else outs[::-1]
        for row, alone in enumerate(lonely):
            assert all(map(torch.equal, own(op, outs[row], apart[row]), alone)), (op, row)
