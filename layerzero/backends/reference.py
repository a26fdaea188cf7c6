"""The reference of every op as a kernel: slow, right for all that the op accepts, the last resort."""

from __future__ import annotations

from layerzero.kernel import ACTIVATIONS, FEATURE_REASONS, Capability, Efficiency, Kernel
from layerzero.ops import table
from layerzero.ops.op import Op

EVERY_FEATURE = frozenset(FEATURE_REASONS) | {f"act_{name}" for name in ACTIVATIONS}
EVERY_FEATURE |= {"lse_grad", "mask_grad", "mask_wide", "xpos"}


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


KERNELS: tuple[Kernel, ...] = tuple(reference_kernel(table.get(name)) for name in table.names())
