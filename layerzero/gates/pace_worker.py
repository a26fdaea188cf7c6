"""Times one call in blocks, as another process asks: a script, run with the tree to measure on its path.

It uses public names alone, so that a tree of an earlier release is measured by the same file. The first line
of input is JSON (`call`, `anchor`, `device`, `callers`, `cpu`); then each line is a number of calls, and each
line of output the nanoseconds that they took.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F

STEADY_S = 300.0


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer
    order = json.loads(sys.stdin.readline())
    if order["cpu"] is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {order["cpu"]})
    torch.set_num_threads(1)
    device = torch.device(order["device"])
    op, arguments = parse_call(order["call"], device)
    with torch.inference_mode():
        if order["anchor"]:
            plain, where = anchor_of(op, arguments), torch.__file__
            callers, loop = order["callers"], asyncio.new_event_loop()
            run = awaited_anchor(plain, callers, loop) if callers else blocks_of(plain)
        else:
            import layerzero as lz

            where = lz.__file__
            run = (
                awaited_blocks(lz, op, arguments, order["callers"])
                if order["callers"]
                else blocks_of(lambda: getattr(lz.sync, op)(**arguments))
            )
        run(3)
        if not order["anchor"]:
            wait_until_steady(lz, run)  # pyright: ignore[reportPossiblyUnboundVariable]
        print(json.dumps({"measures": where}), file=answers)
        for line in sys.stdin:
            begin_ns = time.perf_counter_ns()
            run(int(line))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            print(time.perf_counter_ns() - begin_ns, file=answers)


def wait_until_steady(lz: Any, run: Callable[[int], None]) -> None:
    """Call until no better kernel is on its way: loading one takes time from what is measured.

    Nor is the compiled path, which a tree with new sources compiles for a minute beside its first calls.

    Raises: SystemExit: one is still on its way, and what would be timed is not what will run.
    """
    compiled: Any = getattr(sys.modules.get("layerzero.native"), "FAST_PATH", None)
    if hasattr(compiled, "try_load"):  # a tree of an earlier release may have none
        compiled.try_load()
    end = time.monotonic() + STEADY_S
    while time.monotonic() < end:
        run(1)
        selection = lz.last_selection()
        if selection is None or selection.when_warm is None:
            return
        time.sleep(0.02)
    raise SystemExit(f"needs to be ready within {STEADY_S:g} s, got a kernel that is still loading")


def parse_call(words: str, device: torch.device) -> tuple[str, dict[str, Any]]:
    """The op and its arguments: `rms_norm x=16x512:float32 eps=1e-6`."""
    op, *pairs = words.split()
    generator = torch.Generator().manual_seed(7)
    arguments: dict[str, Any] = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        shape, colon, dtype = text.partition(":")
        if not colon:
            arguments[name] = json.loads(text)
            continue
        sizes = [int(size) for size in shape.split("x")]
        wide = torch.randn(sizes, generator=generator)
        arguments[name] = wide.to(device, getattr(torch, dtype))
    return op, arguments


def blocks_of(call: Callable[[], object]) -> Callable[[int], None]:
    """Run a call so many times."""

    def run(calls: int) -> None:
        for _ in range(calls):
            call()

    return run


def awaited_blocks(lz: Any, op: str, arguments: dict[str, Any], callers: int) -> Callable[[int], None]:
    """Rounds of so many callers that await the op together."""
    loop = asyncio.new_event_loop()
    function = getattr(lz, op)

    async def together(rounds: int) -> None:
        for _ in range(rounds):
            await asyncio.gather(*(function(**arguments) for _ in range(callers)))

    return lambda rounds: loop.run_until_complete(together(rounds))


def awaited_anchor(
    call: Callable[[], object], callers: int, loop: asyncio.AbstractEventLoop
) -> Callable[[int], None]:
    """Rounds of so many callers that await plain torch together, which one other thread runs for them all.

    So what delays a waking thread or loop delays them as it does the callers of an op.
    """
    pool = ThreadPoolExecutor(1)

    async def one(waiting: list[asyncio.Future[object]]) -> object:
        future: asyncio.Future[object] = loop.create_future()
        waiting.append(future)
        return await future

    async def together(rounds: int) -> None:
        for _ in range(rounds):
            waiting: list[asyncio.Future[object]] = []
            together_calls = asyncio.gather(*(one(waiting) for _ in range(callers)))
            await asyncio.sleep(0)
            result = await loop.run_in_executor(pool, call)
            for future in waiting:
                future.set_result(result)
            await together_calls

    return lambda rounds: loop.run_until_complete(together(rounds))


def anchor_of(op: str, arguments: dict[str, Any]) -> Callable[[], object]:
    """Plain torch at about the same size: what a stored time is divided by."""
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    first = tensors[0]
    if op in ("linear", "mlp"):
        weight = tensors[1]
        return lambda: F.linear(first, weight)
    if op == "attention":
        q, k, v = tensors[:3]
        return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
    if op.endswith("norm"):
        return lambda: F.layer_norm(first, first.shape[-1:])
    return lambda: first * first


if __name__ == "__main__":
    main()
