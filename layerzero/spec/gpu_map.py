"""What is known of GPUs by compute capability, as data: `gpus.toml`, and a user's own file before it.

The file that the variable LAYERZERO_GPU_MAP names has the same form; each of its rows goes before ours, so a
GPU that came later, or figures of one's own, need no code.
"""

from __future__ import annotations

import functools
import os
import tomllib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from layerzero._util.files import read_given
from layerzero.spec.errors import ConfigurationError

VARIABLE = "LAYERZERO_GPU_MAP"
FORMAT = 1
_SHIPPED = Path(__file__).with_name("gpus.toml")
_MAX_BYTES = 1 << 20

Sm = Annotated[int, Meta(ge=10, le=999)]
Share = Annotated[float, Meta(gt=0, le=1)]
Above = Annotated[float, Meta(gt=0, le=1e18)]
Text = Annotated[str, Meta(min_length=1, max_length=300)]


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What holds for the compute capabilities (times ten) of a range, both ends included."""

    sm: tuple[Sm, Sm]


class NameRow(_Row, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The name of a generation or of an instruction family."""

    name: Text


class TensorCores(_Row, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The generation of tensor cores, by NVIDIA's own count."""

    generation: Annotated[int, Meta(ge=1)]


class Roof(_Row, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Dense half precision FLOP/s, and bytes/s of a copy."""

    half: Above
    bandwidth: Above


class FamilyEfficiency(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How near the roofs the kernels of a glob come on a family; `launch_us` is the host's part of a call."""

    family: Text
    kernel: Text
    flops: Share
    bandwidth: Share
    launch_us: Annotated[float, Meta(ge=0, le=1e6)]
    source: Text


class PreferredKernels(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The kernels, as globs, that a family runs an op best with."""

    family: Text
    op: Text
    kernels: tuple[Text, ...]
    source: Text


class GpuMap(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One file, or several joined: of rows that fit, the first one holds."""

    version: int
    capabilities: tuple[Sm, ...] = ()
    generation: tuple[NameRow, ...] = ()
    family: tuple[NameRow, ...] = ()
    tensor_cores: tuple[TensorCores, ...] = ()
    roof: tuple[Roof, ...] = ()
    efficiency: tuple[FamilyEfficiency, ...] = ()
    preferred: tuple[PreferredKernels, ...] = ()

    def before(self, other: GpuMap) -> GpuMap:
        """The rows of this one, then those of `other`."""
        rows = {name: (*getattr(self, name), *getattr(other, name)) for name in self.__struct_fields__[1:]}
        return GpuMap(version=FORMAT, **rows)


R = TypeVar("R", bound=_Row)


def row_of(rows: Iterable[R], sm: int | None) -> R | None:
    """The first row that a compute capability (times ten) lies in; None off NVIDIA's GPUs."""
    return next((row for row in rows if sm is not None and row.sm[0] <= sm <= row.sm[1]), None)


@functools.cache
def gpu_map() -> GpuMap:
    """What is known in this process: the user's rows before ours. Read once.

    Raises: ConfigurationError: the file that LAYERZERO_GPU_MAP names is no such file.
    """
    shipped = read_gpu_map(_SHIPPED)
    own_path = os.environ.get(VARIABLE)
    return read_gpu_map(own_path).before(shipped) if own_path else shipped


def read_gpu_map(path: str | os.PathLike[str]) -> GpuMap:
    """The rows of one file.

    Raises: ConfigurationError: it cannot be read, is no TOML, or says what no map says; the field is named.
    """
    try:
        values = tomllib.loads(read_given(path, _MAX_BYTES).decode())
        overlay = msgspec.convert(values, GpuMap)
    except (OSError, ValueError, RecursionError, msgspec.ValidationError) as error:
        needs = "a TOML file in the form of layerzero/spec/gpus.toml"
        raise ConfigurationError(f"{VARIABLE} needs {needs}, got {path}: {error}", path=str(path)) from error
    if overlay.version != FORMAT:
        raise ConfigurationError(f"{VARIABLE}: {path}: version needs {FORMAT}, got {overlay.version}")
    for row in (*overlay.generation, *overlay.family, *overlay.tensor_cores, *overlay.roof):
        if row.sm[0] > row.sm[1]:
            raise ConfigurationError(f"{VARIABLE}: {path}: sm needs a range in order, got {list(row.sm)}")
    return overlay


@functools.lru_cache(maxsize=4096)
def efficiency_on(kernel: str, sm: int) -> FamilyEfficiency | None:
    """What is published of a kernel on a GPU's family; None where nothing is."""
    gpus = gpu_map()
    family = row_of(gpus.family, sm)
    rows = (row for row in gpus.efficiency if family is not None and row.family == family.name)
    return next((row for row in rows if fnmatchcase(kernel, row.kernel)), None)


@functools.lru_cache(maxsize=1024)
def preferred_on(op: str, sm: int) -> tuple[str, ...]:
    """The globs of the kernels that a GPU's family runs an op best with, the best first."""
    gpus = gpu_map()
    family = row_of(gpus.family, sm)
    rows = (row for row in gpus.preferred if family is not None and row.family == family.name)
    return tuple(glob for row in rows if row.op == op for glob in row.kernels)
