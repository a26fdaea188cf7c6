"""Puts the compiled modules into a wheel; everything else stands in pyproject.toml.

LZ_BUILD=pure leaves them out, LZ_BUILD=native insists on them. Otherwise they are in where they can be: the
build has torch, a C++ compiler and a Python with its lock. Without them they are compiled at their first use.
LZ_BUILD_CACHE=FOLDER takes what that folder (a user's ~/.cache/layerzero/native) holds of the same sources.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
WANTED = os.environ.get("LZ_BUILD", "auto")
PLACE = Path("layerzero", "native", "built")


def building() -> ModuleType:
    """`layerzero.native.building`, without the package around it."""
    path = ROOT / "layerzero" / "native" / "building.py"
    spec = importlib.util.spec_from_file_location("building", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["building"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def compiled(into: Path) -> bool:
    """Whether the modules were compiled into a folder; what they lack is printed.

    Raises: SystemExit: they could not be, and LZ_BUILD insists.
    """
    if WANTED == "pure":
        print("layerzero: a wheel without compiled modules, as LZ_BUILD=pure says")
        return False
    recipe = building()
    why = recipe.unbuildable()
    try:
        if not why:
            recipe.build(into)
    except RuntimeError as error:
        why = str(error)
    if why and WANTED == "native":
        sys.exit(f"layerzero: LZ_BUILD=native, and the compiled modules cannot be built: {why}")
    if why:
        print(f"layerzero: a wheel without compiled modules, which are compiled at their first use: {why}")
    return not why


class Modules(Distribution):
    """Has modules for one platform while a wheel is built that carries them."""

    built: Path | None = None

    def has_ext_modules(self) -> bool:
        """Whether what is built is for this platform alone."""
        return self.built is not None


class Wheel(bdist_wheel):
    """Compiles before it decides what kind of wheel this is."""

    def finalize_options(self) -> None:
        """Name the wheel by what it carries."""
        if WANTED not in ("auto", "native", "pure"):
            sys.exit(f"layerzero: LZ_BUILD needs auto, native or pure, got {WANTED!r}")
        # An editable install is a checkout, and asks for another command.
        if self.distribution.built is None and "bdist_wheel" in getattr(self.distribution, "commands", ()):
            folder = Path(tempfile.mkdtemp(prefix="layerzero-build-"))
            if compiled(folder):
                self.distribution.built = folder
            else:
                shutil.rmtree(folder)
        super().finalize_options()

    def run(self) -> None:
        """Build the wheel, and leave nothing behind."""
        try:
            super().run()
        finally:
            if self.distribution.built is not None:
                shutil.rmtree(self.distribution.built)


class Copy(build_ext):
    """Puts what was compiled beside the Python files."""

    def run(self) -> None:
        """Copy it."""
        if self.distribution.built is not None:
            shutil.copytree(self.distribution.built, Path(self.build_lib, PLACE), dirs_exist_ok=True)

    def get_outputs(self) -> list[str]:
        """The files that `run` writes."""
        built = self.distribution.built
        return (
            [] if built is None else [str(Path(self.build_lib, PLACE, path.name)) for path in built.iterdir()]
        )


setup(distclass=Modules, cmdclass={"bdist_wheel": Wheel, "build_ext": Copy})
