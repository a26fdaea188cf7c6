"""Which requirements are met on which class of hardware, by which committed record, and which have no record.

    python -m scripts.exit_criteria                        # the classes, and what has no record
    python -m scripts.exit_criteria --out build/exit.json  # every requirement as well, as JSON tables
    python -m scripts.exit_criteria --need "AMD CPU" "one H200"

The ledger says whether a requirement is met, a record where: one that its row names, one that a benchmark of
its row wrote, a test of its row that the record ran, its mutations where all were killed. Exit status 1 where
a record holds a failure of a requirement, or a class after `--need` has no record.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.ledger import Row, rows
from scripts.support_matrix import RESULTS, ROOT, recorded
from scripts.tables import table

NAMED = re.compile(r"benchmarks/results/(\w+)\.json")
UNNAMED = "CPU not named"  # mutations tried before their record kept each one's machine
CLASSES = ("AMD CPU", "Intel CPU", "one H100", "one H200", "two GPUs", "four GPUs")
COUNTS = {2: "two GPUs", 4: "four GPUs", 8: "eight GPUs"}
FAILED, NONE = "failed", "-"


@dataclass(slots=True)
class Evidence:
    """A committed record: its class of hardware, what wrote it, and what it says of tests and of rows."""

    name: str
    hardware: str
    script: str = ""
    tests: dict[str, str] = field(default_factory=dict)
    killed: frozenset[str] = frozenset()

    def of(self, row: Row, text: str) -> str:
        """`ran` or `failed` where this record is one of the row, else nothing; `text` is the row's line."""
        outcomes = [
            outcome
            for test, outcome in self.tests.items()
            if any(test == proof or test.startswith((f"{proof}::", f"{proof}[")) for proof in row.tests)
        ]
        if FAILED in outcomes:
            return FAILED
        benchmarks = [path for path in row.where + row.paths if path.startswith("benchmarks/")]
        wrote = any(_runs(self.script, path) for path in benchmarks)
        named = self.name in NAMED.findall(text)
        return "ran" if named or wrote or "passed" in outcomes or self.killed & {*row.ids} else ""


def _runs(script: str, path: str) -> bool:
    return path in script or path.removesuffix(".py").replace("/", ".") in script.split()


def hardware_class(environment: dict[str, Any], gpus: int | None = None) -> str:
    """The class of the machine that an environment describes; empty where it names none."""
    machine = str(environment.get("machine") or "")
    card = (
        machine if " x NVIDIA" in machine else str(environment.get("gpu") or environment.get("device") or "")
    )
    if "NVIDIA" in card:
        count = int(machine.partition(" x ")[0]) if " x NVIDIA" in machine else gpus or 1
        model = re.search(r"NVIDIA (?:\w+ )*?([A-Z]+\d+)", card)
        return COUNTS.get(count, f"{count} GPUs") if count > 1 else f"one {model[1] if model else card}"
    words = f"{machine} {environment.get('cpu') or card}".lower()
    return "AMD CPU" if "amd" in words else "Intel CPU" if "intel" in words else ""


def evidence(folder: Path = RESULTS) -> list[Evidence]:
    """Every record of a folder that names its machine, each of its parts by itself."""
    found = []
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text())
        for part in (document, *document.values()):
            environment = part.get("environment") if isinstance(part, dict) else None
            if not isinstance(environment, dict):
                continue
            hardware = hardware_class(environment, document.get("gpus"))
            killed = _killed(part) if hardware else {}
            found += [Evidence(path.stem, place, killed=names) for place, names in killed.items()]
            if hardware and not killed:
                script = str(environment.get("script") or "")
                found.append(Evidence(path.stem, hardware, script, dict(_tests(part))))
    return found


def _tests(part: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Tests and their outcomes, as `scripts.record_tests` and `scripts.support_matrix --run` write them."""
    if isinstance(part.get("tests"), list):
        yield from ((test["test"], test["outcome"]) for test in part["tests"])
    if "proof" in part:
        outcomes = set(part["kernels"].values())
        yield part["proof"], FAILED if FAILED in outcomes else "passed" if "passed" in outcomes else "skipped"


def _killed(part: dict[str, Any]) -> dict[str, frozenset[str]]:
    """By class of hardware, the rows of which every mutation that was tried there was killed."""
    verdicts: dict[str, dict[str, set[bool]]] = defaultdict(lambda: defaultdict(set))
    for row in part["rows"] if isinstance(part.get("rows"), list) else ():
        if isinstance(row, dict) and "mutation" in row:
            of_class = verdicts[hardware_class(row) or UNNAMED]
            for name in row["rows"]:
                of_class[name].add(row["verdict"] == "killed")
    return {
        place: frozenset(name for name, all_killed in of_class.items() if all_killed == {True})
        for place, of_class in verdicts.items()
    }


def report(ledger: Path = ROOT / "REQUIREMENTS.md", folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Tables: `classes` with counts, `criteria` with each requirement by class, `unrecorded` by state."""
    records, lines = evidence(folder), ledger.read_text().splitlines()
    classes = [*CLASSES, *sorted({each.hardware for each in records} - {*CLASSES})]
    counts = {name: defaultdict[str, int](int) for name in classes}
    criteria, unrecorded = [], defaultdict(list)
    for row in rows(ledger):
        state = "met" if row.done else row.state.split(":")[0].split(" ")[0]
        cells: dict[str, str] = {}
        for name in classes:
            said = {each.name: each.of(row, lines[row.line - 1]) for each in records if each.hardware == name}
            by = sorted(record for record, what in said.items() if what)
            word = FAILED if FAILED in said.values() else state
            cells[name] = f"{word}: {', '.join(by)}" if by else NONE
            counts[name][word if by else "no record"] += 1
        criteria.append([row.name, state, *cells.values()])
        if set(cells.values()) == {NONE}:
            unrecorded[state].append(row.name)
    states = ("met", "partly", "open", "observed", FAILED, "no record")
    kernels = _kernels(folder)
    return {
        "classes": {
            "columns": ["hardware", "records", *states, "kernels passed"],
            "rows": [
                [name, len({each.name for each in records if each.hardware == name}),
                 *(counts[name][state] for state in states), len(kernels[name])]
                for name in classes
            ],
        },
        "criteria": {"columns": ["requirement", "ledger", *classes], "rows": criteria},
        "unrecorded": {
            "columns": ["ledger", "requirements without a record"],
            "rows": [[state, ", ".join(names)] for state, names in unrecorded.items()],
        },
    }  # fmt: skip


def _kernels(folder: Path) -> dict[str, set[str]]:
    """Kernels that passed, by class, as the support matrix reads them."""
    found: dict[str, set[str]] = defaultdict(set)
    for each in recorded(folder):
        passed = {kernel for kernel, outcome in each["kernels"].items() if outcome == "passed"}
        found[hardware_class(each["environment"])] |= passed
    return found


def main(argv: list[str] | None = None) -> int:
    """Print the report; 1 where a record fails a requirement, or a class that is needed has no record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--need", nargs="*", default=[], metavar="CLASS")
    given = parser.parse_args(argv)
    tables = report()
    for name in ("classes", "unrecorded"):
        print(f"{table(tables[name]['columns'], tables[name]['rows'])}")
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps({"tables": tables}, indent=1) + "\n")
    recorded_classes = {row[0] for row in tables["classes"]["rows"] if row[1]}
    wrong = [f"{name}: no record" for name in given.need if name not in recorded_classes]
    for row in tables["criteria"]["rows"]:
        wrong += [f"{row[0]}: {cell}" for cell in row[2:] if cell.startswith(FAILED)]
    for line in wrong:
        print(line, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
