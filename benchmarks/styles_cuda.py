"""Does the batch hold however a request is written? Generation on one GPU in eight styles, by captured steps.

    python benchmarks/styles_cuda.py --out FOLDER [--layers 32] [--context 128] [--requests 64]
    python benchmarks/styles_cuda.py --rehearse    # a tiny model on the CPU: shows that everything runs

What differs is what a request does between two of its steps. Its next step always takes its ids from the
device; reading one token behind, it does not wait for the token that it has just drawn. The crowd is closed
and out of step, as in benchmarks/lane_cuda.py. Rounds of all styles take turns; a row is the median of the
rounds after the first. In each round stands a loop by hand over the same graph, with nothing awaited, which
reads one token behind as an expert would write it. Beside each row stand the sizes of the batches that ran
and what the batcher knew of its callers when the round ended. In the first round every token read is compared
with the device's.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT)]  # the model is an example

import torch  # noqa: E402
from generating import agreeing, by_hand, crowd, device_side, models  # noqa: E402
from generating.captured import Whole  # noqa: E402
from harness import show  # noqa: E402
from lane_cuda import Record, attention, begin, built, settings_of  # noqa: E402
from models.llama import SampleArgs  # noqa: E402
from torch import Tensor  # noqa: E402

import layerzero as lz  # noqa: E402
from layerzero.ops.host_copies import to_device_with_host_copy  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "styles_h200.json"
AT_ONCE, IN_A_TASK, TURN = "reads at once", "reads behind, in a task", "gives the loop a turn"
IO, THREAD, BEHIND = "waits for I/O of 0 to 2 ms", "hops through a thread", "reads behind"
LATER, AHEAD = "starts to read, waits later", "plain loop over run_ahead"
TASK = "each step in a task of its own"
HAND = "the same graph by hand"
IO_S = 2e-3  # the longest wait for I/O between two steps
# Tokens/s of the first style that the others need: where the wait lies on each step's path it counts.
NEEDS = {
    AT_ONCE: 1.0, IN_A_TASK: 0.9, TURN: 0.9, IO: 0.75, THREAD: 0.9, BEHIND: 0.9, LATER: 0.9, AHEAD: 1.0,
    TASK: 0.9,
}  # fmt: skip

Breath = Callable[[], Awaitable[object]]


class Reads:
    """Tokens of a round as their requests read them, beside where the device has them."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] | None = None  # kept while somebody checks

    def add(self, host: Tensor, token: Tensor) -> None:
        """`token` was read as `host`."""
        if self.pairs is not None:
            self.pairs.append((host, token))

    def wrong(self) -> int:
        """How many of the tokens kept were not read as the device has them; nothing is kept from then on."""
        pairs, self.pairs = self.pairs or [], None
        if not pairs:
            return 0
        hosts, tokens = (torch.cat(side) for side in zip(*pairs, strict=True))
        return int((hosts != tokens.cpu()).sum())


READS = Reads()


async def nothing() -> None:
    """No breath between two steps."""


async def io_wait(draw: random.Random) -> None:
    """A wait of up to `IO_S`."""
    await asyncio.sleep(draw.uniform(0.0, IO_S))


async def read(token: Tensor, meter: crowd.Meter) -> None:
    """Bring one token to the host and note when it came."""
    note(await lz.to_host(token), token, meter)


def reading_at_once(
    breath: Callable[[random.Random], Awaitable[object]],
    begin: Callable[[Coroutine[Any, Any, Tensor]], Awaitable[Tensor]] = lambda call: call,
) -> crowd.Request:
    """Requests that `begin` each step, read its token before the next one and do `breath` behind it."""

    async def request(model: Any, context: int, tokens: int, seed: int, meter: crowd.Meter) -> None:
        draw = random.Random(seed)
        with model.sequence(context + tokens) as sequence:
            sequence.extend(context)
            token = first(model, seed)
            for drawn in range(tokens):
                token = await begin(step(model, token, sequence, seed, drawn))
                await read(token, meter)
                await breath(draw)
                if meter.over:
                    return

    return request


