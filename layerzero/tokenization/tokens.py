"""Values of tokenizing: what is asked of a text, its tokens, and tokens of several texts side by side."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor


class Tokens(msgspec.Struct, frozen=True):
    """One text as ids (T,) int64; with `offsets` (T, 2) int64, the characters each token stands for."""

    ids: Tensor
    offsets: Tensor | None = None

    def as_list(self) -> list[int]:
        """The ids as numbers; they are in the host's memory, and nothing is waited for."""
        ids: list[int] = self.ids.tolist()
        return ids


class Padded(msgspec.Struct, frozen=True):
    """Texts of one length: ids (B, T) int64, and the mask (B, T) bool, true where a text's own tokens are."""

    ids: Tensor
    mask: Tensor


class EncodeOptions(NamedTuple):
    """How texts are encoded; texts with one such value are encoded together."""

    special_tokens: bool = True
    offsets: bool = False
    max_tokens: int | None = None
    truncation_side: str = "right"
    parse_special: bool = False


def tensor_of(numbers: Sequence[int]) -> Tensor:
    """A vector of int64 with memory of its own."""
    if not numbers:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.frombuffer(array("q", numbers), dtype=torch.int64)


def tensor_of_spans(spans: Sequence[tuple[int, int]]) -> Tensor:
    """Offsets (T, 2) int64 with memory of their own."""
    return tensor_of([place for span in spans for place in span]).view(-1, 2)
