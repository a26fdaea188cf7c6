"""Plans of FlashInfer's batch wrappers: made from lengths on the host, kept while those lengths hold.

A wrapper is planned for lengths and then run any number of times. Lengths that came with a host copy
(`ops.host_copies`, which the KV cache makes at every epoch) are known without a synchronisation, and their
plan is kept for every layer that passes the same tensors. Lengths of a bare tensor are read and planned anew
at every call, because such tensors are edited in place.

A stream of a device has one `StreamWorkspaces`: a float workspace shared by its wrappers, which run one after
the other, and the wrappers themselves. Each wrapper has index buffers of its own, staged through pinned
memory, so that one is planned again only after its last copies have reached the device.

A graph cannot hold planning, which reads lengths and copies from the host. It holds the launch of a plan that
its stream made before the capture; that plan's wrapper is the graph's from then on and is not planned again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from layerzero.backends.flashinfer.common import WORKSPACE_BYTES
from layerzero.ops import captures, host_copies
from layerzero.ops.attention.adapters import int32
from layerzero.spec.errors import CudaGraphUnsafeError

# Wrappers of a stage beyond this are planned again, the longest unused first; each holds 16 MiB.
MAX_PLANS = 16
# What a launch over several blocks a row of logits meets in.
ROW_STATES_BYTES = 1 << 20

Make = Callable[[Tensor], Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PlanKey:
    """What tells one plan from another; `keepalive` are the objects whose identity the key speaks of.

    They live as long as the plan. Without any the plan serves one call: the lengths may change unseen.
    """

    key: Hashable
    keepalive: tuple[object, ...] = ()

    @classmethod
    def of(cls, flags: Hashable, *tensors: Tensor | None) -> PlanKey:
        """Of index tensors, by their host copies where every one has such."""
        copies = [host_copies.host_copy_of(t) for t in tensors if t is not None]
        if any(copy is None for copy in copies):
            return cls(object())
        marks = tuple(None if t is None else id(host_copies.host_copy_of(t)) for t in tensors)
        return cls((flags, marks), tuple(copies))


@dataclass(slots=True)
class CachedWrapper:
    """One wrapper and what it is planned for."""

    wrapper: Any
    kind: Hashable
    copied: torch.cuda.Event
    plan_key: PlanKey | None = None
    captured: bool = False

    @property
    def is_reusable(self) -> bool:
        """Whether its plan may serve another call."""
        return self.plan_key is not None and bool(self.plan_key.keepalive)


@dataclass(slots=True)
class StreamWorkspaces:
    """The wrappers and the workspace of one stream; one thread at a time plans and launches."""

    float_workspace: Tensor
    plans: OrderedDict[Hashable, CachedWrapper] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(
        self, kind: Hashable, plan_key: PlanKey, make: Make, plan: Callable[[Any], None],
        launch: Callable[[Any], T],
    ) -> T:  # fmt: skip
        """`launch` with a wrapper of `kind` that is planned for `lengths`, planned now if none is.

        Raises: CudaGraphUnsafeError: the stream is capturing, and it has no such plan.
        """
        with self.lock:
            return launch(self._planned_wrapper(kind, plan_key, make, plan))

    def _planned_wrapper(
        self, kind: Hashable, plan_key: PlanKey, make: Make, plan: Callable[[Any], None]
    ) -> Any:
        key = (kind, plan_key.key)
        cached = self.plans.get(key)
        if cached is not None:
            cached.captured = cached.captured or captures.is_claiming()
            self.plans.move_to_end(key)
            return cached.wrapper
        if torch.cuda.is_current_stream_capturing():
            raise CudaGraphUnsafeError(
                f"FlashInfer {kind} needs a plan for these lengths that the capturing stream made before the "
                "capture, and has none: lengths without a host copy (layerzero.ops.host_copies) are "
                "planned anew"
            )
        free = self._free(kind) or CachedWrapper(make(self.float_workspace), kind, torch.cuda.Event())
        free.copied.synchronize()
        plan(free.wrapper)
        free.copied.record()
        free.plan_key = plan_key
        self.plans[key] = free
        return free.wrapper

    def _free(self, kind: Hashable) -> CachedWrapper | None:
        """A wrapper of `kind` to plan again: one for bare lengths, or the longest unused of too many."""
        keys = [key for key, p in self.plans.items() if p.kind == kind and not p.captured]
        spent = next((key for key in keys if not self.plans[key].is_reusable), None)
        if spent is None and len(keys) >= MAX_PLANS:
            spent = keys[0]
        return None if spent is None else self.plans.pop(spent)


Name = tuple[int, int]
_WORKSPACES: dict[Name, StreamWorkspaces] = {}
_ROW_STATES: dict[Name, Tensor] = {}
_LOCK = threading.Lock()


def _of_stream(by_stream: dict[Name, T], device: torch.device, nbytes: int, make: Callable[[Tensor], T]) -> T:
    """What `device`'s current stream has in `known`, made now of zeroed bytes where it is missing."""
    name = (device.index or 0, torch.cuda.current_stream(device).cuda_stream)
    entry = by_stream.get(name)
    if entry is None:
        with _LOCK, torch.inference_mode(False):
            workspace = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            entry = by_stream.setdefault(name, make(workspace))
    return entry


