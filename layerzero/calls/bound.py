"""`bind`: one op resolved once, handed back as a callable that only checks that it still may run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from layerzero._util import foreign
from layerzero.actors.device.local_device import LocalDevice
from layerzero.calls import inline_guards  # noqa: F401  puts itself where graphs are compiled
from layerzero.calls.blocking import (
    checked_build,
    context_device,
    device_of,
    show_compiler,
    snapshot_in,
    traced_route,
)
from layerzero.calls.scope import SCOPE
from layerzero.operators import front
from layerzero.ops import table as ops_table
from layerzero.ops.op import Args, Op
from layerzero.selection.dispatch import DispatchState
from layerzero.selection.modes import GRAD
from layerzero.selection.plan import Plan, signature_of
from layerzero.spec.kernel import Kernel

R_co = TypeVar("R_co", covariant=True)

Check = Callable[..., bool]

# torch's own guards on tensors, as torch.compile uses them: all of a call's metadata in one C call.
_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_TensorGuards: Any = getattr(_guards, "TensorGuards", None)


class Binding:
    """What a bound callable holds on to: the op, the fixed arguments, and the plan of one generation."""

    __slots__ = (
        "_backend", "_bits", "_count", "_device", "_op", "_scope", "base", "full", "plan", "snapshot", "tail",
    )  # fmt: skip

    def __init__(self, op: Op, device: LocalDevice, full: Args, count: int, backend: str | None) -> None:
        self._op = op
        self._device = device
        self._backend = backend
        self._scope = SCOPE.get()  # of who binds: who calls may be in another one
        self._bits = device.mode()
        self._count = count
        self.full = full
        self.tail = full[count:]
        self.base: DispatchState = device.snapshot
        self.snapshot: DispatchState = snapshot_in(self._scope, device, op.name, backend)
        self.plan: Plan = self._planned(full, self._bits)

    def _planned(self, full: Args, bits: int) -> Plan:
        self._device.table(self._op, self.snapshot).may_be_captured = True  # unguarded, it runs in any mode
        return self._device.plan(self._op, signature_of(self._op, full), full, bits, self.snapshot)

    def kernel(self) -> Kernel:
        """The kernel of the plan it holds."""
        kernel = self._device.registry.get(self.plan.kernel)
        if kernel is None:
            raise ValueError(
                f"bind needs an example with something to compute, got an empty {self._op.name} call"
            )
        return kernel

    def rebind(self) -> Plan:
        """The plan in the device's present generation."""
        base = self._device.snapshot
        self.snapshot = snapshot_in(self._scope, self._device, self._op.name, self._backend)
        self.plan = self._planned(self.full, self._bits)
        self.base = base  # last: a thread that finds it takes the plan
        return self.plan

    def run_unmatched(self, tensors: tuple[Any, ...]) -> Any:
        """A call whose tensors do not fit the guard: planned for itself, or traced."""
        if len(tensors) != self._count:
            raise TypeError(f"the bound {self._op.name} needs {self._count} arguments, got {len(tensors)}")
        full = (*tensors, *self.tail)
        if foreign.has_transformed(full):
            return traced_route(self._op)(full, self._backend)
        where, bound_device = device_of(full), self._device.device
        if where != bound_device:
            raise ValueError(f"the bound {self._op.name} needs tensors on {bound_device}, got {where}")
        if self._device.snapshot is not self.base:
            self.rebind()
        plan = self._planned(full, self._device.mode())
        try:
            return plan.call(*full)
        except Exception as error:
            return self.recover(plan, full, error)

    def recover(self, plan: Plan, full: Args, error: Exception) -> Any:
        """The next kernel's result after `plan`'s raised."""
        return self._device.recover(plan, full, error, self.snapshot)[0]


class BoundOp(Protocol[R_co]):
    """What `bind` returns."""

    binding: Binding

    def __call__(self, *args: Any) -> R_co: ...


def bind(
    op: str, /, *example: Any, guard: bool = True, backend: str | None = None, **fixed: Any
) -> BoundOp[Any]:
    """Resolve `op` for tensors like `example` and return a callable that takes such tensors.

    The positional arguments of the example are what each call passes anew; keyword arguments stay fixed.
    The callable always checks the generation: after a policy change, an open circuit or a quarantine it is
    bound again before it runs. With `guard` it also checks shape, strides, dtype, device and
    requires_grad, and plans a call that differs for itself; `guard=False` trusts the caller.
    The callable's `.binding.plan` is what it holds.

    Raises: NoKernelFoundError, ValueError, TypeError: as the call itself would.

    Example:
        >>> import torch, layerzero as lz
        >>> x, weight = torch.ones(2, 8), torch.ones(8)
        >>> with lz.start(scoped=True):
        ...     norm = lz.bind("rms_norm", x, weight)
        ...     norm(x, weight).shape
        torch.Size([2, 8])
    """
    definition = ops_table.get(op)
    _, full = checked_build(definition, example, fixed)
    device = context_device(full)
    binding = Binding(definition, device, full, len(example), backend)
    tail = binding.tail
    if guard:
        bound = _guarded(binding, device, tail, _guard_for(binding, full[: len(example)]))
    else:
        bound = _unguarded(binding, device, tail)
    show_compiler(bound, _compiled_form(definition, tail, backend))
    return cast("BoundOp[Any]", bound)


def _compiled_form(op: Op, tail: Args, backend: str | None) -> Callable[..., Any]:
    """What torch's compiler sees of a bound callable: a call of the op's operator."""
    operator, names = front(op), tuple(inspect.signature(op.build).parameters)

    def traced(*tensors: Any) -> Any:
        return operator(**dict(zip(names, (*tensors, *tail), strict=True)), backend=backend)

    return traced