async def reading_behind(model: Any, context: int, tokens: int, seed: int, meter: crowd.Meter) -> None:
    """One token behind, by the request itself."""
    with model.sequence(context + tokens) as sequence:
        sequence.extend(context)
        token, before = first(model, seed), None
        for drawn in range(tokens):
            token = await step(model, token, sequence, seed, drawn)
            if before is not None:
                await read(before, meter)
            before = token
            if meter.over:
                break
        await read(token, meter)


async def reading_in_a_task(model: Any, context: int, tokens: int, seed: int, meter: crowd.Meter) -> None:
    """One token behind, by a task for each token."""
    with model.sequence(context + tokens) as sequence:
        sequence.extend(context)
        token = first(model, seed)
        reading: asyncio.Future[None] | None = None
        for drawn in range(tokens):
            token = await step(model, token, sequence, seed, drawn)
            if reading is not None:
                await reading
            reading = asyncio.ensure_future(read(token, meter))
            if meter.over:
                break
        if reading is not None:
            await reading


async def reading_later(model: Any, context: int, tokens: int, seed: int, meter: crowd.Meter) -> None:
    """Starts to read each token at once, and waits for it behind its next step."""
    with model.sequence(context + tokens) as sequence:
        sequence.extend(context)
        token = first(model, seed)
        reading: Any = None
        for drawn in range(tokens):
            token = await step(model, token, sequence, seed, drawn)
            started = lz.to_host(token), token
            if reading is not None:
                note(await reading[0], reading[1], meter)
            reading = started
            if meter.over:
                break
        note(await reading[0], reading[1], meter)


async def running_ahead(model: Any, context: int, tokens: int, seed: int, meter: crowd.Meter) -> None:
    """A plain loop over tokens."""
    device_tokens: list[Tensor] = []

    with model.sequence(context + tokens) as sequence:
        sequence.extend(context)

        async def following(ids: Tensor) -> Tensor:
            ids = await step(model, ids, sequence, seed, len(device_tokens))
            device_tokens.append(ids)
            return ids

        count = 0
        async for host in lz.run_ahead(following, first(model, seed), max_steps=tokens):
            note(host, device_tokens[count], meter)
            count += 1
            if meter.over:
                return


def note(host: Tensor, token: Tensor, meter: crowd.Meter) -> None:
    """A token has come to the host."""
    meter.times.append(time.perf_counter())
    READS.add(host, token)


def first(model: Any, seed: int) -> Tensor:
    """The token that a request begins with, on the device."""
    ids = torch.tensor([seed % model.config.vocab_size])
    return to_device_with_host_copy(ids, model.cache.device)


async def step(model: Any, token: Tensor, sequence: Any, seed: int, drawn: int) -> Tensor:
    """The token behind `token`, on the device."""
    following: Tensor = await model.sample_next(token, sequence.extend(1), SampleArgs(0.0, 1.0, seed, drawn))
    return following


STYLES: dict[str, crowd.Request] = {
    AT_ONCE: reading_at_once(lambda draw: nothing()),
    IN_A_TASK: reading_in_a_task,
    TURN: reading_at_once(lambda draw: asyncio.sleep(0)),
    IO: reading_at_once(io_wait),
    THREAD: reading_at_once(lambda draw: asyncio.to_thread(int)),
    BEHIND: reading_behind,
    LATER: reading_later,
    AHEAD: running_ahead,
    TASK: reading_at_once(lambda draw: nothing(), asyncio.ensure_future),
}


