"""The three root folders install as one package, and importing it stays cheap and portable."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from layerzero._util.requirements import TORCH_MIN
from tests import children
from tests.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = {"layerzero": "layerzero", "layerzero.actors": "actors", "layerzero.scheduler": "scheduler"}

# What `import layerzero` must never load by itself: vendors, Ray, and the libraries of the command line.
FOREIGN = (
    *(
        "diffusers",
        "flash_attn",
        "flash_attn_interface",
        "flashinfer",
        "kernels",
        "liger_kernel",
        "safetensors",
    ),
    *("sentence_transformers", "tokenizers", "transformers", "xformers", "zentorch"),
    *("click", "fastapi", "prometheus_client", "ray", "rich", "starlette", "uvicorn"),
)


def run(code: str, *, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter that sees this checkout and nothing of this process."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def forked(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process that has imported torch, and nothing of ours."""
    return children.run(code, folder=folder, variables=os.environ | {"CUDA_VISIBLE_DEVICES": ""})


def packages_on_disk() -> set[str]:
    """Every folder with an `__init__.py` below the three roots, under its import name."""
    found = set()
    for name, folder in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            inside = init.parent.relative_to(ROOT / folder).parts
            if name != "layerzero" or not inside or inside[0] not in ("actors", "scheduler"):
                found.add(".".join((name, *inside)))
    return found


def test_every_data_file_beside_the_code_is_named_as_package_data() -> None:
    """A table, a page or a source of C++ that no pattern names would be missing from the wheel."""
    patterns = PROJECT["tool"]["setuptools"]["package-data"]
    named = {
        file
        for package, globs in patterns.items()
        for glob in globs
        for file in (ROOT / package.replace(".", "/")).glob(glob)
    }
    beside = [path for folder in FOLDERS.values() for path in (ROOT / folder).rglob("*") if path.is_file()]
    forgotten = {path for path in beside if path.suffix not in (".py", ".pyc", ".so")} - named
    assert sorted(forgotten) == []


def test_package_list_equals_the_disk() -> None:
    """A package that pyproject.toml forgets would be missing from the wheel."""
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == packages_on_disk()


def test_every_module_lies_in_a_package() -> None:
    """A folder of modules without `__init__.py` would import here and be missing from the wheel."""
    orphans = [
        str(module.relative_to(ROOT))
        for folder in FOLDERS.values()
        for module in (ROOT / folder).rglob("*.py")
        if not (module.parent / "__init__.py").exists()
    ]
    assert orphans == []


@pytest.mark.parametrize("name", ["actors", "scheduler"])
def test_links_are_relative_and_point_at_the_real_folder(name: str) -> None:
    """An absolute link would work on one machine only."""
    link = ROOT / "layerzero" / name
    if not link.is_symlink() and link.is_file():
        pytest.skip("this checkout was made without symbolic links (git config core.symlinks false)")
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name


@pytest.mark.parametrize("name", ["actors", "scheduler"])
def test_bare_import_refuses(name: str) -> None:
    """Imported under its folder name, a class would exist twice."""
    result = run(f"import {name}")
    assert result.returncode == 1
    assert f"import layerzero.{name}, not the top-level folder `{name}`" in result.stderr


@pytest.mark.parametrize("name", ["actors", "scheduler"])
def test_guarded_folders_import_under_their_full_name(name: str, tmp_path: Path) -> None:
    """The guard stops the wrong name only."""
    result = forked(f"import layerzero.{name} as m; print(m.__name__)", tmp_path)
    assert result.stdout.strip() == f"layerzero.{name}", result.stderr


def test_base_dependencies_do_not_pin_torch() -> None:
    """The exact torch belongs to constraints.txt, so that users keep theirs."""
    (torch,) = [d for d in PROJECT["project"]["dependencies"] if d.startswith("torch")]
    assert torch == f"torch>={TORCH_MIN}"
    assert "torch==" in (ROOT / "constraints.txt").read_text()


