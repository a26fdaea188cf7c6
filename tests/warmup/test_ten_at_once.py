"""Ten processes that start at once and want the same kernel: one choice, one run of a real compiler."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.children import Child
from tests.waiting import EVERY_S, LIMIT_S
from tests.warmup import racing
from tests.warmup.test_warmup import keep_what_is_compiled, needs_compiler

pytestmark = [needs_compiler, pytest.mark.timeout(360)]

_RACER = """
import json, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
sys.path.insert(0, str(folder / sys.argv[2]))
import layerzero as lz
from tests.warmup import racing

with lz.start(lz.Settings.load(warm="off", device="cpu", shared_choices_s=300.0)):
    (folder / f"ready-{sys.argv[3]}").touch()
    while not (folder / "start").exists():
        time.sleep(0.005)
    print(json.dumps(racing.answer(folder)))
"""


def wait_for(condition: Callable[[], Any]) -> None:
    """Wait until it holds."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(EVERY_S)


def started(folder: Path, versions: list[str]) -> list[Child]:
    """So many processes, each of a version of the kernel's distribution, which begin at one moment."""
    if not (folder / "norm.c").exists():
        keep_what_is_compiled(folder)
        racing.prepare(folder, *sorted(set(versions)))
    variables = {**os.environ, "XDG_CACHE_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    children = [
        Child(_RACER, str(folder), version, str(number), folder=folder, variables=variables)
        for number, version in enumerate(versions)
    ]
    wait_for(lambda: len(list(folder.glob("ready-*"))) >= len(versions))
    (folder / "start").touch()
    return children


def said(child: Child) -> dict[str, Any]:
    """What a process found."""
    done = child.ended()
    assert done.returncode == 0, done.stderr[-800:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["right"] and found["kernel"] == racing.KERNEL
    return found


@pytest.mark.long
def test_ten_that_start_at_once_compile_and_choose_once(tmp_path: Path) -> None:
    """Ten have version 1 of the kernel's distribution, two have version 2, and all of them one cache.

    Each has computed with what its own environment's one compilation made. A process after a restart compiles
    and chooses nothing.
    """
    versions = ["1.0"] * 5 + ["2.0"] * 2 + ["1.0"] * 5
    found = [said(child) for child in started(tmp_path, versions)]
    assert Counter(version for _, version in racing.compiled(tmp_path)) == {"1.0": 1, "2.0": 1}
    assert [each["versions"] for each in found] == [[version] for version in versions]
    (again,) = map(said, started(tmp_path, ["1.0"]))
    assert (again["versions"], again["chosen"]) == (["1.0"], 0) and len(racing.compiled(tmp_path)) == 2
    (tmp_path / "alone").mkdir()
    (alone,) = map(said, started(tmp_path / "alone", ["1.0"]))
    chosen = [sum(each["chosen"] for each in found if each["versions"] == [v]) for v in ("1.0", "2.0")]
    assert chosen == [alone["chosen"]] * 2 and alone["chosen"] > 0


def test_a_leader_that_is_killed_at_its_compiler_is_replaced(tmp_path: Path) -> None:
    """SIGKILL while its compiler is under way: of the nine others one compiles, and all have the answer."""
    (tmp_path / "hold").touch()
    children = started(tmp_path, ["1.0"] * 10)
    wait_for((tmp_path / "held").exists)
    ((leader, _),) = racing.compiled(tmp_path)
    os.kill(leader, signal.SIGKILL)
    others = [child for child in children if child.process.pid != leader]
    assert len(others) == 9
    found = [said(child) for child in others]
    (tmp_path / "go").touch()  # the dead one's compiler ends as well, and changes nothing
    assert {process for process, _ in racing.compiled(tmp_path)} & {child.process.pid for child in others}
    assert len(racing.compiled(tmp_path)) == 2
    assert [each["versions"] for each in found] == [["1.0"]] * 9
