"""Opening a runtime: `async with layerzero.start(settings) as rt`, or `with` where nothing is awaited."""

from __future__ import annotations

from contextvars import Token
from types import TracebackType

from layerzero.api.scope import SCOPE, Scope
from layerzero.errors import ConfigurationError
from layerzero.runtime import Runtime, install, uninstall
from layerzero.settings import Settings

DRAIN_S = 30.0


class Started:
    """A runtime to be entered; what `start` returns."""

    def __init__(self, settings: Settings | None, scoped: bool) -> None:
        self._settings = settings
        self._scoped = scoped
        self._runtime: Runtime | None = None
        self._token: Token[Scope | None] | None = None

    def __enter__(self) -> Runtime:
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
        return runtime

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._runtime is not None
        if self._token is not None:
            SCOPE.reset(self._token)
        else:
            uninstall(self._runtime)
        self._runtime.close()

    async def __aenter__(self) -> Runtime:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._runtime is not None
        if kind is None:
            await self._runtime.drain(DRAIN_S)
        self.__exit__(kind, error, trace)


def start(settings: Settings | None = None, *, scoped: bool = False) -> Started:
    """Open a runtime for the block and close it completely at its end.

    It serves the whole process: every thread and every event loop. A second one at the same time is an
    error, unless `scoped=True`, which opens it for this context alone. `async with` drains before closing.

    Raises: ConfigurationError: a runtime is open already, or a setting does not fit.
    """
    return Started(settings, scoped)
