"""Weights, keys and values in codes beside sixteen bits on a GPU: products, decoding, a model's whole step.

    python benchmarks/quantized_cuda.py --out FOLDER [--only products,decode,generation]
    python benchmarks/quantized_cuda.py --rehearse     # small, on the CPU: shows that everything runs

Products: a weight of 14,336 x 4,096 in each format over torch's product in bfloat16; several weights take
turns, so that no cache holds them. Decoding: 64 sequences of 4,096 tokens, pages of eight bits over pages
of bfloat16, each by the kernel that is chosen. Generation: Llama 3 8B's shape with random weights, captured
steps of 64 and 16 sequences around a context of 2,048; int4 in groups of 128, keys and values in
float8_e4m3fn, and both. All sides of a row take turns in one run; a number is the median of the rounds
after the first. The error is against float64 of the dequantized weight, over the largest output.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks"), str(ROOT)]

import torch  # noqa: E402
from decode_cuda import captured, on_host  # noqa: E402
from engines import bandwidth  # noqa: E402
from generating import models  # noqa: E402
from harness import environment, medians, show, write  # noqa: E402
from torch import Tensor  # noqa: E402

import layerzero as lz  # noqa: E402
from layerzero.formats import QuantizedTensor  # noqa: E402
from layerzero.runtime import current  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "quantized_h200.json"
WIDTH, INNER, COPIES = 14336, 4096, 8
FORMATS = ("int4", "mxfp4", "nvfp4", "nf4", "int8", "fp8_e4m3")
ROWS = (1, 4, 8, 16, 64, 256)
NEEDS = {1: 2.0, 4: 2.0, 8: 2.0, 16: 2.0, 256: 1.0}
NAMED = frozenset({"int8", "fp8_e4m3"})  # what the dtype of codes says
HEADS, KEY_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
CODES = {"float8_e4m3fn": torch.float8_e4m3fn, "int8": torch.int8}


def timed(device: torch.device, run: Callable[[], object]) -> Callable[[], float]:
    """The device's seconds of `run` as a graph; elsewhere the host's."""
    return captured(run) if device.type == "cuda" else on_host(run)


def chosen(op: str) -> str:
    """The kernel of the last call."""
    selection = lz.last_selection()
    assert selection is not None and selection.op == op
    return selection.kernel


def settled(call: Callable[[], Any], op: str, device: torch.device) -> str:
    """The kernel that serves a call when nothing is loaded or compiled any more."""
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        call()
        selection = lz.last_selection()
        if selection is not None and selection.op == op and selection.when_warm is None:
            break
        time.sleep(0.2)
    return chosen(op)


def products(device: torch.device, rehearse: bool, rounds: int) -> list[dict[str, Any]]:
    """A row for each format and number of rows."""
    width, inner, copies = (64, 128, 2) if rehearse else (WIDTH, INNER, COPIES)
    dtype = torch.float32 if rehearse else torch.bfloat16
    generator = torch.Generator(device).manual_seed(0)
    numbers = torch.randn(width, inner, generator=generator, device=device) * inner**-0.5
    dense = [numbers.to(dtype).clone() for _ in range(max(2, copies // 2))]
    found = []
    for form in FORMATS[:2] if rehearse else FORMATS:
        weight = QuantizedTensor.quantize(numbers, form)
        weights = [weight.clone() for _ in range(copies)]
        for rows in ROWS[:2] if rehearse else ROWS:
            x = torch.randn(rows, inner, generator=generator, device=device).to(dtype)
            found.append(product(x, weights, dense, rounds))
    return found


def product(x: Tensor, weights: list[QuantizedTensor], dense: list[Tensor], rounds: int) -> dict[str, Any]:
    """One product with codes beside torch's own."""
    first, device, rows = weights[0], x.device, x.shape[0]
    name = None if first.format in NAMED else first.format

    def call(weight: QuantizedTensor) -> Tensor:
        out: Tensor = lz.sync.quantized_linear(x, **{**weight.arguments(), "format": name})
        return out

    kernel = settled(lambda: call(first), "quantized_linear", device)
    truth = x.double() @ first.dequantize(torch.float64).t()
    error = float((call(first).double() - truth).abs().max() / truth.abs().max())
    arms = {
        "dense": timed(device, lambda: [torch.nn.functional.linear(x, weight) for weight in dense]),
        "codes": timed(device, lambda: [call(weight) for weight in weights]),
    }
    us = medians(arms, rounds)
    plain, codes = us["dense"] / len(dense), us["codes"] / len(weights)
    return {
        "format": first.format, "rows": rows, "kernel": kernel, "bfloat16_us": round(plain, 2),
        "us": round(codes, 2), "ratio": round(plain / codes, 3), "error": float(f"{error:.2e}"),
        "needs": NEEDS.get(rows) if first.format == "int4" else None,
    }  # fmt: skip


