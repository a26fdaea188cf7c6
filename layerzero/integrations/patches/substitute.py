"""What replaces a module's `forward` while its model is patched, and the table of replacements."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from layerzero.calls.blocking import context_device
from layerzero.operators.choice import as_constant

PARTS = ("attention", "norm", "rope", "mlp", "loss")
# Subclasses of Tensor (DTensor, fake and functional tensors) go to the module's own forward.
PLAIN = (Tensor, nn.Parameter)


@dataclass(frozen=True)
class PatchRow:
    """What became of the modules of one class: the op that serves them, or why none does."""

    part: str
    module: str
    count: int
    op: str | None
    why: str = ""


@dataclass(frozen=True)
class PatchTable:
    """A patched model's parts, one row for each class of module; printed, it is a table."""

    model: str
    rows: tuple[PatchRow, ...]

    def ops(self, part: str) -> set[str]:
        """The ops that serve a part of the model."""
        return {row.op for row in self.rows if row.part == part and row.op is not None}

    def __str__(self) -> str:
        cells = [("part", "module", "count", "op", "why not")]
        cells += [(row.part, row.module, str(row.count), row.op or "-", row.why) for row in self.rows]
        widths = [max(len(line[column]) for line in cells) for column in range(4)]
        lines = (
            "  ".join(cell.ljust(w) for cell, w in zip(line, [*widths, 0], strict=True)) for line in cells
        )
        return "\n".join([self.model, *(line.rstrip() for line in lines)])


class Verdicts:
    """Counts what is said of each class of module, and gives the rows of the table."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str | None, str]] = Counter()

    def add(self, part: str, module: nn.Module, op: str | None, why: str = "") -> None:
        """Note one module: served by `op`, or not and why."""
        self._counts[part, type(module).__name__, op, why] += 1

    def rows(self) -> tuple[PatchRow, ...]:
        """One row for each class and verdict, by part."""
        ordered = sorted(self._counts.items(), key=lambda entry: (PARTS.index(entry[0][0]), entry[0][1]))
        return tuple(PatchRow(part, module, count, op, why) for (part, module, op, why), count in ordered)


class PatchedForward:
    """A module's forward on one of our ops; what the op does not serve goes to the module's own.

    A call that goes there is counted (`own_forward`, by part and reason); a traced one is not.
    """

    part: ClassVar[str]
    op: str
    # What was learnt of the module when it was patched.
    learnt: tuple[Any, ...] = ()
    # What of the module the op does not serve all the same.
    note = ""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.enabled = True

    def install(self) -> None:
        """Put it at the module's `forward`."""
        self.module.__dict__["forward"] = self

    def remove(self) -> None:
        """Give the module its forward back; where a library has wrapped this one since, step aside."""
        self.enabled = False
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """What the module computes without us."""
        return type(self.module).forward(self.module, *args, **kwargs)

    def decline(self, why: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's own forward, counted but in a trace."""
        for value in () if torch.compiler.is_compiling() else (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.device.type != "meta":
                context_device((value,)).counters.add("own_forward", part=self.part, why=why)
                break
        return self.original(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """The module's own: libraries read it to learn what may be passed."""
        return inspect.signature(type(self.module).forward.__get__(self.module))


@as_constant
def learnt_of(substitute: PatchedForward) -> tuple[Any, ...]:
    """What a substitute learnt of its module; a graph guards on the substitute, and not on each of these."""
    return substitute.learnt


def is_left_alone(x: object) -> bool:
    """Whether torch's compiler traces a call whose sizes are symbols.

    Its op would stay a call from the graph, which costs more than the model's own code fused.
    """
    if not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return not isinstance(x, Tensor) or not all(has_static_value(size) for size in x.shape)


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether something is to run when one of these is called, which calling its op would leave out."""
    return any(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
        or module._backward_pre_hooks or "forward" in module.__dict__
        for module in modules
    )  # fmt: skip


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast asks for on x's device, None without autocast."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
