"""Our Triton kernels over codes that no card has timed, beside what runs in their place, on a GPU.

    python benchmarks/codes_cuda.py --out FOLDER [--only ragged,dense,latent,experts] [--rounds 7]
    python benchmarks/codes_cuda.py --rehearse     # small, by Triton's interpreter: every arm runs and agrees

Sizes: attention of Llama 3 8B (sequences of 2,048 keys; pieces of prompts, queries of numbers and of codes),
latent attention of DeepSeek-V3 (4,096 tokens a request; all its heads, and those of one of eight ranks),
experts of Mixtral 8x7B and Qwen3 30B-A3B; 1 to 256 tokens. For each size these take turns, captured: each of
our kernels; `otherwise`, the same call without them (codes are made numbers, if no kernel reads them);
`sixteen bits`, the call over the numbers themselves, by the kernel that is chosen. A graph holds four calls,
so keys of few requests come out of the cache. An arm that no graph can hold is timed without one and says so.
A part waits for libraries that compile --settle seconds at the most, and takes what is there then.
A number is the median of the rounds after the first; `differs` is from sixteen bits, over its largest number.
The weights of all experts are one expert's codes, each in its own memory.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]
if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
from decode_cuda import captured, on_host  # noqa: E402
from harness import device_seconds, environment, medians, show, write  # noqa: E402
from torch import Tensor  # noqa: E402

import layerzero as lz  # noqa: E402
from layerzero.backends.triton_kernels import KERNELS  # noqa: E402
from layerzero.formats import QuantizedTensor  # noqa: E402
from layerzero.formats.elements import encode_values  # noqa: E402
from layerzero.ops import kv_formats, table  # noqa: E402
from layerzero.spec.kernel import LAST_CHOICE  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "codes_h200.json"
ROWS = (1, 8, 64, 256)
CALLS = 4  # in a graph
UNTIMED = {kernel.id: kernel for kernel in KERNELS if kernel.efficiency.launch_us == LAST_CHOICE[2]}
E4M3 = torch.float8_e4m3fn


class Case(NamedTuple):
    """A call over codes, the same over numbers, and our kernels for each."""

    name: str
    op: str
    codes: tuple[tuple[Any, ...], dict[str, Any]]
    numbers: tuple[tuple[Any, ...], dict[str, Any]]
    ours: tuple[str, ...]
    ours_over_numbers: tuple[str, ...] = ()


class Place(NamedTuple):
    """Where a run is, and its sizes."""

    device: torch.device
    numbers: torch.dtype
    small: bool

    def rows(self) -> tuple[int, ...]:
        """Tokens of a call."""
        return (2, 8) if self.small else ROWS

    def normal(self, *shape: int) -> Tensor:
        """Random numbers."""
        return torch.randn(shape, device=self.device).to(self.numbers)

    def coded(self, shape: tuple[int, ...], shared: str, heads: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """(codes, their scales, the numbers that they are)."""
        element = kv_formats.ELEMENT_OF[E4M3]
        of = kv_formats.scale_shape(shape, heads, shared)
        scale = (torch.rand(of, device=self.device) + 4.0) / element.max_value
        codes = encode_values(
            torch.randn(shape, device=self.device) / kv_formats.broadcast_scale(scale, len(shape), heads),
            element,
        )
        return codes, scale, kv_formats.decode(codes, scale, heads, self.numbers)


def attended(place: Place, dense: bool) -> Iterator[Case]:
    """Pieces of prompts of up to eight sequences: scales by token beside numbers, by head beside codes."""
    heads, key_heads, width, context = (4, 2, 64, 40) if place.small else (32, 8, 128, 2048)
    for rows in place.rows():
        sequences = min(rows, 2 if place.small else 8)
        for shared, of_codes in (("token", False), ("head", True)):

            def shape(tokens: int, many: int, sequences: int = sequences) -> tuple[int, ...]:
                return (sequences, many, tokens, width) if dense else (sequences * tokens, many, width)

            q, q_scale, q_numbers = place.coded(shape(rows // sequences, heads), shared, 1)
            k, k_scale, k_numbers = place.coded(shape(context, key_heads), shared, 1)
            v, v_scale, v_numbers = place.coded(shape(context, key_heads), shared, 1)
            if not of_codes:
                q, q_scale = q_numbers, None
            offsets = [
                torch.arange(sequences + 1, device=place.device, dtype=torch.int32) * step
                for step in (rows // sequences, context)
            ]
            behind = () if dense else tuple(offsets)
            scales = {"k_scale": k_scale, "v_scale": v_scale} | ({"q_scale": q_scale} if of_codes else {})
            op = "attention" if dense else "ragged_attention"
            yield Case(
                f"{rows} rows, {'codes' if of_codes else 'numbers'} meet codes by {shared}", op,
                ((q, k, v, *behind), {"is_causal": True} | scales),
                ((q_numbers, k_numbers, v_numbers, *behind), {"is_causal": True}),
                (f"triton.{op}.codes",),
            )  # fmt: skip


def latent(place: Place) -> Iterator[Case]:
    """Decoding of as many requests as rows."""
    context, page, widths = (70, 16, (64, 32)) if place.small else (4096, 64, (512, 64))
    for rows in place.rows():
        pages = -(-context // page)
        pools = [place.coded((rows * pages, page, width), "token", None) for width in widths]
        tables = torch.randperm(rows * pages, device=place.device).view(rows, pages).int()
        lens = torch.full((rows,), context, device=place.device, dtype=torch.int32)
        for heads in (4,) if place.small else (128, 16):
            queries = tuple(place.normal(rows, heads, width) for width in widths)
            (ckv, ckv_scale, ckv_numbers), (kpe, kpe_scale, kpe_numbers) = pools
            named: dict[str, Any] = {"scale": 0.0722}
            scales = {"ckv_scale": ckv_scale, "kpe_scale": kpe_scale}
            ours = [
                (f"triton.mla_attention.{of}", f"triton.mla_attention.{of}_in_order")
                for of in ("codes", "numbers")
            ]
            yield Case(
                f"{rows} requests, {heads} heads", "mla_attention",
                ((*queries, ckv, kpe, tables, lens), named | scales),
                ((*queries, ckv_numbers, kpe_numbers, tables, lens), named), ours[0], ours[1],
            )  # fmt: skip


def experts(place: Place) -> Iterator[Case]:
    """Rows of a mixture, each sent to its experts at random."""
    shapes = {"Mixtral 8x7B": (8, 2, 4096, 14336), "Qwen3 30B-A3B": (128, 8, 2048, 768)}
    if place.small:
        shapes = {"small": (4, 2, 64, 96)}
    formats: dict[str, dict[str, Any]] = {
        "int4": {"group_size": 32 if place.small else 128},
        "fp8_e4m3": {"granularity": "block", "group_size": 32 if place.small else 128},
        "mxfp4": {},
    }
    for model, (count, top, width, inner) in shapes.items():
        for form, sizes in formats.items():
            if place.small and form == "mxfp4":
                continue  # its kernel takes bfloat16 alone, which the interpreter has not
            up, up_numbers = repeated(place, "up", form, sizes, count, (2 * inner, width))
            down, down_numbers = repeated(place, "down", form, sizes, count, (width, inner))
            named = {name: part for name, part in (up | down).items() if not name.startswith("w_")}
            kernel = "powers_of_two" if form == "mxfp4" else "codes"
            for rows in place.rows():
                x = place.normal(rows, width)
                chosen = torch.rand(rows, count, device=place.device).topk(top).indices.int()
                scores = torch.rand(rows, top, device=place.device)
                yield Case(
                    f"{model}, {form}, {rows} rows", "fused_experts",
                    ((x, chosen, scores, up["w_up"], down["w_down"]), named),
                    ((x, chosen, scores, up_numbers, down_numbers), {}),
                    (f"triton.fused_experts.{kernel}",),
                )  # fmt: skip


def repeated(
    place: Place, end: str, form: str, sizes: dict[str, Any], count: int, shape: tuple[int, int]
) -> tuple[dict[str, Any], Tensor]:
    """The arguments of `count` experts that have one weight, and its numbers, as often."""
    one = QuantizedTensor.quantize(place.normal(*shape).float() * shape[1] ** -0.5, form, **sizes)
    found: dict[str, Any] = {}
    for name, part in one.arguments().items():
        if isinstance(part, Tensor):
            raw = part.contiguous().view(torch.uint8)
            many = raw.expand(count, *raw.shape).contiguous().view(part.dtype)
            found["w_" + end if name == "weight" else f"{end}_{name}"] = many
        elif name in {"format", "block_size"}:
            found[name] = part
    numbers = one.dequantize(torch.float32).to(place.numbers)
    return found, numbers.expand(count, *shape).contiguous()


def without_ours(op: str, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Tensor:
    """The call by what is chosen where the untimed kernels are not there."""
    with lz.disable(*UNTIMED):
        out: Tensor = getattr(lz.sync, op)(*call[0], **call[1])
    return out


def settled(run: Callable[[], object], op: str, until: float) -> str:
    """The kernel of the last call, when nothing is loaded or compiled behind the calls or time is up."""
    while True:
        run()
        selection = lz.last_selection()
        assert selection is not None and selection.op == op
        if selection.when_warm is None or time.monotonic() > until:
            return selection.kernel if selection.when_warm is None else f"{selection.kernel}, not settled"
        time.sleep(0.2)


def measure(case: Case, device: torch.device, rounds: int, until: float) -> dict[str, dict[str, Any]]:
    """Every arm of a case; one that fails has its error in place of a number."""
    runs: dict[str, Callable[[], Tensor]] = {
        "sixteen bits": functools.partial(without_ours, case.op, case.numbers),
        "otherwise": functools.partial(without_ours, case.op, case.codes),
    }
    for ids, call in ((case.ours, case.codes), (case.ours_over_numbers, case.numbers)):
        args = table.get(case.op).build(*call[0], **call[1])[1]
        runs |= {kernel: functools.partial(_by_kernel, kernel, args) for kernel in ids}
    found: dict[str, dict[str, Any]] = {}
    timers: dict[str, Callable[[], float]] = {}
    right = None
    for name, run in runs.items():
        row = found[name] = {}
        try:
            if name in {"sixteen bits", "otherwise"}:
                row["kernel"] = settled(run, case.op, until)
            out = run().float()
            right = out if right is None else right
            row["differs"] = float(f"{float((out - right).abs().max() / right.abs().max()):.1e}")
            timers[name] = timer(device, run, row)
        except Exception as error:  # a kernel that does not compile or take a call is a finding
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
    us = medians(timers, rounds)
    plain = us.get("sixteen bits", float("nan"))
    for name, took in us.items():
        found[name] |= {"us": took, "over_sixteen_bits": round(plain / took, 3)}
    return found


def _by_kernel(kernel: str, args: tuple[Any, ...]) -> Tensor:
    out: Tensor = _loaded(kernel)(*args)
    return out


@functools.cache
def _loaded(kernel: str) -> Callable[..., Any]:
    return UNTIMED[kernel].load()


def timer(device: torch.device, run: Callable[[], object], row: dict[str, Any]) -> Callable[[], float]:
    """The device's seconds of `run` as a graph, or without one, where none can hold it."""
    if device.type == "cpu":
        return on_host(run)
    try:
        seconds = captured(lambda: [run() for _ in range(CALLS)])
        return lambda: seconds() / CALLS
    except Exception as error:
        row["not_captured"] = f"{type(error).__name__}: {error}"[:200]
        torch.cuda.synchronize()
        return functools.partial(device_seconds, run)


