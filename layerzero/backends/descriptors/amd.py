"""AMD GPUs under ROCm: AOTriton inside torch, composable kernels through flash-attn, and aiter."""

from __future__ import annotations

from layerzero.backends.descriptors.template import HALF, described, device
from layerzero.spec.capability import AtMost, Capability, MultipleOf, OneOf, SameAs
from layerzero.spec.kernel import Kernel
from layerzero.spec.reasons import Reason

_ROCM = frozenset({"rocm"})
_CDNA = frozenset({"gfx90a", "gfx942", "gfx950"})
_NEW_CDNA = frozenset({"gfx942", "gfx950"})
_FEATURES = frozenset({"causal", "scale", "gqa"})
_BHSD = frozenset({"BHSD"})
_BSHD = frozenset({"BSHD"})
_SAME = (MultipleOf("D", 8, Reason.HEAD_DIM_ALIGNMENT), SameAs("D", "Dv", Reason.HEAD_DIMS_DIFFER))

KERNELS: tuple[Kernel, ...] = (
    described(
        "aotriton.attention.flash",
        Capability(
            source="ROCm/aotriton and ATen/native/transformers/hip: in ROCm's torch, head size up to 512",
            platforms=_ROCM, archs=_CDNA, dtypes=HALF, features=_FEATURES | {"dropout", "lse"}, layouts=_BHSD,
            limits=(AtMost("D", 512, Reason.HEAD_DIM_TOO_LARGE), *_SAME), last_stride1=True,
        ),
        flops=0.4, rank=42,
    ),
    described(
        "aotriton.attention.flash_rdna",
        Capability(
            source="ROCm/aotriton 0.11: RDNA 3 to head size 256, when its experimental switch is on",
            platforms=_ROCM, archs=frozenset({"gfx1100"}), dtypes=HALF,
            features=_FEATURES | {"dropout", "lse"}, layouts=_BHSD, last_stride1=True,
            limits=(AtMost("D", 256, Reason.HEAD_DIM_TOO_LARGE), *_SAME),
        ),
        flops=0.3, rank=43,
    ),
    described(
        "aotriton.attention.efficient",
        Capability(
            source="ROCm/aotriton: the memory-efficient route has float32 and masks, and no grouped heads",
            platforms=_ROCM, archs=_CDNA, dtypes=HALF | {"float32"},
            features=frozenset({"causal", "scale", "mask_float", "dropout", "lse"}), layouts=_BHSD,
            limits=(AtMost("D", 512, Reason.HEAD_DIM_TOO_LARGE), *_SAME), last_stride1=True,
        ),
        flops=0.3, rank=60,
    ),
    described(
        "ck.attention.fmha",
        Capability(
            source="flash-attention README, AMD ROCm support, composable kernel: head sizes up to 256",
            platforms=_ROCM, archs=_CDNA, dtypes=HALF, features=_FEATURES | {"window", "dropout", "lse"},
            layouts=_BSHD, limits=(AtMost("D", 256, Reason.HEAD_DIM_TOO_LARGE), *_SAME), last_stride1=True,
        ),
        flops=0.45, rank=40, distribution="flash-attn>=2.7",
    ),
    described(
        "aiter.attention.fmha_v3",
        Capability(
            source="ROCm/aiter, as vLLM's backend calls it: gfx942 and gfx950, head sizes 64, 128, 256",
            platforms=_ROCM, archs=_NEW_CDNA, dtypes=HALF, features=_FEATURES | {"window", "lse"},
            layouts=_BSHD, last_stride1=True,
            limits=(OneOf("D", (64, 128, 256), Reason.HEAD_DIM_INVALID), *_SAME),
        ),
        flops=0.55, rank=38, distribution="aiter",
    ),
    described(
        "aiter.paged_attention.rocm",
        Capability(
            source="ROCm/aiter, as vLLM's backend calls it: one query a sequence, pages of 16 tokens",
            platforms=_ROCM, archs=_NEW_CDNA, dtypes=HALF, features=frozenset({"causal", "scale", "gqa"}),
            layouts=frozenset({"HND"}), gradient=False,
            limits=(OneOf("P", (16,), Reason.PAGE_SIZE_UNSUPPORTED),
                    OneOf("D", (64, 128, 256), Reason.HEAD_DIM_INVALID)),
        ),
        flops=0.4, bandwidth=0.85, rank=38, distribution="aiter",
    ),
    described(
        "aiter.rms_norm.ck",
        Capability(
            source="ROCm/aiter, aiter.ops.rmsnorm",
            platforms=_ROCM, archs=_NEW_CDNA, dtypes=HALF, contiguous=True, gradient=False,
        ),
        bandwidth=0.8, rank=40, distribution="aiter",
    ),
)  # fmt: skip

DEVICES = {
    "mi250x": device("Instinct MI250X", "rocm", "amd", 3.83e14, 3.2e12, 128, arch="gfx90a"),
    "mi300x": device("Instinct MI300X", "rocm", "amd", 1.307e15, 5.3e12, 192, arch="gfx942"),
    "mi355x": device("Instinct MI355X", "rocm", "amd", 2.5e15, 8.0e12, 288, arch="gfx950"),
    "rx7900xtx": device("Radeon RX 7900 XTX", "rocm", "amd", 1.23e14, 9.6e11, 24, arch="gfx1100"),
}
