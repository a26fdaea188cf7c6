"""Calls as a device would make them, without a device: alone, and several as one batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.ops import checks
from layerzero.ops.op import Args, Op


def call(op: Op, *operands: Any, **options: Any) -> Any:
    """Build, check, guard; then the empty result or the reference's, which must look as `outputs` says."""
    signature, args = op.build(*operands, **options)
    assert signature[0] == op.name and isinstance(hash(signature), int)
    request = op.check(args)
    work = op.work(request)
    assert request.op == op.name and work.flops >= 0 and work.bytes >= 0
    if op.validate_values is not None:
        op.validate_values(args)
    out = op.empty(args) if op.empty is not None else None
    if out is None:
        out = op.reference(*args)
    for part, spec in zip(parts(out), op.outputs(args), strict=True):
        assert tuple(part.shape) == spec.shape and checks.dtype_name(part.dtype) == spec.dtype
    return out


def parts(out: Any) -> tuple[Tensor, ...]:
    """A result as a tuple of tensors."""
    return out if isinstance(out, tuple) else (out,)


def together(op: Op, calls: Sequence[Args]) -> tuple[list[Any], list[Args]]:
    """The results of `calls` as one batch, and the arguments of each launch that it took."""
    assert op.batching is not None
    groups = {op.batching.batch_key(args) for args in calls}
    assert len(groups) == 1 and None not in groups
    launched: list[Args] = []

    def launch(args: Args) -> Any:
        launched.append(args)
        op.check(args)
        return op.reference(*args)

    return op.batching.run(calls, launch), launched


def assert_same(op: Op, calls: Sequence[Args]) -> list[Args]:
    """One batch gives each caller what it gets alone; returns the launches."""
    results, launched = together(op, calls)
    assert len(launched) == 1
    for args, result in zip(calls, results, strict=True):
        for got, alone in zip(parts(result), parts(op.reference(*args)), strict=True):
            assert got.shape == alone.shape
            # Products of matrices sum in another order for another number of rows: a few roundings apart.
            loose: dict[str, Any] = {"rtol": 1e-5, "atol": 5e-5} if got.dtype is torch.float32 else {}
            torch.testing.assert_close(got, alone, equal_nan=True, **loose)
    return launched
