"""Folders that lack a part, or hold another one, are refused where they would be read as other numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from tests.checkpoints.test_readers import read
from tests.checkpoints.writers import NAME, WRITERS, save

Damage = Callable[[dict[str, Tensor], dict[str, Any]], object]
ABSMAX = f"{NAME}.weight.absmax"
NESTED = f"{NAME}.weight.nested_absmax"


@pytest.mark.parametrize(
    ("kind", "damage", "needs"),
    [
        ("awq", lambda parts, _: parts.pop(f"{NAME}.qzeros"), "qzeros"),
        ("gptq_v2", lambda _, says: says.update(checkpoint_format="gptq_v3"), "checkpoint_format gptq or"),
        ("gptq_v2", lambda _, says: says.update(checkpoint_format=2), "checkpoint_format gptq or"),
        ("nf4", lambda parts, _: parts.update({NESTED: parts[NESTED][None]}), "nested_absmax of shape"),
        ("nf4", lambda parts, _: parts.update({ABSMAX: parts[ABSMAX].bool()}), "absmax of uint8"),
        (
            "nf4 in one level",
            lambda parts, _: parts.update({ABSMAX: parts[ABSMAX].bool()}),
            "absmax of float",
        ),
        ("nf4", lambda parts, _: parts.update({ABSMAX: parts[ABSMAX].view(2, -1)}), "absmax of shape"),
    ],
)
def test_what_would_be_other_numbers_is_refused(
    kind: str, damage: Damage, needs: str, tmp_path: Path
) -> None:
    """By the part's name, and what its convention stores there."""
    parts, says, _ = WRITERS[kind]()
    damage(parts, says)
    with pytest.raises(lz.FormatError, match=needs):
        read(save(tmp_path, parts, says))


def test_codes_around_eight_need_no_zero_points(tmp_path: Path) -> None:
    """Where AWQ's folder says that there are none."""
    parts, says, _ = WRITERS["awq"]()
    del parts[f"{NAME}.qzeros"]
    weight = read(save(tmp_path, parts, says | {"zero_point": False}))
    assert weight.zero_point is None and torch.isfinite(weight.dequantize()).all()
