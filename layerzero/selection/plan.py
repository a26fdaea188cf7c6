"""A plan: a selection ready to run, and the check of what its first run returns."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from torch import Tensor

from layerzero.ops.op import Args, Op, Signature
from layerzero.selection.record import Selection
from layerzero.spec.call_spec import CallSpec


@dataclass(eq=False, slots=True)
class BatchFacts:
    """What a call of one signature means to a batcher: its size, its groups by the addresses that decide."""

    tokens: int
    size_bytes: int
    shared_positions: tuple[int, ...] | None
    batch_keys: dict[Hashable, Hashable] = field(default_factory=dict)


class Plan:
    """A selection ready to run: `call(*args)` takes the op's full argument tuple.

    `request` is the call this plan was made for; `selection` may be shared by all requests of one key.
    `can_batch` says whether such a call may share a batch; `batch_facts` is what a batcher keeps of it.
    """

    __slots__ = ("batch_facts", "call", "can_batch", "expected_us", "kernel", "op", "request", "selection")

    def __init__(self, op: Op, call: Callable[..., Any], selection: Selection, request: CallSpec) -> None:
        self.op = op
        self.call = call
        self.selection = selection
        self.request = request
        self.kernel = selection.kernel
        self.expected_us = selection.expected_us
        self.can_batch = selection.kernel != "" and "grad" not in request.modes
        self.batch_facts: BatchFacts | None = None

    def for_request(self, request: CallSpec) -> Plan:
        """This plan for another request of the same key."""
        return self if request is self.request else Plan(self.op, self.call, self.selection, request)

    def with_output_check(self, request: CallSpec) -> Plan:
        """This plan for a new signature: until a run's outputs were right, each run's are compared.

        The comparison takes itself out of the plan, so that a hit after it pays nothing.
        """
        plan = Plan(self.op, self.call, self.selection, request)
        plan.call = CheckedCall(plan)
        return plan

    def check_outputs_again(self) -> None:
        """Compare the outputs of the next run, and of those after it until one was right."""
        if self.kernel and self.call.__class__ is not CheckedCall:
            self.call = CheckedCall(self)

    def selection_for_request(self) -> Selection:
        """The selection as made for this very request."""
        if self.selection.request is self.request:
            return self.selection
        return msgspec.structs.replace(self.selection, request=self.request)


class CheckedCall:
    """The call of a plan that has not run: each run's outputs are compared until a run's were right."""

    __slots__ = ("_call", "_plan")

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._call = plan.call

    def __call__(self, *args: Any) -> Any:
        plan = self._plan
        result = self._call(*args)
        check_outputs(plan.op, args, result, dtypes="autocast" not in plan.request.modes)
        plan.call = self._call
        return result


def check_outputs(op: Op, args: Args, result: Any, *, dtypes: bool) -> None:
    """Compare a kernel's result with `op.outputs(args)`, without reading data; autocast has its own `dtypes`.

    Raises: RuntimeError: they differ; a kernel that does this has failed, like one that raises.
    """
    specs = op.outputs(args)
    parts = result if isinstance(result, tuple) else (result,)
    if len(parts) != len(specs):
        raise RuntimeError(f"{op.name} needs {len(specs)} outputs, the kernel returned {len(parts)}")
    if isinstance(result, tuple) and len(specs) == 1:
        raise RuntimeError(f"{op.name} needs a tensor, the kernel returned a tuple of one")
    device = args[0].device
    for position, (part, spec) in enumerate(zip(parts, specs, strict=True)):
        name = f"output {position} of {op.name}"
        if not isinstance(part, Tensor):
            raise RuntimeError(f"{name} needs to be a tensor, the kernel returned {type(part).__name__}")
        if tuple(part.shape) != tuple(spec.shape):
            raise RuntimeError(
                f"{name} needs shape {tuple(spec.shape)}, the kernel returned {tuple(part.shape)}"
            )
        dtype = str(part.dtype).removeprefix("torch.")
        if dtypes and dtype != spec.dtype:
            raise RuntimeError(f"{name} needs dtype {spec.dtype}, the kernel returned {dtype}")
        if part.device != device:
            raise RuntimeError(f"{name} needs device {device}, the kernel returned {part.device}")


def reference_plan(op: Op, request: CallSpec) -> Plan:
    """The plan of a transformed or traced call: the op's definition in plain torch; no kernel is asked."""
    selection = Selection(
        op=op.name,
        kernel=f"reference.{op.name}",
        request=request,
        why="plain torch: the call is transformed or traced, or an operand has no memory to read",
    )
    plan = Plan(op, op.reference, selection, request)
    plan.can_batch = False
    plan.batch_facts = BatchFacts(1, 0, None)
    return plan


def signature_of(op: Op, args: Sequence[Any]) -> Signature:
    """The signature of a call given as the op's full argument tuple."""
    return op.build(**dict(zip(_parameters(op.build), args, strict=True)))[0]


@functools.cache
def _parameters(build: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(build).parameters)


def load_until_best(
    decide: Callable[[], Selection], warm: Callable[[tuple[str], CallSpec], object]
) -> Selection:
    """Decide anew after each load of what would be better, until nothing is; each kernel is loaded once.

    Where the last one stays unready, the selection still names it as `when_warm`.
    """
    tried, selection = set[str](), decide()
    while (better := selection.when_warm) is not None and better not in tried:
        tried.add(better)
        warm((better,), selection.request)
        selection = decide()
    return selection
