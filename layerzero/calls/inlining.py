"""Calls in operators of torch, by the kernel that is chosen while a graph is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from layerzero._util import foreign, log
from layerzero.backends import is_builtin
from layerzero.calls.blocking import context_device, context_runtime
from layerzero.ops.op import Args, Op
from layerzero.selection.record import Selection
from layerzero.selection.transform import compile_transforms
from layerzero.spec.errors import NoKernelFoundError
from layerzero.spec.kernel import Kernel

# Whose kernels are operators of torch and nothing else; of them, not what compiles by itself.
_IN_TORCH = frozenset({"torch", "reference"})
_COMPILES_ITSELF = frozenset({"torch.attention.flex"})
# Passes over rows: fused with what is around them they cost less than the fastest kernel called from a graph.
_FUSABLE = frozenset({"add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm", "rope"})
# An estimate of what an operator in a graph costs the CPU beside torch's kernel in it, caches being neither
# warm nor cold; a GPU works meanwhile.
_OPERATOR_US = 30.0
# How far prices are off, as a part of torch's: what gains less may as well lose.
_PRICE_ERROR = 0.1
_CHOSEN = "compile.chosen"


class CompiledChoice(msgspec.Struct, frozen=True):
    """A kernel chosen while a graph was compiled, and whether the graph holds it or its operator."""

    op: str
    kernel: str
    inlined: bool
    why: str


class InlinedResult(NamedTuple):
    """What came of a call: its result in torch's operators, or NotImplemented; by which kernel, and why.

    `selection` is what the kernel followed from, where there is a result.
    """

    result: Any
    kernel: str
    why: str
    selection: Selection | None = None


def inline(op: Op, full: Args) -> InlinedResult:
    """A call in operators of torch, by the kernel that is chosen now."""
    example = example_of(full)
    if example is None:
        return InlinedResult(NotImplemented, "", "a size follows from data")
    try:
        selection = chosen(op, example)
    except NoKernelFoundError as error:
        return InlinedResult(NotImplemented, "", f"no kernel takes the call: {str(error).splitlines()[0]}")
    kernel, why = torchs_kernel(op, selection)
    if kernel is None:
        why = "is not made of torch's operators: chosen where the graph runs"
        return InlinedResult(NotImplemented, selection.kernel, why)
    try:
        return InlinedResult(traceable(op, selection, kernel)(*full), kernel.id, why, selection)
    except Exception as error:
        return InlinedResult(NotImplemented, kernel.id, f"cannot be traced: {type(error).__name__}: {error}")


class CompiledChoices(list[CompiledChoice]):
    """What became of the calls of an op while graphs were compiled, each logged once."""

    def note(self, op: Op, kernel: str, why: str, *, inlined: bool) -> None:
        """Add and log it, unless it is known."""
        choice = CompiledChoice(op.name, kernel, inlined, why)
        if choice not in self:
            self.append(choice)
            log.info(_CHOSEN, op=op.name, kernel=kernel, inlined=inlined, why=why)

    def inline(self, op: Op, full: Args) -> InlinedResult:
        """`inline`, noted."""
        inlined = inline(op, full)
        self.note(op, inlined.kernel, inlined.why, inlined=inlined.result is not NotImplemented)
        return inlined


def chosen(op: Op, example: Args) -> Selection:
    """What is chosen for a call now.

    Raises: NoKernelFoundError.
    """
    device = context_device(example)
    with foreign.outside():
        table = device.table(op)
        return table.recompute(table.describe(example, device.mode()))


def torchs_kernel(op: Op, selection: Selection) -> tuple[Kernel | None, str]:
    """The kernel that a graph holds for a selection, made of torch's operators, and why; None without one."""
    kernel = context_runtime().device(selection.request.device).registry.get(selection.kernel)
    assert kernel is not None
    if is_torch(kernel):
        return kernel, selection.why
    # Who adds a kernel wants it called, and not another one for what its call costs.
    kernel_of_torch = _in_its_place(op, selection) if is_builtin(kernel) else None
    why = "fused by the compiler" if op.name in _FUSABLE else "a call from the graph costs more than it gains"
    return kernel_of_torch, f"{why}, in the place of {kernel.id}"


def _in_its_place(op: Op, selection: Selection) -> Kernel | None:
    """The first kernel behind the chosen one that is made of torch's operators, if it serves a graph better.

    None where a policy preferred the chosen one.
    """
    accepted = selection.candidate(selection.kernel).accepted
    if accepted is None or accepted.total_us < accepted.kernel_us + accepted.transform_us:
        return None
    registry = context_runtime().device(selection.request.device).registry
    kernels = (registry.get(kernel_id) for kernel_id in selection.order)
    backends = _IN_TORCH if op.name in _FUSABLE else {"torch"}
    kernel = next((k for k in kernels if k is not None and k.backend in backends and is_torch(k)), None)
    if kernel is None or op.name in _FUSABLE:
        return kernel
    beside = selection.candidate(kernel.id).accepted
    if beside is None or selection.request.device != "cpu":
        return None
    needed_us = max(_OPERATOR_US, _PRICE_ERROR * beside.total_us)
    return kernel if beside.total_us - accepted.total_us < needed_us else None


def is_torch(kernel: Kernel) -> bool:
    """Whether a kernel is made of torch's operators and nothing else."""
    return kernel.backend in _IN_TORCH and kernel.id not in _COMPILES_ITSELF and is_builtin(kernel)


def traceable(op: Op, selection: Selection, kernel: Kernel) -> Callable[..., Any]:
    """A kernel with what a selection transforms for it, and without what watches kernels."""
    accepted = selection.candidate(kernel.id).accepted
    run = context_runtime().device(selection.request.device).registry.callable_of(kernel.id)
    return compile_transforms(op, accepted.transforms if accepted is not None else (), run)


def example_of(full: Args) -> Args | None:
    """The call with the sizes that are known now; None where one is not."""
    from torch._subclasses import FakeTensorMode

    with foreign.outside(), FakeTensorMode():
        example = []
        for value in full:
            hint = _hinted(value)
            if hint is None and value is not None:
                return None
            example.append(hint)
        return tuple(example)


def _hinted(value: Any) -> Any:
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.hint
    if not isinstance(value, Tensor):
        return value
    sizes, strides = ([_hinted(n) for n in numbers] for numbers in (value.shape, value.stride()))
    if None in sizes or None in strides:
        return None
    like = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
    return like.requires_grad_(value.requires_grad) if value.is_floating_point() else like
