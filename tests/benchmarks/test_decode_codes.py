"""The texts of decode.cu that a benchmark compares: each exchange still has its place in the source."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

decode_sources: Any = importlib.import_module("decode_sources")  # a script beside its neighbours


def test_every_text_is_made_of_the_source_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All differ; a source that has changed is refused by the place that is gone."""
    texts = [decode_sources.source(variant) for variant in decode_sources.VARIANTS]
    assert len(set(texts)) == len(texts) and texts[0] == decode_sources.SOURCE.read_text()
    changed = tmp_path / "decode.cu"
    changed.write_text(texts[0].replace("float k_scale[2]", "float k_scales[2]"))
    monkeypatch.setattr(decode_sources, "SOURCE", changed)
    with pytest.raises(ValueError, match=r"decode.cu needs this once for 'one page', got 0:   float k_scale"):
        decode_sources.source("one page")
