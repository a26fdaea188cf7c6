"""Kernels as a message: what another environment's plugin says of its own, without its code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from layerzero._util.files import decode_packed
from layerzero.spec.capability import Capability
from layerzero.spec.errors import ConfigurationError
from layerzero.spec.kernel import Efficiency, Kernel


class DescribedKernel(msgspec.Struct, frozen=True):
    """What of a kernel is data; limits that are functions (workspaces, units) stay with its code."""

    id: str
    op: str
    capability: Capability
    efficiency: tuple[float, float, float, str]
    tie_break_order: int


def describe(kernels: Iterable[Kernel]) -> list[DescribedKernel]:
    """Kernels as data."""
    return [
        DescribedKernel(
            k.id, k.op, k.capability,
            (k.efficiency.flops, k.efficiency.bandwidth, k.efficiency.launch_us, k.efficiency.source),
            k.tie_break_order,
        )
        for k in kernels
    ]  # fmt: skip


def rename_kernels(
    described: bytes, alias: str, load: Callable[[str, str], Callable[[], Callable[..., Any]]]
) -> list[Kernel]:
    """The kernels of a description as those of the backend `alias`; `load(id, op)` gives how one is loaded.

    Raises: ConfigurationError: it is no description of kernels.
    """
    try:
        kernels = decode_packed(described, list[DescribedKernel])
        return [
            Kernel(
                id=".".join((alias, *k.id.split(".")[1:])),
                op=k.op,
                backend=alias,
                capability=k.capability,
                load=load(k.id, k.op),
                efficiency=Efficiency(*k.efficiency),
                tie_break_order=k.tie_break_order,
                slow_import=True,
            )
            for k in kernels
        ]
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigurationError(f"backend {alias!r} is described wrongly: {error}") from error
