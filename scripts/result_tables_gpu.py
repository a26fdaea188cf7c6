"""The tables of what was measured on GPUs; scripts/result_tables.py adds them to the records."""

from typing import Any

Table = dict[str, list[Any]]


def on_gpu(record: dict[str, Any]) -> Table:
    """Return tokens a second of each side by depth and context on the GPU."""
    columns = [
        "layers, context", "side", "tokens/s", "of by hand", "over one by one", "mean batch",
        "us an await beyond by hand",
    ]  # fmt: skip
    rows = []
    for layers, contexts in record["rows"].items():
        for context, here in contexts.items():
            for side, row in here["sides"].items():
                numbers = [
                    row.get(key) for key in ("tokens_per_s", "of_by_hand", "over_one_by_one", "mean_batch")
                ]
                beyond = row.get("us_an_await_beyond_by_hand")
                shown = side.replace("by hand", "by hand, launched op by op, without a graph")
                rows.append([f"{layers}, {context}", shown, *numbers, beyond])
    return {"columns": columns, "rows": rows}


def targets_on_gpu(record: dict[str, Any]) -> Table:
    """Return what was promised on the GPU beside what was measured."""
    rows = [[row["what"], row["needs"], row["got"], row["met"]] for row in record["verdicts"]]
    return {"columns": ["tokens/s over by hand", "needs", "measured", "met"], "rows": rows}


def styles(record: dict[str, Any]) -> Table:
    """Return tokens a second and the mean batch for each way of writing a request."""
    columns = ["between two steps a request", "tokens/s", "of reading at once", "mean batch"]
    keys = ("tokens_per_s", "of_reading_at_once", "mean_batch")
    rows = [[style, *(row[key] for key in keys)] for style, row in record["rows"].items()]
    return {"columns": columns, "rows": rows}


def engines(record: dict[str, Any]) -> Table:
    """Return a step's time beside an engine's, the same graph by hand, and what memory bandwidth allows."""
    columns = [
        "requests x context, side",
        "ms a step",
        "tokens/s",
        "of vLLM",
        "of weights and keys read once",
    ]
    rows = []
    for cell, row in record["rows"].items():
        steps = row["step_ms"]
        for side, step in sorted(steps.items(), key=lambda pair: -pair[1]):
            times = [round(steps["vLLM"] / step, 3), round(step / row["roof_ms"], 2)]
            rows.append([f"{cell}, {side}", round(step, 2), row["tokens_per_s"][side], *times])
    return {"columns": columns, "rows": rows}


def behind_http(record: dict[str, Any]) -> Table:
    """Return what clients of both servers got at each load, ours over the peer's."""
    columns = [
        "load", "tokens/s", "vLLM's", "over vLLM's", "p99 to the first token", "p99 between tokens", "met",
    ]  # fmt: skip
    ratios = ("tokens_per_s", "first_token_p99", "between_p99", "met")
    rows = [
        [
            f"{load}: {row['requests_per_s']:.1f} requests/s",
            *(row[side]["tokens_per_s"] for side in ("LayerZero", "vLLM")),
            *(row["over_peer"][name] for name in ratios),
        ]
        for load, row in record["loads"].items()
    ]
    return {"columns": columns, "rows": rows}


# Device time of a step over weights and keys read once.
ENGINE_ROOFS = {"64x128": 1.35, "64x2048": 1.15}


def engine_targets(record: dict[str, Any]) -> Table:
    """Return what was promised beside an engine, and what was measured."""
    rows = []
    for cell, row in record["rows"].items():
        if not row["step_ms"]:  # the time was up before it
            continue
        promised = [
            (f"{side}, over vLLM's that stay, tokens/s", row["needs"], over, True)
            for side, over in row["over_vllm"].items()
            if side.startswith("run_ahead")
        ]
        if "over_vllm_coming" in row:
            what = "run_ahead over vLLM where requests of both come and go, tokens/s"
            promised.append((what, row["needs"], row["over_vllm_coming"], True))
        device_ms = row["device"]["device_us_a_step"] / 1e3
        if cell in ENGINE_ROOFS:
            roof = device_ms / row["roof_ms"]
            promised.append(("device time over the roof", ENGINE_ROOFS[cell], roof, False))
            ahead = row["step_ms"]["run_ahead, the peer's requests"] / device_ms
            promised.append(("run_ahead, the peer's requests, over the device time", 1.05, ahead, False))
        for what, needs, measured, least in promised:
            met = measured >= needs if least else measured <= needs
            rows.append([f"{cell}: {what}", f"{'>=' if least else '<='} {needs}", round(measured, 3), met])
    return {"columns": ["what", "needs", "measured", "met"], "rows": rows}


