"""Ray actors on GPUs: what hosting costs, what a loss costs, and how a fleet and a group of actors scale.

    python3 benchmarks/fleet_cuda.py --out FOLDER [--budget-s 500]     every part that the GPUs allow
    python3 benchmarks/fleet_cuda.py --out FOLDER --device cpu         a rehearsal: logical GPUs, tiny model
    python3 benchmarks/fleet_cuda.py --out FOLDER --parts actor loss   only these

A Llama in the shape of 3 8B with random weights; its decode steps are captured graphs, asked for by awaited
coroutines that read one token behind.

`actor` (one GPU): the same requests in this process and inside a Ray actor of the same GPU, in turns:
decode, prefill, whole requests; and the same again with every token streamed from the actor to this process.
`loss` (one GPU): a second device on that GPU is refused; the actor, which has taken a warm-up bundle, is
killed under streams: until when they continue, and whether its next process has the bundle.
`fleet` (two GPUs or four): a replica on each, with as many requests on each as on the one beside them.
`group` (two GPUs): a tensor-parallel group of Ray actors beside the same in processes of torchrun's kind.
`lost` (two GPUs or four): the process of one replica is killed under streams of all of them.
`served` (two GPUs or four): the example server with a replica on each GPU, behind HTTP, beside one replica.

Each part is a process of its own and writes its rows as it goes; one that fails or takes too long costs its
own rows alone. FOLDER/fleet_cuda.json holds what all have found, also those of an earlier call of the same
commit and machine.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(ROOT / "examples"), str(ROOT / "benchmarks"), str(ROOT)]
sys.path[:0] = PATHS
# Before ray is imported; the actors inherit all of it.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")  # it needs GPUs that may map each other's memory
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])

import torch  # noqa: E402
from harness import environment, write  # noqa: E402

# GPUs that a part needs, the least seconds that it is worth starting with, and the most that it gets.
PARTS = {
    "actor": (1, 60.0, 240.0),
    "loss": (1, 60.0, 200.0),
    "fleet": (2, 50.0, 200.0),
    "group": (2, 60.0, 200.0),
    "lost": (2, 60.0, 150.0),
    "served": (2, 120.0, 260.0),
}


def run_part(name: str, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """The rows of a part in a process of its own, which ends in time."""
    begin, until = time.time(), time.time() + seconds
    rows = options.out / f"fleet.{name}.json"
    rows.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--out", str(options.out), "--device", options.device, "--as", name]
    command += [
        "--layers",
        str(options.layers),
        "--requests",
        str(options.requests),
        "--gpus",
        str(options.gpus),
        "--until",
        str(until - 10.0),
    ]
    ended: int | str
    # A socket's path has at most 107 bytes, of which Ray takes 70.
    with (
        tempfile.TemporaryDirectory(prefix="lz", dir="/tmp", ignore_cleanup_errors=True) as folder,
        (options.out / f"fleet.{name}.log").open("w") as log,
    ):
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "RAY_TMPDIR": folder}, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            ended = process.wait(max(1.0, until - time.time()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            ended = "killed: out of time"
    found = json.loads(rows.read_text()) if rows.exists() else []
    return {"seconds": round(time.time() - begin, 1), "ended": ended, "rows": found}


def has_error(part: dict[str, Any]) -> bool:
    """Whether a part that was not left out has failed, or found nothing."""
    rows = part.get("rows", [])
    return "left out" not in part and ("error" in part or not rows or any("error" in row for row in rows))


def main() -> int:
    """Run every part that the GPUs and the budget allow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=500.0, help="seconds for everything")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses")
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--layers", type=int, default=32, help="of Llama 3 8B's 32")
    parser.add_argument("--requests", type=int, default=64, help="at once, on each replica")
    parser.add_argument("--gpus", type=int, default=2, help="logical ones of a rehearsal")
    parser.add_argument("--as", dest="part", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--node", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.part:
        from fleeting.parts import be

        return be(options)
    begin = time.time()
    gpus = options.gpus if options.device == "cpu" else torch.cuda.device_count()
    done = options.out / "fleet_cuda.json"
    here = environment(("layerzero-runtime", "ray", "torch", "triton", "flashinfer-python"))
    before = json.loads(done.read_text()) if done.exists() else {}
    same = before and all(before["environment"][name] == here[name] for name in ("commit", "machine"))
    found: dict[str, Any] = before["parts"] if same else {}
    record = {"environment": here, "device": options.device, "gpus": gpus, "parts": found}
    for name in options.parts:
        needs, least, most = PARTS[name]
        left = options.budget_s - (time.time() - begin)
        if gpus < needs:
            found.setdefault(name, {"left out": f"needs {needs} GPUs, got {gpus}"})
            continue
        if left < least:
            found[name] = {"error": f"{left:.0f} s of the budget were left"}
        else:
            found[name] = run_part(name, options, min(most, left))
        write(done, record)
        print(name, json.dumps(found[name])[:3000], flush=True)
    write(done, record)
    failed = [name for name in options.parts if has_error(found[name])]
    print(f"{time.time() - begin:.0f} s; parts with errors: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
