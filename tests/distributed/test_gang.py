"""Rank groups of real processes with gloo's collectives in their steps; one of them under torchrun."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import torch

from layerzero.ops import table as ops_table
from layerzero.perfdb import BenchmarkCase, Environment
from layerzero.perfdb.store import PerfDB
from layerzero.spec.hardware import probe
from tests.distributed import forked
from tests.perfdb.rows import row

SCRIPT = Path(__file__).with_name("ranks.py")
TIMEOUT_S = 120

# What may run one after another in the same processes, because nothing of it breaks a group.
PLAIN = ("together", "compared", "invariant", "trees", "alone")
ALIKE = ("training", "together")
PARTED = ("alter-late", "reorder-both")  # the last breaks the process group


def run(
    name: str,
    ranks: int = 2,
    only: Mapping[str, str] | None = None,
    among: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    """What each rank of a scenario printed; `only` holds what rank 1 alone has in its environment.

    The scenarios `among` which it is run in one start of the ranks, for all tests that ask for one of them.
    """
    names = among or (name,)
    printed = launched(names) if names == PLAIN else started(names, ranks, tuple((only or {}).items()))
    found = [said for said in map(json.loads, printed) if said["scenario"] == name]
    assert len(found) in (1, ranks), found
    return sorted(found, key=lambda said: int(said["rank"]))


@functools.cache
def started(names: tuple[str, ...], ranks: int, only: tuple[tuple[str, str], ...]) -> list[str]:
    """What the ranks printed, scenario after scenario."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [str(SCRIPT), ",".join(names)]
        ended = forked.run_ranks(ranks, arguments, Path(folder), TIMEOUT_S, {1: dict(only)})
    lines = [line for each in ended for line in each.stdout.splitlines()]
    assert lines, ended
    return lines


@functools.cache
def launched(names: tuple[str, ...]) -> list[str]:
    """What two ranks printed that torchrun started."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(SCRIPT), ",".join(names),
    ]  # fmt: skip
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join([str(forked.ROOT), os.environ.get("PYTHONPATH", "")]),
        },
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-3000:]
    return lines


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sums_are_those_of_one_process(ranks: int) -> None:
    """Rank 0 batches; every rank runs the same batches, under one plan."""
    said = run("together", ranks, among=PLAIN if ranks == 2 else ())
    assert len(said) == ranks
    assert said[0]["worst"] < 1e-4
    assert len({each["plan"] for each in said}) == 1
    assert all(each["ran"] == said[0]["ran"] for each in said)
    assert max(said[0]["ran"]) > 1


def test_without_manifests_another_order_gives_wrong_sums_and_no_error() -> None:
    """The control: this is what the manifest is for."""
    said = run("alone", among=PLAIN)
    assert [each.get("error") for each in said] == [None, None]
    assert max(each["worst"] for each in said) > 0.1


@pytest.mark.parametrize("others", [False, True])
def test_measurements_that_every_process_holds_choose_for_the_gang(others: bool, tmp_path: Path) -> None:
    """Two processes with one file of measurements choose by it; where one holds others, both estimate."""
    files = [tmp_path / "one.sqlite", tmp_path / "other.sqlite"]
    for path, us in zip(files, (1.0, 2.0), strict=True):
        anyio.run(measured, path, us)
    only = {rank: {"PLANTED_PERFDB": str(files[rank if others else 0])} for rank in (0, 1)}
    ended = forked.run_ranks(2, [str(SCRIPT), "measured"], tmp_path, TIMEOUT_S, only)
    said = [json.loads(line) for each in ended for line in each.stdout.splitlines()]
    assert [each.get("error") for each in said] == [None, None], said
    assert [each["measured"] for each in said] == [not others] * 2
    kernel = "planted.linear.guessed" if others else "planted.linear.timed"
    assert [each["kernels"] for each in said] == [[kernel]] * 2


async def measured(path: Path, us: float) -> None:
    """Write measurements of a rank's products: what estimates call the slower kernel takes `us`."""
    linear = ops_table.get("linear")
    rows = []
    for count in range(1, 7):
        shape = BenchmarkCase.of_request(linear.check((torch.ones(count, 32), torch.ones(8, 32), None)))
        for name, median_us in (("timed", us), ("guessed", 900.0)):
            rows.append(row(f"planted.linear.{name}", median_us, case=shape))
    one_thread = msgspec.structs.replace(Environment.of_hardware(probe("cpu")), threads=1)
    async with PerfDB(path) as db:
        await db.add(one_thread, rows)


