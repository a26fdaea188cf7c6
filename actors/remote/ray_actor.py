"""The Ray actor of one device: embeds a LocalDevice and hosts code beside it. Runs in the actor's process.

Ray gives it two event loops, each on a thread of its own: `serve` and all hosted code share the first,
`pulse` has the second ("ctl"), so that a watchdog is answered while the first is busy.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from layerzero._util import log
from layerzero._util.files import own_folder
from layerzero.actors.device.local_device import LocalDevice
from layerzero.actors.device.running_kernels import Deaths, Flight, Journal, bury
from layerzero.actors.rpc.channel import Listener
from layerzero.actors.rpc.client import DeviceFacts, DeviceState
from layerzero.actors.rpc.connection import Connection
from layerzero.actors.rpc.frames import Address
from layerzero.actors.rpc.identity import facts_of
from layerzero.actors.rpc.parcels import Payload, parcelled, unpacked
from layerzero.actors.rpc.server import Envelope, Host, Outcome, install_host
from layerzero.actors.rpc.tensors import Cargo, RemoteTensor
from layerzero.native import NOTING
from layerzero.spec.call_spec import Request
from layerzero.spec.errors import DeviceLostError
from layerzero.spec.settings import Settings

Kind = Literal["call", "stream", "put"]

EXIT_AFTER_FAULT = 70
_LAST_WORDS_S = 0.2


class Opened(Protocol):
    """What an opener returns: what serves `lz.*` in the actor's process."""

    def device(self) -> LocalDevice: ...

    def close(self) -> None: ...


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a life of a device begins with; the same for every life but for what the earlier ones taught.

    `opener` is an import string "module:function" of a function from Settings to `Opened`. `fleet` names the
    fleet, `secret` opens the side channel, `decided` are requests to decide again, `condemned` the kernels
    that earlier lives took out.
    """

    name: str
    fleet: str
    settings: Settings
    opener: str
    secret: bytes
    decided: tuple[Request, ...] = ()
    condemned: tuple[str, ...] = ()


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """What a life says of itself when it begins: `blamed` kernels were in flight when the last one ended."""

    facts: DeviceFacts
    address: Address
    blamed: tuple[str, ...]
    condemned: tuple[str, ...]
    rebuilt: int


class Pulse(msgspec.Struct, frozen=True, kw_only=True):
    """A sign of life: state, load, kernels in flight, new decisions, kernels out of service."""

    generation: str
    state: DeviceState
    in_flight: int
    flights: tuple[Flight, ...]
    decided: tuple[Request, ...]
    blocked: dict[str, str]
    executions: int


class DeviceActor:
    """One life of one device. The constructor does nothing, `start` opens everything, once."""

    def __init__(self) -> None:
        self._host: Host | None = None
        self._life: Life | None = None
        self._opened: Opened | None = None
        self._listener: Listener | None = None
        self._journal: Journal | None = None
        self._starting: asyncio.Lock | None = None

    async def start(self, spec: Spec) -> Life:
        """Open the device, rebuild what earlier lives had, listen; a repeated call gets the same answer."""
        if self._starting is None:
            self._starting = asyncio.Lock()
        async with self._starting:
            if self._life is None:
                try:
                    self._life = await self._start(spec)
                except BaseException:
                    await self.leave()  # the next attempt begins from nothing
                    raise
            return self._life

    async def _start(self, spec: Spec) -> Life:
        import ray

        folder = _folder(spec)
        blamed = bury(folder, spec.name)
        fatal = Deaths(folder, spec.name).add(blamed, time.time())
        self._opened = resolve(spec.opener)(spec.settings)
        device = self._opened.device()
        host = Host(device, spec.name)
        twin = await asyncio.to_thread(NOTING.now)
        self._journal = device.journal = Journal(folder, spec.name, host.generation, twin)
        condemned = [k for k in spec.condemned if k not in device.health.blocked()]
        out = host.condemn([*fatal, *condemned], f"the process of {spec.name} died twice while it ran")
        host.earlier = spec.decided
        device.noted = host.note
        rebuilt = await host.rebuild()
        node = ray.get_runtime_context().get_node_id()
        address_of = ray.util.get_node_ip_address()
        self._listener = Listener(host.handlers, node=node, host=address_of, secret=spec.secret)
        address = await self._listener.open()
        host.on("leave", lambda body, _: self.leave())
        install_host(host)
        self._host = host
        facts = facts_of(device, spec.name, host.generation, node)
        log.info(
            "device.started", device=spec.name, generation=host.generation, blamed=blamed, rebuilt=rebuilt
        )
        return Life(facts=facts, address=address, blamed=tuple(blamed), condemned=tuple(out), rebuilt=rebuilt)

    async def serve(
        self, envelope: Envelope, kind: Kind, payload: Payload, cargo: Cargo | None = None
    ) -> Outcome:
        """Run one request at most once; the outcome, with its value pickled."""
        host = self._host
        if host is None:
            return Outcome("stale", detail="the device has not started")
        whole: list[bytes] = []  # the payload, fetched by the one copy that begins

        async def may_begin() -> bool:
            whole.append(await unpacked(payload))
            return await self._may_begin(envelope)

        outcome = await host.serve(
            envelope, lambda: self._work(host, envelope, kind, whole.pop(), cargo), may_begin
        )
        packed = _packed(outcome)
        if (connection := self._connection(envelope)) is not None:
            connection.tell("ended", envelope.number)
        if outcome.status == "lost":
            asyncio.get_running_loop().call_later(_LAST_WORDS_S, os._exit, EXIT_AFTER_FAULT)
        return packed

    def _connection(self, envelope: Envelope) -> Connection | None:
        return None if self._listener is None else self._listener.connections.get(envelope.client)

    async def _may_begin(self, envelope: Envelope) -> bool:
        """Ask the client whether the request may begin: it may have sent it to another life meanwhile.

        A note would not do. What lies in this machine's buffer has reached nobody, and a cut network keeps it
        there while the client takes us for dead.
        """
        connection = self._connection(envelope)
        try:
            return connection is not None and bool(await connection.ask("begin", envelope.number))
        except DeviceLostError:
            return False

    async def _work(
        self, host: Host, envelope: Envelope, kind: Kind, payload: bytes, cargo: Cargo | None
    ) -> Any:
        if kind == "put":
            assert cargo is not None
            return host.shelf.add(cargo.unload(host.device.device))
        from ray import cloudpickle

        fn, args, kwargs = cloudpickle.loads(payload)
        if kind == "call":
            return await host.invoke(fn, args, kwargs)
        connection = self._connection(envelope)
        if connection is None:
            raise RuntimeError("a stream needs the side channel of its client, which has ended")
        count = 0

        async def emit(item: Any) -> None:
            nonlocal count
            connection.tell("item", (envelope.number, count, item))
            count += 1
            await connection.writable()

        return await host.emit(fn, args, kwargs, emit)

    async def export(self, handle: RemoteTensor) -> Cargo:
        """The bytes of a kept tensor; reading changes nothing, so it may be asked again."""
        if self._host is None:
            raise LookupError("the device has not started")
        return Cargo.load(self._host.shelf.get(handle))

    async def leave(self) -> None:
        """Say that the end to come is in order: nobody is blamed; the channel's end says that all is done."""
        if self._journal is not None:
            self._journal.close()
        if self._opened is not None:
            self._opened.close()
        if self._listener is not None:
            self._listener.close()

    async def pulse(self, known: int = 0) -> Pulse | None:
        """A sign of life from the thread of control; None before `start` has ended.

        `known` is how many of this life's decisions have arrived.
        """
        host = self._host
        if host is None:
            return None
        return Pulse(
            generation=host.generation,
            state=host.state,
            in_flight=host.in_flight,
            flights=tuple(host.flights()),
            decided=tuple(host.decided(known)),
            blocked={kernel: why.got for kernel, why in host.device.health.blocked().items()},
            executions=host.ledger.executions,
        )


