"""CUDA graphs for users: prove kernels safe, ask whether they are, rehearse a capture, compile a step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from layerzero._util import log
from layerzero.actors.device.local_device import LocalDevice
from layerzero.calls.blocking import checked_build, context_device, context_runtime, context_snapshot
from layerzero.calls.scope import SCOPE
from layerzero.graphs.captured_steps import MAX_GRAPHS, CapturedSteps
from layerzero.graphs.observe import change_inputs, observe
from layerzero.graphs.proof import CaptureProof
from layerzero.graphs.rehearsal import rehearsal
from layerzero.graphs.step import BUCKETS, GraphedFunction
from layerzero.graphs.verdict import CaptureFinding, find_problems
from layerzero.ops import table as ops_table
from layerzero.ops.op import Args, Op
from layerzero.selection.modes import CAPTURE
from layerzero.selection.record import Selection
from layerzero.spec.errors import CudaGraphUnsafeError, NoKernelFoundError

R = TypeVar("R")
GRAPH_PROVED = "graph.proved"
GRAPH_REFUSED = "graph.refused"
GRAPH_NOT_TRIED = "graph.not_tried"


def validate_graph_capture(
    op: str,
    /,
    *args: Any,
    kernel: str | None = None,
    others: Mapping[str, Tensor] | None = None,
    **kwargs: Any,
) -> tuple[CaptureProof, ...]:
    """Capture kernels with these arguments, replay them with changed inputs, and keep what was found.

    Every kernel that would take the call outside a capture is tried, or only `kernel`. Each is warmed up,
    captured on two side streams, replayed with other values over poisoned memory, and compared with a direct
    call; what it allocates outside the graph's pool and any synchronisation count against it. `others` gives
    by name the second values, where turning the floats around does not make valid ones. The results hold for
    this device and software, in later processes too where `Settings.state_dir` is set.

    A kernel that does not load is left out, with a log event, unless it was named.

    Raises: CudaGraphUnsafeError: the arguments are not on a CUDA device, or a capture is under way.
        ValueError: no such kernel takes the call. TypeError, ValueError: an argument is wrong.
    """
    definition = ops_table.get(op)
    _, full = checked_build(definition, args, kwargs)
    if others is None:
        second = change_inputs(full)
    else:
        named = inspect.signature(definition.build).bind(*args, **kwargs).arguments
        _, second = checked_build(definition, (), {**named, **others})
    device = context_device(full)
    if device.device.type != "cuda":
        raise CudaGraphUnsafeError(f"{op} needs tensors on a CUDA device to be captured, got {device.device}")
    if torch.cuda.is_current_stream_capturing():
        raise CudaGraphUnsafeError("a capture is under way; validate before it")
    selection = device.table(definition, context_snapshot(device, op, None)).recompute(
        device.table(definition).describe(full, device.mode() & ~CAPTURE)
    )
    proofs = []
    for kernel_id in _candidates(selection, kernel):
        try:
            run = device.callable_for(definition, selection, kernel_id)
        except Exception as error:
            if kernel is not None:
                raise
            log.warning(GRAPH_NOT_TRIED, kernel=kernel_id, error=f"{type(error).__name__}: {error}")
            continue
        case_findings = _case_findings(definition, run, full, second)
        proofs.append(record_finding(device, kernel_id, case_of(selection), case_findings))
    device.refresh()
    return tuple(proofs)


def record_finding(
    device: LocalDevice, kernel_id: str, case: str, case_findings: tuple[CaptureFinding, ...]
) -> CaptureProof:
    """Keep what a case showed about a kernel of a device, and say so in the log."""
    kernel = device.registry.get(kernel_id)
    if kernel is None:
        raise ValueError(f"kernel needs the id of a registered kernel, got {kernel_id!r}")
    proof = device.proofs.add(kernel, case, case_findings)
    if case_findings:
        log.warning(GRAPH_REFUSED, kernel=kernel_id, case=case, found=[str(f) for f in case_findings])
    else:
        log.info(GRAPH_PROVED, kernel=kernel_id, case=case)
    device.counters.add("graph_validations", kernel=kernel_id, safe=not case_findings)
    return proof


def _candidates(selection: Selection, kernel: str | None) -> tuple[str, ...]:
    takes = tuple(c.kernel for c in selection.trace if c.eligible)
    if kernel is None:
        return takes
    if kernel not in takes:
        raise ValueError(f"kernel needs one that takes this call: {', '.join(takes)}; got {kernel!r}")
    return (kernel,)


def _case_findings(op: Op, run: Callable[..., Any], args: Args, others: Args) -> tuple[CaptureFinding, ...]:
    unique: dict[CaptureFinding, None] = {}
    for observation in observe(run, args, others, writes=op.written(args)):
        unique |= dict.fromkeys(find_problems(observation))
    return tuple(unique)


def case_of(selection: Selection) -> str:
    """A call in words, as proofs name it."""
    request = selection.request
    sizes = " ".join(f"{name}{size}" for name, size in request.dims.items())
    return " ".join(w for w in (request.dtype, sizes, *sorted(request.features), request.layout) if w)


class CaptureVerdict(msgspec.Struct, frozen=True):
    """Whether a kernel may be captured here, and on whose word; true and false like a bool.

    `basis` is "proved", "found unsafe", "declared" or "unknown".
    """

    kernel: str
    safe: bool
    basis: str
    proof: CaptureProof | None = None

    def __bool__(self) -> bool:
        return self.safe


def is_graph_safe(name: str, /, *args: Any, **kwargs: Any) -> CaptureVerdict:
    """Whether a kernel may run under CUDA graph capture; with an op and arguments, whether that call may.

    Without arguments `name` is a kernel's id on the default device. With arguments it is an op's name: the
    answer is about the kernel that the call would get under capture.
    Raises: ValueError: no kernel has that id. UnknownOpError: no op has that name.
    """
    if not args and not kwargs:
        device = context_runtime().device()
        kernel = device.registry.get(name) if isinstance(name, str) else None
        if kernel is None:
            raise ValueError(f"is_graph_safe needs a kernel's id, or an op with arguments, got {name!r}")
        return _safety(device, kernel.id)
    definition = ops_table.get(name)
    _, full = checked_build(definition, args, kwargs)
    device = context_device(full)
    table = device.table(definition, context_snapshot(device, name, None))
    try:
        chosen = table.recompute(table.describe(full, device.mode() | CAPTURE))
    except NoKernelFoundError:
        return CaptureVerdict("", False, "no kernel takes the call under capture")
    return _safety(device, chosen.kernel)


def _safety(device: LocalDevice, kernel_id: str) -> CaptureVerdict:
    kernel = device.registry.get(kernel_id)
    assert kernel is not None
    proof = device.proofs.proof_of(kernel)
    (applied,) = device.proofs.apply((kernel,), strict=device.settings.graph_strict)
    safe = applied.capability.graph_safe
    declared = "declared" if kernel.capability.graph_safe else "unknown"
    basis = declared if proof is None else "proved" if proof.safe else "found unsafe"
    return CaptureVerdict(kernel_id, safe, basis, proof)


def rehearse_capture() -> AbstractContextManager[None]:
    """A block in which calls on CUDA choose as they will while a graph is captured; run the step in it once.

    Inside a capture nothing is chosen, loaded or waited for: a call that was not rehearsed raises
    CudaGraphUnsafeError.
    """
    return rehearsal()


def compile(
    fn: Callable[..., R],
    *,
    buckets: Sequence[int] = BUCKETS,
    fill: Mapping[str, float] | None = None,
    max_graphs: int = MAX_GRAPHS,
    max_graph_bytes: int | None = None,
) -> GraphedFunction[R]:
    """A step function as graph plans: captured once for each bucket of rows, then replayed.

    `fn` takes and returns tensors with rows along their first axis. A call is padded up to the next bucket
    with `fill[argument]` (0 by default) and gets its own rows back, in memory of their own. On CUDA every op
    inside must have a kernel that is safe under capture; on other devices the padded step simply runs. Give
    the result to `batched` and the calls of many coroutines become one replay. A changed policy or a
    quarantined kernel is captured anew. Each bucket is captured for each dtype and row shape that comes; of
    more than `max_graphs`, or of more than `max_graph_bytes` together, the least recently used go. While a
    kernel that the graph needs is loaded or compiled behind calls, `fn` runs as it is, without a graph;
    `capture` of the result waits for it.

    Raises: ValueError: a bucket or bound below 1, or `fill` names no argument.
    """
    steps = captured_steps(max_graphs, max_graph_bytes)
    return GraphedFunction(fn, buckets=buckets, fill=fill, version=_generation, steps=steps)


def captured_steps(max_graphs: int, max_bytes: int | None) -> CapturedSteps:
    """Where captured steps are kept; what goes for room is counted where it ran."""
    return CapturedSteps(max_graphs, max_bytes, _count)


def compile_within(
    fn: Callable[..., R], buckets: Sequence[int], steps: CapturedSteps, result_rows: int | None = None
) -> GraphedFunction[R]:
    """`compile` of one of several functions that keep their steps together; see `GraphedFunction`."""
    return GraphedFunction(fn, buckets=buckets, version=_generation, steps=steps, result_rows=result_rows)


def _count(name: str, device: torch.device) -> None:
    context_runtime().device(device).counters.add(name, device=str(device))


def _generation(device: torch.device) -> int:
    scope, local_device = SCOPE.get(), context_runtime().device(device)
    return local_device.captures_version if scope is None else scope.generation(local_device)