@pytest.mark.parametrize("name", ["reordered", pytest.param("split", marks=pytest.mark.slow)])
def test_a_rank_that_batches_otherwise_raises_before_the_collective(name: str) -> None:
    """No sum is formed of rows that do not belong together, and no rank hangs."""
    said = run(name)
    assert said[1]["error"] == "ConsistencyError", said
    assert "requests of rank 0's step 1" in said[1]["message"]
    assert "error" in said[0] and said[0]["error"] in (
        "DeviceLostError",
        "RuntimeError",
        "DistBackendError",
    ), said


@pytest.mark.parametrize("name", ["alter-late", "alter-known"])
def test_nobody_gets_sums_of_ranks_that_ran_other_ops(name: str) -> None:
    """One rank runs an op more, a new one or one that all know: that step and those after it are errors."""
    first = run(name)[0]
    got = first["got"]
    assert all(isinstance(each, float) and each < 1e-4 for each in got[:3]), got
    assert got[3].startswith("ConsistencyError: ops of rank 0's step 4 need"), got
    assert "rank 1: it ran others" in got[3]
    assert all("ran others" in each for each in got[4:]) and len(got) == 8, got


def test_every_rank_of_four_that_ran_other_ops_is_named() -> None:
    """Ranks 1 and 3 run an op more: rank 0's error names both, and no caller has their sum."""
    got = run("alter-late", 4, among=PARTED)[0]["got"]
    assert all(isinstance(each, float) and each < 1e-4 for each in got[:3]), got
    assert re.fullmatch(
        r"ConsistencyError: ops of rank 0's step 4 need '(\w+)', got '(?!\1)(\w+)' on rank 1, "
        r"'\2' on rank 3: they ran others, or in another order, and their sums are not handed out",
        got[3],
    ), got
    assert all("ran others" in each for each in got[4:]) and len(got) == 8, got


def test_every_rank_of_four_that_refused_a_step_is_named() -> None:
    """Ranks 1 and 3 have batched in another order: rank 0's callers read what both say, and have no sum."""
    first, second, third, fourth = run("reorder-both", 4, among=PARTED)
    assert (second["error"], fourth["error"]) == ("ConsistencyError", "ConsistencyError")
    assert first["error"] == "DeviceLostError" == third["error"], (first, third)
    for rank in (1, 3):
        said = (
            f"rank {rank} cannot follow: requests of rank 0's step 1 needs [0, 1, 2, 3, 4, 5], got [5, 4, 3"
        )
        assert said in first["message"], first
    assert "rank 2 cannot follow" not in first["message"]


def test_callers_of_rank_0_get_the_reason_of_the_rank_that_left() -> None:
    """Not that of the collective which it broke."""
    first, other = run("leaves")
    assert (other["error"], other["message"]) == ("ValueError", "the pages of rank 1 are gone")
    assert first["error"] == "DeviceLostError", first
    assert "step raised ValueError: the pages of rank 1 are gone" in first["message"]


@pytest.mark.parametrize("way", ["comparing", pytest.param("following", marks=pytest.mark.slow)])
def test_a_follower_in_a_collective_is_told_that_rank_0_hung_up(way: str) -> None:
    """Rank 0's process lives on, so gloo says nothing; the callers have the group's error before it ends."""
    first, other = run(f"hangs-{way}")
    assert first["error"] == "ValueError", first
    assert other["error"] == "DeviceLostError", other
    assert "rank 0 is gone: it hung up while rank 1 was in step 1" in other["message"]
    assert len(other["told"]) == 1
    assert first["heard"]  # that its callers went on, while rank 0 lived


