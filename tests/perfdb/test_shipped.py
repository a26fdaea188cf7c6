"""Tables that ship: whole or refused, and used only on the hardware they speak of."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from layerzero.perfdb import Environment, implausible_reason
from layerzero.perfdb.shipped import (
    Provenance,
    ShippedTable,
    condense,
    fitting_tables,
    read_table,
    write_table,
)
from layerzero.selection.cost.cost_model import TABLES
from layerzero.spec.errors import CacheCorruptionError
from layerzero.spec.hardware import hypothetical_gpu, probe
from tests.perfdb.rows import HERE, row

PROVENANCE = Provenance(command="a test", date="2026-01-01", version="0", environment=HERE)


def test_a_table_comes_back_as_it_was(tmp_path: Path) -> None:
    """Rows and provenance survive, sorted, one row a line."""
    path = tmp_path / "cpu_here.json"
    table = write_table(path, PROVENANCE, [row("b.rms_norm"), row("a.rms_norm", 5.0)])
    assert read_table(path) == table
    assert [r.kernel for r in table.rows] == ["a.rms_norm", "b.rms_norm"]
    assert sum('"kernel"' in line for line in path.read_text().splitlines()) == 2


def test_tunes_of_one_call_become_one_row() -> None:
    """Two tunes give their geometric mean and a spread that tells of both; launches and sizes stay apart."""
    tunes = [
        row(us=80.0, timestamp=1),
        row(us=125.0, timestamp=2),
        row(us=7.0, launch="graph"),
        row("b.rms_norm", 9.0),
    ]
    [both, graph, other] = condense(tunes)
    assert (both.median_us, both.timestamp, both.samples) == (100.0, 2, 22)
    assert both.variance > 22.0**2 and implausible_reason(both) == ""
    assert (graph, other) == (tunes[2], tunes[3])
    [three] = condense(row(us=us) for us in (10.0, 400.0, 11.0))
    assert three.median_us == pytest.approx(11.0)


@pytest.mark.parametrize("damage", ["number", "field", "format", "cut"])
def test_a_damaged_table_is_refused(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """A changed number, an unknown field, another format, half a file: none is used, and it is said."""
    path = tmp_path / "cpu_here.json"
    write_table(path, PROVENANCE, [row(us=5.0)])
    text = path.read_text()
    path.write_text(
        {
            "number": text.replace("5.0", "0.5"),
            "field": text.replace('"content"', '"surprise": 1, "content"'),
            "format": text.replace('"format": 2', '"format": 3'),
            "cut": text[: len(text) // 2],
        }[damage]
    )
    with pytest.raises(CacheCorruptionError, match="cpu_here"):
        read_table(path)
    assert fitting_tables(probe("cpu"), tmp_path) == []
    assert any("shipped_table.refused" in r.getMessage() for r in caplog.records)


def test_a_table_is_for_its_class_of_hardware() -> None:
    """The same GPU by name, the same kind of CPU by vendor, instructions and about as many threads."""
    here = probe("cpu")
    table = ShippedTable(provenance=PROVENANCE, content="", rows=())
    assert table.fits(here)
    assert table.fits(msgspec.structs.replace(here, torch="9.9", name="another of its kind"))
    assert not table.fits(msgspec.structs.replace(here, vendor="another"))
    assert not table.fits(msgspec.structs.replace(here, isa=frozenset({"sve"})))
    assert not table.fits(msgspec.structs.replace(here, threads=here.threads * 8))
    assert not table.fits(hypothetical_gpu(90))
    card = msgspec.structs.replace(hypothetical_gpu(90), name="NVIDIA H200")
    on_card = msgspec.structs.replace(
        table, provenance=msgspec.structs.replace(PROVENANCE, environment=Environment.of_hardware(card))
    )
    assert on_card.fits(card) and not on_card.fits(msgspec.structs.replace(card, name="NVIDIA H100"))


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_every_shipped_table_is_sound(path: Path) -> None:
    """What comes with the package decodes, matches its hash, is named by its platform, says who made it."""
    table = read_table(path)
    provenance = table.provenance
    assert path.name.startswith(f"{provenance.environment.platform}_")
    assert provenance.command and provenance.date and table.rows
    assert not [why for row in table.rows if (why := implausible_reason(row))]
