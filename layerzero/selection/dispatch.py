"""The hot path. Read this first.

One call: `op.build` makes a signature; the device's snapshot holds one table an op; the table maps the
signature to a plan; the plan is called. A hit is two attribute loads and two dict lookups: no lock, no
counter, no clock, no log. Everything below `Table.miss` is the cold path.

A snapshot is never changed, only inserted into and dropped whole: a policy change, a breaker or a newly
loaded kernel makes the next generation, which shares the tables whose verdicts cannot have changed. A miss
publishes into the table it started from, so that a slow computation never reaches a newer generation.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from layerzero._util import foreign, log
from layerzero.ops.op import Args, Op, Signature
from layerzero.selection.decide import CostModel, Knobs, Standing, decide
from layerzero.selection.key import KeyMaker
from layerzero.selection.outputs import check_outputs
from layerzero.selection.policy.policy import Policy
from layerzero.selection.record import Selection, nothing_to_do
from layerzero.spec.call_spec import Request
from layerzero.spec.errors import CudaGraphUnsafeError, NoKernelFoundError, SelectionTimeoutError
from layerzero.spec.hardware import Hardware
from layerzero.spec.kernel import Kernel

if TYPE_CHECKING:
    from layerzero.selection.agreed_terms import Terms
    from layerzero.selection.dispatch_table import Solved

GRAD, DETERMINISTIC, AUTOCAST, CAPTURE, FORWARD = 1, 2, 4, 8, 16
_MODES = 16  # what a plan is remembered under; FORWARD never is
_is_grad_enabled = torch.is_grad_enabled
_is_deterministic = torch.are_deterministic_algorithms_enabled
_is_autocast = torch._C._is_any_autocast_enabled
_forward_ad: Any = torch.autograd.forward_ad
# What `torch.cuda.is_current_stream_capturing` calls; a torch without CUDA has only that.
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)


# Each device reads one of these four at every call, in one frame.


def mode() -> int:
    """The bits of torch's modes that can change a choice, on a device that captures no graph."""
    bits = 1 if _is_grad_enabled() else 0
    if _is_deterministic():
        bits |= DETERMINISTIC
    if _is_autocast():
        bits |= AUTOCAST
    if _forward_ad._current_level >= 0:
        bits |= FORWARD
    return bits


def mode_without_grad() -> int:
    """`mode()` of a runtime that never differentiates."""
    bits = DETERMINISTIC if _is_deterministic() else 0
    return bits | AUTOCAST if _is_autocast() else bits


class _Rehearsal(threading.local):
    """Whether this thread plans for a capture that has not begun; `graphs.rehearsal` sets it."""

    on = False


REHEARSAL = _Rehearsal()


def capturing_mode() -> int:
    """`mode()` on CUDA, where the current stream may be capturing."""
    bits = mode()
    return bits | CAPTURE if REHEARSAL.on or _is_capturing() else bits


def capturing_mode_without_grad() -> int:
    """`capturing_mode()` of a runtime that never differentiates."""
    bits = DETERMINISTIC if _is_deterministic() else 0
    if _is_autocast():
        bits |= AUTOCAST
    return bits | CAPTURE if REHEARSAL.on or _is_capturing() else bits


class LaneFacts:
    """What a call of one signature means to a lane: its size, and its groups by the addresses that decide."""

    __slots__ = ("bytes", "groups", "shared", "tokens")

    def __init__(self, tokens: int, size: int, shared: tuple[int, ...] | None) -> None:
        self.tokens = tokens
        self.bytes = size
        self.shared = shared
        self.groups: dict[Hashable, Hashable] = {}


