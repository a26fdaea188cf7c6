"""Decoding beside an engine on one GPU: vLLM offline, and this library's captured step, in one run.

    python benchmarks/engines.py --vllm-python PYTHONPATH --out FOLDER [--cells 64x128,64x2048,1x128,256x128]
    python benchmarks/engines.py --rehearse    # a tiny model on the CPU, no peer: shows that everything runs

A cell is requests x context. Llama 3 8B's shape, bfloat16, random weights, greedy. vLLM runs in a process
of its own, with its own packages, and generates for a crowd that begins together and stays, and for a
closed crowd whose requests end and begin anew out of step, of 16 to 48 tokens each
(benchmarks/vllm_offline.py). Ours are coroutines, each a plain loop over `lz.run_ahead`
(benchmarks/styles_cuda.py), for the same two crowds; who begins anew waits for its last token first, on
both sides, and no prompt is read for it. Beside them stands the loop by hand over the same graph. Rounds
take turns; a row is the median of the rounds after the first. Both sides' requests stand at about the same
context. The roof is weights and keys read once at the bandwidth of a large copy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks"), str(ROOT)]

import torch  # noqa: E402
from generating import crowd, device_side  # noqa: E402
from harness import device_seconds, show  # noqa: E402
from lane_cuda import Record, begin, built, settings_of  # noqa: E402
from styles_cuda import AHEAD, HAND, Round  # noqa: E402

import layerzero as lz  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "engines_h200.json"
VLLM, VLLM_COMING = "vLLM", "vLLM, requests come and go"
FEW, MANY = 8, 104  # tokens of the peer's two runs
COMING = "run_ahead, requests come and go"
STAYING = "run_ahead, the peer's requests"


class Peer:
    """vLLM in a process of its own; its first line says when it is ready."""

    def __init__(self, pythonpath: str, requests: int, log: IO[str] | None = None, **variables: str) -> None:
        own = {"PYTHONPATH": pythonpath, "LZ_PEER_REQUESTS": str(requests)}
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "benchmarks" / "vllm_offline.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env=os.environ | own | variables,
        )  # fmt: skip
        self._started: dict[str, Any] | None = None

    @property
    def started(self) -> dict[str, Any]:
        """What it said when it was ready; waits for that."""
        if self._started is None:
            self._started = self._answer()
        return self._started

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM ended with status {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def step_ms(self, context: int, requests: int) -> float:
        """What one step of all requests takes."""
        return float(self.step(context, requests)["step_ms"])

    def step(self, context: int, requests: int) -> dict[str, Any]:
        """What one step of all requests takes, and their texts."""
        return self._ask(context=context, requests=requests, few=FEW, many=MANY)

    def coming_ms(self, context: int, requests: int, seed: int, seconds: float) -> float:
        """What one token of each takes where requests end and begin anew."""
        lengths = {"fewest": crowd.FEWEST, "most": crowd.MOST}
        asked = self._ask(context=context, requests=requests, seed=seed, seconds=seconds, **lengths)
        return float(asked["step_ms"])

    def _ask(self, **wanted: float) -> dict[str, Any]:
        assert self.started
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(wanted) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


def bandwidth() -> float:
    """Bytes a second that a large copy reads and writes."""
    if not torch.cuda.is_available():
        return float("nan")
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = [device_seconds(lambda: target.copy_(source)) for _ in range(10)]
    return 2 * source.numel() / statistics.median(times)


def roof_ms(model: Any, context: int, requests: int, bytes_per_s: float) -> float:
    """Weights and keys read once."""
    config, size = model.config, 2 if model.cache.device.type == "cuda" else 4
    weights = sum(
        t.numel() for layer in model.layers for t in (layer.w_qkv, layer.w_o, layer.w_up, layer.w_down)
    )
    weights += model.lm_head.numel()
    keys = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers * context * requests
    return (weights + keys) * size / bytes_per_s * 1e3


def needs(requests: int) -> float:
    """Which part of vLLM's speed a cell is to reach."""
    return 1.0 if requests == 64 else 0.95


def measure(options: argparse.Namespace, record: Record, runtime: lz.Runtime, peer: Peer | None) -> None:
    """Every cell, round by round."""
    model = record.item("model", lambda: built(options, options.cells))
    options.compiling.join()
    found = record.found
    found["bandwidth"] = bandwidth()
    for requests, context in options.cells:
        here = argparse.Namespace(**{**vars(options), "requests": requests, "contexts": [context]})
        cell = f"{requests}x{context}"
        round_: Round | None = record.item(cell, lambda o=here: Round(o, record, runtime, model))
        if round_ is None:
            continue
        into = found["rows"].setdefault(cell, {"step_ms": {}})
        compare(here, record, round_, peer, into)
        finish(into, round_.graph, context, requests, found["bandwidth"])
        if options.device == "cuda":
            into["device"] = record.item(
                f"{cell}, device",
                lambda r=round_, n=requests: device_side.profiled_step(lambda: r.by_hand(0.3), n),
            )
            into["layer"] = record.item(
                f"{cell}, layer", lambda r=round_: device_side.one_layer(lambda: r.by_hand(0.2))
            )
        round_.graph.close()
        record.write()
    found["kernels"] = device_side.kernels_of(runtime, model.cache.device)


