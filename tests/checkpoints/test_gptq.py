"""GPTQ: what it rounds to is what its definition says, and errs less where rows are alike."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from layerzero.checkpoints import calibration
from layerzero.checkpoints import gptq as algorithm
from layerzero.checkpoints.gptq import gptq
from layerzero.checkpoints.rounding import error_of
from layerzero.checkpoints.writing import LAYOUTS
from layerzero.formats import QuantizedTensor, encode_values
from layerzero.formats.elements import table_of

FORMS = (*LAYOUTS, "nf4", "mxfp8", "fp8_e5m2")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def alike(count: int, width: int) -> Tensor:
    """X'X of rows that span few directions, as a model's hidden rows do."""
    rows = random(count, 24) @ random(24, width, seed=1) + 0.3 * random(count, width, seed=2)
    return rows.T @ rows


def by_definition(weight: Tensor, made: QuantizedTensor, gram: Tensor) -> Tensor:
    """Codes (C, K) by the paper's equation 2, under the scales that were made.

    The inverse of what is left of X'X is computed anew for each column.
    """
    damped = gram + algorithm.DAMPING * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    element, left = made.form.element, weight.double().clone()
    step = made.scale.double() * (1.0 if made.tensor_scale is None else made.tensor_scale.double())
    size = made.group_size or weight.shape[1]
    for column in range(weight.shape[1]):
        inverse = torch.linalg.inv(damped[column:, column:])
        unit = step[:, column // size]
        codes = encode_values((left[:, column] / unit).float(), element)
        table = table_of(element, torch.float64, codes.device) if element.bits == 4 else None
        number = (codes.double() if table is None else table[codes.int()]) * unit
        owed = (left[:, column] - number) / inverse[0, 0]
        left[:, column + 1 :] -= owed[:, None] * inverse[0, 1:]
        left[:, column] = number
    return left


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block", [128, 32])
def test_columns_are_rounded_as_the_definition_says(
    form: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the inverse of what is left, whatever the columns of a block; a few codes turn by rounding alone."""
    monkeypatch.setattr(algorithm, "BLOCK", block)
    weight, gram = random(24, 192, seed=3).float(), alike(400, 192)
    made = gptq(weight, form, 64 if form == "int4" else None, gram)
    right = by_definition(weight, made, gram)
    off = (made.dequantize(torch.float64) - right).abs() > 1e-5 * right.abs().max()
    assert off.float().mean() < 0.02


@pytest.mark.parametrize("form", FORMS)
def test_products_with_rows_that_are_alike_err_less(form: str) -> None:
    """|X (W - Q)'| over |X W'|, beside rounding to the nearest."""
    weight, gram = random(32, 256, seed=3).float(), alike(500, 256)
    nearest, better = (
        error_of("w", weight, made, gram).output or 0.0
        for made in (QuantizedTensor.quantize(weight, form), gptq(weight, form, None, gram))
    )
    assert 0 < better < 0.8 * nearest


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_have_nothing_in_common_leave_the_nearest(form: str) -> None:
    """To the bit, for a diagonal X'X; so does a column that no row reaches."""
    weight = random(16, 128, seed=4).float()
    diagonal = torch.rand(128, generator=torch.Generator().manual_seed(5), dtype=torch.float64) + 0.5
    diagonal[7] = 0.0
    made, nearest = gptq(weight, form, None, diagonal.diag()), QuantizedTensor.quantize(weight, form)
    assert torch.equal(made.codes, nearest.codes) and torch.equal(made.scale, nearest.scale)
    assert made.form is nearest.form and made.group_size == nearest.group_size


@pytest.mark.parametrize("size", [16, 96, 192])
def test_groups_of_any_size_lie_in_one_block(size: int) -> None:
    """Below, beside and beyond a block's columns."""
    weight, gram = random(8, 384, seed=3).float(), alike(500, 384)
    made = gptq(weight, "int4", size, gram)
    assert made.group_size == size
    off = (made.dequantize(torch.float64) - by_definition(weight, made, gram)).abs() > 1e-4
    assert off.float().mean() < 0.02


@pytest.mark.parametrize(("tokens", "firsts"), [(2, [0]), (1030, [0, 512, 1024]), (24 * 512, None)])
def test_a_text_that_fits_runs_whole(tokens: int, firsts: list[int] | None) -> None:
    """Row behind row, each token once."""
    rows = calibration.spread_rows(range(tokens))
    assert [token for row in rows for token in row] == list(range(tokens))
    assert firsts is None or [row[0] for row in rows] == firsts


def test_rows_of_a_longer_text_are_spread_over_it() -> None:
    """As many as may run, from its beginning to its last tenth."""
    rows = calibration.spread_rows(range(512 * 100))
    assert len(rows) == calibration.MOST_ROWS and {len(row) for row in rows} == {512}
    steps = [(b[0] - a[0]) // 512 for a, b in pairwise(rows)]
    assert rows[0][0] == 0 and rows[-1][0] > 0.9 * 512 * 100 and set(steps) == {4, 5}
