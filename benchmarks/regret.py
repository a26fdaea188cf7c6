"""How far our choice is from the best kernel, and our call from the best vendor call, shape by shape.

Run `python -m benchmarks.regret --out benchmarks/results/regret_cpu_avx512.json`. Two figures are kept apart:
*choice*, the chosen kernel's time over the fastest available one's, and *end to end*, `lz.sync.<op>` over the
fastest vendor call. Launched eagerly the host is in the time; replayed as a graph (CUDA) it is not. All arms
of one shape take turns in the same rounds. Shapes that `lz.tune` measures are "tuned", the other listed ones
"held out", and those that a seed drew and nobody looked at "blind".

The file is written after every shape, and a run that finds it goes on where it ended (`--budget-s` ends one).
`--tune` measures the standard shapes first and `--table PATH` writes what it measured as a table to ship.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import layerzero as lz
from benchmarks.harness import environment, show, write
from benchmarks.regret_build import CACHES, build, in_order
from benchmarks.regret_shapes import PARTS, asked, shapes
from benchmarks.regret_tune import tune
from layerzero.actors.device.local_device import LocalDevice
from layerzero.measure.calls import Call
from layerzero.measure.timing import QUICK, Timing, TimingBudget, copies_for, time_kernels
from layerzero.ops import table as ops_table
from layerzero.ops.op import Args, Op
from layerzero.perfdb.record import Environment, Launch
from layerzero.selection.record import Selection
from layerzero.selection.workspace import workspace_bytes
from layerzero.spec.kernel import Kernel

VERSION = 2
OURS = "lz"
RAW = "vendor:"
LIBRARIES = ("torch", "flashinfer-python", "flash-attn-4", "vllm", "liger-kernel", "triton", "zentorch")
# "Always this one" policies that the choice is compared with, by the start of the kernel's id.
ALWAYS = {
    "SDPA default": RAW + "sdpa_default",
    "FlashInfer": "flashinfer.",
    "FlashAttention-3": "vllm_flash_attn_3.",
    "FlashAttention-4": "flash_attn_4.",
}


def main() -> None:
    """Tune where asked, measure what is missing, print."""
    options = _options()
    torch.set_num_threads(options.threads or torch.get_num_threads())
    started = time.monotonic()
    deadline = started + options.budget_s
    settings = lz.Settings(
        device=options.device, warm="eager", perfdb=options.perfdb, shipped_tables=not options.no_shipped
    )
    os.environ.update(CACHES)
    built = None
    if options.build_s:
        only = (
            *(("--missing",) if options.missing else ()),
            *(("--parts", *options.parts) if options.parts else ()),
        )
        built = build(options.device, options.workers, options.build_s, options.quick, only)
    with lz.start(settings) as runtime, torch.no_grad():
        device = runtime.device()
        for kernel in options.deny:
            lz.add_policy(deny=kernel)
        record = opened(options.out, device)
        if built is not None:
            record["built"] = built
        if options.tune:
            tune(record, device, options, deadline)
        if not options.tune_only:
            measure_shapes(record, device, options, deadline)
        record["bandwidth"] = record.get("bandwidth") or copy_bandwidth(device.device)
        record["seconds"] = round(record.get("seconds", 0.0) + time.monotonic() - started, 1)
        summarise(record)
        write(options.out, record)
    report(record)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=3600.0, help="end before this many seconds")
    parser.add_argument("--build-s", type=float, default=0.0, help="first compile for at most so long")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    parser.add_argument("--tune", action="store_true", help="measure the standard shapes first")
    parser.add_argument("--tune-only", action="store_true")
    parser.add_argument("--tune-budget-s", type=float, default=240.0)
    parser.add_argument("--repeat", type=int, choices=(1, 2), default=1, help="2: tune twice, report flips")
    parser.add_argument("--again-s", type=float, default=0.0, help="tune for so long again, report flips")
    parser.add_argument(
        "--first", action="append", help="tune the calls of this op before others; repeatable"
    )
    parser.add_argument(
        "--missing", action="store_true", help="tune only calls that the shipped table lacks a kernel of"
    )
    parser.add_argument("--only", action="append", help="tune only calls of this op; repeatable")
    parser.add_argument("--deny", action="append", default=[], help="leave kernels out; repeatable")
    parser.add_argument("--table", type=Path, help="write what was tuned as a table to ship")
    parser.add_argument("--perfdb", default=None, help="keep what was tuned in this file, and read it")
    parser.add_argument("--no-shipped", action="store_true", help="leave the shipped tables out")
    parser.add_argument("--group", action="append", help="only groups that start with this; repeatable")
    parser.add_argument(
        "--parts", nargs="+", help="only these parts of the shapes, or groups of one: blind 'held out, norms'"
    )
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="few shapes, few samples: see that it runs")
    return parser.parse_args()


def opened(path: Path, device: LocalDevice) -> dict[str, Any]:
    """The record to go on with: the file's, if it is of this machine, else a new one."""
    signature = Environment.of_hardware(device.hardware).digest()
    if path.exists():
        record: dict[str, Any] = json.loads(path.read_text())
        if record.get("version") == VERSION and record.get("signature") == signature:
            return record
        raise SystemExit(f"{path} is of another machine, software or version: give another --out")
    kernels = sorted(k.id for k in device.kernels() if k.id not in device.registry.blocked())
    return {
        "version": VERSION,
        "signature": signature,
        "environment": environment(LIBRARIES),
        "kernels": kernels,
        "shapes": {},
    }


