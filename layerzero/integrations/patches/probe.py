"""What a module computes, learnt by computing: a copy with small random weights beside our references."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# Other sums of the same few float32 numbers differ by less, and another formula by more.
SAME = 1e-5


@contextmanager
def quiet() -> Iterator[None]:
    """Computing on the CPU in float32 whatever the caller's modes are."""
    with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        yield


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Random numbers of the CPU that leave every generator of the program as it is."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu") * scale


def stand_in(
    module: nn.Module, parameters: dict[str, Tensor | None], children: dict[str, nn.Module] | None = None
) -> nn.Module:
    """A copy of `module` in evaluation with these parameters and children; the module is left as it is."""
    double: nn.Module = object.__new__(type(module))
    double.__dict__.update(module.__dict__)
    double.__dict__.pop("forward", None)
    double.__dict__.update(
        training=False,
        _parameters={
            name: None if value is None else nn.Parameter(value, requires_grad=False)
            for name, value in parameters.items()
        },
        _modules=copy.copy(module._modules) if children is None else dict(children),
    )
    return double


def answer(function: Callable[..., Any], *args: Any) -> Any:
    """What `function` gives for small random numbers, or the error that says it does not take them."""
    try:
        with quiet():
            return function(*args)
    except Exception as error:
        return error


def same(ours: Any, theirs: Any) -> bool:
    """Whether both are tensors of equal shape and numbers."""
    if not (isinstance(ours, Tensor) and isinstance(theirs, Tensor)) or ours.shape != theirs.shape:
        return False
    return bool((ours - theirs).abs().max() <= SAME * theirs.abs().max())


def why_not(result: Any) -> str:
    """Say what a module answered in place of the numbers that the op gives."""
    if isinstance(result, Exception):
        return f"its forward takes other arguments ({type(result).__name__})"
    return "it computes something else"
