"""The ops as operators of torch, `torch.ops.layerzero.*`: what torch's compiler, export and transforms see.

An operator is defined when `torch.ops.layerzero` is first asked for it; `define_all` defines the rest, for
programs that find operators without asking Python. The kernel is chosen when an operator runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch._ops import _OpNamespace
from torch.jit._builtins import _register_builtin

from layerzero._util import foreign
from layerzero._util.fork_safety import renew_after_fork
from layerzero.native import FAST_PATH
from layerzero.operators import gradient, rules
from layerzero.operators.choice import CAPTURED, is_mark
from layerzero.operators.gradient import TracedCall
from layerzero.operators.schema import NAMESPACE, OperatorSchema, front, laid_out, run_operator, schemas_of
from layerzero.operators.subclasses import compose
from layerzero.ops import table
from layerzero.ops.op import Args, Op

Route = Callable[[Args, str | None], Any]
# A blocking function of an op whose calls on transformed or traced tensors take the route. It shares with a
# function that is given what calls are known, the attribute `cache`.
MakeBlocking = Callable[[Op, Route, Callable[..., Any] | None], Callable[..., Any]]

_DEVICES = ("CPU", "CUDA")
_LIBRARIES: list[torch.library.Library] = []
_DEFINED: dict[str, OperatorSchema] = {}
_CACHES: dict[str, Any] = {}
# Names that no op has, by the op that has them.
_VARIANTS = MappingProxyType(
    {f"{op}_with_lse": op for op in ("attention", "mla_attention", "paged_attention", "ragged_attention")}
)


class OperatorContext(NamedTuple):
    """What operators run, and in what; see `install`."""

    make: MakeBlocking
    rehearsal: Callable[[], AbstractContextManager[None]]

    def both(
        self, op: Op, route: Route, sharing: Callable[..., Any] | None = None
    ) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The op's blocking function, and the one for calls with a backend or a mark in its place."""
        blocking = self.make(op, route, sharing)

        def named_call(*args: Any, backend: str, **named: Any) -> Any:
            if not is_mark(backend):
                return blocking(*args, backend=backend, **named)
            if foreign.has_transformed((*args, *named.values())):
                return route(op.build(*args, **named)[1], backend)
            if backend == CAPTURED and not torch.cuda.is_current_stream_capturing():
                with self.rehearsal():  # the capture that follows finds what is chosen here
                    return blocking(*args, **named)
            return blocking(*args, **named)

        return blocking, named_call


class Operators(_OpNamespace):
    """torch's namespace of our operators, which defines one when it is first asked for."""

    # Operators are named after it, and torch's compiler finds them by that name.
    __module__ = _OpNamespace.__module__

    def __init__(self, surroundings: OperatorContext) -> None:
        super().__init__(NAMESPACE)
        self._surroundings = surroundings
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Begin with a lock that no thread holds."""
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        with self._lock:
            define(name, self._surroundings)
            ready = self.__dict__.get(name)  # another thread was first
            return super().__getattr__(name) if ready is None else ready


def install(make: MakeBlocking, rehearsal: Callable[[], AbstractContextManager[None]]) -> None:
    """Put the namespace in its place.

    `make` gives the blocking functions that operators run; in a block of `rehearsal` they choose among the
    kernels that are safe under graph capture.
    """
    if not isinstance(torch.ops.__dict__.get(NAMESPACE), Operators):
        setattr(torch.ops, NAMESPACE, Operators(OperatorContext(make, rehearsal)))


def define_all() -> tuple[str, ...]:
    """Define every operator; their names without the namespace."""
    for name in table.FILES:
        getattr(torch.ops.layerzero, name)
    return tuple(_DEFINED)


def defined_schemas(op: str) -> tuple[OperatorSchema, ...]:
    """The schemas of an op's operators, which are defined."""
    getattr(torch.ops.layerzero, op)
    return tuple(schema for schema in list(_DEFINED.values()) if schema.op.name == op)


