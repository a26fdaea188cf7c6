"""The Ray actor of one device: embeds a LocalDevice and hosts code beside it. Runs in the actor's process.

Ray gives it two event loops, each on a thread of its own: `serve` and all hosted code share the first,
`heartbeat` has the second ("ctl"), so that a watchdog is answered while the first is busy.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from layerzero._util import log
from layerzero.actors.device.local_device import LocalDevice
from layerzero.actors.device.running_kernels import (
    CrashRecords,
    RunningKernel,
    RunningKernelLog,
    read_crash_log,
)
from layerzero.actors.remote.gpu_claims import RELEASE_S, GpuClaim, gpu_name, user_temp_folder
from layerzero.actors.remote.parcels import Payload, payload_bytes, to_payload
from layerzero.actors.remote.stores import connect_store
from layerzero.actors.rpc.channel import Listener
from layerzero.actors.rpc.client import DeviceFacts, DeviceState
from layerzero.actors.rpc.connection import Connection
from layerzero.actors.rpc.frames import Address
from layerzero.actors.rpc.identity import facts_of
from layerzero.actors.rpc.server import CallOutcome, CallServer, RequestHeader, install_server
from layerzero.actors.rpc.tensors import RemoteTensor, TensorPayload
from layerzero.native import KERNEL_NOTES
from layerzero.sharing.work import SHARED, STORE_LOST
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.errors import DeviceLostError
from layerzero.spec.settings import Settings

Kind = Literal["call", "stream", "put"]

EXIT_AFTER_FAULT = 70
_LAST_WORDS_S = 0.2


class HostedRuntime(Protocol):
    """What an opener returns: what serves `lz.*` in the actor's process."""

    def device(self) -> LocalDevice: ...

    def close(self) -> None: ...


class DeviceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that an incarnation of a device begins with; only what earlier ones taught differs.

    `opener` is an import string "module:function" of a function from Settings to `HostedRuntime`. `pool`
    names the pool, `secret` opens the side channel and the pool's `store`, `decided` are requests to decide
    again, `quarantined` the kernels that earlier incarnations took out.
    """

    name: str
    pool: str
    settings: Settings
    opener: str
    secret: bytes
    store: tuple[str, int] | None = None
    decided: tuple[CallSpec, ...] = ()
    quarantined: tuple[str, ...] = ()


class StartReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an incarnation reports when it begins: `blamed` kernels were in flight when the last one ended."""

    facts: DeviceFacts
    address: Address
    suspects: tuple[str, ...]
    quarantined: tuple[str, ...]
    rebuilt: int


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """A heartbeat: state, load, kernels in flight, new decisions, kernels out of service."""

    incarnation: str
    state: DeviceState
    in_flight: int
    running: tuple[RunningKernel, ...]
    decided: tuple[CallSpec, ...]
    blocked: dict[str, str]
    executions: int


