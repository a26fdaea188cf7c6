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
from pathlib import Path
from typing import Any, Final

from layerzero._util import log
from layerzero.spec.errors import BackendNotAvailableError

UNUSED: Final = "not asked for yet"
OFF: Final = "off"
COMPILING: Final = "compiling in the background"
READY: Final = "ready"
UNAVAILABLE: Final = "unavailable"

# A process that ends sooner has no use for it.
_DELAY_S = 1.0


class NativeModule:
    """What `name`.cpp compiles to, once it is there: `module`, else None; `state` and `detail` say why."""

    __slots__ = ("_error", "_installers", "_lock", "_name", "detail", "module", "requested", "state")

    def __init__(self, name: str = "hot") -> None:
        self._name = name
        self.module: Any = None
        self.state = UNUSED
        self.requested = False  # somebody will call `start` soon
        self.detail = ""
        self._installers: list[Callable[[Any], None]] = []
        self._error: BackendNotAvailableError | None = None
        self._lock = threading.Lock()

    def _library(self) -> Any:
        # Imported here: it needs what only Unix has, and nobody else needs it at import.
        from layerzero.native import compiling

        return compiling.CppModule(
            f"layerzero_{self._name}",
            Path(__file__).with_name(f"{self._name}.cpp"),
            ("-O2", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden"),
        )

    def on_ready(self, install: Callable[[Any], None]) -> None:
        """Call `adopt(module)` when the module is there, now if it is; with None when it is put aside."""
        self._installers.append(install)
        if self.module is None:
            return
        try:
            install(self.module)
        except Exception as error:
            self._failed(error)

    def start(self) -> None:
        """Load what is compiled; compile in the background what is not. Only the first call does anything."""
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
            compiled = library.target().exists()
        except Exception as error:
            self._failed(error)
            return
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
        self.state = READY if module is not None else OFF
        self.detail = ""
        try:
            for install in self._installers:
                install(module)
        except Exception as error:
            self._failed(error)
            raise

    @property
    def compiled(self) -> bool:
        """Whether the library is there already, loaded or not."""
        try:
            return self.module is not None or bool(self._library().target().exists())
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
        """Use Python alone, all of it: nobody keeps a part of a module that the others do not have."""
        if self.module is not None:
            self.module = None
            for install in self._installers:
                install(None)
        self.state = UNAVAILABLE
        self.detail = str(error)
        # Without a compiler nothing is wrong; everything else is worth a look.
        write = log.info if isinstance(error, BackendNotAvailableError) else log.warning
        write("native.unavailable", error=self.detail)


_ENDING = threading.Event()
FAST_PATH: Final = NativeModule()
# What notes the kernels in flight (`actors/device/running_kernels.py`): small, so that a device of a device
# pool waits for it.
KERNEL_NOTES: Final = NativeModule("noting")
