"""The support matrix: which kernel ran where, from the registry and the records of what ran.

    python -m scripts.support_matrix --run    # run the kernels' tests on this machine and record them
    python -m scripts.support_matrix          # make the table from the registry and all records
    python -m scripts.tables                  # write it into the documents

A record is a file in `benchmarks/results` from any machine: `ran_*.json` of this script, with the environment
and every kernel's outcome against the float64 reference (`left_out` says what is not in it, and why), or
`accuracy*.json` of `benchmarks.accuracy`. Where records disagree, a failure wins. The table has three values:
measured here (a record says so), executed by its owner's tests (the owner's suite runs this function there),
descriptor only.
"""

import argparse
import json
import os
import platform
import re
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MATRIX = RESULTS / "support.json"
PLATFORMS = ("cpu", "cuda", "rocm")
# The test that compares a kernel with the float64 reference, on each platform.
PROOFS: dict[str, str] = dict.fromkeys(
    ("cpu", "cuda"), "tests/backends/test_contract.py::test_results_are_within_tolerance"
)
# Whose own suite executes the functions that a backend calls, by backend and platform.
OWNERS = {
    ("torch", "cpu"): "pytorch, test/test_transformers.py and test/test_nn.py",
    ("torch", "cuda"): "pytorch, test/test_transformers.py and test/test_nn.py",
    ("torch", "rocm"): "pytorch, test/test_transformers.py and test/test_nn.py",
    ("zentorch", "cpu"): "ZenDNN PyTorch plug-in, test/unittests",
}
# Whose versions a record names, where they are installed.
LIBRARIES = (
    "torch", "triton", "zentorch", "flashinfer-python", "flash-attn-4", "flash-attn", "vllm", "xformers",
    "liger-kernel", "layerzero-runtime",
)  # fmt: skip
MEASURED, OWNED, DESCRIBED = "measured here", "executed by its owner's tests", "descriptor only"


class Outcomes:
    """A pytest plugin: the outcome of every test whose parameter is a kernel id."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the worst phase of each test."""
        parameter = re.search(r"\[([a-z0-9_.]+)", report.nodeid)
        if parameter is None or (report.when != "call" and report.outcome == "passed"):
            return
        self.found[parameter[1]] = report.outcome


def record(target: str) -> dict[str, Any]:
    """Run a platform's proof and return what ran, with the machine that ran it."""
    import pytest

    plugin = Outcomes()
    os.chdir(ROOT)
    os.environ["LAYERZERO_TEST_DEVICE"] = target
    pytest.main([PROOFS[target], "-q", "-p", "no:cacheprovider"], plugins=[plugin])
    return described(target) | {"kernels": dict(sorted(plugin.found.items()))}


