"""The bounds that tests alone compare by; those that the library compares by are in `spec.tolerances`."""

from __future__ import annotations

from types import MappingProxyType

import torch

# The parity ladder's largest absolute differences in float32: of one op and its gradients, of a layer and of
# each of its stages.
PARITY_KERNEL, PARITY_LAYER = 1e-5, 1e-4
# How much the perplexity of the shipped text may grow where the shipped model's matrices are rounded to a
# format, each by its usual scales, and where its keys and values are kept in one, by token.
PERPLEXITY = {"int8": 1.005, "fp8_e4m3": 1.02, "int4": 1.08, "nf4": 1.06, "nvfp4": 1.05, "mxfp4": 1.06}
# The same where gptq rounds by pieces of the rest of it, over all passages of the test together; and how much
# more than rounding to the nearest it may cost there, of formats that cost next to nothing.
PERPLEXITY_GPTQ = {"int8": 1.003, "fp8_e4m3": 1.005, "int4": 1.02, "nvfp4": 1.02, "mxfp4": 1.03}
PERPLEXITY_GPTQ_OVER_NEAREST = 1.002
PERPLEXITY_KV = {"int8": 1.005, "fp8_e4m3": 1.02, "fp8_e5m2": 1.03}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# What the sources of this project's requirements allow, absolute and relative alike, by kind of op and dtype;
# never less than one unit in the last place of what is compared.
SOURCES: MappingProxyType[str, MappingProxyType[torch.dtype, float]] = MappingProxyType(
    {
        kind: MappingProxyType(dict(zip(_DTYPES, allowed, strict=True)))
        for kind, allowed in (
            ("attention", (1e-3, 1e-2, 1e-5)), ("norm", (1e-3, 1e-2, 1e-6)), ("linear", (1e-3, 1e-2, 1e-6)),
            ("rope", (1e-4, 1e-3, 1e-6)),
        )
    }
)  # fmt: skip
# Of training, after so many steps: of weights, and of the loss.
PARITY_TRAINING = MappingProxyType({1: (1e-5, 1e-5), 5: (1e-3, 1e-2), 20: (1e-2, 1e-1)})
# Of gradients in the first step; those in later ones are in `spec.tolerances`.
PARITY_TRAINING_GRADIENT = 1e-5
# Of how far a loss has fallen after a hundred steps, as a share of it.
PARITY_TREND = 0.1