# -- measuring ------------------------------------------------------------------------------------------


def measure_shapes(
    record: dict[str, Any], device: LocalDevice, options: argparse.Namespace, deadline: float
) -> None:
    effort = QUICK if options.quick else TimingBudget(samples=21, budget_s=0.2)
    launches: tuple[Launch, ...] = ("eager", "graph") if device.device.type == "cuda" else ("eager",)
    wanted = asked(shapes(device.device.type, options.quick), options.parts)
    if "built" in record:  # what would have to compile comes last
        ordered = in_order(device, [shape.call for shape in wanted], record["built"]["units"])
        places = {str(call): place for place, call in enumerate(ordered)}
        wanted.sort(key=lambda shape: places[str(shape.call)])
    for group, call, part in wanted:
        if options.group and not any(group.startswith(name) for name in options.group):
            continue
        operands: list[Args] = []
        for launch in launches:
            name = f"{launch} {call}"
            if name in record["shapes"]:
                continue
            if time.monotonic() > deadline:
                record["unfinished"] = True
                return
            try:
                operands = operands or made(device, call)
                found = measure(device, call, launch, effort, operands)
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"[:400]}
            record["shapes"][name] = {"group": group, "part": part, "launch": launch, **found}
            write(options.out, record)
            print(f"{name}: {found.get('choice') or found.get('error')}", flush=True)
    record["unfinished"] = False


def made(device: LocalDevice, call: Call) -> list[Args]:
    """Operands of equal calls, as many as keep the last-level cache cold."""
    wanted = copies_for(call.operand_bytes(), device.device, 8 << 30)
    return [call.make(device.device, n) for n in range(wanted)]


def measure(
    device: LocalDevice, call: Call, launch: Launch, effort: TimingBudget, copies: list[Args]
) -> dict[str, Any]:
    """Every kernel that takes the call, our call and the vendors', in the same rounds."""
    op = ops_table.get(call.op)
    args = copies[0]
    table = device.table(op)
    request = table.describe(args, device.mode())
    selection: Selection = table.recompute(request)
    chosen = selection
    if launch == "graph":
        chosen = table.recompute(request.replace(modes=request.modes | {"capture"}))
    runs: dict[str, Callable[..., Any]] = {}
    for candidate in selection.trace:
        kernel = device.registry.get(candidate.kernel)
        if kernel is None or _too_slow(op, candidate.backend, selection) or _too_big(kernel, selection):
            continue
        if candidate.eligible:
            runs[candidate.kernel] = device.callable_for(op, selection, candidate.kernel)
    if not _transforms(chosen, chosen.kernel):
        runs[RAW + chosen.kernel] = device.registry.callable_of(chosen.kernel)
    runs |= vendors(op, call)
    runs[OURS] = ours(op, args)
    if launch == "graph" and hasattr(lz, "rehearse_capture"):
        with lz.rehearse_capture():
            runs[OURS](*args)
    timings, failed = time_kernels(runs, copies, device.device, launch, effort)
    return _result(chosen, timings, failed, call, copies)


def _too_slow(op: Op, backend: str, selection: Selection) -> bool:
    """References of big calls would take the whole budget, and nobody chooses them there."""
    work = op.work(selection.request)
    return backend == "reference" and work.flops > (3e9 if selection.request.platform == "cpu" else 1e12)


def _too_big(kernel: Kernel, selection: Selection) -> bool:
    return workspace_bytes(kernel, selection.request) > 4 << 30