class DeviceActor:
    """One incarnation of one device. The constructor does nothing, `start` opens everything, once."""

    def __init__(self) -> None:
        self._server: CallServer | None = None
        self._started: StartReport | None = None
        self._opened: HostedRuntime | None = None
        self._listener: Listener | None = None
        self._running_log: RunningKernelLog | None = None
        self._starting: asyncio.Lock | None = None
        self._claim: GpuClaim | None = None

    async def start(self, spec: DeviceSpec) -> StartReport:
        """Open the device, rebuild what earlier incarnations had, listen; a second call returns the same."""
        if self._starting is None:
            self._starting = asyncio.Lock()
        async with self._starting:
            if self._started is None:
                try:
                    self._started = await self._start(spec)
                # Ray asks again where a start was lost on the way.
                except BaseException:
                    await self.leave()  # the next attempt begins from nothing
                    if self._claim is not None:
                        self._claim.release()
                    raise
            return self._started

    async def _start(self, spec: DeviceSpec) -> StartReport:
        import ray

        folder = _folder(spec)
        # Before the device opens: this incarnation's journal would be among those of the dead.
        suspects = read_crash_log(folder, spec.name)
        fatal = CrashRecords(folder, spec.name).add(suspects, time.time())
        await asyncio.to_thread(_share_work, spec)
        self._opened = resolve(spec.opener)(spec.settings)
        device = self._opened.device()
        node = ray.get_runtime_context().get_node_id()
        await asyncio.to_thread(self._claim_gpu, spec, device, node)
        host = CallServer(device, spec.name)
        compiled = await asyncio.to_thread(KERNEL_NOTES.try_load)
        self._running_log = device.kernel_calls.running_log = RunningKernelLog(
            folder, spec.name, host.incarnation, compiled
        )
        inherited = [k for k in spec.quarantined if k not in device.health.blocked_kernels()]
        quarantined = host.quarantine(
            [*fatal, *inherited], f"the process of {spec.name} died twice while it ran"
        )
        host.inherited_requests = spec.decided
        # After the opening, whose own decisions need no heir.
        device.compiler.on_decided = host.on_decided
        rebuilt = await host.rebuild()
        own_host, silence_s = ray.util.get_node_ip_address(), spec.settings.hang_s
        self._listener = Listener(
            host.handlers, node=node, host=own_host, secret=spec.secret, silence_s=silence_s
        )
        address = await self._listener.open()
        host.on("leave", lambda body, _: self.leave())
        install_server(host)
        self._server = host
        facts = facts_of(device, spec.name, host.incarnation, node)
        log.info(
            "device.started", device=spec.name, incarnation=host.incarnation, blamed=suspects, rebuilt=rebuilt
        )
        return StartReport(
            facts=facts,
            address=address,
            suspects=tuple(suspects),
            quarantined=tuple(quarantined),
            rebuilt=rebuilt,
        )

    def _claim_gpu(self, spec: DeviceSpec, device: LocalDevice, node: str) -> None:
        """Keep other devices off the GPU, as the settings want it. Raises: ConfigurationError: one has it."""
        if (gpu := gpu_name(device.device, node)) is not None:
            limit = spec.settings.cluster_devices_per_gpu
            self._claim = GpuClaim(gpu, f"{spec.name} of pool {spec.pool}", limit)
            self._claim.acquire(min(RELEASE_S, spec.settings.placement_timeout_s / 4))

    async def serve(
        self, envelope: RequestHeader, kind: Kind, payload: Payload, cargo: TensorPayload | None = None
    ) -> CallOutcome:
        """Run one request at most once; the outcome, with its value pickled."""
        host = self._server
        if host is None:
            return CallOutcome("stale", detail="the device has not started")
        whole: list[bytes] = []  # the payload, fetched by the one copy that begins

        async def may_begin() -> bool:
            whole.append(await payload_bytes(payload))
            return await self._may_begin(envelope)

        outcome = await host.serve(
            envelope, lambda: self._work(host, envelope, kind, whole.pop(), cargo), may_begin
        )
        packed = _packed(outcome)
        if (connection := self._connection(envelope)) is not None:
            connection.notify("ended", envelope.number)
        # The answer has to leave first: exiting now would turn a reported fault into a silent death.
        if outcome.status == "lost":
            asyncio.get_running_loop().call_later(_LAST_WORDS_S, os._exit, EXIT_AFTER_FAULT)
        return packed

    def _connection(self, envelope: RequestHeader) -> Connection | None:
        return None if self._listener is None else self._listener.connections.get(envelope.client)

    async def _may_begin(self, envelope: RequestHeader) -> bool:
        """Ask the client whether the request may begin: it may have sent it to another incarnation meanwhile.

        A note would not do. What is in this machine's buffer has reached no other, and a cut network keeps it
        there while the client takes us for dead.
        """
        connection = self._connection(envelope)
        try:
            return connection is not None and bool(await connection.request("begin", envelope.number))
        except DeviceLostError:
            return False

    async def _work(
        self,
        host: CallServer,
        envelope: RequestHeader,
        kind: Kind,
        payload: bytes,
        cargo: TensorPayload | None,
    ) -> Any:
        if kind == "put":
            assert cargo is not None
            return host.tensor_store.add(cargo.unpack(host.device.device))
        from ray import cloudpickle

        fn, args, kwargs = cloudpickle.loads(payload)
        if kind == "call":
            return await host.invoke(fn, args, kwargs)
        connection = self._connection(envelope)
        if connection is None:
            raise RuntimeError("a stream needs the side channel of its client, which has ended")

        async def emit(item: Any) -> None:
            connection.send_item(envelope.number, item)
            await asyncio.sleep(0)  # written before the generator runs further: it may end this process
            await connection.writable()

        return await host.emit(fn, args, kwargs, emit)

    async def export(self, handle: RemoteTensor) -> TensorPayload:
        """The bytes of a kept tensor; reading changes nothing, so it may be asked again."""
        if self._server is None:
            raise LookupError("the device has not started")
        return TensorPayload.pack(self._server.tensor_store.get(handle))

    async def leave(self) -> None:
        """Announce an orderly end: no kernel is suspect; the channel's end says that all is done."""
        if self._running_log is not None:
            self._running_log.close()
        if self._opened is not None:
            self._opened.close()
        if self._listener is not None:
            self._listener.close()

    async def heartbeat(self, received: int = 0) -> Heartbeat | None:
        """A heartbeat from the thread of control; None before `start` has ended.

        `known` is how many of this incarnation's decisions have arrived.
        """
        host = self._server
        if host is None:
            return None
        return Heartbeat(
            incarnation=host.incarnation,
            state=host.state,
            in_flight=host.in_flight,
            running=tuple(host.running_kernels()),
            decided=tuple(host.decided_requests(received)),
            blocked={kernel: why.got for kernel, why in host.device.health.blocked_kernels().items()},
            executions=host.idempotency_log.executions,
        )


