"""Hardware that the project does not have: what its libraries accept, as data for selections.

No kernel of this folder has been executed by this project, and none can be: loading one is refused by name.
They are no part of any device's registry. `lz.dry_run(..., hardware=...)` judges and prices them beside the
others and says "descriptor only", so that a fleet can be planned before it is bought.

One TOML file a family: `[common]` fields of every capability, `[[kernel]]` tables with the fields that
differ (those of `spec.kernel.Capability`), `[device.NAME]` tables (`half`: FLOP/s, `bandwidth`: bytes/s).
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from layerzero._util.strict_yaml import suggestion
from layerzero.spec.capability import Capability
from layerzero.spec.errors import BackendNotAvailableError, ConfigurationError
from layerzero.spec.hardware import Hardware
from layerzero.spec.kernel import Efficiency, Kernel
from layerzero.spec.reasons import Reason

# Between those of the kernels that ran; they order candidates and promise nothing.
GUESS = "a guess: no run of it is known here"


class _Kernel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[kernel]]` table."""

    id: str
    capability: dict[str, Any]
    flops: float = 0.5
    bandwidth: float = 0.7
    launch_us: float = 10.0
    tie_break_order: int = 45
    distribution: str = ""
    default: bool = False


class _Family(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file."""

    family: str
    common: dict[str, Any] = {}
    kernel: tuple[_Kernel, ...]
    device: dict[str, dict[str, Any]]


def _described(row: _Kernel, common: dict[str, Any]) -> Kernel:
    """A kernel that can be judged and priced, and not loaded."""
    backend, op = row.id.split(".")[:2]

    def load() -> Callable[..., Any]:
        raise BackendNotAvailableError(
            f"{row.id} is a descriptor only: this project has no code that calls it",
            backend=backend,
            reason=Reason.DESCRIPTOR_ONLY,
        )

    return Kernel(
        id=row.id,
        op=op,
        backend=backend,
        capability=msgspec.convert(common | row.capability, Capability),
        load=load,
        efficiency=Efficiency(row.flops, row.bandwidth, row.launch_us, GUESS),
        tie_break_order=row.tie_break_order,
        slow_import=True,
        default=row.default,
        distributions=(row.distribution,) if row.distribution else (),
        descriptor=True,
    )


def _hardware(
    platform: str, half: float, gigabytes: float, single: float | None = None, **fields: Any
) -> Hardware:
    """A device with its dense half precision FLOP/s out of its vendor's data sheet.

    `single` is the float32 rate where it is not a sixteenth of `half`; `fields` are those of `Hardware`.
    """
    full = single or half / 16
    derived = {
        "platform": platform,
        "device": "cpu" if platform == "cpu" else f"{'cuda' if platform == 'rocm' else platform}:0",
        "torch": str(torch.__version__),
        "memory_bytes": int(gigabytes * 1e9),
        "peak_flops": {"float16": half, "bfloat16": half, "float32": full, "float64": full / 2},
    }
    return msgspec.convert(derived | fields, Hardware)


def _read(name: str) -> _Family:
    text = Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), _Family)


_FAMILIES = tuple(_read(name) for name in ("nvidia", "amd", "gaudi", "apple", "arm"))
FAMILIES: Mapping[str, tuple[Kernel, ...]] = {
    file.family: tuple(_described(row, file.common) for row in file.kernel) for file in _FAMILIES
}
DEVICES: Mapping[str, Hardware] = {
    name: _hardware(**row) for file in _FAMILIES for name, row in file.device.items()
}


@functools.cache
def descriptors_of(op: str | None = None) -> tuple[Kernel, ...]:
    """The kernels that are only described, or those of one op."""
    return tuple(k for kernels in FAMILIES.values() for k in kernels if op in (None, k.op))


def imagine_hardware(name: str) -> Hardware:
    """A device by the name people use for it, with the roofs of its vendor's data sheet.

    Raises: ConfigurationError: nothing is known under that name; near ones are listed.
    """
    if name not in DEVICES:
        message = f"no hardware is described as {name!r}: {suggestion(name, DEVICES)}"
        raise ConfigurationError(message, hardware=name)
    return DEVICES[name]
