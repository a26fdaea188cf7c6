"""What travels on the side channel: its messages, and where a channel listens."""

from __future__ import annotations

from typing import Any

import msgspec


class Challenge(msgspec.Struct, array_like=True, tag="challenge"):
    """The listener's first frame."""

    nonce: bytes


class Greeting(msgspec.Struct, array_like=True, tag="greeting"):
    """The dialler's answer: who it is, and the keyed digest of the nonce."""

    client: str
    proof: bytes


class RpcRequest(msgspec.Struct, array_like=True, tag="request"):
    """A question that wants an `RpcResponse` of the same number."""

    number: int
    kind: str
    body: Any = None


class RpcResponse(msgspec.Struct, array_like=True, tag="response"):
    """The answer to an `RpcRequest`; `error` is the name of an exception's class and its message, or None."""

    number: int
    body: Any = None
    error: tuple[str, str] | None = None


class Notification(msgspec.Struct, array_like=True, tag="notification"):
    """A message that wants no answer."""

    kind: str
    body: Any = None


class Address(msgspec.Struct, frozen=True):
    """Where a device's channel listens; `path` is of use on the node of that name only."""

    path: str
    host: str
    port: int
    node: str
    secret: bytes

    def __repr__(self) -> str:
        return f"Address({self.path or self.host}:{self.port})"


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Challenge | Greeting | RpcRequest | RpcResponse | Notification).decode
# What they raise of bytes that are no message, or too deep a one, and of a body that cannot travel.
UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
UNWRITABLE = (TypeError, ValueError, OverflowError, RecursionError)
# What an answer's error may name; anything else arrives as a RuntimeError.
ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, TypeError, LookupError, KeyError, RuntimeError, TimeoutError)
}
