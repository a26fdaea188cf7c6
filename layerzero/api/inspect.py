"""Looking at choices without making them: select, explain, which, dry_run, list_kernels, validate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from layerzero.actors.device.local_device import LocalDevice
from layerzero.calls.blocking import checked_build, context_device, context_runtime, context_snapshot
from layerzero.ops import table as ops_table
from layerzero.ops.checks import need_int
from layerzero.ops.op import Args, Op, Signature
from layerzero.selection.context import KernelStatus, SelectionContext, SelectionOptions
from layerzero.selection.decide import decide
from layerzero.selection.plan import Plan, signature_of
from layerzero.selection.record import Selection
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.capability import Capability
from layerzero.spec.hardware import Hardware
from layerzero.spec.kernel import Kernel
from layerzero.spec.reasons import Rejected
from layerzero.spec.settings import Settings

MOST_CALLS = Settings().max_num_batched_tokens  # each call is an entry of a list


class Explanation(msgspec.Struct, frozen=True):
    """Why a call would run where it would; `str()` is a table for people, `selection` the record."""

    selection: Selection

    def __repr__(self) -> str:
        return repr(self.selection).replace("Selection", "Explanation", 1)

    def __str__(self) -> str:
        return str(self.selection)

    def _repr_html_(self) -> str:
        return self.selection._repr_html_()

    def as_json(self) -> str:
        """The whole record as JSON."""
        return msgspec.json.encode(self.selection.as_plain()).decode()


class KernelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One registered kernel with its state on a device: `state` is ready, cold, or why it is blocked."""

    id: str
    op: str
    backend: str
    state: str
    default: bool
    capability: Capability
    blocked: Rejected | None = None


def select(op: str, /, *args: Any, backend: str | None = None, **kwargs: Any) -> Selection:
    """The selection that a call with these arguments gets now; nothing runs.

    Raises: UnknownOpError: the ops are listed. NoKernelFoundError: no kernel may and can.

    Example:
        >>> import torch, layerzero as lz
        >>> with lz.start(scoped=True):
        ...     selection = lz.select("rms_norm", torch.ones(2, 8), backend="reference")
        >>> selection.kernel, len(selection.trace) > 1
        ('reference.rms_norm', True)
    """
    definition = ops_table.get(op)
    return _selection(definition, *checked_build(definition, args, kwargs), backend)


def select_batch(
    op: str, calls: Sequence[Mapping[str, Any]], *, backend: str | None = None
) -> list[Selection]:
    """The selections of many calls of one op, in order; equal calls are looked up once and share one record.

    Args: calls: each call's arguments by name, such as `{"q": q, "k": k, "v": v, "is_causal": True}`.
    Raises: NoKernelFoundError: as `select`. ValueError, TypeError: an argument is wrong, by name.
    """
    definition = ops_table.get(op)
    by_signature: dict[Signature, Selection] = {}
    selections: list[Selection] = []
    for call in calls:
        if not isinstance(call, Mapping):
            raise TypeError(f"calls needs each call's arguments by name, got {type(call).__name__}")
        signature, full = checked_build(definition, (), dict(call))
        selection = by_signature.get(signature)
        if selection is None:
            selection = by_signature[signature] = _selection(definition, signature, full, backend)
        selections.append(selection)
    return selections


def which(op: str, /, *args: Any, batch: int = 1, backend: str | None = None, **kwargs: Any) -> str:
    """The id of the kernel that a call with these arguments gets; with `batch`, that many of them merged.

    Example:
        >>> import torch, layerzero as lz
        >>> with lz.start(scoped=True):
        ...     lz.which("rms_norm", torch.ones(2, 8), backend="reference")
        'reference.rms_norm'
    """
    definition = ops_table.get(op)
    if batch == 1:
        return _planned(definition, *checked_build(definition, args, kwargs), backend).kernel
    need_int("batch", batch, low=1, high=MOST_CALLS)
    _, full = checked_build(definition, args, kwargs)
    together = merged_args(definition, full, batch)
    return _planned(definition, signature_of(definition, together), together, backend).kernel


def explain(op: str, /, *args: Any, backend: str | None = None, **kwargs: Any) -> Explanation:
    """Every kernel's verdict on a call with these arguments, decided anew; print it.

    Raises: NoKernelFoundError: as `select`; its message holds the same verdicts.

    Example:
        >>> import torch, layerzero as lz
        >>> with lz.start(scoped=True):
        ...     text = str(lz.explain("rms_norm", torch.ones(2, 8), backend="reference"))
        >>> print(text.splitlines()[1])
        -> reference.rms_norm: locked by backend='reference'
    """
    definition = ops_table.get(op)
    signature, full = checked_build(definition, args, kwargs)
    device = context_device(full)
    complete(device, op)
    table = device.table(definition, context_snapshot(device, op, backend))
    request = table.describe(full, device.mode())
    if definition.empty is not None and definition.empty(full) is not None:
        return Explanation(_planned(definition, signature, full, backend).selection_for_request())
    return Explanation(table.recompute(request))


