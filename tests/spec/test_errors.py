"""The tree of errors: parents, older names, context and what each carries."""

from __future__ import annotations

import inspect
import re

from layerzero.spec import errors
from layerzero.spec.errors import LayerZeroError

PARENTS = {
    "NoKernelFoundError": "LayerZeroError",
    "UnknownOpError": "LayerZeroError",
    "KernelExecutionError": "LayerZeroError",
    "BackendNotAvailableError": "LayerZeroError",
    "CudaGraphUnsafeError": "LayerZeroError",
    "ConfigurationError": "LayerZeroError",
    "PolicyValidationError": "ConfigurationError",
    "PolicyLoadError": "PolicyValidationError",
    "KernelStillLoadingError": "LayerZeroError",
    "SelectionTimeoutError": "LayerZeroError",
    "CacheCorruptionError": "LayerZeroError",
    "FileRefusedError": "LayerZeroError",
    "BundleRefusedError": "FileRefusedError",
    "BlockError": "LayerZeroError",
    "PlanRefusedError": "FileRefusedError",
    "OverloadedError": "LayerZeroError",
    "DeadlineExceededError": "LayerZeroError",
    "ModeChangedError": "LayerZeroError",
    "DeviceLostError": "LayerZeroError",
    "ConsistencyError": "LayerZeroError",
    "RuntimeClosedError": "LayerZeroError",
    "ReportRefusedError": "FileRefusedError",
    "TokenizerMismatchError": "LayerZeroError",
    "ChatTemplateError": "LayerZeroError",
    "GrammarLimitError": "LayerZeroError",
}


def test_the_tree_is_as_drawn() -> None:
    """Every error has its parent, and the drawing of the module names every error (D4)."""
    found = {
        name: value.__mro__[1].__name__
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, LayerZeroError) and value.__name__ == name
    }
    del found["LayerZeroError"]
    assert found == PARENTS
    drawn = set(re.findall(r"[├└]─ (\w+)", errors.__doc__ or ""))
    assert drawn == set(PARENTS)
    assert errors.NoKernelAvailableError is errors.NoKernelFoundError


def test_an_error_carries_its_facts() -> None:
    """Context, and the attributes that a handler needs, are on the error."""
    error = errors.PolicyLoadError("p.yaml:3: wrong", path="p.yaml", line=3)
    assert (error.path, error.line, dict(error.context)) == ("p.yaml", 3, {"path": "p.yaml", "line": 3})
    assert errors.OverloadedError("full", retry_after=0.5).retry_after == 0.5
    assert errors.DeviceLostError("gone", retryable=True).retryable
    assert errors.ConsistencyError("differ", votes={0: "a", 1: "b"}).votes == {0: "a", 1: "b"}
    assert issubclass(errors.DeadlineExceededError, TimeoutError)
