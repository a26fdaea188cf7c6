"""Trying a kernel under capture on a GPU: two side streams, changed inputs, poisoned memory, allocations.

Nothing else may use the device meanwhile: allocations of other threads would be counted as the kernel's. A
kernel that breaks the context breaks this process; prove in a process of its own what is not trusted.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.graphs.verdict import Observation
from layerzero.ops.op import Args

WARMUPS = 3
STREAMS = 2
_MAX_TRACE = 100_000
_POISON = 0xFF  # NaN in every float format, -1 in every integer


def observe(
    run: Callable[..., Any], args: Args, others: Args, *, writes: Sequence[int] = ()
) -> tuple[Observation, ...]:
    """What a kernel does under capture with `args`, replayed with the tensors of `others`; one a stream.

    Both are full argument tuples on one CUDA device, alike in everything but the tensors' values; `writes`
    are the positions of the tensors that the kernel changes, which count as results.
    """
    device = next(a.device for a in args if isinstance(a, Tensor))
    observations = []
    with torch.cuda.device(device), torch.no_grad():
        for number in range(STREAMS):
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                observations.append(_observe_on_stream(run, args, others, tuple(writes), number))
            torch.cuda.synchronize(device)
            if observations[-1].raised or observations[-1].synchronised or observations[-1].capture_error:
                break
    return tuple(observations)


def _observe_on_stream(
    run: Callable[..., Any], args: Args, others: Args, writes: tuple[int, ...], number: int
) -> Observation:
    try:
        for _ in range(WARMUPS - 1):
            _run_directly(run, args, writes)
        first = _run_directly(run, args, writes)
        second, again = (_run_directly(run, others, writes) for _ in range(2))
        torch.cuda.current_stream().synchronize()
    except Exception as error:
        return Observation(stream=number, raised=_first_line(error))
    checked = _synchronisation_error(run, args)
    if checked:
        return Observation(stream=number, synchronised=checked)
    static = _copies(args)
    captured = _capture(run, static)
    if isinstance(captured, str):
        return Observation(stream=number, capture_error=captured)
    graph, results, outside = captured
    _poison([*first, *(a for a in args if isinstance(a, Tensor))])
    replays = []
    for inputs, expected in ((others, second), (args, first), (others, second)):
        _refill(static, inputs)
        graph.replay()
        got = [*results, *(static[position] for position in writes)]
        replays.append(difference(got, expected))
    graph.reset()
    return Observation(
        stream=number,
        outside_bytes=outside,
        replays=tuple(replays),
        repeats=difference(again, second),
        changed=difference(first, second),
        eps=max((torch.finfo(t.dtype).eps for t in first if t.is_floating_point()), default=0.0),
    )


def _run_directly(run: Callable[..., Any], args: Args, writes: tuple[int, ...]) -> list[Tensor]:
    copies = _copies(args)
    return [*_tensors(run(*copies)), *(copies[position] for position in writes)]


def _synchronisation_error(run: Callable[..., Any], args: Args) -> str:
    """The error of a call that synchronises in a way that torch sees; empty where it does not."""
    copies, before = _copies(args), torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its check a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        run(*copies)
    except Exception as error:
        return _first_line(error)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return ""


def _capture(run: Callable[..., Any], static: Args) -> tuple[torch.cuda.CUDAGraph, list[Tensor], int] | str:
    """The captured graph, its results and the bytes allocated outside its pool; or what made it fail."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            # From here on: beginning a capture allocates the random generator's own 16 bytes.
            results, snapshot = _run_traced(run, static)
    except Exception as error:
        _restore(stream)
        return _first_line(error)
    return graph, results, _bytes_outside_pool(snapshot, graph.pool(), stream.device_index)


def _run_traced(run: Callable[..., Any], static: Args) -> tuple[list[Tensor], Any]:
    torch.cuda.memory._record_memory_history(max_entries=_MAX_TRACE, context=None)
    try:
        return _tensors(run(*static)), torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _restore(stream: torch.cuda.Stream) -> None:
    """Capture something harmless: after a failed capture torch's generator still believes to be in one."""
    torch.cuda.synchronize()
    counter, spare = torch.zeros(1, device=stream.device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(spare, stream=stream, capture_error_mode="thread_local"):
        counter.add_(1)
    spare.reset()
    torch.cuda.synchronize()


def _bytes_outside_pool(snapshot: Any, pool: tuple[int, int], device: int) -> int:
    """The bytes that a memory history shows allocated in other segments than the pool's."""
    pool_segments = [
        (segment["address"], segment["address"] + segment["total_size"])
        for segment in snapshot["segments"]
        if segment["device"] == device and tuple(segment["segment_pool_id"]) == tuple(pool)
    ]
    traces = snapshot["device_traces"][device] if snapshot["device_traces"] else []
    return sum(
        entry["size"]
        for entry in traces
        if entry["action"] == "alloc" and not any(low <= entry["addr"] < high for low, high in pool_segments)
    )


def _poison(like: list[Tensor]) -> None:
    """Write over what is free: a graph that reads memory it no longer owns must not find its old values."""
    blocks = [torch.empty(t.numel() * t.element_size(), dtype=torch.uint8, device=t.device) for t in like * 2]
    for block in blocks:
        block.fill_(_POISON)


def _copies(args: Args) -> Args:
    """The arguments with tensors of their own, laid out alike."""
    return tuple(_copy(a) if isinstance(a, Tensor) else a for a in args)


def _copy(tensor: Tensor) -> Tensor:
    storage = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8, device=tensor.device)
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        storage.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )
    return copy.copy_(tensor.detach())


def _refill(static: Args, values: Args) -> None:
    for buffer, value in zip(static, values, strict=True):
        if isinstance(buffer, Tensor):
            buffer.copy_(value)


def change_inputs(args: Args) -> Args:
    """The arguments with other floats in them: each tensor turned along its last axis by another step.

    Integers (ids, tables, lengths) and masks stay: not every value is a valid one.
    """
    shifted: list[Any] = []
    for position, value in enumerate(args):
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 1:
            flat = value.reshape(-1).roll(position + 1) if value.shape[-1:] == (1,) else None
            rolled = flat.view(value.shape) if flat is not None else value.roll(position + 1, -1)
            shifted.append(_copy(value).copy_(rolled))
        else:
            shifted.append(value)
    return tuple(shifted)


def difference(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest relative L2 difference of any result; infinite where shapes, NaN or integers differ."""
    worst = 0.0
    for one, other in zip(got, expected, strict=True):
        if one.shape != other.shape:
            return float("inf")
        if torch.equal(one, other):
            continue
        if not one.is_floating_point() or not torch.equal(one.isnan(), other.isnan()):
            return float("inf")
        a, b = one.double().nan_to_num(), other.double().nan_to_num()
        worst = max(worst, ((a - b).norm() / b.norm().clamp_min(1e-30)).item())
    return worst


def _tensors(result: Any) -> list[Tensor]:
    outputs = result if isinstance(result, tuple | list) else (result,)
    return [out for out in outputs if isinstance(out, Tensor)]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
