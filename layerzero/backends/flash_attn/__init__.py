"""FlashAttention: the packages of its second, third and fourth generation, which share one namespace.

Each generation is a distribution of its own with limits of its own; a machine may have any of them.
"""

from __future__ import annotations

from layerzero.backends.flash_attn import fa2, fa3, fa4, vllm
from layerzero.spec.kernel import Kernel

KERNELS: tuple[Kernel, ...] = (*fa2.KERNELS, *fa3.KERNELS, *vllm.KERNELS, *fa4.KERNELS)
