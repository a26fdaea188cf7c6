"""A block with arguments of known shapes: ops in order, tensors without numbers, who waits for whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from layerzero._util import foreign
from layerzero.operators import front
from layerzero.ops.op import Args, Op
from layerzero.planner.block import Block, BlockOp, Edge, block_error, map_tree
from layerzero.spec.reasons import Reason

# Operators of torch that read memory, not numbers: their operands come as they would op by op.
READS_MEMORY = frozenset(
    {
        "aten.as_strided.default", "aten.as_strided_copy.default", "aten.as_strided_scatter.default",
        "aten._reshape_alias.default", "aten.view.dtype", "aten.view_copy.dtype",
    }
)  # fmt: skip


class Slot(NamedTuple):
    """Stands for a tensor of the block in a tree of arguments."""

    value: int


class TensorFormat(NamedTuple):
    """How a value lies in memory: the name of its dtype, and its strides in elements."""

    dtype: str
    strides: tuple[int, ...]


class Value(NamedTuple):
    """One tensor of a block: without numbers as `fake`, in full as `constant` where the block holds it."""

    fake: Tensor
    constant: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PlacedOp:
    """One op with its arguments: `args` and `kwargs` as written, `full` as kernels take them, if it is ours.

    `outputs` are its values; `after` are the ops that have to run before it; `changes` are the values whose
    memory it may write.
    """

    written: BlockOp
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    full: Args | None
    outputs: tuple[int, ...]
    after: frozenset[int]
    changes: frozenset[int]

    @property
    def op(self) -> Op | None:
        """The op of this library, where it is one."""
        return self.written.target if self.full is not None else None

    def reads(self) -> tuple[int, ...]:
        """The values that it reads, each once."""
        return slots_of((self.args, self.kwargs))


@dataclass(frozen=True, slots=True, eq=False)
class PlacedBlock:
    """Ops and values by number; `inputs` and `outputs` are values; values behind `inputs` are constants.

    `changed` are the values that some op changes.
    """

    ops: tuple[PlacedOp, ...]
    values: tuple[Value, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    changed: frozenset[int]
    mode: FakeTensorMode
    _laid_out: dict[tuple[int, TensorFormat], Tensor] = field(default_factory=dict)

    def can_join(self, *, grad: bool) -> bool:
        """Whether weights may be joined ahead: not where a gradient has to flow into them."""
        weights = (value.constant for value in self.values if value.constant is not None)
        return not (grad and any(weight.requires_grad for weight in weights))

    def fake(self, value: int, form: TensorFormat | None = None) -> Tensor:
        """A value without numbers, in its own format or in another."""
        plain = self.values[value].fake
        if form is None or form == format_of(plain):
            return plain
        other = self._laid_out.get((value, form))
        if other is None:
            with foreign.outside(), self.mode:
                dtype = getattr(torch, form.dtype)
                other = torch.empty_strided(plain.shape, form.strides, dtype=dtype, device=plain.device)
            self._laid_out[value, form] = other.requires_grad_(plain.requires_grad)
        return other

    def held(self, value: int) -> Tensor | None:
        """A tensor that the block holds and no op of it changes, so that it may be converted ahead."""
        return None if value in self.changed else self.values[value].constant

    def dense(self, value: int, dtype: str) -> TensorFormat:
        """A value's format where it is dense."""
        return TensorFormat(dtype, dense_strides(self.values[value].fake.shape))

    def swapped(self, value: int, dtype: str) -> TensorFormat:
        """A value's format where it is dense but for its second and third axis, which are swapped."""
        return swapped_format(self.values[value].fake, dtype)

    def filled(self, tree: Any, formats: dict[int, TensorFormat]) -> Any:
        """A tree of arguments with tensors without numbers for its slots."""
        return map_tree(
            tree,
            lambda leaf: self.fake(leaf.value, formats.get(leaf.value)) if isinstance(leaf, Slot) else leaf,
        )

    def evaluate(self, op: PlacedOp, formats: dict[int, TensorFormat]) -> tuple[Any, ...]:
        """What an op gives for operands in these formats, without numbers."""
        with foreign.outside(), self.mode:
            return _run(op.written, self.filled(op.args, formats), self.filled(op.kwargs, formats))


