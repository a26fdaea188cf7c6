"""DevicePool: every device of a runtime, here or in a cluster, and code sent to them. Imports no ray.

Code moves to a device, tensors do not move to the code: inside `run`, `layerzero.*` is local.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import anyio
from torch import Tensor

from layerzero.actors.device.local_device import LocalDevice
from layerzero.actors.remote.losses import LostIncarnations
from layerzero.actors.rpc.client import DeviceClient, DeviceFacts, DeviceHealth, DeviceState
from layerzero.actors.rpc.local_client import LocalClient
from layerzero.actors.rpc.tensors import RemoteTensor
from layerzero.ops.checks import need_number
from layerzero.spec.errors import DeadlineExceededError, DeviceLostError, RuntimeClosedError
from layerzero.spec.settings import Settings

# A name, a device, None for the least loaded one, or what takes one of those that serve.
On = str | DeviceClient | Callable[[Sequence[DeviceClient]], DeviceClient] | None
_RETURNING = (DeviceState.STARTING, DeviceState.RESTARTING, DeviceState.HUNG)  # it will run again, or try to


class DevicePool:
    """The devices of a runtime by name; `on` takes a name, a device, or None for the least loaded one.

    Where a call may move, `on` also takes a function: it gets the devices that serve and returns one of them,
    again after each loss.

    `leave` is awaited by `close`, after the devices are closed. `patience_s` bounds how long a call waits in
    all where no device serves.
    """

    def __init__(
        self,
        devices: Mapping[str, DeviceClient],
        leave: Callable[[], Awaitable[None]] | None = None,
        patience_s: float = 60.0,
    ) -> None:
        self.devices = dict(devices)
        self._leave = leave
        self._patience_s = patience_s
        self._closed = False

    def __repr__(self) -> str:
        return f"DevicePool({', '.join(f'{d.name}: {d.state.value}' for d in self.devices.values())})"

    @property
    def facts(self) -> tuple[DeviceFacts, ...]:
        """What each device is."""
        return tuple(device.facts for device in self.devices.values())

    @property
    def nodes(self) -> dict[str, list[str]]:
        """The names of the devices on each node."""
        names: dict[str, list[str]] = {}
        for facts in self.facts:
            names.setdefault(facts.node, []).append(facts.name)
        return names

    def device(self, on: On = None) -> DeviceClient:
        """The device of a name, or the one that a call without `on` would get now.

        Raises: ValueError: no device has that name; the message lists them. RuntimeClosedError: after close.
            DeviceLostError: no device takes calls.
        """
        self._refuse_closed()
        if on is None:
            return self._least_loaded()
        if callable(on):
            return on(self._running() or [self._least_loaded()])
        if not isinstance(on, str):
            return on
        device = self.devices.get(on)
        if device is None:
            raise ValueError(f"on needs one of {', '.join(map(repr, self.devices))}, got {on!r}")
        return device

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeClosedError("this pool is closed; open a runtime with layerzero.start()")

    def _running(self) -> list[DeviceClient]:
        self._refuse_closed()
        return [device for device in self.devices.values() if device.state is DeviceState.RUNNING]

    def _least_loaded(self) -> DeviceClient:
        # None runs: one that will.
        coming = [device for device in self.devices.values() if device.state in _RETURNING]
        for group in (self._running(), coming):
            if group:
                return min(group, key=lambda device: device.load)
        raise DeviceLostError(f"no device takes calls: {self._states}", retryable=True)

    @property
    def _states(self) -> str:
        return ", ".join(f"{d.name} is {d.state.value}" for d in self.devices.values())

    async def _wait_for_device(self, patience_s: float, deadline: float | None) -> float:
        """Wait until some device may serve again; what is left of the patience.

        Raises: DeviceLostError: none came back, or none will. DeadlineExceededError: the deadline has passed.
        """
        coming = [device for device in self.devices.values() if device.state in _RETURNING]
        if not coming:
            raise DeviceLostError(f"no device takes calls: {self._states}", retryable=True)
        now_s = anyio.current_time()
        until_s = now_s + patience_s if deadline is None else min(now_s + patience_s, deadline)
        with anyio.move_on_at(until_s) as waited:
            async with anyio.create_task_group() as tasks:

                async def first(device: DeviceClient) -> None:
                    await device.wait_until_serving()
                    tasks.cancel_scope.cancel()

                for device in coming:
                    tasks.start_soon(first, device)
        if not waited.cancelled_caught:
            return patience_s - (anyio.current_time() - now_s)
        if deadline is not None and until_s == deadline:
            raise DeadlineExceededError(f"no device came back in time: {self._states}")
        what = f"no device came back within placement_timeout_s={self._patience_s:g}"
        raise DeviceLostError(f"{what}: {self._states}", retryable=True)

    async def _pick(self, losses: LostIncarnations, on: On) -> DeviceClient:
        """The least loaded device, of those that the call has not lost where there are such; waits for one.

        Where `on` is a function, the one that it takes of them.

        Raises: DeviceLostError: none takes calls. DeadlineExceededError, RuntimeClosedError.
        """
        try:
            while not (running := self._running()):
                losses.patience_s = await self._wait_for_device(losses.patience_s, losses.deadline)
        except DeviceLostError as nowhere:
            raise (losses.gave_up_error(nowhere) if losses.begun else nowhere) from losses.last
        # A device that has just lost this call may lose it again, for the same reason.
        untried = [each for each in running if each.name not in losses.tried]
        if callable(on):
            return on(untried or running)
        return min(untried or running, key=lambda each: each.load)

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

        A coroutine function runs on the device's event loop, where concurrent calls meet in one batcher; a
        plain function on a thread. Without `on`, a call that has not started moves on when its device is
        lost, and so does an `idempotent` one that has; where no device serves it waits
        `Settings.placement_timeout_s`.

        Raises: what `fn` raises. DeviceLostError, DeadlineExceededError, TypeError: see `DeviceClient.run`.
            TypeError, ValueError: `fn` is no function, `timeout_s` no number of seconds.
        """
        if not callable(fn):
            raise TypeError(f"fn needs a function, got {type(fn).__name__}")
        if timeout_s is not None:
            need_number("timeout_s", timeout_s, low=0.0)
        if on is not None and not callable(on):
            device = self.device(on)
            # Named by the caller: it waits for this device and goes nowhere else.
            return await device.run(fn, *args, timeout_s=timeout_s, idempotent=idempotent, **kwargs)
        losses = LostIncarnations(idempotent, self._patience_s, timeout_s)
        while True:
            device = await self._pick(losses, on)
            try:
                remaining_s = losses.remaining_s
                return await device.run(fn, *args, timeout_s=remaining_s, wait_for_restart=False, **kwargs)
            # Raises where the call may not move; otherwise the loop picks another device.
            except DeviceLostError as error:
                losses.add(error, device.name)

    async def stream(
        self, fn: Callable[..., Any], /, *args: Any, on: On = None, resume: bool = False, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """The items that the async generator function `fn` yields on a device; see `DeviceClient.stream`.

        With `resume` and without `on`, a stream continues elsewhere when its device is lost.
        """
        if on is not None and not callable(on):
            device = self.device(on)
            async for item in device.stream(fn, *args, resume=resume, **kwargs):
                yield item
            return
        so_far: list[Any] = list(kwargs.pop("so_far", ())) if resume else []
        losses = LostIncarnations(resume, self._patience_s, None)
        while True:
            device = await self._pick(losses, on)
            named = {**kwargs, "so_far": list(so_far)} if resume else kwargs
            try:
                async for item in device.stream(fn, *args, wait_for_restart=False, **named):
                    if resume:
                        so_far.append(item)
                    losses.begun = 0  # it gets on
                    yield item
                return
            except DeviceLostError as error:
                losses.add(error, device.name)

    async def forward(
        self, take: Callable[[Any], None], fn: Callable[..., Any], /, *args: Any, on: On = None,
        resume: bool = False, **kwargs: Any,
    ) -> None:  # fmt: skip
        """Call `take` with each item that `stream` would give; see `DeviceClient.forward`."""
        if on is not None and not callable(on):
            await self.device(on).forward(take, fn, *args, resume=resume, **kwargs)
            return
        so_far: list[Any] = list(kwargs.pop("so_far", ())) if resume else []
        losses = LostIncarnations(resume, self._patience_s, None)

        def keep(item: Any) -> None:
            so_far.append(item)
            losses.begun = 0  # it gets on
            take(item)

        while True:
            device = await self._pick(losses, on)
            named = {**kwargs, "so_far": list(so_far)} if resume else kwargs
            try:
                await device.forward(keep if resume else take, fn, *args, wait_for_restart=False, **named)
                return
            except DeviceLostError as error:
                losses.add(error, device.name)

    async def prepare(self, fn: Callable[..., Any], /, *args: Any) -> dict[str, Any]:
        """Run `fn(*args)` on every device now, and on each again at the start of its later incarnations.

        What loads a model, registers a kernel or puts a policy in force belongs here. The results by device.
        """
        return await on_each(self.devices.values(), lambda device: device.prepare(fn, *args))

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
        return all((await on_each(devices, lambda device: device.drain(timeout_s))).values())

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


async def on_each(
    devices: Collection[DeviceClient], work: Callable[[DeviceClient], Awaitable[Any]]
) -> dict[str, Any]:
    """What `work` gives for each of `devices`, by name; it runs for all of them at once.

    Raises: the first error, as itself: callers know it by its type.
    """
    results: dict[str, Any] = {}

    async def one(device: DeviceClient) -> None:
        results[device.name] = await work(device)

    try:
        async with anyio.create_task_group() as tasks:
            for device in devices:
                tasks.start_soon(one, device)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from group
    return {device.name: results[device.name] for device in devices}


def local_pool(device: LocalDevice) -> DevicePool:
    """The pool of one process: its default device, under torch's name for it."""
    name = str(device.device)
    return DevicePool({name: LocalClient(device, name)})


async def open_pool(settings: Settings, opener: str) -> DevicePool:
    """The pool of the cluster that `settings` name; each actor opens its device with the function `opener`.

    Raises: ConfigurationError: the cluster cannot be joined or gives no place in time. DeviceLostError: a
        device did not start. BackendNotAvailableError: ray is not installed.
    """
    from layerzero.actors.remote.cluster import join  # imports ray

    cluster = join(settings)
    devices = await cluster.place(opener)
    return DevicePool({d.name: d for d in devices}, cluster.leave, settings.placement_timeout_s)
