"""Build LayerZero and install it in every way a user may: wheel, sdist, editable, straight from the git tree.

Each install goes into an environment of its own that shares only torch and torch's dependencies with this
one, so the base dependencies are really resolved and nothing of the checkout is visible by accident.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
)

PROBE = """
import importlib, importlib.metadata, sys
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
"""


MISUSE = """
from layerzero.actors import __name__ as name
from layerzero.errors import LayerZeroError

number: int = LayerZeroError(name)
"""


def say(command: list[str], cwd: Path) -> str:
    """Run a command, return what it printed, and stop the whole check with all of it if it fails."""
    done = subprocess.run(
        command,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}\nexit {done.returncode}")
    return done.stdout


def torch_and_below(name: str = "torch", seen: set[str] | None = None) -> set[str]:
    """Return the distributions that torch needs here, itself included."""
    seen = set() if seen is None else seen
    if name.lower() in seen:
        return seen
    seen.add(name.lower())
    for line in metadata.requires(name) or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            torch_and_below(requirement.name, seen)
    return seen


def link_torch(folder: Path) -> None:
    """Fill `folder` with links to torch and what it needs, their metadata included."""
    for name in torch_and_below():
        distribution = metadata.distribution(name)
        for top in {
            file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")
        }:
            target, link = Path(str(distribution.locate_file(top))), folder / top
            if target.exists() and not link.exists():
                link.symlink_to(target)


def environment(folder: Path, shared: Path) -> Path:
    """Make an empty environment that sees `shared`, and return its interpreter."""
    say([sys.executable, "-m", "venv", "--without-pip", str(folder)], folder.parent)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "shared_torch.pth").write_text(f"{shared}\n")
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


def build(tree: Path, out: Path) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it; check what both hold; return (wheel, sdist)."""
    say([sys.executable, "-m", "build", "--outdir", str(out), str(tree)], tree)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    held = {n for n in zipfile.ZipFile(wheel).namelist() if not n.endswith("/")}
    tops = {name.partition("/")[0] for name in held if ".dist-info/" not in name}
    if tops != {"layerzero"}:
        sys.exit(f"the wheel installs {sorted(tops)}, it may install only layerzero")
    lost = modules(tree) - held
    if lost:
        sys.exit(f"the wheel lacks {sorted(lost)}")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    for needed in (
        "actors/__init__.py",
        "scheduler/__init__.py",
        "layerzero/py.typed",
        "LICENSE",
        "README.md",
    ):
        if needed not in packed:
            sys.exit(f"the sdist lacks {needed}")
    return wheel, sdist


def sources(tree: Path, wheel: Path, sdist: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each way to install with the arguments that pip gets."""
    yield "wheel", [str(wheel)]
    yield "sdist", [str(sdist)]
    yield "editable", ["--editable", str(tree)]
    yield "git tree", [f"git+file://{ROOT}"]


def types_reach_users(python: Path, work: Path) -> None:
    """Check that a type checker sees the installed types: a planted misuse is the only error."""
    (user := work / "user.py").write_text(MISUSE)
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), str(user)]
    done = subprocess.run(command, cwd=work, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if "Incompatible types in assignment" not in done.stdout or "Found 1 error in 1 file" not in done.stdout:
        sys.exit(f"mypy does not see the installed package's types:\n{done.stdout}{done.stderr}")


def main() -> int:
    """Install in every way and print what each install imports."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        tree = work / "checkout"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=SKIPPED)
        (shared := work / "shared").mkdir()
        link_torch(shared)
        begin = time.perf_counter()
        wheel, sdist = build(tree, work / "dist")
        print(f"built {wheel.name} and {sdist.name} in {time.perf_counter() - begin:.1f} s")
        for kind, arguments in sources(tree, wheel, sdist):
            begin = time.perf_counter()
            python = environment(work / f"env-{kind.replace(' ', '-')}", shared)
            pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
            say([*pip, "install", "--quiet", "-c", str(ROOT / "constraints.txt"), *arguments], work)
            say([*pip, "check"], work)
            found = say([str(python), "-c", PROBE], work).split()
            home = tree if kind == "editable" else python.parent.parent
            if not all(Path(f).is_relative_to(home) for f in found[1:]):
                sys.exit(f"{kind}: imported {found[1:]} from outside {home}")
            say([str(python.parent / "lz"), "--help"], work)
            if kind == "wheel":
                types_reach_users(python, work)
            print(f"{kind:<9} layerzero-runtime {found[0]}  {time.perf_counter() - begin:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
