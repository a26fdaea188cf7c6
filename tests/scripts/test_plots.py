"""Pictures of the documents are drawn from records, the same bytes each time."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts import plots


def test_every_picture_is_the_committed_one() -> None:
    """Drawing again changes nothing, and no committed picture is of nothing."""
    committed = {path.name: path.read_text() for path in plots.IMAGES.glob("*.svg")}
    assert committed == plots.drawn()


def test_every_picture_is_well_formed_in_both_themes() -> None:
    """A browser reads each file, and each has a name for those who do not see it."""
    files = plots.drawn()
    for name, content in files.items():
        root = ElementTree.fromstring(content)
        assert root.get("aria-label")
        assert name.replace("-light", "-dark") in files


def test_a_bar_is_as_long_as_its_number(tmp_path: Path) -> None:
    """Twice the value is twice the length; a value that is missing has no bar."""
    rows = [["a", 10.0], ["b", 20.0], ["c", None]]
    record = {"tables": {"t": {"columns": ["who", "speed"], "rows": rows}}}
    (file := tmp_path / "r.json").write_text(json.dumps(record))
    spec = plots.Chart("speeds", str(file), "t", ("who",), ("speed",))
    root = ElementTree.fromstring(plots.chart(spec, plots.THEMES[0]))
    blue = plots.THEMES[0].series[0]
    widths = [float(bar.get("width", 0)) for bar in root.iter() if bar.get("fill") == blue]
    assert len(widths) == 2
    assert widths[1] == pytest.approx(2 * widths[0], rel=1e-3)