def _transforms(selection: Selection, kernel: str) -> bool:
    accepted = selection.candidate(kernel).accepted
    return accepted is not None and bool(accepted.transforms)


def ours(op: Op, args: Args) -> Callable[..., Any]:
    """The public blocking call, given the op's full argument tuple as a user would write it."""
    function = getattr(lz.sync, op.name)
    names = list(_parameters(op))
    positional = [n for n, p in _parameters(op).items() if p.kind is not p.KEYWORD_ONLY]
    keywords = names[len(positional) :]
    changed = [n for n in keywords if args[names.index(n)] != _parameters(op)[n].default]
    written = ", ".join([*positional, *(f"{name}={name}" for name in changed)])
    # As a user writes it, without a line of ours in between.
    call: Callable[..., Any] = eval(f"lambda {', '.join(names)}: function({written})", {"function": function})
    return call


@functools.cache
def _parameters(op: Op) -> Any:
    import inspect

    return inspect.signature(op.build).parameters


def vendors(op: Op, call: Call) -> dict[str, Callable[..., Any]]:
    """Calls that stand in no adapter of ours: what a user of torch alone would write."""
    if op.name == "attention":
        if call.args.get("window") is not None or call.args.get("layout") not in (None, "BHSD"):
            return {}
        return {RAW + "sdpa_default": _sdpa_default}
    if op.name == "rms_norm":
        return {RAW + "torch_rms_norm": lambda x, w, eps: functional.rms_norm(x, (x.shape[-1],), w, eps)}
    if op.name == "layer_norm":
        return {
            RAW + "torch_layer_norm": lambda x, w, b, eps: functional.layer_norm(x, x.shape[-1:], w, b, eps)
        }
    if op.name == "linear":
        return {RAW + "torch_linear": functional.linear}
    return {}


def _sdpa_default(q: Any, k: Any, v: Any, mask: Any, causal: bool, *_: Any) -> Any:
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError("torch's causal mask is aligned at the other corner here")
    return functional.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )


def _result(
    chosen: Selection, timings: dict[str, Timing], failed: dict[str, str], call: Call, copies: list[Args]
) -> dict[str, Any]:
    times = {name: round(timing.median_us, 3) for name, timing in timings.items()}
    kernels = {k: us for k, us in times.items() if k != OURS and not k.startswith(RAW)}
    raw = {k.removeprefix(RAW): us for k, us in times.items() if k.startswith(RAW)}
    # Under capture only kernels that may be captured are available; a faster one that may not is told apart.
    admitted = {c.kernel for c in chosen.trace if c.eligible}
    best = min([k for k in kernels if k in admitted] or kernels, key=kernels.__getitem__)
    faster = {k: us for k, us in kernels.items() if us < kernels[best] * 0.97}
    accepted = chosen.candidate(chosen.kernel).accepted
    found: dict[str, Any] = {
        "kernels_us": kernels,
        "vendors_us": raw,
        "chosen": chosen.kernel,
        "source": accepted.source if accepted else "",
        "expected_us": round(chosen.expected_us, 2),
        "best": best,
        "faster_but_not_admitted": faster,
        "failed": failed,
        "copies": len(copies),
        "bytes": call.operand_bytes(),
        "flops": ops_table.get(call.op).work(chosen.request).flops,
    }
    if chosen.kernel in kernels:
        found["choice"] = round(kernels[chosen.kernel] / kernels[best], 4)
        found["faster_than"] = {
            name: round(min(us) / kernels[chosen.kernel], 3)
            for name, start in ALWAYS.items()
            if (us := [t for k, t in times.items() if k.startswith(start)])
        }
    else:
        found["error"] = f"{chosen.kernel} was chosen and could not be timed"
    if OURS in times:
        found["lz_us"] = times[OURS]
        allowed = [us for k, us in kernels.items() if k in admitted] + list(raw.values())
        found["end_to_end"] = round(times[OURS] / min(allowed), 4)
        found["overhead_us"] = round(times[OURS] - raw.get(chosen.kernel, kernels.get(chosen.kernel, 0.0)), 3)
    return found


