"""Hardware that nobody here has: what its libraries say they take, as data that choices can be asked about.

No kernel of this folder has been executed by this project, and none can be: loading one is refused by name.
They are no part of any device's registry. `lz.dry_run(..., hardware=...)` judges and prices them beside the
others and says "descriptor only", so that a device pool can be planned before it is bought.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from layerzero._util.strict_yaml import suggestion
from layerzero.backends.descriptors import amd, apple, arm, gaudi, nvidia
from layerzero.spec.errors import ConfigurationError
from layerzero.spec.hardware import Hardware
from layerzero.spec.kernel import Kernel

FAMILIES: Mapping[str, tuple[Kernel, ...]] = {
    "NVIDIA": nvidia.KERNELS,
    "AMD ROCm": amd.KERNELS,
    "Intel Gaudi": gaudi.KERNELS,
    "Apple Metal": apple.KERNELS,
    "Arm CPUs": arm.KERNELS,
}
DEVICES: Mapping[str, Hardware] = {
    **nvidia.DEVICES, **amd.DEVICES, **gaudi.DEVICES, **apple.DEVICES, **arm.DEVICES,
}  # fmt: skip


@functools.cache
def described(op: str | None = None) -> tuple[Kernel, ...]:
    """The kernels that are only described, or those of one op."""
    return tuple(k for kernels in FAMILIES.values() for k in kernels if op in (None, k.op))


def imagined(name: str) -> Hardware:
    """A device by the name people use for it, with the roofs of its vendor's data sheet.

    Raises: ConfigurationError: nothing is known under that name; near ones are listed.
    """
    hardware = DEVICES.get(name)
    if hardware is None:
        message = f"no hardware is described as {name!r}: {suggestion(name, DEVICES)}"
        raise ConfigurationError(message, hardware=name)
    return hardware
