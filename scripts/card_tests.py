"""Run every test that needs a CUDA device, on one card, and write what came of each.

    python -m scripts.card_tests OUT [--budget-s 230] [--only NAME ...] [--add]

First what fills the card's memory, alone; then the rest of `tests/cuda`, beside what compiles for minutes;
then the contract and the vendors' tests, a process for each backend (and dtype, where a library compiles by
it), at once: a kernel that brings its process down takes no other with it. Each process measures its kernels'
errors when its tests are through. OUT gets `cuda_tests.json`, `ran_cuda.json` and `accuracy.json`, in the
shapes of `benchmarks/results`, and `groups.json` with every test; all are written anew every few seconds.
With `--add` the groups that stand there from the same commit and machine stay, unless they run again.
Without a card the same commands run and skip.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import environment, write
from scripts.support_matrix import PROOFS, described

OF_A_KERNEL = (
    "tests/backends/test_contract.py", "tests/backends/test_vendors.py", "tests/backends/test_workspace.py",
)  # fmt: skip
CUDA, COMPILING, FILTERS, MEMORY = "cuda", "test_triton_kernels", "test_filters", "test_room"
TRUTH = "test_flashinfer_truth"
CODES = ("test_coded_attention", "test_coded_experts", "test_codes")  # each compiles for minutes
# When a group starts: alone, beside what compiles longest, with all the rest; how long the next ones wait.
FIRST, EARLY, LATER = 0, 1, 2
CUT_OFF = "time was up"
LONGEST_S = {FIRST: 45.0, EARLY: 60.0, LATER: float("inf")}


@dataclass(frozen=True)
class Group:
    """Tests of one process: its paths, a selection of names, a dtype where it keeps to one.

    `without` is a package that its process does not find, for a library that does not load beside another;
    `compiles` says that the next groups do not wait for it.
    """

    name: str
    paths: tuple[str, ...]
    select: str = ""
    dtype: str = ""
    without: str = ""
    when: int = LATER
    compiles: bool = False

    def command(self, target: Path) -> list[str]:
        """How it is run."""
        chosen = ["-k", self.select] if self.select else []
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-W", "ignore", "--timeout", "170"]
        accuracy = str(target.with_suffix(".accuracy"))
        return [
            sys.executable, "-m", "scripts.card_group", str(target), accuracy, *options, *chosen, *self.paths,
        ]  # fmt: skip


def groups() -> tuple[Group, ...]:
    """All, in the order in which they start."""
    compiled = (
        "flashinfer. and fa3 and not mla", "flashinfer. and fa2 and not mla", "flashinfer. and mla",
        "flash_attn_4.attention", "flash_attn_4.ragged", "flash_attn_4.paged",
    )  # fmt: skip
    apart = (COMPILING, FILTERS, MEMORY, TRUTH, *CODES)
    found = [
        Group(f"{CUDA}_memory", (f"tests/cuda/{MEMORY}.py",), when=FIRST),
        Group(CUDA, ("tests/cuda",), " and ".join(f"not {word}" for word in apart), when=EARLY),
    ]
    for part in ("tokens and dtype0", "tokens and dtype1", "codes"):
        name = f"{CUDA}_compiling_{part.replace(' and ', '_')}"
        found.append(Group(name, (f"tests/cuda/{COMPILING}.py",), part, when=EARLY, compiles=True))
    found += [
        Group(f"{CUDA}_{name}", (f"tests/cuda/{name}.py",), when=EARLY, compiles=True) for name in CODES
    ]
    for part in ("float32", "bfloat16", "graph"):
        name = f"{CUDA}_{FILTERS}_{part}"
        found.append(Group(name, (f"tests/cuda/{FILTERS}.py",), part, when=EARLY, compiles=True))
    for part in ("bfloat16", "float16 and not bfloat16", "not float16"):
        name = f"{CUDA}_{TRUTH}_{part.replace(' ', '_')}"
        found.append(Group(name, (f"tests/cuda/{TRUTH}.py",), part))
    for select in compiled:
        for dtype in ("bfloat16", "float16"):
            name = re.sub(r"\W+", "_", select.replace(" and not mla", "").replace(" and ", ""))
            # What is written by hand is in bfloat16.
            paths = OF_A_KERNEL if dtype == "bfloat16" else OF_A_KERNEL[:1]
            early = "flash_attn_4" in name
            when = EARLY if early else LATER
            found.append(Group(f"{name}_{dtype}", paths, select, dtype, when=when, compiles=early))
    # The dots keep to ids: tests' names speak of references, variants of Triton.
    for name, select in {
        "flash_attn_2": "flash_attn_2.",
        "flash_attn_3": "flash_attn_3.",
        "vllm": "vllm_marlin. or vllm_machete.",
        "xformers": "xformers.",
        "liger": "liger.",
        "triton": "triton.",
        "of_this_project": "cuda.paged_attention or cuda.quantized_linear",
        "reference": "reference.",
        "torch_attention": "torch.attention.",
        "torch": "torch. and not torch.attention.",
    }.items():
        without = "flash_attn" if name == "xformers" else ""  # it does not import beside FlashAttention-4
        found.append(Group(name, OF_A_KERNEL, select, without=without))
    found.append(Group("flashinfer_rows", OF_A_KERNEL, "flashinfer. and not fa2 and not fa3"))
    of_kernels = "flashinfer. flash_attn_ xformers. vllm_ liger. triton. cuda. reference. torch."
    none = " and ".join(f"not {start}" for start in of_kernels.split())
    found.append(Group("by_hand", OF_A_KERNEL[1:], none))
    for part in ("triton.", "reference.", "not triton. and not reference."):
        name = "invariance_" + ("rest" if part.startswith("not") else part.strip("."))
        select = f"test_a_row_has_its_own_bits and {part}"
        found.append(Group(name, ("tests/backends/test_batch_invariance.py",), select))
    replays = ("tests/backends/test_replays.py",)
    found.append(Group("replays", replays, "not flashinfer."))
    found.append(Group("replays_flashinfer", replays, "flashinfer."))
    found.append(
        Group(
            "own",
            (
                "tests/backends/test_liger.py",
                "tests/backends/test_planning.py",
                "tests/backends/test_triton_kernels.py",
            ),
        )
    )
    return tuple(found)


@dataclass
class Running:
    """A group's process and the file that it writes."""

    group: Group
    target: Path
    log: Path
    process: subprocess.Popen[bytes]
    started: float = field(default_factory=time.monotonic)
    cut_off: bool = False

    @property
    def ended(self) -> bool:
        """Whether its process has."""
        return self.process.poll() is not None

    def accuracy(self) -> dict[str, Any]:
        """The table that it has written, empty so far as there is none."""
        try:
            found: dict[str, Any] = json.loads(self.target.with_suffix(".accuracy").read_text())
        except (OSError, ValueError):
            return {"kernels": []}
        return found

    def record(self) -> dict[str, Any]:
        """What it has written, and how its process stands."""
        try:
            found: dict[str, Any] = json.loads(self.target.read_text())
        except (OSError, ValueError):
            found = {"counts": {}, "tests": []}
        status = self.process.poll()
        found["exit"] = CUT_OFF if self.cut_off or status is None else status
        if status not in (0, 5):  # 5: nothing was selected
            found["log"] = self.log.read_text(errors="replace")[-2000:] if self.log.exists() else ""
        return found