def actor_class() -> Any:
    """DeviceActor as a Ray actor class: restarted without limit, its calls never repeated by Ray itself.

    Ray repeats a call that may have run already; our own numbers decide what may be repeated.
    """
    import ray

    ray.method(concurrency_group="ctl")(DeviceActor.heartbeat)
    remote: Any = ray.remote
    return remote(max_restarts=-1, max_task_retries=0, concurrency_groups={"ctl": 4})(DeviceActor)


def resolve(name: str) -> Callable[[Settings], HostedRuntime]:
    """The function of an import string "module:function".

    Raises: ValueError: the string has another form. ImportError, AttributeError: there is no such function.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"opener needs 'module:function', got {name!r}")
    opener: Callable[[Settings], HostedRuntime] = getattr(importlib.import_module(module), attribute)
    return opener


def _folder(spec: DeviceSpec) -> Path:
    if spec.settings.state_dir is not None:
        return Path(spec.settings.state_dir) / "devices"
    return user_temp_folder() / spec.pool


def _share_work(spec: DeviceSpec) -> None:
    """Choose and measure once for all devices of the pool, where its store answers."""
    if spec.store is None or not spec.settings.shared_choices_s:
        return
    try:
        SHARED.join(connect_store(spec.store, f"layerzero-shared-{spec.pool}", spec.secret))
    except DeviceLostError as error:
        log.warning(STORE_LOST, why=str(error))


def _packed(outcome: CallOutcome) -> CallOutcome:
    """The outcome with its value as bytes, the same for every copy of a request."""
    if outcome.status not in ("done", "failed", "lost"):
        return outcome
    # Pickled once: copies of a request get the same bytes, and a large result is stored once.
    if outcome.packed is None:
        outcome.packed, outcome.value = _pack(outcome), None
    return outcome.packed


def _pack(outcome: CallOutcome) -> CallOutcome:
    """What cannot travel becomes an error that says so."""
    from ray.cloudpickle import dumps, loads  # pyright: ignore[reportAttributeAccessIssue]

    try:
        data = dumps(outcome.value)
        if outcome.status != "done":
            loads(data)  # an exception may pickle and not unpickle: its caller would get pickle's error
        value = to_payload(data) if outcome.status == "done" else data
        return CallOutcome(outcome.status, value, outcome.detail)
    except Exception as error:
        if outcome.status == "done":
            text = f"the result, {type(outcome.value).__name__}, cannot travel to the caller: {error}"
            return CallOutcome("failed", dumps(TypeError(text)), outcome.detail)
        stand_in = RuntimeError(f"{type(outcome.value).__name__}: {outcome.value}")
        return CallOutcome(outcome.status, dumps(stand_in), outcome.detail)