def decoding(device: torch.device, rehearse: bool, rounds: int, copy: float) -> dict[str, Any]:
    """Pages of codes over pages of sixteen bits."""
    sequences, context = (2, 32) if rehearse else (64, 4096)
    dtype = torch.float32 if rehearse else torch.bfloat16
    pages = context // PAGE
    shape = (sequences * pages, PAGE, KEY_HEADS, HEAD_DIM)
    generator = torch.Generator(device).manual_seed(0)
    keys, values = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(2))
    tables = torch.randperm(shape[0], generator=generator, device=device).view(sequences, pages).int()
    lengths = torch.full((sequences,), context, device=device, dtype=torch.int32)
    q = torch.randn(sequences, HEADS, HEAD_DIM, generator=generator, device=device).to(dtype)
    calls: dict[str, Callable[[], Any]] = {
        "sixteen bits": lambda: lz.sync.paged_attention(q, keys, values, tables, lengths)
    }
    read = {"sixteen bits": 2 * keys.numel() * keys.element_size()}
    for name, codes in CODES.items():
        tokens = torch.full(shape[:-1], 1 / 32, device=device)
        scales = {
            "head": torch.full((KEY_HEADS,), 1 / 32, device=device),
            "token": tokens.transpose(1, 2).contiguous().transpose(1, 2),  # as `PagedCache` has them
            "token, a token's heads together": tokens,
        }
        for shared, scale in scales.items():
            limit = 100.0
            k, v = ((t.float() * 32).clamp(-limit, limit).to(codes) for t in (keys, values))
            side = f"{name}, scales by {shared}"
            calls[side] = lambda k=k, v=v, scale=scale: lz.sync.paged_attention(
                q, k, v, tables, lengths, k_scale=scale, v_scale=scale
            )
            read[side] = 2 * (k.numel() + (4 * scale.numel() if scale.dim() == 3 else 0))
    kernels = {name: settled(call, "paged_attention", device) for name, call in calls.items()}

    def twice(call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            call()
            call()

        return run

    us = medians({name: timed(device, twice(call)) for name, call in calls.items()}, rounds)
    us = {name: round(took / 2, 2) for name, took in us.items()}
    plain = us["sixteen bits"]
    return {
        name: {"us": took, "over_sixteen_bits": round(plain / took, 3), "kernel": kernels[name],
               "share_of_copy": round(read[name] / took * 1e6 / copy, 3) if copy == copy else None}
        for name, took in us.items()
    }  # fmt: skip


class Model:
    """A random Llama, its sequences at a context, and its captured step."""

    def __init__(
        self, config: Any, device: torch.device, dtype: torch.dtype, weights: str, kv: torch.dtype | None,
        requests: int, context: int,
    ) -> None:  # fmt: skip
        generator = torch.Generator(device).manual_seed(0)

        def get(name: str, shape: tuple[int, ...]) -> Any:
            if len(shape) == 1:
                return torch.ones(shape, device=device, dtype=dtype)
            numbers = torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(
                shape[-1] ** -0.5
            )
            if weights == "int4" and "layers" in name:
                return QuantizedTensor.quantize(numbers, "int4", granularity="group", group_size=128)
            return numbers

        room = context + 512
        pages = requests * -(-room // PAGE) + requests + 32
        llama = models.llama
        self.model = llama.Llama(config, get, llama.kv_pool(config, device, dtype, pages, PAGE, kv))
        self.device = device
        self.sequences = [self.model.cache.sequence(room) for _ in range(requests)]
        for sequence in self.sequences:
            sequence.extend(context)
        self.ids = torch.ones(requests, dtype=torch.int64, device=device)
        self.run, _ = self.model.runners

    def step(self) -> None:
        """One more token of every sequence; nothing is read."""
        self.ids = self.run([sequence.extend(1) for sequence in self.sequences], self.ids).reshape(-1)

    def seconds(self, steps: int = 16) -> float:
        """Seconds of a step, of `steps` that follow each other."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.ids.tolist()
        return (time.perf_counter() - begin) / steps

    def close(self) -> None:
        """Give everything back."""
        for sequence in self.sequences:
            sequence.close()
        for runner in self.model.runners:
            runner.close()


def generation(device: torch.device, rehearse: bool, layers: int, rounds: int) -> dict[str, Any]:
    """A step of each kind of model, by requests."""
    config = models.SHAPES["tiny" if rehearse else "8b-8"]
    config = config if rehearse else replace(config, num_hidden_layers=layers)
    dtype = torch.float32 if rehearse else torch.bfloat16
    fp8 = torch.float8_e4m3fn
    kinds = {"bfloat16": ("plain", None), "codes for keys and values": ("plain", fp8),
             "int4 weights": ("int4", None), "both": ("int4", fp8)}  # fmt: skip
    if rehearse:
        kinds.pop("int4 weights"), kinds.pop("both")  # the tiny model is narrower than a group
    found: dict[str, Any] = {}
    for requests, context in ((2, 16),) if rehearse else ((64, 2048), (16, 2048)):
        sides: dict[str, Model] = {}
        for name, (weights, kv) in kinds.items():
            side = sides[name] = Model(config, device, dtype, weights, kv, requests, context)
            until = time.monotonic() + (2.0 if rehearse else 100.0)
            while time.monotonic() < until:
                side.step()
                if not rehearse and side.run.captures and not current().device(device.type).loader.loading:
                    break
                time.sleep(0.25)  # a first run compiles for a minute, and each step takes a token of room
            side.seconds(4)
        ms = {
            name: round(us / 1e3, 3)
            for name, us in medians({name: side.seconds for name, side in sides.items()}, rounds).items()
        }
        found[f"{requests}x{context}"] = {
            "step_ms": ms, "captures": {name: side.run.captures for name, side in sides.items()},
            "over_bfloat16": {name: round(ms["bfloat16"] / took, 3) for name, took in ms.items()},
            "needs": 1.4 if requests == 64 else None,
        }  # fmt: skip
        for side in sides.values():
            side.close()
        del sides
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def main() -> int:
    """Measure each part, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--only", default="products,decode,generation")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help="a folder")
    given = parser.parse_args()
    device = torch.device("cpu" if given.rehearse else "cuda")
    only, rounds = given.only.split(","), 1 if given.rehearse else given.rounds
    record: dict[str, Any] = {
        "environment": environment(("layerzero-runtime", "torch", "triton")), "copy_bytes_per_s": bandwidth()
    }  # fmt: skip
    out = given.out / RESULTS.name if given.out else RESULTS
    parts: dict[str, Callable[[], Any]] = {
        "products": lambda: products(device, given.rehearse, rounds),
        "decode": lambda: decoding(device, given.rehearse, rounds, record["copy_bytes_per_s"]),
        "generation": lambda: generation(device, given.rehearse, given.layers, rounds),
    }
    with lz.start(lz.Settings(device=device.type, inference=True, perfdb=None)), torch.inference_mode():
        for name in only:
            record[name] = parts[name]()
            if not given.rehearse:
                write(out, record)
    for row in record.get("products", ()):
        print(row, flush=True)
    for name in ("decode", "generation"):
        show(name, ("side", "found"), [(side, str(row)) for side, row in record.get(name, {}).items()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
