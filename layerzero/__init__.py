"""Choose, explain and run the fastest healthy kernel for an operation, and batch awaited calls.

General layout, from the top down (a module imports only what stands below it):

    api, sync     the public functions: thin
    runtime       opens and closes everything; the only place that wires parts together
    lanes         what a lane runs a batch with
    scheduler     lanes, batching, modes, single flight (asyncio in one file)
    actors        the device of this process: kernels, health, plans
    dispatch      the hot path; read it first
    selection     judge all kernels, price, decide, trace
    policy, health, telemetry, backends, kernel, ops, hardware, settings, log, reasons, errors
"""

import importlib
import sys
from types import ModuleType
from typing import Any

from layerzero.ops.files import FILES as _FILES

__version__ = "0.1.0"

# The public names that are no ops, and where each is defined. Where torch is imported already, what a call
# runs through is imported with the package; everything else when it is first used: nobody's first call waits
# for a command's tables, and `lz --help` does not wait for torch.
_HOMES = {
    "layerzero.api.batched": ("batched",),
    "layerzero.api.binding": ("bind",),
    "layerzero.api.calls": ("last_selection",),
    "layerzero.api.configuration": (
        "add_policy",
        "configure",
        "disable",
        "get_config",
        "get_locks",
        "load_config",
        "load_policy",
        "lock",
        "prefer",
        "reset_policy",
        "unlock",
    ),
    "layerzero.api.graphs": (
        "compile",
        "is_graph_safe",
        "rehearse_capture",
        "validate_graph_capture",
    ),
    "layerzero.api.host": ("to_host",),
    "layerzero.api.inspection": (
        "dry_run",
        "explain",
        "list_kernels",
        "select",
        "select_batch",
        "validate",
        "which",
    ),
    "layerzero.api.start": ("start",),
    "layerzero.api.tokenizing": ("detokenize", "tokenize"),
    "layerzero.api.tuning": ("TuneReport", "record", "solve", "tune", "tune_blocking"),
    "layerzero.api.warming": ("readiness_check", "warmup", "warmup_blocking"),
    "layerzero.backends.hub": ("Hub", "hub_kernel"),
    "layerzero.backends.triton_kernels.own": ("TritonLaunch", "triton_kernel"),
    "layerzero.doctor": ("doctor",),
    "layerzero.errors": (
        "BackendNotAvailableError",
        "CacheCorruptionError",
        "ConfigurationError",
        "ConsistencyError",
        "CudaGraphUnsafeError",
        "DeadlineExceededError",
        "DeviceLostError",
        "KernelExecutionError",
        "LayerZeroError",
        "ModeChangedError",
        "NoKernelAvailableError",
        "NoKernelFoundError",
        "OverloadedError",
        "PolicyLoadError",
        "PolicyValidationError",
        "RuntimeClosedError",
        "SelectionTimeoutError",
        "UnknownOpError",
    ),
    "layerzero.hardware": ("Hardware",),
    "layerzero.integrations": ("patch", "unpatch"),
    "layerzero.kernel": ("Capability", "Efficiency", "Kernel"),
    "layerzero.ops.alibi": ("alibi_slopes",),
    "layerzero.ops.rope_scaling": (
        "DynamicNTKScaling",
        "LinearScaling",
        "Llama3Scaling",
        "NTKScaling",
        "YarnScaling",
        "rope_tables",
        "xpos_table",
    ),
    "layerzero.ops.verify": ("tree_mask",),
    "layerzero.reasons": ("Reason", "Rejected"),
    "layerzero.runtime": ("Runtime",),
    "layerzero.selection.record": ("Accepted", "Selection"),
    "layerzero.settings": ("Settings",),
    "layerzero.warmup.manifest": ("Manifest",),
    "layerzero.tokenization.tokenizer": ("Tokenizer", "Tokens"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

_MODULES = ("kvcache", "metrics", "speculative", "sync")

__all__ = sorted({*_HOME, *_FILES, *_MODULES})
_PUBLIC = frozenset(__all__)


def __getattr__(name: str) -> Any:
    """A public name, imported or made when it is first asked for."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'layerzero' has no attribute {name!r}")
    _load()
    if name in _MODULES:
        return importlib.import_module(f"layerzero.{name}")
    value = _op(name) if name in _FILES else getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def _load() -> None:
    """Import what a call runs through, after the torch that it needs has been looked at."""
    importlib.import_module("layerzero.requirements")
    importlib.import_module("layerzero.api.awaiting")


def _op(name: str) -> Any:
    from layerzero.api.awaiting import awaited
    from layerzero.ops import table

    return awaited(table.get(name))


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """The package, whose public names win over its files of the same name (`doctor` is the function)."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # Code that is sent to another process by value refers to this package by name, as to any module.
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package

if "torch" in sys.modules:
    _load()
