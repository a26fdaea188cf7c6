"""Every option of a command reaches what it speaks of: one that is parsed and dropped is a broken promise."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from layerzero.cli import deployment, main, pytest_consistency
from layerzero.spec.hardware import hypothetical_gpu
from layerzero.spec.settings import Settings
from tests.cli.command import Lz

MANIFEST = "calls:\n  - {op: rms_norm, arguments: [x=4x16]}\n"


class Asked(Exception):
    """Ends a command where it has said what it wants."""


class Teller:
    """Stands in for a function: keeps its arguments by name, and ends the command."""

    def __init__(self, function: Any) -> None:
        self.signature = inspect.signature(function)
        kinds = {p.name: p.kind for p in self.signature.parameters.values()}
        self.rest = next((n for n, kind in kinds.items() if kind is inspect.Parameter.VAR_KEYWORD), "")
        self.given: dict[str, Any] = {}

    def __call__(self, *args: Any, **named: Any) -> Any:
        bound = self.signature.bind(*args, **named)
        bound.apply_defaults()
        self.given = {name: value for name, value in bound.arguments.items() if name != self.rest}
        self.given |= bound.arguments.get(self.rest, {})
        raise Asked


def module_of(*words: str) -> Any:
    """The module that a command is written in: its names are what the command calls."""
    command: Any = main
    for word in words:
        command = command.get_command(click.Context(command), word)
    return inspect.getmodule(inspect.unwrap(command.callback))


def told(lz: Lz, monkeypatch: pytest.MonkeyPatch, name: str, *words: str) -> dict[str, Any]:
    """What `name` is called with by the command line `words`."""
    module = module_of(words[0])
    teller = Teller(getattr(module, name))
    with monkeypatch.context() as patch, pytest.raises(Asked):
        patch.setattr(module, name, teller)
        lz(*words)
    return teller.given


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (("--missing",), "missing", True),
        (("--quick",), "quick", True),
        (("--repeat", "2"), "repeat", 2),
        (("--budget-s", "7"), "budget_s", 7.0),
        (("--op", "linear"), "ops", ("linear",)),
    ],
)
def test_tune(
    lz: Lz, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], field: str, value: object
) -> None:
    """`lz tune` measures what it is told, as often and as long as it is told."""
    plain = told(lz, monkeypatch, "tune_blocking", "tune")
    given = told(lz, monkeypatch, "tune_blocking", "tune", *words)
    assert given[field] == value != plain[field]
    assert {n for n in given if given[n] != plain[n]} - {"progress"} == {field}


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (("--graph",), "launch", "graph"),
        (("--baseline", "reference.rms_norm"), "baseline", "reference.rms_norm"),
        (("--samples", "9"), "samples", 9),
        (("--save",), "save", True),
    ],
)
def test_bench(
    lz: Lz, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], field: str, value: object
) -> None:
    """`lz bench` replays a graph where that is asked for, and so on."""
    plain = told(lz, monkeypatch, "bench_call", "bench", "rms_norm", "x=4x16")
    given = told(lz, monkeypatch, "bench_call", "bench", "rms_norm", "x=4x16", *words)
    assert given[field] == value != plain[field]


def test_explain_imagines_the_cuda_it_is_told(lz: Lz, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--sm` and `--cuda` are the imagined card's."""
    given = told(
        lz, monkeypatch, "hypothetical_gpu", "explain", "rms_norm", "x=4x16", "--sm", "80", "--cuda", "11.8"
    )
    assert (given["sm"], given["cuda"]) == (80, "11.8")
    assert hypothetical_gpu(80, cuda="11.8").cuda == "11.8"


def test_consistency_takes_as_many_devices_as_it_is_told(
    lz: Lz, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`--devices` and `--cluster` are the settings' that the comparison opens with."""
    path = tmp_path / "deployment.yaml"
    path.write_text(MANIFEST)
    given = told(
        lz,
        monkeypatch,
        "check",
        "consistency",
        "--deployment",
        str(path),
        "--devices",
        "3",
        "--cluster",
        "a:1",
    )
    settings = given["settings"]
    assert isinstance(settings, Settings)
    assert (settings.cluster_devices, settings.cluster) == (3, "a:1")


def test_the_pytest_plugin_compares_the_cluster_it_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`--lz-cluster` and `--lz-deployment` are what is compared."""
    path = tmp_path / "deployment.yaml"
    path.write_text(MANIFEST)
    options = {"--lz-cluster": "b:2", "--lz-deployment": str(path)}
    config = SimpleNamespace(getoption=options.get)
    session = SimpleNamespace(stash=pytest.Stash())
    teller = Teller(deployment.check)
    monkeypatch.setattr(pytest_consistency, "check", teller)
    item = SimpleNamespace(session=session, config=config, _what="devices")
    with pytest.raises(Asked):
        pytest_consistency._ConsistencyItem.runtest(item)  # type: ignore[arg-type]
    assert (teller.given["settings"].cluster, len(teller.given["manifest"].calls)) == ("b:2", 1)
    fixture: Any = inspect.unwrap(getattr(pytest_consistency.lz_consistency, "__wrapped__", None) or object)
    if callable(fixture) and fixture is not object:
        with pytest.raises(Asked):
            fixture(SimpleNamespace(config=config))
        assert teller.given["settings"].cluster == "b:2"


@pytest.mark.parametrize(
    "words",
    [
        ("doctor", "--timeout", "nan"),
        ("tune", "--budget-s", "nan"),
        ("top", "--interval", "nan"),
        ("warmup", "--timeout", "nan"),
        ("solve", "table.json", "--tune-s", "nan"),
    ],
)
def test_seconds_that_are_no_number_are_a_wrong_command_line(lz: Lz, words: tuple[str, ...]) -> None:
    """No bound holds NaN: it ran without a limit, or ended in a traceback."""
    refused = lz(*words)
    assert refused.exit_code == 2
    assert f"Invalid value for '{words[-2]}': needs a number of seconds, got nan" in refused.output


def test_a_call_that_memory_does_not_hold_is_told_in_one_line(lz: Lz) -> None:
    """What torch says of the bytes, and how the command is used."""
    refused = lz("bench", "rms_norm", "x=99999999x99999999", "--samples", "5")
    assert refused.exit_code == 2 and "Error: " in refused.output and "memory" in refused.output
    assert lz("which", "rms_norm", "--shape", "8x64", "--batch", "65537").exit_code == 2


def test_a_command_works_where_a_variable_names_a_cluster(lz: Lz, monkeypatch: pytest.MonkeyPatch) -> None:
    """`lz which` on a node of a cluster asks about this machine; only `lz consistency` joins one."""
    monkeypatch.setenv("LAYERZERO_CLUSTER", "auto")
    assert lz("which", "rms_norm", "--shape", "8x64").exit_code == 0
