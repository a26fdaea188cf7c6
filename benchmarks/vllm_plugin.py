"""vLLM beside itself with this library's attention in its decode steps, in one run on one GPU.

    python benchmarks/vllm_plugin.py --vllm-python PYTHONPATH --python PYTHONPATH --out FOLDER

`--vllm-python` has vLLM; `--python` has what this library needs beside it. Two engines of Llama 3 8B's shape
with vLLM's random weights, greedy, defaults: one with the attention that vLLM chooses, one with
`--attention-backend CUSTOM` (layerzero/integrations/vllm.py). Rounds take turns; a row is the median of the
rounds after the first. Beside it stands how many tokens of both texts are equal up to the first difference:
kernels add in another order, and random weights make near ties.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks"), str(ROOT)]

from engines import Peer  # noqa: E402
from harness import environment, show, write  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "vllm_plugin_h200.json"
OWN, OURS = "vLLM's choice", "CUSTOM (this library's choice)"
NEEDS = 0.98
CELLS = ((64, 128), (64, 2048), (8, 128), (1, 128), (1, 2048))


def alike(own: list[list[int]], ours: list[list[int]]) -> float:
    """The part of tokens before the first difference of each pair of texts."""
    same = 0
    for left, right in zip(own, ours, strict=True):
        pairs = list(zip(left, right, strict=True))
        same += next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return round(same / sum(map(len, own)), 4)


# vLLM's own lines as they are, this library's from "info" on.
LOGGING = {
    "version": 1, "disable_existing_loggers": False,
    "handlers": {"all": {"class": "logging.StreamHandler"}},
    "loggers": {
        "layerzero": {"level": "INFO", "handlers": ["all"]}, "vllm": {"level": "ERROR", "handlers": ["all"]}
    },
}  # fmt: skip


def entry_points(folder: Path) -> None:
    """What an installed package tells vLLM: where its plugin is."""
    (folder / "logging.json").write_text(json.dumps(LOGGING))
    info = folder / "layerzero_runtime-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: layerzero-runtime\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nlayerzero = layerzero.integrations.vllm:register\n"
    )


def main() -> int:
    """Start both engines, compare them, write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--vllm-python", required=True, help="PYTHONPATH of an environment that has vLLM")
    parser.add_argument("--python", required=True, help="PYTHONPATH of what this library needs")
    parser.add_argument("--rounds", type=int, default=4, help="of which the first one warms up")
    parser.add_argument("--out", type=Path, default=None, help="a folder")
    given = parser.parse_args()
    out = given.out / RESULTS.name if given.out else RESULTS
    out.parent.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "environment": environment(("layerzero-runtime", "torch", "triton", "vllm")), "rows": {},
    }  # fmt: skip
    most = max(requests for requests, _ in CELLS)
    with tempfile.TemporaryDirectory() as folder:
        entry_points(Path(folder))
        log_path = out.with_suffix(".log")
        with log_path.open("w") as log:
            path = ":".join((folder, given.vllm_python, str(ROOT), given.python))
            peers: dict[str, Peer] = {}
            try:
                # One after another: each sizes its pool of keys and values by the memory that is free.
                peers[OWN] = Peer(given.vllm_python, most, VLLM_PLUGINS="", VLLM_CACHE_ROOT=f"{folder}/own")
                record["started"] = {OWN: peers[OWN].started}
                peers[OURS] = Peer(
                    path, most, log, LZ_PEER_BACKEND="CUSTOM", VLLM_PLUGINS="layerzero",
                    VLLM_CACHE_ROOT=f"{folder}/ours",
                    VLLM_LOGGING_CONFIG_PATH=str(Path(folder) / "logging.json"),
                )  # fmt: skip
                record["started"][OURS] = peers[OURS].started
                for requests, context in CELLS:
                    compare(record, peers, requests, context, given.rounds)
                    write(out, record)
            finally:
                for peer in peers.values():
                    peer.close()
        told = log_path.read_text().splitlines()
    marks = ("engine.attention_chosen", "engine.own_attention", "engine.not_warm")
    record["told"] = [line.strip()[:400] for line in told if any(mark in line for mark in marks)]
    write(out, record)
    return 0


def compare(record: dict[str, Any], peers: dict[str, Peer], requests: int, context: int, rounds: int) -> None:
    """One cell: ms a step of each engine, in turns, and how alike their texts are."""
    times: dict[str, list[float]] = {name: [] for name in peers}
    texts: dict[str, list[list[int]]] = {}
    for turn in range(rounds):
        for name, peer in peers.items():
            answer = peer.step(context, requests)
            texts[name] = answer["texts"]
            if turn:
                times[name].append(round(answer["step_ms"], 3))
    steps = {name: statistics.median(own) for name, own in times.items()}
    over = round(steps[OWN] / steps[OURS], 3)
    record["rows"][f"{requests}x{context}"] = {
        "step_ms": steps, "rounds": times, "over_own": over, "needs": NEEDS, "met": over >= NEEDS,
        "tokens_alike": alike(texts[OWN], texts[OURS]),
    }  # fmt: skip
    show(
        f"{requests} requests, context {context}; {over} of its speed",
        ("engine", "ms a step"),
        [(name, f"{step:.3f}") for name, step in steps.items()],
    )
    print("tokens alike", record["rows"][f"{requests}x{context}"]["tokens_alike"], flush=True)


if __name__ == "__main__":
    sys.exit(main())
