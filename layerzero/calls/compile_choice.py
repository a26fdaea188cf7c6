"""`compile_choice`: whether a compiled model's kernels are chosen where it runs, or while it is compiled."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from layerzero.calls.blocking import context_runtime
from layerzero.calls.inlining import CompiledChoices, chosen, example_of, is_torch, traceable
from layerzero.operators import defined_schemas, front
from layerzero.operators.choice import CHOICE
from layerzero.ops import table as ops_table
from layerzero.ops.checks import need_choice
from layerzero.ops.op import Op
from layerzero.spec.errors import NoKernelFoundError
from layerzero.spec.kernel import Kernel

MODES = ("runtime", "freeze", "autotune")


class compile_choice:
    """Decide when the kernels of models that `torch.compile` compiles from now on are chosen.

    "runtime", as without this call: each time the graph runs, by policy, measurements and health. A kernel
    made of torch's operators is a part of the graph, under a guard that ends with the choice.
    "freeze": while it is compiled, for the sizes of then. A kernel that is made of torch's operators becomes
    a part of the graph, so that Inductor fuses around it, and is not looked at again; norms and rotations
    take such a kernel in the place of a faster one, unless a policy wants that, and so does any op on a CPU
    where the faster one gains less than a call from the graph costs. What stays an operator is
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
        self.choices = CompiledChoices()
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
            inline = None if mode != "freeze" else lambda op, full: self.choices.inline(op, full).result
            CHOICE.set(f"{mode}:{os.getpid()}:{policy}", inline)

    def __enter__(self) -> compile_choice:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.mode == "autotune":
            _stop_autotuning()
        CHOICE.restore(self._before)

    def _run_by(self, op: Op, kernel: Kernel, operator: Callable[..., Any]) -> Callable[..., Any]:
        """What Inductor times for a kernel: it, where it accepts the call, else the operator itself."""

        def run(*args: Any, backend: str | None = None, **named: Any) -> Any:
            full = op.build(*args, **named)[1]
            example = example_of(full)
            with suppress(NoKernelFoundError):
                if example is not None and kernel.id in (selection := chosen(op, example)).order:
                    self.choices.note(op, kernel.id, "timed by Inductor", inlined=True)
                    return traceable(op, selection, kernel)(*full)
            return operator(*args, **named)

        return run

    def _autotune(self) -> None:
        """Have Inductor time the kernels that accept a call beside the op's operator, of one output."""
        from torch._inductor.kernel.custom_op import CustomOpConfig, register_custom_op_autotuning

        registry = context_runtime().device().registry
        for name in ops_table.FILES:
            for schema in defined_schemas(name):
                kernels = [k for k in registry.for_op(name) if is_torch(k) and not k.descriptor]
                if schema.outputs != 1 or schema.op.stochastic or not kernels:
                    continue
                configs = [
                    CustomOpConfig(schema.adapter(self._run_by(schema.op, k, front(schema.op))))
                    for k in kernels
                ]
                register_custom_op_autotuning(schema.overload, configs=configs)


def _stop_autotuning() -> None:
    lowering = sys.modules.get("torch._inductor.lowering")
    if lowering is None:
        return
    for name in ops_table.FILES:
        for schema in defined_schemas(name):
            lowering.user_lowerings.pop(schema.overload, None)