def format_of(tensor: Tensor) -> TensorFormat:
    """How a tensor lies in memory; axes of one element have the strides of a dense tensor where it is one."""
    strides = dense_strides(tensor.shape) if tensor.is_contiguous() else tuple(tensor.stride())
    return TensorFormat(str(tensor.dtype).removeprefix("torch."), strides)


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor, in elements."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def swapped_format(fake: Tensor, dtype: str) -> TensorFormat:
    """Dense with the second and third axis of four in the other order; dense where there are not four."""
    if fake.dim() != 4:
        return TensorFormat(dtype, dense_strides(fake.shape))
    batch, first, second, width = dense_strides(fake.transpose(1, 2).shape)
    return TensorFormat(dtype, (batch, second, first, width))


def slots_of(tree: Any) -> tuple[int, ...]:
    """The values in a tree of arguments, each once."""
    seen: dict[int, None] = {}
    map_tree(tree, lambda leaf: seen.setdefault(leaf.value) if isinstance(leaf, Slot) else None)
    return tuple(seen)


def place(block: Block, args: Sequence[Tensor]) -> PlacedBlock:
    """A block for arguments of these shapes, dtypes and strides.

    Raises: ValueError, TypeError: an op's argument is wrong, by name, with a note that says which op's.
        BlockError: an edge names an output that its op does not have.
    """
    if len(args) != len(block.inputs):
        names = ", ".join(block.inputs)
        raise TypeError(f"the block needs {len(block.inputs)} tensors, {names}, got {len(args)}")
    for name, value in zip(block.inputs, args, strict=True):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} needs a torch.Tensor, got {type(value).__name__}")
    return _Placing(block, args).place()


# The memory of all inputs: calls to come may give views of one tensor where this one gave several.
_INPUTS = 0


