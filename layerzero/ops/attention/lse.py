"""Log-sum-exps: their base, natural in our ops and 2 in some libraries, and a sink that joins them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LN_2 = math.log(2.0)


def from_base_2(lse: Tensor) -> Tensor:
    """A log-sum-exp of base 2, as FlashInfer gives it unless asked, as the natural one of our ops."""
    return lse * LN_2


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Attention (B, H, S, D) and its log-sum-exp (B, H, S) with a logit a head (H,) in the denominator.

    exp(lse) of the new denominator exp(lse) + exp(sink) stays with the keys.
    """
    sink = sinks.to(lse.dtype)[:, None]
    share = torch.sigmoid(lse - sink).masked_fill(lse == -torch.inf, 0.0)
    return (out * share[..., None]).to(out.dtype), torch.logaddexp(lse, sink)
