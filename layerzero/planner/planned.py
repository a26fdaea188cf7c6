"""PlannedBlock: a block that runs by its plans, one for each signature of arguments."""

from __future__ import annotations

import functools
import inspect
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from layerzero._util import foreign, log
from layerzero.actors.device.local_device import LocalDevice
from layerzero.calls.blocking import context_runtime, context_snapshot
from layerzero.calls.scope import SCOPE
from layerzero.planner.block import Block
from layerzero.planner.choices import BlockSelector, Choices
from layerzero.planner.plan_file import SavedPlan, chosen_before, refuse_block, save_plans
from layerzero.planner.program import HeldTensors, Program, run_op_by_op
from layerzero.planner.record import PlanRecord, argument_key, digest_of, make_record, scope_key
from layerzero.planner.search import BEAM, Solution, search
from layerzero.planner.timing import measure_plans
from layerzero.planner.tracing import TURN, WeightPlace, places_of, trace
from layerzero.planner.values import PlacedBlock, place
from layerzero.selection.dispatch import DispatchState, PlanTable
from layerzero.selection.modes import AUTOCAST, CAPTURE, GRAD, REHEARSAL
from layerzero.spec.errors import ConfigurationError, CudaGraphUnsafeError, NoKernelFoundError

MADE = "plan.made"
# Signatures that a planned block keeps programs for, and blocks that a device keeps decisions for.
MAX_PROGRAMS = 64
MAX_DECISIONS = 256
# Loading a kernel makes the next snapshot; after so many the decision is taken as it is.
_ROUNDS = 3
# What a fusion counts for in the plan with most of them that is timed beside the others.
_FAVOUR = 0.5


class _Decision(NamedTuple):
    """What was decided for a block, the tables it follows from, and whether kernels were loaded for it."""

    tables: Mapping[str, PlanTable]
    solution: Solution
    record: PlanRecord
    is_warm: bool = False

    def serves(self, state: DispatchState, warm: bool) -> bool:
        """Whether a state decides all ops of the block alike, with kernels loaded where that is asked."""
        same = all(state.tables.get(name) is table for name, table in self.tables.items())
        return same and (self.is_warm or not warm)


class _Making(NamedTuple):
    """What a plan is made for: a device and modes, with kernels loaded first, timed, or from a file."""

    device: LocalDevice
    bits: int
    warm: bool
    measure: str
    load: bool


@dataclass(slots=True, eq=False)
class _Entry:
    """A program with the state that its choices were made in, and what turns outputs into a result.

    `frozen` are the weights that wanted no gradient where one could have flowed, `places` where modules keep
    weights.
    """

    program: Program
    record: PlanRecord
    unpack: Callable[[list[Any]], Any]
    state: DispatchState
    tables: Mapping[str, PlanTable]
    saved: SavedPlan
    device: LocalDevice
    bits: int
    is_flat: bool
    frozen: tuple[Tensor, ...]
    places: tuple[WeightPlace, ...]

    def is_at_hand(self, args: tuple[Any, ...]) -> bool:
        """Whether these arguments mean this plan, outside every scope, with nothing changed: the usual."""
        device = self.device
        try:
            return (
                self.is_flat
                and device.snapshot is self.state
                and SCOPE.get() is None
                and device.mode() == self.bits
                and not foreign.may_be_foreign(args[0] if args else None)
                and self.program.is_for(*args)
                and not self.has_other_weights()
            )
        except (AttributeError, TypeError):
            return False  # other arguments, or one that is no tensor

    def has_other_weights(self) -> bool:
        """Whether a weight wants a gradient by now that wanted none, or a module has another in its place."""
        replaced = any(weights.get(name) is not weight for weights, name, weight in self.places)
        return replaced or any(weight.requires_grad for weight in self.frozen)

    def holds(self, state: DispatchState) -> bool:
        """Whether a later state decides all of its ops alike, for weights as they are."""
        if self.has_other_weights():
            return False
        if state is not self.state:
            if any(state.tables.get(name) is not table for name, table in self.tables.items()):
                return False
            self.state = state
        return True


