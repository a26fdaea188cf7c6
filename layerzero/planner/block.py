"""Blocks: ops with their edges, written by hand or read from a graph of torch."""

from __future__ import annotations

import difflib
import graphlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from layerzero.ops import table
from layerzero.ops.op import Op
from layerzero.spec.errors import BlockError
from layerzero.spec.reasons import Reason, Rejected

# What people call the operators of torch between ops; any other is written `aten.NAME.OVERLOAD`.
TORCH_NAMES = MappingProxyType(
    {
        "add": "aten.add.Tensor",
        "mul": "aten.mul.Tensor",
        "silu": "aten.silu.default",
        "gelu": "aten.gelu.default",
        "relu": "aten.relu.default",
        "reshape": "aten.reshape.default",
        "transpose": "aten.transpose.int",
        "split": "aten.split.Tensor",
    }
)


class Edge(NamedTuple):
    """A tensor that a block's op or input of that name gives; `output` counts an op's outputs from 0."""

    source: str
    output: int = 0


@dataclass(frozen=True, slots=True, init=False, eq=False)
class BlockOp:
    """One op of a block: `op` is an op of this library, or an operator of torch without side effects.

    Arguments are those of the op; an `Edge` stands for a tensor of the block, and other tensors are the
    block's own, its weights.

    Raises: BlockError: there is no such op (BLOCK_OP_UNKNOWN), or it changes its operands (BLOCK_OP_WRITES).
    """

    name: str
    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any

    def __init__(self, name: str, op: str, /, *args: Any, **kwargs: Any) -> None:
        for part, value in (("name", name), ("op", op)):
            if not isinstance(value, str) or not value:
                raise TypeError(f"BlockOp needs a text for {part}, got {value!r}")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "op", TORCH_NAMES.get(op, op))
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "kwargs", kwargs)
        object.__setattr__(self, "target", _target_of(name, self.op))

    @property
    def is_ours(self) -> bool:
        """Whether it is an op of this library."""
        return isinstance(self.target, Op)

    def edges(self) -> list[Edge]:
        """The tensors of the block that it reads."""
        leaves: list[Any] = []
        map_tree((self.args, self.kwargs), leaves.append)
        return [leaf for leaf in leaves if isinstance(leaf, Edge)]


@dataclass(frozen=True, slots=True)
class Block:
    """Ops with their edges, in any order; `inputs` name the arguments, `outputs` are edges or names of ops.

    `split` (a torch operator) and ops with several results have outputs 0, 1, ...; an op that is named
    alone as an output gives its first.

    Raises: BlockError: the ops wait for each other (BLOCK_CYCLIC), an edge comes from nowhere
        (BLOCK_EDGE_MISSING), a name is taken twice (BLOCK_NAME_TAKEN), or there is no op or output
        (BLOCK_EMPTY).

    Example:
        >>> import layerzero as lz, torch
        >>> block = lz.Block(
        ...     inputs=("x", "residual"),
        ...     ops=[
        ...         lz.BlockOp("sum", "add", lz.Edge("x"), lz.Edge("residual")),
        ...         lz.BlockOp("normed", "rms_norm", lz.Edge("sum"), torch.ones(8)),
        ...     ],
        ...     outputs=("normed", "sum"),
        ... )
        >>> [op.op for op in block.ops]
        ['aten.add.Tensor', 'rms_norm']
    """

    inputs: Sequence[str]
    ops: Sequence[BlockOp]
    outputs: Sequence[str | Edge]
    unpack: Callable[[list[Any]], Any] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, kind in (("inputs", str), ("ops", BlockOp), ("outputs", str | Edge)):
            values = getattr(self, name)
            if isinstance(values, str) or not isinstance(values, Iterable):
                raise TypeError(f"{name} needs a sequence, got {type(values).__name__}")
            wrong = [value for value in values if not isinstance(value, kind)]
            if wrong:
                needs = getattr(kind, "__name__", "str or Edge")
                raise TypeError(f"{name} needs {needs}, got {type(wrong[0]).__name__}: {wrong[0]!r}")
        outputs = tuple(output if isinstance(output, Edge) else Edge(output) for output in self.outputs)
        object.__setattr__(self, "inputs", tuple(self.inputs))
        object.__setattr__(self, "outputs", outputs)
        if not self.ops or not outputs:
            missing = "outputs" if self.ops else "ops"
            raise block_error(Reason.BLOCK_EMPTY, missing, "at least one", "none")
        _need_names(self)
        object.__setattr__(self, "ops", _in_order(tuple(self.ops)))

    @property
    def edges_out(self) -> tuple[Edge, ...]:
        """The outputs as edges."""
        return tuple(output if isinstance(output, Edge) else Edge(output) for output in self.outputs)