class Plan:
    """A selection ready to run: `call(*args)` takes the op's full argument tuple.

    `request` is the call this plan was made for; `selection` may be shared by all requests of one key.
    `joins` says whether such a call may share a batch; `lane` is what a lane remembers of its signature.
    """

    __slots__ = ("call", "expected_us", "joins", "kernel", "lane", "op", "request", "selection")

    def __init__(self, op: Op, call: Callable[..., Any], selection: Selection, request: Request) -> None:
        self.op = op
        self.call = call
        self.selection = selection
        self.request = request
        self.kernel = selection.kernel
        self.expected_us = selection.expected_us
        self.joins = selection.kernel != "" and "grad" not in request.modes
        self.lane: LaneFacts | None = None

    def at(self, request: Request) -> Plan:
        """This plan for another request of the same key."""
        return self if request is self.request else Plan(self.op, self.call, self.selection, request)

    def unproven(self, request: Request) -> Plan:
        """This plan for a new signature: until a run's outputs were right, each run's are compared.

        The comparison takes itself out of the plan, so that a hit after it pays nothing.
        """
        plan = Plan(self.op, self.call, self.selection, request)
        plan.call = Compared(plan)
        return plan

    def record(self) -> Selection:
        """The selection as made for this very request."""
        if self.selection.request is self.request:
            return self.selection
        return msgspec.structs.replace(self.selection, request=self.request)


class Compared:
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


class _Flight:
    """One computation in progress, for those who want its result."""

    __slots__ = ("done", "error", "owner", "plan")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.owner = threading.get_ident()
        self.plan: Plan | None = None
        self.error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """Everything that verdicts of one table depend on; equal rules may share a table.

    `yields` are those of `modes` that are given up where no kernel has them.
    """

    kernels: tuple[Kernel, ...]
    hardware: Hardware
    policy: Policy
    standing: Standing
    knobs: Knobs
    modes: frozenset[str] = frozenset()
    yields: frozenset[str] = frozenset()
    costs: Hashable = None
    watched: Hashable = None
    solved: Solved | None = None

    def fingerprint(self, op: str) -> Hashable:
        """Equal for two rule sets that decide every request of `op` alike."""
        own = tuple(k.id for k in self.kernels)
        rules = tuple(r for r in self.policy.rules if r.op in ("*", op))
        standing = self.standing
        blocked = tuple((k, standing.blocked[k].reason) for k in own if k in standing.blocked)
        unready = tuple(k for k in own if k in standing.unready)
        probing = tuple(k for k in own if k in standing.probing)
        built = None if standing.built is None else frozenset(b for b in standing.built if b[0] in own)
        # The kernels themselves, not their ids: a replaced implementation keeps its id.
        return (
            self.kernels,
            rules,
            blocked,
            unready,
            probing,
            built,
            self.knobs,
            self.modes,
            self.costs,
            self.watched,
            # A table ahead is compared with the whole policy: it was solved under all of it.
            (id(self.solved), self.policy.digest) if self.solved is not None else None,
        )


# Plans for captures by mode and signature, with their kernels: what a new generation is handed.
Rehearsed = Mapping[tuple[int, Signature], tuple[Plan, Kernel]]
_NOTHING: Mapping[Any, Any] = MappingProxyType({})


