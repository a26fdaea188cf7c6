"""Reports that tests make up."""

from __future__ import annotations

from typing import Any

import msgspec

from layerzero.report.document import (
    CallMap,
    LedgerRow,
    MeasuredCall,
    OpTraffic,
    RankFacts,
    ReportDocument,
    ReportTable,
    StoredVerdict,
    TimedKernel,
    TimelineRow,
    TimelineWindow,
)

KERNELS = ("a.norm", "b.norm", "c.norm")
TEXTS = ("cheapest", "by measured", "SM_TOO_OLD: sm needs >= 90, got 80", "for other kinds of device: d.norm")


def measured(call: str, *us: float, op: str = "rms_norm", chosen: int = 0, **more: Any) -> MeasuredCall:
    """A call on which kernel after kernel took so long; the last one of three refuses it."""
    verdicts = [StoredVerdict(k, value, (1,)) for k, value in enumerate(us[:2])]
    verdicts += [StoredVerdict(2, None, (2,))] if len(us) > 2 else []
    given: dict[str, Any] = {
        "op": op, "call": call, "launch": "eager", "chosen": chosen, "why": 0, "elsewhere": 3,
        "times": tuple(TimedKernel(k, value, 0.01) for k, value in enumerate(us)),
        "regret": us[chosen] / min(us[:2]), "verdicts": tuple(verdicts),
    }  # fmt: skip
    return MeasuredCall(**{**given, **more})


def call_map(*calls: MeasuredCall, source: str = "this machine's measurements", own: bool = True) -> CallMap:
    """A map of calls over the three kernels."""
    return CallMap(source, "A machine, cpu, 2 threads", own, KERNELS, TEXTS, calls)


def document(**more: Any) -> ReportDocument:
    """A report with something in every part; `more` replaces parts."""
    calls = [measured(f"float32 C=512 N={n}", 1.0 + n / 8, 2.0, 0.5, chosen=int(n > 8)) for n in range(1, 13)]
    given: dict[str, Any] = {
        "written_at": "2026-11-23T12:00:00+00:00",
        "version": "0.1.0",
        "title": "host, cpu, layerzero 0.1.0",
        "facts": {"torch": "2.13.0", "policy": "abc"},
        "machine": (ReportTable("system", ("what", "value"), (("cpu", "A machine"),)),),
        "missing": (("flashinfer", "missing", "pip install 'layerzero-runtime[flashinfer]'"),),
        "notes": ("worth knowing",),
        "maps": (call_map(*calls, measured("float32 N=1", 3.0, 4.0, op="rope")),),
        "traffic": (
            OpTraffic("t.json", "rms_norm", 3, 40, (("8", 1), ("16", 2)), 0.2, 0.3, 0.4, (("turn", 3),)),
        ),
        "health": (("b.norm", "quarantined", "it lied"),),
        "timeline": TimelineWindow(
            "t.json", 0.0, 100.0, 5, ("rms_norm", "callers 8"),
            (TimelineRow("batches of cpu", ((10.0, 20.0, 0, 1),)),),
        ),
        "ranks": (RankFacts("rank0", {"torch": "2.13.0"}), RankFacts("rank1", {"torch": "2.12.0"})),
        "ledger": (
            LedgerRow("Tasks", "T1", "reason codes", "tests/a.py::b", "done", ""),
            LedgerRow("Tasks", "T52", "a joint plan", "-", "open", "waits"),
        ),
    }  # fmt: skip
    return ReportDocument(**{**given, **more})


def replaced(report: ReportDocument, **more: Any) -> ReportDocument:
    """The report with some parts replaced."""
    return msgspec.structs.replace(report, **more)
