"""Opening a runtime: `async with layerzero.start(settings) as rt`, or `with` where nothing is awaited."""

from __future__ import annotations

from contextvars import Token
from typing import Any

from layerzero.actors.remote.pool import open_pool
from layerzero.calls.scope import SCOPE, Scope
from layerzero.native import FAST_PATH
from layerzero.runtime import Runtime, install, uninstall
from layerzero.scheduler.loop_drivers import isolate_task_modes, stop_isolating_task_modes
from layerzero.spec.errors import ConfigurationError
from layerzero.spec.settings import Settings
from layerzero.warmup.garbage import begin_freezing, end_freezing

DRAIN_S = 30.0
OPENER = "layerzero.api.start:open_hosted"


class RuntimeContext:
    """A runtime to be entered; what `start` returns."""

    def __init__(self, settings: Settings | None, scoped: bool) -> None:
        self._settings = settings
        self._scoped = scoped
        self._runtime: Runtime | None = None
        self._token: Token[Scope | None] | None = None
        self._isolated_loop: Any = None  # asyncio's, whose tasks have modes of their own

    def __enter__(self) -> Runtime:
        if self._settings is not None and self._settings.cluster is not None:
            raise ConfigurationError(
                f"cluster={self._settings.cluster!r} needs `async with`, which can wait for it",
                field="cluster",
            )
        return self._enter()

    def _enter(self) -> Runtime:
        if self._runtime is not None:
            raise ConfigurationError("this start() was entered already; call start() again")
        runtime = Runtime(self._settings)
        runtime.started = True
        if self._scoped:
            self._token = SCOPE.set(Scope(runtime=runtime))
        else:
            try:
                install(runtime)
            except BaseException:
                runtime.close()
                raise
        self._runtime = runtime
        if runtime.settings.freeze_gc and begin_freezing():
            runtime.on_close(end_freezing)
        return runtime

    def __exit__(self, *raised: object) -> None:
        assert self._runtime is not None
        if self._token is not None:
            SCOPE.reset(self._token)
        else:
            uninstall(self._runtime)
        if self._isolated_loop is not None:
            stop_isolating_task_modes(self._isolated_loop)
        self._runtime.close()

    async def __aenter__(self) -> Runtime:
        runtime = self._enter()
        FAST_PATH.start()  # it isolates the tasks, also of a process that awaits no op
        self._isolated_loop = isolate_task_modes()  # for tasks too that it makes before the first call
        if runtime.settings.cluster is not None:
            try:
                runtime.device_pool = await open_pool(runtime.settings, OPENER)
            except BaseException:
                self.__exit__(None, None, None)
                raise
        return runtime

    async def __aexit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        assert self._runtime is not None
        try:
            if kind is None:
                await self._runtime.drain(DRAIN_S)
            await self._runtime.close_device_pool()
        finally:
            self.__exit__(kind, *raised)


def start(settings: Settings | None = None, *, scoped: bool = False) -> RuntimeContext:
    """Open a runtime for the block and close it completely at its end.

    It serves the whole process: every thread and every event loop. A second one at the same time is an
    error, unless `scoped=True`, which opens it for this context alone. `async with` drains before closing,
    and joins the cluster where the settings name one; `runtime.device_pool` are its devices.

    Raises: ConfigurationError: a runtime is open already, a setting does not fit, or the cluster cannot be
        joined. DeviceLostError: a device of the cluster did not start.

    Example:
        >>> import asyncio, torch, layerzero as lz
        >>> async def main():
        ...     async with lz.start(lz.Settings(device="cpu"), scoped=True):
        ...         return await lz.rms_norm(torch.ones(1, 4))
        >>> asyncio.run(main()).shape
        torch.Size([1, 4])
    """
    if settings is not None and not isinstance(settings, Settings):
        raise TypeError(f"settings needs layerzero.Settings, got {type(settings).__name__}")
    return RuntimeContext(settings, scoped)


def open_hosted(settings: Settings) -> Runtime:
    """The runtime of an actor's process, installed for `layerzero.*` there; what a device actor opens."""
    runtime = Runtime(settings)
    runtime.started = True
    install(runtime)
    return runtime
