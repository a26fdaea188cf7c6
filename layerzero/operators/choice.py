"""When the kernel of a compiled call is chosen: where its graph runs, or while it is compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from layerzero.ops.op import Args, Op

# Stands for a backend in the operators of a graph whose kernels are chosen while it is compiled.
_MARK = "compile_choice:"
# Of a graph that torch will capture: its kernels are those that are safe under capture.
CAPTURED = f"{_MARK}captured"
# What follows `_MARK` in that of a graph which holds kernels of torch under a guard.
GUARDED = "guarded:"


class Guards(NamedTuple):
    """`open` gives the mark of the graph that is compiled, or None; `inliner_of` what inlines for a mark."""

    open: Callable[[], str | None]
    inliner_of: Callable[[str], Callable[[Op, Args], Any]]


class CompileChoice:
    """What `layerzero.compile_choice` decided for this process.

    `mark` is what operators of new graphs carry in the place of a backend, and torch's caches keep graphs of
    two marks apart by it. `serves` says of each mark whether its graphs still run as they are: after a block
    they do, after another decision for the process they do not. torch's compiler guards on it.
    `inline(op, full)` gives a call in operators of torch, or NotImplemented.
    """

    def __init__(self) -> None:
        self.guards: Guards | None = None  # of `calls.inline_guards`
        self.mark: str | None = None
        self.inline: Callable[[Op, Args], Any] | None = None
        self.serves: dict[str, bool] = {}

    def set(self, mark: str | None, inline: Callable[[Op, Args], Any] | None) -> None:
        """Choose while compiling, under the name `mark`, or with None where graphs run."""
        self.mark = None if mark is None else _MARK + mark
        self.inline = inline
        self.serves = dict.fromkeys(self.serves, False)
        if self.mark is not None:
            self.serves[self.mark] = True

    def saved(self) -> tuple[Any, ...]:
        """What `restore` takes."""
        return self.mark, self.inline, self.serves

    def restore(self, saved: tuple[Any, ...]) -> None:
        """Go back to what was saved; graphs that serve now still do."""
        self.mark, self.inline, before = saved
        self.serves = {mark: serves or before.get(mark, False) for mark, serves in self.serves.items()}


def as_constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have torch's compiler take what `function` returns for a constant of the graph, without a guard.

    As torch.compiler's own decorator does, which imports the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@as_constant
def mark_under_guard() -> str | None:
    """The mark of the graph that is being compiled, where it has a guard of ours, which reads the rest."""
    mark = None if CHOICE.guards is None or CHOICE.mark is not None else CHOICE.guards.open()
    return None if mark is None else _MARK + mark


def mark_of_graph() -> str | None:
    """What an operator of a graph without such a guard carries.

    The compiler reads this with its guards: a graph of a mark runs while `serves` says so, a graph without
    one while nothing else was decided.
    """
    mark = _mark_now()
    return mark if mark is not None and CHOICE.serves[mark] else CHOICE.mark


@as_constant
def _mark_now() -> str | None:
    return CHOICE.mark


def inliner_of(backend: str | None) -> Callable[[Op, Args], Any] | None:
    """What gives the calls of a graph that is being compiled, by the mark in the place of a backend."""
    if not is_mark(backend):
        return None
    assert backend is not None
    mark = backend.removeprefix(_MARK)
    if CHOICE.guards is None or not mark.startswith(GUARDED):
        return CHOICE.inline
    return CHOICE.guards.inliner_of(mark)


CHOICE = CompileChoice()


def will_be_captured(device: torch.device) -> bool:
    """Whether Inductor compiles a graph that it will capture into CUDA graphs (`mode="reduce-overhead"`)."""
    config: Any = sys.modules.get("torch._inductor.config")
    return device.type == "cuda" and config is not None and bool(config.triton.cudagraphs)


def is_mark(backend: str | None) -> bool:
    """Whether a graph's operator carries a mark in the place of a backend."""
    return backend is not None and backend.startswith(_MARK)