class _Placing:
    def __init__(self, block: Block, args: Sequence[Tensor]) -> None:
        self._block = block
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._values: list[Value] = []
        self._by_edge: dict[Edge, int] = {}
        self._constants: dict[int, int] = {}
        # For each value, the memory that it may be a view of; for each such memory, who read and wrote it.
        self._memory: list[frozenset[int]] = []
        self._readers: dict[int, set[int]] = {}
        self._writers: dict[int, set[int]] = {}
        for name, value in zip(block.inputs, args, strict=True):
            memory = _storage_of(value) | {_INPUTS}
            self._by_edge[Edge(name)] = self._add(self._faked(value), memory=memory)
        self._producer: dict[int, int] = {}

    def _faked(self, value: Tensor) -> Tensor:
        return self._mode.from_tensor(value, static_shapes=True)

    def _add(self, fake: Tensor, constant: Tensor | None = None, memory: frozenset[int] = frozenset()) -> int:
        self._values.append(Value(fake, constant))
        self._memory.append(memory or frozenset({len(self._values)}))
        return len(self._values) - 1

    def place(self) -> PlacedBlock:
        """The block in order."""
        ops = tuple(self._place(position, op) for position, op in enumerate(self._block.ops))
        outputs = tuple(self._value_of(edge, "outputs") for edge in self._block.edges_out)
        inputs = tuple(self._by_edge[Edge(name)] for name in self._block.inputs)
        changed = frozenset().union(*(op.changes for op in ops))
        return PlacedBlock(ops, tuple(self._values), inputs, outputs, changed, self._mode)

    def _value_of(self, edge: Edge, reader: str) -> int:
        value = self._by_edge.get(edge)
        if value is None:
            count = sum(edge.source == other.source for other in self._by_edge)
            needs = f"one of the {count} tensors that {edge.source!r} gives"
            raise block_error(Reason.BLOCK_EDGE_MISSING, reader, needs, f"output {edge.output}")
        return value

    def _slotted(self, tree: Any, reader: str) -> Any:
        def change(leaf: Any) -> Any:
            if isinstance(leaf, Edge):
                return Slot(self._value_of(leaf, reader))
            if isinstance(leaf, Tensor):
                if id(leaf) not in self._constants:
                    self._constants[id(leaf)] = self._add(self._faked(leaf), leaf, _storage_of(leaf))
                return Slot(self._constants[id(leaf)])
            return leaf

        return map_tree(tree, change)

    def _place(self, position: int, op: BlockOp) -> PlacedOp:
        reader = f"op {op.name!r}"
        args, kwargs = self._slotted(op.args, reader), self._slotted(dict(op.kwargs), reader)
        fakes = {slot: self._values[slot].fake for slot in slots_of((args, kwargs))}
        fill: Callable[[Any], Any] = lambda leaf: fakes[leaf.value] if isinstance(leaf, Slot) else leaf  # noqa: E731
        own_args, own_kwargs = map_tree(args, fill), map_tree(kwargs, fill)
        try:
            full = self._full(op, own_args, own_kwargs, fakes)
            with foreign.outside(), self._mode:
                results = _run(op, own_args, own_kwargs)
        except (ValueError, TypeError, RuntimeError) as error:
            error.add_note(f"in op {op.name!r} ({op.op}) of the block")
            raise
        after, changes = self._waits(position, op, full, tuple(fakes))
        memory = frozenset().union(*(self._memory[slot] for slot in fakes)) if not op.is_ours else frozenset()
        outputs = []
        for output, result in enumerate(results):
            if isinstance(result, Tensor):
                value = self._add(result, memory=memory)
                self._by_edge[Edge(op.name, output)] = value
                self._producer[value] = position
                outputs.append(value)
        return PlacedOp(op, args, kwargs, full, tuple(outputs), after, changes)

    def _full(self, op: BlockOp, args: Any, kwargs: Any, fakes: dict[int, Tensor]) -> Args | None:
        """The op's full arguments with slots, as `build` gives them; None for an operator of torch."""
        if not op.is_ours:
            return None
        op_args = {name: value for name, value in kwargs.items() if name != "backend"}
        slot_of = {id(fake): Slot(slot) for slot, fake in fakes.items()}
        return tuple(slot_of.get(id(value), value) for value in op.target.build(*args, **op_args)[1])

    def _waits(
        self, position: int, op: BlockOp, full: Args | None, reads: tuple[int, ...]
    ) -> tuple[frozenset[int], frozenset[int]]:
        """The ops before this one, by what it reads or what memory makes it wait for; what it may change."""
        after = {self._producer[value] for value in reads if value in self._producer}
        written: set[int] = set()
        if full is not None:
            for argument in op.target.writes:
                if isinstance(full[argument], Slot):
                    written |= self._memory[full[argument].value]
        for memory in frozenset().union(*(self._memory[value] for value in reads)):
            after |= self._writers.get(memory, set())
            if memory in written:
                after |= self._readers.get(memory, set())
                self._writers.setdefault(memory, set()).add(position)
            self._readers.setdefault(memory, set()).add(position)
        changes = frozenset(value for value, memory in enumerate(self._memory) if memory & written)
        return frozenset(after - {position}), changes


def _storage_of(tensor: Tensor) -> frozenset[int]:
    """The memory of a tensor that is there, by a number that no value has."""
    return frozenset({-1 - tensor.untyped_storage()._cdata})


def _run(op: BlockOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The results of an op, a single one as a tuple of one."""
    if op.is_ours:
        results = front(op.target)(*args, **{name: v for name, v in kwargs.items() if name != "backend"})
    else:
        results = op.target(*args, **kwargs)
    return tuple(results) if isinstance(results, tuple | list) else (results,)