def map_tree(tree: Any, change: Callable[[Any], Any]) -> Any:
    """A tree of arguments with `change` applied to what is no list, no mapping and no plain tuple."""
    if hasattr(tree, "_fields") or not isinstance(tree, list | tuple | Mapping):
        return change(tree)
    if isinstance(tree, Mapping):
        return {name: map_tree(value, change) for name, value in tree.items()}
    mapped = [map_tree(value, change) for value in tree]
    return mapped if isinstance(tree, list) else tuple(mapped)


def block_error(reason: Reason, field_name: str, needs: str, got: str) -> BlockError:
    """What a block is refused with."""
    problem = Rejected(reason, field_name, needs, got)
    return BlockError(f"a block {problem}", problem=problem)


def _target_of(name: str, op: str) -> Any:
    if op in table.names():
        return table.get(op)
    space, _, rest = op.partition(".")
    packet, _, overload = rest.partition(".")
    target = None
    if space == "aten":
        target = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    if target is None:
        names = (*table.names(), *TORCH_NAMES)
        close = difflib.get_close_matches(op, names, n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        needs = f"an op of {', '.join(names)}, or aten.NAME.OVERLOAD"
        raise block_error(Reason.BLOCK_OP_UNKNOWN, f"op {name!r}", needs, f"{op!r}{hint}")
    if target._schema.is_mutable:
        raise block_error(Reason.BLOCK_OP_WRITES, f"op {name!r}", "an operator without side effects", op)
    return target


def _need_names(block: Block) -> None:
    """Raises: BlockError: a name is there twice, or an edge comes from nowhere."""
    seen: set[str] = set()
    for name in (*block.inputs, *(op.name for op in block.ops)):
        if name in seen:
            raise block_error(Reason.BLOCK_NAME_TAKEN, "name", "one op or input a name", repr(name))
        seen.add(name)
    every = ((f"op {op.name!r}", edge) for op in block.ops for edge in op.edges())
    for reader, edge in (*every, *(("outputs", edge) for edge in block.edges_out)):
        if edge.source not in seen or edge.output < 0 or (edge.output and edge.source in block.inputs):
            close = difflib.get_close_matches(edge.source, sorted(seen), n=2) or sorted(seen)
            needs = f"an edge from an op or input, such as {' or '.join(close)}"
            raise block_error(
                Reason.BLOCK_EDGE_MISSING, reader, needs, f"{edge.source!r} output {edge.output}"
            )


def _in_order(ops: tuple[BlockOp, ...]) -> tuple[BlockOp, ...]:
    """Each op behind those that it reads, otherwise as they are given.

    Raises: BlockError: some wait for each other.
    """
    sources = {op.name: {edge.source for edge in op.edges()} & {other.name for other in ops} for op in ops}
    try:
        graphlib.TopologicalSorter(sources).prepare()
    except graphlib.CycleError as error:
        needs = "an order in which each op can run"
        raise block_error(Reason.BLOCK_CYCLIC, "ops", needs, " -> ".join(error.args[1])) from None
    order: dict[str, BlockOp] = {}
    waiting = list(ops)
    while waiting:
        ready = next(op for op in waiting if sources[op.name] <= order.keys())
        waiting.remove(ready)
        order[ready.name] = ready
    return tuple(order.values())