def test_constraints_keep_zentorch_on_torchs_minor() -> None:
    """A zentorch built for another minor of torch does not load."""
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    )
    assert pins["zentorch"].split(".")[:2] == pins["torch"].split(".")[:2]


def test_the_version_stands_in_one_place() -> None:
    """What is built has the version that the package says."""
    assert "version" not in PROJECT["project"] and "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "layerzero._util.version.VERSION"}


def test_build_needs_no_torch() -> None:
    """An isolated build must not download gigabytes."""
    assert PROJECT["build-system"]["requires"] == ["setuptools>=77"]


def test_import_loads_nothing_foreign(tmp_path: Path) -> None:
    """`import layerzero` loads no vendor, no Ray, no terminal library, and no numpy that torch did not."""
    result = forked(
        "import json, sys, torch\n"
        "before = set(sys.modules)\n"
        "import layerzero\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in set(sys.modules) - before})))",
        tmp_path,
    )
    assert result.returncode == 0, result.stderr
    loaded = json.loads(result.stdout)
    assert "layerzero" in loaded
    assert [name for name in loaded if name in (*FOREIGN, "numpy")] == []


EVERY_MODULE = """
import importlib, json, pkgutil, sys
import torch
import layerzero

def load(path, prefix):  # pkgutil.walk_packages would import the packages that are left out, too
    for module in pkgutil.iter_modules(path, prefix):
        if module.name.split(".")[1] not in ("__main__", "cli", "report", "integrations"):
            loaded = importlib.import_module(module.name)
            if module.ispkg:
                load(loaded.__path__, module.name + ".")

load(layerzero.__path__, "layerzero.")
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def test_no_module_loads_a_vendor_by_being_imported(tmp_path: Path) -> None:
    """A backend's file can be read where its vendor is missing or slow: the import waits for a first use."""
    result = forked(EVERY_MODULE, tmp_path)
    assert result.returncode == 0, result.stderr
    assert [name for name in json.loads(result.stdout) if name in FOREIGN] == []


def test_import_starts_no_thread_and_touches_no_device(tmp_path: Path) -> None:
    """Importing is a declaration: threads and CUDA contexts begin with the first use."""
    result = forked(
        "import threading, torch\n"
        "import layerzero\n"
        "print(threading.active_count(), torch.cuda.is_initialized())",
        tmp_path,
    )
    assert result.stdout.split() == ["1", "False"], result.stderr


PORTABLE = """
import importlib.abc, os, sys
import torch                        # torch brings its own Unix parts; only ours are hidden below

HIDDEN = {"fcntl", "resource", "termios", "pwd", "grp"}

class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in HIDDEN:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Hide())
for name in ("register_at_fork", "fork", "sched_getaffinity", "getuid"):
    if hasattr(os, name):
        delattr(os, name)

import layerzero, pkgutil, importlib
# Each is imported where its library is, which brings its own Unix parts or is not here.
LIBRARIES = "diffusers", "sglang", "sglang_attention", "transformers", "vllm"
OF_LIBRARIES = {f"layerzero.integrations.{name}" for name in LIBRARIES}
missing = [n for n in HIDDEN if n in sys.modules]
for module in pkgutil.walk_packages(layerzero.__path__, "layerzero."):
    if not module.name.endswith("__main__") and module.name not in OF_LIBRARIES:
        importlib.import_module(module.name)
print("portable", missing)
"""


def test_imports_without_the_unix_parts() -> None:
    """Every module imports without `fcntl`, `resource`, `termios`, `pwd`, `grp` and `os.register_at_fork`."""
    result = run(PORTABLE)
    assert result.stdout.strip() == "portable []", result.stderr


def test_hiding_the_unix_parts_is_noticed() -> None:
    """Negative control: under the same hook, importing one of the hidden modules fails."""
    result = run(PORTABLE.replace("import layerzero, pkgutil", "import fcntl, pkgutil"))
    assert result.returncode == 1
    assert "No module named 'fcntl'" in result.stderr