_DECISIONS: WeakKeyDictionary[LocalDevice, OrderedDict[Any, _Decision]] = WeakKeyDictionary()


class PlannedBlock:
    """A block that runs by its plans: one for each signature of arguments, made when it is first called so.

    It is called as the function or the block that it was made of, gives the same results, and may be given
    to `layerzero.compile`. A policy, a kernel's health or a measurement that changes a choice makes the plan
    anew at the next call. Weights that the block holds are joined and converted once; `refresh_weights` does
    it again, and so does each call that finds one changed.
    """

    def __init__(
        self,
        source: Callable[..., Any] | Block,
        *,
        beam: int = BEAM,
        measure: str = "",
        path: str = "",
        saved: tuple[SavedPlan, ...] = (),
    ) -> None:
        self._source = source
        self._beam = beam
        self._measure = measure
        self._path = path
        self._weights = HeldTensors()
        self._saved = {(plan.block, plan.modes): plan for plan in saved}
        self._entries: OrderedDict[Any, _Entry] = OrderedDict()
        self._last: _Entry | None = None
        if isinstance(source, Block):
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            self.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in source.inputs])
            self.__name__ = self.__qualname__ = "block"
        else:
            functools.update_wrapper(self, source, updated=())
            called = source.forward if isinstance(source, torch.nn.Module) else source
            self.__signature__ = inspect.signature(called)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's results, by the plan for these arguments.

        Raises: NoKernelFoundError: an op has no kernel that may and can take it, any more. ValueError,
            TypeError: an argument is wrong, by name. BlockError: the function cannot be traced for them.
            CudaGraphUnsafeError: a graph is being captured, and there is no plan from before.
        """
        tensors: Sequence[Any] = args
        entry = self._last
        if entry is None or kwargs or not entry.is_at_hand(args):
            leaves = pytree.tree_leaves((args, kwargs))
            # A kernel would not see what flows under a transform or a trace, or with tangents; ops answer it.
            if foreign.has_transformed(leaves) or foreign.has_tangents(leaves):
                return self._run_as_written(*args, **kwargs)
            entry, tensors = self._find(args, kwargs)
        program = entry.program
        for held_tensor in program.held:
            held_tensor.refresh()
        return entry.unpack(program.run(*tensors))

    def _run_as_written(self, *args: Any, **kwargs: Any) -> Any:
        """Each op by itself."""
        if not isinstance(self._source, Block):
            return self._source(*args, **kwargs)
        return _as_written(run_op_by_op(self._source, self.__signature__.bind(*args, **kwargs).args))

    @property
    def record(self) -> PlanRecord:
        """The plan that was made or used last."""
        assert self._last is not None
        return self._last.record

    @property
    def records(self) -> tuple[PlanRecord, ...]:
        """Every plan that is kept, the one for the latest signature last."""
        return tuple(entry.record for entry in self._entries.values())

    @property
    def program(self) -> str:
        """The text of the program that was made or used last."""
        assert self._last is not None
        return self._last.program.source

    def refresh_weights(self) -> None:
        """Join and convert weights anew; a captured graph reads them from there."""
        for held_tensor in {held for entry in self._entries.values() for held in entry.program.held}:
            held_tensor.refresh(always=True)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write every plan that is kept: what `layerzero.load_plan` reads.

        Raises: FileExistsError: `path` is another kind of file.
        """
        device, policy = device_of([]), context_runtime().policy.digest
        save_plans(path, tuple(entry.saved for entry in self._entries.values()), device, policy)

    # -- finding and making ------------------------------------------------------------------------------

    def prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, warm: bool = False, load: bool = False
    ) -> None:
        """Make the plan for these arguments; `warm` loads first, `load` needs it to be in the file."""
        self._find(args, kwargs, warm=warm, load=load)

    def _find(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, warm: bool = False, load: bool = False
    ) -> tuple[_Entry, Sequence[Tensor]]:
        if isinstance(self._source, Block) and kwargs:
            args, kwargs = inspect.signature(self).bind(*args, **kwargs).args, {}
        leaves: Any = args
        spec = None
        if kwargs or not all(isinstance(value, Tensor) for value in args):
            leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        device = device_of(tensors)
        bits = device.mode()
        state = context_snapshot(device, "", None)
        key = (bits, spec, scope_key(state, device, bits), *map(argument_key, leaves))
        entry = self._entries.get(key)
        # What was rehearsed holds for the capture behind it: a kernel that is loaded in between, or a policy,
        # asks for another capture.
        is_captured = bool(bits & CAPTURE) and not REHEARSAL.on
        if entry is None or not (entry.holds(state) or is_captured):
            if is_captured:
                raise CudaGraphUnsafeError(
                    "a planned block under graph capture needs a plan from before it: run the step once "
                    "inside layerzero.rehearse_capture(), got arguments that were not rehearsed"
                )
            # Timed once: a plan that is made anew in the middle of traffic is not.
            making = _Making(device, bits, warm, self._measure if entry is None else "", load)
            with TURN.lock:
                known_entry = self._entries.get(key)
                if known_entry is not entry and known_entry is not None and known_entry.holds(state):
                    entry = known_entry  # of another thread, meanwhile
                else:
                    entry = self._entries[key] = self._make(args, kwargs, tensors, making)
                while len(self._entries) > MAX_PROGRAMS:
                    self._entries.popitem(last=False)
        self._last = entry
        return entry, tensors

    def _make(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], making: _Making
    ) -> _Entry:
        making.device.wait_for_costs()
        # One tensor may be two arguments, or a weight and an argument: each is another one to the plan.
        args, kwargs = pytree.tree_map_only(Tensor, _aliased, (args, kwargs))
        tensors = [_aliased(tensor) for tensor in tensors]
        block = self._source if isinstance(self._source, Block) else trace(self._source, args, kwargs)
        placed = place(block, tensors)
        decision = self._decide(placed, making, tensors)
        for table in decision.tables.values():
            table.may_be_captured |= bool(making.bits & CAPTURE)
        state = context_snapshot(making.device, "", None)
        program = Program(placed, making.device, state, decision.solution, self._weights)
        held_bytes = sum(each.own_bytes for each in program.held)
        record = msgspec.structs.replace(decision.record, held_bytes=held_bytes)
        saved = SavedPlan.of(
            record.block, making.bits, decision.solution, record.expected_us, state.policy.digest
        )
        weights = [value.constant for value in placed.values if value.constant is not None]
        frozen = tuple(w for w in weights if making.bits & GRAD and not w.requires_grad)
        is_flat = not kwargs and all(isinstance(value, Tensor) for value in args)
        is_flat = is_flat and not making.bits & AUTOCAST  # to one of several dtypes
        return _Entry(
            program, record, block.unpack or _as_written, state, decision.tables, saved,
            making.device, making.bits, is_flat, frozen, places_of(self._source, weights),
        )  # fmt: skip

    def _decide(self, placed: PlacedBlock, making: _Making, tensors: list[Tensor]) -> _Decision:
        """What was decided for such a block, or what is decided now."""
        device, bits = making.device, making.bits
        state = context_snapshot(device, "", None)
        digest = digest_of(placed)
        key = (digest, bits, self._beam, making.measure, scope_key(state, device, bits))
        decisions = _DECISIONS.setdefault(device, OrderedDict())
        saved = self._saved.get((digest, bits))
        if saved is None and making.load:
            raise refuse_block(self._path, digest, tuple(self._saved.values()))
        if saved is not None and saved.policy != state.policy.digest:
            saved = None  # another policy is in force since: decided anew
        known_decision = decisions.get(key) if saved is None else None
        if known_decision is not None and known_decision.serves(state, making.warm):
            return known_decision
        for attempt in range(_ROUNDS):
            warm = making.warm and attempt < _ROUNDS - 1
            judge = BlockSelector(device, bits, partial(context_snapshot, device), warm=warm)
            state = context_snapshot(device, "", None)
            choices = Choices(placed, judge, can_join=placed.can_join(grad=bool(bits & GRAD)))
            if context_snapshot(device, "", None) is state:
                break
        decision = self._search(placed, choices, state, saved, making.load)  # pyright: ignore[reportPossiblyUnboundVariable]
        if making.measure and saved is None:
            decision = self._measured(placed, choices, device, state, decision, tensors, making.measure)  # pyright: ignore[reportPossiblyUnboundVariable]
        if saved is None:  # what a file says is no decision for others
            decisions[key] = decision._replace(is_warm=making.warm)
        while len(decisions) > MAX_DECISIONS:
            decisions.popitem(last=False)
        record = decision.record
        log.info(
            MADE, block=record.block, steps=len(record.steps), fused=[list(ops) for ops in record.fused_ops],
            expected_us=round(record.expected_us, 1), op_by_op_us=round(record.op_by_op_us, 1),
            transform_cost_total=round(record.transform_cost_total, 1), policy=record.policy,
            plan=record.digest,
        )  # fmt: skip
        return decision

    def _search(
        self, placed: PlacedBlock, choices: Choices, state: DispatchState, saved: SavedPlan | None, load: bool
    ) -> _Decision:
        before = None if saved is None else chosen_before(saved, choices, placed, self._path, needed=load)
        solution = before or search(choices.problem(), self._beam)
        alone = search(choices.problem(frozenset()), self._beam)
        if solution is None:
            raise NoKernelFoundError("no plan for the block: kernels do not read what others write")
        return _decision(placed, choices, solution, alone.cost_us if alone else solution.cost_us, state)

    def _measured(
        self,
        placed: PlacedBlock,
        choices: Choices,
        device: LocalDevice,
        state: DispatchState,
        decision: _Decision,
        tensors: list[Tensor],
        launch: Any,
    ) -> _Decision:
        """The plan that is fastest where they are timed: the one at hand, and those with other fusions."""
        if state.agreed_terms is not None:
            raise ConfigurationError("measure needs one process: ranks of a group would time different plans")
        every = frozenset(a.payload.kind for a in choices.alternatives if a.payload.kind)
        tried = [(every, _FAVOUR), *((every - {kind}, 1.0) for kind in sorted(every)), (frozenset(), 1.0)]
        solutions = {_fusions_of(decision.solution): decision.solution}
        for kinds, favour in tried:
            solution = search(choices.problem(kinds, favour), self._beam)
            if solution is not None:
                solutions.setdefault(_fusions_of(solution), solution)
        runs = {
            name: Program(placed, device, state, solution, self._weights).run
            for name, solution in solutions.items()
        }
        kernels = (a.payload.kernel for each in solutions.values() for a in each.alternatives)
        measured_us = measure_plans(runs, tensors, device, launch, filter(None, kernels))
        best = min(measured_us, key=lambda name: measured_us[name])
        fastest = _decision(placed, choices, solutions[best], decision.record.op_by_op_us, state)
        return fastest._replace(record=msgspec.structs.replace(fastest.record, measured_us=measured_us))


def _fusions_of(solution: Solution) -> str:
    """A name for a solution: how often it fuses what."""
    kinds = Counter(a.payload.kind for a in solution.alternatives if a.payload.kind)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none"


def _decision(
    placed: PlacedBlock, choices: Choices, solution: Solution, alone_us: float, state: DispatchState
) -> _Decision:
    policy = state.policy.digest[:12] if state.policy else ""
    record = make_record(placed, choices, solution, alone_us, policy)
    tables = {name: table for name, table in list(state.tables.items()) if name in choices.ops}
    return _Decision(tables, solution, record)


def _as_written(outputs: list[Any]) -> Any:
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _aliased(tensor: Tensor) -> Tensor:
    return tensor.data.requires_grad_(tensor.requires_grad)


def device_of(tensors: list[Tensor]) -> LocalDevice:
    """The device of the first tensor, the default one where there is none."""
    return context_runtime().device(tensors[0].device if tensors else None)