def path_without(package: str, folder: Path) -> str:
    """PYTHONPATH with a folder of links in the place of each that has the package."""
    found = []
    for number, entry in enumerate(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))):
        if not (Path(entry) / package).is_dir():
            found.append(entry)
            continue
        links = folder / f"without_{package}_{number}"
        links.mkdir()
        for item in Path(entry).iterdir():
            if not item.name.startswith(package):
                (links / item.name).symlink_to(item)
        found.append(str(links))
    return os.pathsep.join(found)


def start(group: Group, folder: Path) -> Running:
    """Start a group's process."""
    target, log = folder / f"{group.name}.json", folder / f"{group.name}.log"
    own = dict(os.environ)
    device = own.pop("LAYERZERO_TEST_DEVICE", "cuda")
    if not group.name.startswith(CUDA):  # settings that are read there know no such variable
        own["LAYERZERO_TEST_DEVICE"] = device
    if group.dtype:
        own["LAYERZERO_TEST_DTYPES"] = group.dtype
    if group.without:
        own["PYTHONPATH"] = path_without(group.without, folder)
    own["OMP_NUM_THREADS"] = "1"  # enough for its references, few enough for all processes
    with log.open("wb") as out:
        process = subprocess.Popen(group.command(target), stdout=out, stderr=subprocess.STDOUT, env=own)
    return Running(group, target, log, process)


