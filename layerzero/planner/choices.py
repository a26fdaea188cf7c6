"""What a block may be made of: each op and fusion with the kernels that take it, by the formats they read."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from layerzero._util import foreign
from layerzero.actors.device.local_device import LocalDevice
from layerzero.operators import front
from layerzero.ops.op import Args, Op
from layerzero.planner.fusions import Fusion, JoinedWeights, OutputSlice, find_fusions
from layerzero.planner.search import CoverOption, CoverProblem
from layerzero.planner.values import (
    READS_MEMORY,
    PlacedBlock,
    PlacedOp,
    Slot,
    TensorFormat,
    format_of,
    slots_of,
    swapped_format,
)
from layerzero.selection.context import SelectionOptions
from layerzero.selection.decide import pick
from layerzero.selection.dispatch import DispatchState
from layerzero.selection.plan import load_until_best
from layerzero.selection.record import Candidate, Selection
from layerzero.selection.transform import COPY_LAUNCH_US, VIEW_US
from layerzero.spec.errors import NoKernelFoundError

# Of the formats in which fusions before an op may leave its operands, so many combinations are looked at.
MAX_COMBINATIONS = 4
# What a selection may do inside a step; casts and copies are conversions between steps.
_INSIDE = frozenset({"layout", "split"})


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One way to run one op or several.

    `full` are the arguments of `op` with slots; None where the op is one of torch, or is chosen as it is
    called. `selection` has the kernel; `formats` are those that it reads its values in, `gives` says which
    part of which output each value is, `cost_us` the price without what its selection transforms inside the
    step, which is `within_us`.
    """

    covers: frozenset[int]
    op: Op | None
    full: Args | None
    selection: Selection | None
    formats: Mapping[int, TensorFormat]
    gives: Mapping[int, OutputSlice]
    cost_us: float
    kind: str = ""
    within_us: float = 0.0

    @property
    def kernel(self) -> str:
        """The kernel's id, or a word for what is no kernel of ours."""
        return self.selection.kernel if self.selection is not None else ""


class RefusedFusion(msgspec.Struct, frozen=True):
    """A fusion that no kernel takes, and the first words of why."""

    kind: str
    covers: tuple[str, ...]
    op: str
    why: str


@dataclass(frozen=True, slots=True, eq=False)
class BlockSelector:
    """Asks a device for its verdicts; `snapshot(op, backend)` is the state in force, `warm` loads first."""

    device: LocalDevice
    bits: int
    snapshot: Callable[[str, str | None], DispatchState]
    warm: bool = False

    def select(self, op: Op, full: Args, backend: str | None = None) -> Selection:
        """The decision on a call of tensors without numbers; once nothing better is cold, where `warm`.

        Raises: NoKernelFoundError: no kernel takes it. ValueError, TypeError: an argument is wrong.
        """

        def decide() -> Selection:
            table = self.device.table(op, self.snapshot(op.name, backend))
            return table.recompute(table.describe(full, self.bits), use_dispatch_table=True)

        with foreign.outside():
            return load_until_best(decide, self.device.warm) if self.warm else decide()


