"""Arm CPUs: oneDNN over the Compute Library, and KleidiAI behind torch's four-bit product."""

from __future__ import annotations

from layerzero.backends.descriptors.template import described, device
from layerzero.spec.capability import Capability, MultipleOf
from layerzero.spec.kernel import Kernel

_CPU = frozenset({"cpu"})
_ARM = frozenset({"arm"})

KERNELS: tuple[Kernel, ...] = (
    described(
        "acl.linear.onednn",
        Capability(
            source="oneDNN over the Arm Compute Library, as torch's aarch64 wheels carry it",
            platforms=_CPU, cpu_vendors=_ARM, isa=frozenset({"asimd"}),
            dtypes=frozenset({"float32", "bfloat16"}), features=frozenset({"bias"}), gradient=False,
        ),
        flops=0.6, rank=44,
    ),
    described(
        "kleidiai.quantized_linear.int4",
        Capability(
            source="torch.ops.aten._dyn_quant_matmul_4bit with KleidiAI: groups of the inner size",
            platforms=_CPU, cpu_vendors=_ARM, isa=frozenset({"asimddp"}),
            dtypes=frozenset({"float32", "bfloat16"}),
            features=frozenset({"quant_int4", "scale_per_group", "scale_per_row", "bias", "inputs_float"}),
            limits=(MultipleOf("K", 32),), contiguous=True, gradient=False,
        ),
        flops=0.6, bandwidth=0.8, rank=44,
    ),
)  # fmt: skip

DEVICES = {
    "graviton3": device(
        "Graviton 3", "cpu", "arm", 8.0e12, 3.0e11, 128, single=4.0e12, threads=64,
        isa=frozenset({"asimd", "asimddp", "sve"}),
    ),
}  # fmt: skip