def outcomes(records: Iterable[dict[str, Any]]) -> dict[str, str]:
    """What the proof says of each kernel: the worst of its dtypes.

    A test that was under way when its process died is a failure, one when the time was up says nothing.
    """
    proof, order, found = PROOFS["cuda"], ("failed", "passed", "skipped"), dict[str, str]()
    for record in records:
        ran = [(entry["test"], entry["outcome"]) for entry in record["tests"]]
        if record.get("running") and record["exit"] != CUT_OFF:
            ran.append((record["running"], "failed"))
        for test, outcome in ran:
            parameter = re.search(r"\[([a-z0-9_.]+)\]$", test)
            if test.startswith(proof) and parameter is not None:
                known = found.get(parameter[1], outcome)
                found[parameter[1]] = min(outcome, known, key=order.index)
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class Earlier:
    """What a run before this one wrote."""

    groups: dict[str, Any] = field(default_factory=dict)
    accuracy: dict[str, Any] = field(default_factory=lambda: {"kernels": []})

    @classmethod
    def read(cls, out: Path) -> Earlier:
        """Raises: ValueError: it ran another commit or on another machine."""
        groups = json.loads((out / "groups.json").read_text())
        now = environment()
        for name, record in groups.items():
            then = record.get("environment", now)  # one that was ended before it wrote has none
            if any(then[key] != now[key] for key in ("commit", "clean", "machine")):
                raise ValueError(f"{out}: {name} is of {then['commit']} on {then['machine']}")
        table = out / "accuracy.json"
        return cls(groups, json.loads(table.read_text())) if table.exists() else cls(groups)


def save(out: Path, started: list[Running], earlier: Earlier) -> None:
    """Write all files."""
    records = earlier.groups | {one.group.name: one.record() for one in started}
    write(out / "groups.json", records)
    cuda = [record for name, record in records.items() if name.startswith(CUDA)]
    if cuda:
        tests = [entry for record in cuda for entry in record["tests"]]
        counts = dict(Counter(entry["outcome"] for entry in tests))
        running = next((r["running"] for r in cuda if r.get("running")), None)
        write(out / "cuda_tests.json", cuda[0] | {"running": running, "counts": counts, "tests": tests})
    kernels = outcomes(r for name, r in records.items() if not name.startswith(CUDA))
    write(out / "ran_cuda.json", described("cuda") | {"kernels": kernels})
    tables = [found for one in started if (found := one.accuracy())["kernels"]]
    anew = {_of_row(row): row for each in tables for row in each["kernels"]}
    rows = sorted(({_of_row(row): row for row in earlier.accuracy["kernels"]} | anew).values(), key=_of_row)
    if rows:
        of = [*tables, earlier.accuracy][0]["environment"]
        write(out / "accuracy.json", {"environment": of, "kernels": rows})


def _of_row(row: dict[str, Any]) -> tuple[str, ...]:
    return (row["op"], row["kernel"], row.get("dtype", ""), row.get("products", ""))


def wait(running: list[Running], awaited: list[Running], out: Path, until: float, earlier: Earlier) -> None:
    """Until the awaited ones have ended or the time is up."""
    while not all(one.ended for one in awaited) and time.monotonic() < until:
        time.sleep(1.0)
        save(out, running, earlier)


def main() -> int:
    """Run all groups; 1 where a test failed or a process died."""
    parser = argparse.ArgumentParser(description="run the CUDA tests on one card")
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget-s", type=float, default=230.0)
    parser.add_argument("--only", nargs="*", help="names of groups, all by default")
    parser.add_argument("--add", action="store_true", help="keep the groups of an earlier run in OUT")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + options.budget_s
    earlier = Earlier.read(options.out) if options.add else Earlier()
    chosen = [g for g in groups() if not options.only or g.name in options.only]
    with tempfile.TemporaryDirectory() as held:
        running: list[Running] = []
        for when in (FIRST, EARLY, LATER):
            now = [start(g, Path(held)) for g in chosen if g.when == when]
            running += now
            awaited = running if when == LATER else [one for one in now if not one.group.compiles]
            wait(running, awaited, options.out, min(until, time.monotonic() + LONGEST_S[when]), earlier)
        for one in running:
            if not one.ended:
                one.cut_off = True
                one.process.kill()
                one.process.wait()
        save(options.out, running, earlier)
        for one in running:
            record = one.record()
            print(f"{one.group.name:45} exit {record['exit']!s:4} {record['counts']}", flush=True)
    return int(any(one.process.returncode not in (0, 5) for one in running))


if __name__ == "__main__":
    sys.exit(main())