class Table:
    """The plans of one op in one generation: `hot[mode]` by signature, `keyed` by reduced request."""

    __slots__ = (
        "_compile", "_cost", "_flights", "_lock", "_maker", "_max_keys", "_rehearsed", "_rules", "_timeout_s",
        "computed", "fingerprint", "generation", "hot", "keyed", "op",
    )  # fmt: skip

    def __init__(
        self,
        op: Op,
        rules: Rules,
        compile_plan: Callable[[Op, Selection], Plan],
        *,
        generation: int,
        max_keys: int,
        cost: CostModel,
        timeout_s: float = 60.0,
        rehearsed: Rehearsed = _NOTHING,
    ) -> None:
        self.op = op
        self._rehearsed = rehearsed
        self.hot: list[dict[Signature, Plan]] = [{} for _ in range(2 * _MODES)]
        self.keyed: dict[Hashable, Plan] = {}
        self.generation = generation
        self.fingerprint = rules.fingerprint(op.name)
        self.computed = 0
        self._rules = rules
        self._compile = compile_plan
        self._cost = cost
        self._maker = KeyMaker(op, rules.kernels, rules.policy.conditions(op.name))
        self._max_keys = max_keys
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._flights: dict[Hashable, _Flight] = {}

    def miss(self, signature: Signature, args: Args, bits: int) -> Plan:
        """The plan for a call whose signature is new: checked, described, decided once per key, remembered.

        Raises: ValueError, TypeError: an argument is wrong. NoKernelFoundError: nobody may and can.
        """
        if foreign.transformed(args):
            return composed(self.op, self.describe(args, bits))  # not kept: it is no choice
        if bits & FORWARD:
            if foreign.has_tangents(args):
                return composed(self.op, self.describe(args, bits))
            bits &= ~FORWARD
            return self.hot[bits].get(signature) or self.miss(signature, args, bits)
        hash(signature)
        request = self.describe(args, bits)
        empty = self.op.empty
        if empty is not None and empty(args) is not None:
            plan = Plan(self.op, lambda *full: empty(full), nothing_to_do(request), request)
        elif (before := self._from_before(request, bits, signature)) is not None:
            return before  # and not remembered: the next rehearsal chooses among what is there then
        else:
            plan = (self._capturable(request, bits) or self.decided(request)).unproven(request)
        hot = self.hot[bits]
        if len(hot) >= self._max_keys:
            hot = self.hot[bits] = {}
        hot[signature] = plan
        return plan

    def _capturable(self, request: Request, bits: int) -> Plan | None:
        """The plan for a call under graph capture, where nothing may be chosen or loaded; None elsewhere."""
        if not bits & CAPTURE:
            return None
        if not REHEARSAL.on:
            known = self.keyed.get(self._maker.key(request))
            if known is None:
                raise CudaGraphUnsafeError(
                    f"{self.op.name} under graph capture needs a plan from before it: run the step once "
                    "inside layerzero.rehearse_capture(), got a call that was not rehearsed",
                    request=request,
                )
            return known
        try:
            return self.decided(request)
        except NoKernelFoundError as error:
            raise CudaGraphUnsafeError(
                f"{self.op.name} has no kernel that is safe under graph capture: {error}",
                trace=error.trace,
                request=request,
            ) from error

    def _from_before(self, request: Request, bits: int, signature: Signature) -> Plan | None:
        """The plan that an earlier generation rehearsed for this very call, where its kernel may still run.

        A kernel that is loaded between rehearsal and capture must not leave the capture without a plan.
        """
        plan, kernel = self._rehearsed.get((bits, signature), (None, None))
        if plan is None or REHEARSAL.on or self._maker.key(request) in self.keyed:
            return None
        if not any(kernel is own for own in self._rules.kernels):
            return None  # removed, or replaced by another of its name
        try:
            trace = self.fresh(request).trace
        except NoKernelFoundError:
            return None
        now = next((c.accepted for c in trace if c.kernel == plan.kernel and c.takes), None)
        before = plan.selection.candidate(plan.kernel).accepted
        return plan if now and before and now.transforms == before.transforms else None

    def rehearsed(self) -> Rehearsed:
        """The plans for captures of this generation and of those before."""
        plans = dict(self._rehearsed) if len(self._rehearsed) < self._max_keys else {}
        own = {kernel.id: kernel for kernel in self._rules.kernels}
        for bits in range(CAPTURE, _MODES):
            for signature, plan in list(self.hot[bits].items()):
                if plan.kernel:
                    plans[bits, signature] = plan, own[plan.kernel]
        return plans

    def describe(self, args: Args, bits: int) -> Request:
        """The request of a call under the given modes."""
        request = self.op.check(args)
        modes = set(self._rules.modes)
        if bits & GRAD and any(isinstance(a, Tensor) and a.requires_grad for a in args):
            if not self.op.differentiable:
                raise ValueError(
                    f"{self.op.name} has no gradient: needs inputs that do not require grad, "
                    "or torch.no_grad()"
                )
            modes.add("grad")
        if bits & DETERMINISTIC:
            modes.add("deterministic")
        if bits & AUTOCAST:
            modes.add("autocast")
        if bits & CAPTURE:
            modes.add("capture")
        return request.replace(modes=frozenset(modes)) if modes else request

    def decided(self, request: Request) -> Plan:
        """The plan for a request; one computation per key, however many threads ask at once."""
        key = self._maker.key(request)
        plan = self.keyed.get(key)
        if plan is not None:
            return plan
        with self._lock:
            plan = self.keyed.get(key)
            if plan is not None:
                return plan
            flight = self._flights.get(key)
            leads = flight is None
            if flight is None:
                flight = self._flights[key] = _Flight()
        if not leads and flight.owner != threading.get_ident():
            return self._follow(flight, request)
        return self._lead(key, flight, request)

    def _lead(self, key: Hashable, flight: _Flight, request: Request) -> Plan:
        try:
            plan = self._compile(self.op, self.fresh(request))
        except BaseException as error:
            flight.error = error
            raise
        else:
            flight.plan = plan
            with self._lock:
                if len(self.keyed) >= self._max_keys:
                    self.keyed = {}
                self.keyed[key] = plan
            return plan
        finally:
            with self._lock:
                self._flights.pop(key, None)
                self.computed += 1
            flight.done.set()

    def _follow(self, flight: _Flight, request: Request) -> Plan:
        if not flight.done.wait(self._timeout_s):
            raise SelectionTimeoutError(
                f"selection for {self.op.name} needs less than {self._timeout_s} s, and has not finished",
                request=request,
            )
        if flight.plan is None:
            assert flight.error is not None
            raise flight.error
        return flight.plan

    def fresh(self, request: Request, *, ahead: bool = True) -> Selection:
        """The decision for a request, computed anew whatever the table remembers.

        Without `ahead` no table of decisions made ahead has a say.

        Where no kernel has what a mode of `Rules.yields` asks for, the choice is made without it, with a
        warning.
        """
        asked = request.modes & self._rules.yields
        try:
            return self._decided_for(request, ahead)
        except NoKernelFoundError:
            if not asked:
                raise
        found = self._decided_for(request.replace(modes=request.modes - asked), ahead)
        log.warning("selection.without_mode", op=self.op.name, modes=sorted(asked), kernel=found.kernel)
        return found

    def _decided_for(self, request: Request, ahead: bool) -> Selection:
        rules, on_grid = self._rules, self._maker.on_grid(request)
        solved = rules.solved if ahead else None
        selection = decide(
            self.op,
            request,
            rules.kernels,
            rules.hardware,
            rules.policy,
            rules.standing,
            rules.knobs,
            priced_as=on_grid,
            cost=self._cost,
            solved=solved.says(request, on_grid, rules.policy) if solved is not None else None,
        )
        return msgspec.structs.replace(selection, generation=self.generation)


