"""What callers whose weights require a gradient would gain by one launch with a graph for each of them.

    python -m benchmarks.own_graphs [--json FILE] [--rounds N]

64 callers await `lz.linear` over one weight, three ways by turns in one process: `alone`, as calls that need
a gradient run today; `shared`, under torch.no_grad(), where they meet in batches; `own graphs`, where they
meet in the same batches and each result gets a node of its own, whose backward multiplies for its caller
alone. The last is this script's, not the library's. `step` is forward, and `backward` the forward with one
backward a caller. Wall time; medians of the rounds, and ratios to `alone`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import layerzero as lz
from benchmarks.harness import environment, medians, show, write

CALLERS, WIDTHS = 64, (256, 1024, 4096)
COLUMNS = ["width", "alone, ms", "shared", "own graphs", "with backward: alone, ms", "own graphs"]


class OwnGraph(torch.autograd.Function):
    """A row of a shared product with a graph of its caller alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, row: Tensor) -> Tensor:
        """The row, as it is."""
        ctx.save_for_backward(x, weight)
        return row.view_as(row)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Of the product of this caller's rows."""
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x, None


async def alone(x: Tensor, weight: Tensor) -> Tensor:
    """As it is written today."""
    return await lz.linear(x, weight)


async def shared(x: Tensor, weight: Tensor) -> Tensor:
    """As a server writes it."""
    with torch.no_grad():
        return await lz.linear(x, weight)


async def own_graph(x: Tensor, weight: Tensor) -> Tensor:
    """The shared product, and a graph of one's own."""
    row: Tensor = OwnGraph.apply(x, weight, await shared(x, weight))
    return row


def step(
    call: Callable[[Tensor, Tensor], Awaitable[Tensor]], rows: list[Tensor], weight: Tensor
) -> list[Tensor]:
    """Every caller's result."""

    async def crowd() -> list[Tensor]:
        return list(await asyncio.gather(*(call(x, weight) for x in rows)))

    return RUNNER.run(crowd())


def measure(width: int, rounds: int) -> list[Any]:
    """A row of the table."""
    weight = torch.nn.Parameter(torch.randn(width, width) * width**-0.5)
    rows = [torch.randn(1, width) for _ in range(CALLERS)]

    def timed(call: Any, backward: bool) -> Callable[[], float]:
        def run() -> float:
            begin = time.perf_counter()
            for result in step(call, rows, weight):
                if backward:
                    result.sum().backward()
            end = time.perf_counter()
            weight.grad = None
            return end - begin

        return run

    expected = torch.cat(step(alone, rows, weight)).detach()
    for call in (shared, own_graph):
        torch.testing.assert_close(
            torch.cat(step(call, rows, weight)).detach(), expected, atol=1e-4, rtol=1e-4
        )
    took = medians(
        {call.__name__: timed(call, False) for call in (alone, shared, own_graph)}
        | {f"{call.__name__}, backward": timed(call, True) for call in (alone, own_graph)},
        rounds,
        1e3,
    )
    first, second = took["alone"], took["alone, backward"]
    return [
        width, round(first, 3), round(took["shared"] / first, 3), round(took["own_graph"] / first, 3),
        round(second, 3), round(took["own_graph, backward"] / second, 3),
    ]  # fmt: skip


RUNNER = asyncio.Runner()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    where = environment(["layerzero-runtime", "torch"])
    with RUNNER, lz.start(lz.Settings(device="cpu", perfdb=None)):
        found = [measure(width, options.rounds) for width in options.widths]
    if options.json:
        tables = {"own_graphs": {"columns": COLUMNS, "rows": found}}
        write(options.json, {"environment": where, "callers": CALLERS, "tables": tables})
    show("one launch with a graph for each caller", COLUMNS, [[str(cell) for cell in row] for row in found])
    return 0


if __name__ == "__main__":
    sys.exit(main())
