"""What LayerZero adds to a call, row by row, beside its peers in the same run.

    python benchmarks/hot_path.py            # a few minutes; writes benchmarks/results/hot_path.json
    python benchmarks/hot_path.py --quick    # seconds: only shows that every row runs

Rows: a a table hit, b a blocking call of each op, c a miss, d the first call of a process, e an awaited call,
f a bound callable; and what a hit allocates, and what policy swaps do to running threads. Published is wall
time over the real kernel that the op chooses, called directly in the same rounds; each is the median of all
rounds. A null kernel (it returns a tensor made before) stands beside where a row is named so. The peers
need the extra `bench`; `peers.py` says what each of them is asked.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the sample calls are the contract tests' own

import awaiting
import peers
import tables
import torch
from harness import (
    SETTLING,
    Plan,
    distribution,
    environment,
    interleave,
    over,
    settled,
    show,
    singles,
    us,
    write,
)
from torch import Tensor

import layerzero as lz
from layerzero.actors.device.local_device import LocalDevice
from layerzero.native import FAST_PATH
from layerzero.ops import table as ops_table
from tests.backends import calls as sample_calls

RESULTS = Path(__file__).resolve().parent / "results" / "hot_path.json"
DISTRIBUTIONS = (
    "layerzero-runtime", "transformers", "kernels", "diffusers", "flashinfer-bench", "kernel-set", "zentorch",
)  # fmt: skip

# Floors are promises (None: none was given), aims what we hold ourselves to; microseconds.
BOUNDS: dict[str, dict[str, float | None]] = {
    "a_hit": {"floor": 1.0, "aim": 0.1},
    "a_hit_p99": {"floor": 10.0, "aim": 10.0},
    "b_attention": {"floor": 5.0, "aim": 2.0},
    "b_linear": {"floor": 5.0, "aim": 2.0},
    "b_rms_norm": {"floor": 5.0, "aim": 2.0},
    "b_worst": {"floor": 5.0, "aim": 2.0},
    "b_null": {"floor": None, "aim": None},
    "c_miss_100_kernels": {"floor": 1000.0, "aim": 100.0},
    "swap_spinning": {"floor": None, "aim": 10_000.0},
    "swap_paced": {"floor": None, "aim": 10_000.0},
    "swap_frozen": {"floor": 10_000.0, "aim": 10_000.0},
    "d_first_call": {"floor": 10_000.0, "aim": 10_000.0},
    "d_import": {"floor": 60_000.0, "aim": 60_000.0},
    "e_lone_inline": {"floor": 10.0, "aim": 1.0},
    "e_lone_worker": {"floor": None, "aim": 60.0},
    "e_one_of_64": {"floor": 5.0, "aim": 2.5},
    "e_one_of_64_spawn": {"floor": 5.0, "aim": 1.5},
    "e_one_of_64_null": {"floor": None, "aim": None},
    "f_guarded": {"floor": None, "aim": 0.6},
    "f_unguarded": {"floor": None, "aim": 0.1},
}


def operands(op: str) -> tuple[Tensor, ...]:
    """Small operands, so that the kernel does not bury what is measured."""
    torch.manual_seed(0)
    if op == "attention":
        return tuple(torch.randn(1, 8, 16, 64) for _ in range(3))
    if op == "linear":
        return torch.randn(1, 64), torch.randn(64, 64)
    return torch.randn(1, 64), torch.randn(64)


def null_kernel(op: str, out: Tensor) -> lz.Kernel:
    """A kernel that does nothing: it hands back a tensor made before."""

    def null(*_: Any) -> Tensor:
        return out

    return lz.Kernel(
        id=f"bench.{op}.null",
        op=op,
        backend="bench",
        capability=lz.Capability(
            source="takes anything",
            features=tables.FEATURES,
            layouts=frozenset({"BHSD"}) if op == "attention" else frozenset(),
        ),
        load=lambda: null,
        efficiency=lz.Efficiency(1.0, 1.0, 0.001, "does nothing"),
    )


def device() -> LocalDevice:
    """The CPU's device in the runtime in force."""
    return lz.Runtime.device(_runtime(), "cpu")


