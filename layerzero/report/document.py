"""The record behind a report: machine, measured times with the choices over them, traffic, health, ledger.

It is JSON by itself, and the page holds the same JSON; `read_report` takes either. Arrays of numbers point
into the lists of texts beside them, since thousands of verdicts share a few hundred sentences.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from layerzero._util.files import decode_json, read_given
from layerzero.spec.errors import ReportRefusedError
from layerzero.spec.reasons import Reason

FORMAT: Final = 1
KIND: Final = "layerzero report"
# The page's element with the record; its text is JSON without a "<".
OPENING: Final = '<script id="report" type="application/json">'
CLOSING: Final = "</script>"


class ReportTable(msgspec.Struct, frozen=True):
    """A table of plain text: a title, the column names, the rows."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class TimedKernel(msgspec.Struct, frozen=True, array_like=True):
    """What one kernel took on a call: its place among the map's kernels, median and spread in microseconds.

    `transform_us` is what the changes cost that it needs on that call.
    """

    kernel: int
    us: float
    spread_us: float
    transform_us: float = 0.0


class StoredVerdict(msgspec.Struct, frozen=True, array_like=True):
    """A kernel's verdict: expected microseconds, None where it refuses, and its sentences among the texts."""

    kernel: int
    expected_us: float | None
    texts: tuple[int, ...]


class MeasuredCall(msgspec.Struct, frozen=True):
    """A call that was measured: who took how long, who would be taken, why, and what everybody says to it.

    `chosen` is -1 where no kernel takes the call. `regret` is the chosen kernel's time over the least of
    those that take the call, transforms included; None where the chosen one was not timed.
    """

    op: str
    call: str
    launch: str
    times: tuple[TimedKernel, ...]
    chosen: int
    why: int
    regret: float | None
    verdicts: tuple[StoredVerdict, ...]
    elsewhere: int = -1


class CallMap(msgspec.Struct, frozen=True):
    """Measured calls of one source: this machine's own, or a shipped table."""

    source: str
    machine: str
    is_own: bool
    kernels: tuple[str, ...]
    texts: tuple[str, ...]
    calls: tuple[MeasuredCall, ...]


class OpTraffic(msgspec.Struct, frozen=True):
    """Batches of one op or device: calls in each (size, how many), milliseconds queued, why launched then."""

    source: str
    name: str
    batches: int
    calls: int
    sizes: tuple[tuple[str, int], ...] = ()
    mean_wait_ms: float | None = None
    p95_wait_ms: float | None = None
    max_wait_ms: float | None = None
    whys: tuple[tuple[str, int], ...] = ()


class TimelineRow(msgspec.Struct, frozen=True):
    """One row of a timeline: (begin us, duration us, the place of its name, the place of its note)."""

    name: str
    slices: tuple[tuple[float, float, int, int], ...]


class TimelineWindow(msgspec.Struct, frozen=True):
    """Some milliseconds of a recorded timeline, around its largest batch."""

    source: str
    begin_us: float
    end_us: float
    left_out: int
    texts: tuple[str, ...]
    rows: tuple[TimelineRow, ...]


class RankFacts(msgspec.Struct, frozen=True):
    """What one rank is and has, by name."""

    name: str
    facts: dict[str, str]


class LedgerRow(msgspec.Struct, frozen=True):
    """One requirement and how far it is."""

    section: str
    id: str
    what: str
    proof: str
    state: str
    note: str


class ReportDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a report shows; `facts` are what two machines are compared by."""

    kind: str = KIND
    format: int = FORMAT
    written_at: str
    version: str
    title: str
    facts: dict[str, str] = {}
    machine: tuple[ReportTable, ...] = ()
    missing: tuple[tuple[str, str, str], ...] = ()
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    maps: tuple[CallMap, ...] = ()
    traffic: tuple[OpTraffic, ...] = ()
    health: tuple[tuple[str, str, str], ...] = ()
    timeline: TimelineWindow | None = None
    drift: dict[str, Any] | None = None
    ranks: tuple[RankFacts, ...] = ()
    ledger: tuple[LedgerRow, ...] = ()


def read_report(path: str | os.PathLike[str]) -> ReportDocument:
    """The record of a report, out of its page or its JSON.

    Raises: ReportRefusedError: it is no report (REPORT_FORMAT), of another format, or cut off
        (REPORT_DAMAGED). OSError: it cannot be read.
    """
    data = read_given(path)
    text, name, refused = data.lstrip(), Path(path).name, partial(ReportRefusedError.because, path)
    if text.startswith(b"<"):
        _, opening, rest = data.partition(OPENING.encode())
        text, closing, _ = rest.partition(CLOSING.encode())
        if not opening:
            raise refused(Reason.REPORT_FORMAT, name, "a page that lz report wrote", "another page")
        if not closing:
            raise refused(Reason.REPORT_DAMAGED, name, "a whole page", f"{len(data)} bytes of one")
    try:
        head = decode_json(text, _Head)
    except msgspec.ValidationError as error:
        raise refused(Reason.REPORT_FORMAT, name, "the record of a report", str(error)) from error
    except msgspec.MsgspecError as error:
        raise refused(Reason.REPORT_DAMAGED, name, "whole JSON", str(error)) from error
    if head.kind != KIND or head.format != FORMAT:
        needs = f"{KIND!r} of format {FORMAT}"
        raise refused(Reason.REPORT_FORMAT, name, needs, f"{head.kind!r} of format {head.format}")
    try:
        return _checked(decode_json(text, ReportDocument))
    except (msgspec.MsgspecError, ValueError) as error:
        raise refused(Reason.REPORT_DAMAGED, name, "a record that decodes", str(error)) from error


class _Head(msgspec.Struct):
    kind: str
    format: int


def _checked(document: ReportDocument) -> ReportDocument:
    """The document. Raises: ValueError: one of its numbers points at nothing."""
    for each in document.maps:
        kernels, texts = len(each.kernels), len(each.texts)
        for call in each.calls:
            points = [*(timed.kernel for timed in call.times), *(verdict.kernel for verdict in call.verdicts)]
            places = [call.why, *(place for verdict in call.verdicts for place in verdict.texts)]
            if not all(0 <= place < kernels for place in points) or not -1 <= call.chosen < kernels:
                raise ValueError(f"{call.op} {call.call}: a kernel that is not listed")
            if not all(0 <= place < texts for place in places) or not -1 <= call.elsewhere < texts:
                raise ValueError(f"{call.op} {call.call}: a sentence that is not listed")
    return document


class StringTable:
    """Texts, each once, and the place of each."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def place(self, text: str) -> int:
        """Where a text is; it is added where it is new."""
        return self._places.setdefault(text, len(self._places))

    def __iter__(self) -> Any:
        return iter(self._places)