def dry_run(
    op: str, /, *args: Any, hardware: Hardware | str | None = None, strict: bool | None = None, **kwargs: Any
) -> Selection:
    """The choice for these arguments on other hardware, or under another strictness; nothing runs.

    On the machine at hand this is `select`. On `hardware`, every registered kernel is judged as if its
    library were installed there, so that a device pool can be planned from a laptop, and so are descriptors:
    kernels that no code here calls, which the record says. A name such as "b200" is a described device.

    Raises: ConfigurationError: no device is described under that name. NoKernelFoundError: as `select`.
    """
    definition = ops_table.get(op)
    signature, full = checked_build(definition, args, kwargs)
    device = context_device(full)
    complete(device, op)
    snapshot = context_snapshot(device, op, None)
    request = device.table(definition, snapshot).describe(full, device.mode())
    settings, policy = device.settings, snapshot.policy
    knobs = SelectionOptions(
        settings.strict if strict is None else strict, settings.tie_band, settings.default_gain,
        payback_calls=settings.payback_calls,
    )  # fmt: skip
    if hardware is None:
        if strict is None:
            return device.plan(definition, signature, full, device.mode(), snapshot).selection_for_request()
        standing = KernelStatus(
            {**device.registry.blocked(), **device.health.blocked_kernels()}, device.registry.unready()
        )
        context = SelectionContext(device.registry.for_op(op), device.hardware, policy, standing, knobs)
        return decide(definition, request, context, cost=device.costs)
    # A caller that asks about this machine never needs them.
    from layerzero.backends.descriptors import descriptors_of, imagine_hardware

    if not isinstance(hardware, str | Hardware):
        raise TypeError(f"hardware needs a Hardware or the name of one, got {type(hardware).__name__}")
    target = imagine_hardware(hardware) if isinstance(hardware, str) else hardware
    elsewhere = request.replace(platform=target.platform, device=target.device)
    kernels = (*device.registry.for_op(op), *descriptors_of(op))
    context = SelectionContext(kernels, target, policy, options=knobs)
    return decide(definition, elsewhere, context)


def validate(op: str, /, *args: Any, **kwargs: Any) -> CallSpec:
    """The request that these arguments make, after every check of the op; nothing is selected or run.

    Raises: ValueError, TypeError: an argument is wrong, by name.

    Example:
        >>> import torch, layerzero as lz
        >>> lz.validate("rms_norm", torch.ones(2, 8)).dims
        {'N': 2, 'C': 8}
        >>> lz.validate("rms_norm", torch.ones(2, 8), torch.ones(4))
        Traceback (most recent call last):
        ValueError: weight needs 8 elements like x's last axis, got 4
    """
    definition = ops_table.get(op)
    _, full = checked_build(definition, args, kwargs)
    request = definition.check(full)
    if definition.validate_values is not None:
        definition.validate_values(full)
    return request


def list_kernels(op: str | None = None, *, backend: str | None = None) -> list[KernelInfo]:
    """The kernels registered on the default device, in registration order, with the state of each.

    Raises: UnknownOpError: `op` does not exist. ValueError: no kernel is of `backend`.
    """
    device = context_runtime().device()
    kernels: tuple[Kernel, ...] = device.kernels()
    if op is not None:
        kernels = device.registry.for_op(ops_table.get(op).name)
    if backend is not None:
        names = sorted({kernel.backend for kernel in device.kernels()})
        if backend not in names:
            raise ValueError(f"backend needs one of {', '.join(names)}, got {backend!r}")
        kernels = tuple(kernel for kernel in kernels if kernel.backend == backend)
    blocked = {**device.registry.blocked(), **device.health.blocked_kernels()}
    unready = device.registry.unready()
    return [
        KernelInfo(
            id=kernel.id,
            op=kernel.op,
            backend=kernel.backend,
            state="blocked" if kernel.id in blocked else "cold" if kernel.id in unready else "ready",
            default=kernel.default,
            capability=kernel.capability,
            blocked=blocked.get(kernel.id),
        )
        for kernel in kernels
    ]


def complete(device: LocalDevice, op: str) -> None:
    """Let the device know what cannot serve the op on it, too, so that it can be said why."""
    device.wait_for_costs()
    if device.registry.complete(op):
        device.refresh()


def _planned(op: Op, signature: Signature, full: Args, backend: str | None) -> Plan:
    device = context_device(full)
    complete(device, op.name)
    return device.plan(op, signature, full, device.mode(), context_snapshot(device, op.name, backend))


def _selection(op: Op, signature: Signature, full: Args, backend: str | None) -> Selection:
    """What a call gets, with the verdict on every kernel also where a table decided without asking them."""
    plan = _planned(op, signature, full, backend)
    if not plan.selection.ahead:
        return plan.selection_for_request()
    device = context_device(full)
    return device.table(op, context_snapshot(device, op.name, backend)).recompute(plan.request)


class _Captured(BaseException):
    """Carries the merged arguments out of a batching rule; never leaves this module."""

    def __init__(self, args: Args) -> None:
        super().__init__()
        self.merged = args


def merged_args(op: Op, args: Args, batch: int) -> Args:
    """The arguments that `batch` such calls become."""
    if op.batching is None or op.batching.batch_key(args) is None:
        return args

    def capture(merged: Args) -> Any:
        raise _Captured(merged)

    try:
        op.batching.run([args] * batch, capture)
    except _Captured as caught:
        return caught.merged
    return args