def _runtime() -> lz.Runtime:
    from layerzero.runtime import current

    return current()


# -- b and f ------------------------------------------------------------------------------------------


def blocking(plan: Plan, op: str) -> dict[str, Any]:
    """Row b for one op: the blocking call and the bound one over the chosen kernel, called directly."""
    if op in ("attention", "linear", "rms_norm"):
        args, named = operands(op), {}
    else:
        args, named = written(op)
    result: dict[str, Any] = {"real": _over_kernel(plan, op, args, named)}
    if op not in ("attention", "linear", "rms_norm"):
        return result
    runtime = _runtime()
    kernel = null_kernel(op, getattr(lz.sync, op)(*args))
    runtime.add_kernel(kernel)
    lz.lock(op, kernel.id)
    try:
        result["null"] = _over_kernel(plan, op, args, named)
    finally:
        lz.unlock(op)
        runtime.remove_kernel(kernel.id)
    return result


def written(op: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A small call of an op as a user writes it: what has no default by position, the rest by keyword."""
    full = sample_calls.call(sample_calls.Case(op), torch.float32)
    positional, named = [], {}
    parameters = inspect.signature(ops_table.get(op).build).parameters.values()
    for value, parameter in zip(full, parameters, strict=True):
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is parameter.empty:
            positional.append(value)
        elif isinstance(value, Tensor) or value != parameter.default:
            named[parameter.name] = value
    return tuple(positional), named


def _over_kernel(plan: Plan, op: str, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    call = getattr(lz.sync, op)
    here = device()
    settle(plan, op, args, named)
    signature, full = ops_table.get(op).build(*args, **named)
    planned = here.plan(ops_table.get(op), signature, full, here.mode())
    # The kernel's own callable: a plan's compares outputs until its first run has proved them.
    direct = here.registry.callable_of(planned.kernel)
    guarded, bare = lz.bind(op, *args, **named), lz.bind(op, *args, guard=False, **named)
    arms = interleave(
        plan,
        direct=lambda: direct(*full),
        sync=lambda: call(*args, **named),
        guarded=lambda: guarded(*args),
        unguarded=lambda: bare(*args),
    )
    base = arms["direct"]
    return {
        "kernel": planned.kernel,
        "transforms": len(planned.selection.transforms),
        "kernel_us": us(base),
        "over": over(arms["sync"], base),
        "bound_guarded": over(arms["guarded"], base),
        "bound_unguarded": over(arms["unguarded"], base),
        "single_calls": distribution(singles(lambda: call(*args, **named), plan.singles)),
        "build": _build_cost(plan, op, args, named),
    }


def settle(plan: Plan, op: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Call an op until its kernel is the one that stays, and nothing compiles beside what is timed."""
    call, here = getattr(lz.sync, op), device()
    for _ in range(SETTLING):
        call(*args, **named)
        here.wait_for_costs()
        if settled(plan, here, lz.last_selection()):
            break
    call(*args, **named)


def _build_cost(plan: Plan, op: str, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    build = ops_table.get(op).build
    return us(interleave(plan, build=lambda: build(*args, **named))["build"])


# -- the whole ------------------------------------------------------------------------------------------


def measure(plan: Plan) -> dict[str, Any]:
    """Every row; what each returns stands under its letter."""
    rows: dict[str, Any] = {}
    q, k, v = operands("attention")
    settle(plan, "attention", (q, k, v), {})
    rows["a"] = tables.hits(plan, device(), (q, k, v))
    rows["b"] = {op: blocking(plan, op) for op in ops_table.names()}
    rows["c"] = tables.misses(plan)
    rows["d"] = tables.first_calls(plan)
    rows["e"] = awaiting.measure(plan)
    rows["allocation"] = tables.allocation(plan, (q, k, v))
    rows["swaps"] = tables.swaps(plan)
    rows["peers"] = peers.compare(plan, q, k, v)
    return rows


def verdicts(rows: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each bounded number beside its floor and aim: wall time, medians of all rounds."""
    attention = rows["b"]["attention"]["real"]
    crowd = rows["e"]["one_of_64"]
    blocking_us = {op: row["real"]["over"]["wall_us"]["median"] for op, row in rows["b"].items()}
    values: dict[str, float | None] = {
        "a_hit": rows["a"]["hit"]["wall_us"]["median"],
        "a_hit_p99": rows["a"]["single_hits"]["p99_us"],
        **{f"b_{op}": blocking_us[op] for op in ("attention", "linear", "rms_norm")},
        "b_worst": max(blocking_us.values()),
        "b_null": rows["b"]["attention"]["null"]["over"]["wall_us"]["median"],
        "c_miss_100_kernels": rows["c"]["100 kernels"]["wall_us"]["median"],
        "d_first_call": rows["d"]["first_call_us"]["median"],
        "d_import": rows["d"]["import_us"]["median"],
        "e_lone_inline": rows["e"]["lone_inline"]["wall_us"]["median"],
        "e_lone_worker": rows["e"]["lone_worker"]["wall_us"]["median"],
        "e_one_of_64": max(row["beyond_kernel"]["wall_us"]["median"] for row in crowd["real"].values()),
        "e_one_of_64_spawn": crowd["real_spawn"]["beyond_kernel"]["wall_us"]["median"],
        "e_one_of_64_null": crowd["null"]["beyond_kernel"]["wall_us"]["median"],
        "f_guarded": attention["bound_guarded"]["wall_us"]["median"],
        "f_unguarded": attention["bound_unguarded"]["wall_us"]["median"],
        **{f"swap_{how}": rows["swaps"][how]["same op"]["wall"]["worst_us"] for how in tables.READERS},
    }
    return {
        name: {
            "us": value,
            **BOUNDS[name],
            "meets_floor": _below(value, BOUNDS[name]["floor"]),
            "meets_aim": _below(value, BOUNDS[name]["aim"]),
        }
        for name, value in values.items()
    }


def _below(value: float | None, bound: float | None) -> bool | None:
    return None if value is None or bound is None else value < bound


def render(record: dict[str, Any]) -> None:
    """The record as two tables."""
    marks = {True: "yes", False: "NO", None: "-"}
    show(
        "hot path, microseconds",
        ("row", "measured", "floor", "", "aim", ""),
        [
            (
                name, "-" if v["us"] is None else f"{v['us']:.3f}",
                "-" if v["floor"] is None else f"{v['floor']:g}", marks[v["meets_floor"]],
                "-" if v["aim"] is None else f"{v['aim']:g}", marks[v["meets_aim"]],
            )
            for name, v in record["verdicts"].items()
        ],
    )  # fmt: skip
    show(
        "one attention call, microseconds",
        ("who", "what", "total", "over torch", "note"),
        [
            (
                name, p["what"],
                "-" if p["total"] is None else f"{p['total']['wall_us']['median']:.2f}",
                "-" if p["over_torch"] is None else f"{p['over_torch']['wall_us']['median']:.2f}",
                (p["refused"] or "")[:60],
            )
            for name, p in record["rows"]["peers"].items()
        ],
    )  # fmt: skip


def prepared() -> str:
    """Compile the awaited path's twin where it is not yet; what came of it."""
    try:
        FAST_PATH.load()
    except lz.BackendNotAvailableError as error:
        return f"Python alone: {error}"
    return FAST_PATH.describe()


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that every row runs")
    parser.add_argument("--out", type=Path, default=None, help="where the JSON goes")
    options = parser.parse_args()
    plan = Plan.quick() if options.quick else Plan()
    print(f"awaited path: {prepared()}", flush=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        record = {"environment": environment(DISTRIBUTIONS), "quick": options.quick, "rows": measure(plan)}
    finally:
        torch.set_num_threads(threads)
    record["environment"]["awaited_path"] = FAST_PATH.describe()
    record["environment"]["load_average_after"] = environment()["load_average"]
    record["verdicts"] = verdicts(record["rows"])
    render(record)
    if options.out is not None or not options.quick:
        write(options.out or RESULTS, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