def compare(
    options: argparse.Namespace, record: Record, round_: Round, peer: Peer | None, into: dict[str, Any]
) -> None:
    """One cell: ms a step of each side, the median of the rounds after the first."""
    requests, context = options.requests, options.contexts[0]
    times: dict[str, list[float]] = {}
    for turn in range(options.rounds):
        speeds = {
            HAND: lambda: round_.by_hand(options.seconds),
            STAYING: lambda: round_.together(AHEAD),
            COMING: lambda t=turn: round_.span(AHEAD, t, options.seconds).tokens_per_s,
        }
        sides = {side: lambda run=run: requests / run() * 1e3 for side, run in speeds.items()}
        if peer is not None:
            sides[VLLM] = lambda: peer.step_ms(context, requests)
            sides[VLLM_COMING] = lambda t=turn: peer.coming_ms(context, requests, t, options.seconds)
        for side, run in sides.items():
            took = record.item(f"{requests}x{context}, {side}", run)
            if took is not None and turn:  # the first round warms up
                times.setdefault(side, []).append(round(took, 3))
        into["step_ms"] = {side: statistics.median(own) for side, own in times.items()}
        into["rounds"] = times


def finish(into: dict[str, Any], model: Any, context: int, requests: int, bytes_per_s: float) -> None:
    """Tokens/s, ratios, and the roof."""
    steps = into["step_ms"]
    into["tokens_per_s"] = {side: round(requests / step * 1e3, 1) for side, step in steps.items()}
    into["roof_ms"] = round(roof_ms(model.model, context, requests, bytes_per_s), 3)
    if VLLM in steps:
        into["over_vllm"] = {side: round(steps[VLLM] / step, 3) for side, step in steps.items()}
        into["needs"] = needs(requests)
    if VLLM_COMING in steps:
        into["over_vllm_coming"] = round(steps[VLLM_COMING] / steps[COMING], 3)


def parse() -> argparse.Namespace:
    """Read the command line."""

    def cells(text: str) -> list[tuple[int, ...]]:
        return [tuple(int(number) for number in word.split("x")) for word in text.split(",")]

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--vllm-python", default=None, help="PYTHONPATH of an environment that has vLLM")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--cells", type=cells, default=cells("64x128,64x2048,1x128,1x2048,8x128,256x128"))
    parser.add_argument("--rounds", type=int, default=4, help="of which the first one warms up")
    parser.add_argument("--seconds", type=float, default=0.8, help="of each of our sides in each round")
    parser.add_argument("--budget-s", type=float, default=200.0, help="after which no item begins")
    parser.add_argument("--deny", action="append", default=[], help="a kernel to leave out; may be repeated")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on the CPU, without a peer")
    parser.add_argument("--out", type=Path, default=None, help="a folder, or a JSON file")
    given = parser.parse_args()
    given.device = "cpu" if given.rehearse else "cuda"
    if given.rehearse:
        given.layers, given.cells, given.rounds, given.seconds = 2, [(4, 16), (1, 24)], 2, 0.1
    elif not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; --rehearse runs a tiny model on the CPU")
    given.depth = given.layers
    given.contexts = sorted({context for _, context in given.cells})
    given.requests = max(requests for requests, _ in given.cells)
    return given


def main() -> int:
    """Measure, print, write after each item; 1 where an item failed."""
    options = parse()
    record = begin(options, RESULTS, peer={}, left_out_kernels=options.deny)
    peer: Peer | None = None
    if options.vllm_python is not None:
        peer = record.item("vLLM starts", lambda: Peer(options.vllm_python, options.requests))
        record.found["peer"] = {} if peer is None else peer.started
    settings = settings_of(options)
    try:
        record.found["denied"] = device_side.deny_for_graphs()
        with lz.start(settings) as runtime, torch.inference_mode():
            for kernel_id in options.deny:
                lz.add_policy(deny=kernel_id)
            measure(options, record, runtime, peer)
    finally:
        if peer is not None:
            peer.close()
    record.write()
    found = record.found
    for cell, row in found["rows"].items():
        show(
            f"{cell}; weights and keys once {row.get('roof_ms')} ms",
            ("side", "ms a step", "tokens/s"),
            [
                (side, f"{step:.2f}", f"{row['tokens_per_s'][side]:.0f}")
                for side, step in row["step_ms"].items()
            ],
        )
        print("over vLLM", row.get("over_vllm"), "device", row.get("device"), flush=True)
        for name, duration_us, gap_us in row.get("layer") or ():
            print(f"{duration_us:8.1f} us, {gap_us:6.1f} us after the last one: {name}", flush=True)
    print("took", found["took_s"], flush=True)
    print("kernels", found.get("kernels"), found["peer"], found["errors"], found["left_out"], flush=True)
    return int(bool(found["errors"]))


if __name__ == "__main__":
    sys.exit(main())
