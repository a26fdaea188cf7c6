"""Rotary embeddings by `rope`, in attention modules that call a function of their own file for it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

import layerzero.sync as sync
from layerzero.calls.blocking import context_device
from layerzero.integrations.patches import probe
from layerzero.integrations.patches.substitute import Substitute
from layerzero.ops.rope.rope import rope_reference

PREFIX = "apply_rotary"
# Positions, and both tables in float32: on the tensor of cosines, for the layers that get it after the first.
_TABLES = "_layerzero_tables"
Tables = tuple[int, Tensor, Tensor, Tensor]


class Rotation:
    """In place of a file's function: q and k (B, H, S, D), cos and sin (B, S, R), turned by `rope`.

    The op's tables have one column for the two features that turn together. That the model's tables repeat
    each is looked at the first time.
    """

    def __init__(self, function: Callable[..., Any], interleaved: bool, halves: bool) -> None:
        self.function, self.interleaved, self.halves = function, interleaved, halves
        self.repeats: bool | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Four tensors and at most the axis of the heads; anything else by the file's function."""
        named = {name: kwargs[name] for name in kwargs if name != "unsqueeze_dim"}
        if len(args) == 4 and not named and kwargs.get("unsqueeze_dim", 1) == 1 and self._serves(*args):
            q, k, cos, sin = args
            tables = self._tables(cos, sin, q.shape[0])
            if tables is not None:
                rotated = sync.rope(
                    q.transpose(1, 2), k.transpose(1, 2), *tables, interleaved=self.interleaved
                )
                return rotated[0].transpose(1, 2), rotated[1].transpose(1, 2)
        if args and isinstance(args[0], Tensor) and args[0].device.type != "meta":
            context_device((args[0],)).counters.add("own_forward", part="rope", why="arguments")
        return self.function(*args, **kwargs)

    def _serves(self, q: Any, k: Any, cos: Any, sin: Any) -> bool:
        if not (type(q) is type(k) is type(cos) is type(sin) is Tensor) or q.device.type == "meta":
            return False
        fits = q.dim() == k.dim() == 4 and cos.dim() == 3 and cos.shape == sin.shape
        # What wider tables promote the result to is the function's own affair.
        return fits and q.dtype is k.dtype is cos.dtype and q.shape[-1] == cos.shape[-1] and self.repeats is not False

    def _tables(self, cos: Tensor, sin: Tensor, batch: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Positions (B, S) and the rows of this call's tables, (B * S, R / 2)."""
        if self.repeats is None:
            self.repeats = all(torch.equal(self._columns(t, 0), self._columns(t, 1)) for t in (cos, sin))
            if not self.repeats:
                return None
        # A tensor made in inference mode counts no writes: nothing is remembered about it.
        version = None if cos.is_inference() else cos._version
        stored: Tables | None = getattr(cos, _TABLES, None)
        if stored is not None and stored[0] == version and stored[1].shape[0] == batch:
            return stored[1:]
        rows = cos.shape[0] * cos.shape[1]
        positions = torch.arange(rows, device=cos.device).view(cos.shape[:2]).expand(batch, -1).contiguous()
        tables = (
            positions,
            *(self._columns(t, 0).float().reshape(rows, -1) for t in (cos, sin)),
        )
        if version is not None:
            setattr(cos, _TABLES, (version, *tables))
        return tables

    def _columns(self, table: Tensor, which: int) -> Tensor:
        """The first or the second of the two columns of each turned pair."""
        if not self.halves:
            return table[..., which::2]
        half = table.shape[-1] // 2
        return table[..., which * half : (which + 1) * half]


class _Globals(dict[str, Any]):
    """A file's names as they are when they are read, but for those that are in here."""

    def __init__(self, file: dict[str, Any], **replaced: Any) -> None:
        super().__init__({"__builtins__": file["__builtins__"], **replaced})
        self.file = file

    def __missing__(self, name: str) -> Any:
        return self.file[name]


class AttentionForward(Substitute):
    """An attention module's own forward, in which the rotary function is ours."""

    part, op = "rope", "rope"

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        others = [n for n in _names(module) if rotation_of(type(module).forward.__globals__.get(n)) is None]
        self.note = f"{', '.join(others)} stays the model's own" if others else ""
        self.run = rewired(type(module).forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; a traced one is left as it is."""
        if torch.compiler.is_compiling() or not self.enabled or self.run is None:
            return self.original(*args, **kwargs)
        return self.run(self.module, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the function, which another process makes anew."""
        return {**self.__dict__, "run": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.run = rewired(type(self.module).forward)


@functools.cache
def rewired(forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """`forward` with our rotation under the name of its file's; None where that is not the op's rotation."""
    if not isinstance(forward, FunctionType):
        return None
    rotations = {
        name: rotation
        for name in forward.__code__.co_names
        if name.startswith(PREFIX) and (rotation := rotation_of(forward.__globals__.get(name)))
    }
    if not rotations:
        return None
    names = _Globals(forward.__globals__, **rotations)
    copied = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return copied


@functools.cache
def rotation_of(function: Any) -> Rotation | None:
    """The op's rotation that gives what `function` gives, where there is one."""
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    if parameters[:4] != ["q", "k", "cos", "sin"] or set(parameters[4:]) - {"position_ids", "unsqueeze_dim"}:
        return None
    q, k = probe.numbers(2, 3, 4, 8, seed=1), probe.numbers(2, 1, 4, 8, seed=2)
    angles = probe.numbers(2, 4, 4, seed=3)
    positions = torch.arange(8, device="cpu").view(2, 4)
    for interleaved, halves in ((False, True), (True, False), (True, True)):
        whole = torch.cat((angles, angles), -1) if halves else angles.repeat_interleave(2, -1)
        theirs = probe.answer(function, q, k, whole.cos(), whole.sin())
        rows = (angles.cos().reshape(8, 4), angles.sin().reshape(8, 4))
        ours = rope_reference(q.transpose(1, 2), k.transpose(1, 2), positions, *rows, interleaved)
        if isinstance(theirs, tuple) and len(theirs) == 2:
            if all(probe.same(a.transpose(1, 2), b) for a, b in zip(ours, theirs, strict=True)):
                return Rotation(function, interleaved, halves)
    return None


def turns(module: nn.Module) -> bool:
    """Whether a module's forward calls a rotary function of its file."""
    return bool(_names(module))


def _names(module: nn.Module) -> list[str]:
    code = getattr(type(module).forward, "__code__", None)
    return [] if code is None else [name for name in code.co_names if name.startswith(PREFIX)]


def substitute(module: nn.Module) -> AttentionForward | str:
    """The attention module with our rotation in it, or why not."""
    if "forward" in module.__dict__:
        return "another library has replaced its forward"
    forward = type(module).forward
    if rewired(forward) is None:
        return f"{_names(module)[0]} of its file is not the op's rotation"
    return AttentionForward(module)


