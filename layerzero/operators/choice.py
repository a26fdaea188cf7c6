"""When the kernel of a compiled call is chosen: where its graph runs, or while it is compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from layerzero.ops.op import Args, Op

# Stands for a backend in the operators of a graph whose kernels are chosen while it is compiled.
_MARK = "compile_choice:"
# Of a graph that torch will capture: its kernels are those that are safe under capture.
CAPTURED = f"{_MARK}captured"


class CompileChoice:
    """What `layerzero.compile_choice` decided for this process.

    `mark` is what operators of new graphs carry in the place of a backend; torch's compiler guards on it,
    and its caches keep graphs of two marks apart. `inline(op, full)` gives a call in operators of torch, or
    NotImplemented.
    """

    def __init__(self) -> None:
        self.mark: str | None = None
        self.inline: Callable[[Op, Args], Any] | None = None

    def set(self, mark: str | None, inline: Callable[[Op, Args], Any] | None) -> None:
        """Choose while compiling, under the name `mark`, or with None where graphs run."""
        self.mark = None if mark is None else _MARK + mark
        self.inline = inline


CHOICE = CompileChoice()


def will_be_captured(device: torch.device) -> bool:
    """Whether Inductor compiles a graph that it will capture into CUDA graphs (`mode="reduce-overhead"`)."""
    config: Any = sys.modules.get("torch._inductor.config")
    return device.type == "cuda" and config is not None and bool(config.triton.cudagraphs)


def is_mark(backend: str | None) -> bool:
    """Whether a graph's operator carries a mark in the place of a backend."""
    return backend is not None and backend.startswith(_MARK)
