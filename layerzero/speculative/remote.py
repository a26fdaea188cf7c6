"""A sequence of a model on a device of a fleet: a draft, a target, or both on devices of their own.

`layerzero.speculative.generate` drives it like one of this process. The device keeps the cache, this side the
tokens: when the device is lost, its next life gets them again and the text goes on. Tokens travel there;
logits, or what was drafted with its distributions, travel back.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerzero.actors.remote.pool import Fleet
from layerzero.spec.errors import DeviceLostError
from layerzero.speculative.generation import Decoder, Drawing, drafted_by

_TRIES = 4  # lives of a device that one forward may see the end of

# -- on the device --------------------------------------------------------------------------------------


@dataclass
class _Sequence:
    decoder: Decoder
    stack: AsyncExitStack


_SEQUENCES: dict[str, _Sequence] = {}


async def _at(key: str, open: Callable[..., Any], args: tuple[Any, ...], known: int) -> Decoder | None:
    """The sequence, with its first `known` tokens; None where it has fewer: its process is another."""
    found = _SEQUENCES.get(key)
    if found is None:
        if known:
            return None
        stack, made = AsyncExitStack(), open(*args)
        if hasattr(made, "__aenter__"):
            made = await stack.enter_async_context(made)
        elif hasattr(made, "__enter__"):
            made = stack.enter_context(made)
        found = _SEQUENCES[key] = _Sequence(made, stack)
    if found.decoder.length < known:
        return None
    found.decoder.rollback(known)
    return found.decoder


async def _forward(
    key: str, open: Callable[..., Any], args: tuple[Any, ...], known: int, tokens: list[int]
) -> Tensor | None:
    decoder = await _at(key, open, args, known)
    return None if decoder is None else (await decoder.forward(torch.tensor(tokens))).cpu()


async def _draft(
    key: str,
    open: Callable[..., Any],
    args: tuple[Any, ...],
    known: int,
    tokens: list[int],
    places: int,
    drawing: Drawing,
) -> tuple[Tensor, Tensor] | None:
    decoder = await _at(key, open, args, known)
    if decoder is None:
        return None
    drafted, probs = await drafted_by(decoder, torch.tensor(tokens), places, drawing)
    return drafted.cpu(), probs.cpu()


async def _close(key: str) -> None:
    found = _SEQUENCES.pop(key, None)
    if found is not None:
        await found.stack.aclose()


# -- here -----------------------------------------------------------------------------------------------


class Elsewhere:
    """One sequence on the device `on` of a fleet; a `speculative.Decoder` and a `speculative.Drafter`."""

    def __init__(self, fleet: Fleet, open: Callable[..., Any], args: tuple[Any, ...], on: str) -> None:
        self.on = on
        self.key = uuid.uuid4().hex
        self._fleet, self._open, self._args = fleet, open, args
        self._text: list[int] = []
        self._there = 0  # tokens of the text that the device's cache holds

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return len(self._text)

    def rollback(self, length: int) -> None:
        """Forget the tokens from `length` on; the device does so at the next call."""
        del self._text[length:]
        self._there = min(self._there, length)

    async def forward(self, tokens: Tensor) -> Tensor:
        """The logits (T, V) after each of `tokens` (T,), on the CPU.

        Raises: DeviceLostError: the device does not come back. What the model raises.
        """
        fresh = tokens.tolist()
        found: Tensor = await self._asked(_forward, fresh)
        self._text += fresh
        self._there = len(self._text)
        return found[-len(fresh) :]

    async def draft(self, fresh: Tensor, places: int, drawing: Drawing) -> tuple[Tensor, Tensor]:
        """`places` tokens (K,) behind `fresh`, and the distributions (K, V) they were drawn from; one call.

        Raises: as `forward`.
        """
        certain = fresh.tolist()
        drafted: Tensor
        drafted, probs = await self._asked(_draft, certain, places, drawing)
        self._text += [*certain, *drafted[:-1].tolist()]
        self._there = len(self._text)
        return drafted, probs

    async def _asked(self, fn: Callable[..., Any], fresh: list[int], *more: Any) -> Any:
        for attempt in range(_TRIES):
            tokens = [*self._text[self._there :], *fresh]
            try:
                found = await self._fleet.run(
                    fn, self.key, self._open, self._args, self._there, tokens, *more, on=self.on
                )
            except DeviceLostError:
                # Whether it ran or not: its cache is gone, and what is drawn follows from seed and place.
                if attempt == _TRIES - 1:
                    raise
                found = None
            if found is not None:
                return found
            self._there = 0
        raise DeviceLostError(f"device {self.on!r} lost the sequence {_TRIES} times", retryable=True)

    async def close(self) -> None:
        """Let the device forget the sequence; one that is lost has."""
        with suppress(DeviceLostError):
            await self._fleet.run(_close, self.key, on=self.on, idempotent=True)


@asynccontextmanager
async def elsewhere(fleet: Fleet, open: Callable[..., Any], *args: Any, on: str) -> AsyncIterator[Elsewhere]:
    """A sequence that `open(*args)` makes on the device `on`: a `speculative.Decoder`, or a manager of one.

    `open` runs there, again in each later life of the device; it finds its model in a module of its own.
    """
    made = Elsewhere(fleet, open, args, on)
    try:
        yield made
    finally:
        await made.close()
