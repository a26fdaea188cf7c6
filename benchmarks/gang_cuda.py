"""A gang on several GPUs of one host, through NCCL: generation, speculation, stages, agreement, divergence.

    python -m benchmarks.gang_cuda --out FOLDER            every GPU of this machine, within 200 s
    python -m benchmarks.gang_cuda --out FOLDER --rehearse  two ranks on the CPU, gloo, a tiny model

Each part runs in processes of its own, one a GPU, as torchrun would start them; each writes its rows one by
one, and a part that fails or takes too long costs its own rows alone. FOLDER/gang_cuda.json holds what all
parts have found so far, also those of an earlier call; FOLDER/PART.rankN.log is what a process said.

The parts: `generate` tokens a second over the gang (heads and columns shared out), over the same ranks by
hand in plain torch and torch.distributed, on one device, and by hand there; `speculate` a draft of one layer
beside plain decoding; `stages` the layers shared out; `agree` plans and manifests; `reordered` and
`other_choice` a rank that differs, caught before the collective.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]  # the models are examples

import torch  # noqa: E402

from benchmarks.harness import environment, write  # noqa: E402

# Seconds that a part may take at most, and the least that it is worth starting with.
PARTS = {
    "generate": (75.0, 25.0),
    "agree": (35.0, 12.0),
    "reordered": (30.0, 12.0),
    "speculate": (80.0, 30.0),
    "other_choice": (30.0, 12.0),
    "stages": (45.0, 20.0),
}


def port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        number: int = found.getsockname()[1]
        return number


def ran(part: str, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """Run one part in as many processes as ranks; the rows of each, and how it ended."""
    began = time.time()
    for old in options.out.glob(f"{part}.rank*"):
        old.unlink()
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port()), "WORLD_SIZE": str(options.ranks)}
    where["LOCAL_WORLD_SIZE"] = where["WORLD_SIZE"]
    command = [sys.executable, "-m", "benchmarks.gang_cuda", "--out", str(options.out), "--as", part]
    command += ["--layers", str(options.layers), "--until", str(began + limit_s - 5.0)]
    command += ["--rehearse"] if options.rehearse else []
    processes, logs = [], []
    for rank in range(options.ranks):
        log = (options.out / f"{part}.rank{rank}.log").open("w")
        logs.append(log)
        env = {**os.environ, **where, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        # Its modules compile for up to a minute each, longer than a part has.
        env.setdefault("LAYERZERO_DENY", "flashinfer.*")
        # A group that is broken on purpose is no reason to end the process that says what it saw.
        env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        processes.append(
            subprocess.Popen(
                command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        )
    ended: list[int | str | None] = []
    for process in processes:
        try:
            ended.append(process.wait(max(0.1, began + limit_s - time.time())))
        except subprocess.TimeoutExpired:
            ended.append("killed: out of time")
            process.kill()
    for process, log in zip(processes, logs, strict=True):
        process.wait()
        log.close()
    rows: list[Any] = []
    for rank in range(options.ranks):
        path = options.out / f"{part}.rank{rank}.json"
        rows += json.loads(path.read_text()) if path.exists() else []
    return {"seconds": round(time.time() - began, 1), "ended": ended, "rows": rows}


def be(options: argparse.Namespace) -> int:
    """Run one part as one rank."""
    from benchmarks.ganging import agreeing, generation, speculation
    from benchmarks.ganging.rank import Rank

    parts = {
        "generate": generation.generate, "stages": generation.stages, "speculate": speculation.speculate,
        "agree": agreeing.agree, "reordered": agreeing.reordered, "other_choice": agreeing.other_choice,
    }  # fmt: skip
    own: Any = parts[options.part]
    assert inspect.iscoroutinefunction(own)
    me = Rank(options.out, options.part, options.layers, options.until, options.rehearse)
    try:
        me.open()
        asyncio.run(own(me))
    except BaseException as error:
        me.row(what=options.part, rank=me.rank, error=f"{type(error).__name__}: {error}"[:1000])
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)  # a group whose peers are gone may wait for them


def main() -> int:
    """Run every part that the budget has time for, and write what is known after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, help="all GPUs of this machine if left out; 2 in a rehearsal")
    parser.add_argument("--layers", type=int, default=16, help="of Llama 3 8B's 32")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds for everything")
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--as", dest="part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.part:
        return be(options)
    began = time.time()
    gpus = torch.cuda.device_count()
    options.ranks = options.ranks or (2 if options.rehearse else gpus)
    if not options.rehearse and not 2 <= options.ranks <= gpus:
        parser.error(f"ranks needs 2 to {gpus} GPUs of this machine, got {options.ranks}; try --rehearse")
    done = options.out / "gang_cuda.json"
    found: dict[str, Any] = json.loads(done.read_text())["parts"] if done.exists() else {}
    names = ("layerzero-runtime", "torch", "triton", "flash-attn-4", "flashinfer-python")
    record = {"environment": environment(names), "gpus": options.ranks, "parts": found}
    for part in options.parts:
        left = options.budget - (time.time() - began)
        most, least = PARTS[part]
        if left < least:
            found[part] = {"error": f"{left:.0f} s of the budget were left, it needs {least:.0f}"}
        else:
            found[part] = ran(part, options, min(most, left))
        write(done, record)
        print(part, json.dumps(found[part])[:1500], flush=True)
    failed = [p for p, said in found.items() if not any("error" not in row for row in said.get("rows", []))]
    errors = sum("error" in row for said in found.values() for row in said.get("rows", []))
    print(f"{time.time() - began:.0f} s; rows with errors: {errors}; parts without a number: {failed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
