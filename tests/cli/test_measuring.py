"""`lz tune`, `lz bench`, `lz solve` and `lz perfdb` from the shell, on this machine's own kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from layerzero.cli import main
from layerzero.measure.calls import Workload
from layerzero.measure.shapes import norm
from layerzero.perfdb.shipped import read_table

NORM = ("rms_norm", "x=16x64", "weight=64")


@pytest.fixture(autouse=True)
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The commands of one test share a file of measurements that nobody else has."""
    path = tmp_path / "perf.sqlite"
    monkeypatch.setenv("LAYERZERO_PERFDB", str(path))
    return path


def lz(*words: object, code: int = 0) -> Result:
    """Run the command; its exit status is part of what is tested."""
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result


def trace(tmp_path: Path, *sizes: int) -> Path:
    path = tmp_path / "trace.json"
    Workload(tuple(norm("rms_norm", n, 64, "float32") for n in sizes)).save(path)
    return path


def test_tuning_is_what_explain_shows_next(tmp_path: Path) -> None:
    """`lz tune` keeps times, `lz perfdb` counts them, `lz explain` shows them, `lz solve` decides by them."""
    assert "measured" not in lz("explain", *NORM).output
    told = lz("tune", "--trace", trace(tmp_path, 16, 48), "--quick", "--repeat", 2).output
    assert "two tunes: " in told and "taken: " in told and "2 calls on cpu" in told
    assert "measured" in lz("explain", *NORM).output
    ops = json.loads(lz("perfdb", "--json").output)["ops"]
    assert ops["rms_norm"]["rows"] == ops["rms_norm"]["here"] > 0
    assert "1 ranges in" in lz("solve", tmp_path / "table.json").output
    assert json.loads((tmp_path / "table.json").read_text())["buckets"][0]["op"] == "rms_norm"


def test_tuning_writes_a_table_to_ship(tmp_path: Path) -> None:
    """`--table` gives provenance with the rows, and JSON tells the same."""
    path = tmp_path / "cpu_here.json"
    said = json.loads(lz("tune", "--trace", trace(tmp_path, 4), "--quick", "--table", path, "--json").output)
    table = read_table(path)
    assert said["calls"] == 1 and 0 < len(table.rows) <= said["rows"]
    assert table.provenance.environment.torch == torch.__version__


def test_bench_names_a_winner(own_file: Path) -> None:
    """Median, tail, variance, winner and speed-up over the default; `--save` keeps the times."""
    said = json.loads(lz("bench", *NORM, "--samples", 5, "--json").output)
    names = [c["name"] for c in said["contenders"]]
    assert said["baseline"] == "torch.rms_norm.native" and "reference.rms_norm" in names
    assert said["contenders"][0]["times_winner"] == 1.0 and said["speedup"] >= 1.0
    assert all(c["p99_us"] >= c["p95_us"] >= c["median_us"] > 0 for c in said["contenders"])
    assert not own_file.exists()
    assert "wins: " in lz("bench", *NORM, "--samples", 5, "--save").output and own_file.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("tune", "--op", "rmsnorm"), "rms_norm"),
        (("tune", "--trace", "nowhere.json"), "does not exist"),
        (("bench", "rms_norm", "x=4x8", "--baseline", "nobody.rms_norm"), "baseline needs one of"),
        (("bench", "rms_norm", "y=4x8"), "no argument 'y'"),
        (("bench", "rms_norm", "--shape", "0x8"), "needs something to compute, got the empty rms_norm x=0x8"),
        (("solve", "table.json"), "tune first"),
    ],
)
def test_wrong_words_are_explained(words: tuple[str, ...], said: str) -> None:
    """Status 2, and a sentence that names what is wrong."""
    assert said in lz(*words, code=2).output


def test_a_file_of_another_kind_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    """`lz solve`, `lz tune --table` and `lz capabilities export` replace nothing but files of their own."""
    path = tmp_path / "mine.txt"
    path.write_text("a poem")
    for words in (
        ("solve", path),
        ("tune", "--trace", trace(tmp_path, 4), "--quick", "--table", path),
        ("capabilities", "export", path),
    ):
        assert "not replaced: it is no file with" in lz(*words, code=1).output
    assert path.read_text() == "a poem"
    assert json.loads(lz("perfdb", "--json").output)["ops"] == {}
