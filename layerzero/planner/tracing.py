"""From a function to a block: what it calls, recorded on tensors that have shapes and no numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from layerzero._util.fork_safety import ProcessLock
from layerzero.calls.functions import captured_values
from layerzero.operators import defined_schemas
from layerzero.ops import table
from layerzero.planner.block import Block, BlockOp, Edge, map_tree
from layerzero.spec.errors import BlockError
from layerzero.spec.reasons import Reason, Rejected

# Operators of torch that mean what an op of ours means: (the op, the names of its arguments in their order).
_MEANS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "aten.linear.default": ("linear", ("x", "weight", "bias")),
}
# A view of a value that a plan keeps in other memory may need a copy; `reshape` makes one where it does.
_SAFE = {"aten.view.default": "aten.reshape.default", "aten._unsafe_view.default": "aten.reshape.default"}
_SWITCH = torch._C._set_grad_enabled


# The parameters or buffers of a module, and a weight that is among them by a name.
WeightPlace = tuple[Mapping[str, Tensor | None], str, Tensor]


# One thread plans at a time: torch's modes of tracing, and its own `nn.Module.__call__` in the place of the
# other, are those of the whole process.
TURN = ProcessLock()


def trace(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Block:
    """The block of a call; its inputs are the tensors among the arguments, in their order.

    Whatever else the function holds or is given is part of the block.
    Raises: BlockError: the function reads numbers out of tensors, changes one in place, or does what torch
        cannot trace (BLOCK_NOT_TRACEABLE, BLOCK_OP_WRITES).
    """
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    unpackers: list[Callable[[list[Any]], Any]] = []

    def flat(*tensors: Tensor) -> list[Any]:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        full_args, full_kwargs = pytree.tree_unflatten(filled, spec)
        result = fn(*full_args, **full_kwargs)
        if isinstance(result, Coroutine):
            result.close()
            raise _refused(fn, "blocking calls, lz.sync.NAME instead of lz.NAME", "a coroutine")
        outputs, output_spec = pytree.tree_flatten(result)
        unpackers.append(_unpacker(output_spec))
        return outputs

    try:
        tracer = make_fx(flat, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)
        graph = tracer(*[leaves[place] for place in places])
    except BlockError:
        raise
    except (ValueError, TypeError) as error:
        if isinstance(error, torch._dynamo.exc.TorchDynamoException):  # pyright: ignore[reportAttributeAccessIssue]
            raise _not_traceable(fn, error) from error
        raise  # an argument of an op, by name
    except Exception as error:
        raise _not_traceable(fn, error) from error
    weights = [*graph.parameters(), *graph.buffers()]
    return _Reader(graph, fn, [*(leaves[place] for place in places), *weights]).block(unpackers[-1])


def places_of(fn: Any, weights: Sequence[Tensor]) -> tuple[WeightPlace, ...]:
    """Where the modules that a function computes with keep these weights."""
    weight_ids = {id(weight) for weight in weights}
    outermost = (value for value in captured_values(fn) if isinstance(value, torch.nn.Module))
    tables: list[Mapping[str, Tensor | None]] = []
    for module in dict.fromkeys(module for outer in outermost for module in outer.modules()):
        tables += (module._parameters, module._buffers)
    return tuple(
        (table, name, weight)
        for table in tables
        for name, weight in table.items()
        if weight is not None and id(weight) in weight_ids
    )


def _unpacker(spec: pytree.TreeSpec) -> Callable[[list[Any]], Any]:
    """What gives a function's result of its tensors in their order."""
    if spec.is_leaf():
        return operator.itemgetter(0)
    if spec == pytree.tree_structure((0,) * spec.num_leaves):
        return tuple
    return lambda values: pytree.tree_unflatten(values, spec)


def _not_traceable(fn: Callable[..., Any], error: Exception) -> BlockError:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    needs = "calls on tensors whose numbers are not looked at"
    return _refused(fn, needs, f"{type(error).__name__}: {first}")


def _refused(fn: Callable[..., Any], needs: str, got: str) -> BlockError:
    name = getattr(fn, "__qualname__", type(fn).__name__)
    problem = Rejected(Reason.BLOCK_NOT_TRACEABLE, name, needs, got)
    return BlockError(f"{name} cannot be planned: {problem}", problem=problem)


class _Reader:
    """Reads a traced graph: each call of an operator is an op of the block."""

    def __init__(self, graph: fx.GraphModule, fn: Callable[..., Any], tensors: Sequence[Tensor]) -> None:
        self._graph = graph
        self._fn = fn
        self._values: dict[fx.Node, Any] = {}
        # Where nothing does, it does not matter where gradients are switched off.
        self._wants_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)

    def block(self, unpack: Callable[[list[Any]], Any]) -> Block:
        """The block; `unpack` gives the function's own result of its outputs."""
        inputs: list[str] = []
        ops: list[BlockOp] = []
        outputs: list[Any] = []
        for node in self._graph.graph.nodes:
            if node.op == "placeholder":
                inputs.append(node.name)
                self._values[node] = Edge(node.name)
            elif node.op == "get_attr":
                self._values[node] = operator.attrgetter(node.target)(self._graph)
            elif node.op == "output":
                outputs = list(self._mapped(node.args[0]))
            elif node.target is operator.getitem and isinstance(self._values[node.args[0]], Edge):
                self._values[node] = self._values[node.args[0]]._replace(output=node.args[1])
            elif node.target is not _SWITCH or self._wants_gradient:
                ops.append(self._op(node))
                self._values[node] = Edge(node.name)
        edges = [output for output in outputs if isinstance(output, Edge)]

        # With a result that no op made: a number, or a tensor that the function holds.
        def unpack_all(values: list[Any]) -> Any:
            filled = iter(values)
            return unpack([next(filled) if isinstance(output, Edge) else output for output in outputs])

        whole = unpack if len(edges) == len(outputs) else unpack_all
        return Block(tuple(inputs), _without_dead(ops, edges), tuple(edges), whole)

    def _mapped(self, tree: Any) -> Any:
        return map_tree(tree, lambda leaf: self._values[leaf] if isinstance(leaf, fx.Node) else leaf)

    def _op(self, node: fx.Node) -> BlockOp:
        args, kwargs = self._mapped(tuple(node.args)), self._mapped(dict(node.kwargs))
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            raise _not_traceable(self._fn, TypeError(f"it calls {target}, which is no operator"))
        name = str(target)
        if target.namespace == "layerzero":
            return _our_op(node.name, target, args, kwargs)
        if name in _MEANS:
            op, names = _MEANS[name]
            return BlockOp(node.name, op, **dict(zip(names, args, strict=False)), **kwargs)
        return BlockOp(node.name, _SAFE.get(name, name), *args, **kwargs)


def _our_op(name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockOp:
    """The op behind an operator, with the op's own arguments."""
    base = target._schema.name.partition("::")[2].removesuffix("_with_lse")
    schema = next(s for s in defined_schemas(base) if s.overload is target)
    given_args, given_kwargs = schema.adapter(lambda *op_args, **named: (op_args, named))(*args, **kwargs)
    return BlockOp(name, table.get(base).name, *given_args, **given_kwargs)


def _without_dead(ops: list[BlockOp], outputs: list[Edge]) -> tuple[BlockOp, ...]:
    """The ops whose results are read, or that write."""
    alive = {edge.source for edge in outputs}
    live_ops: list[BlockOp] = []
    for op in reversed(ops):
        if op.name in alive or (op.is_ours and op.target.writes):
            live_ops.append(op)
            alive |= {edge.source for edge in op.edges()}
    return tuple(reversed(live_ops))
