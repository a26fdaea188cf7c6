"""The runtime: opens and closes everything, and is the only place that wires parts together."""

from __future__ import annotations

from layerzero.runtime.runtime import ACTIVE, Runtime, current, install, uninstall

__all__ = ["ACTIVE", "Runtime", "current", "install", "uninstall"]
