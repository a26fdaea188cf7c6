"""KernelCalls: the callables of kernels as one device runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from layerzero.actors.device.registry import Registry
from layerzero.ops.op import Op
from layerzero.selection.record import Selection
from layerzero.selection.transform import compile_transforms, keep_aligned, with_memory, without_graph
from layerzero.spec.settings import Settings

if TYPE_CHECKING:
    from layerzero.actors.device.running_kernels import RunningKernelLog
    from layerzero.observe.spans import Spans

# Backends whose kernels are torch's operators: those check a tensor's class themselves.
_DISPATCHED = frozenset({"reference", "torch"})


class KernelCalls:
    """Kernels' callables with the transforms of a selection, on the device that owns the tensors.

    `running_log`, where there is one, notes each kernel while it runs; `spans` traces calls.
    """

    def __init__(self, device: torch.device, registry: Registry, settings: Settings) -> None:
        self.device = device
        self.registry = registry
        self.settings = settings
        self.running_log: RunningKernelLog | None = None
        self.spans: Spans | None = None

    @property
    def traces_each(self) -> bool:
        """Whether each caller's waiting and each run of a kernel has a span of its own."""
        return self.spans is not None and self.spans.calls

    def callable_for(self, op: Op, selection: Selection, kernel_id: str) -> Callable[..., Any]:
        """`kernel_id`'s callable with the transforms that `selection`'s trace gives it.

        Raises: what loading the kernel raises.
        """
        accepted = selection.candidate(kernel_id).accepted
        transforms = accepted.transforms if accepted is not None else ()
        run = self.registry.callable_of(kernel_id)
        # Innermost: what transforms do before and after is no time of the kernel's.
        if self.running_log is not None:
            run = self.running_log.wrap(kernel_id, run)
        kernel = self.registry.get(kernel_id)
        if kernel is not None:
            run = keep_aligned(op, kernel.capability.alignment, run)
            # A vendor's launch takes a pointer: one of a tensor without memory would be followed.
            if self.device.type == "cuda" and kernel.backend not in _DISPATCHED:
                run = with_memory(op, run)
        call = compile_transforms(op, transforms, on_owning_device(self.device, run))
        return without_graph(call) if self.settings.inference else call


def on_owning_device(device: torch.device, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, made with `device` as the thread's current one where there are several.

    Kernels that torch does not launch, those of Triton among them, go to the thread's current device; a new
    thread begins with the first.
    """
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        return run
    index = device.index or 0
    current = torch.cuda.current_device

    def call(*args: Any) -> Any:
        if current() == index:
            return run(*args)
        with torch.cuda.device(index):
            return run(*args)

    return call
