"""The reference of every op as a kernel: slow, right for all that the op accepts, the last resort."""

from __future__ import annotations

import importlib
import pkgutil

from layerzero import ops
from layerzero.kernel import ACTIVATIONS, FEATURE_REASONS, Capability, Efficiency, Kernel
from layerzero.ops.op import OPS, Op

EVERY_FEATURE = frozenset(FEATURE_REASONS) | {f"act_{name}" for name in ACTIVATIONS}
EVERY_FEATURE |= {"lse_grad", "mask_grad", "mask_wide"}


def reference_kernel(op: Op) -> Kernel:
    """`op.reference` as the kernel `reference.<op>`."""
    return Kernel(
        id=f"reference.{op.name}",
        op=op.name,
        backend="reference",
        capability=Capability(
            source="the op's definition: plain torch, float32 in between",
            mixed_dtypes=True,
            features=EVERY_FEATURE,
            gradient=op.differentiable,
        ),
        load=lambda: op.reference,
        efficiency=Efficiency(0.05, 0.1, 60.0, "estimate"),
        rank=99,
    )


def _import_every_op() -> None:
    for module in pkgutil.iter_modules(ops.__path__):
        if module.name != "table":
            importlib.import_module(f"{ops.__name__}.{module.name}")


_import_every_op()
KERNELS: tuple[Kernel, ...] = tuple(reference_kernel(op) for op in OPS.values())