def actor_class() -> Any:
    """DeviceActor as a Ray actor class: restarted without limit, its calls never repeated by Ray itself.

    Ray repeats a call that may have run already; our own numbers decide what may be repeated.
    """
    import ray

    ray.method(concurrency_group="ctl")(DeviceActor.pulse)
    remote: Any = ray.remote
    return remote(max_restarts=-1, max_task_retries=0, concurrency_groups={"ctl": 4})(DeviceActor)


def resolve(name: str) -> Callable[[Settings], Opened]:
    """The function of an import string "module:function".

    Raises: ValueError: the string has another form. ImportError, AttributeError: there is no such function.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"opener needs 'module:function', got {name!r}")
    found: Callable[[Settings], Opened] = getattr(importlib.import_module(module), attribute)
    return found


def _folder(spec: Spec) -> Path:
    if spec.settings.state_dir is not None:
        return Path(spec.settings.state_dir) / "devices"
    user = os.getuid() if hasattr(os, "getuid") else 0
    # Anybody may make it first where everybody may write.
    return own_folder(Path(tempfile.gettempdir()) / f"layerzero-{user}", default=True) / spec.fleet


def _packed(outcome: Outcome) -> Outcome:
    """The outcome with its value as bytes, the same for every copy of a request."""
    if outcome.status not in ("done", "failed", "lost"):
        return outcome
    if outcome.packed is None:
        outcome.packed, outcome.value = _pack(outcome), None
    return outcome.packed


def _pack(outcome: Outcome) -> Outcome:
    """What cannot travel becomes an error that says so."""
    from ray.cloudpickle import dumps, loads  # pyright: ignore[reportAttributeAccessIssue]

    try:
        data = dumps(outcome.value)
        if outcome.status == "done":
            return Outcome(outcome.status, parcelled(data), outcome.detail)
        loads(data)
        return Outcome(outcome.status, data, outcome.detail)
    except Exception as error:
        if outcome.status == "done":
            text = f"the result, {type(outcome.value).__name__}, cannot travel to the caller: {error}"
            return Outcome("failed", dumps(TypeError(text)), outcome.detail)
        stand_in = RuntimeError(f"{type(outcome.value).__name__}: {outcome.value}")
        return Outcome(outcome.status, dumps(stand_in), outcome.detail)