class Choices:
    """Everything that a placed block may be made of, as a problem for the search."""

    def __init__(self, block: PlacedBlock, judge: BlockSelector, *, can_join: bool) -> None:
        settings = judge.device.settings
        self._block, self._judge, self._can_join = block, judge, can_join
        self._strict = settings.strict
        self._options = SelectionOptions(settings.strict, settings.tie_band, settings.default_gain)
        # The formats in which each value may come; its own first.
        self._formats: dict[int, list[TensorFormat]] = {
            place: [format_of(value.fake)] for place, value in enumerate(block.values)
        }
        self.alternatives: list[CoverOption] = []
        # The ops whose kernels were judged, and the reasons against each kernel.
        self.ops: set[str] = set()
        self._against: dict[str, str] = {}
        self.refused: list[RefusedFusion] = []
        fusions = find_fusions(block, can_join=can_join)
        for place, placed in enumerate(block.ops):
            for fusion in fusions:
                if min(fusion.covers) == place:
                    self._add_fusion(fusion)
            self._add_op(place, placed)

    def problem(self, kinds: frozenset[str] | None = None, favour: float = 1.0) -> CoverProblem:
        """The problem to search; with `kinds` only fusions of these, at `favour` times their price."""
        alternatives = [
            each if not each.payload.kind or favour == 1.0 else replace(each, cost_us=each.cost_us * favour)
            for each in self.alternatives
            if kinds is None or not each.payload.kind or each.payload.kind in kinds
        ]
        block = self._block
        produced = {value for op in block.ops for value in op.outputs}
        input_formats = {
            place: format_of(value.fake) for place, value in enumerate(block.values) if place not in produced
        }
        output_formats = {
            value: format_of(block.values[value].fake) for value in block.outputs if value in produced
        }
        return CoverProblem(
            [op.after for op in block.ops], alternatives, self.convert_us, input_formats, output_formats
        )

    def convert_us(self, value: int, before: Any, after: Any) -> float:
        """A read and a write; nothing for what the block holds, which is converted when it is planned."""
        if before == after:
            return 0.0
        fake = self._block.values[value].fake
        if after not in (self._block.dense(value, after.dtype), self._block.swapped(value, after.dtype)):
            return math.inf
        if self._can_join and self._block.held(value) is not None:
            return 0.0
        if self._strict:
            return math.inf
        item_bytes = getattr(torch, before.dtype).itemsize + getattr(torch, after.dtype).itemsize
        moved: int = fake.numel() * item_bytes
        return COPY_LAUNCH_US + moved / self._judge.device.hardware.bandwidth * 1e6

    # -- ops of torch, and what is chosen as it is called --------------------------------------------------

    def _add_op(self, place: int, placed: PlacedOp) -> None:
        op, full = placed.op, placed.full
        if op is None or full is None:
            self._add_torch(place, placed)
            return
        plain = self._block.filled(full, {})
        if op.stochastic or (op.empty is not None and op.empty(plain) is not None):
            self._add_called(place, placed)
            return
        alone = Fusion("", frozenset({place}), op, full, _own_outputs(placed))
        self._add_kernels(alone, placed.kwargs.get("backend"))

    def _add_called(self, place: int, placed: PlacedOp) -> None:
        """An op that draws numbers, or has nothing to compute: called as it is written."""
        reads, produced = (
            {value: self._formats[value][0] for value in values}
            for values in (placed.reads(), placed.outputs)
        )
        choice = Choice(frozenset({place}), None, None, None, reads, _own_outputs(placed), COPY_LAUNCH_US)
        self._add(choice, produced)

    def _add_torch(self, place: int, placed: PlacedOp) -> None:
        gives = _own_outputs(placed)
        combinations = self._combinations(placed.reads())
        for formats in itertools.islice(combinations, 1 if placed.written.op in READS_MEMORY else None):
            try:
                results = self._block.evaluate(placed, formats)
            except (RuntimeError, TypeError, ValueError):
                continue  # it does not take operands in these formats
            tensors = [result for result in results if isinstance(result, Tensor)]
            produced = {value: format_of(t) for value, t in zip(placed.outputs, tensors, strict=True)}
            operands = [self._block.fake(value, form) for value, form in formats.items()]
            cost_us = self._torch_us(operands, tensors)
            self._add(Choice(frozenset({place}), None, None, None, formats, gives, cost_us), produced)

    def _torch_us(self, operands: Sequence[Tensor], results: Sequence[Tensor]) -> float:
        """A view, or a launch with everything read and written once."""
        aliases: Any = torch._C
        if all(any(aliases._is_alias_of(result, operand) for operand in operands) for result in results):
            return VIEW_US
        moved = sum(tensor.numel() * tensor.element_size() for tensor in (*operands, *results))
        return COPY_LAUNCH_US + moved / self._judge.device.hardware.bandwidth * 1e6

    def _combinations(self, values: Sequence[int]) -> Iterator[dict[int, TensorFormat]]:
        """The formats in which these values may come together."""
        product = itertools.product(*(self._formats[value] for value in values))
        for formats in itertools.islice(product, MAX_COMBINATIONS):
            yield dict(zip(values, formats, strict=True))

    def _add_fusion(self, fusion: Fusion) -> None:
        try:
            self._add_kernels(fusion)
        except (NoKernelFoundError, ValueError, TypeError) as error:
            names = tuple(self._block.ops[place].written.name for place in sorted(fusion.covers))
            why = str(error).partition("\n")[0]
            self.refused.append(RefusedFusion(fusion.kind, names, fusion.op.name, why))

    def _add_kernels(self, fusion: Fusion, backend: str | None = None) -> None:
        """An alternative for each assignment of formats to the operands, with the best kernel for it.

        Raises: NoKernelFoundError: there is none for the formats in which the operands come.
        """
        op, full = fusion.op, fusion.full
        joined = (value for leaf in full if isinstance(leaf, JoinedWeights) for value in leaf.values)
        values = dict.fromkeys((*slots_of(full), *joined))
        operands = [full[place].value for place in op.operands if isinstance(full[place], Slot)]
        others = {value: self._formats[value][0] for value in values if value not in operands}
        seen: list[dict[int, TensorFormat]] = []
        refusal: NoKernelFoundError | None = None
        pending = [others | combination for combination in self._combinations(operands)]
        pending += [] if self._strict else self._converted(op, full, pending[0], operands)
        accepted_count = 0
        while pending:
            formats = pending.pop(0)
            if formats in seen:
                continue
            seen.append(formats)
            try:
                fakes = self._fakes(full, formats)
                selection = self._judge.select(op, fakes, backend)
            except NoKernelFoundError as error:
                refusal = error
                self._note(op, error.trace)
                continue
            except (ValueError, TypeError):
                if len(seen) == 1:  # as they came; the op may refuse others side by side, dtypes that differ
                    raise
                continue
            self._note(op, selection.trace)
            accepted_count += self._add_best(fusion, formats, selection, fakes)
            if len(seen) == 1 and op.castable and not (op.uncopied_operands or op.writes or self._strict):
                # The dtypes to which kernels that take the call would cast its operands.
                taken = (c.accepted for c in selection.trace if c.eligible and c.accepted is not None)
                casts = (t.after for each in taken for t in each.transforms if t.kind == "cast")
                pending += [self._cast(formats, dtype) for dtype in dict.fromkeys(casts)]
        if not accepted_count and refusal is not None:
            raise refusal

    def _note(self, op: Op, trace: Sequence[Candidate]) -> None:
        self.ops.add(op.name)
        for candidate in trace:
            if candidate.rejected:
                self._against.setdefault(candidate.kernel, "; ".join(map(str, candidate.rejected)))

    def why_not(self, kernel: str) -> str:
        """The reasons against a kernel in the first call that it did not take; empty where it took all."""
        return self._against.get(kernel, "")

    def _converted(
        self, op: Op, full: Args, formats: dict[int, TensorFormat], operands: Sequence[int]
    ) -> list[dict[int, TensorFormat]]:
        """The operands dense, and laid out as the op's other layout has them."""
        dense = {value: self._block.dense(value, formats[value].dtype) for value in operands}
        converted = [formats | dense]
        if op.layouts is not None and full[op.layouts.argument] in op.layouts.names:
            swapped = {value: self._block.swapped(value, formats[value].dtype) for value in operands}
            converted.append(formats | swapped)
        return converted

    def _cast(self, formats: dict[int, TensorFormat], dtype: str) -> dict[int, TensorFormat]:
        """Every floating-point tensor in another dtype; codes of eight bits stay what they are."""
        kinds = {value: getattr(torch, form.dtype) for value, form in formats.items()}
        wide = (value for value, kind in kinds.items() if kind.is_floating_point and kind.itemsize > 1)
        return formats | {value: self._block.dense(value, dtype) for value in wide}

    def _fakes(self, full: Args, formats: Mapping[int, TensorFormat]) -> Args:
        def fill(leaf: Any) -> Any:
            if isinstance(leaf, JoinedWeights):
                parts = [self._block.fake(value, formats.get(value)) for value in leaf.values]
                with foreign.outside(), self._block.mode:
                    return torch.cat(parts)
            return self._block.filled(leaf, dict(formats))

        return tuple(fill(leaf) for leaf in full)

    def _add_best(
        self, fusion: Fusion, formats: dict[int, TensorFormat], selection: Selection, fakes: Args
    ) -> bool:
        """The best of the kernels that read these formats as they are; False where there is none."""
        kind, covers, op = fusion.kind, fusion.covers, fusion.op
        is_swapped = op.layouts is not None and all(
            format_of(fakes[place]) == swapped_format(fakes[place], formats[fusion.full[place].value].dtype)
            for place in op.layouts.operands if isinstance(fusion.full[place], Slot)
        )  # fmt: skip
        inside = _INSIDE | {"contiguous"} if is_swapped else _INSIDE
        eligible = [c for c in selection.trace if c.eligible and _kinds(c) <= inside]
        eligible = [c for c in eligible if "contiguous" not in _kinds(c) or "layout" in _kinds(c)]
        pool = [c for c in eligible if c.accepted is not None and c.accepted.ready] or eligible
        if not pool:
            return False
        best = next((c for c in pool if c.kernel == selection.kernel), None)
        why = selection.why
        if best is None:
            kernels = {k.id: k for k in self._judge.device.registry.for_op(op.name)}
            best, why = pick(pool, kernels, self._options)
        accepted = best.accepted
        assert accepted is not None
        within_us = sum(t.cost_us for t in accepted.transforms if t.kind in _INSIDE)
        order = tuple(dict.fromkeys((best.kernel, *selection.order)))
        chosen = msgspec.structs.replace(
            selection, kernel=best.kernel, order=order, why=why, transforms=accepted.transforms,
            expected_us=accepted.kernel_us + within_us,
            fused_ops=tuple(self._block.ops[place].written.op for place in sorted(covers)) if kind else (),
        )  # fmt: skip
        with foreign.outside(), self._block.mode:
            names = inspect.signature(op.build).parameters
            results = front(op)(**dict(zip(names, fakes, strict=True)))
        outputs = results if isinstance(results, tuple) else (results,)
        produced = {value: format_of(_part(outputs, take)) for value, take in fusion.gives.items()}
        # The kernel's own share of what counts after the policy's boost.
        whole = accepted.kernel_us + accepted.transform_us
        cost_us = accepted.total_us * accepted.kernel_us / whole if whole else accepted.total_us
        choice = Choice(covers, op, fusion.full, chosen, formats, fusion.gives, cost_us, kind, within_us)
        self._add(choice, produced)
        return True

    def _add(self, choice: Choice, produced: dict[int, TensorFormat]) -> None:
        for value, form in produced.items():
            if form not in self._formats[value]:
                self._formats[value].append(form)
        # What it changes is as it came, and no longer what it was converted from.
        changes = frozenset().union(*(self._block.ops[place].changes for place in choice.covers))
        produced = produced | {value: self._formats[value][0] for value in changes}
        demands = tuple(choice.formats.items())
        self.alternatives.append(
            CoverOption(
                choice.covers, choice.cost_us + choice.within_us, demands, tuple(produced.items()), choice
            )
        )


def _own_outputs(placed: PlacedOp) -> dict[int, OutputSlice]:
    return {value: OutputSlice(output) for output, value in enumerate(placed.outputs)}


def _kinds(candidate: Candidate) -> set[str]:
    return {t.kind for t in candidate.accepted.transforms} if candidate.accepted is not None else set()


def _part(outputs: tuple[Any, ...], take: OutputSlice) -> Tensor:
    """The tensor that an `OutputSlice` names, without numbers."""
    whole: Tensor = outputs[take.output]
    return whole.narrow(-1, take.start, take.size) if take.size else whole
