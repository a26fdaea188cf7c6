"""A step function captured for buckets of rows: padded inputs, static buffers, one replay a call.

On CUDA each bucket is a captured graph. Elsewhere the step runs on the same padded static buffers without a
graph, so that padding and buckets can be tested anywhere.
"""

from __future__ import annotations

import bisect
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from layerzero.graphs.captured_steps import CapturedStep, CapturedSteps
from layerzero.graphs.rehearsal import rehearsal
from layerzero.spec.errors import KernelStillLoadingError

R = TypeVar("R")
BUCKETS = (1, 2, 4, 8, 16, 32, 64)
# Runs before the capture, as torch asks: cuBLAS, cuDNN and workspaces are made on first use.
WARMUPS = 3


class EagerStep:
    """The step called anew each time: what a device without graphs does."""

    def __init__(self, run: Callable[[], Any], pool: Any, version: Callable[[], int], waits: bool) -> None:
        self._run = run
        self.pool = pool
        self.outputs = _tensors(run())
        self.version = version()  # it plans anew with every run

    def replay(self) -> None:
        """Run the step again."""
        self.outputs = _tensors(self._run())


class CudaGraph:
    """The step captured once on a side stream, after rehearsals that make every plan and workspace.

    Raises: KernelStillLoadingError: a kernel that it needs loads, and it is not to wait for one.
    """

    def __init__(self, run: Callable[[], Any], pool: Any, version: Callable[[], int], waits: bool) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream), rehearsal(waits):
                for _ in range(WARMUPS):
                    run()
        finally:
            torch.cuda.current_stream().wait_stream(stream)
        # Rehearsing may have moved it on; what moves it from here on asks for another capture.
        self.version = version()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.outputs = _tensors(run())
        self.pool = self._graph.pool()

    def replay(self) -> None:
        """Launch the captured graph on the current stream."""
        self._graph.replay()


