"""`compile_choice`: whether a compiled model's kernels are chosen where it runs, or while it is compiled."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

import msgspec
import torch
from torch import Tensor

from layerzero._util import foreign, log
from layerzero.calls.blocking import context_device, context_runtime
from layerzero.operators import defined_schemas, front
from layerzero.operators.choice import CHOICE
from layerzero.ops import table as ops_table
from layerzero.ops.checks import need_choice
from layerzero.ops.op import Args, Op
from layerzero.selection.record import Selection
from layerzero.selection.transform import compile_transforms
from layerzero.spec.errors import NoKernelFoundError
from layerzero.spec.kernel import Kernel

MODES = ("runtime", "freeze", "autotune")
# Whose kernels are operators of torch and nothing else; of them, not what compiles by itself.
_IN_TORCH = frozenset({"torch", "reference"})
_COMPILES_ITSELF = frozenset({"torch.attention.flex"})
# Passes over rows: fused with what is around them they cost less than the fastest kernel called from a graph.
_FUSABLE = frozenset({"add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm", "rope"})
_CHOSEN = "compile.chosen"


class CompiledChoice(msgspec.Struct, frozen=True):
    """A kernel chosen while a graph was compiled, and whether the graph holds it or its operator."""

    op: str
    kernel: str
    inlined: bool
    why: str


class compile_choice:
    """Decide when the kernels of models that `torch.compile` compiles from now on are chosen.

    "runtime", as without this call: each time the graph runs, by policy, measurements and health.
    "freeze": while it is compiled, for the sizes of then. A kernel that is made of torch's operators becomes
    a part of the graph, so that Inductor fuses around it, and is not looked at again; norms and rotations
    take such a kernel in the place of a faster one, unless a policy wants that. What stays an operator is
    chosen at run time.
    "autotune": Inductor times the kernels that accept a call beside the operator, and keeps the fastest
    (`register_custom_op_autotuning`; ops with one output).
    Holds for the process, or as a context manager until its end. What was compiled inside stays as it is
    after the block; another decision for the process compiles functions anew. `choices` says what was chosen.

    Raises: ValueError, TypeError: no such mode.

    Example:
        >>> import torch, layerzero as lz
        >>> norm = torch.compile(lambda x: lz.sync.rms_norm(x), fullgraph=True, backend="aot_eager")
        >>> with lz.compile_choice("freeze") as chosen:
        ...     norm(torch.ones(2, 8)).shape
        torch.Size([2, 8])
        >>> [choice.op for choice in chosen.choices]
        ['rms_norm']
    """

    def __init__(self, mode: str) -> None:
        need_choice("mode", mode, MODES)
        self.mode = mode
        self.choices: list[CompiledChoice] = []
        self._before = CHOICE.saved()
        if mode == "autotune":
            self._autotune()
        elif CHOICE.mark is not None:
            _stop_autotuning()
        if mode == "runtime":
            CHOICE.set(None, None)
        else:
            # Another process and another policy may choose otherwise: torch's caches must not mix them up.
            policy = hash(context_runtime().program_policy)
            CHOICE.set(f"{mode}:{os.getpid()}:{policy}", self._inline if mode == "freeze" else None)

    def __enter__(self) -> compile_choice:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.mode == "autotune":
            _stop_autotuning()
        CHOICE.restore(self._before)

    def _inline(self, op: Op, full: Args) -> Any:
        """The call in torch's operators, by the kernel that is chosen now; NotImplemented if it has none."""
        example = _example(full)
        if example is None:
            return self._declined(op, "", "a size follows from data")
        try:
            selection, kernel = _chosen(op, example)
        except NoKernelFoundError as error:
            return self._declined(op, "", f"no kernel takes the call: {str(error).splitlines()[0]}")
        why = selection.why
        if not _is_torch(kernel) and (torchs := _fusable(op, selection)) is not None:
            kernel, why = torchs, f"fused by the compiler, in the place of {kernel.id}"
        if not _is_torch(kernel):
            return self._declined(
                op, kernel.id, "is not made of torch's operators: chosen where the graph runs"
            )
        try:
            result = _traceable(op, selection, kernel)(*full)
        except Exception as error:
            return self._declined(op, kernel.id, f"cannot be traced: {type(error).__name__}: {error}")
        self._note(op, kernel.id, why, inlined=True)
        return result

    def _declined(self, op: Op, kernel: str, why: str) -> Any:
        """NotImplemented, and why the graph holds the operator."""
        self._note(op, kernel, why, inlined=False)
        return NotImplemented

    def _note(self, op: Op, kernel: str, why: str, *, inlined: bool) -> None:
        choice = CompiledChoice(op.name, kernel, inlined, why)
        if choice not in self.choices:
            self.choices.append(choice)
            log.info(_CHOSEN, op=op.name, kernel=kernel, inlined=inlined, why=why)

    def _run_by(self, op: Op, kernel: Kernel, operator: Callable[..., Any]) -> Callable[..., Any]:
        """What Inductor times for a kernel: it, where it accepts the call, else the operator itself."""

        def run(*args: Any, backend: str | None = None, **named: Any) -> Any:
            full = op.build(*args, **named)[1]
            example = _example(full)
            with suppress(NoKernelFoundError):
                if example is not None and kernel.id in (selection := _chosen(op, example)[0]).order:
                    self._note(op, kernel.id, "timed by Inductor", inlined=True)
                    return _traceable(op, selection, kernel)(*full)
            return operator(*args, **named)

        return run

    def _autotune(self) -> None:
        """Have Inductor time the kernels that accept a call beside the op's operator, of one output."""
        from torch._inductor.kernel.custom_op import CustomOpConfig, register_custom_op_autotuning

        registry = context_runtime().device().registry
        for name in ops_table.FILES:
            for schema in defined_schemas(name):
                kernels = [k for k in registry.for_op(name) if _is_torch(k) and not k.descriptor]
                if schema.outputs != 1 or schema.op.stochastic or not kernels:
                    continue
                configs = [
                    CustomOpConfig(schema.adapter(self._run_by(schema.op, k, front(schema.op))))
                    for k in kernels
                ]
                register_custom_op_autotuning(schema.overload, configs=configs)


