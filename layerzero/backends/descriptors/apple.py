"""Apple GPUs through torch's MPS: its own attention and the graphs that its norms become."""

from __future__ import annotations

from layerzero.backends.descriptors.template import HALF, described, device
from layerzero.spec.capability import Capability
from layerzero.spec.kernel import Kernel

_MPS = frozenset({"mps"})
_FLOATS = HALF | {"float32"}

KERNELS: tuple[Kernel, ...] = (
    described(
        "mps.attention.sdpa",
        Capability(
            source="ATen/native/mps/operations/Attention.mm: scaled_dot_product_attention",
            platforms=_MPS, dtypes=_FLOATS,
            features=frozenset({"causal", "scale", "mask_bool", "mask_float"}), layouts=frozenset({"BHSD"}),
        ),
        flops=0.4, bandwidth=0.6, launch_us=30.0, rank=45, default=True,
    ),
    described(
        "mps.rms_norm.native",
        Capability(
            source="ATen/native/mps: torch.nn.functional.rms_norm",
            platforms=_MPS, dtypes=_FLOATS, features=frozenset({"no_weight"}),
        ),
        bandwidth=0.6, launch_us=30.0, rank=45, default=True,
    ),
    described(
        "mps.linear.native",
        Capability(
            source="ATen/native/mps/operations/Linear.mm",
            platforms=_MPS, dtypes=_FLOATS, features=frozenset({"bias"}),
        ),
        flops=0.6, bandwidth=0.6, launch_us=30.0, rank=45, default=True,
    ),
)  # fmt: skip

DEVICES = {
    "m3_max": device("Apple M3 Max", "mps", "apple", 2.8e13, 4.0e11, 128, single=1.4e13, arch="apple9"),
}
