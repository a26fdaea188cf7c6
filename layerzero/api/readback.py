"""`to_host`: a read-back that starts when it is called; `run_ahead`: a loop in front of its reader."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from layerzero.calls.blocking import context_runtime
from layerzero.calls.scope import SCOPE
from layerzero.native import FAST_PATH
from layerzero.ops import checks
from layerzero.runtime import ACTIVE
from layerzero.scheduler.core.pending_call import PendingCall
from layerzero.scheduler.loop_driver import LoopDriver
from layerzero.scheduler.modes.readback import compact
from layerzero.scheduler.modes.streams import resume_modes, suspend_modes
from layerzero.scheduler.modes.torch_modes import Modes


@dataclass(slots=True, eq=False, repr=False)
class HostReadback(Coroutine[Any, Any, Tensor]):
    """A tensor on its way to the host: awaited now, later, several times one after another, or never.

    It is a coroutine, so that a task can be made of it.
    """

    _tensor: Tensor | None
    _call: PendingCall | None = None
    _driver: LoopDriver | None = None
    _capture_modes: Callable[[], Modes] | None = None
    _steps: Generator[Any, Any, Tensor] | None = None

    def __await__(self) -> Generator[Any, Any, Tensor]:
        """Wait for the copy. Raises: what it raised. RuntimeError: another task waits for it now."""
        if self._tensor is None:
            self._tensor = yield from self._arrive()
        return self._tensor

    def _arrive(self) -> Generator[Any, Any, Tensor]:
        call, driver = self._call, self._driver
        assert call is not None and driver is not None and self._capture_modes is not None
        if call.done():
            copied: Tensor = call.result()
            return copied
        modes = self._capture_modes()  # of who waits, which need not be those of who asked
        suspend_modes(modes, driver)
        try:
            copied = yield from call.__await__()
            return copied
        finally:
            resume_modes(modes, driver)

    @property
    def done(self) -> bool:
        """Whether awaiting it returns at once."""
        return self._tensor is not None or (self._call is not None and self._call.done())

    def _begun(self) -> Generator[Any, Any, Tensor]:
        if self._steps is None:
            self._steps = self.__await__()
        return self._steps

    def _step(self, step: Callable[..., Any], *given: Any) -> Any:
        try:
            return step(*given)
        except BaseException:  # its end, too: the next task begins a wait of its own
            self._steps = None
            raise

    def send(self, value: Any) -> Any:
        """One step of the wait, as a task makes it."""
        return self._step(self._begun().send, value)

    def throw(self, *error: Any) -> Any:
        """An error at the point of the wait, as a cancelled task gets it."""
        return self._step(self._begun().throw, *error)

    def close(self) -> None:
        """End the wait; the copy is made all the same."""
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.close()


def to_host(tensor: Tensor) -> HostReadback:
    """`tensor` in host memory, by itself: no piece of a batch, safe to read, pickle and keep.

    The copy starts here, behind the work that writes `tensor`; await the result now or later. A loop that
    starts its next step before it awaits the last copy keeps the device busy while it reads. Copies that one
    turn of the loop asks for share a transfer and a wake; the loop is never blocked.

    Args: tensor of any shape and dtype, on the CPU or a CUDA device.
    Returns: an awaitable of a detached CPU tensor of the same shape and dtype.
    Raises: TypeError: the argument is no tensor. RuntimeError: a CUDA tensor outside of a running loop.

    Example:
        >>> import asyncio, torch, layerzero as lz
        >>> async def main():
        ...     reading = lz.to_host(torch.arange(3) * 2)
        ...     return (await reading).tolist()
        >>> asyncio.run(main())
        [0, 2, 4]
    """
    if not isinstance(tensor, Tensor):
        raise _no_tensor(tensor)
    if FAST_PATH.module is not None:
        owned: Tensor = FAST_PATH.module.own(tensor)
        if owned is not NotImplemented:
            return HostReadback(owned)
    plain = tensor.detach()
    if plain.device.type != "cuda":
        return HostReadback(compact(plain.cpu() if plain.device.type != "cpu" else plain))
    device = None if SCOPE.get() is not None else ACTIVE.devices.get(plain.device)
    if device is None:
        device = context_runtime().device(plain.device)
    driver = device.loop_drivers.current()
    modes = device.capture_modes()
    assert modes.stream is not None and driver.readback is not None
    return HostReadback(None, driver.readback.start(plain, modes.stream), driver, device.capture_modes)


async def run_ahead(
    step: Callable[[Tensor], Awaitable[Tensor]], ids: Tensor, *, max_steps: int | None = None
) -> AsyncGenerator[Tensor, None]:
    """Yield on the host what `step` returns, step after step, each step begun with the result before it.

    On CUDA step n + 1 is launched from result n on the device before n is on the host, so that the device
    computes while the reader decides. Leaving the loop drops what ran ahead: at most one step. Give pages
    back behind the loop, not inside it; on one stream their next sequence comes after that step. On a
    device that answers when it has computed, nothing runs ahead. The results are the same either way.

    Args: `step` takes `ids` and returns what the next step takes, both on the same device. `max_steps` ends
        the loop after so many results; None never does.
    Raises: ValueError: `max_steps` is below 1. TypeError: `step` returned no tensor. What `step` raises.

    Example:
        >>> import asyncio, contextlib, torch, layerzero as lz
        >>> async def main():
        ...     async def step(ids):
        ...         return ids + 1
        ...     async with contextlib.aclosing(lz.run_ahead(step, torch.tensor([5]), max_steps=3)) as tokens:
        ...         return [int(token) async for token in tokens]
        >>> asyncio.run(main())
        [6, 7, 8]
    """
    if not callable(step):
        raise TypeError(f"step needs a function of the ids, got {type(step).__name__}")
    if max_steps is not None:
        checks.need_int("max_steps", max_steps, low=1)
    steps = 0
    reading: HostReadback | None = None
    while max_steps is None or steps < max_steps:
        try:
            ids = await step(ids)
        except Exception:
            if reading is not None:  # computed before it, and the reader's
                yield await reading
            raise
        started = to_host(ids)
        steps += 1
        if reading is not None:
            yield await reading
            reading = None
        if started.done:
            host = await started
            # A step may write over what it is given, which no copy that a device makes follows.
            yield host.clone() if host.data_ptr() == ids.data_ptr() else host
        else:
            reading = started
    if reading is not None:
        yield await reading


def _no_tensor(value: object) -> TypeError:
    elsewhere = getattr(value, "advice", None)  # a handle of another process's tensor
    advice = f": {elsewhere}" if isinstance(elsewhere, str) else ""
    return TypeError(f"tensor needs a torch.Tensor, got {type(value).__name__}{advice}")
