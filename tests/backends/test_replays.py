"""A captured call and the calls behind it: a replay reads what it was captured with, whatever came since."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from layerzero.backends.flash_attn import vllm
from layerzero.ops import captures, table
from layerzero.ops.op import Args
from layerzero.spec.kernel import Kernel, rejections
from tests.backends import cases
from tests.backends.test_vendors import loaded, of

CAPTURED = [k for k in cases.KERNELS if "cuda" in k.capability.platforms and k.capability.graph_safe]
# More than what any kernel keeps from call to call.
OTHERS = 150


def calls_of(kernel: Kernel) -> list[Args]:
    """A plain call that the kernel takes, then the same op over many other sizes."""
    op, dtype = table.get(kernel.op), cases.dtypes(kernel)[0]
    base = cases.base_of(kernel)
    plain = [
        replace(case, dims={"D": 64} | base | case.dims)
        for case in cases.cases_of(kernel)
        if not case.strided and not any(ask.startswith("mask") for ask in case.asks)
    ]
    first = next(
        (c for c in plain if not rejections(kernel, op.check(cases.call(c, dtype)), cases.HERE)), None
    )
    if first is None:
        pytest.skip(f"{kernel.id} takes none of the cases")
    accepted = [cases.call(first, dtype)]
    for number in range(OTHERS):
        sizes = {"N": 2 + number, "T": 2 + number % 7, "B": 1 + number % 40, "Sk": 130 + number}
        others = replace(first, dims=first.dims | {n: s for n, s in sizes.items() if n not in base})
        try:
            args = cases.call(others, dtype)
            request = op.check(args)
        except (ValueError, RuntimeError):
            continue
        if not rejections(kernel, request, cases.HERE):
            accepted.append(args)
    return accepted


def empty_what_may_go() -> None:
    """Drop all that kernels keep from call to call within a bound, as other calls may at any time."""
    vllm._steps_of.clear()
    for name, module in list(sys.modules.items()):
        if name.startswith(("layerzero.backends", "layerzero.ops", "layerzero.formats")):
            for kept in list(vars(module).values()):
                bound = getattr(kept, "cache_parameters", lambda: {"maxsize": None})()["maxsize"]
                if bound is not None:
                    kept.cache_clear()


def overwrite_what_is_free() -> None:
    """Fill memory that has been given back, in sizes from 512 bytes on, with a number that is no index."""
    taken = [
        torch.full((size // 4,), 0x7F0F0F0F, dtype=torch.int32, device=cases.DEVICE)
        for size, count in ((512, 4096), (4096, 512), (65536, 128), (1 << 20, 64), (16 << 20, 8))
        for _ in range(count)
    ]
    torch.cuda.synchronize()
    del taken


@pytest.mark.gpu
@of(CAPTURED)
def test_a_replay_reads_what_it_was_captured_with(kernel: Kernel) -> None:
    """Many calls of other sizes between two replays, and memory that is used again, change no result."""
    run = loaded(kernel)
    first, *others = calls_of(kernel)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.no_grad():
        with torch.cuda.stream(stream):
            run(*first)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            outs = [out for out in cases.as_tuple(run(*first)) if isinstance(out, Tensor)]
        before = replayed(graph, outs)
        if not all(map(torch.equal, before, replayed(graph, outs))):
            pytest.skip(f"{kernel.id} gives other numbers at every replay")
        with torch.cuda.stream(stream):
            for args in others:
                run(*args)
        torch.cuda.synchronize()
        empty_what_may_go()
        gc.collect()
        with torch.cuda.stream(stream):  # the allocator gives a stream's memory to that stream again
            overwrite_what_is_free()
        after = replayed(graph, outs)
    assert all(map(torch.equal, before, after)), f"after {len(others)} other calls"
    captures.release()


def replayed(graph: torch.cuda.CUDAGraph, outs: list[Tensor]) -> list[Tensor]:
    """Copies of the graph's results, NaN as 0."""
    graph.replay()
    torch.cuda.synchronize()
    return [out.nan_to_num().clone() if out.is_floating_point() else out.clone() for out in outs]
