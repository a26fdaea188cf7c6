"""Warming up: a manifest of calls made ready before traffic, and a monitor that sees every compilation."""

from layerzero.warmup.manifest import Manifest, manifest_of
from layerzero.warmup.monitor import CompileEvent, Monitor, watching
from layerzero.warmup.run import WarmedCall, WarmupRunner

__all__ = ["CompileEvent", "Manifest", "Monitor", "WarmedCall", "WarmupRunner", "manifest_of", "watching"]