def kernels_of_codes(record: dict[str, Any]) -> Table:
    """Return how long a product of int4 codes takes by each kernel as it is, beside one of bfloat16."""
    rows = [
        [int(count), name, arms["bfloat16"]["us"], arm["us"], arm["ratio"]]
        for count, arms in record["rows"].items()
        for name, arm in arms.items()
        if ".quantized_linear." in name and "us" in arm
    ]
    return {"columns": ["rows", "kernel", "bfloat16, us", "us", "ratio"], "rows": rows}


def decode(record: dict[str, Any]) -> Table:
    """Return how long a graph's call of each kernel takes the device, beside reading keys and values once."""
    ids = sorted({
        kernel
        for row in record["rows"].values()
        for kernel, found in row["kernels"].items()
        if "captured_us" in found
    })  # fmt: skip
    rows = [
        [shape, row["roof_us"], *(row["kernels"].get(kernel, {}).get("captured_us") for kernel in ids)]
        for shape, row in record["rows"].items()
    ]
    return {"columns": ["sequences x context", "keys and values once, us", *ids], "rows": rows}


def plugged(record: dict[str, Any]) -> Table:
    """Return a step's time of vLLM with its own attention and with this library's."""
    rows = [
        [cell, *row["step_ms"].values(), row["over_own"], row["needs"], row["met"], row["tokens_alike"]]
        for cell, row in record["rows"].items()
    ]
    columns = [
        "requests x context", "vLLM's choice: ms a step", "CUSTOM: ms a step", "of its speed", "needs", "met",
        "tokens alike",
    ]  # fmt: skip
    return {"columns": columns, "rows": rows}


def _said(
    record: dict[str, Any], part: str, what: str, number: str = "tokens_per_s"
) -> list[tuple[int, dict[str, Any]]]:
    """Return the rows of one part that have the number, each with the ranks it ran with."""
    return [
        (said.get("ranks", record["gpus"]), row)
        for name, said in record["parts"].items()
        if name.partition(",")[0] == part
        for row in said.get("rows", ())
        if row["what"] == what and number in row
    ]


def over_one(record: dict[str, Any]) -> Table:
    """Return tokens per second of a rank group over those of one GPU with the same requests."""
    alone = {
        (row["requests"], row["context"]): row["tokens_per_s"] for _, row in _said(record, "alone", "alone")
    }
    rows = []
    for ranks, row in _said(record, "decode", "decoding"):
        ours = row["tokens_per_s"]["rank group, reading behind"]
        one = alone[row["requests"], row["context"]]
        rows.append([ranks, row["requests"], row["context"], ours, one, ours / one])
    columns = ["GPUs", "requests", "context", "rank group: tokens/s", "one GPU: tokens/s", "over one GPU"]
    return {"columns": columns, "rows": rows}


def in_stages(record: dict[str, Any]) -> Table:
    """Return captured pipeline stages beside the bound of the slowest one, busy all the time."""
    rows = [
        [ranks, row["requests"], row["context"], row["tokens_per_s"], max(row["stages_ms"]), row["of_bound"]]
        for ranks, row in _said(record, "grid", "grid")
    ]
    columns = ["GPUs", "requests", "context", "tokens/s", "slowest stage: ms a step", "of the bound"]
    return {"columns": columns, "rows": rows}


def diverged(record: dict[str, Any]) -> Table:
    """Return how soon each rank named a planted difference, and the wrong sums that it handed out."""
    rows = [
        [row["planted"], ranks, row["rank"], row["raised"], row["noticed_after_s"] * 1e3, row["wrong_sums"]]
        for part in ("reordered", "other_choice")
        for ranks, row in _said(record, part, "divergence", "wrong_sums")
    ]
    return {"columns": ["planted", "ranks", "rank", "raised", "noticed after (ms)", "wrong sums"],
            "rows": rows}  # fmt: skip


