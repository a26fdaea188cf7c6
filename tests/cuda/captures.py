"""CUDA graphs of the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import layerzero as lz


def captured(step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """The graph of a step that was rehearsed, and what its replays write."""
    with lz.rehearse_capture():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out