class GraphedFunction(Generic[R]):
    """A function over rows that runs for buckets of rows; calls between two buckets are padded up.

    Its arguments are tensors with rows along their first axis, the same number in each; so are its results.
    Padding rows hold `fill[name]` of their argument, 0 by default: give the ids of a scratch page or slot
    where the step writes. Everything else it reads (weights, pages) must stay where it is. Plans that
    changed (a quarantine, a policy) are captured anew: `version()` says so. Of too many captured steps the
    longest unused go (`CapturedSteps`), and are captured again when they are called again.
    """

    def __init__(
        self,
        fn: Callable[..., R],
        *,
        buckets: Sequence[int] = BUCKETS,
        fill: Mapping[str, float] | None = None,
        version: Callable[[torch.device], int] = lambda _: 0,
        steps: CapturedSteps | None = None,
        result_rows: int | None = None,
    ) -> None:
        """`steps` keeps what is captured, for several functions where they share it. With `result_rows`
        results have so many rows in every bucket, and all of them are returned.

        Raises: ValueError: no bucket, one below 1, or `fill` names no argument. TypeError: no function.
        """
        if not callable(fn):
            raise TypeError(f"fn needs a function, got {type(fn).__name__}")
        if not isinstance(buckets, Collection) or not all(isinstance(rows, int) for rows in buckets):
            raise TypeError(f"buckets needs numbers of rows, got {buckets!r:.80}")
        if not buckets or min(buckets) < 1:
            raise ValueError(f"buckets needs numbers of rows of at least 1, got {tuple(buckets)}")
        self._fn = fn
        self._names = _names(fn)
        unknown = sorted(set(fill or {}) - set(self._names))
        if unknown:
            raise ValueError(f"fill needs arguments among {', '.join(self._names)}, got {', '.join(unknown)}")
        self._fill = dict(fill or {})
        self.buckets = tuple(sorted(set(buckets)))
        self._version, self._result_rows = version, result_rows
        self._steps = steps if steps is not None else CapturedSteps()
        self._token = object()  # what tells its steps from those of other functions
        self.captures = 0
        functools.update_wrapper(self, fn)

    def __call__(self, *args: Tensor) -> R:
        """The step's results for these rows, in memory of their own.

        Raises: ValueError: no tensors, different numbers of rows, more rows than the largest bucket, a
            gradient asked for, or results without a row for each row. CudaGraphUnsafeError: an op of the
            step has no kernel that may be captured.
        """
        rows = self._rows(args)
        place = bisect.bisect_left(self.buckets, rows)
        if place == len(self.buckets):
            raise ValueError(f"{self._name} needs at most {self.buckets[-1]} rows, got {rows}")
        with self._steps.lock, torch.no_grad():
            device = args[0].device
            self._order_streams(device)
            try:
                static, recorded, _ = self._captured_for(self.buckets[place], args, waits=False)
            except KernelStillLoadingError:
                self._steps.count_uncaptured(device)
                return self._fn(*args)
            if rows == self.buckets[place]:
                for buffer, value in zip(static, args, strict=True):
                    buffer.copy_(value)
                recorded.replay()
                results = tuple([out.clone() for out in recorded.outputs])
            else:
                for name, buffer, value in zip(self._names, static, args, strict=True):
                    buffer[:rows].copy_(value)
                    buffer[rows:].fill_(self._fill.get(name, 0))
                recorded.replay()
                kept = self._result_rows or rows
                results = tuple([out[:kept].clone() for out in recorded.outputs])
        return cast("R", results if len(results) != 1 else results[0])

    def capture(self, *args: Tensor, buckets: Sequence[int] | None = None) -> None:
        """Make every bucket ready for arguments of these shapes (beyond the first axis) and dtypes.

        The largest first, so that the smaller ones fit into its memory; only those of `buckets` where these
        are given. Raises: ValueError: one of `buckets` is none of its own.
        """
        self._rows(args)
        sizes = self.buckets if buckets is None else tuple(sorted(set(buckets)))
        if unknown := [bucket for bucket in sizes if bucket not in self.buckets]:
            raise ValueError(f"buckets needs some of {self.buckets}, got {unknown[0]!r}")
        with self._steps.lock, torch.no_grad():
            for bucket in reversed(sizes):
                self._captured_for(bucket, args, waits=True)

    @property
    def evictions(self) -> int:
        """How many captured steps were let go for room."""
        return self._steps.evictions

    @property
    def _name(self) -> str:
        return getattr(self._fn, "__qualname__", type(self._fn).__name__)

    def _rows(self, args: tuple[Tensor, ...]) -> int:
        if len(args) != len(self._names) or not all(isinstance(a, Tensor) and a.dim() for a in args):
            kinds = ", ".join(type(a).__name__ for a in args)
            raise ValueError(
                f"{self._name} needs tensors with rows for {', '.join(self._names)}, got {kinds}"
            )
        counts = {a.shape[0] for a in args}
        if len(counts) != 1 or 0 in counts or len({a.device for a in args}) != 1:
            raise ValueError(f"{self._name} needs as many rows on one device in each argument, got {counts}")
        if torch.is_grad_enabled() and any(a.requires_grad for a in args):
            raise ValueError(f"{self._name} is captured without a gradient: needs torch.no_grad()")
        return counts.pop()

    def _order_streams(self, device: torch.device) -> None:
        """Let the current stream wait for the last call's where that was another: a stream is in order."""
        if device.type != "cuda":
            return
        current, last = torch.cuda.current_stream(device), self._steps.streams.get(device)
        if current != last:
            if last is not None:
                current.wait_stream(last)
            self._steps.streams[device] = current

    def _captured_for(self, bucket: int, args: tuple[Tensor, ...], *, waits: bool) -> CapturedStep:
        """Raises: KernelStillLoadingError: a kernel that it needs loads, and the caller does not wait."""
        device = args[0].device
        key = (self._token, bucket, device, *((a.dtype, a.shape[1:]) for a in args))
        version = self._version(device)
        step = self._steps.find(key, version)
        if step is None:
            if not waits and self._steps.is_loading(device, version):
                raise KernelStillLoadingError(f"{self._name} needs kernels that are being loaded")
            try:
                step = self._capture(bucket, device, args, waits)
            except KernelStillLoadingError as error:
                self._steps.wait_for_load(device, version, name=self._name, why=str(error))
                raise
            self._steps.add(key, step, name=self._name, device=device)
        return step

    def _capture(
        self, bucket: int, device: torch.device, args: tuple[Tensor, ...], waits: bool
    ) -> CapturedStep:
        bytes_before = _reserved_bytes(device)
        # Buffers outlive the modes they are made under.
        with torch.inference_mode(False), torch.no_grad():
            static = tuple(
                torch.full((bucket, *a.shape[1:]), self._fill.get(name, 0), dtype=a.dtype, device=device)
                for name, a in zip(self._names, args, strict=True)
            )
            for buffer, value in zip(static, args, strict=True):
                shared = min(bucket, value.shape[0])
                buffer[:shared].copy_(value[:shared])
            on_cuda = device.type == "cuda"
            # A thread's device may be another one: a graph has its streams where its tensors are.
            with torch.cuda.device(device) if on_cuda else nullcontext():
                recorded = (CudaGraph if on_cuda else EagerStep)(
                    lambda: self._fn(*static),
                    self._steps.pools.get(device),
                    lambda: self._version(device),
                    waits,
                )
        expected = self._result_rows or bucket
        for out in recorded.outputs:
            if not out.dim() or out.shape[0] != expected:
                raise ValueError(
                    f"{self._name} needs results of {expected} rows, got shape {tuple(out.shape)}"
                )
        self.captures += 1
        self._steps.pools[device] = recorded.pool
        buffer_bytes = sum(t.numel() * t.element_size() for t in (*static, *recorded.outputs))
        return CapturedStep(static, recorded, max(buffer_bytes, _reserved_bytes(device) - bytes_before))


def _reserved_bytes(device: torch.device) -> int:
    """What torch has taken of a GPU's memory; a capture's workspaces and intermediates are in it."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def _names(fn: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(fn).parameters)


def _tensors(results: Any) -> tuple[Tensor, ...]:
    outputs = results if isinstance(results, tuple) else (results,)
    if not all(isinstance(out, Tensor) for out in outputs):
        raise ValueError(
            f"a step needs to return tensors, got {', '.join(type(o).__name__ for o in outputs)}"
        )
    return outputs
