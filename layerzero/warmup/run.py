"""Making one call ready: its kernel chosen, loaded and run."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from typing import Any, Literal, Protocol

import msgspec
import torch

from layerzero._util import log
from layerzero.graphs.rehearsal import rehearsal
from layerzero.measure.calls import Call
from layerzero.ops import table as ops_table
from layerzero.ops.op import Args, Op, Signature
from layerzero.selection.dispatch import DispatchState
from layerzero.selection.modes import GRAD
from layerzero.selection.plan import Plan, load_until_best, signature_of
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.hardware import Hardware
from layerzero.warmup.monitor import CompileEvent, watching

WARMED = "warmup.call_ready"
WARM_FAILED = "warmup.call_failed"


class AheadCompiler(Protocol):
    """What lets a process of its own compile what a later load needs."""

    def compile_ahead(self, kernel_id: str, request: CallSpec) -> object: ...


class WarmupDevice(Protocol):
    """What warming needs of a device."""

    device: torch.device
    hardware: Hardware

    def mode(self) -> int: ...
    def plan(
        self, op: Op, signature: Signature, args: Args, bits: int, snapshot: DispatchState | None = None
    ) -> Plan: ...
    def warm(self, kernel_ids: Any, request: CallSpec | None = None) -> None: ...
    @property
    def loader(self) -> AheadCompiler: ...


class WarmedCall(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one call: the kernel that serves it, how long it took, what was compiled for it.

    `state` is "ready", "late" (its time ran out; it continues in the background) or "failed" with `error`; a
    failed call is served by whatever kernel is ready, as without warming.
    """

    call: str
    critical: bool
    state: Literal["ready", "late", "failed"]
    kernel: str = ""
    seconds: float = 0.0
    compiled: tuple[CompileEvent, ...] = ()
    error: str = ""


class WarmupRunner:
    """Makes calls ready on one device, one after another."""

    def __init__(self, device: WarmupDevice, *, forbid: bool = False) -> None:
        self._device = device
        self._forbid = forbid

    def warm(self, call: Call, *, critical: bool) -> WarmedCall:
        """Choose, load and run one call; on CUDA once more as a graph capture would choose."""
        started = time.monotonic()
        with watching(forbid=self._forbid) as monitor:
            try:
                kernel = self._ready(call)
                error = ""
            except Exception as raised:
                kernel, error = "", f"{type(raised).__name__}: {raised}"[:500]
        seconds, compiled = time.monotonic() - started, monitor.compiled
        if error:
            log.warning(WARM_FAILED, call=str(call), error=error)
        else:
            log.info(WARMED, call=str(call), kernel=kernel, seconds=round(seconds, 3), compiled=len(compiled))
        return WarmedCall(
            call=str(call), critical=critical, state="failed" if error else "ready", kernel=kernel,
            seconds=seconds, compiled=compiled, error=error,
        )  # fmt: skip

    def compile_ahead(self, calls: Iterable[Call]) -> None:
        """Begin to compile what calls are waiting for, side by side in processes of their own.

        Where that is not for this device, nothing; a call that cannot be made is left to `warm`.
        """
        if self._forbid or self._device.device.type != "cuda":
            return
        for call in calls:
            with suppress(Exception):  # its own turn says why
                self._compile_ahead(call)

    def _compile_ahead(self, call: Call) -> None:
        device, op = self._device, ops_table.get(call.op)
        args = call.make(device.device)
        signature = signature_of(op, args)
        for capturing in (False, True):
            with torch.no_grad(), rehearsal() if capturing else nullcontext():
                selection = device.plan(op, signature, args, device.mode()).selection
            if selection.when_warm is not None:
                device.loader.compile_ahead(selection.when_warm, selection.request)

    def _ready(self, call: Call) -> str:
        device, op = self._device, ops_table.get(call.op)
        args = call.make(device.device)
        signature = signature_of(op, args)
        plan = self._best(op, signature, args)
        with torch.no_grad():
            plan.call(*args)
            # Callers under another grad mode have tables of their own.
            device.plan(op, signature, args, device.mode() | GRAD)
            if device.device.type == "cuda":
                self._rehearse(op, signature, args)
                torch.cuda.synchronize(device.device)
        return plan.kernel

    def _best(self, op: Op, signature: Signature, args: Args) -> Plan:
        """The plan once everything that would be better has been loaded, or has failed to."""
        device = self._device
        with torch.no_grad():
            best = load_until_best(
                lambda: device.plan(op, signature, args, device.mode()).selection, device.warm
            )
            if best.when_warm is not None:
                raise RuntimeError(f"{best.when_warm} stays unready after it was loaded")
            return device.plan(op, signature, args, device.mode())

    def _rehearse(self, op: Op, signature: Signature, args: Args) -> None:
        with rehearsal():
            try:
                plan = self._best(op, signature, args)
            except Exception as error:  # no kernel may be captured: that is the capture's affair
                log.info("warmup.not_capturable", op=op.name, error=f"{type(error).__name__}"[:200])
                return
            plan.call(*args)