def copy_bandwidth(device: torch.device) -> dict[str, float]:
    """Bytes a second of a large copy, read and written bytes counted: what decode is compared with."""
    cuda = device.type == "cuda"
    source = torch.empty((4 << 30) if cuda else (256 << 20), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timings, _ = time_kernels(
        {"copy": lambda a, b: b.copy_(a)},
        [(source, target)],
        device,
        "eager",
        TimingBudget(samples=11, budget_s=2.0),
    )
    return {"copy_gb_s": round(2 * source.numel() / timings["copy"].median_us / 1e3, 1)}


# -- summary --------------------------------------------------------------------------------------------


def summarise(record: dict[str, Any]) -> None:
    """Geometric means and worst cases by launch and part, for groups and together."""
    rows: list[dict[str, Any]] = [row for row in record["shapes"].values() if "choice" in row]
    summary: dict[str, Any] = {}
    for launch in ("eager", "graph"):
        for part in PARTS:
            own = [row for row in rows if row["launch"] == launch and row["part"] == part]
            for group in sorted({_family(row["group"]) for row in own}):
                summary[f"{launch}, {part}, {group}"] = _figures(
                    [r for r in own if _family(r["group"]) == group]
                )
            if own:
                summary[f"{launch}, {part}, all"] = _figures(own)
    record["summary"] = summary
    record["errors"] = {name: row["error"] for name, row in record["shapes"].items() if "error" in row}
    if "bandwidth" in record:
        record["decode"] = _decode(record)
    record["products"] = [
        {"shape": name, "tflops": round(row["flops"] / row["lz_us"] / 1e6, 1)}
        for name, row in record["shapes"].items()
        if row["group"].startswith("linear") and "lz_us" in row and row.get("flops", 0) > 1e9
    ]
    for launch, name in (("eager", "overhead_us"), ("graph", "overhead_graph_us")):
        overheads = [
            row["overhead_us"]
            for row in rows
            if "overhead_us" in row and row["launch"] == launch and row["lz_us"] < 200
        ]
        if overheads:
            record[name] = {
                "median": round(statistics.median(overheads), 3),
                "n": len(overheads),
                "of": "calls below 200 us: lz.sync over the chosen kernel's own callable",
            }
    record["prefill_8k"] = {
        row["launch"]: {"lz_us": row["lz_us"], "best_us": round(row["lz_us"] / row["end_to_end"], 3),
                        "of_best": round(1 / row["end_to_end"], 4)}
        for name, row in record["shapes"].items()
        if "q=1x32x8192x128" in name and "k=1x8x8192x128" in name and "window" not in name
        and "end_to_end" in row
    }  # fmt: skip


def _family(group: str) -> str:
    return group.split()[0]


def _figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    figures: dict[str, Any] = {"shapes": len(rows), **_spread("choice", [row["choice"] for row in rows])}
    ends = [row["end_to_end"] for row in rows if "end_to_end" in row]
    if ends:
        figures |= _spread("end_to_end", ends)
    for name in ALWAYS:
        gains = [row["faster_than"][name] for row in rows if name in row.get("faster_than", {})]
        if gains:
            figures[f"over always {name}"] = round(statistics.geometric_mean(gains), 3)
    return figures


def _spread(name: str, values: list[float]) -> dict[str, float]:
    return {
        f"{name}_geomean": round(statistics.geometric_mean(values), 4),
        f"{name}_worst": round(max(values), 4),
    }


def _decode(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Paged decode in bytes a second (keys and values read once) beside a copy's."""
    copy = record["bandwidth"]["copy_gb_s"]
    found = []
    for name, row in record["shapes"].items():
        if row["group"].startswith("paged decode") and "choice" in row:
            us = row["lz_us"] if "lz_us" in row else row["kernels_us"][row["chosen"]]
            rate = row["bytes"] / us / 1e3
            found.append({"shape": name, "gb_s": round(rate, 1), "of_copy": round(rate / copy, 3)})
    return found


def report(record: dict[str, Any]) -> None:
    """The summary as a table."""
    rows = []
    for name, figures in record["summary"].items():
        ends = [figures.get(f"end_to_end_{part}") for part in ("geomean", "worst")]
        over = [figures.get(f"over always {name}") for name in ALWAYS]
        numbers = [figures["choice_geomean"], figures["choice_worst"], *ends, *over]
        rows.append([name, str(figures["shapes"]), *("-" if n is None else f"{n:.3f}" for n in numbers)])
    show(
        "regret: 1.000 is the best kernel, the best vendor call",
        ["shapes", "n", "choice", "worst", "end to end", "worst", *[f"over {n}" for n in ALWAYS]],
        rows,
    )
    for name, error in list(record["errors"].items())[:10]:
        print(f"not measured: {name}: {error}")
    print(f"unfinished: {record.get('unfinished', False)}; {len(record['shapes'])} rows")


if __name__ == "__main__":
    main()
