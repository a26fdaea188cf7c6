"""LocalClient: the device of this process as its pool sees it. No ray, no socket, no copy, no pickle."""

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
from layerzero.actors.rpc.server import CallServer, RequestHeader, install_server, uninstall_server
from layerzero.actors.rpc.settling import RequestNumbers, result_of
from layerzero.actors.rpc.tensors import RemoteTensor
from layerzero.spec.errors import DeadlineExceededError, DeviceLostError, RuntimeClosedError

_CLIENT = "here"


class LocalClient:
    """The device of this process; `DeviceClient` says what each method promises.

    `restart` begins a new incarnation of the host: its tensors go, its preparations run again.
    """

    def __init__(self, device: LocalDevice, name: str) -> None:
        self._device = device
        self.name = name
        self._current_server: CallServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._numbers = RequestNumbers()
        self._prepared: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._restarts = 0
        self._restarting: asyncio.Future[None] | None = None  # while it restarts
        self._closed = False
        self._forked = False
        renew_after_fork(self)

    def after_fork(self) -> None:
        """In a forked child the host's loop does not run; the device itself begins anew and works."""
        self._current_server = None
        self._numbers = RequestNumbers()
        self._restarting = None

    @property
    def _server(self) -> CallServer:
        if self._closed:
            raise RuntimeClosedError(f"device {self.name!r} is closed")
        loop = asyncio.get_running_loop()
        has_ended = self._loop is None or self._loop.is_closed()
        if self._current_server is None or (self._loop is not loop and has_ended):
            if self._current_server is not None:
                uninstall_server(self._current_server)
            self._current_server = CallServer(self._device, self.name)
            self._loop = loop
            install_server(self._current_server)
        elif self._loop is not loop:
            raise RuntimeError(
                f"device {self.name!r} hosts code on another event loop, which still runs; use it from there"
            )
        return self._current_server

    @property
    def state(self) -> DeviceState:
        """Its present state."""
        if self._closed:
            return DeviceState.CLOSED
        if self._restarting is not None:
            return DeviceState.RESTARTING
        return DeviceState.RUNNING if self._current_server is None else self._current_server.state

    @property
    def facts(self) -> DeviceFacts:
        """What it is."""
        return facts_of(self._device, self.name, self._server.incarnation, platform.node())

    @property
    def load(self) -> int:
        """Calls that run or wait."""
        return 0 if self._current_server is None else self._current_server.in_flight

    async def wait_until_serving(self) -> None:
        """Wait until it has restarted."""
        if self._restarting is not None:
            await asyncio.shield(self._restarting)

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
        """Run `fn` here; see `DeviceClient.run`."""
        host = await self._serving(timeout_s)
        return await self._run_once(host, lambda: host.invoke(fn, args, kwargs), timeout_s)

    async def _serving(self, timeout_s: float | None = None) -> CallServer:
        """The host, once it serves. Raises: DeadlineExceededError: `timeout_s` has passed."""
        while self._restarting is not None:
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.shield(self._restarting)
            except TimeoutError:
                raise DeadlineExceededError(f"device {self.name!r} did not come back in time") from None
        return self._server

    async def _run_once(self, host: CallServer, work: Callable[[], Any], timeout_s: float | None) -> Any:
        number = self._numbers.new_number()
        envelope = RequestHeader(
            _CLIENT, number, self._numbers.ack_watermark, host.incarnation, (), timeout_s
        )
        try:
            outcome = await host.serve(envelope, work)
        except asyncio.CancelledError:
            host.cancel(_CLIENT, number)
            raise
        finally:
            self._numbers.ack(number)
        return result_of(outcome, self.name, same_process=True)

    async def stream(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        resume: bool = False,
        wait_for_restart: bool = True,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        """The items of `fn`; see `DeviceClient.stream`."""
        host = await self._serving()
        if resume:
            kwargs = {"so_far": [], **kwargs}
        queue: asyncio.Queue[Any] = asyncio.Queue(maxsize=64)
        ended = object()

        async def work() -> Any:
            return await host.emit(fn, args, kwargs, queue.put)

        async def pump() -> Any:
            try:
                return await self._run_once(host, work, None)
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

    async def forward(
        self,
        take: Callable[[Any], None],
        fn: Callable[..., Any],
        /,
        *args: Any,
        resume: bool = False,
        wait_for_restart: bool = True,
        **kwargs: Any,
    ) -> None:
        """Pass on the items of `fn`; see `DeviceClient.forward`."""
        host = await self._serving()
        if resume:
            kwargs = {"so_far": [], **kwargs}

        async def emit(item: Any) -> None:
            take(item)
            await asyncio.sleep(0)

        await self._run_once(host, lambda: host.emit(fn, args, kwargs, emit), None)

    async def control(self, kind: str, body: Any = None, *, timeout_s: float = 10.0) -> Any:
        """Ask a handler of the hosted code; see `DeviceClient.control`."""
        async with asyncio.timeout(timeout_s):
            return await (await self._serving()).handle(kind, body)

    async def put(self, tensor: Tensor | RemoteTensor) -> RemoteTensor:
        """Keep a compact copy of a tensor under a handle."""
        store = self._server.tensor_store
        local = store.get(tensor) if isinstance(tensor, RemoteTensor) else tensor
        copy = local.detach().to(self._device.device, copy=True).contiguous()
        free = weakref.WeakMethod(self._free)

        def on_collected(key: str) -> None:
            if (free_now := free()) is not None:
                free_now(key)

        return store.add(copy).on_collected(on_collected)

    async def fetch(self, handle: RemoteTensor) -> Tensor:
        """A copy of a kept tensor."""
        try:
            return self._server.tensor_store.get(handle).detach().to("cpu", copy=True)
        except LookupError as error:
            raise DeviceLostError(str(error), retryable=False) from error

    def _free(self, key: str) -> None:
        if self._current_server is not None:
            self._current_server.tensor_store.free(key)

    async def health(self) -> DeviceHealth:
        """How the device is now."""
        host = self._current_server
        blocked = {k: v.got for k, v in self._device.health.blocked_kernels().items()}
        return DeviceHealth(
            name=self.name,
            state=self.state,
            incarnation="" if host is None else host.incarnation,
            node=platform.node(),
            pid=os.getpid(),
            in_flight=self.load,
            restarts=self._restarts,
            blocked=blocked,
        )

    async def drain(self, timeout_s: float) -> bool:
        """Take no more calls; those that run end."""
        return await self._server.drain(timeout_s)

    async def restart(self, *, drain_s: float = 30.0) -> None:
        """Begin a new incarnation in the same process."""
        old = await self._serving()
        restarting = self._restarting = asyncio.get_running_loop().create_future()
        try:
            await old.drain(drain_s)
            uninstall_server(old)
            self._current_server = None
            self._restarts += 1
            self._device.refresh()
            host = self._server
            for fn, args in self._prepared:
                await self._run_once(host, partial(host.invoke, fn, args, {}), None)
        finally:
            self._restarting = None
            restarting.set_result(None)

    async def prepare(self, fn: Callable[..., Any], /, *args: Any) -> Any:
        """Run `fn` now and after each restart."""
        result = await self.run(fn, *args)
        self._prepared.append((fn, args))
        return result

    async def close(self) -> None:
        """Cut off what runs and forget the host; the device itself belongs to the runtime."""
        if self._closed:
            return
        host, self._closed = self._current_server, True
        if host is not None:
            await host.drain(0.0)
            uninstall_server(host)
