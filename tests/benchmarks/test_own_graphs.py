"""A graph for each caller over one launch: a short run has every number, and gradients are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks import own_graphs


def test_every_way_is_timed(tmp_path: Path) -> None:
    """Both numbers and all ratios of a width."""
    record = tmp_path / "own_graphs.json"
    assert own_graphs.main(["--widths", "32", "--rounds", "1", "--json", str(record)]) == 0
    table = json.loads(record.read_text())["tables"]["own_graphs"]
    (row,) = table["rows"]
    assert len(row) == len(table["columns"]) and row[0] == 32 and all(value > 0 for value in row)


def test_a_caller_has_the_gradients_of_its_own_product() -> None:
    """Of its row and of the weight, and none of a neighbour."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 6))
    x = torch.randn(1, 6, requires_grad=True)
    plain = torch.nn.functional.linear(x, weight)
    expected = torch.autograd.grad(plain.square().sum(), (x, weight))
    with_graph: Any = own_graphs.OwnGraph.apply
    row = with_graph(x, weight, plain.detach())
    for ours, theirs in zip(torch.autograd.grad(row.square().sum(), (x, weight)), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