def known_calls(name: str) -> Any:
    """The calls that the compiled twin knows of an operator that is defined; None without it."""
    return _CACHES[name].entries


def define(name: str, surroundings: OperatorContext) -> None:
    """Define the operators of the op that `name` is an operator of; nothing where it is none."""
    base = name.removesuffix("_backward")
    base = _VARIANTS.get(base, base)
    if base not in table.names() or base in _DEFINED:
        return
    op = table.get(base)
    if not _LIBRARIES:
        _LIBRARIES.append(torch.library.Library(NAMESPACE, "FRAGMENT"))
    for schema in schemas_of(op):
        _DEFINED[schema.name] = schema
        _define(_LIBRARIES[0], schema, surroundings)


def _define(library: torch.library.Library, schema: OperatorSchema, surroundings: OperatorContext) -> None:
    op, name = schema.op, schema.name
    draws = op.stochastic or any(p.name == "dropout_p" for p in schema.parameters)
    tags = (torch.Tag.nondeterministic_seeded,) if draws else ()
    library.define(schema.text(), tags=(torch.Tag.pt2_compliant_tag, *tags))
    finish = _finish(schema)
    plain, named_plain = surroundings.both(op, lambda full, backend: op.reference(*full))
    traced, named_traced = surroundings.both(op, TracedCall(schema), plain)
    run, routed = (
        schema.adapter(plain, finish, named_plain), schema.adapter(traced, finish, named_traced)
    )  # fmt: skip
    overload = schema.overload
    for device in _DEVICES:
        library.impl(name, run, device)
        library.impl(name, routed, f"Autograd{device}")
        library.impl(name, rules.autocast(op, overload, device.lower()), f"Autocast{device}")
    library.impl(name, routed, "AutogradMeta")
    fake = schema.adapter(rules.shapes(op), finish.replace("_laid_out", "_new_layout"))
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    torch.library.register_vmap(f"{NAMESPACE}::{name}", rules.vmap_rule(schema, overload), lib=library)
    _put_in_front(schema, cast(Any, traced).cache)
    if not op.differentiable:
        return
    library.define(schema.gradient_text(), tags=(torch.Tag.pt2_compliant_tag,))
    for device in _DEVICES:
        library.impl(f"{name}_backward", gradient.gradients(schema, plain), device)
    torch.library.register_fake(f"{NAMESPACE}::{name}_backward", gradient.gradient_shapes, lib=library)


def _put_in_front(schema: OperatorSchema, cache: Any) -> None:
    """Have torch's operator ask the compiled twin of `cache` first, whenever that is there.

    Only what Python calls: the dispatcher's own callers (C++, profiles, modes, transforms) find its kernels.
    """
    _CACHES[schema.name] = cache
    of_torch = [(each, each._op) for each in (schema.overload, schema.overload.overloadpacket)]

    def install(module: Any) -> None:
        for each, below in of_torch:
            each._op = below
            if module is not None and cache.entries is not None:
                each._op = module.Operator(*schema.in_front(), cache.entries, below, laid_out)
                each._op.__module__ = below.__module__
                # torch's scripts find an operator by it.
                _register_builtin(each._op, f"{NAMESPACE}::{schema.name}")

    FAST_PATH.on_ready(install)


def _finish(schema: OperatorSchema) -> str:
    """The text of what an implementation returns: its outputs where the operator promises them."""
    if schema.outputs == 0:
        return "None"
    if schema.op.name == "attention":
        return "_laid_out(out, layout != 'BSHD')"
    return (
        "out if out.is_contiguous() else out.contiguous()" if schema.outputs == 1 else "_laid_out(out, False)"
    )


__all__ = [
    "Operators", "Route", "compose", "define", "define_all", "defined_schemas", "front", "install",
    "known_calls", "laid_out", "run_operator",
]  # fmt: skip