def composed(op: Op, request: Request) -> Plan:
    """The plan of a transformed or traced call: the op's definition in plain torch; no kernel is asked."""
    selection = Selection(
        op=op.name,
        kernel=f"reference.{op.name}",
        request=request,
        transforms=(),
        expected_us=0.0,
        why="plain torch: the call is transformed or traced, or an operand has no memory to read",
        trace=(),
        order=(),
    )
    plan = Plan(op, op.reference, selection, request)
    plan.joins = False
    plan.lane = LaneFacts(1, 0, None)
    return plan


class Snapshot:
    """One generation of a device's tables, filled op by op as they are first used.

    `terms` are those of a gang whose snapshot this is; `rehearsed` are the plans for captures of ops whose
    table an earlier generation had.
    """

    __slots__ = ("generation", "policy", "rehearsed", "tables", "terms")

    def __init__(
        self,
        generation: int,
        policy: Policy,
        tables: dict[str, Table] | None = None,
        *,
        terms: Terms | None = None,
        rehearsed: Mapping[str, Rehearsed] = _NOTHING,
    ) -> None:
        self.terms = terms
        self.rehearsed = rehearsed
        self.generation = generation
        self.policy = policy
        self.tables: dict[str, Table] = tables if tables is not None else {}


def positional(op: Op, args: Sequence[Any]) -> Signature:
    """The signature of a call given as the op's full argument tuple."""
    names = _parameters(op)
    return op.build(**dict(zip(names, args, strict=True)))[0]


_PARAMETERS: dict[str, tuple[str, ...]] = {}


def _parameters(op: Op) -> tuple[str, ...]:
    names = _PARAMETERS.get(op.name)
    if names is None:
        names = _PARAMETERS[op.name] = tuple(inspect.signature(op.build).parameters)
    return names
