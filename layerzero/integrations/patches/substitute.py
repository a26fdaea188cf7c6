"""What replaces a module's `forward` while its model is patched, and the table of replacements."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from layerzero.calls.blocking import context_device
from layerzero.operators.choice import as_constant
from layerzero.operators.schema import front
from layerzero.ops import table

# Where a patched module keeps its substitute, so that a copy has its own.
SUBSTITUTE = "_layerzero_forward"
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

    In place, the module is of a subclass of its own class: torch's compiler guards on that alone. A call that
    goes to the module's own forward is counted (`own_forward`, by part and reason); a traced one is not.
    """

    part: ClassVar[str]
    op: str
    # What was learnt of the module when it was patched.
    learnt: tuple[Any, ...] = ()
    # What of the module the op does not serve all the same.
    note = ""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.kind: Any = type(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, but while torch's compiler traces it."""
        raise NotImplementedError

    @staticmethod
    def traced(kind: Any, learnt: Callable[[], Any]) -> Callable[..., Any]:
        """The forward that torch's compiler traces, a function of a module of `kind` and its arguments.

        `learnt` gives what was learnt, as constants of a graph.
        """
        raise NotImplementedError

    @staticmethod
    def methods(kind: Any) -> dict[str, Callable[..., Any]]:
        """What a patched class of `kind` has beside its forward."""
        return {}

    def _patched(self) -> Any:
        form: Any = type(self)
        return patched_class(self.kind, form, self.learnt)

    def install(self) -> None:
        """Have the module compute by it."""
        self.module.__dict__[SUBSTITUTE] = self
        self.module.__class__ = self._patched()

    def remove(self) -> None:
        """Give the module its class back; where a library has made a class of that one since, its forward."""
        if self.module.__dict__.get(SUBSTITUTE) is self:
            del self.module.__dict__[SUBSTITUTE]
        if type(self.module) is self._patched():
            self.module.__class__ = self.kind
        elif "forward" not in self.module.__dict__ and isinstance(self.module, self._patched()):
            self.module.__dict__["forward"] = MethodType(self.kind.forward, self.module)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """What the module computes without us."""
        return self.kind.forward(self.module, *args, **kwargs)

    def decline(
        self, why: str, args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module | None = None
    ) -> Any:
        """The own forward of the module, or of a copy of it, counted."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.device.type != "meta":
                context_device((value,)).counters.add("own_forward", part=self.part, why=why)
                break
        return self.kind.forward(self.module if module is None else module, *args, **kwargs)


@functools.cache
def patched_class(kind: Any, form: type[PatchedForward], learnt: tuple[Any, ...]) -> Any:
    """The subclass of `kind` whose modules compute by their substitutes, of the class `form`."""
    traced = form.traced(kind, as_constant(lambda: learnt))

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() and isinstance(self, patched):
            return traced(self, *args, **kwargs)
        substitute = self.__dict__.get(SUBSTITUTE)
        if substitute is None:  # a library kept this function, and the module is unpatched
            return kind.forward(self, *args, **kwargs)
        if substitute.module is not self:  # a shallow copy, such as DataParallel's: its weights are its own
            return substitute.decline("copy", args, kwargs, self)
        return substitute(*args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        if type(self) is not patched:  # a library has made a class of it
            return kind.__reduce_ex__(self, protocol)
        _, (_, *arguments), *rest = kind.__reduce_ex__(self, max(protocol, 2))
        return _new, (kind, form, learnt, arguments), *rest

    # Libraries read what may be passed.
    forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    own = {**form.methods(kind), "forward": forward, "__reduce_ex__": reduce}
    patched = type(kind.__name__, (kind,), names | own)
    return patched


def _new(kind: Any, form: Any, learnt: tuple[Any, ...], arguments: list[Any]) -> Any:
    """An empty module of a patched class, for pickle and copies."""
    patched = patched_class(kind, form, learnt)
    return patched.__new__(patched, *arguments)


@functools.cache
def in_graph(op: str) -> Callable[..., Any]:
    """What torch's compiler reads in the place of an op's blocking function."""
    return front(table.get(op))


def is_taken(module: nn.Module) -> bool:
    """Whether someone has replaced a module's forward, we or another library."""
    return "forward" in module.__dict__ or SUBSTITUTE in module.__dict__


def class_name(module: object) -> str:
    """The name of a module's class; with its file's where that of torch's class is the same."""
    kind = type(module)
    return f"{kind.__module__}.{kind.__name__}" if kind.__name__ == "Linear" else kind.__name__


def is_left_alone(x: object) -> bool:
    """Whether a call that is traced has sizes that are symbols.

    Its op would stay a call from the graph, which costs more than the model's own code fused.
    """
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


@as_constant
def modes(device: str) -> tuple[torch.dtype | None, bool]:
    """The dtype that autocast asks for, and whether gradients are taken: every graph has a guard on both."""
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return cast, torch.is_grad_enabled()