def main() -> int:
    """Measure each part, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="ragged,dense,latent,experts")
    parser.add_argument("--settle", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help="a folder")
    given = parser.parse_args()
    device = torch.device("cpu" if given.rehearse else "cuda")
    place = Place(device, torch.float16 if given.rehearse else torch.bfloat16, given.rehearse)
    parts: dict[str, Callable[[], Iterator[Case]]] = {
        "ragged": lambda: attended(place, False), "dense": lambda: attended(place, True),
        "latent": lambda: latent(place), "experts": lambda: experts(place),
    }  # fmt: skip
    record: dict[str, Any] = {"environment": environment(("layerzero-runtime", "torch", "triton"))}
    rounds = 1 if given.rehearse else given.rounds
    torch.manual_seed(0)
    with lz.start(lz.Settings(device=device.type, inference=True, perfdb=None)), torch.inference_mode():
        for name in given.only.split(","):
            began, record[name] = time.monotonic(), {}
            for case in parts[name]():
                found = record[name][case.name] = measure(case, device, rounds, began + given.settle)
                if given.rehearse:
                    wrong = {arm: row for arm, row in found.items() if row.get("differs", 1.0) > 2e-2}
                    assert not wrong, (case.name, wrong)
                else:
                    write(given.out / RESULTS.name if given.out else RESULTS, record)
            rows = [(each, arm, str(row)) for each, arms in record[name].items() for arm, row in arms.items()]
            show(f"{name}, {time.monotonic() - began:.0f} s", ("case", "arm", "found"), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
