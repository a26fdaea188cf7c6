"""Build LayerZero and install it in every way a user may: wheel, sdist, editable, straight from the git tree.

    python -m scripts.check_packaging               all four ways
    python -m scripts.check_packaging --out dist    wheel and sdist, which stay in dist/ once both have passed

The wheel carries the compiled modules, the sdist is installed as Python alone; both answer calls on a machine
without a compiler, and the wheel by what it carries.
Each install goes into an environment of its own, so nothing of the checkout is visible by accident. The wheel
and the git tree find only torch and torch's dependencies there: the other base dependencies come from the
registry, and so does what builds the git tree. The sdist and the editable install find all base dependencies
and setuptools there, and pip may ask no registry: what this environment holds has to do.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from layerzero.native import building

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
)

PROBE = """
import importlib, importlib.metadata, runpy, sys
import layerzero, layerzero.actors, layerzero.scheduler
for name in ("actors", "scheduler", "tests", "scripts"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        continue
    sys.exit(f"the install leaks a top-level {name}")
foreign = [n for n in ("ray", "rich", "zentorch", "transformers", "flashinfer") if n in sys.modules]
if foreign:
    sys.exit(f"import layerzero loaded {foreign}")
print(importlib.metadata.version("layerzero-runtime"), layerzero.__file__, layerzero.actors.__file__)
sys.argv = [sys.argv[1], "--help"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


SMOKE = """
import asyncio, pathlib, sys
import torch
import layerzero as lz
from layerzero.backends.native import load_module
from layerzero.spec.errors import BackendNotAvailableError
from layerzero.native import FAST_PATH, KERNEL_NOTES, building

carries = sys.argv[1] == "compiled"
x, weight = torch.randn(2, 8), torch.randn(8, 8)
wanted = torch.nn.functional.linear(x, weight)

async def callers():
    return await asyncio.gather(*(lz.linear(row, weight) for row in x.split(1)))

with lz.start():
    for _ in range(2):
        torch.testing.assert_close(torch.cat(asyncio.run(callers())), wanted)
        torch.testing.assert_close(lz.sync.linear(x, weight), wanted)
modules = [FAST_PATH.try_load(), KERNEL_NOTES.try_load()]
for name in ("layerzero_native", "layerzero_products", "layerzero_rows"):
    try:
        modules.append(load_module(name))
    except BackendNotAvailableError as error:
        assert "no-such-compiler" in str(error), error
        modules.append(None)
places = {None if module is None else str(pathlib.Path(module.__file__).parent) for module in modules}
if places != ({str(building.SHIPPED)} if carries else {None}):
    sys.exit(f"the compiled modules come from {places}")
"""


MISUSE = """
from layerzero.actors import __name__ as name
from layerzero.spec.errors import LayerZeroError

number: int = LayerZeroError(name)
"""


def say(command: list[str], cwd: Path, **variables: str) -> str:
    """Run a command, return what it printed, and stop the whole check with all of it if it fails."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**{key: value for key, value in os.environ.items() if key != "PYTHONPATH"}, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}\nexit {done.returncode}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class Install:
    """A way to install: what pip gets, and whether pip has to do with what this environment holds."""

    kind: str
    arguments: tuple[str, ...]
    offline: bool


def below(*names: str, seen: set[str] | None = None) -> set[str]:
    """Return the distributions that these need here, themselves included."""
    seen = set() if seen is None else seen
    for name in names:
        if name.lower() not in seen:
            seen.add(name.lower())
            below(*wanted_by(name), seen=seen)
    return seen


def wanted_by(name: str) -> list[str]:
    """Return what a distribution needs here without any extra."""
    requirements = [Requirement(line) for line in metadata.requires(name) or ()]
    return [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]


def linked(folder: Path, names: set[str]) -> Path:
    """Make `folder` out of links to these distributions, their metadata included."""
    folder.mkdir()
    for name in names:
        distribution = metadata.distribution(name)
        for top in {
            file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")
        }:
            target, link = Path(str(distribution.locate_file(top))), folder / top
            if target.exists() and not link.exists():
                link.symlink_to(target)
    return folder


def environment(folder: Path, shared: Path) -> Path:
    """Make an empty environment that sees `shared`, and return its interpreter."""
    say([sys.executable, "-m", "venv", "--without-pip", str(folder)], folder.parent)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "shared.pth").write_text(f"{shared}\n")
    return folder / "bin" / "python"


def modules(root: Path) -> set[str]:
    """Return the files that an install has to hold, under the names they have there."""
    found = {"layerzero/py.typed"}
    for folder, package in (
        ("layerzero", "layerzero"),
        ("actors", "layerzero/actors"),
        ("scheduler", "layerzero/scheduler"),
    ):
        for path in (root / folder).rglob("*.py"):  # stays out of the links
            found.add(f"{package}/{path.relative_to(root / folder).as_posix()}")
    return found


def compiled() -> set[str]:
    """Return what a wheel built here has to carry compiled."""
    names = [name for source in building.SOURCES.values() for name in source.variants()]
    return {f"layerzero/native/built/{name}" for name in (*names, building.STAMP)}


def build(tree: Path, out: Path) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it; check what both hold; return (wheel, sdist)."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)]
    say(command, tree, LZ_BUILD="native")
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    held = {n for n in zipfile.ZipFile(wheel).namelist() if not n.endswith("/")}
    tops = {name.partition("/")[0] for name in held if ".dist-info/" not in name}
    if tops != {"layerzero"}:
        sys.exit(f"the wheel installs {sorted(tops)}, it may install only layerzero")
    lost = (modules(tree) | compiled()) - held
    if lost:
        sys.exit(f"the wheel lacks {sorted(lost)}")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    for needed in (
        "setup.py",
        "actors/__init__.py",
        "scheduler/__init__.py",
        "layerzero/native/hot.cpp",
        "layerzero/native/queue.h",
        "layerzero/py.typed",
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "docs/guide/policy.md",
        "examples/serve.py",
    ):
        if needed not in packed:
            sys.exit(f"the sdist lacks {needed}")
    return wheel, sdist


def types_reach_users(python: Path, work: Path) -> None:
    """Check that a type checker sees the installed types: a planted misuse is the only error."""
    (user := work / "user.py").write_text(MISUSE)
    # torch's own types say nothing about ours, and reading them is most of the work.
    (settings := work / "mypy.ini").write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(settings)]
    command += ["--python-executable", str(python), str(user)]
    done = subprocess.run(command, cwd=work, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if "Incompatible types in assignment" not in done.stdout or "Found 1 error in 1 file" not in done.stdout:
        sys.exit(f"mypy does not see the installed package's types:\n{done.stdout}{done.stderr}")


def install(way: Install, work: Path, tree: Path, shared: Path) -> str:
    """Install one way into an environment of its own, check what it holds, and return a line that says so."""
    begin = time.perf_counter()
    python = environment(work / f"env-{way.kind.replace(' ', '-')}", shared)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    limits = ["--no-index", "--no-build-isolation"] if way.offline else []
    constraints = ["-c", str(ROOT / "constraints.txt")]
    say(
        [*pip, "install", "--quiet", "--no-compile", *limits, *constraints, *way.arguments],
        work,
        LZ_BUILD="pure",
    )
    say([*pip, "check"], work)
    command = python.parent / "lz"
    version, *found = say([str(python), "-c", PROBE, str(command)], work).splitlines()[0].split()
    home = tree if way.kind == "editable" else python.parent.parent
    if not all(Path(f).is_relative_to(home) for f in found):
        sys.exit(f"{way.kind}: imported {found} from outside {home}")
    if way.kind in ("wheel", "sdist"):
        expected = "compiled" if way.kind == "wheel" else "python"
        bare = {"CXX": "no-such-compiler", "XDG_CACHE_HOME": str(python.parents[1] / "cache")}
        say([str(python), "-c", SMOKE, expected], work, **bare)
    if way.kind == "wheel":
        say([str(command), "--help"], work)
        types_reach_users(python, work)
    return f"{way.kind:<9} layerzero-runtime {version}  {time.perf_counter() - begin:.1f} s"


def main(arguments: list[str] | None = None) -> int:
    """Install in every way, two at a time, and print what each install imports."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="where wheel and sdist are put; only these two are checked")
    out: Path | None = parser.parse_args(arguments).out
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        tree = work / "checkout"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=SKIPPED)
        torch = linked(work / "torch", below("torch"))
        everything = linked(work / "everything", below(*wanted_by("layerzero-runtime"), "setuptools"))
        begin = time.perf_counter()
        wheel, sdist = build(tree, work / "dist")
        print(f"built {wheel.name} and {sdist.name} in {time.perf_counter() - begin:.1f} s")
        ways: tuple[Install, ...] = (  # the longest first
            Install("git tree", (f"git+file://{ROOT}",), offline=False),
            Install("wheel", (str(wheel),), offline=False),
            Install("sdist", (str(sdist),), offline=True),
            Install("editable", ("--editable", str(tree)), offline=True),
        )
        if out is not None:
            ways = tuple(way for way in ways if way.kind in ("wheel", "sdist"))
        with ThreadPoolExecutor(2) as pool:
            for line in pool.map(lambda w: install(w, work, tree, everything if w.offline else torch), ways):
                print(line)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            for path in (wheel, sdist):
                shutil.copy2(path, out)
                print(f"{out / path.name}  {path.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
