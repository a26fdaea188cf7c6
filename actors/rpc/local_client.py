"""LocalPort: the device of this process as its fleet sees it. No ray, no socket, no copy, no pickle."""

from __future__ import annotations

import asyncio
import os
import platform
import weakref
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from torch import Tensor

from layerzero._util.fork_safety import renew_after_fork
from layerzero.actors.device.local_device import LocalDevice
from layerzero.actors.rpc.client import DeviceFacts, DeviceHealth, DeviceState
from layerzero.actors.rpc.identity import facts_of
from layerzero.actors.rpc.server import Envelope, Host, install_host, uninstall_host
from layerzero.actors.rpc.settling import Numbers, settle
from layerzero.actors.rpc.tensors import RemoteTensor
from layerzero.spec.errors import DeadlineExceededError, DeviceLostError, RuntimeClosedError

_CLIENT = "here"


class LocalPort:
    """The device of this process; `DevicePort` says what each method promises.

    `restart` begins a new generation of the host: its tensors go, its preparations run again.
    """

    def __init__(self, device: LocalDevice, name: str) -> None:
        self._device = device
        self.name = name
        self._host_of: Host | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._numbers = Numbers()
        self._prepared: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._restarts = 0
        self._back: asyncio.Future[None] | None = None  # while it restarts
        self._closed = False
        self._forked = False
        renew_after_fork(self)

    def after_fork(self) -> None:
        """In a forked child the host's loop does not run; the device itself begins anew and works."""
        self._host_of = None
        self._numbers = Numbers()
        self._back = None

    @property
    def _host(self) -> Host:
        if self._closed:
            raise RuntimeClosedError(f"device {self.name!r} is closed")
        loop = asyncio.get_running_loop()
        if self._host_of is None or (self._loop is not loop and self._idle_elsewhere()):
            if self._host_of is not None:
                uninstall_host(self._host_of)
            self._host_of = Host(self._device, self.name)
            self._loop = loop
            install_host(self._host_of)
        elif self._loop is not loop:
            raise RuntimeError(
                f"device {self.name!r} hosts code on another event loop, which still runs; use it from there"
            )
        return self._host_of

    def _idle_elsewhere(self) -> bool:
        return self._loop is None or self._loop.is_closed()

    @property
    def state(self) -> DeviceState:
        """Where it stands now."""
        if self._closed:
            return DeviceState.CLOSED
        if self._back is not None:
            return DeviceState.RESTARTING
        return DeviceState.RUNNING if self._host_of is None else self._host_of.state

    @property
    def facts(self) -> DeviceFacts:
        """What it is."""
        return facts_of(self._device, self.name, self._host.generation, platform.node())

    @property
    def load(self) -> int:
        """Calls that run or wait."""
        return 0 if self._host_of is None else self._host_of.in_flight

    async def back(self) -> None:
        """Wait until it has restarted."""
        if self._back is not None:
            await asyncio.shield(self._back)

    async def run(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        timeout_s: float | None = None,
        idempotent: bool = False,
        wait_for_restart: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run `fn` here; see `DevicePort.run`."""
        host = await self._serving(timeout_s)
        return await self._settled(host, lambda: host.invoke(fn, args, kwargs), timeout_s)

    async def _serving(self, timeout_s: float | None = None) -> Host:
        """The host, waiting for the next one while the device restarts.

        Raises: DeadlineExceededError: `timeout_s` has passed.
        """
        while self._back is not None:
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.shield(self._back)
            except TimeoutError:
                raise DeadlineExceededError(f"device {self.name!r} did not come back in time") from None
        return self._host

    async def _settled(self, host: Host, work: Callable[[], Any], timeout_s: float | None) -> Any:
        number = self._numbers.take()
        envelope = Envelope(_CLIENT, number, self._numbers.floor, host.generation, (), timeout_s)
        try:
            outcome = await host.serve(envelope, work)
        except asyncio.CancelledError:
            host.cancel(_CLIENT, number)
            raise
        finally:
            self._numbers.settle(number)
        return settle(outcome, self.name, here=True)

    async def stream(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        resume: bool = False,
        wait_for_restart: bool = True,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        """The items of `fn`; see `DevicePort.stream`."""
        host = await self._serving()
        if resume:
            kwargs = {"so_far": [], **kwargs}
        queue: asyncio.Queue[Any] = asyncio.Queue(maxsize=64)
        ended = object()

        async def work() -> Any:
            return await host.emit(fn, args, kwargs, queue.put)

        async def pump() -> Any:
            try:
                return await self._settled(host, work, None)
            finally:
                await queue.put(ended)

        task = asyncio.get_running_loop().create_task(pump())
        try:
            while (item := await queue.get()) is not ended:
                yield item
            await task
        finally:
            if not task.done():
                task.cancel()
                while not task.done():  # it may be putting its end mark into a full queue
                    if not queue.empty():
                        queue.get_nowait()
                    await asyncio.sleep(0)

    async def control(self, kind: str, body: Any = None, *, timeout_s: float = 10.0) -> Any:
        """Ask a handler of the hosted code; see `DevicePort.control`."""
        async with asyncio.timeout(timeout_s):
            return await (await self._serving()).handle(kind, body)

    async def put(self, tensor: Tensor | RemoteTensor) -> RemoteTensor:
        """Keep a compact copy of a tensor under a handle."""
        shelf = self._host.shelf
        own = shelf.get(tensor) if isinstance(tensor, RemoteTensor) else tensor
        copy = own.detach().to(self._device.device, copy=True).contiguous()
        return shelf.add(copy).when_gone(_freeing(weakref.ref(self)))

    async def fetch(self, handle: RemoteTensor) -> Tensor:
        """A copy of a kept tensor."""
        try:
            return self._host.shelf.get(handle).detach().to("cpu", copy=True)
        except LookupError as error:
            raise DeviceLostError(str(error), retryable=False) from error

    def _free(self, key: str) -> None:
        if self._host_of is not None:
            self._host_of.shelf.free(key)

    async def health(self) -> DeviceHealth:
        """How the device is now."""
        host = self._host_of
        blocked = {k: v.got for k, v in self._device.health.blocked().items()}
        return DeviceHealth(
            name=self.name,
            state=self.state,
            generation="" if host is None else host.generation,
            node=platform.node(),
            pid=os.getpid(),
            in_flight=self.load,
            restarts=self._restarts,
            blocked=blocked,
        )

    async def drain(self, timeout_s: float) -> bool:
        """Take no more calls; those that run end."""
        return await self._host.drain(timeout_s)

    async def restart(self, *, drain_s: float = 30.0) -> None:
        """Begin a new generation in the same process."""
        old = await self._serving()
        back = self._back = asyncio.get_running_loop().create_future()
        try:
            await old.drain(drain_s)
            uninstall_host(old)
            self._host_of = None
            self._restarts += 1
            self._device.refresh()
            host = self._host
            for fn, args in self._prepared:
                await self._settled(host, partial(host.invoke, fn, args, {}), None)
        finally:
            self._back = None
            back.set_result(None)

    async def prepare(self, fn: Callable[..., Any], /, *args: Any) -> Any:
        """Run `fn` now and after each restart."""
        result = await self.run(fn, *args)
        self._prepared.append((fn, args))
        return result

    async def close(self) -> None:
        """Cut off what runs and forget the host; the device itself belongs to the runtime."""
        if self._closed:
            return
        host, self._closed = self._host_of, True
        if host is not None:
            await host.drain(0.0)
            uninstall_host(host)


def _freeing(port: weakref.ref[LocalPort]) -> Callable[[str], None]:
    def free(key: str) -> None:
        alive = port()
        if alive is not None:
            alive._free(key)

    return free
