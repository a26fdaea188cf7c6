"""Add the tables that the documents show to the JSON files of the benchmarks.

    python -m scripts.result_tables                      # both files under benchmarks/results
    python -m scripts.tables    # then write them into the documents

A file without the measurements that a table needs is an error: no table is made of nothing.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.result_tables_gpu import (
    behind_http,
    compiled_models,
    decode,
    decoded,
    diverged,
    engine_targets,
    engines,
    fleets,
    grouped,
    guessed,
    in_stages,
    kernels_of_codes,
    lost,
    on_gpu,
    over_one,
    plugged,
    served_fleet,
    styles,
    targets_on_gpu,
)

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
Table = dict[str, list[Any]]

CALLS = {
    "a_hit": "a table hit, the request prepared",
    "a_hit_p99": "the same, p99 of single calls",
    "b_attention": "`lz.sync.attention` over its kernel called directly",
    "b_linear": "`lz.sync.linear` over its kernel",
    "b_rms_norm": "`lz.sync.rms_norm` over its kernel",
    "b_worst": "the op with the most over its kernel",
    "b_null": "`lz.sync.attention` over a null kernel, which returns a tensor made before",
    "c_miss_100_kernels": "a miss with 100 kernels registered",
    "d_first_call": "the first call of a process, after `import torch`",
    "d_import": "`import layerzero` after `import torch`",
    "e_lone_inline": "`await` of a lone caller over the blocking call, inline",
    "e_lone_worker": "the same through the worker thread",
    "e_one_of_64": "one of 64 awaiting callers, beyond the batched kernel; the most of four ops",
    "e_one_of_64_spawn": "the same with `rt.spawn`, `linear`",
    "e_one_of_64_null": "the same over a null kernel, `linear`",
    "f_guarded": "a bound `attention` over its kernel",
    "f_unguarded": "the same with `guard=False`",
    "swap_spinning": "the slowest selection of 8 spinning threads, the policy swapped 100 times a second",
    "swap_paced": "the same where each thread selects every 2 ms",
    "swap_frozen": "the same with `Settings(freeze_gc=True)`",
}
WAYS = {
    "one by one": "(a) LayerZero, one request after another",
    "together": "(b) LayerZero, all requests together",
    "arrivals": "(c) LayerZero, Poisson arrivals",
    "hand-batched": "(d) plain torch, batched by hand, one job",
    "arrivals by hand": "(d) plain torch, batched by hand, the arrivals of (c)",
}


def calls(record: dict[str, Any]) -> Table:
    """Return the hot path's rows, wall time, beside their bounds; a row that was not measured is left out."""
    measured = {name: v for name, v in record["verdicts"].items() if v["us"] is not None}
    rows = [
        [CALLS.get(name, name), v["us"], v["floor"], v["meets_floor"], v["aim"], v["meets_aim"]]
        for name, v in measured.items()
    ]
    return {"columns": ["microseconds", "measured", "floor", "met", "aim", "met"], "rows": rows}


def _over_kernel(item: tuple[str, dict[str, Any]]) -> float:
    return float(item[1]["real"]["over"]["wall_us"]["median"])


def ops(record: dict[str, Any]) -> Table:
    """Return what each blocking op costs over the kernel it chose, called directly in the same rounds."""
    rows = [
        [
            f"`{op}`", f"`{row['real']['kernel']}`", row["real"]["kernel_us"]["wall_us"]["median"],
            row["real"]["over"]["wall_us"]["median"], row["real"]["over"]["wall_us"]["p99"],
        ]
        for op, row in sorted(record["rows"]["b"].items(), key=_over_kernel)
    ]  # fmt: skip
    return {"columns": ["op", "kernel", "the kernel, us", "over it, us", "p99 of the rounds"], "rows": rows}


def scaling(record: dict[str, Any]) -> Table:
    """Return look-ups a second of wall time by threads, beside the same table behind one lock."""
    a = record["rows"]["a"]
    rows = [
        [
            int(n),
            *(
                value
                for side in a["hits_per_s"]
                for value in (a["hits_per_s"][side][n], a["relative_to_one"][side][n])
            ),
        ]
        for n in a["hits_per_s"]["snapshot"]
    ]
    return {
        "columns": ["threads", "hits/s", "over one thread", "behind one lock, hits/s", "over one thread"],
        "rows": rows,
    }


def peers(record: dict[str, Any]) -> Table:
    """Return one attention call through each peer; a peer that refused says why."""
    rows = [
        [
            name,
            peer["what"],
            _median(peer["total"]),
            _median(peer["over_torch"]),
            (peer["refused"] or "")[:60],
        ]
        for name, peer in record["rows"]["peers"].items()
    ]
    return {"columns": ["who", "what", "us", "over torch, us", "note"], "rows": rows}


