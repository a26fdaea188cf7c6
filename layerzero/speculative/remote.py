"""A sequence of a model on a device of a device pool: a draft, a target, or both on devices of their own.

`layerzero.speculative.generate` drives it like one of this process. The device keeps the cache, this side the
tokens: when the device is lost, its next incarnation gets them again and the text continues. Tokens travel
there; logits, or what was drafted with its distributions, travel back.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerzero.actors.remote.pool import DevicePool
from layerzero.spec.errors import DeviceLostError
from layerzero.speculative.generation import Decoder, SamplingParams, propose_draft

_TRIES = 4  # incarnations of a device that one forward may see the end of

# -- on the device --------------------------------------------------------------------------------------


@dataclass
class _Sequence:
    decoder: Decoder
    stack: AsyncExitStack


_SEQUENCES: dict[str, _Sequence] = {}


async def _decoder_at(
    key: str, open: Callable[..., Any], args: tuple[Any, ...], num_cached: int
) -> Decoder | None:
    """The sequence, with its first `known` tokens; None where it has fewer: its process is another."""
    sequence = _SEQUENCES.get(key)
    if sequence is None:
        if num_cached:
            return None
        stack, decoder = AsyncExitStack(), open(*args)
        if hasattr(decoder, "__aenter__"):
            decoder = await stack.enter_async_context(decoder)
        elif hasattr(decoder, "__enter__"):
            decoder = stack.enter_context(decoder)
        sequence = _SEQUENCES[key] = _Sequence(decoder, stack)
    if sequence.decoder.length < num_cached:
        return None
    sequence.decoder.rollback(num_cached)
    return sequence.decoder


async def _forward(
    key: str, open: Callable[..., Any], args: tuple[Any, ...], num_cached: int, tokens: list[int]
) -> Tensor | None:
    decoder = await _decoder_at(key, open, args, num_cached)
    return None if decoder is None else (await decoder.forward(torch.tensor(tokens, device="cpu"))).cpu()


async def _draft(
    key: str,
    open: Callable[..., Any],
    args: tuple[Any, ...],
    num_cached: int,
    tokens: list[int],
    num_speculative_tokens: int,
    sampling: SamplingParams,
) -> tuple[Tensor, Tensor] | None:
    decoder = await _decoder_at(key, open, args, num_cached)
    if decoder is None:
        return None
    new_tokens = torch.tensor(tokens, device="cpu")
    drafted, probs = await propose_draft(decoder, new_tokens, num_speculative_tokens, sampling)
    return drafted.cpu(), probs.cpu()


async def _close(key: str) -> None:
    sequence = _SEQUENCES.pop(key, None)
    if sequence is not None:
        await sequence.stack.aclose()


# -- here -----------------------------------------------------------------------------------------------


class RemoteDecoder:
    """One sequence on the device `on` of a device pool; a `speculative.Decoder` and a
    `speculative.Drafter`."""

    def __init__(
        self, device_pool: DevicePool, open: Callable[..., Any], args: tuple[Any, ...], on: str
    ) -> None:
        self.on = on
        self.key = uuid.uuid4().hex
        self._fleet, self._open, self._args = device_pool, open, args
        self._tokens: list[int] = []
        self._num_cached = 0  # tokens of the text that the device's cache holds

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return len(self._tokens)

    def rollback(self, length: int) -> None:
        """Forget the tokens from `length` on; the device does so at the next call."""
        del self._tokens[length:]
        self._num_cached = min(self._num_cached, length)

    async def forward(self, tokens: Tensor) -> Tensor:
        """The logits (T, V) after each of `tokens` (T,), on the CPU.

        Raises: DeviceLostError: the device does not come back. What the model raises.
        """
        new_tokens = tokens.tolist()
        logits: Tensor = await self._call(_forward, new_tokens)
        self._tokens += new_tokens
        self._num_cached = len(self._tokens)
        return logits[-len(new_tokens) :]

    async def draft(
        self, new_tokens: Tensor, num_speculative_tokens: int, sampling: SamplingParams
    ) -> tuple[Tensor, Tensor]:
        """`num_speculative_tokens` tokens (K,) behind `new_tokens`, and the distributions (K, V) they were
        drawn from; one call.

        Raises: as `forward`.
        """
        certain = new_tokens.tolist()
        drafted: Tensor
        drafted, probs = await self._call(_draft, certain, num_speculative_tokens, sampling)
        self._tokens += [*certain, *drafted[:-1].tolist()]
        self._num_cached = len(self._tokens)
        return drafted, probs

    async def _call(self, fn: Callable[..., Any], new_tokens: list[int], *args: Any) -> Any:
        for attempt in range(_TRIES):
            tokens = [*self._tokens[self._num_cached :], *new_tokens]
            try:
                result = await self._fleet.run(
                    fn, self.key, self._open, self._args, self._num_cached, tokens, *args, on=self.on
                )
            except DeviceLostError:
                # Whether it ran or not: its cache is gone, and what is drawn follows from seed and place.
                if attempt == _TRIES - 1:
                    raise
                result = None
            if result is not None:
                return result
            self._num_cached = 0
        raise DeviceLostError(f"device {self.on!r} lost the sequence {_TRIES} times", retryable=True)

    async def close(self) -> None:
        """Let the device forget the sequence; one that is lost has."""
        with suppress(DeviceLostError):
            await self._fleet.run(_close, self.key, on=self.on, idempotent=True)


@asynccontextmanager
async def remote_decoder(
    device_pool: DevicePool, open: Callable[..., Any], *args: Any, on: str
) -> AsyncIterator[RemoteDecoder]:
    """A sequence that `open(*args)` makes on the device `on`: a `speculative.Decoder`, or a manager of one.

    `open` runs there, again in each later incarnation of the device; it finds its model in a module of its
    own.
    """
    decoder = RemoteDecoder(device_pool, open, args, on)
    try:
        yield decoder
    finally:
        await decoder.close()