def compiled_models(record: dict[str, Any]) -> Table:
    """Return the time of a small Llama on torch's ops over that of the same on ours, and over a control."""
    rows = [
        [shape, way, found["median_us"]["torch"], *(found["torch_over"].get(arm) for arm in
         ("control", "ours", "frozen"))]
        for shape, ways in record["shapes"].items() for way, found in ways.items()
    ]  # fmt: skip
    columns = ["shape", "way", "torch's ops, us", "over a control", "over ours", "over ours, frozen"]
    return {"columns": columns, "rows": rows}


def lost(record: dict[str, Any]) -> Table:
    """Return what the loss of a replica's process under streams costs."""
    rows = [
        [row["replicas"], row["requests"], row["complete"], row["tokens_wanted"], row["tokens"],
         row["longest_pause_s"], row["replica_serves_again_after_s"]]
        for row in record["parts"]["lost"]["rows"]
    ]  # fmt: skip
    columns = ["replicas", "streams", "complete", "tokens wanted", "tokens", "longest pause (s)",
               "serves again after (s)"]  # fmt: skip
    return {"columns": columns, "rows": rows}


def fleets(record: dict[str, Any]) -> Table:
    """Return what replicas on several GPUs give over one."""
    rows = [
        [row["replicas"], row["over_one"], row["over_one_streamed"], row["wanted"]]
        for row in record["parts"]["fleet"]["rows"]
        if row["what"] == "fleet"
    ]
    return {"columns": ["replicas", "decoding over one", "streamed over one", "wanted"], "rows": rows}


def grouped(record: dict[str, Any]) -> Table:
    """Return a rank group of Ray actors beside the same in processes of torchrun's kind."""
    rows = [
        [row["step_ms"]["actors"], row["step_ms"]["processes"], row["actors_over_processes"], row["wanted"]]
        for row in record["parts"]["group"]["rows"]
        if row["what"] == "group"
    ]
    return {"columns": ["actors: ms a step", "processes: ms a step", "actors over processes", "wanted"],
            "rows": rows}  # fmt: skip


def served_fleet(record: dict[str, Any]) -> Table:
    """Return what the server gives behind HTTP with one replica and with one on each GPU."""
    said = record["parts"]["served"]["rows"]
    one = said[0]["tokens_per_s"]
    rows = [
        [row["replicas"], row["tokens_per_s"], row["tokens_per_s"] / one, row["between_p50_ms"],
         row["between_p99_ms"], row["ready_s"]]
        for row in said
        if row["what"] == "served"
    ]  # fmt: skip
    columns = ["replicas", "tokens/s", "over one", "between tokens p50 (ms)", "p99 (ms)", "ready after (s)"]
    return {"columns": columns, "rows": rows}


def decoded(record: dict[str, Any]) -> Table:
    """Return what a step takes over a rank group and over plain torch.distributed, both reading behind."""
    ways = ("rank group, reading behind", "torch.distributed, reading behind")
    rows = []
    for ranks, row in _said(record, "decode", "decoding"):
        made_of = row["made_of"][ways[0]]
        parts = [made_of.get(name) for name in ("device_ms", "message_us", "launch_us", "others_us")]
        rows.append(
            [ranks, row["requests"], row["context"], *(row["step_ms"][way] for way in ways), *parts,
             row["over_by_hand"]]
        )  # fmt: skip
    columns = [
        "GPUs", "requests", "context", "rank group: ms a step", "torch.distributed: ms a step",
        "of ours, the device: ms", "rank 0's message: us", "launch: us", "wait for the others: us",
        "rank group over torch.distributed",
    ]  # fmt: skip
    return {"columns": columns, "rows": rows}


def guessed(record: dict[str, Any]) -> Table:
    """Return the speed of speculation over plain decoding, with both models on one GPU and apart."""
    over_ranks = {
        row["scale"]: row["over_plain"]["over ranks"]
        for _, row in _said(record, "speculate", "speculation over ranks")
    }
    rows = [
        [
            row["acceptance"]["speculated"],
            row["tokens_per_s"]["plain"],
            *(row["over_plain"].get(way) for way in ("speculated", "draft on another GPU")),
            over_ranks.get(row["scale"], row["over_plain"].get("speculated over the gang")),
        ]
        for _, row in _said(record, "speculate", "speculation")
    ]
    columns = [
        "drafts accepted", "plain tokens/s", "one GPU", "draft on another GPU", "target over a rank group",
    ]  # fmt: skip
    return {"columns": columns, "rows": sorted(rows, reverse=True)}
