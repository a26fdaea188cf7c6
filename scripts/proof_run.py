"""Runs pytest for `scripts.mutate` in a process of its own, and notes each outcome as it comes.

`python proof_run.py NOTES HOME ARGUMENT...`: NOTES is a file of JSON lines, HOME the tree that nothing may be
imported from. Run by its path, so that it needs nothing of the tree that is tried.
"""

import json
import sys
from pathlib import Path
from typing import Any

STRANGER = 97  # the exit status when a module came out of HOME


class Notes:
    """A plugin of pytest: one line a report, flushed, so that a process that dies leaves them."""

    def __init__(self, path: str) -> None:
        self.file = Path(path).open("a")  # noqa: SIM115  closed by the process's end

    def note(self, **facts: Any) -> None:
        """Write one line."""
        self.file.write(json.dumps(facts) + "\n")
        self.file.flush()

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


def main(notes: str, home: str, *arguments: str) -> int:
    """pytest's exit status, or STRANGER."""
    import pytest

    sys.path[:] = [place for place in sys.path if Path(place).resolve() != Path(__file__).resolve().parent]
    plugin = Notes(notes)
    status = int(pytest.main(list(arguments), plugins=[plugin]))
    if foreign := strangers(Path(home).resolve()):
        plugin.note(node="", outcome="stranger", said=", ".join(foreign[:3]), seconds=0.0)
        return STRANGER
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
