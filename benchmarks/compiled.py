"""Compare a small Llama on our ops with one on torch's own, eager, compiled and frozen; price an operator.

Run `OMP_NUM_THREADS=1 python -m benchmarks.compiled --json benchmarks/results/compiled_cpu.json`. The models
share their weights and give the same numbers; each ratio is the median over the rounds of torch's time over
ours, and that over a second model on torch's ops, the control, says how far from 1 no difference is. The
overhead is that of `torch.ops.layerzero.rms_norm.default` over `lz.sync.rms_norm` on a row that costs next to
nothing. With `--device cuda` the model is in bfloat16, and the compiled ones are captured, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import layerzero as lz
from benchmarks.harness import SETTLING, Plan, environment, interleave, settled, show, us, write
from benchmarks.provenance import provenance
from layerzero.runtime import current

WIDTH, HEADS, GROUPS, LAYERS, HIDDEN, VOCABULARY = 512, 8, 4, 2, 1408, 4096
SHAPES = {"prefill 1 x 128": (1, 128), "one token of 8": (8, 1)}
PLAN, TINY = Plan(rounds=60), Plan(rounds=100)
_LINES = count(1)


class Block(torch.nn.Module):
    """One layer; `ours` says whose ops compute it, and when its kernels are chosen, so that a graph knows."""

    qkv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor
    first: Tensor
    second: Tensor

    def __init__(self, ours: str, generator: torch.Generator) -> None:
        super().__init__()
        self.ours, size = ours, WIDTH // HEADS
        shapes = {
            "qkv": ((HEADS + 2 * GROUPS) * size, WIDTH), "out": (WIDTH, WIDTH), "up": (2 * HIDDEN, WIDTH),
            "down": (WIDTH, HIDDEN),
        }  # fmt: skip
        for name, shape in shapes.items():
            weight = torch.randn(shape, generator=generator) * shape[1] ** -0.5
            setattr(self, name, torch.nn.Parameter(weight, requires_grad=False))
        for name in ("first", "second"):
            weight = torch.rand(WIDTH, generator=generator) + 0.5
            setattr(self, name, torch.nn.Parameter(weight, requires_grad=False))

    def forward(self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        batch, tokens, width = x.shape
        sizes = [HEADS * width // HEADS, GROUPS * width // HEADS, GROUPS * width // HEADS]
        x, residual = self.norm(x, residual, self.first)
        q, k, v = (
            part.view(batch, tokens, -1, width // HEADS).transpose(1, 2)
            for part in self.linear(x, self.qkv).split(sizes, -1)
        )
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        seen = self.attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        x, residual = self.norm(self.linear(seen, self.out), residual, self.second)
        if self.ours:
            return lz.sync.mlp(x, self.up, self.down), residual
        gate, up = F.linear(x, self.up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down), residual

    def norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        if self.ours:
            return lz.sync.add_rms_norm(x, residual, weight)
        total = x + residual
        return F.rms_norm(total, (WIDTH,), weight, 1e-6), total

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return lz.sync.linear(x, weight) if self.ours else F.linear(x, weight)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.ours:
            return lz.sync.attention(q, k, v, is_causal=True)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Model(torch.nn.Module):
    """Tokens to logits."""

    cos: Tensor
    sin: Tensor

    def __init__(self, ours: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.ours = ours
        table = torch.randn(VOCABULARY, WIDTH, generator=generator)
        self.table = torch.nn.Parameter(table, requires_grad=False)
        self.blocks = torch.nn.ModuleList(Block(ours, generator) for _ in range(LAYERS))
        angles = torch.arange(256)[:, None] * 10_000 ** -(torch.arange(32) / 32)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: Tensor) -> Tensor:
        x = lz.sync.embedding(ids, self.table) if self.ours else F.embedding(ids, self.table)
        residual = torch.zeros_like(x)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for block in self.blocks:
            x, residual = block(x, residual, cos, sin)
        x = x + residual
        return lz.sync.linear(x, self.table) if self.ours else F.linear(x, self.table)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def compiled(model: Model, ids: Tensor, **options: Any) -> Callable[[Tensor], Tensor]:
    """The model compiled whole for one shape, with kernels chosen as the model says.

    Each is code of its own: the compiler looks through all graphs of one code before it runs one of them.
    """

    def program(ids: Tensor) -> Tensor:
        out: Tensor = model(ids)
        return out

    code = program.__code__.replace(co_firstlineno=next(_LINES))
    own = FunctionType(code, program.__globals__, closure=program.__closure__)
    run: Callable[[Tensor], Tensor] = torch.compile(own, fullgraph=True, dynamic=False, **options)
    with lz.compile_choice(model.ours or "runtime"):
        run(ids)
    return run


def compare(device: str, shape: tuple[int, int], plan: Plan = PLAN) -> dict[str, Any]:
    """Median microseconds of each way to run the model, and torch's time over ours."""
    arms = {"torch": "", "control": "", "ours": "runtime", "frozen": "freeze"}
    models = {name: Model(choice) for name, choice in arms.items()}
    dtype, bound = (torch.bfloat16, 5e-2) if device == "cuda" else (torch.float32, 1e-3)
    theirs, ours = models["torch"].to(device, dtype), models["ours"]
    # Where weights lie would be a part of a ratio; other tensors over them would be compared by turns.
    for model in models.values():
        model.load_state_dict(theirs.state_dict(keep_vars=True), assign=True)
    ids = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(1)).to(device)
    torch.testing.assert_close(ours(ids), theirs(ids), rtol=bound, atol=bound)
    settle(lambda: ours(ids), device)
    record = {"eager": measured({name: models[name] for name in ("torch", "control", "ours")}, ids, plan)}
    modes: dict[str, dict[str, Any]] = {"compiled": {}}
    if device == "cuda":
        modes["captured"] = {"mode": "reduce-overhead"}
    for name, options in modes.items():
        torch.compiler.reset()  # a graph of the mode before would serve
        runs = {who: compiled(model, ids, **options) for who, model in models.items()}
        with torch.compiler.set_stance("fail_on_recompile"):  # each arm runs what was compiled for it
            record[name] = measured(runs, ids, plan)
    return record