def test_ranks_that_batch_alike_compare_equal() -> None:
    """The comparison refuses nothing that is right."""
    said = run("compared", among=PLAIN)
    assert [each.get("error") for each in said] == [None, None], said
    assert max(each["worst"] for each in said) < 1e-4


def test_ranks_with_another_policy_differ() -> None:
    """One rank's environment denies a kernel: training refuses on both, inference takes what is common."""
    only = {"LAYERZERO_DENY": "torch.linear.native"}
    refused = run("training", only=only, among=ALIKE)
    assert [each["error"] for each in refused] == ["ConsistencyError"] * 2
    assert refused[0]["message"] == refused[1]["message"]
    assert "policy" in refused[0]["message"]
    served = run("together", only=only, among=ALIKE)
    assert served[0]["worst"] < 1e-4
    assert served[0]["plan"] == served[1]["plan"]


def test_ranks_with_another_version_differ() -> None:
    """One rank has another release: training refuses on both by name, inference serves what is common."""
    only = {"PLANTED_VERSION": "0.0.1"}
    refused = run("training", only=only, among=ALIKE)
    assert [each["error"] for each in refused] == ["ConsistencyError"] * 2, refused
    assert refused[0]["message"] == refused[1]["message"]
    assert "rank 1 needs what rank 0 has, got other layerzero 0.0.1 for" in refused[0]["message"]
    served = run("together", only=only, among=ALIKE)
    assert served[0]["worst"] < 1e-4 and served[0]["plan"] == served[1]["plan"]


def test_ranks_of_other_hardware_choose_in_groups() -> None:
    """Another count of threads is another roof: each group prices for itself, and the sums are right."""
    said = run("together", only={"PLANTED_THREADS": "2"})
    assert [each.get("error") for each in said] == [None, None], said
    assert said[0]["worst"] < 1e-4 and said[0]["ran"] == said[1]["ran"]
    assert {len(each["groups"]) for each in said} == {2}


def test_invariance_that_no_kernel_has_yields_on_every_rank_alike() -> None:
    """Asked for and not to be had: both ranks take the same kernels, say so, and the sums are right."""
    said = run("invariant", among=PLAIN)
    assert [each.get("error") for each in said] == [None, None], said
    assert said[0]["kernels"] == said[1]["kernels"] != [""] and said[0]["worst"] < 1e-4


def test_a_rank_that_dies_is_an_error_on_the_others_in_seconds() -> None:
    """FS-022, FS-023: no rank waits for a dead one until some collective's time is up."""
    (first,) = [each for each in run("killed") if each["rank"] == 0]
    assert first["error"] in ("DeviceLostError", "RuntimeError", "DistBackendError"), first
    assert first["seconds"] < 15


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_poorest_ranks_memory_decides_for_all(ranks: int) -> None:
    """Other free memory on every rank, and only the last has too little: alone they part, together not."""
    said = run("poor", ranks)
    assert [each.get("error") for each in said] == [None] * ranks, said
    rich, poor = ["planted.linear.big"], ["planted.linear.small"]
    assert [each["alone"] for each in said] == [rich] * (ranks - 1) + [poor]
    assert [each["kernels"] for each in said] == [poor] * ranks
    assert said[0]["worst"] < 1e-4 and len({each["plan"] for each in said}) == 1


def test_ranks_walk_a_drafted_tree_alike() -> None:
    """Forty sampled trees over two ranks' heads: one outcome on both, one process's; some drafts stay."""
    said = run("trees", among=PLAIN)
    assert [each.get("error") for each in said] == [None, None], said
    assert said[0]["trees"] == said[1]["trees"] == said[0]["alone"] and len(said[0]["trees"]) == 40
    assert {0, 1, 2} <= {accepted for _, _, accepted in said[0]["trees"]}
