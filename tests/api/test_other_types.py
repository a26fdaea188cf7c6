"""A value of another type is named by its argument, and is no error of Python's from inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import layerzero as lz

X = torch.ones(2, 64)
ASKED: dict[str, Callable[[Any], object]] = {
    "op": lambda value: lz.which(value, X),
    "backend": lambda value: lz.sync.rms_norm(X, backend=value),
    "format": lambda value: lz.sync.quantize(X, format=value),
    "format ": lambda value: lz.sync.quantize(X, format=value, granularity="row"),
    "format  ": lambda value: lz.QuantizedTensor.quantize(X, value),
    "is_graph_safe": lz.is_graph_safe,
    "key": lambda value: lz.batched(torch.relu, key=value),
    "buckets": lambda value: lz.compile(lambda rows: rows, buckets=value),
    "max_bytes": lz.PromptCache,
    "special_tokens": lambda value: lz.ChatTemplate("{{ messages }}", value),
    "sha256": lambda value: lz.load_bundle("b.lzb", sha256=value),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_list_of_texts_is_refused_by_name(name: str) -> None:
    """Whatever is asked for there; nothing of it is looked up first."""
    with pytest.raises((TypeError, ValueError), match=f"{name.strip()} needs"):
        ASKED[name](["a"])


def test_a_device_that_torch_has_not_is_named() -> None:
    """By the argument, with what was given."""
    with pytest.raises(ValueError, match="device needs one of torch's, got 'tpu0'"):
        lz.batched(torch.relu, device="tpu0")
