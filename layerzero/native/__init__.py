"""The compiled twin of the awaited path: used from when it is ready, and never needed.

`hot.cpp` does in one step what Python does one attribute at a time; each of its functions has a twin in
Python with the same results. A runtime's first event loop loads the library where this user has compiled it
already; elsewhere it is compiled in the background and taken up when it is done, by calls that come then.
`python -m layerzero.native` compiles it beforehand; LAYERZERO_NATIVE=off leaves it alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from layerzero._util import log
from layerzero.spec.errors import BackendNotAvailableError
from layerzero.spec.reasons import Reason

UNUSED: Final = "not asked for yet"
OFF: Final = "off"
COMPILING: Final = "compiling in the background"
READY: Final = "ready"
UNAVAILABLE: Final = "unavailable"

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
# A process that ends sooner has no use for it.
_DELAY_S = 1.0


class NativeModule:
    """The module of `name`.cpp, once it is there: `module`, else None; `state` and `detail` say why."""

    __slots__ = ("_error", "_installers", "_lock", "_name", "detail", "module", "requested", "state")

    def __init__(self, name: str = "hot") -> None:
        self._name = name
        self.module: Any = None
        self.state = UNUSED
        self.requested = False  # `start` will be called soon
        self.detail = ""
        self._installers: list[Callable[[Any], None]] = []
        self._error: BackendNotAvailableError | None = None
        self._lock = threading.Lock()

    def _library(self) -> Any:
        # Imported here: it needs what only Unix has, and nothing else needs it at import.
        from layerzero.native import compiling

        return compiling.library(f"layerzero_{self._name}")

    def on_ready(self, install: Callable[[Any], None]) -> None:
        """Call `install(module)` when the module is there, now if it is; with None when it is put aside."""
        self._installers.append(install)
        if self.module is None:
            return
        try:
            install(self.module)
        except Exception as error:
            self._failed(error)

    def start(self) -> None:
        """Load what is compiled; compile in the background what is not. Only the first call does anything."""
        # Asked without the lock first: every runtime starts it, and nearly all find it started.
        if self.state != UNUSED:
            return
        with self._lock:
            if self.state != UNUSED:
                return
            if self._is_disabled():
                return
            self.state = COMPILING
        try:
            library = self._library()
            compiled = library.ready
        except Exception as error:
            self._failed(error)
            return
        # Loading takes milliseconds and is done at once; compiling takes a minute, beside the first calls.
        if compiled:
            self._load()
        else:
            threading.Thread(target=self._load_later, name="layerzero-native", daemon=True).start()

    def _is_disabled(self) -> bool:
        if os.environ.get("LAYERZERO_NATIVE", "").lower() not in ("off", "0", "false"):
            return False
        self.state = OFF
        self.detail = "LAYERZERO_NATIVE says so"
        return True

    def try_load(self) -> Any:
        """The module, compiled now if need be; None where it is not wanted or cannot be."""
        if self.module is None and self.state not in (OFF, UNAVAILABLE) and not self._is_disabled():
            self._load()
        return self.module

    def load(self) -> Any:
        """The module, compiled now if need be, and in use from here on.

        Raises: BackendNotAvailableError: no compiler, or an error of it.
        """
        if self._error is not None:
            raise self._error  # it would not compile better the second time
        if self.module is None:
            try:
                self.use(self._library().get())
            except BackendNotAvailableError as error:
                self._error = error
                raise
        return self.module

    def use(self, module: Any) -> None:
        """Put a module in use, or with None Python alone; what tests compare the two by.

        Raises: what an adopter raises; then Python alone is in use everywhere.
        """
        self.module = module
        try:
            for install in self._installers:
                install(module)
        except Exception as error:
            self._failed(error)
            raise
        self.state = READY if module is not None else OFF
        self.detail = ""

    @property
    def compiled(self) -> bool:
        """Whether the library is there already, loaded or not."""
        try:
            return self.module is not None or bool(self._library().ready)
        except BackendNotAvailableError:
            return False

    def describe(self) -> str:
        """One line for people: what runs the awaited path, and what would make it faster."""
        if self.state == UNUSED:
            when_compiled = "compiled, loaded with the first awaited call"
            when_not = "not compiled yet: python -m layerzero.native does, else a runtime in the background"
            return when_compiled if self.compiled else when_not
        if self.state == READY:
            return "compiled"
        return f"Python alone: {self.state}{', ' if self.detail else ''}{self.detail}"

    def _load_later(self) -> None:
        if not _ENDING.wait(_DELAY_S):
            self._load()

    def _load(self) -> None:
        try:
            self.load()
        except Exception as error:
            if self.state != UNAVAILABLE:
                self._failed(error)
        else:
            log.info("native.loaded")

    def _failed(self, error: Exception) -> None:
        """Use Python alone, all of it: no user keeps a part of a module that the others do not have."""
        # Nothing was taken up where the module never came: adopters need not give it back.
        taken_up, self.module = self.module is not None, None
        self.state = UNAVAILABLE
        self.detail = str(error)
        log.warning("native.unavailable", module=self._name, error=self.detail, reason=reason_of(error))
        for install in self._installers if taken_up else ():
            try:
                install(None)
            except Exception as stuck:  # the others still have to give it back
                log.warning(
                    "native.unavailable", module=self._name, error=str(stuck), reason=reason_of(stuck)
                )


def reason_of(error: Exception) -> str:
    """The reason code of an error that keeps a compiled module from being used."""
    reason = error.context.get("reason") if isinstance(error, BackendNotAvailableError) else None
    return str(reason or Reason.KERNEL_LOAD_FAILED)


def is_product(function: FunctionT, grouped: Callable[..., Any] | bool = True) -> FunctionT:
    """Say of a kernel that it is the product of its rows and its weight and nothing more, where no other
    operand is given: batches of several weights may run as one launch (`products.h`).

    That is torch's product, or `grouped(rows, counts, weights)`: as many of the rows (N, K) as each count
    says times its weight (C, K), in one tensor (N, C); None where it cannot.
    """
    vars(function)["is_product"] = grouped
    return function


_ENDING = threading.Event()
FAST_PATH: Final = NativeModule()
# What notes the kernels in flight (`actors/device/running_kernels.py`): small, so that a device of a device
# pool waits for it.
KERNEL_NOTES: Final = NativeModule("noting")