def described(target: str) -> dict[str, Any]:
    """A record without its kernels: the platform, the proof, the machine and its libraries."""
    import torch

    versions = {name: _version(name) for name in LIBRARIES}
    on_card = target == "cuda" and torch.cuda.is_available()
    return {
        "platform": target,
        "proof": PROOFS[target],
        "environment": {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            **provenance(),
            "device": torch.cuda.get_device_name() if on_card else _cpu(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "versions": {name: number for name, number in versions.items() if number},
        },
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    listing = Path("/proc/cpuinfo")
    names = (
        re.findall(r"^model name\s*: (.+)$", listing.read_text(), re.MULTILINE) if listing.exists() else []
    )
    return names[0] if names else platform.processor() or platform.machine()


def recorded(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Return every record of a folder, those of `benchmarks.accuracy` in the shape of this script's own.

    Raises: ValueError: a file is no such record; it is named.
    """
    found = []
    for path in sorted([*folder.glob("ran_*.json"), *folder.glob("accuracy*.json")]):
        try:
            document = json.loads(path.read_text())
            found.append(_of_accuracy(document) if path.name.startswith("accuracy") else document)
            if found[-1]["platform"] not in PLATFORMS:
                raise ValueError(f"platform needs one of {', '.join(PLATFORMS)}")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path.name} is no record: {type(error).__name__}: {error}") from error
    return found


def _of_accuracy(document: dict[str, Any]) -> dict[str, Any]:
    """An accuracy table as a record: a kernel passed where it was called and never disagreed or failed."""
    environment, outcomes = document["environment"], dict[str, str]()
    for row in document["kernels"]:
        wrong = bool(row.get("failed") or row.get("disagreements"))
        if wrong or (row.get("calls") and row["kernel"] not in outcomes):
            outcomes[row["kernel"]] = "failed" if wrong else "passed"
    gpu = environment["gpu"]
    versions = {"torch": environment["torch"], **environment["versions"]}
    return {
        "platform": "cuda" if gpu else "cpu",
        "proof": "benchmarks/accuracy.py",
        "environment": {
            "date": environment["date"],
            "device": gpu or environment["cpu"],
            "versions": {name: number for name, number in versions.items() if number},
        },
        "kernels": outcomes,
    }


def _outcomes(records: list[dict[str, Any]]) -> dict[tuple[str, str], str]:
    """What became of each kernel on each platform, a failure before a pass before a skip."""
    order, made = ("failed", "passed", "skipped"), dict[tuple[str, str], str]()
    for one in records:
        for name, outcome in one["kernels"].items():
            key = (name, one["platform"])
            made[key] = min(outcome, made.get(key, outcome), key=order.index)
    return made


def matrix(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the tables: one row a kernel, and one row a record."""
    from layerzero.backends import load_builtin
    from layerzero.backends.descriptors import FAMILIES

    ran = _outcomes(records)
    rows = [
        [kernel.op, f"`{kernel.id}`", *(_value(kernel, target, ran) for target in PLATFORMS)]
        for kernel in sorted(load_builtin(), key=lambda kernel: (kernel.op, kernel.id))
    ]
    machines = [
        [
            r["platform"],
            r["environment"]["device"],
            ", ".join(f"{name} {number}" for name, number in r["environment"]["versions"].items()),
            r["environment"]["date"][:10],
            sum(outcome == "passed" for outcome in r["kernels"].values()),
            f"`{r['proof']}`",
        ]
        for r in records
    ]
    owners = [[backend, target, where] for (backend, target), where in sorted(OWNERS.items())]
    return {
        "support": {"columns": ["op", "kernel", *PLATFORMS], "rows": rows},
        "machines": {
            "columns": ["platform", "device", "versions", "date", "kernels", "test"],
            "rows": machines,
        },
        "described": {
            "columns": ["hardware", "kernel", "needs", "state", "by"],
            "rows": [
                [family, f"`{kernel.id}`", _needs(kernel), DESCRIBED, kernel.capability.source]
                for family, kernels in FAMILIES.items()
                for kernel in kernels
            ],
        },
        "owners": {"columns": ["backend", "platform", "suite"], "rows": owners},
    }


def _needs(kernel: Any) -> str:
    """What hardware a descriptor is for, in a few words."""
    capability = kernel.capability
    words = [*sorted(capability.archs or ()), *sorted(capability.isa), *sorted(capability.cpu_vendors or ())]
    if capability.sm_min is not None:
        high = capability.sm_max
        words.append(f"sm {capability.sm_min}" + (f" to {high}" if high else " and newer"))
    return ", ".join(words) or ", ".join(sorted(capability.platforms))


def _value(kernel: Any, target: str, ran: dict[tuple[str, str], str]) -> str:
    if target not in kernel.capability.platforms:
        return "-"
    outcome = ran.get((kernel.id, target))
    if outcome == "passed":
        return MEASURED
    if outcome == "failed":
        return "fails here"
    return OWNED if (kernel.backend, target) in OWNERS else DESCRIBED


def main() -> int:
    """Record what runs here where asked, then make the table; 1 where a kernel failed."""
    parser = argparse.ArgumentParser(description="make the support matrix")
    parser.add_argument(
        "--run", nargs="?", const="cpu", choices=sorted(PROOFS), help="run a platform's kernels"
    )
    target = parser.parse_args().run
    RESULTS.mkdir(parents=True, exist_ok=True)
    failed = False
    if target is not None:
        made = record(target)
        failed = not made["kernels"] or "failed" in made["kernels"].values()
        (RESULTS / f"ran_{target}.json").write_text(json.dumps(made, indent=2) + "\n")
    records = recorded()
    MATRIX.write_text(json.dumps({"tables": matrix(records)}, indent=2) + "\n")
    print(f"{MATRIX.relative_to(ROOT)}: {len(records)} records")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
