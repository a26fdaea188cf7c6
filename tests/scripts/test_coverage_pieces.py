"""Coverage in pieces: every test belongs to one, a run ends in time, and processes beside the first count."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import coverage_pieces


def test_every_test_that_counts_is_in_one_piece() -> None:
    """Each file of a folder that is not left out, distributed ones too, once, eight in a piece at most."""
    named = [path for _, files in coverage_pieces.pieces() for path in files]
    tests = coverage_pieces.ROOT / "tests"
    wanted = {
        path
        for path in tests.glob("*/**/test_*.py")
        if path.relative_to(tests).parts[0] not in coverage_pieces.LEFT_OUT
    }
    assert len(named) == len(set(named)) and set(named) == wanted
    assert any(path.parent.name == "distributed" for path in named)
    assert max(len(files) for _, files in coverage_pieces.pieces()) == coverage_pieces.FILES
    assert [name for name, _ in coverage_pieces.pieces("tests/perfdb")] == ["perfdb.0"]


def test_a_run_stops_in_time_and_the_next_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing begins when the time is over; what passed is not run again, what failed and another tree is."""
    ran: list[str] = []
    broken = {"perfdb.0"}
    tree = ["a"]

    def run_piece(files: object, done: Path) -> bool:
        ran.append(done.stem)
        if done.stem not in broken:
            done.parent.mkdir(parents=True, exist_ok=True)
            done.touch()
        return done.stem not in broken

    monkeypatch.setattr(coverage_pieces, "STORE", tmp_path)
    monkeypatch.setattr(coverage_pieces, "run_piece", run_piece)
    monkeypatch.setattr(coverage_pieces, "tree_digest", lambda: tree[0])
    monkeypatch.setattr(coverage_pieces, "combine", lambda sources, into: None)
    monkeypatch.setattr(coverage_pieces, "report", lambda data, bound: 7 if bound else 0)
    names = [name for name, _ in coverage_pieces.pieces()]
    assert coverage_pieces.main(["--minutes", "0"]) == coverage_pieces.LEFT and ran == []
    assert coverage_pieces.main(["--minutes", "9"]) == 1 and ran == names
    broken.clear()
    assert coverage_pieces.main([]) == 7 and ran == [*names, "perfdb.0"]
    assert coverage_pieces.main(["--only", "tests/perfdb"]) == 0 and len(ran) == len(names) + 1
    tree[0] = "b"
    assert coverage_pieces.main(["--minutes", "0"]) == coverage_pieces.LEFT
    assert not list((tmp_path).glob("a"))


ONLY_THERE = "from layerzero._util.version import installed_version; installed_version('torch')"
PARENTS = {
    "a child": f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ONLY_THERE!r}], check=True)",
    "a fork": f"""
import os
if (child := os.fork()) == 0:
    {ONLY_THERE}
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
""",
    "a worker that is ended": f"""
import subprocess, sys
code = {ONLY_THERE!r} + "; print(flush=True); import time; time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
child.terminate()
child.wait()
""",
    "an actor": f"""
from tests.distributed.conftest import BARE, _begun
import ray
cluster = _begun({{"num_cpus": 1, **BARE}})
ray.init(cluster.address)
@ray.remote
class Actor:
    def call(self):
        {ONLY_THERE}
ray.get(Actor.remote().call.remote())
ray.shutdown()
cluster.shutdown()
""",
}


@pytest.mark.parametrize(
    "parent", [pytest.param(name, marks=[pytest.mark.slow] * (name == "an actor")) for name in PARENTS]
)
def test_lines_of_other_processes_count(parent: str, tmp_path: Path) -> None:
    """What a child, a fork that ends at once, a terminated worker and an actor run is in the data."""
    coverage = pytest.importorskip("coverage", reason="needs coverage, of the extra stress")

    script, room = tmp_path / "parent.py", tmp_path / "room"
    script.write_text(PARENTS[parent])
    room.mkdir()
    environment = {**os.environ, "COVERAGE_FILE": str(room / "data"), "PYTHONPATH": str(coverage_pieces.ROOT)}
    subprocess.run(
        [sys.executable, "-m", "coverage", "run", str(script)], cwd=coverage_pieces.ROOT, env=environment,
        check=True, timeout=300,
    )  # fmt: skip
    coverage_pieces.combine(sorted(room.iterdir()), tmp_path / "all")
    data = coverage.CoverageData(str(tmp_path / "all"))
    data.read()
    (path,) = [path for path in data.measured_files() if path.endswith("layerzero/_util/version.py")]
    source = Path(path).read_text().splitlines()
    (body,) = [n for n, line in enumerate(source, 1) if line.startswith("def installed_version")]
    assert any(line > body for line in data.lines(path) or [])
