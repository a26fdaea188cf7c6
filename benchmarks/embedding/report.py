"""What a session of the embedding service measured, and the numbers it adds up to.

`summary` is plain data: the tables and the JSON file are two renderings of it.
"""

from __future__ import annotations

import platform
import runpy
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from embedding.load import Run, percentile

ONE, TOGETHER, ARRIVALS = "one by one", "together", "arrivals"
BY_HAND, ARRIVALS_BY_HAND = "hand-batched", "arrivals by hand"
WAYS = {
    ONE: "(a) one after another",
    TOGETHER: "(b) all together",
    ARRIVALS: "(c) Poisson arrivals",
    BY_HAND: "(d) by hand, one job",
    ARRIVALS_BY_HAND: "(d) by hand, arrivals of (c)",
}
MIN_COSINE = 0.99999
ANSWERS = 5
PACKAGES = ("layerzero-runtime", "torch", "tokenizers", "sentence-transformers", "transformers", "zentorch")


@dataclass(slots=True)
class Session:
    """Everything one session measured; `runs` holds one Run a round for each way.

    `reference` are the embeddings of sentence-transformers (B, C); `rates` the offered arrivals a second of
    each round; `answer` the embedding of `query` in host memory.
    """

    texts: list[str]
    query: str
    reference: Tensor
    device: str
    quick: bool
    load: float
    hand_batch: int = 16
    rates: list[float] = field(default_factory=list)
    runs: dict[str, list[Run]] = field(default_factory=dict)
    answer: Tensor | None = None
    kernels: list[dict[str, Any]] = field(default_factory=list)
    explanation: str = ""


def summary(session: Session) -> dict[str, Any]:
    """Return every number of the session as JSON-ready values."""
    return {
        "sentences": len(session.texts),
        "rounds": len(session.rates),
        "quick": session.quick,
        "device": session.device,
        "hand_batch": session.hand_batch,
        "load": session.load,
        "offered_per_s": median(session.rates),
        "parity": parity(session),
        "query": nearest(session),
        "ways": {name: way(session.runs[name]) for name in WAYS},
        "ratios": ratios(session),
        "targets": targets(session),
        "batches": {name: histogram(session.runs[name]) for name in (TOGETHER, ARRIVALS)},
        "kernels": session.kernels,
        "explain": session.explanation,
        "environment": environment(session.device),
    }


def parity(session: Session) -> dict[str, Any]:
    """Compare every embedding of every way and round with sentence-transformers."""
    expected = session.reference.double()
    ways: dict[str, dict[str, float]] = {}
    for name in WAYS:
        runs = session.runs[name]
        got = [run.embeddings.double() for run in runs]
        ways[name] = {
            "max_abs_diff": max(float((rows - expected).abs().max()) for rows in got),
            "min_cosine": min(float(F.cosine_similarity(rows, expected).min()) for rows in got),
        }
    lowest = min(numbers["min_cosine"] for numbers in ways.values())
    return {
        # A NaN compares false: a result that is not a number is wrong.
        "right": all(numbers["min_cosine"] >= MIN_COSINE for numbers in ways.values()),
        "needs_cosine": MIN_COSINE,
        "min_cosine": lowest,
        "max_abs_diff": max(numbers["max_abs_diff"] for numbers in ways.values()),
        "ways": ways,
    }


def nearest(session: Session) -> dict[str, Any]:
    """Return the texts nearest to the query, best first, by the embeddings that LayerZero computed."""
    if session.answer is None:
        raise ValueError("answer needs to be the embedding of the query, got None")
    scores = [float(score) for score in session.runs[TOGETHER][-1].embeddings @ session.answer]
    best = sorted(zip(scores, session.texts, strict=True), reverse=True)[:ANSWERS]
    return {"text": session.query, "answers": [{"cosine": score, "text": text} for score, text in best]}


def way(runs: list[Run]) -> dict[str, float]:
    """Return medians over the rounds of one way; the loop's lag is taken over all rounds together."""
    late = [late for run in runs for late in run.lag_s]
    return {
        "throughput_per_s": median(run.throughput for run in runs),
        "p50_ms": median(run.latency_ms(0.50) for run in runs),
        "p99_ms": median(run.latency_ms(0.99) for run in runs),
        "lag_p99_ms": percentile(late, 0.99) * 1e3,
        "lag_max_ms": max(late, default=0.0) * 1e3,
        "mean_batch": mean_batch(runs),
    }


def mean_batch(runs: list[Run]) -> float:
    """Return how many requests one launch served on average."""
    sizes = sum((Counter(run.batches) for run in runs), Counter[int]())
    return sum(size * count for size, count in sizes.items()) / max(1, sizes.total())


def histogram(runs: list[Run]) -> list[dict[str, int]]:
    """Return how many launches served 1, 2 to 3, 4 to 7 ... requests."""
    sizes = sum((Counter(run.batches) for run in runs), Counter[int]())
    bars: Counter[int] = Counter()
    for size, count in sizes.items():
        bars[size.bit_length() - 1] += count
    return [
        {"from": 1 << power, "to": (2 << power) - 1, "launches": count}
        for power, count in sorted(bars.items())
    ]


def ratios(session: Session) -> dict[str, list[float]]:
    """Return LayerZero's throughput over the hand-batched one's, round by round."""
    runs = session.runs

    def over(above: str, below: str) -> list[float]:
        pairs = zip(runs[above], runs[below], strict=True)
        return [up.throughput / down.throughput for up, down in pairs]

    return {"(b)/(d)": over(TOGETHER, BY_HAND), "(c)/(d)": over(ARRIVALS, ARRIVALS_BY_HAND)}


def targets(session: Session) -> list[dict[str, Any]]:
    """Return what the service promises beside what was measured; a ratio is the median over the rounds."""
    runs = session.runs
    over = ratios(session)
    late = [late for name in (ONE, TOGETHER, ARRIVALS) for run in runs[name] for late in run.lag_s]
    rows: list[tuple[str, str, float, Callable[[float], bool]]] = [
        ("(b) over (d), throughput", ">= 1.00", median(over["(b)/(d)"]), lambda got: got >= 1.0),
        (
            "(c) over (d) at the same load",
            ">= 0.90",
            median(over["(c)/(d)"]),
            lambda got: got >= 0.9,
        ),
        ("(c) mean batch, requests", ">= 16", mean_batch(runs[ARRIVALS]), lambda got: got >= 16),
        ("loop lag p99, ms, (a) to (c)", "< 10", percentile(late, 0.99) * 1e3, lambda got: got < 10),
    ]
    return [{"what": what, "needs": needs, "got": got, "met": met(got)} for what, needs, got, met in rows]


def environment(device: str) -> dict[str, Any]:
    """Return what a reader needs to judge the numbers: processor, threads, versions, date."""
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **provenance(),
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "versions": {name: installed(name) for name in PACKAGES},
    }
    if device.startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = torch.version.cuda
    return facts


def provenance() -> dict[str, Any]:
    """Return script, commit and machine as the benchmarks' records have them; nothing outside a checkout."""
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "provenance.py"
    if not path.exists():
        return {}
    namespace: dict[str, Any] = runpy.run_path(str(path))["provenance"]()
    return namespace


def installed(package: str) -> str | None:
    """Return the installed version of a distribution; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu_model() -> str:
    """Return the processor's name as the system tells it."""
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
