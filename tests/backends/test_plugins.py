"""A backend of another distribution, really installed: listed, never imported until it is allowed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import layerzero as lz
import layerzero.sync
from layerzero.backends import installed_plugins
from layerzero.cli import main
from layerzero.selection.record import Selection

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "acme-kernels"
version = "1.5"

[project.entry-points."layerzero.backends"]
acme = "acme_kernels:kernels"
broken = "acme_kernels.broken:kernels"
quits = "acme_kernels.quits:kernels"
late = "acme_kernels:late"
nothing = "acme_kernels:nothing"
clash = "acme_kernels:clash"
odd = "acme_kernels:odd"
liar = "acme_kernels:liar"

[project.entry-points."layerzero.ops"]
shadow = "acme_kernels:shadow"
sneaky = "acme_kernels:sneaky"
noops = "acme_kernels:nothing"

[tool.setuptools]
packages = ["acme_kernels"]
"""
MODULE = """
import dataclasses
from layerzero.backends.reference import reference_kernel
from layerzero.spec.kernel import (Kernel)
from layerzero.ops import table

OWN = dataclasses.replace(reference_kernel(table.get("rms_norm")), id="acme.rms_norm", backend="acme")

def double(x, weight, eps):
    return table.get("rms_norm").reference(x, weight, eps) * 2

def kernels():
    return [dataclasses.replace(OWN, load=lambda: double)]

nothing = "no kernels"
clash = [dataclasses.replace(OWN, id="reference.rms_norm", backend="reference")]
shadow = lambda: [dataclasses.replace(table.get("rms_norm"))]
sneaky = [dataclasses.replace(table.get("rms_norm"), name="../etc")]

def lie(x, weight, eps):
    wide = table.get("rms_norm").reference(x.float(), weight, eps)
    return wide if x.dtype != __import__("torch").float32 else wide + 1

liar = [dataclasses.replace(OWN, id="liar.rms_norm", backend="liar", load=lambda: lie)]
late = [dataclasses.replace(OWN, id="late.rms_norm", backend="late", load=lambda: __import__("sys").exit(3))]
odd = [dataclasses.replace(OWN, id="acme.fourier", op="fourier")]
"""
X = torch.randn(4, 16)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip installed the distribution into."""
    source, target = tmp_path_factory.mktemp("acme"), tmp_path_factory.mktemp("site")
    (source / "acme_kernels").mkdir()
    (source / "pyproject.toml").write_text(PROJECT)
    (source / "acme_kernels" / "__init__.py").write_text(MODULE)
    (source / "acme_kernels" / "broken.py").write_text("raise OSError('libacme.so: cannot open')\n")
    (source / "acme_kernels" / "quits.py").write_text("import sys\nsys.exit('no license')\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
    ]
    done = subprocess.run(
        [*command, "--target", str(target), str(source)], capture_output=True, text=True, timeout=300
    )
    if "No module named pip" in done.stderr or "setuptools.build_meta" in done.stderr:
        pytest.skip(f"nothing to install with: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(autouse=True)
def present(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The distribution is installed for this test, and nothing of it is imported."""
    monkeypatch.syspath_prepend(installed)
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_kernels"]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_kernels"]:
        del sys.modules[name]


def test_an_installed_backend_is_listed_and_neither_run_nor_imported() -> None:
    """`lz kernels` and `lz doctor` name it and the setting that lets it run; no kernel of it is known."""
    assert [str(plugin) for plugin in installed_plugins() if plugin.name == "acme"] == [
        "acme (acme-kernels 1.5)"
    ]
    said = CliRunner().invoke(main, ["kernels", "--op", "rms_norm"])
    assert (
        "installed, not allowed: acme (acme-kernels 1.5); LAYERZERO_PLUGINS=acme lets it run" in said.output
    )
    report = str(lz.doctor(imports=False))
    assert "acme" in report and "not allowed" in report
    with lz.start(lz.Settings(warm="off"), scoped=True) as runtime:
        assert not [k for k in runtime.kernel_ids() if k.startswith("acme")]
        with pytest.raises(lz.PolicyValidationError, match="acme") as raised:
            lz.lock("rms_norm", "acme.rms_norm")
        assert "acme (acme-kernels 1.5)" in raised.value.__notes__[0]
    assert "acme_kernels" not in sys.modules


def chosen() -> Selection:
    """What this thread ran last."""
    selection = lz.last_selection()
    assert selection is not None
    return selection


def by_program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> lz.Settings:
    return lz.Settings(plugins=["acme"], warm="off")  # type: ignore[arg-type]  # a list is taken, too


def by_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> lz.Settings:
    monkeypatch.setenv("LAYERZERO_PLUGINS", " acme ,")
    return lz.Settings.load(warm="off")


def by_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> lz.Settings:
    (folder / "lz.yaml").write_text("plugins: [acme]\nwarm: 'off'\n")
    return lz.Settings.load(folder / "lz.yaml")


