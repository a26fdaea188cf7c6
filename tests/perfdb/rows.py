"""Measurements that tests make up."""

from __future__ import annotations

from typing import Any

from layerzero.perfdb import BenchmarkCase, Environment, Measurement
from layerzero.spec.hardware import probe

HERE = Environment.of_hardware(probe("cpu"))


def site(op: str = "rms_norm", **dims: int) -> BenchmarkCase:
    """A float32 call of `op`; the sizes default to 64 rows of 512."""
    sizes = tuple(sorted((dims or {"N": 64, "C": 512}).items()))
    return BenchmarkCase(op=op, dtype="float32", dtypes=("float32",), dims=sizes)


def row(kernel: str = "a.rms_norm", us: float = 10.0, **more: Any) -> Measurement:
    """A steady row; `more` overrides its fields."""
    given: dict[str, Any] = {
        "case": site(), "kernel": kernel, "median_us": us, "p95_us": us * 1.1, "variance": us / 100,
        "samples": 11, "timestamp": 1_790_000_000,
    }  # fmt: skip
    return Measurement(**{**given, **more})
