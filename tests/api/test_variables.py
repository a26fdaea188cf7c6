"""Variables that name what is not there: said when the runtime opens, not when something would need it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import layerzero as lz
from layerzero.runtime.open_device import ISOLATES_NOTHING
from layerzero.spec.gpu_map import gpu_map


@pytest.fixture(autouse=True)
def maps_read_anew() -> Iterator[None]:
    """No test sees another's GPU map."""
    gpu_map.cache_clear()
    yield
    gpu_map.cache_clear()


def opened() -> None:
    """A runtime as a program's first call opens it."""
    with lz.start(lz.Settings.load(warm="off"), scoped=True) as runtime:
        runtime.device("cpu")


@pytest.mark.parametrize("variable", ["LAYERZERO_PERFDB", "LAYERZERO_GPU_MAP"])
def test_a_folder_in_a_files_place_is_an_error_at_once(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable, what it needs and what it got."""
    monkeypatch.setenv(variable, str(tmp_path))
    with pytest.raises(lz.ConfigurationError, match=rf"{variable}.* needs .*, got .*{tmp_path}"):
        opened()


def test_a_gpu_map_that_is_not_there_is_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a process that never asks what a GPU is."""
    monkeypatch.setenv("LAYERZERO_GPU_MAP", str(tmp_path / "none.toml"))
    with pytest.raises(lz.ConfigurationError, match=r"LAYERZERO_GPU_MAP needs a TOML file .*none\.toml"):
        opened()


def test_a_folder_is_no_file_of_measurements_later_either(tmp_path: Path) -> None:
    """What refuses it changes nothing."""
    with lz.start(lz.Settings(warm="off", perfdb=None), scoped=True) as runtime:
        runtime.device("cpu")
        with pytest.raises(lz.ConfigurationError, match=r"perfdb \(LAYERZERO_PERFDB\) needs a file"):
            runtime.reconfigure(runtime.settings.replace(perfdb=str(tmp_path), max_batch_size=3))
        assert (runtime.settings.perfdb, runtime.settings.max_batch_size) == (
            None,
            lz.Settings().max_batch_size,
        )


@pytest.mark.parametrize(("pattern", "said"), [("torhc", 1), ("torch", 0), ("torch.rms*", 0)])
def test_a_backend_that_is_none_is_isolated_with_a_warning(
    pattern: str, said: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that names the variable, what it needs and what it got."""
    monkeypatch.setenv("LAYERZERO_ISOLATE", f"{pattern}=process")
    opened()
    warned = [record.getMessage() for record in caplog.records if ISOLATES_NOTHING in record.getMessage()]
    assert len(warned) == said
    for each in warned:
        assert "LAYERZERO_ISOLATE" in each and "needs='globs over" in each and "got='torhc=process'" in each
