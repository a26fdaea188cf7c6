"""Configuring the runtime: settings, policy files, locks, and preferences for a block of code."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from fnmatch import fnmatchcase
from typing import Any, TypeVar, cast

import msgspec

from layerzero._util.strict_yaml import quote
from layerzero.backends import installed_plugins
from layerzero.calls.blocking import context_runtime
from layerzero.calls.scope import SCOPE, Scope
from layerzero.ops import table as ops_table
from layerzero.selection.policy import EMPTY, Policy, allow_only, exclusion, merge, preference
from layerzero.selection.policy import get_locks as policy_locks
from layerzero.selection.policy import lock as policy_lock
from layerzero.selection.policy import unlock as policy_unlock
from layerzero.selection.policy.names import raise_for_unknown
from layerzero.selection.policy.rules import Layer, split_op
from layerzero.spec.errors import PolicyValidationError
from layerzero.spec.settings import AboveZero, Settings

F = TypeVar("F", bound=Callable[..., Any])


def get_config() -> Settings:
    """The settings in force."""
    return context_runtime().settings


def configure(**changes: Any) -> Settings:
    """Change settings of the running runtime; all at once, or none where one is wrong.

    They hold for calls from here on, on other threads' event loops from their next turn. Devices of a cluster
    keep what they were started with (`settings.here_alone` in the log).
    Raises: ConfigurationError: an unknown setting (near names are listed), a value it does not take, or a
        setting that is read only when a runtime opens.

    Example:
        >>> import layerzero as lz
        >>> with lz.start(scoped=True):
        ...     lz.configure(max_batch_size=16).max_batch_size
        16
    """
    runtime = context_runtime()
    settings = runtime.settings.replace(**changes)
    runtime.reconfigure(settings)
    return settings


def load_config(path: str | os.PathLike[str]) -> Settings:
    """Put the settings of a YAML file in force; an environment variable goes before the file.

    Raises: ConfigurationError: the file names what does not exist; file and line are named.
    """
    settings = Settings.load(path)
    context_runtime().reconfigure(settings)
    return settings


def load_policy(path: str | os.PathLike[str]) -> None:
    """Replace the file layer of the policy; where the file is wrong, the policy in force stays.

    Raises: PolicyLoadError: the file and the line are named.
    """
    context_runtime().load_policy_file(path)


def lock(op: str, kernel: str, *, when: str | tuple[str, ...] = (), for_s: float | None = None) -> None:
    """Make every call of `op` (`op/causal`, `rms_*`) run on `kernel`: an id, a backend or a glob of them.

    A call that the locked kernel cannot take raises NoKernelFoundError with its reasons; it never runs
    elsewhere. `when` limits the lock (`"Sq > 1024"`), `for_s` ends it.

    Raises: PolicyValidationError: the op or the kernel is unknown here.

    Example:
        >>> import layerzero as lz
        >>> with lz.start(scoped=True):
        ...     lz.lock("rms_norm", "reference")
        ...     lz.get_locks()
        {'rms_norm': 'reference'}
    """
    runtime = context_runtime()
    base = split_op(op)[0]
    ops = [name for name in ops_table.names() if fnmatchcase(name, base)]
    known_kernels = frozenset[str]().union(*(runtime.kernel_ids(name) for name in ops))
    try:
        program = policy_lock(
            runtime.program_policy,
            op,
            kernel,
            known_ops=frozenset(ops_table.names()),
            known_kernels=known_kernels,
            when=when,
            until=_until(for_s),
        )
    except PolicyValidationError as error:
        barred = [str(p) for p in installed_plugins() if p.name not in runtime.settings.plugins]
        if barred:
            error.add_note(f"installed and not allowed by Settings.plugins: {', '.join(barred)}")
        raise
    runtime.set_program_policy(program)


def unlock(op: str | None = None) -> None:
    """Remove the locks that `lock` made for `op`; None removes all of them.

    Raises: PolicyValidationError: the op is unknown.
    """
    runtime = context_runtime()
    runtime.set_program_policy(
        policy_unlock(runtime.program_policy, op, known_ops=frozenset(ops_table.names()))
    )


def get_locks() -> dict[str, str]:
    """Op to locked kernel or backend, from file, environment and program."""
    return policy_locks(context_runtime().policy)


def add_policy(*, prefer: str = "", deny: str = "", op: str = "*", for_s: float | None = None) -> None:
    """Add a preference or a denial to the whole process, for `for_s` seconds where given.

    Raises: PolicyValidationError: a pattern does not parse, the op is unknown, or there is neither.

    Example:
        >>> import torch, layerzero as lz
        >>> with lz.start(scoped=True):
        ...     lz.add_policy(deny="torch.*", op="rms_norm")
        ...     lz.which("rms_norm", torch.ones(2, 8)).startswith("torch.")
        False
    """
    runtime = context_runtime()
    until = _until(for_s)
    kinds = (preference, prefer), (exclusion, deny)
    added = [_known(make(glob, op=op, until=until, layer=Layer.PROGRAM)) for make, glob in kinds if glob]
    if not added:
        raise PolicyValidationError("add_policy needs prefer or deny, got neither")
    runtime.set_program_policy(merge(runtime.program_policy, *added))


def reset_policy() -> None:
    """Forget everything the program added; file and environment stay."""
    context_runtime().set_program_policy(EMPTY)


def prefer(*kernels: str, op: str = "*") -> PolicyScope:
    """Inside the block, take matching kernels wherever they are accepted; local to this context.

    What it returns may be used for several blocks, one inside another too, and as a decorator.
    Raises: PolicyValidationError: a pattern does not parse, or the op is unknown.
    """
    return PolicyScope(preference(*kernels, op=op))


def disable(*kernels: str, op: str = "*") -> PolicyScope:
    """Inside the block, never take matching kernels; without any, take nothing but the references.

    What it returns may be used for several blocks, one inside another too, and as a decorator.
    Raises: PolicyValidationError: a pattern does not parse, or the op is unknown.
    """
    return PolicyScope(exclusion(*kernels, op=op) if kernels else allow_only("reference.*", op=op))


class PolicyScope:
    """More rules for a block of code, local to its context, as often as it is entered."""

    def __init__(self, policy: Policy) -> None:
        self._policy = _known(policy)

    def __call__(self, func: F) -> F:
        """`func` under the rules, each time that it is called, or awaited."""
        if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
            raise TypeError(
                f"{self._policy.rules[0].source} needs a function whose end is the end of its work, got the "
                f"generator {getattr(func, '__qualname__', func)}: enter the block inside it"
            )
        if not inspect.iscoroutinefunction(func):

            @functools.wraps(func)
            def called(*args: Any, **kwargs: Any) -> Any:
                with self:
                    answer = func(*args, **kwargs)
                return self._awaited(answer) if isinstance(answer, Coroutine) else answer

            return cast("F", called)

        @functools.wraps(func)
        async def inside(*args: Any, **kwargs: Any) -> Any:
            return await self._awaited(func(*args, **kwargs))

        return cast("F", inside)

    async def _awaited(self, call: Coroutine[Any, Any, Any]) -> Any:
        with self:
            return await call

    def __enter__(self) -> None:
        outer = SCOPE.get()
        _ENTERED.set((*_ENTERED.get(), (self, outer)))
        SCOPE.set((outer or Scope()).nested(self._policy))

    def __exit__(self, *error: object) -> None:
        entered = _ENTERED.get()
        place = max((i for i, (scope, _) in enumerate(entered) if scope is self), default=None)
        if place is None:
            raise RuntimeError(f"a block under {self._policy.rules[0].source} needs to end where it began")
        _ENTERED.set(entered[:place] + entered[place + 1 :])
        SCOPE.set(entered[place][1])


# What was entered in this context and not left yet, each with the scope around it.
_ENTERED: ContextVar[tuple[tuple[PolicyScope, Scope | None], ...]] = ContextVar(
    "layerzero_entered", default=()
)


def _known(policy: Policy) -> Policy:
    raise_for_unknown(policy, known_ops=frozenset(ops_table.names()), known_kernels=None)
    return policy


def _until(for_s: float | None) -> float | None:
    if for_s is None:
        return None
    try:
        msgspec.convert(for_s, AboveZero)
    except msgspec.ValidationError:
        raise ValueError(f"for_s needs a finite number of seconds above 0, got {quote(for_s)}") from None
    return context_runtime().clock.now() + for_s
