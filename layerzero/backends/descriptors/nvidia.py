"""NVIDIA GPUs beside the H200: what newer and older generations are said to take.

Ranges, never "at least": 12.x has neither wgmma nor tcgen05, and 8.7 is newer than 8.6 and poorer than 8.9.
"""

from __future__ import annotations

from typing import Any

from layerzero.backends.descriptors.template import HALF, described, device
from layerzero.spec.capability import AtMost, Capability, MultipleOf, OneOf, SameAs
from layerzero.spec.hardware import MMAFamily
from layerzero.spec.kernel import Kernel
from layerzero.spec.reasons import Reason

_FA4 = "flash-attn-4 4.0.0b36, flash_attn/cute/interface.py; compiled for 10.0 without a GPU, never run there"
_FEATURES = frozenset({"causal", "scale", "gqa", "window", "softcap", "lse"})
_SAME = (MultipleOf("D", 8, Reason.HEAD_DIM_ALIGNMENT), SameAs("D", "Dv", Reason.HEAD_DIMS_DIFFER))
_CUDA = frozenset({"cuda"})
_BLACKWELL: dict[str, Any] = {
    "source": _FA4, "platforms": _CUDA, "sm_min": 100, "sm_max": 119, "cuda_min": "12.9", "dtypes": HALF,
    "mma_families": frozenset({MMAFamily.TCGEN05}), "last_stride1": True, "alignment": 16, "gradient": False,
}  # fmt: skip
_SCALES = frozenset({"scale_per_tensor", "bias", "inputs_quantized"})

KERNELS: tuple[Kernel, ...] = (
    described(
        "flash_attn_4.attention.blackwell",
        Capability(
            features=_FEATURES,
            layouts=frozenset({"BSHD"}),
            limits=(AtMost("D", 128, Reason.HEAD_DIM_TOO_LARGE), *_SAME),
            **_BLACKWELL,
        ),
        flops=0.7, bandwidth=0.8, launch_us=75.0, rank=33, distribution="flash-attn-4>=4.0.0b1",
    ),
    described(
        "flash_attn_4.attention.blackwell_d256",
        Capability(
            features=_FEATURES,
            layouts=frozenset({"BSHD"}),
            limits=(OneOf("D", (256,), Reason.HEAD_DIM_INVALID), *_SAME),
            **_BLACKWELL,
        ),
        flops=0.6, bandwidth=0.8, launch_us=75.0, rank=34, distribution="flash-attn-4>=4.0.0b1",
    ),
    described(
        "flash_attn_4.ragged_attention.blackwell",
        Capability(
            features=_FEATURES,
            limits=(AtMost("D", 128, Reason.HEAD_DIM_TOO_LARGE), *_SAME),
            **_BLACKWELL,
        ),
        flops=0.7, bandwidth=0.8, launch_us=75.0, rank=33, distribution="flash-attn-4>=4.0.0b1",
    ),
    described(
        "flash_attn_3.attention.fp8",
        Capability(
            source="flash-attention README: FP8 forward on H100/H800, CUDA 12.3",
            platforms=_CUDA, sm_min=90, sm_max=90, cuda_min="12.3",
            mma_families=frozenset({MMAFamily.WGMMA}), dtypes=frozenset({"float8_e4m3fn"}),
            features=frozenset({"causal", "scale", "gqa", "window"}), layouts=frozenset({"BSHD"}),
            limits=(OneOf("D", (64, 128, 256), Reason.HEAD_DIM_INVALID), *_SAME),
            last_stride1=True, gradient=False,
        ),
        flops=0.6, bandwidth=0.8, launch_us=20.0, rank=37, distribution="flash-attn-3>=3.0.0b1",
    ),
    described(
        "flash_attn_4.attention.fp8",
        Capability(
            features=frozenset({"causal", "scale", "gqa", "window", "lse"}),
            layouts=frozenset({"BSHD"}),
            limits=(AtMost("D", 128, Reason.HEAD_DIM_TOO_LARGE), *_SAME),
            **{**_BLACKWELL, "dtypes": frozenset({"float8_e4m3fn"})},
        ),
        flops=0.6, bandwidth=0.8, launch_us=75.0, rank=36, distribution="flash-attn-4>=4.0.0b1",
    ),
    described(
        "torch.quantized_linear.scaled_mm_tensorwise",
        Capability(
            source="torch._scaled_mm: float8 products need 9.0 or 8.9, sizes of 16",
            platforms=_CUDA, sm_min=89, dtypes=frozenset({"bfloat16"}),
            features=_SCALES | {"quant_fp8_e4m3"}, limits=(MultipleOf("K", 16), MultipleOf("C", 16)),
            contiguous=True, gradient=False,
        ),
        flops=0.5, bandwidth=0.6, launch_us=60.0,
    ),
    described(
        "torch.quantized_linear.scaled_mm_block",
        Capability(
            source="torch.nn.functional.scaled_mm, BlockWise1x16 and 1x32: MXFP4 and NVFP4 need 10.0",
            platforms=_CUDA, sm_min=100, dtypes=frozenset({"bfloat16"}),
            features=frozenset({"quant_nvfp4", "quant_mxfp4", "scale_per_group", "bias", "inputs_quantized"}),
            limits=(MultipleOf("K", 32), MultipleOf("C", 32)), contiguous=True, gradient=False,
        ),
        flops=0.5, bandwidth=0.6, launch_us=60.0,
    ),
)  # fmt: skip

_SHEET: dict[str, Any] = {"cuda": "13.0", "driver": "580.0"}
DEVICES = {
    "t4": device("Tesla T4", "cuda", "nvidia", 6.5e13, 3.2e11, 16, sm=75, **_SHEET),
    "a100": device("A100 80GB", "cuda", "nvidia", 3.12e14, 2.0e12, 80, sm=80, **_SHEET),
    "l4": device("L4", "cuda", "nvidia", 1.21e14, 3.0e11, 24, sm=89, **_SHEET),
    "h100": device("H100 SXM", "cuda", "nvidia", 9.9e14, 3.35e12, 80, sm=90, **_SHEET),
    "b200": device("B200", "cuda", "nvidia", 2.25e15, 8.0e12, 180, sm=100, **_SHEET),
    "rtx5090": device("GeForce RTX 5090", "cuda", "nvidia", 2.1e14, 1.79e12, 32, sm=120, **_SHEET),
}
