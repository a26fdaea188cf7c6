"""The runtime: opens and closes everything, and is the only place that wires parts together.

One runtime serves the process: event loops, pool threads and handlers all find it through `ACTIVE`. It is
made on first use, or opened by `start`.
"""

from __future__ import annotations

from layerzero.runtime.active import ACTIVE
from layerzero.runtime.process import current, install, uninstall
from layerzero.runtime.runtime import Runtime, open_devices

__all__ = ["ACTIVE", "Runtime", "current", "install", "open_devices", "uninstall"]
