"""Intel Gaudi through habana_frameworks: the fused kernels of its hpex package."""

from __future__ import annotations

from layerzero.backends.descriptors.template import described, device
from layerzero.spec.capability import Capability, SameAs
from layerzero.spec.kernel import Kernel
from layerzero.spec.reasons import Reason

_HPU = frozenset({"hpu"})
_WIDE = frozenset({"bfloat16", "float32"})

KERNELS: tuple[Kernel, ...] = (
    described(
        "gaudi.attention.fused_sdpa",
        Capability(
            source="habana_frameworks.torch.hpex.kernels.FusedSDPA, Intel Gaudi PyTorch API",
            platforms=_HPU, dtypes=_WIDE,
            features=frozenset({"causal", "scale", "mask_float", "dropout", "gqa"}),
            layouts=frozenset({"BHSD"}), limits=(SameAs("D", "Dv", Reason.HEAD_DIMS_DIFFER),),
        ),
        flops=0.5, rank=40, distribution="habana-torch-plugin", default=True,
    ),
    described(
        "gaudi.attention.fused_sdpa_fp8",
        Capability(
            source="habana_frameworks.torch.hpex.kernels.fp8_fused_sdpa, Intel Gaudi PyTorch API",
            platforms=_HPU, dtypes=frozenset({"float8_e4m3fn"}), features=frozenset({"causal", "scale"}),
            layouts=frozenset({"BHSD"}), gradient=False, limits=(SameAs("D", "Dv", Reason.HEAD_DIMS_DIFFER),),
        ),
        flops=0.5, rank=41, distribution="habana-torch-plugin",
    ),
    described(
        "gaudi.rms_norm.fused",
        Capability(
            source="habana_frameworks.torch.hpex.normalization.FusedRMSNorm, Intel Gaudi PyTorch API",
            platforms=_HPU, dtypes=_WIDE,
        ),
        bandwidth=0.8, rank=40, distribution="habana-torch-plugin", default=True,
    ),
)  # fmt: skip

DEVICES = {
    "gaudi2": device("Gaudi 2", "hpu", "intel", 4.32e14, 2.45e12, 96, arch="gaudi2"),
    "gaudi3": device("Gaudi 3", "hpu", "intel", 1.835e15, 3.7e12, 128, arch="gaudi3"),
}
