"""GPTQ: columns are rounded one after the other, and those that follow make up for each one's error.

Source: arXiv 2210.17323, algorithm 1. It needs X'X of the rows that the weight multiplies; a column that no
row reaches is rounded to the nearest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.formats import Element, QuantizedTensor, encode_values, pack_pairs
from layerzero.formats.elements import table_of
from layerzero.formats.rounding import round_to_format

# Added to the diagonal, of its mean: rows may span fewer directions than there are columns.
DAMPING = 0.01
# Columns whose errors reach those behind them in one product, or the next whole group.
BLOCK = 128


def gptq(weight: Tensor, form: str, group_size: int | None, gram: Tensor) -> QuantizedTensor:
    """`weight` (C, K) in a format, so that its products with the rows of `gram` (K, K) err little.

    Scales are those of `QuantizedTensor.quantize`: a row's of the weight as it is, a group's of what the
    columns before have left of it.
    Raises: FormatError: the format, or a scale that is not finite.
    """
    nearest = QuantizedTensor.quantize(weight, form, group_size=group_size)
    kind, size = nearest.form, nearest.group_size
    remaining, upper = weight.float().clone(), _upper(gram)
    codes, scale = torch.empty_like(weight, dtype=kind.element.storage), nearest.scale.clone()
    width = weight.shape[1]
    block = size * max(1, BLOCK // size) if size else BLOCK  # a group is in one block
    for begin in range(0, width, block):
        end = min(begin + block, width)
        errors = remaining.new_empty(weight.shape[0], end - begin)
        for column in range(begin, end):
            if size and column % size == 0:
                group = remaining[:, column : column + size]
                group_scale = round_to_format(group, kind, "group", size, None, nearest.tensor_scale)[1]
                scale[:, column // size] = group_scale[:, 0]
            step = _step(scale, column // size if size else 0, nearest.tensor_scale)
            codes[:, column] = encode_values(remaining[:, column] / step, kind.element)
            rounded = _number(codes[:, column], kind.element) * step
            error = (remaining[:, column] - rounded) / upper[column, column]
            errors[:, column - begin] = error
            remaining[:, column + 1 : end] -= error[:, None] * upper[column, column + 1 : end]
        remaining[:, end:] -= errors @ upper[begin:end, end:]
    packed = pack_pairs(codes) if kind.packed > 1 else codes
    return QuantizedTensor(packed, scale, form, tensor_scale=nearest.tensor_scale)


def _upper(gram: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse of X'X, damped: row k is column k's price to others."""
    damped = gram.double().clone()
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1.0  # a column that no row reaches
    diagonal += DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True).float()
    return factor


def _step(scale: Tensor, group: int, tensor_scale: Tensor | None) -> Tensor:
    """What one unit of a code is, row by row: both levels of scales."""
    step = scale[:, group].float()
    return step if tensor_scale is None else step * tensor_scale


def _number(codes: Tensor, element: Element) -> Tensor:
    """What codes that are not packed stand for."""
    return codes.float() if element.bits == 8 else table_of(element, torch.float32, codes.device)[codes.int()]