def known(runtime: lz.Runtime, device: torch.device) -> dict[str, Any]:
    """What this loop's batcher knows of its callers: times of batches, lateness, in ms."""
    batcher = runtime.device(device).loop_drivers.current().batcher
    expected = batcher.expected_callers
    if expected is None:
        return {}
    callers = list(expected._waiting)
    late = sorted(caller.late_s * 1e3 for caller in callers if caller.late_s is not None)
    groups = {caller.last_queue for caller in callers}
    return {
        "launches": expected.launches,
        "expected": len(callers),
        "late_ms": [round(late[len(late) * part // 100], 3) for part in (0, 50, 90, 99)] if late else [],
        "groups": [
            {"run_ms": round(group.run_s * 1e3, 3), "period_ms": round(group.period_s * 1e3, 3)}
            for group in groups
            if group is not None
        ],
    }


class Round:
    """Spans of every style over one captured model."""

    def __init__(self, options: argparse.Namespace, record: Record, runtime: lz.Runtime, model: Any) -> None:
        self.options, self.record, self.runtime = options, record, runtime
        self.crowd = crowd.Crowd(options.requests, options.contexts[0], options.seconds, ramp_s=0.1)
        kernel, bound = attention(runtime, model, self.crowd)
        self.graph: Any = Whole(model, self.crowd.limit, options.requests)
        self.hand = by_hand.Paged(model, bound)
        record.found |= {"attention": kernel, "shape": models.described(model.config)}

    def agree(self) -> dict[str, Any]:
        """The next tokens of one crowd by the graph, beside those of the loop by hand."""
        return agreeing.agreement(self.hand, self.graph, self.crowd.context, self.options.requests)

    def span(self, style: str, turn: int, seconds: float) -> crowd.Span:
        """One round of one style."""
        now = replace(self.crowd, seed=turn, seconds=seconds)
        device = self.graph.cache.device
        return asyncio.run(
            crowd.awaited(
                self.runtime, self.graph, now, "step",
                written=STYLES[style], look=lambda: known(self.runtime, device),
            )
        )  # fmt: skip

    def by_hand(self, seconds: float) -> float:
        """Tokens/s of a closed crowd that steps by the graph in a loop and reads one step behind."""
        requests, cuda = self.options.requests, self.graph.cache.device.type == "cuda"
        ids = torch.cat([first(self.graph, number) for number in range(requests)])
        sequences: list[Any] = []
        reading: Any = None
        read = -3  # what warms up is not counted
        begin = time.perf_counter()
        while read < 1 or time.perf_counter() - begin < seconds:
            if not sequences or sequences[0].length + 1 >= self.crowd.limit:
                for sequence in sequences:
                    sequence.close()
                sequences = [self.graph.sequence(self.crowd.limit) for _ in range(requests)]
                for sequence in sequences:
                    sequence.extend(self.crowd.context)
            ids = self.graph.runner([sequence.extend(1) for sequence in sequences], ids)
            host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=cuda).copy_(ids, non_blocking=True)
            done = torch.cuda.Event() if cuda else None
            if done is not None:
                done.record()
            if reading is not None:
                if reading[1] is not None:
                    reading[1].synchronize()
                reading[0].tolist()
                read += 1
                if not read:
                    begin = time.perf_counter()
            reading = host, done
        took = time.perf_counter() - begin
        for sequence in sequences:
            sequence.close()
        return read * requests / took

    def together(self, style: str) -> float:
        """Tokens/s of a crowd that begins together and of which nobody ends: the median of its steps."""
        requests, meter = self.options.requests, crowd.Meter()

        async def everybody() -> None:
            self.graph.model.per = "step"
            each = (
                STYLES[style](self.graph, self.crowd.context, crowd.MOST - 1, number, meter)
                for number in range(requests)
            )
            await asyncio.gather(*each)

        asyncio.run(everybody())
        last = meter.times[requests - 1 :: requests]  # when each step's last token came
        steps = [after - before for before, after in itertools.pairwise(last)]
        return requests / statistics.median(steps[4:])

    def checked(self, style: str) -> int:
        """A short round in which every token read is compared; how many were compared.

        Raises: ValueError: a token was not read as the device has it.
        """
        READS.pairs = []
        self.span(style, 0, min(0.4, self.options.seconds))
        count = len(READS.pairs)
        if wrong := READS.wrong():
            raise ValueError(f"{wrong} of {count} tokens were not read as the device has them")
        return count

    def look(self, style: str) -> dict[str, Any]:
        """Where the time of a style goes."""
        return device_side.look(lambda: self.span(style, 0, self.options.seconds / 2), self.options.requests)


def rows(spans: dict[str, list[crowd.Span]], requests: int) -> dict[str, Any]:
    """A row a style: medians of its rounds."""
    of: dict[str, Any] = {}
    for style, own in spans.items():
        speed = statistics.median(span.tokens_per_s for span in own)
        of[style] = {
            "tokens_per_s": round(speed, 1),
            "step_ms": round(requests / speed * 1e3, 3) if speed else None,
            "mean_batch": round(statistics.median(span.mean_batch for span in own), 2),
            "rounds": [round(span.tokens_per_s, 1) for span in own],
            "last_round": own[-1].extra,
        }
    floor = of.get(AT_ONCE, {}).get("tokens_per_s")
    for style, row in of.items():
        row["of_reading_at_once"] = round(row["tokens_per_s"] / floor, 3) if floor else None
        row["needs"] = NEEDS[style]
    return of


def measure(options: argparse.Namespace, record: Record, runtime: lz.Runtime) -> None:
    """Every style, round by round, then where the time of each goes."""
    found = record.found
    model = record.item("model", lambda: built(options))
    round_: Round | None = record.item("attention", lambda: Round(options, record, runtime, model))
    if round_ is None:
        return
    options.compiling.join()
    found["agreement"] = record.item("agreement", round_.agree)
    for style in STYLES:
        count = record.item(f"{style}, tokens compared", lambda style=style: round_.checked(style))
        found["compared"][style] = count
    spans: dict[str, list[crowd.Span]] = {}
    hand: list[float] = []
    for turn in range(options.rounds):
        speed = record.item(HAND, lambda: round_.by_hand(options.seconds))
        hand += [speed] if speed is not None else []
        found["by_hand"] = {"tokens_per_s": statistics.median(hand), "rounds": hand} if hand else {}
        for style in STYLES:
            span = record.item(style, lambda s=style, t=turn: round_.span(s, t, options.seconds))
            if span is not None:
                spans.setdefault(style, []).append(span)
            found["rows"] = rows(spans, options.requests)
        for row in found["rows"].values():
            row["of_by_hand"] = round(row["tokens_per_s"] / statistics.median(hand), 3) if hand else None
        record.write()
    if options.look and options.device == "cuda":
        found["layer"] = record.item("one layer", lambda: device_side.one_layer(lambda: round_.by_hand(0.3)))
    for style in STYLES if options.look else ():
        found["where"][style] = record.item(f"{style}, where", lambda style=style: round_.look(style))
    found["kernels"] = device_side.kernels_of(runtime, model.cache.device)
    round_.graph.close()
    record.write()


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.8, help="of each style in each round")
    parser.add_argument("--budget-s", type=float, default=200.0, help="after which no item begins")
    parser.add_argument("--look", action="store_true", help="also where the time of each style goes")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--out", type=Path, default=None, help="a folder, or a JSON file")
    given = parser.parse_args()
    given.device = "cpu" if given.rehearse else "cuda"
    if given.rehearse:
        given.layers, given.context, given.requests, given.rounds, given.seconds = 2, 16, 4, 2, 0.1
    elif not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; --rehearse runs a tiny model on the CPU")
    given.contexts, given.depth = [given.context], given.layers
    return given


def main() -> int:
    """Measure, print, write after each item; 1 where an item failed."""
    options = parse()
    record = begin(options, RESULTS, compared={}, where={}, by_hand={}, layer=[])
    settings = settings_of(options)
    record.found["denied"] = device_side.deny_for_graphs()
    with lz.start(settings) as runtime, torch.inference_mode():
        measure(options, record, runtime)
    found = record.found
    show(
        f"{options.layers} layers, context {options.context}, {found.get('attention')}",
        ("between two steps", "tokens/s", "of reading at once", "needs", "mean batch"),
        [
            (style, f"{v['tokens_per_s']:.0f}", str(v["of_reading_at_once"]), str(v["needs"]),
             f"{v['mean_batch']:.1f}")
            for style, v in found["rows"].items()
        ],
    )  # fmt: skip
    print(HAND, found["by_hand"], flush=True)
    for style, row in found["rows"].items():
        print(style, row["last_round"], flush=True)
    for name, duration_us, gap_us in found["layer"] or ():
        print(f"{duration_us:8.1f} us, {gap_us:6.1f} us after the last one: {name}", flush=True)
    for title in ("errors", "left_out"):
        print(title, found[title], flush=True)
    return int(bool(found["errors"]))


if __name__ == "__main__":
    sys.exit(main())
