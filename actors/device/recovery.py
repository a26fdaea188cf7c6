"""What happens when a kernel raises: the next one answers inside the same call, and health is updated.

A failure counts against a kernel only if another kernel answers the same call: when all raise, the data
is at fault, not the kernel. Nor does it count where the caller's transforms, modes or hooks had a part in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from layerzero._util import foreign, log
from layerzero.actors.device.kernel_calls import KernelCalls
from layerzero.health import Health
from layerzero.observe.counters import Counters
from layerzero.ops.op import Args, Op
from layerzero.selection.dispatch import DispatchState
from layerzero.selection.plan import Plan, check_outputs, reference_plan
from layerzero.selection.record import Selection, format_bytes
from layerzero.selection.workspace import workspace_bytes
from layerzero.spec.errors import (
    CudaGraphUnsafeError,
    KernelExecutionError,
    LayerZeroError,
    NoKernelFoundError,
)
from layerzero.spec.hardware import Hardware, free_memory
from layerzero.spec.reasons import Reason

_is_traced = torch.compiler.is_dynamo_compiling
_ARGUMENT_ERRORS = (ValueError, TypeError, IndexError)


class OnProbationError(Exception):
    """A kernel on probation does not take a call: its probes are taken, or none is spent on such a call."""

    reason = Reason.CIRCUIT_OPEN


@dataclass(frozen=True, eq=False)
class Recovery:
    """Fallback inside one call, and probes of kernels that rest.

    `_refresh_budget()` looks at free memory again, before the retry after an allocation failed;
    `_judge(plan, snapshot)` gives the verdict on every kernel for a plan that was decided ahead.
    """

    _calls: KernelCalls
    _health: Health
    _counters: Counters
    _hardware: Hardware
    _refresh_budget: Callable[[], object]
    _judge: Callable[[Plan, DispatchState | None], Selection]

    def recover(
        self, plan: Plan, args: Args, error: Exception, snapshot: DispatchState | None
    ) -> tuple[Any, Plan]:
        """Run the kernels after `plan.kernel` in its selection's order until one answers."""
        op = plan.op
        if isinstance(error, OnProbationError):
            plan = self._beside(plan, error)
            try:
                return self._checked(plan, plan.call, args), plan
            except Exception as raised:  # of that kernel, as if it had been chosen
                error = raised
        # Ours says what was asked wrongly; a user's own mode or hook says what it means to say.
        if isinstance(error, LayerZeroError) or foreign.is_raised_outside(error):
            raise error
        # Under vmap or grad no kernel's callable sees plain memory: only a composition of torch's
        # ops answers.
        if foreign.has_transformed(args):
            return self._run_composed(plan, args, error)
        # What the first kernel launched is in the graph already, and would be replayed with it.
        if "capture" in plan.request.modes:
            raise CudaGraphUnsafeError(
                f"{plan.kernel} raised {_short(error)} during a graph capture, which can take no other",
                kernel=plan.kernel,
            ) from error
        # A mode on the way may be what raised, so no kernel is blamed for it.
        quiet = foreign.in_foreign_mode()
        if not op.pure:
            if quiet:
                raise error
            raise self._error(
                plan.kernel, error, f"{op.name} changes its inputs, so no other kernel may repeat it"
            )
        if plan.selection.ahead:
            plan = self._judged(plan, snapshot)
        if is_out_of_memory(error):
            return self._retry_with_less_memory(plan, args, error)
        return self._try_next(plan, args, error, quiet)

    def _beside(self, plan: Plan, error: OnProbationError) -> Plan:
        """The plan of the next kernel, for a call that the plan's own did not take; it has not failed."""
        blocked = self._health.blocked_kernels()
        order = tuple(k for k in plan.selection.order if k != plan.kernel and k not in blocked)
        if not order:
            raise self._error(plan.kernel, error, "no other kernel takes the call")
        self._counters.add("fallbacks", kernel=plan.kernel, reason=_reason_of(error))
        log.debug("kernel.fell_back", kernel=plan.kernel, used=order[0], op=plan.op.name, error=str(error))
        record = self._record_fallback(plan, order[0], error).selection
        record = msgspec.structs.replace(record, why=f"fallback: {error}", order=order)
        call = self._calls.callable_for(plan.op, plan.selection, order[0])
        return Plan(plan.op, call, record, plan.request)

    @staticmethod
    def _checked(plan: Plan, call: Callable[..., Any], args: Args) -> Any:
        """What a kernel gives in place of the plan's own, with outputs as they have to be."""
        result = call(*args)
        check_outputs(plan.op, args, result, dtypes="autocast" not in plan.request.modes)
        return result

    def _judged(self, plan: Plan, snapshot: DispatchState | None) -> Plan:
        """A plan that was decided ahead with the verdicts on the other kernels, in the order to try them."""
        try:
            full = self._judge(plan, snapshot)
        except NoKernelFoundError:
            return plan  # a policy that came meanwhile leaves none
        order = (plan.kernel, *(kernel for kernel in full.order if kernel != plan.kernel))
        judged = msgspec.structs.replace(plan.selection, trace=full.trace, order=order)
        return Plan(plan.op, plan.call, judged, plan.request)

    def _try_next(self, plan: Plan, args: Args, error: Exception, quiet: bool) -> tuple[Any, Plan]:
        """The next kernel's answer, and a count against those that gave none unless `quiet`."""
        op = plan.op
        failed = [(plan.kernel, error)]
        for kernel_id in plan.selection.order:
            if kernel_id == plan.kernel or kernel_id in self._health.blocked_kernels():
                continue
            try:
                result = self._checked(plan, self._calls.callable_for(op, plan.selection, kernel_id), args)
            # Blamed only if a later kernel answers: until then the data may be at fault.
            except Exception as other:
                failed.append((kernel_id, other))
                continue
            if not quiet:
                for broken, why in failed:
                    self._count_failure(plan, broken, kernel_id, why)
                self._health.success(kernel_id)
            return result, self._record_fallback(plan, kernel_id, error)
        # Every kernel refused these arguments: the caller's mistake, in the words of the first.
        if quiet or isinstance(error, _ARGUMENT_ERRORS):
            raise error
        self._counters.add("failures", kernel=plan.kernel)
        self._health.failure(plan.kernel, _short(error), op=op.name)
        raise self._error(plan.kernel, error, "no other kernel could answer")

    def _run_composed(self, plan: Plan, args: Args, error: Exception) -> tuple[Any, Plan]:
        """Plain torch's answer to a transformed call; the kernel's error where there is none either."""
        plain = reference_plan(plan.op, plan.request)
        if plan.call is plain.call:
            raise error
        try:
            return plain.call(*args), plain
        except Exception as other:
            raise error from other

    def _retry_with_less_memory(self, plan: Plan, args: Args, error: Exception) -> tuple[Any, Plan]:
        """Run the kernel that states the smallest workspace, once; memory is not the first kernel's fault."""
        calls, op, request = self._calls, plan.op, plan.request
        self._counters.add("out_of_memory", kernel=plan.kernel)
        # torch keeps freed blocks of other sizes, which the retry may not fit into.
        if calls.device.type == "cuda":
            torch.cuda.empty_cache()
        self._refresh_budget()
        free, total = free_memory(calls.device), self._hardware.memory_bytes
        usage = f"{format_bytes(free)} of {format_bytes(total)} are free"
        failed = calls.registry.get(plan.kernel)
        others = [
            kernel
            for kernel_id in plan.selection.order
            if kernel_id != plan.kernel
            and kernel_id not in self._health.blocked_kernels()
            and (kernel := calls.registry.get(kernel_id)) is not None
            and (failed is None or workspace_bytes(kernel, request) <= workspace_bytes(failed, request))
        ]
        if not others:
            raise self._error(plan.kernel, error, f"no smaller kernel takes the call, and {usage}")
        smallest = min(others, key=lambda kernel: workspace_bytes(kernel, request)).id
        log.warning("kernel.out_of_memory", kernel=plan.kernel, used=smallest, op=op.name, usage=usage)
        try:
            result = self._checked(plan, self._calls.callable_for(op, plan.selection, smallest), args)
        except Exception as other:
            message = f"so did {smallest} ({_short(other)}); {usage}: make the call smaller"
            raise self._error(plan.kernel, error, message) from other
        self._counters.add("fallbacks", kernel=plan.kernel, reason=_reason_of(error))
        return result, self._record_fallback(plan, smallest, error)

    def several_weights_failed(self, plan: Plan, error: Exception) -> None:
        """Count what a kernel's function for several weights raised; each weight is launched by itself."""
        self._count_failure(plan, plan.kernel, f"{plan.kernel}, each weight by itself", error)
        if self._calls.spans is not None:
            self._calls.spans.fell_back(plan, plan.kernel, error)

    def _count_failure(self, plan: Plan, broken: str, used: str, error: Exception) -> None:
        self._counters.add("fallbacks", kernel=broken, reason=_reason_of(error))
        log.warning("kernel.fell_back", kernel=broken, used=used, op=plan.op.name, error=_short(error))
        self._health.failure(broken, _short(error), op=plan.op.name)

    def _record_fallback(self, plan: Plan, used: str, error: Exception) -> Plan:
        """The plan as it really ran, for `last_selection`."""
        if self._calls.spans is not None:
            self._calls.spans.fell_back(plan, used, error)
        accepted = plan.selection.candidate(used).accepted
        assert accepted is not None  # it is in the order
        record = msgspec.structs.replace(
            plan.selection,
            kernel=used,
            request=plan.request,
            transforms=accepted.transforms,
            expected_us=accepted.kernel_us + accepted.transform_us,
            why=f"fallback: {plan.kernel} raised {_short(error)}",
            fallback=plan.kernel,
        )
        return Plan(plan.op, plan.call, record, plan.request)

    def _error(self, kernel: str, error: Exception, what: str) -> KernelExecutionError:
        failure = KernelExecutionError(f"{kernel} raised {_short(error)}; {what}", kernel=kernel)
        failure.__cause__ = error
        return failure

    def probe(
        self, op: Op, kernel_id: str, call: Callable[..., Any], selection: Selection
    ) -> Callable[..., Any]:
        """`call` for callers that get a probe token of a half-open circuit, OnProbationError for others."""

        def probing(*args: Any) -> Any:
            if foreign.in_foreign_mode() or foreign.has_transformed(args):
                raise OnProbationError(f"{kernel_id} is on probation, and this call would say nothing of it")
            token = self._health.take_probe(kernel_id)
            # All places of this round are taken: a kernel on probation is tried by a few calls at a time.
            if token is None:
                raise OnProbationError(f"{kernel_id} is on probation, and other calls are its probes")
            with token:
                result = call(*args)
                check_outputs(op, args, result, dtypes="autocast" not in selection.request.modes)
                return result

        return probing


def with_guard(device: torch.device, op: Op, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` behind the op's guard, on the device whose data a guard may look at.

    torch's compiler sees the call alone. `.behind` is for arguments that a guard has given.
    """
    guard = op.validate_values
    # Looking at data on a GPU would wait for the device at every call.
    if guard is None or device.type != "cpu":
        return call

    def guarded(*args: Any) -> Any:
        return call(*args) if _is_traced() else call(*guard(args))

    guarded.behind = call  # type: ignore[attr-defined]
    return guarded


def validated_args(op: Op, args: Args, error: Exception) -> Args:
    """The arguments as the op's guard gives them, after a call with them raised `error`.

    Raises: ValueError: the data was wrong: what the guard said before the kernel, or what it says now.
    """
    if op.validate_values is None:
        return args
    try:
        return op.validate_values(args)
    except ValueError as fault:
        if type(error) is ValueError and error.args == fault.args:
            raise error from None
        raise fault from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the CPU, where torch has no type of its own for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


def _short(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= 200 else text[:197] + "..."


def _reason_of(error: BaseException) -> str:
    """The code of an error that has one, else its class: a label has no library's wording."""
    reason = getattr(error, "reason", None)
    return reason.value if isinstance(reason, Reason) else type(error).__name__
