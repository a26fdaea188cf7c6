"""How the backends of this folder state their kernels: an id says the backend, the op and the variant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from layerzero.spec.kernel import Capability, Efficiency, Kernel


def kernel(
    kernel_id: str,
    load: Callable[[], Callable[..., Any]],
    capability: Capability,
    efficiency: Efficiency,
    **fields: Any,
) -> Kernel:
    """The kernel `<backend>.<op>.<variant>`; `fields` are the others of `Kernel`.

    Raises: ValueError: the id is no such name. TypeError: a field does not exist.
    """
    backend, op = kernel_id.split(".")[:2]
    return Kernel(
        id=kernel_id,
        op=op,
        backend=backend,
        capability=capability,
        load=load,
        efficiency=efficiency,
        **fields,
    )
