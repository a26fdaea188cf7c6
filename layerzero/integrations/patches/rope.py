"""Rotary embeddings by `rope`, in attention modules that call a function of their own file for it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import layerzero.sync as sync
from layerzero._util import foreign
from layerzero.calls.blocking import context_device
from layerzero.integrations.patches import probe, rewire, sdpa
from layerzero.integrations.patches.rewire import reads
from layerzero.integrations.patches.substitute import PatchedForward, in_graph, is_taken
from layerzero.operators.choice import as_constant
from layerzero.ops.rope.rope import rope_reference

PREFIX = "apply_rotary"
# The sines, the versions of both, positions, and both tables in float32: on the tensor of cosines, for the
# layers that get it after the first.
_TABLES = "_layerzero_tables"
Tables = tuple[Tensor, tuple[int, int], Tensor, Tensor, Tensor]


class HalvesTable(tuple[Tensor, Tensor]):
    """Tables (B, S, R) of a rotary module in a graph, whose columns i and i + R / 2 are equal."""


class PairsTable(tuple[Tensor, Tensor]):
    """Tables (B, S, R) of a rotary module in a graph, whose columns 2i and 2i + 1 are equal."""


class Rotation:
    """In place of a file's function: q and k (B, H, S, D), cos and sin (B, S, R), turned by `rope`.

    The op's tables have one column for the two features that turn together. That tables repeat each is looked
    at once for every pair of them, but in a capture, where nothing can be read; a first pair that does not
    leaves the file its function for good. In a graph of torch's compiler, the class of the pair says it.
    """

    def __init__(
        self, function: Callable[..., Any], interleaved: bool, halves: bool, partial: bool = False
    ) -> None:
        self.function, self.interleaved, self.halves, self.partial = function, interleaved, halves, partial
        self.repeats: bool | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Four tensors and at most the axis of the heads; anything else by the file's function."""
        named = {name: kwargs[name] for name in kwargs if name != "unsqueeze_dim"}
        if len(args) == 4 and not named and kwargs.get("unsqueeze_dim", 1) == 1 and self._serves(*args):
            q, k, cos, sin = args
            tables = self._tables(cos, sin, q.shape[0])
            if tables is not None:
                return self._turned(q, k, tables)
        if args and isinstance(args[0], Tensor) and args[0].device.type != "meta":
            context_device((args[0],)).counters.add("own_forward", part="rope", why="arguments")
        return self.function(*args, **kwargs)

    def in_graph(self) -> Callable[..., Any]:
        """The same with tables that are known to repeat their columns."""
        function, rope = self.function, in_graph("rope")
        table_form = as_constant(lambda: (self.interleaved, self.halves, self.partial))

        def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
            interleaved, halves, partial = table_form()
            if unsqueeze_dim != 1 or not _fits(q, k, cos, sin, partial):
                return function(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
            rows = _rows(cos, sin, q.shape[0], halves)
            q, k = rope(q.transpose(1, 2), k.transpose(1, 2), *rows, interleaved=interleaved)
            return q.transpose(1, 2), k.transpose(1, 2)

        return turn

    def _turned(self, q: Tensor, k: Tensor, tables: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        rotated = sync.rope(q.transpose(1, 2), k.transpose(1, 2), *tables, interleaved=self.interleaved)
        return rotated[0].transpose(1, 2), rotated[1].transpose(1, 2)

    def _serves(self, q: Any, k: Any, cos: Any, sin: Any) -> bool:
        if not (type(q) is type(k) is type(cos) is type(sin) is Tensor) or q.device.type == "meta":
            return False
        if foreign.is_traced():  # its tables cannot be looked at
            return False
        return self.repeats is not False and _fits(q, k, cos, sin, self.partial)

    def _tables(self, cos: Tensor, sin: Tensor, batch: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Positions (B, S) and the rows of this call's tables, (B * S, R / 2); None where columns differ."""
        # A tensor made in inference mode counts no writes: nothing is remembered about it.
        versions = None if cos.is_inference() or sin.is_inference() else (cos._version, sin._version)
        stored: Tables | None = getattr(cos, _TABLES, None)
        if stored is not None and stored[0] is sin and stored[1] == versions and stored[2].shape[0] == batch:
            return stored[2:]
        if not self._repeat(cos, sin):
            return None
        tables = _rows(cos, sin, batch, self.halves)
        if versions is not None:
            setattr(cos, _TABLES, (sin, versions, *tables))
        return tables

    def _repeat(self, cos: Tensor, sin: Tensor) -> bool:
        """Whether both columns of each turned pair are equal."""
        if self.repeats is None and not sin.any():  # the first position alone: all of its columns are equal
            return False
        if self.repeats and cos.is_cuda and torch.cuda.is_current_stream_capturing():
            return True
        repeat = _repeat(cos, sin, self.halves)
        self.repeats = repeat if self.repeats is None else self.repeats
        return repeat


def _fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, partial: bool) -> bool:
    fits = q.dim() == k.dim() == 4 and cos.dim() == 3 and cos.shape == sin.shape
    # What wider tables promote the result to is the function's own affair.
    width = cos.shape[-1] == q.shape[-1] or (partial and cos.shape[-1] < q.shape[-1])
    return fits and width and q.dtype is k.dtype is cos.dtype


def _rows(cos: Tensor, sin: Tensor, batch: int, halves: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Positions (B, S) and the rows of the tables that they choose, one column for each turned pair."""
    rows = cos.shape[0] * cos.shape[1]
    positions = torch.arange(rows, device=cos.device).view(cos.shape[:2]).expand(batch, -1).contiguous()
    columns, others = (_columns(t, halves, 0).float().reshape(rows, -1) for t in (cos, sin))
    return positions, columns, others


def _columns(table: Tensor, halves: bool, which: int) -> Tensor:
    """The first or the second of the two columns of each turned pair."""
    if not halves:
        return table[..., which::2]
    half = table.shape[-1] // 2
    return table[..., which * half : (which + 1) * half]


def _repeat(cos: Tensor, sin: Tensor, halves: bool) -> bool:
    return all(torch.equal(_columns(t, halves, 0), _columns(t, halves, 1)) for t in (cos, sin))


class AttentionForward(PatchedForward):
    """An attention module's own forward, in which the rotary function, torch's attention or both are ours."""

    part, op = "rope", "rope"

    def __init__(self, module: nn.Module, parts: frozenset[str]) -> None:
        super().__init__(module)
        self.learnt = (parts,)
        self._read()

    def _read(self) -> None:
        self.forward = self.kind.forward
        self.run = forward_on_ops(self.forward, *self.learnt)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        if self.run is None or self.kind.forward is not self.forward:  # changed by someone else, since
            return self.original(*args, **kwargs)
        return self.run(self.module, *args, **kwargs)

    @staticmethod
    def traced(kind: Any, learnt: Callable[[], Any]) -> Callable[..., Any]:
        """A graph turns by the op what a rotary module of the model has made."""
        (parts,) = learnt()
        forward, tables = kind.forward, _tables_of(kind.forward)
        by_ops = forward_on_ops(forward, parts, traced=True)
        without_rope = forward_on_ops(forward, parts - {"rope"}, traced=True)
        is_changed = as_constant(lambda: kind.forward is not forward)

        def run(module: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_changed():
                if by_ops is not None and any(
                    type(operand) is tables for operand in (*args, *kwargs.values())
                ):
                    return by_ops(module, *args, **kwargs)
                if without_rope is not None:
                    return without_rope(module, *args, **kwargs)
            return kind.forward(module, *args, **kwargs)

        return run

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the functions, which another process makes anew."""
        return {**self.__dict__, "run": None, "forward": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._read()


class TablesForward(PatchedForward):
    """A rotary module's own forward; in a graph the class of what it returns says which columns are equal."""

    part, op = "rope", "rope"

    def __init__(self, module: nn.Module, tables: Callable[..., Any]) -> None:
        super().__init__(module)
        self.learnt = (tables,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Cosines and sines."""
        return self.original(*args, **kwargs)

    @staticmethod
    def traced(kind: Any, learnt: Callable[[], Any]) -> Callable[..., Any]:
        """Cosines and sines of the class."""
        (tables,) = learnt()
        return lambda module, *args, **kwargs: tables(kind.forward(module, *args, **kwargs))


def tables_substitute(module: nn.Module) -> TablesForward | None:
    """A rotary module that says how its tables repeat, learnt from what a copy gives; None of any other."""
    is_rotary = "rotary" in type(module).__name__.lower() and not is_taken(module)
    buffers = dict(module.named_buffers())
    is_unmade = any(buffer.device.type == "meta" for buffer in buffers.values())
    if not is_rotary or is_unmade or module._modules or module._parameters:
        return None
    double = probe.stand_in(module, {})
    double.__dict__["_buffers"] = {name: buffer.cpu().clone() for name, buffer in buffers.items()}
    layers: Any = [()]
    if "layer_type" in inspect.signature(type(module).forward).parameters:
        layers = [(kind,) for kind in sorted(set(getattr(module, "layer_types", None) or ()))]
    positions = torch.arange(1, 4, device="cpu")[None]
    pairs = [
        probe.answer(type(module).forward, double, probe.numbers(1, 3, 8), positions, *layer)
        for layer in layers
    ]
    for halves, tables in ((True, HalvesTable), (False, PairsTable)):
        if pairs and all(_is_pair(pair) and _repeat(pair[0], pair[1], halves) for pair in pairs):
            return TablesForward(module, tables)
    return None


def _is_pair(tables: Any) -> bool:
    return isinstance(tables, tuple) and len(tables) == 2 and all(
        isinstance(table, Tensor) and table.dim() and table.shape[-1] % 2 == 0 for table in tables
    )  # fmt: skip


@functools.cache
def forward_on_ops(
    forward: Callable[..., Any], parts: frozenset[str], traced: bool = False
) -> Callable[..., Any] | None:
    """`forward` with our functions under the names of its file's; None where it reads none of an op's."""
    replaced: dict[str, Any] = {}
    if "rope" in parts:
        rotations = _rotations(forward).items()
        replaced |= {name: rotation.in_graph() if traced else rotation for name, rotation in rotations}
    if "attention" in parts:
        replaced |= sdpa.replacements(forward)
    return rewire.rebind(forward, replaced, traced=traced) if replaced else None


@functools.cache
def _tables_of(forward: Callable[..., Any]) -> type | None:
    """The class of tables for all rotations of a forward; None where they differ."""
    layouts = {rotation.halves for rotation in _rotations(forward).values()}
    return None if len(layouts) != 1 else (HalvesTable if layouts.pop() else PairsTable)


def _rotations(forward: Callable[..., Any]) -> dict[str, Rotation]:
    """Our rotation under the names of its file's that are the op's."""
    names = [name for name in reads(forward) if name.startswith(PREFIX)]
    rotations = {name: rotation_of(forward.__globals__.get(name)) for name in names}
    return {name: rotation for name, rotation in rotations.items() if rotation is not None}


@functools.cache
def rotation_of(function: Any) -> Rotation | None:
    """The op's rotation that gives what `function` gives, where there is one."""
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    if parameters[:4] != ["q", "k", "cos", "sin"] or set(parameters[4:]) - {"position_ids", "unsqueeze_dim"}:
        return None
    for interleaved, halves in ((False, True), (True, False), (True, True)):
        if _gives(function, 8, interleaved, halves):
            return Rotation(function, interleaved, halves, _gives(function, 12, interleaved, halves))
    return None


def _gives(function: Callable[..., Any], width: int, interleaved: bool, halves: bool) -> bool:
    """Whether `function` turns the first 8 of `width` features as the op does."""
    q, k = probe.numbers(2, 3, 4, width, seed=1), probe.numbers(2, 1, 4, width, seed=2)
    angles = probe.numbers(2, 4, 4, seed=3)
    whole = torch.cat((angles, angles), -1) if halves else angles.repeat_interleave(2, -1)
    theirs = probe.answer(function, q, k, whole.cos(), whole.sin())
    if not isinstance(theirs, tuple) or len(theirs) != 2:
        return False
    positions = torch.arange(8, device="cpu").view(2, 4)
    rows = (angles.cos().reshape(8, 4), angles.sin().reshape(8, 4))
    ours = rope_reference(q.transpose(1, 2), k.transpose(1, 2), positions, *rows, interleaved)
    return all(probe.same(turned.transpose(1, 2), other) for turned, other in zip(ours, theirs, strict=True))


def turns(module: nn.Module) -> bool:
    """Whether a module's forward calls a rotary function of its file."""
    return bool(_names(module))


def _names(module: nn.Module) -> list[str]:
    return [name for name in reads(type(module).forward) if name.startswith(PREFIX)]


def verdict(module: nn.Module) -> tuple[str | None, str]:
    """The op of a module's rotation and what of it stays the model's own, or none and why."""
    served = _rotations(type(module).forward)
    others = [name for name in _names(module) if name not in served]
    if not served:
        return None, f"{others[0]} of its file is not the op's rotation"
    return "rope", f"{', '.join(others)} stays the model's own" if others else ""