def stream_workspaces(device: torch.device) -> StreamWorkspaces:
    """The stage of `device`'s current stream; zeroed, since the decode kernels count in it from the start."""
    return _of_stream(_WORKSPACES, device, WORKSPACE_BYTES, StreamWorkspaces)


def row_states_buffer(device: torch.device) -> Tensor:
    """Where the blocks of a launch on `device`'s current stream meet, zero before it and after it.

    FlashInfer's own is one a device, in which two streams would meet. A graph has one of its own.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(ROW_STATES_BYTES, dtype=torch.uint8, device=device)
    return _of_stream(_ROW_STATES, device, ROW_STATES_BYTES, lambda room: room)


def release(device: torch.device | None = None) -> None:
    """Give the workspaces and plans of a device (of all) back; graphs that hold some must be gone."""
    with _LOCK:
        for by_stream in (_WORKSPACES, _ROW_STATES):
            for name in [n for n in by_stream if device is None or n[0] == (device.index or 0)]:
                del by_stream[name]
        captures.release(device)


def query_starts(cu_seqlens_q: Tensor | None, batch: int) -> Tensor:
    """Where each sequence's queries start, on the CPU; one a sequence without offsets."""
    if cu_seqlens_q is None:
        return torch.arange(batch + 1, dtype=torch.int32, device="cpu")
    return int32(host_copies.to_host_values(cu_seqlens_q))


@dataclass(frozen=True, slots=True)
class CompressedBlockTables:
    """The pages of a batch in compressed rows: offsets and lengths on the CPU, page ids on the device."""

    starts: Tensor
    ids: Tensor
    lengths: Tensor
    last: Tensor

    @classmethod
    def of(cls, tables: Tensor, seq_lens: Tensor, page_size: int) -> CompressedBlockTables:
        """Out of block tables (B, M), of which a length's pages are read and no more."""
        lengths = int32(host_copies.to_host_values(seq_lens))
        counts = (lengths + page_size - 1) // page_size
        starts = torch.zeros(len(counts) + 1, dtype=torch.int32, device="cpu")
        torch.cumsum(counts, 0, out=starts[1:])
        total, width = int(starts[-1]), tables.shape[1]
        flat = tables.reshape(-1)
        if total != flat.shape[0]:
            rows = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), counts.long())
            places = torch.arange(total, device="cpu") - starts[:-1].long()[rows] + rows * width
            flat = flat.index_select(0, places.to(tables.device, non_blocking=True))
        last = lengths - (counts - 1).clamp(min=0) * page_size
        return cls(starts, flat.to(torch.int32), lengths, last)
