"""Fleet: every device of a runtime, here or in a cluster, and code sent to them. Imports no ray.

Code moves to a device, tensors do not move to the code: inside `run`, `layerzero.*` is local.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import anyio
from torch import Tensor

from layerzero import log
from layerzero.actors.inprocess import LocalPort
from layerzero.actors.local import LocalDevice
from layerzero.actors.port import DeviceFacts, DeviceHealth, DevicePort, DeviceState
from layerzero.actors.tensors import RemoteTensor
from layerzero.errors import DeviceLostError, RuntimeClosedError
from layerzero.ops.checks import need_number
from layerzero.settings import Settings

On = str | DevicePort | None


class Fleet:
    """The devices of a runtime by name; `on` takes a name, a device, or None for the least loaded one.

    `leave` is awaited by `close`, after the devices are closed.
    """

    def __init__(
        self, devices: Mapping[str, DevicePort], leave: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self.devices = dict(devices)
        self._leave = leave
        self._closed = False

    def __repr__(self) -> str:
        return f"Fleet({', '.join(f'{d.name}: {d.state.value}' for d in self.devices.values())})"

    @property
    def facts(self) -> tuple[DeviceFacts, ...]:
        """What each device is."""
        return tuple(device.facts for device in self.devices.values())

    @property
    def nodes(self) -> dict[str, list[str]]:
        """The names of the devices on each node."""
        found: dict[str, list[str]] = {}
        for facts in self.facts:
            found.setdefault(facts.node, []).append(facts.name)
        return found

    def device(self, on: On = None) -> DevicePort:
        """The device of a name, or the one that a call without `on` would get now.

        Raises: ValueError: no device has that name; the message lists them. RuntimeClosedError: after close.
            DeviceLostError: no device takes calls.
        """
        if self._closed:
            raise RuntimeClosedError("this fleet is closed; open a runtime with layerzero.start()")
        if on is None:
            return self._least()
        if not isinstance(on, str):
            return on
        found = self.devices.get(on)
        if found is None:
            raise ValueError(f"on needs one of {', '.join(map(repr, self.devices))}, got {on!r}")
        return found

    def _least(self, without: frozenset[str] = frozenset()) -> DevicePort:
        serving = [d for d in self.devices.values() if d.name not in without]
        running = [d for d in serving if d.state is DeviceState.RUNNING]
        # None runs: wait with one that will.
        coming = [d for d in serving if d.state in (DeviceState.RESTARTING, DeviceState.STARTING)]
        for group in (running, coming):
            if group:
                return min(group, key=lambda device: device.load)
        states = ", ".join(f"{d.name} is {d.state.value}" for d in self.devices.values())
        raise DeviceLostError(f"no device takes calls: {states}", retryable=True)

    def _others(self, device: DevicePort) -> bool:
        return any(d is not device and d.state is DeviceState.RUNNING for d in self.devices.values())

    def _next(self, lost: DevicePort, tried: set[str]) -> DevicePort:
        """Where a call goes on: to a device that was not tried, or with the lost one when that comes back."""
        if lost.state is DeviceState.RESTARTING and not self._others(lost):
            return lost
        return self._least(frozenset(tried))

    # -- code ------------------------------------------------------------------------------------

    async def run(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        on: On = None,
        timeout_s: float | None = None,
        idempotent: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run `fn(*args, **kwargs)` on a device and return its result; there, `layerzero.*` is local.

        A coroutine function runs on the device's event loop, where concurrent calls meet in one lane; a plain
        function on a thread. Without `on`, a call that has not started moves on when its device is lost.

        Raises: what `fn` raises. DeviceLostError, DeadlineExceededError, TypeError: see `DevicePort.run`.
            TypeError, ValueError: `fn` is no function, `timeout_s` no number of seconds.
        """
        if not callable(fn):
            raise TypeError(f"fn needs a function, got {type(fn).__name__}")
        if timeout_s is not None:
            need_number("timeout_s", timeout_s, low=0.0)
        tried: set[str] = set()
        device = self.device(on)
        while True:
            try:
                return await device.run(
                    fn,
                    *args,
                    timeout_s=timeout_s,
                    idempotent=idempotent,
                    wait_for_restart=on is not None or not self._others(device),
                    **kwargs,
                )
            except DeviceLostError as error:
                tried.add(device.name)
                if (
                    on is not None
                    or not (error.retryable or idempotent)
                    or device.state is DeviceState.RUNNING
                ):
                    raise
                log.warning("fleet.moved", device=device.name, why=str(error)[:200])
                device = self._next(device, tried)

    async def stream(
        self, fn: Callable[..., Any], /, *args: Any, on: On = None, resume: bool = False, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """The items that the async generator function `fn` yields on a device; see `DevicePort.stream`.

        With `resume` and without `on`, a stream goes on elsewhere when its device does not come back.
        """
        tried: set[str] = set()
        so_far: list[Any] = list(kwargs.pop("so_far", ()))
        device = self.device(on)
        while True:
            extra = {"so_far": list(so_far)} if so_far else {}
            try:
                wait = on is not None or not self._others(device)
                items = device.stream(fn, *args, resume=resume, wait_for_restart=wait, **kwargs, **extra)
                async for item in items:
                    so_far.append(item)
                    yield item
                return
            except DeviceLostError as error:
                tried.add(device.name)
                if on is not None or not (resume or (error.retryable and not so_far)):
                    raise
                log.warning("fleet.moved", device=device.name, why=str(error)[:200])
                device = self._next(device, tried)

    async def prepare(self, fn: Callable[..., Any], /, *args: Any) -> dict[str, Any]:
        """Run `fn(*args)` on every device now, and on each again at the start of its later lives.

        What loads a model, registers a kernel or puts a policy in force belongs here. The results by device.
        """
        results: dict[str, Any] = {}
        with _single():
            async with anyio.create_task_group() as tasks:
                for device in self.devices.values():
                    tasks.start_soon(_keep, results, device.name, lambda d=device: d.prepare(fn, *args))
        return {name: results[name] for name in self.devices}

    # -- tensors ---------------------------------------------------------------------------------

    async def ship(self, tensor: Tensor | RemoteTensor, *, to: On) -> RemoteTensor:
        """Move a tensor, or one that lives on another device, to a device; a compact copy.

        Raises: DeviceLostError: the tensor was lost with its device. TypeError: it is none.
        """
        if not isinstance(tensor, Tensor | RemoteTensor):
            raise TypeError(f"tensor needs a torch.Tensor or a handle of one, got {type(tensor).__name__}")
        target = self.device(to)
        if isinstance(tensor, RemoteTensor) and tensor.device != target.name:
            return await target.put(tensor, self.device(tensor.device))  # type: ignore[call-arg]
        return await target.put(tensor)

    async def fetch(self, handle: RemoteTensor) -> Tensor:
        """A copy, in this process, of a tensor that lives on a device."""
        return await self.device(handle.device).fetch(handle)

    # -- health and the end ----------------------------------------------------------------------

    async def health(self) -> tuple[DeviceHealth, ...]:
        """How each device is."""
        return tuple([await device.health() for device in self.devices.values()])

    async def drain(self, timeout_s: float = 30.0, *, on: On = None) -> bool:
        """Let a device, or all, take no more calls and end those that run; False if some were cut off."""
        devices = list(self.devices.values()) if on is None else [self.device(on)]
        ended: dict[str, Any] = {}
        with _single():
            async with anyio.create_task_group() as tasks:
                for device in devices:
                    tasks.start_soon(_keep, ended, device.name, lambda d=device: d.drain(timeout_s))
        return all(ended.values())

    async def rolling_restart(self, *, drain_s: float = 30.0) -> None:
        """Restart the devices one after another, each only when the one before serves again.

        Raises: DeviceLostError: a device did not come back; those after it were not touched.
        """
        for device in self.devices.values():
            await device.restart(drain_s=drain_s)

    async def close(self) -> None:
        """Close every device and leave the cluster. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for device in self.devices.values():
            await device.close()
        if self._leave is not None:
            await self._leave()


async def _keep(results: dict[str, Any], name: str, work: Callable[[], Awaitable[Any]]) -> None:
    results[name] = await work()


@contextmanager
def _single() -> Iterator[None]:
    """Let the first of a task group's errors out as itself: callers know it by its type."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from group


def local_fleet(device: LocalDevice) -> Fleet:
    """The fleet of one process: its default device, under torch's name for it."""
    name = str(device.device)
    return Fleet({name: LocalPort(device, name)})


async def open_fleet(settings: Settings, opener: str) -> Fleet:
    """The fleet of the cluster that `settings` name; each actor opens its device with the function `opener`.

    Raises: ConfigurationError: the cluster cannot be joined or gives no place in time. DeviceLostError: a
        device did not start. BackendNotAvailableError: ray is not installed.
    """
    from layerzero.actors.cluster import join  # imports ray

    cluster = join(settings)
    devices = await cluster.place(opener)
    return Fleet({device.name: device for device in devices}, leave=cluster.leave)