def _guard_for(binding: Binding, example: Args) -> Check:
    """The guard for these tensors: strides and requires_grad count only where a verdict reads them."""
    capability = binding.kernel().capability
    strided = capability.contiguous or capability.last_stride1 or capability.alignment > 1
    return _tensor_check(example, strides=strided, grad=torch.is_grad_enabled())


def _guarded(binding: Binding, device: LocalDevice, tail: Args, check: Check) -> Callable[..., Any]:
    bits = device.mode()
    mode, may_be_foreign = device.mode, foreign.may_be_foreign

    def bound(*tensors: Any) -> Any:
        if not check(*tensors) or mode() != bits or may_be_foreign(tensors[0] if tensors else tail[0]):
            return binding.run_unmatched(tensors)
        plan = binding.plan if device.snapshot is binding.base else binding.rebind()
        try:
            return plan.call(*tensors, *tail)
        except Exception as error:
            return binding.recover(plan, (*tensors, *tail), error)

    exact = _exact_check(binding)
    if exact is None or device.capturing is not None or bits & ~GRAD:
        bound.binding = binding  # type: ignore[attr-defined]
        return bound
    return _guarded_exactly(binding, device, tail, exact, bound)


def _guarded_exactly(
    binding: Binding, device: LocalDevice, tail: Args, exact: Check, otherwise: Callable[..., Any]
) -> Callable[..., Any]:
    """Calls whose tensors are the example's in everything, under plain modes; `otherwise` takes the rest."""
    forward: Any = torch.autograd.forward_ad
    deterministic, autocast = torch.are_deterministic_algorithms_enabled, torch._C._is_any_autocast_enabled

    def bound(*tensors: Any) -> Any:
        try:
            if not exact(*tensors) or deterministic() or autocast() or forward._current_level >= 0:
                return otherwise(*tensors)
        except TypeError:  # another number of arguments, or no tensors
            return otherwise(*tensors)
        plan = binding.plan if device.snapshot is binding.base else binding.rebind()
        try:
            return plan.call(*tensors, *tail)
        except Exception as error:
            return binding.recover(plan, (*tensors, *tail), error)

    bound.binding = binding  # type: ignore[attr-defined]
    return bound


def _exact_check(binding: Binding) -> Check | None:
    """The C check that tensors are the example's in shape, strides, dtype, device and grad; None without one.

    Only where no argument requires grad: then torch's grad mode decides nothing and need not be read.
    """
    tensors = [value for value in binding.full if isinstance(value, Tensor)]
    example = binding.full[: len(binding.full) - len(binding.tail)]
    if _TensorGuards is None or any(t.requires_grad for t in tensors):
        return None
    if not example or any(type(value) is not Tensor for value in example):
        return None
    check: Check = _TensorGuards(*example, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def _unguarded(binding: Binding, device: LocalDevice, tail: Args) -> Callable[..., Any]:
    def bound(*tensors: Any) -> Any:
        plan = binding.plan if device.snapshot is binding.base else binding.rebind()
        try:
            return plan.call(*tensors, *tail)
        except Exception as error:
            return binding.recover(plan, (*tensors, *tail), error)

    bound.binding = binding  # type: ignore[attr-defined]
    return bound


def _tensor_check(example: Args, *, strides: bool, grad: bool) -> Check:
    """A check that arguments are like the example's: tensors by metadata, everything else by value."""
    count, are_tensors = len(example), all(isinstance(value, Tensor) for value in example)
    if count <= len(_CHECKS) and are_tensors and not strides and not grad:
        return _CHECKS[count - 1](*example)
    facts = [_facts(value, strides, grad) for value in example]

    def check(*values: Any) -> bool:
        return len(values) == count and all(
            _facts(v, strides, grad) == fact for v, fact in zip(values, facts, strict=True)
        )

    return check


def _facts(value: Any, strides: bool, grad: bool) -> Any:
    if isinstance(value, Tensor):
        extra = (value.stride() if strides else None, value.requires_grad if grad else None)
        return (value.shape, value.dtype, value.device, extra)
    return value


def _check_one(a: Tensor) -> Check:
    shape, dtype, device = a.shape, a.dtype, a.device

    def check(a: Tensor, *more: Any) -> bool:
        return a.shape == shape and a.dtype is dtype and a.device == device and not more

    return check


def _check_two(a: Tensor, b: Tensor) -> Check:
    first, shape, dtype, device = _check_one(a), b.shape, b.dtype, b.device

    def check(a: Tensor, b: Tensor, *more: Any) -> bool:
        return b.shape == shape and b.dtype is dtype and b.device == device and not more and first(a)

    return check


def _check_three(a: Tensor, b: Tensor, c: Tensor) -> Check:
    sa, sb, sc = a.shape, b.shape, c.shape
    da, db, dc = a.dtype, b.dtype, c.dtype
    device = a.device
    if b.device != device or c.device != device:
        raise ValueError("bound tensors need one device")

    def check(a: Tensor, b: Tensor, c: Tensor, *more: Any) -> bool:
        return (
            a.shape == sa and b.shape == sb and c.shape == sc
            and a.dtype is da and b.dtype is db and c.dtype is dc
            and a.device == device and b.device == device and c.device == device
            and not more
        )  # fmt: skip

    return check


_CHECKS: tuple[Callable[..., Check], ...] = (_check_one, _check_two, _check_three)