def _median(arm: dict[str, Any] | None) -> float | None:
    return None if arm is None else float(arm["wall_us"]["median"])


def service(record: dict[str, Any]) -> Table:
    """Return throughput, latency, loop lag and batch of each way, medians over the rounds."""
    columns = ["way", "texts/s", "p50 ms", "p99 ms", "loop lag p99 ms", "requests a launch", "lowest cosine"]
    rows = []
    for name, label in WAYS.items():
        way = record["ways"][name]
        numbers = [way[key] for key in ("throughput_per_s", "p50_ms", "p99_ms", "lag_p99_ms", "mean_batch")]
        rows.append([label, *numbers, f"{record['parity']['ways'][name]['min_cosine']:.7f}"])
    return {"columns": columns, "rows": rows}


def targets(record: dict[str, Any]) -> Table:
    """Return what the service promises beside what was measured."""
    rows = [[row["what"], row["needs"], row["got"], row["met"]] for row in record["targets"]]
    return {"columns": ["what", "needs", "measured", "met"], "rows": rows}


def kernels(record: dict[str, Any]) -> Table:
    """Return which kernel served each op of the service, and why."""
    rows = [[row["op"], f"`{row['kernel']}`", row["why"]] for row in record["kernels"]]
    return {"columns": ["op", "kernel", "why"], "rows": rows}


def place(record: dict[str, Any]) -> Table:
    """Return the machine and the versions of a measurement."""
    where = record["environment"]
    rows = [
        [name, str(where[name])]
        for name in (
            "script",
            "commit",
            "machine",
            "date",
            "cpu",
            "gpu",
            "usable_cores",
            "threads",
            "torch_threads",
            "platform",
            "python",
            "torch",
        )
        if where.get(name) is not None
    ]
    rows += [
        [name, number] for name, number in where.get("versions", {}).items() if number and name != "torch"
    ]
    return {"columns": ["where", "value"], "rows": rows}


MODELS = {"shipped": "shipped, 3.0 M", "mid": "random, 20 M"}
SIDES = ("per op", "per layer", "per step", "by hand, paged", "by hand, contiguous")


def generation(record: dict[str, Any]) -> Table:
    """Return tokens a second of each side at the most requests, beside one request and transformers."""
    columns = [
        "model, context", "requests", "one by one", *SIDES, "transformers `generate`", "per layer / by hand",
        "per step / by hand", "mean batch",
    ]  # fmt: skip
    rows = []
    for name, of_model in record["generation"]["rows"].items():
        for context, of_context in of_model["contexts"].items():
            count = max(of_context, key=int)
            sides, one = of_context[count], of_context["1"]
            other = (
                record.get("transformers", {}).get("rows", {}).get(name, {}).get(context, {}).get(count, {})
            )
            alone = max(one[side]["tokens_per_s"] for side in SIDES)
            rows.append(
                [
                    f"{MODELS.get(name, name)}; {context}", int(count), alone,
                    *(sides[side]["tokens_per_s"] for side in SIDES),
                    other.get("generate", {}).get("tokens_per_s"),
                    sides["per layer"]["of_by_hand"], sides["per step"]["of_by_hand"],
                    sides["per step"]["mean_batch"],
                ]
            )  # fmt: skip
    return {"columns": columns, "rows": rows}


def servers(record: dict[str, Any]) -> Table:
    """Return the latency behind each server at shares of what the slower one can do."""
    columns = [
        "beside", "load", "requests/s", "LayerZero p50 ms", "its p50 ms", "LayerZero p99 ms", "its p99 ms",
        "LayerZero mean batch", "its mean batch",
    ]  # fmt: skip
    rows: list[list[Any]] = []
    for peer, found in record.get("servers", {}).get("rows", {}).items():
        if "refused" in found:
            rows.append([f"{peer}: {found['refused'][:60]}", *[None] * (len(columns) - 1)])
            continue
        for load, sides in found["loads"].items():
            ours, theirs = sides["LayerZero"], sides[peer]
            pairs = [row[key] for key in ("p50_ms", "p99_ms", "mean_batch") for row in (ours, theirs)]
            rows.append([peer, load, ours["requests_per_s"], *pairs])
    return {"columns": columns, "rows": rows}


def section_place(record: dict[str, Any]) -> Table:
    """Return where the generation section was measured."""
    return place(record["generation"])