def _chosen(op: Op, example: Args) -> tuple[Selection, Kernel]:
    device = context_device(example)
    with foreign.outside():
        table = device.table(op)
        selection = table.recompute(table.describe(example, device.mode()))
    kernel = device.registry.get(selection.kernel)
    assert kernel is not None
    return selection, kernel


def _fusable(op: Op, selection: Selection) -> Kernel | None:
    """The first kernel behind the chosen one that is made of torch's operators, if no policy preferred it."""
    chosen = selection.candidate(selection.kernel).accepted
    if op.name not in _FUSABLE or chosen is None or chosen.total_us < chosen.kernel_us + chosen.transform_us:
        return None
    registry = context_runtime().device(selection.request.device).registry
    kernels = (registry.get(kernel_id) for kernel_id in selection.order)
    return next((k for k in kernels if k is not None and k.backend == "torch" and _is_torch(k)), None)


def _is_torch(kernel: Kernel) -> bool:
    return kernel.backend in _IN_TORCH and kernel.id not in _COMPILES_ITSELF


def _traceable(op: Op, selection: Selection, kernel: Kernel) -> Callable[..., Any]:
    """A kernel with what a selection transforms for it, and without what watches kernels."""
    accepted = selection.candidate(kernel.id).accepted
    run = context_runtime().device(selection.request.device).registry.callable_of(kernel.id)
    return compile_transforms(op, accepted.transforms if accepted is not None else (), run)


def _example(full: Args) -> Args | None:
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


def _stop_autotuning() -> None:
    lowering = sys.modules.get("torch._inductor.lowering")
    if lowering is None:
        return
    for name in ops_table.FILES:
        for schema in defined_schemas(name):
            lowering.user_lowerings.pop(schema.overload, None)