def measured(runs: dict[str, Callable[[Tensor], Tensor]], ids: Tensor, plan: Plan) -> dict[str, Any]:
    """Median microseconds of each, taken in turn, and torch's over the others', round by round."""
    arms = interleave(plan, **{who: (lambda run=run: run(ids)) for who, run in runs.items()})
    medians = {who: us(arm)["wall_us"]["median"] for who, arm in arms.items()}
    ratios = {
        who: round(
            median(theirs / ours for theirs, ours in zip(arms["torch"].wall, arm.wall, strict=True)), 3
        )
        for who, arm in arms.items()
        if who != "torch"
    }
    return {"median_us": medians, "torch_over": ratios}


def settle(call: Callable[[], Any], device: str) -> None:
    """Call until nothing loads or compiles behind the calls."""
    for _ in range(SETTLING):
        call()
        if settled(PLAN, current().device(device), lz.last_selection()):
            return


def overhead() -> dict[str, float]:
    """Microseconds of one small norm through `lz.sync`, through torch's operator, and their difference."""
    x, weight = torch.randn(1, 64), torch.randn(64)
    sync, operator = lz.sync.rms_norm, torch.ops.layerzero.rms_norm.default
    settle(lambda: operator(x, weight), "cpu")
    settle(lambda: sync(x, weight), "cpu")
    arms = interleave(TINY, sync=lambda: sync(x, weight), operator=lambda: operator(x, weight))
    medians = {name: us(arm)["wall_us"]["median"] for name, arm in arms.items()}
    return medians | {"overhead_us": round(medians["operator"] - medians["sync"], 3)}


def main() -> None:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=PLAN.rounds)
    options = parser.parse_args()
    with torch.no_grad():
        record: dict[str, Any] = {
            **provenance(),
            "environment": environment(),
            "overhead": overhead(),
            "shapes": {
                name: compare(options.device, shape, Plan(rounds=options.rounds))
                for name, shape in SHAPES.items()
            },
        }
    rows = [
        [shape, way, f"{found['median_us']['torch']:.0f}", *(f"{found['torch_over'].get(w, 0):.3f}" for w in
         ("control", "ours", "frozen"))]
        for shape, ways in record["shapes"].items() for way, found in ways.items()
    ]  # fmt: skip
    show(
        "A small Llama", ["shape", "way", "torch us", "torch over control", "over ours", "over frozen"], rows
    )
    print(record["overhead"])
    if options.json:
        write(options.json, record)


if __name__ == "__main__":
    main()