def regret(record: dict[str, Any]) -> Table:
    """Return how far choice and call are from the best kernel and the best vendor call, over all shapes."""
    columns = ["launched, shapes", "shapes", "choice", "worst", "end to end", "worst"]
    policies = sorted({name for row in record["summary"].values() for name in row if name.startswith("over")})
    rows = []
    for name, row in record["summary"].items():
        if name.endswith(", all"):
            numbers = ("choice_geomean", "choice_worst", "end_to_end_geomean", "end_to_end_worst")
            values = [row[number] for number in numbers]
            always = [row.get(policy) for policy in policies]
            rows.append([name.removesuffix(", all"), row["shapes"], *values, *always])
    return {"columns": [*columns, *(f"speed-up {policy}" for policy in policies)], "rows": rows}


def replayed(record: dict[str, Any]) -> Table:
    """Return how far choices over recorded times are from the best kernel, by launch and part."""
    rows = [[name, row["shapes"], row["geomean"], row["worst"]] for name, row in record["choice"].items()]
    return {"columns": ["launched, shapes", "shapes", "choice", "worst"], "rows": rows}


def loads(record: dict[str, Any]) -> Table:
    """Return how awaited loads compare with one call after another and with futures batched by hand."""
    columns = [
        "load", "width", "over one by one", "over by hand", "the same in CPU time", "", "mean batch",
        "at once",
    ]  # fmt: skip
    ratios, counts = ("of_one_by_one", "of_by_hand"), ("mean_batch", "at_once")
    return {
        "columns": columns,
        "rows": [
            [
                load, int(width), *(row[key] for key in ratios), *(row["cpu"][key] for key in ratios),
                *(row[key] for key in counts),
            ]
            for load, widths in record["loads"].items()
            for width, row in widths.items()
        ],
    }  # fmt: skip


def watched(record: dict[str, Any]) -> Table:
    """Return what a timeline adds to one of 64 callers."""
    rows = [
        [what, row["off_us"], row["on_us"], row["ratio"]["median"]] for what, row in record["rows"].items()
    ]
    return {"columns": ["call", "without, us", "with, us", "ratio, round by round"], "rows": rows}


def since(record: dict[str, Any]) -> Table:
    """Return what each row costs over what it cost in an older tree."""
    rows = [
        [name, row["old_us"], row["new_us"], row["ratio"], *row["quartiles"]]
        for name, row in record["rows"].items()
    ]
    columns = ["row", f"{record['old'][:7]}, us", "now, us", "ratio", "lower quartile", "upper quartile"]
    return {"columns": columns, "rows": rows}


def planned(record: dict[str, Any]) -> Table:
    """Return layers planned as a whole over the same with each op chosen by itself."""
    rows = [
        [row["layer"], row["rows"], how, row[how]["op_by_op_us"]["median"], row[how]["planned_us"]["median"],
         row[how]["speedup"], "yes" if row[how]["speedup"] >= 1.0 else "no"]
        for row in record["rows"]
        for how in ("eager", "compiled")
        if "speedup" in row.get(how, {})
    ]  # fmt: skip
    columns = ["layer", "rows", "launched", "op by op, us", "planned, us", "speed-up", "at least 1.0"]
    return {"columns": columns, "rows": rows}


def coded_products(record: dict[str, Any]) -> Table:
    """Return products with weights in codes over cuBLAS's of bfloat16, and what a ratio needs."""
    rows = [
        [
            row["format"],
            row["rows"],
            row["kernel"],
            row["bfloat16_us"],
            row["us"],
            row["ratio"],
            row["needs"] or "",
        ]
        for row in record["products"]
        if row["kernel"].startswith("cuda.")
    ]
    columns = ["codes", "rows", "kernel", "bfloat16, us", "us", "ratio", "needs"]
    return {"columns": columns, "rows": rows}


def coded_pages(record: dict[str, Any]) -> Table:
    """Return decoding over pages in codes beside pages of sixteen bits."""
    rows = [
        [pages, row["kernel"], row["us"], row["over_sixteen_bits"], row["share_of_copy"]]
        for pages, row in record["decode"].items()
    ]
    columns = ["pages", "kernel", "us", "over sixteen bits", "bandwidth over a copy's"]
    return {"columns": columns, "rows": rows}


def coded_steps(record: dict[str, Any]) -> Table:
    """Return a model's captured steps with codes beside bfloat16."""
    rows = [
        [requests, side, ms, row["over_bfloat16"][side], (row["needs"] or "") if side == "both" else ""]
        for requests, row in record["generation"].items()
        for side, ms in row["step_ms"].items()
    ]
    return {"columns": ["requests x context", "codes", "step, ms", "over bfloat16", "needs"], "rows": rows}


def started(record: dict[str, Any]) -> Table:
    """Return the seconds from the start of a process to its first token and to its graphs."""
    needs = {"cold": 40, "bundle": 15}
    rows = [
        [kind, row["first_token_s"], row["ready_s"], needs.get(kind, ""), row["step_ms_when_ready"]]
        for kind, row in record["starts"].items()
    ]
    return {
        "columns": ["process", "first token, s", "nothing left to load, s", "needs", "then a step, ms"],
        "rows": rows,
    }


