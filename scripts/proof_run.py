"""Runs pytest for `scripts.mutate`, each time in a process of its own, and notes each outcome as it comes.

Run by its path, so that it needs nothing of the tree that is tried. It imports torch and the test tools once
and forks for each request: a line of JSON on stdin with `root` (the tree, where the child runs), `home` (the
tree that nothing may be imported from), `notes` and `out` (files), `variables` and `arguments`. It answers
with two lines on stdout: the child's process id, which leads a group of its own, and its exit status.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, BinaryIO

STRANGER = 97  # the exit status when a module came out of `home`
TOOLS = ("torch", "numpy", "pytest")  # no plugin: pytest rewrites those as it imports them


class Notes:
    """A plugin of pytest: one line a report, at once, so that a process that dies leaves them."""

    def __init__(self, path: str) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND)  # until the process's end

    def note(self, **facts: Any) -> None:
        """Write one line."""
        os.write(self.file, f"{json.dumps(facts)}\n".encode())

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One phase of one test: a pass counts at its call, a failure or a skip in any phase."""
        if report.outcome != "passed" or report.when == "call":
            self.note(node=report.nodeid, outcome=report.outcome, said=said(report), seconds=report.duration)

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported, or is skipped as a whole."""
        if report.outcome != "passed":
            outcome = "uncollected" if report.outcome == "failed" else "skipped"
            self.note(node=report.nodeid, outcome=outcome, said=said(report), seconds=0.0)


def said(report: Any) -> str:
    """The line that says why, without its context."""
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr or "")
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return (lines[0] if crash is not None else lines[-1])[:300] if lines else ""


def strangers(home: Path) -> list[str]:
    """Modules that were imported from `home`, which is not the tree that is tried."""
    places = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    return [
        f"{name} from {place}"
        for name, place in places.items()
        if place and place != __file__ and "site-packages" not in place and home in Path(place).parents
    ]


def run(request: dict[str, Any]) -> int:
    """What a child does; pytest's exit status, or STRANGER."""
    import pytest

    os.environ.clear()
    os.environ.update(request["variables"])
    sys.path.insert(0, request["root"])
    sys.argv = ["pytest", *request["arguments"]]
    plugin = Notes(request["notes"])
    status = int(pytest.main(request["arguments"], plugins=[plugin]))
    if foreign := strangers(Path(request["home"]).resolve()):
        plugin.note(node="", outcome="stranger", said=", ".join(foreign[:3]), seconds=0.0)
        return STRANGER
    return status


def begun(request: dict[str, Any], requests: BinaryIO, answers: int) -> int:
    """The process id of a child for `request`; in the child it does not return."""
    process = os.fork()
    if process:
        return process
    os.setsid()
    os.close(answers)
    requests.close()
    out = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for stream, file in ((0, nothing), (1, out), (2, out)):
        os.dup2(file, stream)
    os.chdir(request["root"])
    try:
        status = run(request)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a failed test may have left threads that the interpreter's end would wait for


def main() -> None:
    """Answer requests until there are no more."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [place for place in sys.path if place and Path(place).resolve() != here]
    for tool in TOOLS:
        __import__(tool)
    requests, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    os.dup2(2, 1)
    for line in iter(requests.readline, b""):
        process = begun(json.loads(line), requests, answers)
        os.write(answers, f"{process}\n".encode())
        _, status = os.waitpid(process, 0)
        os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())


if __name__ == "__main__":
    main()
