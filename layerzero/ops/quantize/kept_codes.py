"""Four-bit codes as torch's and zentorch's products want them laid out: made once for a weight, and kept.

Both take rows of bfloat16 and whole numbers of four bits around 8, and no zero points: torch would round
(8 - zero) x scale to eight bits, and zentorch answers with other numbers. They follow a weight as
`ops/linear/kept_weights.py` says, with a byte of every sixteenth row compared at each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from layerzero.ops.linear.kept_weights import MEMORY_SHARE, PackedWeights
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.hardware import host_free_bytes

# Rows of a weight whose first byte is compared at each call.
COMPARED = 16


class KeptCodes(NamedTuple):
    """What a library's layout makes of codes and of scales, for the weights that were seen."""

    codes: PackedWeights
    scales: PackedWeights

    def of(self, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales laid out, made for this call alone where they are not kept."""
        return self._codes(weight), self.scales.of_or_made(scale)

    def _codes(self, weight: Tensor) -> Tensor:
        both = self.codes.of_or_made(weight)
        panels, compared = both[: weight.numel()], both[weight.numel() :]
        if not torch.equal(compared, weight[::COMPARED, 0]):  # changed behind torch's back
            self.codes.repack(weight)
            return self._codes(weight)
        return panels


def keep(lay_out: Callable[[Tensor], Tensor], lay_out_scale: Callable[[Tensor], Tensor]) -> KeptCodes:
    """A library's layouts: of codes (C, K / 2) as bytes, as many; of scales (C, G), four bytes each."""
    limit, sharing = int(MEMORY_SHARE * host_free_bytes()), list[PackedWeights]()

    def with_compared(weight: Tensor) -> Tensor:
        panels = lay_out(weight.contiguous()).contiguous().view(torch.uint8).flatten()
        return torch.cat((panels, weight[::COMPARED, 0]))

    return KeptCodes(
        PackedWeights(with_compared, limit, 2, sharing), PackedWeights(lay_out_scale, limit, 4, sharing)
    )


def workspace(request: CallSpec) -> int:
    """The codes a second time, one number each while they are laid out, and their scales."""
    columns, inner = request.dim("C"), request.dim("K")
    groups = max(1, inner // max(1, request.dim("S")))
    return columns * (6 * inner + 4 * groups)
