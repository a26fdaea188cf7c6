"""How often the performance gate is wrong: a tree against itself, and against one that is a tenth slower.

    python -m benchmarks.gate_alarms [--runs 100] [--slower 1.0 1.1] [--load] [--out FILE]
    python -m benchmarks.gate_alarms --gates 100 [--cpu-minutes 12] [--out FILE]

`--gates` runs the command itself, `lz gate`, with the calls and the limit of RELEASE.yaml and nothing
changed: by turns against a copy of this tree and against a baseline that this machine has just written. It
ends with status 1 where one of them fails; one that is undecided is counted. Otherwise each run is what
`lz gate` does for one call: two fresh processes, paired rounds, the sign test, and once more where the answer
is not "as fast". The slower tree is a copy whose function waits by the clock, so that the least time of many
blocks is so much longer. `--load` keeps a process a core busy with products, in bursts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks.harness import environment, write
from layerzero.gates.paired_rounds import PacedCall, PaceProcess, PairedResult, compare_paces
from layerzero.gates.stages import confirm

ROOT = Path(__file__).resolve().parents[1]
CALL = PacedCall("rms_norm x=16x512:float32 weight=512:float32")
LIMIT = 0.05
TRIES, BLOCKS, NEAR = 6, 1500, 0.005
LOAD = """
import random, time, torch
torch.set_num_threads(1)
a = torch.randn(384, 384)
while True:
    end = time.monotonic() + random.uniform(0.01, 0.6)
    while time.monotonic() < end:
        a @ a
    time.sleep(random.uniform(0.0, 0.3))
"""
SLOWER = """

_as_it_was = _blocking(_table.get("rms_norm"))


def rms_norm(*args, **kwargs):
    from time import perf_counter_ns

    result = _as_it_was(*args, **kwargs)
    begin = perf_counter_ns()
    while perf_counter_ns() - begin < {delay_ns}:
        pass
    return result
"""


def main() -> None:
    """Run, and print a line a factor."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--slower", type=float, nargs="+", default=[1.0, 1.1])
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--gates", type=int, default=0)
    parser.add_argument("--cpu-minutes", type=float, default=math.inf)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.gates:
        raise SystemExit(run_gates(options.gates, options.cpu_minutes * 60, options.out))
    record: dict[str, Any] = {
        "what": (__doc__ or "").splitlines()[0], "call": str(CALL), "limit": LIMIT, "load": options.load,
        "runs": {}, "environment": environment(),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trees = {factor: slower_tree(Path(folder), factor) for factor in options.slower}
        with loaded_cores(options.load):
            for factor, (tree, least_ratio) in trees.items():
                results = [run(tree, number) for number in range(options.runs)]
                record["runs"][f"{factor:g}"] = {"least_ratio": round(least_ratio, 4), **figures(results)}
                print(f"{factor:g}", record["runs"][f"{factor:g}"], flush=True)
    if options.out is not None:
        write(options.out, record)


def run_gates(wanted: int, cpu_s: float, out: Path | None) -> int:
    """Run `lz gate` so often, or for so much processor time; the status is 1 where one fails."""
    stage = yaml.safe_load((ROOT / "RELEASE.yaml").read_text())["stages"]["performance"]
    calls = {"calls": stage["calls"], "slower": stage["slower"]}
    answers: Counter[str] = Counter()
    failed: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tree, _ = slower_tree(folder, 1.0)
        against = {"against": str(tree)}
        written = gate(folder, calls | against, "--write-baseline", str(folder / "baseline.json"))
        digest = written.rsplit("sha256: ", 1)[1].split()[0]
        kinds = (against, {"baseline": "baseline.json", "sha256": digest})
        while answers.total() < wanted and children_s() < cpu_s:
            kind = kinds[answers.total() % 2]
            report = json.loads(gate(folder, calls | kind, "--suite", "full", "--json"))
            answers[f"{next(iter(kind))} {report['verdict']}"] += 1
            if report["verdict"] == "failed":
                failed.append(report)
            print(dict(answers), [stage["lines"] for stage in report["stages"][:1]], flush=True)
    record = {"what": "lz gate with nothing changed", **calls, "answers": dict(answers), "failed": failed}
    if out is not None:
        write(out, {**record, "load_average": os.getloadavg()[0], "environment": environment()})
    return 1 if failed else 0


def gate(folder: Path, stage: dict[str, Any], *words: str) -> str:
    """What `lz gate` prints for a release of this one stage."""
    release = folder / "RELEASE.yaml"
    release.write_text(yaml.safe_dump({"version": 1, "stages": {"performance": stage}}))
    command = [sys.executable, "-m", "layerzero", "gate", str(release), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 2:
        raise SystemExit(done.stderr)
    return done.stdout


def children_s() -> float:
    """The processor time of all children so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(tree: Path, number: int) -> PairedResult:
    """One run of the gate: this tree is what `tree` is compared with."""
    result = confirm(lambda: compare_paces(CALL, ROOT, tree, slower=LIMIT))
    print(f"  {number}: {result.answer} {result.ratio:.3f} {result.why}", flush=True)
    return result


def figures(results: list[PairedResult]) -> dict[str, Any]:
    """The answers counted, with the ratios and rounds behind them."""
    ratios = sorted(result.ratio for result in results)
    return {
        "answers": dict(Counter(result.answer for result in results)),
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_least": round(ratios[0], 4),
        "ratio_most": round(ratios[-1], 4),
        "rounds_median": statistics.median(result.rounds for result in results),
        "load_average": round(os.getloadavg()[0], 2),
    }


def slower_tree(folder: Path, factor: float) -> tuple[Path, float]:
    """A copy of the tree whose blocking function takes so much longer, and by how much it does."""
    tree = folder / f"slower-{factor:g}"
    shutil.copytree(ROOT / "layerzero", tree / "layerzero", ignore=shutil.ignore_patterns("__pycache__"))
    if factor == 1.0:
        return tree, 1.0
    source = tree / "layerzero" / "sync.py"
    text, delay_ns, ratio = source.read_text(), 200.0, 0.0
    for _ in range(TRIES):
        source.write_text(text + SLOWER.format(delay_ns=round(delay_ns)))
        bare_us, slow_us = least_times(tree)
        ratio = slow_us / bare_us
        if abs(ratio - factor) < NEAR:
            break
        delay_ns = max(0.0, delay_ns + (factor * bare_us - slow_us) * 1e3)
    return tree, ratio


def least_times(tree: Path) -> tuple[float, float]:
    """Microseconds of the call in this tree and in another, each the least of many blocks in turn."""
    with PaceProcess(CALL, tree=ROOT, cpu=0) as bare, PaceProcess(CALL, tree=tree, cpu=0) as slow:
        bare.start()
        slow.start()
        pairs = [(bare.call_us(bare.block()), slow.call_us(slow.block())) for _ in range(BLOCKS)]
    return min(first for first, _ in pairs), min(second for _, second in pairs)


@contextlib.contextmanager
def loaded_cores(wanted: bool) -> Iterator[None]:
    """Processes that keep the cores busy in bursts, one a core."""
    words = [sys.executable, "-c", LOAD]
    children = [subprocess.Popen(words) for _ in range(os.cpu_count() or 1)] if wanted else []
    try:
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()


if __name__ == "__main__":
    main()
