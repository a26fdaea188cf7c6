"""A crowd of requests at a given context: tokens a second and the mean batch, through LayerZero and by hand.

The crowd is closed: so many requests are under way at any time. They start at Poisson times, each draws a
length of its own, and whoever ends is replaced at once, so that no two stay in step. A request begins
behind `context` tokens whose keys and values are in the cache already; what is measured is decoding.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from models.llama import Llama, Per, SampleArgs

import layerzero as lz
from generating import by_hand
from layerzero.ops.host_copies import to_device_with_host_copy

FEWEST, MOST = 16, 48  # tokens of a request, uniformly drawn
Lengths = Callable[[], int]
Request = Callable[[Llama, int, int, int, "Meter"], Awaitable[None]]
Look = Callable[[], dict[str, Any]]


@dataclass(slots=True)
class Span:
    """What one span measured: tokens between `begin` and `end`, and how many requests each batch held."""

    seconds: float
    tokens: int
    batches: int = 0
    rows: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def mean_batch(self) -> float:
        return self.rows / self.batches if self.batches else 0.0


@dataclass(frozen=True, slots=True)
class Crowd:
    """How many requests, behind how many tokens, for how long; `ramp_s` spreads their starts."""

    requests: int
    context: int
    seconds: float
    ramp_s: float = 0.25
    seed: int = 0

    def starts(self) -> list[float]:
        """Poisson start times within about `ramp_s`."""
        draw = random.Random(self.seed)
        times, now = [], 0.0
        for _ in range(self.requests):
            times.append(now)
            now += draw.expovariate(self.requests / self.ramp_s)
        return times

    def lengths(self) -> Lengths:
        """How long each next request is."""
        draw = random.Random(self.seed + 1)
        return lambda: draw.randint(FEWEST, MOST)

    @property
    def limit(self) -> int:
        """The most tokens a sequence ever holds."""
        return self.context + MOST

    def pages(self, page_size: int) -> int:
        """Pages that the whole crowd needs, and one request more for who leaves while another enters."""
        return (self.requests + 1) * -(-self.limit // page_size)


# -- LayerZero ------------------------------------------------------------------------------------------


class Meter:
    """When each token came; a request asks `over` before the next one."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.over = False


def whole_steps(times: list[float], requests: int) -> tuple[float, int] | None:
    """Seconds from the first step's tokens to the last one's, and the tokens that came in them.

    Tokens of so many requests come a crowd at a time: a window that cuts a step counts all of it or nothing,
    which is a sixth of what six steps bring. A step begins behind the longest pause among a crowd's tokens.
    None where `times` hold less than a step.
    """

    def begins(part: list[float]) -> int:
        return max(range(1, len(part)), key=lambda index: part[index] - part[index - 1])

    if len(times) < requests + 2:
        return None
    first = begins(times[: requests + 1])
    last = len(times) - requests - 1 + begins(times[-requests - 1 :])
    return (times[last] - times[first], last - first) if last > first else None


async def request(model: Llama, context: int, tokens: int, seed: int, meter: Meter) -> None:
    """One request behind `context` tokens, written as if it were alone."""
    with model.sequence(context + tokens) as sequence:
        sequence.extend(context)
        token = to_device_with_host_copy(torch.tensor([seed % model.config.vocab_size]), model.cache.device)
        for drawn in range(tokens):
            token = await model.sample_next(token, sequence.extend(1), SampleArgs(0.0, 1.0, seed, drawn))
            await lz.to_host(token)
            meter.times.append(time.perf_counter())
            if meter.over:
                return


async def awaited(
    runtime: lz.Runtime, model: Llama, crowd: Crowd, per: Per, *, spawn: bool = False,
    written: Request = request, look: Look | None = None,
) -> Span:  # fmt: skip
    """The crowd through LayerZero, one await an op, a layer or a step.

    `written` is how one request is written; what `look` tells at the end of the span goes into its `extra`.
    """
    model.per = per
    meter, lengths = Meter(), crowd.lengths()

    async def client(index: int, start: float) -> None:
        await asyncio.sleep(start)
        for turn in range(1 << 30):
            one: Any = written(model, crowd.context, lengths(), index + 997 * turn, meter)
            await (runtime.spawn(one) if spawn else one)
            if meter.over:
                return

    clients = [asyncio.ensure_future(client(i, at)) for i, at in enumerate(crowd.starts())]
    await asyncio.sleep(2 * crowd.ramp_s)
    before, begin = sizes(runtime), time.perf_counter()
    meter.times.clear()
    await asyncio.sleep(crowd.seconds)
    counted = time.perf_counter() - begin, len(meter.times)
    seconds, tokens = whole_steps(meter.times, crowd.requests) or counted
    ran = sizes(runtime)
    ran.subtract(before)
    extra = {"sizes": {size: count for size, count in sorted(ran.items()) if count}}
    extra |= look() if look is not None else {}
    meter.over = True
    await asyncio.gather(*clients)
    return Span(seconds, tokens, ran.total(), sum(size * count for size, count in ran.items()), extra)


def sizes(runtime: lz.Runtime) -> Counter[int]:
    """How many batches of which size the batchers have run; a lone inline call is in none."""
    ran: Counter[int] = Counter()
    for device in runtime.devices.values():
        ran.update(device.loop_drivers.stats().sizes)
    return ran


# -- by hand --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Slot:
    """One sequence of the hand-written loop."""

    sequence: Any
    length: int
    left: int
    token: int


def looped(cache: by_hand.Paged | by_hand.Contiguous, crowd: Crowd) -> Span:
    """The crowd through the hand-written loop: joins between steps, one forward for all of them."""
    model, lengths = cache.model, crowd.lengths()
    starts, slots = crowd.starts(), []
    tokens = batches = counted = steps = 0
    begun = time.perf_counter()
    begin = begun + 2 * crowd.ramp_s
    until = begin + crowd.seconds
    changed, measuring = False, False
    ids = torch.empty(0, dtype=torch.long)
    while (now := time.perf_counter()) < until:
        if not measuring and now >= begin:
            begin, counted, steps, measuring = now, tokens, batches, True
        while starts and begun + starts[0] <= now:
            starts.pop(0)
            slots.append(_entered(model, crowd, lengths()))
            changed = True
        if not slots:
            continue
        if changed:
            cache.join([slot.sequence for slot in slots], [slot.length for slot in slots])
            ids = torch.tensor([slot.token for slot in slots], device=model.cache.device)
            changed = False
        ids = by_hand.step(cache, ids).argmax(-1)
        batches += 1
        for index, (slot, drawn) in enumerate(zip(slots, ids.tolist(), strict=True)):
            tokens += 1
            slot.token, slot.length, slot.left = drawn, slot.length + 1, slot.left - 1
            if not slot.left:
                slot.sequence.close()
                slots[index] = _entered(model, crowd, lengths())
                changed = True
    end = time.perf_counter()
    for slot in slots:
        slot.sequence.close()
    return Span(end - begin, tokens - counted, batches - steps, tokens - counted)


def _entered(model: Llama, crowd: Crowd, tokens: int) -> Slot:
    return Slot(model.sequence(crowd.context + tokens), crowd.context, tokens, 0)
