"""Stored baselines: what is written is read, and every other file is refused with its code."""

from __future__ import annotations

import hashlib
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pytest

from layerzero.gates.baseline import (
    Baseline,
    BaselineCall,
    BaselineRefusedError,
    RatioStats,
    read_baseline,
    write_baseline,
)
from layerzero.gates.paired_rounds import PacedCall
from layerzero.perfdb.table_file import content_hash
from tests.perfdb.rows import HERE

TODAY = date(2026, 11, 23)
RATIO = RatioStats(2.0, lowest=1.9, highest=2.1, scatter=1.1)
PACED = (BaselineCall(PacedCall("rms_norm x=1x8:float32"), RATIO, control=RATIO, load=0.5),)


def stored(path: Path, **more: Any) -> str:
    """A baseline of this machine, written today; its SHA-256."""
    given: dict[str, Any] = {"date": "2026-11-23", "version": "0.1.0", "environment": HERE,
                             "content": content_hash(PACED), "paced": PACED}  # fmt: skip
    return write_baseline(path, Baseline(**{**given, **more}))


def code(path: Path, sha256: str | None = None, today: date = TODAY) -> str:
    """The code with which a file is refused here."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if sha256 is None else sha256
    with pytest.raises(BaselineRefusedError) as caught:
        read_baseline(path, HERE, sha256=digest, max_age_days=30, today=today)
    assert str(path) in str(caught.value) and caught.value.problems[0].needs
    return str(caught.value.problems[0].reason.value)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Calls, ratios and environment come back, and may be written again."""
    path = tmp_path / "base.json"
    stored(path)
    digest = stored(path)
    assert read_baseline(path, HERE, sha256=digest, max_age_days=1, today=TODAY).paced == PACED


def test_a_baseline_that_may_not_be_compared_with_is_refused(tmp_path: Path) -> None:
    """Old, of another format, of another machine or torch, altered, cut, or named by nobody."""
    path = tmp_path / "base.json"
    digest = stored(path)
    assert code(path, today=date(2026, 12, 24)) == "BASELINE_STALE"
    assert code(path, sha256="") == code(path, sha256="0" * 64) == "BASELINE_UNTRUSTED"
    for version in (1, 3):
        stored(path, format=version)
        assert code(path) == "BASELINE_FORMAT"
    for change in ({"device": "another CPU"}, {"torch": "1.0"}, {"isa": ("sse",)}):
        stored(path, environment=msgspec.structs.replace(HERE, **change))
        assert code(path) == "BASELINE_ENVIRONMENT_DIFFERS"
    nought = msgspec.structs.replace(RATIO, lowest=0.0)
    without = (msgspec.structs.replace(PACED[0], control=nought),)
    for damage in (
        {"content": "0"}, {"date": "today"}, {"date": "2026-11-26"},
        {"paced": without, "content": content_hash(without)},
    ):  # fmt: skip
        stored(path, **damage)
        assert code(path) == "BASELINE_DAMAGED"
    stored(path)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"median":2.0', b'"median":9.0'))
    assert whole != path.read_bytes() and code(path, sha256=digest) == "BASELINE_DAMAGED"
    for length in (0, 1, len(whole) // 2, len(whole) - 3):
        path.write_bytes(whole[:length])
        assert code(path) == "BASELINE_DAMAGED"


def test_an_untrusted_baseline_says_its_own_hash(tmp_path: Path) -> None:
    """Whoever has looked at the file can name it: the refusal has the line for the release file."""
    path = tmp_path / "base.json"
    digest = stored(path)
    with pytest.raises(BaselineRefusedError) as caught:
        read_baseline(path, HERE, sha256="", max_age_days=30, today=TODAY)
    assert caught.value.problems[0].counterfactual == f"sha256: {digest}"


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    """No file is no baseline."""
    with pytest.raises(BaselineRefusedError, match="BASELINE_DAMAGED"):
        read_baseline(tmp_path / "none.json", HERE, sha256="", max_age_days=1, today=TODAY)
