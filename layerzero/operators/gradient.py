"""What runs at torch's autograd key: a call that is traced becomes a node of the operator, with its gradient.

The gradient is an operator as well. It runs the op again with a kernel that has a gradient, chosen when it
runs, and keeps nothing of the forward pass but the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from layerzero._util import foreign
from layerzero.operators.choice import CAPTURED, inliner_of, will_be_captured
from layerzero.operators.schema import OperatorSchema, run_operator
from layerzero.operators.subclasses import compose
from layerzero.ops.op import Args

_C: Any = torch._C


class TracedCall:
    """A call at the autograd key whose tensors have no memory to read, or whose caller is traced."""

    def __init__(self, schema: OperatorSchema) -> None:
        self._schema = schema
        self._pack = schema.packer()
        self._function = _function(schema)

    def __call__(self, full: Args, backend: str | None) -> Any:
        """The operator below autograd; with a gradient to follow, as one node of the graph.

        Raises: ValueError: a gradient is needed and the op has none; the operand is named.
        """
        op = self._schema.op
        if foreign.has_subclass(full):
            return compose(op, full, run_operator)
        if foreign.in_transform():
            return op.reference(*full)
        if (inline := inliner_of(backend)) is not None:
            inlined = inline(op, full)
            if inlined is not NotImplemented:
                return inlined
            backend = None
        if backend is None and will_be_captured(full[0].device):
            backend = CAPTURED
        flat = self._pack(*full, backend)
        overload = self._schema.overload
        if not (torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in flat)):
            with _C._AutoDispatchBelowAutograd():
                return overload(*flat)
        op.need_gradient(full)
        if _drops(self._schema, flat):
            return op.reference(*full)  # the backward pass needs the numbers that the forward pass drew
        return self._function.apply(*flat)


def _drops(schema: OperatorSchema, flat: Args) -> bool:
    names = [p.name for p in schema.parameters]
    return "dropout_p" in names and flat[names.index("dropout_p")] > 0


def _function(schema: OperatorSchema) -> Any:
    """The autograd function of an operator: its arguments are saved, its gradients are an operator's."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *flat: Any) -> Any:
            tensors = [value for value in flat if isinstance(value, Tensor)]
            ctx.save_for_backward(*tensors)
            ctx.rest = [None if isinstance(value, Tensor) else (value,) for value in flat]
            with _C._AutoDispatchBelowAutograd():
                return schema.overload(*flat)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            saved = iter(ctx.saved_tensors)
            flat = [next(saved) if number is None else number[0] for number in ctx.rest]
            tensors = [p for p, number in enumerate(ctx.rest) if number is None]
            needs_grad = [bool(ctx.needs_input_grad[p]) for p in tensors]
            backward = getattr(torch.ops.layerzero, f"{schema.name}_backward").default
            computed = iter(backward(list(grads), *flat[:-1], needs_grad))
            each: list[Tensor | None] = [None] * len(flat)
            for position, is_wanted in zip(tensors, needs_grad, strict=True):
                each[position] = next(computed) if is_wanted else None
            return tuple(each)

    Function.__name__ = Function.__qualname__ = f"layerzero_{schema.name}"
    return Function


def gradients(schema: OperatorSchema, run: Callable[..., Any]) -> Callable[..., list[Tensor]]:
    """The implementation of an operator's gradient: `run` again under autograd, then back through it."""
    adapted = schema.adapter(run)

    def backward(grads: list[Tensor], *rest: Any) -> list[Tensor]:
        *flat, needs_grad = rest
        asks = iter(needs_grad)
        leaves = [
            value.detach().requires_grad_(next(asks)) if isinstance(value, Tensor) else value
            for value in flat
        ]
        with torch.enable_grad(), _autograd_on():
            result = adapted(*leaves)
        outs = result if isinstance(result, tuple) else (result,)
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        paths = [(out, grad) for out, grad in zip(outs, grads, strict=True) if out.requires_grad]
        with _autograd_on():
            computed = torch.autograd.grad(
                [out for out, _ in paths], inputs, [grad for _, grad in paths], allow_unused=True
            )
        return [
            torch.zeros_like(leaf, memory_format=torch.contiguous_format)
            if grad is None
            else grad.contiguous()
            for leaf, grad in zip(inputs, computed, strict=True)
        ]

    return backward


def gradient_shapes(grads: list[Tensor], *rest: Any) -> list[Tensor]:
    """The gradients' shapes: those of the tensors that want one, contiguous."""
    *flat, needs_grad = rest
    tensors = [value for value in flat if isinstance(value, Tensor)]
    return [value.new_empty(value.shape) for value, asks in zip(tensors, needs_grad, strict=True) if asks]


@contextmanager
def _autograd_on() -> Generator[None]:
    """Autograd's keys, which a dispatch below them has put aside."""
    keys, include = _C.DispatchKey, _C._SetExcludeDispatchKeyGuard
    with include(keys.AutogradFunctionality, False), include(keys.ADInplaceOrView, False):
        yield
