"""Plugins: backends and ops of other distributions, announced in entry points.

`layerzero.backends` names a function that returns kernels, `layerzero.ops` one that returns ops. What is
installed is listed from its metadata alone; it is imported where `Settings.plugins` names it, and not before.
"""

from __future__ import annotations

import importlib.metadata
import re
import threading
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import msgspec

from layerzero.ops import table
from layerzero.ops.op import Op, register
from layerzero.spec.errors import BackendNotAvailableError, ConfigurationError
from layerzero.spec.kernel import Kernel

ENTRY_POINT_GROUP = "layerzero.backends"
OPS_GROUP = "layerzero.ops"
_ELSEWHERE = re.compile(r"(?P<alias>[a-z0-9_]{1,32})=(?P<name>[^@=]+)@(?P<python>/.+)")
_OP_NAME = re.compile(r"[a-z][a-z0-9_]{0,47}")
T = TypeVar("T")


class PluginRequest(msgspec.Struct, frozen=True):
    """One entry of `Settings.plugins`: a plugin of this environment, or of `python`'s under another name."""

    name: str
    alias: str = ""
    python: str = ""

    @classmethod
    def parse(cls, text: str) -> PluginRequest:
        """`NAME`, or `ALIAS=NAME@/PYTHON`.

        Raises: ConfigurationError: it is neither.
        """
        elsewhere = _ELSEWHERE.fullmatch(text)
        if elsewhere is not None:
            return cls(elsewhere["name"], elsewhere["alias"], elsewhere["python"])
        if "@" in text or "=" in text:
            raise ConfigurationError(
                f"plugins needs NAME or ALIAS=NAME@/PATH/OF/PYTHON, got {text!r}", field="plugins"
            )
        return cls(text)


class Plugin(msgspec.Struct, frozen=True):
    """What an installed distribution announces; `kind` is what it adds, backend or ops."""

    name: str
    distribution: str
    version: str
    target: str
    kind: str = "backend"

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version})".replace("  ", " ")


def installed_plugins() -> tuple[Plugin, ...]:
    """Every plugin that an installed distribution announces, by name; nothing of them is imported."""
    groups = ((ENTRY_POINT_GROUP, "backend"), (OPS_GROUP, "ops"))
    plugins = set()
    for group, kind in groups:
        for point in importlib.metadata.entry_points(group=group):
            name, version = (point.dist.name, point.dist.version) if point.dist else ("", "")
            plugins.add(Plugin(point.name, name, version, point.value, kind))
    return tuple(sorted(plugins, key=lambda plugin: (plugin.name, plugin.kind, plugin.distribution)))


def plugin_kernels(name: str) -> list[Kernel]:
    """The kernels of one plugin; none where it only announces ops.

    Raises: BackendNotAvailableError, ConfigurationError: as `load_plugins`.
    """
    announced = _announced(ENTRY_POINT_GROUP, name, "backend plugin")
    if announced is None:
        if _announced(OPS_GROUP, name, "op plugin") is not None:
            return []
        raise BackendNotAvailableError(
            f"backend plugin {name!r} is allowed but no installed distribution announces it in the entry "
            f"point group {ENTRY_POINT_GROUP!r}",
            backend=name,
        )
    kernels = _need_each(f"backend plugin {name!r}", announced[0], Kernel)
    for kernel in kernels:
        if kernel.op not in table.names():
            op_names = ", ".join(table.names())
            raise ConfigurationError(
                f"backend plugin {name!r}: {kernel.id!r} needs an op among {op_names}, got {kernel.op!r}"
            )
    return list(kernels)


_OPS_LOCK = threading.Lock()
_loaded_ops: dict[str, str] = {}  # an op's name: the plugin that brought it


def load_plugin_ops(names: Collection[str]) -> None:
    """Register the ops that the plugins in `names` announce; each once in a process.

    Raises: BackendNotAvailableError: one does not import. ConfigurationError: it gives something else than
        ops, or takes the name of another op.
    """
    with _OPS_LOCK:
        for name in sorted(set(names)):
            announced = _announced(OPS_GROUP, name, "op plugin")
            ops = () if announced is None else announced[0]
            ops = (ops,) if isinstance(ops, Op) else ops
            for op in _need_each(f"op plugin {name!r}", ops, Op):
                _register(name, op)


def _need_each(what: str, values: Any, kind: type[T]) -> Sequence[T]:
    if not isinstance(values, tuple | list) or not all(isinstance(value, kind) for value in values):
        got = type(values).__name__
        raise ConfigurationError(f"{what} needs to give a sequence of {kind.__name__}, got {got}")
    return values


def _register(plugin: str, op: Op) -> None:
    if _loaded_ops.get(op.name) == plugin:
        return  # an earlier runtime of this process has allowed it
    if not _OP_NAME.fullmatch(op.name):
        raise ConfigurationError(f"op plugin {plugin!r} needs a name in lower snake case, got {op.name!r}")
    if op.name in table.names():
        owner = _loaded_ops.get(op.name, "this library")
        raise ConfigurationError(f"op plugin {plugin!r} needs a name of its own, got {op.name!r} of {owner}")
    register(op)
    _loaded_ops[op.name] = plugin


def _announced(group: str, name: str, what: str) -> tuple[Any] | None:
    """What a plugin's entry point gives, called where it is a function, alone in a tuple; None without one.

    Raises: ConfigurationError: two distributions announce it. BackendNotAvailableError: it does not load.
    """
    entry_points = list(importlib.metadata.entry_points(group=group, name=name))
    if not entry_points:
        return None
    if len(entry_points) > 1:
        values = ", ".join(sorted(point.value for point in entry_points))
        raise ConfigurationError(f"{what} {name!r} needs one distribution that announces it, got {values}")
    try:
        value = entry_points[0].load()
        return (value() if callable(value) else value,)
    except (Exception, SystemExit) as error:  # whatever a stranger's module raises
        message = f"{what} {name!r} does not load: {type(error).__name__}: {error}"
        raise BackendNotAvailableError(message, backend=name) from error
