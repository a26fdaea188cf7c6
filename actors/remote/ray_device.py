"""RayDevice: a device that lives in a Ray actor, as its pool sees it: requests, streams, tensors.

Ray carries requests. The side channel carries control, the items of streams, and the question whether a
request may begin. A request is sent again under its number until it is answered or the incarnation that had
it is over; without an answer to that question it never ran, so only then it may run elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from torch import Tensor

from layerzero.actors.remote import sending
from layerzero.actors.remote.losses import MAX_BEGUN
from layerzero.actors.remote.parcels import Payload
from layerzero.actors.remote.ray_actor import Kind
from layerzero.actors.remote.restarts import IncarnationLostError, health_of, stream_items
from layerzero.actors.remote.sending import payload_of, unpickle
from layerzero.actors.remote.supervised import PAUSE_S, SupervisedDevice
from layerzero.actors.rpc.client import DeviceHealth, DeviceState
from layerzero.actors.rpc.server import CallOutcome
from layerzero.actors.rpc.settling import result_of
from layerzero.actors.rpc.tensors import RemoteTensor, TensorPayload
from layerzero.spec.errors import DeviceLostError


class RayDevice(SupervisedDevice):
    """One device of a cluster; `DeviceClient` says what each method promises."""

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
        """Run `fn` in the actor; see `DeviceClient.run`."""
        payload = payload_of(fn, args, kwargs)
        return await self._request(
            "call", payload, timeout_s=timeout_s, idempotent=idempotent, wait=wait_for_restart
        )

    async def _request(
        self,
        kind: Kind,
        payload: Payload,
        *,
        timeout_s: float | None = None,
        idempotent: bool = False,
        tensor_payload: Any = None,
        wait: bool = True,
    ) -> Any:
        self._refuse_a_fork()  # asyncio itself would say that no loop runs here
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        begun = 0  # in incarnations that it lost
        while True:
            try:
                incarnation = await self._serving_incarnation(deadline, wait)
            except DeviceLostError as error:
                raise (sending.lost_call(self.name, error, begun) if begun else error) from None
            number = incarnation.numbers.new_number()
            try:
                outcome = await self._sender.send(
                    self.actor, incarnation, number, kind, payload, tensor_payload, deadline
                )
            except IncarnationLostError as lost:
                # Nothing of it ran: the next incarnation takes it, as often as that happens.
                if number not in incarnation.started:
                    continue
                begun += 1
                if idempotent and begun < MAX_BEGUN:
                    continue
                raise sending.lost_call(self.name, lost, begun if idempotent else 0) from None
            finally:
                incarnation.numbers.ack(number)
            if await self._must_resend(outcome):
                continue
            # The process answered, and will end: a loss like its death, but one that it reports.
            if outcome.status == "lost" and idempotent and begun + 1 < MAX_BEGUN:
                begun += 1
                continue
            return result_of(unpickle(outcome), self.name)

    async def _must_resend(self, outcome: CallOutcome) -> bool:
        """Whether a request that did not run came too late here and is for the next incarnation."""
        if outcome.status == "draining" and self.state is not DeviceState.DRAINING:
            await asyncio.sleep(PAUSE_S)
            return True
        return False

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
        """Pass on the items of `fn` in the actor; see `DeviceClient.forward`."""
        so_far: list[Any] = list(kwargs.pop("so_far", ())) if resume else []
        begun = 0  # in incarnations that it lost since its last item

        def keep(item: Any) -> None:
            so_far.append(item)
            take(item)

        while True:
            try:
                incarnation = await self._serving_incarnation(None, wait_for_restart)
            except DeviceLostError as error:
                raise (sending.lost_stream(self.name, error, begun) if begun else error) from None
            number = incarnation.numbers.new_number()
            items = incarnation.sink(number, keep if resume else take)
            extra = {"so_far": list(so_far)} if resume else {}
            payload = payload_of(fn, args, {**kwargs, **extra})
            request = asyncio.ensure_future(
                self._sender.send(self.actor, incarnation, number, "stream", payload, None, None)
            )
            try:
                outcome = unpickle(await items.until(request))
                if await self._must_resend(outcome):
                    continue
                await items.all(result_of(outcome, self.name))
                return
            except IncarnationLostError as lost:
                if number not in incarnation.started:
                    continue
                # An item since the last loss is progress, so the count begins anew.
                begun = 1 if items.count else begun + 1
                if resume and begun < MAX_BEGUN:
                    continue
                raise sending.lost_stream(self.name, lost, begun if resume else 0) from None
            finally:
                # A caller that leaves in the middle closes the generator on the device, too.
                if not request.done():
                    request.cancel()
                incarnation.numbers.ack(number)
                incarnation.drop(number)

    def stream(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        resume: bool = False,
        wait_for_restart: bool = True,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        """The items of `fn` in the actor; see `DeviceClient.stream`."""
        named = {"resume": resume, "wait_for_restart": wait_for_restart, **kwargs}
        return stream_items(lambda take: self.forward(take, fn, *args, **named))

    async def control(self, kind: str, body: Any = None, *, timeout_s: float = 10.0) -> Any:
        """Ask a handler of the hosted code through the side channel; see `DeviceClient.control`."""
        serving = self.state is DeviceState.RUNNING and not self._forked
        incarnation = (self._incarnation if serving else None) or await self._serving_incarnation(None)
        return await incarnation.channel.request(kind, body, timeout_s=timeout_s)

    # -- tensors ---------------------------------------------------------------------------------

    async def put(self, tensor: Tensor | RemoteTensor, source: RayDevice | None = None) -> RemoteTensor:
        """Move a tensor to the device; from `source`'s process straight to this one's."""
        import ray
        from ray import exceptions

        # From process to process: the caller's own memory never holds it.
        if isinstance(tensor, RemoteTensor):
            owner = source or self
            tensor_payload = owner.actor.export.remote(tensor)
        else:
            tensor_payload = ray.put(TensorPayload.pack(tensor))
        try:
            handle: RemoteTensor = await self._request(
                "put", b"", tensor_payload=tensor_payload, idempotent=True
            )
        except exceptions.RayTaskError as error:
            raise sending.lost_tensor(error) from error
        incarnation = self._incarnation
        return handle.on_collected(lambda key: incarnation.release(key) if incarnation is not None else None)

    async def fetch(self, handle: RemoteTensor) -> Tensor:
        """A copy of a kept tensor in this process."""
        try:
            call = payload_of(sending.pack_tensor, (handle,), {})
            tensor_payload: TensorPayload = await self._request("call", call, idempotent=True)
        except LookupError as error:
            raise DeviceLostError(str(error), retryable=False) from error
        return tensor_payload.unpack("cpu")

    # -- health and the end ----------------------------------------------------------------------

    async def health(self) -> DeviceHealth:
        """How the device is, as of its last heartbeat."""
        why = "" if self.state is DeviceState.RUNNING else self._why
        return health_of(self, self._incarnation, self._facts, self._restart_policy.restarts, why)

    async def prepare(self, fn: Callable[..., Any], /, *args: Any) -> Any:
        """Run `fn` now and at the start of every later incarnation."""
        payload = payload_of(fn, args, {})
        result = await self._request("call", payload)
        self._prepared.append(payload)
        return result