def hosted(record: dict[str, Any]) -> Table:
    """Return a Ray actor's captured steps over the same in this process."""
    (row,) = [row for row in record["parts"]["actor"]["rows"] if row["what"] == "actor"]
    return {
        "columns": ["in a Ray actor over in process", "ratio"],
        "rows": [
            [what.removesuffix("_over_in_process").replace("_ms", ""), value]
            for what, value in row.items()
            if what.endswith("_over_in_process")
        ],
    }


FILES: dict[str, dict[str, Callable[[dict[str, Any]], Table]]] = {
    "hot_path.json": {"calls": calls, "ops": ops, "scaling": scaling, "peers": peers, "place": place},
    "lane.json": {"generation": generation, "servers": servers, "place": section_place},
    "regret_cpu_avx512.json": {"regret": regret, "place": place},
    "regret_h200.json": {"regret": regret, "place": place},
    "regret_h200_second.json": {"regret": regret, "place": place},
    "regret_h200_replayed.json": {"choice": replayed},
    "lane_h200.json": {"sides": on_gpu, "targets": targets_on_gpu, "place": place},
    "styles_h200.json": {"styles": styles, "place": place},
    "decode_h200.json": {"decode": decode, "place": place},
    "engines_h200.json": {"steps": engines, "targets": engine_targets, "place": place},
    "engines_wide_h200.json": {"steps": engines, "targets": engine_targets, "place": place},
    "engines_http_h200.json": {"served": behind_http, "place": place},
    "traffic.json": {"loads": loads, "place": place},
    "timeline.json": {"watched": watched, "place": place},
    "since_hot_path.json": {"since": since, "place": place},
    "since_demo.json": {"since": since, "place": place},
    "gang_h200.json": {"decoded": decoded, "diverged": diverged, "place": place},
    "speculation_h200.json": {"guessed": guessed, "place": place},
    "gang_four_h200.json": {
        "decoded": decoded,
        "over_one": over_one,
        "place": place,
    },
    "gang_stages_h200.json": {"in_stages": in_stages, "place": place},
    "gang_without_flashinfer_h200.json": {
        "decoded": decoded,
        "over_one": over_one,
        "in_stages": in_stages,
        "diverged": diverged,
        "place": place,
    },
    "gang_grid_h200.json": {"in_stages": in_stages, "place": place},
    "fleet_four_h200.json": {"fleets": fleets, "place": place},
    "fleet_group_h200.json": {"grouped": grouped, "place": place},
    "fleet_lost_h200.json": {"lost": lost, "place": place},
    "compiled_cpu.json": {"models": compiled_models, "place": place},
    "compiled_h200.json": {"models": compiled_models, "place": place},
    "served_h200.json": {"served": served_fleet, "place": place},
    "served_two_h200.json": {"served": served_fleet, "place": place},
    "vllm_plugin_h200.json": {"steps": plugged, "place": place},
    "planner_h200.json": {"planned": planned, "place": place},
    "quantized_h200.json": {"pages": coded_pages, "steps": coded_steps, "place": place},
    "quantized_products_h200.json": {"products": coded_products, "place": place},
    "start_h200.json": {"started": started, "place": place},
    "start_cold_h200.json": {"started": started, "place": place},
    "start_prebuilt_h200.json": {"started": started, "place": place},
    "quantized_tiles_h200.json": {"kernels": kernels_of_codes, "place": place},
    "fleet_h200.json": {"hosted": hosted, "place": place},
    "gang_cuda.json": {"decoded": decoded, "place": place},
    "embedding_demo.json": {"service": service, "targets": targets, "kernels": kernels, "place": place},
}


def main() -> int:
    """Add the tables to each named file (by default to those that exist) and say what was added."""
    parser = argparse.ArgumentParser(description="add tables to the benchmarks' JSON")
    parser.add_argument("files", nargs="*", type=Path)
    given = parser.parse_args().files
    paths = given or [RESULTS / name for name in FILES if (RESULTS / name).exists()]
    for path in paths:
        if path.name not in FILES:
            parser.error(f"files needs {' or '.join(FILES)}, got {path.name}")
        record = json.loads(path.read_text())
        record["tables"] = {name: make(record) for name, make in FILES[path.name].items()}
        path.write_text(json.dumps(record, indent=2) + "\n")
        print(f"{path.name}: {', '.join(record['tables'])}")
    if not paths:
        print(f"nothing to do: no result under {RESULTS}")
    return 0 if paths else 1


if __name__ == "__main__":
    sys.exit(main())