@pytest.mark.parametrize("allowed", [by_program, by_environment, by_file])
def test_an_allowed_backend_runs_beside_the_others(
    allowed: Callable[..., lz.Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known to locks, preferences, `backend=` and listings; its numbers are its own."""
    settings = allowed(tmp_path, monkeypatch)
    assert settings.plugins == ("acme",)
    wanted = 2 * torch.nn.functional.rms_norm(X, (16,), eps=1e-6)
    with lz.start(settings, scoped=True):
        assert "acme.rms_norm" in {info.id for info in lz.list_kernels("rms_norm", backend="acme")}
        lz.lock("rms_norm", "acme.rms_norm")
        assert lz.which("rms_norm", X) == "acme.rms_norm"
        torch.testing.assert_close(layerzero.sync.rms_norm(X), wanted)
        lz.unlock()
        torch.testing.assert_close(layerzero.sync.rms_norm(X, backend="acme"), wanted)
        with lz.prefer("acme"):
            assert lz.which("rms_norm", X) == "acme.rms_norm"
        assert lz.which("layer_norm", X) != "acme.rms_norm"


def test_policy_files_and_the_command_know_an_allowed_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under strict, where an unknown name is refused; `lz policy check` and `lz kernels` agree."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("rules:\n  - lock: acme\n    op: rms_norm\n")
    refused = CliRunner().invoke(main, ["policy", "check", "--strict", str(policy)])
    assert refused.exit_code == 1 and "acme" in refused.output
    monkeypatch.setenv("LAYERZERO_PLUGINS", "acme")
    assert CliRunner().invoke(main, ["policy", "check", "--strict", str(policy)]).exit_code == 0
    with lz.start(lz.Settings.load(strict=True, policy=str(policy), warm="off"), scoped=True):
        assert lz.which("rms_norm", X) == "acme.rms_norm"
    listed = CliRunner().invoke(main, ["kernels", "--backend", "acme", "--json"])
    assert [found["id"] for found in json.loads(listed.output)] == ["acme.rms_norm"]
    assert "not allowed: acme" not in CliRunner().invoke(main, ["kernels", "--backend", "acme"]).output
    exported = CliRunner().invoke(main, ["capabilities", "export", str(tmp_path / "all.json")])
    assert exported.exit_code == 0 and "acme.rms_norm" in (tmp_path / "all.json").read_text()


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        (
            "nobody",
            lz.BackendNotAvailableError,
            "'nobody' is allowed but no installed distribution announces",
        ),
        ("broken", lz.BackendNotAvailableError, r"'broken' does not load: OSError: libacme\.so"),
        ("quits", lz.BackendNotAvailableError, "'quits' does not load: SystemExit: no license"),
        ("nothing", lz.ConfigurationError, "'nothing' needs to give a sequence of Kernel, got str"),
        ("clash", lz.ConfigurationError, r"two kernels are named 'reference\.rms_norm'"),
        (
            "shadow",
            lz.ConfigurationError,
            r"'shadow' needs a name of its own, got 'rms_norm' of this library",
        ),
        ("sneaky", lz.ConfigurationError, r"'sneaky' needs a name in lower snake case, got '\.\./etc'"),
        ("noops", lz.ConfigurationError, "'noops' needs to give a sequence of Op, got str"),
        ("odd", lz.ConfigurationError, r"'acme\.fourier' needs an op among .*, got 'fourier'"),
    ],
)
def test_a_backend_that_is_allowed_and_cannot_be_had_is_an_error(
    name: str, error: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the runtime opens, in its log with a count, and at the command: by the plugin's name."""
    for _ in range(2):
        with pytest.raises(error, match=said), lz.start(lz.Settings(plugins=(name,)), scoped=True):
            pass
    told = [text for each in caplog.records if "plugin.refused" in (text := each.getMessage())]
    assert len(told) == 2 and all(f"plugins={name!r}" in text for text in told), told
    first, second = (int(text.split("refused=")[1].split()[0]) for text in told)
    assert second == first + 1
    listed = CliRunner().invoke(main, ["kernels"], env={"LAYERZERO_PLUGINS": name})
    assert listed.exit_code == 2 and name in listed.output


def test_a_kernel_whose_loading_ends_the_process_ends_itself_alone() -> None:
    """`sys.exit()` in what it imports is a failed import: it is blocked, and the next kernel answers."""
    with lz.start(lz.Settings(plugins=("late",), warm="off"), scoped=True) as runtime, lz.prefer("late"):
        runtime.device().warm(["late.rms_norm"])
        layerzero.sync.rms_norm(X)
        assert chosen().kernel != "late.rms_norm"
        blocked = runtime.device().registry.blocked()["late.rms_norm"]
        assert blocked.reason == "BACKEND_IMPORT_FAILED" and "SystemExit: 3" in blocked.got


def test_a_plugin_that_lies_about_what_it_takes_is_found_out() -> None:
    """Another dtype than it claims: the next kernel answers. Wrong numbers: quarantined where checked."""
    half = X.to(torch.bfloat16)
    with lz.start(lz.Settings(plugins=("liar",), check_rate=1.0, warm="off"), scoped=True) as runtime:
        with lz.prefer("liar"):
            assert layerzero.sync.rms_norm(half).dtype is torch.bfloat16
            assert "needs dtype bfloat16, the kernel returned float32" in chosen().why
            layerzero.sync.rms_norm(X)
            assert chosen().kernel == "liar.rms_norm"
        runtime.device().close()  # the guard's thread has ended its work
        assert runtime.device().health.state("liar.rms_norm") == "quarantined"


@pytest.mark.parametrize(
    "text", ["a=acme", "acme@/usr/bin/python", "A=acme@/python", "a=acme@python", "a=@/p"]
)
def test_a_plugin_of_another_environment_is_named_wholly(text: str) -> None:
    """With the name that it has here, its own, and its interpreter."""
    with pytest.raises(lz.ConfigurationError, match="plugins needs NAME or ALIAS=NAME@/PATH/OF/PYTHON, got"):
        lz.Runtime(lz.Settings(plugins=(text,)))


@pytest.mark.parametrize("wrong", ["acme", 3, ("",), (" acme",), (1,), None])
def test_names_of_backends_are_a_list(wrong: Any) -> None:
    """A bare word would be five names of a letter each."""
    with pytest.raises(
        lz.ConfigurationError, match="plugins needs a list of names of installed entry points, got"
    ):
        lz.Settings(plugins=wrong)
