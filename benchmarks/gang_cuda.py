"""A rank group on several GPUs of one host, through NCCL; `decode` is the comparison, beside it other parts.

    python -m benchmarks.gang_cuda --out FOLDER [--budget-s 250]      `decode` on every GPU of this machine
    python -m benchmarks.gang_cuda --out FOLDER --rehearse            two ranks on the CPU, gloo, a tiny model
    python -m benchmarks.gang_cuda --out FOLDER --parts agree stages  other parts

`decode` has four sides that take turns: ours as captured steps that read one token behind, plain
torch.distributed as a captured graph that reads one behind, and both with each token read before the next
step. Beside them stands what a step is made of: rank 0's message, the launch, the wait for the followers'
word, the device's time and its pause before the next step; a follower's row has its wait for rank 0. Without
FlashInfer both sides run torch's kernels and Triton's; the row `setting` says which attention and what is
missing.

Each part runs in processes of its own, one a GPU, as torchrun would start them; each writes its rows one by
one, and a part that fails or takes too long costs its own rows alone. FOLDER/gang_cuda.json holds what all
parts have found so far, also those of an earlier call; FOLDER/PART.RANKS.rankN.log is what a process said.
On four GPUs every part runs with two ranks and with four; parts of two ranks stand on a pair of GPUs each.

The other parts: `speculate` a draft of one layer beside plain decoding; `stages` the layers shared out;
`agree` plans and messages; `reordered` and `other_choice` every other rank differs, caught before a sum of it
is used; `alone` the whole model on one GPU; `grid` stages of two ranks each, beside the bound of the slowest.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import inspect
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]  # the models are examples

import torch  # noqa: E402

from benchmarks.harness import environment, write  # noqa: E402

# The least seconds that a part is worth starting with.
PARTS = {
    "decode": 40.0,
    "stages": 20.0,
    "reordered": 12.0,
    "agree": 12.0,
    "speculate": 30.0,
    "other_choice": 12.0,
    "alone": 20.0,
    "grid": 40.0,
}


class Run(NamedTuple):
    """One part with so many ranks, on the GPUs from `first` on."""

    part: str
    ranks: int
    first: int = 0

    def __str__(self) -> str:
        return f"{self.part}, {self.ranks} ranks"


# What runs at the same time on four GPUs, and its seconds at most. Parts that are timed share no GPU with a
# part that keeps one busy; agreement is between processors.
ON_FOUR = (
    (100.0, (Run("alone", 1), Run("decode", 2, 2))),
    (120.0, (Run("decode", 4),)),
    (200.0, (Run("grid", 4),)),
    (200.0, (Run("stages", 2), Run("grid", 2, 2))),
    (45.0, (Run("stages", 4), Run("agree", 2))),
    (35.0, (Run("reordered", 2), Run("reordered", 4), Run("other_choice", 2), Run("other_choice", 4))),
    (60.0, (Run("speculate", 2), Run("agree", 4))),
)
# On two, what matters most comes first: the last part has what the others leave.
ON_TWO = (
    (400.0, (Run("decode", 2),)),
    (80.0, (Run("alone", 1),)),
    (200.0, (Run("grid", 2),)),
    (120.0, (Run("speculate", 2),)),
    (32.0, (Run("reordered", 2), Run("other_choice", 2), Run("agree", 2))),
    (50.0, (Run("stages", 2),)),
)
ALONE_S = {"stages": 50.0, "decode": 400.0, "agree": 35.0, "speculate": 120.0, "alone": 60.0, "grid": 200.0}


def port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        number: int = found.getsockname()[1]
        return number


class Running:
    """One part under way: its processes and what they say."""

    def __init__(self, run: Run, options: argparse.Namespace, until: float) -> None:
        self.run, self.out, self.until, self.began = run, options.out, until, time.time()
        self.name = f"{run.part}.{run.ranks}"
        for old in self.out.glob(f"{self.name}.rank*"):
            old.unlink()
        command = [sys.executable, "-m", "benchmarks.gang_cuda", "--out", str(self.out), "--as", run.part]
        command += ["--layers", str(options.layers), "--until", str(until - 5.0)]
        command += ["--rehearse"] if options.rehearse else []
        self.logs = [(self.out / f"{self.name}.rank{rank}.log").open("w") for rank in range(run.ranks)]
        self.processes = [
            subprocess.Popen(
                command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
            for env, log in zip(self._environments(), self.logs, strict=True)
        ]

    def _environments(self) -> list[dict[str, str]]:
        run = self.run
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = seen.split(",") if seen else [str(number) for number in range(torch.cuda.device_count())]
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port()), "WORLD_SIZE": str(run.ranks)}
        where["LOCAL_WORLD_SIZE"] = where["WORLD_SIZE"]
        where["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[run.first : run.first + run.ranks])
        found = []
        for rank in range(run.ranks):
            env = {**os.environ, **where, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            # A group that is broken on purpose is no reason to end the process that says what it saw.
            env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
            # Without it buffers of a graph need GPUs that may map each other's memory.
            env.setdefault("NCCL_GRAPH_REGISTER", "0")
            found.append(env)
        return found

    def ended(self) -> dict[str, Any]:
        """Wait for it; the rows of each rank, and how it ended."""
        ended: list[int | str | None] = []
        for process in self.processes:
            try:
                ended.append(process.wait(max(0.1, self.until - time.time())))
            except subprocess.TimeoutExpired:
                ended.append("killed: out of time")
                process.kill()
        for process, log in zip(self.processes, self.logs, strict=True):
            process.wait()
            log.close()
        rows: list[Any] = []
        for rank in range(self.run.ranks):
            path = self.out / f"{self.name}.rank{rank}.json"
            rows += json.loads(path.read_text()) if path.exists() else []
        return {
            "ranks": self.run.ranks,
            "seconds": round(time.time() - self.began, 1),
            "ended": ended,
            "rows": rows,
        }


def be(options: argparse.Namespace) -> int:
    """Run one part as one rank."""
    from benchmarks.ganging import agreeing, decoding, generation, grid, speculation
    from benchmarks.ganging.rank import Rank

    parts = {
        "decode": decoding.decode, "stages": generation.stages, "speculate": speculation.speculate,
        "agree": agreeing.agree, "reordered": agreeing.reordered, "other_choice": agreeing.other_choice,
        "alone": grid.alone, "grid": grid.grid,
    }  # fmt: skip
    own: Any = parts[options.part]
    assert inspect.iscoroutinefunction(own)
    ranks = os.environ["WORLD_SIZE"]
    me = Rank(options.out, f"{options.part}.{ranks}", options.layers, options.until, options.rehearse)
    faulthandler.dump_traceback_later(max(1.0, options.until + 3.0 - time.time()))  # where it stands then
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
    parser.add_argument(
        "--ranks", type=int, help="2 and 4 on four GPUs, else all GPUs, if left out; 2 in a rehearsal"
    )
    parser.add_argument("--layers", type=int, default=32, help="of Llama 3 8B's 32")
    parser.add_argument("--budget-s", type=float, default=250.0, help="seconds for everything")
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=["decode"])
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--all", action="store_true", help="rehearse what runs on four GPUs")
    parser.add_argument("--as", dest="part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.part:
        return be(options)
    began = time.time()
    gpus = torch.cuda.device_count()
    ranks = options.ranks or (2 if options.rehearse else gpus)
    if not options.rehearse and not 2 <= ranks <= gpus:
        parser.error(f"ranks needs 2 to {gpus} GPUs of this machine, got {ranks}; try --rehearse")
    alone = tuple((ALONE_S.get(part, 30.0), (Run(part, 1 if part == "alone" else ranks),)) for part in PARTS)
    waves = ON_TWO if ranks == 2 else alone
    if options.ranks is None and (gpus >= 4 or options.all):
        waves = ON_FOUR
    done = options.out / "gang_cuda.json"
    found: dict[str, Any] = json.loads(done.read_text())["parts"] if done.exists() else {}
    names = ("layerzero-runtime", "torch", "triton", "flash-attn-4", "flashinfer-python")
    record = {"environment": environment(names), "gpus": gpus, "parts": found}
    for most, wave in waves:
        runs = [run for run in wave if run.part in options.parts]
        left = options.budget_s - (time.time() - began)
        if runs and left < max(PARTS[run.part] for run in runs):
            found |= {
                str(run): {"ranks": run.ranks, "error": f"{left:.0f} s of the budget were left"}
                for run in runs
            }
            runs = []
        until = time.time() + min(most * (4 if options.rehearse else 1), left)
        under_way = [Running(run, options, until) for run in runs]
        for each in under_way:
            found[str(each.run)] = each.ended()
            write(done, record)
            print(each.run, json.dumps(found[str(each.run)])[:1500], flush=True)
    write(done, record)
    failed = [p for p, said in found.items() if not any("error" not in row for row in said.get("rows", []))]
    errors = sum("error" in row for said in found.values() for row in said.get("rows", []))
    print(f"{time.time() - began:.0f} s; rows with errors: {errors}; parts without a number: {failed}")
    return 1 if errors or failed else 0


if __name__ == "__main__":
    sys.exit(main())
