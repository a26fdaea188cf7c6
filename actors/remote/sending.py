"""Requests on their way to a Ray actor: packed, sent as often as it takes, and their answers opened."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from torch import Tensor

from layerzero.actors.remote.parcels import Payload, StoredPayload, payload_bytes, to_payload
from layerzero.actors.remote.ray_actor import Kind
from layerzero.actors.remote.restarts import ActorIncarnation, IncarnationLostError
from layerzero.actors.rpc.server import CallOutcome, RequestHeader
from layerzero.actors.rpc.tensors import TensorPayload
from layerzero.spec.errors import DeadlineExceededError, DeviceLostError

_GRACE_S = 1.0
_RESEND_S = 0.1
_RESEND_MAX_S = 2.0


class Sender:
    """Sends the requests of one client to one device."""

    def __init__(self, device: str, client: str) -> None:
        self._device = device
        self._client = client

    async def send(
        self,
        actor: Any,
        incarnation: ActorIncarnation,
        number: int,
        kind: Kind,
        payload: Payload,
        tensor_payload: Any,
        deadline: float | None,
    ) -> CallOutcome:
        """The outcome of one request in one incarnation, sent as often as it takes.

        Ray needs seconds to report a lost message. The channel says at once that a request begins and that
        it has ended; a copy is sent where that or the answer does not come soon.

        Raises: IncarnationLostError: the incarnation is over; another one's answer to a copy says so too, and
            nothing of the first one, which may have begun. DeadlineExceededError: the deadline has passed.
        """
        loop = asyncio.get_running_loop()
        replies: set[asyncio.Future[Any]] = set()
        fetching: asyncio.Future[CallOutcome] | None = None  # the answer, of which a long value is on its way
        patience = _RESEND_S
        incarnation.sending += 1
        try:
            while True:
                remaining_s = None if deadline is None else deadline - loop.time()
                if remaining_s is not None and remaining_s < -_GRACE_S:
                    incarnation.channel.notify("cancel", (self._client, number))
                    raise DeadlineExceededError(f"device {self._device!r} did not answer in time")
                if not replies or (fetching is None and incarnation.silent(number)):
                    ref = actor.serve.remote(
                        self._envelope(incarnation, number, remaining_s), kind, payload, tensor_payload
                    )
                    replies.add(asyncio.ensure_future(await_ref(ref)))
                wait_s = patience if remaining_s is None else min(patience, max(0.0, remaining_s) + _GRACE_S)
                done, _ = await asyncio.wait(
                    {*replies, incarnation.over}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
                )
                for reply in done - {incarnation.over}:
                    replies.discard(reply)
                    outcome = _outcome_of(reply)
                    if reply is fetching:
                        fetching = None
                    if outcome is None or fetching is not None:
                        continue
                    if isinstance(outcome.value, StoredPayload):
                        fetching = asyncio.ensure_future(_with_fetched_value(outcome))
                        replies.add(fetching)
                        continue
                    if outcome.status == "stale":
                        incarnation.end(f"it is over: {outcome.detail}")
                        break
                    return outcome
                if incarnation.over.done():
                    raise IncarnationLostError(incarnation.over.result())
                patience = min(patience * 2, _RESEND_MAX_S)
        except asyncio.CancelledError:
            incarnation.channel.notify("cancel", (self._client, number))
            raise
        finally:
            for reply in replies:
                reply.cancel()
            incarnation.sending -= 1
            incarnation.forget(number)

    def _envelope(
        self, incarnation: ActorIncarnation, number: int, remaining_s: float | None
    ) -> RequestHeader:
        numbers = incarnation.numbers
        remaining_s = None if remaining_s is None else max(0.0, remaining_s)
        acks = numbers.take_acks()
        watermark = numbers.ack_watermark
        return RequestHeader(self._client, number, watermark, incarnation.incarnation, acks, remaining_s)


def payload_of(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Payload:
    """A call as bytes, or the parcel of a long one.

    Raises: TypeError: it cannot travel.
    """
    from ray.cloudpickle import dumps  # pyright: ignore[reportAttributeAccessIssue]

    try:
        data: bytes = dumps((fn, args, kwargs))
    except Exception as error:
        what = f"{getattr(fn, '__qualname__', repr(fn))} and its arguments"
        raise TypeError(f"{what} need to travel to the device, and cannot: {error}") from error
    return to_payload(data)


async def _with_fetched_value(outcome: CallOutcome) -> CallOutcome:
    return CallOutcome(outcome.status, await payload_bytes(outcome.value), outcome.detail)


def unpickle(outcome: CallOutcome) -> CallOutcome:
    """The outcome with its value unpacked."""
    if outcome.status in ("done", "failed", "lost"):
        from ray import cloudpickle

        return CallOutcome(outcome.status, cloudpickle.loads(outcome.value), outcome.detail)
    return outcome


async def pack_tensor(tensor: Tensor) -> TensorPayload:
    """A kept tensor, as it leaves its process; runs in the actor."""
    return TensorPayload.pack(tensor)


def _outcome_of(reply: asyncio.Future[Any]) -> CallOutcome | None:
    """The outcome, or None where Ray says that the message, its answer or what that refers to was lost."""
    from ray import exceptions

    try:
        outcome: CallOutcome = reply.result()
    except (exceptions.RayActorError, exceptions.ObjectLostError):
        return None
    return outcome


def lost_call(device: str, lost: object, begun: int = 0) -> DeviceLostError:
    """The error text of a call that had begun; `begun`: incarnations lost by one that may run again."""
    what = f"device {device!r} was lost while the call ran there ({lost}); it had started"
    if begun:
        what += f" and lost its device {begun} times, so it is not run again"
    else:
        what += ", so it may have had effects; pass idempotent=True where it may run again"
    return DeviceLostError(what, retryable=False)


def lost_stream(device: str, lost: object, begun: int = 0) -> DeviceLostError:
    """The error text of a stream that had begun; `begun` as above, since its last item."""
    what = f"device {device!r} was lost in the middle of a stream ({lost})"
    if begun:
        what += f"; it lost its device {begun} times since its last item, so it does not continue"
    else:
        what += "; pass resume=True and take so_far where it can continue from what was delivered"
    return DeviceLostError(what, retryable=False)


def lost_tensor(error: Any) -> Exception:
    """What a failed move of a kept tensor means to the caller, from Ray's error."""
    cause = error.cause if isinstance(error.cause, Exception) else error
    return DeviceLostError(str(cause), retryable=False) if isinstance(cause, LookupError) else cause


async def await_ref(ref: Any) -> Any:
    """An object reference as a coroutine, which is what asyncio's functions take."""
    return await ref
