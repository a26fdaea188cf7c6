"""Long values on their way: put into Ray's object store once; each copy of a message carries a reference.

A message is sent again where it seems lost, and a long value is slow: a copy must not bring it along.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

INLINE = 1 << 16  # bytes; Ray itself keeps values of up to 100 KiB in the message


@dataclass(eq=False, slots=True)
class StoredPayload:
    """A reference to bytes in Ray's object store; Ray does not fetch what is inside another object."""

    ref: Any


Payload = bytes | StoredPayload


def to_payload(data: bytes) -> Payload:
    """The bytes themselves, or the parcel of long ones; its owner is this process."""
    if len(data) <= INLINE:
        return data
    import ray

    return StoredPayload(ray.put(data))


async def payload_bytes(payload: Payload) -> bytes:
    """The bytes.

    Raises: ray.exceptions.ObjectLostError: they went with their owner.
    """
    if not isinstance(payload, StoredPayload):
        return payload
    data: bytes = await payload.ref
    return data
